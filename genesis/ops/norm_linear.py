"""RMSNorm with the linear layers that read its result, which is not kept: backward makes it again from x and 1/rms."""

from __future__ import annotations

import numpy as np

from genesis.array import Array
from genesis.backend.cpu import scratch
from genesis.errors import ShapeError
from genesis.op import Context, Spec, op
from genesis.ops.linalg import matmul_flops
from genesis.ops.linear import (
    check_linear,
    input_gradient,
    join_parameters,
    packed_gradients,
    packed_linear,
    split_parameters,
)
from genesis.ops.norm import check_norm, norm_gradients, rms_norm, rms_norm_backward, rms_norm_scale, statistics_type
from genesis.ops.sweep import is_narrow

__all__ = ["norm_linear"]

Grads = tuple[Array | None, ...]


def _infer(x: Array, scale: Array, *parameters: Array, eps: float, fp8: int = 0) -> tuple[Spec, Spec]:
    weights, biases = split_parameters(parameters)
    if not weights:
        raise ShapeError("norm_linear takes one weight [out, in] or more")
    check_norm("norm_linear", x, scale)
    statistics = Spec(x.shape[:-1], statistics_type(x.dtype))
    return check_linear("norm_linear", x, weights, biases, fp8=fp8), statistics


def _vjp(ctx: Context, g: Array, _: None) -> Grads:
    """With n = rms_norm(x): the gradients of `packed_linear` at n, then those of the norm at x for dn = g·W."""
    x, scale, *parameters = ctx.inputs
    rstd = ctx.outputs[1]
    assert rstd is not None
    weights = [w for w in parameters if w.ndim == 2]
    learns = any(ctx.needs[2 : 2 + len(weights)])
    if not (ctx.needs[0] or ctx.needs[1]):
        normed = rms_norm_scale(x, scale, rstd) if learns else None
        return None, None, *packed_gradients(ctx, g, 2, normed)
    dn = input_gradient(None, 0, g, weights, ctx.attrs.get("fp8", 0))
    dx, dscale, *result = norm_gradients(ctx, rms_norm_backward, dn, x, scale, rstd, count=2, with_result=learns)
    del dn
    return dx, dscale, *packed_gradients(ctx, g, 2, *(result or [None]))


def _saves(needs: tuple[bool, ...]) -> tuple[int | str, ...]:
    return (*range(len(needs)), "out1")


@op(
    "norm_linear",
    _infer,
    vjp=_vjp,
    saves=_saves,
    auxiliary=(1,),
    flops=lambda i, o, a: matmul_flops(i, o, a) + 4 * i[0].size,
    join=join_parameters(2),
    autocast="low_precision",
)
def norm_linear(
    out: tuple[np.ndarray, np.ndarray], x: np.ndarray, scale: np.ndarray, *parameters: np.ndarray, eps: float,
    fp8: int = 0,
) -> None:  # fmt: skip
    """`packed_linear(rms_norm(x), …)`; also gives r = 1 / sqrt(mean(x²) + eps), without gradient.

    Args:
        x: `[..., in]`.
        scale: the norm's weight `[in]`.
        parameters: weights `[out_i, in]`, then for each its bias `[out_i]`, or none.
        fp8: as for `packed_linear`.
    """
    with scratch(x.shape, np.float32 if is_narrow(x.dtype) else x.dtype) as normed:
        rms_norm.reference((normed, out[1]), x, scale, eps)
        packed_linear.reference(out[0], normed, *parameters, fp8=fp8)
