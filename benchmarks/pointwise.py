"""Elementwise ops of random sizes and layouts compared with torch, as GPU time.

    python -m benchmarks.pointwise --seed 1 --each 4

A kind of call is a number of operands, an element size in bytes and a layout. Both libraries read the same memory, and
their results are compared. CUDA graphs of both are replayed in turns; each reported time is a median.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.results import columns, rows_table, write_report
from genesis.backend import Device

Call = Callable[..., Any]
# Functions by their number of operands; L is the library, genesis or torch.
FUNCTIONS: dict[int, dict[str, Call]] = {
    1: {
        "silu": lambda L, x: L.nn.functional.silu(x), "gelu": lambda L, x: L.nn.functional.gelu(x),
        "exp": lambda L, x: L.exp(x), "tanh": lambda L, x: L.tanh(x), "sigmoid": lambda L, x: L.sigmoid(x),
        "times two": lambda L, x: x * 2, "abs": lambda L, x: L.abs(x), "clamp": lambda L, x: L.clamp(x, -1, 1),
        "cube": lambda L, x: x**3, "pow 1.7": lambda L, x: x**1.7, "relu": lambda L, x: L.relu(x),
        "isnan": lambda L, x: L.isnan(x),
    },
    2: {
        "add": lambda L, x, y: x + y, "mul": lambda L, x, y: x * y, "div": lambda L, x, y: x / y,
        "maximum": lambda L, x, y: L.maximum(x, y), "lt": lambda L, x, y: x < y, "pow": lambda L, x, y: L.pow(x, y),
    },
    3: {
        "where": lambda L, x, y, z: L.where(z > 0, x, y), "lerp": lambda L, x, y, z: L.lerp(x, y, z),
        "clamp": lambda L, x, y, z: L.clamp(x, y, z),
    },
}  # fmt: skip
LAYOUTS = ("aligned", "odd", "transposed", "one transposed", "row", "column", "middle")
CALLS, ROUNDS = 10, 5


def shapes(rng: random.Random, layout: str) -> tuple[int, ...]:
    """Return a random shape with 2^20 to 2^26 elements; an "odd" length is not a multiple of 16."""
    size = 1 << rng.randint(20, 26)
    if layout in ("aligned", "odd"):
        return (size + (rng.randrange(1, 1000) * 2 + 1 if layout == "odd" else 0),)
    columns = round(math.exp(rng.uniform(math.log(100), math.log(9000))))
    columns = max(16, columns // 16 * 16) if rng.random() < 0.5 else columns
    if layout == "middle":
        return (max(2, size // columns // 64), 64, columns)
    return (max(2, size // columns), columns)


def operands(torch: Any, count: int, dtype: Any, layout: str, shape: tuple[int, ...]) -> list[Any]:
    """Return positive operands, broadcast or transposed as the layout says."""
    found = []
    for i in range(count):
        of, order = list(shape), list(range(len(shape)))
        is_last = i == count - 1
        if layout == "transposed" or (layout == "one transposed" and is_last):
            of, order = of[::-1], order[::-1]
        elif is_last and count > 1:
            spared = {"row": range(len(of) - 1), "column": [len(of) - 1], "middle": [1]}.get(layout, [])
            of = [1 if d in spared else s for d, s in enumerate(of)]
        found.append((torch.rand(of, device="cuda") + 0.25).to(dtype).permute(order))
    return found


def captured(library: Any, call: Callable[[], Any]) -> tuple[Callable[[], float], Any]:
    """Return a function that replays a graph of calls and returns the seconds per call; and the graph with results."""
    call()
    library.cuda.synchronize()
    graph, results = library.cuda.CUDAGraph(), []
    with library.cuda.graph(graph):
        for _ in range(CALLS):
            results[:] = [call()]
    events = [library.cuda.Event(enable_timing=True) for _ in range(2)]

    def seconds() -> float:
        graph.replay()
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        return float(events[0].elapsed_time(events[1])) * 1e-3 / CALLS

    return seconds, (graph, results)


def main() -> None:
    """Time the cases of each kind in both libraries, and print their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=4, help="cases of each kind")
    parser.add_argument("--seconds", type=float, default=60, help="start no case after this time")
    parser.add_argument("--json", type=Path, help="write one line per case")
    parser.add_argument("--out", type=Path, help="write a report")
    options = parser.parse_args()
    import torch

    import genesis

    began, rng, cases, rows = time.perf_counter(), random.Random(options.seed), [], []
    for _ in range(options.each):
        for count, functions in FUNCTIONS.items():
            for dtype in (torch.float16, torch.bfloat16, torch.float32)[rng.randrange(2) :][:2]:
                for layout in LAYOUTS if count > 1 else LAYOUTS[:3]:
                    name = rng.choice(list(functions))
                    cases.append((count, dtype, layout, name, shapes(rng, layout)))
    for count, dtype, layout, name, shape in cases:  # kernels compile in parallel, for small operands of these layouts
        small = [max(2, s % 16 + 48) if s > 48 else s for s in shape]
        tiny = [genesis.from_dlpack(x) for x in operands(torch, count, dtype, layout, tuple(small))]
        FUNCTIONS[count][name](genesis, *tiny)
    genesis.cuda.synchronize()
    print(f"{len(cases)} cases, compiled after {time.perf_counter() - began:.0f} s", flush=True)
    for count, dtype, layout, name, shape in cases:
        if time.perf_counter() - began > options.seconds:
            break
        theirs = operands(torch, count, dtype, layout, shape)
        ours = [genesis.from_dlpack(x) for x in theirs]
        call = FUNCTIONS[count][name]
        timers, kept = zip(
            captured(genesis, lambda call=call, ours=ours: call(genesis, *ours)),  # type: ignore[misc]
            captured(torch, lambda call=call, theirs=theirs: call(torch, *theirs)),  # type: ignore[misc]
            strict=True,
        )
        seconds = [median(column) for column in zip(*([t() for t in timers] for _ in range(ROUNDS)), strict=True)]
        got, want = torch.from_dlpack(kept[0][1][0]), kept[1][1][0]
        limit = {2: 1e-2, 4: 1e-5}[dtype.itemsize]
        is_right = torch.allclose(got.float(), want.float(), rtol=limit, atol=limit)
        row = {"kind": f"{count} operands, {dtype.itemsize} bytes, {layout}", "function": name, "right": is_right}
        row |= {"shape": shape, "genesis": seconds[0] * 1e6, "torch": seconds[1] * 1e6}
        rows.append({**row, "ratio": seconds[1] / seconds[0], "strides": [got.stride(), want.stride()]})
        if options.json:
            options.json.write_text("".join(json.dumps(each) + "\n" for each in rows))
    report(rows, options)


