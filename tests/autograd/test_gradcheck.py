"""The gradient checker: it must accept right gradients and reject ones that are wrong by 0.05 %."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
from genesis.autograd import Function, jacobians
from genesis.errors import GradientError
from tests.autograd.scenarios import gradcheck, leaf


def scaled(factor: float, element: int | None = None) -> Any:
    """x², whose gradient is off by `factor`, in all elements or one."""

    class Square(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            (x,) = ctx.saved_tensors
            factors = np.full(x.shape, factor if element is None else 1.0)
            if element is not None:
                factors[element] = factor
            return g * 2 * x * genesis.tensor(factors)

    return Square.apply


def test_a_right_gradient_is_accepted() -> None:
    assert gradcheck(scaled(1.0), [leaf(genesis, 0.5, -1, 2)])
    assert gradcheck(scaled(1.000001), [leaf(genesis, 0.5, -1, 2)]), "within the tolerance of 1e-5"


@pytest.mark.parametrize("factor", [1.0005, 0.9995, 0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("element", [None, 0, 2])
def test_a_gradient_wrong_by_a_twentieth_of_a_percent_is_rejected(factor: float, element: int | None) -> None:
    with pytest.raises(GradientError, match=r"d output 0\[\d\] / d input 0\[\d\] is \S+ by backward and"):
        gradcheck(scaled(factor, element), [leaf(genesis, 0.5, -1, 2)])


def test_the_message_names_the_worst_element() -> None:
    with pytest.raises(GradientError, match=r"d output 0\[2\] / d input 0\[2\] is 4\.4 by .* \(1 of 9 elements"):
        gradcheck(scaled(1.1, 2), [leaf(genesis, 0.5, -1, 2)])


def test_a_missing_gradient_is_rejected() -> None:
    a = leaf(genesis, 1, 2)
    with pytest.raises(GradientError, match="is 0 by backward and 1 by differences"):
        gradcheck(lambda x: x.detach() * 1, [a])


def test_a_gradient_at_the_wrong_place_is_rejected() -> None:
    class Swapped(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g.flip(0)

    with pytest.raises(GradientError, match="by backward"):
        gradcheck(Swapped.apply, [leaf(genesis, 1, 2)])


def test_every_input_and_output_is_checked() -> None:
    a, b = leaf(genesis, 1, 2), leaf(genesis, 3, 4)
    assert gradcheck(lambda x, y: (x * y, x + y, (x > 0)), [a, b])
    with pytest.raises(GradientError, match=r"d output 1\[.\] / d input 1"):
        gradcheck(lambda x, y: (x * y, x + y.detach()), [a, b])


def test_inputs_without_a_gradient_are_left_alone() -> None:
    a, index = leaf(genesis, 1, 2, 3), genesis.tensor([0, 2])
    assert gradcheck(lambda x, i: x[i] * 2, [a, index])


def test_nothing_to_check_is_an_error() -> None:
    with pytest.raises(GradientError, match="no input requires a gradient"):
        gradcheck(lambda x: x * 2, [genesis.ones(2, dtype=genesis.float64)])
    with pytest.raises(GradientError, match="no float output"):
        gradcheck(lambda x: x > 0, [leaf(genesis, 1)])
    with pytest.raises(GradientError, match=r"input 0 is genesis\.float32"):
        gradcheck(lambda x: x * 2, [genesis.ones(2, requires_grad=True)])


def test_inputs_are_as_before() -> None:
    a = leaf(genesis, 0.1, 0.2)
    gradcheck(lambda x: x.exp(), [a])
    assert a.tolist() == [0.1, 0.2] and a.grad is None


def test_empty_and_zero_dimensional_inputs() -> None:
    assert gradcheck(lambda x: x * 2, [genesis.zeros(0, 3, dtype=genesis.float64, requires_grad=True)])
    assert gradcheck(lambda x: x.sum() * 2, [genesis.zeros(0, dtype=genesis.float64, requires_grad=True)])
    assert gradcheck(lambda x: x.exp(), [genesis.tensor(0.5, dtype=genesis.float64, requires_grad=True)])


def test_jacobians_have_inputs_in_rows() -> None:
    a = leaf(genesis, 1, 2)
    ((numerical, analytical),) = jacobians(lambda x: genesis.cat([x * 3, x[:1]]), [a], 0)
    assert analytical.tolist() == [[3, 0, 1], [0, 3, 0]]
    np.testing.assert_allclose(numerical, analytical, atol=1e-8)
