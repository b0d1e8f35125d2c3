"""torch's scaled_dot_product_attention: runs the fused op if it supports the arguments, else the plain formula.

Both have the same precision: scores, softmax and sums are float32 or wider in forward and backward. 2-byte types appear
only as operands and results of matmuls.

Letters: B sequences, Hq query heads in groups that share one of Hkv key heads, T queries, S keys, head size D.
"""

from __future__ import annotations

import math

from genesis.autograd import apply
from genesis.autograd.record import in_low_precision
from genesis.dtypes import bool_, float32, float64
from genesis.errors import DTypeError, ShapeError, UsageError
from genesis.functions import elementwise as ew
from genesis.functions import pointwise as pw
from genesis.functions.create import arange
from genesis.functions.random import dropout
from genesis.functions.reduce import any as any_of
from genesis.functions.reduce import softmax
from genesis.functions.shape import cat, expand
from genesis.functions.surface import layer_function
from genesis.ops.attention import attention
from genesis.ops.linalg import mixed_matmul
from genesis.shapes import Shape, broadcast_shapes
from genesis.tensor import Tensor


@layer_function
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function of this name: q `[B, Hq, T, D]`, k and v `[B, Hkv, S, D]`, dimensions before T optional.

    Without mask and dropout it runs as `attention`, in memory proportional to T. Otherwise it materializes the scores
    `[B, Hq, T, S]` in float32 and keeps the weights for backward. A query that sees no key gives 0.

    Args:
        attn_mask: bool (True means visible) or float (added to the scores), broadcast to `[B, Hq, T, S]`.
        dropout_p: probability with which a weight is dropped.
        is_causal: query i sees keys 0 to i; excludes a mask.
        scale: factor of the scores; 1/√D by default.
        enable_gqa: allow fewer key heads than query heads.

    Raises:
        ShapeError, DTypeError: if the tensors do not match, or the mask has integers.
        UsageError: for both a mask and `is_causal`.
    """
    if is_causal and attn_mask is not None:
        raise UsageError("scaled_dot_product_attention takes a mask or is_causal, not both")
    query, key, value = _of_one_batch(query, key, value, enable_gqa)
    _check(query, key, value, enable_gqa)
    q, k, v = query, key, value
    if q.ndim != 4:
        q, k, v = (x.reshape(_to_four_dims(x.shape)) for x in (query, key, value))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if attn_mask is None and dropout_p == 0 and v.array.shape == k.array.shape:
        heads = _fused(q, k, v, is_causal, factor)
    else:
        mask = None if attn_mask is None else _four_dimensional(attn_mask, (*query.shape[:-1], k.shape[2]))
        if is_causal:  # bool [T, S]: query i sees keys 0 to i
            mask = arange(q.shape[2], device=q.device).unsqueeze(1) >= arange(k.shape[2], device=q.device)
        heads = _by_formula(q, k, v, mask, dropout_p, factor)
    return heads if query.ndim == 4 else heads.reshape(*query.shape[:-1], v.shape[-1])


def _of_one_batch(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, ...]:
    """Return the tensors with equal dimensions before the heads, and equal heads unless keys are shared."""
    tensors, last = (query, key, value), -3 if enable_gqa else -2
    if query.array.shape[:last] == key.array.shape[:last] == value.array.shape[:last]:
        return tensors
    most = max(x.ndim for x in tensors)
    shapes = [(1,) * (most - x.ndim) + tuple(x.shape) for x in tensors]
    try:
        lead = broadcast_shapes(*(shape[:last] for shape in shapes))
    except ShapeError:
        return tensors  # `_check` names the dimension
    return tuple(x.expand(*lead, *shape[last:]) for x, shape in zip(tensors, shapes, strict=True))


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    q, k, v = query.array.shape, key.array.shape, value.array.shape
    if not len(q) == len(k) == len(v) >= 2 or k[:-1] != v[:-1] or q[-1] != k[-1]:
        raise ShapeError(f"attention takes q [B, Hq, T, D], k [B, Hkv, S, D] and v [B, Hkv, S, Dv], got {q}, {k}, {v}")
    if q[:-3] != k[:-3]:
        raise ShapeError(f"attention: q, k and v have different batches: {q}, {k}, {v}")
    if len(q) == 2 or q[-3] == k[-3]:
        return
    heads, shared = q[-3], k[-3]
    if not enable_gqa:
        raise ShapeError(f"attention got {heads} query heads and {shared} key heads", next="pass enable_gqa=True")
    if shared == 0 or heads % shared:
        raise ShapeError(f"{heads} query heads cannot share {shared} key heads evenly")


def _to_four_dims(shape: Shape) -> Shape:
    """Merge the dimensions before heads, or prepend 1s, so that the shape has four dimensions."""
    lead = shape[:-3]
    return (math.prod(lead), *(1,) * (3 - len(shape)), *shape[-3:])


def _four_dimensional(mask: Tensor, full: Shape) -> Tensor:
    """Reshape a mask so that it broadcasts to four-dimensional scores. `full` is their original shape."""
    try:
        fits = broadcast_shapes(mask.shape, full) == tuple(full)
    except ShapeError:
        fits = False
    if not fits:
        raise ShapeError(f"a mask of shape {tuple(mask.shape)} does not broadcast to the scores, {tuple(full)}")
    if mask.dtype is not bool_ and not mask.dtype.is_floating_point:
        raise DTypeError(f"the mask has type {mask.dtype.name}", next="pass bools (True: visible), or floats to add")
    if len(full) <= 4 or mask.ndim <= 3:
        return mask
    return expand(mask, (*full[:-3], *mask.shape[-3:])).reshape(_to_four_dims((*full[:-3], *mask.shape[-3:])))  # type: ignore[no-any-return]


def _fused(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Run the fused op. Its last causal query sees all keys, while torch's causal query i sees keys 0 to i."""
    queries, keys = q.array.shape[2], k.array.shape[2]
    if not is_causal or queries == keys:
        return _run_op(q, k, v, is_causal, scale)
    if queries < keys:  # no query sees the keys after the last query
        return _run_op(q, k[:, :, :queries], v[:, :, :queries], True, scale)
    causal, full = _run_op(q[:, :, :keys], k, v, True, scale), _run_op(q[:, :, keys:], k, v, False, scale)
    return cat([causal, full], dim=2)  # type: ignore[no-any-return]


