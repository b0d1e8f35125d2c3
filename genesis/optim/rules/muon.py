"""Muon: orthogonalizes the momentum of a matrix before the step. AdamW updates all parameters that are not matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Unpack

from genesis.errors import ConfigError
from genesis.ops.matrix_optimizers import muon_step
from genesis.optim.flat import MatrixRule, RuleCall, check_range
from genesis.optim.optimizer import How, Optimizer, betas_of
from genesis.optim.rules.adam import ADAMW
from genesis.optim.states import muon_groups
from genesis.shapes import Shape
from genesis.tensor import Tensor

# From Jordan et al. (2024): the largest derivative at 0 for which singular values end between 0.5 and 1.5.
COEFFICIENTS = (3.4445, -4.775, 2.0315)


def orthogonalize(
    x: Tensor, coefficients: tuple[float, float, float] = COEFFICIENTS, eps: float = 1e-7, iterations: int = 5
) -> Tensor:
    """Return the approximate orthogonal factor of a matrix, by Newton-Schulz iterations in its dtype."""
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    y = x.T if tall else x
    y = y / (y * y).sum().sqrt().clamp(min=eps)
    for _ in range(iterations):
        gram = y @ y.T
        y = (gram @ gram * c + gram * b) @ y + y * a
    return y.T if tall else y


def _lr_ratio(rule: str | None, shape: Shape) -> float:
    """The factor on the learning rate of a matrix."""
    rows, columns = shape
    if rule == "match_rms_adamw":  # updates then have AdamW's usual root mean square of 0.2 (Liu et al., 2025)
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(rows / columns if rule == "spectral_unclamped" else max(1.0, rows / columns))


def _plain(
    param: Tensor, grad: Tensor, average: Tensor, lr: float, step: int, *, momentum: float, nesterov: bool,
    weight_decay: float, lr_ratio: float, **iteration: Any,
) -> None:  # fmt: skip
    """See `muon_step`."""
    fresh = grad * (1 - momentum)
    average.mul_(momentum).add_(fresh)
    update = orthogonalize(fresh + average * momentum if nesterov else average, **iteration)
    if weight_decay:
        param.mul_(1 - lr * weight_decay)
    param.sub_(update * (lr * lr_ratio))


MUON = MatrixRule(muon_step, lambda shape: {"momentum_buffer": shape}, _plain)


class Muon(Optimizer):
    """Muon (Jordan et al., 2024) for matrices, and AdamW for all other parameters.

    By default Muon updates each parameter of two dimensions. A group with `use_muon` False uses AdamW only, as it
    should for embeddings and output heads; see `muon_groups`.

    Args:
        params: see `Optimizer`.
        lr: learning rate of both rules.
        weight_decay: decoupled weight decay of both rules.
        momentum: decay rate of the averaged gradient.
        nesterov: step along a mix of gradient and average.
        ns_coefficients, eps, ns_steps: settings of the Newton-Schulz iteration, see `orthogonalize`.
        adjust_lr_fn: "original" (or None) multiplies lr by √max(1, rows/columns); "match_rms_adamw" by
            0.2·√max(rows, columns), so that AdamW's learning rates and decay fit; "spectral_unclamped" by
            √(rows/columns).
        betas, adamw_eps: settings of AdamW.
        maximize: ascend instead of descend.
        how: see `Optimizer`.
    """

    elementwise = False
    at_least_0 = ("lr", "weight_decay", "eps", "adamw_eps")
    below_1 = ("betas", "momentum")
    in_runs: ClassVar[dict[str, Any]] = {
        "lr": 3e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "momentum": 0.95,
        "nesterov": True,
        "weight_decay": 0.1,
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        *,
        maximize: bool = False,
        **how: Unpack[How],
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "adamw_eps": adamw_eps,
            "use_muon": True,
            "maximize": maximize,
        }
        super().__init__(params, defaults, **how)

    def check_settings(self, group: dict[str, Any]) -> None:
        super().check_settings(group)
        check_range("ns_steps", group["ns_steps"], 1, 100)
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw", "spectral_unclamped"):
            raise ConfigError(
                f"adjust_lr_fn is {group['adjust_lr_fn']!r}",
                next='use "original", "match_rms_adamw" or "spectral_unclamped"',
            )

    @classmethod
    def rule(cls, shape: Shape, group: Mapping[str, Any]) -> RuleCall:
        if not group["use_muon"] or len(shape) != 2:
            attrs = {"eps": group["adamw_eps"], "weight_decay": group["weight_decay"], "decoupled": True}
            return RuleCall(ADAMW, betas_of(group) | attrs)
        attrs = {k: group[k] for k in ("momentum", "nesterov", "weight_decay", "eps")}
        iteration = {"coefficients": tuple(group["ns_coefficients"]), "iterations": group["ns_steps"]}
        return RuleCall(MUON, {**attrs, **iteration, "lr_ratio": _lr_ratio(group["adjust_lr_fn"], shape)})

    @classmethod
    def for_run(
        cls, named_parameters: Iterable[tuple[str, Any]], weight_decay: float, settings: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return `muon_groups`, and settings in which `eps` is AdamW's and Muon's updates have AdamW's size."""
        others = {k: v for k, v in settings.items() if k != "eps"}
        adapted = {**others, "adamw_eps": settings["eps"], "adjust_lr_fn": "match_rms_adamw"}
        return muon_groups(named_parameters, weight_decay), adapted
