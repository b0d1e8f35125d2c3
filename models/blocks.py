"""The parts that Qwen2, Qwen3 and Llama share. Parameter names are Hugging Face's.

Shapes: B batch, T tokens, H hidden size, Q query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import genesis
from genesis import Tensor, nn
from genesis.autograd import checkpoint
from genesis.nn import functional as F
from genesis.nn import fused
from genesis.ops import fp8 as fp8_ops
from genesis_models.config import ModelConfig
from genesis_models.rope import tables

__all__ = ["Attention", "CausalLM", "Decoder", "DecoderLayer", "KeyValueCache", "Mlp", "Rotary", "widest_product"]


class KeyValueCache:
    """Keys and values of the tokens seen so far, one pair of buffers a layer.

    Args:
        batch, capacity: sequences, and the most tokens of each.
    """

    def __init__(self, config: ModelConfig, batch: int, capacity: int, dtype: genesis.DType, device: str) -> None:
        shape = (batch, capacity, config.num_key_value_heads, config.head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [genesis.empty(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [genesis.empty(shape, dtype=dtype, device=device) for _ in layers]
        self.length, self.capacity = 0, capacity

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store `[B, T, K, D]` behind what is there; returns all keys and values so far."""
        end = self.length + k.shape[1]
        self.keys[layer][:, self.length : end] = k
        self.values[layer][:, self.length : end] = v
        return self.keys[layer][:, :end], self.values[layer][:, :end]


class Rotary:
    """cos and sin by position, grown as longer sequences come. It has no parameters and may be shared by threads.

    On the CPU the rows are looked up in numpy. Positions that stand on a device are not read back: the whole table goes
    there once.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._placed: dict[tuple[int, genesis.Device], tuple[Tensor, Tensor]] = {}
        empty = np.empty((0, config.head_dim // 2), np.float32)
        self._tables = (empty, empty)  # replaced as a whole, so that no thread sees one table without the other

    def __call__(self, positions: np.ndarray, device: genesis.Device) -> tuple[Tensor, Tensor]:
        """cos and sin `[*positions.shape, D/2]`, float32."""
        cos, sin = self._for_length(int(positions.max(initial=-1)) + 1)
        cos, sin = cos[positions], sin[positions]
        return genesis.from_numpy(cos).to(device=device), genesis.from_numpy(sin).to(device=device)

    def span(self, begin: int, end: int, device: genesis.Device) -> tuple[Tensor, Tensor]:
        """cos and sin of positions `begin` … `end` - 1 on a device, `[T, D/2]` float32."""
        cos, sin = self._on_device(end, device)
        return cos.narrow(0, begin, end - begin), sin.narrow(0, begin, end - begin)

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin `[*positions.shape, D/2]` of positions below `end` that stand on a device."""
        cos, sin = self._on_device(end, positions.device)
        return F.embedding(positions, cos), F.embedding(positions, sin)

    def _on_device(self, length: int, device: genesis.Device) -> tuple[Tensor, Tensor]:
        cos, sin = self._for_length(length)
        key = (len(cos), device)
        if key not in self._placed:
            if self._is_stretched(len(cos)):  # each length has a table of its own: keep the last one alone
                self._placed.clear()
            self._placed[key] = genesis.tensor(cos, device=device), genesis.tensor(sin, device=device)
        return self._placed[key]

    def _is_stretched(self, length: int) -> bool:
        """Whether frequencies depend on the length: under dynamic scaling beyond the trained one."""
        return self.config.rope.kind == "dynamic" and length > self.config.max_position_embeddings

    def _for_length(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        found = self._tables
        if self._is_stretched(length):
            return found if len(found[0]) == length else self._make(length)
        if len(found[0]) >= length and not self._is_stretched(len(found[0])):
            return found
        size = max(256, 1 << (length - 1).bit_length())
        return self._make(self.config.max_position_embeddings if self._is_stretched(size) else size)

    def _make(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        self._tables = found = tables(self.config, length)
        return found


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; `qk_norm` normalises each query and key head (Qwen3)."""

    def __init__(self, config: ModelConfig, layer: int, *, bias: bool, out_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        self.layer, self.window = layer, config.layer_windows[layer]
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.scale = config.head_dim, 1 / math.sqrt(config.head_dim)
        width, kv_width = self.heads * config.head_dim, self.key_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=out_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps) if qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps) if qk_norm else None

    def forward(self, x: Tensor, norm: nn.RMSNorm, context: Context) -> Tensor:
        """x + attention(norm(x))."""
        b, t, _ = x.shape
        layers = (self.q_proj, self.k_proj, self.v_proj)
        qkv = fused.packed_linear(x, layers, norm, context.recompute, context.fp8)
        o = self.attended(qkv.view(b, t, -1, self.head_dim), context)  # [B, T, Q, D]
        del qkv  # what it holds is no longer needed, unless backward keeps it
        return fused.linear_sum(o.view(b, t, -1), self.o_proj, x, context.fp8)

    def turned(self, qkv: Tensor, context: Context) -> Tensor:
        """Queries and keys normalised, where the model does that, and rotated."""
        cos, sin = context.cos, context.sin
        if self.q_norm is None or self.k_norm is None:
            return F.rope(qkv, cos, sin, self.heads + self.key_heads)
        return fused.norm_rope(qkv, self.q_norm, self.k_norm, cos, sin, self.heads, self.key_heads)

    def attended(self, qkv: Tensor, context: Context) -> Tensor:
        """Attention of `[B, T, Q + 2K, D]` over the tokens here and those in the cache."""
        heads = (self.heads, self.key_heads)
        how: dict[str, Any] = {"starts": context.starts, "scale": self.scale, "causal": True, "window": self.window}
        if context.cache is None and self.q_norm is None:
            return F.attention_packed(qkv, *heads, tables=(context.cos, context.sin), **how)
        qkv = self.turned(qkv, context)
        if context.cache is None:
            return F.attention_packed(qkv, *heads, **how)
        q, k, v = qkv.split([self.heads, self.key_heads, self.key_heads], 2)
        return F.attention(q, *context.cache.append(self.layer, k, v), **how)


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x))·up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, norm: nn.RMSNorm, context: Context) -> Tensor:
        """x + mlp(norm(x))."""
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        return fused.gated_mlp(x, norm, *layers, context.recompute, context.fp8)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = self.self_attn(x, self.input_layernorm, context)
        return self.mlp(x, self.post_attention_layernorm, context)


def widest_product(config: ModelConfig) -> int:
    """The most columns that a product of a layer with a weight has, forward or for its input's gradient."""
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    return max(config.hidden_size, heads * config.head_dim, 2 * config.intermediate_size)


class Context:
    """What all layers of one forward pass share.

    Attributes:
        cos, sin: rotary tables.
        starts: where each token's document starts `[B, T]`, or None.
        cache: keys and values of earlier tokens, or None.
        recompute: whether backward makes again what is cheap to make, the norms' and SwiGLU's results.
        fp8: the fewest columns of a product that is made in 8-bit floats, 0: none is.
    """

    def __init__(
        self, cos: Tensor, sin: Tensor, starts: Tensor | None, cache: KeyValueCache | None, recompute: bool, fp8: int
    ) -> None:
        self.cos, self.sin, self.starts, self.cache = cos, sin, starts, cache
        self.recompute, self.fp8 = recompute, fp8


class Decoder(nn.Module):
    """Token embedding, the layers, the final norm."""

    def __init__(self, config: ModelConfig, attentions: Sequence[Attention]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config, attention) for attention in attentions])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids: Tensor, context: Context, recompute: bool) -> Tensor:
        x = self.embed_tokens(input_ids)  # [B, T, H]
        for layer in self.layers:
            x = checkpoint(layer, x, context) if recompute else layer(x, context)
        return self.norm(x)


