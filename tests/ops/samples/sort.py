"""Samples of sorting and counting; the oracles go element by element or use numpy's other algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.errors import DTypeError, IndexRangeError, ShapeError
from tests.ops.sampling import INTS, Case, Rows, apart, integers, mask, normal, positive

WHOLE = (*INTS, "bool")


def sorted_lines(x: np.ndarray, axis: int, descending: bool = False) -> tuple[Any, Any]:
    """By Python's stable sort, line by line."""
    if x.ndim == 0:
        return x, np.int64(0)
    lines = np.moveaxis(x, axis, -1)
    found = np.empty(lines.shape, np.int64)
    for at in np.ndindex(lines.shape[:-1]):
        found[at] = sorted(range(lines.shape[-1]), key=lambda i: -float(lines[at][i]) if descending else lines[at][i])
    order = np.moveaxis(found, -1, axis)
    return np.take_along_axis(x, order, axis), order


def best(x: np.ndarray, k: int, axis: int, largest: bool = True) -> tuple[Any, Any]:
    """The head of the stable sort."""
    values, order = sorted_lines(x, axis, largest)
    if x.ndim == 0:
        return values, order
    head = np.arange(k)
    return np.take(values, head, axis), np.take(order, head, axis)


def sort_cases(rng: np.random.Generator) -> list[Case]:
    shapes = [((6,), 0), ((3, 4, 5), 0), ((3, 4, 5), 1), ((3, 4, 5), -1), ((), 0), ((1,), 0), ((0,), 0), ((2, 0, 3), 0)]
    found = [Case((normal(rng, *s),), {"axis": a, "descending": d}) for s, a in shapes for d in (False, True)]
    ties = [np.repeat(integers(rng, -2, 3, 5, 8), 2, axis=0), np.array([[0.0, -0.0, 1.0, -0.0, 0.0]])]
    wide = integers(rng, -(2**62), 2**62, 50)
    return found + [Case((x,), {"axis": -1, "descending": d}) for x in (*ties, wide) for d in (False, True)]


def top_cases(rng: np.random.Generator) -> list[Case]:
    shapes = [((9,), 4, 0), ((3, 4, 5), 2, 0), ((3, 4, 5), 4, 1), ((3, 4, 5), 1, -1), ((), 1, 0), ((1,), 1, 0)]
    shapes += [((0,), 0, 0), ((4, 3), 0, 1), ((0, 3), 2, 1), ((3, 200), 7, 1), ((200, 3), 7, 0)]
    found = [Case((normal(rng, *s),), {"k": k, "axis": a, "largest": d}) for s, k, a in shapes for d in (False, True)]
    ties = integers(rng, 0, 4, 3, 60)
    return found + [Case((ties,), {"k": 9, "axis": 1, "largest": d}) for d in (False, True)]


def holes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """About half zeros."""
    return np.where(mask(rng, *shape), positive(rng, *shape), 0.0)


def positions(x: np.ndarray, size: int) -> Any:
    """In row-major order, element by element."""
    found = [at for at in np.ndindex(x.shape) if x[at] != 0]
    return np.array(found, np.int64).reshape(size, x.ndim)


def nonzero_cases(rng: np.random.Generator) -> list[Case]:
    # floats have one row at most: the suite would repeat the first one and so change the count
    arrays = [holes(rng, *shape) for shape in ((1, 5), (1, 3, 4), (), (0, 3), (1, 1))]
    arrays += [mask(rng, *shape) for shape in ((3, 5), (2, 3, 4), (40, 7), (9,))]
    arrays += [np.zeros((1, 3)), np.array(5.0), np.array(0.0), integers(rng, -1, 2, 8)]
    return [Case((x,), {"size": int(sum(x[at] != 0 for at in np.ndindex(x.shape)))}) for x in arrays]


def counts(x: np.ndarray, *weights: np.ndarray, size: int) -> Any:
    """One element after another."""
    out = np.zeros(size, np.float64 if weights else np.int64)
    for i, value in enumerate(x):
        out[value] += weights[0][i] if weights else 1
    return out


def count_cases(rng: np.random.Generator) -> list[Case]:
    return [
        Case((integers(rng, 0, 6, 40),), {"size": 6}),
        Case((integers(rng, 0, 6, 40),), {"size": 9}),
        Case((integers(rng, 0, 1, 0),), {"size": 0}),
        Case((integers(rng, 0, 1, 0),), {"size": 3}),
        Case((integers(rng, 2, 3, 1),), {"size": 3}),
        Case((integers(rng, 0, 6, 40), normal(rng, 40)), {"size": 6}),
    ]


