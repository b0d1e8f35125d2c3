"""Samples of random ops; the oracles draw Philox words in Python integers and follow the documented layout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genesis import dtypes
from genesis.dtypes import DType
from genesis.errors import DTypeError, NumericError, ShapeError, UsageError
from tests.ops.sampling import Case, Rows, normal, positive

BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
KINDS = (dtypes.float64, dtypes.float32, dtypes.float16, dtypes.bfloat16)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (2, 3), (0, 3), (5, 1, 7))
START = {"seed": 2**63 + 12345, "offset": 2**32 - 2}  # crosses into the upper half of the counter


def block(seed: int, counter: int) -> tuple[int, ...]:
    """Philox 4x32-10 of one counter, from the paper's definition."""
    words = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [(b >> 32) ^ words[1] ^ key[0], b & 0xFFFFFFFF, (a >> 32) ^ words[3] ^ key[1], a & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(words)


def draw32(seed: int, offset: int, i: int) -> int:
    """The 32-bit draw of element i."""
    return block(seed, offset + i // 4)[i % 4]


def draw64(seed: int, offset: int, i: int) -> int:
    """The 64-bit draw of element i."""
    words = block(seed, offset + i // 2)
    j = i % 2
    return words[2 * j] | words[2 * j + 1] << 32


def each(shape: tuple[int, ...], value: Any) -> np.ndarray:
    """`value(i)` for all flat positions."""
    return np.array([value(i) for i in range(math.prod(shape))]).reshape(shape)


def uniform(*, seed: int, offset: int, shape: tuple[int, ...], dtype: DType, low: float, high: float) -> np.ndarray:
    bits = BITS[dtype.name]

    def value(i: int) -> float:
        draw = draw64(seed, offset, i) >> (64 - 53) if bits == 53 else draw32(seed, offset, i) >> (32 - bits)
        return low + math.ldexp(draw, -bits) * (high - low)

    return each(shape, value).astype(np.float64)


def gauss(*, seed: int, offset: int, shape: tuple[int, ...], dtype: DType, mean: float, std: float) -> np.ndarray:
    def open_unit(i: int) -> float:
        if dtype is dtypes.float64:
            return ((draw64(seed, offset, i) >> 11) + 0.5) * 2.0**-53
        return (draw32(seed, offset, i) + 0.5) * 2.0**-32

    def value(i: int) -> float:
        even = i - i % 2
        turn = (math.sin if i % 2 else math.cos)(2 * math.pi * open_unit(even + 1))
        return mean + std * math.sqrt(-2 * math.log(open_unit(even))) * turn

    return each(shape, value).astype(np.float64)


def integers(*, seed: int, offset: int, shape: tuple[int, ...], dtype: DType, low: int, high: int) -> np.ndarray:
    made = each(shape, lambda i: low + draw64(seed, offset, i) % (high - low))
    return made.astype(np.float64 if dtype.is_floating_point else np.int64)


def permutation(*, seed: int, offset: int, n: int, dtype: DType) -> np.ndarray:
    return np.array(sorted(range(n), key=lambda i: draw64(seed, offset, i)), np.int64)


def coins(p: np.ndarray, *, seed: int, offset: int) -> np.ndarray:
    flat = p.ravel()
    return each(p.shape, lambda i: float(draw32(seed, offset, i) < flat[i] * 2**32)).astype(np.float64)


def dropout(x: np.ndarray, position: Any = (0, 0), *, p: float, seed: int, offset: int) -> np.ndarray:
    offset, seed = offset + int(position[0]), (seed + int(position[1])) % 2**64
    if p == 1:
        return x * 0
    return x / (1 - p) * each(x.shape, lambda i: float(draw32(seed, offset, i) >= int(p * 2**32))).astype(np.float64)


def categories(p: np.ndarray, *, num_samples: int, replacement: bool, seed: int, offset: int) -> np.ndarray:
    rows = p.reshape(-1, p.shape[-1])
    n, found = p.shape[-1], []
    for r, weights in enumerate(rows.tolist()):
        if replacement or num_samples == 1:
            for j in range(num_samples):
                target = (draw64(seed, offset, r * num_samples + j) >> 11) * 2.0**-53 * sum_of(weights)
                found.append(next(c for c in range(n) if sum_of(weights[: c + 1]) > target))
        else:
            finish = [
                -math.log((draw32(seed, offset, r * n + c) + 0.5) * 2.0**-32) / w if w else math.inf
                for c, w in enumerate(weights)
            ]
            found += sorted(range(n), key=finish.__getitem__)[:num_samples]
    return np.array(found, np.int64).reshape(*p.shape[:-1], num_samples)


def sum_of(values: list[float]) -> float:
    """From the left, as a running sum does it (Python's own sum compensates rounding)."""
    total = 0.0
    for value in values:
        total += value
    return total


def created(**attrs: Any) -> list[Case]:
    return [Case((), {**START, "shape": s, "dtype": d, **attrs}) for s in SHAPES for d in KINDS]


def integer_cases(rng: np.random.Generator) -> list[Case]:
    ranges: list[tuple[int, int, DType]] = [
        (0, 10, dtypes.int64), (-5, 6, dtypes.int32), (0, 256, dtypes.uint8), (-128, 128, dtypes.int8),
        (3, 4, dtypes.int16),
        (-(2**63), 2**63, dtypes.int64), (0, 2**63, dtypes.int64), (-100, 100, dtypes.float32), (0, 9, dtypes.bfloat16),
    ]  # fmt: skip
    return [Case((), {**START, "shape": s, "dtype": d, "low": a, "high": b}) for s in SHAPES for a, b, d in ranges]


def dropout_cases(rng: np.random.Generator) -> list[Case]:
    return [Case((normal(rng, *s),), {**START, "p": p}) for s in SHAPES for p in (0.0, 0.1, 0.5, 0.9, 1.0)]


def positioned_dropouts(rng: np.random.Generator) -> list[Case]:
    """With a part of the offset and of the seed in memory, above and below 2^32."""
    at = ((3, 0), (1 << 40, 1), (2**32 + 5, -(2**63)), (1, -1), (0, 2**62))
    return [Case((normal(rng, *s), np.array(n)), {**START, "p": 0.3}) for s, n in zip(SHAPES, at, strict=True)][::-1]


def category_cases(rng: np.random.Generator) -> list[Case]:
    holes = np.array([[0.0, 2.0, 0.0, 1.0, 0.0], [3.0, 0.5, 0.25, 0.0, 0.0]])
    found = []
    for weights in (positive(rng, 7), positive(rng, 3, 5), holes, positive(rng, 1)):
        for count, replacement in ((1, False), (1, True), (9, True), (min(2, weights.shape[-1]), False)):
            attrs = {**START, "num_samples": count, "replacement": replacement}
            found.append(Case((weights,), attrs))
    return found


AT = {"seed": 0, "offset": 0}
NEW = {**AT, "shape": (2,)}


def _bad_weights(weights: Any, message: str, count: int = 1) -> tuple[Case, type[Exception], str]:
    return Case((np.array(weights),), {**AT, "num_samples": count, "replacement": False}), NumericError, message


ROWS: list[Rows] = [
    Rows(
        "uniform", uniform, lambda rng: created(low=0.0, high=1.0) + created(low=-2.0, high=2.0), exact=True,
        dtypes=("float64",),
        errors=(
            (Case((), {**NEW, "dtype": dtypes.int64, "low": 0, "high": 1}), DTypeError, "uniform .*int64"),
            (Case((), {**NEW, "dtype": dtypes.float32, "low": 1, "high": 0}), UsageError, "no values between 1 and 0"),
        ),
    ),
    Rows(
        "normal", gauss, lambda rng: created(mean=0.0, std=1.0) + created(mean=3.0, std=0.5), dtypes=("float64",),
        reduction=lambda case: 2,
        errors=(
            (Case((), {**NEW, "dtype": dtypes.bool_, "mean": 0, "std": 1}), DTypeError, "normal .*bool"),
            (Case((), {**NEW, "dtype": dtypes.float32, "mean": 0, "std": -1}), UsageError, "deviation of -1 is neg"),
        ),
    ),
    Rows(
        "randint", integers, integer_cases, dtypes=("float64",), exact=True,
        errors=(
            (Case((), {**NEW, "dtype": dtypes.int64, "low": 2, "high": 2}), UsageError, "no integers from 2"),
            (Case((), {**NEW, "dtype": dtypes.uint8, "low": 0, "high": 257}), DTypeError, "0 to 256 does not fit"),
            (Case((), {**NEW, "dtype": dtypes.float32, "low": -1, "high": 2**63}), UsageError, "too wide for float32"),
            (Case((), {**NEW, "dtype": dtypes.bool_, "low": 0, "high": 2}), DTypeError, "randint .*bool"),
        ),
    ),
    Rows(
        "randperm", permutation,
        lambda rng: [Case((), {**START, "n": n, "dtype": dtypes.int64}) for n in (0, 1, 2, 50)],
        dtypes=("float64",), exact=True,
        errors=(
            (Case((), {**AT, "n": -1, "dtype": dtypes.int64}), UsageError, "randperm .*-1 elements"),
            (Case((), {**AT, "n": 3, "dtype": dtypes.bool_}), DTypeError, "randperm .*bool"),
        ),
    ),
    Rows(
        "bernoulli", coins, lambda rng: [Case((rng.random(s),), START) for s in SHAPES]
        + [Case((np.array([0.0, 1.0] * 8),), START)], exact=True,
        errors=(
            (Case((np.array([0.5, 1.5]),), AT), NumericError, "1.5 is not a probability"),
            (Case((np.array([math.nan]),), AT), NumericError, "nan is not a probability"),
            (Case((np.array([1]),), AT), DTypeError, "takes float probabilities, got int64"),
        ),
    ),
    Rows(
        "dropout", dropout, dropout_cases,
        grads=lambda rng: [Case((normal(rng, 3, 4),), {**START, "p": 0.3})],
        errors=(
            (Case((np.ones(2),), {**AT, "p": 1.5}), UsageError, "dropout: 1.5 is not a probability"),
            (Case((np.ones(2, np.int64),), {**AT, "p": 0.5}), DTypeError, "dropout takes float tensors, got int64"),
        ),
    ),
    Rows(
        "dropout", dropout, positioned_dropouts, extremes=False,  # a position is two words
        grads=lambda rng: [Case((normal(rng, 3, 4), np.array([1 << 35, 9])), {**START, "p": 0.3})],
        errors=((Case((np.ones(2), np.ones(1)), {**AT, "p": 0.5}), ShapeError, r"not int64 \(2,\)"),),
    ),
    Rows(
        "multinomial", categories, category_cases, exact=True,
        errors=(
            _bad_weights([1.0, -1.0], "negative, infinite or NaN"),
            _bad_weights([1.0, math.inf], "negative, infinite or NaN"),
            _bad_weights([0.0, 0.0], "need as many categories with a weight above 0"),
            _bad_weights([1.0, 0.0], "2 samples need as many categories", 2),
            (
                Case((np.ones(2),), {**AT, "num_samples": 3, "replacement": False}),
                ShapeError,
                "3 samples of 2 categories",
            ),
            (Case((np.ones((2, 2, 2)),), {**AT, "num_samples": 1, "replacement": True}), ShapeError, r"\(2, 2, 2\)"),
            (Case((np.ones(2, np.int64),), {**AT, "num_samples": 1, "replacement": True}), DTypeError, "float weights"),
        ),
    ),
]  # fmt: skip
