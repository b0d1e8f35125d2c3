"""Shape ops: views, which only describe memory differently, and ops that move elements without arithmetic.

A view's layout (shape, strides, offset of its first element) depends on the source's layout. Its gradient is zeros of
the source's shape with g at the view's position. In the gradient formulas, g is the gradient of the result.
"""

from __future__ import annotations

import builtins
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import scratch
from genesis.dtypes import promote_types
from genesis.errors import DimensionError, GradientError, IndexRangeError, ShapeError
from genesis.op import Context, Grads, Op, op, registry, through
from genesis.ops.elementwise import copy, fill
from genesis.shapes import Shape, broadcast_strides, contiguous_strides, numel, view_strides

# --- Layouts ----------------------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """A window on a source: sizes, strides in elements, and its start relative to the source's first element."""

    shape: Shape
    strides: Shape
    offset: int = 0


def overlaps(shape: Shape, strides: Shape) -> bool:
    """Whether two indices may reach the same element. True may be wrong for interleaved windows; False never is."""
    reach = 0
    for stride, size in sorted((st, s) for s, st in zip(shape, strides, strict=True) if s > 1):
        if stride <= reach:
            return numel(shape) > 0
        reach += stride * (size - 1)
    return False


def extent(shape: Shape, strides: Shape) -> int:
    """Return the elements from the first to the last one that a window reaches; 0 for an empty window."""
    return 1 + sum(st * (s - 1) for s, st in zip(shape, strides, strict=True)) if numel(shape) else 0


def contiguous(x: Array) -> Array:
    """Return x, or a contiguous copy if it is not contiguous."""
    return x if x.is_contiguous else copy(x)


def reshaped(x: Array, shape: Shape) -> Array:
    """Return x as `shape` (of the same element count): a view if its strides allow it, else a view of a copy."""
    steps = view_strides(x.shape, x.strides, shape)
    return x.view(shape, steps) if steps is not None else copy(x).view(shape, contiguous_strides(shape))


def _window(flat: np.ndarray, shape: Shape, strides: Shape, offset: int) -> np.ndarray:
    """Return a strided window on a contiguous 1-D array; numpy checks that it stays inside."""
    item = flat.itemsize
    steps = tuple(s * item for s in strides)
    return np.ndarray(shape, flat.dtype, flat.view(np.uint8), offset * item if numel(shape) else 0, steps)


# --- View ops ---------------------------------------------------------------------------------------------------------


def _view_op(
    name: str,
    layout: Callable[..., Layout],
    reference: Callable[..., np.ndarray],
    vjp: Callable[..., Grads] | None = None,
) -> Op:
    """Register a view op.

    Args:
        layout: `layout(shape, strides, **attrs)` returns the view's layout; raises if the attributes do not fit.
        reference: the same view in numpy.
        vjp: by default, g is put into zeros of the source's shape.
    """

    layout = functools.lru_cache(4096)(layout)

    def infer(x: Array, **attrs: Any) -> Spec:
        return Spec(layout(x.shape, x.strides, **attrs).shape, x.dtype)

    def view(x: Array, **attrs: Any) -> Array:
        shape, strides, offset = layout(x.shape, x.strides, **attrs)
        # An empty window has no first element, and its start may be outside the storage.
        return Array(x.storage, shape, strides, x.dtype, x.device, x.offset + (offset if numel(shape) else 0))

    def put_back(ctx: Context, g: Array) -> Grads:
        """dx = zeros of x's shape with g at the window's position."""
        spec = ctx.spec(0)
        source = contiguous_strides(spec.shape)
        _, strides, offset = layout(spec.shape, source, **ctx.attrs)
        return (as_strided_backward(g, strides=strides, offset=offset, source_shape=spec.shape, source_strides=source),)

    return Op(name, reference, infer, vjp or put_back, view=view, family="shape")


def _reshape_layout(shape: Shape, strides: Shape, *, target: Shape) -> Layout:
    if numel(shape) != numel(target):
        raise ShapeError(f"shape {target} has {numel(target)} elements, the tensor of shape {shape} has {numel(shape)}")
    target_strides = view_strides(shape, strides, target)
    if target_strides is None:
        raise ShapeError(
            f"a tensor of shape {shape} and strides {strides} cannot be viewed as {target} without a copy",
            next="use reshape(), which copies if necessary",
        )
    return Layout(target, target_strides)


