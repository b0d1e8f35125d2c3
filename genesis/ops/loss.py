"""Cross entropy over a vocabulary: from logits, and from hidden states without holding all logits in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import scratch
from genesis.dtypes import INTEGER, float32, float64
from genesis.errors import DTypeError, IndexRangeError, ShapeError
from genesis.op import Context, Grads, gradient_like, op, registry
from genesis.ops.blocks import each_block, upcast
from genesis.ops.elementwise import add, arange, cast, eq, exp, mul, ne, sub, where
from genesis.ops.shape import reshaped
from genesis.shapes import Shape

WORKSPACE = 16 << 20  # bytes of logits that linear_cross_entropy holds at a time
SAFE_LOGIT = 40.0  # no maximum is subtracted from logits within ±40: e^±40 fits easily into float32
MIN_CHUNK = 256  # tokens; with fewer, accumulating the weight gradient would cost more than the matmul


def _check_labels(name: str, labels: Array, shape: Shape) -> None:
    if labels.dtype.category != INTEGER:
        raise DTypeError(f"{name} takes integer labels, got {labels.dtype}")
    if labels.shape != shape:
        raise ShapeError(f"{name}: labels have shape {labels.shape}, expected {shape}")


def _check_range(name: str, labels: np.ndarray, kept: np.ndarray, classes: int) -> None:
    bad = kept & ((labels < 0) | (labels >= classes))
    if bad.any():
        raise IndexRangeError(f"{name}: label {int(labels[bad][0])} is not between 0 and {classes - 1}")


def _sum_type(x: Array) -> Spec:
    return Spec((), float64 if x.dtype is float64 else float32)


def _infer(
    logits: Array, labels: Array, *, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Spec, Spec]:
    if logits.ndim != 2:
        raise ShapeError(f"cross_entropy takes logits [N, V], got {logits.shape}")
    if not logits.dtype.is_floating_point:
        raise DTypeError(f"cross_entropy takes float logits, got {logits.dtype}")
    _check_labels("cross_entropy", labels, logits.shape[:1])
    per_row = Spec(labels.shape, _sum_type(logits).dtype)
    return per_row, per_row


def _vjp(ctx: Context, g: Array, _: None) -> Grads:
    return cross_entropy_backward(g, *ctx.inputs, ctx.outputs[1], **ctx.attrs), None


@op(
    "cross_entropy",
    _infer,
    vjp=_vjp,
    saves=(0, 1, "out"),
    auxiliary=(1,),
    flops=lambda i, o, a: 4 * i[0].size,
    autocast="fp32",
)
def cross_entropy(
    out: tuple[np.ndarray, np.ndarray],
    logits: np.ndarray,
    labels: np.ndarray,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Loss of each row, 0 where the label is `ignore_index`; the second output is each row's LSE (no gradient).

    With l = log Σ e^x: (1 - s)·(l - x[label]) + s·(l - mean x) + z·l², with label smoothing s (Szegedy et al., 2016)
    and z-loss weight z (Chowdhery et al., 2022).

    Args:
        logits: `[N, V]`.
        labels: `[N]` integers.
    """
    losses, lse = out
    kept = labels != ignore_index
    _check_range("cross_entropy", labels, kept, logits.shape[1])
    safe = np.where(kept, labels, 0)

    def block(start: int, stop: int) -> None:
        x = upcast(logits[start:stop])
        top = x.max(axis=1, keepdims=True)
        l = top[:, 0] + np.log(np.exp(x - top).sum(axis=1))  # noqa: E741  the formula's name
        chosen = x[np.arange(stop - start), safe[start:stop]]
        value = (1 - label_smoothing) * (l - chosen) + z_loss * l * l
        if label_smoothing:
            value += label_smoothing * (l - x.mean(axis=1))
        lse[start:stop] = l
        losses[start:stop] = np.where(kept[start:stop], value, 0)

    if logits.size:
        each_block(block, logits.shape[0], logits.shape[1])


def _backward_plain(
    g: Array, logits: Array, labels: Array, lse: Array, *, ignore_index: int, label_smoothing: float, z_loss: float
) -> Array:
    """The gradient by ops on arrays, with l computed again from the logits."""
    count, column = logits.shape[1], (labels.shape[0], 1)
    l = registry["logsumexp"](logits, axes=1, keepdim=True)  # noqa: E741
    kept = ne(labels, ignore_index)
    classes = arange(start=0, step=1, count=count, dtype=labels.dtype, device=labels.device)
    onehot = cast(eq(reshaped(labels, column), classes), dtype=lse.dtype)
    p = mul(exp(sub(logits, l)), add(mul(l, 2 * z_loss), 1))
    target = add(mul(onehot, 1 - label_smoothing), label_smoothing / max(count, 1))
    return mul(sub(p, target), reshaped(where(kept, g, 0.0), column))


