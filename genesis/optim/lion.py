"""Lion: steps of one size, in the direction of the sign of an averaged gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from genesis.ops.optimizers import lion_step
from genesis.optim.optimizer import LowPrecision, Optimizer, Scale, Unit, check_range
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
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        low_precision: LowPrecision = "master",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, foreach=foreach, fused=fused, low_precision=low_precision, seed=seed)

    def check_settings(self, group: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay"):
            check_range(name, group[name], 0)
        for i, beta in enumerate(group["betas"]):
            check_range(f"betas[{i}]", beta, 0, 1)

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
        lion_step(
            unit.param.array,
            unit.grad.array,
            unit.state["exp_avg"].array,
            group["lr"],
            scale,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
        )
