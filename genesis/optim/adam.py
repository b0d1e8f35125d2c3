"""Adam and AdamW: steps along running averages of the gradient, divided by the root of those of its square."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Unpack

from genesis.ops.optimizers import adamw_step
from genesis.optim.optimizer import How, Optimizer
from genesis.optim.unit import Scale, Unit, check_betas, check_range, run_step
from genesis.shapes import Shape
from genesis.tensor import Tensor

__all__ = ["Adam", "AdamW", "adamw_fused", "adamw_plain"]


def adamw_plain(unit: Unit, group: dict[str, Any], grad: Tensor, decoupled: bool) -> None:
    """The update in tensor operations, in the order of `genesis.ops.optimizers.adamw_step`, which names its source."""
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    param, exp_avg, exp_avg_sq = unit.param, unit.state["exp_avg"], unit.state["exp_avg_sq"]
    if decay and not decoupled:
        grad = grad + param * decay
    exp_avg.mul_(beta1).add_(grad * (1 - beta1))
    exp_avg_sq.mul_(beta2).add_(grad * grad * (1 - beta2))
    root = math.sqrt(1 - beta2**unit.step)
    step_size = lr / (1 - beta1**unit.step) * root
    update = exp_avg / (exp_avg_sq.sqrt() + group["eps"] * root) * step_size
    if decay and decoupled:
        param.mul_(1 - lr * decay)
    param.sub_(update)


def adamw_fused(unit: Unit, group: dict[str, Any], scale: Scale, decoupled: bool) -> None:
    """The update as one op."""
    run_step(
        adamw_step,
        unit,
        ("exp_avg", "exp_avg_sq"),
        group["lr"],
        scale,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=decoupled,
    )


class Adam(Optimizer):
    """Adam (Kingma & Ba, 2015); weight decay is an L2 penalty, added to the gradient.

    Args:
        params: see `Optimizer`.
        lr: learning rate.
        betas: decay of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: see above.
        maximize: ascend.
        how: see `Optimizer`.
    """

    decoupled = False
    neutral: ClassVar[Mapping[str, Any]] = {"decoupled_weight_decay": False}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **how: Unpack[How],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **how)

    def check_settings(self, group: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_range(name, group[name], 0)
        check_betas(group)

    def state_shapes(self, param: Tensor, group: dict[str, Any]) -> dict[str, Shape]:
        return {"exp_avg": param.shape, "exp_avg_sq": param.shape}

    def plain_update(self, unit: Unit, group: dict[str, Any], grad: Tensor) -> None:
        adamw_plain(unit, group, grad, self.decoupled)

    def fused_update(self, unit: Unit, group: dict[str, Any], scale: Scale) -> None:
        adamw_fused(unit, group, scale, self.decoupled)


class AdamW(Adam):
    """Adam with decoupled weight decay: p = (1 - lr·weight_decay)·p before the step (Loshchilov & Hutter, 2019).

    Args as for `Adam`. Decay is usually for matrices alone: see `decay_groups`.
    """

    decoupled = True
    neutral: ClassVar[Mapping[str, Any]] = {"decoupled_weight_decay": True}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        **how: Unpack[How],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, **how)
