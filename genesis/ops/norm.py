"""RMSNorm and LayerNorm over the last dimension, and their gradients. Statistics are float32 or wider."""

from __future__ import annotations

import numpy as np

from genesis.array import Array
from genesis.dtypes import DType, float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.op import Context, Spec, op
from genesis.ops.blocks import each_block, rows_of, store, sum_blocks, wide, working
from genesis.ops.checks import gradient_like

__all__ = ["layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"]

Grads = tuple[Array | None, ...]


def _statistics_type(dtype: DType) -> DType:
    return float64 if dtype is float64 else float32


def _check(name: str, x: Array, *parameters: Array) -> None:
    if not x.dtype.is_floating_point:
        raise DTypeError(f"{name} takes float tensors, got {x.dtype}")
    if x.ndim == 0:
        raise ShapeError(f"{name} needs at least one dimension")
    for p in parameters:
        if p.shape != x.shape[-1:]:
            raise ShapeError(f"{name}: weight has shape {p.shape}, the input's last dimension is {x.shape[-1]}")


def _rms_norm_infer(x: Array, weight: Array, *, eps: float) -> tuple[Spec, Spec]:
    _check("rms_norm", x, weight)
    return Spec(x.shape, x.dtype), Spec(x.shape[:-1], _statistics_type(x.dtype))


def _rms_norm_vjp(ctx: Context, g: Array, _: None) -> Grads:
    x, weight = ctx.inputs
    dx, dw = rms_norm_backward(g, x, weight, ctx.outputs[1])
    return dx, dw


@op(
    "rms_norm",
    _rms_norm_infer,
    vjp=_rms_norm_vjp,
    saves=(0, 1, "out"),
    auxiliary=(1,),
    flops=lambda i, o, a: 4 * o[0].size,
)
def rms_norm(out: tuple[np.ndarray, np.ndarray], x: np.ndarray, weight: np.ndarray, eps: float) -> None:
    """y = x·r·weight with r = 1 / sqrt(mean(x²) + eps); also gives r, without gradient (Zhang & Sennrich, 2019)."""
    y, rstd = rows_of(out[0]), out[1].reshape(-1)
    rows = rows_of(x)
    w = wide(weight)

    def block(start: int, stop: int) -> None:
        xb = wide(rows[start:stop])
        mean = np.vecdot(xb, xb) / xb.shape[1]
        r = 1 / np.sqrt(mean + eps, dtype=xb.dtype)
        rstd[start:stop] = r
        yb = np.multiply(xb, r[:, None], out=working(y[start:stop]))
        yb *= w
        store(yb, y[start:stop])

    each_block(block, rows.shape[0], max(rows.shape[1], 1))


@op(
    "rms_norm_backward",
    lambda g, x, weight, rstd: gradient_like("rms_norm_backward", g, x, weight),
    flops=lambda i, o, a: 8 * o[0].size,
)
def rms_norm_backward(
    out: tuple[np.ndarray, np.ndarray], g: np.ndarray, x: np.ndarray, weight: np.ndarray, rstd: np.ndarray
) -> None:
    """With n = x·r: dx = r·(g·w - n·mean(g·w·n)), dw = Σ rows g·n. The sums are taken from g·x."""
    dx, rows, grads, r = rows_of(out[0]), rows_of(x), rows_of(g), rstd.reshape(-1)
    w = wide(weight)

    def block(start: int, stop: int) -> np.ndarray:
        gb, xb, rb = wide(grads[start:stop]), wide(rows[start:stop]), r[start:stop]
        product = gb * xb
        dw: np.ndarray = np.einsum("n,nh->h", rb, product)
        factor = np.vecdot(product, w) * rb * rb / xb.shape[1]
        gw = np.multiply(gb, w, out=working(dx[start:stop]))
        gw -= np.multiply(xb, factor[:, None], out=product)
        gw *= rb[:, None]
        store(gw, dx[start:stop])
        return dw

    sum_blocks(block, rows.shape[0], max(rows.shape[1], 1), out[1])


def _layer_norm_infer(x: Array, weight: Array, bias: Array, *, eps: float) -> tuple[Spec, Spec, Spec]:
    _check("layer_norm", x, weight, bias)
    statistics = Spec(x.shape[:-1], _statistics_type(x.dtype))
    return Spec(x.shape, x.dtype), statistics, statistics


def _layer_norm_vjp(ctx: Context, g: Array, _m: None, _r: None) -> Grads:
    x, weight, _ = ctx.inputs
    dx, dw, db = layer_norm_backward(g, x, weight, ctx.outputs[1], ctx.outputs[2])
    return dx, dw, db


@op(
    "layer_norm",
    _layer_norm_infer,
    vjp=_layer_norm_vjp,
    saves=(0, 1, "out"),
    auxiliary=(1, 2),
    flops=lambda i, o, a: 7 * o[0].size,
)
def layer_norm(
    out: tuple[np.ndarray, np.ndarray, np.ndarray], x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float
) -> None:
    """y = (x - m)·r·weight + bias with m = mean(x), r = 1 / sqrt(var(x) + eps); also gives m and r (no gradient)."""
    y, mean, rstd, rows = rows_of(out[0]), out[1].reshape(-1), out[2].reshape(-1), rows_of(x)
    w, b = wide(weight), wide(bias)

    def block(start: int, stop: int) -> None:
        xb = wide(rows[start:stop])
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
    lambda g, x, weight, mean, rstd: gradient_like("layer_norm_backward", g, x, weight, weight),
    flops=lambda i, o, a: 11 * o[0].size,
)
def layer_norm_backward(
    out: tuple[np.ndarray, np.ndarray, np.ndarray],
    g: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
) -> None:
    """With n = (x - m)·r: dx = r·(g·w - mean(g·w) - n·mean(g·w·n)), dw = Σ rows g·n, db = Σ rows g."""
    dx, rows, grads = rows_of(out[0]), rows_of(x), rows_of(g)
    m, r, w = mean.reshape(-1), rstd.reshape(-1), wide(weight)

    def block(start: int, stop: int) -> np.ndarray:
        gb, rb = wide(grads[start:stop]), r[start:stop, None]
        n = (wide(rows[start:stop]) - m[start:stop, None]) * rb
        parameters = np.stack([np.einsum("nh,nh->h", gb, n), gb.sum(axis=0)])
        gw = gb * w
        n *= (np.einsum("nh,nh->n", gw, n) / n.shape[1])[:, None]
        gw -= gw.mean(axis=1, keepdims=True)
        gw -= n
        np.multiply(gw, rb, out=dx[start:stop], casting="unsafe")
        return parameters

    both = np.empty((2, weight.shape[0]), w.dtype)
    sum_blocks(block, rows.shape[0], max(rows.shape[1], 1), both)
    out[1][...], out[2][...] = both
