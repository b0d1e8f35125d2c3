"""RMSNorm and LayerNorm over the last dimension, and their gradients. Statistics are float32 or wider.

Backward adds the input's accumulated gradient, such as a transformer's residual gradient, in the same pass.
"""

from __future__ import annotations

import numpy as np

from genesis.array import Array, Spec, constant
from genesis.dtypes import DType, float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.op import Context, Grads, Op, gradient_like, op, registry
from genesis.ops.blocks import each_block, rows_of, store, sum_blocks, upcast, working
from genesis.ops.elementwise import add, div, mul, rsqrt, sub
from genesis.ops.shape import reshaped


def statistics_type(dtype: DType) -> DType:
    """Return the dtype of means and inverse roots: float32 or wider."""
    return float64 if dtype is float64 else float32


def check_norm(name: str, x: Array, *parameters: Array) -> None:
    """Raise ShapeError or DTypeError unless x is a float array with parameters for its last dimension."""
    if not x.dtype.is_floating_point:
        raise DTypeError(f"{name} takes float tensors, got {x.dtype}")
    if x.ndim == 0:
        raise ShapeError(f"{name} needs at least one dimension")
    for p in parameters:
        if p.shape != x.shape[-1:]:
            raise ShapeError(f"{name}: weight has shape {p.shape}, the input's last dimension is {x.shape[-1]}")


# Gradients by ops on arrays, for second derivatives. Forward's statistics enter as constants: 1/r² = m + eps gives the
# eps that backward does not know, and r is computed again from x.


def _mean(x: Array) -> Array:
    return registry["mean"](x, axes=-1, keepdim=True)


def _rows_sum(x: Array) -> Array:
    return registry["sum_to_shape"](x, shape=x.shape[-1:])


def _inverse_root(centred: Array, rstd: Array) -> Array:
    """r = 1 / √(mean(centred²) + eps), as a function of x."""
    square, r = _mean(mul(centred, centred)), constant(rstd)
    eps = sub(div(1.0, mul(r, r)), reshaped(constant(square), r.shape))
    return rsqrt(add(square, reshaped(eps, square.shape)))


def _rms_norm_plain(
    g: Array, x: Array, weight: Array, rstd: Array, plus: Array | None = None, *, with_result: bool = False,
    learns: bool = True,
) -> tuple[Array, ...]:  # fmt: skip
    r = _inverse_root(x, rstd)
    n, gw = mul(x, r), mul(g, weight)
    dx = mul(r, sub(gw, mul(n, _mean(mul(gw, n)))))
    grads = (dx if plus is None else add(dx, plus), *((_rows_sum(mul(g, n)),) if learns else ()))
    return (*grads, mul(n, weight)) if with_result else grads


def _layer_norm_plain(
    g: Array, x: Array, weight: Array, mean: Array, rstd: Array, plus: Array | None = None
) -> tuple[Array, ...]:
    centred = sub(x, _mean(x))
    r = _inverse_root(centred, rstd)
    n, gw = mul(centred, r), mul(g, weight)
    dx = mul(r, sub(sub(gw, _mean(gw)), mul(n, _mean(mul(gw, n)))))
    return dx if plus is None else add(dx, plus), _rows_sum(mul(g, n)), _rows_sum(g)


def _rms_norm_infer(x: Array, weight: Array, *, eps: float) -> tuple[Spec, Spec]:
    check_norm("rms_norm", x, weight)
    return Spec(x.shape, x.dtype), Spec(x.shape[:-1], statistics_type(x.dtype))


def norm_gradients(
    ctx: Context,
    backward: Op,
    g: Array,
    *operands: Array | None,
    count: int,
    plus: Array | None = None,
    with_result: bool = False,
) -> list[Array | None]:
    """Run `backward(g, *operands)`: adds accumulated gradients to dx, and writes parameters' gradients into slots.

    Args:
        count: number of inputs with gradients: x and the parameters that follow it.
        plus: another gradient of x to add.
        with_result: also return forward's result, as the last entry.
    """
    accumulated = ctx.take_accumulated(0) if ctx.needs[0] else None
    if accumulated is not None:
        own = accumulated.array if accumulated.is_own else None
        plus = accumulated.array if plus is None else add(accumulated.array, plus, out=own)
    if backward is rms_norm_backward and not ctx.needs[1]:  # as with adapters, whose norms are frozen
        dx = backward(g, *operands, *(() if plus is None else (plus,)), learns=False, with_result=with_result)
        return [dx[0], None, dx[1]] if with_result else [dx, None]
    sums = [ctx.take_accumulated(i) if ctx.needs[i] else None for i in range(1, count)]
    slots = [ctx.gradient_slot(i) if t is None and ctx.needs[i] else None for i, t in enumerate(sums, 1)]
    given = operands if plus is None else (*operands, plus)
    out = None if slots.count(None) == len(slots) else (None, *slots, *[None] * with_result)
    grads = list(backward(g, *given, out=out, **({"with_result": True} if with_result else {})))
    for i, before in enumerate(sums, 1):
        if before is not None:
            grads[i] = add(before.array, grads[i], out=before.array if before.is_own else None)
    return grads


