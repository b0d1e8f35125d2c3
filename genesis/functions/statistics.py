"""Statistics, scans, order statistics and searches, with torch's names and semantics.

They are made of ops. A scan takes log2(n) passes: after pass k each element has combined 2^k elements.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from genesis.autograd.modes import no_grad
from genesis.autograd.record import TensorBase
from genesis.dtypes import BOOL, bool_, default_dtype, float32, float64, iinfo, int32, int64
from genesis.errors import DimensionError, DTypeError, NumericError, ShapeError, UsageError
from genesis.functions import pointwise as pw
from genesis.functions import reduce
from genesis.functions.create import arange, full_like, ones, tensor, zeros, zeros_like
from genesis.functions.elementwise import add, clamp, clone, div, lerp, result_type, sub, to_dtype, where
from genesis.functions.index import gather, getitem, index_select, scatter_add
from genesis.functions.maths import logaddexp
from genesis.functions.reduce import ValuesAndIndices
from genesis.functions.shape import cat, expand, flatten, movedim, narrow, ravel, reshape, unsqueeze
from genesis.functions.surface import Dims, DTypeLike, Tensor, array_of, public
from genesis.keywords import check_calls
from genesis.shapes import normalize_axis


class MinAndMax(NamedTuple):
    """The smallest and the largest elements."""

    min: Any
    max: Any


def _line(name: str, x: Any, dim: int) -> tuple[int, int]:
    """Return the normalized dimension, and its size (1 for a tensor without dimensions)."""
    shape = array_of(x, name).shape
    dim = normalize_axis(dim, builtins.max(len(shape), 1))
    return dim, shape[dim] if shape else 1


# --- Means and sums ---------------------------------------------------------------------------------------------------


@public
def var_mean(
    x: Tensor,
    dim: Dims | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `var` and `mean` over `dim`."""
    over = None if isinstance(dim, bool) else dim
    return reduce.var(x, dim, unbiased, keepdim, correction=correction), reduce.mean(x, over, keepdim)


