"""Arithmetic on shapes and strides. Strides count elements, as in torch; nothing here touches memory."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

from genesis.errors import DTypeError, IndexRangeError, ShapeError

Shape = tuple[int, ...]


class Size(tuple[int, ...]):
    """The shape of a tensor: a tuple that counts its elements; slices and sums of sizes are sizes."""

    __slots__ = ()

    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self)

    def __getitem__(self, index: Any) -> Any:
        found = tuple.__getitem__(self, index)
        return Size(found) if isinstance(index, slice) else found

    def __add__(self, other: Any) -> Size:
        return Size(tuple.__add__(self, tuple(other)))

    def __radd__(self, other: Any) -> Size:
        return Size((*other, *self))

    def __mul__(self, count: Any) -> Size:
        return Size(tuple.__mul__(self, count))

    __rmul__ = __mul__


def numel(shape: Sequence[int]) -> int:
    """Number of elements."""
    return math.prod(shape)


@functools.lru_cache(4096)
def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides; a dimension of size 0 counts as 1."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(shape[i + 1], 1)
    return tuple(strides)


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements lie row-major without gaps (strides of size-1 dimensions do not matter)."""
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
    """numpy's broadcasting of shapes. Raises: ShapeError, naming the shapes and the dimension that differs."""
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
    """Strides that read an array of `shape` as if it had shape `target` (0 where it repeats)."""
    pad = len(target) - len(shape)
    if pad < 0 or any(s not in (1, t) for s, t in zip(shape, target[pad:], strict=True)):
        raise ShapeError(f"shape {shape} does not expand to {target}")
    tail = tuple(0 if s == 1 and t != 1 else st for s, t, st in zip(shape, target[pad:], strides, strict=True))
    return (0,) * pad + tail


def as_index(what: str, value: Any) -> int:
    """An int, or what counts as one, such as numpy's integers. Raises: DTypeError, naming `what` it is."""
    try:
        return operator.index(value)
    except TypeError:
        raise DTypeError(f"{what} {value!r} is no integer") from None


def normalize_axis(axis: int, ndim: int) -> int:
    """A dimension index in [0, ndim); negative counts from the end. A zero-dimensional array accepts 0 and -1."""
    span = max(ndim, 1)
    if axis.__class__ is not int:
        axis = as_index("dimension", axis)
    if not -span <= axis < span:
        raise IndexRangeError(
            f"dimension {axis} is out of range for {ndim} dimensions", next=f"use {-span} to {span - 1}"
        )
    return axis % span


def normalize_axes(axes: int | Sequence[int] | None, ndim: int) -> Shape:
    """Sorted distinct dimension indices; None means all of them."""
    if axes is None:
        return tuple(range(ndim))
    given = axes if isinstance(axes, tuple | list) else (as_index("dimension", axes),)
    found = [normalize_axis(a, ndim) for a in given]
    if len(set(found)) != len(found):
        raise ShapeError(f"a dimension appears twice in {tuple(given)}")
    return tuple(sorted(a for a in found if a < ndim))


def reduced_shape(shape: Shape, axes: Shape, keepdim: bool) -> Shape:
    """The shape left after reducing `axes` (as `normalize_axes` gives them)."""
    if keepdim:
        return tuple(1 if i in axes else s for i, s in enumerate(shape))
    return tuple(s for i, s in enumerate(shape) if i not in axes)


def resolve_shape(shape: Sequence[int], count: int) -> Shape:
    """`shape` with its one -1 filled in so that it has `count` elements."""
    unknown = [i for i, s in enumerate(shape) if s == -1]
    if len(unknown) > 1 or any(s < -1 for s in shape):
        raise ShapeError(f"shape {tuple(shape)} is not valid: sizes are at least 0, with at most one -1")
    out = list(shape)
    if unknown:
        rest = numel([s for s in shape if s != -1])
        if rest == 0 or count % rest:
            raise ShapeError(f"shape {tuple(shape)} does not fit {count} elements")
        out[unknown[0]] = count // rest
    if numel(out) != count:
        raise ShapeError(f"shape {tuple(shape)} has {numel(out)} elements, the tensor has {count}")
    return tuple(out)


@functools.lru_cache(4096)
def view_strides(shape: Shape, strides: Shape, target: Shape) -> Shape | None:
    """Strides under which the same memory reads as `target` (same element count), or None where a copy is needed."""
    if numel(shape) == 0:
        return contiguous_strides(target)
    # Merge runs of dimensions that lie without gaps into blocks (size, innermost stride).
    blocks: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if blocks and blocks[-1][1] == stride * size:
            blocks[-1] = (blocks[-1][0] * size, stride)
        else:
            blocks.append((size, stride))
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