COLUMNS = columns(
    kind=("kind", "text", "Operands, bytes of an element, and layout."),
    count=("cases", "count", "Number of timed cases of the kind."),
    median=("median", "ratio", "torch's time / Genesis's."),
    worst=("worst", "ratio", "The lowest of these ratios."),
    of=("worst case", "text", "The case with the lowest ratio: function and shape."),
)


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print and write the ratios torch / Genesis of each kind."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        found = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["ratio"])
        worst, middle = found[0], median(row["ratio"] for row in found)
        of = f"{worst['function']} {worst['shape']}"
        lines.append({"kind": kind, "count": len(found), "median": middle, "worst": worst["ratio"], "of": of})
    table = rows_table("kinds", f"{len(rows)} elementwise calls, torch's time / Genesis's", COLUMNS, lines)
    wrong = [row for row in rows if not row["right"]]
    print("differs from torch:", [(row["function"], row["kind"], row["shape"]) for row in wrong] or "none")
    print(f"kinds with a median below 1: {sum(line['median'] < 1 for line in lines)} of {len(lines)}, "
          f"cases below 0.85: {sum(row['ratio'] < 0.85 for row in rows)} of {len(rows)}")  # fmt: skip
    write_report(options.out, "gpu-pointwise", Device("cuda"), [table], {"seed": options.seed})


if __name__ == "__main__":
    main()
