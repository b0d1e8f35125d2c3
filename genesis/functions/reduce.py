"""Reductions, softmax, and comparisons of whole tensors, named and behaving as torch's.

`axis` is accepted for `dim` everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from genesis.autograd.modes import no_grad
from genesis.autograd.record import TensorBase, apply
from genesis.dtypes import as_dtype
from genesis.errors import DTypeError, UsageError
from genesis.functions import pointwise as pw
from genesis.functions.arguments import Dims, DTypeLike, Sizes, Tensor, integer, integers, number
from genesis.functions.elementwise import add, sub, to_dtype
from genesis.functions.make import as_operand
from genesis.functions.shape import array_of, sizes_of
from genesis.functions.surface import public
from genesis.keywords import check_calls
from genesis.op import Op
from genesis.ops import elementwise
from genesis.ops import reduce as ops
from genesis.ops import softmax as softmax_ops


class ValuesAndIndices(NamedTuple):
    """Selected elements and where along the dimension they stood."""

    values: Any
    indices: Any


# --- Arguments --------------------------------------------------------------------------------------------------------


def one_of(name: str, dim: Any, axis: Any) -> Any:
    """`dim`, or `axis`, which is its other name."""
    if axis is None:
        return dim
    if dim is not None:
        raise UsageError(f"{name} got both dim and axis", next="axis is another name for dim: give one")
    return axis


def _listed(name: str, dim: Dims, axis: Dims) -> int | tuple[int, ...] | None:
    """The op's `axes`."""
    found = one_of(name, dim, axis)
    return found if found is None or isinstance(found, int) else tuple(found)


def _dims(name: str, dim: Dims, axis: Dims) -> int | tuple[int, ...] | None:
    """The op's `axes`; an empty sequence means all dimensions, as in torch."""
    found = _listed(name, dim, axis)
    return None if found == () else found


def _as(x: Any, dtype: Any, name: str) -> Any:
    """x in the type that a reduction was asked to compute in."""
    array = array_of(x, name)
    if dtype is None or as_dtype(dtype) is array.dtype:
        return x
    return apply(elementwise.cast, x, dtype=as_dtype(dtype))


def _result(found: Any, dtype: Any, out: Any) -> Any:
    """The result in the type that was asked for: autocast widens floats while it is computed, integers count in int64
    and wrap around."""
    return found if dtype is None or out is not None else to_dtype(found, dtype)


# --- Sums, means, products --------------------------------------------------------------------------------------------


@public(also=("reduce_sum",))
def sum(
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: DTypeLike = None,
    axis: Dims = None,
    out: Tensor | None = None,
) -> Tensor:
    """Σ x over `dim` (all dimensions unless given); integers and bools give int64.

    Args:
        dtype: cast x to this type first.
    """
    found = apply(ops.sum, _as(x, dtype, "sum"), out=out, axes=_dims("sum", dim, axis), keepdim=keepdim)
    return _result(found, dtype, out)


@public(also=("reduce_mean",))
def mean(
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: DTypeLike = None,
    axis: Dims = None,
    out: Tensor | None = None,
) -> Tensor:
    """Σ x / n over `dim` (all dimensions unless given).

    Raises:
        DTypeError: for integers, unless `dtype` is a float type.
    """
    return apply(ops.mean, _as(x, dtype, "mean"), out=out, axes=_dims("mean", dim, axis), keepdim=keepdim)


@public(also=("reduce_prod",))
def prod(
    x: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: DTypeLike = None,
    axis: Dims = None,
    out: Tensor | None = None,
) -> Tensor:
    """Π x over `dim` (all dimensions unless given; several are allowed); integers and bools give int64."""
    found = apply(ops.prod, _as(x, dtype, "prod"), out=out, axes=_dims("prod", dim, axis), keepdim=keepdim)
    return _result(found, dtype, out)


def _spread(
    op: Op, x: Any, dim: Any, unbiased: bool, keepdim: bool, correction: float | None, axis: Dims, out: Any
) -> Any:
    array_of(x, op.name)
    if isinstance(dim, bool):  # x.var(False), torch's older form
        dim, unbiased = None, dim
    dim = None if dim is None else integers(dim, op.name, "dim")
    correction = float(unbiased) if correction is None else correction
    return apply(op, x, out=out, axes=_dims(op.name, dim, axis), keepdim=keepdim, correction=correction)


@public(also=("reduce_var",))
def var(
    x: Tensor,
    dim: Dims | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    axis: Dims = None,
    out: Tensor | None = None,
) -> Tensor:
    """Σ (x - mean)² / (n - correction) over `dim`.

    Args:
        correction: degrees of freedom taken off; without it, 1, or 0 where `unbiased` is False.
    """
    return _spread(ops.var, x, dim, unbiased, keepdim, correction, axis, out)


