"""Indexing functions on tensors: `x[index]`, `x[index] = value`, and torch's gather, scatter, select and put families.

`genesis.indexing` decides what an index does; here it is run and recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array, from_numpy
from genesis.autograd.graph import is_same_window
from genesis.autograd.modes import is_grad_enabled
from genesis.autograd.record import TensorBase, apply, apply_
from genesis.dtypes import INTEGER, bool_, int64
from genesis.errors import DTypeError, ShapeError
from genesis.functions.elementwise import copy_, fill_, to_dtype
from genesis.functions.shape import expand, flatten, reshape, unsqueeze
from genesis.functions.surface import Operand, Sizes, Tensor, array_of, integer, plain, public
from genesis.functions.transfer import moved
from genesis.indexing import Kind, plan_get, plan_set
from genesis.keywords import check_calls
from genesis.ops import elementwise
from genesis.ops import index as ops
from genesis.ops import shape as views
from genesis.ops.elementwise import arange
from genesis.shapes import Shape, broadcast_shapes, contiguous_strides, normalize_axis, numel

# --- x[index] ---------------------------------------------------------------------------------------------------------


def _arrays_in(index: Any) -> Any:
    """The index with its tensors replaced by their arrays."""
    if isinstance(index, tuple):
        return tuple(_arrays_in(e) for e in index)
    if isinstance(index, list) and any(isinstance(e, TensorBase) for e in index):
        return np.asarray([e.array.numpy() if isinstance(e, TensorBase) else e for e in index])
    return index.array if isinstance(index, TensorBase) else index


def getitem(x: Tensor, index: Any) -> Tensor:
    """`x[index]`: a view for ints, slices, None and Ellipsis; a copy where integer arrays or masks take part.

    Raises:
        IndexRangeError: naming dimension, size and index.
        DTypeError: for index tensors that are neither integers nor bools.
    """
    index = _arrays_in(index)
    if isinstance(index, Array) and index.dtype is bool_ and index.shape == x.array.shape and index.shape:
        return _selected(x, index)
    plan = plan_get(x.array, index)
    if plan.kind is Kind.VIEW:
        return apply(views.slice, x, items=plan.items or ())
    part = x if plan.items is None else apply(views.slice, x, items=plan.items)
    return apply(ops.index_get, part, *plan.indices, dims=plan.dims, named=plan.named)


class IndexPlan(NamedTuple):
    """What an index does to a tensor; see `index_plan`.

    Attributes:
        kind: VIEW or GATHER where it reads; COPY, FILL or SCATTER where it writes. Equal to its name as a string.
        result_shape: of what is read or written.
        result_strides: in elements; those of the view, of the new tensor that a GATHER makes, of a SCATTER's values.
        ptr_offset_bytes: from the tensor's first element to that of the view, which for a GATHER or SCATTER the
            integers and slices of the index give, and in which the index tensors count.
        index_tensor: the positions that are gathered or written: int64, a tuple where several dimensions have their
            own, None where there are none, or where a mask serves without.
        needs_mask_compaction: whether a bool mask must be counted and its positions listed, which waits for the device.
        temp_memory_bytes: taken besides the result for positions; kernels may take a workspace on top.
    """

    kind: Kind
    result_shape: Shape
    result_strides: Shape
    ptr_offset_bytes: int
    index_tensor: Any
    needs_mask_compaction: bool
    temp_memory_bytes: int


_READS: Any = object()


@public(method=False)
def index_plan(x: Tensor, index: Any, value: Any = _READS) -> IndexPlan:
    """What `x[index]` does, or `x[index] = value` where a value is given; x is left alone.

    Raises:
        IndexRangeError, DTypeError: as `x[index]`.
    """
    array, key = array_of(x, "index_plan"), _arrays_in(index)
    entries = key if isinstance(key, tuple) else (key,)
    masked = any(_is_mask(e) for e in entries)
    if value is _READS and isinstance(key, Array) and key.dtype is bool_ and key.shape == array.shape and key.shape:
        found = _selected(TensorBase.wrap(array), key).array
        offsets: Any = ops.mask_offsets.infer(key)
        nbytes = numel(offsets.shape) * offsets.dtype.itemsize
        return IndexPlan(Kind.GATHER, found.shape, found.strides, 0, None, True, nbytes)
    is_number = not isinstance(value, TensorBase) or not value.array.shape
    plan = plan_get(array, key) if value is _READS else plan_set(array, key, is_number)
    gathers = plan.kind in (Kind.GATHER, Kind.SCATTER)
    given = {e.storage for e in entries if isinstance(e, Array)}
    made = {i.storage for i in plan.indices} - given
    positions = tuple(TensorBase.wrap(i) for i in plan.indices)
    return IndexPlan(
        plan.kind,
        plan.shape,
        contiguous_strides(plan.shape) if gathers else plan.window.strides,
        plan.window.offset * array.dtype.itemsize,
        (positions[0] if len(positions) == 1 else positions) if positions else None,
        masked and gathers,
        sum(storage.nbytes for storage in made),
    )


def _is_mask(entry: Any) -> bool:
    if isinstance(entry, Array):
        return entry.dtype is bool_
    return isinstance(entry, np.ndarray | list) and np.asarray(entry).dtype == np.bool_


def _selected(x: Any, mask: Array) -> Any:
    """The elements of x where a mask of its shape holds; reading how many there are is the one wait."""
    offsets = ops.mask_offsets(mask)
    count = offsets.view((), (), offsets.offset + offsets.size - 1).item()
    return apply(ops.masked_select, x, mask, offsets, count=count)


def setitem(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`: changes x's memory; the value broadcasts and is cast to x's dtype.

    Where integer arrays repeat an index, the last value stays. Raises: as `getitem`; ShapeError.
    """
    value = _as_value(value, x.array)
    number = not isinstance(value, TensorBase)
    plan = plan_set(x.array, _arrays_in(index), number or not value.array.shape)
    part = x if plan.items is None else apply(views.slice, x, items=plan.items)
    if not number:
        value = _fitting(value, plan.shape)
    if plan.mask is not None:
        # written under the mask, so that nothing has to be counted
        apply_(elementwise.where, part, plan.mask, value if number else to_dtype(value, x.array.dtype), part)
    elif plan.kind is Kind.SCATTER:
        _write(part, value, plan.indices, plan.dims, named=plan.named)
    elif number:
        fill_(part, value)
    elif not (
        is_same_window(part.array, value.array) and value.owner is x.owner
    ):  # as after x[i] += 1, not off the tape
        copy_(part, value)


