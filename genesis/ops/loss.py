"""Cross entropy over a vocabulary: from logits, and from hidden states without holding all logits in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from genesis.array import Array, Spec, constant
from genesis.backend.cpu import scratch
from genesis.dtypes import INTEGER, float32, float64, int64
from genesis.errors import DTypeError, IndexRangeError, ShapeError, UsageError
from genesis.op import Context, Grads, gradient_like, op, registry
from genesis.ops.blocks import each_block, sweep, upcast
from genesis.ops.elementwise import add, arange, cast, div, eq, exp, mul, ne, neg, numeric, sub, where
from genesis.ops.formula import by_ops
from genesis.ops.reduce import sum as sum_of
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
    logits: Array, labels: Array, *, ignore_index: int, label_smoothing: float, z_loss: float, mean: bool = False
) -> tuple[Spec, ...]:
    if logits.ndim != 2:
        raise ShapeError(f"cross_entropy takes logits [N, V], got {logits.shape}")
    if not logits.dtype.is_floating_point:
        raise DTypeError(f"cross_entropy takes float logits, got {logits.dtype}")
    _check_labels("cross_entropy", labels, logits.shape[:1])
    per_row, one = Spec(labels.shape, _sum_type(logits).dtype), _sum_type(logits)
    return (one, per_row, one) if mean else (per_row, per_row)


def _vjp(ctx: Context, g: Array, *_: None) -> Grads:
    attrs = {name: value for name, value in ctx.attrs.items() if name != "mean"}
    return cross_entropy_backward(g, *ctx.inputs, *ctx.outputs[1:], **attrs), None


@op(
    "cross_entropy",
    _infer,
    vjp=_vjp,
    saves=(0, 1, "out1", "out2"),
    auxiliary=(1, 2),
    flops=lambda i, o, a: 4 * i[0].size,
    autocast="fp32",
)
def cross_entropy(
    out: tuple[np.ndarray, ...],
    logits: np.ndarray,
    labels: np.ndarray,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    mean: bool = False,
) -> None:
    """Loss of each row, 0 where the label is `ignore_index`; the second output is each row's LSE (no gradient).

    With l = log Σ e^x: (1 - s)·(l - x[label]) + s·(l - mean x) + z·l², with label smoothing s (Szegedy et al., 2016)
    and z-loss weight z (Chowdhery et al., 2022).

    With `mean`, the first output is the sum of the losses divided by the third, the number of rows not ignored.

    Args:
        logits: `[N, V]`.
        labels: `[N]` integers.
    """
    losses, lse = (np.zeros_like(out[1]) if mean else out[0]), out[1]
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
    if mean:
        sum_of.reference(out[0], losses)
        out[2][...] = np.count_nonzero(kept)
        np.divide(out[0], out[2], out=out[0])


def _backward_plain(
    g: Array, logits: Array, labels: Array, lse: Array, divisor: Array | None = None, *, ignore_index: int,
    label_smoothing: float, z_loss: float,
) -> Array:  # fmt: skip
    """The gradient by ops on arrays, with l computed again from the logits."""
    g = g if divisor is None else div(g, constant(divisor))
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
    lambda g, logits, labels, lse, divisor=None, **attrs: gradient_like(
        "cross_entropy_backward", g, logits, like=lse if divisor is None else divisor
    ),
    flops=lambda i, o, a: 4 * o[0].size,
    plain=_backward_plain,
)
def cross_entropy_backward(
    out: np.ndarray,
    g: np.ndarray,
    logits: np.ndarray,
    labels: np.ndarray,
    lse: np.ndarray,
    divisor: np.ndarray | None = None,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """dx = g·(p·(1 + 2·z·l) - (1 - s)·onehot - s/V) with p = e^(x - l); rows with `ignore_index` get 0.

    With the divisor of a mean, g is one number, and is divided by it.
    """
    g = upcast(g) if divisor is None else upcast(g) / upcast(divisor)
    scale = np.where(labels != ignore_index, g, 0).astype(upcast(lse[:0]).dtype)
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


def _check_head(name: str, x: Array, weight: Array, labels: Array) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(f"{name} takes x [N, H] and weight [V, H], got {x.shape} and {weight.shape}")
    if not x.dtype.is_floating_point or weight.dtype is not x.dtype:
        raise DTypeError(f"{name} takes one float type, got {x.dtype} and {weight.dtype}")
    is_batch = labels.ndim == 2 and labels.size == x.shape[0]
    _check_labels(name, labels, labels.shape if is_batch else x.shape[:1])


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
    with_hits: bool = False,
) -> tuple[Spec, ...]:
    _check_head("linear_cross_entropy", x, weight, labels)
    if with_grads and with_hits:
        raise UsageError("linear_cross_entropy takes with_grads or with_hits, not both", next="call it for each")
    if isinstance(divisor, Array) and divisor.ndim:
        raise ShapeError(f"linear_cross_entropy: the divisor has shape {divisor.shape} but must be one number")
    grads = (Spec(x.shape, x.dtype), Spec(weight.shape, weight.dtype))
    return _sum_type(x), *([Spec((), int64)] * with_hits), *grads[: int(with_grads) * (1 + weight_grad)]


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
    with_hits: bool = False,
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
        shift: row t has the label t + `shift`, and the last `shift` rows have none; 1 predicts the next token.
        with_hits: without gradients, also count the labels that have the first largest logit, unless the loss is NaN.
    """
    results: tuple[Any, ...] = out if isinstance(out, tuple) else (out,)
    loss, dx, dw = (*results, None, None)[:3]
    hits, dx = (dx, None) if with_hits else (None, dx)
    labels = _shifted(labels, shift, ignore_index)
    count = np.count_nonzero(labels != ignore_index)
    share = np.asarray(count if divisor is None and mean else 1 if divisor is None else divisor, _wide(x))
    chunks = _head_chunks("linear_cross_entropy", x, weight, labels, ignore_index, dx, dw, share, hits=hits)
    total = sum((float(losses.sum()) for _, losses in chunks), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):  # the mean of no rows is NaN
        loss[...] = np.float64(total) / np.float64(share)


