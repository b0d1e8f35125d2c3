"""Averages of weights: the formulas, buffers, batch norms, and rates that move to the final one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn, optim
from genesis.errors import ConfigError, UsageError
from genesis.optim import swa_utils
from genesis.optim.lr_scheduler import ExponentialLR, SequentialLR

AVERAGES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "equal": ({}, [1 / 4] * 4),
    "equal, as a function": ({"avg_fn": swa_utils.get_swa_avg_fn()}, [1 / 4] * 4),
    "equal, of lists": ({"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()}, [1 / 4] * 4),
    "exponential": ({"avg_fn": swa_utils.get_ema_avg_fn(0.5)}, [1 / 8, 1 / 8, 1 / 4, 1 / 2]),
    "exponential, of lists": ({"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.5)}, [1 / 8, 1 / 8, 1 / 4, 1 / 2]),
    "the last": ({"avg_fn": lambda averaged, current, count: current}, [0, 0, 0, 1]),
}


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("name", AVERAGES)
def test_averages(name: str, use_buffers: bool) -> None:
    how, shares = AVERAGES[name]
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).train()
    net[0].bias.data = net[0].bias.data.double()  # a second dtype
    averaged = swa_utils.AveragedModel(net, use_buffers=use_buffers, **how)
    seen: dict[str, list[np.ndarray]] = {}
    for step in range(4):
        for key, value in net.state_dict().items():
            value.fill_(0.25 * step + len(key))
            seen.setdefault(key, []).append(value.numpy().copy())
        averaged.update_parameters(net)
    assert averaged.n_averaged.item() == 4
    for key, found in averaged.module.state_dict().items():
        is_buffer = "running" in key or "num" in key
        expected = seen[key][-1] if is_buffer and not use_buffers else np.tensordot(shares, np.stack(seen[key]), 1)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    whole = swa_utils.AveragedModel(nn.Linear(3, 2), device="cpu")
    assert whole(genesis.ones(1, 3)).shape == (1, 2)


def test_batch_norms_are_computed_anew() -> None:
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((5, 3)).astype(np.float32) for _ in range(4)]
    net = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), nn.Linear(3, 1)).eval()
    swa_utils.update_bn([(genesis.tensor(b), "label") for b in batches], net, device="cpu")
    np.testing.assert_allclose(net[0].running_mean.numpy(), np.mean([b.mean(0) for b in batches], 0), atol=1e-6)
    np.testing.assert_allclose(net[0].running_var.numpy(), np.mean([b.var(0, ddof=1) for b in batches], 0), rtol=1e-5)
    assert net[0].momentum == 0.3 and not net.training and net[0].num_batches_tracked.item() == 4
    swa_utils.update_bn(iter(()), nn.Linear(1, 1))


@pytest.mark.parametrize(("strategy", "half"), [("linear", 0.5), ("cos", (1 - math.cos(math.pi / 2)) / 2)])
def test_rates_move_to_the_last_one(strategy: str, half: float) -> None:
    optimizer = optim.SGD([{"params": [genesis.ones(1).requires_grad_()], "lr": lr} for lr in (1.0, 0.1)])
    scheduler = swa_utils.SWALR(optimizer, [0.5, 0.2], 4, strategy)
    rows = [scheduler.get_last_lr()]
    for _ in range(6):
        scheduler.step()
        rows.append(scheduler.get_last_lr())
    np.testing.assert_allclose(rows[2], [1 + half * (0.5 - 1), 0.1 + half * 0.1], rtol=1e-12)
    np.testing.assert_allclose(rows[4:], [[0.5, 0.2]] * 3, rtol=1e-12)
    other = swa_utils.SWALR(optim.SGD(optimizer.param_groups), 0.3, 0)
    assert other.get_last_lr() == [0.3, 0.3]


def test_rates_move_after_another_scheduler() -> None:
    optimizer = optim.SGD([genesis.ones(1).requires_grad_()], lr=1.0)
    parts = [ExponentialLR(optimizer, 0.5), swa_utils.SWALR(optimizer, 0.1, 4, "linear")]
    scheduler = SequentialLR(optimizer, parts, [2])
    found = []
    for _ in range(6):
        found.append(scheduler.get_last_lr()[0])
        scheduler.step()
    # torch's: the second one begins with the rate of the step before, and counts its own steps
    np.testing.assert_allclose(found, [1.0, 0.5, 0.5, 0.4, 0.3, 0.2], rtol=1e-12)


def test_what_cannot_be_meant() -> None:
    net, average = nn.Linear(1, 1), swa_utils.get_swa_avg_fn()
    with pytest.raises(UsageError, match="not both"):
        swa_utils.AveragedModel(net, avg_fn=average, multi_avg_fn=swa_utils.get_swa_multi_avg_fn())
    with pytest.raises(ConfigError, match="decay is 2"):
        swa_utils.get_ema_avg_fn(2)
    for how in ({"anneal_strategy": "exp"}, {"anneal_epochs": -1}, {"swa_lr": [0.1, 0.2]}):
        with pytest.raises(ConfigError):
            swa_utils.SWALR(optim.SGD(net.parameters()), **{"swa_lr": 0.1, **how})
