"""Rotary position embedding (Su et al., 2021) in the half-split layout that Llama and Qwen checkpoints use."""

from __future__ import annotations

import numpy as np

from genesis.array import Array
from genesis.backend.cpu import parallel
from genesis.errors import ShapeError
from genesis.op import Context, Spec, op
from genesis.ops.blocks import wide

__all__ = ["rope"]


def _infer(x: Array, cos: Array, sin: Array, *, inverse: bool = False) -> Spec:
    if x.ndim != 4 or x.shape[-1] % 2:
        raise ShapeError(f"rope takes [B, T, heads, even head size], got {x.shape}")
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
    return rope(g, cos, sin, inverse=not ctx.attrs.get("inverse", False)), None, None


@op("rope", _infer, vjp=_vjp, saves=(1, 2), flops=lambda i, o, a: 3 * o[0].size)
def rope(out: np.ndarray, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, inverse: bool = False) -> None:
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle; `inverse` rotates back.

    Args:
        x: `[B, T, heads, D]`.
        cos, sin: of the angles, `[T, D/2]` or `[B, T, D/2]`, without gradient.
    """
    if x.size == 0:
        return
    half = x.shape[-1] // 2
    table = (-1, x.shape[1], half) if cos.ndim == 3 else (1, x.shape[1], half)
    c = np.broadcast_to(cos.reshape(table), (x.shape[0], *table[1:]))[:, :, None, :]
    s = np.broadcast_to(sin.reshape(table), (x.shape[0], *table[1:]))[:, :, None, :]
    c, s = wide(c), wide(s)

    def piece(start: int, stop: int) -> None:
        xb = wide(x[:, start:stop])
        cb, sb = c[:, start:stop], s[:, start:stop]
        first, second = xb[..., :half], xb[..., half:]
        crossed = second * sb
        turned = first * sb
        target = out[:, start:stop]
        combine, other = (np.add, np.subtract) if inverse else (np.subtract, np.add)
        combine(first * cb, crossed, out=target[..., :half], casting="unsafe")
        other(second * cb, turned, out=target[..., half:], casting="unsafe")

    parallel(piece, x.shape[1], x.size)
