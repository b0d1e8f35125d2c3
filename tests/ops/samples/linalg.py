"""Samples of matrix products; the oracles are sums of products written with einsum, in float64 or int64."""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.dtypes import bfloat16, float32, float64
from genesis.errors import DTypeError, ShapeError
from tests.ops.sampling import INTS, Case, Rows, normal, uniform

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


def linear_oracle(x: np.ndarray, weight: np.ndarray, bias: Any = None, residual: Any = None) -> np.ndarray:
    found: np.ndarray = np.sum(x[..., None, :] * weight, axis=-1)
    found = found if bias is None else found + bias
    return found if residual is None else found + residual


def residual_linears(rng: np.random.Generator) -> list[Case]:
    """Both with a bias and without one."""
    found = linears(rng)
    for shape, out, bias in LINEARS:
        inputs = (normal(rng, *shape), normal(rng, out, shape[-1]), normal(rng, out) if bias else None)
        found.append(Case((*inputs, normal(rng, *shape[:-1], out))))
    return found


PACKED: list[tuple[Shape, tuple[int, ...], bool]] = [
    ((4,), (3, 2), True), ((2, 4), (3,), False), ((2, 5, 4), (3, 1, 2), True), ((2, 5, 4), (2, 6), False),
    ((0, 4), (3, 2), True), ((2, 0, 4), (3, 3), False), ((2, 3), (0, 2), True), ((3, 0), (2, 1), True),
    ((19, 40), (64, 16, 16), True), ((3, 7, 33), (34, 34), False),
]  # fmt: skip


def packed_linears(rng: np.random.Generator) -> list[Case]:
    return [
        Case(
            (
                normal(rng, *shape),
                *(normal(rng, n, shape[-1]) for n in sizes),
                *(normal(rng, n) for n in sizes if bias),
            )
        )
        for shape, sizes, bias in PACKED
    ]


def packed_linear_oracle(x: np.ndarray, *parameters: np.ndarray) -> np.ndarray:
    weights = [p for p in parameters if p.ndim == 2]
    biases: list[Any] = [p for p in parameters if p.ndim == 1] or [None] * len(weights)
    return np.concatenate([linear_oracle(x, w, b) for w, b in zip(weights, biases, strict=True)], axis=-1)


def sums_of_products(rng: np.random.Generator) -> list[Case]:
    """x, y and what their product is added to."""
    found = []
    for case in products(rng):
        found.append(Case((*case.inputs, normal(rng, *matmul_oracle(*case.inputs).shape))))
    return found


def added_products(rng: np.random.Generator) -> list[Case]:
    return [Case((c.inputs[2], *c.inputs[:2])) for c in sums_of_products(rng)]


MATRICES: list[tuple[Shape, Shape]] = [
    ((2, 3), (3, 4)), ((2, 3, 5, 8), (2, 3, 8, 4)), ((1, 1), (1, 1)), ((2, 4, 3), (2, 3, 5)), ((33, 70), (70, 17)),
    ((2, 9, 64), (2, 64, 31)), ((0, 3), (3, 4)), ((2, 0), (0, 4)), ((0, 2, 3), (0, 3, 4)),
]  # fmt: skip


def mixed_products(rng: np.random.Generator) -> list[Case]:
    """Results in float32, of equal types and of float32 on either side, whose numbers add up to 1 at most."""
    found = []
    for a, b in MATRICES:
        found.append(Case((normal(rng, *a), normal(rng, *b)), {"dtype": float32, "alpha": 0.75}))
        shares = uniform(rng, 0.0, 1 / max(1, a[-1]), *a).astype(np.float32)
        found.append(Case((shares, normal(rng, *b)), {"dtype": float32}))
        found.append(Case((normal(rng, *b[:-2], b[-1], b[-2]), np.swapaxes(shares, -1, -2)), {"dtype": float32}))
    return found


