"""Shape functions on tensors, with torch's names and semantics. Views share memory with their tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from genesis.array import Array
from genesis.autograd.record import TensorBase, apply
from genesis.dtypes import DType, MemoryFormat, as_dtype, contiguous_format
from genesis.errors import DimensionError, DTypeError, GradientError, IndexRangeError, ShapeError, UsageError
from genesis.functions.surface import DTypeLike, Sizes, Tensor, array_of, public, sizes_of
from genesis.ops import elementwise
from genesis.ops import shape as ops
from genesis.shapes import Shape, normalize_axes, normalize_axis, numel, resolve_shape, view_strides

# --- Views: the same memory in other sizes ----------------------------------------------------------------------------


@public(function=False, keywords={"size": "shape"})
def view(x: Tensor, *shape: Sizes, dtype: DTypeLike = None) -> Tensor:
    """Return a view of x as `shape` (one size may be -1). Raises ShapeError if that needs a copy.

    `view(dtype)` reads the same bytes as another type, without a gradient; the size of the last dimension changes.
    """
    if dtype is not None or (len(shape) == 1 and isinstance(shape[0], DType)):
        return _reinterpreted(x, as_dtype(shape[0] if dtype is None else dtype))
    return apply(ops.reshape, x, shape=resolve_shape(sizes_of(shape, "view"), array_of(x, "view").size))


def _reinterpreted(x: Tensor, dtype: DType) -> Tensor:
    """Return x's bytes as another type."""
    array = array_of(x, "view")
    old, new, shape = array.dtype.itemsize, dtype.itemsize, array.shape
    if x.requires_grad and dtype.is_floating_point and dtype is not array.dtype:
        raise GradientError(f"view({dtype.name}) has no gradient", next="call detach() first")
    # The stride of a dimension of size 1 does not matter.
    strides = [new if n == 1 else s * old for n, s in zip(shape, array.strides, strict=True)]
    if old != new:
        if not shape or (shape[-1] != 1 and array.strides[-1] != 1) or shape[-1] * old % new:
            raise ShapeError(f"view({dtype.name}): shape {shape}, strides {array.strides}: the last does not fit")
        shape, strides[-1] = (*shape[:-1], shape[-1] * old // new), new
    start = array.offset * old
    array.data_ptr()  # ends a trace, because a graph has one type for each storage
    if any(place % new for place in (*strides, start)):
        raise ShapeError(f"view({dtype.name}): strides {array.strides} do not align with {new} bytes")
    places = tuple(place // new for place in strides)
    return TensorBase.wrap(Array(array.storage, shape, places, dtype, array.device, start // new))


@public(function=False)
def view_as(x: Tensor, other: Tensor) -> Tensor:
    """Return a view of x in the shape of `other`."""
    return view(x, array_of(other, "view_as").shape)


@public
def reshape(x: Tensor, *shape: Sizes) -> Tensor:
    """Return x as `shape` (one size may be -1): a view if the strides allow it, else a copy."""
    a = array_of(x, "reshape")
    target = resolve_shape(sizes_of(shape, "reshape"), a.size)
    if view_strides(a.shape, a.strides, target) is None:
        x = apply(elementwise.copy, x)
    return apply(ops.reshape, x, shape=target)


@public(function=False)
def reshape_as(x: Tensor, other: Tensor) -> Tensor:
    """Return x in the shape of `other`."""
    return reshape(x, array_of(other, "reshape_as").shape)


@public
def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Return x with dimensions `start_dim` to `end_dim` (inclusive) merged into one."""
    shape = array_of(x, "flatten").shape
    first, last = normalize_axis(start_dim, len(shape)), normalize_axis(end_dim, len(shape))
    if not shape:
        return reshape(x, 1)
    if first > last:
        raise ShapeError(f"flatten: start_dim {start_dim} comes after end_dim {end_dim} in shape {shape}")
    return reshape(x, *shape[:first], numel(shape[first : last + 1]), *shape[last + 1 :])


@public
def ravel(x: Tensor) -> Tensor:
    """Return all elements in one dimension, in row-major order."""
    array = array_of(x, "ravel")
    return reshape(x if array.is_contiguous else contiguous(x), -1) if array.size else reshape(x, 0)


@public
def unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return x with dimension `dim` split into `sizes` (one may be -1)."""
    shape, dim = _dimension("unflatten", x, dim)
    return view(x, *shape[:dim], *resolve_shape(sizes_of((sizes,), "unflatten"), shape[dim]), *shape[dim + 1 :])


@public
def squeeze(x: Tensor, *dim: int | Sequence[int]) -> Tensor:
    """Return x without its dimensions of size 1: all of them, or those in `dim`."""
    shape = array_of(x, "squeeze").shape
    chosen = normalize_axes(sizes_of(dim, "squeeze") if dim and dim[0] is not None else None, len(shape))
    return apply(ops.reshape, x, shape=tuple(s for i, s in enumerate(shape) if s != 1 or i not in chosen))


@public
def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """Return x with a dimension of size 1 inserted before `dim`."""
    shape = array_of(x, "unsqueeze").shape
    dim = normalize_axis(dim, len(shape) + 1)
    return apply(ops.reshape, x, shape=(*shape[:dim], 1, *shape[dim:]))


@public(keywords={"size": "sizes"})
def expand(x: Tensor, *sizes: Sizes, implicit: bool = False) -> Tensor:
    """Return a view of x, repeated along dimensions of size 1 and along new leading ones; -1 keeps a size.

    `implicit` has no effect.
    """
    shape, target = array_of(x, "expand").shape, sizes_of(sizes, "expand")
    pad = len(target) - len(shape)
    if any(s < -1 or (s == -1 and i < pad) for i, s in enumerate(target)):
        raise ShapeError(f"expand: {target} is not valid for a tensor of shape {shape}: -1 keeps an existing size")
    return apply(ops.expand, x, shape=tuple(shape[i - pad] if s == -1 else s for i, s in enumerate(target)))


@public(function=False)
def expand_as(x: Tensor, other: Tensor) -> Tensor:
    """Return x expanded to the shape of `other`."""
    return expand(x, array_of(other, "expand_as").shape)


@public
def broadcast_to(x: Tensor, *size: Sizes) -> Tensor:
    """Return x expanded to `size`."""
    return expand(x, *size)


@public
def contiguous(x: Tensor, memory_format: MemoryFormat | None = None) -> Tensor:
    """Return x itself if its elements are stored row-major without gaps, else a copy."""
    if memory_format not in (None, contiguous_format):
        raise UsageError(f"contiguous: the memory format is {memory_format!r}", next="leave it out")
    return x if array_of(x, "contiguous").is_contiguous else apply(elementwise.copy, x)


# --- Views: the order of dimensions -----------------------------------------------------------------------------------


@public
def permute(x: Tensor, *dims: Sizes) -> Tensor:
    """Return x with its dimensions in the order `dims`."""
    ndim = array_of(x, "permute").ndim
    return apply(ops.permute, x, dims=tuple(normalize_axis(d, ndim) for d in sizes_of(dims, "permute")))


@public
def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """Return x with two dimensions swapped."""
    ndim = array_of(x, "transpose").ndim
    a, b = normalize_axis(dim0, ndim), normalize_axis(dim1, ndim)
    order = list(range(ndim))
    if ndim:
        order[a], order[b] = b, a
    return apply(ops.permute, x, dims=tuple(order))


@public
def swapaxes(x: Tensor, axis0: int, axis1: int) -> Tensor:
    """Compute `transpose`; this is numpy's name."""
    return transpose(x, axis0, axis1)


@public(function=False)
def t(x: Tensor) -> Tensor:
    """Return the transpose of a matrix; vectors and scalars are returned unchanged."""
    ndim = array_of(x, "t").ndim
    if ndim > 2:
        raise ShapeError(f"t() takes at most 2 dimensions, got shape {x.array.shape}", next="use transpose or mT")
    return permute(x, *reversed(range(ndim)))


@public
def movedim(x: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """Return x with dimensions `source` moved to positions `destination`; the others keep their order."""
    ndim = array_of(x, "movedim").ndim
    pairs = [(v,) if isinstance(v, int) else tuple(v) for v in (source, destination)]
    taken, places = ([normalize_axis(d, ndim) for d in dims] for dims in pairs)
    if len(taken) != len(places) or len(set(taken)) != len(taken) or len(set(places)) != len(places):
        raise ShapeError(f"movedim: {source} to {destination} does not pair distinct dimensions")
    rest = iter(d for d in range(ndim) if d not in taken)
    at = dict(zip(places, taken, strict=True))
    return apply(ops.permute, x, dims=tuple(at[i] if i in at else next(rest) for i in range(ndim)))


# --- Views: parts -----------------------------------------------------------------------------------------------------


def _dimension(name: str, x: Any, dim: int) -> tuple[Shape, int]:
    """Return x's shape and the normalized `dim`. Raises DimensionError for a tensor without dimensions."""
    shape = array_of(x, name).shape
    if not shape:
        raise DimensionError(f"{name}() of a tensor without dimensions")
    return shape, normalize_axis(dim, len(shape))


def _part(x: Any, dim: int, item: ops.Item) -> Any:
    """Return `item` (see ops.slice) of dimension `dim`, with all other dimensions complete."""
    leading = tuple((0, size, 1) for size in x.array.shape[:dim])
    return apply(ops.slice, x, items=(*leading, item))


@public
def select(x: Tensor, dim: int, index: int) -> Tensor:
    """Return the slice at `index` of dimension `dim`, which is removed. Raises IndexRangeError."""
    shape, dim = _dimension("select", x, dim)
    if not -shape[dim] <= index < shape[dim]:
        raise IndexRangeError(f"index {index} is out of range for dimension {dim} of size {shape[dim]}")
    return _part(x, dim, index % shape[dim])


@public
def narrow(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return `length` elements of dimension `dim` from `start` on; a negative start counts from the end.

    Raises IndexRangeError with dimension, size and range.
    """
    shape, dim = _dimension("narrow", x, dim)
    size = shape[dim]
    first = start + size if start < 0 else start
    if not (0 <= first <= size and 0 <= length <= size - first):
        raise IndexRangeError(f"narrow: {length} from {start} on is out of range for dimension {dim} of size {size}")
    return _part(x, dim, (first, length, 1))


@public(keywords={"split_size": "split_size_or_sections", "tensor": "x"})
def split(x: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Return views along `dim`: of one size (the last may be smaller), or of the listed sizes."""
    shape = array_of(x, "split").shape
    dim = normalize_axis(dim, len(shape))
    size = shape[dim] if shape else 1
    if isinstance(split_size_or_sections, int):
        step = split_size_or_sections
        if step < 0 or (step == 0 and size):
            raise ShapeError(f"split: size {step} is not valid for dimension {dim} of size {size}")
        sections = [min(step, size - i) for i in range(0, size, step)] if size else [0]
    else:
        sections = list(sizes_of((split_size_or_sections,), "split"))
        if sum(sections) != size or any(s < 0 for s in sections):
            raise ShapeError(f"split: sizes {sections} do not add up to dimension {dim} of size {size}")
    starts = itertools.accumulate(sections[:-1], initial=0)
    return tuple(narrow(x, dim, a, n) for a, n in zip(starts, sections, strict=True))


@public
def chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Return at most `chunks` views of equal size along `dim`; the last may be smaller."""
    shape = array_of(x, "chunk").shape
    if chunks < 1:
        raise ShapeError(f"chunk needs at least 1 chunk, got {chunks}")
    size = shape[normalize_axis(dim, len(shape))] if shape else 1
    if size == 0:
        return split(x, [0] * chunks, dim)
    return split(x, -(-size // chunks), dim)


@public
def unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Return one view per index of dimension `dim`, which is removed."""
    shape, dim = _dimension("unbind", x, dim)
    return tuple(_part(x, dim, i) for i in range(shape[dim]))


@public
def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Return the diagonals of the matrices in `dim1` and `dim2` as the last dimension, `offset` above the main one."""
    ndim = array_of(x, "diagonal").ndim
    if ndim < 2:
        raise ShapeError(f"diagonal: needs at least 2 dimensions, got shape {x.array.shape}")
    return apply(ops.diagonal, x, offset=offset, dim1=normalize_axis(dim1, ndim), dim2=normalize_axis(dim2, ndim))


@public
def unfold(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """Return a view of all windows of `size` along `dimension`, `step` apart, as a new last dimension."""
    if not array_of(x, "unfold").shape and dimension in (0, -1) and size in (0, 1) and step > 0:
        return as_strided(x, (size,), (step,))
    return apply(ops.unfold, x, dim=_dimension("unfold", x, dimension)[1], size=size, step=step)


@public
def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """Return any window on x's storage; `storage_offset` counts from the storage's start (default: x's own).

    Raises:
        ShapeError: if the window leaves the storage.
    """
    a = array_of(x, "as_strided")
    offset = 0 if storage_offset is None else storage_offset - a.offset
    shape, strides = sizes_of((size,), "as_strided"), sizes_of((stride,), "as_strided")
    return apply(ops.as_strided, x, shape=shape, strides=strides, offset=offset)


# --- Joining and repeating --------------------------------------------------------------------------------------------


def _listed(name: str, tensors: Any) -> tuple[Any, ...]:
    """Return the tensors of a sequence, or the rows of one tensor. Raises DTypeError for anything else."""
    if not isinstance(tensors, TensorBase) and (isinstance(tensors, str) or not isinstance(tensors, Iterable)):
        raise DTypeError(f"{name} takes a list of tensors, got {type(tensors).__name__}", next="pass [x, y, ...]")
    listed: tuple[Any, ...] = tuple(tensors)  # type: ignore[arg-type]  # a tensor is iterated by rows
    return listed


@public(method=False, also=("concat",))
def cat(tensors: Sequence[Tensor] | Tensor, dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Return the tensors concatenated along `dim`, in their common dtype; tensors of shape (0,) are skipped.

    Raises ShapeError if shapes differ outside `dim`.
    """
    tensors = _listed("cat", tensors)
    arrays = [array_of(t, "cat") for t in tensors]
    if not arrays:
        raise ShapeError("cat needs at least one tensor")
    if any(not a.shape for a in arrays):
        raise ShapeError("cat: a tensor without dimensions cannot be joined", next="use stack()")
    ndim = max((a.ndim for a in arrays if a.shape != (0,)), default=1)
    return apply(ops.cat, *tensors, out=out, dim=normalize_axis(dim, ndim))


@public(method=False)
def stack(tensors: Sequence[Tensor] | Tensor, dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Return tensors of the same shape stacked along a new dimension. Raises ShapeError if shapes differ."""
    tensors = _listed("stack", tensors)
    shapes = [array_of(t, "stack").shape for t in tensors]
    if not shapes or any(s != shapes[0] for s in shapes):
        raise ShapeError(f"stack: needs tensors of one shape, got {sorted(set(shapes))}")
    dim = normalize_axis(dim, len(shapes[0]) + 1)
    return apply(ops.cat, *(unsqueeze(t, dim) for t in tensors), out=out, dim=dim)


@public(keywords={"repeats": "sizes"})
def repeat(x: Tensor, *sizes: Sizes) -> Tensor:
    """Return x repeated `sizes` times along each dimension; additional sizes add leading dimensions."""
    shape, counts = array_of(x, "repeat").shape, sizes_of(sizes, "repeat")
    if len(counts) < len(shape) or any(c < 0 for c in counts):
        raise ShapeError(f"repeat: {counts} does not fit a tensor of shape {shape}: pass one count >= 0 per dimension")
    shape = (1,) * (len(counts) - len(shape)) + shape
    apart = reshape(x, *(v for s in shape for v in (1, s)))
    wide = expand(apart, *(v for c, s in zip(counts, shape, strict=True) for v in (c, s)))
    return reshape(apply(elementwise.copy, wide), *(c * s for c, s in zip(counts, shape, strict=True)))


# --- Moving elements --------------------------------------------------------------------------------------------------


@public
def roll(x: Tensor, shifts: int | Sequence[int], dims: int | Sequence[int] | None = None) -> Tensor:
    """Return x with elements rotated by `shifts` along `dims`; without `dims`, in the flattened tensor."""
    shape = array_of(x, "roll").shape
    if dims is None:
        return reshape(roll(flatten(x), shifts, 0), shape)
    axes = tuple(normalize_axis(d, len(shape)) for d in ((dims,) if isinstance(dims, int) else dims))
    moves = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    return apply(ops.roll, x, shifts=moves, dims=axes)


@public
def flip(x: Tensor, *dims: Sizes) -> Tensor:
    """Return a copy with the elements along `dims` in reverse order."""
    ndim = array_of(x, "flip").ndim
    if not dims:
        raise DTypeError("flip needs the dimensions to reverse", next="pass dims=, as in flip(0, 1)")
    axes = tuple(normalize_axis(d, ndim) for d in sizes_of(dims, "flip"))
    return apply(ops.flip, x, dims=axes if ndim else axes[1:])  # a 0-d tensor accepts dimension 0 once


@public(out=True)
def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return the lower triangles of the matrices in the last two dimensions, up to `diagonal`; 0 elsewhere."""
    array_of(x, "tril")
    return apply(ops.tril, x, diagonal=diagonal)


@public(out=True)
def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return the upper triangles of the matrices in the last two dimensions, from `diagonal` on; 0 elsewhere."""
    array_of(x, "triu")
    return apply(ops.triu, x, diagonal=diagonal)


@public(method=False)
def pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
    """Return x padded with `value`; `pad` lists (before, after) from the last dimension on; negative widths crop.

    Raises:
        ShapeError: for an odd count, too many widths, or a mode other than "constant".
    """
    shape = array_of(x, "pad").shape
    if mode != "constant" or len(pad) % 2 or len(pad) > 2 * len(shape):
        raise ShapeError(
            f"pad: mode {mode!r} with widths {tuple(pad)} does not fit shape {shape}: use 'constant' pairs"
        )
    pairs = [(0, 0)] * (len(shape) - len(pad) // 2) + list(zip(pad[-2::-2], pad[::-2], strict=True))
    for dim, (before, after) in enumerate(pairs):
        if before < 0 or after < 0:
            x = narrow(x, dim, max(-before, 0), shape[dim] + min(before, 0) + min(after, 0))
    widths = tuple((max(a, 0), max(b, 0)) for a, b in pairs)
    return apply(ops.pad, x, widths=widths, value=value)
