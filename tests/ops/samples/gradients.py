"""Rows for the norm of gradients and the factor that clips them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError
from tests.ops.sampling import Case, Rows, normal

SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (1,), (), (0,), (2, 0, 3), (4, 3, 2), (9001,))
A = np.ones((2, 3))
REPORT = np.array([7.0, 7.0, 7.0, 0.0], np.float32)


def _norm(*arrays: Any, ord: float) -> Any:
    flat = np.concatenate([np.zeros(0), *(np.ravel(x) for x in arrays)])
    return np.float64(np.linalg.norm(flat, ord)) if flat.size else np.float64(0)


def _factor(report: Any, loss: Any, *arrays: Any, max_norm: float | None) -> tuple[Any, ...]:
    norm = _norm(*arrays, ord=2.0)
    good = np.isfinite(loss) and np.isfinite(norm) and report[3] == 0
    factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    return (np.array([loss, norm, factor, 0.0] if good else [loss, norm, np.nan, np.nan]),)


def _norm_cases(rng: np.random.Generator) -> list[Case]:
    many = (normal(rng, 3, 4), normal(rng), normal(rng, 0), normal(rng, 5000))
    single = [Case((normal(rng, *shape),), {"ord": 2.0}) for shape in SHAPES]
    return [
        *single,
        *(Case(many, {"ord": o}) for o in (2.0, 1.0, 3.0, math.inf)),
        Case((normal(rng, 300_000),), {"ord": 2.0}),
    ]


def _factor_cases(rng: np.random.Generator) -> list[Case]:
    def case(loss: float, limit: float | None, *arrays: np.ndarray, mark: float = 0.0) -> Case:
        report = REPORT + np.array([0, 0, 0, mark], np.float32)
        return Case((report, np.array(loss, np.float32), *arrays), {"max_norm": limit})

    small, large = normal(rng, 7) * 1e-3, normal(rng, 70_000)
    return [
        case(2.5, 1.0, small, large),
        case(2.5, 1.0, small),
        case(2.5, None, large),
        case(2.5, 1.0),
        case(2.5, 1.0, normal(rng, 0)),
        case(math.nan, 1.0, small),
        case(math.inf, None, small),
        case(2.5, 1.0, np.array([1.0, math.inf])),
        case(2.5, None, np.array([1.0, math.nan])),
        case(2.5, 1.0, small, mark=math.nan),
    ]


def _length(case: Case) -> int:
    return max(2, sum(x.size for x in case.inputs if isinstance(x, np.ndarray)))


ROWS = [
    Rows(
        "total_norm",
        _norm,
        _norm_cases,
        errors=(
            (Case((A.astype(np.int64),), {"ord": 2.0}), DTypeError, "int64"),
            (Case((A,), {"ord": 0.0}), ShapeError, "order"),
        ),
        reduction=_length,
    ),
    Rows(
        "clip_factor",
        _factor,
        _factor_cases,
        errors=(
            (Case((A, np.ones(()), A), {"max_norm": 1.0}), ShapeError, "report of 4 numbers"),
            (Case((REPORT, A, A), {"max_norm": 1.0}), ShapeError, "loss of one number"),
            (Case((REPORT, np.ones(()), A.astype(np.int64)), {"max_norm": 1.0}), DTypeError, "clip_factor.*int64"),
        ),
        reduction=_length,
    ),
]