def distinct(x: np.ndarray, size: int) -> tuple[Any, Any, Any]:
    """By a set."""
    values = sorted(set(x.ravel().tolist()))
    inverse = np.array([values.index(v) for v in x.ravel().tolist()], np.int64).reshape(x.shape)
    return np.array(values, x.dtype), inverse, np.array([int((x == v).sum()) for v in values], np.int64)


def distinct_cases(rng: np.random.Generator) -> list[Case]:
    arrays = [integers(rng, -4, 5, *shape) for shape in ((20,), (4, 5), (), (1,), (0,), (0, 3))]
    # halves are exact in every float type, so that rounding merges no two; one row, as the suite may repeat the first
    halves = [integers(rng, -4, 5, *shape) / 2 for shape in ((1, 20), (1, 4, 5), (), (1,), (0,), (0, 3))]
    return [Case((x,), {"size": len(set(x.ravel().tolist()))}) for x in (*arrays, *halves, mask(rng, 3, 4))]


ROWS: list[Rows] = [
    Rows(
        "sort", sorted_lines, sort_cases, int_dtypes=WHOLE, exact=True,
        grads=lambda rng: [
            Case((apart(rng, 3, 4),), {"axis": 0}),
            Case((apart(rng, 3, 4),), {"axis": -1, "descending": True}),
            Case((apart(rng),), {"axis": 0}),
        ],
        errors=((Case((np.zeros((2, 3)),), {"axis": 2}), IndexRangeError, r"sort of shape \(2, 3\): dimension 2 is"),),
    ),
    Rows(
        "topk", best, top_cases, int_dtypes=WHOLE, exact=True,
        grads=lambda rng: [
            Case((apart(rng, 3, 4),), {"k": 2, "axis": 0}),
            Case((apart(rng, 3, 4),), {"k": 3, "axis": -1, "largest": False}),
            Case((apart(rng),), {"k": 1, "axis": 0}),
        ],
        errors=(
            (Case((np.zeros((2, 3)),), {"k": 4, "axis": 1}), ShapeError, r"topk of shape \(2, 3\): dimension 1 has 3"),
            (Case((np.zeros((2, 3)),), {"k": 1, "axis": 5}), IndexRangeError, r"topk of shape \(2, 3\): dimension 5"),
            (Case((np.zeros(3),), {"k": -1, "axis": 0}), ShapeError, "k is -1"),
        ),
    ),
    Rows(
        "nonzero_count", lambda x: np.int64(sum(x[at] != 0 for at in np.ndindex(x.shape))),
        lambda rng: [Case(c.inputs) for c in nonzero_cases(rng)], int_dtypes=WHOLE, exact=True,
        errors=((Case((), {}), TypeError, "missing"),),
    ),
    Rows(
        "nonzero", positions, nonzero_cases, exact=True,
        errors=(
            (Case((np.ones((2, 3)),), {"size": 5}), ShapeError, "nonzero: 6 elements are not 0, size is 5"),
            (Case((np.ones((2, 3)),), {"size": -1}), ShapeError, "nonzero: size -1 is negative"),
        ),
    ),
    Rows(
        "bincount", counts, count_cases, reduction=lambda c: len(c.inputs) * 20 - 19,
        errors=(
            (Case((np.array([0, 3]),), {"size": 3}), IndexRangeError, "bincount: 3 is not between 0 and 2"),
            (Case((np.array([-1, 3]),), {"size": 9}), IndexRangeError, "bincount: -1 is not between"),
            (Case((np.zeros(3),), {"size": 3}), DTypeError, "bincount takes integers"),
            (Case((np.zeros((3, 1), np.int64),), {"size": 3}), DTypeError, r"got int64 \(3, 1\)"),
            (Case((np.zeros(3, np.int64), np.zeros(2)), {"size": 3}), ShapeError, r"weights \(2,\) for values \(3,\)"),
        ),
    ),
    Rows(
        "unique_count", lambda x: np.int64(len(set(x.ravel().tolist()))),
        lambda rng: [Case(c.inputs) for c in distinct_cases(rng)], exact=True,
        errors=((Case((), {}), TypeError, "missing"),),
    ),
    Rows(
        "unique", distinct, distinct_cases, exact=True,
        errors=(
            (Case((np.array([1, 1, 2]),), {"size": 3}), ShapeError, "unique: 2 distinct values, size is 3"),
            (Case((np.array([1, 1, 2]),), {"size": -3}), ShapeError, "unique: size -3 is negative"),
        ),
    ),
]  # fmt: skip
