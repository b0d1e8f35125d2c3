"""An optimizer that a user writes, with its own step: state, hooks, saving and loading."""

from __future__ import annotations

from typing import Any

import genesis
from genesis import optim


class Signs(optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.5, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @genesis.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("mean", genesis.zeros_like(p)).add_(p.grad)
                state["count"] = state.get("count", 0) + 1
                p.sub_(state["mean"].sign() * group["lr"])


def parameter(dtype: Any = genesis.float32) -> genesis.nn.Parameter:
    p = genesis.nn.Parameter(genesis.tensor([1.0, -2.0], dtype=dtype))
    p.grad = genesis.tensor([0.5, -3.0], dtype=dtype)
    return p


def test_a_users_optimizer_steps_saves_and_loads() -> None:
    p, q = parameter(), parameter(genesis.float64)
    first, second = Signs([p], decay=0.1), Signs([q])
    seen: list[Any] = []
    first.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append((args[0] is first, kwargs)))
    first.register_step_post_hook(lambda optimizer, args, kwargs: seen.append(optimizer))
    first.step()
    assert p.tolist() == [0.5, -1.5] and seen == [(True, {}), first]
    state = first.state_dict()
    assert state["param_groups"] == [{"lr": 0.5, "decay": 0.1, "params": [0]}] and state["state"][0]["count"] == 1
    second.load_state_dict(state)
    kept = second.state[second.param_groups[0]["params"][0]]
    assert (
        kept["mean"].dtype is genesis.float64
        and kept["count"] == 1
        and kept["mean"].tolist() == [0.5, -3.0]
        and second.param_groups[0]["decay"] == 0.1
    )
    kept["mean"].zero_()
    assert first.state[p]["mean"].tolist() == [0.5, -3.0]
