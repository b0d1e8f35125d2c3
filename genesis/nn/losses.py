"""Losses as functions, with the names and argument order of torch.nn.functional, and as modules.

torch's old arguments `size_average` and `reduce` keep their positions, so that later positional arguments have the same
meaning as in torch.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from genesis.autograd import apply
from genesis.autograd.modes import is_grad_enabled
from genesis.autograd.record import in_fp32
from genesis.dtypes import float32, float64
from genesis.errors import DTypeError, ShapeError, UsageError
from genesis.functions import elementwise as ew
from genesis.functions import pointwise as pw
from genesis.functions.index import index_select
from genesis.functions.linalg import linear
from genesis.functions.reduce import log_softmax
from genesis.functions.shape import expand, stack
from genesis.functions.surface import layer_function
from genesis.ops import distillation as distillation_ops
from genesis.ops import loss as loss_ops
from genesis.shapes import broadcast_shapes
from genesis.tensor import Tensor

OldReduction = bool | None  # an alias hides the type from the generic check, so that `reduction_of` reports errors
IGNORE = -100  # the customary label of positions without a loss


def _shown(value: Any) -> str:
    """Describe a value for an error: texts and numbers by their repr, others by their type."""
    return repr(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def _check_tensors(name: str, input: Any, target: Any) -> None:
    for which, value in (("input", input), ("target", target)):
        if not isinstance(value, Tensor):
            raise DTypeError(f"{name}: {which} is {_shown(value)}, not a tensor", next="call genesis.tensor() on it")


def reduction_of(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """Return the reduction that torch's old arguments imply, or `reduction` if both are None."""
    if size_average is None and reduce is None:
        return reduction
    for name, value in (("size_average", size_average), ("reduce", reduce)):
        if value is not None and not isinstance(value, bool):
            raise UsageError(
                f"{name} is {_shown(value)}, and must be None, True or False",
                next="pass the arguments after weight by name: size_average and reduce come before reduction",
            )
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def reduced(losses: Tensor, reduction: str, count: Any = None) -> Tensor:
    """Return all losses, their sum, or their sum divided by `count`, which is their number by default.
    Raises UsageError for an unknown reduction.
    """
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if reduction != "mean":
        raise UsageError(f"reduction is {reduction!r}", next='use "mean", "sum" or "none"')
    return losses.mean() if count is None else losses.sum() / count


def _check_weight(name: str, argument: str, weight: Any) -> None:
    if not isinstance(weight, Tensor):
        raise DTypeError(
            f"{name}: {argument} is {_shown(weight)}, not a tensor",
            next="pass the arguments after (input, target, weight) by name",
        )
    if not weight.is_floating_point():
        raise DTypeError(f"{name}: {argument} is a tensor of {weight.dtype.name}, not of floats")


