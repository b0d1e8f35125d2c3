"""Ops on order and occurrence: sorting, the k largest, positions of nonzeros, counts, distinct values.

NaN counts as larger than every number, as in torch. Equal elements keep their order, also in topk, so results depend
only on values. An op whose result's size depends on values takes that size as the attribute `size`, which a counting op
computes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import parallel
from genesis.dtypes import INTEGER, float32, float64, int64
from genesis.errors import DTypeError, IndexRangeError, ShapeError
from genesis.op import Context, Grads, op
from genesis.ops.blocks import as_type, is_narrow
from genesis.ops.reduce import put_along_axis, reads, single_axis

Pair = tuple[np.ndarray, np.ndarray]

_INDEX_BITS = np.uint64(32)


# --- Order ------------------------------------------------------------------------------------------------------------


def _order_bits(x: np.ndarray) -> np.ndarray:
    """Return uint32 in the order of `x`, for dtypes of up to 4 bytes: NaN is the largest value, the zeros are equal."""
    sign = np.uint32(1 << 31)
    if x.dtype.kind in "iub":
        integers: np.ndarray = x.astype(np.int32).view(np.uint32) ^ sign
        return integers
    plain = as_type(x, np.dtype(np.float32)) + np.float32(0)  # -0 becomes 0
    bits = plain.view(np.uint32)
    ordered: np.ndarray = np.where(bits & sign, ~bits, bits | sign)
    ordered[np.isnan(plain)] = 0xFFFFFFFF
    return ordered


def _ranked(lines: np.ndarray, count: int, descending: bool) -> np.ndarray:
    """Return positions of the first `count` elements of each line `[n, length]` in stable order."""
    length = lines.shape[1]
    if lines.dtype.itemsize > 4:
        if not descending:
            return np.argsort(lines, axis=1, kind="stable")[:, :count]
        # Reversing twice keeps the order of equal elements.
        backward: np.ndarray = length - 1 - np.argsort(lines[:, ::-1], axis=1, kind="stable")[:, ::-1]
        return backward[:, :count]
    bits = _order_bits(lines)
    # One key holds value and position. Keys are distinct, so a fast unstable sort returns the stable order.
    keys = (~bits if descending else bits).astype(np.uint64) << _INDEX_BITS
    keys |= np.arange(length, dtype=np.uint64)
    if count < length // 4:
        keys = np.partition(keys, count, axis=1)[:, :count]
    keys.sort(axis=1)
    return (keys[:, :count] & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _take_ranked(out: Pair, x: np.ndarray, axis: int, count: int, descending: bool) -> None:
    """Write values and positions of the first `count` elements along `axis`."""
    values, positions = (np.moveaxis(np.atleast_1d(o), axis, -1) for o in out)
    moved = np.moveaxis(np.atleast_1d(x), axis, -1)
    if moved.size == 0:
        return
    lines = moved.reshape(-1, moved.shape[-1])
    ranked = np.empty((len(lines), count), np.int64)

    def piece(start: int, stop: int) -> None:
        ranked[start:stop] = _ranked(lines[start:stop], count, descending)

    parallel(piece, len(lines), x.size)
    positions[...] = ranked.reshape(positions.shape)
    values[...] = np.take_along_axis(lines, ranked, 1).reshape(values.shape)


def _ranked_vjp(ctx: Context, g: Array, _: Array | None) -> Grads:
    spec = ctx.spec(0)
    axis: int = ctx.attrs["axis"]
    return (put_along_axis(g, ctx.outputs[1], axis=axis, size=spec.shape[axis] if spec.shape else 1),)


def _comparisons(inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
    x: Array = inputs[0]
    length = x.shape[attrs["axis"]] if x.shape else 1
    return x.size * length.bit_length()


def _sort_infer(x: Array, axis: int, descending: bool = False) -> tuple[Spec, Spec]:
    single_axis("sort", x.shape, axis)
    return Spec(x.shape, x.dtype), Spec(x.shape, int64)


@op("sort", _sort_infer, vjp=_ranked_vjp, saves=("out1",), flops=_comparisons, torch="torch.sort")
def sort(out: Pair, x: np.ndarray, axis: int, descending: bool = False) -> None:
    """x sorted along `axis`, and the original position of each element; equal elements keep their order.

    dx = g at those positions.
    """
    _take_ranked(out, x, axis, x.shape[axis] if x.ndim else 1, descending)


def _topk_infer(x: Array, k: int, axis: int, largest: bool = True) -> tuple[Spec, Spec]:
    axis = single_axis("topk", x.shape, axis)
    length = x.shape[axis] if x.shape else 1
    if not (0 if x.shape else 1) <= k <= length:
        raise ShapeError(f"topk of shape {x.shape}: dimension {axis} has {length} elements, k is {k}")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :]) if x.shape else ()
    return Spec(shape, x.dtype), Spec(shape, int64)


@op("topk", _topk_infer, vjp=_ranked_vjp, saves=("out1",), flops=_comparisons)
def topk(out: Pair, x: np.ndarray, k: int, axis: int, largest: bool = True) -> None:
    """The k largest (or smallest) elements along `axis`, sorted, and their positions; of equals, the first ones.

    dx = g at those positions, 0 elsewhere.
    """
    if k:
        _take_ranked(out, x, axis, k, largest)


# --- Results whose size depends on values -----------------------------------------------------------------------------


def _as_bool(x: np.ndarray) -> np.ndarray:
    return x.astype(np.bool_, copy=False)


@op("nonzero_count", lambda x: Spec((), int64), flops=reads)
def nonzero_count(out: np.ndarray, x: np.ndarray) -> None:
    """Count the elements that are not 0: the `size` of `nonzero`."""
    out[...] = np.count_nonzero(_as_bool(x))


def _nonzero_infer(x: Array, size: int) -> Spec:
    if size < 0:
        raise ShapeError(f"nonzero: size {size} is negative")
    return Spec((size, x.ndim), int64)


@op("nonzero", _nonzero_infer, flops=reads)
def nonzero(out: np.ndarray, x: np.ndarray, size: int) -> None:
    """Indices `[size, ndim]` of the elements that are not 0, in row-major order.

    Raises:
        ShapeError: if their number is not `size`.
    """
    flat = np.flatnonzero(_as_bool(x))
    if len(flat) != size:
        raise ShapeError(f"nonzero: {len(flat)} elements are not 0, size is {size}", next="take it from nonzero_count")
    if x.ndim:
        np.stack(np.unravel_index(flat, x.shape), axis=1, out=out)


def _bincount_infer(x: Array, *weights: Array, size: int) -> Spec:
    if x.dtype.category != INTEGER or x.ndim != 1:
        raise DTypeError(f"bincount takes integers [n], got {x.dtype.name} {x.shape}", next="flatten() or cast it")
    if not weights:
        return Spec((size,), int64)
    if weights[0].shape != x.shape:
        raise ShapeError(f"bincount: weights {weights[0].shape} for values {x.shape}")
    return Spec((size,), float32 if weights[0].dtype is float32 else float64)


@op("bincount", _bincount_infer, flops=reads)
def bincount(out: np.ndarray, x: np.ndarray, *weights: np.ndarray, size: int) -> None:
    """How often each of 0 … size-1 occurs in x `[n]`; with weights `[n]`, sums of the weights in float64.

    Raises:
        IndexRangeError: for values outside that range.
    """
    wrong = x[(x < 0) | (x >= size)]
    if wrong.size:
        raise IndexRangeError(f"bincount: {wrong[0]} is not between 0 and {size - 1}")
    given = weights[0].astype(np.float64) if weights else None
    np.copyto(out, np.bincount(x.astype(np.int64), given, size), casting="unsafe")


def _comparable(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1).astype(np.float32) if is_narrow(x.dtype) else x.reshape(-1)


@op("unique_count", lambda x: Spec((), int64), flops=reads)
def unique_count(out: np.ndarray, x: np.ndarray) -> None:
    """Count the distinct values of x, where each NaN counts as one: the `size` of `unique`."""
    out[...] = len(np.unique(_comparable(x), equal_nan=False))


def _unique_infer(x: Array, size: int) -> tuple[Spec, Spec, Spec]:
    if size < 0:
        raise ShapeError(f"unique: size {size} is negative")
    return Spec((size,), x.dtype), Spec(x.shape, int64), Spec((size,), int64)


@op("unique", _unique_infer, flops=reads)
def unique(out: tuple[np.ndarray, np.ndarray, np.ndarray], x: np.ndarray, size: int) -> None:
    """The sorted distinct values of x, the position of each element of x among them, and their counts.

    Raises:
        ShapeError: if their number is not `size`.
    """
    values, inverse, counts = np.unique(_comparable(x), return_inverse=True, return_counts=True, equal_nan=False)
    if len(values) != size:
        raise ShapeError(f"unique: {len(values)} distinct values, size is {size}", next="take it from unique_count")
    np.copyto(out[0], values, casting="unsafe")
    out[1][...] = inverse.reshape(x.shape)
    out[2][...] = counts
