"""CUDA implementations of RMSNorm followed by linear layers, alone and as a gated MLP with a residual.

Plain reference: genesis/ops/norm_linear.py: `norm_linear`, `norm_mlp`. The normalized input is written to a buffer,
which the GEMM reads; the GEMM of gate and up applies SwiGLU in its epilogue. For few rows outside of autograd, and for
one row under `genesis.exact`, the GEMM kernel normalizes the input itself.
"""

from __future__ import annotations

from genesis.array import Array, empty
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.kernels.decode.exact_rows import exact_rows_into
from genesis.kernels.decode.few_rows import Norm, few_rows_linear_into, few_rows_swiglu_into, is_for_few_rows
from genesis.kernels.decode.wide_rows import is_for_wide_rows, takes_norm, wide_rows_swiglu_into
from genesis.kernels.elements import as_matrix
from genesis.kernels.gemm.gated import adapted_gemm_swiglu_into, gemm_swiglu_into, quantized_gemm_swiglu_into
from genesis.kernels.gemm.linear import linear, packed_linear
from genesis.kernels.norm.norm import rms_norm
from genesis.kernels.pointwise.swiglu import swiglu_packed
from genesis.ops.linalg import is_wide_enough
from genesis.ops.linear import own_parameters, split_parameters
from genesis.ops.low_rank import LowRank, split_pairs
from genesis.ops.shape import contiguous, slices


@cuda_impl("norm_linear")
def norm_linear(
    out: tuple[Array, ...], x: Array, scale: Array, *parameters: Array, eps: float, fp8: int = 0,
    low_rank: LowRank | None = None,
) -> None:  # fmt: skip
    y, rstd, *more = out
    weights, biases = split_parameters(own_parameters(parameters, low_rank))
    if not more and not fp8 and is_for_few_rows(x, *weights):
        few_rows_linear_into(y, x, weights, biases, norm=Norm(contiguous(scale), eps, rstd))
        return
    if not more and not fp8 and len(weights) == 1 and takes_norm(x, weights[0]):
        bias, norm = contiguous(biases[0]) if biases else None, Norm(contiguous(scale), eps, rstd)
        exact_rows_into(as_matrix(y), None, as_matrix(contiguous(x)), weights[0], bias, norm=norm)
        return
    normed = empty(x.shape, x.dtype, x.device)
    rms_norm((normed, rstd), x, scale, eps)
    packed_linear((y, *more) if more else y, normed, *parameters, fp8=fp8, low_rank=low_rank)


@cuda_impl("norm_mlp")
def norm_mlp(
    out: tuple[Array, ...], x: Array, scale: Array, down: Array, down_bias: Array | None, *parameters: Array,
    eps: float, keep: bool = False, fp8: int = 0, low_rank: LowRank | None = None,
    down_low_rank: LowRank | None = None,
) -> None:  # fmt: skip
    """Write x + h·Wdᵀ + bd. If one weight without bias holds gate and up, one kernel computes them and h."""
    params, _ = split_pairs(parameters, down_low_rank)
    down_pairs, pair_outputs = parameters[len(params) :], out[5 if keep else 3 :]
    y, rstd, gate_up = out[:3]
    # Few rows: kernels that stream the weights once.
    is_step = not (keep or pair_outputs or fp8)
    is_few = is_step and all(w.ndim == 2 for w in params) and is_for_few_rows(x, *params, down)
    if is_few or (is_step and len(params) == 1 and takes_norm(x, params[0])):
        h, norm = _empty_like(x, gate_up.shape[-1] // 2), Norm(contiguous(scale), eps, rstd)
        if is_few:
            gate, up = params if len(params) == 2 else slices(params[0], [params[0].shape[0] // 2] * 2)
            few_rows_swiglu_into(*map(as_matrix, (h, gate_up, contiguous(x))), gate, up, norm=norm)
        else:
            exact_rows_into(*map(as_matrix, (gate_up, h, contiguous(x))), contiguous(params[0]), norm=norm)
        linear(y, h, down, down_bias, x)
        return
    # Norm, then gate, up and h.
    normed, h = out[3:5] if keep else (_empty_like(x, x.shape[-1]), _empty_like(x, gate_up.shape[-1] // 2))
    rms_norm((normed, rstd), x, scale, eps)
    parts = tuple(map(as_matrix, (h, gate_up, normed)))
    is_quantized = is_wide_enough(fp8, gate_up.shape[-1])
    if low_rank is not None:
        u, *pair_outputs = pair_outputs
        fused, operands = split_pairs(params, low_rank)
        assert operands is not None
        is_plain = len(fused) == 1 and not is_quantized
        if not is_plain or not adapted_gemm_swiglu_into(*parts[:2], as_matrix(u), parts[2], *fused, operands, low_rank):
            packed_linear((gate_up, u), normed, *params, fp8=fp8, low_rank=low_rank)
            swiglu_packed(h, gate_up)
    elif len(params) == 1 and params[0].is_contiguous and not is_quantized and is_for_wide_rows(normed, *params):
        wide_rows_swiglu_into(*parts, params[0])
    elif is_quantized and len(params) == 1:
        quantized_gemm_swiglu_into(*parts, contiguous(params[0]))
    elif len(params) == 1:
        gemm_swiglu_into(*parts, params[0])
    else:
        packed_linear(gate_up, normed, *params, fp8=fp8)
        swiglu_packed(h, gate_up)
    # Free the normalized input before the down projection.
    del normed, parts
    results = (y, *pair_outputs) if pair_outputs else y
    linear(results, h, down, down_bias, x, *down_pairs, fp8=fp8, low_rank=down_low_rank)


def _empty_like(x: Array, width: int) -> Array:
    return empty((*x.shape[:-1], width), x.dtype, x.device)
