"""A transformer's gated MLP with the norm before it and the residual connection around it: x + down(silu(gate)·up).

What backward reads again is kept as asked: all of it, or gate and up alone, from which the rest is recomputed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.array import Array
from genesis.backend.cpu import scratch
from genesis.errors import ShapeError
from genesis.op import Context, Spec, op
from genesis.ops.linear import (
    bias_gradients,
    check_linear,
    input_gradient,
    join_parameters,
    linear,
    packed_gradients,
    packed_linear,
    split_parameters,
    weight_gradients,
)
from genesis.ops.norm import check_norm, norm_gradients, rms_norm, rms_norm_backward, rms_norm_scale, statistics_type
from genesis.ops.shape import reshaped
from genesis.ops.sweep import as_type, is_narrow
from genesis.ops.swiglu import swiglu_linear_backward, swiglu_packed
from genesis.shapes import numel

__all__ = ["norm_mlp"]

Grads = tuple[Array | None, ...]
FIRST = 4  # the first input of the weights and biases of gate and up


def _infer(
    x: Array, scale: Array, down: Array, down_bias: Array | None, *parameters: Array, eps: float, keep: bool = False,
    fp8: int = 0,
) -> tuple[Spec, ...]:  # fmt: skip
    weights, biases = split_parameters(parameters)
    sizes = [w.shape[0] for w in weights]
    if len(weights) not in (1, 2) or sizes[0] != sizes[-1] or sum(sizes) % 2:
        raise ShapeError(
            "norm_mlp takes the weights of gate and up, both [F, in], or one [2F, in];"
            f" got {' and '.join(str(w.shape) for w in weights) or 'none'}"
        )
    check_norm("norm_mlp", x, scale)
    gate_up = check_linear("norm_mlp", x, weights, biases, fp8=fp8)
    h = Spec((*x.shape[:-1], gate_up.shape[-1] // 2), x.dtype)
    like = Array(x.storage, h.shape, h.shape, h.dtype, x.device)  # only its shape and dtype are read
    y = check_linear("norm_mlp", like, (down,), () if down_bias is None else (down_bias,), x, fp8)
    kept = (x.spec, h) if keep else ()
    return y, Spec(x.shape[:-1], statistics_type(x.dtype)), gate_up, *kept


def _at_down(ctx: Context, g: Array, h: Array | None) -> tuple[Array | None, list[Array | None]]:
    """The gradient of gate and up, where it is needed, and those of down's weight and bias; h where it was kept."""
    down, gate_up = ctx.inputs[2], ctx.outputs[2]
    assert gate_up is not None
    d, needs_d, fp8 = None, any((*ctx.needs[:2], *ctx.needs[FIRST:])), ctx.attrs.get("fp8", 0)
    if needs_d and ctx.needs[2] and h is None:
        d, h = swiglu_linear_backward(g, down, gate_up, with_result=True, fp8=fp8)
    found: list[Array | None] = [None, None]
    rows = numel(g.shape[:-1])
    flat, size = reshaped(g, (rows, g.shape[-1])), g.shape[-1:]
    if ctx.needs[2]:
        h = swiglu_packed(gate_up) if h is None else h
        (found[0],) = weight_gradients(ctx, (2,), flat, reshaped(h, (rows, h.shape[-1])), size)
    if ctx.needs[3]:
        (found[1],) = bias_gradients(ctx, (3,), flat, size)
    if needs_d and d is None:
        d = swiglu_linear_backward(g, down, gate_up, fp8=fp8)
    return d, found


