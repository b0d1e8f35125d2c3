"""Low-rank pairs on CUDA: products with low-rank terms, composed of GEMMs of linalg.py, and kernels for DoRA's factors.

Plain reference: genesis/ops/low_rank.py. Only `low_rank_product` and, inside
`genesis.exact`, `chain_product` add x·Wᵀ and u·Bᵀ.

Shapes: x [m, k], W [n, k], A [r, k], B [n, r], u = x·Aᵀ. Each kernel's docstring names its tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import bfloat16, float32, float64
from genesis.kernels.elements import TRITON, as_matrix, converted, needs_int64, row_slice, work_type
from genesis.kernels.formulas import tile_function
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.gemm.thin import RANGES, picked, range_of, thin_products_into
from genesis.kernels.norm.norm import sum_partials
from genesis.kernels.pointwise.elementwise import elementwise, fill
from genesis.kernels.pointwise.random import dropout
from genesis.ops.elementwise import add, cast, copy, div, maximum, mul, sqrt
from genesis.ops.linalg import mixed_matmul, transposed
from genesis.ops.low_rank import LowRank, Operands, Pair, split_layers
from genesis.ops.reduce import sum_to_shape
from genesis.ops.shape import contiguous, slices, window


class Term(NamedTuple):
    """A low-rank term u·b that is added to columns [start, stop) of a product."""

    start: int
    stop: int
    u: Array  # `[..., r]`
    b: Array  # `[r, stop - start]`, or its transpose if the product's weight is transposed
    is_zero: bool = False  # whether u is 0


def low_rank_product(
    out: Array, x: Array, weight: Array, terms: Sequence[Term], *, transpose_b: bool = False,
    bias: Array | None = None, residual: Array | None = None,
) -> None:  # fmt: skip
    """Write out = x·weight + Σ u·b in the terms' columns + bias + residual. `transpose_b` is as in `matmul_into`.

    Terms that cover all columns are stored first, rounded while they are small, and the epilogue of x·weight adds them
    in float32, or if all are 0 adds nothing. Other terms are added to the rounded result.
    """
    if sum(term.stop - term.start for term in terms) < out.shape[-1]:
        matmul_into(out, x, weight, transpose_b=transpose_b, bias=bias, residual=residual)
        add_terms(out, terms, transpose_b)
        return
    from_zero = all(term.is_zero for term in terms)
    if not from_zero:
        add_terms(out, terms, transpose_b, accumulate=False)
    how: dict[str, Any] = {"bias": bias, "residual": residual, "accumulate": True, "from_zero": from_zero}
    matmul_into(out, x, weight, transpose_b=transpose_b, **how)


def add_terms(out: Array, terms: Sequence[Term], transpose_b: bool = False, accumulate: bool = True) -> None:
    """Add Σ u·b to out in the terms' columns, or overwrite them if `accumulate` is False."""
    for term in terms:
        part = window(out, term.start, term.stop)
        if not term.is_zero:
            matmul_into(part, term.u, term.b, transpose_b=transpose_b, accumulate=accumulate)
        elif not accumulate:
            fill(part, value=0, shape=part.shape, dtype=part.dtype)


def terms_of(u: Array, operands: Operands, low_rank: LowRank) -> list[Term]:
    """Return the terms of pairs, for a transposed weight."""
    parts = _of_pairs(operands.b, [p.stop - p.start for p in low_rank.pairs])
    ends = zip(low_rank.pairs, low_rank.ranks, parts, strict=True)
    return [Term(p.start, p.stop, window(u, *columns), b, p.scale == 0) for p, columns, b in ends]


