"""Elementwise twins: one kernel for one, two or three operands, which takes the function as a constant.

Dimensions are merged first, so that operands which lie the same way in memory become one run with vector accesses;
broadcast and strided operands are read in place. Python numbers are arguments, not constants: no value compiles anew.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.signature import Double
from genesis.backend.cuda.twins import twin
from genesis.dtypes import DType, float64
from genesis.kernels.indices import collapse, is_wide, offsets
from genesis.kernels.types import TRITON, converted, work_type
from genesis.shapes import broadcast_strides

__all__ = ["elementwise"]


# --- The kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def read(p_x, i, sizes, strides, m, DIMS: tl.constexpr, NUMBER: tl.constexpr, WORK: tl.constexpr):
    """A tile of an operand in the type to compute in; a number fills the tile."""
    if NUMBER:
        return tl.full(i.shape, p_x, WORK)
    x = tl.load(p_x + offsets(i, sizes, strides, DIMS), mask=m)
    return converted(x, WORK)


@triton.jit
def write(p_o, i, y, sizes, strides, m, DIMS: tl.constexpr):
    tl.store(p_o + offsets(i, sizes, strides, DIMS), converted(y, p_o.dtype.element_ty), mask=m)


@triton.jit
def positions(n, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """The linear indices of this program's tile, and which of them exist."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    return i, i < n


@triton.jit
def unary(p_o, p_x, n, sizes, so, sx, F: tl.constexpr, NUMBERS: tl.constexpr, WORK: tl.constexpr,
          DIMS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, WIDE)
    x = read(p_x, i, sizes, sx, m, DIMS, NUMBERS & 1, WORK)
    write(p_o, i, F(x), sizes, so, m, DIMS)


@triton.jit
def binary(p_o, p_x, p_y, n, sizes, so, sx, sy, F: tl.constexpr, NUMBERS: tl.constexpr, WORK: tl.constexpr,
           DIMS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, WIDE)
    x = read(p_x, i, sizes, sx, m, DIMS, NUMBERS & 1, WORK)
    y = read(p_y, i, sizes, sy, m, DIMS, NUMBERS & 2, WORK)
    write(p_o, i, F(x, y), sizes, so, m, DIMS)


@triton.jit
def ternary(p_o, p_x, p_y, p_z, n, sizes, so, sx, sy, sz, F: tl.constexpr, NUMBERS: tl.constexpr,
            WORK: tl.constexpr, FIRST: tl.constexpr, DIMS: tl.constexpr, WIDE: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    i, m = positions(n, BLOCK, WIDE)
    x = read(p_x, i, sizes, sx, m, DIMS, NUMBERS & 1, FIRST)
    y = read(p_y, i, sizes, sy, m, DIMS, NUMBERS & 2, WORK)
    z = read(p_z, i, sizes, sz, m, DIMS, NUMBERS & 4, WORK)
    write(p_o, i, F(x, y, z), sizes, so, m, DIMS)


# --- Launching them ---------------------------------------------------------------------------------------------------


def _number(value: Any, work: DType) -> Any:
    """A Python number as a kernel's argument, in float64 where the work is."""
    if not work.is_floating_point:
        return int(value)
    return Double(value) if work is float64 else float(value)


def elementwise(
    function: Any, out: Array, *operands: Any, work: DType | None = None, first: DType | None = None
) -> None:
    """`out = function(*operands)` element by element, broadcasting.

    Args:
        function: under `triton.jit`, of one to three tiles.
        operands: arrays or numbers.
        work: the type to compute in; out's own (float32 for 2-byte floats) unless given.
        first: the type of the first of three operands, where it is another (a condition).
    """
    work = work_type(out.dtype if work is None else work)
    arrays = [x for x in operands if isinstance(x, Array)]
    spread = [broadcast_strides(x.shape, x.strides, out.shape) for x in arrays]
    sizes, so, *merged = collapse(out.shape, out.strides, *spread)
    rest = iter(merged)
    strides = [next(rest) if isinstance(x, Array) else (0,) * len(sizes) for x in operands]
    values = [x if isinstance(x, Array) else _number(x, work) for x in operands]
    numbers = sum(1 << i for i, x in enumerate(operands) if not isinstance(x, Array))
    kernel = (unary, binary, ternary)[len(operands) - 1]
    extra = {"FIRST": TRITON[(first or work).name]} if len(operands) == 3 else {}
    n = out.size
    block = 1024
    launch(
        kernel, triton.cdiv(n, block), out, *values, n, sizes, so, *strides,
        F=function, NUMBERS=numbers, WORK=TRITON[work.name], DIMS=len(sizes),
        WIDE=is_wide(sizes, so, *merged), BLOCK=block, num_warps=4, **extra,
    )  # fmt: skip


# --- Functions of one tile --------------------------------------------------------------------------------------------


@triton.jit
def _same(x):
    return x


@triton.jit
def _add(x, y):
    return x | y if x.dtype == tl.int1 else x + y


TABLE = {"add": _add}


def _register() -> None:
    for name, function in TABLE.items():
        twin(name)(lambda out, *operands, function=function: elementwise(function, out, *operands))


_register()


@twin("copy", "cast")
def copy(out: Array, x: Array, dtype: DType | None = None) -> None:
    """y = x, in out's memory and dtype."""
    elementwise(_same, out, x, work=x.dtype)


@twin("overwrite")
def overwrite(out: Array, x: Array, source: Any) -> None:
    """y = source; the values of x are not read."""
    elementwise(_same, out, source, work=source.dtype if isinstance(source, Array) else out.dtype)


@twin("fill")
def fill(out: Array, value: float, shape: Any, dtype: DType) -> None:
    """Every element is `value`."""
    elementwise(_same, out, value)
