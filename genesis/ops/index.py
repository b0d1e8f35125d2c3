"""Indexing by arrays: get, put, embedding, and the true elements of a mask. `genesis.indexing` selects among them.

Get and put take one integer array per indexed dimension. The arrays broadcast to one shape, which replaces the indexed
dimensions in the result if these are adjacent, and comes first otherwise, as in numpy and torch. Rows with the same
target are added in the order of their positions, so results are reproducible.
"""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.dtypes import INTEGER, bool_, int64
from genesis.errors import DTypeError, IndexRangeError, ShapeError
from genesis.op import Context, Grads, op
from genesis.ops.blocks import as_type, work_type
from genesis.ops.elementwise import arange, copy, eq, fill, where
from genesis.ops.reduce import sum_to_shape
from genesis.ops.shape import reshaped
from genesis.shapes import Shape, broadcast_shapes, numel

MASK_BLOCK = 4096  # elements of a mask that are counted together
_INDICES = 64  # numpy's limit of dimensions
# From this width on, rows are sorted by target and each run is added with one call: numpy's `add.at` is slow for rows,
# and `add.reduceat` does not vectorise over them.
_WIDE = 32


# --- Position of the index dimensions ---------------------------------------------------------------------------------


def placed(shape: Shape, dims: Shape, index_shape: Shape) -> tuple[Shape, int]:
    """Return the result's shape, and the dimension at which `index_shape` starts in it."""
    rest = tuple(s for d, s in enumerate(shape) if d not in dims)
    adjacent = all(b == a + 1 for a, b in itertools.pairwise(dims))
    at = dims[0] if adjacent and dims else 0
    return rest[:at] + index_shape + rest[at:], at


def _check(name: str, shape: Shape, indices: tuple[Array, ...], dims: Shape) -> Shape:
    """Return the result's shape. Raises ShapeError or DTypeError for indices that do not fit `shape`."""
    if len(indices) != len(dims) or not dims or list(dims) != sorted(set(dims)) or dims[-1] >= len(shape):
        raise ShapeError(f"{name}: {len(indices)} index arrays do not fit dimensions {dims} of shape {shape}")
    for index in indices:
        if index.dtype.category != INTEGER:
            raise DTypeError(f"{name}: an index array is {index.dtype}, expected integers")
    return placed(shape, dims, broadcast_shapes(*(i.shape for i in indices)))[0]


def _within(indices: tuple[np.ndarray, ...], shape: Shape, dims: Shape, named: Shape | None) -> list[np.ndarray]:
    """Return the indices as int64 counted from 0. Raises IndexRangeError with dimension, size and index."""
    checked = []
    for i, (index, dim) in enumerate(zip(indices, dims, strict=True)):
        size = shape[dim]
        index = index.astype(np.int64, copy=False)
        if index.size:
            low, high = int(index.min()), int(index.max())
            if low < -size or high >= size:
                bad = low if low < -size else high
                shown = dim if named is None else named[i]
                raise IndexRangeError(
                    f"index {bad} is out of range for dimension {shown} of size {size}",
                    next=f"use {-size} to {size - 1}" if size else "an empty dimension has no elements to index",
                )
            if low < 0:
                index = np.where(index < 0, index + size, index)
        checked.append(index)
    return checked


def _front(x: np.ndarray, dims: Shape) -> np.ndarray:
    return np.moveaxis(x, dims, range(len(dims)))


def _rows(values: Any, shape: Shape, dims: Shape, index_shape: Shape) -> np.ndarray:
    """Return `values`, which broadcast to a result's shape, as `[N, *rest]` for N indices."""
    result, at = placed(shape, dims, index_shape)
    wide = np.broadcast_to(np.asarray(values), result)
    moved = _front(wide, tuple(range(at, at + len(index_shape))))
    return moved.reshape(numel(index_shape), *moved.shape[len(index_shape) :])


# --- Get --------------------------------------------------------------------------------------------------------------