def make_u(u: Array, x: Array, operands: Operands, low_rank: LowRank) -> None:
    """Write u = s·dropout(x)·Aᵀ, with a single GEMM if all A are one operand with one scale; none if all s are 0."""
    scales = {p.scale for p in low_rank.pairs}
    if scales == {0.0}:
        fill(u, value=0, shape=u.shape, dtype=u.dtype)
        return
    if low_rank.dropout is not None:
        dropped = empty(x.shape, x.dtype, x.device)
        dropout(dropped, x, *operands.where, **low_rank.noise)
        x = dropped
    if len(operands.a) == 1 and len(scales) == 1:
        matmul_into(u, x, operands.a[0], transpose_b=True, alpha=scales.pop())
        return
    parts = _of_pairs(operands.a, [p.rank for p in low_rank.pairs])
    for p, columns, a in zip(low_rank.pairs, low_rank.ranks, parts, strict=True):
        matmul_into(window(u, *columns), x, a, transpose_b=True, alpha=p.scale)


def _of_pairs(arrays: Sequence[Array], rows: list[int]) -> Sequence[Array]:
    """Return the array of each pair, with these numbers of rows; one array may hold those of all pairs."""
    return arrays if len(arrays) == len(rows) else slices(arrays[0], rows)


# --- Pairs as further steps along k (docs/decisions/0014-exact.md) ----------------------------------------------------

STEP = 16  # terms of an MMA step, which have no order among themselves


def chain_product(
    out: Array, x: Array, weights: Sequence[Array], u: Array, operands: Operands, low_rank: LowRank,
    biases: Sequence[Array], residual: Array | None,
) -> None:  # fmt: skip
    """Compute out = [x | u]·[W | B]ᵀ + bias + residual with one chain per result: first the terms of W, then u·B."""
    y, added, first = as_matrix(out), None if residual is None else as_matrix(residual), 0
    for i, (left, right) in enumerate(chain_operands(as_matrix(x), weights, as_matrix(u), operands, low_rank)):
        last = first + right.shape[0]
        bias = biases[i] if biases else None
        matmul_into(
            window(y, first, last), left, right, transpose_b=True, bias=bias, residual=added, rounds=True
        )  # fmt: skip
        first = last


def chain_operands(
    x: Array, weights: Sequence[Array], u: Array, operands: Operands, low_rank: LowRank
) -> Iterator[tuple[Array, Array]]:
    """Yield [x | u] and [W | B] for each weight, with zeros where a row of W has no pair.

    Each pair has its own columns, padded to whole steps, so an MMA step never mixes the terms of two pairs.
    """
    terms, starts, first = terms_of(u, operands, low_rank), [_whole(x.shape[1])], 0
    for term in terms:
        starts.append(starts[-1] + _whole(term.u.shape[1]))
    left = _extended(x, starts[-1])
    for term, at in zip(terms, starts, strict=False):
        copy(term.u, out=window(left, at, at + term.u.shape[1]))
    for weight in weights:
        right, last = _extended(weight, starts[-1]), first + weight.shape[0]
        for term, at in zip(terms, starts, strict=False):
            low, high = max(term.start, first), min(term.stop, last)
            if low < high:
                b = row_slice(term.b, low - term.start, high - low)
                copy(b, out=window(row_slice(right, low - first, high - low), at, at + b.shape[1]))
        yield left, right
        first = last


def _whole(terms: int) -> int:
    return triton.cdiv(terms, STEP) * STEP


def _extended(x: Array, width: int) -> Array:
    """Return a copy of matrix x with zeros in further columns, up to `width`."""
    out = empty((x.shape[0], width), x.dtype, x.device)
    copy(x, out=window(out, 0, x.shape[1]))
    rest = window(out, x.shape[1], width)
    fill(rest, value=0, shape=rest.shape, dtype=rest.dtype)
    return out


# --- Pairs as further columns of one GEMM -----------------------------------------------------------------------------

# [x | u]·[W | B]ᵀ = x·Wᵀ + u·Bᵀ, with any kernel and epilogue. Copying reads and writes x and W, and saves passes over
# the result, which is wider. Tiles: R rows x C columns.
GRAIN = 8  # TMA addresses rows of a multiple of this many 2-byte elements
ROWS, COLUMNS = 32, 128