def _as_value(value: Any, x: Array) -> Any:
    """What is assigned: a tensor, or a number that x's dtype can hold."""
    if isinstance(value, TensorBase):
        return value
    if isinstance(value, (list, tuple, np.ndarray)) and np.ndim(value):
        from genesis.functions.create import as_tensor

        return as_tensor(np.asarray(value))
    if (found := plain(value)) is None:
        raise DTypeError(f"a value of type {type(value).__name__} cannot be assigned to elements")
    value = found
    if x.dtype is bool_:
        return bool(value)
    if x.dtype.category != INTEGER:
        return value
    limits = np.iinfo(x.dtype.numpy)
    if not limits.min <= value <= limits.max:  # also for NaN
        raise DTypeError(f"{value} does not fit into {x.dtype}, which holds {limits.min} to {limits.max}")
    return int(value)


def _fitting(value: Any, shape: Shape) -> Any:
    """`value` without leading dimensions of size 1 that `shape` has no place for."""
    given = value.array.shape
    extra = len(given) - len(shape)
    if extra > 0 and all(s == 1 for s in given[:extra]):
        value = apply(views.reshape, value, shape=given[extra:])
    given = value.array.shape
    if len(given) > len(shape) or any(v not in (1, s) for v, s in zip(given[::-1], shape[::-1], strict=False)):
        raise ShapeError(f"a value of shape {given} cannot be assigned to an index of shape {shape}")
    return value


def _write(
    x: Any, values: Any, indices: tuple[Any, ...], dims: Shape, *, accumulate: bool = False, named: Shape | None = None,
    along: int | None = None,
) -> Any:  # fmt: skip
    """Values written (or added) at index arrays of x, in place."""
    if is_grad_enabled() and any(isinstance(v, TensorBase) and v.requires_grad for v in (x, values)):
        return apply_(ops.index_put, x, x, values, *indices, dims=dims, accumulate=accumulate, named=named, along=along)
    # nothing to record: only the indexed elements are touched
    given = (v.array if isinstance(v, TensorBase) else v for v in (x, values, *indices))
    ops.index_put_(*given, dims=dims, accumulate=accumulate, named=named, along=along)
    return x


