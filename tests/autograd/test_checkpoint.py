"""Activation checkpointing: the same gradients, the same random numbers, less memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import random
from genesis.autograd import Function, checkpoint
from genesis.backend.cpu import pool
from genesis.errors import GradientError
from tests.autograd.scenarios import leaf, squares

DOUBLE = genesis.float64


def block(x: Any, w: Any) -> Any:
    """A few ops that save inputs and outputs."""
    return (x * w).tanh().exp() * x


def both_ways(function: Callable[..., Any], *make: Callable[[], Any]) -> tuple[list[Any], list[Any]]:
    """(value, gradients) plain and checkpointed, on fresh leaves and the same random state."""
    results = []
    for wrap in (False, True):
        random.manual_seed(7)
        leaves = [m() for m in make]
        y = checkpoint(function, *leaves) if wrap else function(*leaves)
        after = genesis.rand(2).tolist()  # a draw between forward and backward
        squares(y).backward()
        results.append([y.tolist(), after, genesis.rand(2).tolist(), *(x.grad.tolist() for x in leaves)])
    return results[0], results[1]


def test_the_same_numbers_to_the_bit() -> None:
    plain, again = both_ways(block, lambda: leaf(genesis, 0.1, 0.5, -2), lambda: leaf(genesis, 1, 2, 3))
    assert plain == again


def test_random_draws_repeat_and_later_draws_are_undisturbed() -> None:
    def noisy(x: Any) -> Any:
        return genesis.dropout(x * 3, 0.5) * genesis.rand(50, dtype=DOUBLE) + x

    plain, again = both_ways(noisy, lambda: genesis.ones(50, dtype=DOUBLE, requires_grad=True))
    assert plain == again
    assert 0.0 in np.array(plain[0]) - 1.0, "dropout dropped nothing"


def test_a_generator_among_the_arguments_is_set_back() -> None:
    def noisy(x: Any, generator: Any) -> Any:
        return x * genesis.rand(3, dtype=DOUBLE, generator=generator)

    results = []
    for wrap in (False, True):
        x, generator = leaf(genesis, 1, 2, 3), genesis.Generator(3)
        y = checkpoint(noisy, x, generator) if wrap else noisy(x, generator)
        y.sum().backward()
        results.append((x.grad.tolist(), generator.state()))
    assert results[0] == results[1]


def test_tensors_that_the_function_closes_over() -> None:
    w = leaf(genesis, 2, 3)
    plain, again = both_ways(lambda x: block(x, w), lambda: leaf(genesis, 0.5, 1))
    assert plain == again
    assert w.grad is not None


def test_results_are_kept_and_activations_are_not() -> None:
    """Ten blocks of four ops: plain holds about forty activations, checkpointed about ten."""
    held, peaks = {}, {}
    for wrap in (False, True):
        gc.collect()
        x = genesis.ones(1 << 17, dtype=DOUBLE, requires_grad=True)
        w = genesis.ones(1 << 17, dtype=DOUBLE)
        before = pool.allocated
        y = x
        for _ in range(10):
            y = checkpoint(block, y, w) if wrap else block(y, w)
        held[wrap] = (pool.allocated - before) / x.nbytes
        pool.max_allocated = pool.allocated
        y.sum().backward()
        peaks[wrap] = (pool.max_allocated - before) / x.nbytes
        del y, x, w
    assert held[False] >= 30 and held[True] <= 11
    assert peaks[True] <= 20 < peaks[False]


def test_the_memory_of_the_second_run_is_freed() -> None:
    gc.collect()
    gc.disable()
    try:
        x, w = genesis.ones(1 << 17, dtype=DOUBLE, requires_grad=True), genesis.ones(1 << 17, dtype=DOUBLE)
        before = pool.allocated
        for _ in range(20):
            checkpoint(block, x, w).sum().backward()
            x.grad = None
            assert pool.allocated <= before + 4096, "a cycle keeps activations until the collector runs"
    finally:
        gc.enable()


def test_nested() -> None:
    def outer(x: Any, w: Any) -> Any:
        inner = checkpoint(block, x, w)
        return checkpoint(lambda t: block(checkpoint(block, t, w), w), inner) + x

    def flat(x: Any, w: Any) -> Any:
        return block(block(block(x, w), w), w) + x

    make = (lambda: leaf(genesis, 0.1, -0.2), lambda: leaf(genesis, 0.3, 0.4))
    assert both_ways(outer, *make)[1][3:] == both_ways(flat, *make)[0][3:]


def test_nested_draws_repeat() -> None:
    def inner(x: Any) -> Any:
        return genesis.dropout(x, 0.3)

    def outer(x: Any) -> Any:
        return checkpoint(inner, genesis.dropout(x, 0.3) * 2) * genesis.rand(40, dtype=DOUBLE)

    plain, again = both_ways(outer, lambda: genesis.ones(40, dtype=DOUBLE, requires_grad=True))
    assert plain == again


def test_several_passes() -> None:
    x, w = leaf(genesis, 0.5, 1), leaf(genesis, 1, 2)
    y = checkpoint(block, x, w)
    squares(y).backward(retain_graph=True)
    first = x.grad.tolist()
    squares(y).backward()
    assert x.grad.tolist() == [2 * g for g in first]
    with pytest.raises(GradientError, match="second time"):
        squares(y).backward()


def test_several_results_and_keyword_arguments() -> None:
    def two(x: Any, *, w: Any, scale: float) -> tuple[Any, Any]:
        return (x * w).exp(), (x - w) * scale

    x, w = leaf(genesis, 0.5, 1), leaf(genesis, 1, 2)
    first, second = checkpoint(two, x, w=w, scale=3.0)
    (first.sum() + second.sum()).backward()
    e = np.exp([0.5, 2.0])
    np.testing.assert_allclose(x.grad.numpy(), [1 * e[0] + 3, 2 * e[1] + 3])
    np.testing.assert_allclose(w.grad.numpy(), [0.5 * e[0] - 3, e[1] - 3])


def test_without_recording_the_function_just_runs() -> None:
    calls = []

    def counted(x: Any) -> Any:
        calls.append(1)
        return x * 2

    with genesis.no_grad():
        assert not checkpoint(counted, leaf(genesis, 1)).requires_grad
    y = checkpoint(counted, genesis.ones(2))
    assert not y.requires_grad and len(calls) == 2


def test_the_function_runs_twice_and_only_if_backward_needs_it() -> None:
    calls = []

    def counted(x: Any) -> Any:
        calls.append(1)
        return x.exp() * x

    x = leaf(genesis, 1)
    y = checkpoint(counted, x)
    assert len(calls) == 1
    y.backward()
    assert len(calls) == 2


def test_a_function_that_does_something_else_the_second_time_is_an_error() -> None:
    calls = [0]

    def fickle(x: Any) -> Any:
        calls[0] += 1
        return x.exp() if calls[0] == 1 else (x.exp() * 2)

    y = checkpoint(fickle, leaf(genesis, 1))
    with pytest.raises(GradientError, match="1 calls in forward and 2 in backward"):
        y.backward()


def test_the_same_number_of_calls_on_other_shapes_is_an_error() -> None:
    calls = [0]

    def fickle(x: Any) -> Any:
        calls[0] += 1
        return x[: calls[0]].exp().sum()

    y = checkpoint(fickle, leaf(genesis, 1, 2, 3))
    with pytest.raises(GradientError, match="3 calls"):
        y.backward()


def test_a_changed_argument_is_an_error() -> None:
    x = leaf(genesis, 1, 2)
    h = x * 1
    y = checkpoint(block, h, genesis.ones(2, dtype=DOUBLE))
    h.add_(1.0)
    with pytest.raises(GradientError, match="input of a checkpointed function was changed in place"):
        y.sum().backward()


def test_values_changed_inside_after_they_were_saved_are_an_error_as_without_checkpointing() -> None:
    def careless(x: Any) -> Any:
        y = x.exp()
        z = y * 2
        y.mul_(3.0)  # exp's gradient needs y
        return z

    with pytest.raises(GradientError, match="exp needs"):
        careless(leaf(genesis, 1, 2)).sum().backward()
    with pytest.raises(GradientError, match="exp needs"):
        checkpoint(careless, leaf(genesis, 1, 2)).sum().backward()


def test_changes_in_place_inside() -> None:
    def careful(x: Any) -> Any:
        h = x * 2
        h[1:].mul_(x[:-1])
        h.exp_()
        return h * x

    plain, again = both_ways(careful, lambda: leaf(genesis, 0.5, 1, 0.25))
    assert plain == again


def test_custom_functions_inside() -> None:
    class Double(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g * 2 * ctx.saved_tensors[0]

    plain, again = both_ways(lambda x: Double.apply(x.exp()).tanh(), lambda: leaf(genesis, 0.1, 0.2))
    assert plain == again


def test_an_error_in_the_function_leaves_recording_as_it_was() -> None:
    def failing(x: Any) -> Any:
        x.exp()
        raise ValueError("inside")

    x = leaf(genesis, 1)
    with pytest.raises(ValueError, match="inside"):
        checkpoint(failing, x)
    y = x.exp()
    y.backward()
    assert y.grad_fn.recompute is None and x.grad.tolist() == y.tolist()
