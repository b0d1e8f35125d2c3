"""backward(), grad(), accumulation and hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
from genesis.autograd import backward, grad
from genesis.errors import GradientError, ShapeError, UsageError
from tests.autograd.scenarios import leaf, squares

DOUBLE = genesis.float64


def values(*v: float) -> Any:
    return genesis.tensor(list(v), dtype=DOUBLE)


# --- backward ---------------------------------------------------------------------------------------------------------


def test_a_gradient_may_be_given() -> None:
    a = leaf(genesis, 1, 2, 3)
    (a * a).backward(values(1, 10, 100))
    assert a.grad.tolist() == [2, 40, 600]


def test_a_given_gradient_is_cast_and_not_kept() -> None:
    a = leaf(genesis, 1, 2)
    given = genesis.tensor([1.0, 2.0])
    a.backward(given)
    given.zero_()
    assert a.grad.tolist() == [1, 2] and a.grad.dtype is DOUBLE


def test_without_a_gradient_one_element_is_needed() -> None:
    a = leaf(genesis, 1, 2)
    with pytest.raises(GradientError, match=r"shape \(2,\)"):
        (a * 2).backward()
    (a * 2)[:1].backward()  # one element, one dimension
    assert a.grad.tolist() == [2, 0]


def test_errors_name_what_is_wrong() -> None:
    a = leaf(genesis, 1, 2)
    with pytest.raises(GradientError, match="not require a gradient"):
        values(1).backward()
    with pytest.raises(ShapeError, match=r"\(3,\).*\(2,\)"):
        (a * 2).backward(values(1, 2, 3))
    with pytest.raises(GradientError, match="2 tensors and 3"):
        backward([a * 1, a * 2], [values(1, 1)] * 3)


def test_several_roots_in_one_pass() -> None:
    a = leaf(genesis, 1, 2)
    y = a * 3
    z = y * y
    backward([y.sum(), z], [None, values(1, 10)])
    assert a.grad.tolist() == [3 + 2 * 3 * 3 * 1, 3 + 10 * 2 * 6 * 3]


def test_the_same_tensor_twice_and_a_tensor_that_is_also_an_ancestor() -> None:
    a = leaf(genesis, 3)
    y = a * a
    backward([y, y, y * 2])
    assert a.grad.tolist() == [6 + 6 + 12]


def test_leaves_accumulate_over_passes_and_uses() -> None:
    a = leaf(genesis, 1, 2)
    for _ in range(3):
        (a + a * 2 + a.sum()).sum().backward()
    assert a.grad.tolist() == [15, 15]
    a.grad = None
    squares(a).backward()
    assert a.grad.tolist() == [2, 4]


def test_the_gradient_of_a_leaf_is_its_own_memory() -> None:
    a, b = leaf(genesis, 1, 2), leaf(genesis, 3, 4)
    (a + b).backward(values(1, 1))  # one array serves both
    a.grad.mul_(10.0)
    assert b.grad.tolist() == [1, 1]


def test_accumulation_happens_in_place() -> None:
    a = leaf(genesis, 1, 2)
    squares(a).backward()
    first = a.grad
    squares(a).backward()
    assert a.grad is first and first.tolist() == [4, 8]


def test_retain_graph() -> None:
    a = leaf(genesis, 1, 2)
    y = squares(a)
    y.backward(retain_graph=True)
    y.backward()
    assert a.grad.tolist() == [4, 8]
    with pytest.raises(GradientError, match="second time") as caught:
        y.backward()
    assert "retain_graph=True" in caught.value.next
    assert a.grad.tolist() == [4, 8]


def test_a_shared_part_cannot_run_backward_twice() -> None:
    h = leaf(genesis, 1, 2).exp()
    h.sum().backward()
    with pytest.raises(GradientError, match="backward reached exp a second time"):
        (h * 2).sum().backward()


def test_broadcast_operands_get_gradients_of_their_shape_and_dtype() -> None:
    a = genesis.ones(2, 1, 3, dtype=DOUBLE, requires_grad=True)
    b = genesis.ones(4, 1, dtype=genesis.float32, requires_grad=True)
    c = genesis.tensor(2.0, dtype=genesis.float16, requires_grad=True)
    (a * b * c).sum().backward()
    assert (a.grad.shape, b.grad.shape, c.grad.shape) == ((2, 1, 3), (4, 1), ())
    assert (a.grad.dtype, b.grad.dtype, c.grad.dtype) == (DOUBLE, genesis.float32, genesis.float16)
    assert a.grad.tolist()[0][0][0] == 8 and b.grad.tolist()[0] == [12] and c.grad.item() == 24


def test_integers_take_no_part() -> None:
    a, index = leaf(genesis, 1, 2, 3), genesis.tensor([2, 0])
    y = a[index] * index
    y.sum().backward()
    assert a.grad.tolist() == [0, 0, 2]
    assert not (a > 1).requires_grad and not a.argmax().requires_grad
    with pytest.raises(GradientError, match="int64 tensors have no gradient"):
        index.requires_grad_()


def test_an_op_without_a_gradient_says_so_in_backward_and_not_before() -> None:
    a = leaf(genesis, 0.25, 0.75)
    y = genesis.bernoulli(a)
    assert y.requires_grad
    with pytest.raises(GradientError, match="bernoulli has no gradient"):
        y.sum().backward()
    (a + y.detach()).sum().backward()
    assert a.grad.tolist() == [1, 1]


def test_the_order_of_addition_is_reproducible() -> None:
    """Gradients that meet are added in recording order, whatever the sizes: bit-identical from run to run."""

    def run() -> bytes:
        a = genesis.tensor(np.linspace(0.1, 1, 50).astype(np.float32), requires_grad=True)
        parts = [(a * (i + 0.1)).sin() * 10.0**i for i in range(6)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        total.sum().backward()
        return a.grad.numpy().tobytes()  # type: ignore[no-any-return]

    assert len({run() for _ in range(5)}) == 1


# --- grad -------------------------------------------------------------------------------------------------------------


def test_grad_touches_no_leaf() -> None:
    a, b = leaf(genesis, 1, 2), leaf(genesis, 3, 4)
    da, db = grad((a * a * b).sum(), [a, b])
    assert (da.tolist(), db.tolist()) == ([6, 16], [1, 4])
    assert a.grad is None and b.grad is None


def test_grad_with_respect_to_a_result() -> None:
    a = leaf(genesis, 1, 2)
    h = a * 3
    (dh,) = grad(squares(h), h)
    assert dh.tolist() == [6, 12]


def test_grad_outputs_and_repeated_inputs() -> None:
    a = leaf(genesis, 1, 2)
    first, second = grad(a * a, [a, a], grad_outputs=values(1, 10))
    assert first.tolist() == second.tolist() == [2, 40]


def test_unused_inputs() -> None:
    a, b = leaf(genesis, 1), leaf(genesis, 2)
    y = a * 2
    with pytest.raises(GradientError, match="allow_unused=True"):
        grad(y, [a, b], retain_graph=True)
    da, db = grad(y, [a, b], allow_unused=True)
    assert da.tolist() == [2] and db is None
    with pytest.raises(GradientError, match="not require a gradient"):
        grad(y, values(1))


def test_grad_runs_only_what_leads_to_its_inputs() -> None:
    """A branch without a gradient does not run backward, and what did not stays usable."""
    a, b = leaf(genesis, 1.5), leaf(genesis, 2)
    other = b.exp()
    y = a * 2 + b.floor_divide(1.0) + other
    (da,) = grad(y, a)
    assert da.tolist() == [2]
    other.sum().backward()
    assert b.grad.tolist() == pytest.approx([np.exp(2)])


# --- Hooks ------------------------------------------------------------------------------------------------------------


def test_a_hook_sees_the_whole_gradient_once_and_may_replace_it() -> None:
    a = leaf(genesis, 1, 2)
    h = a * 2
    seen = []

    def hook(g: Any) -> Any:
        seen.append(g.tolist())
        return g * 10

    h.register_hook(hook)
    (h.sum() + squares(h)).backward()
    assert seen == [[1 + 4, 1 + 8]]
    assert a.grad.tolist() == [100, 180]


def test_hooks_run_in_the_order_of_registration_until_removed() -> None:
    a = leaf(genesis, 1)
    remove = a.register_hook(lambda g: g + 1)
    a.register_hook(lambda g: g * 2)
    (a * 3).backward()
    assert a.grad.tolist() == [(3 + 1) * 2]
    remove()
    (a * 3).backward()
    assert a.grad.tolist() == [8 + 6]


def test_a_hook_that_returns_nothing_changes_nothing() -> None:
    a = leaf(genesis, 1)
    a.register_hook(lambda g: None)
    (a * 3).backward()
    assert a.grad.tolist() == [3]


def test_a_hook_that_changes_the_shape_is_an_error() -> None:
    a = leaf(genesis, 1, 2)
    a.register_hook(lambda g: g.sum())
    with pytest.raises(GradientError, match=r"accumulate.*\(\).*\(2,\)"):
        (a * 3).sum().backward()


def test_hooks_of_two_outputs_of_one_op_stay_apart() -> None:
    a = leaf(genesis, 1, 2, 3)
    first, second = a.split([1, 2])
    first.register_hook(lambda g: g * 10)
    (first.sum() + second.sum()).backward()
    assert a.grad.tolist() == [10, 1, 1]


def test_hooks_run_under_grad_too() -> None:
    a = leaf(genesis, 1)
    h = a * 2
    h.register_hook(lambda g: g * 5)
    assert grad(h * 1, [a, h])[0].tolist() == [10]


def test_a_hook_needs_a_gradient() -> None:
    with pytest.raises(GradientError, match="gradient"):
        values(1).register_hook(lambda g: g)


def test_the_post_accumulate_hook_runs_once_a_pass_after_the_gradient_is_complete() -> None:
    a = leaf(genesis, 1, 2)
    seen = []
    remove = a.register_post_accumulate_grad_hook(lambda t: seen.append((t is a, t.grad.tolist())))
    (a * 2 + a * 3 + a.exp() * 0).sum().backward()
    assert seen == [(True, [5, 5])]
    (a * 2).sum().backward()
    assert seen[1:] == [(True, [7, 7])]
    remove()
    (a * 2).sum().backward()
    assert len(seen) == 2
    with pytest.raises(GradientError, match="for leaves"):
        (a * 2).register_post_accumulate_grad_hook(lambda t: None)


def test_a_post_accumulate_hook_may_use_up_the_gradient() -> None:
    """As an optimizer does that steps inside backward."""
    a = leaf(genesis, 1, 2)

    def step(t: Any) -> None:
        with genesis.no_grad():
            t.sub_(t.grad * 0.5)
        t.grad = None

    a.register_post_accumulate_grad_hook(step)
    squares(a).backward()
    assert a.tolist() == [0, 0] and a.grad is None


def test_retain_grad_keeps_the_gradient_of_a_result() -> None:
    a = leaf(genesis, 1, 2)
    h = a * 2
    h.retain_grad()
    squares(h).backward(retain_graph=True)
    assert h.grad.tolist() == [4, 8]
    squares(h).backward()
    assert h.grad.tolist() == [8, 16]


def test_retain_grad_needs_a_gradient() -> None:
    with pytest.raises(GradientError, match="gradient"):
        genesis.ones(2).retain_grad()


def test_a_hook_that_returns_no_tensor_is_an_error() -> None:
    a = leaf(genesis, 1, 2)
    a.register_hook(lambda g: 3)
    with pytest.raises(UsageError, match="returned a value of type int"):
        a.sum().backward()


def test_what_is_no_tensor_is_named() -> None:
    a = leaf(genesis, 1, 2)
    with pytest.raises(UsageError, match="a gradient is a value of type float"):
        (a * 2).backward(1.0)
    with pytest.raises(UsageError, match="an input is a value of type int"):
        genesis.autograd.grad(a.sum(), 3)
    with pytest.raises(UsageError, match="an output is a value of type int"):
        genesis.autograd.grad([3], a)


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_rounded_quotients_have_slopes_of_0(mode: str) -> None:
    x, y = leaf(genesis, 7.5, -3.2), leaf(genesis, 2.0, 1.5)
    x.div(y, rounding_mode=mode).sum().backward()
    assert x.grad.tolist() == y.grad.tolist() == [0, 0]
