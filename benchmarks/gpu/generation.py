"""Generation on a GPU by Genesis and torch in turns: time of a token, of a whole call, and to the first token.

    python -m benchmarks.gpu.generation --sizes 0.5B,qwen3-0.6B --batches 1,8,32 --recipes lean-graph

Each side is a process that loads the same random weights and runs one case after the other; a case's rounds are
interleaved. `token` is the median time between the ends of decoding steps, by events. `first` is the wall time from the
call to its first token, after all graphs were captured. `share` is the rate at which a step reads its weights and half
of its cache, divided by the bandwidth of a copy in the same process. `same` is the mean number of leading greedy tokens
that equal the first side's (16-bit ties may differ).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gpu.lora_step import Side, SideError, listed
from benchmarks.results import columns, rows_table, write_report
from genesis.backend import as_device

Job = dict[str, Any]
COLUMNS = columns(
    size=("size", "text", "Model."),
    side=("side", "text", "Genesis with the types of its weights and cache, or a recipe of torch."),
    batch=("rows", "count", "Sequences that are generated together."),
    prompt=("prompt", "count", "Tokens of a prompt."),
    new=("new", "count", "Generated tokens of each sequence."),
    draw=("draw", "text", "Greedy, or sampled with temperature 0.8, top-p 0.95 and top-k 50."),
    token=("token", "s", "Median time between the ends of decoding steps, by events."),
    tokens_per_second=("tokens/s", "token/s", "Tokens per second of all rows, at the median."),
    ratio=("ratio", "ratio", "Time of a token / Genesis's."),
    share=("of a copy", "share", "Rate of the step's weights and half of its cache as a share of a copy's."),
    whole=("whole call", "s", "Wall time of the call."),
    first=("first token", "s", "Wall time to the first token, after all graphs were captured."),
    same=("same", "count", "Mean number of leading greedy tokens that equal the first side's."),
    error=("error", "text", "Why the side has no figures."),
)


def cases(chosen: argparse.Namespace) -> list[Job]:
    """The cases: each batch with each draw, a prompt for the time to the first token, and a long prompt."""
    found: list[Job] = [
        {"batch": int(batch), "prompt": chosen.prompt, "new": chosen.new, "draw": draw}
        for batch, draw in itertools.product(listed(chosen.batches), listed(chosen.draws))
    ]
    if chosen.first:
        found.append({"batch": 1, "prompt": chosen.first, "new": 8, "draw": "greedy"})
    if chosen.long:
        found.append({"batch": 1, "prompt": chosen.long, "new": chosen.new, "draw": "greedy"})
    return found


def run(size: str, chosen: argparse.Namespace, until: float) -> list[dict[str, Any]]:
    """Run all cases of a size on all sides, and return their rows."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = {"size": size, "folder": folder, "device": chosen.device, "dtype": chosen.dtype}
        with Side(sys.executable, "generation_genesis", {**job, "prepare": True}, chosen.limit) as side:
            side.answer()
        named: list[tuple[str, str, Job]] = []
        for weights, cache in itertools.product(listed(chosen.weights), listed(chosen.caches)):
            parts = [
                "genesis",
                *([weights] if weights != "auto" else []),
                *([f"kv-{cache}"] if cache != "auto" else []),
            ]
            named.append(("generation_genesis", "-".join(parts), {"weights": weights, "cache": cache, "exact": False}))
        if chosen.exact:
            exact = {"weights": "auto", "cache": "auto", "exact": True}
            named.append(("generation_genesis", "genesis-exact", exact))
        named += [("generation_torch", recipe, {}) for recipe in listed(chosen.recipes)]
        sides = []
        for module, name, more in named:
            python = chosen.torch if module == "generation_torch" else sys.executable
            side = stack.enter_context(Side(python, module, {**job, **more, "side": name}, chosen.limit))
            try:
                side.answer()
                sides.append((name, side))
            except SideError as error:
                rows.append({"size": size, "side": name, "error": str(error)})
        for case in cases(chosen):
            new = [{"size": size, "side": name, **case} for name, _ in sides]
            for _ in range(chosen.rounds):
                for row, (_, side) in zip(new, sides, strict=True):
                    if "error" not in row and time.monotonic() < until:
                        _ask(row, side, case)
            rows += new
            _compare(new)
    return rows


def _ask(row: dict[str, Any], side: Side, case: Job) -> None:
    try:
        answer = side.ask(case)
    except SideError as error:
        row["error"] = str(error)
        return
    for key in ("token", "whole", "first"):
        row.setdefault(f"{key}_rounds", []).append(answer.pop(key))
        row[key] = statistics.median(row[f"{key}_rounds"])
    row.update(answer, tokens_per_second=row["batch"] / row["token"])


def _compare(rows: list[dict[str, Any]]) -> None:
    """Add each side's time / the first side's, and the number of leading tokens that are equal."""
    for row in rows[1:]:
        if "token" in row and "token" in rows[0]:
            row["ratio"] = row["token"] / rows[0]["token"]
    found = [row.pop("tokens") for row in rows if "tokens" in row]
    for row, tokens in zip([row for row in rows if "token" in row], found, strict=True):
        if row["draw"] == "greedy":
            row["same"] = same_beginning(found[0], tokens)


def same_beginning(x: list[list[int]], y: list[list[int]]) -> float:
    """The mean number of leading tokens in which the rows of two batches agree."""
    lengths = [sum(itertools.takewhile(bool, map(int.__eq__, a, b))) for a, b in zip(x, y, strict=True)]
    return statistics.mean(lengths)


def arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="0.5B", help="0.5B, qwen3-0.6B, llama-3.2-1B, tiny")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--draws", default="greedy,sampled", help="sampled: temperature 0.8, top-p 0.95, top-k 50")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--first", type=int, default=1024, help="tokens of the prompt for the first token; 0: none")
    parser.add_argument("--long", type=int, default=8192, help="tokens of the long prompt; 0: none")
    parser.add_argument("--caches", default="auto", help="types of keys and values: auto, fp8")
    parser.add_argument("--weights", default="auto", help="types of weights: auto, fp8, int8")
    parser.add_argument("--exact", action="store_true", help="also time exact generation, without sampled draws")
    parser.add_argument("--recipes", default="", help="recipes of torch: lean-graph, lean-compile")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--torch", default=sys.executable, help="the interpreter of an environment with torch")
    parser.add_argument("--limit", type=float, default=120, help="seconds that one answer may take")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no case starts")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    until, rows = time.monotonic() + chosen.budget, []
    for size in listed(chosen.sizes):
        rows += run(size, chosen, until)
    made = rows_table("cases", "Generation", COLUMNS, rows)
    write_report(chosen.out, "generation", as_device(chosen.device), [made], {"dtype": chosen.dtype})


if __name__ == "__main__":
    main()
