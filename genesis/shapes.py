"""Arithmetic on shapes and strides. Strides count elements, as in torch. Nothing here touches memory."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

from genesis.errors import DTypeError, IndexRangeError, ShapeError

Shape = tuple[int, ...]


class Size(tuple[int, ...]):
    """The shape of a tensor: a tuple whose slices and sums are sizes, too."""

    __slots__ = ()

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self)

    def __getitem__(self, index: Any) -> Any:
        entry = tuple.__getitem__(self, index)
        return Size(entry) if isinstance(index, slice) else entry

    def __add__(self, other: Any) -> Size:
        return Size(tuple.__add__(self, tuple(other)))

    def __radd__(self, other: Any) -> Size:
        return Size((*other, *self))

    def __mul__(self, count: Any) -> Size:
        return Size(tuple.__mul__(self, count))

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return f"genesis.Size({list(self)})"


def numel(shape: Sequence[int]) -> int:
    """Return the number of elements."""
    return math.prod(shape)


class RowMajor(tuple[int, ...]):
    """Strides of `contiguous_strides`: their type says without a comparison that no dimensions are swapped."""

    __slots__ = ()


@functools.lru_cache(4096)
def contiguous_strides(shape: Shape) -> Shape:
    """Return row-major strides; a dimension of size 0 counts as 1."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return RowMajor(strides)


def strides_in_order(shape: Shape, order: Sequence[int]) -> Shape:
    """Return strides without gaps that store the dimensions of `order` from the innermost to the outermost."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


@functools.lru_cache(4096)
def preserved_strides(shape: Shape, *operands: tuple[Shape, Shape]) -> Shape:
    """Return the strides that torch gives an elementwise result of `shape`.

    Dimensions keep the order in which the (shape, strides) of the operands store them; the first operand that tells
    two dimensions apart decides.
    """
    if all(s == shape and st == operands[0][1] for s, st in operands) and is_dense(*operands[0]):
        return operands[0][1]
    wide = [_spread(shape, s, st) for s, st in operands]
    order = list(range(len(shape)))[::-1]
    for i in range(1, len(order)):
        at = i
        for before in range(i - 1, -1, -1):
            swap = _stored_later(shape, wide, order[before], order[at])
            if swap > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif swap < 0:
                break
    return strides_in_order(shape, order)


def _spread(target: Shape, shape: Shape, strides: Shape) -> Shape:
    """Return an operand's strides along the dimensions of `target`; 0 where it repeats."""
    pad = len(target) - len(shape)
    tail = [0 if s == 1 and t != 1 else st for s, t, st in zip(shape, target[pad:], strides, strict=True)]
    return (0,) * pad + tuple(tail)


def _stored_later(shape: Shape, operands: Sequence[Shape], a: int, b: int) -> int:
    """Return 1 if dimension a lies outside b in memory, -1 if inside, 0 if the operands do not say."""
    for strides in operands:
        if strides[a] and strides[b]:
            if strides[a] != strides[b]:
                return 1 if strides[a] > strides[b] else -1
            if shape[a] > shape[b]:
                return 1
    return 0


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether some order of the dimensions reads memory without gaps and without repetition."""
    step = 1
    for stride, size in sorted((st, s) for s, st in zip(shape, strides, strict=True) if s != 1):
        if stride != step:
            return not all(shape)
        step *= size
    return True


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements are stored row-major without gaps; strides of dimensions of size 1 are ignored."""
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def broadcast_shapes(*shapes: Shape) -> Shape:
    """Broadcast shapes as numpy does. Raises ShapeError with the shapes and the dimension that differs."""
    first = shapes[0]
    if all(s == first for s in shapes):
        return first
    ndim = max(len(s) for s in shapes)
    out = [1] * ndim
    for shape in shapes:
        for i, size in enumerate(shape, ndim - len(shape)):
            if size != 1:
                if out[i] not in (1, size):
                    listed = " and ".join(str(s) for s in shapes)
                    raise ShapeError(
                        f"shapes {listed} do not broadcast: dimension {i - ndim} is {out[i]} against {size}"
                    )
                out[i] = size
    return tuple(out)


