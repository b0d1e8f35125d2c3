"""The kernel of all elementwise optimizer steps: one launch over all elements, after one that makes their constants.

Both take a rule's functions as constants (`genesis.ops.rule`). They alone know how values are stored: the parameter is
float32 or float64; or bfloat16 that is rounded at random; or a bfloat16 weight with a 16-bit residual, together an fp32
master. States are of the type to compute in, or bfloat16 rounded at random.
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
    apart,
    exact,
    note,
    put,
    scalar,
    step_constants,
    step_mask,
)
from genesis.kernels.pointwise.elementwise import positions
from genesis.kernels.pointwise.random import number_words
from genesis.ops.rounding import Noise
from genesis.ops.rule import Rule, for_each_rule

BLOCK, WARPS = 1024, 4  # elements and warps of a program; on an H200 as fast as a copy, as are 128 to 1024 elements


# --- The functions that a rule may call -------------------------------------------------------------------------------


@triton.jit
def where(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def sign(x, size):
    return tl.where(x > 0, size, tl.where(x < 0, -size, x))  # 0 and NaN stay


CALLABLE = {"sqrt": maths.root, "power": maths.power, "divide": maths.divide, "where": where, "sign": sign}


@functools.cache
def in_triton(function: Callable[..., Any]) -> Any:
    """A rule's function under `triton.jit`, the names it calls standing for Triton's functions."""
    assert isinstance(function, FunctionType)
    names = {**function.__globals__, **CALLABLE, "tl": tl}  # Triton's interpreter looks for its language there
    return triton.jit(FunctionType(function.__code__, names, function.__name__))


# --- The kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def constants_kernel(p_c, p_s, lr, step, scale, first, each, hyper, choices, RULE: tl.constexpr,
                     NUMBERS: tl.constexpr):  # fmt: skip
    """The constants of a step, in float64."""
    c = note(p_c, p_s, step, scale, first, each, NUMBERS)
    given = ()
    for i in tl.static_range(len(hyper)):
        given += (exact(hyper[i]),)
    values = RULE(scalar(lr, NUMBERS & 1), scalar(step, NUMBERS & 2), c, *given, *choices)
    for i in tl.static_range(len(values)):
        put(p_c, i, values[i])


@triton.jit
def read(p_x, p_residual, o, o_residual, m, WORK: tl.constexpr):
    """Values in the type to compute in."""
    if p_residual is not None:
        return join(tl.load(p_x + o, mask=m), tl.load(p_residual + o_residual, mask=m))
    else:
        return converted(tl.load(p_x + o, mask=m), WORK)


@triton.jit
def write(p_x, p_residual, o, o_residual, m, x, p_s, s0, s1, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """Store values as they are kept; bfloat16 without a residual is rounded at random, with its stream's noise."""
    if p_residual is not None:
        weight, residual = split(x)
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
    """A step of the parameter p and its states a and b, of which a rule may have none or one.

    Args:
        strides: of p, its residual, g, a and b.
    """
    i, m = positions(n, BLOCK, INT64)  # [BLOCK]
    m = step_mask(m, p_c)
    constants = ()
    for k in tl.static_range(COUNT):
        constants += (tl.load(p_c + k),)
    o_p, o_r = offsets(i, sizes, strides[0]), offsets(i, sizes, strides[1])
    o_a, o_b = offsets(i, sizes, strides[3]), offsets(i, sizes, strides[4])
    p = read(p_p, p_residual, o_p, o_r, m, WORK)
    states = ()
    if p_a is not None:
        states += (read(p_a, None, o_a, o_a, m, WORK),)
    if p_b is not None:
        states += (read(p_b, None, o_b, o_b, m, WORK),)
    g = converted(tl.load(p_g + offsets(i, sizes, strides[2]), mask=m), WORK)
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
    """Make a step; operands are any residual, the gradient, the states, learning rate, step count, gradient scale."""
    residual, grad, *rest = operands if is_split else (None, *operands)
    given, scalars = rest[: len(rule.states)], rest[len(rule.states) :]
    work, choices = float64 if param.dtype is float64 else float32, rule.choices(attrs)
    values, starts = step_constants(
        constants_kernel, work, param, scalars, tuple(attrs[name] for name in rule.hyper), choices,
        noise=noise, RULE=in_triton(rule.constants),
    )  # fmt: skip
    count = len(rule.constants_of(0.5, 2.0, 0.5, attrs))
    with apart(param, *given, *(() if residual is None else (residual,))) as (param, *kept):
        residual = None if residual is None else kept.pop()
        a, b = (*kept, None, None)[:2]
        operands = [param if x is None else x for x in (param, residual, grad, a, b)]
        sizes, *strides = collapse(param.shape, *(x.strides for x in operands))
        launch(
            update_kernel, triton.cdiv(param.size, BLOCK), param, residual, grad, a, b, values, starts,
            *number_words(noise.seed if noise else 0), param.size, sizes, tuple(strides), choices,
            RULE=in_triton(rule.update), COUNT=count, WORK=TRITON[work.name],
            INT64=needs_int64(sizes, *strides), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip


def _register(rule: Rule) -> None:
    """The CUDA implementations of a rule's ops, also of a rule that is written after this file was loaded."""
    cuda_impl(f"{rule.name}_step")(functools.partial(_update, rule, False))
    cuda_impl(f"{rule.name}_split_step")(functools.partial(_update, rule, True))


for_each_rule(_register)