# --- Losses of class labels -------------------------------------------------------------------------------------------


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
    """Cross entropy of logits against integer labels, or against class probabilities.

    Args:
        input: logits `[C]`, `[N, C]` or `[N, C, …]`.
        target: integer labels, with input's shape without C; or probabilities of input's shape, for which the mean
            divides by the number of rows and `ignore_index` has no effect.
        weight: class weights `[C]`. As in torch, each loss is multiplied by the weight of its label, the mean divides
            by the sum of these weights, and the smoothed share of the target uses the weight of each class.
        size_average, reduce: torch's old names of `reduction`.
        ignore_index: label of rows without a loss. The mean does not count them; it is NaN if no other rows exist.
        label_smoothing: share of the target that is spread evenly over all classes.
        z_loss: factor of log²(Σ e^x), which keeps logits from drifting. It excludes `weight`.
    """
    reduction = reduction_of(size_average, reduce, reduction)
    # Check the arguments.
    _check_tensors("cross_entropy", input, target)
    if not 0 <= label_smoothing <= 1:
        raise UsageError(f"label_smoothing is {label_smoothing}, and must be between 0 and 1")
    if target.is_floating_point():
        if z_loss:
            raise UsageError("cross_entropy takes probabilities or z_loss, not both")
        return _with_probabilities(input, target, weight, reduction, float(label_smoothing))
    shape = input.array.shape
    if not shape or target.array.shape != (shape[:1] + shape[2:])[len(shape) == 1 :]:
        raise ShapeError(f"cross_entropy: logits {shape} and labels {target.shape} do not match")
    # One row of logits per label: [N, C] and [N].
    flat, labels = input, target
    if len(shape) != 2:
        moved = input if len(shape) == 1 else input.movedim(1, -1)
        flat, labels = moved.reshape(-1, moved.shape[-1]), target.reshape(-1)
    attrs: dict[str, Any] = {"label_smoothing": float(label_smoothing), "z_loss": float(z_loss)}
    if weight is None and reduction == "mean":
        return apply(loss_ops.cross_entropy, flat, labels, ignore_index=ignore_index, **attrs, mean=True)[0]  # type: ignore[no-any-return]
    # The losses, and the share of each label in the divisor of the mean.
    if weight is None:
        losses = apply(loss_ops.cross_entropy, flat, labels, ignore_index=ignore_index, **attrs)[0]
        shares = labels != ignore_index
    elif z_loss:
        raise UsageError("cross_entropy takes a weight or z_loss, not both")
    else:
        losses, shares = _weighted(flat, labels, weight, ignore_index, float(label_smoothing))
    if reduction == "none":
        return losses.reshape(target.shape)  # type: ignore[no-any-return]
    return reduced(losses, reduction, shares.sum())


def _with_probabilities(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str, smoothing: float
) -> Tensor:
    """-Σ w·t·log_softmax(x) with the smoothed target (1 - s)·t + s/C, in logits' dtype."""
    if logits.ndim == 0 or target.shape != logits.shape:
        raise ShapeError(f"cross_entropy: logits {logits.shape} and probabilities {target.shape} do not match")
    dim = min(logits.ndim, 2) - 1
    classes = logits.shape[dim]
    terms = log_softmax(logits, dim) * (target * (1 - smoothing) + smoothing / max(classes, 1) if smoothing else target)
    if weight is not None:
        _check_weight("cross_entropy", "weight", weight)
        if weight.shape != (classes,):
            raise ShapeError(f"cross_entropy: the weight has shape {weight.shape}, expected ({classes},)")
        terms = terms * weight.reshape(-1, *(1,) * (logits.ndim - 2))
    losses = -terms.sum(dim)
    return reduced(losses, reduction, losses.numel() if losses.numel() else math.nan)


