"""Strided addressing: dimensions are merged on the host, and offsets computed from linear indices on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import triton
import triton.language as tl

from genesis.array import Array
from genesis.shapes import Shape


def collapse(shape: Shape, *strides: Shape) -> tuple[Shape, ...]:
    """The same elements in as few dimensions as all operands allow, in the same order.

    Returns:
        The merged sizes and, for each operand, its strides. At least one dimension.
    """
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


def needs_int64(sizes: Sequence[int], *strides: Sequence[int]) -> bool:
    """Whether an element index or an offset passes 2^31."""
    reach = [sum(abs(st) * (s - 1) for s, st in zip(sizes, each, strict=True)) for each in strides]
    # room for the last, partially masked tile
    return max(math.prod(sizes), *reach, 0) > (1 << 31) - (1 << 17)


def as_matrix(x: Array) -> Array:
    """A contiguous array as a matrix of its last dimension."""
    width = x.shape[-1]
    return x.view((x.size // width if width else 0, width), (width, 1), x.offset)


@triton.jit
def offsets(i, sizes, strides):
    """Offsets of the elements with linear (row-major) indices i."""
    LAST: tl.constexpr = len(sizes) - 1
    o = i * 0
    for back in tl.static_range(LAST):
        o += (i % sizes[LAST - back]) * strides[LAST - back]
        i = i // sizes[LAST - back]
    return o + i * strides[0]


@triton.jit
def program_indices(SIZE: tl.constexpr, INT64: tl.constexpr):
    """The indices [SIZE] of this program's tile along the grid's first dimension."""
    program = tl.program_id(0)
    if INT64:
        program = program.to(tl.int64)
    return program * SIZE + tl.arange(0, SIZE)
