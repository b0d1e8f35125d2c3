"""Rotary position embedding (Su et al., 2021) in the half-split layout that Llama and Qwen checkpoints use."""

from __future__ import annotations

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import parallel
from genesis.errors import ShapeError
from genesis.op import Context, op
from genesis.ops.blocks import store, upcast, working


def _infer(x: Array, cos: Array, sin: Array, *, inverse: bool = False, heads: int | None = None) -> Spec:
    if x.ndim != 4 or x.shape[-1] % 2:
        raise ShapeError(f"rope takes [B, T, heads, even head size], got {x.shape}")
    if heads is not None and not 0 <= heads <= x.shape[2]:
        raise ShapeError(f"rope: {heads} heads to turn, x has {x.shape[2]}")
    half = x.shape[-1] // 2
    allowed = {(x.shape[1], half), (1, x.shape[1], half), (x.shape[0], x.shape[1], half)}
    if cos.shape != sin.shape or cos.shape not in allowed:
        raise ShapeError(
            f"rope: cos {cos.shape} and sin {sin.shape} must be [T, {half}] or [B, T, {half}] for x {x.shape}"
        )
    return Spec(x.shape, x.dtype)


def _vjp(ctx: Context, g: Array) -> tuple[Array | None, ...]:
    """A rotation's transpose is the rotation back."""
    _, cos, sin = ctx.inputs
    attrs = {**ctx.attrs, "inverse": not ctx.attrs.get("inverse", False)}
    return rope(g, cos, sin, **attrs), None, None


@op("rope", _infer, vjp=_vjp, saves=(1, 2), flops=lambda i, o, a: 3 * o[0].size)
def rope(
    out: np.ndarray, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, inverse: bool = False, heads: int | None = None
) -> None:
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle; `inverse` rotates back.

    Args:
        x: `[B, T, heads, D]`.
        cos, sin: of the angles, `[T, D/2]` or `[B, T, D/2]`, without gradient.
        heads: how many are rotated; those after them (values behind queries and keys) are copied. None means all.
    """
    if heads is not None:
        out[:, :, heads:] = x[:, :, heads:]
        out, x = out[:, :, :heads], x[:, :, :heads]
    if x.size == 0:
        return
    half = x.shape[-1] // 2
    table = (-1, x.shape[1], 1, half) if cos.ndim == 3 else (1, x.shape[1], 1, half)
    c, s = upcast(cos.reshape(table)), upcast(sin.reshape(table))
    c = np.concatenate([c, c], axis=-1)
    s = np.concatenate([s, -s] if inverse else [-s, s], axis=-1)

    def piece(start: int, stop: int) -> None:
        # whole heads at a time: numpy's inner loops are twice as long as over the halves
        xb, target = upcast(x[:, start:stop]), out[:, start:stop]
        rotated = np.multiply(xb, c[:, start:stop], out=working(target))
        crossed = np.empty_like(rotated)
        crossed[..., :half], crossed[..., half:] = xb[..., half:], xb[..., :half]
        crossed *= s[:, start:stop]
        rotated += crossed
        store(rotated, target)

    parallel(piece, x.shape[1], x.size)