def _rms_norm_vjp(ctx: Context, g: Array, _: None) -> Grads:
    return tuple(norm_gradients(ctx, rms_norm_backward, g, *ctx.inputs, ctx.outputs[1], count=2))


@op(
    "rms_norm",
    _rms_norm_infer,
    vjp=_rms_norm_vjp,
    saves=(0, 1, "out1"),
    auxiliary=(1,),
    flops=lambda i, o, a: 4 * o[0].size,
    autocast="fp32",
)
def rms_norm(out: tuple[np.ndarray, np.ndarray], x: np.ndarray, weight: np.ndarray, eps: float) -> None:
    """y = x·r·weight with r = 1 / sqrt(mean(x²) + eps), an output without gradient (Zhang & Sennrich, 2019)."""
    y, rstd = rows_of(out[0]), out[1].reshape(-1)
    rows = rows_of(x)
    w = upcast(weight)

    def block(start: int, stop: int) -> None:
        xb = upcast(rows[start:stop])
        mean = np.vecdot(xb, xb) / xb.shape[1]
        r = 1 / np.sqrt(mean + eps, dtype=xb.dtype)
        rstd[start:stop] = r
        yb = np.multiply(xb, r[:, None], out=working(y[start:stop]))
        yb *= w
        store(yb, y[start:stop])

    each_block(block, rows.shape[0], max(rows.shape[1], 1))


def _backward_infer(
    name: str, g: Array, x: Array, parameters: tuple[Array, ...], plus: Array | None
) -> tuple[Spec, ...]:
    if plus is not None and plus.shape != x.shape:
        raise ShapeError(f"{name}: an accumulated gradient {plus.shape} does not match an input of shape {x.shape}")
    return gradient_like(name, g, x, *parameters)


def _rms_norm_backward_infer(
    g: Array, x: Array, weight: Array, rstd: Array, plus: Array | None = None, *, with_result: bool = False,
    learns: bool = True,
) -> tuple[Spec, ...]:  # fmt: skip
    specs = _backward_infer("rms_norm_backward", g, x, (weight,), plus)[: 1 + learns]
    return (*specs, Spec(x.shape, x.dtype)) if with_result else specs


@op("rms_norm_backward", _rms_norm_backward_infer, plain=_rms_norm_plain, flops=lambda i, o, a: 8 * o[0].size)
def rms_norm_backward(
    out: np.ndarray | tuple[np.ndarray, ...],
    g: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    rstd: np.ndarray,
    plus: np.ndarray | None = None,
    with_result: bool = False,
    learns: bool = True,
) -> None:
    """dx = r·(g·w - n·mean(g·w·n)) + plus and dw = Σ rows g·n with n = x·r. The sums are computed from g·x.

    `with_result` also returns n·w, bit-identical to forward's result, which then need not be saved. With `learns`
    False, for a frozen weight, dw is not computed.
    """
    outs = out if isinstance(out, tuple) else (out,)
    if with_result:
        rms_norm_scale.reference(outs[-1], x, weight, rstd)
    dx, rows, grads, r = rows_of(outs[0]), rows_of(x), rows_of(g), rstd.reshape(-1)
    more = None if plus is None else rows_of(plus)
    w = upcast(weight)

    def block(start: int, stop: int) -> np.ndarray:
        gb, xb, rb = upcast(grads[start:stop]), upcast(rows[start:stop]), r[start:stop]
        product = gb * xb
        dw: np.ndarray = np.einsum("n,nh->h", rb, product)
        factor = np.vecdot(product, w) * rb * rb / xb.shape[1]
        gw = np.multiply(gb, w, out=working(dx[start:stop]))
        gw -= np.multiply(xb, factor[:, None], out=product)
        gw *= rb[:, None]
        if more is not None:
            gw += upcast(more[start:stop])
        store(gw, dx[start:stop])
        return dw

    sum_blocks(block, rows.shape[0], max(rows.shape[1], 1), outs[1] if learns else np.empty_like(w))


