"""Module hooks with keywords, order, and errors; hooks before backward."""

from __future__ import annotations

from typing import Any

import pytest

import genesis
from genesis import nn


class Scale(nn.Module):
    def forward(self, x: Any, *, by: float = 2.0, fail: bool = False) -> Any:
        if fail:
            raise ValueError("forward failed")
        return x * by


def test_keywords_and_order() -> None:
    module, seen = Scale(), []
    module.register_forward_pre_hook(lambda m, a, k: (a, {**k, "by": k["by"] + 1}), with_kwargs=True)
    module.register_forward_hook(lambda m, a, k, y: seen.append(("late", k["by"])), with_kwargs=True)
    module.register_forward_hook(lambda m, a, y: seen.append(("early", y.item())), prepend=True)
    assert module(genesis.tensor(1.0), by=3.0).item() == 4
    assert seen == [("early", 4.0), ("late", 4.0)]
    module.register_forward_pre_hook(lambda m, a, k: a, with_kwargs=True)
    with pytest.raises(RuntimeError, match=r"\(args, kwargs\)"):
        module(genesis.tensor(1.0), by=3.0)


def test_a_hook_runs_after_an_error_if_asked() -> None:
    module, seen = Scale(), []
    module.register_forward_hook(lambda m, a, y: seen.append("plain"))
    module.register_forward_hook(lambda m, a, y: seen.append(y), always_call=True)
    with pytest.raises(ValueError, match="forward failed"):
        module(genesis.tensor(1.0), fail=True)
    assert seen == [None]


def test_hooks_before_backward_replace_the_gradient() -> None:
    module, x = Scale(), genesis.tensor([1.0, 2.0], requires_grad=True)
    seen = []
    module.register_full_backward_hook(lambda m, gi, go: seen.append((gi[0].tolist(), go[0].tolist())))
    module.register_full_backward_pre_hook(lambda m, go: (go[0] * 10,))
    module(x).sum().backward()
    assert seen == [([20.0, 20.0], [10.0, 10.0])]
    assert x.grad.tolist() == [20, 20]


def test_what_is_retained_comes_after_all_hooks() -> None:
    x = genesis.tensor([1.0], requires_grad=True)
    y = x * 2
    y.retain_grad()
    y.retain_grad()
    y.register_hook(lambda g: g * 3)
    assert y.retains_grad
    assert not x.retains_grad
    y.sum().backward()
    assert y.grad.tolist() == [3]


def test_hooks_on_all_modules_run_first() -> None:
    everywhere, seen = nn.modules.module, []
    model = nn.Sequential(Scale(), nn.Linear(1, 1))
    model[1].register_forward_hook(lambda m, a, y: seen.append("own"))
    handles = [
        everywhere.register_module_forward_pre_hook(lambda m, a: seen.append(f"pre {type(m).__name__}")),
        everywhere.register_module_forward_hook(lambda m, a, y: seen.append(type(m).__name__)),
        everywhere.register_module_full_backward_hook(lambda m, gi, go: seen.append(f"back {type(m).__name__}")),
        everywhere.register_module_full_backward_pre_hook(lambda m, go: seen.append(f"to {type(m).__name__}")),
    ]
    y = model(genesis.ones(1, 1, requires_grad=True))
    order = ["pre Sequential", "pre Scale", "Scale", "pre Linear", "Linear", "own", "Sequential"]
    assert seen == order
    y.sum().backward()
    assert seen[len(order) :] == [
        "to Sequential", "to Linear", "back Linear", "to Scale", "back Scale", "back Sequential",
    ]  # fmt: skip
    for handle in handles:
        handle.remove()
    seen.clear()
    model(genesis.ones(1, 1))
    assert seen == ["own"]