def broadcast_strides(shape: Shape, strides: Shape, target: Shape) -> Shape:
    """Return strides that read an array of `shape` as if it had shape `target`; 0 where it repeats."""
    pad = len(target) - len(shape)
    if pad < 0 or any(s not in (1, t) for s, t in zip(shape, target[pad:], strict=True)):
        raise ShapeError(f"shape {shape} does not expand to {target}")
    tail = tuple(0 if s == 1 and t != 1 else st for s, t, st in zip(shape, target[pad:], strides, strict=True))
    return (0,) * pad + tail


def as_index(what: str, value: Any) -> int:
    """Return an int, also from numpy's integers and their like. Raises DTypeError, which calls the value `what`."""
    try:
        return operator.index(value)
    except TypeError:
        raise DTypeError(f"{what} {value!r} is not an integer") from None


def normalize_axis(axis: int, ndim: int) -> int:
    """Return a dimension in [0, ndim); negative ones count from the end. A 0-d array accepts 0 and -1."""
    span = max(ndim, 1)
    if axis.__class__ is not int:
        axis = as_index("dimension", axis)
    if not -span <= axis < span:
        raise IndexRangeError(
            f"dimension {axis} is out of range for {ndim} dimensions", next=f"use {-span} to {span - 1}"
        )
    return axis % span


def normalize_axes(axes: int | Sequence[int] | None, ndim: int) -> Shape:
    """Return sorted distinct dimensions in [0, ndim); None means all."""
    if axes is None:
        return tuple(range(ndim))
    listed = axes if isinstance(axes, tuple | list) else (as_index("dimension", axes),)
    normalized = [normalize_axis(a, ndim) for a in listed]
    if len(set(normalized)) != len(normalized):
        raise ShapeError(f"a dimension appears twice in {tuple(listed)}")
    return tuple(sorted(a for a in normalized if a < ndim))


def reduced_shape(shape: Shape, axes: Shape, keepdim: bool) -> Shape:
    """Return the shape after reducing `axes`, which are normalized (see `normalize_axes`)."""
    if keepdim:
        return tuple(1 if i in axes else s for i, s in enumerate(shape))
    return tuple(s for i, s in enumerate(shape) if i not in axes)


def resolve_shape(shape: Sequence[int], count: int) -> Shape:
    """Return `shape` with its -1, if any, replaced so that it has `count` elements."""
    unknown = [i for i, s in enumerate(shape) if s == -1]
    if len(unknown) > 1 or any(s < -1 for s in shape):
        raise ShapeError(f"shape {tuple(shape)} is not valid: sizes are at least 0, with at most one -1")
    out = list(shape)
    if unknown:
        known = numel([s for s in shape if s != -1])
        if known == 0 or count % known:
            raise ShapeError(f"shape {tuple(shape)} does not fit {count} elements")
        out[unknown[0]] = count // known
    if numel(out) != count:
        raise ShapeError(f"shape {tuple(shape)} has {numel(out)} elements, the tensor has {count}")
    return tuple(out)


@functools.lru_cache(4096)
def view_strides(shape: Shape, strides: Shape, target: Shape) -> Shape | None:
    """Return strides that read the same memory as `target` (same element count); None if a copy is necessary."""
    if numel(shape) == 0:
        return contiguous_strides(target)
    # Merge runs of dimensions without gaps into blocks (size, innermost stride).
    blocks: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if blocks and blocks[-1][1] == stride * size:
            blocks[-1] = (blocks[-1][0] * size, stride)
        else:
            blocks.append((size, stride))
    # Split the blocks into the target's dimensions, innermost first.
    out = [1] * len(target)
    i = len(target) - 1
    for size, stride in reversed(blocks):
        left = size
        while left > 1:
            while i >= 0 and target[i] == 1:
                out[i] = stride
                i -= 1
            if i < 0 or left % target[i]:
                return None
            out[i] = stride
            stride *= target[i]
            left //= target[i]
            i -= 1
    return tuple(out)
