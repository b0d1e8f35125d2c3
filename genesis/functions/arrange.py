"""Functions that arrange elements: joins and splits, diagonals, tiles, grids; with torch's names and semantics.

They are made of the views and ops of `shape.py` and `index.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from genesis.autograd.record import TensorBase
from genesis.dtypes import as_dtype, int64
from genesis.errors import DimensionError, DTypeError, IndexRangeError, ShapeError, UsageError
from genesis.functions import index
from genesis.functions import pointwise as pw
from genesis.functions.create import arange, tensor, zeros
from genesis.functions.elementwise import clone, copy_, sub, to_dtype
from genesis.functions.reduce import nonzero
from genesis.functions.shape import (
    as_strided,
    cat,
    chunk,
    diagonal,
    expand,
    flatten,
    flip,
    narrow,
    ravel,
    repeat,
    reshape,
    select,
    split,
    stack,
    transpose,
    unsqueeze,
)
from genesis.functions.surface import DeviceLike, DTypeLike, Sizes, Tensor, array_of, integers, public, sizes_of
from genesis.shapes import Size, normalize_axis
from genesis.shapes import broadcast_shapes as common_shape

# --- Joins and splits -------------------------------------------------------------------------------------------------


def _tensors_of(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the tensors of f(a, b) or f([a, b])."""
    return tuple(tensors[0]) if len(tensors) == 1 and not isinstance(tensors[0], TensorBase) else tensors


def _raised(x: Any, ndim: int) -> Any:
    """Return x with at least `ndim` dimensions, as atleast_1d, atleast_2d and atleast_3d insert them."""
    shape = array_of(x, "atleast").shape
    if len(shape) >= ndim:
        return x
    full = (*(1,) * (min(ndim, 2) - max(len(shape), 1)), *(shape or (1,)))
    return reshape(x, *full, 1) if ndim == 3 else reshape(x, full)


def _at_least(ndim: int) -> Any:
    def raised(*tensors: Any) -> Any:
        each = _tensors_of(tensors)
        return (
            _raised(each[0], ndim) if len(tensors) == 1 and each is tensors else tuple(_raised(t, ndim) for t in each)
        )

    raised.__name__ = f"atleast_{ndim}d"
    raised.__doc__ = f"Return a tensor, or a tuple of tensors, with at least {ndim} dimensions."
    return public(method=False)(raised)


atleast_1d, atleast_2d, atleast_3d = _at_least(1), _at_least(2), _at_least(3)


@public(method=False, out=True)
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined along dimension 1; vectors along dimension 0."""
    each = [_raised(t, 1) for t in tensors]
    return cat(each, 0 if each and each[0].array.ndim == 1 else 1)


@public(method=False, out=True, also=("row_stack",))
def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined along dimension 0; vectors count as rows."""
    return cat([_raised(t, 2) for t in tensors], 0)


@public(method=False, out=True)
def dstack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined along dimension 2, which is added where missing."""
    return cat([_raised(t, 3) for t in tensors], 2)


@public(method=False, out=True)
def column_stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors joined as columns: vectors and numbers become columns, matrices stay."""
    each = [reshape(t, -1 if t.array.size else 0, 1) if array_of(t, "column_stack").ndim < 2 else t for t in tensors]
    return cat(each, 1)


@public(keywords={"sections": "indices_or_sections", "indices": "indices_or_sections"})
def tensor_split(
    x: Tensor,
    indices_or_sections: int | Sequence[int] | Tensor,
    dim: int = 0,
    *,
    indices: Any = None,
    sections: Any = None,
) -> tuple[Tensor, ...]:
    """Return views along `dim`: as many as the number says, of nearly equal size, or cut before the indices."""
    return _split_at("tensor_split", x, indices_or_sections, dim)


def _split_at(name: str, x: Any, cuts: Any, dim: int) -> tuple[Any, ...]:
    shape = array_of(x, name).shape
    if not shape:
        raise ShapeError(f"{name} needs at least one dimension")
    dim = normalize_axis(dim, len(shape))
    size = shape[dim]
    if isinstance(cuts, TensorBase):
        cuts = cuts.array.numpy().tolist()
    if isinstance(cuts, int):
        if cuts < 1:
            raise ShapeError(f"{name}: {cuts} sections", next="pass at least 1")
        small, larger = divmod(size, cuts)
        return split(x, [small + 1] * larger + [small] * (cuts - larger), dim)
    ends = [min(max(c + size if c < 0 else c, 0), size) for c in (*cuts, size)]
    starts = [0, *ends[:-1]]
    return tuple(narrow(x, dim, a, max(b - a, 0)) for a, b in zip(starts, ends, strict=True))


