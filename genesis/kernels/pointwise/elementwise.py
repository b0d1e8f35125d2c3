"""Elementwise ops: one kernel each for one, two and three operands, which takes the function as a constant.

Reference: `genesis/ops/elementwise.py`, under the same names.

Dimensions are merged first, so that operands with the same memory layout become one-dimensional and load as vectors.
Broadcast and strided operands are read in place. Python scalars are arguments, not constants, so that a new value does
not recompile the kernel. Tiles: BLOCK elements in row-major order.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.compile import Double
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import clear, launch
from genesis.dtypes import DType, bool_, result_type
from genesis.kernels import maths
from genesis.kernels.elements import (
    TRITON,
    collapse,
    converted,
    float_argument,
    needs_int64,
    offsets,
    program_indices,
    work_type,
)
from genesis.kernels.gemm.copies import transposed_copy
from genesis.ops.blocks import as_type
from genesis.shapes import broadcast_strides

# --- The kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def load_operand(p_x, i, sizes, strides, m, SCALAR: tl.constexpr, WORK: tl.constexpr):
    """Load a tile [BLOCK] of an operand in the type WORK. A scalar fills the tile."""
    if SCALAR:
        return tl.full(i.shape, p_x, WORK)
    else:
        return converted(tl.load(p_x + offsets(i, sizes, strides), mask=m), WORK)


@triton.jit
def store_result(p_o, i, y, sizes, strides, m):
    tl.store(p_o + offsets(i, sizes, strides), converted(y, p_o.dtype.element_ty), mask=m)


@triton.jit
def positions(n, BLOCK: tl.constexpr, INT64: tl.constexpr):
    """Return the linear indices [BLOCK] of this program's tile, and their mask."""
    i = program_indices(BLOCK, INT64)  # [BLOCK]
    return i, i < n


@triton.jit
def unary_kernel(p_o, p_x, n, sizes, so, sx, F: tl.constexpr, SCALARS: tl.constexpr, WORK: tl.constexpr,
                 INT64: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, INT64)  # [BLOCK]
    x = load_operand(p_x, i, sizes, sx, m, SCALARS & 1, WORK)  # [BLOCK]
    store_result(p_o, i, F(x), sizes, so, m)


@triton.jit
def binary_kernel(p_o, p_x, p_y, n, sizes, so, sx, sy, F: tl.constexpr, SCALARS: tl.constexpr, WORK: tl.constexpr,
                  INT64: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, INT64)  # [BLOCK]
    x = load_operand(p_x, i, sizes, sx, m, SCALARS & 1, WORK)  # [BLOCK]
    y = load_operand(p_y, i, sizes, sy, m, SCALARS & 2, WORK)  # [BLOCK]
    store_result(p_o, i, F(x, y), sizes, so, m)


@triton.jit
def ternary_kernel(p_o, p_x, p_y, p_z, n, sizes, so, sx, sy, sz, F: tl.constexpr, SCALARS: tl.constexpr,
                   WORK: tl.constexpr, CONDITION: tl.constexpr, INT64: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, INT64)  # [BLOCK]
    x = load_operand(p_x, i, sizes, sx, m, SCALARS & 1, CONDITION)  # [BLOCK]
    y = load_operand(p_y, i, sizes, sy, m, SCALARS & 2, WORK)  # [BLOCK]
    z = load_operand(p_z, i, sizes, sz, m, SCALARS & 4, WORK)  # [BLOCK]
    store_result(p_o, i, F(x, y, z), sizes, so, m)


# --- Launching them ---------------------------------------------------------------------------------------------------


def scalar_argument(value: Any, work: DType) -> Any:
    """Return a Python number as a kernel's argument: a float, or an integer cast like the reference's."""
    if not work.is_floating_point:
        with np.errstate(invalid="ignore"):  # numpy warns when it casts NaN to an integer
            return int(as_type(value, work.numpy))
    return float_argument(value, work)


class Expression(NamedTuple):
    """The arguments of an `elementwise` call, for a kernel that fuses it with other work."""

    function: Any
    operands: tuple[Any, ...]
    work: DType
    condition_type: DType


class _Expressions(threading.local):
    """The list that collects the expressions of this thread, while `expressions_of` runs an implementation."""

    collected: list[Expression] | None = None


_expressions = _Expressions()


def expressions_of(implementation: Callable[..., None], *args: Any, **attrs: Any) -> list[Expression]:
    """Run a CUDA implementation and return its calls of `elementwise`, none of which launches."""
    _expressions.collected = calls = []
    try:
        implementation(*args, **attrs)
    finally:
        _expressions.collected = None
    return calls


