"""Losses of values, distributions and pairs, with the names and argument order of torch.nn.functional.

`size_average` and `reduce` are torch's old names of `reduction`. Losses of classes are in `class_losses.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from genesis.autograd.record import in_fp32
from genesis.errors import ShapeError, UsageError
from genesis.functions import elementwise as ew
from genesis.functions import pointwise as pw
from genesis.functions import reduce as reductions
from genesis.functions.create import full_like
from genesis.functions.surface import array_of, layer_function
from genesis.nn.activation_functions import check_float, wide
from genesis.nn.distance_functions import pairwise_distance
from genesis.nn.losses import OldReduction, broadcast_pair, reduced, reduction_of
from genesis.tensor import Tensor

# --- Differences ------------------------------------------------------------------------------------------------------


def _weighted(name: str, losses: Tensor, weight: Tensor | None, input: Tensor, reduction: str, by_sum: bool) -> Tensor:
    """Reduce losses times an optional weight of input's shape; `by_sum`: the mean divides by the weight's sum."""
    if weight is None:
        return ew.to_dtype(reduced(losses, reduction), losses.dtype)  # type: ignore[no-any-return]
    if array_of(weight, name).shape != input.shape:
        raise ShapeError(f"{name}: the weight has shape {weight.shape}, and the input {input.shape}")
    return reduced(losses * weight, reduction, weight.sum() if by_sum and reduction == "mean" else None)


@layer_function
def l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """|input - target|. The mean divides by the sum of `weight`, which has input's shape."""
    reduction = reduction_of(size_average, reduce, reduction)
    x, t = broadcast_pair("l1_loss", input, target)
    return _weighted("l1_loss", pw.abs(x - t), weight, input, reduction, True)


@layer_function
def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """z²/(2·beta) for z = |input - target| < beta, else z - beta/2."""
    reduction = reduction_of(size_average, reduce, reduction)
    if beta < 0:
        raise UsageError(f"smooth_l1_loss: beta is {beta}, and must be at least 0")
    x, t = broadcast_pair("smooth_l1_loss", input, target)
    losses = pw.abs(x - t) if not beta else _huber(x, t, beta) / beta
    return _weighted("smooth_l1_loss", losses, None, input, reduction, False)


@layer_function
def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """z²/2 for z = |input - target| ≤ delta, else delta·(z - delta/2) (Huber, 1964)."""
    if not delta > 0:
        raise UsageError(f"huber_loss: delta is {delta}, and must be greater than 0")
    x, t = broadcast_pair("huber_loss", input, target)
    return _weighted("huber_loss", _huber(x, t, delta), weight, input, reduction, False)


def _huber(x: Any, t: Any, delta: float) -> Any:
    """m·(z - m/2) with m = min(z, delta), whose derivative is z, at most delta, also for an infinite z."""
    z = pw.abs(x - t)
    near = ew.clamp(z, max=delta)
    return near * (z - near / 2)


# --- Distributions ----------------------------------------------------------------------------------------------------


@layer_function
def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """Kullback-Leibler divergence t·(log t - x) of log-probabilities x = `input` from probabilities t = `target`.

    Args:
        reduction: "batchmean" divides the sum by the number of rows, which is the divergence; "mean" divides by the
            number of elements.
        log_target: `target` holds log-probabilities.
    """
    reduction = reduction_of(size_average, reduce, reduction)
    array_of(input, "kl_div"), array_of(target, "kl_div")
    x, t = in_fp32(input, target)
    if log_target:
        losses = pw.exp(t) * (t - x)
    else:
        losses = t * pw.log(ew.where(t == 0, 1.0, t)) - t * x
    if reduction != "batchmean":
        return reduced(losses, reduction)
    return losses.sum() / input.shape[0] if input.ndim else losses.sum()  # type: ignore[no-any-return]


@layer_function
def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """(log v + (input - target)²/v)/2 with v = max(var, eps), which gets var's gradient.

    Args:
        var: variances of input's shape, or without its last dimension, or with size 1 in one dimension; or one number.
        full: add the constant log(2π)/2.
    """
    name = "gaussian_nll_loss"
    check_float(name, input)
    given = var if isinstance(var, Tensor) else full_like(input, var)
    if bool(reductions.any(given < 0).item()):
        raise UsageError(f"{name}: var is {var}" if given is not var else f"{name}: var has negative elements")
    if given.shape != input.shape:
        if input.shape[:-1] == given.shape:
            given = given.unsqueeze(-1)
        elif input.ndim != given.ndim or sum(b for a, b in zip(input.shape, given.shape, strict=True) if a != b) != 1:
            raise ShapeError(f"{name}: var has shape {given.shape}, and the input {input.shape}")
    limited = given + (ew.clamp_min(given, eps) - given).detach()  # all of var gets a gradient, as in torch
    losses = (pw.log(limited) + pw.square(input - target) / limited) * 0.5
    return reduced(losses + 0.5 * math.log(2 * math.pi) if full else losses, reduction)


