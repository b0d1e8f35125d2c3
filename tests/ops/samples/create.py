"""Samples of the ops that make values from numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.dtypes import bool_, float32, float64, int16, int64
from genesis.errors import DTypeError, ShapeError
from tests.ops.sampling import Case, Rows

RANGES: list[dict[str, Any]] = [
    {"start": 0, "step": 1, "count": 5, "dtype": int64},
    {"start": 2**60, "step": -3, "count": 4, "dtype": int64},  # exact beyond float64's integers
    {"start": -7, "step": 2, "count": 3, "dtype": int16},
    {"start": 0.5, "step": 0.25, "count": 6, "dtype": float32},
    {"start": 1, "step": -0.1, "count": 7, "dtype": float64},
    {"start": 3, "step": 1, "count": 0, "dtype": float32},
]
LINES: list[dict[str, Any]] = [
    {"start": 0.0, "end": 1.0, "count": 11, "dtype": float64},
    {"start": 3.0, "end": -2.0, "count": 5, "dtype": float32},
    {"start": 2.5, "end": 9.0, "count": 1, "dtype": float32},
    {"start": 0, "end": 10, "count": 4, "dtype": int64},
    {"start": 0.0, "end": 1.0, "count": 0, "dtype": float32},
]


def arange_oracle(start: Any, step: Any, count: int, dtype: Any) -> np.ndarray:
    return np.array([start + step * i for i in range(count)], dtype.numpy)


def linspace_oracle(start: float, end: float, count: int, dtype: Any) -> np.ndarray:
    """A weighted mean of the ends."""
    last = max(count - 1, 1)
    return np.array([(start * (last - i) + end * i) / last for i in range(count)], np.float64).astype(dtype.numpy)


ROWS = [
    Rows(
        name,
        oracle,
        lambda rng, made=made: [Case((), attrs) for attrs in made],  # type: ignore[misc]
        dtypes=("float64",),
        errors=(
            (Case((), made[0] | {"count": -1}), ShapeError, "range .*-1 elements"),
            (Case((), made[0] | {"dtype": bool_}), DTypeError, "range"),
        ),
    )
    for name, oracle, made in (("arange", arange_oracle, RANGES), ("linspace", linspace_oracle, LINES))
]