class CausalLM(nn.Module):
    """A decoder with a language-model head. Subclasses make the attention of each layer.

    Attributes:
        config: the checked configuration.
        activation_checkpointing: what training does not keep for backward, which makes it again: "none"; "selective",
            the results of norms and of SwiGLU, a third of a layer's memory for a hundredth of its time; or "full", all
            but each layer's input, for the time of another forward pass.
        precision: "fp8": in training the layers' products with wide results are made in 8-bit floats, but for gradients
            of weights; None: in the type of the weights, as those of embedding and head are, and all when the model is
            used.
        stored_types: parameter -> the type of its tensor in the folder, where loading chose the model's type by itself;
            `save` writes these.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.stored_types: Mapping[str, str] = {}
        self.activation_checkpointing = "none"
        self.precision: str | None = None
        self.model = Decoder(config, [self.make_attention(config, i) for i in range(config.num_hidden_layers)])
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self._rotary = Rotary(config)

    def make_attention(self, config: ModelConfig, layer: int) -> Attention:
        """The attention of one layer."""
        raise NotImplementedError

    @property
    def head_weight(self) -> Tensor:
        """The output projection `[V, H]`: its own, or the token embedding."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def hidden_states(
        self, input_ids: Tensor, position_ids: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Final hidden states `[B, T, H]` of tokens `[B, T]`.

        Args:
            position_ids: `[B, T]`; positions that restart at 0 mark document borders, and attention is cut there. On a
                device they must be below the tokens seen so far, these included.
            cache: keys and values of earlier tokens; extended by this call. Positions continue from it.
        """
        t, begin = input_ids.shape[1], 0 if cache is None else cache.length
        cos, sin, starts = self._positions(begin, begin + t, position_ids, input_ids.device)
        trains = self.training and cache is None
        how = self.activation_checkpointing if trains else "none"
        fp8 = fp8_ops.WIDE if trains and self.precision == "fp8" else 0
        context = Context(cos, sin, starts, cache, recompute=how == "selective", fp8=fp8)
        x = self.model(input_ids, context, recompute=how == "full")
        if cache is not None:
            cache.length += t
        return x

    def _positions(
        self, begin: int, end: int, position_ids: Tensor | None, device: genesis.Device
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """cos and sin of the tokens' positions, and where each token's document starts (None for one document)."""
        if device.type != "cpu":
            if position_ids is None:
                return *self._rotary.span(begin, end, device), None
            ids = position_ids.to(device=device)
            return *self._rotary.at(ids, end), genesis.arange(begin, end, device=device) - ids
        if position_ids is None:
            return *self._rotary(np.arange(begin, end), device), None
        positions = position_ids.numpy()
        return *self._rotary(positions, device), genesis.from_numpy(np.arange(begin, end) - positions)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Logits `[B, T, V]`."""
        return F.linear(self.hidden_states(input_ids, position_ids, cache), self.head_weight)

    def loss(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        num_targets: int | Tensor | None = None,
    ) -> Tensor:
        """Next-token cross entropy: position t predicts `labels[:, t + 1]`; the logits never exist whole.

        Args:
            labels: `[B, T]`, -100 where there is nothing to predict.
            num_targets: what the summed loss is divided by; the number of targets in this batch unless given.
        """
        return F.linear_cross_entropy(
            self.hidden_states(input_ids, position_ids), self.head_weight, labels, shift=1, num_targets=num_targets
        )
