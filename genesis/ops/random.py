"""Random ops: results are pure functions of seed, offset and the element's position, the same on every device.

`genesis.random.philox` returns four 32-bit words per counter. With elements numbered in row-major order:

* 32-bit draws: element i takes word i % 4 of counter offset + i // 4.
* 64-bit draws: element i takes words 2j and 2j + 1 (the low half first), j = i % 2, of counter offset + i // 2.

The optional operand `position`, int64 `[2]`, is added to offset and seed modulo 2^64: a CUDA graph reads it at each
replay. Each op's docstring says how it uses its words. Draws are made in chunks, so that temporaries stay small; chunks
and threads do not affect values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import parallel
from genesis.dtypes import FLOAT, INTEGER, DType, float64, int64
from genesis.errors import DTypeError, NumericError, ShapeError, UsageError
from genesis.op import op, through
from genesis.ops.blocks import as_type, is_narrow
from genesis.random import philox
from genesis.shapes import Shape, numel

_CHUNK = 1 << 13  # counters per chunk; their 64-bit temporaries fit into the cache
UNIFORM_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}  # bits that each type holds exactly below 1

Values = Callable[[np.ndarray, slice], Any]
Position = Array | np.ndarray | None  # int64 `[2]`, added to offset and seed; see `Generator.positioned_by`


# --- From counters to elements ----------------------------------------------------------------------------------------


def _pairs(words: np.ndarray) -> np.ndarray:
    """Return uint64 `[n, 2]` from uint32 `[n, 4]`."""
    wide = words.astype(np.uint64)
    pairs: np.ndarray = wide[:, 0::2] | (wide[:, 1::2] << np.uint64(32))
    return pairs


def check_position(name: str, position: Any) -> None:
    """Raise ShapeError for a position that is not int64 `[2]`."""
    if position is not None and (position.shape != (2,) or position.dtype is not int64):
        raise ShapeError(f"{name}: a position {position.dtype.name} {position.shape} is not int64 (2,)")


def _generate(out: np.ndarray, at: tuple[Any, int, int], each: int, values: Values) -> None:
    """Fill `out` in chunks; `values(words [n, 4], elements)` returns a chunk of values, `each` per counter.

    `at` is (position, seed, offset).
    """
    position, seed, offset = at
    if position is not None:
        offset, seed = ((n + int(p)) % (1 << 64) for n, p in zip((offset, seed), position, strict=True))
    flat = out.reshape(-1) if out.flags.c_contiguous else np.empty(out.size, out.dtype)
    counters = -(-out.size // each)

    def piece(start: int, stop: int) -> None:
        for first in range(start * _CHUNK, min(stop * _CHUNK, counters), _CHUNK):
            count = min(_CHUNK, counters - first)
            at = slice(first * each, min((first + count) * each, out.size))
            chunk = np.reshape(values(philox(seed, offset + first, count), at), -1)
            flat[at] = chunk[: at.stop - at.start]

    parallel(piece, -(-counters // _CHUNK), out.size)
    if not out.flags.c_contiguous:
        np.copyto(out, flat.reshape(out.shape))


def words_for(dtype: DType, shape: Shape) -> int:
    """Return how many 32-bit words `uniform` or `normal` uses for a dtype and shape, for `Generator.reserve`."""
    return numel(shape) * (2 if dtype is float64 else 1)


def _creates(name: str, lowest: int) -> Callable[..., Spec]:
    """Return the rule of an op that creates a tensor whose dtype has category `lowest` or higher."""

    def infer(position: Position = None, *, shape: Shape, dtype: DType, **attrs: Any) -> Spec:
        check_position(name, position)
        if dtype.category < lowest:
            raise DTypeError(f"{name} cannot create {dtype.name} tensors", next="choose another dtype=")
        return Spec(tuple(shape), dtype)

    return infer


# --- Creation ---------------------------------------------------------------------------------------------------------


def _uniform_infer(position: Position = None, *, low: float, high: float, **attrs: Any) -> Spec:
    if not (low <= high and math.isfinite(high - low)):
        raise UsageError(f"uniform: no values between {low} and {high}", next="pass finite bounds with low <= high")
    return _creates("uniform", FLOAT)(position, **attrs)


@op("uniform", _uniform_infer)
def uniform(
    out: np.ndarray, position: Position = None, *, seed: int, offset: int, shape: Shape, dtype: DType, low: float,
    high: float,
) -> None:  # fmt: skip
    """y = low + u·(high - low), in [low, high), or low if both are equal.

    u is the upper b bits of the draw times 2^-b: b = 53 of a 64-bit draw for float64; of a 32-bit draw, b = 24 for
    float32, 11 for float16 and 8 for bfloat16. So u is exact in the dtype and never rounds to 1.
    """
    bits = UNIFORM_BITS[dtype.name]
    work = np.dtype(np.float32 if is_narrow(out.dtype) else out.dtype)
    end = out.dtype.type(high)
    below = np.nextafter(end, out.dtype.type(low))

    def values(words: np.ndarray, at: slice) -> np.ndarray:
        draws, width = (_pairs(words), 64) if dtype is float64 else (words, 32)
        u: np.ndarray = (draws >> draws.dtype.type(width - bits)).astype(work)
        u *= work.type(2.0**-bits)
        if (low, high) == (0, 1):
            return u
        u *= work.type(high - low)
        u += work.type(low)
        y = u.astype(out.dtype, copy=False)
        np.copyto(y, below, where=y >= end)  # rounding may have reached the open end
        return y

    _generate(out, (position, seed, offset), 2 if dtype is float64 else 4, values)


def _normal_infer(position: Position = None, *, std: float, **attrs: Any) -> Spec:
    if std < 0:
        raise UsageError(f"normal: a standard deviation of {std} is negative")
    return _creates("normal", FLOAT)(position, **attrs)


@op("normal", _normal_infer)
def normal(
    out: np.ndarray, position: Position = None, *, seed: int, offset: int, shape: Shape, dtype: DType, mean: float,
    std: float,
) -> None:  # fmt: skip
    """y = mean + std·z with standard normal z by Box and Muller, computed in float64.

    Elements are drawn in pairs from draws a (of the even element) and b (of the odd one) in (0, 1): the even element is
    √(-2 ln a)·cos 2πb, the odd one √(-2 ln a)·sin 2πb. For float64, a and b are (the upper 53 bits of a 64-bit draw +
    ½)·2^-53; for other dtypes, (a 32-bit draw + ½)·2^-32.
    """

    def values(words: np.ndarray, at: slice) -> np.ndarray:
        if dtype is float64:
            u = ((_pairs(words) >> np.uint64(11)) + 0.5) * 2.0**-53
        else:
            u = (words + 0.5) * 2.0**-32
        radius = np.log(u[:, 0::2])
        radius *= -2.0
        np.sqrt(radius, out=radius)
        radius *= std
        angle = u[:, 1::2] * (2 * math.pi)
        np.multiply(radius, np.cos(angle), out=u[:, 0::2])
        np.multiply(radius, np.sin(angle), out=u[:, 1::2])
        u += mean
        return u

    _generate(out, (position, seed, offset), 2 if dtype is float64 else 4, values)


def _randint_infer(position: Position = None, *, low: int, high: int, dtype: DType, **attrs: Any) -> Spec:
    if low >= high:
        raise UsageError(f"randint: no integers from {low} to below {high}", next="pass low < high")
    if dtype.category == INTEGER:
        info = np.iinfo(dtype.numpy)
        if low < info.min or high - 1 > info.max:
            raise DTypeError(f"randint: {low} to {high - 1} does not fit into {dtype.name}")
    elif high - low > 1 << 63:
        raise UsageError(f"randint: {low} to {high} is too wide for {dtype.name}")
    return _creates("randint", INTEGER)(position, dtype=dtype, **attrs)


@op("randint", _randint_infer)
def randint(
    out: np.ndarray, position: Position = None, *, seed: int, offset: int, shape: Shape, dtype: DType, low: int,
    high: int,
) -> None:  # fmt: skip
    """y = low + d mod (high - low) with a 64-bit draw d. The bias is below (high - low)·2^-64."""

    def values(words: np.ndarray, at: slice) -> np.ndarray:
        draws = _pairs(words)
        if high - low < 1 << 64:
            draws %= np.uint64(high - low)
        draws += np.uint64(low % (1 << 64))  # wraps around to negative numbers
        return draws.view(np.int64)

    _generate(out, (position, seed, offset), 2, values)


def _randperm_infer(position: Position = None, *, n: int, **attrs: Any) -> Spec:
    if n < 0:
        raise UsageError(f"randperm cannot have {n} elements", next="pass n >= 0")
    return _creates("randperm", INTEGER)(position, shape=(n,), **attrs)


@op("randperm", _randperm_infer)
def randperm(out: np.ndarray, position: Position = None, *, seed: int, offset: int, n: int, dtype: DType) -> None:
    """0 … n-1, sorted by a 64-bit draw for each; equal draws keep their order."""
    keys = np.empty(n, np.uint64)
    _generate(keys, (position, seed, offset), 2, lambda words, at: _pairs(words))
    out[...] = np.argsort(keys, kind="stable")


# --- Bernoulli and dropout --------------------------------------------------------------------------------------------


def _bernoulli_infer(p: Array, position: Position = None, *, seed: int, offset: int) -> Spec:
    check_position("bernoulli", position)
    if p.dtype.category != FLOAT:
        raise DTypeError(f"bernoulli takes float probabilities, got {p.dtype.name}", next="cast with .float()")
    return Spec(p.shape, p.dtype)


@op("bernoulli", _bernoulli_infer)
def bernoulli(out: np.ndarray, p: np.ndarray, position: Position = None, *, seed: int, offset: int) -> None:
    """y = 1 where a 32-bit draw is below p·2^32, else 0.

    Raises:
        NumericError: for a probability outside [0, 1].
    """
    flat = p.reshape(-1)

    def values(words: np.ndarray, at: slice) -> np.ndarray:
        chance = flat[at].astype(np.float64)
        wrong = ~((chance >= 0) & (chance <= 1))
        if wrong.any():
            raise NumericError(f"bernoulli: {chance[wrong][0]} is not a probability", next="pass values in [0, 1]")
        hit: np.ndarray = words.reshape(-1)[: len(chance)] < chance * 2.0**32
        return hit

    _generate(out, (position, seed, offset), 4, values)


def _dropout_infer(x: Array, position: Position = None, *, p: float, seed: int, offset: int) -> Spec:
    if not 0 <= p <= 1:
        raise UsageError(f"dropout: {p} is not a probability", next="pass p in [0, 1]")
    if x.dtype.category != FLOAT:
        raise DTypeError(f"dropout takes float tensors, got {x.dtype.name}", next="cast with .float()")
    check_position("dropout", position)
    return Spec(x.shape, x.dtype)


@op("dropout", _dropout_infer, vjp=through("dropout"), saves=(1,), elementwise=True)
def dropout(out: np.ndarray, x: np.ndarray, position: Position = None, *, p: float, seed: int, offset: int) -> None:
    """y = x / (1 - p) where a 32-bit draw is at least p·2^32 (rounded down), else x·0. dx = g with the same mask.

    The mask is not saved; backward draws it again.
    """
    flat = x.reshape(-1)
    work = np.dtype(np.float32 if is_narrow(x.dtype) else x.dtype)
    limit = np.uint32(min(int(p * 2.0**32), 0xFFFFFFFF))
    scale = work.type(1 / (1 - p) if p < 1 else 0)  # p = 1 drops everything

    def values(words: np.ndarray, at: slice) -> np.ndarray:
        part = as_type(flat[at], work)
        factor: np.ndarray = (words.reshape(-1)[: len(part)] >= limit) * scale
        factor *= part
        return factor

    _generate(out, (position, seed, offset), 4, values)


# --- Sampling categories ----------------------------------------------------------------------------------------------


def _multinomial_infer(
    p: Array, position: Position = None, *, num_samples: int, replacement: bool, seed: int, offset: int
) -> Spec:
    check_position("multinomial", position)
    if p.dtype.category != FLOAT:
        raise DTypeError(f"multinomial takes float weights, got {p.dtype.name}", next="cast with .float()")
    if p.ndim not in (1, 2) or p.shape[-1] == 0:
        raise ShapeError(f"multinomial takes weights [n] or [rows, n] with n > 0, got {p.shape}")
    if num_samples < 1 or (not replacement and num_samples > p.shape[-1]):
        raise ShapeError(
            f"multinomial cannot draw {num_samples} samples of {p.shape[-1]} categories",
            next="pass replacement=True",
        )
    return Spec((*p.shape[:-1], num_samples), int64)


def _checked_weights(row: np.ndarray, needed: int) -> np.ndarray:
    weights = row.astype(np.float64)
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise NumericError("multinomial: a weight is negative, infinite or NaN")
    if np.count_nonzero(weights) < needed:
        raise NumericError(f"multinomial: {needed} samples need as many categories with a weight above 0")
    return weights


def _by_position(weights: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return the categories into which `draws` in [0, 1) fall on the cumulative distribution of the weights."""
    ends = np.cumsum(weights)
    last = np.searchsorted(ends, ends[-1])  # rounding must not select a zero weight after the last positive one
    categories: np.ndarray = np.minimum(np.searchsorted(ends, draws * ends[-1], side="right"), last)
    return categories


