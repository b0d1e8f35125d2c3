"""Reductions of elements that are written to the same position: scatter_reduce and index_reduce, as in torch.

Elements are sorted by position. Products combine neighbours of equal position in log2(n) passes. For an
extremum, writes are sorted by value, and the last one wins.
"""

from __future__ import annotations

from typing import Any

from genesis.autograd.function import Function
from genesis.autograd.modes import no_grad
from genesis.dtypes import int64
from genesis.errors import ShapeError, UsageError
from genesis.functions import pointwise as pw
from genesis.functions import reduce
from genesis.functions.create import arange, ones_like, zeros_like
from genesis.functions.elementwise import add, clone, div, sub, to_dtype, where
from genesis.functions.index import gather, getitem, index_put, scatter, scatter_add
from genesis.functions.shape import cat, expand, narrow, ravel, reshape
from genesis.functions.statistics import cummax
from genesis.functions.surface import Tensor, array_of, public
from genesis.shapes import normalize_axis

_REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")


class _Shared(Function):
    """The extrema of self and sources at each position; equal ones share the gradient evenly."""

    @staticmethod
    def forward(ctx: Any, x: Any, src: Any, dim: int, index: Any, is_max: bool, include_self: bool) -> Any:
        result = _extremum(x, dim, index, src, is_max, include_self)
        ctx.save_for_backward(x, src, index, result)
        ctx.rest = dim, include_self
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, src, index, result = ctx.saved_tensors
        dim, include_self = ctx.rest
        is_source = to_dtype(pw.eq(src, gather(result, dim, index)), grad.array.dtype)
        is_self = to_dtype(pw.eq(x, result), grad.array.dtype)
        share = div(grad, scatter_add(is_self, dim, index, is_source))
        dx = pw.mul(share, is_self)
        if not include_self:  # x still counts among the equal ones, as in torch
            dx = scatter(dx, dim, index, zeros_like(index, dtype=dx.array.dtype))
        return dx, pw.mul(gather(share, dim, index), is_source), None, None, None, None


def _counts(x: Any, dim: int, index: Any) -> Any:
    """Return how many elements are written to each position of x."""
    return scatter_add(zeros_like(x, dtype=int64), dim, index, ones_like(index))


def _extremum(x: Any, dim: int, index: Any, src: Any, is_max: bool, include_self: bool) -> Any:
    """Return the extrema: sort the writes by value, so that the last one wins; NaN wins over all."""
    places = _places(x, dim, index)
    if include_self:  # x itself is written, too
        every = arange(x.array.size, device=x.array.device)
        places, values = cat([every, places]), cat([ravel(x), ravel(src)])
    else:
        values = ravel(src)
    order = reduce.argsort(values, 0, descending=not is_max)
    if not is_max and values.array.dtype.is_floating_point:  # NaN, which sort counts as the largest, goes last
        order = getitem(order, reduce.argsort(to_dtype(pw.isnan(getitem(values, order)), int64)))
    written = index_put(ravel(x), (getitem(places, order),), getitem(values, order))
    return reshape(written, x.array.shape)


def _places(x: Any, dim: int, index: Any) -> Any:
    """Return the position in the flattened x of each element of `index`, as a vector."""
    shape = x.array.shape
    places, stride = zeros_like(index), 1
    for d in reversed(range(len(shape))):
        size = index.array.shape[d]
        own = arange(size, device=index.array.device)
        at = index if d == dim else reshape(own, *(size if i == d else 1 for i in range(len(shape))))
        places = add(places, pw.mul(at, stride))
        stride *= shape[d]
    return ravel(places)


