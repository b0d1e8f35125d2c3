"""genesis.utils.checkpoint: torch's arguments."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest

import genesis
from genesis.errors import GradientError
from genesis.utils.checkpoint import checkpoint, checkpoint_sequential


def dropped(x: Any, scale: float = 1.0) -> Any:
    return genesis.nn.functional.dropout(x.exp() * scale, 0.5).sin()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_and_draws_are_those_of_a_plain_call(reentrant: bool) -> None:
    found = []
    calls: list[Any] = [dropped, lambda x: checkpoint(dropped, x, use_reentrant=reentrant)]
    for call in calls:
        genesis.manual_seed(3)
        x = genesis.ones(64, requires_grad=True)
        call(x).sum().backward()
        found.append((x.grad.tolist(), genesis.rand(2).tolist()))
    assert found[0] == found[1]


def test_contexts_and_the_decorator() -> None:
    seen: list[str] = []

    @contextmanager
    def noted(name: str) -> Any:
        seen.append(name)
        yield

    x = genesis.ones(2, requires_grad=True)
    decorate = checkpoint(use_reentrant=False, context_fn=lambda: (noted("forward"), noted("again")))
    y = decorate(dropped)(x, scale=2.0)
    assert seen == ["forward"]
    y.sum().backward()
    assert seen == ["forward", "again"]


def test_the_check_can_be_left_out() -> None:
    runs: list[int] = []

    def unsteady(x: Any) -> Any:
        runs.append(1)
        y = x.exp()
        return y.sin() if len(runs) % 2 else y.sin().exp()

    x = genesis.ones(2, requires_grad=True)
    with pytest.raises(GradientError):
        checkpoint(unsteady, x, use_reentrant=False).sum().backward()
    checkpoint(unsteady, x, use_reentrant=False, determinism_check="none").sum().backward()


def test_segments_and_faulty_arguments() -> None:
    x = genesis.ones(2, requires_grad=True)
    steps = [genesis.exp, genesis.sin, genesis.cos, genesis.tanh, genesis.exp]
    checkpoint_sequential(steps, 3, x, use_reentrant=False).sum().backward()
    y = x.detach().requires_grad_()
    y.exp().sin().cos().tanh().exp().sum().backward()
    assert x.grad.tolist() == y.grad.tolist()
    wrongs: list[dict[str, Any]] = [{"scale": 2.0}, {"debug": True}, {"determinism_check": "all"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"checkpoint|determinism"):
            checkpoint(dropped, x, use_reentrant=True, **wrong)
    with pytest.warns(UserWarning, match="use_reentrant"):
        checkpoint(dropped, x)