def _by_gumbel_trick(weights: np.ndarray, draws: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` categories with the smallest exponential times, whose rates are the weights."""
    finish = np.full(len(weights), math.inf)
    np.divide(-np.log(draws), weights, out=finish, where=weights > 0)
    return np.argsort(finish, kind="stable")[:count]


@op("multinomial", _multinomial_infer)
def multinomial(
    out: np.ndarray, p: np.ndarray, position: Position = None, *, num_samples: int, replacement: bool, seed: int,
    offset: int,
) -> None:  # fmt: skip
    """Draw `num_samples` categories for each row of weights `[…, n]`, which need not add up to 1.

    With replacement, or for one sample: sample i is the category into which its 64-bit draw (the upper 53 bits times
    2^-53) falls on the cumulative distribution. Without replacement: category i of all rows' categories has the time
    -ln(a) / weight with a = (its 32-bit draw + ½)·2^-32, and the categories with the smallest times are returned in
    that order.

    Raises:
        NumericError: for negative, infinite or NaN weights, or too few weights above 0.
    """
    rows, n = p.reshape(-1, p.shape[-1]), p.shape[-1]
    result = np.empty((len(rows), num_samples), np.int64)
    if replacement or num_samples == 1:
        draws = np.empty(result.shape)
        _generate(draws, (position, seed, offset), 2, lambda words, at: (_pairs(words) >> np.uint64(11)) * 2.0**-53)
        for i, row in enumerate(rows):
            result[i] = _by_position(_checked_weights(row, 1), draws[i])
    else:
        times = np.empty((len(rows), n))
        _generate(times, (position, seed, offset), 4, lambda words, at: (words + 0.5) * 2.0**-32)
        for i, row in enumerate(rows):
            result[i] = _by_gumbel_trick(_checked_weights(row, num_samples), times[i], num_samples)
    out[...] = result.reshape(out.shape)
