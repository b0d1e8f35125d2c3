"""Kernels of the elementwise optimizer steps: one launch over all elements, after one that makes the step's constants.

The parameter of a kernel is float32 or float64; or bfloat16 that is rounded at random; or, with `p_low`, a bfloat16
weight whose further bits are there. States are as the parameter computes, or bfloat16 rounded at random.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, float32, float64
from genesis.kernels import maths
from genesis.kernels.optim.rounding import at_random, draws, halves, join
from genesis.kernels.optim.step_constants import (
    Constants,
    Scalar,
    apart,
    exact,
    note,
    put,
    scalar,
    step_constants,
    wanted,
)
from genesis.kernels.pointwise.elementwise import positions
from genesis.kernels.pointwise.random import number_words
from genesis.kernels.strides import collapse, is_wide, offsets
from genesis.kernels.types import TRITON, converted
from genesis.ops.rounding import Noise

__all__: list[str] = []

BLOCK, WARPS = 1024, 4  # elements and warps of a program; on an H200 as fast as a copy, as are 128 to 1024 elements


# --- Constants --------------------------------------------------------------------------------------------------------


@triton.jit
def sgd_constants(p_c, p_s, lr, step, scale, first, each, decay, NUMBERS: tl.constexpr):
    rate = scalar(lr, NUMBERS & 1)
    put(p_c, 0, 1 - rate * decay)
    put(p_c, 1, rate * note(p_c, p_s, step, scale, first, each, NUMBERS))


@triton.jit
def momentum_constants(p_c, p_s, lr, step, scale, first, each, momentum, dampening, decay, NUMBERS: tl.constexpr):
    put(p_c, 0, scalar(lr, NUMBERS & 1))
    put(p_c, 1, note(p_c, p_s, step, scale, first, each, NUMBERS))
    put(p_c, 2, exact(momentum))
    put(p_c, 3, 1 - exact(dampening))
    put(p_c, 4, exact(decay))
    put(p_c, 5, (scalar(step, NUMBERS & 2) <= 1).to(tl.float64))


@triton.jit
def adam_constants(p_c, p_s, lr, step, scale, first, each, beta1, beta2, eps, decay, L2: tl.constexpr,
                   NUMBERS: tl.constexpr):  # fmt: skip
    rate, count = scalar(lr, NUMBERS & 1), scalar(step, NUMBERS & 2)
    c = note(p_c, p_s, step, scale, first, each, NUMBERS)
    b1, b2 = exact(beta1), exact(beta2)
    root = maths.root(1 - maths.power(b2, count))
    pre = c * 0 + 1 if L2 else c  # with L2 the gradient is scaled when the decay is added
    put(p_c, 0, b1)
    put(p_c, 1, b2)
    put(p_c, 2, (1 - b1) * pre)
    put(p_c, 3, (1 - b2) * pre * pre)
    put(p_c, 4, exact(eps) * root)
    put(p_c, 5, rate / (1 - maths.power(b1, count)) * root)
    put(p_c, 6, 1 - rate * decay)
    put(p_c, 7, c)
    put(p_c, 8, exact(decay))


@triton.jit
def lion_constants(p_c, p_s, lr, step, scale, first, each, beta1, beta2, decay, NUMBERS: tl.constexpr):
    rate, c = scalar(lr, NUMBERS & 1), note(p_c, p_s, step, scale, first, each, NUMBERS)
    b1, b2 = exact(beta1), exact(beta2)
    put(p_c, 0, b1)
    put(p_c, 1, b2)
    put(p_c, 2, (1 - b1) * c)
    put(p_c, 3, (1 - b2) * c)
    put(p_c, 4, rate)
    put(p_c, 5, 1 - rate * decay)


# --- Reading and writing what a step changes --------------------------------------------------------------------------


@triton.jit
def read(p_x, o, m, WORK: tl.constexpr):
    return converted(tl.load(p_x + o, mask=m), WORK)


@triton.jit
def write(p_x, o, m, y, p_s, s0, s1, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """Keep y; bfloat16 is rounded at random, with the noise of its stream."""
    if p_x.dtype.element_ty == tl.bfloat16:
        tl.store(p_x + o, at_random(y, draws(tl.load(p_s + STREAM), s0, s1, BLOCK // 8)), mask=m)
    else:
        tl.store(p_x + o, y, mask=m)


@triton.jit
def read_master(p_p, p_low, o_p, o_low, m, WORK: tl.constexpr):
    if p_low is not None:
        return join(tl.load(p_p + o_p, mask=m), tl.load(p_low + o_low, mask=m))
    else:
        return read(p_p, o_p, m, WORK)


@triton.jit
def write_master(p_p, p_low, o_p, o_low, m, y, p_s, s0, s1, BLOCK: tl.constexpr):
    if p_low is not None:
        weight, low = halves(y)
        tl.store(p_p + o_p, weight, mask=m)
        tl.store(p_low + o_low, low, mask=m)
    else:
        write(p_p, o_p, m, y, p_s, s0, s1, 0, BLOCK)


# --- The kernels ------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["s0", "s1"])
def sgd(p_p, p_low, p_g, p_c, p_s, s0, s1, n, sizes, sp, sl, sg, WORK: tl.constexpr, DIMS: tl.constexpr,
        WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, WIDE)
    m = wanted(m, p_c)
    o_p, o_l = offsets(i, sizes, sp, DIMS), offsets(i, sizes, sl, DIMS)
    keep, take = tl.load(p_c), tl.load(p_c + 1)
    p = read_master(p_p, p_low, o_p, o_l, m, WORK)
    g = read(p_g, offsets(i, sizes, sg, DIMS), m, WORK)
    write_master(p_p, p_low, o_p, o_l, m, p * keep - g * take, p_s, s0, s1, BLOCK)


@triton.jit(do_not_specialize=["s0", "s1"])
def sgd_momentum(p_p, p_low, p_g, p_b, p_c, p_s, s0, s1, n, sizes, sp, sl, sg, sb, NESTEROV: tl.constexpr,
                 WORK: tl.constexpr, DIMS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, WIDE)
    m = wanted(m, p_c)
    o_p, o_l, o_b = offsets(i, sizes, sp, DIMS), offsets(i, sizes, sl, DIMS), offsets(i, sizes, sb, DIMS)
    rate, scale, mu, damp, decay = (
        tl.load(p_c), tl.load(p_c + 1), tl.load(p_c + 2), tl.load(p_c + 3), tl.load(p_c + 4),
    )  # fmt: skip
    p, b = read_master(p_p, p_low, o_p, o_l, m, WORK), read(p_b, o_b, m, WORK)
    g = read(p_g, offsets(i, sizes, sg, DIMS), m, WORK) * scale + p * decay
    b = tl.where(tl.load(p_c + 5) != 0, g, b * mu + g * damp)
    update = g + b * mu if NESTEROV else b
    write(p_b, o_b, m, b, p_s, s0, s1, 1, BLOCK)
    write_master(p_p, p_low, o_p, o_l, m, p - update * rate, p_s, s0, s1, BLOCK)


@triton.jit(do_not_specialize=["s0", "s1"])
def adam(p_p, p_low, p_g, p_m, p_v, p_c, p_s, s0, s1, n, sizes, sp, sl, sg, sm, sv, L2: tl.constexpr,
         WORK: tl.constexpr, DIMS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, mask = positions(n, BLOCK, WIDE)
    mask = wanted(mask, p_c)
    o_p, o_l = offsets(i, sizes, sp, DIMS), offsets(i, sizes, sl, DIMS)
    o_m, o_v = offsets(i, sizes, sm, DIMS), offsets(i, sizes, sv, DIMS)
    b1, b2, k1, k2 = tl.load(p_c), tl.load(p_c + 1), tl.load(p_c + 2), tl.load(p_c + 3)
    small, alpha, keep = tl.load(p_c + 4), tl.load(p_c + 5), tl.load(p_c + 6)
    p = read_master(p_p, p_low, o_p, o_l, mask, WORK)
    m, v = read(p_m, o_m, mask, WORK), read(p_v, o_v, mask, WORK)
    g = read(p_g, offsets(i, sizes, sg, DIMS), mask, WORK)
    if L2:
        g = p * tl.load(p_c + 8) + g * tl.load(p_c + 7)
    else:
        p = p * keep
    m = m * b1 + g * k1
    v = v * b2 + g * g * k2
    write(p_m, o_m, mask, m, p_s, s0, s1, 1, BLOCK)
    write(p_v, o_v, mask, v, p_s, s0, s1, 2, BLOCK)
    p = p - maths.divide(m, maths.root(v) + small) * alpha
    write_master(p_p, p_low, o_p, o_l, mask, p, p_s, s0, s1, BLOCK)


@triton.jit(do_not_specialize=["s0", "s1"])
def lion(p_p, p_low, p_g, p_m, p_c, p_s, s0, s1, n, sizes, sp, sl, sg, sm, WORK: tl.constexpr, DIMS: tl.constexpr,
         WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, mask = positions(n, BLOCK, WIDE)
    mask = wanted(mask, p_c)
    o_p, o_l, o_m = offsets(i, sizes, sp, DIMS), offsets(i, sizes, sl, DIMS), offsets(i, sizes, sm, DIMS)
    b1, b2, k1, k2 = tl.load(p_c), tl.load(p_c + 1), tl.load(p_c + 2), tl.load(p_c + 3)
    rate, keep = tl.load(p_c + 4), tl.load(p_c + 5)
    p, m = read_master(p_p, p_low, o_p, o_l, mask, WORK), read(p_m, o_m, mask, WORK)
    g = read(p_g, offsets(i, sizes, sg, DIMS), mask, WORK)
    s = m * b1 + g * k1
    update = tl.where(s > 0, rate, tl.where(s < 0, -rate, s))  # 0 and NaN stay
    write(p_m, o_m, mask, m * b2 + g * k2, p_s, s0, s1, 1, BLOCK)
    write_master(p_p, p_low, o_p, o_l, mask, p * keep - update, p_s, s0, s1, BLOCK)


# --- Launching them ---------------------------------------------------------------------------------------------------


def _step(
    kernel: Any, param: Array, low: Array | None, grad: Array, states: tuple[Array, ...], constants: Constants,
    noise: Noise | None, **flags: bool,
) -> None:  # fmt: skip
    """Launch a step."""
    changed = (param, *states) if low is None else (param, *states, low)
    seed = noise.seed if noise else 0
    with apart(*changed) as (param, *rest):
        low, states = (None, tuple(rest)) if low is None else (rest[-1], tuple(rest[:-1]))
        operands = (param, param if low is None else low, grad, *states)
        sizes, *strides = collapse(param.shape, *(x.strides for x in operands))
        launch(
            kernel, triton.cdiv(param.size, BLOCK), param, low, grad, *states, constants.values, constants.starts,
            *number_words(seed), param.size, sizes, *strides, **flags, WORK=TRITON[_work(param).name], DIMS=len(sizes),
            WIDE=is_wide(sizes, *strides), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def _work(param: Array) -> DType:
    """The type to compute in."""
    return float64 if param.dtype is float64 else float32


def _sgd(
    param: Array, low: Array | None, grad: Array, lr: Scalar, step: Scalar, scale: Scalar, weight_decay: float,
    noise: Noise | None,
) -> None:  # fmt: skip
    made = step_constants(sgd_constants, _work(param), param, (lr, step, scale), weight_decay, noise=noise)
    _step(sgd, param, low, grad, (), made, noise)


@cuda_impl("sgd_step")
def sgd_step(
    out: tuple[()], param: Array, grad: Array, lr: Scalar, step: Scalar, grad_scale: Scalar, *, weight_decay: float,
    noise: Noise | None = None,
) -> None:  # fmt: skip
    """p -= lr·(c·g + wd·p), c the `grad_scale`."""
    _sgd(param, None, grad, lr, step, grad_scale, weight_decay, noise)


@cuda_impl("sgd_split_step")
def sgd_split_step(
    out: tuple[()], weight: Array, low: Array, grad: Array, lr: Scalar, step: Scalar, grad_scale: Scalar, *,
    weight_decay: float, noise: Noise | None = None,
) -> None:  # fmt: skip
    """`sgd_step` of a split master."""
    _sgd(weight, low, grad, lr, step, grad_scale, weight_decay, noise)


def _momentum(
    param: Array, low: Array | None, grad: Array, buffer: Array, numbers: tuple[Scalar, Scalar, Scalar], *,
    momentum: float, dampening: float, nesterov: bool, weight_decay: float, noise: Noise | None = None,
) -> None:  # fmt: skip
    rest = (momentum, dampening, weight_decay)
    made = step_constants(momentum_constants, _work(param), param, numbers, *rest, noise=noise)
    _step(sgd_momentum, param, low, grad, (buffer,), made, noise, NESTEROV=nesterov)


@cuda_impl("sgd_momentum_step")
def sgd_momentum_step(
    out: tuple[()], param: Array, grad: Array, momentum_buffer: Array, lr: Scalar, step: Scalar, grad_scale: Scalar,
    **settings: Any,
) -> None:  # fmt: skip
    """With g' = c·g + wd·p: b = g' at step 1, else b = μ·b + (1-δ)·g'; p -= lr·b, or lr·(g' + μ·b) with Nesterov."""
    _momentum(param, None, grad, momentum_buffer, (lr, step, grad_scale), **settings)


@cuda_impl("sgd_momentum_split_step")
def sgd_momentum_split_step(
    out: tuple[()], weight: Array, low: Array, grad: Array, momentum_buffer: Array, lr: Scalar, step: Scalar,
    grad_scale: Scalar, **settings: Any,
) -> None:  # fmt: skip
    """`sgd_momentum_step` of a split master."""
    _momentum(weight, low, grad, momentum_buffer, (lr, step, grad_scale), **settings)


def _adamw(
    param: Array, low: Array | None, grad: Array, states: tuple[Array, Array],
    numbers: tuple[Scalar, Scalar, Scalar], *, beta1: float, beta2: float, eps: float, weight_decay: float,
    decoupled: bool, noise: Noise | None = None,
) -> None:  # fmt: skip
    l2 = bool(weight_decay) and not decoupled
    rest = (beta1, beta2, eps, weight_decay)
    made = step_constants(adam_constants, _work(param), param, numbers, *rest, noise=noise, L2=l2)
    _step(adam, param, low, grad, states, made, noise, L2=l2)


@cuda_impl("adamw_step")
def adamw_step(
    out: tuple[()], param: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, lr: Scalar, step: Scalar,
    grad_scale: Scalar, **settings: Any,
) -> None:  # fmt: skip
    """m = β1·m + (1-β1)·c·g, v = β2·v + (1-β2)·(c·g)², p = (1 - lr·wd)·p - α·m / (√v + ε·√b2)."""
    _adamw(param, None, grad, (exp_avg, exp_avg_sq), (lr, step, grad_scale), **settings)


@cuda_impl("adamw_split_step")
def adamw_split_step(
    out: tuple[()], weight: Array, low: Array, grad: Array, exp_avg: Array, exp_avg_sq: Array, lr: Scalar,
    step: Scalar, grad_scale: Scalar, **settings: Any,
) -> None:  # fmt: skip
    """`adamw_step` of a split master."""
    _adamw(weight, low, grad, (exp_avg, exp_avg_sq), (lr, step, grad_scale), **settings)


def _lion(
    param: Array, low: Array | None, grad: Array, exp_avg: Array, numbers: tuple[Scalar, Scalar, Scalar], *,
    beta1: float, beta2: float, weight_decay: float, noise: Noise | None = None,
) -> None:  # fmt: skip
    made = step_constants(lion_constants, _work(param), param, numbers, beta1, beta2, weight_decay, noise=noise)
    _step(lion, param, low, grad, (exp_avg,), made, noise)


@cuda_impl("lion_step")
def lion_step(
    out: tuple[()], param: Array, grad: Array, exp_avg: Array, lr: Scalar, step: Scalar, grad_scale: Scalar,
    **settings: Any,
) -> None:  # fmt: skip
    """p = (1 - lr·wd)·p - lr·sign(β1·m + (1-β1)·c·g), then m = β2·m + (1-β2)·c·g."""
    _lion(param, None, grad, exp_avg, (lr, step, grad_scale), **settings)


@cuda_impl("lion_split_step")
def lion_split_step(
    out: tuple[()], weight: Array, low: Array, grad: Array, exp_avg: Array, lr: Scalar, step: Scalar,
    grad_scale: Scalar, **settings: Any,
) -> None:  # fmt: skip
    """`lion_step` of a split master."""
    _lion(weight, low, grad, exp_avg, (lr, step, grad_scale), **settings)