@layer_function
def poisson_nll_loss(
    input: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    size_average: OldReduction = None,
    eps: float = 1e-8,
    reduce: OldReduction = None,
    reduction: str = "mean",
) -> Tensor:
    """e^x - t·x with `log_input`, else x - t·log(x + eps). `full` adds log t!, by Stirling, where t > 1."""
    reduction = reduction_of(size_average, reduce, reduction)
    losses = pw.exp(input) - target * input if log_input else input - target * pw.log(input + eps)
    if full:
        safe = ew.where(target > 1, target, 1)
        stirling = safe * pw.log(safe) - safe + pw.log(2 * math.pi * safe) * 0.5
        losses = losses + ew.where(target > 1, stirling, 0.0)
    return reduced(losses, reduction)


# --- Labels of ±1 -----------------------------------------------------------------------------------------------------


@layer_function
def soft_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
) -> Tensor:
    """log(1 + e^(-t·x)) for targets t = ±1."""
    reduction = reduction_of(size_average, reduce, reduction)
    x = wide(-target * input)
    # At x = 0, abs has the derivative 0 and maximum passes half of the gradient.
    losses = pw.log1p(pw.exp(-pw.abs(x))) + pw.maximum(x, 0.0)
    return reduced(ew.to_dtype(losses, input.dtype), reduction)


@layer_function
def hinge_embedding_loss(
    input: Tensor,
    target: Tensor,
    margin: float = 1.0,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
) -> Tensor:
    """x where the target is 1, max(0, margin - x) where it is -1; their sum for other targets."""
    reduction = reduction_of(size_average, reduce, reduction)
    near = ew.where(target != -1, input, 0.0)
    far = ew.where(target != 1, _positive(margin - input), 0.0)
    return reduced(near + far, reduction)


def _positive(x: Any) -> Any:
    """max(x, 0) with the derivative 1 at 0, as in torch's clamp."""
    return ew.clamp(x, min=0.0) if x.is_floating_point() else ew.clamp(x, min=0)


@layer_function
def margin_ranking_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0.0,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
) -> Tensor:
    """max(0, -t·(x1 - x2) + margin): with t = 1, x1 should exceed x2; with t = -1, x2 should exceed x1."""
    reduction = reduction_of(size_average, reduce, reduction)
    if not input1.ndim == input2.ndim == target.ndim:
        raise ShapeError(
            f"margin_ranking_loss: shapes {input1.shape}, {input2.shape} and {target.shape} differ in dimensions"
        )
    return reduced(_positive(-target * (input1 - input2) + margin), reduction)


@layer_function
def cosine_embedding_loss(
    input1: Tensor,
    input2: Tensor,
    target: Tensor,
    margin: float = 0.0,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
) -> Tensor:
    """1 - cos(x1, x2) where the target is 1, max(0, cos(x1, x2) - margin) where it is -1, and 0 for others.

    Args:
        input1, input2: `[N, D]` or `[D]`; both broadcast.
        target: `[N]`, or 0-d for `[D]`.
    """
    reduction = reduction_of(size_average, reduce, reduction)
    shapes = f"{input1.shape}, {input2.shape} and {target.shape}"
    if target.ndim > 1 or input1.ndim != target.ndim + 1 or input2.ndim != target.ndim + 1:
        raise ShapeError(f"cosine_embedding_loss: shapes {shapes}", next="pass [N, D], [N, D], [N], or [D], [D], []")
    x1, x2 = (x if x.is_floating_point() else x.float() for x in (input1, input2))
    small = 1e-12  # torch's, added to the squares
    norms = (pw.square(x1).sum(-1) + small) * (pw.square(x2).sum(-1) + small)
    cosine = (x1 * x2).sum(-1) / pw.sqrt(norms)
    near, far = ew.where(target == 1, 1 - cosine, 0.0), ew.where(target == -1, _positive(cosine - margin), 0.0)
    return reduced(near + far, reduction)


# --- Triplets ---------------------------------------------------------------------------------------------------------

Distance = Callable[[Tensor, Tensor], Tensor]


@layer_function
def triplet_margin_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
) -> Tensor:
    """max(0, d(anchor, positive) - d(anchor, negative) + margin) with p-norm distances d.

    `swap`: use d(positive, negative) where it is smaller than d(anchor, negative).
    """
    reduction = reduction_of(size_average, reduce, reduction)

    def distance(x: Tensor, y: Tensor) -> Tensor:
        return pairwise_distance(x, y, p, eps)

    return _triplets("triplet_margin_loss", (anchor, positive, negative), distance, margin, swap, reduction)


@layer_function
def triplet_margin_with_distance_loss(
    anchor: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    distance_function: Distance | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """`triplet_margin_loss` with a distance of the caller, `pairwise_distance` by default."""
    distance = pairwise_distance if distance_function is None else distance_function
    triplet = anchor, positive, negative
    return _triplets("triplet_margin_with_distance_loss", triplet, distance, margin, swap, reduction)


def _triplets(
    name: str, triplet: tuple[Tensor, Tensor, Tensor], distance: Distance, margin: float, swap: bool, reduction: str
) -> Tensor:
    anchor, positive, negative = triplet
    if margin <= 0:
        raise UsageError(f"{name}: margin is {margin}, and must be greater than 0")
    if not anchor.ndim == positive.ndim == negative.ndim:
        shapes = ", ".join(str(x.shape) for x in triplet)
        raise ShapeError(f"{name}: anchor, positive and negative differ in dimensions: {shapes}")
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = pw.minimum(far, distance(positive, negative))
    return reduced(_positive(margin + near - far), reduction)
