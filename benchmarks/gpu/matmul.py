"""Tiles for matmuls: measures candidates, prints the best as rows for the table, and compares with torch.

    python -m benchmarks.gpu.matmul [--shapes forward dgrad wgrad …] [--table] [--candidates 128,256,64,8,3 …]

A shape is a group's name, a shape's name, or KIND:LAYOUT:M:N:K (KIND half, tf32 or float32; LAYOUT as in
genesis/kernels/gemm/tiles.py, so "nt" is x·wᵀ). All candidates are compiled side by side before anything is timed.
Times are medians over replays of a graph of calls that take turns on several sets of random inputs, more than the L2
holds. Every candidate's result is checked against a float32 matmul first. --table measures only what the shipped table
chooses. The ratio is torch / Genesis: above 1, Genesis is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.gpu.timing import backend, gpu_graph, shared_array, torch_gpu_graph
from genesis.backend.cuda.compilations import compiling
from genesis.backend.cuda.launch import signature_of
from genesis.backend.cuda.precision import allow_tf32
from genesis.kernels.gemm import linalg
from genesis.kernels.gemm.tiles import GemmTile, choose, fitted, persistent_schedule

L2 = 50 << 20
ROUNDS = 9
LIMITS = {"half": 6e-3, "tf32": 2e-3, "float32": 2e-6}  # of the relative error


class Shape(NamedTuple):
    """One matmul: kind "half" is bfloat16."""

    kind: str
    layout: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.layout}:{self.m}:{self.n}:{self.k}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.kind == "half" else torch.float32

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def nbytes(self) -> int:
        return (self.m * self.k + self.k * self.n + self.m * self.n) * (2 if self.kind == "half" else 4)


SQUARES = (512, 1024, 2048, 4096, 8192)
LINEARS = ((896, 896), (1152, 896), (4864, 896), (9728, 896), (896, 4864), (151936, 896))  # out, in
GROUPS: dict[str, tuple[Shape, ...]] = {
    "bf16": tuple(Shape("half", "nn", n, n, n) for n in SQUARES),
    "tf32": tuple(Shape("tf32", "nn", n, n, n) for n in SQUARES),
    "forward": tuple(Shape("half", "nt", 8192, n, k) for n, k in LINEARS),
    "dgrad": tuple(Shape("half", "nn", 8192, k, n) for n, k in LINEARS),
    "wgrad": tuple(Shape("half", "tn", n, k, 8192) for n, k in LINEARS),
    "short": tuple(Shape("half", layout, m, 4864, 896) for m in (128, 512, 2048) for layout in ("nt", "nn")),
    "decode": tuple(
        Shape("half", "nt", m, n, k) for m in (1, 16) for n, k in ((896, 4864), (4864, 896), (151936, 896))
    ),
    "float32": tuple(Shape("float32", "nn", n, n, n) for n in (512, 2048, 4096)),
}
ESSENTIAL = ("bf16", "tf32", "forward", "dgrad", "wgrad")

HALF = [
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4), (128, 128, 64, 4, 3),
    (128, 128, 64, 4, 4), (128, 128, 64, 8, 4), (128, 128, 128, 8, 2), (64, 256, 64, 4, 4), (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4), (64, 64, 64, 4, 4), (64, 128, 128, 4, 3), (128, 64, 128, 4, 3), (64, 64, 128, 4, 4),
]  # fmt: skip
TF32 = [
    (128, 256, 32, 8, 3), (128, 256, 32, 8, 4), (256, 128, 32, 8, 3), (128, 128, 32, 4, 4), (128, 128, 32, 8, 4),
    (64, 256, 32, 4, 4), (128, 64, 32, 4, 4), (64, 128, 32, 4, 4), (64, 64, 32, 4, 4), (128, 128, 64, 8, 3),
    (64, 64, 64, 4, 4),
]  # fmt: skip
FLOAT32 = [
    (64, 64, 16, 4, 3), (128, 64, 16, 4, 3), (128, 64, 16, 8, 3), (128, 128, 16, 8, 3), (64, 128, 16, 8, 3),
    (128, 128, 16, 4, 3), (32, 64, 16, 4, 3), (64, 64, 16, 8, 3), (64, 64, 32, 4, 3),
]  # fmt: skip
EMULATED = [(128, 128, 32, 8, 3), (128, 64, 32, 4, 3), (64, 64, 32, 4, 4), (128, 64, 32, 8, 3), (128, 256, 32, 8, 2)]
NARROW = [(64, 16, 128, 4, 4), (64, 16, 256, 4, 3), (128, 16, 128, 4, 4), (64, 32, 128, 4, 4), (64, 64, 128, 4, 3)]


def tiles_of(shape: Shape) -> list[GemmTile]:
    """The candidates for a shape: tiles, each with the splits and, in tf32, the sides that can matter."""
    if shape.kind == "float32":
        return [GemmTile(*t) for t in (FLOAT32 if linalg.FLOAT32 == "ieee" else EMULATED)]
    narrow = min(shape.m, shape.n) <= 64
    base = [GemmTile(*t) for t in (NARROW if narrow else HALF if shape.kind == "half" else TF32)]
    if narrow:
        base = [t._replace(swapped=shape.m < shape.n) for t in base]
    elif shape.kind == "tf32" and shape.layout != "nt":
        base = [t._replace(**way) for t in base for way in ({"swapped": True}, {"transposed_copies": 1})]
    base += [t._replace(ctas_per_sm=2) for t in base if t.warps == 4]
    limits = backend.driver.properties
    base = [t for t in base if fitted(t, shape.dtype.itemsize, limits.shared_memory) == t]
    found = []
    for t in base:
        rows, columns = (shape.n, shape.m) if t.swapped else (shape.m, shape.n)
        count, steps = -(-rows // t.bm) * -(-columns // t.bn), -(-shape.k // t.bk)
        programs = limits.sm_count * t.ctas_per_sm
        if count > 40 * limits.sm_count:  # the last round does not matter
            splits = {1}
        else:
            more = (2, 3, 4, 6, 8, 16) if steps >= 16 else (2,)
            splits = {1, persistent_schedule(count, steps, programs).split, *more}
        schedules = {persistent_schedule(count, steps, programs, s): s for s in sorted(splits, reverse=True)}
        found += [t._replace(split=s) for s in sorted(schedules.values())]
    return pruned(shape, found)


def pruned(shape: Shape, tiles: list[GemmTile], most: int = 40) -> list[GemmTile]:
    """Without those whose rounds over the SMs waste so much that they cannot win, the least wasteful first."""
    programs = backend.driver.properties.sm_count

    def rounds(t: GemmTile) -> float:  # time in units of useful work
        rows, columns = (shape.n, shape.m) if t.swapped else (shape.m, shape.n)
        count, steps = -(-rows // t.bm) * -(-columns // t.bn), -(-shape.k // t.bk)
        s = persistent_schedule(count, steps, programs * t.ctas_per_sm, t.split)
        # programs on one SM share it
        spent = -(-s.full // programs) * steps + -(-s.leftover * s.split // programs) * (s.steps_per_split + 4)
        rate = 1.0 if t.bm * t.bn >= 1 << 15 else 0.85 if t.bm * t.bn >= 1 << 14 else 0.6  # of the tensor cores, about
        return spent * t.bm * t.bn * t.bk / rate

    return sorted(tiles, key=rounds)[:most]


class Inputs(NamedTuple):
    """One set of operands, for both libraries over the same memory."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor

    def ours(self, tile: GemmTile | None) -> None:
        linalg.matmul_into(shared_array(self.out), shared_array(self.a), shared_array(self.b), tile=tile)

    def theirs(self) -> None:
        torch.mm(self.a, self.b, out=self.out)


