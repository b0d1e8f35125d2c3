"""torch's optimizers that have no kernel here: tensor operations update one parameter after the other.

They read step count and learning rate on the host, so a CUDA graph cannot capture them. Flat buffers hold their
parameters and gradients, not their states. The formulas are torch's, with its order of operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Unpack

from genesis.errors import ConfigError
from genesis.functions.create import tensor
from genesis.optim.flat import MatrixRule, RuleCall, check_pair, check_range
from genesis.optim.optimizer import How, Optimizer
from genesis.shapes import Shape
from genesis.tensor import Tensor

Formula = Callable[..., None]
IMPLEMENTATION = ("capturable", "foreach", "differentiable")  # arguments that are not settings of a group


def _penalized(p: Tensor, g: Tensor, weight_decay: float, decoupled_lr: float | None = None) -> Tensor:
    """Return the gradient with the L2 penalty or, with `decoupled_lr`, decay the parameter and return it unchanged."""
    if decoupled_lr is None:
        return g + p * weight_decay if weight_decay else g
    p.mul_(1 - decoupled_lr * weight_decay)
    return g


class Composed(Optimizer):
    """Base of these optimizers: `formula(p, g, *states, lr, step, **settings)` updates in place."""

    elementwise = False
    at_least_0: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")
    states: ClassVar[dict[str, float | str]]  # initial values; a text names the setting that holds the value
    scalars: ClassVar[tuple[str, ...]] = ()  # the states with one element
    formula: ClassVar[Formula]

    def _start(self, params: Iterable[Any], arguments: dict[str, Any], **how: Any) -> None:
        settings = {k: v for k, v in arguments.items() if k not in ("self", "params", "how")}
        super().__init__(params, settings, **{k: settings.pop(k) for k in IMPLEMENTATION if k in settings}, **how)

    @property
    def not_capturable(self) -> str | None:
        """The reason why a CUDA graph cannot capture `update`."""
        return f"{type(self).__name__} reads the step count on the host"

    @classmethod
    def rule(cls, shape: Shape, group: Mapping[str, Any]) -> RuleCall:
        initial = {k: float(group[v]) if isinstance(v, str) else v for k, v in cls.states_of(group).items()}
        return composed(cls.formula, shape, group, initial, cls.scalars)

    @classmethod
    def states_of(cls, group: Mapping[str, Any]) -> dict[str, float | str]:
        """Return the states of a group."""
        return cls.states


def composed(
    formula: Formula, shape: Shape, group: Mapping[str, Any], initial: dict[str, float], scalars: tuple[str, ...] = ()
) -> RuleCall:
    """Return the call of a formula in tensor operations; its settings are its keyword-only arguments."""
    code = formula.__code__
    names = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    shapes = {name: () if name in scalars else shape for name in initial}
    return RuleCall(MatrixRule(None, lambda shape: shapes, formula), {n: group[n] for n in names}, initial)


# --- Formulas ---------------------------------------------------------------------------------------------------------


def amsgrad(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, most: Tensor, lr: float, step: int, *, betas: Any, eps: float,
    weight_decay: float, decoupled_weight_decay: bool,
) -> None:  # fmt: skip
    """Adam whose denominator is the largest average so far (Reddi et al., 2018)."""
    g = _penalized(p, g, weight_decay, lr if decoupled_weight_decay else None)
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    most.copy_(most.maximum(v))
    denominator = most.sqrt() / math.sqrt(1 - betas[1] ** step) + eps
    p.addcdiv_(m, denominator, value=-lr / (1 - betas[0] ** step))


def _adagrad(
    p: Tensor, g: Tensor, total: Tensor, lr: float, step: int, *, lr_decay: float, eps: float, weight_decay: float
) -> None:
    g = _penalized(p, g, weight_decay)
    total.addcmul_(g, g)
    p.addcdiv_(g, total.sqrt() + eps, value=-lr / (1 + (step - 1) * lr_decay))


def _adadelta(
    p: Tensor, g: Tensor, square: Tensor, delta: Tensor, lr: float, step: int, *, rho: float, eps: float,
    weight_decay: float,
) -> None:  # fmt: skip
    g = _penalized(p, g, weight_decay)
    square.mul_(rho).addcmul_(g, g, value=1 - rho)
    change = (delta + eps).sqrt() / (square + eps).sqrt() * g
    delta.mul_(rho).addcmul_(change, change, value=1 - rho)
    p.sub_(change * lr)


def _adamax(
    p: Tensor, g: Tensor, m: Tensor, largest: Tensor, lr: float, step: int, *, betas: Any, eps: float,
    weight_decay: float,
) -> None:  # fmt: skip
    g = _penalized(p, g, weight_decay)
    m.lerp_(g, 1 - betas[0])
    largest.copy_((largest * betas[1]).maximum(g.abs() + eps))
    p.addcdiv_(m, largest, value=-lr / (1 - betas[0] ** step))


def _nadam(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, product: Tensor, lr: float, step: int, *, betas: Any, eps: float,
    weight_decay: float, momentum_decay: float, decoupled_weight_decay: bool,
) -> None:  # fmt: skip
    g = _penalized(p, g, weight_decay, lr if decoupled_weight_decay else None)
    mu, following = (betas[0] * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in (step, step + 1))
    product.mul_(mu)
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    denominator, past = (v / (1 - betas[1] ** step)).sqrt() + eps, float(product)
    p.addcdiv_(g, denominator, value=-lr * (1 - mu) / (1 - past))
    p.addcdiv_(m, denominator, value=-lr * following / (1 - past * following))


def _radam(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float, step: int, *, betas: Any, eps: float, weight_decay: float,
    decoupled_weight_decay: bool,
) -> None:  # fmt: skip
    g = _penalized(p, g, weight_decay, lr if decoupled_weight_decay else None)
    m.lerp_(g, 1 - betas[0])
    v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
    left, limit = 1 - betas[1] ** step, 2 / (1 - betas[1]) - 1
    length = limit - 2 * step * betas[1] ** step / left
    change = m / (1 - betas[0] ** step) * lr
    if length > 5:  # the variance of the average is known well enough
        known = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
        change = change * (math.sqrt(left) / (v.sqrt() + eps)) * math.sqrt(known)
    p.sub_(change)


def _rmsprop(
    p: Tensor, g: Tensor, square: Tensor, *args: Any, alpha: float, eps: float, weight_decay: float, momentum: float,
    centered: bool,
) -> None:  # fmt: skip
    *more, lr, _ = args
    g = _penalized(p, g, weight_decay)
    square.mul_(alpha).addcmul_(g, g, value=1 - alpha)
    variance = square
    if centered:
        mean = more.pop()
        mean.lerp_(g, 1 - alpha)
        variance = square - mean * mean
    denominator = variance.sqrt() + eps
    if momentum > 0:
        more[0].mul_(momentum).addcdiv_(g, denominator)
        p.sub_(more[0] * lr)
    else:
        p.addcdiv_(g, denominator, value=-lr)


def _rprop(
    p: Tensor, g: Tensor, before: Tensor, size: Tensor, lr: float, step: int, *, etas: Any, step_sizes: Any
) -> None:
    sign = (g * before).sign()
    factor = sign.clamp(0) * (etas[1] - 1) + sign.clamp(None, 0) * (1 - etas[0]) + 1
    size.copy_((size * factor).clamp(*step_sizes))
    g = g.masked_fill(sign < 0, 0)
    p.sub_(g.sign() * size)
    before.copy_(g)


def _rounded(value: Any) -> float:
    return float(tensor(float(value)))  # to the default dtype, in which torch keeps it


def _asgd(
    p: Tensor, g: Tensor, eta: Tensor, mu: Tensor, average: Tensor, lr: float, step: int, *, lambd: float,
    alpha: float, t0: float, weight_decay: float,
) -> None:  # fmt: skip
    g, rate, share = _penalized(p, g, weight_decay), _rounded(eta), _rounded(mu)
    p.mul_(1 - lambd * rate).sub_(g * rate)
    average.add_((p - average) * share)
    eta.fill_(_rounded(lr / (1 + lambd * lr * step) ** alpha))
    mu.fill_(_rounded(1 / max(1, step - t0)))


# --- Optimizers -------------------------------------------------------------------------------------------------------


class Adagrad(Composed):
    """Adagrad (Duchi et al., 2011): steps divided by the root of the sum of all squared gradients."""

    formula = _adagrad
    states = {"sum": "initial_accumulator_value"}  # noqa: RUF012
    at_least_0 = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, lr_decay: float = 0, weight_decay: float = 0,
        initial_accumulator_value: float = 0, eps: float = 1e-10, *, maximize: bool = False, **how: Unpack[How],
    ) -> None:  # fmt: skip
        self._start(params, locals(), **how)


class Adadelta(Composed):
    """Adadelta (Zeiler, 2012): steps of the size of the averaged earlier steps."""

    formula = _adadelta
    states = {"square_avg": 0, "acc_delta": 0}  # noqa: RUF012
    at_least_0 = ("lr", "eps", "weight_decay")

    def __init__(
        self, params: Iterable[Any], lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0,
        *, maximize: bool = False, **how: Unpack[How],
    ) -> None:  # fmt: skip
        self._start(params, locals(), **how)

    def check_settings(self, group: dict[str, Any]) -> None:
        super().check_settings(group)
        check_range("rho", group["rho"], 0, math.nextafter(1, 2))


class Adamax(Composed):
    """Adamax (Kingma & Ba, 2015): Adam with the largest decayed gradient as the denominator."""

    formula = _adamax
    states = {"exp_avg": 0, "exp_inf": 0}  # noqa: RUF012
    at_least_0, below_1 = ("lr", "eps", "weight_decay"), ("betas",)

    def __init__(
        self, params: Iterable[Any], lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, *, maximize: bool = False, **how: Unpack[How],
    ) -> None:  # fmt: skip
        self._start(params, locals(), **how)


class NAdam(Composed):
    """NAdam (Dozat, 2016): Adam with Nesterov momentum."""

    formula = _nadam
    states = {"exp_avg": 0, "exp_avg_sq": 0, "mu_product": 1}  # noqa: RUF012
    scalars = ("mu_product",)
    at_least_0, below_1 = ("lr", "eps", "weight_decay", "momentum_decay"), ("betas",)

    def __init__(
        self, params: Iterable[Any], lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, momentum_decay: float = 4e-3, decoupled_weight_decay: bool = False, *,
        maximize: bool = False, **how: Unpack[How],
    ) -> None:  # fmt: skip
        self._start(params, locals(), **how)


class RAdam(Composed):
    """RAdam (Liu et al., 2020): Adam whose first steps are corrected for the few gradients seen."""

    formula = _radam
    states = {"exp_avg": 0, "exp_avg_sq": 0}  # noqa: RUF012
    at_least_0, below_1 = ("lr", "eps", "weight_decay"), ("betas",)

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, decoupled_weight_decay: bool = False, *, maximize: bool = False, **how: Unpack[How],
    ) -> None:  # fmt: skip
        self._start(params, locals(), **how)


class RMSprop(Composed):
    """RMSprop (Hinton, 2012; centered: Graves, 2013): gradients divided by the root of their averaged square."""

    formula = _rmsprop
    at_least_0 = ("lr", "alpha", "eps", "weight_decay", "momentum")

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8,
        weight_decay: float = 0, momentum: float = 0, centered: bool = False, capturable: bool = False,
        foreach: bool | None = None, maximize: bool = False, differentiable: bool = False, **how: Any,
    ) -> None:  # fmt: skip
        self._start(params, locals(), **how)

    @classmethod
    def states_of(cls, group: Mapping[str, Any]) -> dict[str, float | str]:
        kept = {"square_avg": True, "momentum_buffer": group["momentum"] > 0, "grad_avg": group["centered"]}
        return {name: 0 for name, is_kept in kept.items() if is_kept}


class Rprop(Composed):
    """Rprop (Riedmiller & Braun, 1993): each element's step grows while its gradient keeps its sign."""

    formula = _rprop
    states = {"prev": 0, "step_size": "lr"}  # noqa: RUF012
    at_least_0 = ("lr",)

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50), *, capturable: bool = False, foreach: bool | None = None,
        maximize: bool = False, differentiable: bool = False, **how: Any,
    ) -> None:  # fmt: skip
        self._start(params, locals(), **how)

    def check_settings(self, group: dict[str, Any]) -> None:
        super().check_settings(group)
        for name in ("etas", "step_sizes"):
            check_pair(name, group[name], 0, math.inf)
        if not 0 < group["etas"][0] < 1 < group["etas"][1]:
            raise ConfigError(f"etas is {group['etas']}, and must be a factor below 1 and one above 1")


class ASGD(Composed):
    """Averaged stochastic gradient descent (Polyak & Juditsky, 1992). `state[p]["ax"]` is the average."""

    formula = _asgd
    states = {"eta": "lr", "mu": 1, "ax": 0}  # noqa: RUF012
    scalars = ("eta", "mu")

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, lambd: float = 1e-4, alpha: float = 0.75, t0: float = 1e6,
        weight_decay: float = 0, foreach: bool | None = None, maximize: bool = False, differentiable: bool = False,
        capturable: bool = False, **how: Any,
    ) -> None:  # fmt: skip
        self._start(params, locals(), **how)
