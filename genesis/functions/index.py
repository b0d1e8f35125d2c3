"""Indexing functions on tensors: `x[index]`, `x[index] = value`, and torch's gather, scatter, select and put families.

`genesis.indexing` decides what an index does; this module runs and records it.
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
from genesis.errors import DTypeError, ShapeError, UsageError
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
    if isinstance(index, tuple):
        return tuple(_arrays_in(e) for e in index)
    if isinstance(index, list) and any(isinstance(e, TensorBase) for e in index):
        return np.asarray([e.array.numpy() if isinstance(e, TensorBase) else e for e in index])
    return index.array if isinstance(index, TensorBase) else index


def getitem(x: Tensor, index: Any) -> Tensor:
    """Return `x[index]`: a view for ints, slices, None and Ellipsis; a copy if integer arrays or masks are included.

    Raises:
        IndexRangeError: for an index outside its dimension; names dimension, size and index.
        DTypeError: for index tensors that hold neither integers nor bools.
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
        kind: VIEW or GATHER for reads; COPY, FILL or SCATTER for writes. A member equals its name as a string.
        result_shape: shape that is read or written.
        result_strides: strides in elements, of the view, of a GATHER's new tensor, or of a SCATTER's values.
        ptr_offset_bytes: offset of the view from the tensor's first element. For a GATHER or SCATTER, the view is the
            one that the integers and slices of the index select; the index tensors count from its start.
        index_tensor: int64 positions that are gathered or written; a tuple if several dimensions have their own; None
            without index tensors, or if a mask is applied without them.
        needs_mask_compaction: whether a bool mask is converted to positions, which blocks for the count.
        temp_memory_bytes: memory for positions, in addition to the result; kernels may also need a workspace.
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
    """Return what `x[index]` does, or `x[index] = value` if a value is given; x does not change.

    Raises:
        IndexRangeError: as `x[index]`.
        DTypeError: as `x[index]`.
    """
    array, key = array_of(x, "index_plan"), _arrays_in(index)
    entries = key if isinstance(key, tuple) else (key,)
    masked = any(_is_mask(e) for e in entries)
    # x[mask] with a mask of x's shape has its own op.
    if value is _READS and isinstance(key, Array) and key.dtype is bool_ and key.shape == array.shape and key.shape:
        selected = _selected(TensorBase.wrap(array), key).array
        offsets: Any = ops.mask_offsets.infer(key)
        nbytes = numel(offsets.shape) * offsets.dtype.itemsize
        return IndexPlan(Kind.GATHER, selected.shape, selected.strides, 0, None, True, nbytes)
    # Every other index follows its plan; positions computed from masks and lists take temporary memory.
    is_number = not isinstance(value, TensorBase) or not value.array.shape
    plan = plan_get(array, key) if value is _READS else plan_set(array, key, is_number)
    gathers = plan.kind in (Kind.GATHER, Kind.SCATTER)
    users_storages = {e.storage for e in entries if isinstance(e, Array)}
    temporary = {i.storage for i in plan.indices} - users_storages
    positions = tuple(TensorBase.wrap(i) for i in plan.indices)
    return IndexPlan(
        plan.kind,
        plan.shape,
        contiguous_strides(plan.shape) if gathers else plan.window.strides,
        plan.window.offset * array.dtype.itemsize,
        (positions[0] if len(positions) == 1 else positions) if positions else None,
        masked and gathers,
        sum(storage.nbytes for storage in temporary),
    )


def _is_mask(entry: Any) -> bool:
    if isinstance(entry, Array):
        return entry.dtype is bool_
    return isinstance(entry, np.ndarray | list) and np.asarray(entry).dtype == np.bool_


def _selected(x: Any, mask: Array) -> Any:
    """Return the elements of x where a mask of its shape is true; reading their count blocks once."""
    offsets = ops.mask_offsets(mask)
    count = offsets.view((), (), offsets.offset + offsets.size - 1).item()
    return apply(ops.masked_select, x, mask, offsets, count=count)


