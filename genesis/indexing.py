"""The index plan: what `x[index]` and `x[index] = value` do, decided before anything runs.

Basic indexing (integers, slices, None, Ellipsis) always returns a view. Integer arrays and bool masks gather from or
scatter into the view that the basic part of the index selects. The rules are torch's: an integer removes its dimension
before the arrays are applied, and slices have positive steps. A mask blocks once, to read its count from the device.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from genesis.array import Array, from_host, from_numpy
from genesis.backend import Device
from genesis.dtypes import INTEGER, bool_, int64, uint8
from genesis.errors import DTypeError, IndexRangeError, ShapeError
from genesis.ops.index import mask_count, mask_indices, placed
from genesis.ops.shape import Item, Layout, slice_layout
from genesis.shapes import Shape, broadcast_shapes, contiguous_strides


class Kind(enum.StrEnum):
    """What an index does: returns a view, gathers, copies arrays or fills one value into a view, or scatters."""

    VIEW = "VIEW"
    GATHER = "GATHER"
    COPY = "COPY"
    FILL = "FILL"
    SCATTER = "SCATTER"


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The plan of an index for one array.

    Attributes:
        kind: what runs.
        items: basic part of the index, as `ops.shape.slice` takes it; None if it selects the whole array.
        window: view that the basic part selects: shape, strides, and offset from the array's first element.
        shape: shape that the whole index reads or writes.
        indices: integer arrays, one per entry of `dims`.
        dims: dimensions of the window that `indices` index.
        named: the same dimensions, numbered as in the array, for errors.
        mask: mask of a FILL, with dimensions of size 1 added so that it broadcasts to the window.
    """

    kind: Kind
    items: tuple[Item, ...] | None
    window: Layout
    shape: Shape
    indices: tuple[Array, ...] = ()
    dims: Shape = ()
    named: Shape = ()
    mask: Array | None = None


def _on_device(values: np.ndarray, device: Device) -> Array:
    if device.type == "cpu":
        return from_numpy(values)
    return from_host(values, int64 if values.dtype != np.bool_ else bool_, device)


def _as_index(entry: Any, device: Device) -> Any:
    """Return an entry of an index as int, bool, slice, None, Ellipsis or Array."""
    if entry is None or entry is Ellipsis or isinstance(entry, (bool, int, slice)):
        return entry
    # Lists, ranges and numpy arrays become arrays on the device.
    if isinstance(entry, (list, range, np.ndarray, np.bool_)):
        try:
            values = np.asarray(entry)
        except ValueError as error:
            raise ShapeError("a list used as an index must be rectangular") from error
        if values.size == 0 and not isinstance(entry, np.ndarray):
            values = values.astype(np.int64)
        if values.dtype.kind not in "iub":
            raise DTypeError(f"an index has type {values.dtype}", next="use integers, or bools for a mask")
        entry = _on_device(values if values.dtype == np.bool_ else values.astype(np.int64), device)
    # 0-d integer tensors become ints.
    if isinstance(entry, Array):
        if entry.dtype is uint8 or entry.dtype.category > INTEGER:
            raise DTypeError(
                f"an index tensor is {entry.dtype}, expected integers or bools",
                next="cast it: .to(bool) for a mask, .long() for positions",
            )
        return entry.item() if not entry.shape and entry.dtype is not bool_ else entry
    try:
        return operator.index(entry)
    except TypeError:
        raise DTypeError(
            f"an index has type {type(entry).__name__}", next="use int, slice, None, ..., integer tensors or bool masks"
        ) from None


def _consumed(entry: Any) -> int:
    """Return how many dimensions of the array an entry indexes."""
    if isinstance(entry, Array):
        return entry.ndim if entry.dtype is bool_ else 1
    return 0 if entry is None or entry is Ellipsis or isinstance(entry, bool) else 1


def _range(entry: slice, dim: int, size: int) -> tuple[int, int, int]:
    """Return a slice as (start, count, step)."""
    try:
        if entry.step is not None and operator.index(entry.step) < 1:
            raise ShapeError(
                f"slice step {entry.step} for dimension {dim}: steps are at least 1", next="use flip() to reverse"
            )
        start, stop, step = entry.indices(size)
    except TypeError:
        raise DTypeError(f"{entry} for dimension {dim}: bounds and steps of slices are integers") from None
    return start, len(range(start, stop, step)), step


