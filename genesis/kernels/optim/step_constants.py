"""Shared parts of optimizer kernels: the constants of a step, computed on the device, and operands updated in place.

Learning rate, step count and gradient scale are numbers or 0-d arrays, which the host never reads. One program computes
in float64 the constants that all elements share, such as powers of β. If the gradient scale is NaN, the step is skipped
and stores nothing. Numbers change from step to step, and each would record another launch plan, so plans are kept only
if all three inputs are arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.compile import Double
from genesis.backend.cuda.launch import forget_plan, launch
from genesis.dtypes import DType, int64
from genesis.kernels.elements import converted
from genesis.kernels.pointwise.elementwise import elementwise, identity
from genesis.ops.rounding import STREAMS, Noise

DeviceScalar = Any  # a Python number or a 0-d array
_STREAMS = tl.constexpr(STREAMS)


@triton.jit
def scalar(x, IS_NUMBER: tl.constexpr):
    """Return a number, or the element of a 0-d array, in float64."""
    return tl.full((), x, tl.float64) if IS_NUMBER else converted(tl.load(x), tl.float64)


@triton.jit
def store_constant(p_c, AT: tl.constexpr, value):
    tl.store(p_c + AT, converted(value, p_c.dtype.element_ty))


@triton.jit
def exact(x):
    return tl.full((), x, tl.float64)


@triton.jit
def begin_step(p_c, p_s, step, scale, first, each, NUMBERS: tl.constexpr):
    """Return the gradient scale in float64. Store whether it is a number, and where the noise begins."""
    c = scalar(scale, NUMBERS & 4)
    store_constant(p_c, 9, (c == c).to(tl.float64))
    if p_s is not None:
        before = (scalar(step, NUMBERS & 2) - 1).to(tl.int64)
        for stream in tl.static_range(_STREAMS):
            tl.store(p_s + stream, tl.full((), first, tl.int64) + (before * _STREAMS + stream) * each)
    return c


@triton.jit
def step_mask(m, p_c):
    """Return the mask m of a store, or an empty mask if the step is skipped."""
    taken = tl.zeros(m.shape, p_c.dtype.element_ty) + tl.load(p_c + 9)  # the interpreter cannot broadcast a scalar bool
    return m & (taken != 0)


def step_constants(
    kernel: Any, dtype: DType, like: Array, scalars: tuple[DeviceScalar, DeviceScalar, DeviceScalar],
    hyper: tuple[float, ...], choices: tuple[bool, ...] = (), noise: Noise | None = None, **constants: Any,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Compute the constants of a step on the device of `like`.

    Args:
        kernel: `kernel(values, starts, lr, step, scale, first, each, hyper, choices, NUMBERS)` under `triton.jit`.
        dtype: type that the constants are rounded to, once.
        scalars: learning rate, step count, gradient scale.
        hyper: hyperparameters of the rule.
        choices: boolean options of the rule.

    Returns:
        The constants `[10]`; the last is 0 if the step is skipped. The first counters of the noise, int64 `[3]`, or
        None without stochastic rounding.
    """
    values = empty((10,), dtype, like.device)
    starts = None if noise is None else empty((STREAMS,), int64, like.device)
    numbers = sum(1 << i for i, x in enumerate(scalars) if not isinstance(x, Array))
    if numbers:
        forget_plan()
    launch(
        kernel, 1, values, starts, *(x if isinstance(x, Array) else Double(x) for x in scalars),
        noise.first if noise else 0, noise.each if noise else 0, tuple(Double(x) for x in hyper), choices,
        **constants, NUMBERS=numbers, num_warps=1,
    )  # fmt: skip
    return values, starts


@contextmanager
def updated_in_place(*arrays: Array) -> Iterator[list[Array]]:
    """Yield arrays that a kernel can update in place. An expanded view becomes a copy that is written back."""
    targets = [empty(x.shape, x.dtype, x.device) if x.overlaps_itself() else x for x in arrays]
    for x, target in zip(arrays, targets, strict=True):
        if target is not x:
            elementwise(identity, target, x)
    yield targets
    for x, target in zip(arrays, targets, strict=True):
        if target is not x:
            elementwise(identity, x, target)