reshape = _view_op(
    "reshape",
    lambda shape_, strides, *, shape: _reshape_layout(shape_, strides, target=tuple(shape)),
    lambda x, *, shape: x.reshape(shape, copy=False),
    lambda ctx, g: (reshaped(g, ctx.spec(0).shape),),  # dx = g in x's shape
)


def _permute_layout(shape: Shape, strides: Shape, *, dims: Shape) -> Layout:
    if sorted(dims) != list(range(len(shape))):
        raise ShapeError(f"permute: {tuple(dims)} does not name each of the {len(shape)} dimensions of {shape} once")
    return Layout(tuple(shape[d] for d in dims), tuple(strides[d] for d in dims))


def _permute_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g with the inverse permutation."""
    return (permute(g, dims=_inverse(ctx.attrs["dims"])),)


@functools.lru_cache(4096)
def _inverse(dims: Shape) -> Shape:
    return tuple([dims.index(i) for i in range(len(dims))])


permute = _view_op("permute", _permute_layout, lambda x, *, dims: np.transpose(x, dims), _permute_vjp)


expand = _view_op(
    "expand",
    lambda shape_, strides, *, shape: Layout(tuple(shape), broadcast_strides(shape_, strides, tuple(shape))),
    lambda x, *, shape: np.broadcast_to(x, shape),
    lambda ctx, g: (registry["sum_to_shape"](g, shape=ctx.spec(0).shape),),  # dx = g, repeated dimensions summed
)


Item = int | tuple[int, int, int] | None


def slice_layout(shape: Shape, strides: Shape, *, items: tuple[Item, ...]) -> Layout:
    """Return the layout that `items` select, one per dimension from the left; indices and starts count from 0.

    An index removes its dimension, (start, count, step) keeps part of it, None adds a dimension of size 1. Dimensions
    without an item are kept.
    """
    sizes: list[int] = []
    steps: list[int] = []
    dim = offset = 0
    for item in items:
        if item is None:
            sizes.append(1)
            steps.append(0)
            continue
        if dim == len(shape):
            raise IndexRangeError(f"slice: too many indices for {len(shape)} dimensions of shape {shape}")
        size, stride = shape[dim], strides[dim]
        start, count, step = (item, 1, 1) if isinstance(item, int) else item
        if step < 1 or start < 0 or count < 0 or (count and start + (count - 1) * step >= size):
            raise IndexRangeError(f"slice: {item} is out of range for dimension {dim} of size {size}")
        offset += start * stride
        if not isinstance(item, int):
            sizes.append(count)
            steps.append(stride * step)
        dim += 1
    return Layout((*sizes, *shape[dim:]), (*steps, *strides[dim:]), offset)


def numpy_items(items: tuple[Item, ...]) -> tuple[Any, ...]:
    """Return `items` as a numpy index."""
    return tuple(
        builtins.slice(i[0], i[0] + max((i[1] - 1) * i[2] + 1, 0) if i[1] else i[0], i[2])
        if isinstance(i, tuple)
        else i
        for i in items
    )


slice = _view_op("slice", slice_layout, lambda x, *, items: x[(*numpy_items(items), ...)])


def _diagonal_layout(shape: Shape, strides: Shape, *, offset: int, dim1: int, dim2: int) -> Layout:
    if dim1 == dim2:
        raise ShapeError(f"diagonal: dimension {dim1} of shape {shape} is named twice")
    rows, columns = shape[dim1] + min(offset, 0), shape[dim2] - max(offset, 0)
    count = max(min(rows, columns), 0)
    start = strides[dim2] * offset if offset >= 0 else strides[dim1] * -offset
    kept = [d for d in range(len(shape)) if d not in (dim1, dim2)]
    return Layout(
        (*(shape[d] for d in kept), count),
        (*(strides[d] for d in kept), strides[dim1] + strides[dim2]),
        start,
    )


diagonal = _view_op("diagonal", _diagonal_layout, lambda x, *, offset, dim1, dim2: np.diagonal(x, offset, dim1, dim2))


def _unfold_layout(shape: Shape, strides: Shape, *, dim: int, size: int, step: int) -> Layout:
    if not (0 <= size <= shape[dim] and step > 0):
        raise ShapeError(f"unfold: size {size} and step {step} do not suit dimension {dim} of size {shape[dim]}")
    count = (shape[dim] - size) // step + 1
    return Layout(
        (*shape[:dim], count, *shape[dim + 1 :], size),
        (*strides[:dim], strides[dim] * step, *strides[dim + 1 :], strides[dim]),
    )


def _unfold_numpy(x: np.ndarray, *, dim: int, size: int, step: int) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(x, size, dim)
    return windows[(builtins.slice(None),) * dim + (builtins.slice(None, None, step),)]


unfold = _view_op("unfold", _unfold_layout, _unfold_numpy)


# --- as_strided: any window -------------------------------------------------------------------------------------------


class _WindowOp(Op):
    """An op whose gradient depends on the source's strides, which it saves instead of an input."""

    def context(
        self, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], needs: tuple[bool, ...]
    ) -> Context:
        """Return an op's context with the source's strides among the attributes."""
        return super().context(inputs, outputs, attrs | {"source_strides": inputs[0].strides}, needs)