@public(also=("reduce_std",))
def std(
    x: Tensor,
    dim: Dims | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
    axis: Dims = None,
    out: Tensor | None = None,
) -> Tensor:
    """√`var`, with the same arguments; its gradient is 0 where it is 0."""
    return _spread(ops.std, x, dim, unbiased, keepdim, correction, axis, out)


@public(also=("reduce_count_nonzero",))
def count_nonzero(x: Tensor, dim: Dims = None, *, axis: Dims = None) -> Tensor:
    """How many elements over `dim` are not 0, as int64."""
    array_of(x, "count_nonzero")
    return apply(ops.count_nonzero, x, axes=_dims("count_nonzero", dim, axis))


@public(function=False)
def sum_to_size(x: Tensor, *size: Sizes) -> Tensor:
    """x summed over the dimensions that broadcasting `size` to x's shape repeats."""
    array_of(x, "sum_to_size")
    return apply(ops.sum_to_shape, x, shape=sizes_of(size, "sum_to_size"))


@public(method=False)
def sum_to_shape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x summed over the dimensions that broadcasting `shape` to x's shape repeats: the gradient of broadcasting."""
    array_of(x, "sum_to_shape")
    return apply(ops.sum_to_shape, x, shape=sizes_of((shape,), "sum_to_shape"))


@public
def cumsum(
    x: Tensor, dim: int | None = None, *, dtype: DTypeLike = None, axis: int | None = None, out: Tensor | None = None
) -> Tensor:
    """Running sums along `dim`; integers and bools give int64."""
    along = one_of("cumsum", dim, axis)
    if along is None:
        raise UsageError("cumsum needs a dimension", next="pass dim=")
    found = apply(ops.cumsum, _as(x, dtype, "cumsum"), out=out, axis=along)
    return _result(found, dtype, out)


# --- Extrema ----------------------------------------------------------------------------------------------------------


@public(also=("reduce_amax", "reduce_max"))
def amax(x: Tensor, dim: Dims = None, keepdim: bool = False, *, axis: Dims = None, out: Tensor | None = None) -> Tensor:
    """The largest element over `dim` (all dimensions unless given); equal ones share the gradient evenly."""
    array_of(x, "amax")
    return apply(ops.amax, x, out=out, axes=_dims("amax", dim, axis), keepdim=keepdim)


@public(also=("reduce_amin", "reduce_min"))
def amin(x: Tensor, dim: Dims = None, keepdim: bool = False, *, axis: Dims = None, out: Tensor | None = None) -> Tensor:
    """The smallest element over `dim` (all dimensions unless given); equal ones share the gradient evenly."""
    array_of(x, "amin")
    return apply(ops.amin, x, out=out, axes=_dims("amin", dim, axis), keepdim=keepdim)


def _extremum(ops_: tuple[Op, Op, Op], x: Any, dim: Any, keepdim: bool, other: Any, axis: int | None) -> Any:
    """The three forms of max and min: of everything, along one dimension, of two tensors."""
    whole, along, pairwise = ops_
    array_of(x, pairwise.name)
    if isinstance(dim, TensorBase):
        dim, other = None, dim
    dim = one_of(whole.name, dim, axis)
    if other is not None:
        if dim is not None:
            raise UsageError(f"{pairwise.name} of two tensors takes no dim")
        return apply(pairwise, x, as_operand(other, pairwise.name[:3]))
    if dim is None:
        return apply(whole, x)
    return ValuesAndIndices(*apply(along, x, axis=integer(dim, pairwise.name[:3], "dim"), keepdim=keepdim))


@public
def max(
    x: Tensor,
    dim: int | Tensor | None = None,
    keepdim: bool = False,
    *,
    other: Tensor | None = None,
    axis: int | None = None,
) -> Any:
    """The largest element of x; with `dim` (values, indices) along it; with a second tensor the larger of two."""
    return _extremum((ops.amax, ops.max_with_indices, elementwise.maximum), x, dim, keepdim, other, axis)


@public
def min(
    x: Tensor,
    dim: int | Tensor | None = None,
    keepdim: bool = False,
    *,
    other: Tensor | None = None,
    axis: int | None = None,
) -> Any:
    """The smallest element of x; with `dim` (values, indices) along it; with a second tensor the smaller of two."""
    return _extremum((ops.amin, ops.min_with_indices, elementwise.minimum), x, dim, keepdim, other, axis)


@public
def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False, *, axis: int | None = None) -> Tensor:
    """Position of the largest element (the first of equals) along `dim`, or in the flattened tensor."""
    array_of(x, "argmax")
    return apply(ops.argmax, x, axis=one_of("argmax", dim, axis), keepdim=keepdim)


