"""DPO steps on one GPU, packed here, and in torch padded as by TRL and packed by hand: real tokens a second.

    python -m benchmarks.gpu.preferences FOLDER [--sizes 0.5B,qwen3-1.7B] [--kinds lora,full] [--steps 4] [--rounds 3]
        [--modes cached,sft,adapter] [--torch-modes packed,padded-8] [--torch PYTHON] [--out JSON]

A pair has 100 to 1,500 tokens: two answers, each after the prompt, which takes 10 % to 50 % of the mean sequence. A
step learns from the pairs in 4 rows of 4,096 slots, where Genesis stores a prompt once; real tokens count it twice on
all sides. A step is forward, backward, clipping to norm 1 and AdamW, with base and adapters (r 16, all seven linears)
or all weights in bf16. The log-probabilities of the reference are given, as with a cache, except in Genesis' mode
`adapter`, which computes the base in each step. `sft` is the supervised step on the same rows. All sides start from the
files in FOLDER, which are written first, and their first losses must agree. One process of Genesis and one of torch
open a mode each and take turns, a few steps at a time; the median is reported. preferences_torch.py explains torch's
modes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import genesis_models
from benchmarks.gpu.lora_genesis import LR, MAX_NORM, prepare
from benchmarks.gpu.lora_step import Job, Side, SideError, listed, serve_modes, take_turns
from benchmarks.results import columns, rows_table, write_report
from genesis import cuda
from genesis.backend import as_device
from genesis.data.documents import DocumentIndex, TokenSet
from genesis.data.loader import Batch, PackedLoader
from genesis.data.pairs import share_prompts
from genesis.train.config import OptimConfig
from genesis.train.device_steps import DeviceSteps
from genesis.train.objective import NextTokens
from genesis.train.optimizer import build_optimizer
from genesis.train.preferences import PairObjective, positions_of
from genesis.train.state import TrainState
from genesis_models.adapters import load_adapter

ROWS, LENGTH, BATCHES = 4, 4096, 4
LIMITS = 100, 1500  # tokens of a pair
TOLERANCE = 2e-2  # relative, between first losses in bf16, which depend on differences of log-probabilities
BETA = 0.1

# --- Pairs ------------------------------------------------------------------------------------------------------------


def make_pairs(vocabulary: int, count: int) -> TokenSet:
    """Random pairs as samples of two sequences; the prompt takes 10 % to 50 % of each."""
    rng = np.random.default_rng(0)
    stream, mask, lengths, splits = [], [], [], []
    for _ in range(count):
        total = int(rng.integers(LIMITS[0], LIMITS[1] + 1))
        prompt = rng.integers(0, vocabulary, int(total / 2 * rng.uniform(0.1, 0.5)))
        first = int((total - 2 * len(prompt)) * rng.uniform(0.3, 0.7))
        for size in (first, total - 2 * len(prompt) - first):
            stream += [prompt, rng.integers(0, vocabulary, size)]
            mask += [np.zeros(len(prompt), np.uint8), np.ones(size, np.uint8)]
        lengths.append(total)
        splits.append(len(prompt) + first)
    sizes, names = np.array(lengths), np.zeros((count, 32), np.uint8)
    index = DocumentIndex(
        names, sizes, ("pairs",), np.zeros(count, np.int64), np.arange(count), np.ones(count, np.bool_), names
    )
    return TokenSet(
        np.concatenate(stream).astype(np.uint32), np.cumsum(sizes) - sizes, sizes, np.arange(count), index, 0, "", "",
        np.concatenate(mask), splits=np.array(splits),
    )  # fmt: skip


def make_batches(vocabulary: int) -> tuple[TokenSet, list[Batch]]:
    """The pairs with shared prompts, and full batches of them."""
    tokens = share_prompts(make_pairs(vocabulary, 2 * BATCHES * ROWS * LENGTH * 2 // sum(LIMITS)))
    loader = PackedLoader(tokens, batch_size=ROWS, seq_len=LENGTH, seed=0)
    batches = [loader.batch(0, index) for index in range(loader.num_batches(0))]
    return tokens, sorted(batches, key=lambda batch: -batch.num_tokens)[:BATCHES]


def write_files(job: Job) -> None:
    """Write the base, an adapter whose B is not 0, and the batches for torch: ids, lengths and prompts of sequences."""
    folder = Path(job["folder"])
    if (folder / "pairs.npz").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    prepare(job)
    tokens, batches = make_batches(_vocabulary(job))
    arrays: dict[str, np.ndarray] = {}
    for number, batch in enumerate(batches):
        found: list[np.ndarray] = []
        prompts = []
        for sample in batch.samples[:, 1]:
            begin, end = tokens.starts[sample], tokens.starts[sample] + tokens.lengths[sample]
            middle, prompt = begin + tokens.splits[sample], slice(begin, begin + tokens.shared[sample])
            found += [tokens.stream[begin:middle], np.append(tokens.stream[prompt], tokens.stream[middle:end])]
            prompts += [int(tokens.shared[sample]) + 1] * 2
        arrays |= {f"ids{number}": np.concatenate(found), f"prompts{number}": np.array(prompts)}
        arrays[f"lengths{number}"] = np.array([len(each) for each in found])
    np.savez(folder / "pairs.npz", **arrays)


def _vocabulary(job: Job) -> int:
    return int(json.loads((Path(job["folder"]) / "base" / "config.json").read_text())["vocab_size"])


# --- The side of Genesis ----------------------------------------------------------------------------------------------


class Supervised(NextTokens):
    """Next tokens in rows whose sequences share prompts."""

    def fields(self, batch: Batch) -> tuple[np.ndarray, ...]:
        return batch.input_ids, batch.labels, positions_of(batch)


class Steps:
    """A model and its steps in a mode: sft, adapter or cached."""

    def __init__(self, job: Job) -> None:
        folder, self.device = Path(job["folder"]), as_device(job["device"])
        model: Any = genesis_models.load(folder / "base", device=job["device"], dtype="bfloat16")
        if job["kind"] == "lora":
            load_adapter(model, folder / "adapter")
        model.train()
        optimizer = build_optimizer(OptimConfig(name="adamw", lr=LR, weight_decay=0.0), model.named_parameters(), 0)
        tokens, self.batches = make_batches(_vocabulary(job))
        objective: Any = Supervised()
        if job["mode"] != "sft":
            objective = PairObjective("dpo", {"beta": BETA, "label_smoothing": 0.0}, job["mode"])
            # A reference that finds all tokens equally likely.
            middle, ends = tokens.starts + tokens.splits, tokens.starts + tokens.lengths
            sides = ((tokens.starts, middle), (middle, ends))
            counts = np.stack([tokens.targets_between(*side) for side in sides], 1)
            objective._cached.append((tokens, -np.log(_vocabulary(job)) * counts))
        loader: Any = SimpleNamespace(batch_size=ROWS, seq_len=LENGTH)
        state = TrainState(model, optimizer, loader, objective=objective)
        self.steps, self.count = DeviceSteps(state, self.device, MAX_NORM, 1000, note=lambda text: None), 0

    def step(self) -> int:
        """Take a step and wait for its end; return its real tokens."""
        batch = self.batches[self.count % BATCHES]
        self.count += 1
        self.steps.take([batch], LR)
        cuda.synchronize()
        return batch.num_tokens + int(batch.tokens.shared[batch.samples[:, 1]].sum())

    def loss(self) -> float:
        """The loss of the first step since the last call."""
        first = self.steps.reading().results()[0]
        return first.loss_sum / first.targets

    def close(self) -> None:
        """Free the memory."""
        for part in self.steps._parts:
            part.close()
        del self.steps
        gc.collect()
        cuda.empty_cache(self.device)


# --- Turns ------------------------------------------------------------------------------------------------------------

COLUMNS = columns(
    size=("size", "text", "Model."),
    kind=("kind", "text", "Adapters of rank 16, or all weights."),
    mode=("mode", "text", "Genesis: cached, sft, adapter. Torch: packed, or padded-N with N pairs in a micro-batch."),
    step=("step", "s", "Median step."),
    tokens_per_second=("tokens/s", "token/s", "Real tokens a second."),
    ratio=("ratio", "ratio", "Time per real token / that of Genesis' cached."),
    loss=("first loss", "count", "Loss of the first step."),
    error=("error", "text", "Why the mode has no figures."),
)


def turns(sides: dict[str, Side], job: Job, modes: dict[str, str], chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Open a mode on each side, let them take turns, and return a row for each."""
    rows = {name: {"size": job["size"], "kind": job["kind"], "mode": mode} for name, mode in modes.items()}
    for name, mode in modes.items():
        sides[name].send({**job, "mode": mode})
    for name in modes:
        try:
            rows[name] |= sides[name].answer()
        except SideError as error:
            rows[name]["error"] = str(error)
    take_turns([(sides[name], row) for name, row in rows.items()], chosen.steps, chosen.rounds)
    for name, row in rows.items():
        if "error" not in row:
            counts, seconds = row.pop("counts"), row.pop("seconds")
            row["tokens_per_second"] = statistics.median(n / s for n, s in zip(counts, seconds, strict=True))
            row["step"] = statistics.median(seconds)
            sides[name].ask({})
        print(json.dumps(row), flush=True)
    return list(rows.values())


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add the time of each mode per real token relative to `cached`, and whether its first loss differs."""
    for row in rows:
        place = row["size"], row["kind"], "cached"
        first = next((r for r in rows if (r["size"], r["kind"], r["mode"]) == place), row)
        if "error" not in row and "error" not in first:
            row["ratio"] = first["tokens_per_second"] / row["tokens_per_second"]
            is_same_loss = row["mode"] not in ("sft", "adapter")
            row["differs"] = is_same_loss and abs(row["loss"] - first["loss"]) > TOLERANCE * abs(first["loss"])


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", default="0.5B")
    parser.add_argument("--kinds", default="lora,full")
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--modes", default="cached,sft,adapter")
    parser.add_argument("--torch-modes", default="packed,padded-8", help="padded-N has N pairs in a micro-batch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--torch", default=sys.executable, help="the interpreter of an environment with torch")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one answer may take")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    chosen, rows = arguments(), list[dict[str, Any]]()
    with (
        Side(sys.executable, "preferences", {"serve": True}, chosen.limit) as ours,
        Side(chosen.torch, "preferences_torch", {}, chosen.limit) as theirs,
    ):
        sides = {"genesis": ours, "torch": theirs}
        for size, kind in itertools.product(listed(chosen.sizes), listed(chosen.kinds)):
            job = {"folder": str(chosen.folder / size), "size": size, "device": chosen.device}
            write_files({**job, "r": 16, "kind": "lora", "dtype": "bfloat16"})
            own = [mode for mode in listed(chosen.modes) if (kind, mode) != ("full", "adapter")]
            for pair in itertools.zip_longest(own, listed(chosen.torch_modes)):
                modes = {name: mode for name, mode in zip(sides, pair, strict=True) if mode}
                rows += turns(sides, {**job, "kind": kind, "warm_up": chosen.warm_up}, modes, chosen)
    _add_ratios(rows)
    made = rows_table("steps", "DPO steps on pairs of 100 to 1,500 tokens", COLUMNS, rows)
    made.notes += [
        f"{row['size']} {row['kind']} {row['mode']}: the first loss is {row['loss']:.5f}, not that of cached"
        for row in rows
        if row.get("differs")
    ]
    write_report(chosen.out, "preference-steps", as_device(chosen.device), [made])
    if made.notes:
        sys.exit("\n".join(made.notes))


if __name__ == "__main__":
    if "serve" in sys.argv[1]:
        serve_modes(Steps)
    else:
        main()
