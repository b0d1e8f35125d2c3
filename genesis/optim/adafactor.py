"""Adafactor: the second moment of a matrix kept as one number per row and one per column."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from genesis.dtypes import float64
from genesis.ops.matrix_optimizers import adafactor_step, adafactor_vector_step
from genesis.optim.optimizer import How, Optimizer
from genesis.optim.unit import Scale, Unit, check_range
from genesis.shapes import Shape
from genesis.tensor import Tensor

__all__ = ["Adafactor"]


def _rms(x: Tensor) -> Tensor:
    return (x * x).mean().sqrt()


class Adafactor(Optimizer):
    """Adafactor (Shazeer & Stern, 2018) without momentum; steps are relative to the size of the parameter.

    Args:
        params: see `Optimizer`. Parameters of more than two dimensions are batches of matrices.
        lr: largest relative step; from step t on it is at most 1/√t.
        beta2_decay: the second moment moves to the present square with weight t^beta2_decay.
        eps: (ε1, ε2). ε1 bounds the root of the second moment from below (None: the step of the dtype at 1), ε2 the
            parameter's size in the step.
        d: updates of a greater root mean square are scaled down to it.
        weight_decay: p = (1 - lr·weight_decay)·p before the step.
        maximize: ascend.
        how: see `Optimizer`.
    """

    elementwise = False

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
        for name in ("lr", "weight_decay"):
            check_range(name, group[name], 0)
        check_range("d", group["d"], 1)
        check_range("-beta2_decay", -group["beta2_decay"], 0)
        for i, eps in enumerate(group["eps"]):
            if eps is not None or i == 1:
                check_range(f"eps[{i}]", eps, 0)

    def state_shapes(self, param: Tensor, group: dict[str, Any]) -> dict[str, Shape]:
        shape = param.shape
        if len(shape) < 2:
            return {"variance": shape}
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}

    def plain_update(self, unit: Unit, group: dict[str, Any], grad: Tensor) -> None:
        param, state, lr = unit.param, unit.state, group["lr"]
        if param.numel() == 0:
            return
        eps1, eps2 = group["eps"]
        if eps1 is None:
            eps1 = 2.0**-52 if param.dtype is float64 else 2.0**-23
        weight = unit.step ** group["beta2_decay"]
        square = grad * grad
        if param.ndim < 2:
            variance = state["variance"].mul_(1 - weight).add_(square * weight)
        else:
            row = state["row_var"].mul_(1 - weight).add_(square.mean(-1, keepdim=True) * weight)
            column = state["col_var"].mul_(1 - weight).add_(square.mean(-2, keepdim=True) * weight)
            variance = row * column / row.mean(-2, keepdim=True).clamp(min=eps1)
        update = grad / variance.clamp(min=eps1 * eps1).sqrt()
        step_size = _rms(param).clamp(min=eps2) * min(lr, unit.step**-0.5)
        if group["weight_decay"]:
            param.mul_(1 - lr * group["weight_decay"])
        param.sub_(update * (step_size / (_rms(update) / group["d"]).clamp(min=1.0)))

    def fused_update(self, unit: Unit, group: dict[str, Any], scale: Scale) -> None:
        names = ("row_var", "col_var") if unit.param.ndim >= 2 else ("variance",)
        op = adafactor_step if unit.param.ndim >= 2 else adafactor_vector_step
        op(
            unit.param.array,
            unit.grad.array,
            *(unit.state[n].array for n in names),
            group["lr"],
            unit.step,
            scale,
            beta2_decay=group["beta2_decay"],
            eps1=group["eps"][0],
            eps2=group["eps"][1],
            d=group["d"],
            weight_decay=group["weight_decay"],
        )
