"""Phi-3 and Phi-4 (Abdin et al., "Phi-3 Technical Report", 2024): one matrix for queries, keys and values, and one for
gate and up.

Shapes: B batch, T tokens, H hidden size, Q query heads, K key/value heads, D head size, F inner size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from genesis import Tensor, nn
from genesis_models.blocks import CausalLM, Context, PreNormLayer
from genesis_models.config import ModelConfig, Reader, family

ROPE_KINDS = {
    "default": "default",
    "longrope": "longrope",
    "su": "longrope",
    "yarn": "longrope",
}  # names in older configs


@family("phi3", "Phi-3 and Phi-3.5 mini and medium, Phi-4, Phi-4-mini")
@dataclass(frozen=True, slots=True)
class Phi3Config(ModelConfig):
    """`config.json` of `model_type: phi3`; long versions use `longrope`, and Phi-4-mini rotates a part of each head."""

    ROTATES_PARTS: ClassVar[bool] = True
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.require(attention_bias=False, mlp_bias=False)
        head_dim = reader.head_dim()
        rope = reader.rope(head_dim, ROPE_KINDS, rotates_parts=True)
        return reader.config(cls, head_dim=head_dim, rope=rope, layer_windows=reader.same_windows())


class Attention(nn.Module):
    """Grouped-query attention that rotates the first values of each head, or all of them."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.window = layer, config.layer_windows[layer]
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.scale = config.head_dim, 1 / math.sqrt(config.head_dim)
        self.rotary_dim = config.rotary_dim
        width = (self.heads + 2 * self.key_heads) * self.head_dim
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.qkv_proj = nn.Linear(config.hidden_size, width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [B, T, H]
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, Q + 2·K, D]
        q, k, v = qkv.split([self.heads, self.key_heads, self.key_heads], 2)
        q, k = context.rope_part(q, self.rotary_dim), context.rope_part(k, self.rotary_dim)
        o = context.attention(q, k, v, self.layer, self.window, self.scale)  # [B, T, Q, D]
        return self.o_proj(o.flatten(-2))


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:  # [B, T, H]
        gate, up = self.gate_up_proj(x).chunk(2, -1)  # [B, T, F] each
        return self.down_proj(self.act_fn(gate) * up)


class DecoderLayer(PreNormLayer):
    """Attention and MLP, each applied to the normalised stream and added to it."""

    make_attention, make_mlp = Attention, MLP


class Phi3ForCausalLM(CausalLM):
    """Embedding, layers, norm and head."""

    make_layer = DecoderLayer
