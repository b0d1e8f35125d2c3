"""Draws a million tokens exactly on a GPU, and counts those whose log-probability the forward pass of training misses.

    .venv/bin/python -m tests.soak.exact [--tokens 1000000] [--cases 0.5B:1,llama-1B] [--out FILE]

Weights are random, with the shapes of published models and wide logits. Requests differ in prompt (1 to 3,000 tokens,
some shared), length and temperature; finished rows are refilled. Each sequence is then scored once by the pass that
training runs under `genesis.exact`, in micro-batches of several sizes whose documents begin at random multiples of 64,
with each activation checkpointing, captured and eager. Some sequences are also scored without `genesis.exact`: there,
log-probabilities must differ, or the check would see nothing. docs/decisions/0014-exact.md states the rules.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import genesis
import genesis_models
from benchmarks.results import columns, rows_table, write_report
from genesis import Tensor, cuda
from genesis.autograd.modes import exact
from genesis.backend import as_device
from genesis.errors import GenesisError
from genesis.nn import functional as F
from genesis_models.adapters import AdapterConfig, adapted_layers, apply_adapters
from genesis_models.engine import Request, Sampling, device, device_rows
from genesis_models.engine.device import DeviceEngine
from genesis_models.engine.device_cache import KEY_BLOCK
from genesis_models.engine.engine import length_of
from genesis_models.registry import preset

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512,
    "max_position_embeddings": 32768, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
MODELS = {
    "0.5B": preset("0.5B"),
    "1.5B": preset("1.5B"),
    "qwen3-0.6B": preset("qwen3-0.6B"),
    "llama-1B": LLAMA,
    "gemma3-1B": GEMMA,
}
LONGEST, NEW = 3000, 200  # tokens of a prompt; mean of a continuation


class Case(NamedTuple):
    """A model, how it draws, and how many of a million tokens."""

    model: str
    rows: int
    tokens: int
    layers: int
    chunk: int = 2048  # tokens of a prompt in one pass
    rank: int = 0  # of adapters
    is_captured: bool = True

    @property
    def adapted(self) -> str:
        """The ending of its model's name."""
        return f"-lora{self.rank}" * bool(self.rank)

    @property
    def eager(self) -> str:
        """The ending of its rows' name."""
        return "-eager" * (not self.is_captured)

    @property
    def name(self) -> str:
        """As `--cases` calls it."""
        return f"{self.model}{self.adapted}:{self.rows}{self.eager}"


CASES = (
    Case("0.5B", 512, 260_000, 24, 512), Case("0.5B", 256, 160_000, 24), Case("0.5B", 100, 120_000, 24, 1024),
    Case("0.5B", 3, 21_000, 24, 64), Case("0.5B", 1, 21_000, 24), Case("0.5B", 32, 60_000, 24, 256),
    Case("0.5B", 256, 60_000, 24, rank=16), Case("1.5B", 100, 60_000, 28), Case("qwen3-0.6B", 256, 80_000, 4),
    Case("llama-1B", 512, 60_000, 4), Case("gemma3-1B", 100, 30_000, 12, 192), Case("1.5B", 512, 60_000, 4, 1024),
    Case("llama-1B", 32, 20_000, 16), Case("0.5B", 3, 3_000, 24, rank=16), Case("qwen3-0.6B", 3, 3_000, 28),
    Case("gemma3-1B", 3, 3_000, 12), Case("1.5B", 1, 3_000, 28), Case("0.5B", 3, 600, 24, is_captured=False),
)  # fmt: skip


class Layout(NamedTuple):
    """A micro-batch of training."""

    batch: int
    length: int  # of a packed row; 0: one document alone
    checkpointing: str
    is_captured: bool = False

    @property
    def name(self) -> str:
        """Its description."""
        length = f"{self.length:,}" if self.length else "one document"
        return f"{self.batch} x {length}, {self.checkpointing}{', captured' * self.is_captured}"


PLAIN = Layout(3, 4096, "none")
LAYOUTS = (
    Layout(1, 4096, "none", True), Layout(2, 4096, "selective"), Layout(1, 8192, "full"), PLAIN,
    Layout(1, 6144, "selective"), Layout(1, 0, "none"),
)  # fmt: skip
ALONE = 8  # documents that the last layout scores for each temperature: every length prepares its launches
Scorer = Callable[[np.ndarray, np.ndarray], np.ndarray]
CASE_COLUMNS = columns(
    model=("model", "text", "Shape of the random weights; -lora16 with adapters of rank 16 on all linear layers."),
    rows=("rows", "text", "Concurrent sequences, fewer than asked if memory is short; -eager without CUDA graphs."),
    layers=("layers", "count", "Layers of the model."),
    chunk=("chunk", "count", "Tokens of a prompt in one forward pass."),
    requests=("requests", "count", "Sequences."),
    prompts=("prompts", "count", "Tokens of all prompts."),
    drawn=("drawn", "count", "Drawn tokens."),
    differ=("differ", "count", "Drawn tokens whose log-probability differs from the forward pass of training."),
    drawing=("drawing", "s", "Time of drawing, with the capture of graphs."),
    scoring=("scoring", "s", "Time of scoring."),
)  # fmt: skip
LAYOUT_COLUMNS = columns(
    layout=("micro-batch", "text", "Rows x tokens, activation checkpointing, and whether a CUDA graph computes it."),
    scored=("scored", "count", "Drawn tokens that it scores."),
    differ=("differ", "count", "Log-probabilities that differ."),
)


