"""Stochastic gradient descent, with momentum and Nesterov's variant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from genesis.errors import ConfigError
from genesis.ops.optimizers import sgd_momentum_step, sgd_step
from genesis.optim.optimizer import How, Optimizer
from genesis.optim.unit import Scale, Unit, check_range, run_step
from genesis.shapes import Shape
from genesis.tensor import Tensor

__all__ = ["SGD"]


class SGD(Optimizer):
    """p -= lr·b, where b = momentum·b + (1 - dampening)·(g + weight_decay·p) and starts at the first gradient.

    Args:
        params: see `Optimizer`.
        lr: learning rate.
        momentum: share of b that is kept; 0 keeps no b.
        dampening: share of later gradients that is left out of b.
        weight_decay: L2 penalty, added to the gradient.
        nesterov: step along g + momentum·b; needs a momentum and no dampening.
        maximize: ascend.
        how: see `Optimizer`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **how: Unpack[How],
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **how)

    def check_settings(self, group: dict[str, Any]) -> None:
        for name in ("lr", "momentum", "weight_decay"):
            check_range(name, group[name], 0)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ConfigError("nesterov needs a momentum above 0 and a dampening of 0")

    def state_shapes(self, param: Tensor, group: dict[str, Any]) -> dict[str, Shape]:
        return {"momentum_buffer": param.shape} if group["momentum"] else {}

    def plain_update(self, unit: Unit, group: dict[str, Any], grad: Tensor) -> None:
        param, lr, momentum, decay = unit.param, group["lr"], group["momentum"], group["weight_decay"]
        if not momentum:
            step = grad * lr
            if decay:
                param.mul_(1 - lr * decay)
            param.sub_(step)
            return
        if decay:
            grad = grad + param * decay
        buffer = unit.state["momentum_buffer"]
        if unit.step == 1:
            buffer.copy_(grad)
        else:
            buffer.mul_(momentum).add_(grad * (1 - group["dampening"]))
        direction = grad + buffer * momentum if group["nesterov"] else buffer
        param.sub_(direction * lr)

    def fused_update(self, unit: Unit, group: dict[str, Any], scale: Scale) -> None:
        if not group["momentum"]:
            run_step(sgd_step, unit, (), group["lr"], scale, weight_decay=group["weight_decay"])
            return
        settings = {k: group[k] for k in ("momentum", "dampening", "nesterov", "weight_decay")}
        run_step(sgd_momentum_step, unit, ("momentum_buffer",), group["lr"], scale, **settings)