# --- Whole slices by an index vector ----------------------------------------------------------------------------------


def _vector(name: str, x: Any, dim: int, index: Any) -> int:
    """The dimension, for an index of at most one dimension that suits x."""
    shape, given = array_of(x, name).shape, array_of(index, name)
    if given.ndim > 1 or given.dtype.category != INTEGER:
        raise ShapeError(f"{name}: the index must be a vector of integers, got shape {given.shape}, {given.dtype}")
    if not shape:
        raise ShapeError(f"{name}: the tensor has no dimensions")
    return normalize_axis(dim, len(shape))


def _slices(name: str, x: Any, dim: int, index: Any, source: Any) -> tuple[int, Any]:
    """(dimension, index as a vector) for a source that has one slice for each index; ShapeError if it has not."""
    dim = _vector(name, x, dim, index)
    index = reshape(index, -1) if index.array.size else index
    shape = x.array.shape
    expected = (*shape[:dim], index.array.size, *shape[dim + 1 :])
    if array_of(source, name).shape != expected:
        raise ShapeError(f"{name}: the source has shape {source.array.shape}, expected {expected}")
    return dim, index


@public
def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """The slices `index` (a vector) of dimension `dim`, copied."""
    dim = _vector("index_select", x, dim, index)
    return apply(ops.index_get, x, reshape(index, -1) if not index.array.shape else index, dims=(dim,))


@public
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """x with alpha·source added to the slices `index` of dimension `dim`; repeated indices add up."""
    dim, index = _slices("index_add", x, dim, index, source)
    return apply(ops.index_put, x, _times(source, alpha), index, dims=(dim,), accumulate=True)


