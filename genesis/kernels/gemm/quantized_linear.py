"""CUDA implementation of a linear layer with 8-bit weights.

Plain reference: genesis/ops/quantized_linear.py: `quantized_linear`, `dequantize_rows`.

For few rows, as in a step of generation, the kernel streams the codes once (few_rows.py). For more rows, as in a
prompt, the weight is first converted to x's type in memory; that pass costs little compared with the matmul.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, float8_e4m3fn, float64
from genesis.errors import DeviceError
from genesis.kernels.decode.few_rows import MAX_ROWS, Norm, few_rows_into, few_rows_swiglu_into, takes_mma
from genesis.kernels.elements import TRITON, as_matrix, converted
from genesis.kernels.gemm.linalg import matmul_into
from genesis.kernels.norm.norm import rms_norm
from genesis.kernels.pointwise.swiglu import swiglu_packed
from genesis.ops.fp8 import lacking
from genesis.ops.norm import statistics_type
from genesis.ops.quantized_linear import KINDS
from genesis.ops.shape import contiguous, slices

TILE = 4096  # elements of a row per program


@triton.jit(do_not_specialize=["k"])
def dequantize_kernel(p_w, p_codes, p_scale, k, TYPE: tl.constexpr, BK: tl.constexpr):
    """Store BK elements of a row of W = diag(scale)·codes, rounded."""
    row, o_k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BK + tl.arange(0, BK)
    b_w = converted(tl.load(p_codes + row * k + o_k, mask=o_k < k, other=0.0), tl.float32) * tl.load(p_scale + row)
    tl.store(p_w + row * k + o_k, converted(b_w, TYPE), mask=o_k < k)


@cuda_impl("dequantize_rows")
def dequantize_rows(out: Array, codes: Array, scale: Array, *, dtype: DType) -> None:
    if out.size:
        weight, (n, k) = _as_codes(contiguous(codes)), codes.shape
        how = {"TYPE": TRITON[dtype.name], "BK": TILE, "num_warps": 4}
        launch(dequantize_kernel, (n, triton.cdiv(k, TILE)), out, weight, contiguous(scale), k, **how)


def _as_codes(codes: Array) -> Array:
    """Return the codes as an array of their real type. Raises DeviceError if that is e4m3 and the GPU lacks it."""
    kind = KINDS[codes.dtype]
    lack = lacking(backend_of(codes.device).driver.properties.capability, codes.device)
    if kind is float8_e4m3fn and lack is not None:
        raise DeviceError(f"quantized_linear in fp8 {lack}", next="quantize to int8")
    return Array(codes.storage, codes.shape, codes.strides, kind, codes.device, codes.offset)


@cuda_impl("quantized_linear")
def quantized_linear(
    out: Array, x: Array, codes: Array, scale: Array, bias: Array | None = None, residual: Array | None = None,
    norm: Array | None = None, *, eps: float = 0.0, swiglu: bool = False,
) -> None:  # fmt: skip
    if not out.size:
        return
    weight, scale, x = _as_codes(contiguous(codes)), contiguous(scale), contiguous(x)
    bias, residual, norm = (None if a is None else contiguous(a) for a in (bias, residual, norm))
    rows, y = as_matrix(x), as_matrix(out)
    gate_up = empty((y.shape[0], codes.shape[0]), x.dtype, x.device) if swiglu else y
    is_few = rows.shape[0] <= MAX_ROWS and x.dtype is not float64 and codes.size
    if is_few and (rows.shape[0] == 1 or takes_mma(rows, [weight])):
        how = {"norm": None if norm is None else Norm(norm, eps), "w_scale": scale}
        if swiglu:
            few_rows_swiglu_into(y, gate_up, rows, *slices(weight, [y.shape[1]] * 2), **how)
        else:
            few_rows_into(y, rows, weight, bias=bias, residual=None if residual is None else as_matrix(residual), **how)
        return
    # More rows: dequantize the weight, then multiply.
    if norm is not None:
        normed = empty(rows.shape, x.dtype, x.device)
        rms_norm((normed, empty((rows.shape[0],), statistics_type(x.dtype), x.device)), rows, norm, eps)
        rows = normed
    w = empty(codes.shape, x.dtype, x.device)
    dequantize_rows(w, codes, scale, dtype=x.dtype)
    residual = None if residual is None else as_matrix(residual)
    matmul_into(gate_up, rows, w, transpose_b=True, bias=bias, residual=residual)
    if swiglu:
        swiglu_packed(y, gate_up)