@public
def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False, *, axis: int | None = None) -> Tensor:
    """Position of the smallest element (the first of equals) along `dim`, or in the flattened tensor."""
    array_of(x, "argmin")
    return apply(ops.argmin, x, axis=one_of("argmin", dim, axis), keepdim=keepdim)


# --- Truth ------------------------------------------------------------------------------------------------------------


@public(also=("reduce_any",))
def any(x: Tensor, dim: Dims = None, keepdim: bool = False, *, axis: Dims = None, out: Tensor | None = None) -> Tensor:
    """Whether an element over `dim` is not 0; an empty `dim` means none here, as in torch."""
    array_of(x, "any")
    return apply(ops.any, x, out=out, axes=_listed("any", dim, axis), keepdim=keepdim)


@public(also=("reduce_all",))
def all(x: Tensor, dim: Dims = None, keepdim: bool = False, *, axis: Dims = None, out: Tensor | None = None) -> Tensor:
    """Whether no element over `dim` is 0; an empty `dim` means none here, as in torch."""
    array_of(x, "all")
    return apply(ops.all, x, out=out, axes=_listed("all", dim, axis), keepdim=keepdim)


# --- Log of summed exponentials, norms --------------------------------------------------------------------------------


@public(also=("reduce_logsumexp",))
def logsumexp(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, axis: Dims = None, out: Tensor | None = None
) -> Tensor:
    """log Σ e^x over `dim` (all dimensions unless given)."""
    array_of(x, "logsumexp")
    return apply(ops.logsumexp, x, out=out, axes=_dims("logsumexp", dim, axis), keepdim=keepdim)


_NORMS = {"fro": 2.0, "inf": math.inf, "-inf": -math.inf}


@public(also=("reduce_norm",))
def norm(
    x: Tensor,
    p: float | str | None = 2.0,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: DTypeLike = None,
    axis: Dims = None,
    out: Tensor | None = None,
) -> Tensor:
    """The vector p-norm (Σ |x|^p)^(1/p) over `dim` (all dimensions unless given).

    Args:
        p: any number, ±∞ included; "fro" is 2.
        dtype: cast x to this type first.
    """
    p = 2.0 if p is None else p
    power = _NORMS.get(p) if isinstance(p, str) else float(number(p, "norm", "p"))
    if power is None:
        raise DTypeError(f"norm: p is {p!r}", next='give a number, "fro" or "inf"')
    found = apply(ops.norm, _as(x, dtype, "norm"), out=out, axes=_dims("norm", dim, axis), keepdim=keepdim, p=power)
    return _result(found, dtype, out)


check_calls(globals(), ("ValuesAndIndices",))


@public(nn=True)
def softmax(x: Tensor, dim: int, *, dtype: DTypeLike = None) -> Tensor:
    """e^x / Σ e^x along `dim`, computed in float32 or wider; `dtype` casts x first."""
    x = as_operand(x, "softmax")
    if dtype is None:
        return apply(softmax_ops.softmax, x, dim=dim)
    return to_dtype(apply(softmax_ops.softmax, to_dtype(x, dtype), dim=dim), dtype)  # autocast widens in between


@public(nn=True)
def log_softmax(x: Tensor, dim: int, *, dtype: DTypeLike = None) -> Tensor:
    """log softmax(x) along `dim`, without forming the softmax."""
    x = as_operand(x, "log_softmax")
    if dtype is None:
        return apply(softmax_ops.log_softmax, x, dim=dim)
    return to_dtype(apply(softmax_ops.log_softmax, to_dtype(x, dtype), dim=dim), dtype)  # autocast widens in between


# --- Comparisons of whole tensors -------------------------------------------------------------------------------------


@public
def isclose(x: Tensor, y: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """Where |x - y| <= atol + rtol·|y|, or both are equal, as bools.

    Args:
        equal_nan: whether NaN is close to NaN.

    Raises:
        DTypeError: if the two have different types.
        UsageError: for a negative tolerance.
    """
    a, b = array_of(x, "isclose"), array_of(y, "isclose")
    if a.dtype is not b.dtype:
        raise DTypeError(f"isclose of {a.dtype.name} and {b.dtype.name}", next="cast one with .to(...)")
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
    """Whether `isclose` holds everywhere; waits for the device."""
    return bool(all(isclose(x, y, rtol, atol, equal_nan)).array.item())


@public
def equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have one shape and equal elements; waits for the device."""
    a, b = array_of(x, "equal"), array_of(y, "equal")
    return a.shape == b.shape and bool(all(pw.eq(x, y)).array.item())