def built(case: Case, device: str = "cuda") -> genesis_models.CausalLM:
    """A model with random weights whose scores and logits have a standard deviation of about 2."""
    raw = MODELS[case.model]
    config = {**raw, "num_hidden_layers": case.layers, "initializer_range": 2 * raw["hidden_size"] ** -0.5}
    model = genesis_models.build(config, 0, device=device, dtype="bfloat16")
    if case.rank:
        apply_adapters(model, AdapterConfig(r=case.rank, alpha=2.0 * case.rank))
    with genesis.no_grad():
        for layer in adapted_layers(model).values() if case.rank else ():
            layer.lora_B.weight.normal_(0.0, 0.05)
        for each in model.parameters():
            if each.ndim == 1:  # biases and norms
                each.add_(genesis.randn(*each.shape, device=device).to(dtype=each.dtype) * 0.2)
    return model


def requests_of(case: Case, tokens: int, vocabulary: int, rng: np.random.Generator) -> list[Request]:
    """Requests for `tokens` tokens; a quarter has the prompt of the request before."""
    found = list[Request]()
    mean = min(NEW, max(tokens // (2 * case.rows), 4))
    ids: list[int] = []
    while tokens > 0:
        if not ids or rng.random() > 0.25:
            ids = rng.integers(0, vocabulary, int(np.exp(rng.uniform(0, np.log(LONGEST + 1))))).tolist()
        new = min(int(rng.integers(1, 2 * mean)), tokens)
        sampling = Sampling(float(rng.choice([1.0, 0.7, 0.0])), seed=7)
        found.append(Request(ids, sampling, new, sequence=len(found)))
        tokens -= new
    return found


def drawn(
    model: genesis_models.CausalLM, case: Case, requests: Sequence[Request]
) -> tuple[list[list[int]], list[list[float]], int]:
    """The ids and log-probabilities that exact generation gives each request, and the number of concurrent ones."""
    ids: list[list[int]] = [[] for _ in requests]
    chances: list[list[float]] = [[] for _ in requests]
    capacity = max(length_of(model, each) for each in requests)
    engine = DeviceEngine(model, rows=case.rows, capacity=capacity, log_probs=True, chunk=case.chunk, exact=True)
    with ExitStack() as stack:
        for module in (device, device_rows) if not case.is_captured else ():
            stack.enter_context(mock.patch.object(module, "captured", lambda step, device: step))
        for token in engine.run(requests):
            if token.id is not None and token.log_prob is not None:
                ids[token.request].append(token.id)
                chances[token.request].append(token.log_prob)
    device_rows.release(model)
    return ids, chances, engine.width


def micro_batches(
    documents: Sequence[tuple[int, np.ndarray]], layout: Layout, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray, list[tuple[int, int, int]]]]:
    """Pack numbered documents: ids and positions `[B, T]`, and the number, row and place of each document in them."""
    waiting = list(documents)
    while waiting:
        length = layout.length or len(waiting[0][1])
        ids, positions = np.zeros((2, layout.batch, length), np.int64)
        positions[:] = np.arange(length)
        places = list[tuple[int, int, int]]()
        for row in range(layout.batch):
            end = 0
            while waiting:
                gap = int(rng.integers(0, 4)) if layout.length and len(waiting[0][1]) + 4 * KEY_BLOCK <= length else 0
                begin = (-(-end // KEY_BLOCK) + gap) * KEY_BLOCK
                if begin + len(waiting[0][1]) > length:
                    break
                number, document = waiting.pop(0)
                end = begin + len(document)
                ids[row, begin:end], positions[row, begin:] = document, np.arange(length - begin)
                places.append((number, row, begin))
        yield ids, positions, places


def scorer(model: genesis_models.CausalLM, layout: Layout, temperature: float) -> Scorer:
    """Return what scores micro-batches `[B, T]` with the forward pass of training: `[B, T - 1]`, float32."""
    place = model.model.embed_tokens.weight.device
    kept, inputs = list[Tensor](), list[Tensor]()

    def launch() -> None:
        with genesis.enable_grad():
            hidden = model.hidden_states(inputs[0], inputs[1])
            found = F.linear_token_log_probs(
                hidden[:, :-1], model.head_weight, inputs[0][:, 1:], temperature=temperature
            )
        kept[:] = [found.detach()]

    run = device_rows.captured(launch, place) if layout.is_captured else launch

    def score(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        sent = [genesis.from_numpy(each).to(device=place) for each in (ids, positions)]
        if inputs and layout.is_captured:
            for buffer, each in zip(inputs, sent, strict=True):
                buffer.copy_(each)
        else:
            inputs[:] = sent
        run()
        return kept[0].cpu().numpy()

    return score


class Tally(Counter[str]):
    """Numbers of tokens: `scored`, and those that `differ`."""

    def compare(self, found: Sequence[float], scored: np.ndarray) -> None:
        """Compare log-probabilities bit by bit."""
        bits = np.array(found, np.float32).view(np.uint32), scored.view(np.uint32)
        self.update(scored=len(scored), differ=int((bits[0] != bits[1]).sum()))


def check(
    case: Case, tokens: int, seed: int, tallies: dict[Layout, Tally], device: str = "cuda"
) -> tuple[dict[str, Any], Tally]:
    """Draw and score a case's tokens; count them by layout. Return the case's row, and the tokens scored without
    `genesis.exact`.
    """
    rng, model = np.random.default_rng(seed), built(case, device).eval()
    requests = requests_of(case, tokens, model.config.vocab_size, rng)
    begin = time.perf_counter()
    ids, chances, width = drawn(model, case, requests)
    middle = time.perf_counter()
    model.train()
    before, control = sum(each["differ"] for each in tallies.values()), Tally()
    temperatures = np.array([each.sampling.temperature or 1.0 for each in requests])
    for temperature in np.unique(temperatures).tolist():
        numbers = rng.permutation(np.flatnonzero(temperatures == temperature))
        shares = *np.array_split(numbers[ALONE:], len(LAYOUTS) - 1), numbers[:ALONE]
        for layout, share in zip(LAYOUTS, shares, strict=True):
            is_plain = layout.checkpointing == "selective" and not model.is_fused
            model.activation_checkpointing = "full" if is_plain else layout.checkpointing
            documents = [(i, np.array([*requests[i].ids, *ids[i]])) for i in share.tolist()]
            score, plain = (scorer(model, each, temperature) for each in (layout, PLAIN))
            for batch, positions, places in micro_batches(documents, layout, rng):
                passes = [(True, score, tallies[layout])]
                if layout == PLAIN and not control:
                    passes.append((False, plain, control))
                for is_exact, compute, tally in passes:
                    with exact(is_exact):
                        scored = compute(batch, positions)
                    for i, row, first in places:
                        end = first + len(requests[i].ids) - 1 + len(ids[i])
                        tally.compare(chances[i], scored[row, end - len(ids[i]) : end])
    return {
        **case._asdict(), "model": case.model + case.adapted, "rows": f"{width}{case.eager}",
        "requests": len(requests), "prompts": sum(len(each.ids) for each in requests), "drawn": sum(map(len, ids)),
        "differ": sum(each["differ"] for each in tallies.values()) - before, "drawing": middle - begin,
        "scoring": time.perf_counter() - middle,
    }, control  # fmt: skip


def main() -> int:
    """Check all cases. Return 1 if one fails, if a log-probability differs, or if none does without `genesis.exact`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens to draw, at least 4 a row")
    parser.add_argument("--cases", default="", help="comma-separated models or model:rows, such as 0.5B:1,llama-1B")
    parser.add_argument("--layers", type=int, default=1000, help="the most layers of a model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600, help="start no case after this time")
    parser.add_argument("--out", type=Path, help="also write a report as JSON")
    chosen = parser.parse_args()
    wanted = [each for each in chosen.cases.split(",") if each]
    rows, tallies, control = list[dict[str, Any]](), {each: Tally() for each in LAYOUTS}, Tally()
    failed = False
    whole, begin = sum(case.tokens for case in CASES), time.monotonic()
    for number, case in enumerate(CASES):
        is_wanted = not wanted or case.name in wanted or case.name.partition(":")[0] in wanted
        if is_wanted and time.monotonic() - begin < chosen.seconds:
            tokens = max(-(-case.tokens * chosen.tokens // whole), 4 * case.rows)
            changed = case._replace(layers=min(case.layers, chosen.layers))
            try:
                row, plain = check(changed, tokens, chosen.seed + number, tallies)
            except GenesisError as error:
                print(f"{case.name}: {error}", file=sys.stderr, flush=True)
                failed = True
                continue
            control.update(plain)
            rows.append(row)
            seconds = f"{row['drawing']:.1f} s of drawing, {row['scoring']:.1f} s of scoring"
            print(f"{case.name}: {row['differ']:,} of {row['drawn']:,} differ, {seconds}", file=sys.stderr, flush=True)
            gc.collect()
            cuda.empty_cache()
    tables = [rows_table("cases", "Exact generation", CASE_COLUMNS, rows)]
    scored = [{"layout": layout.name, **tally} for layout, tally in tallies.items()]
    scored.append({"layout": f"{PLAIN.name}, without genesis.exact", **control})
    tables.append(rows_table("layouts", "Scoring", LAYOUT_COLUMNS, scored))
    total, differ = (sum(each[key] for each in tallies.values()) for key in ("scored", "differ"))
    print(f"{differ:,} of {total:,} log-probabilities differ")
    write_report(chosen.out, "exact", as_device("cuda"), tables, {"tokens": total, "differ": differ})
    return int(failed or differ or total != sum(row["drawn"] for row in rows) or not control["differ"])


if __name__ == "__main__":
    sys.exit(main())
