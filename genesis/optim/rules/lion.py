"""Lion: steps of equal size along the sign of an averaged gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Unpack

from genesis.ops.rule import Rule, sign
from genesis.optim.flat import RuleCall
from genesis.optim.optimizer import How, Optimizer, betas_of
from genesis.shapes import Shape


def constants(lr, step, scale, beta1, beta2, weight_decay):
    return beta1, beta2, (1 - beta1) * scale, (1 - beta2) * scale, lr, 1 - lr * weight_decay


def update(p, g, m, b1, b2, k1, k2, lr, keep):
    """p = (1 - lr·wd)·p - lr·sign(β1·m + (1-β1)·c·g), then m = β2·m + (1-β2)·c·g (Chen et al., 2023, algorithm 2).

    The step count affects only the rounding noise.
    """
    step = sign(m * b1 + g * k1, lr)
    return p * keep - step, m * b2 + g * k2


LION = Rule("lion", ("exp_avg",), ("beta1", "beta2", "weight_decay"), constants, update, flops=9)


class Lion(Optimizer):
    """Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023) with decoupled weight decay.

    Args:
        params: see `Optimizer`.
        lr: step size of every element; about a tenth of Adam's.
        betas: weight of the average in the step's direction, and decay rate of the average.
        weight_decay: p = (1 - lr·weight_decay)·p before the step.
        maximize: ascend instead of descend.
        how: see `Optimizer`.
    """

    at_least_0 = ("lr", "weight_decay")
    below_1 = ("betas",)
    in_runs: ClassVar[dict[str, Any]] = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}

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

    @classmethod
    def rule(cls, shape: Shape, group: Mapping[str, Any]) -> RuleCall:
        return RuleCall(LION, {**betas_of(group), "weight_decay": group["weight_decay"]})