def _run_op(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Run the op in the order in which memory holds the queries: without a view if that is by head."""
    _, by_head, by_token, _ = q.array.strides
    if by_head >= by_token and q.array.shape[1] == k.array.shape[1]:
        return apply(attention, q, k, v, scale=scale, causal=is_causal, window=0, by_head=True)[0]  # type: ignore[no-any-return]
    inputs = (x.transpose(1, 2) for x in (q, k, v))
    return apply(attention, *inputs, scale=scale, causal=is_causal, window=0)[0].transpose(1, 2)  # type: ignore[no-any-return]


def _by_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, scale: float) -> Tensor:
    """dropout(softmax(scale·q·kᵀ + mask))·v with the score matrix in float32 or wider."""
    q, k, v = in_low_precision(q, k, v)
    if not q.dtype.is_floating_point or k.dtype is not q.dtype or v.dtype is not q.dtype:
        types = ", ".join(x.dtype.name for x in (q, k, v))
        raise DTypeError(f"attention takes q, k, v of one float type, got {types}")
    (batch, heads, queries, size), (shared, keys) = q.shape, k.shape[1:3]
    group = heads // shared if shared else 0
    wide = float64 if q.dtype is float64 else float32
    rows = q.reshape(batch, shared, group * queries, size)  # one matmul for all query heads of a group
    scores = apply(mixed_matmul, rows, k.transpose(-2, -1), dtype=wide, alpha=scale)
    scores = scores.reshape(batch, heads, queries, keys)
    blind = None
    if mask is not None:
        scores, blind = _masked(scores, mask)
    weights = dropout(softmax(scores, -1), dropout_p)
    y = apply(mixed_matmul, weights.reshape(batch, shared, group * queries, keys), v, dtype=q.dtype)
    y = y.reshape(batch, heads, queries, v.shape[-1])
    return y if blind is None else ew.where(blind, 0.0, y)  # type: ignore[no-any-return]


def _masked(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mask the scores, and return which queries see no key. Their scores stay unmasked, so that softmax is not NaN."""
    if mask.dtype is bool_:
        blind = pw.logical_not(any_of(mask, -1, keepdim=True))
        return ew.where(pw.logical_or(mask, blind), scores, -math.inf), blind
    added = mask.to(scores.dtype)
    blind = pw.logical_not(any_of(added != -math.inf, -1, keepdim=True))
    return scores + ew.where(blind, 0.0, added), blind