def _scale_infer(x: Array, weight: Array, rstd: Array) -> Spec:
    check_norm("rms_norm_scale", x, weight)
    return Spec(x.shape, x.dtype)


@op(
    "rms_norm_scale",
    _scale_infer,
    flops=lambda i, o, a: 2 * o[0].size,
)
def rms_norm_scale(out: np.ndarray, x: np.ndarray, weight: np.ndarray, rstd: np.ndarray) -> None:
    """y = x·r·weight with r from `rms_norm`: recomputes the same bits when they were not saved."""
    y, rows, r, w = rows_of(out), rows_of(x), rstd.reshape(-1), upcast(weight)

    def block(start: int, stop: int) -> None:
        yb = np.multiply(upcast(rows[start:stop]), r[start:stop, None], out=working(y[start:stop]))
        yb *= w
        store(yb, y[start:stop])

    each_block(block, rows.shape[0], max(rows.shape[1], 1))


def _layer_norm_infer(x: Array, weight: Array, bias: Array, *, eps: float) -> tuple[Spec, Spec, Spec]:
    check_norm("layer_norm", x, weight, bias)
    statistics = Spec(x.shape[:-1], statistics_type(x.dtype))
    return Spec(x.shape, x.dtype), statistics, statistics


def _layer_norm_vjp(ctx: Context, g: Array, _m: None, _r: None) -> Grads:
    return tuple(norm_gradients(ctx, layer_norm_backward, g, *ctx.inputs[:2], *ctx.outputs[1:], count=3))


@op(
    "layer_norm",
    _layer_norm_infer,
    vjp=_layer_norm_vjp,
    saves=(0, 1, "out1", "out2"),
    auxiliary=(1, 2),
    flops=lambda i, o, a: 7 * o[0].size,
    autocast="fp32",
)
def layer_norm(
    out: tuple[np.ndarray, np.ndarray, np.ndarray], x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float
) -> None:
    """y = (x - m)·r·weight + bias, m = mean(x), r = 1 / sqrt(var(x) + eps); m and r are outputs without gradient."""
    y, mean, rstd, rows = rows_of(out[0]), out[1].reshape(-1), out[2].reshape(-1), rows_of(x)
    w, b = upcast(weight), upcast(bias)

    def block(start: int, stop: int) -> None:
        xb = upcast(rows[start:stop])
        m = xb.mean(axis=1)
        centred = xb - m[:, None]
        r = 1 / np.sqrt(np.einsum("nh,nh->n", centred, centred) / xb.shape[1] + eps, dtype=xb.dtype)
        mean[start:stop], rstd[start:stop] = m, r
        centred *= r[:, None]
        centred *= w
        np.add(centred, b, out=y[start:stop], casting="unsafe")

    each_block(block, rows.shape[0], max(rows.shape[1], 1))


@op(
    "layer_norm_backward",
    lambda g, x, weight, mean, rstd, plus=None: _backward_infer("layer_norm_backward", g, x, (weight, weight), plus),
    flops=lambda i, o, a: 11 * o[0].size,
    plain=_layer_norm_plain,
)
def layer_norm_backward(
    out: tuple[np.ndarray, np.ndarray, np.ndarray],
    g: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    plus: np.ndarray | None = None,
) -> None:
    """dx = r·(g·w - mean(g·w) - n·mean(g·w·n)) + plus, dw = Σ rows g·n, db = Σ rows g with n = (x - m)·r."""
    dx, rows, grads = rows_of(out[0]), rows_of(x), rows_of(g)
    more = None if plus is None else rows_of(plus)
    m, r, w = mean.reshape(-1), rstd.reshape(-1), upcast(weight)

    def block(start: int, stop: int) -> np.ndarray:
        gb, rb = upcast(grads[start:stop]), r[start:stop, None]
        n = (upcast(rows[start:stop]) - m[start:stop, None]) * rb
        parameters = np.stack([np.einsum("nh,nh->h", gb, n), gb.sum(axis=0)])
        gw = gb * w
        n *= (np.einsum("nh,nh->n", gw, n) / n.shape[1])[:, None]
        gw -= gw.mean(axis=1, keepdims=True)
        gw -= n
        gw *= rb
        if more is not None:
            gw += upcast(more[start:stop])
        dx[start:stop] = gw
        return parameters

    both = np.empty((2, weight.shape[0]), w.dtype)
    sum_blocks(block, rows.shape[0], max(rows.shape[1], 1), both)
    out[1][...], out[2][...] = both
