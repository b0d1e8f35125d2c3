"""torch's schedulers: rates and momenta are torch's, states continue, and what cannot be meant is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genesis import optim
from genesis.errors import ConfigError, ModelError, UsageError
from genesis.functions.create import tensor
from genesis.optim import lr_scheduler
from tests.optim.scheduler_cases import CASES, FIXTURE, RATES, followed, steps


def make_optimizer(kind: str = "SGD") -> Any:
    groups = [{"params": [tensor([1.0], requires_grad=True)], "lr": lr} for lr in RATES]
    return getattr(optim, kind)(groups, **({"momentum": 0.9} if kind == "SGD" else {}))


@pytest.mark.parametrize("name", steps())
def test_rates_and_momenta_are_torchs(name: str) -> None:
    with np.load(FIXTURE, allow_pickle=False) as stored:
        for kind in ("SGD", "AdamW"):
            found = followed(lr_scheduler, make_optimizer(kind), steps()[name])
            # 24 steps of a recursion, each of at most 8 roundings of numbers below 2
            np.testing.assert_allclose(found, stored[f"{name}/{kind}"], rtol=24 * 8 * 2.0**-53, atol=24 * 2.0**-51)


def test_every_array_of_the_fixture_is_compared() -> None:
    with np.load(FIXTURE, allow_pickle=False) as stored:
        assert {name.split("/")[0] for name in stored.files} == set(steps())
    classes = {n for n in lr_scheduler.__all__ if n not in ("LRScheduler", "ReduceLROnPlateau")}
    assert {name.split(" ")[0] for name in CASES} == classes


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_scheduler_goes_on(name: str) -> None:
    def made() -> tuple[Any, Any]:
        optimizer = make_optimizer()
        return optimizer, CASES[name](lr_scheduler, optimizer)

    (first, scheduler), (second, resumed) = made(), made()
    for _ in range(7):
        scheduler.step()
    state = scheduler.state_dict()
    assert not any(callable(v) for v in state.values())
    resumed.load_state_dict(state)
    assert [g["lr"] for g in second.param_groups] == [g["lr"] for g in first.param_groups]
    for _ in range(9):
        scheduler.step()
        resumed.step()
        assert resumed.get_last_lr() == scheduler.get_last_lr() == [g["lr"] for g in second.param_groups]
    with pytest.raises(ModelError, match="gama"):
        resumed.load_state_dict({**state, "gama": 1})


class Halving(lr_scheduler._LRScheduler):
    """A scheduler of a user, in torch's form."""

    def __init__(self, optimizer: Any, every: Any, last_epoch: int = -1) -> None:
        self.every = every
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        return [base * 0.5 ** (self.last_epoch // self.every) for base in self.base_lrs]


class Counting:
    """A function of the step with a state."""

    calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / self.calls


def test_schedulers_and_functions_of_users() -> None:
    scheduler, other = Halving(make_optimizer(), 3), Halving(make_optimizer(), 1)
    for _ in range(7):
        scheduler.step()
    other.load_state_dict(scheduler.state_dict())
    assert scheduler.get_last_lr() == other.get_last_lr() == [rate / 4 for rate in RATES]
    assert other.every == 3 and other.state_dict()["_step_count"] == 8
    scheduler.step(3)
    assert scheduler.get_last_lr() == [rate / 2 for rate in RATES]
    first, second = (lr_scheduler.LambdaLR(make_optimizer(), [Counting(), lambda step: 1.0]) for _ in range(2))
    first.step()
    assert first.state_dict()["lr_lambdas"] == [{"calls": 2}, None]
    second.load_state_dict(first.state_dict())
    second.step()
    assert second.get_last_lr() == [RATES[0] / 3, RATES[1]]


def test_a_plateau_continues_and_takes_tensors() -> None:
    (first, second) = (make_optimizer() for _ in range(2))
    scheduler, resumed = (lr_scheduler.ReduceLROnPlateau(o, patience=1) for o in (first, second))
    for loss in (1.0, 1.0, 1.0):
        scheduler.step(tensor(loss))
    assert first.param_groups[0]["lr"] == RATES[0] * 0.1
    resumed.load_state_dict(scheduler.state_dict())
    for each in (scheduler, resumed):
        each.step(1.0)
        each.step(1.0)
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"] == RATES[0] * 0.1 * 0.1


def test_a_later_start_needs_the_first_rates() -> None:
    with pytest.raises(KeyError, match="parameter group 0 has no initial_lr"):
        lr_scheduler.StepLR(make_optimizer(), 5, last_epoch=3)
    optimizer = make_optimizer()
    for group in optimizer.param_groups:
        group["initial_lr"] = 1.0
    resumed = lr_scheduler.CosineAnnealingLR(optimizer, 10, last_epoch=4)
    assert resumed.last_epoch == 5 and resumed.get_last_lr() == [0.5 + 0.5 * np.cos(np.pi / 2)] * 2


made = make_optimizer
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: lr_scheduler.StepLR(RATES, 5), UsageError, "not a tuple"),  # type: ignore[arg-type]
    (lambda: lr_scheduler.StepLR(made(), 0), ConfigError, "step_size is 0"),
    (lambda: lr_scheduler.StepLR(made(), 5, gama=0.1), TypeError, "gama"),  # type: ignore[call-arg]
    (lambda: lr_scheduler.LinearLR(made(), 0.0), ConfigError, "start_factor is 0"),
    (lambda: lr_scheduler.ConstantLR(made(), 2.0), ConfigError, "between 0 and 1"),
    (lambda: lr_scheduler.OneCycleLR(made(), 1.0), ConfigError, "needs total_steps"),
    (lambda: lr_scheduler.OneCycleLR(made(), [1.0], 5), ConfigError, "max_lr has 1 entries"),
    (lambda: lr_scheduler.OneCycleLR(made(), 1.0, 5, anneal_strategy="exp"), ConfigError, "anneal_strategy is 'exp'"),
    (lambda: lr_scheduler.OneCycleLR(made("Adafactor"), 1.0, 5), ConfigError, "neither momentum nor betas"),
    (lambda: [s := lr_scheduler.OneCycleLR(made(), 1.0, 2), *(s.step() for _ in range(3))], ConfigError, "has 2 steps"),
    (lambda: lr_scheduler.CyclicLR(made(), 0.1, 1.0, mode="square"), ConfigError, "mode is 'square'"),
    (lambda: lr_scheduler.ReduceLROnPlateau(made(), "least"), ConfigError, "mode is 'least'"),
    (lambda: lr_scheduler.ReduceLROnPlateau(made(), factor=1.0), ConfigError, "factor is 1.0"),
    (lambda: lr_scheduler.SequentialLR(made(), [], []), ConfigError, "no schedulers"),
    (
        lambda: lr_scheduler.SequentialLR(made(), [lr_scheduler.StepLR(made(), 1)], []),
        ConfigError,
        "different optimizer",
    ),
    (lambda: lr_scheduler.ChainedScheduler([lr_scheduler.ReduceLROnPlateau(made())]), ConfigError, "does not take"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_cannot_be_meant(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_milestones_are_in_order() -> None:
    optimizer = make_optimizer()
    parts = [lr_scheduler.StepLR(optimizer, 1) for _ in range(3)]
    for milestones in ([5], [7, 5]):
        with pytest.raises(ConfigError, match="milestones"):
            lr_scheduler.SequentialLR(optimizer, parts, milestones)


# torch 2.13's parameters, after the optimizer.
ORDER = {
    "LambdaLR": "lr_lambda last_epoch",
    "MultiplicativeLR": "lr_lambda last_epoch",
    "StepLR": "step_size gamma last_epoch",
    "MultiStepLR": "milestones gamma last_epoch",
    "ConstantLR": "factor total_iters last_epoch",
    "LinearLR": "start_factor end_factor total_iters last_epoch",
    "ExponentialLR": "gamma last_epoch",
    "SequentialLR": "schedulers milestones last_epoch",
    "CosineAnnealingLR": "T_max eta_min last_epoch",
    "ReduceLROnPlateau": "mode factor patience threshold threshold_mode cooldown min_lr eps",
    "CyclicLR": "base_lr max_lr step_size_up step_size_down mode gamma scale_fn scale_mode cycle_momentum "
    "base_momentum max_momentum last_epoch",
    "CosineAnnealingWarmRestarts": "T_0 T_mult eta_min last_epoch",
    "OneCycleLR": "max_lr total_steps epochs steps_per_epoch pct_start anneal_strategy cycle_momentum base_momentum "
    "max_momentum div_factor final_div_factor three_phase last_epoch",
    "PolynomialLR": "total_iters power last_epoch",
}


@pytest.mark.parametrize("name", ORDER)
def test_parameters_are_torchs(name: str) -> None:
    assert list(inspect.signature(getattr(lr_scheduler, name)).parameters) == ["optimizer", *ORDER[name].split()]