def _wide(x: np.ndarray) -> np.dtype[Any]:
    """Return the dtype of sums over x."""
    return np.dtype(np.float64) if x.dtype == np.float64 else np.dtype(np.float32)


def _head_chunks(
    name: str,
    x: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    ignore_index: int,
    dx: np.ndarray | None,
    dw: np.ndarray | None,
    divisors: np.ndarray,
    temperature: float = 1.0,
    hits: np.ndarray | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield for each chunk of the rows with a label their indices and losses, and fill dx, dw and hits where given.

    Args:
        divisors: what the gradients are divided by, `[]` or `[N]`.
    """
    vocabulary, acc = weight.shape[0], _wide(x)
    kept = np.flatnonzero(labels != ignore_index)
    _check_range(name, labels, labels != ignore_index, vocabulary)
    for result in (dx, hits, None if kept.size else dw):
        if result is not None:
            result.fill(0)
    rows = chunk_rows(vocabulary, acc.itemsize)
    w = upcast(weight)
    sum_dw = dw if dw is None or dw.dtype == acc else np.zeros(dw.shape, acc)
    more = w.shape if sum_dw is not None and kept.size > rows else (0,)
    with scratch((min(rows, kept.size), vocabulary), acc) as buffer, scratch(more, acc) as chunk_dw:
        for first in range(0, kept.size, rows):
            chosen = kept[first : first + rows]
            xc = upcast(x if chosen.size == x.shape[0] else x[chosen])
            logits = np.matmul(xc, w.T, out=buffer[: chosen.size])
            if temperature != 1:
                logits /= acc.type(temperature)
            if hits is not None:  # a row whose largest logit is not finite has a loss of NaN
                hits += np.count_nonzero((logits.argmax(1) == labels[chosen]) & np.isfinite(logits.max(1)))
            losses, sums = _loss_rows(logits, labels[chosen], dx is not None or dw is not None)
            # Scale the narrow operands by 1 / (Σ e^x · divisor) rather than the logits.
            sums *= divisors[chosen, None] if divisors.ndim else divisors
            if dx is not None:
                dx[chosen] = np.matmul(logits, w) / sums
            if sum_dw is not None and first == 0:
                np.matmul(logits.T, xc / sums, out=sum_dw)
            elif sum_dw is not None:
                sum_dw += np.matmul(logits.T, xc / sums, out=chunk_dw)
            yield chosen, losses
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


def _loss_rows(logits: np.ndarray, labels: np.ndarray, with_grads: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of some rows and sums `[rows, 1]`; `logits` becomes its gradient times `sums`."""
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
    return losses, sums


# --- Log-probabilities of labels --------------------------------------------------------------------------------------


def _log_probs_infer(
    x: Array, weight: Array, labels: Array, *, ignore_index: int, shift: int, temperature: float, with_dx: bool
) -> tuple[Spec, ...]:
    _check_head("linear_token_log_probs", x, weight, labels)
    if not temperature > 0:
        raise UsageError(f"linear_token_log_probs: the temperature is {temperature}", next="pass a positive number")
    return Spec(x.shape[:1], _sum_type(x).dtype), *([Spec(x.shape, x.dtype)] * with_dx)


def _log_probs_vjp(ctx: Context, g: Array, *_: None) -> Grads:
    """Scale the stored gradients of a frozen head; otherwise compute the logits again."""
    attrs = {name: ctx.attrs[name] for name in ("ignore_index", "shift", "temperature")}
    if ctx.attrs["with_dx"]:
        dx = ctx.outputs[1]
        assert dx is not None and not ctx.needs[1], "linear_token_log_probs was recorded for a frozen head"
        return cast(mul(dx, reshaped(g, (g.shape[0], 1))), dtype=dx.dtype), None, None
    needs = ctx.needs[:2]
    slot = ctx.gradient_slot(1) if needs[1] else None
    out = (None, slot) if all(needs) else slot
    found = linear_token_log_probs_backward(g, *ctx.inputs, **attrs, needs=needs, out=out)
    grads = iter(found if isinstance(found, tuple) else (found,))
    return *(next(grads) if each else None for each in needs), None


@op(
    "linear_token_log_probs",
    _log_probs_infer,
    vjp=_log_probs_vjp,
    saves=lambda needs: (0, 1, 2) if needs[1] else ("out1",),
    auxiliary=(1,),
    flops=lambda i, o, a: 2 * i[0].size * i[1].shape[0] * len(o) + 4 * i[0].shape[0] * i[1].shape[0],
    autocast="low_precision",
    autocast_inputs=2,
)
def linear_token_log_probs(
    out: np.ndarray | tuple[np.ndarray, ...],
    x: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    *,
    ignore_index: int,
    shift: int,
    temperature: float,
    with_dx: bool,
) -> None:
    """Log-probability of each row's label under softmax(x·weightᵀ / temperature), 0 where it is `ignore_index`.

    Args:
        x: `[N, H]` hidden states.
        weight: `[V, H]`, the head.
        labels: integers `[N]`, or `[B, T]` with N = B·T.
        shift: row t has the label t + `shift`, and the last `shift` rows have none.
        with_dx: also return the gradient of each row's log-probability with respect to x, for a frozen head.
    """
    results: tuple[Any, ...] = out if isinstance(out, tuple) else (out,)
    found, dx = (*results, None)[:2]
    found.fill(0)
    labels = _shifted(labels, shift, ignore_index)
    chunks = (x, weight, labels, ignore_index, dx, None, np.asarray(-temperature, _wide(x)), temperature)
    for chosen, losses in _head_chunks("linear_token_log_probs", *chunks):
        found[chosen] = -losses


def _log_probs_backward_infer(
    g: Array, x: Array, weight: Array, labels: Array, *, needs: tuple[bool, bool], **attrs: Any
) -> Spec | tuple[Spec, ...]:
    _check_head("linear_token_log_probs_backward", x, weight, labels)
    if g.shape != x.shape[:1]:
        raise ShapeError(f"linear_token_log_probs_backward: g has shape {g.shape}, expected {x.shape[:1]}")
    specs = [Spec(each.shape, each.dtype) for each, need in zip((x, weight), needs, strict=True) if need]
    return tuple(specs) if len(specs) > 1 else specs[0]


@op(
    "linear_token_log_probs_backward",
    _log_probs_backward_infer,
    flops=lambda i, o, a: 2 * i[1].size * i[2].shape[0] * (1 + len(o)) + 4 * i[1].shape[0] * i[2].shape[0],
)
def linear_token_log_probs_backward(
    out: np.ndarray | tuple[np.ndarray, ...],
    g: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    *,
    ignore_index: int,
    shift: int,
    temperature: float,
    needs: tuple[bool, bool],
) -> None:
    """dlogits = g·(onehot - p) / temperature, dx = dlogits·weight, dweight = dlogitsᵀ·x, as far as needed."""
    results = iter(out if isinstance(out, tuple) else (out,))
    dx, dw = (next(results) if each else None for each in needs)
    labels = _shifted(labels, shift, ignore_index)
    with np.errstate(divide="ignore"):  # a gradient of 0
        divisors = -_wide(x).type(temperature) / g.astype(_wide(x))
    for _ in _head_chunks(
        "linear_token_log_probs_backward", x, weight, labels, ignore_index, dx, dw, divisors, temperature
    ):
        pass


# --- Squared difference -----------------------------------------------------------------------------------------------


def _squared_difference(x: Any, y: Any, out: np.ndarray | None = None) -> Any:
    d = x - y
    return np.multiply(d, d, out=out)


def _squared_difference_gradient(g: Any, x: Any, y: Any, out: np.ndarray | None = None) -> Any:
    return np.multiply(g, (x - y) * 2, out=out)


def _squared_difference_vjp(ctx: Context, g: Array) -> Grads:
    dx = squared_difference_backward(g, *ctx.inputs)
    return dx if ctx.needs[0] else None, neg(dx) if ctx.needs[1] else None


@op(
    "squared_difference", numeric("squared_difference"), vjp=_squared_difference_vjp, saves=(0, 1), elementwise=True,
    formula=_squared_difference,
)  # fmt: skip
def squared_difference(out: np.ndarray, x: Any, y: Any) -> None:
    """(x - y)², in one pass. dx = g·2·(x - y), dy = -dx."""
    sweep(_squared_difference, out, x, y)


@op(
    "squared_difference_backward", numeric("squared_difference_backward"), elementwise=True,
    plain=by_ops(_squared_difference_gradient), formula=_squared_difference_gradient,
)  # fmt: skip
def squared_difference_backward(out: np.ndarray, g: np.ndarray, x: Any, y: Any) -> None:
    """g·2·(x - y)."""
    sweep(_squared_difference_gradient, out, g, x, y)