def elementwise(
    function: Any, out: Array, *operands: Any, work: DType | None = None, condition_type: DType | None = None
) -> None:
    """Compute `out = function(*operands)` element by element, with broadcasting.

    Args:
        function: function of one to three tiles, under `triton.jit`.
        operands: arrays or numbers.
        work: type of the computation; by default out's type (float32 for 2-byte floats).
        condition_type: type of the first of three operands, if it differs.
    """
    work = work_type(out.dtype if work is None else work)
    if _expressions.collected is not None:
        _expressions.collected.append(Expression(function, operands, work, condition_type or work))
        return
    arrays = [x for x in operands if isinstance(x, Array)]
    broadcast = [broadcast_strides(x.shape, x.strides, out.shape) for x in arrays]
    order = sorted(range(out.ndim), key=lambda d: -out.strides[d])  # neighbours in memory are neighbours in a tile
    sizes, so, *merged = collapse(*(tuple([each[d] for d in order]) for each in (out.shape, out.strides, *broadcast)))
    array_strides = iter(merged)
    strides = [next(array_strides) if isinstance(x, Array) else (0,) * len(sizes) for x in operands]
    values = [x if isinstance(x, Array) else scalar_argument(x, work) for x in operands]
    scalars = sum(1 << i for i, x in enumerate(operands) if not isinstance(x, Array))
    kernel = (unary_kernel, binary_kernel, ternary_kernel)[len(operands) - 1]
    extra = {"CONDITION": TRITON[(condition_type or work).name]} if len(operands) == 3 else {}
    n = out.size
    block = 1024
    launch(
        kernel, triton.cdiv(n, block), out, *values, n, sizes, so, *strides, F=function, SCALARS=scalars,
        WORK=TRITON[work.name], INT64=needs_int64(sizes, so, *merged), BLOCK=block, num_warps=4, **extra,
    )  # fmt: skip


# --- Functions of one tile --------------------------------------------------------------------------------------------


@triton.jit
def identity(x):
    return x


@triton.jit
def _add(x, y):
    return x | y if x.dtype == tl.int1 else x + y


@triton.jit
def _sub(x, y):
    return x - y


@triton.jit
def _mul(x, y):
    return x & y if x.dtype == tl.int1 else x * y


@triton.jit
def _floor_divide(x, y):
    """Return floor(x / y). An integer divided by 0 gives 0, because an error would have to wait for the GPU."""
    if x.dtype.is_floating():
        return maths.floor_divide(x, y)
    else:
        safe = tl.where(y == 0, 1, y).to(x.dtype)
        quotient = x // safe
        quotient = (quotient - ((x % safe != 0) & ((x < 0) != (safe < 0))).to(x.dtype)).to(x.dtype)
        return tl.where(y == 0, 0, quotient).to(x.dtype)


@triton.jit
def _remainder(x, y):
    """Return x - y·floor(x / y), which has the sign of y. An integer modulo 0 gives 0."""
    if x.dtype.is_floating():
        return maths.modulo(x, y)
    else:
        safe = tl.where(y == 0, 1, y).to(x.dtype)
        rest = x % safe
        rest = tl.where((rest != 0) & ((rest < 0) != (safe < 0)), rest + safe, rest)
        return tl.where(y == 0, 0, rest).to(x.dtype)


@triton.jit
def _pow(x, p):
    if x.dtype.is_floating():
        return maths.power(x, p)
    else:
        return _integer_power(x, p)


@triton.jit
def _integer_power(x, p):
    """Return x^p by squaring, with wrap-around. A negative power of anything but 1 and -1 is 0."""
    one = (x * 0 + 1).to(x.dtype)
    result, base, left = one, x, p
    for _ in range(x.dtype.primitive_bitwidth):
        result = tl.where((left & 1) != 0, result * base, result).to(x.dtype)
        base = (base * base).to(x.dtype)
        left = (left >> 1).to(x.dtype)
    flipped = tl.where((p & 1) != 0, x, one)
    unit = tl.where(x == 1, one, tl.where((x < 0) & (x + one == 0), flipped, 0)).to(x.dtype)
    return tl.where(p < 0, unit, result)


@triton.jit
def _maximum(x, y):
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def _minimum(x, y):
    return tl.where((x < y) | (x != x), x, y)


@triton.jit
def _lerp(x, end, w):
    step = end - x
    return tl.where(tl.abs(w) < 0.5, x + w * step, end - (1 - w) * step)


