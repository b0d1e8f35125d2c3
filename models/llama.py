"""Llama 2 and 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024): no biases unless the config asks for them.

Shapes: B batch, T tokens, H hidden size, Q query heads, K key/value heads, D head size, F inner size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from genesis import Tensor, nn
from genesis_models.blocks import MLP, Attention, CausalLM, Context
from genesis_models.config import ModelConfig, Reader, family


@family("llama", "Llama, SmolLM2, TinyLlama")
@dataclass(frozen=True, slots=True)
class LlamaConfig(ModelConfig):
    """`config.json` of `model_type: llama`; Llama 3.1 stretches the rotary frequencies (`rope_type: llama3`)."""

    @classmethod
    def read(cls, reader: Reader) -> Self:
        return reader.config(
            cls,
            head_dim=reader.head_dim(),
            max_position_embeddings=reader.count("max_position_embeddings", 2048),
            attention_bias=reader.get("attention_bias", bool, False),
            mlp_bias=reader.get("mlp_bias", bool, False),
        )


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised stream and added to it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, bias=config.attention_bias, out_bias=config.attention_bias)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [B, T, H]
        x = x + self.self_attn(self.input_layernorm(x), context)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(CausalLM):
    """Embedding, layers, norm and head."""

    make_layer = DecoderLayer
