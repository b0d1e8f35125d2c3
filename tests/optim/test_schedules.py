"""Learning-rate schedules: torch's numbers where the two agree, ends and corners, and the object that sets rates."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from genesis import optim
from genesis.errors import ConfigError
from genesis.functions.create import tensor
from genesis.optim.schedules import Schedule
from tests.optim.trajectories import FIXTURE

WARM = {"lr": 0.5, "warmup_steps": 5}
BY_TORCH: dict[str, Schedule] = {
    "cosine": optim.Cosine(lr=0.5, total_steps=25, min_lr_ratio=0.1),
    "linear": optim.Linear(lr=0.5, total_steps=25, min_lr_ratio=0.1),
    "step": optim.Step(lr=0.5, step_size=7, gamma=0.3),
    "warm_cosine": optim.Cosine(**WARM, total_steps=30, min_lr_ratio=0.1),  # type: ignore[arg-type]
    "warm_linear": optim.Linear(**WARM, total_steps=30, min_lr_ratio=0.1),  # type: ignore[arg-type]
    "warm_step": optim.Step(**WARM, step_size=7, gamma=0.3),  # type: ignore[arg-type]
    "one_cycle": optim.OneCycle(lr=0.5, warmup_steps=9, total_steps=30, min_lr_ratio=4e-6),
}


@pytest.mark.parametrize("name", BY_TORCH)
def test_rates_are_torchs(name: str) -> None:
    with np.load(FIXTURE, allow_pickle=False) as stored:
        expected = stored[f"schedule/{name}"]
    found = [BY_TORCH[name].lr_at(s) for s in range(len(expected))]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_every_schedule_of_the_fixture_is_compared() -> None:
    with np.load(FIXTURE, allow_pickle=False) as stored:
        names = {k.split("/")[1] for k in stored.files if k.startswith("schedule/")}
    assert names == set(BY_TORCH)


def test_warm_up_reaches_the_peak_in_its_last_step() -> None:
    schedule = optim.Constant(lr=2.0, warmup_steps=4)
    assert [schedule.lr_at(s) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert optim.Constant(lr=2.0).lr_at(0) == 2.0


def test_wsd_is_flat_and_then_a_line() -> None:
    schedule = optim.WSD(lr=1.0, warmup_steps=2, total_steps=10, decay_steps=4, min_lr_ratio=0.2)
    found = [round(schedule.lr_at(s), 10) for s in range(12)]
    assert found == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]


@pytest.mark.parametrize("make", [optim.Linear, optim.Cosine, optim.OneCycle])
def test_decays_fall_all_the_way_and_stay(make: Any) -> None:
    schedule = make(lr=1.0, warmup_steps=3, total_steps=20, min_lr_ratio=0.1)
    rates = [schedule.lr_at(s) for s in range(25)]
    assert all(a > b for a, b in itertools.pairwise(rates[3:20]))
    assert rates[20:] == pytest.approx([0.1] * 5, abs=1e-15)
    assert max(rates) == rates[2] == 1.0


def test_sequential_restarts_each_schedule() -> None:
    schedule = optim.Sequential(
        [optim.Constant(lr=1.0, warmup_steps=2), optim.Step(lr=0.5, step_size=1, gamma=0.5)], [3]
    )
    assert [schedule.lr_at(s) for s in range(6)] == [0.5, 1.0, 1.0, 0.5, 0.25, 0.125]
    with pytest.raises(ConfigError, match="2 schedules"):
        optim.Sequential([optim.Constant(lr=1.0)] * 2, [])
    with pytest.raises(ConfigError, match="in order"):
        optim.Sequential([optim.Constant(lr=1.0)] * 3, [5, 2])


def test_make_schedule_builds_what_a_configuration_says() -> None:
    base: dict[str, Any] = {"lr": 0.5, "total_steps": 30, "warmup_steps": 5}
    assert optim.make_schedule("constant", **base) == optim.Constant(lr=0.5, warmup_steps=5)
    assert optim.make_schedule("cosine", **base, min_lr_ratio=0.1) == BY_TORCH["warm_cosine"]
    assert optim.make_schedule("linear", **base, min_lr_ratio=0.1) == BY_TORCH["warm_linear"]
    assert optim.make_schedule("step", **base, step_size=7, step_gamma=0.3) == BY_TORCH["warm_step"]
    assert optim.make_schedule("wsd", **base, min_lr_ratio=0.0, decay_ratio=0.2) == optim.WSD(
        lr=0.5, warmup_steps=5, total_steps=30, decay_steps=6, min_lr_ratio=0.0
    )
    cycle = optim.make_schedule("one_cycle", lr=0.5, total_steps=30, warmup_steps=9, min_lr_ratio=4e-6)
    assert cycle == BY_TORCH["one_cycle"]
    with pytest.raises(ConfigError, match="step needs step_size"):
        optim.make_schedule("step", **base)
    with pytest.raises(ConfigError, match="exponential"):
        optim.make_schedule("exponential", **base)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (optim.Constant, {"lr": -1.0}, "lr is -1.0"),
        (optim.Constant, {"lr": 1.0, "warmup_steps": -1}, "warmup_steps"),
        (optim.Cosine, {"lr": 1.0, "total_steps": 0, "min_lr_ratio": 0.0}, "total_steps"),
        (optim.Cosine, {"lr": 1.0, "total_steps": 10, "min_lr_ratio": 1.5}, "min_lr_ratio"),
        (optim.WSD, {"lr": 1.0, "total_steps": 10, "min_lr_ratio": 0.0, "decay_steps": -1}, "decay_steps"),
        (optim.Step, {"lr": 1.0, "step_size": 0, "gamma": 0.1}, "step_size"),
    ],
)
def test_settings_out_of_range(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings)


def test_one_step_runs_and_all_warm_up_runs_have_finite_rates() -> None:
    for make in (optim.Linear, optim.Cosine, optim.OneCycle):
        assert 0 <= make(lr=1.0, total_steps=1, min_lr_ratio=0.1).lr_at(0) <= 1
        assert make(lr=1.0, total_steps=5, warmup_steps=5, min_lr_ratio=0.1).lr_at(4) == 1.0
    assert optim.WSD(lr=1.0, total_steps=5, min_lr_ratio=0.1, decay_steps=0).lr_at(99) == 1.0


def test_lambda_lr_sets_every_group_and_resumes() -> None:
    schedule = optim.Cosine(lr=1.0, warmup_steps=2, total_steps=10, min_lr_ratio=0.0)

    def make() -> tuple[optim.SGD, optim.LambdaLR]:
        a, b = (tensor([1.0], requires_grad=True) for _ in range(2))
        optimizer = optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.01}])
        return optimizer, optim.LambdaLR(optimizer, schedule.factor_at)

    optimizer, scheduler = make()
    rates = []
    for _ in range(6):
        rates.append(scheduler.get_last_lr())
        scheduler.step()
    np.testing.assert_allclose(rates, [[0.1 * schedule.lr_at(s), 0.01 * schedule.lr_at(s)] for s in range(6)])
    other, resumed = make()
    resumed.load_state_dict(scheduler.state_dict())
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in optimizer.param_groups]
    scheduler.step()
    resumed.step()
    assert resumed.get_last_lr() == scheduler.get_last_lr()


def test_lambda_lr_checks_its_lengths() -> None:
    optimizer = optim.SGD([tensor([1.0], requires_grad=True)])
    with pytest.raises(ConfigError, match="2 functions"):
        optim.LambdaLR(optimizer, [lambda s: 1.0, lambda s: 1.0])
    scheduler = optim.LambdaLR(optimizer, lambda s: 1.0)
    with pytest.raises(ConfigError, match="_last_lr has 2 entries"):
        scheduler.load_state_dict({**scheduler.state_dict(), "_last_lr": [1.0, 2.0]})
