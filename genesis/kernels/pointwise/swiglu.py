"""SwiGLU and GEGLU on packed [gate, up] rows. Tiles of both halves are read and written once.

Reference: `genesis/ops/swiglu.py`: swiglu_packed, swiglu_packed_backward, swiglu_linear_backward, geglu_packed,
geglu_packed_backward. Tiles: BN rows x BH columns of each half.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.kernels.elements import (
    TRITON,
    as_matrix,
    collapse,
    converted,
    needs_int64,
    offsets,
    program_indices,
    work_type,
)
from genesis.kernels.formulas import tile_function
from genesis.kernels.gemm.fp8 import quantize_scaled_operands
from genesis.kernels.gemm.linalg import Scales, matmul_into
from genesis.kernels.gemm.low_rank import Term, add_terms, can_extend, concat_columns, low_rank_product
from genesis.kernels.gemm.warp_specialized import ws_swiglu_backward_into
from genesis.kernels.pointwise.elementwise import copy
from genesis.ops.linalg import is_wide_enough
from genesis.ops.shape import contiguous, slices
from genesis.shapes import contiguous_strides, numel

sigmoid, sigmoid_fast = (tile_function("sigmoid", form) for form in ("exact", "fast"))
gelu_tanh, gelu_tanh_fast = (tile_function("gelu_tanh", form) for form in ("exact", "fast"))
gelu_backward, gelu_backward_fast = (tile_function("gelu_tanh_backward", form) for form in ("exact", "fast"))
TILE = 1024  # elements of each half: 16 bytes per thread in a 2-byte type


@triton.jit
def tile_indices(n, half, INT64: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr):
    """Return the rows [BN] and columns [BH] of this program's tile of a half, and their mask [BN, BH]."""
    i_n, i_h = program_indices(BN, INT64), tl.program_id(1) * BH + tl.arange(0, BH)  # [BN], [BH]
    return i_n, i_h, (i_n < n)[:, None] & (i_h < half)[None, :]


