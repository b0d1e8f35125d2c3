"""Gate and up projections with SwiGLU: h = silu(x·Wgᵀ)·(x·Wuᵀ), with gate and up stored for the backward pass.

Plain reference: genesis/ops/linear.py: `packed_linear`, and genesis/ops/swiglu.py: `swiglu_packed`.

With many tiles, the epilogue of the warp-specialized GEMM applies SwiGLU, which saves the loads of a separate kernel,
two thirds of its traffic. With fewer tiles, a GEMM and a separate kernel are faster (docs/log.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend import mode
from genesis.backend.cuda import backend_of
from genesis.dtypes import bfloat16, float32
from genesis.kernels.elements import converted
from genesis.kernels.gemm.fp8 import quantize_operands
from genesis.kernels.gemm.linalg import Scales, matmul_into
from genesis.kernels.gemm.low_rank import can_extend, concat_columns, make_u
from genesis.kernels.gemm.warp_specialized import is_for_swiglu, ws_swiglu_into
from genesis.kernels.pointwise.elementwise import copy, fill
from genesis.kernels.pointwise.swiglu import sigmoid_fast, swiglu_packed
from genesis.ops.low_rank import LowRank, Operands
from genesis.ops.shape import window


@triton.jit
def swiglu(b_gate, b_up):
    """Return silu(gate)·up in float32, with the same operations that the backward pass recomputes it with."""
    g, u = converted(b_gate, tl.float32), converted(b_up, tl.float32)
    return sigmoid_fast(g) * g * u


@triton.jit
def halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """Return the left and right halves [BM, BN // 2] of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


def gemm_swiglu_into(h: Array, gate_up: Array, x: Array, weight: Array, scales: Array | None = None) -> None:
    """Write gate_up = [gate | up] = x·weightᵀ and h = silu(gate)·up.

    Args:
        h: `[m, f]`, contiguous.
        gate_up: `[m, 2·f]`, contiguous.
        x: `[m, k]`, contiguous.
        weight: `[2·f, k]`: the rows of gate, then the rows of up.
        scales: scales of quantized operands, of rows, then of columns, `[m + 2·f]`.
    """
    if not ws_swiglu_into(h, gate_up, x, weight, scales):
        matmul_into(gate_up, x, weight, transpose_b=True, scales=None if scales is None else Scales(scales, True))
        swiglu_packed(h, gate_up)


def adapted_gemm_swiglu_into(
    h: Array, gate_up: Array, u: Array, x: Array, weight: Array, operands: Operands, low_rank: LowRank
) -> bool:
    """Compute `gemm_swiglu_into` with low-rank pairs, as [x | u]·[weight | B]ᵀ, and u `[m, rank]`, contiguous.

    Returns False, without writing h and gate_up, where copying costs more, inside `genesis.exact`, or unless gate and
    up have pairs of the same rank with a single operand B. Factors, which add a rounding, require bfloat16 and
    `is_for_swiglu`.
    """
    halves, factors = [(0, h.shape[1]), (h.shape[1], 2 * h.shape[1])], operands.factors
    is_regular = [p[:2] for p in low_rank.pairs] == halves and len({p.rank for p in low_rank.pairs}) == 1
    if not is_regular or len(operands.b) != 1:
        return False
    properties = backend_of(x.device).driver.properties
    if properties.capability < (9, 0) or x.dtype.itemsize != 2 or not x.size or not h.size or not weight.is_contiguous:
        return False
    if mode.exact or not can_extend(x.shape[0], x.shape[1], low_rank.rank):
        return False
    if factors is not None and not (x.dtype is bfloat16 and is_for_swiglu(x, h.shape[1])):
        return False
    make_u(u, x, operands, low_rank)
    if factors is None and not any(p.scale for p in low_rank.pairs) and is_for_swiglu(x, h.shape[1]):
        return ws_swiglu_into(h, gate_up, x, weight)  # the columns of u would only add zeros at the end of each sum
    left, right = concat_columns(x, u), concat_columns(weight, operands.b[0], parts=2)
    if factors is None:
        gemm_swiglu_into(h, gate_up, left, right)
        return True
    scales = empty((x.shape[0] + factors.size,), float32, x.device)  # of rows, then of columns
    fill(scales, value=1, shape=scales.shape, dtype=float32)
    copy(window(scales, x.shape[0], scales.size), factors)
    return ws_swiglu_into(h, gate_up, left, right, scales)


def quantized_gemm_swiglu_into(h: Array, gate_up: Array, x: Array, weight: Array) -> None:
    """Compute `gemm_swiglu_into` in 8-bit floats, on any device."""
    if h.size:
        gemm_swiglu_into(h, gate_up, *quantize_operands(x, weight))
