"""`genesis.linalg`: values against numpy in float64, gradients against differences, and the errors of LAPACK."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import linalg
from genesis.autograd import gradcheck
from genesis.errors import GenesisError

RNG = np.random.default_rng(45)
SQUARE = RNG.standard_normal((2, 3, 3)) + 3 * np.eye(3)
TALL, WIDE = RNG.standard_normal((4, 3)), RNG.standard_normal((3, 5))

# Functions whose results do not depend on signs of vectors, and their arguments.
DIFFERENTIABLE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "cholesky": (lambda a: linalg.cholesky(a @ a.mT), (SQUARE,)),
    "upper cholesky": (lambda a: linalg.cholesky(a @ a.mT, upper=True), (SQUARE,)),
    "det": (linalg.det, (SQUARE,)),
    "det of a singular matrix": (linalg.det, (np.diag([2.0, 3.0, 0.0]),)),
    "slogdet": (lambda a: linalg.slogdet(a)[1], (SQUARE,)),
    "inv": (linalg.inv, (SQUARE,)),
    "solve": (linalg.solve, (SQUARE, RNG.standard_normal((3, 2)))),
    "solve from the right": (lambda a, b: linalg.solve(a, b, left=False), (SQUARE, TALL)),
    "solve_triangular": (
        lambda a, b: linalg.solve_triangular(a, b, upper=True),
        (SQUARE, RNG.standard_normal((3, 2))),
    ),
    "lu of a wide matrix": (lambda a: linalg.lu(a)[1:], (WIDE,)),
    "lu of a tall matrix": (lambda a: linalg.lu(a)[1:], (TALL,)),
    "qr of a wide matrix": (linalg.qr, (WIDE,)),
    "qr of a tall matrix": (linalg.qr, (TALL,)),
    "svd": (lambda a: (linalg.svd(a, False)[0] ** 2, linalg.svd(a)[1]), (TALL,)),
    "right singular vectors": (lambda a: linalg.svd(a, False)[2] ** 2, (WIDE,)),
    "eigh": (lambda a: (linalg.eigvalsh(a + a.mT), linalg.eigh(a + a.mT)[1] ** 2), (SQUARE,)),
    "pinv": (linalg.pinv, (TALL,)),
    "matrix_exp": (linalg.matrix_exp, (SQUARE,)),
    "matrix_norm": (lambda a: linalg.matrix_norm(a, "nuc"), (SQUARE,)),
    "householder_product": (linalg.householder_product, (TALL, RNG.standard_normal(3))),
    "lstsq": (lambda a, b: linalg.lstsq(a, b)[0], (TALL, RNG.standard_normal((4, 2)))),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str) -> None:
    function, arrays = DIFFERENTIABLE[name]
    assert gradcheck(function, [genesis.tensor(a, dtype=genesis.float64, requires_grad=True) for a in arrays])


@pytest.mark.parametrize("array", [SQUARE, TALL, WIDE, TALL.T[:, ::-1], np.zeros((2, 0, 3))], ids=lambda a: a.shape)
def test_factors_multiply_to_the_matrix(array: np.ndarray) -> None:
    a = genesis.tensor(np.ascontiguousarray(array), dtype=genesis.float64)
    q, r = linalg.qr(a)
    u, s, vh = linalg.svd(a, full_matrices=False)
    p, lower, upper = linalg.lu(a)
    for product in (q @ r, (u * s.unsqueeze(-2)) @ vh, p @ lower @ upper):
        np.testing.assert_allclose(product.numpy(), array, atol=1e-12)


def test_values_are_numpys() -> None:
    a = genesis.tensor(SQUARE, dtype=genesis.float64)
    expected = {
        linalg.det: np.linalg.det, linalg.inv: np.linalg.inv, linalg.cond: np.linalg.cond, linalg.pinv: np.linalg.pinv,
        linalg.svdvals: lambda x: np.linalg.svd(x, compute_uv=False), linalg.matrix_rank: np.linalg.matrix_rank,
    }  # fmt: skip
    for ours, numpys in expected.items():
        np.testing.assert_allclose(ours(a).numpy(), numpys(SQUARE), rtol=1e-10)
    for order in ("fro", "nuc", math.inf, -math.inf, 1, -1, 2, -2):
        found = linalg.matrix_norm(a, order, keepdim=True)
        np.testing.assert_allclose(found.numpy(), np.linalg.norm(SQUARE, order, (-2, -1), keepdims=True), rtol=1e-12)
    values, vectors = np.linalg.eigh(SQUARE[0] + SQUARE[0].T)
    expo = (vectors * np.exp(values)) @ vectors.T
    np.testing.assert_allclose(linalg.matrix_exp(a[0] + a[0].mT).numpy(), expo, rtol=1e-11)


def test_out_is_filled_and_resized() -> None:
    a, out = genesis.tensor(SQUARE), genesis.empty(0, dtype=genesis.float64)
    assert linalg.inv(a, out=out) is out and genesis.allclose(a @ out, genesis.eye(3, dtype=genesis.float64))


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda: linalg.inv(genesis.zeros(2, 2)), linalg.LinAlgError, "singular"),
        (lambda: linalg.cholesky(-genesis.eye(3)), RuntimeError, "order 1"),
        (lambda: linalg.inv(genesis.eye(3).half()), RuntimeError, "float16"),
        (lambda: linalg.det(genesis.ones(2, 3)), RuntimeError, "square"),
        (lambda: linalg.norm(genesis.ones(2, 2), "frob"), RuntimeError, "fro"),
    ],
)
def test_errors(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        call()
    assert isinstance(caught.value, GenesisError)
