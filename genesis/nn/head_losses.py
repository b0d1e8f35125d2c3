"""Losses that contain the output layer: cross entropy of a linear head, and the adaptive softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from genesis.errors import IndexRangeError, ShapeError, UsageError
from genesis.functions.shape import cat
from genesis.nn import functional as F
from genesis.nn.layers import Linear
from genesis.nn.module import Module, ModuleList, Sequential
from genesis.tensor import Tensor


class LinearCrossEntropyLoss(Module):
    """The loss of a linear layer's logits; see `functional.linear_cross_entropy`. The layer is `linear`.

    Args:
        out_features: further dimensions of the logits, after the classes.
        weight: factors of the classes.
    """

    def __init__(
        self, in_features: int, num_classes: int, *, out_features: tuple[int, ...] = (), bias: bool = False,
        device: Any = None, dtype: Any = None, reduction: str = "mean", weight: Tensor | None = None,
        ignore_index: int | None = None, label_smoothing: float = 0.0, options: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if weight is not None and weight.shape != (num_classes,):
            raise ShapeError(f"LinearCrossEntropyLoss: weight is {tuple(weight.shape)}, expected ({num_classes},)")
        if not 0 <= label_smoothing <= 1:
            raise UsageError(f"LinearCrossEntropyLoss: label_smoothing is {label_smoothing}, expected 0 to 1")
        self.register_buffer("weight", weight)
        self.num_classes, self.out_features, self.reduction = num_classes, out_features, reduction
        self.ignore_index, self.label_smoothing, self.options = ignore_index, label_smoothing, options
        self.linear = Linear(in_features, math.prod(out_features, start=num_classes), bias, device, dtype)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        shape, bias = (self.num_classes, *self.out_features), self.linear.bias
        return F.linear_cross_entropy(
            input, self.linear.weight.reshape(*shape, -1), target, weight=self.weight, reduction=self.reduction,
            linear_bias=None if bias is None else bias.reshape(shape), ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing, options=self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        names = ("num_classes", "out_features", "bias", "reduction", "ignore_index", "label_smoothing", "options")
        values = {**self.__dict__, "bias": self.linear.bias is not None}
        return f"in_features={self.linear.in_features}, " + ", ".join(f"{n}={values[n]}" for n in names)


class AdaptiveLogSoftmax(NamedTuple):
    """Log-probabilities of the targets, and their negative mean."""

    output: Tensor
    loss: Tensor


class AdaptiveLogSoftmaxWithLoss(Module):
    """A softmax over frequent classes and clusters of rarer ones, which have smaller layers (Grave et al., 2017).

    Args:
        in_features, n_classes: size of an input, and number of classes, which are ordered from frequent to rare.
        cutoffs: first classes of the clusters, ascending.
        div_value: each cluster's layer is narrower than the one before by this factor.
        head_bias: whether the layer of frequent classes has a bias.
    """

    def __init__(
        self, in_features: int, n_classes: int, cutoffs: Sequence[int], div_value: float = 4.0,
        head_bias: bool = False, device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        firsts = list(cutoffs)
        if not firsts or firsts != sorted(set(firsts)) or not 0 < firsts[0] <= firsts[-1] < n_classes:
            raise UsageError(f"AdaptiveLogSoftmaxWithLoss: cutoffs {firsts} do not ascend from 1 to {n_classes - 1}")
        self.in_features, self.n_classes, self.cutoffs = in_features, n_classes, [*firsts, n_classes]
        self.div_value, self.head_bias = div_value, head_bias
        self.shortlist_size, self.n_clusters = firsts[0], len(firsts)
        self.head_size, place = firsts[0] + len(firsts), (device, dtype)
        self.head = Linear(in_features, self.head_size, head_bias, *place)
        widths = [int(in_features // div_value ** (i + 1)) for i in range(len(firsts))]
        sizes = [stop - start for start, stop in pairwise(self.cutoffs)]
        self.tail = ModuleList(
            Sequential(Linear(in_features, width, False, *place), Linear(width, size, False, *place))
            for width, size in zip(widths, sizes, strict=True)
        )

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        for layer in (self.head, *(part for cluster in self.tail for part in cluster)):
            layer.reset_parameters()

    def forward(self, input: Tensor, target: Tensor) -> AdaptiveLogSoftmax:
        """Return log-probabilities `[N]` of targets `[N]` for inputs `[N, in_features]`, and the loss."""
        if target.ndim > 1 or input.ndim != target.ndim + 1 or input.shape[:-1] != target.shape:
            raise ShapeError(f"AdaptiveLogSoftmaxWithLoss: input {tuple(input.shape)}, target {tuple(target.shape)}")
        x, labels = (input, target) if target.ndim else (input.unsqueeze(0), target.unsqueeze(0))
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.n_classes:
            raise IndexRangeError(f"AdaptiveLogSoftmaxWithLoss: a target is outside 0 to {self.n_classes - 1}")
        # The head predicts the class or its cluster; a cluster's layers take only the rows with its classes.
        entry, inside = labels.clone(), x.new_zeros(len(labels))
        for i, (start, stop) in enumerate(pairwise(self.cutoffs)):
            rows = ((labels >= start) & (labels < stop)).nonzero().squeeze(1)
            if rows.numel():
                logs = F.log_softmax(self.tail[i](x[rows]), dim=1)
                inside = inside.index_copy(0, rows, logs.gather(1, labels[rows, None] - start).squeeze(1))
                entry[rows] = self.shortlist_size + i
        output = inside + F.log_softmax(self.head(x), dim=1).gather(1, entry.unsqueeze(1)).squeeze(1)
        return AdaptiveLogSoftmax(output if target.ndim else output.squeeze(0), (-output).mean())

    def log_prob(self, input: Tensor) -> Tensor:
        """Return the log-probabilities of all classes, `[N, n_classes]`."""
        head = F.log_softmax(self.head(input), dim=1)
        parts = [head[:, : self.shortlist_size]]
        for i, cluster in enumerate(self.tail):
            parts.append(F.log_softmax(cluster(input), dim=1) + head[:, self.shortlist_size + i].unsqueeze(1))
        return cat(parts, dim=1)  # type: ignore[no-any-return]

    def predict(self, input: Tensor) -> Tensor:
        """Return the most probable classes `[N]`; clusters are computed only where the head prefers one."""
        best = self.head(input).argmax(1)
        rows = (best >= self.shortlist_size).nonzero().squeeze(1)
        if rows.numel():
            best[rows] = self.log_prob(input[rows]).argmax(1)
        return best  # type: ignore[no-any-return]
