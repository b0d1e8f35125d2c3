"""Low-rank pairs on CUDA: products with an addition of a low rank, composed of the GEMMs of linalg.py.

Plain reference: genesis/ops/low_rank.py: `low_rank_gradient`, `matmul_sum` and the pairs of the linear ops.

`low_rank_product` is the one place where x·Wᵀ meets u·Bᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from genesis.array import Array, empty
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.pointwise.random import dropout
from genesis.ops.low_rank import LowRank, Operands, Pair
from genesis.ops.shape import contiguous, slices, window

__all__ = ["Term", "add_terms", "low_rank_product", "make_u", "terms_of"]


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


@cuda_impl("low_rank_gradient")
def low_rank_gradient(out: Array, g: Array, *b: Array, pairs: tuple[Pair, ...]) -> None:
    """v = [s1·g1·B1, …]."""
    start = 0
    for p, weight in zip(pairs, b, strict=True):
        matmul_into(window(out, start, start + p.rank), window(g, p.start, p.stop), weight, alpha=p.scale)
        start += p.rank


@cuda_impl("matmul_sum")
def matmul_sum(out: Array, x: Array, y: Array, u: Array, w: Array, addend: Array | None = None) -> None:
    """x @ y + u @ w + addend."""
    residual = None if addend is None else contiguous(addend)
    low_rank_product(out, x, y, [Term(0, w.shape[-1], u, w)], residual=residual)