@triton.jit
def concat_columns_kernel(p_o, p_x, p_u, rows, width, rank, part, so, sx, su, INT64: tl.constexpr, R: tl.constexpr,
                          C: tl.constexpr):  # fmt: skip
    """Store out[i] = [x[i] | 0 | u[i] | 0]. Each part of `part` rows has its own columns for u."""
    i, j = tl.program_id(0), tl.program_id(1) * C + tl.arange(0, C)[None, :]
    if INT64:
        i = i.to(tl.int64)
    i = i * R + tl.arange(0, R)[:, None]  # [R, 1]
    is_x = (i < rows) & (j < width)  # [R, C]
    j_u = j - width - i // part * rank
    is_u = (i < rows) & (j_u >= 0) & (j_u < rank)  # [R, C]
    b_x = tl.load(p_x + i * sx + j, mask=is_x, other=0)  # [R, C]
    b_u = tl.load(p_u + i * su + j_u, mask=is_u & (j >= width), other=0)  # [R, C]
    tl.store(p_o + i * so + j, tl.where(j < width, b_x, b_u), mask=(i < rows) & (j < so))


def can_extend(rows: int, width: int, rank: int) -> bool:
    """Return whether concatenation is faster, for a product with `rows` rows and a result wider than `width`."""
    return rows >= width and width % GRAIN == rank % GRAIN == 0


def concat_columns(x: Array, u: Array, parts: int = 1) -> Array:
    """Return [x | u] of x `[rows, width]` and u `[rows, rank]`, both with contiguous rows. With `parts` > 1, each of
    these parts of u's rows has its own columns, and zeros fill the others.
    """
    (rows, width), rank = x.shape, u.shape[1]
    assert x.strides[1] == u.strides[1] == 1 and u.shape[0] == rows and rows % parts == 0
    out = empty((rows, width + parts * rank), x.dtype, x.device)
    if out.size:
        launch(
            concat_columns_kernel, (triton.cdiv(rows, ROWS), triton.cdiv(out.shape[1], COLUMNS)), out, x, u, rows,
            width, rank, rows // parts, out.shape[1], x.strides[0], u.strides[0],
            INT64=needs_int64(out.shape, out.strides) or needs_int64(x.shape, x.strides), R=ROWS, C=COLUMNS,
            num_warps=4,
        )  # fmt: skip
    return out


# --- Gradients --------------------------------------------------------------------------------------------------------


@cuda_impl("low_rank_backward")
def low_rank_backward(
    out: tuple[Array, ...], g: Array, u: Array, *arrays: Array, pairs: tuple[Pair, ...], is_result: bool = False
) -> None:
    """Write v = [s1·g'1·B1, …], dBi = g'iᵀ·ui and, with c and z, dc, in one pass over g if possible."""
    count, (v, *d) = len(pairs), out
    c, z = (contiguous(x) for x in arrays[count:]) if len(arrays) > count else (None, None)
    sums = None if c is None else d.pop()
    b, rows, ranges = [contiguous(x) for x in arrays[:count]], as_matrix(contiguous(g)), [p[:2] for p in pairs]
    operands = as_matrix(v), d, rows, b, as_matrix(contiguous(u))
    # One pass over g, if the kernel supports the ranges.
    covers = sums is None or (sums.dtype is float32 and sum(p.stop - p.start for p in pairs) == g.shape[-1])
    if covers and len({p.scale for p in pairs}) == 1:
        of_z = None if z is None else as_matrix(z)
        if thin_products_into(
            *operands, ranges, scale=pairs[0].scale, z=of_z, factors=c, sums=sums, divides=is_result
        ):  # fmt: skip
            return
    # Otherwise one kernel for dc and GEMMs for v and dB.
    if sums is not None and c is not None and z is not None:
        column_sums_into(sums, rows, as_matrix(z))
        if is_result:
            div(sums, c if c.dtype is sums.dtype else cast(c, dtype=sums.dtype), out=sums)
    gemm_products(*operands, pairs, c)


