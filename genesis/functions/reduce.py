"""Reductions, softmax, sorting, counting, and comparisons of whole tensors, with torch's names and semantics."""

from __future__ import annotations

import builtins
import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from genesis.autograd.modes import no_grad
from genesis.autograd.record import TensorBase, apply
from genesis.dtypes import INTEGER, int64
from genesis.errors import DTypeError, UsageError
from genesis.functions import pointwise as pw
from genesis.functions.elementwise import add, sub, to_dtype
from genesis.functions.shape import pad
from genesis.functions.surface import (
    Dims,
    DTypeLike,
    Sizes,
    Tensor,
    array_of,
    as_operand,
    integer,
    integers,
    number,
    public,
    sizes_of,
)
from genesis.keywords import check_calls
from genesis.op import Op
from genesis.ops import elementwise
from genesis.ops import reduce as ops
from genesis.ops import softmax as softmax_ops
from genesis.ops import sort as sort_ops


class ValuesAndIndices(NamedTuple):
    """Selected elements, and their positions along the dimension."""

    values: Any
    indices: Any


def _reduced(op: Op, x: Any, dim: Any, *, dtype: DTypeLike = None, **rest: Any) -> Any:
    """Return x, cast to `dtype` if given, reduced over `dim`; an empty `dim` means all dimensions, as in torch.

    The result is cast to `dtype`, too, because autocast and integer sums compute in a wider one.
    """
    array_of(x, op.name)
    x = x if dtype is None else to_dtype(x, dtype)
    result = apply(op, x, axes=None if dim == () else dim, **rest)
    return result if dtype is None or rest["out"] is not None else to_dtype(result, dtype)


# --- Sums, means, products --------------------------------------------------------------------------------------------


@public(also=("reduce_sum",))
def sum(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
) -> Tensor:
    """Return Σ x over `dim` (default: all); `dtype` casts x first, integers and bools give int64 by default."""
    return _reduced(ops.sum, x, dim, keepdim=keepdim, dtype=dtype, out=out)


@public(also=("reduce_mean",))
def mean(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
) -> Tensor:
    """Return Σ x / n over `dim` (default: all); `dtype` casts x first.

    Raises:
        DTypeError: for integers, unless `dtype` is a float type.
    """
    return _reduced(ops.mean, x, dim, keepdim=keepdim, dtype=dtype, out=out)


@public(also=("reduce_prod",))
def prod(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: DTypeLike = None, out: Tensor | None = None
) -> Tensor:
    """Return Π x over `dim`, one or several (default: all); integers and bools give int64 by default."""
    return _reduced(ops.prod, x, dim, keepdim=keepdim, dtype=dtype, out=out)


def _spread(op: Op, x: Any, dim: Any, unbiased: bool, keepdim: bool, correction: float | None, out: Any) -> Any:
    if isinstance(dim, bool):  # x.var(False), torch's older form
        dim, unbiased = None, dim
    dim = None if dim is None else integers(dim, op.name, "dim")
    correction = float(unbiased) if correction is None else correction
    return _reduced(op, x, dim, keepdim=keepdim, correction=correction, out=out)


