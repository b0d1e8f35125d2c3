"""Adafactor: keeps the second moment of a matrix as one value per row and one per column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Unpack

from genesis.dtypes import float64
from genesis.ops.matrix_optimizers import adafactor_step, adafactor_vector_step
from genesis.optim.flat import MatrixRule, RuleCall, check_range
from genesis.optim.optimizer import How, Optimizer
from genesis.shapes import Shape
from genesis.tensor import Tensor


def _rms(x: Tensor) -> Tensor:
    return (x * x).mean().sqrt()


def _plain(param: Tensor, grad: Tensor, *args: Any, beta2_decay: float, eps1: float | None, **settings: float) -> None:
    """See `adafactor_step` and `adafactor_vector_step`, whose settings have the same names."""
    *states, lr, step = args
    if eps1 is None:
        eps1 = 2.0**-52 if param.dtype is float64 else 2.0**-23
    weight, square = step**beta2_decay, grad * grad
    means = [square.mean(-1, keepdim=True), square.mean(-2, keepdim=True)] if len(states) == 2 else [square]
    variance, *column = (s.mul_(1 - weight).add_(m * weight) for s, m in zip(states, means, strict=True))
    if column:
        variance = variance * column[0] / variance.mean(-2, keepdim=True).clamp(min=eps1)
    update = grad / variance.clamp(min=eps1 * eps1).sqrt()
    step_size = _rms(param).clamp(min=settings["eps2"]) * min(lr, step**-0.5)
    if settings["weight_decay"]:
        param.mul_(1 - lr * settings["weight_decay"])
    param.sub_(update * (step_size / (_rms(update) / settings["d"]).clamp(min=1.0)))


MATRIX = MatrixRule(
    adafactor_step, lambda shape: {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}, _plain
)
VECTOR = MatrixRule(adafactor_vector_step, lambda shape: {"variance": shape}, _plain)


class Adafactor(Optimizer):
    """Adafactor (Shazeer & Stern, 2018) without momentum; steps are relative to the size of the parameter.

    Args:
        params: see `Optimizer`. Parameters of more than two dimensions are batches of matrices.
        lr: maximum relative step size; step t uses min(lr, 1/√t).
        beta2_decay: the current square enters the second moment with weight t^beta2_decay.
        eps: (ε1, ε2). ε1 is a lower bound on the root of the second moment (None: machine epsilon of the dtype), ε2 on
            the parameter's root mean square in the step.
        d: maximum root mean square of an update, which is scaled down to it.
        weight_decay: p = (1 - lr·weight_decay)·p before the step.
        maximize: ascend instead of descend.
        how: see `Optimizer`.
    """

    elementwise = False
    at_least_0 = ("lr", "weight_decay")
    in_runs: ClassVar[dict[str, Any]] = {"lr": 1e-2, "weight_decay": 0.0}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **how: Unpack[How],
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **how)

    def check_settings(self, group: dict[str, Any]) -> None:
        super().check_settings(group)
        check_range("d", group["d"], 1)
        check_range("-beta2_decay", -group["beta2_decay"], 0)
        for i, eps in enumerate(group["eps"]):
            if eps is not None or i == 1:
                check_range(f"eps[{i}]", eps, 0)

    @classmethod
    def rule(cls, shape: Shape, group: Mapping[str, Any]) -> RuleCall:
        attrs = {k: group[k] for k in ("beta2_decay", "d", "weight_decay")}
        eps1, eps2 = group["eps"]
        return RuleCall(MATRIX if len(shape) >= 2 else VECTOR, {"eps1": eps1, "eps2": eps2, **attrs})