def _splitter(name: str, least: int, dim: int) -> Any:
    def function(x: Tensor, *indices_or_sections: int | Sequence[int]) -> tuple[Tensor, ...]:
        cuts: Any = indices_or_sections[0] if len(indices_or_sections) == 1 else indices_or_sections
        cuts = cuts if isinstance(cuts, TensorBase) else integers(cuts, name, "indices_or_sections")
        ndim = array_of(x, name).ndim
        if ndim < least:
            raise ShapeError(f"{name} needs at least {least} dimensions, got shape {x.array.shape}")
        at = 0 if name == "hsplit" and ndim == 1 else dim
        if isinstance(cuts, int) and (cuts < 1 or x.array.shape[at] % cuts):
            raise ShapeError(
                f"{name}: {x.array.shape[at]} elements do not form {cuts} equal sections", next="use tensor_split"
            )
        return _split_at(name, x, cuts, at)

    function.__name__, function.__doc__ = name, f"Compute `tensor_split` along dimension {dim}, into equal sections."
    return public(keywords={"sections": "indices_or_sections", "indices": "indices_or_sections"})(function)


hsplit, vsplit, dsplit = _splitter("hsplit", 1, 1), _splitter("vsplit", 2, 0), _splitter("dsplit", 3, 2)


@public
def split_with_sizes(x: Tensor, split_sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Return views of the listed sizes along `dim`."""
    return split(x, split_sizes, dim)


@public
def unsafe_chunk(x: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Compute `chunk`."""
    return chunk(x, chunks, dim)


@public(keywords={"reps": "dims"})
def tile(x: Tensor, *dims: Sizes) -> Tensor:
    """Return x repeated `dims` times along its last dimensions; missing counts are 1."""
    ndim, counts = array_of(x, "tile").ndim, sizes_of(dims, "tile")
    return repeat(x, (*(1,) * (ndim - len(counts)), *counts))


# --- Broadcasting and grids -------------------------------------------------------------------------------------------


@public(method=False)
def broadcast_shapes(*shapes: Any) -> Any:
    """Return the shape to which shapes (or single sizes) broadcast."""
    return Size(common_shape(*((s,) if isinstance(s, int) else tuple(s) for s in shapes)))


@public(method=False)
def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """Return views of the tensors in their common shape."""
    each = _tensors_of(tensors)
    shape = common_shape(*(array_of(t, "broadcast_tensors").shape for t in each))
    return tuple(expand(t, shape) for t in each)


@public(method=False)
def meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[Tensor, ...]:
    """Return views of vectors as coordinates of a grid; `indexing` is "ij" (default) or "xy" (first two swapped)."""
    each = [_raised(t, 1) for t in _tensors_of(tensors)]
    if indexing not in (None, "ij", "xy"):
        raise UsageError(f"meshgrid: indexing {indexing!r} is not 'ij' or 'xy'")
    if any(t.array.ndim != 1 for t in each) or len({(t.array.dtype, t.array.device) for t in each}) > 1:
        raise ShapeError("meshgrid takes vectors of one dtype on one device")
    order = list(range(len(each)))
    if indexing == "xy" and len(each) > 1:
        order[0], order[1] = 1, 0
    shape = [each[i].array.size for i in order]
    return tuple(
        expand(reshape(t, *(t.array.size if order[d] == i else 1 for d in range(len(each)))), *shape)
        for i, t in enumerate(each)
    )


@public(method=False)
def cartesian_prod(*tensors: Any) -> Tensor:
    """Return all combinations of vectors' elements as rows; of one vector, the vector."""
    each = _tensors_of(tensors)
    return each[0] if len(each) == 1 else stack([flatten(g) for g in meshgrid(*each, indexing="ij")], 1)


@public(method=False)
def combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Return the combinations of `r` elements of a vector as rows, in order."""
    if array_of(x, "combinations").ndim != 1:
        raise ShapeError(f"combinations takes a vector, got shape {x.array.shape}")
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    rows = list(choose(range(x.array.size), r))
    if not rows or not r:
        return reshape(x[:0], (0, r) if r else (0,))
    return index.getitem(x, _positions(rows, x))


def _positions(values: Any, x: Any) -> Any:
    return tensor(values, dtype=int64, device=x.array.device)


# --- Diagonals and triangles ------------------------------------------------------------------------------------------


@public
def diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Return matrices in dimensions `dim1` and `dim2` whose diagonals are the last dimension of x."""
    shape = array_of(x, "diag_embed").shape
    if not shape:
        raise DimensionError("diag_embed needs at least one dimension")
    ndim, size = len(shape) + 1, shape[-1] + abs(offset)
    a, b = normalize_axis(dim1, ndim), normalize_axis(dim2, ndim)
    if a == b:
        raise ShapeError(f"diag_embed: dim1 and dim2 are both {a}")
    rest = [d for d in range(ndim) if d not in (a, b)]
    sizes = dict(zip(rest, shape[:-1], strict=True)) | {a: size, b: size}
    target = zeros(*(sizes[d] for d in range(ndim)), dtype=x.array.dtype, device=x.array.device)
    copy_(diagonal(target, offset, a, b), x)
    return target


@public(out=True)
def diag(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return the matrix with a vector as its diagonal, or a copy of a matrix's diagonal."""
    ndim = array_of(x, "diag").ndim
    if ndim not in (1, 2):
        raise ShapeError(f"diag takes a vector or a matrix, got shape {x.array.shape}")
    return diag_embed(x, diagonal) if ndim == 1 else clone(_diagonal(x, diagonal))


def _diagonal(x: Any, offset: int) -> Any:
    return diagonal(x, offset)


@public
def diagflat(x: Tensor, offset: int = 0) -> Tensor:
    """Return the matrix with the flattened x as its diagonal."""
    return diag_embed(ravel(x), offset)


@public
def trace(x: Tensor) -> Tensor:
    """Return the sum of a matrix's diagonal."""
    if array_of(x, "trace").ndim != 2:
        raise ShapeError(f"trace takes a matrix, got shape {x.array.shape}")
    return diagonal(x).sum()


@public(method=False, out=True)
def block_diag(*tensors: Tensor) -> Tensor:
    """Return the matrix with matrices (vectors as rows, numbers) as blocks along its diagonal."""
    each = [_raised(t, 2) for t in _tensors_of(tensors)] or [zeros(1, 0)]
    if any(t.array.ndim > 2 for t in each):
        raise ShapeError("block_diag takes tensors of at most 2 dimensions")
    width = sum(t.array.shape[1] for t in each)
    rows, before = [], 0
    for t in each:
        (height, columns), kind = t.array.shape, {"dtype": t.array.dtype, "device": t.array.device}
        rows.append(cat([zeros(height, before, **kind), t, zeros(height, width - before - columns, **kind)], 1))
        before += columns
    return cat(rows, 0)


def _triangle(name: str, keeps: Any, sense: str) -> Any:
    def indices(
        row: int,
        col: int,
        offset: int = 0,
        *,
        dtype: DTypeLike = None,
        device: DeviceLike = None,
        requires_grad: bool = False,
    ) -> Tensor:
        if row < 0 or col < 0:
            raise ShapeError(f"{name}: {row} rows and {col} columns", next="pass sizes of at least 0")
        i, j = arange(row, device=device), arange(col, device=device)
        inside = keeps(sub(unsqueeze(j, 0), unsqueeze(i, 1)) if row and col else zeros(row, col), offset)
        found = transpose(nonzero(inside), 0, 1)
        found = clone(found).to(int64 if dtype is None else as_dtype(dtype))
        return found.requires_grad_() if requires_grad else found

    indices.__name__ = name
    indices.__doc__ = f"Return rows and columns `[2, n]` of the {sense} triangle of a matrix, up to diagonal `offset`."
    return public(method=False, pin_memory=True)(indices)


tril_indices = _triangle("tril_indices", pw.le, "lower")
triu_indices = _triangle("triu_indices", pw.ge, "upper")


@public(method=True, function=False)
def fill_diagonal_(x: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """Set the main diagonal, in place; with `wrap`, it starts again after the square part of a tall matrix."""
    a = array_of(x, "fill_diagonal_")
    if a.ndim < 2 or (a.ndim > 2 and len(set(a.shape)) > 1):
        raise ShapeError(f"fill_diagonal_ takes a matrix, or equal dimensions, got shape {a.shape}")
    length, step = min(a.shape), sum(a.strides)
    if wrap and a.ndim == 2 and a.shape[0] > a.shape[1]:
        length = -(-a.shape[0] * a.shape[1] // (a.shape[1] + 1))
        index.index_put_(x, _wrapped(x, length), fill_value)
        return x
    as_strided(x, (length,), (step,)).fill_(fill_value)
    return x


def _wrapped(x: Any, length: int) -> tuple[Any, Any]:
    width = x.array.shape[1]
    flat = pw.mul(arange(length, device=x.array.device), width + 1)
    return pw.floor_divide(flat, width), pw.remainder(flat, width)


# --- Order of dimensions ----------------------------------------------------------------------------------------------


@public
def fliplr(x: Tensor) -> Tensor:
    """Return x with dimension 1 reversed."""
    if array_of(x, "fliplr").ndim < 2:
        raise ShapeError("fliplr needs at least 2 dimensions")
    return flip(x, 1)


@public
def flipud(x: Tensor) -> Tensor:
    """Return x with dimension 0 reversed."""
    if array_of(x, "flipud").ndim < 1:
        raise ShapeError("flipud needs at least 1 dimension")
    return flip(x, 0)


@public
def rot90(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Return x rotated `k` quarter turns in the plane of `dims`, from the first towards the second."""
    ndim = array_of(x, "rot90").ndim
    if len(dims) != 2 or ndim < 2:
        raise ShapeError(f"rot90 needs two dimensions of at least 2, got dims {tuple(dims)} of {ndim}")
    a, b = (normalize_axis(d, ndim) for d in dims)
    if a == b:
        raise ShapeError(f"rot90: both dims are {a}")
    turned = (
        clone,
        lambda v: transpose(flip(v, b), a, b),
        lambda v: flip(v, a, b),
        lambda v: flip(transpose(v, a, b), b),
    )
    return clone(turned[k % 4](x)) if k % 4 == 1 else turned[k % 4](x)


@public
def adjoint(x: Tensor) -> Tensor:
    """Return x with its last two dimensions swapped, the adjoint of real matrices."""
    return transpose(x, -2, -1)


# --- Elements and parts -----------------------------------------------------------------------------------------------


@public
def argwhere(x: Tensor) -> Tensor:
    """Return indices `[n, ndim]` of the elements that are not 0."""
    return nonzero(x)


@public(out=True)
def take(x: Tensor, index: Tensor) -> Tensor:
    """Return the elements of the flattened x at `index`, in its shape."""
    return _taken(x, index)


def _taken(x: Any, positions: Any) -> Any:
    if array_of(positions, "take").dtype is not int64:
        raise DTypeError(f"take: the index is {positions.array.dtype}, expected int64")
    taken = index.getitem(ravel(x), positions)
    return taken if positions.array.shape else clone(taken)


@public(function=False)
def put_(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Write or add `source` at `index` of the flattened x, in place."""
    return _put(x, index, source, accumulate)


@public
def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Compute `put_` on a copy."""
    return _put(clone(x), index, source, accumulate)


def _put(x: Any, positions: Any, source: Any, accumulate: bool) -> Any:
    if array_of(source, "put").size != array_of(positions, "put").size or x.array.dtype is not source.array.dtype:
        raise IndexRangeError(
            f"put: {source.array.size} values ({source.array.dtype}) for {positions.array.size} indices"
        )
    size = x.array.size
    flat = ravel(positions)
    if any(not -size <= extreme < size for extreme in flat.array.numpy().tolist()):
        raise IndexRangeError(f"put: an index is out of range for {size} elements")
    places, rest = [], pw.remainder(flat, size) if size else flat
    for length in reversed(x.array.shape):
        places.append(pw.remainder(rest, length))
        rest = pw.floor_divide(rest, length)
    if not places:
        index.index_put_(reshape(x, 1), (flat,), ravel(source), accumulate)
        return x
    return index.index_put_(x, tuple(reversed(places)), ravel(source), accumulate)


def _scattered(x: Any, src: Any, part: Any, name: str) -> Any:
    """Return a copy of x whose part, selected by a view, is overwritten with `src`."""
    result = clone(x)
    window = part(result)
    if window.array.shape != array_of(src, name).shape:
        raise ShapeError(f"{name}: the source has shape {src.array.shape}, expected {window.array.shape}")
    copy_(window, src)
    return result


@public
def select_scatter(x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """Return a copy of x with `src` as slice `index` of `dim`."""
    return _scattered(x, src, lambda v: select(v, dim, index), "select_scatter")


@public(out=True)
def slice_scatter(
    x: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """Return a copy of x with `src` in start:end:step of `dim`."""
    dim = normalize_axis(dim, array_of(x, "slice_scatter").ndim)
    where = (*(slice(None),) * dim, slice(start, end, step))
    return _scattered(x, src, lambda v: v[where], "slice_scatter")


@public
def diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Return a copy of x with `src` as its diagonal."""
    return _scattered(x, src, lambda v: _diagonals(v, offset, dim1, dim2), "diagonal_scatter")


def _diagonals(x: Any, offset: int, dim1: int, dim2: int) -> Any:
    return diagonal(x, offset, dim1, dim2)


@public
def as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Return a copy of x with `src` in a window of its storage."""
    return _scattered(x, src, lambda v: as_strided(v, size, stride, storage_offset), "as_strided_scatter")


@public(out=True)
def narrow_copy(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return a copy of `narrow`."""
    return clone(narrow(x, dim, start, length))


@public(method=False)
def unravel_index(indices: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the coordinates of positions in a flattened tensor of `shape`."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    places, indices = [], to_dtype(indices, int64)
    for length in reversed(sizes):
        places.append(pw.remainder(indices, length))
        indices = pw.floor_divide(indices, length)
    return tuple(reversed(places))
