"""Activations and their derivatives, as functions of one tile for `elementwise`, and the two gradients of SwiGLU.

Reference: `genesis/ops/activation.py`, under the same names, and `genesis/ops/swiglu.py`: swiglu, swiglu_backward.

A 2-byte result keeps 8 or 11 bits, so it is computed with the GPU's fast exponential and division, which are accurate
to 22 bits. The exact functions in float32 would take longer than the memory traffic. Wider results use the exact
functions.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import promote_types
from genesis.kernels import maths
from genesis.kernels.elements import TRITON, collapse, needs_int64, work_type
from genesis.kernels.pointwise.elementwise import elementwise, load_operand, positions, store_result

_ROOT_HALF = tl.constexpr(math.sqrt(0.5))
_DENSITY = tl.constexpr(1 / math.sqrt(2 * math.pi))
_TANH_SCALE = tl.constexpr(math.sqrt(2 / math.pi))
_TANH_CUBIC = tl.constexpr(0.044715)


# --- Functions of one tile --------------------------------------------------------------------------------------------


@triton.jit
def relu(x):
    return tl.where(x <= 0, 0.0, x)  # keeps NaN


@triton.jit
def relu_backward(g, x):
    return tl.where(x <= 0, 0.0, g)  # a product would give NaN for an infinite g


@triton.jit
def silu(x):
    return maths.divide(x, maths.exp(-x) + 1)  # e^-x may overflow to inf, which correctly gives 0


@triton.jit
def silu_fast(x):
    return x / (tl.exp(-x) + 1)


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    e = tl.exp(-x) if FAST else maths.exp(-x)
    return 1 / (e + 1) if FAST else maths.divide(e * 0 + 1, e + 1)


@triton.jit
def silu_backward(g, x):
    s = sigmoid(x, False)
    return g * (s * (1 + x * (1 - s)))


@triton.jit
def silu_backward_fast(g, x):
    s = sigmoid(x, True)
    return g * (s * (1 + x * (1 - s)))


@triton.jit
def gelu(x):
    return x * (0.5 * (1 + maths.erf(x * _ROOT_HALF)))


@triton.jit
def gelu_backward(g, x):
    cdf = 0.5 * (1 + maths.erf(x * _ROOT_HALF))
    return g * (cdf + x * maths.exp(-0.5 * x * x) * _DENSITY)


@triton.jit
def gelu_tanh(x):
    return 0.5 * x * (1 + maths.tanh((x + x * x * x * _TANH_CUBIC) * _TANH_SCALE))


@triton.jit
def gelu_tanh_derivative(x, FAST: tl.constexpr):
    inner = (x + x * x * x * _TANH_CUBIC) * _TANH_SCALE
    t = fast_tanh(inner) if FAST else maths.tanh(inner)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (1 + x * x * 3 * _TANH_CUBIC) * _TANH_SCALE


@triton.jit
def gelu_tanh_backward(g, x):
    return g * gelu_tanh_derivative(x, False)


@triton.jit
def fast_tanh(x):
    """Return 1 - 2 / (e^2x + 1). Near 0 its error is an ulp of 1 in float32, which rounding to 2 bytes hides."""
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def gelu_tanh_fast(x):
    return 0.5 * x * (1 + fast_tanh((x + x * x * x * _TANH_CUBIC) * _TANH_SCALE))


@triton.jit
def gelu_tanh_backward_fast(g, x):
    return g * gelu_tanh_derivative(x, True)


@triton.jit
def swiglu(gate, up):
    return silu(gate) * up


@triton.jit
def swiglu_fast(gate, up):
    return silu_fast(gate) * up


@triton.jit
def swiglu_backward_kernel(p_dgate, p_dup, p_g, p_gate, p_up, n, sizes, so, sg, sa, sb, FAST: tl.constexpr,
                           WORK: tl.constexpr, INT64: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, INT64)  # [BLOCK] each
    g = load_operand(p_g, i, sizes, sg, m, False, WORK)  # [BLOCK]
    x = load_operand(p_gate, i, sizes, sa, m, False, WORK)  # [BLOCK]
    up = load_operand(p_up, i, sizes, sb, m, False, WORK)  # [BLOCK]
    s = sigmoid(x, FAST)  # [BLOCK]
    store_result(p_dup, i, g * (s * x), sizes, so, m)
    store_result(p_dgate, i, g * (s + s * x * (1 - s)) * up, sizes, so, m)


# --- The CUDA implementations -----------------------------------------------------------------------------------------

# (exact, fast) function of each op.
FUNCTIONS = {
    "relu": (relu, relu),
    "relu_backward": (relu_backward, relu_backward),
    "silu": (silu, silu_fast),
    "silu_backward": (silu_backward, silu_backward_fast),
    "gelu": (gelu, gelu),
    "gelu_backward": (gelu_backward, gelu_backward),
    "gelu_tanh": (gelu_tanh, gelu_tanh_fast),
    "gelu_tanh_backward": (gelu_tanh_backward, gelu_tanh_backward_fast),
    "swiglu": (swiglu, swiglu_fast),
}


def _run(functions: tuple[Any, Any], out: Array, *operands: Array) -> None:
    elementwise(functions[out.dtype.itemsize == 2], out, *operands)


for _name, _functions in FUNCTIONS.items():
    cuda_impl(_name)(functools.partial(_run, _functions))


@cuda_impl("swiglu_backward")
def swiglu_backward(out: tuple[Array, Array], g: Array, gate: Array, up: Array) -> None:
    """Store dgate = g·up·σ·(1 + gate·(1 - σ)) and dup = g·gate·σ, in one pass."""
    dgate, dup = out
    sizes, so, *strides = collapse(dgate.shape, dgate.strides, g.strides, gate.strides, up.strides)
    work = work_type(promote_types(promote_types(g.dtype, gate.dtype), up.dtype))
    block, n = 1024, dgate.size
    launch(
        swiglu_backward_kernel, triton.cdiv(n, block), dgate, dup, g, gate, up, n, sizes, so, *strides,
        FAST=dgate.dtype.itemsize == 2 and dup.dtype.itemsize == 2, WORK=TRITON[work.name],
        INT64=needs_int64(sizes, so, *strides), BLOCK=block, num_warps=4,
    )  # fmt: skip
