"""Rotary position embedding (Su et al., 2021) in the half-split layout of Llama and Qwen checkpoints.

`rope` is RoPE alone; `norm_rope` fuses it with the norms of queries and keys by head (Qwen3).
"""

from __future__ import annotations

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import parallel
from genesis.errors import ShapeError
from genesis.op import Context, Grads, gradient_like, op
from genesis.ops.blocks import each_block, store, sum_blocks, upcast, working
from genesis.ops.elementwise import add
from genesis.ops.norm import check_norm, statistics_type


def _infer(x: Array, cos: Array, sin: Array, *, inverse: bool = False, heads: int | None = None) -> Spec:
    if x.ndim != 4 or x.shape[-1] % 2:
        raise ShapeError(f"rope takes [B, T, heads, even head size], got {x.shape}")
    if heads is not None and not 0 <= heads <= x.shape[2]:
        raise ShapeError(f"rope cannot rotate {heads} heads, x has {x.shape[2]}")
    half = x.shape[-1] // 2
    allowed = {(x.shape[1], half), (1, x.shape[1], half), (x.shape[0], x.shape[1], half)}
    if cos.shape != sin.shape or cos.shape not in allowed:
        raise ShapeError(
            f"rope: cos {cos.shape} and sin {sin.shape} must be [T, {half}] or [B, T, {half}] for x {x.shape}"
        )
    return Spec(x.shape, x.dtype)


def _vjp(ctx: Context, g: Array) -> tuple[Array | None, ...]:
    """Apply the inverse RoPE: the transpose of a rotation is its inverse."""
    _, cos, sin = ctx.inputs
    attrs = {**ctx.attrs, "inverse": not ctx.attrs.get("inverse", False)}
    return rope(g, cos, sin, **attrs), None, None


@op("rope", _infer, vjp=_vjp, saves=(1, 2), flops=lambda i, o, a: 3 * o[0].size)
def rope(
    out: np.ndarray, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, inverse: bool = False, heads: int | None = None
) -> None:
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle; `inverse` rotates by the negative angle.

    Args:
        x: `[B, T, heads, D]`.
        cos: cosines of the angles, `[T, D/2]` or `[B, T, D/2]`, without gradient.
        sin: sines of the angles, in the same shape.
        heads: number of leading heads to rotate; the others (values after queries and keys) are copied. None means all.
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
        # Whole heads, because numpy's inner loops are then twice as long as over halves.
        xb, target = upcast(x[:, start:stop]), out[:, start:stop]
        rotated = np.multiply(xb, c[:, start:stop], out=working(target))
        crossed = np.empty_like(rotated)
        crossed[..., :half], crossed[..., half:] = xb[..., half:], xb[..., :half]
        crossed *= s[:, start:stop]
        rotated += crossed
        store(rotated, target)

    parallel(piece, x.shape[1], x.size)


# --- Fused with the norm of each head ---------------------------------------------------------------------------------


def _check_norm_rope(
    name: str, x: Array, weights: tuple[Array, Array], tables: tuple[Array, Array], heads: int, keys: int
) -> Spec:
    """Return the spec of the statistics `[B, T, heads + keys]`."""
    rope.infer(x, *tables)
    if min(heads, keys) < 0 or heads + keys > x.shape[2]:
        raise ShapeError(f"{name}: {heads} query and {keys} key heads do not fit x, which has {x.shape[2]}")
    check_norm(name, x, *weights)
    return Spec((*x.shape[:2], heads + keys), statistics_type(x.dtype))


def _norm_rope_infer(
    x: Array, query_weight: Array, key_weight: Array, cos: Array, sin: Array, *, heads: int, key_heads: int, eps: float
) -> tuple[Spec, Spec]:
    rstd = _check_norm_rope("norm_rope", x, (query_weight, key_weight), (cos, sin), heads, key_heads)
    return Spec(x.shape, x.dtype), rstd


def _norm_rope_vjp(ctx: Context, g: Array, _: None) -> Grads:
    """Apply the inverse RoPE, then the gradient of `rms_norm` with the weight of queries or of keys."""
    sums = [ctx.take_accumulated(i) if ctx.needs[i] else None for i in (1, 2)]
    slots = [ctx.gradient_slot(i) if t is None and ctx.needs[i] else None for i, t in enumerate(sums, 1)]
    attrs = {k: ctx.attrs[k] for k in ("heads", "key_heads")}
    if not any(ctx.needs[1:3]):  # as with adapters, whose norms are frozen
        return norm_rope_backward(g, *ctx.inputs, ctx.outputs[1], learns=False, **attrs), None, None, None, None
    dx, *weights = norm_rope_backward(g, *ctx.inputs, ctx.outputs[1], out=(None, *slots), **attrs)
    for i, before in enumerate(sums):
        if before is not None:
            weights[i] = add(before.array, weights[i], out=before.array if before.is_own else None)
    return dx, *weights, None, None


