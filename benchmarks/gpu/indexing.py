"""Gather, scatter, selection, sorting and transposed copies against torch on one GPU, and sweeps of their tiles.

    python -m benchmarks.gpu.indexing [--only gather] [--sweep]

The ratio is torch / Genesis: above 1, Genesis is faster. Times are on the GPU by graph replay; of selections, which
wait for the GPU, wall time. Results are compared with torch's before they are timed. --sweep tries other tiles for the
rows that have some, and prints the best ones of each.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.ops import as_torch
from benchmarks.gpu.timing import backend, gpu_us, shared, torch_gpu_us, wall_us
from genesis.array import empty
from genesis.autograd.record import TensorBase
from genesis.kernels.gemm import transpose
from genesis.kernels.index import radix_sort as radix
from genesis.kernels.index import segment
from genesis.op import registry

ROWS, IDS, WIDTH = 151936, 8192, 896
Tile = tuple[int, ...]


class Sweep(NamedTuple):
    """Tiles to try: candidates replace what the function `name` of `module` returns."""

    module: Any
    name: str
    candidates: list[Tile]


class Row(NamedTuple):
    """One comparison; `nbytes` is the least memory traffic."""

    name: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    nbytes: int
    sweeps: tuple[Sweep, ...] = ()
    wall: bool = False
    tolerance: float = 0.0
    calls: int = 20


def tiles(rows: Tile, columns: Tile, warps: Tile, least: int, most: int) -> list[Tile]:
    """Tiles with `least` to `most` elements for each thread."""
    every = itertools.product(rows, columns, warps)
    return [(r, c, w) for r, c, w in every if least <= r * c // (32 * w) <= most]


MOVES = Sweep(segment, "tile_of", tiles((1, 2, 4, 8, 16, 32), (128, 256, 512, 1024), (1, 2, 4, 8), 8, 64))
ADDS = Sweep(segment, "window_of", tiles((4, 8, 16, 32), (64, 128, 256, 512), (1, 2, 4), 8, 128))
RANKS = Sweep(radix, "rank_tile", tiles((16, 32, 64), (64, 128, 256, 512), (2, 4, 8), 16, 128))
TRANSPOSES = Sweep(transpose, "tile", tiles((32, 64, 128), (32, 64, 128), (2, 4, 8), 4, 64))


def ids_of(repeated: bool) -> torch.Tensor:
    """8,192 rows: uniform, or a few very frequent ones, as in text."""
    if not repeated:
        return torch.randint(0, ROWS, (IDS,), device="cuda")
    return (ROWS * torch.rand(IDS, device="cuda") ** 8).long().clamp_(max=ROWS - 1)


def moving(dtype: torch.dtype, repeated: bool) -> Iterator[Row]:
    """Gathers and scatters of rows."""
    # integers, whose sums are exact in float32 in every order
    weight = torch.randint(-8, 8, (ROWS, WIDTH), device="cuda").to(dtype)
    g = torch.randint(-8, 8, (IDS, WIDTH), device="cuda").to(dtype)
    ids = ids_of(repeated)
    w, v, i = shared(weight), shared(g), shared(ids)
    kind = f"{str(dtype).removeprefix('torch.')} {'repeated' if repeated else 'uniform'}"
    # torch rounds after each addition
    tolerance = 0.0 if dtype is torch.float32 else 3e-2
    yield Row(
        f"gather embedding {kind}",
        lambda: registry["embedding"](i.array, w.array),
        lambda: torch.nn.functional.embedding(ids, weight),
        2 * g.nbytes,
        (MOVES,),
    )
    yield Row(
        f"gather index_select {kind}",
        lambda: w.index_select(0, i),
        lambda: weight.index_select(0, ids),
        2 * g.nbytes,
        (MOVES,),
    )
    yield Row(
        f"scatter embedding_backward {kind}",
        lambda: registry["embedding_backward"](v.array, i.array, rows=ROWS),
        lambda: torch.ops.aten.embedding_dense_backward(g, ids, ROWS, -1, False),
        g.nbytes + weight.nbytes,
        (ADDS,),
        tolerance=tolerance,
        calls=4,
    )
    zeros, others = shared(torch.zeros_like(weight)), torch.zeros_like(weight)
    yield Row(
        f"scatter index_add_ {kind}",
        lambda: zeros.index_add_(0, i, v),
        lambda: others.index_add_(0, ids, g),
        3 * g.nbytes,
        (ADDS, RANKS),
        tolerance=tolerance,
    )


def selecting(share: float) -> Row:
    """Boolean selection, with its synchronisation for the count."""
    x, mask = torch.randn(1 << 26, device="cuda"), torch.rand(1 << 26, device="cuda") < share
    a, m = shared(x), shared(mask)
    least = x.numel() + 8 * int(mask.sum())
    return Row(
        f"select {share:.0%} of 64M", lambda: a.masked_select(m), lambda: x.masked_select(mask), least, wall=True
    )


def sorting(x: torch.Tensor) -> Row:
    """A stable sort along the last dimension: indices, which are the same in both."""
    a = shared(x)
    return Row(
        f"sort {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}",
        lambda: registry["sort"](a.array, axis=x.ndim - 1)[1],
        lambda: torch.sort(x, stable=True)[1],
        2 * x.nbytes + 8 * x.numel(),
        calls=4,
    )


def best(x: torch.Tensor, k: int) -> Row:
    """The k largest of each line."""
    a = shared(x)
    return Row(
        f"topk {k} of {tuple(x.shape)}",
        lambda: registry["topk"](a.array, k=k, axis=1)[0],
        lambda: torch.topk(x, k)[0],
        x.nbytes,
    )


def transposing(dtype: torch.dtype) -> Row:
    """A transposed copy."""
    x = torch.randn((16384, 4096), device="cuda").to(dtype)
    a = shared(x.t())

    def ours() -> Any:
        out = empty(a.array.shape, a.array.dtype, a.array.device)
        assert transpose.transposed_copy(out, a.array)
        return out

    name = f"transpose 16384x4096 {str(dtype).removeprefix('torch.')}"
    return Row(name, ours, lambda: x.t().contiguous(), 2 * x.nbytes, (TRANSPOSES,))


def rows() -> Iterator[Row]:
    """All rows; inputs live as long as theirs."""
    for dtype in (torch.float32, torch.bfloat16):
        for repeated in (False, True):
            yield from moving(dtype, repeated)
    for share in (0.01, 0.5, 0.99):
        yield selecting(share)
    yield sorting(torch.randint(0, ROWS, (IDS,), device="cuda"))
    for shape in ((4096, 512), (512, 2048), (1 << 22,)):
        yield sorting(torch.randn(shape, device="cuda"))
    yield best(torch.randn((8, ROWS), device="cuda"), 50)
    for dtype in (torch.bfloat16, torch.float32):
        yield transposing(dtype)


def forget() -> None:
    """Forget plans and cached launches."""
    backend._calls.clear()
    backend._into.clear()


def check(row: Row) -> None:
    """Results agree with torch's."""
    found = row.ours()
    ours = as_torch(found if isinstance(found, TensorBase) else TensorBase.wrap(found))
    expected = row.theirs().to(ours.dtype)
    error = (ours - expected).double().norm() / expected.double().norm().clamp(min=1e-30)
    if not error <= row.tolerance:
        raise SystemExit(f"{row.name}: the results differ by {error:.2e}")


