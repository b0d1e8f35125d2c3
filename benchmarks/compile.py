"""Functions of plain ops, compiled by Genesis and by torch.compile, on one GPU in one process.

    python -m benchmarks.compile --seed 1 --out report.json

Prints the time of a forward pass and of forward and backward, by CUDA events, and the ratio torch / Genesis. Every
function is checked against its eager result first.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import results
from genesis.backend import Device


def gelu(F: Any, x: Any) -> Any:
    return 0.5 * x * (1 + (x * 0.7978845608 * (1 + 0.044715 * x * x)).tanh())


def swiglu(F: Any, gate: Any, up: Any) -> Any:
    return gate * gate.sigmoid() * up


def softmax(F: Any, x: Any) -> Any:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def log_softmax_nll(F: Any, x: Any, labels: Any) -> Any:
    return -F.log_softmax(x, -1).gather(-1, labels).mean()


def rms_norm_residual(F: Any, x: Any, residual: Any, weight: Any) -> Any:
    h = x + residual
    return h * (h.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def layer_norm_dropout(F: Any, x: Any, weight: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdim=True)
    far = x - mean
    return F.dropout(far * ((far * far).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight + bias, 0.1)


def rotary(F: Any, x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return x * cos + F.cat([-b, a], -1) * sin


def z_loss(F: Any, x: Any) -> Any:
    return (x.logsumexp(-1) ** 2).mean() * 1e-4


def bias_gelu_residual(F: Any, x: Any, bias: Any, residual: Any) -> Any:
    return F.gelu(x + bias) + residual


def masked_mean(F: Any, x: Any, mask: Any) -> Any:
    return (x * mask).sum() / mask.sum()


def label_smoothing(F: Any, x: Any, labels: Any) -> Any:
    log_probs = F.log_softmax(x, -1)
    return -0.9 * log_probs.gather(-1, labels).mean() - 0.1 * log_probs.mean()


def variance(F: Any, x: Any) -> Any:
    far = x - x.mean(-1, keepdim=True)
    return (far * far).sum(-1) / (x.shape[-1] - 1)


def moe_gate(F: Any, x: Any) -> Any:
    probs = x.softmax(-1)
    keep = probs >= probs.mean(-1, keepdim=True)
    chosen = probs * keep
    return chosen / chosen.sum(-1, keepdim=True)


def adam(F: Any, p: Any, g: Any, m: Any, v: Any) -> Any:
    m = m * 0.9 + g * 0.1
    v = v * 0.95 + g * g * 0.05
    return p * (1 - 1e-4) - 1e-3 * m / (v.sqrt() + 1e-8), m, v


def lion(F: Any, p: Any, g: Any, m: Any) -> Any:
    return p * (1 - 1e-4) - 1e-3 * (m * 0.9 + g * 0.1).sign(), m * 0.99 + g * 0.01


# Function; kind of each operand: "x", "c", "p" matrices, "w" a row, "l" labels, "k" a mask; whether it has a gradient.
CASES: tuple[tuple[Callable[..., Any], str, bool], ...] = (
    (gelu, "x", True), (swiglu, "xx", True), (softmax, "x", True), (log_softmax_nll, "xl", True),
    (rms_norm_residual, "xxw", True), (layer_norm_dropout, "xww", True), (rotary, "xcc", True), (z_loss, "x", True),
    (bias_gelu_residual, "xwx", True), (masked_mean, "xk", True), (label_smoothing, "xl", True), (variance, "x", True),
    (moe_gate, "x", True), (adam, "xxpp", False), (lion, "xxx", False),
)  # fmt: skip


def operands(library: Any, kinds: str, rows: int, columns: int, seed: int) -> list[Any]:
    """Random operands on the GPU: "p" in [0, 1), "k" 0 or 1, "l" labels, others normal."""
    library.manual_seed(seed)
    sizes = (rows, columns)
    makers: dict[str, Callable[[], Any]] = {
        "x": lambda: library.randn(sizes, device="cuda"),
        "c": lambda: library.randn(sizes, device="cuda"),
        "w": lambda: library.randn(columns, device="cuda"),
        "p": lambda: library.rand(sizes, device="cuda"),
        "k": lambda: library.randint(0, 2, sizes, device="cuda"),
        "l": lambda: library.randint(0, columns, (rows, 1), device="cuda"),
    }
    return [makers[kind]() for kind in kinds]


class Side:
    """One library, which makes tensors, compiles and times."""

    def __init__(self, library: Any, functional: Any) -> None:
        self.library = library
        names = {name: getattr(functional, name) for name in ("log_softmax", "gelu", "dropout")}
        self.functional = type(
            "F", (), {**{k: staticmethod(v) for k, v in names.items()}, "cat": staticmethod(library.cat)}
        )

    def tensors(self, values: list[Any], kinds: str, dtype: str, grad: bool) -> list[Any]:
        made = []
        for value, kind in zip(values, kinds, strict=True):
            t = self.library.from_dlpack(value)
            if kind != "l":
                t = t.to(getattr(self.library, dtype))
            made.append(t.detach().requires_grad_(grad and kind in "xw"))
        return made

    def times(self, function: Callable[..., Any], tensors: list[Any], grad: bool, rounds: int) -> Callable[[], float]:
        """Return a function that runs once and returns milliseconds."""
        seed = None
        if grad:
            out = function(*tensors)
            seed = self.library.ones_like(out)

        def once() -> None:
            if not grad:
                with self.library.no_grad():
                    function(*tensors)
                return
            for t in tensors:
                t.grad = None
            function(*tensors).backward(seed)

        def timed() -> float:
            start, end = (self.library.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(rounds):
                once()
            end.record()
            self.library.cuda.synchronize()
            return float(start.elapsed_time(end)) / rounds

        for _ in range(3):
            once()
        self.library.cuda.synchronize()
        return timed


def drawn(seed: int, only: str, is_small: bool) -> list[tuple[Any, ...]]:
    """The cases with random shapes, in random order: a run that ends early is a sample."""
    rng = random.Random(seed)
    cases = [(*case, dtype) for case in CASES for dtype in ("bfloat16", "float32")]
    rng.shuffle(cases)
    found: list[tuple[Any, ...]] = []
    for number, (function, kinds, has_grad, dtype) in enumerate(cases):
        aligned = number % 2 == 0
        columns = rng.choice((1024, 2048, 4096, 8192)) if aligned else rng.randrange(700, 9000)
        if function is rotary:
            columns -= columns % 2
        if function is moe_gate:
            columns = 64 if aligned else 48
        shape = (5, 70) if is_small else (max(1, (1 << 25) // columns), columns)
        if not only or function.__name__ in only.split(","):
            found.append((number, function, kinds, has_grad, dtype, *shape))
    return found


def main() -> None:
    """Time all cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the report")
    parser.add_argument("--only", default="", help="names of functions, separated by commas")
    parser.add_argument("--seconds", type=float, default=400, help="start no case after this time")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th case from the K-th on")
    parser.add_argument("--compile-only", action="store_true", help="compile for both libraries, and compare")
    parser.add_argument("--device-check", action="store_true", help="only compare with eager results, at small sizes")
    options = parser.parse_args()
    import genesis

    sides = [Side(genesis, genesis.nn.functional)]
    if not options.device_check:
        import torch

        sides.append(Side(torch, torch.nn.functional))
    rows_found, began = [], time.perf_counter()
    first, step = map(int, options.part.split("/"))
    for number, function, kinds, has_grad, dtype, rows, columns in drawn(
        options.seed, options.only, options.device_check
    )[first::step]:
        if time.perf_counter() - began > options.seconds:
            break
        values = operands(genesis, kinds, rows, columns, number)
        line: dict[str, Any] = {"function": function.__name__, "dtype": dtype, "shape": [rows, columns]}
        for grad in (False, True) if has_grad else (False,):
            timers = []
            for side in sides:
                F = side.functional

                def call(*tensors: Any, function: Any = function, F: Any = F) -> Any:
                    return function(F, *tensors)

                if side.library is not genesis:
                    torch._dynamo.reset()
                compiled = side.library.compile(call)
                tensors = side.tensors(values, kinds, dtype, grad)
                if side.library is genesis:
                    check(call, compiled, tensors, line)
                if not options.device_check:
                    start = time.perf_counter()
                    timers.append(side.times(compiled, tensors, grad, 20))
                    line[f"{side.library.__name__} first s"] = round(time.perf_counter() - start, 2)
            if not timers or options.compile_only:
                continue
            rounds = [[t() for t in timers] for _ in range(7)]
            mine, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
            name = "both" if grad else "forward"
            line |= {f"{name} ms": round(mine, 4), f"{name} torch ms": round(theirs, 4), name: round(theirs / mine, 3)}
        rows_found.append(line)
        print(json.dumps(line), flush=True)
    report(rows_found, options)


