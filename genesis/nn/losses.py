"""Losses as functions under the names of torch.nn.functional, with its arguments in its order, and as modules.

torch's old `size_average` and `reduce` keep their places and their meaning, so that no argument after them means
something else than it does there.
"""

from __future__ import annotations

from typing import Any

from genesis.autograd import apply
from genesis.autograd.modes import is_grad_enabled
from genesis.autograd.record import in_fp32
from genesis.dtypes import float32, float64
from genesis.errors import DTypeError, ShapeError, UsageError
from genesis.functions import elementwise as ew
from genesis.functions import pointwise as pw
from genesis.functions.index import index_select
from genesis.functions.reduce import log_softmax
from genesis.functions.shape import expand
from genesis.functions.surface import layer_function
from genesis.nn.module import Module
from genesis.ops import loss as loss_ops
from genesis.shapes import broadcast_shapes
from genesis.tensor import Tensor

OldReduction = bool | None  # a name of its own: `reduction_of` says more of a wrong one than a bool's reader does
IGNORE = -100  # the label that counts for nothing, as everywhere in this field


def _shown(value: Any) -> str:
    """A value that was expected to be something else: texts and numbers as they are, others by their kind."""
    return repr(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def _check_tensors(name: str, input: Any, target: Any) -> None:
    for which, value in (("input", input), ("target", target)):
        if not isinstance(value, Tensor):
            raise DTypeError(f"{name}: {which} is {_shown(value)}, not a tensor", next="make one with genesis.tensor")


def reduction_of(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """`reduction`, unless one of torch's old arguments is given, which then says it."""
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not None and not isinstance(value, bool):
            raise UsageError(
                f"{name} is {_shown(value)}, and must be None, True or False",
                next="torch has size_average and reduce before reduction: name the arguments after weight",
            )
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _reduced(losses: Tensor, reduction: str, count: Any = None) -> Tensor:
    """All losses, their sum, or their mean over `count` of them."""
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if reduction != "mean":
        raise UsageError(f"reduction is {reduction!r}", next='use "mean", "sum" or "none"')
    return losses.mean() if count is None else losses.sum() / count


def _check_weight(name: str, what: str, weight: Any) -> None:
    if not isinstance(weight, Tensor):
        raise DTypeError(
            f"{name}: {what} is {_shown(weight)}, not a tensor",
            next="the order is torch's: (input, target, weight, …); name the arguments after it",
        )
    if not weight.is_floating_point():
        raise DTypeError(f"{name}: {what} is a tensor of {weight.dtype.name}, not of floats")


# --- Of classes -------------------------------------------------------------------------------------------------------


@layer_function
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: OldReduction = None,
    ignore_index: int = IGNORE,
    reduce: OldReduction = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy of logits against integer labels.

    Args:
        input: `[C]`, `[N, C]` or `[N, C, …]`.
        target: integers, input's shape without C.
        weight: `[C]`, of the classes. A loss is multiplied by its label's, the mean divides by the sum of these, and
            what smoothing spreads counts with each class's own, as in torch.
        size_average, reduce: torch's old names of `reduction`.
        ignore_index: rows with this label count for nothing, in the mean too. With no other rows the mean is NaN.
        label_smoothing: share of the target spread evenly over all classes.
        z_loss: factor of log²(Σ e^x), which keeps logits from drifting; excludes a weight.
    """
    reduction = reduction_of(size_average, reduce, reduction)
    _check_tensors("cross_entropy", input, target)
    if not 0 <= label_smoothing <= 1:
        raise UsageError(f"label_smoothing is {label_smoothing}, and must be between 0 and 1")
    if target.is_floating_point():
        raise DTypeError("cross_entropy takes labels, not probabilities of classes", next="give integers")
    logits = input
    if logits.ndim == 0 or target.shape != (*logits.shape[:1], *logits.shape[2:])[logits.ndim == 1 :]:
        raise ShapeError(f"cross_entropy: logits {logits.shape} and labels {target.shape} do not belong together")
    if logits.ndim > 2:
        logits = logits.movedim(1, -1)
    flat = logits.reshape(-1, logits.shape[-1])
    labels = target.reshape(-1)
    attrs: dict[str, Any] = {"label_smoothing": float(label_smoothing), "z_loss": float(z_loss)}
    if weight is None:
        losses = apply(loss_ops.cross_entropy, flat, labels, ignore_index=ignore_index, **attrs)[0]
        shares = labels != ignore_index
    elif z_loss:
        raise UsageError("cross_entropy takes a weight or z_loss, not both")
    else:
        losses, shares = _weighted(flat, labels, weight, ignore_index, float(label_smoothing))
    if reduction == "none":
        return losses.reshape(target.shape)  # type: ignore[no-any-return]
    return _reduced(losses, reduction, shares.sum())


def _weighted(
    logits: Tensor, labels: Tensor, weight: Tensor, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Weighted losses, and the weights of the labels that count: `[N]` each.

    With p = log_softmax(x) and s the smoothing: -(1 - s)·w[label]·p[label] - s/C·Σ w·p.
    """
    _check_weight("cross_entropy", "weight", weight)
    if weight.shape != logits.shape[1:]:
        raise ShapeError(f"cross_entropy: a weight of shape {weight.shape} for {logits.shape[1]} classes")
    kept = labels != ignore_index
    factors = weight.to(float64 if logits.dtype is float64 else float32)
    shares = ew.where(kept, index_select(factors, 0, ew.where(kept, labels, 0)), 0.0)
    attrs: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": 0.0, "z_loss": 0.0}
    losses = apply(loss_ops.cross_entropy, logits, labels, **attrs)[0] * shares
    if smoothing:
        spread = -(log_softmax(logits.to(factors.dtype), -1) * factors).sum(-1)
        losses = losses * (1 - smoothing) + ew.where(kept, spread, 0.0) * (smoothing / logits.shape[1])
    return losses, shares


@layer_function
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int = IGNORE,
    reduction: str = "mean",
    shift: int = 0,
    num_targets: int | Tensor | None = None,
) -> Tensor:
    """Cross entropy of the logits x·weightᵀ, which never exist whole; gradients are computed along with the loss.

    Args:
        x: `[…, H]` hidden states.
        weight: `[V, H]`, the output head.
        target: integers, x's shape without H.
        ignore_index: as in `cross_entropy`.
        reduction: "mean" or "sum".
        shift: position t of a sequence has the target t + `shift` along the last dimension, the last ones none: 1
            takes tokens as each other's targets.
        num_targets: what the mean divides by, in the place of the number of targets that count.
    """
    if reduction not in ("mean", "sum"):
        raise UsageError(f"linear_cross_entropy has no reduction {reduction!r}", next='use "mean" or "sum"')
    if reduction == "sum" and num_targets is not None:
        raise UsageError("linear_cross_entropy: num_targets belongs to the mean", next='leave it out, or use "mean"')
    if target.shape != x.shape[:-1] or shift < 0:
        raise ShapeError(f"linear_cross_entropy: x {x.shape}, target {target.shape} and shift {shift} do not fit")
    labels = target if target.ndim in (1, 2) else target.reshape(-1, *target.shape[-1:])
    divisor = () if num_targets is None else (num_targets,)
    attrs: dict[str, Any] = {"ignore_index": ignore_index, "shift": shift}
    attrs["mean"] = reduction == "mean" and num_targets is None
    attrs["with_grads"] = is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if attrs["with_grads"] and not weight.requires_grad:  # a frozen head
        attrs["weight_grad"] = False
    found = apply(loss_ops.linear_cross_entropy, x.reshape(-1, x.shape[-1]), weight, labels, *divisor, **attrs)
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]