def _tables(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, inverse: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors `[1 or B, T, 1, D]` of heads, and of heads with their halves swapped; see `rope`."""
    c, s = (upcast(t).reshape(-1, x.shape[1], 1, x.shape[3] // 2) for t in (cos, sin))
    return np.concatenate([c, c], axis=-1), np.concatenate([s, -s] if inverse else [-s, s], axis=-1)


def _swap_halves(x: np.ndarray) -> np.ndarray:
    half, swapped = x.shape[-1] // 2, np.empty(x.shape, x.dtype)
    swapped[..., :half], swapped[..., half:] = x[..., half:], x[..., :half]
    return swapped


@op(
    "norm_rope",
    _norm_rope_infer,
    vjp=_norm_rope_vjp,
    saves=(0, 1, 2, 3, 4, "out1"),
    auxiliary=(1,),
    flops=lambda i, o, a: 7 * o[0].size,
    autocast="fp32",
)
def norm_rope(
    out: tuple[np.ndarray, np.ndarray],
    x: np.ndarray,
    query_weight: np.ndarray,
    key_weight: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    heads: int,
    key_heads: int,
    eps: float,
) -> None:
    """`rope(rms_norm(x))` for queries and keys; other heads are copied. r = 1 / sqrt(mean(x²) + eps) is an output, too.

    Args:
        x: `[B, T, heads + key_heads + others, D]`.
        query_weight: weight `[D]` of the queries' norm.
        key_weight: weight `[D]` of the keys' norm.
        cos: cosines of the angles, `[T, D/2]` or `[B, T, D/2]`, without gradient.
        sin: sines of the angles, in the same shape.
        heads: number of query heads, which come first.
        key_heads: number of key heads, which follow.
        eps: epsilon of the norms.
    """
    y, rstd = out
    rotated, size = heads + key_heads, x.shape[3]
    y[:, :, rotated:] = x[:, :, rotated:]
    if not x.size:
        return
    c, s = _tables(x, cos, sin, inverse=False)
    weights = _weights(query_weight, key_weight, heads, key_heads)

    def block(start: int, stop: int) -> None:
        xb = upcast(x[:, start:stop, :rotated])
        r = 1 / np.sqrt(np.vecdot(xb, xb) / size + eps, dtype=xb.dtype)
        rstd[:, start:stop] = r
        n = xb * r[..., None]
        n *= weights
        crossed = _swap_halves(n)
        crossed *= s[:, start:stop]
        n *= c[:, start:stop]
        np.add(n, crossed, out=y[:, start:stop, :rotated], casting="unsafe")

    each_block(block, x.shape[1], x.shape[0] * rotated * size)


def _weights(query_weight: np.ndarray, key_weight: np.ndarray, heads: int, key_heads: int) -> np.ndarray:
    return np.concatenate(
        [np.broadcast_to(upcast(w), (n, w.size)) for w, n in ((query_weight, heads), (key_weight, key_heads))]
    )


def _norm_rope_backward_infer(
    g: Array, x: Array, query_weight: Array, key_weight: Array, cos: Array, sin: Array, rstd: Array, *, heads: int,
    key_heads: int, learns: bool = True,
) -> tuple[Spec, ...]:  # fmt: skip
    _check_norm_rope("norm_rope_backward", x, (query_weight, key_weight), (cos, sin), heads, key_heads)
    return gradient_like("norm_rope_backward", g, x, query_weight, key_weight)[: 3 if learns else 1]


@op("norm_rope_backward", _norm_rope_backward_infer, flops=lambda i, o, a: 11 * o[0].size)
def norm_rope_backward(
    out: np.ndarray | tuple[np.ndarray, ...],
    g: np.ndarray,
    x: np.ndarray,
    query_weight: np.ndarray,
    key_weight: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    rstd: np.ndarray,
    heads: int,
    key_heads: int,
    learns: bool = True,
) -> None:
    """dx = r·(h·w - n·mean(h·w·n)), dw = Σ heads and tokens h·n, with h = inverse RoPE of g and n = x·r.

    With `learns` False, for frozen weights, dx is the only output.
    """
    d, *grads = out if isinstance(out, tuple) else (out,)
    rotated, size = heads + key_heads, x.shape[3]
    d[:, :, rotated:] = g[:, :, rotated:]
    if not x.size:
        for grad in grads:
            grad[...] = 0
        return
    c, s = _tables(x, cos, sin, inverse=True)
    weights = _weights(query_weight, key_weight, heads, key_heads)

    def block(start: int, stop: int) -> np.ndarray:
        gb, rb = upcast(g[:, start:stop, :rotated]), rstd[:, start:stop, :, None]
        # Inverse RoPE.
        crossed = _swap_halves(gb)
        crossed *= s[:, start:stop]
        h = gb * c[:, start:stop]
        h += crossed
        # Gradient of the norm.
        n = np.multiply(upcast(x[:, start:stop, :rotated]), rb, out=crossed)
        sums = np.einsum("bthd,bthd->hd", h, n)
        h *= weights
        n *= (np.vecdot(h, n) / size)[..., None]
        h -= n
        np.multiply(h, rb, out=d[:, start:stop, :rotated], casting="unsafe")
        return np.stack([sums[:heads].sum(axis=0), sums[heads:].sum(axis=0)])

    weight_sums = np.empty((2, size), weights.dtype)
    sum_blocks(block, x.shape[1], max(x.shape[0] * rotated * size, 1), weight_sums)
    for grad, value in zip(grads, weight_sums, strict=False):
        grad[...] = value
