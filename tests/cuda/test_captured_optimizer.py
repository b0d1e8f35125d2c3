"""A captured update may be replayed any number of times: each replay is the step that an eager optimizer makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import genesis
from genesis.backend import CPU, Device
from genesis.backend.cuda import backend_of
from genesis.cuda.graphs import FunctionGraph
from genesis.errors import ShapeError
from genesis.optim import OPTIMIZERS, SGD, Adafactor, Adam, AdamW, Lion, Muon
from genesis.optim.optimizer import Optimizer
from genesis.tensor import Tensor

CUDA = Device("cuda", 0)
SHAPES = ((6, 40), (5,))
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (SGD, {"weight_decay": 0.1}),
    "momentum": (SGD, {"momentum": 0.9}),
    "adam": (Adam, {"weight_decay": 0.1}),
    "adamw": (AdamW, {}),
    "adamw ascending": (AdamW, {"maximize": True}),
    "lion": (Lion, {}),
    "adafactor": (Adafactor, {}),
    "muon": (Muon, {}),
    "adamw, one parameter at a time": (AdamW, {"fused": False}),
    "adamw, bfloat16 moments": (AdamW, {"state_dtype": "bfloat16"}),
    "adamw, all bfloat16": (AdamW, {"state_dtype": "bfloat16", "low_precision": "stochastic"}),
    "sgd, all bfloat16": (SGD, {"low_precision": "stochastic"}),
    "lion, float32 gradients": (Lion, {"grad_dtype": "float32"}),
    **{f"{name} as it is": (kind, {}) for name, kind in OPTIMIZERS.items() if kind.in_runs},
}


def make(name: str, device: str = "cuda") -> tuple[Optimizer, list[Tensor]]:
    """An optimizer of two groups with rates of their own, and its parameters."""
    rng = np.random.default_rng(1)
    params = [genesis.tensor(rng.standard_normal(s), dtype="bfloat16", device=device) for s in SHAPES]
    for p in params:
        p.requires_grad_()
    kind, settings = RULES[name]
    groups = [{"params": [("w", params[0])], "lr": 0.1}, {"params": [("b", params[1])], "lr": 0.02}]
    return kind(groups, **{"fused": True, **settings}), params


def give(optimizer: Optimizer, params: list[Tensor], step: int) -> None:
    """Gradients of a step, where a backward that is part of the graph would leave them."""
    rng = np.random.default_rng(50 + step)
    for p in params:
        values = genesis.tensor(rng.standard_normal(p.shape), dtype="bfloat16", device=p.device)
        if p.grad is None:
            p.grad = values
        else:
            p.grad.copy_(values)
    for group in optimizer.param_groups:
        group["lr"] *= 0.9


def everything(optimizer: Optimizer, params: list[Tensor]) -> list[Any]:
    states = [optimizer.saved_state(p) for p in params]
    found: list[Any] = [p.detach().cpu().numpy().tobytes() for p in params]
    for state in states:
        found += [(k, v.cpu().numpy().tobytes() if isinstance(v, Tensor) else v) for k, v in sorted(state.items())]
    return found


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if not kind.in_runs])
def test_an_optimizer_of_tensor_operations_is_not_captured(name: str) -> None:
    optimizer = OPTIMIZERS[name]([genesis.ones(2, device="cuda", requires_grad=True)])
    assert optimizer.not_capturable is not None
    assert "on the host" in optimizer.not_capturable


@pytest.mark.sample(cases=7)
@pytest.mark.parametrize("name", RULES)
def test_replays_are_the_steps_of_an_eager_optimizer(name: str) -> None:
    optimizer, params = make(name)
    scale = genesis.tensor(0.5, device="cuda")
    assert optimizer.not_capturable is None
    graph = FunctionGraph()
    for step in range(5):
        give(optimizer, params, step)
        optimizer.begin_step()
        if step == 0:
            optimizer.update(scale)
        elif step == 1:
            graph.warm_up(lambda: optimizer.update(scale))
        elif step == 2:
            graph.record(lambda: optimizer.update(scale))
            graph.replay()
        else:
            graph.replay()
    other, others = make(name)
    for step in range(5):
        give(other, others, step)
        other.step(grad_scale=genesis.tensor(0.5, device="cuda"))
    assert [optimizer.state[p]["step"] for p in params] == [5, 5]
    assert everything(optimizer, params) == everything(other, others)


def test_counts_stay_right_where_parameters_join_late() -> None:
    """A parameter whose first gradient comes in step 3 is at its own step 3 when the others are at 5."""
    optimizer, params = make("adamw")
    other, others = make("adamw", "cpu")
    for made, leaves in ((optimizer, params), (other, others)):
        for step in range(5):
            give(made, leaves, step)
            if step < 2:
                leaves[1].grad = None
            made.step()
        assert [made.state[p]["step"] for p in leaves] == [5, 3]
    for p, q in zip(params, others, strict=True):
        mine, its = (o.saved_state(x)["master"].cpu().numpy() for o, x in ((optimizer, p), (other, q)))
        np.testing.assert_allclose(mine, its, rtol=0, atol=1e-6)


def test_a_step_neither_waits_nor_copies_from_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, params = make("adamw")
    scale = genesis.tensor(0.5, device="cuda")
    give(optimizer, params, 0)
    optimizer.step(grad_scale=scale)
    backend = backend_of(CUDA)

    def refuse(*args: Any) -> None:
        raise AssertionError("the step waited or copied")

    for name in ("synchronize", "synchronize_stream", "synchronize_event"):
        monkeypatch.setattr(backend.driver, name, refuse)
    optimizer.begin_step()
    for name in ("copy",):
        monkeypatch.setattr(backend.driver, name, refuse)
    optimizer.update(scale)
    with pytest.raises(AssertionError, match="waited or copied"):
        optimizer.begin_step()  # which does copy: the check sees copies


def test_numbers_may_come_with_the_batch() -> None:
    optimizer, params = make("adamw")
    there = genesis.zeros(3, dtype="float64", device="cuda")
    optimizer.device_scalars(CUDA).read_from(there.array)
    for step in range(3):
        give(optimizer, params, step)
        optimizer.begin_step()
        there.copy_(genesis.tensor(optimizer.step_scalars(), dtype="float64"))
        optimizer.update()
    other, others = make("adamw")
    for step in range(3):
        give(other, others, step)
        other.step()
    assert everything(optimizer, params) == everything(other, others)
    with pytest.raises(ShapeError, match=r"float32.* float64 \(3,\)"):
        optimizer.device_scalars(CUDA).read_from(genesis.zeros(3, device="cuda").array)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_clip_factor_of_the_gradients(device: str) -> None:
    optimizer, params = make("adamw", device)
    give(optimizer, params, 0)
    report, loss = genesis.zeros(4, device=device), genesis.tensor(1.5, device=device)
    factor = optimizer.clip_factor(report, loss, 0.5)
    norm = float(np.linalg.norm(np.concatenate([p.grad.cpu().numpy().astype(np.float64).ravel() for p in params])))
    assert report.cpu().tolist() == pytest.approx([1.5, norm, 0.5 / norm, 0.0], rel=1e-5)
    assert factor.item() == report.cpu().tolist()[2]
    assert factor.device == (CPU if device == "cpu" else CUDA)
