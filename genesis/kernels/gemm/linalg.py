"""Kernels of matrix products, and `matmul_into`, with which other Kernels multiply and finish in the same kernel.

The kernels are those of `products.py`, and of `specialized.py` and `crosswise.py` where these are faster. Operands are
read in the order in which they lie in memory; a layout is copied first only where float32 is read better from another
one. Where whole rounds over the SMs leave tiles over, these are split along k.

Letters: the product is [m, k] x [k, n].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.precision import allow_tf32
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.dtypes import DType, bfloat16, float8_e4m3fn, float32, float64, int64
from genesis.kernels.gemm.gemm import (
    ACCUMULATE,
    ALPHA,
    ALPHA_THERE,
    BIAS_M,
    BIAS_N,
    FACTOR_M,
    FACTOR_N,
    GELU_TANH,
    RELU,
    RESIDUAL,
    SCALED,
    SCALED_M,
    SCALED_N,
    SILU,
    add_parts,
    by_descriptors,
    by_pointers,
    by_terms,
)
from genesis.kernels.gemm.tf32_rs import crosswise_into
from genesis.kernels.gemm.tiles import IMPRECISE, Cut, Tile, beside, choose, cut, pieces
from genesis.kernels.gemm.transpose import LEAST, gains, transposed_copy
from genesis.kernels.gemm.warp_specialized import product_and_residual_into, scaled_product_into
from genesis.kernels.strides import collapse, is_wide
from genesis.kernels.types import TRITON, work_type
from genesis.ops.elementwise import add, cast, copy
from genesis.ops.shape import contiguous
from genesis.shapes import Shape, broadcast_shapes, broadcast_strides

__all__ = ["Scales", "matmul_into"]

FLOAT32 = "ieee"  # how float32 is multiplied without tf32


# --- The product as the kernels take it -------------------------------------------------------------------------------


class Factor(NamedTuple):
    """An operand as matrices: strides along the batch dimensions, its rows and its columns."""

    array: Array
    batch: Shape
    row: int
    column: int

    @property
    def turned(self) -> Factor:
        return self._replace(row=self.column, column=self.row)


class Product(NamedTuple):
    """o = a·b: [m, k] x [k, n] for each index of the merged batch dimensions."""

    batches: Shape
    m: int
    n: int
    k: int
    a: Factor
    b: Factor
    o: Factor

    @property
    def swapped(self) -> Product:
        """oᵀ = bᵀ·aᵀ."""
        return Product(self.batches, self.n, self.m, self.k, self.b.turned, self.a.turned, self.o.turned)

    @property
    def matrices(self) -> int:
        count = 1
        for size in self.batches:
            count *= size
        return count


class Scales(NamedTuple):
    """Factors of a product of quantised operands: float32 `[m]`, or `[m + n]` where those of the columns follow."""

    array: Array
    of_columns: bool


class Finish(NamedTuple):
    """What happens to the sum: see `matmul_into`. `bias` goes along "n", or along "m" in a swapped product; `factors`,
    of which there are none beside a bias, the other way. A product with `scales` is not swapped.
    """

    bias: Array | None
    activation: str | None
    residual: Array | None
    accumulate: bool
    alpha: float | Array
    factors: Array | None = None
    scales: Scales | None = None
    along: str = "n"

    @property
    def flags(self) -> int:
        """EPILOGUE of the kernels."""
        found = {None: 0, "relu": RELU.value, "gelu_tanh": GELU_TANH.value, "silu": SILU.value}[self.activation]
        if self.bias is not None:
            found |= BIAS_N.value if self.along == "n" else BIAS_M.value
        if self.factors is not None:
            found |= FACTOR_M.value if self.along == "n" else FACTOR_N.value
        found |= RESIDUAL.value * (self.residual is not None) | ACCUMULATE.value * self.accumulate
        if self.scales is not None:
            return int(found | SCALED_M.value | SCALED_N.value * self.scales.of_columns)
        if isinstance(self.alpha, Array):
            return int(found | ALPHA_THERE.value)
        return int(found | ALPHA.value * (self.alpha != 1.0))

    @property
    def reads(self) -> bool:
        """Whether it reads as much as it stores."""
        return self.accumulate or self.residual is not None

    @property
    def is_early(self) -> bool:
        """Whether a residual is all there is; it is fetched before the sum, and tiles are not taken in turn."""
        return self.flags & ~SCALED.value == RESIDUAL.value

    @property
    def values(self) -> tuple[Any, ...]:
        """p_bias, step, p_residual and alpha of the kernels."""
        alpha = self.alpha if self.scales is None else self.scales.array
        alpha = alpha if isinstance(alpha, Array) else float(alpha)
        vector = self.bias if self.factors is None else self.factors
        return vector, vector.strides[0] if vector is not None else 1, self.residual, alpha

    @property
    def swapped(self) -> Finish:
        return self._replace(along="m" if self.along == "n" else "n")


def _product(out: Array, x: Array, y: Array, turned: bool) -> Product:
    """Vectors as matrices, batches broadcast and merged; one product over all rows where y has no batch of its own."""
    if turned:
        y_shape, y_strides = (*y.shape[:-2], y.shape[-1], y.shape[-2]), (*y.strides[:-2], y.strides[-1], y.strides[-2])
    else:
        y_shape, y_strides = y.shape, y.strides
    batch = broadcast_shapes(x.shape[:-2], y_shape[:-2])
    m, n, k = (x.shape[-2] if x.ndim > 1 else 1), (y_shape[-1] if y.ndim > 1 else 1), x.shape[-1]
    ba = broadcast_strides(x.shape[:-2], x.strides[:-2], batch)
    bb = broadcast_strides(y_shape[:-2], y_strides[:-2], batch)
    bo, tail = out.strides[: len(batch)], list(out.strides[len(batch) :])
    row_x, row_o = (x.strides[-2], tail.pop(0)) if x.ndim > 1 else (0, 0)
    column_y, column_o = (y_strides[-1], tail.pop(0)) if y.ndim > 1 else (0, 0)
    row_y = y_strides[-2] if y.ndim > 1 else y_strides[0]
    if not any(bb):
        sizes, merged_x, merged_o = collapse((*batch, m), (*ba, row_x), (*bo, row_o))
        if len(sizes) == 1:
            batch, ba, bb, bo = (), (), (), ()
            (m,), (row_x,), (row_o,) = sizes, merged_x, merged_o
    batch, ba, bb, bo = collapse(batch, ba, bb, bo)
    if batch == (1,):  # a stride of 0 is a constant, which leaves the tiles' alignment known
        ba = bb = bo = (0,)
    a, b = Factor(x, ba, row_x, x.strides[-1]), Factor(y, bb, row_y, column_y)
    return Product(batch, m, n, k, a, b, Factor(out, bo, row_o, column_o))


class Region(NamedTuple):
    """A factor as TMA sees it: whether it is turned (its rows the inner dimension), the region's shape and
    strides, and for each batch dimension 1 where the factor moves along, 0 where it repeats.
    """

    turned: bool
    shape: Shape
    strides: Shape
    spread: Shape

    def descriptor(self, array: Array, rows: int, columns: int, tf32: bool = False) -> Descriptor:
        """Tiles of [rows, columns]."""
        block = (columns, rows) if self.turned else (rows, columns)
        return Descriptor(array, self.shape, self.strides, (*(1,) * len(self.spread), *block), tf32)


def _region(f: Factor, batches: Shape, rows: int, columns: int) -> Region | None:
    """The region of a factor, or None where TMA cannot address it."""
    spread = tuple(int(stride != 0 and size > 1) for stride, size in zip(f.batch, batches, strict=True))
    if len(spread) > 2:
        return None
    for turned in (False, True):
        inner, right, outer, down = (rows, f.row, columns, f.column) if turned else (columns, f.column, rows, f.row)
        if right != 1 and inner > 1:
            continue
        grain = 16 // f.array.dtype.itemsize
        down = down if outer > 1 else -(-inner // grain) * grain  # a single row may have any stride
        shape, strides = (outer, inner), (down, 1)
        if any(spread):
            sizes = tuple(size if moves else 1 for size, moves in zip(batches, spread, strict=True))
            steps = tuple(stride if moves else down * outer for stride, moves in zip(f.batch, spread, strict=True))
            shape, strides = (*sizes, *shape), (*steps, *strides)
        if is_describable(f.array, shape, strides):
            return Region(turned, shape, strides, spread if any(spread) else ())
    return None


# --- Launching --------------------------------------------------------------------------------------------------------


def matmul_into(
    out: Array, a: Array, b: Array, *, turned: bool = False, bias: Array | None = None, activation: str | None = None,
    residual: Array | None = None, accumulate: bool = False, alpha: float | Array = 1.0, factors: Array | None = None,
    scales: Scales | None = None, tile: Tile | None = None,
) -> None:  # fmt: skip
    """out = activation(alpha·diag(factors)·a·b + bias) + residual, plus what out held where `accumulate` is set.

    Everything after the sum is computed in float32 (float64 for float64, the integers' own type for integers) and
    rounded once; a residual of 2-byte operands may be added to a product that was rounded before, where that is faster.

    Args:
        out: `[..., m, n]`, contiguous, of any float dtype where the operands are floats.
        a, b: `[..., m, k]` and `[..., k, n]` of one dtype and any strides; batch dimensions broadcast. A vector is a
            row on the left and a column on the right, and its dimension is missing in out.
        turned: b is `[..., n, k]`, as weights are.
        bias: `[n]`, with any stride.
        activation: "relu", "gelu_tanh" or "silu".
        residual: of out's shape, contiguous.
        alpha: a number, or an array of one element in the type of the sums.
        factors: `[m]`, of a single product without a bias, with any stride.
        scales: of quantised operands of a single product: in the place of alpha.
        tile: in the place of the table's choice, to measure it.
    """
    assert residual is None or (residual.shape == out.shape and residual.is_contiguous)
    if out.size == 0:
        return
    product = _product(out, a, b, turned)
    assert factors is None or (bias is None and out.ndim == 2)  # both arrive in one parameter of the kernels
    assert scales is None or (out.ndim == 2 and isinstance(alpha, float) and alpha == 1)  # they arrive in alpha's place
    finish = Finish(bias, activation, residual, accumulate, alpha, factors, scales)
    if tile is None and (_launch_specialized(product, finish) or _launch_crosswise(product, finish)):
        return
    if not a.dtype.is_floating_point or a.dtype is float64:  # Triton 3.6 has no dot of float64
        _launch_terms(product, finish)
    elif not _launch_descriptors(product, finish, tile):
        _launch_pointers(product, finish, tile)


def _kind(dtype: DType, k: int) -> str:
    """The row of the tile table."""
    if dtype is float8_e4m3fn:
        return "fp8" if k <= IMPRECISE else "fp8_long"
    if dtype.itemsize == 2:
        return "half"
    return "tf32" if dtype is float32 and allow_tf32 else dtype.name


def _dot_type(dtype: DType) -> Any:
    """The type in which tiles are multiplied; the interpreter multiplies neither bfloat16 nor 8-bit floats."""
    return TRITON[(float32 if is_interpreted() and dtype in (bfloat16, float8_e4m3fn) else dtype).name]


def _launch_specialized(p: Product, finish: Finish) -> bool:
    """Multiply with weights as they lie, and finish in warps of their own; False where these have no such finish."""
    is_scaled = finish.scales is not None and finish.flags & ~SCALED.value == 0
    if not (finish.is_early or is_scaled) or p.matrices != 1 or p.a.column != 1 or p.b.row != 1 or p.o.column != 1:
        return False
    x = p.a.array.view((p.m, p.k), (p.a.row, 1), p.a.array.offset)
    weight = p.b.array.view((p.n, p.k), (p.b.column, 1), p.b.array.offset)
    if is_scaled:
        out = p.o.array.view((p.m, p.n), (p.n, 1), p.o.array.offset)
        return p.o.row == p.n and scaled_product_into(out, x, weight, *finish.scales)
    if finish.scales is not None and not finish.scales.of_columns:
        return False
    out, residual = (y.view((p.m, p.n), (p.n, 1), y.offset) for y in (p.o.array, finish.residual))
    return product_and_residual_into(out, x, weight, residual, finish.scales and finish.scales.array)


def _launch_crosswise(p: Product, finish: Finish) -> bool:
    """Multiply in tf32 with the second factor as it lies; False where that is not it."""
    if not (p.a.array.dtype is p.o.array.dtype is float32 and allow_tf32) or finish.flags or p.matrices != 1:
        return False
    if p.a.column != 1 or p.b.column != 1 or p.o.column != 1 or p.k == 0:
        return False
    x, y, out = (
        f.array.view((rows, columns), (f.row, 1), f.array.offset)
        for f, rows, columns in ((p.a, p.m, p.k), (p.b, p.k, p.n), (p.o, p.m, p.n))
    )
    return crosswise_into(out, x, y)


def _launch_descriptors(p: Product, finish: Finish, tile: Tile | None) -> bool:
    """Multiply with TMA; False where the device has none or it cannot address the operands."""
    dtype, properties = p.a.array.dtype, backend_of(p.o.array.device).driver.properties
    kind = _kind(dtype, p.k)
    if properties.capability < (9, 0) or kind not in ("half", "tf32", "fp8", "fp8_long") or p.k == 0:
        return False
    a, b = _region(p.a, p.batches, p.m, p.k), _region(p.b, p.batches, p.k, p.n)
    if a is None or b is None:
        return False
    layout = "nt"[a.turned] + "nt"[b.turned]
    tile = tile or choose(
        kind, layout, p.m, p.n, p.k, dtype.itemsize, properties.shared_memory, finish.reads, p.o.array.dtype.itemsize
    )
    if finish.is_early and not tile.once and kind == "half":  # a pass of its own is faster than a large tile's epilogue
        _launch_descriptors(p, finish._replace(residual=None), tile)
        assert finish.residual is not None
        add(p.o.array, finish.residual, out=p.o.array)
        return True
    if tile.swapped:
        assert finish.scales is None  # which stand in the order of the product
        p, finish = p.swapped, finish.swapped
        a, b = b._replace(turned=not b.turned), a._replace(turned=not a.turned)
    if tile.copied and min(p.m, p.n, p.k) >= LEAST and p.k % (16 // dtype.itemsize) == 0:
        if not b.turned:
            p = p._replace(b=_copied(p.b.turned, p.batches, p.n, p.k).turned)
        if a.turned and tile.copied > 1:
            p = p._replace(a=_copied(p.a, p.batches, p.m, p.k))
        a, b = _region(p.a, p.batches, p.m, p.k), _region(p.b, p.batches, p.k, p.n)
        assert a is not None and b is not None
    _launch_persistent(p, finish, tile, a, b, properties.sm_count)
    return True


def _copied(f: Factor, batches: Shape, rows: int, columns: int) -> Factor:
    """A copy with its columns innermost in memory, of a factor that has its rows there."""
    shape = (*(size if step else 1 for size, step in zip(batches, f.batch, strict=True)), rows, columns)
    copy = empty(shape, f.array.dtype, f.array.device)
    done = transposed_copy(copy, f.array.view(shape, (*f.batch, f.row, f.column)))
    assert done, (shape, f)
    batch = tuple(own if step else 0 for step, own in zip(f.batch, copy.strides[:-2], strict=True))
    return Factor(copy, batch, columns, 1)


def _launch_persistent(p: Product, finish: Finish, t: Tile, a: Region, b: Region, sm_count: int) -> None:
    """Launch `by_descriptors`, and `add_parts` where tiles are split along k."""
    out, dtype, tf32 = p.o.array, p.a.array.dtype, p.a.array.dtype is float32
    tiles, programs = p.matrices * triton.cdiv(p.m, t.bm) * triton.cdiv(p.n, t.bn), sm_count * t.resident
    c = cut(tiles, triton.cdiv(p.k, t.bk), programs, t.split)
    partial = empty((c.rest * c.split * t.bm * t.bn,), float32, out.device) if c.split > 1 else None
    o = _region(p.o._replace(batch=p.o.batch[-1:]), (p.matrices,), p.m, p.n) if c.whole else None
    if o is not None and o.shape[-1] * out.dtype.itemsize % 16:  # the engine wrote past the end of such rows
        o = None
    once = t.once and c.whole == tiles and (tiles <= programs or finish.is_early)
    columns = t.bn // pieces(t, out.dtype.itemsize, finish.reads and not once)
    grid = tiles if once else min(programs, c.whole + c.rest * c.split)
    so = (p.o.batch[-1], p.o.row, p.o.column)
    store = {"EPILOGUE": finish.flags, "WIDE": is_wide((p.matrices, p.m, p.n), so)}
    size = {"BM": t.bm, "BN": t.bn, "GROUP": t.group, "MATRICES": _matrices(p, tiles)}
    launch(
        by_descriptors, grid, a.descriptor(p.a.array, t.bm, t.bk, tf32),
        b.descriptor(p.b.array, t.bk, t.bn, tf32), o and o.descriptor(out, t.bm, columns), out, partial,
        *finish.values, p.m, p.n, p.k, p.batches, so, *c, A_TURNED=a.turned, B_TURNED=b.turned, A_SPREAD=a.spread,
        B_SPREAD=b.spread, TYPE=_dot_type(dtype), PRECISION="tf32" if tf32 else "ieee",
        MOVED=tf32 and a.turned and not is_interpreted(), BATCHED=bool(o and o.spread), BK=t.bk, SPLIT=c.split > 1,
        IMPRECISE=t.bk if _kind(dtype, p.k) == "fp8_long" else None,
        STORE="pointers" if o is None else ("columns" if o.turned else "rows"), PIECES=t.bn // columns,
        ONCE=once, num_warps=t.warps, num_stages=t.stages, **store, **size,
    )  # fmt: skip
    if partial is not None:
        _launch_add(p, finish, t, c, partial, {**store, **size})


def _lying_along_n(p: Product, finish: Finish) -> tuple[Product, Finish]:
    """The same product, its right factor with n innermost in memory where that gains more than it costs: see `gains`.

    A left factor with k outermost becomes the right one as it lies; otherwise one of the two is turned over in memory,
    the smaller one if it can be. In a tile of 64 x 64 x 16, shared memory is then read in 768 cycles beside 512 of
    sums, where it took 2560.
    """
    if p.b.row != 1 or p.b.column == 1 or finish.scales is not None:
        return p, finish
    ways = [(p, finish), (p.swapped, finish.swapped)]
    if p.a.row == 1:
        return ways[1]
    for way, its_finish in sorted(ways, key=lambda way: _elements(way[0])):
        if _pays(way):
            return way._replace(b=_copied(way.b, way.batches, way.k, way.n)), its_finish
    return p, finish


def _pays(p: Product) -> bool:
    """Whether the right factor has k innermost, and the product gains more than it costs to turn that over."""
    return (
        p.b.row == 1
        and min((*p.b.batch, p.b.column)) >= 0
        and min(p.k, p.n) >= LEAST
        and gains(_elements(p), p.matrices * p.m * p.n * p.k)
    )


def _elements(p: Product) -> int:
    """How many the right factor has, each of its matrices counted once."""
    count = p.k * p.n
    for size, step in zip(p.batches, p.b.batch, strict=True):
        count *= size if step else 1
    return count


def _launch_pointers(p: Product, finish: Finish, tile: Tile | None) -> None:
    dtype, properties = p.a.array.dtype, backend_of(p.o.array.device).driver.properties
    kind = dtype.name if dtype.itemsize > 2 and not (dtype is float32 and allow_tf32) else "pointers"
    if kind == "float32":
        p, finish = _lying_along_n(p, finish)
    t = tile or choose(kind, "nn", p.m, p.n, p.k, dtype.itemsize, properties.shared_memory)
    sa, sb, so = (p.a.row, p.a.column), (p.b.row, p.b.column), (p.o.batch[-1], p.o.row, p.o.column)
    tiles = p.matrices * triton.cdiv(p.m, t.bm) * triton.cdiv(p.n, t.bn)
    c = beside(tiles, triton.cdiv(p.k, t.bk), properties.sm_count, t) if kind == "float32" else Cut(tiles, 0, 1, 0)
    partial = empty((tiles * c.split * t.bm * t.bn,), float32, p.o.array.device) if c.split > 1 else None
    size = {"BM": t.bm, "BN": t.bn, "GROUP": t.group, "MATRICES": _matrices(p, tiles)}
    launch(
        by_pointers, tiles * c.split, p.o.array, p.a.array, p.b.array, partial, *finish.values, p.m, p.n, p.k,
        p.batches, p.a.batch, p.b.batch, sa, sb, so, c.split, c.share, DIMS=len(p.batches), TYPE=_dot_type(dtype),
        WORK=TRITON[work_type(dtype).name], PRECISION="tf32" if dtype is float32 and allow_tf32 else FLOAT32,
        EPILOGUE=finish.flags, WIDE=_is_wide(p, so), EVEN=p.k % t.bk == 0, BK=t.bk, SPLIT=c.split > 1,
        num_warps=t.warps, num_stages=t.stages, **size,
    )  # fmt: skip
    if partial is not None:
        _launch_add(p, finish, t, c, partial, {"EPILOGUE": finish.flags, "WIDE": _is_wide(p, so), **size})


def _launch_add(p: Product, finish: Finish, t: Tile, c: Cut, partial: Array, constants: dict[str, Any]) -> None:
    """Launch `add_parts`."""
    rows, so = max(1, min(t.bm, 2048 // t.bn)), (p.o.batch[-1], p.o.row, p.o.column)
    launch(
        add_parts, c.rest * (t.bm // rows), p.o.array, partial, *finish.values, p.m, p.n, so, c.whole, c.split,
        ROWS=rows, **constants,
    )  # fmt: skip


def _launch_terms(p: Product, finish: Finish) -> None:
    dtype = p.a.array.dtype
    sa, sb, so = (p.a.row, p.a.column), (p.b.row, p.b.column), (p.o.batch[-1], p.o.row, p.o.column)
    tiles = p.matrices * triton.cdiv(p.m, 32) * triton.cdiv(p.n, 64)
    launch(
        by_terms, tiles, p.o.array, p.a.array, p.b.array,
        *finish.values, p.m, p.n, p.k, p.batches, p.a.batch, p.b.batch, sa, sb, so, DIMS=len(p.batches),
        WORK=TRITON[dtype.name] if dtype in (float64, int64) else tl.int32, EPILOGUE=finish.flags,
        WIDE=_is_wide(p, so), BM=32, BN=64, MATRICES=_matrices(p, tiles),
    )  # fmt: skip


def _matrices(p: Product, tiles: int) -> str:
    """MATRICES of `place`."""
    if tiles >= 1 << 21:
        return "many"
    return "one" if p.matrices == 1 else "few"


def _is_wide(p: Product, so: Shape) -> bool:
    """Whether an offset of any operand passes 2^31."""
    return (
        is_wide((*p.batches, p.m, p.k), (*p.a.batch, p.a.row, p.a.column))
        or is_wide((*p.batches, p.k, p.n), (*p.b.batch, p.b.row, p.b.column))
        or is_wide((p.matrices, p.m, p.n), so)
    )


# --- The CUDA implementations -----------------------------------------------------------------------------------------


@cuda_impl("matmul")
def matmul(out: Array, x: Array, y: Array) -> None:
    """y = x @ y."""
    matmul_into(out, x, y)


@cuda_impl("mixed_matmul")
def mixed_matmul(out: Array, x: Array, y: Array, dtype: DType, alpha: float = 1.0) -> None:
    """alpha·x @ y, summed in float32 and rounded once."""
    narrow = min(x.dtype, y.dtype, key=lambda t: t.itemsize)
    a, b = (f if f.dtype is narrow else cast(f, dtype=narrow) for f in (x, y))
    matmul_into(out, a, b, alpha=alpha)


@cuda_impl("matmul_add")
def matmul_add(out: Array, x: Array, y: Array, addend: Array) -> None:
    """x @ y + addend."""
    matmul_into(out, x, y, residual=contiguous(addend))


@cuda_impl("add_matmul")
def add_matmul(out: tuple[()], target: Array, x: Array, y: Array) -> None:
    """target += x @ y."""
    whole = contiguous(target)
    matmul_into(whole, x, y, accumulate=True)
    if whole is not target:
        copy(whole, out=target)
