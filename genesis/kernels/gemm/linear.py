"""CUDA implementations of linear layers: GEMMs with K-major weights; bias and residual join before the single rounding.

Plain reference: genesis/ops/linear.py: `linear`, `packed_linear`.
"""

from __future__ import annotations

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.kernels.gemm.fp8 import quantized_gemm_into
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.strides import as_matrix
from genesis.ops.fp8 import is_wide_enough
from genesis.ops.linear import columns, split_parameters
from genesis.ops.shape import contiguous

__all__: list[str] = []


@cuda_impl("linear")
def linear(
    out: Array, x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None, fp8: int = 0
) -> None:
    """y = x·Wᵀ + b + residual."""
    residual = None if residual is None else contiguous(residual)
    if is_wide_enough(fp8, out.shape[-1]):
        residual = None if residual is None else as_matrix(residual)
        rows = as_matrix(contiguous(x))
        quantized_gemm_into(as_matrix(out), rows, contiguous(weight), bias=bias, residual=residual)
        return
    matmul_into(out, x, weight, transpose_b=True, bias=bias, residual=residual)


@cuda_impl("packed_linear")
def packed_linear(out: Array, x: Array, *parameters: Array, fp8: int = 0) -> None:
    """[x·W1ᵀ + b1, …, x·Wnᵀ + bn], a GEMM for each weight: those contiguous in memory were joined before."""
    weights, biases = split_parameters(parameters)
    is_quantized = is_wide_enough(fp8, out.shape[-1])
    if is_quantized:
        out, x = as_matrix(out), as_matrix(contiguous(x))
    parts = columns(out, [w.shape[0] for w in weights])
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        bias = biases[i] if biases else None
        if is_quantized:
            quantized_gemm_into(part, x, contiguous(weight), bias=bias)
        else:
            matmul_into(part, x, weight, transpose_b=True, bias=bias)
