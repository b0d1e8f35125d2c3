"""CUDA implementations of linear layers: GEMMs with K-major weights that add bias and residual before rounding once.

Plain reference: genesis/ops/linear.py: `linear`, `packed_linear`.
"""

from __future__ import annotations

from collections.abc import Sequence

from genesis.array import Array
from genesis.backend import mode
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.errors import UsageError
from genesis.kernels.decode.few_rows import few_rows_linear_into, is_for_few_rows
from genesis.kernels.decode.wide_rows import is_for_wide_rows, wide_rows_linear_into
from genesis.kernels.elements import as_matrix
from genesis.kernels.gemm.fp8 import quantized_gemm_into
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.gemm.low_rank import add_terms, chain_product, low_rank_product, make_u, scale_columns, terms_of
from genesis.ops.linalg import is_wide_enough
from genesis.ops.linear import split_parameters
from genesis.ops.low_rank import LowRank, split_pairs
from genesis.ops.shape import columns, contiguous


@cuda_impl("linear")
def linear(
    out: Array | tuple[Array, ...], x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None,
    *pairs: Array, fp8: int = 0, low_rank: LowRank | None = None,
) -> None:  # fmt: skip
    """Write y = x·Wᵀ + b + residual; with pairs also u and z."""
    if isinstance(out, tuple):
        _adapted(out, x, [weight], [] if bias is None else [bias], residual, pairs, low_rank, fp8)
        return
    residual = None if residual is None else contiguous(residual)
    _products(out, x, [weight], [] if bias is None else [bias], residual, fp8)


@cuda_impl("packed_linear")
def packed_linear(
    out: Array | tuple[Array, ...], x: Array, *parameters: Array, fp8: int = 0, low_rank: LowRank | None = None
) -> None:
    """Write [x·W1ᵀ + b1, …, x·Wnᵀ + bn] with one GEMM per weight. Weights adjacent in memory are already joined."""
    if isinstance(out, tuple):
        own, _ = split_pairs(parameters, low_rank)
        _adapted(out, x, *split_parameters(own), None, parameters[len(own) :], low_rank, fp8)
        return
    _products(out, x, *split_parameters(parameters), None, fp8)


def _products(
    out: Array, x: Array, weights: Sequence[Array], biases: Sequence[Array], residual: Array | None, fp8: int
) -> None:
    """Write one product per weight side by side, plus the residual, which only a single weight may have."""
    if not fp8 and is_for_few_rows(x, *weights):
        few_rows_linear_into(out, x, weights, biases, residual)
        return
    if not fp8 and is_for_wide_rows(x, *weights):
        wide_rows_linear_into(out, x, weights, biases, residual)
        return
    is_quantized = is_wide_enough(fp8, out.shape[-1])
    if is_quantized:
        out, x, residual = as_matrix(out), as_matrix(contiguous(x)), None if residual is None else as_matrix(residual)
    parts = columns(out, [w.shape[0] for w in weights])
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        bias = biases[i] if biases else None
        if is_quantized:
            quantized_gemm_into(part, x, contiguous(weight), bias=bias, residual=residual)
        else:
            matmul_into(part, x, weight, transpose_b=True, bias=bias, residual=residual, rounds=True)


def _adapted(
    out: tuple[Array, ...], x: Array, weights: list[Array], biases: list[Array], residual: Array | None,
    pairs: Sequence[Array], low_rank: LowRank | None, fp8: int,
) -> None:  # fmt: skip
    """Compute `linear` or `packed_linear` with low-rank pairs: y, u and, with factors c, z. If z is not an output, y
    holds it temporarily. Low-rank terms are computed in x's type, even if x·Wᵀ is computed in 8-bit floats.
    """
    assert low_rank is not None
    _, operands = split_pairs(pairs, low_rank)
    assert operands is not None
    y, u, x = out[0], out[1], contiguous(x)
    residual = None if residual is None else contiguous(residual)
    make_u(u, x, operands, low_rank)
    if mode.exact:
        if fp8 or operands.factors is not None or low_rank.dropout is not None:
            what = "genesis.exact does not support adapters with DoRA, dropout or 8-bit floats"
            raise UsageError(what, next="merge the adapter, switch dropout off, or compute outside genesis.exact")
        if y.size:
            chain_product(y, x, weights, u, operands, low_rank, biases, residual)
        return
    terms, factors = terms_of(u, operands, low_rank), operands.factors
    z = y if factors is None or len(out) < 3 else out[2]
    # z = x·Wᵀ + low-rank terms; without factors it includes bias and residual, and is y.
    added = (biases, residual) if factors is None else ([], None)
    if len(weights) == 1 and not is_wide_enough(fp8, y.shape[-1]):
        bias = added[0][0] if added[0] else None
        low_rank_product(z, x, weights[0], terms, transpose_b=True, bias=bias, residual=added[1])
    elif added[1] is not None:
        linear(z, x, weights[0], *(added[0] or [None]), added[1], fp8=fp8)
        add_terms(z, terms, True)
    else:
        packed_linear(z, x, *weights, *added[0], fp8=fp8)
        add_terms(z, terms, True)
    # y = c∘z + bias + residual.
    if factors is not None and y.size:
        matrices = [as_matrix(a) for a in (y, z)]
        parts = [columns(a, [w.shape[0] for w in weights]) for a in (*matrices, contiguous(factors))]
        residual_rows = None if residual is None else as_matrix(residual)
        for i, (part, source, c) in enumerate(zip(*parts, strict=True)):
            scale_columns(part, source, c, biases[i] if biases else None, residual_rows)