# --- Of values -------------------------------------------------------------------------------------------------------


def _pair(name: str, input: Tensor, target: Tensor) -> None:
    _check_tensors(name, input, target)
    if input.shape != target.shape:
        raise ShapeError(f"{name}: input has shape {input.shape}, target {target.shape}")
    if not (input.is_floating_point() and target.is_floating_point()):
        raise DTypeError(f"{name} takes float tensors, got {input.dtype} and {target.dtype}")


def _times(name: str, losses: Tensor, weight: Tensor | None) -> Tensor:
    """Losses times a weight that broadcasts to them."""
    if weight is None:
        return losses
    _check_weight(name, "weight", weight)
    if broadcast_shapes(losses.shape, weight.shape) != losses.shape:
        raise ShapeError(f"{name}: a weight of shape {weight.shape} for losses of shape {losses.shape}")
    return losses * weight


@layer_function
def mse_loss(
    input: Tensor,
    target: Tensor,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """(input - target)²; a `weight` is broadcast to the losses, and the mean divides by the sum of it.

    `size_average` and `reduce` are torch's old names of `reduction`.
    """
    reduction = reduction_of(size_average, reduce, reduction)
    _pair("mse_loss", input, target)
    input, target = in_fp32(input, target)
    losses = _times("mse_loss", pw.square(input - target), weight)
    return _reduced(losses, reduction, None if weight is None else expand(weight, losses.shape).sum())


@layer_function
def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
) -> Tensor:
    """-(t·log p + (1-t)·log(1-p)) for probabilities p = `input`; logs are at least -100, as in torch.

    dp = g·(p - t) / max(p·(1-p), 1e-12), which is finite at p = 0 and p = 1.

    Args:
        weight: of the losses, broadcast; the mean divides by their count, as in torch.
        size_average, reduce: torch's old names of `reduction`.
    """
    reduction = reduction_of(size_average, reduce, reduction)
    _pair("binary_cross_entropy", input, target)
    input, target = in_fp32(input, target)
    p = input.detach()
    yes, no = ew.clamp(pw.log(p), min=-100.0), ew.clamp(pw.log1p(-p), min=-100.0)
    losses = -(target * yes + (1 - target) * no)
    if is_grad_enabled() and input.requires_grad:
        # 0 times a derivative that has no 0 / 0 at p = 0 and p = 1, as the logarithms' own would have
        losses = losses + (input - p) * ((p - target.detach()) / ew.clamp(p * (1 - p), min=1e-12))
    return _reduced(_times("binary_cross_entropy", losses, weight), reduction)