def _parse(x: Array, index: Any) -> tuple[tuple[Item, ...] | None, Layout, list[tuple[int, int, Array]]]:
    """Return the basic part (None if it selects the whole array), the view it selects, and the arrays of the index.

    Each array comes as (dimension of the view, dimension of x, array or mask).
    """
    entries = [_as_index(e, x.device) for e in (index if isinstance(index, tuple) else (index,))]
    used = sum(_consumed(e) for e in entries)
    if used > x.ndim:
        raise IndexRangeError(f"{used} indices exceed the {x.ndim} dimensions of shape {x.shape}")
    if sum(e is Ellipsis for e in entries) > 1:
        raise IndexRangeError("an index has more than one ellipsis (...)")
    # Walk through the entries from the left.
    items: list[Item] = []
    arrays: list[tuple[int, int, Array]] = []
    dim = place = 0  # the next dimension of x, and of the window
    for entry in entries:
        if entry is Ellipsis:
            covered = x.ndim - used
            items += [(0, size, 1) for size in x.shape[dim : dim + covered]]
            dim, place = dim + covered, place + covered
        elif isinstance(entry, bool):
            items.append(None)
            arrays.append((place, dim, _on_device(np.zeros(int(entry), np.int64), x.device)))
            place += 1
        elif entry is None:
            items.append(None)
            place += 1
        elif isinstance(entry, int):
            size = x.shape[dim]
            if not -size <= entry < size:
                raise IndexRangeError(f"index {entry} is out of range for dimension {dim} of size {size}")
            items.append(entry % size)
            dim += 1
        elif isinstance(entry, slice):
            items.append(_range(entry, dim, x.shape[dim]))
            dim, place = dim + 1, place + 1
        else:
            width = _consumed(entry)
            sizes = x.shape[dim : dim + width]
            if entry.dtype is bool_ and entry.shape != sizes:
                raise IndexRangeError(
                    f"a mask of shape {entry.shape} at dimension {dim} does not match a tensor of shape {x.shape}"
                )
            arrays.append((place, dim, entry))
            # A 0-d mask indexes a new dimension of size 1.
            items += [(0, size, 1) for size in sizes] if width else [None]
            dim, place = dim + width, place + max(width, 1)
    window = slice_layout(x.shape, x.strides, items=tuple(items))
    return None if window == (x.shape, x.strides, 0) else tuple(items), window, arrays


def _integer_arrays(place: int, dim: int, entry: Array) -> list[tuple[int, int, Array]]:
    """Return an entry as integer arrays, one per dimension; reading the count of a mask blocks."""
    if entry.dtype is not bool_:
        return [(place, dim, entry)]
    count = int(mask_count(entry).item())
    if not entry.shape:
        return [(place, dim, _on_device(np.zeros(count, np.int64), entry.device))]
    positions = mask_indices(entry, count=count)
    return [(place + i, dim + i, positions.view((count,), (1,), i * count)) for i in range(entry.ndim)]


def _with_arrays(
    kind: Kind, items: tuple[Item, ...] | None, window: Layout, arrays: list[tuple[int, int, Array]]
) -> IndexPlan:
    flat = [n for entry in arrays for n in _integer_arrays(*entry)]
    dims = tuple(place for place, _, _ in flat)
    indices = tuple(array for _, _, array in flat)
    shape = placed(window.shape, dims, broadcast_shapes(*(i.shape for i in indices)))[0]
    return IndexPlan(kind, items, window, shape, indices, dims, tuple(dim for _, dim, _ in flat))


def plan_get(x: Array, index: Any) -> IndexPlan:
    """Return the plan of `x[index]`.

    `index` is an int, slice, None, Ellipsis, bool, Array, numpy array or list, or a tuple of these.

    Raises:
        IndexRangeError: for an index outside its dimension; names dimension, size and index.
        DTypeError: for index tensors that hold neither integers nor bools.
    """
    items, window, arrays = _parse(x, index)
    if arrays:
        return _with_arrays(Kind.GATHER, items, window, arrays)
    return IndexPlan(Kind.VIEW, items, window, window.shape)


def plan_set(x: Array, index: Any, scalar: bool) -> IndexPlan:
    """Return the plan of `x[index] = value`; `scalar` means that the value is one number. Raises as `plan_get`.

    A single number assigned through a single mask is a FILL under the mask, so no count is read.
    """
    items, window, arrays = _parse(x, index)
    if not arrays:
        return IndexPlan(Kind.FILL if scalar else Kind.COPY, items, window, window.shape)
    place, _, mask = arrays[0]
    if not (scalar and len(arrays) == 1 and mask.dtype is bool_):
        return _with_arrays(Kind.SCATTER, items, window, arrays)
    after = len(window.shape) - place - max(mask.ndim, 1)
    shape = (*(mask.shape or (1,)), *(1,) * after)
    wide = mask.view(shape, (*(mask.strides or (0,)), *contiguous_strides((1,) * after)))
    return IndexPlan(Kind.FILL, items, window, window.shape, mask=wide)