def measure(row: Row) -> tuple[float, float]:
    """Microseconds (Genesis, torch)."""
    if row.wall:
        return wall_us(row.ours, backend.driver.synchronize), wall_us(row.theirs, torch.cuda.synchronize)
    return gpu_us(row.ours, row.calls), torch_gpu_us(row.theirs, row.calls)


def sweep(row: Row) -> None:
    """The best tiles, one function after the other, keeping the best of the earlier ones."""
    for each in row.sweeps:
        plain, times = getattr(each.module, each.name), {}
        for tile in each.candidates:
            setattr(each.module, each.name, lambda *args, tile=tile: tile)
            forget()
            try:
                times[tile] = gpu_us(row.ours, row.calls)
            except Exception as error:  # a tile may need too much shared memory or too many registers
                print(f"  {each.name} {tile}: {type(error).__name__}")
        setattr(each.module, each.name, plain)
        forget()
        first = sorted(times, key=times.__getitem__)[:5]
        shown = "  ".join(f"{t} {times[t]:.1f}" for t in first)
        print(f"  {row.name}: {each.name}: {shown}  (default {gpu_us(row.ours, row.calls):.1f} us)", flush=True)


def main() -> None:
    """Measure and print the table."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--only", default="", help="rows whose name has this in it")
    arguments.add_argument("--sweep", action="store_true")
    given = arguments.parse_args()
    lines = []
    for row in rows():
        if given.only not in row.name:
            continue
        check(row)
        if given.sweep and row.sweeps:
            sweep(row)
        ours, theirs = measure(row)
        lines.append(f"{row.name:44s} {ours:9.1f} {theirs:9.1f} {theirs / ours:6.2f} {row.nbytes / ours / 1e6:7.2f}")
        print(lines[-1], flush=True)
        gc.collect()
    print(f"\n{'row':44s} {'us':>9s} {'torch us':>9s} {'ratio':>6s} {'TB/s':>7s}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
