"""Learning-rate schedules as pure functions of the step. `lr_scheduler` has torch's scheduler objects.

Steps count from 0: `lr_at(0)` is the rate of the first update. During a warm-up of w steps the rate rises linearly and
reaches its peak in step w - 1. A decay starts in step w and ends at step `total_steps`, one after the last step, so no
update has a rate of 0. (One-cycle reaches its end within the run, as in torch.) Later steps keep the last rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from genesis.errors import ConfigError
from genesis.optim.flat import check_range


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Base class: a linear warm-up of `warmup_steps` to the peak rate `lr`. Subclasses define what follows."""

    lr: float
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_range("lr", self.lr, 0)
        check_range("warmup_steps", self.warmup_steps, 0)

    def lr_at(self, step: int) -> float:
        """The learning rate of step `step`."""
        return self.lr * self.factor_at(step)

    def factor_at(self, step: int) -> float:
        """The learning rate of step `step` as a fraction of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.after_warmup(step - self.warmup_steps)

    def after_warmup(self, step: int) -> float:
        """The fraction of the peak, `step` steps after the end of the warm-up."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The peak rate until the end."""

    def after_warmup(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class _Decay(Schedule):
    """A decay to `min_lr_ratio` of the peak at step `total_steps`."""

    total_steps: int
    min_lr_ratio: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("total_steps", self.total_steps, 1)
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"min_lr_ratio is {self.min_lr_ratio}, and must be between 0 and 1")

    def after_warmup(self, step: int) -> float:
        length = self.total_steps - self.warmup_steps
        done = min(step / length, 1.0) if length > 0 else 1.0
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * self.remaining(done)

    def remaining(self, done: float) -> float:
        """The remaining fraction of the decay when the fraction `done` of its steps has passed."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Linear(_Decay):
    """A linear decay."""

    def remaining(self, done: float) -> float:
        return 1 - done


@dataclass(frozen=True, kw_only=True)
class Cosine(_Decay):
    """A decay along half a cosine wave (Loshchilov & Hutter, "SGDR", 2017, without restarts)."""

    def remaining(self, done: float) -> float:
        return (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, kw_only=True)
class WSD(_Decay):
    """Warm-up, stable, decay: the peak rate, then a linear decay over the last `decay_steps` (Hu et al., 2024)."""

    decay_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("decay_steps", self.decay_steps, 0)

    def after_warmup(self, step: int) -> float:
        left = self.total_steps - self.warmup_steps - step
        if left >= self.decay_steps or self.decay_steps == 0:
            return 1.0
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * max(left, 0) / self.decay_steps


@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """Multiplies the rate by `gamma` every `step_size` steps after the warm-up."""

    step_size: int
    gamma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("step_size", self.step_size, 1)
        check_range("gamma", self.gamma, 0)

    def after_warmup(self, step: int) -> float:
        return self.gamma ** (step // self.step_size)


@dataclass(frozen=True, kw_only=True)
class OneCycle(_Decay):
    """Rises from `start_ratio` over `warmup_steps`, then falls to `min_lr_ratio` in the last step, along cosines.

    Smith & Topin, "Super-convergence" (2018), in the form of torch's OneCycleLR.
    """

    start_ratio: float = 1 / 25

    def factor_at(self, step: int) -> float:
        peak, last = max(self.warmup_steps - 1, 0), self.total_steps - 1
        if step <= peak:
            return along_cosine(self.start_ratio, 1.0, step / peak) if peak else 1.0
        return along_cosine(1.0, self.min_lr_ratio, min((step - peak) / (last - peak), 1.0) if last > peak else 1.0)


def along_cosine(start: float, end: float, done: float) -> float:
    """Interpolate from `start` to `end` along half a cosine wave, at the fraction `done`."""
    return end + (start - end) / 2 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True)
class Sequential:
    """Schedules in sequence. Schedule i starts at step `milestones[i-1]`, which is its own step 0."""

    schedules: Sequence[Schedule]
    milestones: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.milestones) != len(self.schedules) - 1 or list(self.milestones) != sorted(self.milestones):
            raise ConfigError(
                f"{len(self.schedules)} schedules have the milestones {list(self.milestones)}",
                next="pass the first step of each schedule after the first, in order",
            )

    def lr_at(self, step: int) -> float:
        """The learning rate of step `step`."""
        index = sum(step >= m for m in self.milestones)
        return self.schedules[index].lr_at(step - (self.milestones[index - 1] if index else 0))


def make_schedule(
    name: str,
    *,
    lr: float,
    total_steps: int,
    warmup_steps: int = 0,
    min_lr_ratio: float | None = None,
    decay_ratio: float | None = None,
    step_size: int | None = None,
    step_gamma: float | None = None,
) -> Schedule:
    """Build the schedule of a configuration's `optim` section.

    Args:
        name: constant, linear, cosine, wsd, step or one_cycle. The settings it needs must not be None.
        decay_ratio: fraction of the run in which the rate of wsd decays.

    Raises:
        ConfigError: for an unknown name, a missing setting, or a setting out of range.
    """

    def need(setting: str, value: Any) -> Any:
        if value is None:
            raise ConfigError(f"the schedule {name} needs {setting}")
        return value

    def decay() -> dict[str, Any]:
        return {**base, "total_steps": total_steps, "min_lr_ratio": need("min_lr_ratio", min_lr_ratio)}

    base: dict[str, Any] = {"lr": lr, "warmup_steps": warmup_steps}
    if name == "constant":
        return Constant(**base)
    if name == "linear":
        return Linear(**decay())
    if name == "cosine":
        return Cosine(**decay())
    if name == "wsd":
        return WSD(**decay(), decay_steps=round(need("decay_ratio", decay_ratio) * total_steps))
    if name == "step":
        return Step(**base, step_size=need("step_size", step_size), gamma=need("step_gamma", step_gamma))
    if name == "one_cycle":
        return OneCycle(**decay())
    raise ConfigError(f"the schedule {name!r} is unknown", next="use constant, linear, cosine, wsd, step or one_cycle")
