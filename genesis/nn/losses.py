"""Losses as modules; the functions of the same names are in `functional`."""

from __future__ import annotations

from genesis.nn import functional as F
from genesis.nn.module import Module
from genesis.tensor import Tensor

__all__ = ["BCELoss", "BCEWithLogitsLoss", "CrossEntropyLoss", "MSELoss"]


class _Loss(Module):
    """Base: how the single losses become one: "mean", "sum" or "none"."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}"


class CrossEntropyLoss(_Loss):
    """Cross entropy of logits against integer labels; see `functional.cross_entropy`.

    Args:
        ignore_index: a label that counts for nothing.
        label_smoothing: share of the target spread evenly over all classes.
        z_loss: weight of the squared log of the normalizer.
    """

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> None:
        super().__init__(reduction)
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(input, target, self.ignore_index, self.reduction, self.label_smoothing, self.z_loss)


class MSELoss(_Loss):
    """(input - target)²."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(input, target, self.reduction)


class BCELoss(_Loss):
    """Binary cross entropy of probabilities."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(input, target, self.reduction)


class BCEWithLogitsLoss(_Loss):
    """Binary cross entropy of logits.

    Args:
        pos_weight: weight of positive targets, broadcast; it moves with the module.
    """

    def __init__(self, reduction: str = "mean", pos_weight: Tensor | None = None) -> None:
        super().__init__(reduction)
        self.register_buffer("pos_weight", pos_weight)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(input, target, self.reduction, self.pos_weight)
