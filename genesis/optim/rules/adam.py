"""Adam and AdamW: step along a running average of the gradient, divided by the root of the average of its square."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Unpack

from genesis.errors import KeywordError
from genesis.ops.rule import Rule, divide, power, sqrt
from genesis.optim.flat import RuleCall, check_flags
from genesis.optim.optimizer import How, Optimizer, betas_of
from genesis.optim.rules.composed import amsgrad as with_maximum
from genesis.optim.rules.composed import composed
from genesis.shapes import Shape


def constants(lr, step, scale, beta1, beta2, eps, weight_decay, l2):
    root = sqrt(1 - power(beta2, step))
    c = 1.0 if l2 else scale  # an L2 penalty is added to the gradient after scaling it
    k1, k2, alpha = (1 - beta1) * c, (1 - beta2) * c * c, lr / (1 - power(beta1, step)) * root
    return beta1, beta2, k1, k2, eps * root, alpha, 1 - lr * weight_decay, scale, weight_decay


def update(p, g, m, v, b1, b2, k1, k2, eps, alpha, keep, scale, decay, l2):
    """m = β1·m + (1-β1)·c·g, v = β2·v + (1-β2)·(c·g)², p = (1 - lr·wd)·p - α·m / (√v + ε·√b2).

    b1 = 1-β1^t, b2 = 1-β2^t and α = lr·√b2/b1, in the order of operations at the end of section 2 of Kingma & Ba,
    "Adam" (2015). Decay is decoupled (Loshchilov & Hutter, 2019), or wd·p is added to c·g instead.
    """
    if l2:
        g = p * decay + g * scale
    else:
        p = p * keep
    m = m * b1 + g * k1
    v = v * b2 + g * g * k2
    return p - divide(m, sqrt(v) + eps) * alpha, m, v


ADAMW = Rule(
    "adamw",
    ("exp_avg", "exp_avg_sq"),
    ("beta1", "beta2", "eps", "weight_decay"),
    constants,
    update,
    flops=13,
    choices=lambda attrs: (bool(attrs["weight_decay"]) and not attrs["decoupled"],),
)


class Adam(Optimizer):
    """Adam (Kingma & Ba, 2015). Weight decay is an L2 penalty, which is added to the gradient.

    Args:
        params: see `Optimizer`.
        lr: learning rate.
        betas: decay rates of the averages of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: factor of the L2 penalty.
        amsgrad: divide by the root of the largest average so far (Reddi et al., 2018), in tensor operations.
        maximize: ascend instead of descend.
        decoupled_weight_decay: decay as `AdamW` does.
        how: see `Optimizer`.
    """

    at_least_0 = ("lr", "eps", "weight_decay")
    below_1 = ("betas",)
    in_runs: ClassVar[dict[str, Any]] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        **how: Unpack[How],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        defaults |= {"maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, defaults, **how)

    def check_settings(self, group: dict[str, Any]) -> None:
        super().check_settings(group)
        check_flags(group, ("amsgrad", "decoupled_weight_decay"))
        if group["amsgrad"]:
            self.elementwise = False  # the states are not stored in flat buffers

    @property
    def not_capturable(self) -> str | None:
        """The reason why a CUDA graph cannot capture `update`, or None if it can."""
        if any(group["amsgrad"] for group in self.param_groups):
            return "amsgrad reads the step count on the host"
        return super().not_capturable

    @classmethod
    def rule(cls, shape: Shape, group: Mapping[str, Any]) -> RuleCall:
        if group["amsgrad"]:
            return composed(with_maximum, shape, group, {"exp_avg": 0, "exp_avg_sq": 0, "max_exp_avg_sq": 0})
        decoupled = group["decoupled_weight_decay"]
        attrs = {"eps": group["eps"], "weight_decay": group["weight_decay"], "decoupled": decoupled}
        return RuleCall(ADAMW, betas_of(group) | attrs)


class AdamW(Adam):
    """Adam with decoupled weight decay: p = (1 - lr·weight_decay)·p before the step (Loshchilov & Hutter, 2019).

    It takes the arguments of `Adam`. Usually only matrices decay, see `decay_groups`.
    """

    in_runs: ClassVar[dict[str, Any]] = {**Adam.in_runs, "weight_decay": 0.1}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **how: Unpack[How],
    ) -> None:
        given = how.pop("decoupled_weight_decay", True)  # type: ignore[typeddict-item]
        if given is False:
            raise KeywordError("AdamW does not offer decoupled_weight_decay=False", next="use Adam for an L2 penalty")
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True, **how
        )
