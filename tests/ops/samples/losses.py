"""Samples of cross entropy and of log-probabilities, from logits and from hidden states."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genesis.errors import IndexRangeError, ShapeError, UsageError
from tests.ops.samples.elementwise import binary
from tests.ops.sampling import Case, Rows, integers, normal, positive


def cross_entropy_oracle(
    logits: np.ndarray, labels: np.ndarray, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[np.ndarray, np.ndarray]:
    losses, lse = np.zeros(len(labels)), np.zeros(len(labels))
    for n, row in enumerate(logits):
        top = row.max()
        lse[n] = top + math.log(np.exp(row - top).sum())
        if labels[n] != ignore_index:
            hard, soft = lse[n] - row[labels[n]], lse[n] - row.mean()
            losses[n] = (1 - label_smoothing) * hard + label_smoothing * soft + z_loss * lse[n] ** 2
    return losses, lse


def cross_entropies(rng: np.random.Generator) -> list[Case]:
    cases = []
    for n, v in [(4, 5), (1, 1), (3, 2), (40, 300)]:
        labels = integers(rng, 0, v, n)
        labels[0] = -100
        for smoothing, z in [(0.0, 0.0), (0.1, 1e-2)]:
            attrs = {"ignore_index": -100, "label_smoothing": smoothing, "z_loss": z}
            cases.append(Case((normal(rng, n, v) * 3, labels), attrs))
    return cases


def cross_entropy_backward_oracle(
    g: np.ndarray,
    logits: np.ndarray,
    labels: np.ndarray,
    lse: np.ndarray,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> np.ndarray:
    found = np.zeros_like(logits)
    for n, label in enumerate(labels):
        if label != ignore_index:
            p = np.exp(logits[n] - lse[n])
            found[n] = p * (1 + 2 * z_loss * lse[n]) - label_smoothing / logits.shape[1]
            found[n, label] -= 1 - label_smoothing
            found[n] *= g[n]
    return found


def cross_entropy_backwards(rng: np.random.Generator) -> list[Case]:
    cases = []
    for case in cross_entropies(rng):
        logits, labels = case.inputs
        cases.append(Case((normal(rng, len(labels)), logits, labels, positive(rng, len(labels)) + 5), case.attrs))
    return cases


def mean_oracle(logits: np.ndarray, labels: np.ndarray, mean: bool, **attrs: Any) -> tuple[np.ndarray, ...]:
    losses, lse = cross_entropy_oracle(logits, labels, **attrs)
    count = np.array(float((labels != attrs["ignore_index"]).sum()))
    return losses.sum() / count, lse, count


def mean_backward_oracle(g: np.ndarray, *operands: np.ndarray, **attrs: Any) -> np.ndarray:
    *rest, divisor = operands
    return cross_entropy_backward_oracle(np.full(len(rest[1]), g / divisor), *rest, **attrs)


def means(rng: np.random.Generator) -> list[Case]:
    cases = [Case(case.inputs, {**case.attrs, "mean": True}) for case in cross_entropies(rng)]
    return [case for case in cases if (case.inputs[1] >= 0).any()]


def mean_backwards(rng: np.random.Generator) -> list[Case]:
    cases = cross_entropy_backwards(rng)
    return [Case((np.array(1.7), *case.inputs[1:], np.array(3.0)), case.attrs) for case in cases]


def linear_cross_entropy_oracle(
    x: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    divisor: np.ndarray | float | None = None,
    *,
    ignore_index: int,
    with_grads: bool,
    weight_grad: bool = True,
    mean: bool = False,
    shift: int = 0,
    with_hits: bool = False,
) -> Any:
    total, hits, dx, dw = 0.0, 0, np.zeros_like(x), np.zeros_like(weight)
    length, targets = labels.shape[-1], {}
    for place in np.ndindex(labels.shape):
        if place[-1] >= shift and labels[place] != ignore_index:
            row = sum(i * n for i, n in zip(place, (length, 1)[-labels.ndim :], strict=True)) - shift
            targets[row] = labels[place]
    for n, label in targets.items():
        logits = weight @ x[n]
        p = np.exp(logits - logits.max())
        total -= math.log(p[label] / p.sum())
        hits += int(logits.argmax() == label)
        d = p / p.sum()
        d[label] -= 1
        dx[n] = d @ weight
        dw += np.outer(d, x[n])
    share = (len(targets) if mean else 1) if divisor is None else divisor
    count = int(with_grads) * (1 + weight_grad)
    if not targets:
        loss = np.asarray(0.0 if share else math.nan)
        return (loss, dx, dw)[: 1 + count] if with_grads else (loss, hits) if with_hits else loss
    loss = np.asarray(total / share)
    return (loss, dx / share, dw / share)[: 1 + count] if with_grads else (loss, hits) if with_hits else loss


def heads_with_hits(rng: np.random.Generator) -> list[Case]:
    """Cases without gradients that count hits; in the last, several classes of each row have the largest logit."""
    cases = linear_cross_entropies(rng, (False,))
    x, weight, labels = np.abs(normal(rng, 6, 8)), np.zeros((300, 8)), np.array([2, 139, 290, 141, 140, 141])
    x[4:] *= -1
    weight[[2, 139, 290]], weight[[140, 141]] = 1.0, -1.0
    cases += [Case((x, weight, labels), cases[0].attrs)]
    return [Case(case.inputs, {**case.attrs, "with_hits": True}) for case in cases]


def frozen_heads(rng: np.random.Generator) -> list[Case]:
    """Without the weight's gradient."""
    return [Case(c.inputs, {**c.attrs, "weight_grad": False}) for c in reversed(linear_cross_entropies(rng, (True,)))]


