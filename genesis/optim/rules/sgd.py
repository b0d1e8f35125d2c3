"""Stochastic gradient descent, with momentum and Nesterov momentum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Unpack

from genesis.errors import ConfigError
from genesis.ops.rule import Rule, where
from genesis.optim.flat import RuleCall
from genesis.optim.optimizer import How, Optimizer
from genesis.shapes import Shape


def plain_constants(lr, step, scale, weight_decay):
    return 1 - lr * weight_decay, lr * scale


def plain(p, g, keep, take):
    """p -= lr·(c·g + wd·p), where c is `grad_scale`. The step count affects only the rounding noise."""
    return (p * keep - g * take,)


def momentum_constants(lr, step, scale, momentum, dampening, weight_decay, l2, nesterov):
    return lr, scale, momentum, 1 - dampening, weight_decay, step <= 1


def with_momentum(p, g, b, lr, scale, mu, take, decay, is_first, l2, nesterov):
    """With g' = c·g + wd·p: b = g' at step 1, else b = μ·b + (1-δ)·g'; p -= lr·b, or lr·(g' + μ·b) with Nesterov.

    Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013), in torch's form.
    """
    g = g * scale + p * decay if l2 else g * scale
    b = where(is_first != 0, g, b * mu + g * take)
    update = g + b * mu if nesterov else b
    return p - update * lr, b


PLAIN = Rule("sgd", (), ("weight_decay",), plain_constants, plain, flops=4)
MOMENTUM = Rule(
    "sgd_momentum",
    ("momentum_buffer",),
    ("momentum", "dampening", "weight_decay"),
    momentum_constants,
    with_momentum,
    flops=7,
    choices=lambda attrs: (bool(attrs["weight_decay"]), bool(attrs["nesterov"])),
)


class SGD(Optimizer):
    """p -= lr·b, where b = momentum·b + (1 - dampening)·(g + weight_decay·p) and starts at the first gradient.

    Args:
        params: see `Optimizer`.
        lr: learning rate.
        momentum: decay rate of b; 0 means plain SGD without b.
        dampening: fraction of later gradients that does not enter b.
        weight_decay: factor of the L2 penalty, which is added to the gradient.
        nesterov: step along g + momentum·b; needs a momentum above 0 and a dampening of 0.
        maximize: ascend instead of descend.
        how: see `Optimizer`.
    """

    shows_step = False
    at_least_0 = ("lr", "momentum", "weight_decay")
    in_runs: ClassVar[dict[str, Any]] = {"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 0.0}

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
        super().check_settings(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ConfigError("nesterov needs a momentum above 0 and a dampening of 0")

    @classmethod
    def rule(cls, shape: Shape, group: Mapping[str, Any]) -> RuleCall:
        if not group["momentum"]:
            return RuleCall(PLAIN, {"weight_decay": group["weight_decay"]})
        return RuleCall(MOMENTUM, {k: group[k] for k in ("momentum", "dampening", "nesterov", "weight_decay")})
