"""What the kernels of optimizer steps share: the few constants of a step, made on the device, and in-place operands.

Learning rate, step count and gradient scale may be numbers or 0-d arrays, which are never read back: a single program
computes from them, in float64, the constants that all elements share (powers of β, say). A gradient scale of NaN leaves
the step out: nothing is stored. Numbers change from step to step and would each leave a plan behind, so plans are kept
only where these inputs are arrays.
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
from genesis.kernels.pointwise.elementwise import elementwise
from genesis.ops.rounding import STREAMS, Noise

DeviceScalar = Any  # a Python number or a 0-d array
_STREAMS = tl.constexpr(STREAMS)


@triton.jit
def scalar(x, IS_NUMBER: tl.constexpr):
    """A number, or the element of a 0-d array, in float64."""
    return tl.full((), x, tl.float64) if IS_NUMBER else converted(tl.load(x), tl.float64)


@triton.jit
def put(p_c, AT: tl.constexpr, value):
    tl.store(p_c + AT, converted(value, p_c.dtype.element_ty))


@triton.jit
def exact(x):
    """A number argument in float64."""
    return tl.full((), x, tl.float64)


@triton.jit
def note(p_c, p_s, step, scale, first, each, NUMBERS: tl.constexpr):
    """The gradient scale in float64. It is noted whether it is a number, as otherwise the step is left out, and where
    the step's noise begins.
    """
    c = scalar(scale, NUMBERS & 4)
    put(p_c, 9, (c == c).to(tl.float64))
    if p_s is not None:
        before = (scalar(step, NUMBERS & 2) - 1).to(tl.int64)
        for stream in tl.static_range(_STREAMS):
            tl.store(p_s + stream, tl.full((), first, tl.int64) + (before * _STREAMS + stream) * each)
    return c


@triton.jit
def step_mask(m, p_c):
    """The mask of a store of a step, which holds nothing where the step is left out."""
    made = tl.zeros(m.shape, p_c.dtype.element_ty) + tl.load(p_c + 9)  # the interpreter cannot spread a scalar bool
    return m & (made != 0)


def step_constants(
    kernel: Any, dtype: DType, like: Array, scalars: tuple[DeviceScalar, DeviceScalar, DeviceScalar],
    hyper: tuple[float, ...], choices: tuple[bool, ...] = (), noise: Noise | None = None, **constants: Any,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The constants of a step.

    Args:
        kernel: `kernel(values, starts, lr, step, scale, first, each, hyper, choices, NUMBERS)` under `triton.jit`.
        dtype: what they are rounded to, once.
        scalars: learning rate, step count, gradient scale.
        hyper, choices: the rule's own.

    Returns:
        Their values `[10]`, of which the last says whether the step is made; and the first counters of its noise, int64
        `[3]`, None where nothing is rounded at random.
    """
    values = empty((10,), dtype, like.device)
    starts = None if noise is None else empty((STREAMS,), int64, like.device)
    given = sum(1 << i for i, x in enumerate(scalars) if not isinstance(x, Array))
    if given:
        forget_plan()
    launch(
        kernel, 1, values, starts, *(x if isinstance(x, Array) else Double(x) for x in scalars),
        noise.first if noise else 0, noise.each if noise else 0, tuple(Double(x) for x in hyper), choices,
        **constants, NUMBERS=given, num_warps=1,
    )  # fmt: skip
    return values, starts


@triton.jit
def same(x):
    return x


@contextmanager
def apart(*arrays: Array) -> Iterator[list[Array]]:
    """Arrays to change in place; expanded views, whose elements share memory, as copies that are written back."""
    own = [empty(x.shape, x.dtype, x.device) if x.overlaps_itself() else x for x in arrays]
    for x, copy in zip(arrays, own, strict=True):
        if copy is not x:
            elementwise(same, copy, x)
    yield own
    for x, copy in zip(arrays, own, strict=True):
        if copy is not x:
            elementwise(same, x, copy)
