"""Replaces a model's plain blocks with fused ops; `build` and `load` end with this step.

A rule pairs a block in plain form with the class that computes the same in fused ops. To find a block's rule, its
forward is traced symbolically: its modules and values record what is computed as text. A block gets the class of the
rule whose plain form has the same trace. Other blocks remain plain. Parameters, their names and their order do not
change.

A fused block calls its modules one by one if one of them is not a plain layer (an adapter, for instance) or has a hook
(`genesis.nn.fused`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeVar

import genesis
from genesis import Tensor, nn
from genesis.nn import functional as F
from genesis.nn import fused
from genesis_models.blocks import Context, PackedHeads, pairs

M = TypeVar("M", bound=nn.Module)


class Fused:
    """A block whose class a rule changed."""


class FusedAttention(Fused):
    """Attention with one matmul for packed queries, keys and values. With `norm`: x + attention(norm(x))."""

    def forward(self: Any, x: Tensor, context: Context, norm: nn.RMSNorm | None = None) -> Tensor:
        b, t, _ = x.shape
        layers = self.projections()
        qkv = fused.packed_linear(x, layers, norm, context.recompute, context.fp8)  # [B, T, (Q + 2·K)·D]
        o = self.attended(qkv.view(b, t, -1, self.head_dim), context)  # [B, T, Q, D]
        del qkv  # frees it, unless backward needs it
        if norm is None:
            return fused.packed_linear(o.view(b, t, -1), (self.o_proj,), fp8=context.fp8)
        return fused.linear_sum(o.view(b, t, -1), self.o_proj, x, context.fp8)

    def projections(self: Any) -> tuple[nn.Module, ...]:
        """Return the projections of queries, keys and values."""
        return self.q_proj, self.k_proj, self.v_proj

    def attended(self: Any, qkv: Tensor, context: Context) -> Tensor:
        """Return attention `[B, T, Q, D]` of `[B, T, Q + 2·K, D]`, including cached keys and values."""
        form: PackedHeads = self.form()
        if context.cache is not None:
            return context.cache.attention_packed(qkv, form, context.starts, context.tables)
        tables = None if form.rope is None else context.tables[form.rope]  # attention rotates queries and keys itself
        if form.norms is not None:
            qkv, tables = form.prepared(qkv, context.tables), None
        how: dict[str, Any] = {"starts": context.starts, "scale": self.scale, "causal": True, "window": self.window}
        return F.attention_packed(qkv, self.heads, self.key_heads, tables=tables, **how)

    def form(self: Any) -> PackedHeads:
        """Return what happens to queries, keys and values before attention."""
        return PackedHeads(self.layer, self.heads, self.key_heads, self.window, self.scale)


class FusedPackedAttention(FusedAttention):
    """Attention with one weight for queries, keys and values."""

    def projections(self: Any) -> tuple[nn.Module, ...]:
        return (self.qkv_proj,)

    def attended(self: Any, qkv: Tensor, context: Context) -> Tensor:
        """Reorder queries and keys by `pairs` first if only a part of each head is rotated."""
        if self.rotary_dim < self.head_dim:
            qk, v = qkv.split([self.heads + self.key_heads, self.key_heads], 2)
            qkv = genesis.cat([pairs(qk, self.rotary_dim), v], 2)
        return super().attended(qkv, context)


class FusedNoPEAttention(FusedAttention):
    """Attention without positions."""

    def form(self: Any) -> PackedHeads:
        return super().form()._replace(rope=None)


class FusedHeadNormAttention(FusedAttention):
    """Attention whose query and key heads are normalised and rotated by one op."""

    def form(self: Any) -> PackedHeads:
        return super().form()._replace(norms=(self.q_norm, self.k_norm))


class FusedRopeHeadNormAttention(FusedHeadNormAttention):
    """Attention with normalised heads and one of several rotary embeddings."""

    def form(self: Any) -> PackedHeads:
        return super().form()._replace(rope=self.rope)


class FusedMLP(Fused):
    """SwiGLU: one matmul for gate and up. With `norm`: x + mlp(norm(x)), in one op."""

    def forward(self: Any, x: Tensor, context: Context | None = None, norm: nn.RMSNorm | None = None) -> Tensor:
        recompute, fp8 = (False, 0) if context is None else (context.recompute, context.fp8)
        if norm is None:
            return self.down_proj(F.swiglu(fused.packed_linear(x, self.projections(), fp8=fp8)))
        return fused.gated_mlp(x, norm, self.projections(), self.down_proj, recompute, fp8)

    def projections(self: Any) -> tuple[nn.Module, ...]:
        """Return the projections of gate and up."""
        return self.gate_proj, self.up_proj


class FusedPackedMLP(FusedMLP):
    """SwiGLU with one weight for gate and up."""

    def projections(self: Any) -> tuple[nn.Module, ...]:
        return (self.gate_up_proj,)


class FusedGEGLU(FusedMLP):
    """GEGLU in the tanh form of GELU: one matmul for gate and up."""

    def forward(self: Any, x: Tensor, context: Context | None = None, norm: nn.RMSNorm | None = None) -> Tensor:
        recompute, fp8 = (False, 0) if context is None else (context.recompute, context.fp8)
        h = F.geglu(fused.packed_linear(x, self.projections(), norm, recompute, fp8))
        return self.down_proj(h) if norm is None else fused.linear_sum(h, self.down_proj, x, fp8)


class FusedPreNormLayer(Fused):
    """A layer whose two blocks compute its norms and its additions to the stream.

    Only such layers support selective recomputation and 8-bit floats.
    """

    is_fused_layer = True

    def forward(self: Any, x: Tensor, context: Context) -> Tensor:
        if not all(isinstance(each, Fused) for each in (self.self_attn, self.mlp)):  # a block alone was unfused
            return super().forward(x, context)  # type: ignore[misc]
        x = self.self_attn(x, context, norm=self.input_layernorm)
        return self.mlp(x, context, norm=self.post_attention_layernorm)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        """Assign, and fuse the layer again if the value is a module."""
        if isinstance(value, nn.Module):
            unfuse(self)
            setattr(self, name, value)
            fuse(self)
        else:
            super().__setattr__(name, value)


# --- Rules ------------------------------------------------------------------------------------------------------------


def _attention(self: Any, x: Any, context: Any) -> Any:
    q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
    o = context.attention(context.rope(q), context.rope(k), v, self.layer, self.window, self.scale)
    return self.o_proj(o.flatten(-2))


def _packed_attention(self: Any, x: Any, context: Any) -> Any:
    qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
    q, k, v = qkv.split([self.heads, self.key_heads, self.key_heads], 2)
    q, k = context.rope_part(q, self.rotary_dim), context.rope_part(k, self.rotary_dim)
    o = context.attention(q, k, v, self.layer, self.window, self.scale)
    return self.o_proj(o.flatten(-2))


def _nope_attention(self: Any, x: Any, context: Any) -> Any:
    q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
    o = context.attention(q, k, v, self.layer, self.window, self.scale)
    return self.o_proj(o.flatten(-2))


def _head_norm_attention(self: Any, x: Any, context: Any) -> Any:
    q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
    q, k = context.rope(self.q_norm(q)), context.rope(self.k_norm(k))
    o = context.attention(q, k, v, self.layer, self.window, self.scale)
    return self.o_proj(o.flatten(-2))


def _rope_head_norm_attention(self: Any, x: Any, context: Any) -> Any:
    q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
    q, k = context.rope(self.q_norm(q), self.rope), context.rope(self.k_norm(k), self.rope)
    o = context.attention(q, k, v, self.layer, self.window, self.scale)
    return self.o_proj(o.flatten(-2))


def _swiglu(self: Any, x: Any) -> Any:
    _check_silu(self)
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _geglu(self: Any, x: Any) -> Any:
    if getattr(self.act_fn.module, "approximate", "") != "tanh":
        raise TypeError("another activation")
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _packed_swiglu(self: Any, x: Any) -> Any:
    _check_silu(self)
    gate, up = self.gate_up_proj(x).chunk(2, -1)
    return self.down_proj(self.act_fn(gate) * up)


def _check_silu(block: Any) -> None:
    if not isinstance(block.act_fn.module, nn.SiLU):
        raise TypeError("another activation")


def _pre_norm_layer(self: Any, x: Any, context: Any) -> Any:
    x = x + self.self_attn(self.input_layernorm(x), context)
    return x + self.mlp(self.post_attention_layernorm(x))


# A block's plain forward, and the class that fuses it.
RULES: tuple[tuple[Callable[..., Any], type[Fused]], ...] = (
    (_attention, FusedAttention),
    (_packed_attention, FusedPackedAttention),
    (_nope_attention, FusedNoPEAttention),
    (_head_norm_attention, FusedHeadNormAttention),
    (_rope_head_norm_attention, FusedRopeHeadNormAttention),
    (_swiglu, FusedMLP),
    (_geglu, FusedGEGLU),
    (_packed_swiglu, FusedPackedMLP),
    (_pre_norm_layer, FusedPreNormLayer),
)


def fuse(model: M) -> M:
    """Give `model` and its blocks the fused forms that the rules define, and return it."""
    return model.apply(_fuse)


def unfuse(block: M) -> M:
    """Give a block and the blocks in it their plain forms back, and return it."""
    for module in block.modules():
        if isinstance(module, Fused):
            module.__class__ = type(module).__bases__[1]
    return block


def _fuse(block: nn.Module) -> None:
    if isinstance(block, Fused):
        return
    written = _written(type(block).forward, block)
    for plain, fused_class in RULES if written is not None else ():
        if written == _written(plain, block):
            if fused_class is not FusedPreNormLayer or _has_fused_parts(block):
                block.__class__ = _class_of(fused_class, type(block))  # type: ignore[arg-type]
            return


def _has_fused_parts(layer: Any) -> bool:
    """Whether both blocks of a layer are fused, and its norms are RMSNorm."""
    blocks, norms = (layer.self_attn, layer.mlp), (layer.input_layernorm, layer.post_attention_layernorm)
    return all(isinstance(each, Fused) for each in blocks) and all(isinstance(each, nn.RMSNorm) for each in norms)


@functools.cache
def _class_of(fused: Any, plain: Any) -> Any:
    return type(f"Fused{plain.__name__}", (fused, plain), {"__doc__": fused.__doc__})


# --- Symbolic tracing of a forward ------------------------------------------------------------------------------------


class _Value:
    """A symbolic value: the expression that computes it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __getattr__(self, name: str) -> Callable[..., _Value]:
        return lambda *args, **settings: _Value(f"{self.text}.{name}{_arguments(args, settings)}")

    def split(self, sizes: Sequence[int], dim: int) -> tuple[_Value, ...]:
        return tuple(_Value(f"{self.text}.split({sizes}, {dim})[{i}]") for i in range(len(sizes)))

    def chunk(self, chunks: int, dim: int) -> tuple[_Value, ...]:
        return tuple(_Value(f"{self.text}.chunk({chunks}, {dim})[{i}]") for i in range(chunks))

    def __add__(self, other: object) -> _Value:
        return _Value(f"({self.text} + {_text(other)})")

    def __mul__(self, other: object) -> _Value:
        return _Value(f"({self.text} * {_text(other)})")


class _Part:
    """A module of a block; it records its calls."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module

    def __call__(self, *args: object, **settings: object) -> _Value:
        return _Value(f"{self.name}{_arguments(args, settings)}")


class _Block:
    """A block as its forward sees it during the trace: modules record calls, other attributes have their values."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        if isinstance(found, MethodType):  # bound to this object, a method also sees modules that record calls
            return MethodType(found.__func__, self)
        return _Part(name, found) if isinstance(found, nn.Module) else found


def _arguments(args: tuple[object, ...], settings: dict[str, object]) -> str:
    return f"({', '.join([*map(_text, args), *(f'{name}={_text(each)}' for name, each in settings.items())])})"


def _text(value: object) -> str:
    return value.text if isinstance(value, _Value) else repr(value)


def _written(forward: Callable[..., Any], block: nn.Module) -> str | None:
    """Return what `forward` of a block computes, as text; None if symbolic values do not support what it does."""
    count = forward.__code__.co_argcount - 1
    try:
        return _text(forward(_Block(block), *map(_Value, ("x", "context")[:count])))
    except Exception:  # a forward may do anything with values of an unexpected kind
        return None
