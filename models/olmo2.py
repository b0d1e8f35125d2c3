"""OLMo 2 (Team OLMo, "2 OLMo 2 Furious", 2024): norms after the blocks, and one RMSNorm over all heads.

Shapes: B batch, T tokens, H hidden size, Q query heads, K key/value heads, D head size, F inner size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from genesis import Tensor, nn
from genesis_models import blocks
from genesis_models.blocks import MLP, CausalLM, Context
from genesis_models.config import ModelConfig, Reader, family


@family("olmo2", "OLMo 2")
@dataclass(frozen=True, slots=True)
class Olmo2Config(ModelConfig):
    """`config.json` of `model_type: olmo2`."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5}

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.require(mlp_bias=False, clip_qkv=None, sliding_window=None)
        bias = reader.get("attention_bias", bool, False)
        return reader.config(cls, head_dim=reader.head_dim(), attention_bias=bias)


class Attention(blocks.Attention):
    """Grouped-query attention; the queries of all heads are normalised together, and so are the keys."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = nn.RMSNorm(self.heads * self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.key_heads * self.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [B, T, H]
        q = self.q_norm(self.q_proj(x)).unflatten(-1, (-1, self.head_dim))  # [B, T, Q, D]
        k = self.k_norm(self.k_proj(x)).unflatten(-1, (-1, self.head_dim))  # [B, T, K, D]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [B, T, K, D]
        q, k = context.rope(q), context.rope(k)
        o = context.attention(q, k, v, self.layer, self.window, self.scale)  # [B, T, Q, D]
        return self.o_proj(o.flatten(-2))


class DecoderLayer(nn.Module):
    """Attention and MLP on the unnormalised stream; their results are normalised and added to it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_feedforward_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [B, T, H]
        x = x + self.post_attention_layernorm(self.self_attn(x, context))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Olmo2ForCausalLM(CausalLM):
    """Embedding, layers, norm and head."""

    make_layer = DecoderLayer