def _weighted(
    logits: Tensor, labels: Tensor, weight: Tensor, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the weighted losses and the weight of each label, 0 for ignored ones: `[N]` each.

    With p = log_softmax(x) and smoothing s, a loss is -(1 - s)·w[label]·p[label] - s/C·Σ w·p.
    """
    _check_weight("cross_entropy", "weight", weight)
    if weight.shape != logits.shape[1:]:
        raise ShapeError(f"cross_entropy: the weight has shape {weight.shape}, expected ({logits.shape[1]},)")
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
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    shift: int = 0,
    num_targets: int | Tensor | None = None,
) -> Tensor:
    """`cross_entropy` of the logits input·linear_weightᵀ + linear_bias.

    With labels, "mean" or "sum", and neither bias, weight nor smoothing, it is computed in chunks and forward also
    computes the gradients; otherwise all logits are held in memory.

    Args:
        input: hidden states `[…, H]`.
        linear_weight: output head `[V, H]`; or `[V, …, H]` for `[N, H]`, with a target `[N, …]`.
        target: integer labels, with input's shape without H; or probabilities of the shape of the logits.
        linear_bias: `[V]`, or `[V, …]` as in `linear_weight`.
        weight, ignore_index, label_smoothing: as for `cross_entropy`.
        options: torch's options of its chunks; no effect.
        shift: position t has the target t + `shift` of the last dimension, and the last `shift` positions have none.
            With 1, `target` may be the input tokens.
        num_targets: divisor of the mean; the number of targets that are not ignored by default.
    """
    name = "linear_cross_entropy"
    for x in (input, linear_weight):
        _check_tensors(name, x, target)
    ignored, extended = IGNORE if ignore_index is None else ignore_index, shift or num_targets is not None
    if ignore_index is not None and target.is_floating_point():
        raise UsageError(f"{name}: probabilities exclude ignore_index", next="remove ignore_index")
    plain = linear_bias is None and weight is None and not label_smoothing and linear_weight.ndim == 2
    if plain and reduction in ("mean", "sum") and not target.is_floating_point() and input.ndim > 1:
        return _chunked(input, linear_weight, target, ignored, reduction, shift, num_targets)
    if extended:
        raise UsageError(
            f"{name}: shift and num_targets exclude linear_bias, weight, label_smoothing, probabilities and "
            f'reduction="none"',
            next="compute logits and call cross_entropy",
        )
    if (linear_weight.ndim > 2 and input.ndim != 2) or not linear_weight.shape or not input.shape:
        raise ShapeError(f"{name}: input {input.shape} and weight {linear_weight.shape} do not match")
    classes = linear_weight.shape[:-1]
    head = linear_weight.reshape(-1, linear_weight.shape[-1])
    logits = linear(input, head, None if linear_bias is None else linear_bias.reshape(-1))
    logits = logits.reshape(*input.shape[:-1], *classes)
    if len(classes) == 1 and logits.ndim > 2:  # [..., V] to rows
        logits = logits.reshape(-1, logits.shape[-1])
        rows = target.reshape(-1, *logits.shape[1:]) if target.is_floating_point() else target.reshape(-1)
        how: dict[str, Any] = {"ignore_index": ignored, "label_smoothing": label_smoothing}
        losses = cross_entropy(logits, rows, weight, reduction=reduction, **how)
        return losses.reshape(input.shape[:-1]) if reduction == "none" else losses
    return cross_entropy(
        logits, target, weight, ignore_index=ignored, reduction=reduction, label_smoothing=label_smoothing
    )


def _chunked(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    reduction: str,
    shift: int,
    num_targets: int | Tensor | None,
) -> Tensor:
    """Run the fused op."""
    if reduction == "sum" and num_targets is not None:
        raise UsageError('linear_cross_entropy: num_targets needs the reduction "mean"', next="remove num_targets")
    labels = _labels_of("linear_cross_entropy", target, shift, x)
    divisor = () if num_targets is None else (num_targets,)
    attrs: dict[str, Any] = {"ignore_index": ignore_index, "shift": shift}
    attrs["mean"] = reduction == "mean" and num_targets is None
    attrs["with_grads"] = is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if attrs["with_grads"] and not weight.requires_grad:  # a frozen head
        attrs["weight_grad"] = False
    results = apply(loss_ops.linear_cross_entropy, x.reshape(-1, x.shape[-1]), weight, labels, *divisor, **attrs)
    return results[0] if isinstance(results, tuple) else results  # type: ignore[no-any-return]


def _labels_of(name: str, target: Tensor, shift: int, x: Tensor, *more: Tensor) -> Tensor:
    """Return a target for each row of x, in one or two dimensions."""
    for each in (x, *more):
        _check_tensors(name, each, target)
    if target.shape != x.shape[:-1] or shift < 0:
        raise ShapeError(f"{name}: input {x.shape}, target {target.shape} and shift {shift} do not match")
    return target if target.ndim in (1, 2) else target.reshape(-1, *target.shape[-1:])


@layer_function
def linear_loss_and_hits(input: Tensor, linear_weight: Tensor, target: Tensor, *, shift: int = 0) -> Tensor:
    """Return `[2]`: the summed loss of `linear_cross_entropy`, and how many targets are the likeliest class, the first
    one of several. There are no gradients.
    """
    labels = _labels_of("linear_loss_and_hits", target, shift, input, linear_weight)
    rows = input.detach().reshape(-1, input.shape[-1])
    attrs: dict[str, Any] = {"ignore_index": IGNORE, "shift": shift, "with_grads": False, "with_hits": True}
    loss, hits = apply(loss_ops.linear_cross_entropy, rows, linear_weight.detach(), labels, **attrs)
    found: Tensor = stack([loss, hits.to(dtype=loss.dtype)])
    return found


@layer_function
def linear_token_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = IGNORE,
    shift: int = 0,
) -> Tensor:
    """Return the log-probability of each target under softmax(input·linear_weightᵀ / temperature), without logits.

    The result has target's shape, in float32 (float64 for float64 inputs); it is 0 at positions without a target. With
    a frozen head, forward also computes the gradient of the input. Otherwise backward computes the logits again.

    Args:
        input: hidden states `[…, H]`.
        linear_weight: output head `[V, H]`.
        target: integer labels `[…]`.
        temperature: number above 0 by which the logits are divided.
        ignore_index, shift: as for `linear_cross_entropy`.

    Raises:
        UsageError: the temperature is not above 0. ShapeError, DTypeError: the arguments do not match.
    """
    name = "linear_token_log_probs"
    labels = _labels_of(name, target, shift, input, linear_weight)
    is_frozen = is_grad_enabled() and input.requires_grad and not linear_weight.requires_grad
    attrs: dict[str, Any] = {"temperature": float(temperature), "ignore_index": ignore_index, "shift": shift}
    rows = input.reshape(-1, input.shape[-1])
    results = apply(loss_ops.linear_token_log_probs, rows, linear_weight, labels, **attrs, with_dx=is_frozen)
    found: Tensor = results[0] if isinstance(results, tuple) else results
    return found.reshape(target.shape)


@layer_function
def linear_distillation(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    ignore_index: int = IGNORE,
    shift: int = 0,
    num_targets: int | Tensor = 1,
) -> tuple[Tensor, Tensor]:
    """Return the divergence between a student and a teacher over the vocabulary, without logits, and three sums.

    It is the generalized Jensen-Shannon divergence (Agarwal et al., 2024, https://arxiv.org/abs/2306.13649): forward KL
    for beta 0, reverse KL for beta 1. Forward also computes the gradients; the teacher receives none.

    The first result is the sum over positions with a target, divided by `num_targets`. The sums, `[3]`, are the cross
    entropy of the targets by the student and by the teacher, and the number of positions where the student's likeliest
    token is also the teacher's.

    Args:
        input, linear_weight: the student's hidden states `[…, H]` and output head `[V, H]`.
        teacher_input, teacher_weight: the teacher's, `[…, H']` and `[V', H']`, of the same dtype. Tokens beyond the
            smaller vocabulary are left out.
        target: integer labels `[…]`; positions with `ignore_index` do not count.
        beta: weight of the teacher in the mixture, 0 to 1.
        temperature: number above 0; divides the logits of student and teacher.
        ignore_index, shift: as for `linear_cross_entropy`.

    Raises:
        UsageError: beta or the temperature is out of range. ShapeError, DTypeError: the arguments do not match.
    """
    name = "linear_distillation"
    labels = _labels_of(name, target, shift, input, linear_weight, teacher_input, teacher_weight)
    attrs: dict[str, Any] = {"beta": float(beta), "temperature": float(temperature)}
    attrs |= {"ignore_index": ignore_index, "shift": shift}
    attrs["with_grads"] = is_grad_enabled() and (input.requires_grad or linear_weight.requires_grad)
    if attrs["with_grads"] and not linear_weight.requires_grad:  # a frozen head
        attrs["weight_grad"] = False
    rows, teacher_rows = (x.reshape(-1, x.shape[-1]) for x in (input, teacher_input.detach()))
    operands = (rows, linear_weight, teacher_rows, teacher_weight.detach(), labels, num_targets)
    loss, figures, *_ = apply(distillation_ops.linear_distillation, *operands, **attrs)
    return loss, figures


# --- Losses of values -------------------------------------------------------------------------------------------------


def broadcast_pair(name: str, input: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Return float tensors of one shape. Different shapes broadcast with a warning, as in torch."""
    _check_tensors(name, input, target)
    if not (input.is_floating_point() or target.is_floating_point()):
        raise DTypeError(f"{name} takes float tensors, got {input.dtype} and {target.dtype}")
    if input.shape != target.shape:
        warnings.warn(
            f"{name}: the input has shape {tuple(input.shape)} and the target {tuple(target.shape)}, which broadcast; "
            "pass tensors of one shape",
            stacklevel=4,
        )
        shape = broadcast_shapes(input.shape, target.shape)
        input, target = expand(input, shape), expand(target, shape)
    x, t = in_fp32(input, target)
    return x, t


def _check_pair(name: str, input: Tensor, target: Tensor) -> None:
    _check_tensors(name, input, target)
    if input.shape != target.shape:
        raise ShapeError(f"{name}: input has shape {input.shape}, and target has {target.shape}")
    if not (input.is_floating_point() and target.is_floating_point()):
        raise DTypeError(f"{name} takes float tensors, got {input.dtype} and {target.dtype}")


def _times(name: str, losses: Tensor, weight: Tensor | None) -> Tensor:
    """Multiply losses by a weight that broadcasts to them."""
    if weight is None:
        return losses
    _check_weight(name, "weight", weight)
    if broadcast_shapes(losses.shape, weight.shape) != losses.shape:
        raise ShapeError(f"{name}: the weight {weight.shape} does not broadcast to the losses {losses.shape}")
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
    """(input - target)². A `weight` is broadcast to the losses, and the mean divides by its sum.

    `size_average` and `reduce` are torch's old names of `reduction`.
    """
    reduction = reduction_of(size_average, reduce, reduction)
    input, target = broadcast_pair("mse_loss", input, target)
    losses = _times("mse_loss", apply(loss_ops.squared_difference, input, target), weight)
    return reduced(losses, reduction, None if weight is None else expand(weight, losses.shape).sum())


@layer_function
def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
) -> Tensor:
    """-(t·log p + (1-t)·log(1-p)) for probabilities p = `input`. Logarithms are clamped at -100, as in torch.

    dp = g·(p - t) / max(p·(1-p), 1e-12), which is finite at p = 0 and p = 1.

    Args:
        weight: factor of the losses, broadcast. The mean divides by the number of losses, as in torch.
        size_average, reduce: torch's old names of `reduction`.
    """
    reduction = reduction_of(size_average, reduce, reduction)
    _check_pair("binary_cross_entropy", input, target)
    input, target = in_fp32(input, target)
    p = input.detach()
    yes, no = ew.clamp(pw.log(p), min=-100.0), ew.clamp(pw.log1p(-p), min=-100.0)
    losses = -(target * yes + (1 - target) * no)
    if is_grad_enabled() and input.requires_grad:
        # Adds 0 with the derivative above; the derivative of the logarithms would be 0 / 0 at p = 0 and p = 1.
        losses = losses + (input - p) * ((p - target.detach()) / ew.clamp(p * (1 - p), min=1e-12))
    return reduced(_times("binary_cross_entropy", losses, weight), reduction)


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
    """Binary cross entropy of logits x = `input`: (1-t)·x + (1 + (w-1)·t)·log(1 + e^-x), without overflow.

    Args:
        target, weight, size_average, reduce: as for `binary_cross_entropy`.
        pos_weight: weight w of positive targets, broadcast.
    """
    name = "binary_cross_entropy_with_logits"
    reduction = reduction_of(size_average, reduce, reduction)
    _check_pair(name, input, target)
    input, target = in_fp32(input, target)
    # At x = 0, abs has the derivative 0 and maximum passes half of the gradient, so dx = σ(x) - t holds there too.
    softplus = pw.log1p(pw.exp(-pw.abs(input))) + pw.maximum(-input, 0.0)
    if pos_weight is not None:
        _check_weight(name, "pos_weight", pos_weight)
        softplus = softplus * (1 + (pos_weight - 1) * target)
    return reduced(_times(name, (1 - target) * input + softplus, weight), reduction)