def _get_vjp(ctx: Context, g: Array) -> Grads:
    """dx = zeros with g added at the indices."""
    indices = ctx.inputs[1:]
    return (index_get_backward(g, *indices, dims=ctx.attrs["dims"], shape=ctx.spec(0).shape), *(None,) * len(indices))


def _total_bytes(indices: Sequence[Any]) -> int:
    return sum(index.nbytes for index in indices)


@op(
    "index_get",
    lambda x, *indices, dims, named=None: Spec(_check("index", x.shape, indices, dims), x.dtype),
    vjp=_get_vjp,
    saves=tuple(range(1, 1 + _INDICES)),
    flops=lambda i, o, a: 0,
    nbytes=lambda i, o, a: 2 * o[0].nbytes + _total_bytes(i[1:]),  # reads only the indexed elements of x
)
def index_get(out: np.ndarray, x: np.ndarray, *indices: np.ndarray, dims: Shape, named: Shape | None = None) -> None:
    """y = x[..., i, ...] with one index array for each of `dims`, which are in increasing order.

    Args:
        named: numbers of `dims` in errors, if x is a part of the tensor that the user indexed.
    """
    positions = _within(indices, x.shape, dims, named)
    first, last = dims[0], dims[-1]
    if x.flags.c_contiguous and last - first + 1 == len(dims):
        # Adjacent dimensions of contiguous memory are one dimension: a single take, directly into `out`.
        flat, sizes = positions[0], x.shape[first : last + 1]
        for index, size in zip(positions[1:], sizes[1:], strict=True):
            flat = flat * size + index
        np.take(x.reshape(*x.shape[:first], numel(sizes), *x.shape[last + 1 :]), flat, first, out, "clip")
        return
    key: list[Any] = [builtins.slice(None)] * x.ndim
    for dim, index in zip(dims, positions, strict=True):
        key[dim] = index
    out[...] = x[tuple(key)]


def _get_backward_infer(g: Array, *indices: Array, dims: Shape, shape: Shape) -> Spec:
    expected = _check("index_get_backward", tuple(shape), indices, dims)
    if g.shape != expected:
        raise ShapeError(f"index_get_backward: the gradient has shape {g.shape}, expected {expected}")
    return Spec(tuple(shape), g.dtype)


def _get_backward_vjp(ctx: Context, g: Array) -> Grads:
    """dg = g at the indices."""
    indices = ctx.inputs[1:]
    return index_get(g, *indices, dims=ctx.attrs["dims"]), *(None,) * len(indices)


@op(
    "index_get_backward",
    _get_backward_infer,
    vjp=_get_backward_vjp,
    saves=tuple(range(1, 1 + _INDICES)),
    flops=lambda i, o, a: i[0].size,
)
def index_get_backward(out: np.ndarray, g: np.ndarray, *indices: np.ndarray, dims: Shape, shape: Shape) -> None:
    """Compute the gradient of `index_get`: zeros of `shape` with g added at the indices, in order of position."""
    out.fill(0)
    _put(out, g, _within(indices, shape, dims, None), dims, True)


# --- Put --------------------------------------------------------------------------------------------------------------


def _put(target: np.ndarray, values: Any, positions: list[np.ndarray], dims: Shape, accumulate: bool) -> None:
    """Write or add `values` at the indices, in order of position: the last write to an element wins."""
    index_shape = np.broadcast_shapes(*(i.shape for i in positions))
    rows = _rows(values, target.shape, dims, index_shape)
    # With one index dimension over C-ordered rows, numpy writes from front to back.
    flat = tuple(np.ascontiguousarray(np.broadcast_to(i, index_shape)).reshape(-1) for i in positions)
    front = _front(target, dims)
    if accumulate:
        add_rows(front, flat, rows)
    else:
        front[flat] = np.ascontiguousarray(rows)