def gemm_products(
    v: Array, d: Sequence[Array], g: Array, b: Sequence[Array], u: Array, pairs: Sequence[Pair], c: Array | None = None
) -> None:
    """Write v = s·g·(c∘Bi) and dBi = c∘(gᵀ·u) with one GEMM per product and pair. c scales B, not the larger g."""
    start = 0
    for p, weight, d_weight in zip(pairs, b, d, strict=True):
        part, stop = window(g, p.start, p.stop), start + p.rank
        factors = None if c is None else window(c, p.start, p.stop)
        scaled = weight
        if factors is not None and weight.size:
            scaled = empty(weight.shape, weight.dtype, weight.device)
            scale_rows(scaled, weight, factors)
        matmul_into(window(v, start, stop), part, scaled, alpha=p.scale)
        matmul_into(d_weight, transposed(part), window(u, start, stop), row_scale=factors)
        start = stop


@cuda_impl("matmul_sum")
def matmul_sum(out: Array, x: Array, y: Array, u: Array, w: Array, addend: Array | None = None) -> None:
    residual = None if addend is None else contiguous(addend)
    low_rank_product(out, x, y, [Term(0, w.shape[-1], u, w)], residual=residual)


LARGEST_RANK = 128  # limited by registers, which hold A·Aᵀ


# --- DoRA: the factors ------------------------------------------------------------------------------------------------


@triton.jit
def dora_factors_kernel(p_c, p_norm, p_m0, p_m1, p_m2, p_s0, p_s1, p_s2, p_w0, p_w1, p_w2, p_a0, p_a1, p_a2, p_b0, p_b1,
                        p_b2, k, r, scale, starts, stops, DOT: tl.constexpr, INT64: tl.constexpr,
                        TILE: tl.constexpr):  # fmt: skip
    """Store c and the norms of BM columns of one of several layers. A layer has W `[n, k]`, A `[r, k]`, B `[n, r]`, m
    `[n]` and ‖W‖² `[n]`, all contiguous.

    Args:
        starts: first column of each layer in c; `stops` are the ends.
        DOT: (operands' type, input_precision).
        TILE: (BM, BK, R): rows of W, step along k, padded rank.
    """
    BM: tl.constexpr = TILE[0]
    BK: tl.constexpr = TILE[1]
    R: tl.constexpr = TILE[2]
    i, start, stop, first = range_of(tl.program_id(0), starts, stops, BM)
    i_c, i_r = first + tl.arange(0, BM), tl.arange(0, R)  # [BM], [R]
    i_n, n = i_c - start, stop - start
    if INT64:
        i_n = i_n.to(tl.int64)
    m_n, m_r = (i_n < n)[:, None], i_r < r
    # Load the operands of the last step early, to hide their latency.
    squares = converted(tl.load(picked(i, p_s0, p_s1, p_s2) + i_n, mask=i_n < n, other=0), tl.float32)  # [BM]
    m = tl.load(picked(i, p_m0, p_m1, p_m2) + i_n, mask=i_n < n, other=0)  # [BM]
    p_b = picked(i, p_b0, p_b1, p_b2) + (i_n * r)[:, None] + i_r[None, :]
    b_b = converted(tl.load(p_b, mask=m_n & m_r[None, :], other=0), tl.float32)  # [BM, R]
    p_w, p_a = picked(i, p_w0, p_w1, p_w2) + (i_n * k)[:, None], picked(i, p_a0, p_a1, p_a2) + (i_r * k)[:, None]
    b_cross, b_gram = tl.zeros((BM, R), tl.float32), tl.zeros((R, R), tl.float32)  # W·Aᵀ [BM, R], A·Aᵀ [R, R]
    for o_k in range(0, k, BK):
        i_k = o_k + tl.arange(0, BK)  # [BK]
        m_k = (i_k < k)[None, :]
        b_w = converted(tl.load(p_w + i_k[None, :], mask=m_n & m_k, other=0), DOT[0])  # [BM, BK]
        b_a = converted(tl.load(p_a + i_k[None, :], mask=m_r[:, None] & m_k, other=0), DOT[0])  # [R, BK]
        b_cross = tl.dot(b_w, b_a.T, b_cross, input_precision=DOT[1])  # [BM, R]
        b_gram = tl.dot(b_a, b_a.T, b_gram, input_precision=DOT[1])  # [R, R]
    b_change = 2 * b_cross + scale * tl.dot(b_b, b_gram, input_precision="ieee")  # [BM, R]
    total = squares + scale * tl.sum(b_change * b_b, 1)  # [BM]; rounding may make it negative
    norm = tl.sqrt(tl.maximum(total, 0))  # [BM]
    tl.store(p_norm + i_c, norm, mask=i_c < stop)
    tl.store(p_c + i_c, converted(converted(m, tl.float32) / norm, p_c.dtype.element_ty), mask=i_c < stop)