def mixed_oracle(x: np.ndarray, y: np.ndarray, dtype: Any, alpha: float = 1.0) -> np.ndarray:
    return alpha * matmul_oracle(x.astype(np.float64), y.astype(np.float64))


ROWS = [
    Rows(
        "mixed_matmul",
        mixed_oracle,
        mixed_products,
        dtypes=("float32", "float16", "bfloat16"),
        grads=lambda rng: [
            Case((normal(rng, *a), normal(rng, *b)), {"dtype": float64, "alpha": -1.5}) for a, b in MATRICES[:4]
        ],
        reduction=lambda case: max(1, case.inputs[0].shape[-1]),
        inner=1,
        narrows=True,
        errors=(
            (Case((np.zeros((2, 3)), np.zeros((2, 3))), {"dtype": float64}), ShapeError, r"\[..., k, m\], got \(2, 3"),
            (Case((np.zeros((2, 4, 3)), np.zeros((3, 5))), {"dtype": float64}), ShapeError, "takes matrices"),
            (Case((np.zeros(3), np.zeros((3, 5))), {"dtype": float64}), ShapeError, "takes matrices"),
            (Case((np.zeros((2, 2)), np.zeros((2, 2))), {"dtype": float32}), DTypeError, "float64"),
            (Case((np.zeros((2, 2), int), np.zeros((2, 2), int)), {"dtype": float32}), DTypeError, "takes floats"),
            (
                Case((np.zeros((2, 2), np.float16), np.zeros((2, 2), bfloat16.numpy)), {"dtype": float32}),
                DTypeError,
                "must be float32",
            ),
        ),
    ),
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
        residual_linears,
        int_dtypes=INTS,
        grads=residual_linears,
        reduction=lambda case: case.inputs[0].shape[-1] + 2,
        errors=(
            (Case((np.zeros((2, 3)), np.zeros((4, 2)))), ShapeError, r"\(2, 3\) .* \(4, 2\)"),
            (Case((np.zeros((2, 3)), np.zeros((4, 3)), np.zeros(3))), ShapeError, r"a bias of shape \(3,\)"),
            (
                Case((np.zeros((2, 3)), np.zeros((4, 3)), None, np.zeros((4, 2)))),
                ShapeError,
                r"residual of shape \(4, 2",
            ),
            (Case((np.zeros((2, 3)), np.zeros((4, 3), np.float32))), DTypeError, "float64 and float32"),
        ),
    ),
    Rows(
        "packed_linear",
        packed_linear_oracle,
        packed_linears,
        int_dtypes=INTS,
        grads=lambda rng: packed_linears(rng)[:-2],
        reduction=lambda case: case.inputs[0].shape[-1] + 1,
        errors=(
            (Case((np.zeros((2, 3)), np.zeros((4, 3)), np.zeros((4, 2)))), ShapeError, r"a weight \(4, 2\)"),
            (Case((np.zeros((2, 3)), np.zeros((4, 3)), np.zeros((4, 3)), np.zeros(4))), ShapeError, "bias"),
            (Case((np.zeros((2, 3)),)), ShapeError, "one weight"),
        ),
    ),
    Rows(
        "matmul_add",
        lambda x, y, addend: matmul_oracle(x, y) + addend,
        sums_of_products,
        int_dtypes=INTS,
        reduction=lambda case: case.inputs[0].shape[-1] + 1,
        errors=((Case((np.zeros((2, 3)), np.zeros((3, 4)), np.zeros(4))), ShapeError, r"has shape \(2, 4\), not"),),
    ),
    Rows(
        "add_matmul",
        lambda target, x, y: target + matmul_oracle(x, y),
        added_products,
        int_dtypes=INTS,
        reduction=lambda case: case.inputs[1].shape[-1] + 1,
        errors=((Case((np.zeros(4), np.zeros((2, 3)), np.zeros((3, 4)))), ShapeError, r"has shape \(2, 4\), not"),),
        strided=False,  # an expanded target cannot be written
    ),
]
