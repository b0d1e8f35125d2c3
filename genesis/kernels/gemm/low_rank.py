"""Low-rank pairs on CUDA: products with an addition of a low rank, composed of the GEMMs of linalg.py.

Plain reference: genesis/ops/low_rank.py: `low_rank_backward`, `matmul_sum` and the pairs of the linear ops.

`low_rank_product` is the one place where x·Wᵀ meets u·Bᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from genesis.array import Array, empty
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.dtypes import float32
from genesis.kernels.gemm.dora import column_sums_into, scale_rows
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.gemm.thin import thin_products_into
from genesis.kernels.pointwise.random import dropout
from genesis.kernels.strides import as_matrix
from genesis.ops.elementwise import cast, div
from genesis.ops.linalg import transposed
from genesis.ops.low_rank import LowRank, Operands, Pair
from genesis.ops.shape import contiguous, slices, window


class Term(NamedTuple):
    """An addition u·b to columns [start, stop) of a product.

    Attributes:
        u: `[..., r]`.
        b: `[r, stop - start]`, or its transpose where the product's weight is transposed.
    """

    start: int
    stop: int
    u: Array
    b: Array


def low_rank_product(
    out: Array, x: Array, weight: Array, terms: Sequence[Term], *, transpose_b: bool = False,
    bias: Array | None = None, residual: Array | None = None,
) -> None:  # fmt: skip
    """out = x·weight + Σ u·b in the terms' columns + bias + residual; `transpose_b`: as for `matmul_into`.

    Terms that cover all columns are stored first and read by the base product's epilogue: what is rounded to out's type
    in between is then small, and all the rest is added in float32. Other terms are added to a result that was rounded.
    """
    if sum(term.stop - term.start for term in terms) < out.shape[-1]:
        matmul_into(out, x, weight, transpose_b=transpose_b, bias=bias, residual=residual)
        add_terms(out, terms, transpose_b)
        return
    add_terms(out, terms, transpose_b, accumulate=False)
    matmul_into(out, x, weight, transpose_b=transpose_b, bias=bias, residual=residual, accumulate=True)


def add_terms(out: Array, terms: Sequence[Term], transpose_b: bool = False, accumulate: bool = True) -> None:
    """out += Σ u·b in the terms' columns, or = with `accumulate` False."""
    for start, stop, u, b in terms:
        matmul_into(window(out, start, stop), u, b, transpose_b=transpose_b, accumulate=accumulate)


def terms_of(u: Array, operands: Operands, low_rank: LowRank) -> list[Term]:
    """The additions of pairs, for a transposed weight."""
    parts = operands.b
    if len(parts) < len(low_rank.pairs):
        parts = slices(parts[0], [p.stop - p.start for p in low_rank.pairs])
    ends = zip(low_rank.pairs, low_rank.ranks, parts, strict=True)
    return [Term(p.start, p.stop, window(u, *columns), b) for p, columns, b in ends]


def make_u(u: Array, x: Array, operands: Operands, low_rank: LowRank) -> None:
    """u = s·dropout(x)·Aᵀ: one GEMM where the A are one operand and have one scale."""
    if low_rank.dropout is not None:
        dropped = empty(x.shape, x.dtype, x.device)
        dropout(dropped, x, *operands.where, **low_rank.noise)
        x = dropped
    scales = {p.scale for p in low_rank.pairs}
    if len(operands.a) == 1 and len(scales) == 1:
        matmul_into(u, x, operands.a[0], transpose_b=True, alpha=scales.pop())
        return
    parts = operands.a
    if len(parts) < len(low_rank.pairs):
        parts = slices(parts[0], [p.rank for p in low_rank.pairs])
    for p, columns, a in zip(low_rank.pairs, low_rank.ranks, parts, strict=True):
        matmul_into(window(u, *columns), x, a, transpose_b=True, alpha=p.scale)


@cuda_impl("low_rank_backward")
def low_rank_backward(
    out: tuple[Array, ...], g: Array, u: Array, *rest: Array, pairs: tuple[Pair, ...], is_result: bool = False
) -> None:
    """v = [s1·g'1·B1, …], dBi = g'iᵀ·ui and, with c and z, dc: one pass over g where that is possible."""
    count, (v, *d) = len(pairs), out
    c, z = (contiguous(x) for x in rest[count:]) if len(rest) > count else (None, None)
    sums = None if c is None else d.pop()
    b, rows, ranges = [contiguous(x) for x in rest[:count]], as_matrix(contiguous(g)), [p[:2] for p in pairs]
    operands = as_matrix(v), d, rows, b, as_matrix(contiguous(u))
    covers = sums is None or (sums.dtype is float32 and sum(p.stop - p.start for p in pairs) == g.shape[-1])
    if covers and len({p.scale for p in pairs}) == 1:
        of_z = None if z is None else as_matrix(z)
        if thin_products_into(
            *operands, ranges, scale=pairs[0].scale, z=of_z, factors=c, sums=sums, divides=is_result
        ):  # fmt: skip
            return
    if sums is not None and c is not None and z is not None:
        column_sums_into(sums, rows, as_matrix(z))
        if is_result:
            div(sums, c if c.dtype is sums.dtype else cast(c, dtype=sums.dtype), out=sums)
    gemm_products(*operands, pairs, c)


def gemm_products(
    v: Array, d: Sequence[Array], g: Array, b: Sequence[Array], u: Array, pairs: Sequence[Pair], c: Array | None = None
) -> None:
    """v = s·g·(c∘Bi) and dBi = c∘(gᵀ·u) by a GEMM for each product of each pair: B is smaller than g."""
    start = 0
    for p, weight, found in zip(pairs, b, d, strict=True):
        part, stop = window(g, p.start, p.stop), start + p.rank
        factors = None if c is None else c.view((p.stop - p.start,), (1,), c.offset + p.start)
        scaled = weight
        if factors is not None and weight.size:
            scaled = empty(weight.shape, weight.dtype, weight.device)
            scale_rows(scaled, weight, factors)
        matmul_into(window(v, start, stop), part, scaled, alpha=p.scale)
        matmul_into(found, transposed(part), window(u, start, stop), row_scale=factors)
        start = stop


@cuda_impl("matmul_sum")
def matmul_sum(out: Array, x: Array, y: Array, u: Array, w: Array, addend: Array | None = None) -> None:
    """x @ y + u @ w + addend."""
    residual = None if addend is None else contiguous(addend)
    low_rank_product(out, x, y, [Term(0, w.shape[-1], u, w)], residual=residual)