def _vjp(ctx: Context, g: Array, *_: None) -> Grads:
    """Those of `linear` at h = silu(gate)·up, of SwiGLU, of `packed_linear` at n = rms_norm(x) and of the norm; the
    residual's, which is g, is added to the norm's.
    """
    x, scale, _, _, *parameters = ctx.inputs
    rstd = ctx.outputs[1]
    assert rstd is not None
    normed, h = ctx.outputs[3:] or (None, None)
    d, found = _at_down(ctx, g, h)
    if d is None:
        return None, None, *found, *[None] * len(parameters)
    weights = [w for w in parameters if w.ndim == 2]
    learns = any(ctx.needs[FIRST : FIRST + len(weights)])
    if normed is None and learns and not (ctx.needs[0] or ctx.needs[1]):
        normed = rms_norm_scale(x, scale, rstd)
    if normed is not None or not learns:
        found += packed_gradients(ctx, d, FIRST, normed)
    if not (ctx.needs[0] or ctx.needs[1]):
        return None, None, *found
    makes = normed is None and learns
    dn = input_gradient(None, 0, d, weights, ctx.attrs.get("fp8", 0))
    dx, dscale, *result = norm_gradients(ctx, rms_norm_backward, dn, x, scale, rstd, count=2, plus=g, with_result=makes)
    if makes:
        found += packed_gradients(ctx, d, FIRST, *result)
    return dx, dscale, *found


def _saves(needs: tuple[bool, ...]) -> tuple[int | str, ...]:
    """x, the weights (which lie in memory anyway), 1/rms, gate and up; n and h where a weight behind them learns."""
    kept = [name for name, need in (("out3", any(needs[FIRST:])), ("out4", needs[2])) if need]
    return (*range(len(needs)), "out1", "out2", *kept)


def _flops(inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any]) -> int:
    x, gate_up = inputs[0], outputs[2]
    return int(4 * x.size + gate_up.size * (6 * x.shape[-1] + 7) // 2)


@op(
    "norm_mlp",
    _infer,
    vjp=_vjp,
    saves=_saves,
    auxiliary=(1, 2, 3, 4),
    flops=_flops,
    join=join_parameters(FIRST),
    autocast="low_precision",
)
def norm_mlp(
    out: tuple[np.ndarray, ...], x: np.ndarray, scale: np.ndarray, down: np.ndarray, down_bias: np.ndarray | None,
    *parameters: np.ndarray, eps: float, keep: bool = False, fp8: int = 0,
) -> None:  # fmt: skip
    """x + h·Wdᵀ + bd with h = silu(gate)·up, [gate | up] = n·[Wg | Wu]ᵀ + [bg | bu], n = rms_norm(x).

    Also gives, without gradient, r = 1 / sqrt(mean(x²) + eps) and [gate | up] `[..., 2F]`; with `keep` n and h, too,
    which backward then need not recompute.

    Args:
        x: `[..., in]`.
        scale: the norm's weight `[in]`.
        down: `[in, F]`.
        down_bias: `[in]`.
        parameters: weights of gate and up `[F, in]`, or one `[2F, in]`; then for each its bias, or none.
        fp8: as for `packed_linear` and `linear`, of each product by itself.
    """
    y, rstd, gate_up, *kept = out
    shapes = x.shape, gate_up.shape, (*x.shape[:-1], gate_up.shape[-1] // 2)
    if is_narrow(x.dtype):
        with (
            scratch(shapes[0], np.float32) as n,
            scratch(shapes[1], np.float32) as wide,
            scratch(shapes[2], np.float32) as h,
        ):
            parameters = tuple(as_type(p, n.dtype) for p in parameters)
            _through((y, rstd, wide, n, h), x, scale, down, down_bias, *parameters, eps=eps, fp8=fp8)
            for stored, values in zip((gate_up, *kept), (wide, n, h), strict=False):
                np.copyto(stored, values, casting="unsafe")
    elif kept:
        _through(out, x, scale, down, down_bias, *parameters, eps=eps, fp8=fp8)
    else:
        with scratch(shapes[0], x.dtype) as n, scratch(shapes[2], x.dtype) as h:
            _through((*out, n, h), x, scale, down, down_bias, *parameters, eps=eps, fp8=fp8)


def _through(
    out: tuple[np.ndarray, ...], x: np.ndarray, scale: np.ndarray, down: np.ndarray, down_bias: np.ndarray | None,
    *parameters: np.ndarray, eps: float, fp8: int,
) -> None:  # fmt: skip
    """The steps one after the other; all but y and the statistics in a type of 4 bytes or more."""
    y, rstd, gate_up, n, h = out
    rms_norm.reference((n, rstd), x, scale, eps)
    packed_linear.reference(gate_up, n, *parameters, fp8=fp8)
    swiglu_packed.reference(h, gate_up)
    linear.reference(y, h, down, down_bias, x, fp8=fp8)
