"""torch's multi_head_attention_forward: projections, attention under masks, and the weights if they are asked for.

Letters: T queries, S keys, B sequences, E channels in H heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from genesis.dtypes import DType, bool_
from genesis.errors import DTypeError, ShapeError, UsageError
from genesis.functions import elementwise as ew
from genesis.functions.linalg import linear
from genesis.functions.random import dropout
from genesis.functions.reduce import softmax
from genesis.functions.shape import cat
from genesis.functions.surface import layer_function
from genesis.nn.scaled_attention import scaled_dot_product_attention
from genesis.tensor import Tensor

NAME = "multi_head_attention_forward"


@layer_function
def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs `[T, B, E]` of multi-head attention, and its weights `[B, T, S]` or None.

    Without a batch, `B` is absent everywhere. A query that sees no key gives NaN with `need_weights`, else 0.

    Args:
        query, key, value: `[T, B, E]`, `[S, B, Ek]`, `[S, B, Ev]`.
        in_proj_weight, in_proj_bias: projections of query, key and value, stacked: `[3E, E]` and `[3E]`. With
            `use_separate_proj_weight` the weights are `q_proj_weight`, `k_proj_weight` and `v_proj_weight`.
        bias_k, bias_v: a further key and value `[1, 1, E]`; `add_zero_attn` adds one of zeros.
        static_k, static_v: replace the projected keys and values, `[B·H, S, E/H]`.
        key_padding_mask: `[B, S]`, bool (True hides a key) or float (added to the scores).
        attn_mask: `[T, S]` or `[B·H, T, S]`, bool (True hides) or float.
        average_attn_weights: return the mean over heads; otherwise weights are `[B, H, T, S]`.
        is_causal: `attn_mask` is the causal mask; it is only read if another mask is given or weights are needed.
    """
    batched = _check_shapes(query, key, value, key_padding_mask, attn_mask, embed_dim_to_check, num_heads)
    if is_causal and attn_mask is None:
        raise UsageError(f"{NAME}: is_causal needs attn_mask", next="pass Transformer.generate_square_subsequent_mask")
    same = query is key is value
    if not batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    length, batch, channels = query.shape
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    q, k, v = _projected((query,) if same else (query, key, value), weights, in_proj_bias)
    # Further keys: a learned one, then one of zeros.
    if (bias_k is None) != (bias_v is None) or (bias_k is not None and not static_k is static_v is None):
        raise UsageError(f"{NAME}: bias_k and bias_v come together, and without static keys")
    if bias_k is not None and bias_v is not None:
        k, v = cat([k, bias_k.expand(1, batch, channels)]), cat([v, bias_v.expand(1, batch, channels)])
    q, k, v = (x.reshape(len(x), batch, num_heads, channels // num_heads).permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x if s is None else _static(s, x) for x, s in ((k, static_k), (v, static_v)))  # [B, H, S, D]
    if add_zero_attn:
        k, v = (cat([x, x.new_zeros(batch, num_heads, 1, x.shape[-1])], dim=2) for x in (k, v))
    skips_mask = is_causal and key_padding_mask is None and not need_weights
    mask = None if skips_mask else _merged(attn_mask, key_padding_mask, q, k.shape[2])
    dropped = dropout_p if training else 0.0
    # Attend: weights are only formed if they are returned.
    shares = None
    if need_weights:
        scores = (q * math.sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)
        shares = dropout(softmax(scores if mask is None else scores + mask, -1), dropped)
        heads = shares @ v
    else:
        heads = scaled_dot_product_attention(q, k, v, mask, dropped, skips_mask)
    y = linear(heads.permute(2, 0, 1, 3).reshape(length, batch, channels), out_proj_weight, out_proj_bias)
    if shares is not None and average_attn_weights:
        shares = shares.mean(1)
    return (y, shares) if batched else (y.squeeze(1), None if shares is None else shares.squeeze(0))


def _check_shapes(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None, mask: Tensor | None, width: int, heads: int
) -> bool:
    """Raise ShapeError if inputs and masks do not fit each other. Return whether there is a batch."""
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.ndim not in (2, 3) or not query.ndim == key.ndim == value.ndim:
        raise ShapeError(f"{NAME} takes [T, B, E] or [T, E], got {shapes}")
    if key.shape[:-1] != value.shape[:-1] or query.shape[1:-1] != key.shape[1:-1]:
        raise ShapeError(f"{NAME}: lengths or batches do not match: {shapes}")
    if query.shape[-1] != width or width % heads:
        raise ShapeError(f"{NAME}: {query.shape[-1]} channels, expected {width} in {heads} heads")
    if padding is not None and padding.shape != (*key.shape[1:-1], key.shape[0]):
        raise ShapeError(f"{NAME}: key_padding_mask is {tuple(padding.shape)}, the keys are {tuple(key.shape)}")
    area = (query.shape[0], key.shape[0])
    count = heads * (query.shape[1] if query.ndim == 3 else 1)
    if mask is not None and mask.shape not in (area, (count, *area)):
        raise ShapeError(f"{NAME}: attn_mask is {tuple(mask.shape)}, expected {area} or {(count, *area)}")
    return query.ndim == 3


def _projected(
    inputs: tuple[Tensor, ...], weights: Tensor | tuple[Tensor | None, ...] | None, bias: Tensor | None
) -> Sequence[Tensor]:
    """Return q, k and v. One matmul computes all of them if they share input and weight."""
    parts = weights if isinstance(weights, tuple) else (weights,)
    if any(w is None for w in parts):
        raise UsageError(f"{NAME}: a projection weight is None", next="pass in_proj_weight, or the three separate ones")
    if len(inputs) == len(parts) == 1:
        return linear(inputs[0], parts[0], bias).chunk(3, -1)  # type: ignore[no-any-return]
    parts = parts if len(parts) == 3 else parts[0].chunk(3)  # type: ignore[union-attr]
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return [linear(x, w, b) for x, w, b in zip(inputs * (3 // len(inputs)), parts, biases, strict=True)]


def _static(given: Tensor, heads: Tensor) -> Tensor:
    """Return given keys or values `[B·H, S, D]` as `[B, H, S, D]`."""
    batch, count, _, size = heads.shape
    if given.ndim != 3 or given.shape[0] != batch * count or given.shape[2] != size:
        raise ShapeError(f"{NAME}: static keys are {tuple(given.shape)}, expected [{batch * count}, S, {size}]")
    return given.reshape(batch, count, -1, size)


def additive(mask: Tensor | None, name: str, dtype: DType) -> Tensor | None:
    """Return a mask as floats to add to the scores. Raises DTypeError for integers."""
    if mask is None or mask.is_floating_point():
        return mask
    if mask.dtype is not bool_:
        raise DTypeError(f"{name} has type {mask.dtype.name}", next="pass bools (True: hidden), or floats to add")
    return ew.where(mask, -math.inf, 0.0).to(dtype)  # type: ignore[no-any-return]


def _merged(mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
    """Return one mask that broadcasts to `[B, H, T, S]`; further keys are seen by all."""
    batch, heads = q.shape[:2]
    mask, padding = additive(mask, "attn_mask", q.dtype), additive(padding, "key_padding_mask", q.dtype)
    if mask is not None and mask.ndim == 3:
        mask = mask.reshape(batch, heads, *mask.shape[1:])
    if padding is not None:
        padding = padding[:, None, None]
        mask = padding if mask is None else mask + padding
    if mask is None or mask.shape[-1] == keys:
        return mask
    return cat([mask, mask.new_zeros(*mask.shape[:-1], keys - mask.shape[-1])], dim=-1)  # type: ignore[no-any-return]