@triton.jit
def swiglu_packed_kernel(p_y, p_x, n, half, sizes, sx, dx, GELU: tl.constexpr, FAST: tl.constexpr, WORK: tl.constexpr,
                         INT64: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Store silu(gate)·up, or gelu(gate)·up with GELU."""
    i_n, i_h, m = tile_indices(n, half, INT64, BN, BH)  # [BN], [BH], [BN, BH]
    p_gate = (p_x + offsets(i_n, sizes, sx))[:, None] + (i_h * dx)[None, :]  # [BN, BH]
    gate = converted(tl.load(p_gate, mask=m, other=0), WORK)  # [BN, BH]
    up = converted(tl.load(p_gate + half * dx, mask=m, other=0), WORK)  # [BN, BH]
    if GELU:
        y = (gelu_tanh_fast(gate) if FAST else gelu_tanh(gate)) * up  # [BN, BH]
    else:
        y = (sigmoid_fast(gate) if FAST else sigmoid(gate)) * gate * up  # [BN, BH]
    tl.store(p_y + (i_n * half)[:, None] + i_h[None, :], converted(y, p_y.dtype.element_ty), mask=m)


@triton.jit
def swiglu_packed_backward_kernel(p_d, p_y, p_g, p_x, n, half, sizes, sg, sx, dg, dx, RESULT: tl.constexpr,
                                  GELU: tl.constexpr, FAST: tl.constexpr, WORK: tl.constexpr, INT64: tl.constexpr,
                                  BN: tl.constexpr, BH: tl.constexpr):  # fmt: skip
    """Store both gradients, and with RESULT also the result of forward."""
    i_n, i_h, m = tile_indices(n, half, INT64, BN, BH)  # [BN], [BH], [BN, BH]
    p_gate = (p_x + offsets(i_n, sizes, sx))[:, None] + (i_h * dx)[None, :]  # [BN, BH]
    o_g = offsets(i_n, sizes, sg)[:, None] + (i_h * dg)[None, :]  # [BN, BH]
    gate = converted(tl.load(p_gate, mask=m, other=0), WORK)  # [BN, BH]
    up = converted(tl.load(p_gate + half * dx, mask=m, other=0), WORK)  # [BN, BH]
    g = converted(tl.load(p_g + o_g, mask=m, other=0), WORK)  # [BN, BH]
    if GELU:
        activated = gelu_tanh_fast(gate) if FAST else gelu_tanh(gate)
        d_gate = gelu_backward_fast(g, gate) if FAST else gelu_backward(g, gate)
    else:
        s = sigmoid_fast(gate) if FAST else sigmoid(gate)
        activated = s * gate
        d_gate = g * (s + activated * (1 - s))
    p_gate = p_d + (2 * i_n * half)[:, None] + i_h[None, :]  # [BN, BH]
    tl.store(p_gate, converted(d_gate * up, p_d.dtype.element_ty), mask=m)
    tl.store(p_gate + half, converted(g * activated, p_d.dtype.element_ty), mask=m)
    if RESULT:
        tl.store(p_y + (i_n * half)[:, None] + i_h[None, :], converted(activated * up, p_y.dtype.element_ty), mask=m)


def _arguments(x: Array, *others: Array) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Return the grid, arguments and constants of a kernel over x and `others`, which have half the width of x."""
    half, operands = x.shape[-1] // 2, (*others, x)
    sizes, *strides = collapse(x.shape[:-1], *(a.strides[:-1] for a in operands))
    n = numel(sizes)
    columns = min(triton.next_power_of_2(half), 1024)
    rows = min(TILE // columns, triton.next_power_of_2(n))
    wide = [(*s, a.strides[-1]) for s, a in zip(strides, operands, strict=True)]
    constants = {
        "FAST": x.dtype.itemsize == 2, "WORK": TRITON[work_type(x.dtype).name], "BN": rows,
        "BH": columns, "num_warps": 4,
        "INT64": needs_int64((*sizes, 2 * half), *wide, contiguous_strides((*sizes, 2 * half))),
    }  # fmt: skip
    grid = triton.cdiv(n, rows), triton.cdiv(half, columns)
    return grid, (n, half, sizes, *strides, *(a.strides[-1] for a in operands)), constants


def _packed(gelu: bool, out: Array, gate_up: Array) -> None:
    if out.size:
        grid, values, constants = _arguments(gate_up)
        launch(swiglu_packed_kernel, grid, out, gate_up, *values, GELU=gelu, **constants)


def _packed_backward(
    gelu: bool, out: Array | tuple[Array, Array], g: Array, gate_up: Array, with_result: bool = False
) -> None:
    """Store [dgate, dup], and with `with_result` also the result of forward, in one pass."""
    d, y = out if isinstance(out, tuple) else (out, None)
    if g.size:
        grid, values, constants = _arguments(gate_up, g)
        launch(
            swiglu_packed_backward_kernel, grid, d, y, g, gate_up, *values, RESULT=y is not None, GELU=gelu,
            **constants,
        )  # fmt: skip


swiglu_packed = cuda_impl("swiglu_packed")(functools.partial(_packed, False))
swiglu_packed_backward = cuda_impl("swiglu_packed_backward")(functools.partial(_packed_backward, False))
cuda_impl("geglu_packed")(functools.partial(_packed, True))
cuda_impl("geglu_packed_backward")(functools.partial(_packed_backward, True))


@cuda_impl("swiglu_linear_backward")
def swiglu_linear_backward(
    out: Array | tuple[Array, Array], g: Array, weight: Array, gate_up: Array, v: Array | None = None,
    a: Array | None = None, with_result: bool = False, fp8: int = 0,
) -> None:  # fmt: skip
    """Store [dgate, dup] for dh = g·W + v·A, and with `with_result` also silu(gate)·up."""
    d, h = out if isinstance(out, tuple) else (out, None)
    if not d.size:
        return
    # Quantize the operands, or append v·A to them, so that one matmul computes dh.
    left, right, scales = g, weight, None
    terms = [] if v is None or a is None else [Term(0, a.shape[1], v, a)]
    if is_wide_enough(fp8, weight.shape[1]):
        left, right, scales = quantize_scaled_operands(as_matrix(contiguous(g)), contiguous(weight))
    elif v is not None and a is not None and can_extend(numel(g.shape[:-1]), g.shape[-1], v.shape[-1]):
        left = concat_columns(as_matrix(contiguous(g)), as_matrix(contiguous(v)))
        right, terms = empty((weight.shape[0] + a.shape[0], weight.shape[1]), weight.dtype, weight.device), []
        for part, source in zip(slices(right, [weight.shape[0], a.shape[0]]), (weight, a), strict=True):
            copy(part, source)
    # Fuse the matmul and SwiGLU's backward pass, or run one after the other.
    if gate_up.is_contiguous and left.is_contiguous and right.is_contiguous and not terms:
        result = None if h is None else as_matrix(h)
        if ws_swiglu_backward_into(as_matrix(d), result, as_matrix(left), right, as_matrix(gate_up), scales):
            return
    dh = empty((*d.shape[:-1], weight.shape[1]), d.dtype, g.device)
    if scales is None:
        low_rank_product(dh if left is g else as_matrix(dh), left, right, terms)
    else:
        matmul_into(as_matrix(dh), left, right, transpose_b=True, scales=Scales(scales, False))
        add_terms(dh, terms)
    swiglu_packed_backward(out, dh, gate_up, with_result=with_result)
