"""Functions that run several modules as one op: layers of one input in one GEMM, with a norm before, a residual after.

Each function returns what the modules return one after the other. It falls back to calling them one by one if a module
is neither a plain layer nor an adapter, or has a hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genesis.autograd import apply
from genesis.autograd.modes import is_grad_enabled
from genesis.functions.linalg import LowRankPairs
from genesis.functions.shape import cat
from genesis.nn import functional as F
from genesis.nn.hooks import everywhere_watches
from genesis.nn.layers import Linear, RMSNorm
from genesis.nn.lora import LoRALinear, low_rank_pairs
from genesis.nn.module import Module
from genesis.nn.quantized import QuantizedLinear, quantized_linear
from genesis.ops import attention_step as steps
from genesis.ops.fp8 import suits_fp8
from genesis.tensor import Tensor


def _is_plain(module: Module, kind: type[Module]) -> bool:
    return type(module) is kind and not (
        module._pre_hooks or module._forward_hooks or module._backward_hooks or everywhere_watches
    )


def _is_linear(module: Module) -> bool:
    """Whether a layer can be fused with others: a plain linear layer, or an adapter of one."""
    if type(module) is not LoRALinear:
        return _is_plain(module, Linear)
    return all(_is_plain(m, k) for m, k in ((module, LoRALinear), (module.lora_A, Linear), (module.lora_B, Linear)))


def _pairs(layers: Sequence[Module]) -> tuple[bool, LowRankPairs | None]:
    """Return whether the adapters of layers on one input have the same dropout, and their low-rank pairs."""
    adapters = [layer for layer in layers if type(layer) is LoRALinear]
    if not adapters:
        return True, None
    if len({a.dropout if a.training else 0.0 for a in adapters}) > 1:
        return False, None
    return True, low_rank_pairs(layers)


def _allowed(fp8: int, *layers: Linear) -> int:
    """`fp8`, or 0 if the sizes of a layer rule it out."""
    return fp8 if fp8 and all(suits_fp8(layer.weight) for layer in layers) else 0


def _are_quantized(layers: Sequence[Module]) -> bool:
    """Whether one op can run the layers: all have 8-bit weights, and all or none have a bias."""
    return all(_is_plain(each, QuantizedLinear) for each in layers) and len({each.bias is None for each in layers}) == 1


def _quantized(x: Tensor, layers: Sequence[Any], norm: RMSNorm | None, swiglu: bool = False) -> Tensor:
    """Run 8-bit layers on norm(x). With `swiglu` they are gate and up, and the result is silu(gate)·up."""
    if norm is None:
        return quantized_linear(x, layers, swiglu=swiglu)
    if _is_plain(norm, RMSNorm) and norm.weight is not None and norm.eps is not None:
        return quantized_linear(x, layers, None, norm.scale(), norm.eps, swiglu)
    return quantized_linear(norm(x), layers, swiglu=swiglu)


def packed_linear(
    x: Tensor, layers: Sequence[Linear], norm: RMSNorm | None = None, recompute: bool = False, fp8: int = 0
) -> Tensor:
    """Run linear layers on norm(x) and concatenate their results in the last dimension.

    Args:
        x: input `[..., in]`.
        norm: norm applied to x first, if any.
        recompute: recompute norm(x) in backward instead of keeping it.
        fp8: results with at least this many columns are multiplied in fp8; 0 means never. Odd sizes never are.
    """
    if _are_quantized(layers):
        return _quantized(x, layers, norm)
    biases = [layer.bias for layer in layers if _is_linear(layer) and layer.bias is not None]
    plain = all(map(_is_linear, layers)) and len(biases) in (0, len(layers))
    agree, pairs = _pairs(layers) if plain else (False, None)
    plain = plain and agree
    weights = [layer.weight for layer in layers] if plain else []
    fp8 = _allowed(fp8, *layers) if plain else 0
    # Saving a launch pays when x is one generated token of each sequence on a GPU.
    is_one_step = x.device.type == "cuda" and x.ndim == 3 and x.shape[1] == 1 and not is_grad_enabled()
    if (recompute or is_one_step) and plain and norm is not None and _is_plain(norm, RMSNorm):
        scale, eps = norm.scale(), norm.eps
        if scale is not None and eps is not None:
            return F.norm_linear(x, scale, weights, biases, eps=eps, fp8=fp8, low_rank=pairs)
    if norm is not None:
        x = norm(x)
    if plain:
        return F.packed_linear(x, weights, biases, fp8=fp8, low_rank=pairs)
    return cat([layer(x) for layer in layers], -1)  # type: ignore[no-any-return]


def linear_sum(x: Tensor, layer: Linear, residual: Tensor, fp8: int = 0) -> Tensor:
    """Return residual + layer(x). `fp8` is as for `packed_linear`."""
    if _are_quantized((layer,)):
        return quantized_linear(x, (layer,), residual)  # type: ignore[arg-type]
    if _is_linear(layer):
        _, pairs = _pairs((layer,))
        return F.linear(x, layer.weight, layer.bias, residual, fp8=_allowed(fp8, layer), low_rank=pairs)
    return residual + layer(x)  # type: ignore[no-any-return]


def gated_mlp(
    x: Tensor, norm: RMSNorm, gate_up: Sequence[Linear], down: Linear, recompute: bool = False, fp8: int = 0
) -> Tensor:
    """Return x + down(silu(gate(n))·up(n)) with n = norm(x).

    Args:
        gate_up: gate and up, or one layer that returns both concatenated.
        recompute: recompute n and the input of `down` in backward instead of keeping them.
        fp8: as for `packed_linear`.
    """
    if _are_quantized(gate_up) and all(layer.bias is None for layer in gate_up):
        return linear_sum(_quantized(x, gate_up, norm, swiglu=True), down, x)
    plain = all(map(_is_linear, (*gate_up, down))) and _is_plain(norm, RMSNorm)
    biases = [layer.bias for layer in gate_up if layer.bias is not None] if plain else []
    scale = norm.scale() if plain and len(biases) in (0, len(gate_up)) else None
    if scale is not None and norm.eps is not None:
        agree, pairs = _pairs(gate_up)
        if agree:
            weights, down_weights = [each.weight for each in gate_up], (down.weight, down.bias)
            keep = not recompute and is_grad_enabled()
            how: dict[str, Any] = {"keep": keep, "fp8": _allowed(fp8, *gate_up, down), "low_rank": pairs}
            at_down = _pairs((down,))[1]
            return F.norm_mlp(x, scale, weights, biases, *down_weights, eps=norm.eps, down_low_rank=at_down, **how)
    return linear_sum(F.swiglu(packed_linear(x, gate_up, norm, recompute, fp8)), down, x, fp8)


def norm_rope(
    qkv: Tensor, query_norm: RMSNorm, key_norm: RMSNorm, cos: Tensor, sin: Tensor, heads: int, key_heads: int
) -> Tensor:
    """Normalise queries and keys per head, rotate them, and leave the values unchanged.

    qkv is `[B, T, heads + 2·key_heads, D]`. cos and sin are `[T, D/2]` or `[B, T, D/2]`.
    """
    if (weights := _weights_of(query_norm, key_norm)) is not None:
        query, key, eps = weights
        return F.norm_rope(qkv, query, key, cos, sin, heads=heads, key_heads=key_heads, eps=eps)
    return F.rope(_normalised(qkv, query_norm, key_norm, heads, key_heads), cos, sin, heads + key_heads)


def attention_step(
    qkv: Tensor,
    cache: Tensor,
    lengths: Tensor,
    tables: tuple[Tensor, Tensor] | None = None,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
    active: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    early: bool = False,
) -> Tensor:
    """Write one token's key and value into the KV cache, and return its attention `[B, Q, D]` for each sequence.

    Args:
        qkv: projections `[B, Q + 2·K, D]`.
        cache: keys and values `[2, B, K, S, D]`, updated in place.
        lengths: length of each sequence before this token, int64 `[B]`.
        tables: cos and sin by position, `[at least S, D/2]`; None means no rotation.
        norms: norms of query and key heads, applied before the rotation.
        active: `[B]`, 0 for rows to skip.
        window: number of keys that the token sees, including its own; 0 means all.
        early: whether, in a captured graph, no earlier kernel writes any input but qkv.
    """
    weights = None if norms is None else _weights_of(*norms)
    if norms is not None and weights is None:
        key_heads = cache.shape[2]
        qkv = _normalised(qkv, *norms, qkv.shape[-2] - 2 * key_heads, key_heads)
    query, key, eps = weights or (None, None, 0.0)
    cos, sin = tables or (None, None)
    how: dict[str, Any] = {"scale": scale, "window": window, "eps": eps, "early": early}
    return apply(steps.attention_step, qkv, cache, lengths, cos, sin, query, key, active, **how)  # type: ignore[no-any-return]


def _weights_of(query_norm: RMSNorm, key_norm: RMSNorm) -> tuple[Tensor, Tensor, float] | None:
    """The weights and the common eps of two plain norms. None if a norm is not plain or their eps differ."""
    if not (_is_plain(query_norm, RMSNorm) and _is_plain(key_norm, RMSNorm)):
        return None
    query, key, eps = query_norm.scale(), key_norm.scale(), query_norm.eps
    agree = eps is not None and eps == key_norm.eps
    return (query, key, eps) if agree and query is not None and key is not None else None  # type: ignore[return-value]


def _normalised(qkv: Tensor, query_norm: Module, key_norm: Module, heads: int, key_heads: int) -> Tensor:
    q, k, v = qkv.split([heads, key_heads, key_heads], -2)
    return cat([query_norm(q), key_norm(k), v], -2)  # type: ignore[no-any-return]
