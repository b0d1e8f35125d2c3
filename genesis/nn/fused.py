"""Modules called together: layers on one input in one product, a norm before it, a residual added by it.

Each function gives what the modules would give one after the other. It calls them so where one of them is neither a
plain layer nor an adapter (another class in its place) or is watched by a hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genesis.autograd import apply
from genesis.autograd.modes import is_grad_enabled
from genesis.functions.linalg import LowRankPairs
from genesis.functions.shape import cat
from genesis.nn import functional as F
from genesis.nn.layers import Linear, RMSNorm
from genesis.nn.lora import LoRALinear, low_rank_pairs
from genesis.nn.module import Module
from genesis.nn.quantized import QuantizedLinear, quantized_linear
from genesis.ops import attention_step as steps
from genesis.ops.fp8 import suits_fp8
from genesis.tensor import Tensor


def _is_plain(module: Module, kind: type[Module]) -> bool:
    return type(module) is kind and not (module._pre_hooks or module._forward_hooks or module._backward_hooks)


def _is_linear(module: Module) -> bool:
    """Whether a layer can be computed with others: a linear one, or an adapter of one."""
    if type(module) is not LoRALinear:
        return _is_plain(module, Linear)
    return all(_is_plain(m, k) for m, k in ((module, LoRALinear), (module.lora_A, Linear), (module.lora_B, Linear)))


def _pairs(layers: Sequence[Module]) -> tuple[bool, LowRankPairs | None]:
    """What adapters among layers on one input add; whether they agree on dropout, so that one draw can serve all."""
    adapters = [layer for layer in layers if type(layer) is LoRALinear]
    if not adapters:
        return True, None
    if len({a.dropout if a.training else 0.0 for a in adapters}) > 1:
        return False, None
    return True, low_rank_pairs(layers)


def _allowed(fp8: int, *layers: Linear) -> int:
    """`fp8`, or 0 where the sizes of a layer rule it out."""
    return fp8 if fp8 and all(suits_fp8(layer.weight) for layer in layers) else 0


def _are_quantized(layers: Sequence[Module]) -> bool:
    """Whether layers have weights in 8 bits, and all or none a bias, so that one op computes them."""
    return all(_is_plain(each, QuantizedLinear) for each in layers) and len({each.bias is None for each in layers}) == 1


def _quantized(x: Tensor, layers: Sequence[Any], norm: RMSNorm | None, swiglu: bool = False) -> Tensor:
    """Layers with weights in 8 bits on norm(x), with `swiglu` silu(gate)·up of theirs."""
    if norm is None:
        return quantized_linear(x, layers, swiglu=swiglu)
    if _is_plain(norm, RMSNorm) and norm.weight is not None and norm.eps is not None:
        return quantized_linear(x, layers, None, norm.scale(), norm.eps, swiglu)
    return quantized_linear(norm(x), layers, swiglu=swiglu)


def packed_linear(
    x: Tensor, layers: Sequence[Linear], norm: RMSNorm | None = None, recompute: bool = False, fp8: int = 0
) -> Tensor:
    """The results of several linear layers on norm(x) side by side in the last dimension.

    Args:
        x: `[..., in]`.
        norm: a norm that x passes first.
        recompute: do not keep norm(x) for backward, which makes it again.
        fp8: the fewest columns of a result that is multiplied in 8-bit floats, 0: none; layers of odd sizes are not.
    """
    if _are_quantized(layers):
        return _quantized(x, layers, norm)
    biases = [layer.bias for layer in layers if _is_linear(layer) and layer.bias is not None]
    plain = all(map(_is_linear, layers)) and len(biases) in (0, len(layers))
    agree, pairs = _pairs(layers) if plain else (False, None)
    plain = plain and agree
    weights = [layer.weight for layer in layers] if plain else []
    fp8 = _allowed(fp8, *layers) if plain else 0
    # A launch less counts where x is one token of each sequence that is generated on a GPU.
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
    """residual + layer(x); `fp8` as for `packed_linear`."""
    if _are_quantized((layer,)):
        return quantized_linear(x, (layer,), residual)  # type: ignore[arg-type]
    if _is_linear(layer):
        _, pairs = _pairs((layer,))
        return F.linear(x, layer.weight, layer.bias, residual, fp8=_allowed(fp8, layer), low_rank=pairs)
    return residual + layer(x)  # type: ignore[no-any-return]


def gated_mlp(
    x: Tensor, norm: RMSNorm, gate_up: Sequence[Linear], down: Linear, recompute: bool = False, fp8: int = 0
) -> Tensor:
    """x + down(silu(gate(n))·up(n)) with n = norm(x).

    Args:
        gate_up: gate and up, or one layer whose results are theirs side by side.
        recompute: do not keep n and down's input for backward, which makes them again.
        fp8: the fewest columns of a result that is multiplied in 8-bit floats, 0: none; layers of odd sizes are not.
    """
    if _are_quantized(gate_up) and all(layer.bias is None for layer in gate_up):
        return linear_sum(_quantized(x, gate_up, norm, swiglu=True), down, x)
    plain = all(map(_is_linear, (*gate_up, down))) and _is_plain(norm, RMSNorm)
    biases = [layer.bias for layer in gate_up if layer.bias is not None] if plain else []
    scale = norm.scale() if plain and len(biases) in (0, len(gate_up)) else None
    if scale is not None and norm.eps is not None:
        agree, pairs = _pairs(gate_up)
        if agree:
            weights, rest = [each.weight for each in gate_up], (down.weight, down.bias)
            keep = not recompute and is_grad_enabled()
            how: dict[str, Any] = {"keep": keep, "fp8": _allowed(fp8, *gate_up, down), "low_rank": pairs}
            at_down = _pairs((down,))[1]
            return F.norm_mlp(x, scale, weights, biases, *rest, eps=norm.eps, down_low_rank=at_down, **how)
    return linear_sum(F.swiglu(packed_linear(x, gate_up, norm, recompute, fp8)), down, x, fp8)


def norm_rope(
    qkv: Tensor, query_norm: RMSNorm, key_norm: RMSNorm, cos: Tensor, sin: Tensor, heads: int, key_heads: int
) -> Tensor:
    """Queries and keys normalised by head and rotated, the values behind them as they are.

    qkv is `[B, T, heads + 2·key_heads, D]`, cos and sin are `[T, D/2]` or `[B, T, D/2]`.
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
    """Attention `[B, Q, D]` of one token of each sequence over a KV cache, into which its key and value are written.

    Args:
        qkv: `[B, Q + 2·K, D]`, as projections leave them.
        cache: `[2, B, K, S, D]`.
        lengths: of the sequences before this token, int64 `[B]`.
        tables: cos and sin of each position, `[at least S, D/2]`; None leaves queries and keys unrotated.
        norms: of query and key heads, before they are rotated.
        active: `[B]`, 0 for rows that take no part.
        window: how many keys up to the token's own are seen; 0 means all.
        early: in a captured graph, whether nothing ahead of this call writes any input but qkv.
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
    """The weights and the eps of two plain norms; None where they are not, or do not agree."""
    if not (_is_plain(query_norm, RMSNorm) and _is_plain(key_norm, RMSNorm)):
        return None
    query, key, eps = query_norm.scale(), key_norm.scale(), query_norm.eps
    agree = eps is not None and eps == key_norm.eps
    return (query, key, eps) if agree and query is not None and key is not None else None  # type: ignore[return-value]


def _normalised(qkv: Tensor, query_norm: Module, key_norm: Module, heads: int, key_heads: int) -> Tensor:
    q, k, v = qkv.split([heads, key_heads, key_heads], -2)
    return cat([query_norm(q), key_norm(k), v], -2)  # type: ignore[no-any-return]
