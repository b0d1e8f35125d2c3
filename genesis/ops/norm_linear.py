"""RMSNorm with the linear layers that read its result, which is not kept: backward makes it again from x and 1/rms."""

from __future__ import annotations

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import scratch
from genesis.op import Context, op
from genesis.ops.blocks import is_narrow
from genesis.ops.linear import (
    check_packed,
    input_gradient,
    join_parameters,
    low_rank_flops,
    own_parameters,
    packed_gradients,
    packed_linear,
    pairs_backward,
    split_parameters,
)
from genesis.ops.low_rank import LowRank
from genesis.ops.norm import check_norm, norm_gradients, rms_norm, rms_norm_backward, rms_norm_scale, statistics_type

Grads = tuple[Array | None, ...]


def _infer(
    x: Array, scale: Array, *parameters: Array, eps: float, fp8: int = 0, low_rank: LowRank | None = None
) -> tuple[Spec, ...]:
    found = check_packed("norm_linear", x, parameters, fp8, low_rank)
    check_norm("norm_linear", x, scale)
    y, *more = (found,) if isinstance(found, Spec) else found
    return y, Spec(x.shape[:-1], statistics_type(x.dtype)), *more


def _vjp(ctx: Context, g: Array, *_: None) -> Grads:
    """With n = rms_norm(x): the gradients of `packed_linear` at n, then those of the norm at x for dn = g·W."""
    x, scale, *parameters = ctx.inputs
    rstd, *kept = ctx.outputs[1:]
    assert rstd is not None
    low_rank, needs_norm = ctx.attrs.get("low_rank"), ctx.needs[0] or ctx.needs[1]
    weights, _biases = split_parameters(own_parameters(parameters, low_rank))
    pairs = pairs_backward(ctx, g, low_rank, kept)
    learns = any(ctx.needs[2 : 2 + len(weights)]) or pairs.reads_input(ctx)
    if not needs_norm:
        normed = rms_norm_scale(x, scale, rstd) if learns else None
        return None, None, *packed_gradients(ctx, g, 2, normed, pairs)
    dn = input_gradient(None, 0, g, pairs.scaled(weights), ctx.attrs.get("fp8", 0), pairs.term)
    dx, dscale, *result = norm_gradients(ctx, rms_norm_backward, dn, x, scale, rstd, count=2, with_result=learns)
    del dn
    return dx, dscale, *packed_gradients(ctx, g, 2, result[0] if result else None, pairs)


def _saves(needs: tuple[bool, ...]) -> tuple[int | str, ...]:
    return (*range(len(needs)), "out1", "out2", "out3")


@op(
    "norm_linear",
    _infer,
    vjp=_vjp,
    saves=_saves,
    auxiliary=(1, 2, 3),
    flops=lambda i, o, a: low_rank_flops(i, o, a) + 4 * i[0].size,
    join=join_parameters(2),
    autocast="low_precision",
)
def norm_linear(
    out: tuple[np.ndarray, ...], x: np.ndarray, scale: np.ndarray, *parameters: np.ndarray, eps: float, fp8: int = 0,
    low_rank: LowRank | None = None,
) -> None:  # fmt: skip
    """`packed_linear(rms_norm(x), …)`; also gives r = 1 / sqrt(mean(x²) + eps), without gradient.

    Args:
        x: `[..., in]`.
        scale: the norm's weight `[in]`.
        parameters, fp8, low_rank: as for `packed_linear`, whose further outputs for low-rank pairs are the last ones.
    """
    y, rstd, *more = out
    with scratch(x.shape, np.float32 if is_narrow(x.dtype) else x.dtype) as normed:
        rms_norm.reference((normed, rstd), x, scale, eps)
        packed_linear.reference((y, *more) if more else y, normed, *parameters, fp8=fp8, low_rank=low_rank)