def setitem(x: Tensor, index: Any, value: Any) -> None:
    """Run `x[index] = value`: write into x's memory; the value broadcasts and is cast to x's dtype.

    If integer arrays repeat an index, the last value wins. Raises as `getitem` does; also ShapeError.
    """
    # Read the value, and decide what the index does.
    value = _as_value(value, x.array)
    number = not isinstance(value, TensorBase)
    plan = plan_set(x.array, _arrays_in(index), number or not value.array.shape)
    part = x if plan.items is None else apply(views.slice, x, items=plan.items)
    if not number:
        value = _fitting(value, plan.shape)
    # Write into the selected part.
    if plan.mask is not None:
        # A masked write needs no count.
        apply_(elementwise.where, part, plan.mask, value if number else to_dtype(value, x.array.dtype), part)
    elif plan.kind is Kind.SCATTER:
        _write(part, value, plan.indices, plan.dims, named=plan.named)
    elif number:
        fill_(part, value)
    elif not (
        is_same_window(part.array, value.array) and value.owner is x.owner
    ):  # x[i] += 1 has already written the value in place
        copy_(part, value)


def _as_value(value: Any, x: Array) -> Any:
    """Return the value to assign: a tensor, or a number that x's dtype can hold."""
    if isinstance(value, TensorBase):
        return value
    if isinstance(value, (list, tuple, np.ndarray)) and np.ndim(value):
        from genesis.functions.create import as_tensor

        return as_tensor(np.asarray(value))
    if (plain_number := plain(value)) is None:
        raise DTypeError(f"a value of type {type(value).__name__} cannot be assigned to elements")
    value = plain_number
    if x.dtype is bool_:
        return bool(value)
    if x.dtype.category != INTEGER:
        return value
    limits = np.iinfo(x.dtype.numpy)
    if not limits.min <= value <= limits.max:  # also for NaN
        raise DTypeError(f"{value} does not fit into {x.dtype}, which holds {limits.min} to {limits.max}")
    return int(value)


def _fitting(value: Any, shape: Shape) -> Any:
    """Return `value` without leading dimensions of size 1 in excess of `shape`."""
    sizes = value.array.shape
    extra = len(sizes) - len(shape)
    if extra > 0 and all(s == 1 for s in sizes[:extra]):
        value = apply(views.reshape, value, shape=sizes[extra:])
    sizes = value.array.shape
    if len(sizes) > len(shape) or any(v not in (1, s) for v, s in zip(sizes[::-1], shape[::-1], strict=False)):
        raise ShapeError(f"a value of shape {sizes} cannot be assigned to an index of shape {shape}")
    return value


def _write(
    x: Any, values: Any, indices: tuple[Any, ...], dims: Shape, *, accumulate: bool = False, named: Shape | None = None,
    along: int | None = None,
) -> Any:  # fmt: skip
    """Write values into x at index arrays, in place, or add them."""
    if is_grad_enabled() and any(isinstance(v, TensorBase) and v.requires_grad for v in (x, values)):
        return apply_(ops.index_put, x, x, values, *indices, dims=dims, accumulate=accumulate, named=named, along=along)
    # Nothing to record: the in-place op touches only the indexed elements.
    operands = (v.array if isinstance(v, TensorBase) else v for v in (x, values, *indices))
    ops.index_put_(*operands, dims=dims, accumulate=accumulate, named=named, along=along)
    return x


# --- Whole slices by an index vector ----------------------------------------------------------------------------------


def _vector(name: str, x: Any, dim: int, index: Any) -> int:
    """Return the normalized dimension for an index of at most one dimension. Raises ShapeError."""
    shape, array = array_of(x, name).shape, array_of(index, name)
    if array.ndim > 1 or array.dtype.category != INTEGER:
        raise ShapeError(f"{name}: the index must be a vector of integers, got shape {array.shape}, {array.dtype}")
    if not shape:
        raise ShapeError(f"{name}: the tensor has no dimensions")
    return normalize_axis(dim, len(shape))


def _slices(name: str, x: Any, dim: int, index: Any, source: Any) -> tuple[int, Any]:
    """Return (dimension, index as a vector). Raises ShapeError unless the source has one slice per index."""
    dim = _vector(name, x, dim, index)
    index = reshape(index, -1) if index.array.size else index
    shape = x.array.shape
    expected = (*shape[:dim], index.array.size, *shape[dim + 1 :])
    if array_of(source, name).shape != expected:
        raise ShapeError(f"{name}: the source has shape {source.array.shape}, expected {expected}")
    return dim, index