@op(
    "cross_entropy_backward",
    lambda g, logits, labels, lse, **attrs: gradient_like("cross_entropy_backward", g, logits, like=lse),
    flops=lambda i, o, a: 4 * o[0].size,
    plain=_backward_plain,
)
def cross_entropy_backward(
    out: np.ndarray,
    g: np.ndarray,
    logits: np.ndarray,
    labels: np.ndarray,
    lse: np.ndarray,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """dx = g·(p·(1 + 2·z·l) - (1 - s)·onehot - s/V) with p = e^(x - l); rows with `ignore_index` get 0."""
    scale = upcast(np.where(labels != ignore_index, g, 0).astype(lse.dtype))
    safe = np.where(labels != ignore_index, labels, 0)

    def block(start: int, stop: int) -> None:
        l, weight = upcast(lse[start:stop, None]), scale[start:stop, None]  # noqa: E741
        p = np.exp(upcast(logits[start:stop]) - l)
        p *= 1 + 2 * z_loss * l
        p -= label_smoothing / p.shape[1]
        p[np.arange(stop - start), safe[start:stop]] -= 1 - label_smoothing
        np.multiply(p, weight, out=out[start:stop], casting="unsafe")

    if logits.size:
        each_block(block, logits.shape[0], logits.shape[1])


def _linear_infer(
    x: Array,
    weight: Array,
    labels: Array,
    divisor: Array | float | None = None,
    *,
    ignore_index: int,
    with_grads: bool,
    weight_grad: bool = True,
    mean: bool = False,
    shift: int = 0,
) -> tuple[Spec, ...]:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(f"linear_cross_entropy takes x [N, H] and weight [V, H], got {x.shape} and {weight.shape}")
    if not x.dtype.is_floating_point or weight.dtype is not x.dtype:
        raise DTypeError(f"linear_cross_entropy takes one float type, got {x.dtype} and {weight.dtype}")
    if labels.ndim == 2 and labels.size == x.shape[0]:
        _check_labels("linear_cross_entropy", labels, labels.shape)
    else:
        _check_labels("linear_cross_entropy", labels, x.shape[:1])
    if isinstance(divisor, Array) and divisor.ndim:
        raise ShapeError(f"linear_cross_entropy: the divisor has shape {divisor.shape} but must be one number")
    grads = (Spec(x.shape, x.dtype), Spec(weight.shape, weight.dtype))
    return _sum_type(x), *grads[: int(with_grads) * (1 + weight_grad)]


def _linear_vjp(ctx: Context, g: Array, *_: None) -> Grads:
    """Scale the gradients, which were computed with the loss, by the gradient of the loss."""
    assert ctx.attrs["with_grads"], "linear_cross_entropy was recorded without its gradients"
    dx, dw = (*ctx.outputs, None)[1:3]
    assert dw is not None or not ctx.needs[1], "linear_cross_entropy was recorded without the weight's gradient"
    if not ctx.is_unit(g):
        dx = mul(dx, g) if ctx.needs[0] else None
        dw = mul(dw, g, out=dw if ctx.is_last else None) if ctx.needs[1] else None
    return (dx, dw, None, None)[: len(ctx.inputs)]


def _linear_flops(inputs: tuple[Array, ...], outputs: tuple[Array, ...], attrs: dict[str, object]) -> int:
    product = 2 * inputs[0].size * inputs[1].shape[0]
    gradients = (1 + bool(attrs.get("weight_grad", True))) * bool(attrs["with_grads"])
    return product * (1 + gradients) + 4 * inputs[0].shape[0] * inputs[1].shape[0]


@op(
    "linear_cross_entropy",
    _linear_infer,
    vjp=_linear_vjp,
    saves=("out",),
    auxiliary=(1, 2),
    gradient_outputs=((2, 1),),
    flops=_linear_flops,
    autocast="low_precision",
    autocast_inputs=2,
)
def linear_cross_entropy(
    out: np.ndarray | tuple[np.ndarray, ...],
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
) -> None:
    """Cross entropy of logits x·weightᵀ, summed and divided, computed in chunks of tokens.

    `with_grads` adds the outputs dx and, unless `weight_grad` is False, dweight. With p = softmax(logits): dlogits =
    (p - onehot) / divisor, dx = dlogits·weight, dweight = dlogitsᵀ·x. Rows whose label is `ignore_index` contribute
    nothing.

    Args:
        x: `[N, H]` hidden states.
        weight: `[V, H]`, the head.
        labels: integers `[N]`, or `[B, T]` with N = B·T.
        divisor: number by which the sum is divided; receives no gradient.
        mean: without a divisor, divide by the number of rows that are not ignored.
        shift: row t has the label t + `shift`, and the last `shift` rows none; 1 predicts the next token.
    """
    results: tuple[Any, ...] = out if isinstance(out, tuple) else (out,)
    loss, dx, dw = (*results, None, None)[:3]
    vocabulary, acc = weight.shape[0], np.dtype(np.float64) if x.dtype == np.float64 else np.dtype(np.float32)
    labels = _shifted(labels, shift, ignore_index)
    # Rows with a label, and the divisor.
    kept = np.flatnonzero(labels != ignore_index)
    _check_range("linear_cross_entropy", labels, labels != ignore_index, vocabulary)
    share = acc.type(kept.size if divisor is None and mean else 1 if divisor is None else divisor)
    if with_grads:
        assert dx is not None
        dx.fill(0)
        if dw is not None and not kept.size:
            dw.fill(0)
    # For each chunk: logits, losses, and the gradients of x and of the weight.
    rows = chunk_rows(vocabulary, acc.itemsize)
    w = upcast(weight)
    total = 0.0
    sum_dw = dw if dw is None or dw.dtype == acc else np.zeros(dw.shape, acc)
    more = w.shape if sum_dw is not None and kept.size > rows else (0,)
    with scratch((min(rows, kept.size), vocabulary), acc) as buffer, scratch(more, acc) as chunk_dw:
        for first in range(0, kept.size, rows):
            chosen = kept[first : first + rows]
            xc = upcast(x if chosen.size == x.shape[0] else x[chosen])
            logits = np.matmul(xc, w.T, out=buffer[: chosen.size])
            losses, sums = _loss_rows(logits, labels[chosen], with_grads)
            total += losses
            if dx is None:
                continue
            # scales the narrow operands by 1 / (Σ e^x · divisor) rather than the logits
            sums *= share
            dx[chosen] = np.matmul(logits, w) / sums
            if sum_dw is None:
                continue
            if first == 0:
                np.matmul(logits.T, xc / sums, out=sum_dw)
            else:
                sum_dw += np.matmul(logits.T, xc / sums, out=chunk_dw)
    with np.errstate(invalid="ignore", divide="ignore"):  # the mean of no rows is NaN
        loss[...] = np.float64(total) / np.float64(share)
    if dw is not None and dw is not sum_dw:
        dw[...] = sum_dw


def chunk_rows(vocabulary: int, itemsize: int) -> int:
    """Return how many tokens' logits, of `itemsize` bytes each, are in memory at a time."""
    return max(MIN_CHUNK, WORKSPACE // (max(vocabulary, 1) * itemsize))


def _shifted(labels: np.ndarray, shift: int, ignore_index: int) -> np.ndarray:
    """Return the label of each row, `[N]`."""
    if not shift:
        return labels.reshape(-1)
    shifted = np.full(labels.shape, ignore_index, labels.dtype)
    shifted[..., :-shift] = labels[..., shift:]
    return shifted.reshape(-1)


def _loss_rows(logits: np.ndarray, labels: np.ndarray, with_grads: bool) -> tuple[float, np.ndarray]:
    """Return the summed loss of some rows and sums `[rows, 1]`; `logits` becomes its gradient times `sums`."""
    losses = np.empty(labels.shape, np.float64)
    sums = np.empty((labels.shape[0], 1), logits.dtype)

    def block(start: int, stop: int) -> None:
        part, index = logits[start:stop], np.arange(stop - start)
        top = part.max(axis=1, keepdims=True)
        if not (np.abs(top).max(initial=0) <= SAFE_LOGIT):  # true for NaN, too
            part -= top
        chosen = part[index, labels[start:stop]].astype(np.float64)
        np.exp(part, out=part)
        total = part.sum(axis=1, keepdims=True, out=sums[start:stop])
        losses[start:stop] = np.log(total[:, 0]) - chosen
        if with_grads:
            part[index, labels[start:stop]] -= total[:, 0]

    each_block(block, *logits.shape)
    return float(losses.sum()), sums