def inputs_of(shape: Shape) -> Inputs:
    def made(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        x = torch.randn((columns, rows) if transposed else (rows, columns), device="cuda", dtype=shape.dtype)
        return x.t() if transposed else x

    a = made(shape.m, shape.k, shape.layout[0] == "t")
    b = made(shape.k, shape.n, shape.layout[1] == "t")
    return Inputs(a, b, torch.empty(shape.m, shape.n, device="cuda", dtype=shape.dtype))


class Check:
    """The relative error in norm of some rows and columns, the first and the last among them, against float64."""

    def __init__(self, shape: Shape, x: Inputs) -> None:
        self.rows = torch.linspace(0, shape.m - 1, min(shape.m, 512), device="cuda").long()
        self.columns = torch.linspace(0, shape.n - 1, min(shape.n, 4096), device="cuda").long()
        self.want = x.a[self.rows].double() @ x.b[:, self.columns].double()

    def error(self, x: Inputs) -> float:
        found = x.out[self.rows][:, self.columns].double()
        return float((found - self.want).norm() / self.want.norm())


def compile_all(work: Iterable[tuple[Shape, GemmTile | None]]) -> dict[tuple[Shape, GemmTile | None], str]:
    """Compile every kernel of these candidates side by side; those that fail, with the reason."""
    asked: dict[tuple[Shape, GemmTile | None], list[Any]] = {}
    capability = backend.driver.properties.capability
    for shape, group in itertools.groupby(work, key=lambda item: item[0]):
        x = inputs_of(shape)
        for _, tile in group:
            futures = asked[shape, tile] = []

            def ask(kernel: Any, grid: Any, *args: Any, futures: list[Any] = futures, **keywords: Any) -> None:
                futures.append(compiling(kernel, signature_of(kernel, args, keywords), capability))

            with mock.patch.object(linalg, "launch", ask), Switched(shape):
                x.ours(tile)
    failed = {}
    for key, futures in asked.items():
        for future in futures:
            try:
                made = future.result()
                if made.shared > backend.driver.properties.shared_memory:
                    failed[key] = f"{made.shared} bytes of shared memory"
            except Exception as error:  # a candidate that the compiler refuses is no candidate
                failed[key] = f"{type(error).__name__}: {str(error)[-200:]}"
    return failed


class Switched:
    """tf32 on for tf32 shapes, in both libraries."""

    def __init__(self, shape: Shape) -> None:
        self.on = shape.kind == "tf32"

    def __enter__(self) -> None:
        self.before = allow_tf32.set(self.on)
        torch.backends.cuda.matmul.allow_tf32 = self.on

    def __exit__(self, *error: object) -> None:
        allow_tf32.set(self.before)


def calls_for(shape: Shape, budget_us: float) -> int:
    """How many calls take about `budget_us`."""
    rate = {"half": 600e6, "tf32": 300e6, "float32": 30e6}[shape.kind]
    guess = max(shape.flops / rate, shape.nbytes / 3e6, 4.0)
    return int(min(max(budget_us / guess, 3), 40))


def measure(
    shape: Shape, tiles: list[GemmTile | None], budget_us: float
) -> tuple[list[tuple[float, GemmTile | None]], float]:
    """Microseconds of each candidate that is right, best first, and of torch. All take turns: the clock wanders."""
    sets = [inputs_of(shape) for _ in range(min(8, 1 + 2 * L2 // shape.nbytes))]
    n, check = calls_for(shape, budget_us), Check(shape, sets[0])
    with Switched(shape), contextlib.ExitStack() as stack:
        graphs: list[tuple[GemmTile | None, Callable[[], float]]] = []
        for tile in tiles:
            try:
                error = error_of(tile, sets[0], check)
                if not error < LIMITS[shape.kind]:
                    print(f"  wrong: {shape} {tile}: relative error {error:.1e}", flush=True)
                    continue
                graphs.append((tile, stack.enter_context(gpu_graph([turn(x, tile) for x in sets], n))))
            except Exception as failure:  # one broken candidate must not end the run
                print(f"  failed: {shape} {tile}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
        theirs = torch_gpu_graph([x.theirs for x in sets], n)
        times: list[list[float]] = [[] for _ in range(len(graphs) + 1)]
        for _ in range(ROUNDS):
            for found, (_, replay) in zip(times, [*graphs, (None, theirs)], strict=True):
                found.append(replay())
    medians = [statistics.median(found) for found in times]
    ours = sorted(zip(medians, [tile for tile, _ in graphs], strict=False), key=lambda item: item[0])
    return ours, medians[-1]


def error_of(tile: GemmTile | None, x: Inputs, check: Check) -> float:
    """The relative error of one call."""
    x.out.fill_(float("nan"))
    torch.cuda.synchronize()
    x.ours(tile)
    backend.driver.synchronize()
    return check.error(x)


def turn(x: Inputs, tile: GemmTile | None) -> Callable[[], None]:
    return lambda: x.ours(tile)


def shapes_of(names: list[str]) -> list[Shape]:
    found: list[Shape] = []
    for name in names:
        if name in GROUPS:
            found += GROUPS[name]
        else:
            kind, layout, *sizes = name.split(":")
            found.append(Shape(kind, layout, *map(int, sizes)))
    return list(dict.fromkeys(found))


def chosen(shape: Shape) -> GemmTile:
    """What the shipped table says."""
    shared_memory = backend.driver.properties.shared_memory
    return choose(shape.kind, shape.layout, shape.m, shape.n, shape.k, shape.dtype.itemsize, shared_memory)


def tile_of(text: str) -> GemmTile:
    """A tile from its numbers, separated by commas."""
    values = dict(zip(GemmTile._fields, map(int, text.split(",")), strict=False))
    return GemmTile(**{**values, "swapped": bool(values.get("swapped", 0))})  # type: ignore[arg-type]


def row(shape: Shape, tile: GemmTile) -> str:
    """A line of the table's source."""
    defaults = GemmTile._field_defaults
    rest = "".join(f", {name}={value}" for name, value in tile._asdict().items() if value != defaults.get(name, value))
    body = ", ".join(map(str, tile[:5]))
    return f'        TunedShape("{shape.layout}", {shape.m}, {shape.n}, {shape.k}, GemmTile({body}{rest})),'


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(ESSENTIAL))
    parser.add_argument("--table", action="store_true", help="only what the shipped table chooses")
    parser.add_argument(
        "--candidates",
        nargs="+",
        help="BM,BN,BK,WARPS,STAGES[,GROUP,SPLIT,SWAPPED,CTAS_PER_SM,TRANSPOSED_COPIES] instead",
    )
    parser.add_argument("--budget", type=float, default=2500.0, help="microseconds of GPU time a graph")
    parser.add_argument("--keep", type=int, default=3, help="candidates that are printed and timed again")
    parser.add_argument("--float32", default=linalg.FLOAT32, choices=("ieee", "tf32x3", "bf16x6"))
    options = parser.parse_args()
    linalg.FLOAT32 = options.float32
    shapes = shapes_of(options.shapes)
    plan: dict[Shape, list[Any]] = {}
    for shape in shapes:
        if options.table:
            plan[shape] = [None]
        elif options.candidates:
            plan[shape] = [tile_of(c) for c in options.candidates]
        else:
            plan[shape] = list(dict.fromkeys([*tiles_of(shape), chosen(shape)]))
    started = time.perf_counter()
    failed = compile_all((shape, tile) for shape, tiles in plan.items() for tile in tiles)
    for (shape, tile), reason in failed.items():
        print(f"  not compiled: {shape} {tile}: {reason}")
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    rows, ratios = [], []
    for shape, tiles in plan.items():
        gc.collect()
        torch.cuda.empty_cache()
        backend.pool.empty_cache()
        found, theirs = measure(shape, [t for t in tiles if (shape, t) not in failed], options.budget)
        best = [t for _, t in found[: options.keep]]
        if len(found) > 1:  # the winner by luck is the winner no more
            found, theirs = measure(shape, best, 4 * options.budget)
        if not found:
            print(f"{shape!s:32s} nothing measured")
            continue
        us, tile = found[0]
        ratios.append(theirs / us)
        rates = "  ".join(f"{shape.flops / t / 1e6:.0f}" for t, _ in found)
        print(
            f"{shape!s:32s} {us:9.2f} us, torch {theirs:9.2f} us, ratio {theirs / us:5.3f}; torch "
            f"{shape.flops / theirs / 1e6:.0f}, ours {rates} TFLOP/s", flush=True,
        )  # fmt: skip
        for t, each in found:
            print(f"      {t:9.2f} {tuple(each) if each else 'table: ' + str(tuple(chosen(shape)))}", flush=True)
        if tile is not None:
            rows.append((shape, tile))
    for kind in sorted({shape.kind for shape, _ in rows}):
        print(f'    "{kind}": (')
        print("\n".join(row(shape, tile) for shape, tile in rows if shape.kind == kind))
        print("    ),")
    if ratios:
        ratios.sort()
        print(
            f"median ratio {ratios[len(ratios) // 2]:.3f}, least {ratios[0]:.3f}; {time.perf_counter() - started:.0f} s"
        )


if __name__ == "__main__":
    main()