@public
def std_mean(
    x: Tensor,
    dim: Dims | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `std` and `mean` over `dim`."""
    over = None if isinstance(dim, bool) else dim
    return reduce.std(x, dim, unbiased, keepdim, correction=correction), reduce.mean(x, over, keepdim)


@public(out=True)
def nansum(x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None) -> Tensor:
    """Return the sum over `dim`, with NaN counted as 0."""
    is_float = array_of(x, "nansum").dtype.is_floating_point
    return reduce.sum(where(pw.isnan(x), 0.0, x) if is_float else x, dim, keepdim, dtype=dtype)


@public(out=True)
def nanmean(x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None) -> Tensor:
    """Return the mean over `dim` of the elements that are not NaN."""
    if not array_of(x, "nanmean").dtype.is_floating_point:
        raise DTypeError(f"nanmean takes floats, got {x.array.dtype}", next="cast with .to(...)")
    count = reduce.sum(pw.logical_not(pw.isnan(x)), dim, keepdim)
    return div(nansum(x, dim, keepdim, dtype=dtype), count)


@public(out=True)
def aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> MinAndMax:
    """Return the smallest and the largest elements along `dim`, or of all."""
    return MinAndMax(reduce.amin(x, dim, keepdim), reduce.amax(x, dim, keepdim))


@public
def dist(x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """Return the p-norm of x - other, as one number."""
    return reduce.norm(sub(x, other), p)


@public(also=("trapz",))
def trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float | None = None, dim: int = -1) -> Tensor:
    """Return the integral of samples `y` along `dim` by the trapezoidal rule, at points `x` or `dx` (1) apart."""
    return reduce.sum(_trapezoids("trapezoid", y, x, dx, dim), dim)


@public
def cumulative_trapezoid(y: Tensor, x: Tensor | None = None, *, dx: float | None = None, dim: int = -1) -> Tensor:
    """Return the integral up to each sample but the first; arguments as for `trapezoid`."""
    return reduce.cumsum(_trapezoids("cumulative_trapezoid", y, x, dx, dim), dim)


def _trapezoids(name: str, y: Any, x: Any, dx: float | None, dim: int) -> Any:
    if x is not None and dx is not None:
        raise UsageError(f"{name} got both x and dx", next="pass one")
    dim, size = _line(name, y, dim)
    if not y.array.shape:
        raise DimensionError(f"{name} needs at least one dimension")
    last = builtins.max(size - 1, 0)
    pairs = add(narrow(y, dim, 0, last), narrow(y, dim, size - last, last))
    if x is None:
        return pw.mul(pairs, (1.0 if dx is None else dx) / 2)
    if array_of(x, name).ndim == 1:
        x = reshape(x, *(-1 if d == dim else 1 for d in range(y.array.ndim))) if x.array.size else x
    return div(pw.mul(pairs, diff(x, dim=dim if x.array.ndim == y.array.ndim else -1)), 2)


@public(out=True)
def diff(x: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None) -> Tensor:
    """Return the `n`-th differences of neighbours along `dim`, of x between `prepend` and `append`."""
    if not array_of(x, "diff").shape:
        raise DimensionError("diff needs at least one dimension")
    if n < 0:
        raise UsageError(f"diff: n is {n}, expected at least 0")
    dim, _ = _line("diff", x, dim)
    if not n:
        return clone(x)
    parts = [part for part in (prepend, x, append) if part is not None]
    x = cat(parts, dim) if len(parts) > 1 else x
    for _ in range(builtins.min(n, x.array.shape[dim])):
        size = builtins.max(x.array.shape[dim] - 1, 0)
        left, right = narrow(x, dim, 0, size), narrow(x, dim, x.array.shape[dim] - size, size)
        x = pw.logical_xor(right, left) if x.array.dtype.category == BOOL else sub(right, left)
    return x


@public
def cov(x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """Return the covariance matrix of variables (rows) from observations (columns), which may have weights."""
    if array_of(x, "cov").ndim > 2:
        raise ShapeError(f"cov takes at most 2 dimensions, got shape {x.array.shape}")
    rows = reshape(x, 1, -1) if x.array.ndim < 2 else x
    rows = rows if x.array.dtype.is_floating_point else to_dtype(rows, default_dtype())
    for name, given, takes_floats in (("fweights", fweights, False), ("aweights", aweights, True)):
        if given is None:
            continue
        if array_of(given, "cov").shape != rows.array.shape[1:]:
            raise ShapeError(f"cov: {name} has shape {given.array.shape}, expected {rows.array.shape[1:]}")
        if given.array.dtype.is_floating_point != takes_floats:
            raise DTypeError(f"cov: {name} is {given.array.dtype}", next="pass integer fweights and float aweights")
        if bool(pw.lt(given, 0).any()):
            raise NumericError(f"cov: a weight of {name} is negative")
    weights = fweights if aweights is None else aweights if fweights is None else pw.mul(fweights, aweights)
    if weights is None:
        count: Any = rows.array.shape[1]
        mean, scaled = reduce.mean(rows, 1, keepdim=True), None
    else:
        count = reduce.sum(weights)
        mean, scaled = div(reduce.sum(pw.mul(rows, weights), 1, keepdim=True), count), weights
    if aweights is not None and correction:
        count = sub(count, pw.mul(div(reduce.sum(pw.mul(weights, aweights)), count), correction))
    else:
        count = count - correction
    centred = sub(rows, mean)
    product = (centred if scaled is None else pw.mul(centred, scaled)) @ centred.T
    norm = builtins.max(count, 0) if isinstance(count, int) else clamp(count, 0)
    result = div(product, norm)
    return reshape(result, ()) if rows.array.shape[0] == 1 else result


@public
def corrcoef(x: Tensor) -> Tensor:
    """Return the correlation coefficients of variables (rows) from observations (columns)."""
    c = cov(x)
    if not c.array.shape:
        return div(c, c)
    deviation = pw.sqrt(c.diagonal())
    return clamp(div(div(c, unsqueeze(deviation, 1)), unsqueeze(deviation, 0)), -1, 1)


# --- Scans ------------------------------------------------------------------------------------------------------------


def _scan(x: Any, dim: int, combine: Callable[[Any, Any], Any]) -> Any:
    """Return y_i = x_0 ∘ … ∘ x_i along `dim`, of an associative function of (earlier, later)."""
    size, step = (x.array.shape[dim], 1) if x.array.shape else (1, 1)
    if size < 2:
        return clone(x)
    while step < size:
        combined = combine(narrow(x, dim, 0, size - step), narrow(x, dim, step, size - step))
        x = cat([narrow(x, dim, 0, step), combined], dim)
        step *= 2
    return x


@public(out=True, in_place=True)
def cumprod(x: Tensor, dim: int, *, dtype: DTypeLike = None) -> Tensor:
    """Return cumulative products along `dim`; integers and bools give int64 by default."""
    dim, _ = _line("cumprod", x, dim)
    kind = x.array.dtype if x.array.dtype.is_floating_point else int64
    kind = kind if dtype is None else tensor(0, dtype=dtype).array.dtype
    narrower = kind.is_floating_point and kind.itemsize < 4
    wide = to_dtype(x, float32 if narrower else kind)
    return to_dtype(_scan(wide, dim, pw.mul), kind)


@public(out=True)
def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Return log Σ e^x of the elements up to each one along `dim`, without overflow."""
    dim, _ = _line("logcumsumexp", x, dim)
    kind = x.array.dtype
    if not kind.is_floating_point:
        raise DTypeError(f"logcumsumexp takes floats, got {kind}", next="cast with .to(...)")
    wide = to_dtype(x, float32 if kind.itemsize < 4 else kind)
    return to_dtype(_scan(wide, dim, logaddexp), kind)


def _running(name: str, x: Any, dim: int, wins: Callable[[Any, Any], Any]) -> ValuesAndIndices:
    """Return the running extremum and its positions: the last of equals; after a NaN, the last NaN."""
    dim, size = _line(name, x, dim)
    if not x.array.shape:
        return ValuesAndIndices(clone(x), zeros_like(x, dtype=int64))
    with no_grad():
        shape = [size if d == dim else 1 for d in range(x.array.ndim)]
        places = clone(expand(reshape(arange(size, device=x.array.device), *shape), x.array.shape))

        def later(a: Any, b: Any) -> Any:
            left, right = gather(x, dim, a), gather(x, dim, b)
            takes = pw.logical_or(pw.isnan(right), pw.logical_and(pw.logical_not(pw.isnan(left)), wins(right, left)))
            return where(takes, b, a)

        places = _scan(places, dim, later) if x.array.size else places
    return ValuesAndIndices(gather(x, dim, places), places)


@public(out=True)
def cummax(x: Tensor, dim: int) -> ValuesAndIndices:
    """Return the largest element so far along `dim`, and its position (the last of equals)."""
    return _running("cummax", x, dim, pw.ge)


@public(out=True)
def cummin(x: Tensor, dim: int) -> ValuesAndIndices:
    """Return the smallest element so far along `dim`, and its position (the last of equals)."""
    return _running("cummin", x, dim, pw.le)


# --- Order statistics -------------------------------------------------------------------------------------------------


@public(out=True)
def msort(x: Tensor) -> Tensor:
    """Return x sorted along its first dimension."""
    return reduce.sort(x, 0).values


def _order_statistic(name: str, x: Any, dim: int, keepdim: bool, place: Callable[[Any, int], Any]) -> ValuesAndIndices:
    """Return the element at `place(sorted, size)` of each sorted line, and its position."""
    dim, size = _line(name, x, dim)
    if not size:
        raise DimensionError(f"{name}: dimension {dim} has no elements")
    ordered, origins = reduce.sort(x, dim)
    at = place(ordered, size)
    if isinstance(at, int):
        index = full_like(narrow(origins, dim, 0, 1) if x.array.shape else origins, at)
    else:
        index = at
    positions = gather(origins, dim, index)
    values = gather(x, dim, positions)
    if not keepdim and x.array.shape:
        values, positions = values.squeeze(dim), positions.squeeze(dim)
    return ValuesAndIndices(values, positions)


@public(out=True)
def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> ValuesAndIndices:
    """Return the k-th smallest element along `dim`, counted from 1, and its position."""
    _, size = _line("kthvalue", x, dim)
    if not 1 <= k <= size:
        raise ShapeError(f"kthvalue: k is {k}, the dimension has {size} elements")
    return _order_statistic("kthvalue", x, dim, keepdim, lambda ordered, size: k - 1)


def _median(name: str, x: Any, dim: int | None, keepdim: bool, place: Callable[[Any, int, int], Any]) -> Any:
    if dim is not None:
        axis, _ = _line(name, x, dim)
        return _order_statistic(name, x, dim, keepdim, lambda ordered, size: place(ordered, size, axis))
    if not array_of(x, name).size:
        return full_like(reduce.sum(x), math.nan) if x.array.dtype.is_floating_point else _median_of_none(name, x)
    return _order_statistic(name, ravel(x), 0, False, lambda ordered, size: place(ordered, size, 0)).values


def _median_of_none(name: str, x: Any) -> Any:
    return full_like(reduce.amax(zeros(1, dtype=x.array.dtype)), iinfo(x.array.dtype).min)


@public(out=True)
def median(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the lower median of all elements, or (values, indices) along `dim`; NaN if there is one."""

    def place(ordered: Any, size: int, axis: int) -> Any:
        lower = (size - 1) // 2
        if not ordered.array.dtype.is_floating_point:
            return lower
        last = narrow(ordered, axis, size - 1, 1) if ordered.array.shape else ordered
        first_nan = sub(size, reduce.sum(pw.isnan(ordered), axis if ordered.array.shape else None, keepdim=True))
        first_nan = reshape(first_nan, last.array.shape)
        return where(pw.isnan(last), first_nan, lower)

    return _median("median", x, dim, keepdim, place)


@public(out=True)
def nanmedian(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the lower median of the elements that are not NaN; see `median`."""

    def place(ordered: Any, size: int, axis: int) -> Any:
        if not ordered.array.dtype.is_floating_point:
            return (size - 1) // 2
        if not ordered.array.shape:
            return 0
        valid = reduce.sum(pw.logical_not(pw.isnan(ordered)), axis, keepdim=True)
        return pw.floor_divide(clamp(sub(valid, 1), 0), 2)

    return _median("nanmedian", x, dim, keepdim, place)


@public(out=True)
def mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> ValuesAndIndices:
    """Return the most frequent element along `dim` (the smallest if there are several), and its last position."""

    def place(ordered: Any, size: int) -> Any:
        if not ordered.array.shape:
            return 0
        axis = normalize_axis(dim, ordered.array.ndim)
        # The length of each run of equals, at its last element.
        shape = [size if d == axis else 1 for d in range(ordered.array.ndim)]
        places = expand(reshape(arange(size, device=ordered.array.device), *shape), ordered.array.shape)
        starts = pw.ne(narrow(ordered, axis, 1, size - 1), narrow(ordered, axis, 0, size - 1))
        starts = cat(
            [full_like(narrow(places, axis, 0, 1), 0), where(starts, narrow(places, axis, 1, size - 1), 0)], axis
        )
        first = cummax(starts, axis).values
        return reduce.argmax(sub(places, first), axis, keepdim=True)

    with no_grad():
        positions = _order_statistic("mode", x, dim, True, place).indices
    return _chosen(x, dim, keepdim, positions)


def _chosen(x: Any, dim: int, keepdim: bool, positions: Any) -> ValuesAndIndices:
    values = gather(x, dim, positions)
    if keepdim or not x.array.shape:
        return ValuesAndIndices(values, positions)
    return ValuesAndIndices(values.squeeze(dim), positions.squeeze(dim))


_INTERPOLATIONS = ("linear", "lower", "higher", "midpoint", "nearest")


def _quantile(name: str, x: Any, q: Any, dim: Any, keepdim: bool, interpolation: str, *, skips_nan: bool) -> Any:
    kind = array_of(x, name).dtype
    if kind not in (float32, float64):
        raise UsageError(f"{name} takes float32 or float64, got {kind}", next="cast with .to(...)")
    if interpolation not in _INTERPOLATIONS:
        raise UsageError(f"{name}: interpolation {interpolation!r} is not one of {', '.join(_INTERPOLATIONS)}")
    if not isinstance(q, TensorBase):
        if not 0 <= q <= 1:
            raise UsageError(f"{name}: q is {q}", next="pass values from 0 to 1")
        q = tensor(q, dtype=kind, device=x.array.device)
    if q.array.dtype is not kind or q.array.ndim > 1:
        raise UsageError(f"{name}: q must be a number or a vector of {kind}")
    if not x.array.size:
        raise UsageError(f"{name} of no elements")
    ndim, flat = x.array.ndim, dim is None
    lines = unsqueeze(ravel(x), 0) if flat else movedim(x, dim, -1) if ndim else reshape(x, 1)
    ordered = reduce.sort(lines, -1).values  # [..., n]
    size = ordered.array.shape[-1]
    # The rank of each quantile in each line.
    vector = reshape(q, -1)
    if skips_nan:
        valid = reduce.sum(pw.logical_not(pw.isnan(ordered)), -1, keepdim=True)
        rank = clamp(pw.mul(vector, to_dtype(sub(valid, 1), kind)), 0)
    else:
        rank = expand(pw.mul(vector, size - 1), (*ordered.array.shape[:-1], vector.array.size))
        has_nan = pw.isnan(narrow(ordered, -1, size - 1, 1))
        rank = where(has_nan, float(size - 1), rank)
    low = pw.floor({"higher": pw.ceil, "nearest": pw.round}.get(interpolation, pw.floor)(rank))
    result = gather(ordered, -1, to_dtype(low, int64))
    if interpolation in ("linear", "midpoint"):
        upper = gather(ordered, -1, to_dtype(pw.ceil(rank), int64))
        result = lerp(result, upper, full_like(rank, 0.5) if interpolation == "midpoint" else sub(rank, low))
    result = movedim(result, -1, 0)  # [q, ...]
    if flat:
        result = reshape(result, vector.array.size, *((1,) * ndim if keepdim else ()))
    elif keepdim and ndim:
        result = unsqueeze(result, normalize_axis(dim, ndim) + 1)
    return result if q.array.ndim else getitem(result, 0)


@public(out=True)
def quantile(
    x: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Tensor:
    """Return quantiles `q` (a number or a vector) of all elements or along `dim`; NaN where there is one.

    Args:
        interpolation: between the two nearest elements: "linear", "lower", "higher", "midpoint" or "nearest".
    """
    return _quantile("quantile", x, q, dim, keepdim, interpolation, skips_nan=False)


@public(out=True)
def nanquantile(
    x: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Tensor:
    """Compute `quantile` of the elements that are not NaN."""
    return _quantile("nanquantile", x, q, dim, keepdim, interpolation, skips_nan=True)


# --- Searches and counts ----------------------------------------------------------------------------------------------


@public(method=False, out=True)
def searchsorted(
    sorted_sequence: Tensor,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Return where `input` would be inserted in sorted lines: before equals, or with `right` after them.

    Args:
        sorted_sequence: a vector for all values, or lines `[..., n]` for values `[..., k]`.
        side: "left" or "right", another form of `right`.
        sorter: indices that sort the lines.
    """
    if side not in (None, "left", "right") or (side == "left" and right):
        raise UsageError(f"searchsorted: side {side!r} does not go with right={right}")
    after = right or side == "right"
    shape = array_of(sorted_sequence, "searchsorted").shape
    if not isinstance(input, TensorBase):
        input = tensor(input, dtype=sorted_sequence.array.dtype, device=sorted_sequence.array.device)
    if not shape or (len(shape) > 1 and shape[:-1] != input.array.shape[:-1]):
        raise ShapeError(f"searchsorted: lines of shape {shape} do not match values {input.array.shape}")
    if sorter is not None:
        sorted_sequence = gather(sorted_sequence, -1, sorter)
    with no_grad():
        size = shape[-1]
        low = zeros_like(input, dtype=int64)
        high = full_like(low, size)
        for _ in range(size.bit_length()):
            middle = pw.floor_divide(add(low, high), 2)
            at = clamp(middle, 0, size - 1)
            found = getitem(sorted_sequence, at) if len(shape) == 1 else gather(sorted_sequence, -1, at)
            stays = pw.gt(found, input) if after else pw.ge(found, input)
            moves = pw.logical_and(pw.logical_not(stays), pw.lt(low, high))
            low, high = where(moves, add(middle, 1), low), where(moves, high, pw.minimum(middle, high))
    return to_dtype(low, int32) if out_int32 else low


@public(method=False, out=True)
def bucketize(input: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Return the bucket of each value between sorted `boundaries`; with `right`, a boundary opens the next bucket."""
    if array_of(boundaries, "bucketize").ndim != 1:
        raise ShapeError(f"bucketize takes a vector of boundaries, got shape {boundaries.array.shape}")
    return searchsorted(boundaries, input, out_int32=out_int32, right=right)


@public(out=True)
def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Return the counts of elements in `bins` equal intervals from `min` to `max`; both 0 mean the data's range."""
    kind = array_of(x, "histc").dtype
    if not kind.is_floating_point:
        raise DTypeError(f"histc takes floats, got {kind}", next="cast with .to(...)")
    if bins < 1:
        raise UsageError(f"histc: {bins} bins", next="pass at least 1")
    low, high = float(min), float(max)
    if low == high and x.array.size:
        low, high = float(reduce.amin(x)), float(reduce.amax(x))
    if low == high:
        low, high = low - 1, high + 1
    if not low < high or math.isinf(low) or math.isinf(high):
        raise UsageError(f"histc: the range from {low} to {high} is not valid")
    flat = to_dtype(ravel(x), float64)
    inside = pw.logical_and(pw.ge(flat, low), pw.le(flat, high))
    place = pw.mul(sub(flat, low), bins / (high - low))
    index = clamp(to_dtype(where(inside, place, 0.0), int64), 0, bins - 1)
    counts = zeros(bins, dtype=int64, device=x.array.device)
    return to_dtype(scatter_add(counts, 0, index, to_dtype(inside, int64)), kind)


@public(method=False, out=True)
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Return whether each element equals one of `test_elements`; `invert` negates it. One may be a number."""
    if not isinstance(elements, TensorBase):
        elements = tensor(elements, device=array_of(test_elements, "isin").device)
    if not isinstance(test_elements, TensorBase):
        test_elements = tensor(test_elements, device=elements.array.device)
    common = result_type(elements, test_elements)
    elements, ordered = to_dtype(elements, common), reduce.sort(to_dtype(ravel(test_elements), common)).values
    size = ordered.array.size
    if not size:
        found = pw.logical_and(pw.eq(elements, elements), False)
    else:
        at = clamp(searchsorted(ordered, elements), 0, size - 1)
        found = pw.eq(getitem(ordered, at), elements)
    return pw.logical_not(found) if invert else found


@public
def unique_consecutive(
    x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Return x without repetitions of neighbours, of the flattened tensor or of slices along `dim`.

    `return_inverse` also returns the position of each element's run, `return_counts` the runs' lengths.
    """
    shape = array_of(x, "unique_consecutive").shape
    lines = ravel(x) if dim is None else x
    axis, size = _line("unique_consecutive", lines, dim or 0)
    rows = flatten(movedim(lines, axis, 0), 1) if lines.array.ndim > 1 else reshape(lines, size, 1)
    last = builtins.max(size - 1, 0)
    changes = pw.ne(narrow(rows, 0, size - last, last), narrow(rows, 0, 0, last))
    starts = cat([ones(size - last, dtype=bool_, device=x.array.device), changes.any(1)])
    first = flatten(reduce.nonzero(starts))
    values = index_select(lines, axis, first)
    inverse = sub(reduce.cumsum(starts, 0), 1)
    counts = diff(cat([first, tensor([size], device=x.array.device)]))
    inverse = reshape(inverse, shape) if dim is None else inverse
    extra = (*((inverse,) if return_inverse else ()), *((counts,) if return_counts else ()))
    return (values, *extra) if extra else values


check_calls(globals(), ("MinAndMax",))
