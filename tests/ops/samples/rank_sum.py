"""Rows for the sum over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError
from tests.ops.sampling import Case, Rows, normal


def _sum(total: Any, own: Any, others: Any, *, rank: int, adds: bool) -> tuple[Any, ...]:
    return (own + others.sum(0) + (total if adds else 0),)


def _cases(rng: np.random.Generator) -> list[Case]:
    def case(ranks: int, rank: int, length: int, adds: bool, wide: bool = False) -> Case:
        total = normal(rng, length).astype(np.float32 if wide else np.float64)
        return Case((total, normal(rng, length), normal(rng, ranks - 1, length)), {"rank": rank, "adds": adds})

    return [
        case(1, 0, 5, True),
        case(2, 1, 2050, False),
        case(2, 0, 33, True),
        *(case(3, rank, 37, rank == 1) for rank in range(3)),
        case(8, 5, 1, False),
        case(2, 0, 0, True),
    ]


def _bad(total: Any, own: Any, others: Any, rank: int = 0) -> Case:
    return Case((total, own, others), {"rank": rank, "adds": False})


A, ROWS_OF_A, N = np.zeros(3), np.zeros((1, 3)), np.zeros(3, np.int64)
ROWS = [
    Rows(
        "rank_sum",
        _sum,
        _cases,
        int_dtypes=("int64", "int32", "int16", "int8", "uint8"),
        errors=(
            (_bad(A, A, A), ShapeError, r"others' \[ranks - 1, n\]"),
            (_bad(np.zeros(4), A, ROWS_OF_A), ShapeError, r"got \(4,\)"),
            (_bad(A, A, ROWS_OF_A, 2), ShapeError, "rank 2 .* 2 ranks"),
            (_bad(A, A, np.zeros((1, 3), np.int64)), DTypeError, "one dtype"),
            (_bad(A, N, np.zeros((1, 3), np.int64)), DTypeError, "cannot be stored in"),
            (_bad(np.zeros(6)[::2], A, ROWS_OF_A), ShapeError, "contiguous"),
            (_bad(A > 0, A > 0, ROWS_OF_A > 0), DTypeError, "can be added"),
        ),
        strided=False,  # flat buffers are contiguous
        reduction=lambda case: int(case.inputs[2].shape[0]) + 2,
    )
]