def _as_strided_view(x: Array, shape: Shape, strides: Shape, offset: int = 0) -> Array:
    if len(shape) != len(strides) or any(s < 0 for s in (*shape, *strides)):
        raise ShapeError(f"as_strided: shape {shape} and strides {strides} must have one length and no negative entry")
    start, size = x.offset + offset, x.storage.nbytes // x.dtype.itemsize
    if numel(shape) and not 0 <= start <= start + extent(shape, strides) <= size:
        raise ShapeError(
            f"as_strided: shape {shape}, strides {strides}, offset {start} reach outside a storage of {size} elements"
        )
    return Array(x.storage, tuple(shape), tuple(strides), x.dtype, x.device, start if numel(shape) else x.offset)


def _as_strided_vjp(ctx: Context, g: Array) -> Grads:
    """dx[j] = sum of g[i] over the indices i of the window that reach the element x[j]."""
    spec, source = ctx.spec(0), ctx.attrs["source_strides"]
    strides, offset = ctx.attrs["strides"], ctx.attrs.get("offset", 0)
    return (as_strided_backward(g, strides=strides, offset=offset, source_shape=spec.shape, source_strides=source),)


def _as_strided_numpy(x: np.ndarray, shape: Shape, strides: Shape, offset: int = 0) -> np.ndarray:
    """y[i] = the element at x's first + offset + i·strides, counted in elements of the storage."""
    flat = np.lib.stride_tricks.as_strided(x, (offset + extent(shape, strides),), (x.itemsize,), writeable=False)
    steps = tuple(s * x.itemsize for s in strides)
    return np.lib.stride_tricks.as_strided(flat[offset:], shape, steps, writeable=False)


as_strided = _WindowOp(
    "as_strided",
    _as_strided_numpy,
    lambda x, **attrs: Spec(_as_strided_view(x, **attrs).shape, x.dtype),
    _as_strided_vjp,
    view=_as_strided_view,
    family="shape",
)


def _as_strided_backward_infer(
    g: Array, *, strides: Shape, offset: int, source_shape: Shape, source_strides: Shape
) -> Spec:
    if len(strides) != len(g.shape) or len(source_shape) != len(source_strides):
        raise ShapeError(
            f"as_strided_backward: strides {strides} do not fit a gradient of shape {g.shape}, or source strides"
            f" {source_strides} do not fit shape {source_shape}"
        )
    return Spec(tuple(source_shape), g.dtype)


def _as_strided_backward_vjp(ctx: Context, g: Array) -> Grads:
    """dg = the window of the gradient. Raises GradientError if elements of the source share memory."""
    attrs, shape = ctx.attrs, ctx.spec(0).shape
    offset, source = attrs["offset"], (attrs["source_shape"], attrs["source_strides"])
    if overlaps(*source):
        raise GradientError("as_strided has no second derivative for a source whose elements share memory")
    low = min(0, offset)
    reach = max(extent(*source), offset + extent(shape, attrs["strides"])) - low
    flat = as_strided_backward(g, strides=source[1], offset=-low, source_shape=(reach,), source_strides=(1,))
    return (as_strided(flat, shape=shape, strides=attrs["strides"], offset=offset - low),)