def _product(x: Any, dim: int, index: Any, src: Any, include_self: bool) -> Any:
    """Return the products at each position: neighbours in the order of positions are multiplied pair by pair."""
    places, values = _places(x, dim, index), ravel(src)
    with no_grad():
        places, order = reduce.sort(places, 0)
        count = places.array.size
        own = arange(count, device=places.array.device)
        starts = where(
            pw.ne(narrow(places, 0, 1, count - 1), narrow(places, 0, 0, count - 1)), narrow(own, 0, 1, count - 1), 0
        )
        rank = sub(own, cummax(cat([narrow(own, 0, 0, 1), starts]), 0).values)
    values, step = getitem(values, order), 1
    while step < count:
        left, right = narrow(values, 0, 0, count - step), narrow(values, 0, step, count - step)
        same = pw.eq(narrow(places, 0, 0, count - step), narrow(places, 0, step, count - step))
        first = pw.eq(pw.remainder(narrow(rank, 0, 0, count - step), 2 * step), 0)
        combined = pw.mul(left, where(pw.logical_and(same, first), right, ones_like(right)))
        values, step = cat([combined, narrow(values, 0, count - step, step)]), 2 * step
    leads = pw.eq(rank, 0)
    factors = index_put(ravel(ones_like(x)), (getitem(places, leads),), getitem(values, leads))
    factors = reshape(factors, x.array.shape)
    return pw.mul(x, factors) if include_self else where(_counts(x, dim, index) == 0, x, factors)


def _reduced(name: str, x: Any, dim: int, index: Any, src: Any, how: str, include_self: bool) -> Any:
    if how not in _REDUCTIONS or (name == "index_reduce" and how == "sum"):
        raise UsageError(f"{name}: {how!r} is not a reduction", next=f"pass one of {', '.join(_REDUCTIONS)}")
    if array_of(x, name).dtype is not array_of(src, name).dtype:
        raise UsageError(f"{name}: the source is {src.array.dtype}, the tensor {x.array.dtype}", next="cast it")
    if not x.array.shape:
        flat = _reduced(name, reshape(x, 1), 0, reshape(index, -1), reshape(src, -1), how, include_self)
        return reshape(flat, ())
    dim = normalize_axis(dim, x.array.ndim)
    if not index.array.size:
        return clone(x)
    bounds, sources = index.array.shape, src.array.shape
    if len(sources) != len(bounds) or any(b > s for b, s in zip(bounds, sources, strict=True)):
        raise ShapeError(f"{name}: a source of shape {sources} does not cover an index of shape {bounds}")
    for d, size in enumerate(bounds):
        src = narrow(src, d, 0, size)
    gather(x, dim, index)  # checks the index
    if how in ("amax", "amin"):
        return _Shared.apply(x, src, dim, index, how == "amax", include_self)
    if how == "prod":
        return _product(x, dim, index, src, include_self)
    base = x if include_self else scatter(x, dim, index, zeros_like(src))
    total = scatter_add(base, dim, index, src)
    if how == "sum":
        return total
    count = add(_counts(x, dim, index), int(include_self)).clamp(min=1)
    if x.array.dtype.is_floating_point:
        return div(total, count.to(x.array.dtype))
    return pw.floor_divide(total, count).to(x.array.dtype)


@public(in_place=True, out=True)
def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Return x with src[i, j] reduced into x[i, index[i, j]] (dim = 1): "sum", "prod", "mean", "amax" or "amin".

    Without `include_self`, x counts only where nothing is written.
    """
    return _reduced("scatter_reduce", x, dim, index, src, reduce, include_self)


@public(in_place=True, out=True)
def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Return x with slices of `source` reduced into the slices `index` of `dim`: "prod", "mean", "amax" or "amin"."""
    ndim = array_of(x, "index_reduce").ndim
    if array_of(index, "index_reduce").ndim > 1:
        raise ShapeError(f"index_reduce: the index must be a vector, got shape {index.array.shape}")
    if not ndim:
        return _reduced("index_reduce", x, 0, index, source, reduce, include_self)
    dim = normalize_axis(dim, ndim)
    count = index.array.size
    expected = (*x.array.shape[:dim], count, *x.array.shape[dim + 1 :])
    if array_of(source, "index_reduce").shape != expected:
        raise ShapeError(f"index_reduce: the source has shape {source.array.shape}, expected {expected}")
    places = reshape(index, *(count if d == dim else 1 for d in range(ndim)))
    return _reduced("index_reduce", x, dim, expand(places, expected), source, reduce, include_self)
