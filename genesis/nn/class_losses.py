"""Losses of log-probabilities and scores against class labels, with torch's names; cross entropy is in `losses.py`."""

from __future__ import annotations

import math

from genesis.dtypes import INTEGER, int64
from genesis.errors import DTypeError, IndexRangeError, ShapeError, UsageError
from genesis.functions import elementwise as ew
from genesis.functions import pointwise as pw
from genesis.functions import reduce as reductions
from genesis.functions.create import arange, zeros
from genesis.functions.index import gather, index_select, scatter_add
from genesis.functions.surface import array_of, layer_function
from genesis.nn.activation_functions import check_float, logsigmoid
from genesis.nn.losses import IGNORE, OldReduction, reduced, reduction_of
from genesis.tensor import Tensor


@layer_function
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: OldReduction = None,
    ignore_index: int = IGNORE,
    reduce: OldReduction = None,
    reduction: str = "mean",
) -> Tensor:
    """-w[label]·x[label] for log-probabilities x = `input`; the mean divides by the sum of the w.

    Args:
        input: `[C]`, `[N, C]` or `[N, C, …]`.
        target: integer labels, with input's shape without C.
        weight: class weights `[C]`, 1 by default.
        ignore_index: label of rows without a loss.
    """
    reduction = reduction_of(size_average, reduce, reduction)
    check_float("nll_loss", input)
    if array_of(target, "nll_loss").dtype.category != INTEGER:
        raise DTypeError(f"nll_loss takes integer labels, got {target.dtype.name}")
    if not input.ndim or target.shape != (*input.shape[:1], *input.shape[2:])[input.ndim == 1 :]:
        raise ShapeError(f"nll_loss: input {input.shape} and labels {target.shape} do not match")
    dim = min(input.ndim, 2) - 1
    if weight is not None and weight.shape != input.shape[dim : dim + 1]:
        raise ShapeError(f"nll_loss: the weight has shape {weight.shape}, expected ({input.shape[dim]},)")
    kept = target != ignore_index
    labels = ew.where(kept, target, 0).to(int64)
    if not input.shape[dim]:  # without classes, every row is ignored or wrong
        losses, shares = zeros(target.shape, dtype=input.dtype, device=input.device), kept.to(input.dtype) * 0
    else:
        losses = -gather(input, dim, labels.unsqueeze(dim)).squeeze(dim)
        shares = kept.to(input.dtype)
        if weight is not None:
            shares = shares * index_select(weight, 0, labels.reshape(-1)).reshape(labels.shape)
        losses = ew.where(kept, losses * shares, 0.0)
    return reduced(losses, reduction, shares.sum())


@layer_function
def multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
) -> Tensor:
    """Σ_j w[label]·max(0, margin - x[label] + x[j])^p / C over the other classes j.

    Args:
        input: scores `[N, C]` or `[C]`.
        target: integer labels `[N]`, or one label.
        p: 1 or 2.
        weight: class weights `[C]`.
    """
    name = "multi_margin_loss"
    reduction = reduction_of(size_average, reduce, reduction)
    check_float(name, input)
    if p not in (1, 2):
        raise UsageError(f"{name}: p is {p}", next="use 1 or 2")
    if input.ndim > 2 or not input.numel() or target.ndim > 1 or target.numel() != math.prod(input.shape[:-1]):
        raise ShapeError(f"{name} takes [N, C] and [N], got {input.shape} and {target.shape}")
    scores, labels = input.reshape(-1, input.shape[-1] if input.ndim else 1), target.reshape(-1)
    classes = scores.shape[1]
    if weight is not None and weight.shape != (classes,):
        raise ShapeError(f"{name}: the weight has shape {weight.shape}, expected ({classes},)")
    excess = ew.clamp(scores - gather(scores, 1, labels.unsqueeze(1)) + margin, min=0.0)
    losses = excess if p == 1 else pw.square(excess)
    if weight is not None:
        losses = losses * index_select(weight, 0, labels).unsqueeze(1)
    others = arange(classes, device=labels.device) != labels.unsqueeze(1)
    losses = ew.where(others, losses, 0.0).sum(1) / classes
    return reduced(losses.reshape(input.shape[:-1] if target.ndim else ()), reduction)


@layer_function
def multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
) -> Tensor:
    """Σ max(0, 1 - (x[i] - x[j])) / C over the labels i of a row and the other classes j.

    Args:
        input: scores `[N, C]` or `[C]`.
        target: int64 labels of input's shape; those from the first -1 on do not count.
    """
    name = "multilabel_margin_loss"
    reduction = reduction_of(size_average, reduce, reduction)
    check_float(name, input)
    if input.ndim > 2 or input.shape != target.shape or (input.ndim and not input.shape[-1]):
        raise ShapeError(f"{name} takes two tensors [N, C], got {input.shape} and {target.shape}")
    classes = input.shape[-1] if input.ndim else 1
    scores, labels = input.reshape(-1, classes), target.reshape(-1, classes)
    if (
        labels.numel()
        and not -1 <= int(reductions.amin(labels).item()) <= int(reductions.amax(labels).item()) < classes
    ):
        raise IndexRangeError(f"{name}: a label is not between -1 and {classes - 1}")
    counts = reductions.cumsum((labels == -1).to(int64), 1) == 0
    safe = ew.where(counts, labels, 0).to(int64)
    own = scatter_add(zeros(scores.shape, dtype=int64, device=scores.device), 1, safe, counts.to(int64)) > 0
    chosen = gather(scores, 1, safe).unsqueeze(2)
    excess = ew.clamp(1 - (chosen - scores.unsqueeze(1)), min=0.0)  # [N, labels, classes]
    pairs = pw.logical_and(counts.unsqueeze(2), pw.logical_not(own).unsqueeze(1))
    losses = ew.where(pairs, excess, 0.0).sum((1, 2)) / classes
    return reduced(losses.reshape(input.shape[:-1]), reduction)


@layer_function
def multilabel_soft_margin_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: OldReduction = None,
    reduce: OldReduction = None,
    reduction: str = "mean",
) -> Tensor:
    """Mean over classes of -w·(t·log σ(x) + (1 - t)·log σ(-x)) for targets t in [0, 1] of input's shape."""
    reduction = reduction_of(size_average, reduce, reduction)
    losses = -(target * logsigmoid(input) + (1 - target) * logsigmoid(-input))
    if weight is not None:
        losses = losses * weight
    return reduced(losses.sum(-1) / input.shape[-1], reduction)