@op("as_strided_backward", _as_strided_backward_infer, vjp=_as_strided_backward_vjp)
def as_strided_backward(
    out: np.ndarray, g: np.ndarray, strides: Shape, offset: int, source_shape: Shape, source_strides: Shape
) -> None:
    """Compute the gradient of `as_strided`: zeros of the source's shape with g added into the window.

    An element that several indices of the window reach receives their sum, computed in float64. An element that several
    indices of the source reach is divided equally among them.
    """
    inside = offset >= 0 and offset + extent(g.shape, strides) <= out.size
    distinct = not overlaps(g.shape, strides)
    plain = tuple(source_strides) == contiguous_strides(source_shape)
    # The common case: write g directly into the result.
    if plain and inside and distinct and out.flags.c_contiguous:
        out.fill(0)
        _window(out.reshape(-1), g.shape, strides, offset)[...] = g
        return
    # The general case: accumulate in flat memory that covers source and window.
    low = min(0, offset)
    reach = max(extent(source_shape, source_strides), offset + extent(g.shape, strides)) - low
    with scratch((max(reach, 1),), out.dtype if distinct else np.float64) as flat:
        flat.fill(0)
        if distinct:
            _window(flat, g.shape, strides, offset - low)[...] = g
        else:
            places = _addresses(g.shape, strides, offset - low).ravel()
            flat[...] = np.bincount(places, g.astype(np.float64).ravel(), minlength=len(flat))
        if overlaps(source_shape, source_strides):
            visits = np.bincount(_addresses(source_shape, source_strides, -low).ravel(), minlength=len(flat))
            np.divide(flat, np.maximum(visits, 1), out=flat, casting="unsafe")
        out[...] = _window(flat, source_shape, source_strides, -low)


def _addresses(shape: Shape, strides: Shape, offset: int) -> np.ndarray:
    addresses = np.full((1,) * len(shape), offset, np.int64)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        addresses = addresses + (np.arange(size) * stride).reshape((size,) + (1,) * (len(shape) - dim - 1))
    return addresses


def _as_strided_scatter_infer(x: Array, src: Array, shape: Shape, strides: Shape, offset: int = 0) -> Spec:
    _as_strided_view(x, shape, strides, offset)
    if src.shape != tuple(shape):
        raise ShapeError(f"as_strided_scatter: the window has shape {tuple(shape)}, the source has {src.shape}")
    if overlaps(tuple(shape), tuple(strides)):
        raise ShapeError(f"as_strided_scatter: elements of the window {shape} with strides {strides} share memory")
    return Spec(x.shape, x.dtype)


