"""CUDA implementations of matmul, and `matmul_into`, which other implementations call for a GEMM with an epilogue.

Plain reference: genesis/ops/linalg.py: `matmul`, `mixed_matmul`, `matmul_add`, `add_matmul`.

The kernels are defined in gemm.py; warp_specialized.py, tf32_rs.py, thin.py and few_columns.py have faster kernels for
some GEMMs. Operands are read in place. An operand is copied first only if float32 needs another layout, or if TMA
cannot address it and the GEMM is large. Tiles left over after full rounds over the SMs are split along k.

The GEMM is [m, k] x [k, n] for each of several matrices.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend import mode
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.dispatch import allow_tf32, cuda_impl
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.dtypes import DType, bfloat16, float8_e4m3fn, float16, float32, float64, int64
from genesis.kernels.dependents import can_overlap
from genesis.kernels.elements import TRITON, collapse, needs_int64, work_type
from genesis.kernels.gemm import gemm
from genesis.kernels.gemm.few_columns import MAX_EXACT_COLUMNS, few_columns_tile, gemm_few_columns, is_for_few_columns
from genesis.kernels.gemm.gemm import gemm_pointers, gemm_rank1, gemm_reduce_splits, gemm_tma
from genesis.kernels.gemm.tf32_rs import gemm_tf32_rs_into
from genesis.kernels.gemm.thin import thin_products_into
from genesis.kernels.gemm.tiles import (
    MAX_IMPRECISE,
    GemmTile,
    Problem,
    Schedule,
    choose,
    epilogue_slices,
    schedule_of,
    unaligned_tile,
)
from genesis.kernels.gemm.warp_specialized import can_add_residual, ws_residual_into, ws_scaled_into
from genesis.ops.elementwise import add, cast, copy
from genesis.ops.shape import contiguous
from genesis.shapes import Shape, broadcast_shapes, broadcast_strides

THIN, MIN_WIDTH, MIN_TERMS = 32, 512, 2048  # `_launch_thin`: largest number of rows, fewest columns and terms
MIN_SUM = 64  # the fewest terms for `_launch_few_columns`
PART_TILE, PARTS_IN_FLIGHT = 1024, 8192  # `gemm_reduce_splits`: elements of a program, and loads of parts at a time
FLOAT32 = "ieee"  # input_precision of float32 without tf32
MIN_EXTENT = 16  # the fewest elements along either axis for which copies of operands are profitable
MIN_MULTIPLY_ADDS = 1 << 22  # the fewest multiply-adds for which an operand is copied to another layout first
MIN_USES = 3  # uses of each element that save as much as an extra read and write costs
MIN_FLOPS = 1 << 25  # FLOPs for which TMA saves as much time as launching a copy takes
FLOPS_PER_BYTE = 36  # the same per byte copied: 60 TFLOP/s through pointers, 400 by TMA, copies at 2 TB/s (H100)


# --- The GEMM as the kernels take it ----------------------------------------------------------------------------------


class Operand(NamedTuple):
    """An operand, or out, as matrices, with strides along the batch dimensions, between rows and between columns."""

    array: Array
    batch: Shape
    row: int
    column: int

    @property
    def transposed(self) -> Operand:
        return self._replace(row=self.column, column=self.row)

    def matrix(self, rows: int, columns: int) -> Array:
        """Return the operand as a matrix. It has no batch dimensions."""
        return self.array.view((rows, columns), (self.row, self.column), self.array.offset)


class Limit(NamedTuple):
    """A limit of a size, "m", "n" or "k": one int32 in device memory."""

    size: str
    value: Array

    @property
    def swapped(self) -> Limit:
        return self._replace(size={"m": "n", "n": "m", "k": "k"}[self.size])


class Gemm(NamedTuple):
    """o = a·b: [m, k] x [k, n] for each index of the merged batch dimensions."""

    batches: Shape
    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    o: Operand
    limit: Limit | None = None

    @property
    def swapped(self) -> Gemm:
        """oᵀ = bᵀ·aᵀ."""
        operands = (each.transposed for each in (self.b, self.a, self.o))
        return Gemm(self.batches, self.n, self.m, self.k, *operands, self.limit and self.limit.swapped)

    @property
    def matrices(self) -> int:
        return math.prod(self.batches)

    @property
    def out_strides(self) -> Shape:
        """Strides of out by matrix, row and column."""
        return self.o.batch[-1], self.o.row, self.o.column


class Scales(NamedTuple):
    """Scales of quantized operands: float32 `[m]` for A's rows, or `[m + n]` for A's rows, then B's columns."""

    array: Array
    of_columns: bool


