"""Samples of the divergence between a student and a teacher: every kind, temperature, vocabulary and way to divide."""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.errors import IndexRangeError, ShapeError, UsageError
from tests.ops.sampling import Case, Rows, integers, normal

__all__ = ["ROWS", "distillation_oracle"]


def distillation_oracle(
    x: np.ndarray, weight: np.ndarray, teacher_x: np.ndarray, teacher_weight: np.ndarray, labels: np.ndarray,
    divisor: Any = None, *, beta: float, temperature: float, ignore_index: int, shift: int, with_grads: bool,
    weight_grad: bool = True,
) -> Any:  # fmt: skip
    """The definition row by row in probabilities, and the gradient by the chain rule through the softmax."""
    share, classes = 1 if divisor is None else divisor, min(len(weight), len(teacher_weight))
    moved = np.full(labels.shape, ignore_index)
    moved[..., : labels.shape[-1] - shift] = labels[..., shift:]
    total, figures, dx, dw = 0.0, np.zeros(3), np.zeros_like(x), np.zeros_like(weight)
    for n, label in enumerate(moved.reshape(-1)):
        if label == ignore_index:
            continue
        plain = [head[:classes] @ row for head, row in ((weight, x[n]), (teacher_weight, teacher_x[n]))]
        cooled = [_log_softmax(each / temperature) for each in plain]
        p, q = np.exp(cooled[0]), np.exp(cooled[1])
        # Divergences, and their derivatives with respect to p.
        if beta == 0:
            total, slope = total + (q * (cooled[1] - cooled[0])).sum(), -q / p
        elif beta == 1:
            total, slope = total + (p * (cooled[0] - cooled[1])).sum(), cooled[0] - cooled[1] + 1
        else:
            m = beta * q + (1 - beta) * p
            total += beta * (q * np.log(q / m)).sum() + (1 - beta) * (p * np.log(p / m)).sum()
            slope = -beta * q * (1 - beta) / m + (1 - beta) * (np.log(p / m) + 1 - (1 - beta) * p / m)
        d = p * (slope - p @ slope) / temperature / share
        dx[n] = d @ weight[:classes]
        dw[:classes] += np.outer(d, x[n])
        figures[:2] -= [_log_softmax(each)[label] for each in plain]
        figures[2] += plain[1][plain[0].argmax()] == plain[1].max()
    return (np.asarray(total / share), figures, dx, dw)[: 2 + with_grads * (1 + weight_grad)]


def _log_softmax(x: np.ndarray) -> np.ndarray:
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def distillations(rng: np.random.Generator, with_grads: bool = True, **more: Any) -> list[Case]:
    cases = []
    kinds = [(0.0, 1.0), (1.0, 1.0), (0.5, 1.0), (0.1, 2.0), (0.0, 0.5), (1.0, 3.0), (0.9, 1.0)]
    sizes = [(4, 3, 5, 2, 5), (3, 2, 7, 4, 6), (3, 2, 6, 4, 7), (1, 1, 1, 1, 1), (0, 3, 4, 3, 4), (6, 16, 150, 8, 150)]
    for number, (beta, temperature) in enumerate(kinds):
        for n, h, v, teacher_h, teacher_v in sizes if number == 2 else sizes[number % 3 :: 3]:
            labels = integers(rng, 0, min(v, teacher_v), n)
            if n > 2:
                labels[1] = -100
            heads = normal(rng, v, h), normal(rng, teacher_v, teacher_h) / max(1, teacher_h // 4)
            inputs = (normal(rng, n, h), heads[0] / max(1, h // 4), normal(rng, n, teacher_h), heads[1], labels)
            attrs = {"beta": beta, "temperature": temperature, "ignore_index": -100, "shift": 0} | more
            cases.append(Case(inputs, {**attrs, "with_grads": with_grads}))
    labels = integers(rng, 0, 7, 2, 4)
    labels[0, 2] = labels[1, 0] = -1
    inputs = (normal(rng, 8, 8), normal(rng, 7, 8), normal(rng, 8, 4), normal(rng, 7, 4), labels)
    for divisor, shift in ((np.array(3), 1), (2.5, 2), (4.0, 4)):
        attrs = {"beta": 0.3, "temperature": 1.5, "ignore_index": -1, "shift": shift} | more
        cases.append(Case((*inputs, divisor), {**attrs, "with_grads": with_grads}))
    return cases


def without_agreements(found: Any) -> Any:
    """Drop the count of agreements: with strides of 0 all logits are equal up to rounding."""
    return found[0], found[1][:2], *found[2:]


def compared_oracle(*inputs: Any, **attrs: Any) -> Any:
    return without_agreements(distillation_oracle(*inputs, **attrs))


ATTRS = {"beta": 0.5, "temperature": 1.0, "ignore_index": -100, "shift": 0, "with_grads": False}
X, W = np.ones((2, 3)), np.ones((4, 3))
PLAIN = (X, W, X, W, np.array([0, 1]))
ROWS = [
    Rows(
        "linear_distillation",
        compared_oracle,
        distillations,
        grads=lambda rng: [c for c in distillations(rng) if c.inputs[0].size and c.attrs["shift"] != 4],
        wrt=(0, 1),
        errors=(
            (Case((X, W, X[:1], W, np.array([0, 1])), ATTRS), ShapeError, "linear_distillation"),
            (Case((X, W, X, W[:, :2], np.array([0, 1])), ATTRS), ShapeError, "linear_distillation"),
            (Case((*PLAIN, np.ones(2)), ATTRS), ShapeError, "one number"),
            (Case(PLAIN, {**ATTRS, "beta": 1.5}), UsageError, "beta is 1.5"),
            (Case(PLAIN, {**ATTRS, "temperature": 0.0}), UsageError, "temperature is 0"),
            (Case((X, W, X, W[:3], np.array([0, 3])), ATTRS), IndexRangeError, "label 3"),
        ),
        reduction=lambda case: 8 * max(case.inputs[1].size, case.inputs[3].size, 1) * max(len(case.inputs[0]), 1),
        inner=2,
        seen=without_agreements,
    ),
    Rows(
        "linear_distillation",
        compared_oracle,
        lambda rng: distillations(rng, False)[::2] + distillations(rng, weight_grad=False)[1::3],
        grads=lambda rng: [c for c in distillations(rng, weight_grad=False) if c.inputs[0].size][:3],
        wrt=(0,),
        reduction=lambda case: 8 * max(case.inputs[1].size, case.inputs[3].size, 1) * max(len(case.inputs[0]), 1),
        inner=2,
        seen=without_agreements,
    ),
]
