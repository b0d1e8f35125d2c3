"""Averages of a model's weights over training (Izmailov et al., 2018), as in torch.optim.swa_utils."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from genesis.autograd import no_grad
from genesis.errors import ConfigError, UsageError
from genesis.functions.create import tensor
from genesis.keywords import check_calls
from genesis.nn.channel_layers import BatchNorm1d
from genesis.nn.module import Module
from genesis.optim.flat import check_range
from genesis.optim.lr_scheduler import LRScheduler, _for_groups
from genesis.optim.optimizer import Optimizer
from genesis.tensor import Tensor

__all__ = [
    "SWALR", "AveragedModel", "get_ema_avg_fn", "get_ema_multi_avg_fn", "get_swa_avg_fn", "get_swa_multi_avg_fn",
    "update_bn",
]  # fmt: skip

Average = Callable[[Tensor, Tensor, Any], Tensor]
MultiAverage = Callable[[Sequence[Tensor], Sequence[Tensor], Any], None]


def get_ema_avg_fn(decay: float = 0.999) -> Average:
    """Return the function of the exponential moving average: decay·average + (1 - decay)·value."""
    if not 0 <= decay <= 1:
        raise ConfigError(f"decay is {decay}, and must be between 0 and 1")
    return no_grad()(lambda averaged, current, count: decay * averaged + (1 - decay) * current)


def get_swa_avg_fn() -> Average:
    """Return the function of the equally weighted average: average + (value - average) / (count + 1)."""
    return no_grad()(lambda averaged, current, count: averaged + (current - averaged) / (count + 1))


def _for_lists(average: Average) -> MultiAverage:
    @no_grad()
    def update(averaged: Sequence[Tensor], current: Sequence[Tensor], count: Any) -> None:
        for mine, other in zip(averaged, current, strict=True):
            mine.copy_(average(mine, other, count))

    return update


def get_ema_multi_avg_fn(decay: float = 0.999) -> MultiAverage:
    """Return a function that updates lists of tensors in place as `get_ema_avg_fn` says."""
    return _for_lists(get_ema_avg_fn(decay))


def get_swa_multi_avg_fn() -> MultiAverage:
    """Return a function that updates lists of tensors in place as `get_swa_avg_fn` says."""
    return _for_lists(get_swa_avg_fn())


class AveragedModel(Module):
    """A copy of a model whose parameters are averages of the model's parameters at calls of `update_parameters`.

    Args:
        device: place of the copy, by default the model's.
        avg_fn: called with the average, the model's value and the number of averaged models; returns the new average.
            By default the average is equally weighted, see `get_swa_avg_fn`.
        multi_avg_fn: the same for lists of tensors of one dtype and device, in place.
        use_buffers: average buffers, too, instead of copying them.
    """

    n_averaged: Tensor

    def __init__(
        self,
        model: Module,
        device: Any = None,
        avg_fn: Average | None = None,
        multi_avg_fn: MultiAverage | None = None,
        use_buffers: bool = False,
    ) -> None:
        super().__init__()
        if avg_fn is not None and multi_avg_fn is not None:
            raise UsageError("AveragedModel takes avg_fn or multi_avg_fn, not both")
        self.module = copy.deepcopy(model)
        if device is not None:
            self.module.to(device)
        self.register_buffer("n_averaged", tensor(0, device=device))
        self.avg_fn, self.multi_avg_fn, self.use_buffers = avg_fn, multi_avg_fn, use_buffers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @no_grad()
    def update_parameters(self, model: Module) -> None:
        """Include the parameters of `model` in the average; the first call copies them."""
        buffers = list(zip(self.module.buffers(), model.buffers(), strict=True))
        pairs: list[tuple[Tensor, Tensor]] = list(zip(self.module.parameters(), model.parameters(), strict=True))
        pairs += buffers if self.use_buffers else []
        count, groups = self.n_averaged, dict[Any, list[tuple[Tensor, Tensor]]]()
        for mine, other in pairs:
            groups.setdefault((mine.device, mine.dtype), []).append((mine.detach(), other.detach().to(mine.device)))
        for (device, _), members in groups.items():
            if count == 0:
                for mine, other in members:
                    mine.copy_(other)
                continue
            update = self.multi_avg_fn or _for_lists(self.avg_fn or get_swa_avg_fn())
            update([mine for mine, _ in members], [other for _, other in members], count.to(device))
        for mine, other in () if self.use_buffers else buffers:
            mine.copy_(other)
        self.n_averaged += 1


@no_grad()
def update_bn(loader: Iterable[Any], model: Module, device: Any = None) -> None:
    """Compute the running statistics of all batch norms anew, as averages over the batches of `loader`.

    A batch is a tensor, or a list or tuple that begins with the tensor for the model.
    """
    norms = {m: m.momentum for m in model.modules() if isinstance(m, BatchNorm1d)}
    if not norms:
        return
    was_training = model.training
    model.train()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    for batch in loader:
        inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
        model(inputs if device is None else inputs.to(device))
    for norm, momentum in norms.items():
        norm.momentum = momentum
    model.train(was_training)


class SWALR(LRScheduler):
    """Moves the rates to `swa_lr` in `anneal_epochs` steps, where they stay.

    Args:
        swa_lr: final rate, one or one per group.
        anneal_strategy: "cos" or "linear".
    """

    def __init__(
        self,
        optimizer: Optimizer,
        swa_lr: float | Sequence[float],
        anneal_epochs: int = 10,
        anneal_strategy: str = "cos",
        last_epoch: int = -1,
    ) -> None:
        for group, rate in zip(optimizer.param_groups, _for_groups("swa_lr", optimizer, swa_lr), strict=True):
            group["swa_lr"] = rate
        if anneal_strategy not in ("cos", "linear"):
            raise ConfigError(f"anneal_strategy is {anneal_strategy!r}", next='use "cos" or "linear"')
        check_range("anneal_epochs", anneal_epochs, 0)
        self.anneal_strategy, self.anneal_epochs = anneal_strategy, anneal_epochs
        super().__init__(optimizer, last_epoch)

    def _share(self, step: int) -> float:
        """The share of the final rate in the rate of a step."""
        done = max(0.0, min(1.0, step / max(1, self.anneal_epochs)))
        return (1 - math.cos(math.pi * done)) / 2 if self.anneal_strategy == "cos" else done

    def next_rate(self, lr: float, index: int) -> float:
        step = self._step_count - 1 if self.anneal_epochs else max(1, self._step_count - 1)
        end, before, share = self.optimizer.param_groups[index]["swa_lr"], self._share(step - 1), self._share(step)
        start = end if before == 1 else (lr - before * end) / (1 - before)
        return float(end * share + start * (1 - share))


check_calls(globals(), __all__)