def _as_strided_scatter_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g with the window zeroed, dsrc = the window of g; depends only on shapes, strides and attributes."""
    spec, source = ctx.spec(0), ctx.attrs["source_strides"]
    shape, strides, offset = ctx.attrs["shape"], ctx.attrs["strides"], ctx.attrs.get("offset", 0)
    low = min(0, offset)
    reach = max(extent(spec.shape, source), offset + extent(shape, strides)) - low
    if type(g) is not Array:  # a second backward pass differentiates ops, not writes into memory
        flat = as_strided_backward(g, strides=source, offset=-low, source_shape=(reach,), source_strides=(1,))
        inside = as_strided(flat, shape=shape, strides=strides, offset=offset - low)
        zeros = fill(value=0, shape=shape, dtype=g.dtype, device=g.device)
        rest = as_strided_scatter(flat, zeros, shape=shape, strides=strides, offset=offset - low)
        return as_strided(rest, shape=spec.shape, strides=source, offset=-low), copy(inside)
    field = fill(value=0, shape=(reach,), dtype=g.dtype, device=g.device)
    dx, window = field.view(spec.shape, source, -low), field.view(shape, strides, offset - low)
    copy(g, out=dx)
    dsrc = copy(window) if ctx.needs[1] else None
    fill(out=window, value=0, shape=shape, dtype=g.dtype)
    return dx, dsrc


def _as_strided_scatter_numpy(
    out: np.ndarray, x: np.ndarray, src: np.ndarray, shape: Shape, strides: Shape, offset: int = 0
) -> None:
    """y = x with the window that `as_strided` describes replaced by `src`."""
    item = x.itemsize
    source = tuple(s // item for s in x.strides)
    low = min(0, offset)
    reach = max(extent(x.shape, source), offset + extent(shape, strides)) - low
    with scratch((max(reach, 1),), x.dtype) as flat:
        _window(flat, x.shape, source, -low)[...] = x
        _window(flat, tuple(shape), tuple(strides), offset - low)[...] = src
        out[...] = _window(flat, x.shape, source, -low)


as_strided_scatter = _WindowOp(
    "as_strided_scatter",
    _as_strided_scatter_numpy,
    _as_strided_scatter_infer,
    _as_strided_scatter_vjp,
    family="shape",
)


# --- Concatenation ----------------------------------------------------------------------------------------------------


def _operands(arrays: tuple[Any, ...]) -> list[int]:
    """Return the operands that cat concatenates: torch skips tensors of shape (0,)."""
    return [i for i, x in enumerate(arrays) if x.shape != (0,)]


def _cat_infer(*arrays: Array, dim: int) -> Spec:
    dtype = functools.reduce(promote_types, (x.dtype for x in arrays))
    kept = [arrays[i].shape for i in _operands(arrays)]
    if not kept:
        return Spec((0,), dtype)
    first = kept[0]
    if not 0 <= dim < len(first):
        raise ShapeError(f"cat: dimension {dim} is out of range for shape {first}")
    for shape in kept:
        if len(shape) != len(first) or (*shape[:dim], *shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]):
            raise ShapeError(f"cat: shapes {first} and {shape} differ outside dimension {dim}")
    return Spec((*first[:dim], sum(s[dim] for s in kept), *first[dim + 1 :]), dtype)


def _cat_vjp(ctx: Context, g: Array) -> Grads:
    """dx_i = the part of g that belongs to x_i."""
    specs = [s for s in ctx.input_specs if s is not None]
    dim, start = ctx.attrs["dim"], 0
    parts: list[Array | None] = [g.view((0,), (1,)) if s.shape == (0,) else None for s in specs]
    for i in _operands(tuple(specs)):
        count = specs[i].shape[dim]
        if ctx.needs[i]:
            leading = tuple((0, size, 1) for size in g.shape[:dim])
            parts[i] = slice(g, items=(*leading, (start, count, 1)))
        start += count
    return tuple(parts)


@op("cat", _cat_infer, vjp=_cat_vjp)
def cat(out: np.ndarray, *arrays: np.ndarray, dim: int) -> None:
    """Concatenate the arrays along `dim`, in their common dtype."""
    kept = [arrays[i] for i in _operands(arrays)]
    if kept:
        np.concatenate(kept, axis=dim, out=out, casting="unsafe")


# --- Flip and roll ----------------------------------------------------------------------------------------------------


def _flip_infer(x: Array, *, dims: Shape) -> Spec:
    if len(set(dims)) != len(dims) or any(not 0 <= d < x.ndim for d in dims):
        raise DimensionError(f"flip: dimensions {dims} do not suit shape {x.shape}")
    return Spec(x.shape, x.dtype)


@op("flip", _flip_infer, vjp=through("flip"))
def flip(out: np.ndarray, x: np.ndarray, dims: Shape) -> None:
    """x with its elements along `dims` in reverse order. dx = g flipped."""
    np.copyto(out, np.flip(x, dims))


def _roll_infer(x: Array, *, shifts: Shape, dims: Shape) -> Spec:
    if len(shifts) != len(dims):
        raise ShapeError(f"roll: {len(shifts)} shifts do not match {len(dims)} dimensions")
    if any(not 0 <= d < x.ndim for d in dims):
        raise DimensionError(f"roll: dimensions {dims} do not suit shape {x.shape}")
    return Spec(x.shape, x.dtype)


def _roll_vjp(ctx: Context, g: Array) -> Grads:
    return (roll(g, shifts=tuple(-s for s in ctx.attrs["shifts"]), dims=ctx.attrs["dims"]),)


@op("roll", _roll_infer, vjp=_roll_vjp)
def roll(out: np.ndarray, x: np.ndarray, shifts: Shape, dims: Shape) -> None:
    """x rotated by `shifts` along `dims`: elements that leave at one end enter at the other. dx = g rotated back."""
    np.copyto(out, np.roll(x, shifts, dims))


# --- Triangles and borders --------------------------------------------------------------------------------------------


def _matrix_infer(name: str) -> Callable[..., Spec]:
    def infer(x: Array, *, diagonal: int) -> Spec:
        if len(x.shape) < 2:
            raise ShapeError(f"{name}: needs at least 2 dimensions, got shape {x.shape}")
        return Spec(x.shape, x.dtype)

    return infer


def _keep(out: np.ndarray, x: np.ndarray, kept: np.ndarray) -> None:
    """Set out = x where `kept` is true, else 0; out may be x."""
    np.copyto(out, x)
    np.copyto(out, np.zeros((), out.dtype), where=~kept)


@op("tril", _matrix_infer("tril"), vjp=through("tril"), elementwise=True)
def tril(out: np.ndarray, x: np.ndarray, diagonal: int) -> None:
    """The matrices of the last two dimensions with 0 above `diagonal`. dx = tril(g)."""
    _keep(out, x, np.tri(x.shape[-2], x.shape[-1], diagonal, dtype=bool))


@op("triu", _matrix_infer("triu"), vjp=through("triu"), elementwise=True)
def triu(out: np.ndarray, x: np.ndarray, diagonal: int) -> None:
    """The matrices of the last two dimensions with 0 below `diagonal`. dx = triu(g)."""
    _keep(out, x, ~np.tri(x.shape[-2], x.shape[-1], diagonal - 1, dtype=bool))


def _pad_infer(x: Array, *, widths: tuple[tuple[int, int], ...], value: float) -> Spec:
    if len(widths) != len(x.shape) or any(w < 0 for pair in widths for w in pair):
        raise ShapeError(f"pad: widths {widths} do not suit shape {x.shape}: one pair of sizes >= 0 per dimension")
    return Spec(tuple(s + a + b for s, (a, b) in zip(x.shape, widths, strict=True)), x.dtype)


def _pad_vjp(ctx: Context, g: Array) -> Grads:
    """dx = the inner part of g."""
    inside = zip(ctx.attrs["widths"], ctx.spec(0).shape, strict=True)
    return (slice(g, items=tuple((before, size, 1) for (before, _), size in inside)),)


@op("pad", _pad_infer, vjp=_pad_vjp)
def pad(out: np.ndarray, x: np.ndarray, widths: tuple[tuple[int, int], ...], value: float) -> None:
    """x with a border of `value`, (before, after) elements wide along each dimension."""
    out.fill(value)
    out[tuple(builtins.slice(a, a + s) for (a, _), s in zip(widths, x.shape, strict=True))] = x


# --- Adjacent arrays --------------------------------------------------------------------------------------------------


def joined(arrays: Sequence[Array]) -> Array | None:
    """Return a single window `[Σ n, ...]` over arrays `[n, ...]` that follow each other in memory, else None."""
    first = arrays[0]
    if type(first) is not Array:  # in a second backward pass each array has its own history
        return None
    if len(arrays) == 1:
        return first if first.is_contiguous else None
    end, rows = first.offset, 0
    for a in arrays:
        if a.storage is not first.storage or a.offset != end or a.shape[1:] != first.shape[1:]:
            return None
        if a.dtype is not first.dtype or not a.is_contiguous:
            return None
        end += a.size
        rows += a.shape[0]
    shape = (rows, *first.shape[1:])
    return first.view(shape, contiguous_strides(shape))


def slices(joint: Array, sizes: Sequence[int]) -> list[Array]:
    """Return consecutive windows of `sizes` rows each."""
    if len(sizes) == 1 and sizes[0] == joint.shape[0]:
        return [joint]
    windows, start, step = [], joint.offset, joint.strides[0]
    for size in sizes:
        windows.append(joint.view((size, *joint.shape[1:]), joint.strides, start))
        start += size * step if joint.size else 0  # without elements, the offset must stay inside the memory
    return windows


def columns(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Return consecutive windows of `sizes` entries each along the last dimension."""
    return [window(x, stop - size, stop) for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True)]


def window(x: Array, start: int, stop: int) -> Array:
    """Return a view of the columns [start, stop) of x."""
    return x.view((*x.shape[:-1], stop - start), x.strides, x.offset + (start * x.strides[-1] if x.size else 0))