class Epilogue(NamedTuple):
    """The operations on the accumulator; see `matmul_into`. `bias` is along "n", or along "m" in a swapped GEMM, and
    `row_scale`, which excludes a bias, along the other axis. A GEMM with `scales` is never swapped.
    """

    bias: Array | None
    activation: str | None
    residual: Array | None
    accumulate: bool
    alpha: float | Array
    row_scale: Array | None = None
    scales: Scales | None = None
    rounds: bool = False
    from_zero: bool = False
    along: str = "n"

    @property
    def flags(self) -> int:
        """The kernels' EPILOGUE."""
        activations = {"relu": gemm.RELU, "gelu_tanh": gemm.GELU_TANH, "silu": gemm.SILU}
        bits = activations[self.activation].value if self.activation is not None else 0
        if self.bias is not None:
            bits |= gemm.BIAS_N.value if self.along == "n" else gemm.BIAS_M.value
        if self.row_scale is not None:
            bits |= gemm.SCALE_M.value if self.along == "n" else gemm.SCALE_N.value
        bits |= gemm.RESIDUAL.value * (self.residual is not None) | gemm.ACCUMULATE.value * self.accumulate
        bits |= gemm.ROUND.value * (self.rounds and self.residual is not None)
        if self.scales is not None:
            return int(bits | gemm.DEQUANT_M.value | gemm.DEQUANT_N.value * self.scales.of_columns)
        if isinstance(self.alpha, Array):
            return int(bits | gemm.ALPHA_POINTER.value)
        return int(bits | gemm.ALPHA.value * (self.alpha != 1.0))

    @property
    def launched(self) -> int:
        """EPILOGUE of a launch, which does not read an out that counts as 0."""
        return self.flags & ~(gemm.ACCUMULATE.value * self.from_zero)

    @property
    def reads(self) -> bool:
        """True if the epilogue reads as much as it stores."""
        return self.accumulate or self.residual is not None

    @property
    def is_early(self) -> bool:
        """True if the epilogue only adds a residual. Programs of one tile then load it before the main loop."""
        return self.flags & ~(gemm.DEQUANT.value | gemm.ROUND.value) == gemm.RESIDUAL.value

    @property
    def operands(self) -> tuple[Any, ...]:
        """The kernels' p_vector, vector_stride, p_residual and alpha."""
        alpha = self.alpha if self.scales is None else self.scales.array
        alpha = alpha if isinstance(alpha, Array) else float(alpha)
        vector = self.bias if self.row_scale is None else self.row_scale
        return vector, vector.strides[0] if vector is not None else 1, self.residual, alpha

    @property
    def swapped(self) -> Epilogue:
        return self._replace(along="m" if self.along == "n" else "n")


def _gemm_of(out: Array, x: Array, y: Array, transpose_b: bool) -> Gemm:
    """Return the GEMM of x·y. Vectors become matrices; batches are merged, with x's rows if y has no batches."""
    if transpose_b:
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
    # Without batches of y, merge x's batches with its rows if memory allows.
    if not any(bb):
        sizes, merged_x, merged_o = collapse((*batch, m), (*ba, row_x), (*bo, row_o))
        if len(sizes) == 1:
            batch, ba, bb, bo = (), (), (), ()
            (m,), (row_x,), (row_o,) = sizes, merged_x, merged_o
    batch, ba, bb, bo = collapse(batch, ba, bb, bo)
    if batch == (1,):  # a stride of 0 is a constant, which keeps the tiles' alignment known to the compiler
        ba = bb = bo = (0,)
    a, b = Operand(x, ba, row_x, x.strides[-1]), Operand(y, bb, row_y, column_y)
    return Gemm(batch, m, n, k, a, b, Operand(out, bo, row_o, column_o))


class TmaRegion(NamedTuple):
    """An operand as TMA addresses it."""

    transposed: bool  # whether elements along a column are contiguous, instead of elements along a row
    shape: Shape
    strides: Shape
    batch: Shape  # per batch dimension: 1 if the operand has a stride, 0 if it is broadcast

    def descriptor(self, array: Array, rows: int, columns: int, tf32: bool = False) -> Descriptor:
        """Return a descriptor of tiles [rows, columns]."""
        block = (columns, rows) if self.transposed else (rows, columns)
        return Descriptor(array, self.shape, self.strides, (*(1,) * len(self.batch), *block), tf32)