@cuda_impl("dora_factors")
def dora_factors(
    out: tuple[Array, Array], *arrays: Array, columns: tuple[tuple[int, int], ...], scales: tuple[float, ...],
    width: int,
) -> None:  # fmt: skip
    """Write c and the norms of several layers side by side, with 1 in columns that belong to no layer."""
    if sum(stop - start for start, stop in columns) < width:
        for factors in out:
            fill(factors, value=1, shape=factors.shape, dtype=factors.dtype)
    layers = [_Layer(range_, scale, *map(contiguous, x)) for range_, scale, x in zip(
        columns, scales, zip(*split_layers(arrays), strict=True), strict=True
    )]  # fmt: skip
    alike = len(layers) <= RANGES and len({(x.scale, x.a.shape, x.squares.dtype) for x in layers}) == 1
    for group in [layers] if alike else [[x] for x in layers]:
        _factors(*out, group)


class _Layer(NamedTuple):
    """A layer's columns of c, and its contiguous operands."""

    columns: tuple[int, int]
    scale: float
    m: Array
    squares: Array
    w: Array
    a: Array
    b: Array


def _factors(c: Array, norm: Array, layers: Sequence[_Layer]) -> None:
    """Write c and the norms of layers with the same rank, width and scale."""
    w, (r, k) = layers[0].w, layers[0].a.shape
    if r > LARGEST_RANK or norm.dtype is float64 or w.dtype is float64:
        for layer in layers:
            _composed_factors(c, norm, layer)
        return
    is_float32 = w.dtype is float32
    dot = float32 if is_interpreted() and w.dtype is bfloat16 else w.dtype
    starts, stops = zip(*(x.columns for x in layers), strict=True)
    rows, columns, warps, stages = _tile(stops[-1] - starts[0], max(16, triton.next_power_of_2(r)), is_float32)
    operands = [x for each in list(zip(*layers, strict=True))[2:] for x in (*each, *[each[0]] * (RANGES - len(each)))]
    launch(
        dora_factors_kernel, sum(triton.cdiv(stop - start, rows) for start, stop in (x.columns for x in layers)),
        c, norm, *operands, k, r, layers[0].scale, starts, stops,
        DOT=(TRITON[dot.name], "ieee" if is_float32 else "tf32"),
        INT64=any(needs_int64((x.w.shape[0] + rows, k), (k, 1)) for x in layers),
        TILE=(rows, columns, max(16, triton.next_power_of_2(r))), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _tile(n: int, rank: int, is_float32: bool) -> tuple[int, int, int, int]:
    """Return BM, BK, warps and stages: about one program per SM, with steps wide enough to hide latency."""
    if is_float32:
        return 32 if rank > 64 else 64, 32, 8 if rank > 32 else 4, 3
    if rank > 64:  # A·Aᵀ occupies most registers
        return 16, 128, 8, 2
    return 16 if n <= 2048 else 32, 256 if rank <= 32 else 128, 8 if rank > 32 else 4, 4


def _composed_factors(c: Array, norm: Array, layer: _Layer) -> None:
    """Compute the factors and norms of one layer with products in memory."""
    (start, stop), scale, m, squares, w, a, b = layer
    c, norm = (window(x, start, stop) for x in (c, norm))
    kind = norm.dtype
    cross, gram = (mixed_matmul(x, transposed(a), dtype=kind) for x in (w, a))
    wide = cast(b, dtype=kind)
    change = add(mul(cross, 2.0), mul(mixed_matmul(wide, gram, dtype=kind), scale))
    total = mul(sum_to_shape(mul(change, wide), shape=(b.shape[0], 1)), scale)
    total = add(total.view(squares.shape, (1,)), cast(squares, dtype=kind))
    sqrt(maximum(total, 0.0), out=norm)
    copy(cast(div(cast(m, dtype=kind), norm), dtype=c.dtype), out=c)


# --- Scaled columns and rows ------------------------------------------------------------------------------------------


scaled = tile_function("mul")


@triton.jit
def scaled_and_one(z, c, x):
    return z * c + x


@triton.jit
def scaled_and_two(z, c, x, y):
    return z * c + x + y


@triton.jit
def column_sums_kernel(p_partial, p_g, p_z, n, h, sg, sz, WORK: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr):
    """Store the sums of g∘z over a program's tiles of rows, for BH columns. Programs take tiles of BN rows in turn."""
    i_h = tl.program_id(0) * BH + tl.arange(0, BH)  # [BH]
    m_h = i_h < h
    b_sum = tl.zeros((BN, BH), WORK)  # [BN, BH]
    for first in range(tl.program_id(1) * BN, n, tl.num_programs(1) * BN):
        i_n = first + tl.arange(0, BN).to(tl.int64)  # [BN]
        m = (i_n < n)[:, None] & m_h[None, :]
        g = converted(tl.load(p_g + (i_n * sg)[:, None] + i_h[None, :], mask=m, other=0), WORK)  # [BN, BH]
        b_sum += g * converted(tl.load(p_z + (i_n * sz)[:, None] + i_h[None, :], mask=m, other=0), WORK)  # [BN, BH]
    tl.store(p_partial + tl.program_id(1).to(tl.int64) * h + i_h, tl.sum(b_sum, 0), mask=m_h)


@cuda_impl("scale_columns")
def scale_columns(
    out: Array, z: Array, factors: Array, bias: Array | None = None, residual: Array | None = None
) -> None:
    """Write out = c∘z + bias + residual; z may be out."""
    added = [x for x in (bias, residual) if x is not None]
    if out.size:
        elementwise((scaled, scaled_and_one, scaled_and_two)[len(added)], out, z, factors, *added, work=z.dtype)


@cuda_impl("scale_rows")
def scale_rows(out: Array, w: Array, factors: Array) -> None:
    elementwise(scaled, out, w, factors.view((w.shape[0], 1), (factors.strides[0], 0), factors.offset), work=w.dtype)


def column_sums_into(sums: Array, g: Array, z: Array) -> None:
    """Write the sums over all rows of g∘z. Rows are contiguous; partial sums are added in order."""
    n, h = z.shape
    work = work_type(z.dtype)
    if not n:
        fill(sums, value=0, shape=sums.shape, dtype=sums.dtype)
        return
    columns = min(triton.next_power_of_2(h), 128)
    programs = max(1, min(triton.cdiv(n, 16), 512 // triton.cdiv(h, columns)))
    partial = empty((programs, h), work, z.device)
    launch(
        column_sums_kernel, (triton.cdiv(h, columns), programs), partial, g, z, n, h, g.strides[0], z.strides[0],
        WORK=TRITON[work.name], BN=16, BH=columns,
    )  # fmt: skip
    sum_partials(sums, partial)