def _put_check(x: Array, values: Any, indices: tuple[Array, ...], dims: Shape) -> None:
    shape = _check("index_put", x.shape, indices, dims)
    sizes = values.shape if isinstance(values, Array) else ()
    if len(sizes) > len(shape) or any(v not in (1, s) for v, s in zip(sizes[::-1], shape[::-1], strict=False)):
        raise ShapeError(f"index_put: values of shape {sizes} do not broadcast to the indexed shape {shape}")


def _put_infer(
    x: Array, values: Any, *indices: Array, dims: Shape, accumulate: bool = False, named: Shape | None = None,
    along: int | None = None,
) -> Spec:  # fmt: skip
    _put_check(x, values, indices, dims)
    return Spec(x.shape, x.dtype)


def _put_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g, with 0 where values were written; dvalues = g at the indices, with 0 for overwritten writes."""
    indices, attrs = ctx.inputs[2:], ctx.attrs
    dims, accumulate = attrs["dims"], attrs.get("accumulate", False)
    dx = dvalues = None
    if ctx.needs[0]:
        dx = g if accumulate else index_put(g, 0.0, *indices, dims=dims)
    if ctx.needs[1]:
        spec = ctx.spec(1)
        dvalues = index_get(g, *indices, dims=dims)
        if not accumulate:
            dvalues = where(_last_writes(g, indices, dims), dvalues, 0.0)
        dvalues = sum_to_shape(dvalues, shape=spec.shape)
    return dx, dvalues, *(None,) * len(indices)


def _last_writes(x: Array, indices: tuple[Array, ...], dims: Shape) -> Array:
    """Return, as bools that broadcast to the result, which writes are not overwritten by a later one."""
    shape = broadcast_shapes(*(i.shape for i in indices))
    count, sizes, order = numel(shape), tuple(x.shape[d] for d in dims), tuple(range(len(dims)))
    # Each write stores its number; it survives if the number is still there afterwards.
    numbers = reshaped(arange(start=0, step=1, count=count, dtype=int64, device=x.device), shape)
    blank = fill(value=0, shape=sizes, dtype=int64, device=x.device)
    survivors = index_get(index_put(blank, numbers, *indices, dims=order), *indices, dims=order)
    at = placed(x.shape, dims, shape)[1]
    return reshaped(eq(survivors, numbers), (*shape, *(1,) * (len(x.shape) - len(dims) - at)))


@op("index_put", _put_infer, vjp=_put_vjp, saves=tuple(range(2, 2 + _INDICES)), autocast="widest")
def index_put(
    out: np.ndarray,
    x: np.ndarray,
    values: Any,
    *indices: np.ndarray,
    dims: Shape,
    accumulate: bool = False,
    named: Shape | None = None,
    along: int | None = None,
) -> None:
    """y = x with `values` (broadcast, cast to x's dtype) written at the indices, or added there.

    If indices repeat, the last write wins; with `accumulate`, all are added in order of position. `along` means that
    every other dimension is indexed by its own positions, so that sums along `along` are independent of each other.
    """
    if out is not x:  # a compiled function passes x itself if nothing else reads it
        np.copyto(out, x)
    _put(out, values, _within(indices, x.shape, dims, named), dims, accumulate)


def _put_inplace_infer(x: Array, values: Any, *indices: Array, dims: Shape, **attrs: Any) -> tuple[Spec, ...]:
    _put_check(x, values, indices, dims)
    if x.overlaps_itself():
        raise ShapeError(
            f"index_put_: elements of a tensor of shape {x.shape} and strides {x.strides} share memory",
            next="call .contiguous() before writing into an expanded view",
        )
    return ()


def _put_bytes(inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
    """Return the bytes written (and read, when adding), plus values and indices."""
    x, values, *indices = inputs
    rest = numel([n for i, n in enumerate(x.shape) if i not in attrs["dims"]])
    touched = rest * numel(np.broadcast_shapes(*(index.shape for index in indices))) * x.dtype.itemsize
    value_bytes = values.nbytes if isinstance(values, Array) else 0
    return (2 if attrs.get("accumulate") else 1) * touched + value_bytes + _total_bytes(indices)


@op("index_put_", _put_inplace_infer, mutates=(0,), nbytes=_put_bytes)
def index_put_(
    out: tuple[()],
    x: np.ndarray,
    values: Any,
    *indices: np.ndarray,
    dims: Shape,
    accumulate: bool = False,
    named: Shape | None = None,
    along: int | None = None,
) -> None:
    """`index_put` into x itself; touches only the indexed elements."""
    positions = _within(indices, x.shape, dims, named)
    # Copy indices and values that share memory with x, which changes while they are read.
    positions = [i.copy() if np.may_share_memory(i, x) else i for i in positions]
    if isinstance(values, np.ndarray) and np.may_share_memory(values, x):
        values = values.copy()
    _put(x, values, positions, dims, accumulate)


# --- Masks ------------------------------------------------------------------------------------------------------------


def _offsets(mask: Array) -> int:
    return -(-mask.size // MASK_BLOCK) + 1


def _check_mask(name: str, mask: Array) -> None:
    if mask.dtype is not bool_:
        raise DTypeError(f"{name} takes a bool mask, got {mask.dtype}", next="compare first, for example x > 0")


def _mask_rule(name: str, shape: Callable[..., Shape]) -> Callable[..., Spec]:
    """Return the rule of an op on a mask with int64 results of shape `shape(mask, **attrs)`."""

    def infer(mask: Array, **attrs: Any) -> Spec:
        _check_mask(name, mask)
        return Spec(shape(mask, **attrs), int64)

    return infer


@op("mask_count", _mask_rule("mask_count", lambda mask: ()), flops=lambda i, o, a: i[0].size)
def mask_count(out: np.ndarray, mask: np.ndarray) -> None:
    """Count the true elements. Reading the result is the only time that a mask blocks."""
    out[...] = np.count_nonzero(mask)


@op("mask_indices", _mask_rule("mask_indices", lambda mask, count: (mask.ndim, count)), flops=lambda i, o, a: i[0].size)
def mask_indices(out: np.ndarray, mask: np.ndarray, count: int) -> None:
    """Indices of the `count` true elements in row-major order, `[dimensions, count]`."""
    for row, indices in zip(out, np.nonzero(mask) if mask.ndim else (), strict=True):
        row[...] = indices


@op("mask_offsets", _mask_rule("mask_offsets", lambda mask: (_offsets(mask),)), flops=lambda i, o, a: i[0].size)
def mask_offsets(out: np.ndarray, mask: np.ndarray) -> None:
    """Counts of true elements before each block of `MASK_BLOCK`, in row-major order; the last entry is the total."""
    out[0] = 0
    if mask.size:
        flat = mask.reshape(-1)
        np.cumsum(np.add.reduceat(flat, np.arange(0, flat.size, MASK_BLOCK), dtype=np.int64), out=out[1:])


def _masked_select_check(name: str, shape: Shape, mask: Array, offsets: Array) -> None:
    _check_mask(name, mask)
    if mask.shape != shape:
        raise ShapeError(f"{name}: a mask of shape {mask.shape} does not match shape {shape}")
    if offsets.dtype is not int64 or offsets.shape != (_offsets(mask),):
        raise ShapeError(f"{name}: {offsets.dtype} offsets {offsets.shape} do not fit a mask of shape {mask.shape}")


def _masked_select_infer(x: Array, mask: Array, offsets: Array, *, count: int) -> Spec:
    _masked_select_check("masked_select", x.shape, mask, offsets)
    return Spec((count,), x.dtype)


def _masked_select_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g where the mask is true, in order, and 0 elsewhere."""
    return masked_select_backward(g, *ctx.inputs[1:]), None, None


@op("masked_select", _masked_select_infer, vjp=_masked_select_vjp, saves=(1, 2), flops=lambda i, o, a: 0)
def masked_select(out: np.ndarray, x: np.ndarray, mask: np.ndarray, offsets: np.ndarray, count: int) -> None:
    """The elements of x where `mask`, of the same shape, is true, in row-major order.

    Args:
        offsets: `mask_offsets` of the mask.
        count: last entry of `offsets`.
    """
    out[...] = x[mask]


def _masked_select_backward_infer(g: Array, mask: Array, offsets: Array) -> Spec:
    _masked_select_check("masked_select_backward", mask.shape, mask, offsets)
    if g.ndim != 1:
        raise ShapeError(f"masked_select_backward: the gradient has shape {g.shape}, expected a vector")
    return Spec(mask.shape, g.dtype)


def _masked_select_backward_vjp(ctx: Context, g: Array) -> Grads:
    """dg = g where the mask is true."""
    return masked_select(g, *ctx.inputs[1:], count=ctx.spec(0).shape[0]), None, None


@op(
    "masked_select_backward",
    _masked_select_backward_infer,
    vjp=_masked_select_backward_vjp,
    saves=(1, 2),
    flops=lambda i, o, a: 0,
)
def masked_select_backward(out: np.ndarray, g: np.ndarray, mask: np.ndarray, offsets: np.ndarray) -> None:
    """Compute the gradient of `masked_select`: g, in order, where `mask` is true, and 0 elsewhere."""
    out.fill(0)
    out[mask] = g


# --- Adding rows ------------------------------------------------------------------------------------------------------


def _spread(keys: np.ndarray, width: int) -> np.ndarray:
    return keys if width == 1 else (keys[:, None] * width + np.arange(width)).reshape(-1)


def sum_rows(keys: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum rows `[N, W]` by key, narrow floats in float32; return sorted distinct keys `[U]` and sums `[U, W]`."""
    # Sort by key, and find the run of each key.
    order = np.argsort(keys, kind="stable")
    ranked = keys[order]
    first = np.ones(len(ranked), bool)
    np.not_equal(ranked[1:], ranked[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    counts = np.diff(starts, append=len(ranked))
    width, dtype = rows.shape[1], work_type(rows.dtype)
    if width < _WIDE:
        sums = np.zeros((len(starts), width), dtype)
        number = np.empty(len(keys), np.int64)  # number of each row's key among the distinct ones
        number[order] = np.repeat(np.arange(len(starts)), counts)
        np.add.at(sums.reshape(-1), _spread(number, width), as_type(rows, dtype).reshape(-1))
        return ranked[starts], sums
    sums = as_type(rows[order[starts]], dtype)
    for i in np.flatnonzero(counts > 1).tolist():
        run = as_type(rows[order[starts[i] : starts[i] + counts[i]]], dtype)
        np.add.reduce(run, axis=0, out=sums[i])
    return ranked[starts], sums


def add_rows(target: np.ndarray, places: tuple[np.ndarray, ...], rows: np.ndarray) -> None:
    """Compute target[places[0][n], places[1][n], ...] += rows[n] for n in order; places may repeat.

    Args:
        target: `[M1, ..., Mk, *R]`, with any strides.
        places: k int64 arrays `[N]` within bounds.
        rows: `[N, *R]`.
    """
    sizes, rest = target.shape[: len(places)], target.shape[len(places) :]
    keys = np.ravel_multi_index(places, sizes) if len(places) > 1 else places[0]
    width = int(np.prod(rest, dtype=np.int64))
    if keys.size == 0 or width == 0:
        return
    dtype = work_type(target.dtype)
    flat = rows.reshape(len(keys), width)
    if width < _WIDE and target.dtype == dtype and target.flags.c_contiguous:
        np.add.at(target.reshape(-1), _spread(keys, width), as_type(flat, dtype).reshape(-1))
        return
    distinct, sums = sum_rows(keys, flat if flat.dtype == target.dtype else as_type(flat, dtype))
    where = np.unravel_index(distinct, sizes)
    target[where] = as_type(target[where], dtype) + sums.reshape(len(distinct), *rest)


# --- Embedding --------------------------------------------------------------------------------------------------------


def _embedding_infer(ids: Array, weight: Array) -> Spec:
    if ids.dtype.category != INTEGER:
        raise DTypeError(f"embedding takes integer ids, got {ids.dtype}")
    if weight.ndim != 2:
        raise ShapeError(f"embedding: weight must be [rows, width], got {weight.shape}")
    return Spec((*ids.shape, weight.shape[1]), weight.dtype)


def _embedding_vjp(ctx: Context, g: Array) -> tuple[Array | None, ...]:
    """dweight as `embedding_backward`; an accumulated gradient (of a tied head) gets only the rows of its ids."""
    accumulated = ctx.take_accumulated(1)
    if accumulated is not None:
        total = accumulated.array if accumulated.is_own else copy(accumulated.array)
        embedding_add_(total, g, ctx.inputs[0])
        return None, total
    spec = ctx.spec(1)
    return None, embedding_backward(g, ctx.inputs[0], rows=spec.shape[0], out=ctx.gradient_slot(1))


@op(
    "embedding",
    _embedding_infer,
    vjp=_embedding_vjp,
    saves=(0,),
    flops=lambda i, o, a: 0,
    nbytes=lambda i, o, a: i[0].nbytes + 2 * o[0].nbytes,  # reads only the selected rows of the weight
    torch="torch.nn.functional.embedding",
)
def embedding(out: np.ndarray, ids: np.ndarray, weight: np.ndarray) -> None:
    """y[...] = weight[ids[...]].

    Args:
        ids: integers of any shape, from 0 to rows - 1.
        weight: `[rows, width]`.
    """
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= weight.shape[0]):
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise IndexRangeError(
            f"embedding: id {bad} is not between 0 and {weight.shape[0] - 1}",
            next="check that the tokenizer belongs to this model",
        )
    np.take(weight, ids, axis=0, out=out, mode="clip")


def _embedding_backward_infer(g: Array, ids: Array, rows: int) -> Spec:
    if g.shape[:-1] != ids.shape:
        raise ShapeError(f"embedding_backward: the gradient has shape {g.shape}, the ids have {ids.shape}")
    return Spec((rows, g.shape[-1]), g.dtype)


@op(
    "embedding_backward",
    _embedding_backward_infer,
    vjp=lambda ctx, g: (embedding(ctx.inputs[1], g), None),
    saves=(1,),
    flops=lambda i, o, a: i[0].size,
)
def embedding_backward(out: np.ndarray, g: np.ndarray, ids: np.ndarray, rows: int) -> None:
    """dweight[r] = Σ g over the positions with ids = r, in order of position; accumulated in float32 or wider."""
    out.fill(0)
    if ids.size == 0 or g.shape[-1] == 0:
        return
    distinct, sums = sum_rows(ids.reshape(-1).astype(np.int64, copy=False), g.reshape(-1, g.shape[-1]))
    out[distinct] = sums


def _embedding_add_infer(total: Array, g: Array, ids: Array) -> tuple[Spec, ...]:
    if total.ndim != 2 or g.shape != (*ids.shape, total.shape[1]):
        raise ShapeError(
            f"embedding_add_ adds a gradient {g.shape} of ids {ids.shape} to [rows, width], got {total.shape}"
        )
    if total.dtype is not g.dtype:
        raise DTypeError(f"embedding_add_: the gradient is {g.dtype}, the total is {total.dtype}")
    return ()


@op(
    "embedding_add_",
    _embedding_add_infer,
    mutates=(0,),
    flops=lambda i, o, a: i[1].size,
    nbytes=lambda i, o, a: 3 * i[1].nbytes + i[2].nbytes,  # touches only the rows of ids in the total
)
def embedding_add_(out: tuple[()], total: np.ndarray, g: np.ndarray, ids: np.ndarray) -> None:
    """total[r] += Σ g over the positions with ids = r, in order of position; other rows are not touched.

    Sums accumulate in float32 or wider and are rounded once.
    """
    if g.size:
        add_rows(total, (ids.reshape(-1).astype(np.int64, copy=False),), g.reshape(-1, g.shape[-1]))