def report(found: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print the ratios and write the report."""
    rows = [
        {
            "function": line["function"], "dtype": line["dtype"], "rows": line["shape"][0],
            "columns": line["shape"][1], "step": step, "genesis": line[f"{step} ms"] / 1e3,
            "torch": line[f"{step} torch ms"] / 1e3, "ratio": line[step],
        }
        for line in found for step in ("forward", "both") if step in line
    ]  # fmt: skip
    if not rows:
        return
    ratios = sorted(row["ratio"] for row in rows)
    print(f"{len(ratios)} ratios torch / Genesis: median {statistics.median(ratios)}, worst {ratios[0]}, "
          f"below 0.85: {sum(r < 0.85 for r in ratios)}")  # fmt: skip
    of = results.columns(
        function=("function", "text", "Function of plain ops, in benchmarks/compile.py."),
        dtype=("dtype", "text", "Of the operands."), rows=("rows", "count", "Rows of the operands."),
        columns=("columns", "count", "Columns of the operands."),
        step=("pass", "text", "Forward, or forward and backward."),
        genesis=("Genesis", "s", "Median time of a call, by events."), torch=("torch", "s", "torch.compile's time."),
        ratio=("ratio", "ratio", "torch's time / Genesis's."),
    )  # fmt: skip
    table = results.rows_table("cases", "Compiled functions compared with torch.compile", of, rows)
    results.write_report(options.out, "compile", Device("cuda"), [table], {"seed": options.seed})


def check(call: Any, compiled: Any, tensors: list[Any], line: dict[str, Any]) -> None:
    """Compare the compiled function with the eager one."""
    from genesis import manual_seed

    want, got = ((manual_seed(0), function(*tensors))[1] for function in (call, compiled))
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (want, got)), strict=True):
        limit = 2e-2 if line["dtype"] == "bfloat16" else 1e-4
        scale = max(1e-6, a.detach().float().abs().max().item())
        far = ((a.detach().float() - b.detach().float()).abs() > limit * scale).float().mean().item()
        line["share beyond tolerance"] = max(line.get("share beyond tolerance", 0.0), far)
    # A comparison of two rounded numbers may fall on either side, which changes a whole row of `moe_gate`.
    assert line["share beyond tolerance"] <= (1e-2 if line["function"] == "moe_gate" else 0), line
    assert not compiled.breaks, [b.reason for b in compiled.breaks.values()]


if __name__ == "__main__":
    main()
