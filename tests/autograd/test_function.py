"""Custom differentiable functions."""

from __future__ import annotations

from typing import Any

import pytest

import genesis
from genesis.autograd import Function, FunctionContext
from genesis.errors import GradientError
from tests.autograd.scenarios import gradcheck, leaf, squares

DOUBLE = genesis.float64


class Cube(Function):
    """x³."""

    @staticmethod
    def forward(ctx: FunctionContext, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: FunctionContext, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        return g * 3 * x * x


class Both(Function):
    """Sum and difference, scaled: two outputs, a number among the arguments."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any, scale: float) -> Any:
        ctx.scale = scale
        return (x + y) * scale, (x - y) * scale

    @staticmethod
    def backward(ctx: Any, gs: Any, gd: Any) -> Any:
        Both.seen = (gs, gd, ctx.needs_input_grad)
        return (gs + gd) * ctx.scale, (gs - gd) * ctx.scale, None

    seen: Any = None


def test_values_and_gradients() -> None:
    x = leaf(genesis, 0.5, -1.5)
    assert Cube.apply(x).tolist() == [0.125, -3.375]
    assert gradcheck(Cube.apply, [x])
    assert gradcheck(lambda a, b: Both.apply(a, b, 3.0), [leaf(genesis, 1, 2), leaf(genesis, 3, 5)])


def test_forward_runs_without_recording_and_the_result_is_one_node() -> None:
    x = leaf(genesis, 2)
    y = Cube.apply(x)
    assert y.grad_fn.name == "Cube" and [e.node.name for e in y.grad_fn.edges] == ["accumulate"]


def test_needs_input_grad_and_outputs_without_a_gradient() -> None:
    x, y = leaf(genesis, 1, 2), genesis.tensor([3.0, 4.0], dtype=DOUBLE)
    total, difference = Both.apply(x, y, 2.0)
    assert total.requires_grad and difference.requires_grad
    squares(total).backward()
    gs, gd, needs = Both.seen
    assert gs.tolist() == [16, 24] and gd.tolist() == [0, 0] and gd.dtype is DOUBLE
    assert needs == (True, False, False)
    assert x.grad.tolist() == [32, 48] and y.grad is None


def test_nothing_is_recorded_where_nothing_needs_a_gradient() -> None:
    x = genesis.tensor([1.0, 2.0])
    assert not Cube.apply(x).requires_grad
    with genesis.no_grad():
        assert not Cube.apply(leaf(genesis, 1)).requires_grad


def test_outputs_that_are_not_float_tensors_stay_off_the_tape() -> None:
    class Ranked(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2, x.argmax(), "label"

        @staticmethod
        def backward(ctx: Any, g: Any, *rest: Any) -> Any:
            return g * 2

    x = leaf(genesis, 1, 5, 2)
    doubled, index, label = Ranked.apply(x)
    assert doubled.requires_grad and not index.requires_grad
    assert (index.item(), label) == (1, "label")
    doubled.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_a_saved_tensor_that_was_changed_is_an_error() -> None:
    h = leaf(genesis, 1, 2) * 1
    y = Cube.apply(h)
    h.add_(1.0)
    with pytest.raises(GradientError, match=r"saved tensor of shape \(2,\) was changed in place"):
        y.sum().backward()


def test_saved_tensors_may_be_none() -> None:
    class Scale(Function):
        @staticmethod
        def forward(ctx: Any, x: Any, bias: Any) -> Any:
            ctx.save_for_backward(x, bias)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            x, bias = ctx.saved_tensors
            assert bias is None and x is not None
            return g * 2, None

    x = leaf(genesis, 1)
    Scale.apply(x, None).backward()
    assert x.grad.tolist() == [2]


class Wrong(Function):
    """Returns from backward whatever it is told to."""

    answer: Any = None

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return Wrong.answer


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((genesis.ones(2),), "returned 1 gradients for 2 arguments"),
        (genesis.ones(2), "returned 1 gradients for 2 arguments"),
        ((genesis.ones(3), None), r"returned \(3,\) for argument 0 of shape \(2,\)"),
        ((1.0, None), r"returned float for argument 0 of shape \(2,\)"),
    ],
)
def test_a_wrong_answer_of_backward_is_an_error(answer: Any, said: str) -> None:
    Wrong.answer = answer
    x = leaf(genesis, 1, 2)
    with pytest.raises(GradientError, match=said):
        Wrong.apply(x, genesis.tensor([1.0, 2.0], dtype=DOUBLE)).sum().backward()


def test_gradients_are_cast_to_the_arguments_dtype() -> None:
    Wrong.answer = (genesis.ones(2, dtype=genesis.float32), None)
    x = leaf(genesis, 1, 2)
    Wrong.apply(x, genesis.tensor([1.0, 2.0], dtype=DOUBLE)).sum().backward()
    assert x.grad.dtype is DOUBLE and x.grad.tolist() == [1, 1]


def test_what_was_saved_is_released_after_backward() -> None:
    x = leaf(genesis, 1, 2)
    y = Cube.apply(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert y.grad_fn.context is None
    with pytest.raises(GradientError, match="reached Cube a second time"):
        y.sum().backward()


def test_forward_and_backward_must_be_defined() -> None:
    with pytest.raises(NotImplementedError):
        Function.apply(leaf(genesis, 1))