@public(out=True)
def index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Return a copy of the slices `index` (a vector) along dimension `dim`."""
    if not array_of(x, "index_select").shape:
        return reshape(index_select(reshape(x, 1), dim, index), ())
    dim = _vector("index_select", x, dim, index)
    return apply(ops.index_get, x, reshape(index, -1) if not index.array.shape else index, dims=(dim,))


@public(out=True)
def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """Return x with alpha·source added to the slices `index` along dimension `dim`; repeated indices accumulate."""
    if not array_of(x, "index_add").shape:
        return reshape(index_add(reshape(x, 1), dim, index, reshape(source, -1), alpha=alpha), ())
    dim, index = _slices("index_add", x, dim, index, source)
    return apply(ops.index_put, x, _times(source, alpha), index, dims=(dim,), accumulate=True)


@public
def index_add_(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """Compute `index_add` in place."""
    if not array_of(x, "index_add_").shape:
        index_add_(reshape(x, 1), dim, index, reshape(source, -1), alpha=alpha)
        return x
    dim, index = _slices("index_add_", x, dim, index, source)
    return _write(x, _times(source, alpha), (index,), (dim,), accumulate=True)


def _times(source: Any, alpha: float) -> Any:
    return source if alpha == 1 else apply(elementwise.mul, source, alpha)


@public(out=True)
def index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Return x with the slices `index` along dimension `dim` replaced by `source`; the last of repeated ones wins."""
    if not array_of(x, "index_copy").shape:
        return reshape(index_copy(reshape(x, 1), dim, index, reshape(source, -1)), ())
    dim, index = _slices("index_copy", x, dim, index, source)
    return apply(ops.index_put, x, source, index, dims=(dim,))


