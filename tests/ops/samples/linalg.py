"""Samples of matrix products; the oracles are sums of products written with einsum, in float64 or int64."""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError
from tests.ops.sampling import INTS, Case, Rows, normal

Shape = tuple[int, ...]

PRODUCTS: list[tuple[Shape, Shape]] = [
    ((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((1, 1), (1, 1)), ((5, 1), (1, 5)),
    ((2, 4, 3), (3, 5)), ((2, 4, 3), (3,)), ((3,), (2, 3, 4)), ((4, 3), (2, 3, 5)), ((2, 4, 3), (2, 3, 5)),
    ((2, 1, 4, 3), (5, 3, 2)), ((2, 2, 4, 3), (2, 1, 3, 2)), ((1, 4, 3), (3, 2)), ((2, 3, 4, 5), (5, 6)),
]  # fmt: skip
EMPTY: list[tuple[Shape, Shape]] = [
    ((0, 3), (3, 4)), ((2, 0), (0, 4)), ((2, 3), (3, 0)), ((0,), (0,)), ((0, 2, 3), (3, 4)), ((2, 0, 3), (2, 3, 1)),
]  # fmt: skip
LARGE: list[tuple[Shape, Shape]] = [((33, 70), (70, 17)), ((2, 9, 64), (64, 31))]


def products(rng: np.random.Generator) -> list[Case]:
    return [Case((normal(rng, *a), normal(rng, *b))) for a, b in PRODUCTS + EMPTY + LARGE]


def matmul_oracle(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    left = x if x.ndim > 1 else x[None]
    right = y if y.ndim > 1 else y[:, None]
    found: np.ndarray = np.sum(left[..., :, :, None] * right[..., None, :, :], axis=-2)
    found = found if x.ndim > 1 else np.squeeze(found, -2)
    return found if y.ndim > 1 else np.squeeze(found, -1)


LINEARS: list[tuple[Shape, int, bool]] = [
    ((4,), 3, True), ((2, 4), 3, False), ((2, 4), 3, True), ((2, 5, 4), 3, True), ((2, 5, 4), 3, False),
    ((1, 1), 1, True), ((0, 4), 3, True), ((2, 0, 4), 3, False), ((2, 3), 0, True), ((3, 0), 2, True),
]  # fmt: skip


def linears(rng: np.random.Generator) -> list[Case]:
    return [
        Case((normal(rng, *shape), normal(rng, out, shape[-1]), *((normal(rng, out),) if bias else ())))
        for shape, out, bias in LINEARS
    ]


def linear_oracle(x: np.ndarray, weight: np.ndarray, bias: Any = 0) -> np.ndarray:
    found: np.ndarray = np.sum(x[..., None, :] * weight, axis=-1) + bias
    return found


ROWS = [
    Rows(
        "matmul",
        matmul_oracle,
        products,
        int_dtypes=INTS,
        grads=lambda rng: [Case((normal(rng, *a), normal(rng, *b))) for a, b in PRODUCTS + EMPTY[:4]],
        reduction=lambda case: max(1, case.inputs[0].shape[-1]),
        errors=(
            (Case((np.zeros((2, 3)), np.zeros((2, 3)))), ShapeError, r"\(2, 3\) and \(2, 3\): the inner sizes 3 and 2"),
            (Case((np.zeros((2, 4, 3)), np.zeros((3, 3, 5)))), ShapeError, "do not broadcast"),
            (Case((np.zeros(()), np.zeros(3))), ShapeError, "at least 1 dimension"),
            (Case((np.zeros((2, 2)), np.zeros((2, 2), np.float32))), DTypeError, "float64 and float32"),
            (Case((np.zeros((2, 2), bool), np.zeros((2, 2), bool))), DTypeError, "does not take bool"),
        ),
    ),
    Rows(
        "linear",
        linear_oracle,
        linears,
        int_dtypes=INTS,
        grads=linears,
        reduction=lambda case: case.inputs[0].shape[-1] + 1,
        errors=(
            (Case((np.zeros((2, 3)), np.zeros((4, 2)))), ShapeError, r"\(2, 3\) with a weight of shape \(4, 2\)"),
            (Case((np.zeros((2, 3)), np.zeros((4, 3)), np.zeros(3))), ShapeError, r"a bias of shape \(3,\)"),
            (Case((np.zeros((2, 3)), np.zeros((4, 3), np.float32))), DTypeError, "float64 and float32"),
        ),
    ),
]
