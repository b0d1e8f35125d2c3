"""Rows for the norm of gradients and the factor that clips them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError
from genesis.ops.gradients import NORM_SPAN
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


def _spans(x: Any, of: int) -> Any:
    return np.array([np.square(x[i : i + NORM_SPAN].astype(np.float64)).sum() for i in range(0, x.size, NORM_SPAN)])


def _factor_of_ranks(report: Any, figures: Any, losses: int, max_norm: float | None) -> tuple[Any, ...]:
    norm = np.array([math.sqrt(figures[losses:].sum())])
    return _factor(report, figures[:losses].sum(), norm, max_norm=max_norm)


def _cases_of_ranks(rng: np.random.Generator) -> list[Case]:
    def case(losses: int, sums: np.ndarray, limit: float | None, mark: float = 0.0) -> Case:
        report = REPORT + np.array([0, 0, 0, mark], np.float32)
        figures = np.concatenate([rng.uniform(0.5, 2.0, losses), sums])
        return Case((report, figures), {"losses": losses, "max_norm": limit})

    sums = rng.uniform(0.5, 2.0, 70)
    found = [case(1, sums, 1.0), case(4, sums, None), case(3, sums[:1], 0.1), case(2, sums[:0], 1.0)]
    return [*found, case(2, sums * math.inf, 1.0), case(2, sums, 1.0, mark=math.nan)]


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
    Rows(
        "square_spans",
        _spans,
        lambda rng: [Case((normal(rng, n),), {"of": of}) for n, of in ((0, 5), (5, 5), (70_000, 70_000), (9, 40_000))],
        errors=(
            (Case((A,), {"of": 6}), ShapeError, "one dimension"),
            (Case((A[0],), {"of": 2}), ShapeError, "a part of 2 elements"),
            (Case((A[0].astype(np.int64),), {"of": 3}), DTypeError, "int64"),
        ),
        reduction=_length,
        seen=lambda outs: (outs[0].astype(np.float32),),  # squares are added in float32 first
    ),
    Rows(
        "clip_factor_of_ranks",
        _factor_of_ranks,
        _cases_of_ranks,
        dtypes=("float64",),
        errors=(
            (Case((A, A[0]), {"losses": 1, "max_norm": 1.0}), ShapeError, "report of 4 numbers"),
            (Case((REPORT, A), {"losses": 1, "max_norm": 1.0}), ShapeError, "1 losses and sums"),
            (Case((REPORT, A[0]), {"losses": 4, "max_norm": 1.0}), ShapeError, "4 losses and sums"),
        ),
        reduction=_length,
    ),
]
