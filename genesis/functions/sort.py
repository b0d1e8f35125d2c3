"""Sorting, counting and finding in tensors, named and behaving as torch's. Equal elements always keep their order."""

from __future__ import annotations

from typing import Any

from genesis.autograd.record import TensorBase, apply
from genesis.dtypes import INTEGER
from genesis.errors import UsageError
from genesis.functions.arguments import Tensor
from genesis.functions.reduce import ValuesAndIndices, one_of
from genesis.functions.shape import array_of
from genesis.functions.surface import public
from genesis.ops import reduce as reduce_ops
from genesis.ops import sort as ops


def _last(name: str, dim: int | None, axis: int | None) -> int:
    """The dimension to work along: the last one unless given."""
    found = one_of(name, dim, axis)
    return -1 if found is None else found


@public
def sort(
    x: Tensor, dim: int | None = None, descending: bool = False, stable: bool = True, *, axis: int | None = None
) -> ValuesAndIndices:
    """x in order along `dim` (the last one unless given), and where each element came from.

    NaN counts as the largest value. The sort is stable whatever `stable` says.
    """
    array_of(x, "sort")
    return ValuesAndIndices(*apply(ops.sort, x, axis=_last("sort", dim, axis), descending=descending))


@public
def argsort(
    x: Tensor, dim: int | None = None, descending: bool = False, stable: bool = True, *, axis: int | None = None
) -> Tensor:
    """The indices of `sort`."""
    return sort(x, dim, descending, stable, axis=axis).indices


@public
def topk(
    x: Tensor, k: int, dim: int | None = None, largest: bool = True, sorted: bool = True, *, axis: int | None = None
) -> ValuesAndIndices:
    """The k largest (or smallest) elements along `dim` (the last one unless given), and their positions.

    They come in order whatever `sorted` says; of equals the first ones are taken.
    """
    array_of(x, "topk")
    return ValuesAndIndices(*apply(ops.topk, x, k=k, axis=_last("topk", dim, axis), largest=largest))


@public
def nonzero(x: Tensor, as_tuple: bool = False) -> Any:
    """Indices `[n, ndim]` of the elements that are not 0, in row-major order; n is read from the device once.

    Args:
        as_tuple: give one `[n]` tensor for each dimension instead (views of one table).
    """
    array = array_of(x, "nonzero")
    if as_tuple and not array.shape:
        return (apply(ops.nonzero, TensorBase.wrap(array.view((1,), (1,))), size=_count(x)).reshape(-1),)
    found = apply(ops.nonzero, x, size=_count(x))
    return tuple(found[:, i] for i in range(array.ndim)) if as_tuple else found


def _count(x: Any) -> int:
    count: int = apply(ops.nonzero_count, x).array.item()
    return count


@public
def bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each value occurs in x `[n]` (integers from 0 on), or the sums of the `weights` at each.

    Returns:
        `[max(x.max() + 1, minlength)]`; the largest value is read from the device once.
    """
    array = array_of(x, "bincount")
    if minlength < 0:
        raise UsageError(f"bincount: minlength {minlength} is negative")
    size = minlength
    if array.size and array.dtype.category == INTEGER:
        size = max(size, 1 + apply(reduce_ops.amax, x).array.item())
    return apply(ops.bincount, x, *(() if weights is None else (weights,)), size=size)


@public
def unique(x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    """The distinct values of the flattened x in order; their number is read from the device once.

    Args:
        return_inverse: give also the position of each element's value among them, in x's shape.
        return_counts: give also how often each occurs.
    """
    array_of(x, "unique")
    size = apply(ops.unique_count, x).array.item()
    values, inverse, counts = apply(ops.unique, x, size=size)
    extra = (*((inverse,) if return_inverse else ()), *((counts,) if return_counts else ()))
    return (values, *extra) if extra else values