@public(also=("reduce_var",))
def var(
    x: Tensor,
    dim: Dims | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return Σ (x - mean)² / (n - correction) over `dim` (default: all).

    Args:
        correction: degrees of freedom to subtract; by default 1 if `unbiased` is True, else 0.
    """
    return _spread(ops.var, x, dim, unbiased, keepdim, correction, out)


@public(also=("reduce_std",))
def std(
    x: Tensor,
    dim: Dims | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return √`var`, with the same arguments; where it is 0, its gradient is 0."""
    return _spread(ops.std, x, dim, unbiased, keepdim, correction, out)


@public(also=("reduce_count_nonzero",))
def count_nonzero(x: Tensor, *dim: int | Sequence[int]) -> Tensor:
    """Return how many elements over `dim` (default: all) are not 0, as int64."""
    return _reduced(ops.count_nonzero, x, sizes_of(dim, "count_nonzero") if dim and dim[0] is not None else None)


@public(function=False)
def sum_to_size(x: Tensor, *size: Sizes) -> Tensor:
    """Return x summed to shape `size`: over the dimensions that broadcasting from `size` to x's shape repeats."""
    array, shape = array_of(x, "sum_to_size"), sizes_of(size, "sum_to_size")
    if shape == array.shape and shape:
        return x
    if not array.dtype.is_floating_point:
        x = to_dtype(x, int64)
    return apply(ops.sum_to_shape, x, shape=shape)


@public(method=False)
def sum_to_shape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return x summed over the dimensions that broadcasting from `shape` repeats: the gradient of broadcasting."""
    array_of(x, "sum_to_shape")
    return apply(ops.sum_to_shape, x, shape=sizes_of((shape,), "sum_to_shape"))


@public
def cumsum(x: Tensor, dim: int | None = None, *, dtype: DTypeLike = None, out: Tensor | None = None) -> Tensor:
    """Return cumulative sums along `dim`; integers and bools give int64 by default."""
    array_of(x, "cumsum")
    if dim is None:
        raise UsageError("cumsum needs a dimension", next="pass dim=")
    result = apply(ops.cumsum, x if dtype is None else to_dtype(x, dtype), out=out, axis=dim)
    return result if dtype is None or out is not None else to_dtype(result, dtype)


# --- Extrema ----------------------------------------------------------------------------------------------------------


@public(also=("reduce_amax", "reduce_max"))
def amax(x: Tensor, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return the largest element over `dim` (default: all); equal ones share the gradient evenly."""
    return _reduced(ops.amax, x, dim, keepdim=keepdim, out=out)


@public(also=("reduce_amin", "reduce_min"))
def amin(x: Tensor, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return the smallest element over `dim` (default: all); equal ones share the gradient evenly."""
    return _reduced(ops.amin, x, dim, keepdim=keepdim, out=out)


def _extremum(over_all: Op, along: Op, pairwise: Op, x: Any, dim: Any, keepdim: bool, other: Any) -> Any:
    """Compute one of the three forms of max and min: of all elements, along one dimension, of two tensors."""
    array_of(x, pairwise.name)
    if isinstance(dim, TensorBase):
        dim, other = None, dim
    if other is not None:
        if dim is not None:
            raise UsageError(f"{pairwise.name} of two tensors takes no dim")
        return apply(pairwise, x, as_operand(other, pairwise.name[:3]))
    if dim is None:
        return apply(over_all, x)
    return ValuesAndIndices(*apply(along, x, axis=integer(dim, pairwise.name[:3], "dim"), keepdim=keepdim))


@public(out=True)
def max(x: Tensor, dim: int | Tensor | None = None, keepdim: bool = False, *, other: Tensor | None = None) -> Any:
    """Return the largest element, with `dim` (values, indices) along it, with a second tensor the larger of each."""
    return _extremum(ops.amax, ops.max_with_indices, elementwise.maximum, x, dim, keepdim, other)


@public(out=True)
def min(x: Tensor, dim: int | Tensor | None = None, keepdim: bool = False, *, other: Tensor | None = None) -> Any:
    """Return the smallest element, with `dim` (values, indices) along it, with a second tensor the smaller of each."""
    return _extremum(ops.amin, ops.min_with_indices, elementwise.minimum, x, dim, keepdim, other)


@public(out=True)
def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the position of the largest element (the first of equals) along `dim` or in the flattened tensor."""
    array_of(x, "argmax")
    return apply(ops.argmax, x, axis=dim, keepdim=keepdim)


@public(out=True)
def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the position of the smallest element (the first of equals) along `dim` or in the flattened tensor."""
    array_of(x, "argmin")
    return apply(ops.argmin, x, axis=dim, keepdim=keepdim)


@public(also=("reduce_any",))
def any(x: Tensor, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return whether any element over `dim` is not 0; an empty `dim` reduces no dimension, as in torch."""
    array_of(x, "any")
    return apply(ops.any, x, out=out, axes=dim, keepdim=keepdim)


@public(also=("reduce_all",))
def all(x: Tensor, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return whether all elements over `dim` are not 0; an empty `dim` reduces no dimension, as in torch."""
    array_of(x, "all")
    return apply(ops.all, x, out=out, axes=dim, keepdim=keepdim)


@public(also=("reduce_logsumexp",))
def logsumexp(x: Tensor, dim: Dims = None, keepdim: bool = False, *, out: Tensor | None = None) -> Tensor:
    """Return log Σ e^x over `dim` (default: all)."""
    return _reduced(ops.logsumexp, x, dim, keepdim=keepdim, out=out)


@public(also=("reduce_norm",))
def norm(
    x: Tensor,
    p: float | str | None = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    dtype: DTypeLike = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the vector p-norm (Σ |x|^p)^(1/p) over `dim` (default: all).

    Args:
        p: any number, including ±∞; "fro" means 2.
        dtype: dtype to which x is cast first.
    """
    if p == "nuc" and array_of(x, "norm").ndim > 1:
        norms = importlib.import_module("genesis.functions.matrix_norms")  # it imports this module
        over = dim if dim is not None else tuple(range(x.array.ndim))
        return norms.matrix_norm(x, "nuc", over, keepdim, dtype=dtype, out=out)
    names = {None: 2.0, "fro": 2.0, "inf": math.inf, "-inf": -math.inf}
    power = names.get(p) if p is None or isinstance(p, str) else float(number(p, "norm", "p"))
    if power is None:
        raise DTypeError(f"norm: {p!r} is not a valid p", next='pass a number, "fro" or "inf"')
    return _reduced(ops.norm, x, dim, keepdim=keepdim, p=power, dtype=dtype, out=out)


def _along(op: Op, x: Any, dim: int, dtype: DTypeLike) -> Any:
    x = as_operand(x, op.name)
    if dtype is None:
        return apply(op, x, dim=dim)
    return to_dtype(apply(op, to_dtype(x, dtype), dim=dim), dtype)  # autocast may compute in a wider dtype


@public(out=True)
def softmax(x: Tensor, dim: int, dtype: DTypeLike = None) -> Tensor:
    """Return e^x / Σ e^x along `dim`, computed in float32 or wider; `dtype` casts x first."""
    return _along(softmax_ops.softmax, x, dim, dtype)


@public(out=True)
def log_softmax(x: Tensor, dim: int, dtype: DTypeLike = None) -> Tensor:
    """Return log softmax(x) along `dim`, computed without the softmax; `dtype` casts x first."""
    return _along(softmax_ops.log_softmax, x, dim, dtype)


# --- Order ------------------------------------------------------------------------------------------------------------


@public(out=True)
def sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> ValuesAndIndices:
    """Return x sorted along `dim` (default: the last), and the original position of each element.

    NaN counts as the largest value. The sort is always stable, whatever `stable` is.
    """
    array_of(x, "sort")
    return ValuesAndIndices(*apply(sort_ops.sort, x, axis=dim, descending=descending))


@public(out=True)
def argsort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Return the indices of `sort`."""
    return sort(x, dim, descending, stable).indices


@public(out=True)
def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> ValuesAndIndices:
    """Return the k largest (or smallest) elements along `dim` (default: the last), and their positions.

    They are always sorted, whatever `sorted` is. Of equal elements, the first ones are selected.
    """
    array_of(x, "topk")
    return ValuesAndIndices(*apply(sort_ops.topk, x, k=k, axis=dim, largest=largest))


@public(out=True)
def nonzero(x: Tensor, as_tuple: bool = False) -> Any:
    """Return indices `[n, ndim]` of the elements that are not 0, in row-major order; reading n blocks once.

    `as_tuple` returns one `[n]` tensor per dimension instead (views of one table).
    """
    array = array_of(x, "nonzero")
    size = apply(sort_ops.nonzero_count, x).array.item()
    if as_tuple and not array.shape:
        return (apply(sort_ops.nonzero, TensorBase.wrap(array.view((1,), (1,))), size=size).reshape(-1),)
    indices = apply(sort_ops.nonzero, x, size=size)
    return tuple(indices[:, i] for i in range(array.ndim)) if as_tuple else indices


@public(out=True)
def nonzero_static(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """Return the first `size` rows of `nonzero(x)`, followed by rows of `fill_value`."""
    found = nonzero(x)[:size]
    return pad(found, (0, 0, 0, size - found.array.shape[0]), value=fill_value)


@public
def bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return how often each value occurs in x `[n]` (integers from 0 on), or the sum of its `weights`.

    The result has shape `[max(x.max() + 1, minlength)]`; reading the largest value blocks once.
    """
    array, size = array_of(x, "bincount"), minlength
    if minlength < 0:
        raise UsageError(f"bincount: minlength {minlength} is negative")
    if array.size and array.dtype.category == INTEGER:
        size = builtins.max(size, 1 + apply(ops.amax, x).array.item())
    return apply(sort_ops.bincount, x, *(() if weights is None else (weights,)), size=size)


@public
def unique(
    x: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Return the sorted distinct values of the flattened x, or slices along `dim`. Blocks once to read their count.

    `return_inverse` also returns the position of each element's value among them, `return_counts` their counts.
    """
    array_of(x, "unique")
    if dim is None:
        values, inverse, counts = apply(sort_ops.unique, x, size=apply(sort_ops.unique_count, x).array.item())
    else:
        values, inverse, counts = _unique_slices(x, dim)
    extra = (*((inverse,) if return_inverse else ()), *((counts,) if return_counts else ()))
    return (values, *extra) if extra else values


def _unique_slices(x: Any, dim: int) -> Any:
    """Return the distinct slices along `dim`, in the order of their elements, with positions and counts."""
    rows = x.movedim(dim, 0).flatten(1) if x.ndim > 1 else x.reshape(-1, 1)
    order = argsort(rows[:, -1]) if rows.shape[1] else sort(rows.new_zeros(rows.shape[0])).indices
    for column in range(rows.shape[1] - 2, -1, -1):  # stable sorts, the last key first
        order = order[argsort(rows[order, column])]
    values, inverse, counts = x.index_select(dim, order).unique_consecutive(True, True, dim)
    return values, inverse[argsort(order)], counts


# --- Comparisons of whole tensors -------------------------------------------------------------------------------------


@public
def isclose(x: Tensor, y: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """Return bools: |x - y| <= atol + rtol·|y|, or x = y; with `equal_nan`, NaN is close to NaN.

    Raises:
        DTypeError: if the two have different dtypes.
        UsageError: for a negative tolerance.
    """
    a, b = array_of(x, "isclose"), array_of(y, "isclose")
    if a.dtype is not b.dtype:
        raise DTypeError(
            f"isclose takes one dtype, got {a.dtype.name} and {b.dtype.name}", next="cast one with .to(...)"
        )
    if rtol < 0 or atol < 0:
        raise UsageError(f"isclose: rtol {rtol} and atol {atol} must be at least 0")
    with no_grad():
        close = pw.eq(x, y)
        if equal_nan and a.dtype.is_floating_point:
            close = pw.logical_or(close, pw.logical_and(pw.isnan(x), pw.isnan(y)))
        if a.dtype.category == 0 or (rtol == 0 and atol == 0):
            return close
        apart = pw.abs(sub(x, y))
        allowed = add(pw.abs(pw.mul(y, rtol)), atol)
        return pw.logical_or(close, pw.logical_and(pw.isfinite(apart), pw.le(apart, allowed)))


@public
def allclose(x: Tensor, y: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Return whether `isclose` is true everywhere; blocks until the device is done."""
    return bool(all(isclose(x, y, rtol, atol, equal_nan)).array.item())


@public
def equal(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors have the same shape and equal elements; blocks until the device is done."""
    a, b = array_of(x, "equal"), array_of(y, "equal")
    return a.shape == b.shape and bool(all(pw.eq(x, y)).array.item())


check_calls(globals(), ("ValuesAndIndices",))
