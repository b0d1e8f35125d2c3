"""In-place changes and views: torch's results for the scenarios, what is refused, and what saved values cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genesis
from genesis.autograd import apply_
from genesis.errors import DTypeError, GradientError, ShapeError
from genesis.functions import elementwise, pointwise
from genesis.functions.surface import methods
from genesis.ops import elementwise as ops
from tests.autograd.scenarios import SCENARIOS, leaf, squares

EXPECTED: dict[str, list[Any]] = json.loads((Path(__file__).parent / "fixtures" / "inplace.json").read_text())


def test_every_scenario_has_expected_values() -> None:
    assert list(SCENARIOS) == list(EXPECTED)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_gives_torchs_numbers(name: str) -> None:
    got = SCENARIOS[name](genesis)
    assert len(got) == len(EXPECTED[name])
    for i, (value, expected) in enumerate(zip(got, EXPECTED[name], strict=True)):
        if isinstance(expected, bool) or expected is None:
            assert value is expected, f"item {i}"
        else:
            np.testing.assert_allclose(value.detach().numpy(), expected, rtol=1e-12, err_msg=f"item {i}")


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.mul_(2.0),
        lambda a: a.zero_(),
        lambda a: a.copy_(genesis.ones(3, dtype=genesis.float64)),
        lambda a: a[1:].add_(1.0),
        lambda a: a.view(3, 1).fill_(1.0),
        lambda a: a.__setitem__(0, 1.0),
        lambda a: a.exp_(),
    ],
)
def test_a_leaf_that_requires_a_gradient_refuses_changes(change: Callable[[Any], Any]) -> None:
    a = leaf(genesis, 1, 2, 3)
    with pytest.raises(GradientError, match="leaf that requires a gradient") as caught:
        change(a)
    assert "no_grad" in caught.value.next
    assert a.tolist() == [1, 2, 3], "refused, and yet changed"


def test_a_leaf_that_requires_none_takes_the_history_of_what_is_written() -> None:
    a, h = leaf(genesis, 1, 2), genesis.zeros(2, dtype=genesis.float64)
    h.add_(a)
    assert h.requires_grad and not h.is_leaf
    squares(h).backward()
    assert a.grad.tolist() == [2, 4] and h.grad is None


@pytest.mark.parametrize("change", [lambda h: h.add_(1.0), lambda h: h[0].zero_(), lambda h: h.detach().mul_(2.0)])
def test_changing_a_value_that_backward_needs_is_an_error(change: Callable[[Any], Any]) -> None:
    a = leaf(genesis, 1, 2, 3)
    h = a * 2
    y = h * h
    change(h)
    with pytest.raises(GradientError, match=r"mul needs .* shape \(3,\) .* changed in place \(version 1, saved at 0\)"):
        y.sum().backward()


def test_changing_a_saved_result_is_an_error() -> None:
    y = leaf(genesis, 1, 2).exp()
    y.mul_(2.0)
    with pytest.raises(GradientError, match="exp needs"):
        y.sum().backward()


def test_changing_what_backward_does_not_need_is_no_error() -> None:
    a, b = leaf(genesis, 1, 2, 3), genesis.tensor([4.0, 5.0, 6.0], dtype=genesis.float64)
    h = a * 1
    y = h * b  # b needs no gradient, so h is not kept
    h.add_(10.0)
    y.sum().backward()
    assert a.grad.tolist() == [4, 5, 6]


def test_a_change_without_recording_is_seen_by_backward() -> None:
    a = leaf(genesis, 1, 2, 3)
    y = a * a
    with genesis.no_grad():
        a.add_(1.0)
    with pytest.raises(GradientError, match="changed in place"):
        y.sum().backward()


def test_a_result_wider_than_its_target_is_refused() -> None:
    h = genesis.ones(3)
    with pytest.raises(ShapeError, match=r"add: the result has shape \(2, 3\), out has \(3,\)"):
        h.add_(genesis.ones(2, 3))
    whole = genesis.ones(3, dtype=genesis.int64)
    with pytest.raises(DTypeError, match=r"float32 result does not fit into genesis\.int64"):
        whole.add_(1.5)
    with pytest.raises(ShapeError, match="expanded view"):
        genesis.ones(1).expand(3).add_(1.0)


def test_a_refused_change_leaves_values_history_and_version() -> None:
    a = leaf(genesis, 1, 2, 3)
    h = a * 2
    node, version = h.grad_fn, h.array.storage.version
    with pytest.raises(ShapeError):
        h.mul_(genesis.ones(2, 3, dtype=genesis.float64))
    assert h.grad_fn is node and h.array.storage.version == version and h.tolist() == [2, 4, 6]


# --- Beyond torch: operands that share memory with the target ---------------------------------------------------------


def test_both_operands_may_be_the_target() -> None:
    a = leaf(genesis, 1, 2, 3)
    h = a * 2
    h.mul_(h)  # 4a²
    squares(h).backward()  # 16a⁴
    assert a.grad.tolist() == [64 * v**3 for v in (1, 2, 3)]


def test_an_operand_may_overlap_the_target() -> None:
    a = leaf(genesis, 1, 2, 3, 4)
    h = a * 1
    h[1:].mul_(h[:-1])  # a0, a0·a1, a1·a2, a2·a3: read before anything is written
    assert h.tolist() == [1, 2, 6, 12]
    h.sum().backward()
    assert a.grad.tolist() == [1 + 2, 1 + 3, 2 + 4, 3]


BINARY = {"add", "sub", "mul", "div", "pow", "remainder", "floor_divide", "maximum", "minimum", "atan2"}
OTHERS: dict[str, list[Any]] = {"lerp": [0.7, 0.25], "clamp": [0.4, 0.8]}
MODULES = (elementwise, pointwise)
INTEGER_FORMS = ["bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "left_shift", "right_shift"]
IN_PLACE = sorted(
    n[:-1] for module in MODULES for n in vars(module) if n in methods and n[-1] == "_" and n[:-1] in methods
)


def _operands(name: str) -> list[Any]:
    if name == "masked_fill":
        return [genesis.tensor([True, False, True]), 2.0]
    if name in BINARY:
        return [genesis.tensor([0.5, 0.25, 0.75], dtype=genesis.float64)]
    return OTHERS.get(name, [])


def test_there_are_in_place_forms() -> None:
    assert len(IN_PLACE) >= 35 and {"add", "exp", "clamp", "masked_fill", "bitwise_xor"} <= set(IN_PLACE)


@pytest.mark.parametrize("name", [n for n in IN_PLACE if n not in INTEGER_FORMS])
def test_the_form_in_place_agrees_with_the_plain_form(name: str) -> None:
    results = []
    for form in (name, name + "_"):
        x = leaf(genesis, 1.3, 1.6, 1.9) if name == "acosh" else leaf(genesis, 0.3, 0.6, 0.9)
        h = x * 1
        y = methods[form](h, *_operands(name))
        assert (y is h) == form.endswith("_")
        y.sum().backward()
        results.append((y.tolist(), x.grad.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", INTEGER_FORMS)
def test_integer_forms_in_place_agree_with_the_plain_forms(name: str) -> None:
    target, other = genesis.tensor([1, 6, 7]), genesis.tensor([3, 3, 1])
    want = methods[name](target, other)
    assert methods[name + "_"](target, other) is target
    assert target.tolist() == want.tolist()


def test_saved_values_are_only_copied_where_they_are_needed() -> None:
    """x.mul_(constant) keeps nothing of x; x.mul_(y) with y on the tape keeps a copy of the old x."""
    a = leaf(genesis, 1, 2, 3)
    h = a * 1
    apply_(ops.mul, h, h, 3.0)
    assert [x for x in h.grad_fn.saved.context.inputs if x is not None] == [3.0]
    h.mul_(leaf(genesis, 1, 1, 1))
    kept = h.grad_fn.saved.context.inputs[0]
    assert kept.storage is not h.array.storage and kept.numpy().tolist() == [3, 6, 9]
