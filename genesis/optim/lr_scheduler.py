"""torch's learning-rate schedulers under their names: objects that set an optimizer's rates step by step.

Rates follow torch's recursions. The next rate is computed from the current one, so several schedulers of one optimizer
multiply. `genesis.optim.schedules` has schedules as pure functions of the step, which training runs use.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

from genesis.errors import ConfigError, UsageError
from genesis.keywords import check_calls
from genesis.optim.flat import check_range
from genesis.optim.optimizer import Optimizer
from genesis.optim.saving import check_saved
from genesis.optim.schedules import along_cosine

__all__ = [
    "ChainedScheduler", "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
    "LRScheduler", "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR",
    "ReduceLROnPlateau", "SequentialLR", "StepLR",
]  # fmt: skip


class MissingRateError(ConfigError, KeyError):
    """A parameter group has no initial rate."""


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"a scheduler takes an optimizer, not a {type(optimizer).__name__}")


def _for_groups(name: str, optimizer: Optimizer, value: Any) -> list[Any]:
    """Return one value per parameter group, from a list or one value for all."""
    _check_optimizer(optimizer)
    count = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{name} has {len(value)} entries, and the optimizer has {count} parameter groups")
    return list(value)


class LRScheduler:
    """Base class: counts steps and sets the rates of groups.

    Subclasses define `get_lr`, or `next_rate` and, where a formula exists, `rate`.

    Args:
        optimizer: optimizer; a group's initial rate is its "initial_lr" if it has one, else its current rate.
        last_epoch: number of the last step, or -1 at the start. Any other number requires groups with "initial_lr",
            as in a loaded optimizer.
    """

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        _check_optimizer(optimizer)
        self.optimizer, self.last_epoch = optimizer, last_epoch
        for i, group in enumerate(optimizer.param_groups):
            if last_epoch == -1:
                group.setdefault("initial_lr", group["lr"])
            elif "initial_lr" not in group:
                raise MissingRateError(
                    f"last_epoch is {last_epoch}, and parameter group {i} has no initial_lr",
                    next="load the optimizer's state first, or remove last_epoch",
                )
        self.base_lrs = [float(g["initial_lr"]) for g in optimizer.param_groups]
        self.start()

    def start(self) -> None:
        """Take the first step, at construction."""
        self._step_count, self._is_initial = 0, True
        self.step()
        self._is_initial = False

    def next_rate(self, lr: float, index: int) -> float:
        """Return the rate of group `index` in step `last_epoch`, computed from its current rate `lr`."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_lr()")

    def get_lr(self) -> list[float]:
        """Return the rate of each group in step `last_epoch`. `get_last_lr` returns the current ones."""
        return [self.next_rate(float(g["lr"]), i) for i, g in enumerate(self.optimizer.param_groups)]

    def rate(self, index: int) -> float:
        """Return the rate of group `index` in step `last_epoch`, from the initial rate if a formula exists."""
        return self.get_lr()[index]

    def step(self, epoch: int | None = None) -> None:
        """Advance to the next step, or to step `epoch`."""
        self._step_count += 1
        self._update_lr(epoch)

    def _update_lr(self, epoch: int | None = None) -> None:
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self.set(self.get_lr() if epoch is None else self._get_closed_form_lr())

    def _get_closed_form_lr(self) -> list[float]:
        return [self.rate(i) for i in range(len(self.base_lrs))]

    def set(self, rates: Sequence[float]) -> None:
        """Set the rate of each group."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = list(rates)

    def get_last_lr(self) -> list[float]:
        """The current rate of each group."""
        return list(self._last_lr)

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes but the optimizer and functions."""
        found = ((n, v) for n, v in vars(self).items() if n != "optimizer" and not callable(v))
        return {n: list(v) if isinstance(v, list) else v for n, v in found}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a saved step, with its settings and rates.

        Raises:
            ModelError: if another class saved the state.
            ConfigError: if the number of groups differs.
        """
        own = self.state_dict()
        check_saved(f"{type(self).__name__}'s state", state_dict, list(own))
        _for_groups("_last_lr", self.optimizer, list(state_dict["_last_lr"]))
        for name, value in state_dict.items():
            setattr(self, name, type(own[name])(value) if isinstance(own[name], (list, Counter)) else value)
        self.set(self._last_lr)


# --- Functions of the step --------------------------------------------------------------------------------------------

_LRScheduler = LRScheduler  # its older name, from which users derive
Function = Callable[[int], float]


class _ByFunctions(LRScheduler):
    """Base class: one function of the step for all groups, or one per group."""

    def __init__(self, optimizer: Optimizer, lr_lambda: Function | Sequence[Function], last_epoch: int = -1) -> None:
        _check_optimizer(optimizer)
        groups = optimizer.param_groups
        each = list(lr_lambda) if isinstance(lr_lambda, Sequence) else [lr_lambda] * len(groups)
        self.lr_lambdas: list[Any] = each
        if len(self.lr_lambdas) != len(groups):
            raise ConfigError(
                f"lr_lambda has {len(self.lr_lambdas)} functions, and the optimizer has {len(groups)} parameter groups"
            )
        super().__init__(optimizer, last_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes but the optimizer and functions; other callables are saved by their attributes."""
        kept = [None if isinstance(f, FunctionType) else dict(getattr(f, "__dict__", {})) for f in self.lr_lambdas]
        return {**super().state_dict(), "lr_lambdas": kept}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a saved step, with its settings and rates."""
        functions = self.lr_lambdas
        super().load_state_dict(state_dict)
        for function, kept in zip(functions, self.lr_lambdas, strict=True):
            if kept:
                function.__dict__.update(kept)
        self.lr_lambdas = functions


class LambdaLR(_ByFunctions):
    """The initial rate times a function of the step.

    Args:
        lr_lambda: one function of the step, or one per group, such as a schedule's `factor_at`.
    """

    def next_rate(self, lr: float, index: int) -> float:
        return float(self.base_lrs[index] * self.lr_lambdas[index](self.last_epoch))


class MultiplicativeLR(_ByFunctions):
    """The current rate times a function of the step, from step 1 on."""

    def next_rate(self, lr: float, index: int) -> float:
        return float(lr * self.lr_lambdas[index](self.last_epoch)) if self.last_epoch > 0 else lr


# --- Decays and warm-ups ----------------------------------------------------------------------------------------------


class StepLR(LRScheduler):
    """Multiplies the rate by `gamma` every `step_size` steps."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        check_range("step_size", step_size, 1)
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def next_rate(self, lr: float, index: int) -> float:
        return lr if self.last_epoch == 0 or self.last_epoch % self.step_size else lr * self.gamma

    def rate(self, index: int) -> float:
        return self.base_lrs[index] * self.gamma ** (self.last_epoch // self.step_size)


class MultiStepLR(LRScheduler):
    """Multiplies the rate by `gamma` at each of the `milestones`."""

    def __init__(
        self, optimizer: Optimizer, milestones: Iterable[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        self.milestones, self.gamma = Counter(milestones), gamma
        super().__init__(optimizer, last_epoch)

    def next_rate(self, lr: float, index: int) -> float:
        return lr * self.gamma ** self.milestones[self.last_epoch]

    def rate(self, index: int) -> float:
        passed = bisect_right(sorted(self.milestones.elements()), self.last_epoch)
        return self.base_lrs[index] * self.gamma**passed


class ConstantLR(LRScheduler):
    """Multiplies the rate by `factor` during the first `total_iters` steps."""

    def __init__(self, optimizer: Optimizer, factor: float = 1 / 3, total_iters: int = 5, last_epoch: int = -1) -> None:
        if not 0 <= factor <= 1:
            raise ConfigError(f"factor is {factor}, and must be between 0 and 1")
        self.factor, self.total_iters = factor, total_iters
        super().__init__(optimizer, last_epoch)

    def next_rate(self, lr: float, index: int) -> float:
        if self.last_epoch == 0:
            return lr * self.factor
        if self.last_epoch != self.total_iters:
            return lr
        # torch divides here and fails for a factor of 0.
        return lr * (1 / self.factor) if self.factor else self.base_lrs[index]

    def rate(self, index: int) -> float:
        return self.base_lrs[index] * (self.factor if self.last_epoch < self.total_iters else 1.0)


class LinearLR(LRScheduler):
    """Multiplies the rate by a factor from `start_factor` to `end_factor`, linearly over `total_iters` steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        if not 0 < start_factor <= 1 or not 0 <= end_factor <= 1:
            raise ConfigError(
                f"start_factor is {start_factor} and end_factor {end_factor}, and must be between 0 and 1",
                next="choose start_factor above 0",
            )
        self.start_factor, self.end_factor, self.total_iters = start_factor, end_factor, total_iters
        super().__init__(optimizer, last_epoch)

    def next_rate(self, lr: float, index: int) -> float:
        if self.last_epoch == 0:
            return lr * self.start_factor
        if self.last_epoch > self.total_iters:
            return lr
        rise = self.end_factor - self.start_factor
        return lr * (1.0 + rise / (self.total_iters * self.start_factor + (self.last_epoch - 1) * rise))

    def rate(self, index: int) -> float:
        done = min(self.total_iters, self.last_epoch) / self.total_iters
        return self.base_lrs[index] * (self.start_factor + (self.end_factor - self.start_factor) * done)


class ExponentialLR(LRScheduler):
    """Multiplies the rate by `gamma` in every step."""

    def __init__(self, optimizer: Optimizer, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, last_epoch)

    def next_rate(self, lr: float, index: int) -> float:
        return lr if self.last_epoch == 0 else lr * self.gamma

    def rate(self, index: int) -> float:
        return self.base_lrs[index] * self.gamma**self.last_epoch


class PolynomialLR(LRScheduler):
    """The initial rate times (1 - step/total_iters)^power."""

    def __init__(self, optimizer: Optimizer, total_iters: int = 5, power: float = 1.0, last_epoch: int = -1) -> None:
        self.total_iters, self.power = total_iters, power
        super().__init__(optimizer, last_epoch)

    def next_rate(self, lr: float, index: int) -> float:
        if self.last_epoch == 0 or self.last_epoch > self.total_iters:
            return lr
        left = 1.0 - self.last_epoch / self.total_iters
        return float(lr * (left / (1.0 - (self.last_epoch - 1) / self.total_iters)) ** self.power)

    def rate(self, index: int) -> float:
        left = 1.0 - min(self.total_iters, self.last_epoch) / self.total_iters
        return float(self.base_lrs[index] * left**self.power)


class CosineAnnealingLR(LRScheduler):
    """A cosine wave that falls to `eta_min` in `T_max` steps and rises in the next `T_max` (Loshchilov & Hutter, 2017).

    For a single decay, stop or switch to another scheduler at step `T_max`.
    """

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        check_range("T_max", T_max, 1)
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, last_epoch)

    def next_rate(self, lr: float, index: int) -> float:
        step, length, low = self.last_epoch, self.T_max, self.eta_min
        if step == 0:
            return lr
        if self._is_initial:
            return self.rate(index)
        if (step - 1 - length) % (2 * length) == 0:  # one step after the minimum, where the recursion divides by 0
            return lr + (self.base_lrs[index] - low) * (1 - math.cos(math.pi / length)) / 2
        ahead, behind = 1 + math.cos(math.pi * step / length), 1 + math.cos(math.pi * (step - 1) / length)
        return ahead / behind * (lr - low) + low

    def rate(self, index: int) -> float:
        wave = 1 + math.cos(math.pi * self.last_epoch / self.T_max)
        return self.eta_min + (self.base_lrs[index] - self.eta_min) * wave / 2


class CosineAnnealingWarmRestarts(LRScheduler):
    """Cosine decays from the initial rate to `eta_min`: the first has `T_0` steps, each next `T_mult` times as many."""

    def __init__(
        self, optimizer: Optimizer, T_0: int, T_mult: int = 1, eta_min: float = 0, last_epoch: int = -1
    ) -> None:
        check_range("T_0", T_0, 1)
        check_range("T_mult", T_mult, 1)
        self.T_0, self.T_mult, self.eta_min = T_0, T_mult, eta_min
        self.T_cur: float = last_epoch
        self.T_i = T_0
        super().__init__(optimizer, last_epoch)

    def next_rate(self, lr: float, index: int) -> float:
        wave = 1 + math.cos(math.pi * self.T_cur / self.T_i)
        return self.eta_min + (self.base_lrs[index] - self.eta_min) * wave / 2

    def step(self, epoch: float | None = None) -> None:
        """Advance to the next step, or to `epoch`, which may be fractional."""
        if epoch is None and self.last_epoch < 0:
            epoch = 0
        if epoch is None:
            epoch = self.last_epoch + 1
            self.T_cur += 1
            if self.T_cur >= self.T_i:
                self.T_cur, self.T_i = self.T_cur % self.T_i, self.T_i * self.T_mult
        else:
            check_range("epoch", epoch, 0)
            start, length = 0, self.T_0
            if self.T_mult == 1:
                start = int(epoch // length) * length
            while epoch >= start + length:
                start, length = start + length, length * self.T_mult
            self.T_cur, self.T_i = epoch - start, length  # the wave that contains `epoch`
        self.last_epoch = math.floor(epoch)
        self.set([self.next_rate(0.0, i) for i in range(len(self.base_lrs))])


# --- Rates and momentum in cycles -------------------------------------------------------------------------------------


class _Cycle(LRScheduler):
    """Base class: also cycles the momentum (or the first beta) between two values per group."""

    def take_momenta(self, optimizer: Optimizer, cycle_momentum: bool, base: Any, top: Any) -> None:
        """Read the momentum settings. Raises ConfigError for an optimizer without momentum."""
        if cycle_momentum and "momentum" not in optimizer.defaults and "betas" not in optimizer.defaults:
            raise ConfigError(
                f"{type(optimizer).__name__} has neither momentum nor betas", next="pass cycle_momentum=False"
            )
        self.cycle_momentum = cycle_momentum
        lows, highs = _for_groups("base_momentum", optimizer, base), _for_groups("max_momentum", optimizer, top)
        self.momentum_ends = list(zip(lows, highs, strict=True))

    def set_momentum(self, index: int, value: float) -> None:
        """Set the momentum (or the first beta) of a group."""
        group = self.optimizer.param_groups[index]
        if "betas" in self.optimizer.defaults:
            group["betas"] = (value, *group["betas"][1:])
        else:
            group["momentum"] = value


class OneCycleLR(_Cycle):
    """Rises from max_lr/div_factor to `max_lr`, then falls to the initial rate over `final_div_factor`.

    Args:
        max_lr: peak rate, one or one per group.
        total_steps: number of steps of the cycle; or pass `epochs` and `steps_per_epoch`.
        pct_start: fraction of the steps in which the rate rises.
        anneal_strategy: "cos" or "linear".
        cycle_momentum: whether momentum (or the first beta) falls from `max_momentum` to `base_momentum` while the rate
            rises, and rises while it falls.
        three_phase: fall to the initial rate in as many steps as the rise, then to the final rate.

    Smith & Topin, "Super-convergence" (2018).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: str = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | Sequence[float] = 0.85,
        max_momentum: float | Sequence[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        if total_steps is None and (epochs is None or steps_per_epoch is None):
            raise ConfigError("OneCycleLR needs total_steps, or epochs and steps_per_epoch")
        self.total_steps = total_steps if total_steps is not None else (epochs or 0) * (steps_per_epoch or 0)
        check_range("total_steps", self.total_steps, 1)
        if not 0 <= pct_start <= 1:
            raise ConfigError(f"pct_start is {pct_start}, and must be between 0 and 1")
        if anneal_strategy not in ("cos", "linear"):
            raise ConfigError(f"anneal_strategy is {anneal_strategy!r}", next='use "cos" or "linear"')
        self.anneal = along_cosine if anneal_strategy == "cos" else _line
        self.max_lrs = _for_groups("max_lr", optimizer, max_lr)
        self.final_div_factor = final_div_factor
        up, last = float(pct_start * self.total_steps) - 1, self.total_steps - 1
        first, top, end = 0, 1, 2  # indices of the initial, the peak and the final rate
        # A phase: its end, the rates it starts and ends with, and the momenta it starts and ends with.
        self.phases = [(up, first, top, 1, 0), (last, top, end, 0, 1)]
        if three_phase:
            down = float(2 * pct_start * self.total_steps) - 2
            self.phases = [(up, first, top, 1, 0), (down, top, first, 0, 1), (last, first, end, 1, 1)]
        if last_epoch == -1:
            for group, peak in zip(optimizer.param_groups, self.max_lrs, strict=True):
                group["initial_lr"] = peak / div_factor
        self.take_momenta(optimizer, cycle_momentum, base_momentum, max_momentum)
        super().__init__(optimizer, last_epoch)

    def next_rate(self, lr: float, index: int) -> float:
        if self.last_epoch > self.total_steps:
            raise ConfigError(
                f"OneCycleLR has {self.total_steps} steps, and this is step {self.last_epoch}",
                next="set total_steps to the number of steps of the run",
            )
        start = 0.0
        for end, *ends in self.phases:  # noqa: B007
            if self.last_epoch <= end:
                break
            if end != self.phases[-1][0]:
                start = end
        share = (self.last_epoch - start) / (end - start) if end != start else 1.0
        low = self.base_lrs[index]
        rates = (low, self.max_lrs[index], low / self.final_div_factor)
        if self.cycle_momentum:
            momenta = self.momentum_ends[index]
            self.set_momentum(index, self.anneal(momenta[ends[2]], momenta[ends[3]], share))
        return self.anneal(rates[ends[0]], rates[ends[1]], share)


def _line(start: float, end: float, share: float) -> float:
    return (end - start) * share + start


class CyclicLR(_Cycle):
    """Cycles between `base_lr` and `max_lr`, with momentum in the opposite direction (Smith, 2017).

    Args:
        base_lr, max_lr: rates, one or one per group.
        step_size_up, step_size_down: steps of a rise and of a fall, equal by default.
        mode: "triangular"; "triangular2" halves the height every cycle; "exp_range" multiplies it by gamma^step.
        scale_fn, scale_mode: factor of the height, as a function of the "cycle" or of the step ("iterations"); replaces
            `mode`.
        cycle_momentum: whether momentum (or the first beta) cycles, too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_lr: float | Sequence[float],
        max_lr: float | Sequence[float],
        step_size_up: int = 2000,
        step_size_down: int | None = None,
        mode: str = "triangular",
        gamma: float = 1.0,
        scale_fn: Callable[[float], float] | None = None,
        scale_mode: str = "cycle",
        cycle_momentum: bool = True,
        base_momentum: float | Sequence[float] = 0.8,
        max_momentum: float | Sequence[float] = 0.9,
        last_epoch: int = -1,
    ) -> None:
        check_range("step_size_up", step_size_up, 1)
        modes: dict[str, tuple[Callable[[float], float], str]] = {
            "triangular": (lambda cycle: 1.0, "cycle"),
            "triangular2": (lambda cycle: 1 / 2.0 ** (cycle - 1), "cycle"),
            "exp_range": (lambda step: gamma**step, "iterations"),
        }
        if scale_fn is None and mode not in modes:
            raise ConfigError(f"mode is {mode!r}", next=f"use {', '.join(modes)}, or pass a scale_fn")
        self.scale, self.scale_mode = (scale_fn, scale_mode) if scale_fn is not None else modes[mode]
        if self.scale_mode not in ("cycle", "iterations"):
            raise ConfigError(f"scale_mode is {scale_mode!r}", next='use "cycle" or "iterations"')
        self.cycle_steps = step_size_up + (step_size_up if step_size_down is None else step_size_down)
        self.share_up = step_size_up / self.cycle_steps
        lows, self.max_lrs = _for_groups("base_lr", optimizer, base_lr), _for_groups("max_lr", optimizer, max_lr)
        if last_epoch == -1:
            for group, low in zip(optimizer.param_groups, lows, strict=True):
                group["lr"] = group["initial_lr"] = low
        self.take_momenta(optimizer, cycle_momentum, base_momentum, max_momentum)
        super().__init__(optimizer, last_epoch)

    def next_rate(self, lr: float, index: int) -> float:
        cycle = math.floor(1 + self.last_epoch / self.cycle_steps)
        x = 1.0 + self.last_epoch / self.cycle_steps - cycle
        height = x / self.share_up if x <= self.share_up else (x - 1) / (self.share_up - 1)
        scale = self.scale(cycle if self.scale_mode == "cycle" else self.last_epoch)
        if self.cycle_momentum:
            low, high = self.momentum_ends[index]
            self.set_momentum(index, high - (high - low) * height * scale)
        low = self.base_lrs[index]
        return float(low + (self.max_lrs[index] - low) * height * scale)


# --- Combinations -----------------------------------------------------------------------------------------------------


class _Combination(LRScheduler):
    """Base class: several schedulers of one optimizer."""

    def _set_schedulers(self, optimizer: Optimizer | None, schedulers: Sequence[LRScheduler]) -> None:
        name = type(self).__name__
        if not schedulers:
            raise ConfigError(f"{name} got no schedulers")
        self._schedulers = list(schedulers)
        self.optimizer = schedulers[0].optimizer if optimizer is None else optimizer
        for i, each in enumerate(self._schedulers):
            if isinstance(each, ReduceLROnPlateau) or not isinstance(each, LRScheduler):
                raise ConfigError(f"{name}: scheduler {i} is a {type(each).__name__}, which it does not take")
            if each.optimizer is not self.optimizer:
                raise ConfigError(f"{name}: scheduler {i} has a different optimizer")

    def step(self, epoch: int | None = None) -> None:
        """Advance to the next step."""
        if epoch is not None:
            raise ConfigError(f"{type(self).__name__}.step takes no epoch", next="call step() without arguments")
        self.advance()

    def advance(self) -> None:
        """Step the schedulers that are active."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return all attributes but the optimizer, and the states of the schedulers."""
        return {**super().state_dict(), "_schedulers": [s.state_dict() for s in self._schedulers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a saved step, with its settings and rates."""
        own, saved = self._schedulers, state_dict.get("_schedulers", ())
        if len(saved) != len(own):
            raise ConfigError(f"the state has {len(saved)} schedulers, expected {len(own)}")
        for each, state in zip(own, saved, strict=True):
            each.load_state_dict(state)
        super().load_state_dict(state_dict)
        self._schedulers = own


class SequentialLR(_Combination):
    """Schedulers in sequence. Scheduler i starts at step milestones[i-1], which is its own step 0."""

    def __init__(
        self, optimizer: Optimizer, schedulers: Sequence[LRScheduler], milestones: Sequence[int], last_epoch: int = -1
    ) -> None:
        _check_optimizer(optimizer)
        self._set_schedulers(optimizer, schedulers)
        if len(milestones) != len(schedulers) - 1 or list(milestones) != sorted(milestones):
            raise ConfigError(
                f"{len(schedulers)} schedulers have the milestones {list(milestones)}",
                next="pass the first step of each scheduler after the first, in order",
            )
        self._milestones, self.last_epoch = list(milestones), last_epoch + 1
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        _undo_first_steps(self)
        now = self._schedulers[bisect_right(self._milestones, 0)]
        now.start()
        self._last_lr = now.get_last_lr()

    def advance(self) -> None:
        self.last_epoch += 1
        index = bisect_right(self._milestones, self.last_epoch)
        now = self._schedulers[index]
        if index > 0 and self._milestones[index - 1] == self.last_epoch:
            now._update_lr(0)
        else:
            now.step()
        self._last_lr = now.get_last_lr()


def _undo_first_steps(scheduler: LRScheduler) -> None:
    """Uncount the step that each nested scheduler took at construction."""
    for each in scheduler._schedulers if isinstance(scheduler, _Combination) else ():
        if isinstance(each, _Combination):
            _undo_first_steps(each)
        else:
            each.last_epoch -= 1


class ChainedScheduler(_Combination):
    """Steps all schedulers in every step, so that their factors multiply."""

    def __init__(self, schedulers: Sequence[LRScheduler], optimizer: Optimizer | None = None) -> None:
        self._set_schedulers(optimizer, schedulers)
        self._last_lr = [float(g["lr"]) for g in self.optimizer.param_groups]

    def advance(self) -> None:
        for each in self._schedulers:
            each.step()
        self._last_lr = [float(g["lr"]) for g in self.optimizer.param_groups]


class ReduceLROnPlateau(LRScheduler):
    """Multiplies the rate by `factor` after more than `patience` steps in a row without an improvement by `threshold`.

    Args:
        mode: "min" or "max", the direction of improvement.
        threshold_mode: "rel" (threshold relative to the best value) or "abs".
        cooldown: steps after a change that are not counted.
        min_lr: lower bound of the rate, one or one per group.
        eps: minimum change of the rate; smaller ones are skipped.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0,
        eps: float = 1e-8,
    ) -> None:
        check_range("factor", factor, 0, 1)
        if mode not in ("min", "max"):
            raise ConfigError(f"mode is {mode!r}", next="use min or max")
        if threshold_mode not in ("rel", "abs"):
            raise ConfigError(f"threshold_mode is {threshold_mode!r}", next="use rel or abs")
        self.optimizer, self.mode, self.factor, self.patience = optimizer, mode, factor, patience
        self.threshold, self.threshold_mode, self.cooldown, self.eps = threshold, threshold_mode, cooldown, eps
        self.min_lrs = _for_groups("min_lr", optimizer, min_lr)
        self.last_epoch, self.cooldown_counter, self.num_bad_epochs = 0, 0, 0
        self.best = math.inf if mode == "min" else -math.inf
        self._last_lr = [float(g["lr"]) for g in optimizer.param_groups]

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]
        """Count a step with the value `metrics`, a number or a 0-d tensor, and lower the rates on a plateau."""
        current = float(metrics)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.is_better(current):
            self.best, self.num_bad_epochs = current, 0
        else:
            self.num_bad_epochs += 1
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs > self.patience:
            for group, least in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
                old = float(group["lr"])
                new = max(old * self.factor, least)
                if old - new > self.eps:
                    group["lr"] = new
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
        self._last_lr = [float(g["lr"]) for g in self.optimizer.param_groups]

    def is_better(self, value: float) -> bool:
        """Whether a value improves on the best so far by more than the threshold."""
        sign = -1.0 if self.mode == "min" else 1.0
        step = sign * self.threshold
        bound = self.best * (1.0 + step) if self.threshold_mode == "rel" else self.best + step
        return value < bound if self.mode == "min" else value > bound


check_calls(globals(), __all__)
