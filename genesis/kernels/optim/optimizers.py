"""The kernels of all elementwise optimizer steps: one computes the constants of a step, the other updates all elements.

Reference: `genesis/ops/optimizers.py`. Both kernels take the functions of a rule as constants (`genesis.ops.rule`)
and handle the storage formats themselves. A parameter is float32 or float64, or bfloat16 with stochastic rounding, or a
bfloat16 weight with a 16-bit residual, which together are a float32 master. States have the type of the computation, or
are bfloat16 with stochastic rounding. Tiles have BLOCK elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import float32, float64
from genesis.kernels import maths
from genesis.kernels.elements import TRITON, collapse, converted, needs_int64, offsets
from genesis.kernels.optim.rounding import at_random, draws, join, split
from genesis.kernels.optim.step_constants import (
    begin_step,
    exact,
    scalar,
    step_constants,
    step_mask,
    store_constant,
    updated_in_place,
)
from genesis.kernels.pointwise.elementwise import positions
from genesis.kernels.pointwise.random import number_words
from genesis.ops.rounding import Noise
from genesis.ops.rule import Rule, for_each_rule

BLOCK, WARPS = 1024, 4  # elements and warps per program; on an H200 128 to 1024 elements are as fast as a copy


# --- The functions that a rule may call -------------------------------------------------------------------------------


@triton.jit
def where(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def sign(x, size):
    return tl.where(x > 0, size, tl.where(x < 0, -size, x))  # keeps 0 and NaN


CALLABLE = {"sqrt": maths.root, "power": maths.power, "divide": maths.divide, "where": where, "sign": sign}


@functools.cache
def in_triton(function: Callable[..., Any]) -> Any:
    """Return a rule's function under `triton.jit`, with the functions it may call replaced by Triton's."""
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, **CALLABLE, "tl": tl}  # Triton's interpreter looks up `tl` in these globals
    return triton.jit(FunctionType(function.__code__, names, function.__name__))


# --- The kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def constants_kernel(p_c, p_s, lr, step, scale, first, each, hyper, choices, RULE: tl.constexpr,
                     NUMBERS: tl.constexpr):  # fmt: skip
    """Compute the constants of a step in float64 and store them."""
    c = begin_step(p_c, p_s, step, scale, first, each, NUMBERS)
    hyperparameters = ()
    for i in tl.static_range(len(hyper)):
        hyperparameters += (exact(hyper[i]),)
    values = RULE(scalar(lr, NUMBERS & 1), scalar(step, NUMBERS & 2), c, *hyperparameters, *choices)
    for i in tl.static_range(len(values)):
        store_constant(p_c, i, values[i])


@triton.jit
def read(p_x, p_residual, o, o_residual, m, WORK: tl.constexpr):
    """Return values in the type of the computation."""
    if p_residual is not None:
        return join(tl.load(p_x + o, mask=m), tl.load(p_residual + o_residual, mask=m))
    else:
        return converted(tl.load(p_x + o, mask=m), WORK)


@triton.jit
def write(p_x, p_residual, o, o_residual, m, x, p_s, s0, s1, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """Store values in their storage format. bfloat16 without a residual is rounded with the noise of its stream."""
    if p_residual is not None:
        weight, residual = split(x)  # [BLOCK] each
        tl.store(p_x + o, weight, mask=m)
        tl.store(p_residual + o_residual, residual, mask=m)
    elif p_x.dtype.element_ty == tl.bfloat16:
        tl.store(p_x + o, at_random(x, draws(tl.load(p_s + STREAM), s0, s1, BLOCK // 8)), mask=m)
    else:
        tl.store(p_x + o, x, mask=m)


@triton.jit(do_not_specialize=["s0", "s1"])
def update_kernel(p_p, p_residual, p_g, p_a, p_b, p_c, p_s, s0, s1, n, sizes, strides, choices, RULE: tl.constexpr,
                  COUNT: tl.constexpr, WORK: tl.constexpr, INT64: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Update the parameter p and its states a and b. A rule may have fewer than two states.

    Args:
        strides: strides of p, its residual, g, a and b.
    """
    i, m = positions(n, BLOCK, INT64)  # [BLOCK]
    m = step_mask(m, p_c)
    constants = ()
    for k in tl.static_range(COUNT):
        constants += (tl.load(p_c + k),)
    o_p, o_r = offsets(i, sizes, strides[0]), offsets(i, sizes, strides[1])
    o_a, o_b = offsets(i, sizes, strides[3]), offsets(i, sizes, strides[4])
    p = read(p_p, p_residual, o_p, o_r, m, WORK)  # [BLOCK]
    states = ()
    if p_a is not None:
        states += (read(p_a, None, o_a, o_a, m, WORK),)
    if p_b is not None:
        states += (read(p_b, None, o_b, o_b, m, WORK),)
    g = converted(tl.load(p_g + offsets(i, sizes, strides[2]), mask=m), WORK)  # [BLOCK]
    new = RULE(p, g, *states, *constants, *choices)
    if p_a is not None:
        write(p_a, None, o_a, o_a, m, new[1], p_s, s0, s1, 1, BLOCK)
    if p_b is not None:
        write(p_b, None, o_b, o_b, m, new[2], p_s, s0, s1, 2, BLOCK)
    write(p_p, p_residual, o_p, o_r, m, new[0], p_s, s0, s1, 0, BLOCK)


# --- Launching them ---------------------------------------------------------------------------------------------------


def _update(
    rule: Rule, is_split: bool, out: tuple[()], param: Array, *operands: Any, noise: Noise | None = None, **attrs: Any
) -> None:
    """Update `param`. Operands: with `is_split` the residual; gradient, states, learning rate, step count, scale."""
    residual, grad, *others = operands if is_split else (None, *operands)
    states, scalars = others[: len(rule.states)], others[len(rule.states) :]
    work, choices = float64 if param.dtype is float64 else float32, rule.choices(attrs)
    values, starts = step_constants(
        constants_kernel, work, param, scalars, tuple(attrs[name] for name in rule.hyper), choices,
        noise=noise, RULE=in_triton(rule.constants),
    )  # fmt: skip
    count = len(rule.constants_of(0.5, 2.0, 0.5, attrs))
    with updated_in_place(param, *states, *(() if residual is None else (residual,))) as (param, *updated):
        residual = None if residual is None else updated.pop()
        a, b = (*updated, None, None)[:2]
        operands = [param if x is None else x for x in (param, residual, grad, a, b)]
        sizes, *strides = collapse(param.shape, *(x.strides for x in operands))
        launch(
            update_kernel, triton.cdiv(param.size, BLOCK), param, residual, grad, a, b, values, starts,
            *number_words(noise.seed if noise else 0), param.size, sizes, tuple(strides), choices,
            RULE=in_triton(rule.update), COUNT=count, WORK=TRITON[work.name],
            INT64=needs_int64(sizes, *strides), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def _register(rule: Rule) -> None:
    """Register the CUDA implementations of a rule's ops; also called for rules that are defined later."""
    cuda_impl(f"{rule.name}_step")(functools.partial(_update, rule, False))
    cuda_impl(f"{rule.name}_split_step")(functools.partial(_update, rule, True))


for_each_rule(_register)
