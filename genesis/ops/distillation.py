"""The divergence between a student and a teacher over the vocabulary, from hidden states, in chunks of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import scratch
from genesis.errors import DTypeError, ShapeError, UsageError
from genesis.op import Context, Grads, op
from genesis.ops.blocks import each_block, upcast
from genesis.ops.elementwise import mul
from genesis.ops.loss import _check_head, _check_range, _shifted, _sum_type, _wide, chunk_rows

FIGURES = 3  # cross entropy of the student, cross entropy of the teacher, agreements


def _infer(
    x: Array,
    weight: Array,
    teacher_x: Array,
    teacher_weight: Array,
    labels: Array,
    divisor: Array | float | None = None,
    *,
    beta: float,
    temperature: float,
    ignore_index: int,
    shift: int,
    with_grads: bool,
    weight_grad: bool = True,
) -> tuple[Spec, ...]:
    name = "linear_distillation"
    _check_head(name, x, weight, labels)
    _check_head(name, teacher_x, teacher_weight, labels)
    if teacher_x.dtype is not x.dtype:
        raise DTypeError(f"{name} takes one float type, got {x.dtype} and {teacher_x.dtype} (teacher)")
    if teacher_x.shape[0] != x.shape[0]:
        raise ShapeError(f"{name} takes equally many rows, got {x.shape[0]} and {teacher_x.shape[0]} (teacher)")
    if isinstance(divisor, Array) and divisor.ndim:
        raise ShapeError(f"{name}: the divisor has shape {divisor.shape} but must be one number")
    if not 0 <= beta <= 1:
        raise UsageError(f"{name}: beta is {beta}", next="pass a number from 0 to 1")
    if not temperature > 0:
        raise UsageError(f"{name}: the temperature is {temperature}", next="pass a positive number")
    grads = (Spec(x.shape, x.dtype), Spec(weight.shape, weight.dtype))
    one = _sum_type(x)
    return one, Spec((FIGURES,), one.dtype), *grads[: int(with_grads) * (1 + weight_grad)]


def _vjp(ctx: Context, g: Array, *_: None) -> Grads:
    """Scale the gradients, which were computed with the loss, by the gradient of the loss."""
    assert ctx.attrs["with_grads"], "linear_distillation was recorded without its gradients"
    assert not any(ctx.needs[2:4]), "linear_distillation was recorded for a teacher that is trained"
    dx, dw = (*ctx.outputs, None)[2:4]
    assert dw is not None or not ctx.needs[1], "linear_distillation was recorded without the weight's gradient"
    if not ctx.is_unit(g):
        dx = mul(dx, g) if ctx.needs[0] else None
        dw = mul(dw, g, out=dw if ctx.is_last else None) if ctx.needs[1] else None
    return (dx, dw, None, None, None, None)[: len(ctx.inputs)]


def _flops(inputs: tuple[Array, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
    rows, classes = inputs[0].shape[0], min(inputs[1].shape[0], inputs[3].shape[0])
    products = (len(outputs) - 1) * inputs[0].shape[1] + inputs[2].shape[1]
    return rows * classes * (2 * products + 20)


@op(
    "linear_distillation",
    _infer,
    vjp=_vjp,
    saves=("out",),
    auxiliary=(1, 2, 3),
    gradient_outputs=((3, 1),),
    flops=_flops,
    autocast="low_precision",
    autocast_inputs=4,
)
def linear_distillation(
    out: tuple[np.ndarray, ...],
    x: np.ndarray,
    weight: np.ndarray,
    teacher_x: np.ndarray,
    teacher_weight: np.ndarray,
    labels: np.ndarray,
    divisor: np.ndarray | float | None = None,
    *,
    beta: float,
    temperature: float,
    ignore_index: int,
    shift: int,
    with_grads: bool,
    weight_grad: bool = True,
) -> None:
    """Sum of the generalized Jensen-Shannon divergences of the rows with a label, divided (Agarwal et al., 2024).

    With p = softmax(x·weightᵀ / T) of the student, q of the teacher and m = β·q + (1 - β)·p, a row has the divergence
    β·KL(q‖m) + (1 - β)·KL(p‖m); for β = 0 it is the forward KL(q‖p) and for β = 1 the reverse KL(p‖q), as in TRL. The
    gradients with respect to the student's logits are, with a = log p - log m (log p - log q for β = 1):

        β = 0: (p - q) / T      β = 1: p·(a - Σ p·a) / T      else: (1 - β)·p·(a - Σ p·a) / T

    The second output has three sums over these rows: the cross entropy of the label by the student and by the teacher,
    both at temperature 1, and the number of rows whose likeliest class of the student has the teacher's largest logit.
    `with_grads` adds dx and, unless `weight_grad` is False, dweight. Logits exist for a chunk of rows at a time.

    Args:
        x, weight: the student's hidden states `[N, H]` and head `[V, H]`.
        teacher_x, teacher_weight: the teacher's `[N, H']` and `[V', H']`. Classes beyond the smaller V are left out.
        labels: integers `[N]`, or `[B, T]` with N = B·T. A row's label decides whether it counts, and the figures.
        divisor: number by which the sum is divided; receives no gradient.
        shift: row t has the label t + `shift`, and the last `shift` rows have none.
    """
    results: tuple[Any, ...] = out
    loss, figures, dx, dw = (*results, None, None)[:4]
    classes, acc = min(weight.shape[0], teacher_weight.shape[0]), _wide(x)
    labels = _shifted(labels, shift, ignore_index)
    kept = np.flatnonzero(labels != ignore_index)
    _check_range("linear_distillation", labels, labels != ignore_index, classes)
    share = acc.type(1 if divisor is None else divisor)
    for grad in (dx, dw):
        if grad is not None:
            grad.fill(0)
    w, teacher_w = upcast(weight[:classes]), upcast(teacher_weight[:classes])
    sum_dw = None if dw is None else np.zeros(w.shape, acc)
    total, sums, rows = 0.0, np.zeros(FIGURES), chunk_rows(classes, 2 * acc.itemsize)
    with scratch((2, min(rows, kept.size), classes), acc) as buffers:
        for first in range(0, kept.size, rows):
            chosen = kept[first : first + rows]
            xc, teacher_xc = upcast(x[chosen]), upcast(teacher_x[chosen])
            s, t = (buffer[: chosen.size] for buffer in buffers)
            np.matmul(xc, w.T, out=s)
            np.matmul(teacher_xc, teacher_w.T, out=t)
            found = _rows(s, t, labels[chosen], beta, temperature)
            total += float(found[0].sum())
            sums += found[1:].sum(axis=1)
            s /= share * acc.type(temperature)
            if dx is not None:
                dx[chosen] = np.matmul(s, w)
            if sum_dw is not None:
                sum_dw += np.matmul(s.T, xc)
    if dw is not None:
        dw[:classes] = sum_dw
    figures[...] = sums
    with np.errstate(invalid="ignore", divide="ignore"):
        loss[...] = np.float64(total) / np.float64(share)


def _rows(s: np.ndarray, t: np.ndarray, labels: np.ndarray, beta: float, temperature: float) -> np.ndarray:
    """Return divergence and figures of rows, `[4, rows]`; overwrite the logits `s` with T times their gradient."""
    found = np.zeros((1 + FIGURES, len(labels)))

    def block(start: int, stop: int) -> None:
        u, v, index = s[start:stop], t[start:stop], np.arange(stop - start)
        chosen = labels[start:stop]
        found[3, start:stop] = v[index, u.argmax(1)] == v.max(1)
        for row, values in ((1, u), (2, v)):
            found[row, start:stop] = -_log_softmax(values.copy())[index, chosen]
        for values in (u, v):
            values /= values.dtype.type(temperature)
            _log_softmax(values)
        p, q = np.exp(u), np.exp(v)
        if beta == 0:
            found[0, start:stop] = (q * (v - u)).sum(1)
            np.subtract(p, q, out=u)
            return
        log_m = v if beta == 1 else np.logaddexp(u + np.log1p(-u.dtype.type(beta)), v + np.log(u.dtype.type(beta)))
        a = u - log_m
        of_student = (p * a).sum(1)
        scale = 1.0 if beta == 1 else 1 - beta
        found[0, start:stop] = scale * of_student + (0 if beta == 1 else beta * (q * (v - log_m)).sum(1))
        np.multiply(p * u.dtype.type(scale), a - of_student[:, None], out=u)

    each_block(block, *s.shape)
    return found


def _log_softmax(values: np.ndarray) -> np.ndarray:
    """Subtract the log of the normalizer of each row, in place."""
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values