@public
def index_add_(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """`index_add` in place."""
    dim, index = _slices("index_add_", x, dim, index, source)
    return _write(x, _times(source, alpha), (index,), (dim,), accumulate=True)


def _times(source: Any, alpha: float) -> Any:
    return source if alpha == 1 else apply(elementwise.mul, source, alpha)


@public
def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """x with the slices `index` of dimension `dim` replaced by those of `source`; the last of repeated ones stays."""
    dim, index = _slices("index_copy", x, dim, index, source)
    return apply(ops.index_put, x, source, index, dims=(dim,))


@public
def index_copy_(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """`index_copy` in place."""
    dim, index = _slices("index_copy_", x, dim, index, source)
    return _write(x, source, (index,), (dim,))


@public
def index_fill(x: Tensor, dim: int, index: Tensor, value: Operand) -> Tensor:
    """x with `value` (a number or a tensor of one element) in the slices `index` of dimension `dim`."""
    dim = _vector("index_fill", x, dim, index)
    return apply(ops.index_put, x, _as_value(value, x.array), index, dims=(dim,))


@public
def index_fill_(x: Tensor, dim: int, index: Tensor, value: Operand) -> Tensor:
    """`index_fill` in place."""
    dim = _vector("index_fill_", x, dim, index)
    return _write(x, _as_value(value, x.array), (index,), (dim,))


def _put_plan(name: str, x: Any, indices: Any, values: Any) -> tuple[Any, tuple[Array, ...], Shape]:
    """(value, index arrays, dims) for a tuple of index tensors over the leading dimensions."""
    given = [array_of(i, name) for i in indices]
    # without dimensions an index would count as basic indexing and take its dimension away
    vectors = [i.view((1,), (1,)) if not i.shape else i for i in given]
    plan = plan_get(array_of(x, name), tuple(vectors))
    if not plan.indices:
        raise ShapeError(f"{name}: needs at least one index tensor", next="use x[...] = value")
    value = _as_value(values, x.array)
    return _fitting(value, plan.shape) if isinstance(value, TensorBase) else value, plan.indices, plan.dims


@public
def index_put(x: Tensor, indices: Sequence[Tensor], values: Operand, accumulate: bool = False) -> Tensor:
    """x with `values` written at the index tensors `indices` (a tuple, over the leading dimensions), or added there.

    Raises:
        IndexRangeError: naming dimension, size and index.
    """
    value, arrays, dims = _put_plan("index_put", x, indices, values)
    return apply(ops.index_put, x, value, *arrays, dims=dims, accumulate=accumulate)


@public
def index_put_(x: Tensor, indices: Sequence[Tensor], values: Operand, accumulate: bool = False) -> Tensor:
    """`index_put` in place."""
    value, arrays, dims = _put_plan("index_put_", x, indices, values)
    return _write(x, value, arrays, dims, accumulate=accumulate)


# --- Element by element along one dimension ---------------------------------------------------------------------------


def _along(name: str, x: Any, dim: int, index: Any) -> tuple[Any, tuple[Any, ...], Shape]:
    """(x with at least one dimension, an index for each, all dimensions).

    The indices are `index` along `dim`, and each element's own position along the others.
    """
    if not array_of(x, name).shape:
        x, index = apply(views.reshape, x, shape=(1,)), reshape(index, -1)
    shape, given = x.array.shape, array_of(index, name)
    if given.dtype.category != INTEGER:
        raise DTypeError(f"{name}: the index is {given.dtype}, expected integers")
    dim, ndim = normalize_axis(dim, len(shape)), len(shape)
    if given.ndim != ndim or any(g > s for d, (g, s) in enumerate(zip(given.shape, shape, strict=True)) if d != dim):
        raise ShapeError(f"{name}: an index of shape {given.shape} does not suit a tensor of shape {shape}, dim {dim}")
    places = [
        arange(start=0, step=1, count=n, dtype=int64, device=given.device).view(
            tuple(n if i == d else 1 for i in range(ndim)), (0,) * d + (1,) + (0,) * (ndim - d - 1)
        )
        for d, n in enumerate(given.shape)
    ]
    return x, (*places[:dim], index, *places[dim + 1 :]), tuple(range(ndim))


@public
def gather(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """y[i, j, k] = x[i, index[i, j, k], k] for dim = 1; the result has the shape of `index`."""
    source, places, dims = _along("gather", x, dim, index)
    found = apply(ops.index_get, source, *places, dims=dims)
    return found if found.array.shape == index.array.shape else reshape(found, index.array.shape)


@public
def take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """`gather` whose index and tensor broadcast against each other outside `dim`; without dim over the flat tensor."""
    if dim is None:
        return gather(flatten(x), 0, flatten(indices))
    shape, given = array_of(x, "take_along_dim").shape, array_of(indices, "take_along_dim").shape
    dim = normalize_axis(dim, len(shape))
    if len(shape) != len(given):
        raise ShapeError(f"take_along_dim: indices of shape {given} for a tensor of shape {shape}")
    common = broadcast_shapes(
        (*shape[:dim], 1, *shape[dim + 1 :]),
        (*given[:dim], 1, *given[dim + 1 :]),
    )
    wide = (*common[:dim], shape[dim], *common[dim + 1 :])
    index = (*common[:dim], given[dim], *common[dim + 1 :])
    return gather(expand(x, wide), dim, expand(indices, index))


def _source(name: str, x: Any, index: Any, src: Any) -> Any:
    """What scatter writes: a number, or the part of `src` that `index` covers."""
    if not isinstance(src, TensorBase):
        return _as_value(src, x.array)
    given, shape = src.array.shape, index.array.shape
    if len(given) != len(shape) or any(g < s for g, s in zip(given, shape, strict=True)):
        raise ShapeError(f"{name}: a source of shape {given} for an index of shape {shape}")
    if given != shape:
        src = apply(views.slice, src, items=tuple((0, n, 1) for n in shape))
    return to_dtype(src, x.array.dtype)


def _scatter(name: str, x: Any, dim: int, index: Any, src: Any, accumulate: bool = False) -> Any:
    """Write `src`, or add it; in place where the name says so."""
    value = _source(name, x, index, src)
    target, places, dims = _along(name, x, dim, index)
    how: dict[str, Any] = {"dims": dims, "accumulate": accumulate, "along": normalize_axis(dim, len(dims))}
    if name[-1] == "_":
        _write(target, value, places, **how)
        return x
    found = apply(ops.index_put, target, value, *places, **how)
    return found if found.array.shape == x.array.shape else reshape(found, x.array.shape)


@public(keywords={"value": "src"})
def scatter(x: Tensor, dim: int, index: Tensor, src: Operand) -> Tensor:
    """x with y[i, index[i, j, k], k] = src[i, j, k] for dim = 1; the last of repeated writes stays."""
    return _scatter("scatter", x, dim, index, src)


@public(keywords={"value": "src"})
def scatter_(x: Tensor, dim: int, index: Tensor, src: Operand) -> Tensor:
    """`scatter` in place."""
    return _scatter("scatter_", x, dim, index, src)


@public
def scatter_add(x: Tensor, dim: int, index: Tensor, src: Operand) -> Tensor:
    """x with y[i, index[i, j, k], k] += src[i, j, k] for dim = 1; repeated writes add up in order."""
    return _scatter("scatter_add", x, dim, index, src, accumulate=True)


@public
def scatter_add_(x: Tensor, dim: int, index: Tensor, src: Operand) -> Tensor:
    """`scatter_add` in place."""
    return _scatter("scatter_add_", x, dim, index, src, accumulate=True)


@public
def repeat_interleave(x: Tensor, repeats: Sizes | Tensor, dim: int | None = None) -> Tensor:
    """Each element (or slice along `dim`) `repeats` times in a row; `repeats` is a number or one number per slice.

    Raises:
        ShapeError: if there are neither one nor as many numbers as slices.
    """
    if dim is None:
        x, dim = flatten(x), 0
    shape = array_of(x, "repeat_interleave").shape
    dim = normalize_axis(dim, len(shape))
    if not shape:
        x, shape = reshape(x, 1), (1,)
    is_one = (
        not repeats.array.shape if isinstance(repeats, TensorBase) else not isinstance(repeats, (Sequence, np.ndarray))
    )
    if is_one:
        repeats = integer(repeats, "repeat_interleave", "repeats")
        wide = expand(unsqueeze(x, dim + 1), *shape[: dim + 1], repeats, *shape[dim + 1 :])
        return reshape(apply(elementwise.copy, wide), *shape[:dim], shape[dim] * repeats, *shape[dim + 1 :])
    counts = np.asarray(repeats.array.numpy() if isinstance(repeats, TensorBase) else repeats)
    if counts.shape not in ((1,), (shape[dim],), ()) or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ShapeError(
            f"repeat_interleave: repeats of shape {counts.shape} and type {counts.dtype} for dimension {dim} of size"
            f" {shape[dim]}: one number >= 0, or one per slice"
        )
    rows = np.repeat(np.arange(shape[dim]), counts if counts.shape == (shape[dim],) else int(counts.reshape(())))
    return index_select(x, dim, TensorBase.wrap(moved(from_numpy(rows), x.array.device)))


# --- Masks ------------------------------------------------------------------------------------------------------------


def _mask(name: str, mask: Any) -> Array:
    """The array of a bool tensor."""
    array = array_of(mask, name)
    if array.dtype is not bool_:
        raise DTypeError(f"{name} takes a bool mask, got {array.dtype}", next="compare first, for example x > 0")
    return array


@public
def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """The elements where `mask` holds (both broadcast), in row-major order, as a vector."""
    shape = broadcast_shapes(array_of(x, "masked_select").shape, _mask("masked_select", mask).shape)
    return getitem(expand(x, shape), expand(mask, shape))


@public
def masked_scatter_(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The elements of x where `mask` (which broadcasts to x) holds become those of `source`, in order, in place.

    Raises:
        ShapeError: if the source has fewer elements than the mask selects.
    """
    shape = array_of(x, "masked_scatter").shape
    _mask("masked_scatter", mask)
    plan = plan_get(x.array, expand(mask, shape).array)
    count = plan.shape[0]
    if array_of(source, "masked_scatter").size < count:
        raise ShapeError(f"masked_scatter: the mask selects {count} elements, the source has {source.array.size}")
    values = apply(views.slice, reshape(source, -1) if source.array.size else flatten(source), items=((0, count, 1),))
    part = x if plan.items is None else apply(views.slice, x, items=plan.items)
    _write(part, to_dtype(values, x.array.dtype), plan.indices, plan.dims)
    return x


@public
def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`masked_scatter_` on a copy of x, broadcast to the mask's shape."""
    shape = broadcast_shapes(array_of(x, "masked_scatter").shape, array_of(mask, "masked_scatter").shape)
    return masked_scatter_(apply(elementwise.copy, expand(x, shape)), mask, source)


check_calls(globals(), ("IndexPlan",))
