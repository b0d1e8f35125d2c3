"""Functions of genesis.masked, and polygamma, beside numpy and stored values."""

from __future__ import annotations

import numpy as np
import pytest

import genesis
from genesis.errors import DTypeError

X = np.array([[3.0, 1.0, 2.0], [5.0, 4.0, 6.0]])
MASK = np.array([[True, False, True], [False, False, False]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sum", [5, 0]), ("prod", [6, 1]), ("amax", [3, -np.inf]), ("amin", [2, np.inf]), ("mean", [2.5, np.nan]),
        ("median", [2, np.nan]), ("norm", [np.sqrt(13), 0]), ("var", [0.5, np.nan]), ("std", [np.sqrt(0.5), np.nan]),
        ("argmax", [0, 0]), ("argmin", [2, 0]), ("logsumexp", [np.log(np.exp(3) + np.exp(2)), -np.inf]),
    ],
)  # fmt: skip
def test_reductions_count_what_the_mask_keeps(name: str, expected: list[float]) -> None:
    x, mask = genesis.tensor(X), genesis.tensor(MASK)
    found = getattr(genesis.masked, name)(x, dim=1, mask=mask)
    assert found.dtype is x.dtype
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_rows_keep_their_shape_and_gradients_pass_by_masked_elements() -> None:
    x, mask = genesis.tensor(X, requires_grad=True), genesis.tensor(MASK)
    found = genesis.masked.softmax(x, 1, mask=mask)
    assert found[0].tolist() == pytest.approx([1 / (1 + np.exp(-1)), 0, 1 / (1 + np.exp(1))])
    genesis.masked.sum(x * x, mask=mask).backward()
    assert x.grad.tolist() == [[6, 0, 4], [0, 0, 0]]
    assert genesis.masked.cumsum(x, 1, mask=mask)[0].tolist() == [3, 3, 5]
    with pytest.raises(DTypeError):
        genesis.masked.mean(genesis.ones(2, dtype=genesis.int64))


def test_polygamma_has_its_values_and_the_next_as_derivative() -> None:
    # ψ2(1) = -2ζ(3), ψ3(½) = π⁴, ψ2(-½) = ψ2(½) + 2/(½)³ and ψ2(½) = -14ζ(3)
    zeta3 = 1.2020569031595942
    values = [
        genesis.polygamma(n, genesis.tensor(x, dtype=genesis.float64)).item() for n, x in ((2, 1), (3, 0.5), (2, -0.5))
    ]
    assert values == pytest.approx([-2 * zeta3, np.pi**4, -14 * zeta3 + 16], rel=1e-12)
    x = genesis.tensor([-1.3, 0.2, 4.0], dtype=genesis.float64, requires_grad=True)
    assert genesis.autograd.gradcheck(lambda t: t.polygamma(2), (x,))
    assert genesis.polygamma(1, genesis.tensor([0.0, -2.0])).tolist() == [float("inf")] * 2
