"""Lion: steps of one size, in the direction of the sign of an averaged gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from genesis.ops.optimizers import lion_step
from genesis.optim.optimizer import How, Optimizer
from genesis.optim.unit import Scale, Unit, check_betas, check_range, run_step
from genesis.shapes import Shape
from genesis.tensor import Tensor

__all__ = ["Lion"]


class Lion(Optimizer):
    """Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023) with decoupled weight decay.

    Args:
        params: see `Optimizer`.
        lr: length of a step of every element; about a tenth of Adam's.
        betas: weight of the average in the step's direction, and decay of the average.
        weight_decay: p = (1 - lr·weight_decay)·p before the step.
        maximize: ascend.
        how: see `Optimizer`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **how: Unpack[How],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **how)

    def check_settings(self, group: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            check_range(name, group[name], 0)
        check_betas(group)

    def state_shapes(self, param: Tensor, group: dict[str, Any]) -> dict[str, Shape]:
        return {"exp_avg": param.shape}

    def plain_update(self, unit: Unit, group: dict[str, Any], grad: Tensor) -> None:
        (beta1, beta2), lr = group["betas"], group["lr"]
        param, exp_avg = unit.param, unit.state["exp_avg"]
        update = (exp_avg * beta1 + grad * (1 - beta1)).sign() * lr
        if group["weight_decay"]:
            param.mul_(1 - lr * group["weight_decay"])
        param.sub_(update)
        exp_avg.mul_(beta2).add_(grad * (1 - beta2))

    def fused_update(self, unit: Unit, group: dict[str, Any], scale: Scale) -> None:
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        run_step(
            lion_step, unit, ("exp_avg",), group["lr"], scale, beta1=beta1, beta2=beta2, weight_decay=decay
        )  # fmt: skip
