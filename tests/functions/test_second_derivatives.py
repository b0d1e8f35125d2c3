"""Second derivatives of matrix functions and running sums, and values at the edges of types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import genesis

SYMMETRIC = np.array([[2.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 3.0]])


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: genesis.linalg.eigvalsh(x + x.mT), SYMMETRIC),
        (genesis.linalg.svdvals, SYMMETRIC[:, :2] + 1.0),
        (lambda x: genesis.linalg.norm(x, "nuc"), SYMMETRIC),
        (genesis.linalg.cond, SYMMETRIC),
        (lambda x: genesis.logcumsumexp(x, 0), np.array([1.0, 1.0, 1.0, 0.0])),
    ],
)
def test_second_derivatives_agree_with_finite_differences(function: Callable[[Any], Any], x: np.ndarray) -> None:
    assert genesis.autograd.gradgradcheck(function, (genesis.tensor(x, requires_grad=True),))


def test_integers_of_ranges_are_torchs() -> None:
    assert genesis.arange(-0.9, 2.1, 2.0, dtype=genesis.int64).tolist() == [0, 2]
    assert genesis.logspace(4.3, -3, 4, 3.0, dtype=genesis.int64).tolist() == [81, 6, 0, 0]
    assert genesis.ones((), dtype=genesis.bool).sum_to_size(()).dtype is genesis.int64


def test_large_sides_have_a_hypotenuse() -> None:
    x = genesis.tensor([1.7e308, 3e200, 3.0], dtype=genesis.float64)
    y = genesis.tensor([1.0, 4e200, 4.0], dtype=genesis.float64)
    assert genesis.hypot(x, y).tolist() == pytest.approx([1.7e308, 5e200, 5.0])


def test_put_accumulates_in_a_tensor_without_dimensions() -> None:
    x = genesis.tensor(2.0, requires_grad=True)
    y = x.put(genesis.tensor(0), genesis.tensor([3.0]), accumulate=True)
    assert y.item() == 5.0 and genesis.autograd.grad(y, x)[0].item() == 1.0


def test_attention_broadcasts_batches() -> None:
    q, k = genesis.randn(2, 3, 4), genesis.randn(5, 2, 6, 4)
    found = genesis.nn.functional.scaled_dot_product_attention(q, k, k)
    expected = genesis.nn.functional.scaled_dot_product_attention(q.expand(5, 2, 3, 4), k, k)
    assert genesis.equal(found, expected)