def linear_cross_entropies(rng: np.random.Generator, with_grads: tuple[bool, ...] = (True, False)) -> list[Case]:
    cases = []
    for n, h, v in [(4, 3, 5), (1, 1, 1), (3, 2, 7), (0, 3, 4), (6, 16, 150)]:
        labels = integers(rng, 0, v, n)
        if n > 2:
            labels[1] = -100
        inputs = (normal(rng, n, h), normal(rng, v, h) / max(1, h // 4), labels)
        cases += [Case(inputs, {"ignore_index": -100, "with_grads": w}) for w in with_grads]
    x, weight, labels = (normal(rng, 3, 4), normal(rng, 5, 4), integers(rng, 0, 5, 3))
    far = (x * 200 / np.abs(x @ weight.T).max(axis=1, keepdims=True), weight, labels)  # e^x would overflow
    cases += [Case(far, {"ignore_index": -100, "with_grads": w}) for w in with_grads]
    return cases + [case for w in with_grads for case in divided(rng, w)]


def divided(rng: np.random.Generator, with_grads: bool) -> list[Case]:
    """Labels of sequences, moved by one, and every way to divide."""
    labels = integers(rng, 0, 7, 2, 4)
    labels[0, 2] = labels[1, 0] = -1
    inputs = (normal(rng, 8, 8), normal(rng, 7, 8), labels)
    attrs: dict[str, Any] = {"ignore_index": -1, "with_grads": with_grads}
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((np.array(3),), {"shift": 1}),
        ((np.array(2.5),), {"shift": 2, "mean": True}),
        ((4.0,), {}),
        ((), {"mean": True, "shift": 1}),
        ((), {"mean": True, "shift": 4}),  # nothing is left to predict: the mean is NaN
    ]
    return [Case((*inputs, *more), {**attrs, **way}) for more, way in ways]


def token_log_probs_oracle(
    x: np.ndarray, weight: np.ndarray, labels: np.ndarray, *, ignore_index: int, shift: int, temperature: float,
    with_dx: bool,
) -> Any:  # fmt: skip
    """Each row by the cross entropy of that row alone, with the head divided by the temperature."""
    found, dx, _ = token_rows(x, weight, labels, ignore_index, shift, temperature)
    return (found, dx) if with_dx else found


def token_rows(
    x: np.ndarray, weight: np.ndarray, labels: np.ndarray, ignore_index: int, shift: int, temperature: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The log-probability of each row `[N]`, and its gradients `[N, H]` and `[N, V, H]`."""
    moved = np.full(labels.shape, ignore_index)
    moved[..., : labels.shape[-1] - shift] = labels[..., shift:]
    found, dx, dw = np.zeros(len(x)), np.zeros(x.shape), np.zeros((len(x), *weight.shape))
    attrs: dict[str, Any] = {"ignore_index": ignore_index, "with_grads": True}
    for i, label in enumerate(moved.reshape(-1)):
        row = linear_cross_entropy_oracle(x[i : i + 1], weight / temperature, np.array([label]), **attrs)
        found[i], dx[i], dw[i] = -row[0], -row[1][0], -row[2] / temperature
    return found, dx, dw


def token_log_probs_backward_oracle(
    g: np.ndarray, x: np.ndarray, weight: np.ndarray, labels: np.ndarray, *, ignore_index: int, shift: int,
    temperature: float, needs: tuple[bool, bool],
) -> Any:  # fmt: skip
    _, dx, dw = token_rows(x, weight, labels, ignore_index, shift, temperature)
    both = (g[:, None] * dx, np.tensordot(g, dw, 1))
    chosen = [each for each, need in zip(both, needs, strict=True) if need]
    return tuple(chosen) if len(chosen) > 1 else chosen[0]


def token_log_probs(rng: np.random.Generator, with_dx: bool) -> list[Case]:
    attrs = {"ignore_index": -100, "with_dx": with_dx}
    cases = [
        Case(case.inputs, {**attrs, "shift": 0, "temperature": temperature})
        for case, temperature in zip(linear_cross_entropies(rng, (False,))[:6], (1, 0.7, 2.5, 1, 1, 1), strict=True)
    ]
    labels = integers(rng, 0, 7, 2, 4)
    labels[0, 2] = -100
    inputs = (normal(rng, 8, 8), normal(rng, 7, 8), labels)
    return cases + [Case(inputs, {**attrs, "shift": shift, "temperature": 0.5}) for shift in (1, 4)]


def token_log_probs_backwards(rng: np.random.Generator) -> list[Case]:
    cases = []
    for i, case in enumerate(token_log_probs(rng, False)):
        g = normal(rng, len(case.inputs[0]))
        g[:1] = 0.0
        attrs = {name: value for name, value in case.attrs.items() if name != "with_dx"}
        needs = ((True, True), (False, True), (True, False))[i % 3]
        cases.append(Case((g, *case.inputs), {**attrs, "needs": needs}))
    return cases


TOKEN_ATTRS = {"ignore_index": -100, "shift": 0, "temperature": 1.0}
TOKEN_ROWS = [
    Rows(
        "linear_token_log_probs",
        token_log_probs_oracle,
        lambda rng: token_log_probs(rng, True),
        grads=lambda rng: [c for c in token_log_probs(rng, True) if c.inputs[0].size],
        wrt=(0,),
        reduction=lambda case: 4 * max(case.inputs[1].size, 1),
        inner=2,
    ),
    Rows(
        "linear_token_log_probs",
        token_log_probs_oracle,
        lambda rng: token_log_probs(rng, False),
        grads=lambda rng: [c for c in token_log_probs(rng, False) if c.inputs[0].size],
        wrt=(0, 1),
        errors=(
            (
                Case((np.ones((2, 3)), np.ones((4, 3)), np.array([0, 4])), {**TOKEN_ATTRS, "with_dx": False}),
                IndexRangeError,
                "label 4",
            ),
            (
                Case(
                    (np.ones((2, 3)), np.ones((4, 3)), np.array([0, 1])),
                    {**TOKEN_ATTRS, "temperature": 0.0, "with_dx": False},
                ),
                UsageError,
                "temperature is 0",
            ),
        ),
        reduction=lambda case: 4 * max(case.inputs[1].size, 1) * max(len(case.inputs[2]), 1),
        inner=2,
    ),
    Rows(
        "linear_token_log_probs_backward",
        token_log_probs_backward_oracle,
        token_log_probs_backwards,
        errors=(
            (
                Case(
                    (np.ones(3), np.ones((2, 3)), np.ones((4, 3)), np.array([0, 1])),
                    {**TOKEN_ATTRS, "needs": (True, True)},
                ),
                ShapeError,
                r"g has shape \(3,\)",
            ),
        ),
        reduction=lambda case: 4 * max(case.inputs[2].size, 1) * max(len(case.inputs[1]), 1),
        inner=2,
    ),
]
LOSS_ATTRS = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0}
LOSS_ROWS = [
    Rows(
        "cross_entropy",
        cross_entropy_oracle,
        cross_entropies,
        grads=lambda rng: [c for c in cross_entropies(rng) if c.inputs[0].size < 30],
        errors=(
            (Case((np.ones((2, 3)), np.array([0, 3])), LOSS_ATTRS), IndexRangeError, "label 3"),
            (Case((np.ones((2, 3)), np.array([0])), LOSS_ATTRS), ShapeError, "labels"),
        ),
        reduction=lambda case: 4 * case.inputs[0].shape[-1],
    ),
    Rows(
        "cross_entropy_backward",
        cross_entropy_backward_oracle,
        cross_entropy_backwards,
        errors=(
            (
                Case((np.ones(3), np.ones((2, 3)), np.array([0, 1]), np.ones(2)), LOSS_ATTRS),
                ShapeError,
                "gradient",
            ),
        ),
        reduction=lambda case: 8,
    ),
    Rows(
        "cross_entropy",
        mean_oracle,
        means,
        grads=lambda rng: [c for c in means(rng) if c.inputs[0].size < 30],
        reduction=lambda case: 4 * sum(case.inputs[0].shape),
    ),
    Rows("cross_entropy_backward", mean_backward_oracle, mean_backwards, reduction=lambda case: 8),
    Rows(
        "linear_cross_entropy",
        linear_cross_entropy_oracle,
        frozen_heads,
        grads=lambda rng: [c for c in frozen_heads(rng) if c.inputs[0].size and c.attrs.get("shift") != 4][:3],
        wrt=(0,),
        reduction=lambda case: 4 * max(case.inputs[1].size, 1) * max(len(case.inputs[2]), 1),
        inner=2,
    ),
    Rows(
        "linear_cross_entropy",
        linear_cross_entropy_oracle,
        heads_with_hits,
        reduction=lambda case: 4 * max(case.inputs[1].size, 1) * max(len(case.inputs[2]), 1),
        inner=2,
    ),
    Rows(
        "linear_cross_entropy",
        linear_cross_entropy_oracle,
        linear_cross_entropies,
        grads=lambda rng: [
            c for c in linear_cross_entropies(rng, (True,)) if c.inputs[0].size and c.attrs.get("shift") != 4
        ],
        errors=(
            (
                Case((np.ones((2, 3)), np.ones((4, 2)), np.array([0, 1])), {"ignore_index": -100, "with_grads": True}),
                ShapeError,
                "linear_cross_entropy",
            ),
            (
                Case(
                    (np.ones((4, 3)), np.ones((5, 3)), np.zeros((3, 2), int)),
                    {"ignore_index": -100, "with_grads": True},
                ),
                ShapeError,
                "labels have shape",
            ),
            (
                Case(
                    (np.ones((2, 3)), np.ones((5, 3)), np.array([0, 1]), np.ones(2)),
                    {"ignore_index": -100, "with_grads": False},
                ),
                ShapeError,
                "one number",
            ),
            (
                Case((np.ones((2, 3)), np.ones((4, 3)), np.array([0, 4])), {"ignore_index": -100, "with_grads": True}),
                IndexRangeError,
                "label 4",
            ),
        ),
        wrt=(0, 1),
        reduction=lambda case: 4 * max(case.inputs[1].size, 1) * max(len(case.inputs[2]), 1),
        inner=2,  # p - 1 and the other p of a token meet the weight, and add up to at most 2
    ),
]

DIFFERENCES = [
    binary(
        "squared_difference",
        lambda x, y: np.square(np.subtract(x, y)),
        reduction=lambda case: 4,
        extremes=False,  # a difference of infinite values, and a square beyond the type's range
    ),
    Rows(
        "squared_difference_backward",
        lambda g, x, y: 2 * g * (x - y),
        lambda rng: [
            Case(tuple(normal(rng, *shape) for shape in shapes))
            for shapes in (((3, 4),) * 3, ((17,),) * 3, ((2, 3), (3,), (2, 1)), ((0, 2),) * 3)
        ],
        errors=((Case((np.ones(3), np.ones(4), np.ones(4))), ShapeError, "broadcast"),),
        reduction=lambda case: 4,
        extremes=False,
    ),
]
ROWS = LOSS_ROWS + TOKEN_ROWS + DIFFERENCES
