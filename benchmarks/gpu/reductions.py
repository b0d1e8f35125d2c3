"""Tile sizes of reductions, softmax and norms: measures candidates for each row, then compares with torch.

    python -m benchmarks.gpu.reductions [--sweep] [--only sum softmax …] [--shape 4,512,896]

With --sweep every candidate of a row is timed (each is checked against the default's result first) and the best are
listed; without it only what the planner chooses. The table at the end has one line a row: the planner's time, the best
candidate's, torch's, the bytes a second, and torch / Genesis (above 1, Genesis is faster). Times are medians over
replays of a graph. Small inputs stay in the L2, for both.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.ops import recorded
from benchmarks.gpu.timing import backend, gpu_us, shared_array, torch_gpu_us
from genesis.kernels.norm import norm
from genesis.kernels.reduce import reduce, softmax
from genesis.kernels.reduce.min_max import column_min_max, row_min_max
from genesis.kernels.reduce.plan import (
    LineTiles,
    NormTiles,
    Tiles,
    column_tiles,
    line_tiles,
    norm_tiles,
    reduction_layout,
    reduction_tiles,
    row_tiles,
)
from genesis.kernels.reduce.reduction import reduce_into

SHAPES = ((4, 512, 896), (16, 2048, 4864))
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Row(NamedTuple):
    """One comparison.

    Attributes:
        run: launches the op with a given cut.
        results: what `run` writes; checked by bytes' worth of closeness against the default's.
        default: the planner's cut.
        candidates: other cuts.
        theirs: torch's call.
    """

    name: str
    run: Callable[[Any], None]
    results: list[torch.Tensor]
    default: Any
    candidates: list[Any]
    theirs: Callable[[], Any]
    nbytes: int
    calls: int


def reduction_candidates(default: Tiles, elements: int, programs: int) -> list[Tiles]:
    """Tile sizes around the default: other blocks, splits and warps."""
    found = []
    for block_k in {max(1, default.block_k // 4), max(1, default.block_k // 2), default.block_k, default.block_k * 2}:
        for block_r in {
            max(8, default.block_r // 4),
            default.block_r // 2,
            default.block_r,
            default.block_r * 2,
            default.block_r * 4,
        }:
            if not 512 <= block_k * block_r <= 32768:
                continue
            chunks = -(-elements // block_r)
            tiles_k = -(-programs * default.block_k // block_k)
            for target in (1, 132, 264, 528, 1056, 2112):
                splits = min(max(1, target // tiles_k), chunks)
                span = -(-chunks // splits) * block_r
                for warps in (4, 8, 16):
                    if 4 <= block_k * block_r // (32 * warps) <= 64:
                        found.append(Tiles(block_k, block_r, -(-elements // span), span, warps))
    return sorted(set(found))


def reduction_rows(shapes: tuple[tuple[int, ...], ...]) -> Iterator[Row]:
    """Sums, maxima, and maxima with indices."""
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            p = torch.randn(shape, device="cuda", dtype=dtype)
            for axes in (None, -1, (0, 1), 1):
                for kind in ("sum", "max"):
                    yield _reduction_row(kind, p, axes)


def _reduction_row(kind: str, p: torch.Tensor, axes: Any) -> Row:
    x, reduced = shared_array(p), tuple(range(3)) if axes is None else axes if isinstance(axes, tuple) else (axes % 3,)
    placed = kind == "max" and isinstance(axes, int)
    layout = reduction_layout(x.shape, x.strides, reduced, ordered=placed)
    shape = tuple(s for i, s in enumerate(p.shape) if i not in reduced)
    values, places = (
        torch.empty(shape, device="cuda", dtype=p.dtype),
        torch.empty(shape, device="cuda", dtype=torch.long),
    )
    work = reduce._compare_type(x.dtype)
    if placed:
        spec = reduce._with_identity(True, work, reduce.ARGMAX)
    elif kind == "max":
        spec = reduce._with_identity(
            True, work, reduce.ReduceSpec(reduce.init_value, reduce.step_max, reduce.maximum, reduce.finish_first, 0)
        )
    else:
        spec = reduce.ADD
    out, indices = shared_array(values), shared_array(places) if placed else None

    def theirs() -> Any:
        if placed:
            return torch.max(p, axes)
        if kind == "max":
            return torch.amax(p, reduced) if axes is not None else torch.max(p)
        return torch.sum(p, reduced) if axes is not None else torch.sum(p)

    whole = row_tiles(layout, p.element_size()) if placed else None
    columns = column_tiles(layout, p.element_size()) if placed else None
    default = whole or columns or reduction_tiles(layout, p.element_size(), spec.states)

    def run(cut: Tiles) -> None:
        if indices is not None and whole is not None:
            row_min_max(reduce.maximum, spec.identity, out, indices, x, layout, cut)
        elif indices is not None and columns is not None:
            column_min_max(spec, reduce.maximum, out, indices, x, layout, cut)
        else:
            reduce_into(spec, out, x, layout, work, indices=indices, cut=cut)

    candidates = reduction_candidates(default, layout.elements, -(-layout.results // default.block_k))
    if columns is not None:
        candidates = [c for c in candidates if c.splits == 1]
    return Row(
        f"{kind} {axes} {tuple(p.shape)} {SHORT[p.dtype]}",
        run,
        [values, places] if placed else [values],
        default,
        candidates if whole is None else [whole._replace(warps=w) for w in (2, 4, 8, 16)],
        theirs,
        p.numel() * p.element_size(),
        20,
    )


def softmax_rows() -> Iterator[Row]:
    """Rows of 16K and of a vocabulary."""
    cases = (((16384, 16384), torch.float32), ((8192, 151936), torch.bfloat16), ((8192, 151936), torch.float32))
    for shape, dtype in cases:
        p = torch.randn(shape, device="cuda", dtype=dtype)
        y = torch.empty_like(p)
        x, out = shared_array(p), shared_array(y)
        whole = 1 << (shape[1] - 1).bit_length()
        found = [LineTiles(1, f, u, False, True, w) for f in (1024, 2048, 4096) for u in (2, 4, 8) for w in (4, 8, 16)]
        found = [c for c in found if 8 <= c.block_r * c.unroll // (32 * c.warps) <= 64]
        if whole <= 32768:
            found += [LineTiles(1, whole, 1, True, True, w) for w in (8, 16, 32)]
        yield Row(
            f"softmax {shape} {SHORT[dtype]}",
            lambda cut, out=out, x=x: softmax._softmax(out, x, -1, False, cut),
            [y],
            line_tiles(shape[0], shape[1], p.element_size(), True),
            found,
            lambda p=p: torch.softmax(p, -1),
            2 * p.numel() * p.element_size(),
            4,
        )


def norm_rows() -> Iterator[Row]:
    """RMSNorm forward and backward."""
    for shape in ((16384, 4096), (8192, 896)):
        p, g = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        w = torch.rand(shape[1], device="cuda", dtype=torch.bfloat16)
        y, r = torch.empty_like(p), torch.empty(shape[0], device="cuda")
        d, dw = torch.empty_like(p), torch.empty_like(w)
        x, weight, rstd = shared_array(p), shared_array(w), shared_array(r)
        whole = 1 << (shape[1] - 1).bit_length()
        size = p.numel() * p.element_size()

        out, grad, outs = shared_array(y), shared_array(g), (shared_array(d), shared_array(dw))

        def forward(cut: Any, x: Any = x, weight: Any = weight, rstd: Any = rstd, out: Any = out) -> None:
            norm._forward(out, None, rstd, x, weight, None, 1e-6, cut)

        def backward(
            cut: Any, x: Any = x, weight: Any = weight, rstd: Any = rstd, grad: Any = grad, outs: Any = outs
        ) -> None:  # fmt: skip
            norm._backward(outs, grad, x, weight, None, rstd, None, cut)

        rows = [n for n in (1, 2, 4) if n * whole <= 8192]
        wide = [NormTiles(n, whole, True, 0, k) for n in rows for k in (2, 4, 8, 16)]
        yield Row(
            f"rms_norm {shape} bf16", forward, [y, r], norm_tiles(*shape, 2), wide,
            lambda p=p, w=w: torch.nn.functional.rms_norm(p, w.shape, w, 1e-6), 2 * size, 20,
        )  # fmt: skip
        deep = [c._replace(programs=n) for c in wide for n in (132, 264, 396, 528, 792, 1056)]
        q, v = p.clone().requires_grad_(), w.clone().requires_grad_()
        z = recorded(lambda q=q, v=v: torch.nn.functional.rms_norm(q, v.shape, v, 1e-6))
        yield Row(
            f"rms_norm_backward {shape} bf16", backward, [d, dw], norm_tiles(*shape, 2, backward=True), deep,
            lambda z=z, q=q, v=v, g=g: torch.autograd.grad(z, (q, v), g, retain_graph=True), 3 * size, 20,
        )  # fmt: skip


def timed(row: Row, cut: Any, expected: list[torch.Tensor] | None) -> float:
    """Microseconds with these tiles.

    Raises:
        RuntimeError: if its results are not those of the default.
    """
    for x in row.results:
        x.zero_()
    torch.cuda.synchronize()
    row.run(cut)
    backend.driver.synchronize()
    if expected is not None:
        for x, want in zip(row.results, expected, strict=True):
            error = float((x.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
            if not error < (1e-5 if x.dtype in (torch.float32, torch.long) else 1e-2):
                raise RuntimeError(f"{row.name}: {cut} gives other results, relative error {error:.2g}")
    return gpu_us(lambda: row.run(cut), row.calls)


def measure(row: Row, sweep: bool) -> str:
    """Time one row; its line of the table."""
    ours = timed(row, row.default, None)
    expected = [x.clone() for x in row.results]
    best, best_cut = ours, row.default
    if sweep:
        found = []
        for cut in row.candidates:  # kernels compile in parallel while the first ones run
            row.run(cut)
        backend.driver.synchronize()
        for cut in row.candidates:
            found.append((timed(row, cut, expected), cut))
        found.sort(key=lambda item: item[0])
        print(f"\n{row.name}: planner {ours:.2f} us with {row.default}")
        for time, cut in found[:6]:
            print(f"  {time:9.2f} us  {cut}")
        if found and found[0][0] < best:
            best, best_cut = found[0]
    theirs = torch_gpu_us(row.theirs, row.calls)
    note = "" if best_cut == row.default else f"  best {tuple(best_cut)}"
    rate = row.nbytes / ours / 1e6
    return f"{row.name:40s} {ours:9.2f} {best:9.2f} {theirs:9.2f} {rate:6.2f} {theirs / ours:6.2f}{note}"


def main() -> None:
    """Measure the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time every candidate")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose name starts with one of these")
    parser.add_argument("--shape", nargs="+", help="shapes of three dimensions for sum and max, such as 4,512,896")
    args = parser.parse_args()
    shapes = tuple(tuple(map(int, s.split(","))) for s in args.shape) if args.shape else SHAPES
    lines = []
    for rows in (reduction_rows(shapes), softmax_rows(), norm_rows()):
        for row in rows:
            if row.name.startswith(tuple(args.only)):
                lines.append(measure(row, args.sweep))
        gc.collect()
        torch.cuda.empty_cache()
    print(f"\n{'row':40s} {'us':>9s} {'best us':>9s} {'torch us':>9s} {'TB/s':>6s} {'ratio':>6s}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