@layer_function
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """The same for logits x = `input`: (1-t)·x + (1 + (w-1)·t)·log(1 + e^-x), without overflow.

    Args:
        weight, size_average, reduce: as for `binary_cross_entropy`.
        pos_weight: weight w of positive targets, broadcast.
    """
    name = "binary_cross_entropy_with_logits"
    reduction = reduction_of(size_average, reduce, reduction)
    _pair(name, input, target)
    input, target = in_fp32(input, target)
    # at x = 0 abs has the derivative 0 and maximum half of its gradient, so that dx = σ(x) - t holds there too
    softplus = pw.log1p(pw.exp(-pw.abs(input))) + pw.maximum(-input, 0.0)
    if pos_weight is not None:
        _check_weight(name, "pos_weight", pos_weight)
        softplus = softplus * (1 + (pos_weight - 1) * target)
    return _reduced(_times(name, (1 - target) * input + softplus, weight), reduction)


# --- Modules ----------------------------------------------------------------------------------------------------------


class _Loss(Module):
    """Base: how the single losses become one: "mean", "sum" or "none"; `size_average`, `reduce`: torch's old names."""

    def __init__(self, size_average: bool | None = None, reduce: bool | None = None, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction_of(size_average, reduce, reduction)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}"


class CrossEntropyLoss(_Loss):
    """Cross entropy of logits against labels; see `functional.cross_entropy`. `weight` moves with the module."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.register_buffer("weight", weight)
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        how: dict[str, Any] = {
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
        }
        return cross_entropy(input, target, self.weight, reduction=self.reduction, **how)


class MSELoss(_Loss):
    """(input - target)²."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return mse_loss(input, target, reduction=self.reduction)


class BCELoss(_Loss):
    """Binary cross entropy of probabilities; a `weight` of the losses is broadcast and moves with the module."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.register_buffer("weight", weight)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return binary_cross_entropy(input, target, self.weight, reduction=self.reduction)


class BCEWithLogitsLoss(_Loss):
    """Binary cross entropy of logits.

    `weight` is of the losses, `pos_weight` of positive targets; both are broadcast and move with the module.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(
            input, target, self.weight, reduction=self.reduction, pos_weight=self.pos_weight
        )
