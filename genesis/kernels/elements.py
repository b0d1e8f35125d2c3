"""Elements inside kernels: their types, the type of the computation, conversions, and addresses.

The host merges dimensions, and the device computes offsets from linear indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.compile import Double
from genesis.backend.cuda.driver import is_interpreted
from genesis.dtypes import ALL, DType, float8_e4m3fn, float32, float64
from genesis.shapes import Shape, contiguous_strides

TRITON = {
    "float64": tl.float64,
    "float32": tl.float32,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float8_e4m3fn": tl.float8e4nv,
    "int64": tl.int64,
    "int32": tl.int32,
    "int16": tl.int16,
    "int8": tl.int8,
    "uint8": tl.uint8,
    "bool": tl.int1,
}


def work_type(dtype: DType) -> DType:
    """Return the type in which values of a dtype are computed: float32 for floats of at most 2 bytes."""
    return float32 if dtype.is_floating_point and dtype.itemsize <= 2 else dtype


def float_argument(value: float, work: DType) -> float:
    """Return a Python number as a kernel's argument: float64 if the kernel computes in float64, else float32."""
    return Double(value) if work is float64 else float(value)


@triton.jit
def converted(x, TYPE: tl.constexpr):
    """Return x cast to another type. Floats are truncated to integers, and all values but 0 become True."""
    if tl.int1 == TYPE:
        return x != 0
    elif x.dtype == tl.int1:
        return x.to(tl.int8).to(TYPE)
    elif x.dtype == tl.float64 and TYPE.primitive_bitwidth == 16:
        return x.to(tl.float32).to(TYPE)
    elif x.dtype.is_floating() and not TYPE.is_floating() and TYPE.primitive_bitwidth < 32:
        return x.to(tl.int32).to(TYPE)
    else:
        return x.to(TYPE)


# Triton's interpreter truncates to bfloat16 where a GPU rounds, and loads bfloat16 and 8-bit floats as integers.
if is_interpreted():
    _NUMPY = {TRITON[d.name]: d.numpy for d in (*ALL, float8_e4m3fn)}
    _BITS = {tl.bfloat16: np.dtype(np.uint16), tl.float8e4nv: np.dtype(np.uint8)}  # types of the loaded integers

    def converted(x: Any, TYPE: Any) -> Any:
        """Cast the numpy values of an interpreted tile."""
        target = getattr(TYPE, "value", TYPE)
        values = x.handle.data
        if x.dtype in _BITS and values.dtype == _BITS[x.dtype]:
            values = values.view(_NUMPY[x.dtype])
        with np.errstate(all="ignore"):
            values = values.astype(_NUMPY[target])
        if target in _BITS:
            values = values.view(_BITS[target])
        kind = tl.block_type(target, list(x.shape)) if x.shape else target
        return tl.tensor(type(x.handle)(values, target), kind)


# --- Strided addressing -----------------------------------------------------------------------------------------------


def collapse(shape: Shape, *strides: Shape) -> tuple[Shape, ...]:
    """Merge dimensions, keeping at least one. Return their sizes and the strides of each operand, in the same order."""
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(m[-1] == s[axis] * size for m, s in zip(merged, strides, strict=True)):
            sizes[-1] *= size
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[axis]
            continue
        sizes.append(size)
        for m, s in zip(merged, strides, strict=True):
            m.append(s[axis])
    if not sizes:
        return ((1,), *((1,) for _ in strides))
    return (tuple(sizes), *(tuple(m) for m in merged))


def in_order(sizes: Shape, strides: Shape) -> Shape:
    """Return `strides`, or (1,) for a contiguous array, whose offsets are the linear indices themselves."""
    return (1,) if strides == contiguous_strides(sizes) else strides


def needs_int64(sizes: Sequence[int], *strides: Sequence[int]) -> bool:
    """Return whether an element index or an offset can exceed int32."""
    reach = [sum(abs(st) * (s - 1) for s, st in zip(sizes, each, strict=True)) for each in strides]
    # The margin of 2^17 covers indices of the last tile that are masked.
    return max(math.prod(sizes), *reach, 0) > (1 << 31) - (1 << 17)


def as_matrix(x: Array) -> Array:
    """Return a contiguous array as a matrix with its last dimension as columns."""
    width = x.shape[-1]
    return x.view((x.size // width if width else 0, width), (width, 1), x.offset)


def row_slice(x: Array, first: int, count: int) -> Array:
    return x.view((count, *x.shape[1:]), x.strides, x.offset + first * x.strides[0])


@triton.jit
def offsets(i, sizes, strides):
    """Return the offsets of the elements with linear (row-major) indices i, in the shape of i.

    A single stride is the distance between neighbours in this order; see `in_order`.
    """
    LAST: tl.constexpr = len(strides) - 1
    o = i * 0
    for back in tl.static_range(LAST):
        o += (i % sizes[LAST - back]) * strides[LAST - back]
        i = i // sizes[LAST - back]
    return o + i * strides[0]


@triton.jit
def offsets_after(start, i, sizes, strides, WRAPS: tl.constexpr):
    """Return `offsets` of indices i from `start` on, in a matrix in at most WRAPS more rows, with one division."""
    if WRAPS == 0 or len(strides) != 2:
        return offsets(i, sizes, strides)
    else:
        first = start // sizes[1]
        c = i - first * sizes[1]
        r = i * 0 + first
        for _ in tl.static_range(WRAPS):
            over = c >= sizes[1]
            c = tl.where(over, c - sizes[1], c)
            r += over.to(r.dtype)
        return r * strides[0] + c * strides[1]


@triton.jit
def program_indices(SIZE: tl.constexpr, INT64: tl.constexpr):
    """Return the indices [SIZE] of this program's tile along the grid's first dimension."""
    program = tl.program_id(0)
    if INT64:
        program = program.to(tl.int64)
    return program * SIZE + tl.arange(0, SIZE)