@triton.jit
def _neg(x):
    return x * -1.0 if x.dtype.is_floating() else 0 - x


@triton.jit
def _abs(x):
    return tl.abs(x)


@triton.jit
def _sign(x):
    if x.dtype == tl.int1:
        return x
    else:
        return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def _rsqrt(x):
    return maths.divide(tl.full(x.shape, 1, x.dtype), maths.root(x))


@triton.jit
def _reciprocal(x):
    return maths.divide(tl.full(x.shape, 1, x.dtype), x)


@triton.jit
def _sigmoid(x):
    return maths.divide(tl.full(x.shape, 1, x.dtype), maths.exp(-x) + 1)


@triton.jit
def _floor(x):
    return maths.floor(x) if x.dtype.is_floating() else x


@triton.jit
def _ceil(x):
    return maths.ceil(x) if x.dtype.is_floating() else x


@triton.jit
def _trunc(x):
    return maths.trunc(x) if x.dtype.is_floating() else x


@triton.jit
def _round(x):
    return maths.rint(x) if x.dtype.is_floating() else x


@triton.jit
def _eq(x, y):
    return x == y


@triton.jit
def _ne(x, y):
    return x != y


@triton.jit
def _lt(x, y):
    return x < y


@triton.jit
def _le(x, y):
    return x <= y


@triton.jit
def _gt(x, y):
    return x > y


@triton.jit
def _ge(x, y):
    return x >= y


@triton.jit
def _logical_and(x, y):
    return (x != 0) & (y != 0)


@triton.jit
def _logical_or(x, y):
    return (x != 0) | (y != 0)


@triton.jit
def _logical_xor(x, y):
    return (x != 0) != (y != 0)


@triton.jit
def _logical_not(x):
    return x == 0


@triton.jit
def _isnan(x):
    return x != x


@triton.jit
def _isinf(x):
    return tl.abs(x) == float("inf") if x.dtype.is_floating() else x != x


@triton.jit
def _isfinite(x):
    return tl.abs(x) < float("inf") if x.dtype.is_floating() else x == x


@triton.jit
def _bitwise_and(x, y):
    return x & y


@triton.jit
def _bitwise_or(x, y):
    return x | y


@triton.jit
def _bitwise_xor(x, y):
    return x ^ y


@triton.jit
def _bitwise_not(x):
    return x == 0 if x.dtype == tl.int1 else ~x


@triton.jit
def _left_shift(x, y):
    """Return x << y. A shift by the type's width or more gives 0."""
    inside = (y >= 0) & (y < x.dtype.primitive_bitwidth)
    return tl.where(inside, x << tl.where(inside, y, 0).to(x.dtype), 0).to(x.dtype)