def _tma_region(x: Operand, batches: Shape, rows: int, columns: int) -> TmaRegion | None:
    """Return the region of an operand, or None if TMA cannot address it."""
    batch = tuple(int(stride != 0 and size > 1) for stride, size in zip(x.batch, batches, strict=True))
    if len(batch) > 2:
        return None
    for transposed in (False, True):
        inner, right, outer, down = (rows, x.row, columns, x.column) if transposed else (columns, x.column, rows, x.row)
        if right != 1 and inner > 1:
            continue
        grain = 16 // x.array.dtype.itemsize
        down = down if outer > 1 else -(-inner // grain) * grain  # a single row may have any stride
        shape, strides = (outer, inner), (down, 1)
        if any(batch):
            sizes = tuple(size if moves else 1 for size, moves in zip(batches, batch, strict=True))
            steps = tuple(stride if moves else down * outer for stride, moves in zip(x.batch, batch, strict=True))
            shape, strides = (*sizes, *shape), (*steps, *strides)
        if is_describable(x.array, shape, strides):
            return TmaRegion(transposed, shape, strides, batch if any(batch) else ())
    return None


# --- Launches ---------------------------------------------------------------------------------------------------------


@cuda_impl("matmul")
def matmul_into(
    out: Array, a: Array, b: Array, *, transpose_b: bool = False, bias: Array | None = None,
    activation: str | None = None, residual: Array | None = None, accumulate: bool = False,
    alpha: float | Array = 1.0, row_scale: Array | None = None, scales: Scales | None = None,
    rounds: bool = False, one_chain: bool | None = None, limit: Limit | None = None, tile: GemmTile | None = None,
    from_zero: bool = False,
) -> None:  # fmt: skip
    """Write out = activation(alpha·diag(row_scale)·a·b + bias) + residual, plus out's previous value if `accumulate`.

    The epilogue is computed in float32 (float64 for float64, the integers' own type for integers) and rounded once. A
    residual of 2-byte operands may be added after the result is rounded, where that is faster. With `rounds` it always
    is, so that a row does not depend on the number of rows.

    Args:
        out: `[..., m, n]`, contiguous, of any float dtype if the operands are floats.
        a: `[..., m, k]` with any strides. A vector is a row, and out then has no dimension m.
        b: `[..., k, n]` of a's dtype with any strides. A vector is a column, and out then has no dimension n.
        transpose_b: b is `[..., n, k]`, like a weight.
        bias: `[n]`, with any stride.
        activation: "relu", "gelu_tanh" or "silu".
        residual: array of out's shape, contiguous.
        alpha: a number, or an array of one element in the accumulator's type.
        row_scale: `[m]`, with any stride; requires a single matrix and no bias.
        scales: scales of quantized operands; requires a single matrix, and alpha = 1.
        rounds: round the product to out's type before the residual is added.
        one_chain: compute each element by one accumulator that adds the terms in ascending order, whatever the sizes;
            not for 8-bit floats. None does so inside `genesis.exact`.
        limit: limit of m or k of a single matrix of 2-byte floats that TMA can load. Rows of out behind it are
            undefined. Terms behind it must be 0 up to a multiple of 128; further ones are not read.
        tile: tile that replaces the model's choice, for benchmarks.
        from_zero: `accumulate` with the same kernel, so the same bits, as if out were 0, without reading it.
    """
    assert residual is None or (residual.shape == out.shape and residual.is_contiguous)
    if out.size == 0:
        return
    p = _gemm_of(out, a, b, transpose_b)._replace(limit=limit)
    assert row_scale is None or (bias is None and out.ndim == 2)  # kernels have one parameter for both
    assert scales is None or (out.ndim == 2 and isinstance(alpha, float) and alpha == 1)  # kernels take it as alpha
    e = Epilogue(bias, activation, residual, accumulate, alpha, row_scale, scales, rounds, from_zero)
    one_chain = mode.exact if one_chain is None else one_chain
    split = (_launch_tf32_rs, _launch_thin, _launch_few_columns)  # these sum along k in other orders
    special = (_launch_warp_specialized, *(() if one_chain else split))
    if tile is None and limit is None and any(is_launched(p, e) for is_launched in special):
        return
    if not a.dtype.is_floating_point or a.dtype is float64:  # Triton 3.6 has no dot of float64
        _launch_rank1(p, e)
    elif not _launch_tma(p, e, one_chain, tile):
        assert limit is None, (out, a, b)
        _launch_pointers(p, e, one_chain, tile)


def _kind(dtype: DType, k: int) -> str:
    if dtype is float8_e4m3fn:
        return "fp8" if k <= MAX_IMPRECISE else "fp8_long"
    if dtype.itemsize == 2:
        return "half"
    return "tf32" if dtype is float32 and allow_tf32 else dtype.name


def _dot_type(dtype: DType) -> Any:
    """Return the operands' type in tl.dot. The interpreter's dot supports neither bfloat16 nor 8-bit floats."""
    return TRITON[(float32 if is_interpreted() and dtype in (bfloat16, float8_e4m3fn) else dtype).name]


def _launch_warp_specialized(p: Gemm, e: Epilogue) -> bool:
    """Launch a warp-specialized kernel for scaled operands. Return False if it lacks the epilogue or is slower."""
    is_scaled = e.flags & ~gemm.DEQUANT.value == 0
    if e.scales is None or not (e.is_early or is_scaled) or not _has_weight(p):
        return False
    out, x, weight = _with_weight(p)
    if is_scaled:
        return ws_scaled_into(out, x, weight, *e.scales)
    return e.scales.of_columns and ws_residual_into(out, x, weight, _residual(p, e), e.scales.array)


def _has_weight(p: Gemm) -> bool:
    """Return whether the GEMM is x·weightᵀ with contiguous rows of all operands, and out is contiguous."""
    return p.matrices == 1 and p.a.column == p.b.row == p.o.column == 1 and p.o.row == p.n


def _with_weight(p: Gemm) -> tuple[Array, Array, Array]:
    """Return out, x and the weight."""
    return p.o.matrix(p.m, p.n), p.a.matrix(p.m, p.k), p.b.transposed.matrix(p.n, p.k)


def _residual(p: Gemm, e: Epilogue) -> Array:
    assert e.residual is not None
    return e.residual.view((p.m, p.n), (p.n, 1), e.residual.offset)


def _launch_tf32_rs(p: Gemm, e: Epilogue) -> bool:
    """Launch the tf32 kernel for an MN-major operand B. Return False if it does not apply or is slower."""
    if not (p.a.array.dtype is p.o.array.dtype is float32 and allow_tf32) or e.flags or p.matrices != 1:
        return False
    if p.a.column != 1 or p.b.column != 1 or p.o.column != 1 or p.k == 0:
        return False
    return gemm_tf32_rs_into(p.o.matrix(p.m, p.n), p.a.matrix(p.m, p.k), p.b.matrix(p.k, p.n))


def _launch_thin(p: Gemm, e: Epilogue) -> bool:
    """Launch the kernel for few rows and a long k, as in gradients of low-rank matrices. Return False for others."""
    if e.flags & ~gemm.ACCUMULATE.value or p.matrices != 1 or p.a.row != 1 or p.b.column != 1 or p.o.column != 1:
        return False
    if p.m > THIN or p.n < MIN_WIDTH or p.k < MIN_TERMS:
        return False
    g, u, out = p.b.matrix(p.k, p.n), p.a.transposed.matrix(p.k, p.m), p.o.transposed.matrix(p.n, p.m)
    return thin_products_into(None, [out], g, [], u, [(0, p.n)], accumulate=e.accumulate and not e.from_zero)


def _launch_few_columns(p: Gemm, e: Epilogue) -> bool:
    """Launch `gemm_few_columns`, possibly split along k. Return False if it does not apply or is slower."""
    if p.a.array.dtype not in (bfloat16, float16, float32) or e.scales is not None or p.k < MIN_SUM:
        return False
    if p.m < p.n:
        p, e = p.swapped, e.swapped
    is_exact = p.a.array.dtype is float32 and not allow_tf32
    if not is_for_few_columns(p.n, p.a.row, p.a.column, p.b.row, p.matrices * p.m * p.k, is_exact):
        return False
    # Others are faster on the tensor cores if A is MN-major, or if its rows are loaded element by element.
    is_slow = p.a.column != 1 or p.a.row % 16 != 0 or p.k % 16 != 0 or (p.n > 1 and p.matrices > 1)
    if not is_exact and is_slow and _is_addressed_by_tma(p):
        return False
    sm_count = backend_of(p.o.array.device).driver.properties.sm_count
    t = few_columns_tile(p.matrices, p.m, p.n, p.k, p.a.column == 1, sm_count)
    tiles, s, partial, matrices = _divided(p, t)
    wide = _needs_int64(p)
    launch(
        gemm_few_columns, tiles * s.split, p.o.array, p.a.array, p.b.array, partial, *e.operands, (p.m, p.n, p.k),
        p.batches, p.a[1:], p.b[1:], p.out_strides, (s.split, s.steps_per_split), EPILOGUE=e.launched, INT64=wide,
        COLUMNS=p.n, BM=t.bm, BN=t.bn, BK=t.bk, MATRICES=matrices, SPLIT=s.split > 1,
        VECTORS=p.a.column == 1 and p.b.row == 1 and _is_addressed_by_tma(p), num_warps=t.warps,
    )  # fmt: skip
    _launch_reduce_splits(p, e, t, s, partial, wide, matrices)
    return True


def _is_addressed_by_tma(p: Gemm) -> bool:
    """Return whether TMA can address both operands: rows begin at multiples of 16 bytes."""
    return all(_tma_region(*x) is not None for x in ((p.a, p.batches, p.m, p.k), (p.b, p.batches, p.k, p.n)))


def _launch_tma(p: Gemm, e: Epilogue, one_chain: bool, tile: GemmTile | None) -> bool:
    """Launch `gemm_tma`. Return False if the device has no TMA or TMA cannot address the operands."""
    dtype, properties = p.a.array.dtype, backend_of(p.o.array.device).driver.properties
    kind = _kind(dtype, p.k)
    if properties.capability < (9, 0) or kind == "float32" or p.k == 0:
        return False
    a, b = _regions(p)
    if a is None or b is None:
        names = "a" * (a is None) + "b" * (b is None)
        elements = sum(_b_elements(p.swapped if x == "a" else p) for x in names)
        if alignment_is_profitable(2 * p.matrices * p.m * p.n * p.k, elements * dtype.itemsize):
            p = _with_copies(p, names)
            a, b = _regions(p)
    if a is None or b is None:
        return False
    if tile is None:
        tile = choose(_problem(p, e, kind, a, b), properties.sm_count, properties.shared_memory, one_chain)
    if not tile.by_tma:
        _launch_pointers(p, e, one_chain, tile)
        return True
    if tile.specialized:
        is_launched = ws_residual_into(*_with_weight(p), _residual(p, e), columns=tile.bn)
        assert is_launched, (p, tile)
        return True
    # Adding a residual separately is faster than in a large tile's epilogue.
    if e.is_early and not tile.is_single and kind == "half":
        _launch_tma(p, e._replace(residual=None), one_chain, tile)
        assert e.residual is not None
        add(p.o.array, e.residual, out=p.o.array)
        return True
    if tile.swapped:
        assert e.scales is None  # scales are in the order of the operands
        p, e = p.swapped, e.swapped
    if tile.copies and min(p.m, p.n, p.k) >= MIN_EXTENT:
        p = _with_copies(p, tile.copies)
    a, b = _regions(p)
    assert a is not None and b is not None
    _launch_persistent(p, e, tile, a, b)
    return True


def _regions(p: Gemm) -> tuple[TmaRegion | None, TmaRegion | None]:
    return _tma_region(p.a, p.batches, p.m, p.k), _tma_region(p.b, p.batches, p.k, p.n)


def _problem(p: Gemm, e: Epilogue, kind: str, a: TmaRegion, b: TmaRegion) -> Problem:
    item = p.a.array.dtype.itemsize
    is_specializable = kind == "half" and e.is_early and p.limit is None and _has_weight(p)
    return Problem(
        kind, "nt"[a.transposed] + "nt"[b.transposed], p.m, p.n, p.k, p.matrices, item, p.o.array.dtype.itemsize,
        (a.strides[-2] * item, b.strides[-2] * item), e.reads, e.scales is None,
        p.limit is None and all(x.shape[-1] * item % 16 == 0 for x in (a, b)), e.is_early,
        is_specializable and can_add_residual(*_with_weight(p), _residual(p, e)),
    )  # fmt: skip


def alignment_is_profitable(flops: int, nbytes: int) -> bool:
    """Return whether copying `nbytes` bytes of operands, so that TMA loads them, makes a GEMM of `flops` FLOPs faster.
    Loading element by element leaves the tensor cores idle for nine tenths of the time.
    """
    return flops > MIN_FLOPS + FLOPS_PER_BYTE * nbytes


def _copied(x: Operand, batches: Shape, rows: int, columns: int) -> Operand:
    """Return a copy with contiguous columns, whose rows begin at multiples of 128 bytes."""
    array = x.array
    shape = tuple(size if step else 1 for size, step in zip(batches, x.batch, strict=True))
    grain = 128 // array.dtype.itemsize
    padded = empty((*shape, rows, -(-columns // grain) * grain), array.dtype, array.device)
    y = padded.view((*shape, rows, columns), padded.strides)
    copy(array.view(y.shape, (*x.batch, x.row, x.column)), out=y)
    batch = tuple(own if step else 0 for step, own in zip(x.batch, y.strides[:-2], strict=True))
    return Operand(y, batch, y.strides[-2], 1)


def _with_copies(p: Gemm, names: str) -> Gemm:
    """Return the GEMM with copies of the operands named "a" or "b", whose rows begin at multiples of 128 bytes. 2-byte
    floats keep their order; others become K-major, as tensor cores require.
    """

    def copied(x: Operand, rows: int, columns: int) -> Operand:
        if x.column != 1 and x.row == 1 and x.array.dtype.itemsize == 2:
            return _copied(x.transposed, p.batches, columns, rows).transposed
        return _copied(x, p.batches, rows, columns)

    a = copied(p.a, p.m, p.k) if "a" in names else p.a
    b = copied(p.b.transposed, p.n, p.k).transposed if "b" in names else p.b
    return p._replace(a=a, b=b)


def _launch_persistent(p: Gemm, e: Epilogue, t: GemmTile, a: TmaRegion, b: TmaRegion) -> None:
    """Launch `gemm_tma`, and `gemm_reduce_splits` if tiles are split along k."""
    out, dtype, tf32 = p.o.array, p.a.array.dtype, p.a.array.dtype is float32
    programs = backend_of(out.device).persistent_programs(t.ctas_per_sm)
    tiles, s, partial, matrices = _divided(p, t, programs)
    is_stored = s.full or p.limit is not None
    o = _tma_region(p.o._replace(batch=p.o.batch[-1:]), (p.matrices,), p.m, p.n) if is_stored else None
    if o is not None and o.shape[-1] * out.dtype.itemsize % 16:  # TMA would write past the end of such rows
        o = None
    # Programs without a loop over tiles, if each has one tile or a residual is loaded early.
    one_tile = t.is_single and s.full == tiles and (tiles <= programs or e.is_early)
    columns = t.bn // epilogue_slices(t, out.dtype.itemsize, e.reads and not one_tile)
    grid = tiles if one_tile else min(programs, s.full + s.leftover * s.split)
    so = p.out_strides
    wide = needs_int64((p.matrices, p.m, p.n), so)
    flags, operands = _epilogue_by_tma(e, o, t.bm, columns)
    launch(
        gemm_tma, grid, a.descriptor(p.a.array, t.bm, t.bk, tf32), b.descriptor(p.b.array, t.bk, t.bn, tf32),
        o and o.descriptor(out, t.bm, columns), out, partial, *operands, (p.m, p.n, p.k), p.batches, so, tuple(s),
        p.limit and p.limit.value, LIMIT=p.limit and p.limit.size,
        A_LAYOUT=(a.transposed, a.batch), B_LAYOUT=(b.transposed, b.batch),
        OUT_LAYOUT=("pointers" if o is None else ("columns" if o.transposed else "rows"), bool(o and o.batch)),
        DOT=(_dot_type(dtype), "tf32" if tf32 else "ieee", t.bk if _kind(dtype, p.k) == "fp8_long" else None),
        EPILOGUE=flags, INT64=wide, TILE=(t.bm, t.bn, t.bk), MATRICES=matrices,
        SCHEDULE="one_tile" if one_tile else "split_k" if s.leftover else "persistent", SLICES=t.bn // columns,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    _launch_reduce_splits(p, e, t, s, partial, wide, matrices, grid)


def _epilogue_by_tma(e: Epilogue, o: TmaRegion | None, rows: int, columns: int) -> tuple[int, tuple[Any, ...]]:
    """Return EPILOGUE and operands of `gemm_tma`. With `accumulate`, a residual is loaded by TMA, like out."""
    x = e.residual
    if x is None or o is None or not e.accumulate or not is_describable(x, o.shape, o.strides):
        return e.launched, e.operands
    vector, stride, _, alpha = e.operands
    flags = e.launched - gemm.RESIDUAL.value + gemm.RESIDUAL_BY_TMA.value
    return flags, (vector, stride, o.descriptor(x, rows, columns), alpha)


def _with_b_along_n(p: Gemm, e: Epilogue) -> tuple[Gemm, Epilogue]:
    """Return the GEMM with an MN-major operand B if that is profitable.

    Threads of exact float32 GEMMs load 16 bytes each from shared memory, neighbouring threads from neighbouring
    columns. If B is K-major, these columns are in the same banks, and a load takes 32 cycles instead of 4. An M-major
    operand A becomes B without a copy. Otherwise one operand is copied, the smaller one if possible. In a tile of 64 x
    64 x 16, shared memory reads then take 768 cycles (2560 with a K-major B), multiply-adds 512.
    """
    if p.b.row != 1 or p.b.column == 1 or e.scales is not None:
        return p, e
    ways = [(p, e), (p.swapped, e.swapped)]
    if p.a.row == 1:
        return ways[1]
    for way, its_epilogue in sorted(ways, key=lambda way: _b_elements(way[0])):
        if _b_copy_is_profitable(way):
            return way._replace(b=_copied(way.b, way.batches, way.k, way.n)), its_epilogue
    return p, e


def _b_copy_is_profitable(p: Gemm) -> bool:
    """Return whether B is K-major and copying it to MN-major saves more than it costs."""
    if p.b.row != 1 or min((*p.b.batch, p.b.column)) < 0 or p.k < MIN_EXTENT or p.n <= MAX_EXACT_COLUMNS:
        return False
    return p.matrices * p.m * p.n * p.k >= max(MIN_MULTIPLY_ADDS, MIN_USES * _b_elements(p))


def _b_elements(p: Gemm) -> int:
    return p.k * p.n * math.prod(size for size, step in zip(p.batches, p.b.batch, strict=True) if step)


def _launch_pointers(p: Gemm, e: Epilogue, one_chain: bool, tile: GemmTile | None) -> None:
    """Launch `gemm_pointers`, and `gemm_reduce_splits` if tiles are split along k."""
    dtype, properties = p.a.array.dtype, backend_of(p.o.array.device).driver.properties
    kind = dtype.name if dtype.itemsize > 2 and not (dtype is float32 and allow_tf32) else "pointers"
    if tile is not None and tile.swapped:
        p, e = p.swapped, e.swapped
    if kind == "float32":
        p, e = _with_b_along_n(p, e)
    is_ahead = kind == "pointers" and tile is None and not _is_addressed_by_tma(p)
    if is_ahead:
        t = unaligned_tile(p.matrices, p.m, p.n, p.k, dtype.itemsize, properties.sm_count)
        t = t._replace(split=1) if one_chain else t
    else:
        layout = "tn" if p.a.row == 1 < p.a.column else "nn"
        q = Problem(kind, layout, p.m, p.n, p.k, p.matrices, dtype.itemsize, p.o.array.dtype.itemsize)
        t = tile or choose(q, properties.sm_count, properties.shared_memory, one_chain)
    tiles, s, partial, matrices = _divided(p, t)
    so, wide = p.out_strides, _needs_int64(p)
    precision = "tf32" if dtype is float32 and allow_tf32 else FLOAT32
    vectors = _vectors(p.a, p.batches, p.m, p.k, "mk"), _vectors(p.b, p.batches, p.k, p.n, "kn")
    launch(
        gemm_pointers, tiles * s.split, p.o.array, p.a.array, p.b.array, partial, *e.operands, (p.m, p.n, p.k),
        p.batches, p.a[1:], p.b[1:], so, (s.split, s.steps_per_split),
        DOT=(_dot_type(dtype), TRITON[work_type(dtype).name], precision), EPILOGUE=e.launched, INT64=wide,
        EVEN=p.k % t.bk == 0, VECTORS=vectors, TILE=(t.bm, t.bn, t.bk), MATRICES=matrices,
        SPLIT=(1 + can_overlap(p.o.array)) * (s.split > 1), AHEAD=is_ahead, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    _launch_reduce_splits(p, e, t, s, partial, wide, matrices)


def _vectors(x: Operand, batches: Shape, rows: int, columns: int, axes: str) -> str | None:
    """Return the axis along which an operand is loaded in 16 bytes, the name of rows or of columns, or None."""
    region = _tma_region(x, batches, rows, columns)
    if region is None or region.shape[-1] * x.array.dtype.itemsize % 16:
        return None
    return axes[0] if region.transposed else axes[1]


def _launch_reduce_splits(
    p: Gemm, e: Epilogue, t: GemmTile, s: Schedule, partial: Array | None, wide: bool, matrices: str,
    programs: int = 1 << 30,
) -> None:  # fmt: skip
    if partial is None:
        return
    many = 8 if s.split == 1 else min(32, triton.next_power_of_2(s.split))  # one part: the device decides
    rows = max(1, min(t.bm, min(PART_TILE, PARTS_IN_FLIGHT // many) // t.bn))
    launch(
        gemm_reduce_splits, min(s.leftover, programs) * (t.bm // rows), p.o.array, partial, *e.operands,
        (p.m, p.n, p.k), p.out_strides, tuple(s), p.limit and p.limit.value, programs, LIMIT=p.limit and p.limit.size,
        EPILOGUE=e.launched, INT64=wide, TILE=(t.bm, t.bn, t.bk), MATRICES=matrices, ROWS=rows, MANY=many,
    )  # fmt: skip


def _divided(p: Gemm, t: GemmTile, programs: int = 0) -> tuple[int, Schedule, Array | None, str]:
    """Return the number of tiles, their division among persistent programs, if any, partial sums, and MATRICES."""
    tiles = p.matrices * triton.cdiv(p.m, t.bm) * triton.cdiv(p.n, t.bn)
    s = schedule_of(tiles, triton.cdiv(p.k, t.bk), max(programs, 1), t.split, is_persistent=programs > 0)
    if p.limit is not None and p.limit.size != "k":  # room for a schedule of any number of tiles
        s = Schedule(0, max(s.leftover * s.split, programs), 1, s.steps_per_split)
    elements = s.leftover * s.split * t.bm * t.bn
    return tiles, s, empty((elements,), float32, p.o.array.device) if s.leftover else None, _matrices(p, tiles)


def _launch_rank1(p: Gemm, e: Epilogue) -> None:
    dtype = p.a.array.dtype
    tiles = p.matrices * triton.cdiv(p.m, 32) * triton.cdiv(p.n, 64)
    launch(
        gemm_rank1, tiles, p.o.array, p.a.array, p.b.array, *e.operands, (p.m, p.n, p.k), p.batches, p.a[1:], p.b[1:],
        p.out_strides, WORK=TRITON[dtype.name] if dtype in (float64, int64) else tl.int32,
        EPILOGUE=e.launched, INT64=_needs_int64(p), BM=32, BN=64, MATRICES=_matrices(p, tiles),
    )  # fmt: skip


def _matrices(p: Gemm, tiles: int) -> str:
    """Return MATRICES of `grouped_tile`."""
    if tiles >= 1 << 21:
        return "many"
    return "one" if p.matrices == 1 else "few"


def _needs_int64(p: Gemm) -> bool:
    """Return whether an offset of any operand exceeds 2^31."""
    return (
        needs_int64((*p.batches, p.m, p.k), (*p.a.batch, p.a.row, p.a.column))
        or needs_int64((*p.batches, p.k, p.n), (*p.b.batch, p.b.row, p.b.column))
        or needs_int64((p.matrices, p.m, p.n), p.out_strides)
    )


# --- The CUDA implementations -----------------------------------------------------------------------------------------


@cuda_impl("mixed_matmul")
def mixed_matmul(out: Array, x: Array, y: Array, dtype: DType, alpha: float = 1.0) -> None:
    narrow = min(x.dtype, y.dtype, key=lambda t: t.itemsize)
    a, b = (f if f.dtype is narrow else cast(f, dtype=narrow) for f in (x, y))
    matmul_into(out, a, b, alpha=alpha)


@cuda_impl("matmul_add")
def matmul_add(out: Array, x: Array, y: Array, addend: Array) -> None:
    matmul_into(out, x, y, residual=contiguous(addend))


@cuda_impl("add_matmul")
def add_matmul(out: tuple[()], target: Array, x: Array, y: Array) -> None:
    sums = contiguous(target)
    matmul_into(sums, x, y, accumulate=True)
    if sums is not target:
        copy(sums, out=target)