@public
def index_copy_(x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Compute `index_copy` in place."""
    if not array_of(x, "index_copy_").shape:
        index_copy_(reshape(x, 1), dim, index, reshape(source, -1))
        return x
    dim, index = _slices("index_copy_", x, dim, index, source)
    return _write(x, source, (index,), (dim,))


@public
def index_fill(x: Tensor, dim: int, index: Tensor, value: Operand) -> Tensor:
    """Return x with `value`, a number or a one-element tensor, in the slices `index` along dimension `dim`."""
    if not array_of(x, "index_fill").shape:
        return reshape(index_fill(reshape(x, 1), dim, index, value), ())
    dim = _vector("index_fill", x, dim, index)
    return apply(ops.index_put, x, _as_value(value, x.array), index, dims=(dim,))


@public
def index_fill_(x: Tensor, dim: int, index: Tensor, value: Operand) -> Tensor:
    """Compute `index_fill` in place."""
    if not array_of(x, "index_fill_").shape:
        index_fill_(reshape(x, 1), dim, index, value)
        return x
    dim = _vector("index_fill_", x, dim, index)
    return _write(x, _as_value(value, x.array), (index,), (dim,))


def _put_plan(name: str, x: Any, indices: Any, values: Any) -> tuple[Any, tuple[Array, ...], Shape]:
    """Return (value, index arrays, dims) for a tuple of index tensors over the leading dimensions."""
    index_arrays = [array_of(i, name) for i in indices]
    # A 0-d index would count as basic indexing, which removes its dimension.
    vectors = [i.view((1,), (1,)) if not i.shape else i for i in index_arrays]
    plan = plan_get(array_of(x, name), tuple(vectors))
    if not plan.indices:
        raise ShapeError(f"{name}: needs at least one index tensor", next="use x[...] = value")
    value = _as_value(values, x.array)
    return _fitting(value, plan.shape) if isinstance(value, TensorBase) else value, plan.indices, plan.dims


@public
def index_put(x: Tensor, indices: Sequence[Tensor], values: Operand, accumulate: bool = False) -> Tensor:
    """Return x with `values` written, or added, at `indices`: a tuple of index tensors for the leading dimensions.

    Raises:
        IndexRangeError: for an index outside its dimension; names dimension, size and index.
    """
    value, arrays, dims = _put_plan("index_put", x, indices, values)
    return apply(ops.index_put, x, value, *arrays, dims=dims, accumulate=accumulate)


@public
def index_put_(x: Tensor, indices: Sequence[Tensor], values: Operand, accumulate: bool = False) -> Tensor:
    """Compute `index_put` in place."""
    value, arrays, dims = _put_plan("index_put_", x, indices, values)
    return _write(x, value, arrays, dims, accumulate=accumulate)


# --- Element by element along one dimension ---------------------------------------------------------------------------


def _along(name: str, x: Any, dim: int, index: Any) -> tuple[Any, tuple[Any, ...], Shape]:
    """Return (x with at least one dimension, one index per dimension, all dimensions).

    The indices are `index` along `dim`, and each element's own position along the other dimensions.
    """
    if not array_of(x, name).shape:
        x, index = apply(views.reshape, x, shape=(1,)), reshape(index, -1)
    shape, positions = x.array.shape, array_of(index, name)
    if positions.dtype.category != INTEGER:
        raise DTypeError(f"{name}: the index is {positions.dtype}, expected integers")
    dim, ndim = normalize_axis(dim, len(shape)), len(shape)
    if positions.ndim != ndim or any(
        g > s for d, (g, s) in enumerate(zip(positions.shape, shape, strict=True)) if d != dim
    ):
        raise ShapeError(
            f"{name}: an index of shape {positions.shape} does not suit a tensor of shape {shape}, dim {dim}"
        )
    places = [
        arange(start=0, step=1, count=n, dtype=int64, device=positions.device).view(
            tuple(n if i == d else 1 for i in range(ndim)), (0,) * d + (1,) + (0,) * (ndim - d - 1)
        )
        for d, n in enumerate(positions.shape)
    ]
    return x, (*places[:dim], index, *places[dim + 1 :]), tuple(range(ndim))


@public(out=True)
def gather(x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Return y with y[i, j, k] = x[i, index[i, j, k], k] for dim = 1; y has the shape of `index`.

    The gradient is dense, whatever `sparse_grad` is.
    """
    if not array_of(index, "gather").size:
        return reshape(index_select(flatten(x), 0, flatten(index)), index.array.shape)
    source, places, dims = _along("gather", x, dim, index)
    gathered = apply(ops.index_get, source, *places, dims=dims)
    return gathered if gathered.array.shape == index.array.shape else reshape(gathered, index.array.shape)


@public(out=True)
def take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Compute `gather` with x and `indices` broadcast outside `dim`; without `dim`, on the flattened tensors."""
    if dim is None:
        return gather(flatten(x), 0, flatten(indices))
    shape, index_shape = array_of(x, "take_along_dim").shape, array_of(indices, "take_along_dim").shape
    dim = normalize_axis(dim, len(shape))
    if len(shape) != len(index_shape):
        raise ShapeError(f"take_along_dim: indices of shape {index_shape} do not match a tensor of shape {shape}")
    common = broadcast_shapes(
        (*shape[:dim], 1, *shape[dim + 1 :]),
        (*index_shape[:dim], 1, *index_shape[dim + 1 :]),
    )
    wide = (*common[:dim], shape[dim], *common[dim + 1 :])
    index = (*common[:dim], index_shape[dim], *common[dim + 1 :])
    return gather(expand(x, wide), dim, expand(indices, index))


def _source(name: str, x: Any, index: Any, src: Any) -> Any:
    """Return the values that scatter writes: a number, or the part of `src` that `index` covers."""
    if not isinstance(src, TensorBase):
        return _as_value(src, x.array)
    source_shape, shape = src.array.shape, index.array.shape
    if len(source_shape) != len(shape) or any(g < s for g, s in zip(source_shape, shape, strict=True)):
        raise ShapeError(f"{name}: a source of shape {source_shape} does not cover an index of shape {shape}")
    if source_shape != shape:
        src = apply(views.slice, src, items=tuple((0, n, 1) for n in shape))
    return to_dtype(src, x.array.dtype)


def _scatter(name: str, x: Any, dim: int, index: Any, src: Any, accumulate: bool = False) -> Any:
    """Write or add `src`, in place if the name ends in an underscore."""
    value = _source(name, x, index, src)
    target, places, dims = _along(name, x, dim, index)
    how: dict[str, Any] = {"dims": dims, "accumulate": accumulate, "along": normalize_axis(dim, len(dims))}
    if name[-1] == "_":
        _write(target, value, places, **how)
        return x
    scattered = apply(ops.index_put, target, value, *places, **how)
    return scattered if scattered.array.shape == x.array.shape else reshape(scattered, x.array.shape)


@public(keywords={"value": "src"}, out=True)
def scatter(x: Tensor, dim: int, index: Tensor, src: Operand, *, reduce: str | None = None) -> Tensor:
    """Return x with y[i, index[i, j, k], k] = src[i, j, k] for dim = 1; the last of repeated writes wins.

    `reduce` "add" or "multiply" combines `src` with the elements of x, without a gradient.
    """
    if reduce is not None:
        return scatter_(apply(elementwise.copy, x), dim, index, src, reduce=reduce)
    return _scatter("scatter", x, dim, index, src)


@public(keywords={"value": "src"})
def scatter_(x: Tensor, dim: int, index: Tensor, src: Operand, *, reduce: str | None = None) -> Tensor:
    """Compute `scatter` in place."""
    if reduce is not None:
        if reduce not in ("add", "multiply"):
            raise UsageError(f"scatter: reduce is {reduce!r}", next='pass "add" or "multiply"')
        if not isinstance(src, TensorBase):
            src = apply(
                elementwise.fill, value=src, shape=index.array.shape, dtype=x.array.dtype, device=x.array.device
            )
        return x.scatter_reduce_(dim, index, src, "sum" if reduce == "add" else "prod")
    return _scatter("scatter_", x, dim, index, src)


@public(out=True)
def scatter_add(x: Tensor, dim: int, index: Tensor, src: Operand) -> Tensor:
    """Return x with y[i, index[i, j, k], k] += src[i, j, k] for dim = 1; repeated writes accumulate in order."""
    return _scatter("scatter_add", x, dim, index, src, accumulate=True)


@public
def scatter_add_(x: Tensor, dim: int, index: Tensor, src: Operand) -> Tensor:
    """Compute `scatter_add` in place."""
    return _scatter("scatter_add_", x, dim, index, src, accumulate=True)


@public
def repeat_interleave(
    x: Tensor, repeats: Sizes | Tensor = (), dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Return each element, or slice along `dim`, `repeats` times in a row; `repeats` is one number or one per slice.

    `repeat_interleave(repeats)` repeats the positions 0, 1, …. `output_size`, the length of the result, is checked.

    Raises:
        ShapeError: if the count of `repeats` is neither one nor the number of slices.
    """
    if isinstance(repeats, tuple) and not repeats:
        size, place = array_of(x, "repeat_interleave").size, x.array.device
        x, repeats = apply(arange, start=0, step=1, count=size, dtype=int64, device=place), x
    if output_size is not None:
        result = repeat_interleave(x, repeats, dim)
        if result.array.shape[0 if dim is None else dim] != output_size:
            raise ShapeError(
                f"repeat_interleave: the result has shape {result.array.shape}, not {output_size} along dim"
            )
        return result
    if dim is None:
        x, dim = flatten(x), 0
    shape = array_of(x, "repeat_interleave").shape
    dim = normalize_axis(dim, len(shape))
    if not shape:
        x, shape = reshape(x, 1), (1,)
    # One count for all slices: expand and copy.
    is_one = (
        not repeats.array.shape if isinstance(repeats, TensorBase) else not isinstance(repeats, (Sequence, np.ndarray))
    )
    if is_one:
        repeats = integer(repeats, "repeat_interleave", "repeats")
        wide = expand(unsqueeze(x, dim + 1), *shape[: dim + 1], repeats, *shape[dim + 1 :])
        return reshape(apply(elementwise.copy, wide), *shape[:dim], shape[dim] * repeats, *shape[dim + 1 :])
    # One count per slice: select by index.
    counts = np.asarray(repeats.array.numpy() if isinstance(repeats, TensorBase) else repeats)
    if counts.shape not in ((1,), (shape[dim],), ()) or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ShapeError(
            f"repeat_interleave: repeats {counts.shape} of type {counts.dtype} do not fit dimension {dim} of size"
            f" {shape[dim]}: pass one number >= 0, or one per slice"
        )
    rows = np.repeat(np.arange(shape[dim]), counts if counts.shape == (shape[dim],) else int(counts.reshape(())))
    return index_select(x, dim, TensorBase.wrap(moved(from_numpy(rows), x.array.device)))


# --- Masks ------------------------------------------------------------------------------------------------------------


def _mask(name: str, mask: Any) -> Array:
    array = array_of(mask, name)
    if array.dtype is not bool_:
        raise DTypeError(f"{name} takes a bool mask, got {array.dtype}", next="compare first, for example x > 0")
    return array


@public(out=True)
def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """Return the elements where `mask` is true (both broadcast) as a vector, in row-major order."""
    shape = broadcast_shapes(array_of(x, "masked_select").shape, _mask("masked_select", mask).shape)
    return getitem(expand(x, shape), expand(mask, shape))


@public
def masked_scatter_(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Overwrite the elements of x where `mask` (which broadcasts to x) is true with the elements of `source`.

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
    """Compute `masked_scatter_` on a copy of x, broadcast to the mask's shape."""
    shape = broadcast_shapes(array_of(x, "masked_scatter").shape, array_of(mask, "masked_scatter").shape)
    return masked_scatter_(apply(elementwise.copy, expand(x, shape)), mask, source)


check_calls(globals(), ("IndexPlan",))