@triton.jit
def _right_shift(x, y):
    """Return x >> y. A shift by the type's width or more gives 0 or -1, by the sign."""
    inside = (y >= 0) & (y < x.dtype.primitive_bitwidth)
    gone = tl.where(x < 0, -1, 0).to(x.dtype)
    return tl.where(inside, x >> tl.where(inside, y, 0).to(x.dtype), gone).to(x.dtype)


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _where(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def _clamp(x, low, high):
    return _minimum(_maximum(x, low), high)


@triton.jit
def _sigmoid_quick(x):
    return 1 / (maths.exp(-x) + 1)


@triton.jit
def _sigmoid_fast(x):
    return 1 / (tl.exp(-x) + 1)


@triton.jit
def _exp_fast(x):
    return tl.exp(x)


# Fast forms with errors of some ulps, for kernels of many ops: (for results of 4 bytes and more, for narrower ones).
QUICK = {_sigmoid: (_sigmoid_quick, _sigmoid_fast), maths.exp: (maths.exp, _exp_fast)}

# --- The CUDA implementations -----------------------------------------------------------------------------------------

# Ops that are computed in the result's type.
VALUES = {
    "add": _add, "sub": _sub, "mul": _mul, "div": maths.divide, "floor_divide": _floor_divide,
    "remainder": _remainder, "maximum": _maximum, "minimum": _minimum, "lerp": _lerp, "neg": _neg, "abs": _abs,
    "sign": _sign, "square": _square, "exp": maths.exp, "exp2": maths.exp2, "expm1": maths.expm1, "log": maths.log,
    "log2": maths.log2, "log10": maths.log10, "log1p": maths.log1p, "sqrt": maths.root, "rsqrt": _rsqrt,
    "reciprocal": _reciprocal, "sin": maths.sin, "cos": maths.cos, "tan": maths.tan, "tanh": maths.tanh,
    "sigmoid": _sigmoid, "erf": maths.erf, "floor": _floor, "ceil": _ceil, "trunc": _trunc, "round": _round,
    "bitwise_and": _bitwise_and, "bitwise_or": _bitwise_or, "bitwise_xor": _bitwise_xor,
    "bitwise_not": _bitwise_not, "left_shift": _left_shift, "right_shift": _right_shift,
}  # fmt: skip
# Ops that are computed in the operands' common type, with a bool result.
PREDICATES = {
    "eq": _eq, "ne": _ne, "lt": _lt, "le": _le, "gt": _gt, "ge": _ge, "logical_and": _logical_and,
    "logical_or": _logical_or, "logical_xor": _logical_xor, "logical_not": _logical_not, "isnan": _isnan,
    "isinf": _isinf, "isfinite": _isfinite,
}  # fmt: skip


def _predicate(function: Any, out: Array, *operands: Any) -> None:
    elementwise(function, out, *operands, work=result_type(operands))


for _name, _function in VALUES.items():
    cuda_impl(_name)(functools.partial(elementwise, _function))
for _name, _function in PREDICATES.items():
    cuda_impl(_name)(functools.partial(_predicate, _function))


@cuda_impl("pow")
def pow(out: Array, x: Any, p: Any) -> None:
    """Compute x^p. Squares, by far the most frequent powers, are products."""
    if isinstance(p, (int, float)) and p == 2:
        elementwise(_square, out, x)
    else:
        elementwise(_pow, out, x, p)


@cuda_impl("copy", "cast")
def copy(out: Array, x: Array, dtype: DType | None = None) -> None:
    """Copy x in out's dtype. A transpose is copied through shared memory."""
    if not transposed_copy(out, x):
        elementwise(identity, out, x, work=x.dtype)


@cuda_impl("overwrite")
def overwrite(out: Array, x: Array, source: Any) -> None:
    """Copy `source`. The values of x are not read."""
    elementwise(identity, out, source, work=source.dtype if isinstance(source, Array) else out.dtype)


@cuda_impl("fill")
def fill(out: Array, value: float, shape: Any, dtype: DType) -> None:
    if out.is_contiguous and value == 0 and math.copysign(1, value) > 0:
        clear(out)
    else:
        elementwise(identity, out, value)


@cuda_impl("where")
def where(out: Array, condition: Array, x: Any, y: Any) -> None:
    elementwise(_where, out, condition, x, y, condition_type=bool_)


@cuda_impl("clamp")
def clamp(out: Array, x: Array, min: Any = None, max: Any = None) -> None:
    if min is not None and max is not None:
        elementwise(_clamp, out, x, min, max)
    elif max is None:
        elementwise(_maximum, out, x, min)
    else:
        elementwise(_minimum, out, x, max)


# --- Ranges, in float64 or exact integers -----------------------------------------------------------------------------


TILE = 1024


@triton.jit(do_not_specialize=["start", "step", "count", "end"])
def arange_kernel(p_o, start, step, end, count, TYPE: tl.constexpr, ENDS: tl.constexpr, T: tl.constexpr):
    """Store start + step · i. With ENDS the second half is counted from `end`."""
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)  # [T]
    y = tl.full([T], start, TYPE) + tl.full([T], step, TYPE) * i.to(TYPE)  # [T]
    if ENDS:
        back = tl.full([T], end, TYPE) - tl.full([T], step, TYPE) * (count - 1 - i).to(TYPE)  # [T]
        y = tl.where(i < tl.maximum(count // 2, 1), y, back)
    tl.store(p_o + i, converted(y, p_o.dtype.element_ty), mask=i < count)


@cuda_impl("arange")
def arange(out: Array, start: float, step: float, count: int, dtype: DType) -> None:
    exact = isinstance(start, int) and isinstance(step, int)
    bounds = (int(start), int(step)) if exact else (Double(start), Double(step))
    launch(
        arange_kernel, triton.cdiv(count, TILE), out, *bounds, bounds[0], count, TYPE=tl.int64 if exact else tl.float64,
        ENDS=False, T=TILE, num_warps=4,
    )  # fmt: skip


@cuda_impl("linspace")
def linspace(out: Array, start: float, end: float, count: int, dtype: DType) -> None:
    step = (float(end) - float(start)) / max(count - 1, 1)
    launch(
        arange_kernel, triton.cdiv(count, TILE), out, Double(start), Double(step), Double(end), count, TYPE=tl.float64,
        ENDS=True, T=TILE, num_warps=4,
    )  # fmt: skip
