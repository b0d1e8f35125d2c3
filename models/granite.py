"""Granite 3 (IBM, "Granite 3.0 Language Models", 2024): Llama's layers with four scaling factors.

Shapes: B batch, T tokens, H hidden size, Q query heads, K key/value heads, D head size, F inner size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from genesis import Tensor
from genesis_models import blocks
from genesis_models.blocks import CausalLM, Context, PreNormLayer
from genesis_models.config import ModelConfig, Reader, family


@family("granite", "Granite 3 without experts")
@dataclass(frozen=True, slots=True)
class GraniteConfig(ModelConfig):
    """`config.json` of `model_type: granite`.

    Attributes:
        embedding_multiplier: factor of the embedded tokens.
        attention_multiplier: factor of the scores, instead of 1/√D.
        residual_multiplier: factor of the results of attention and MLP before they are added to the stream.
        logits_scaling: divisor of the logits.
    """

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float

    @classmethod
    def read(cls, reader: Reader) -> Self:
        factors = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
        return reader.config(
            cls,
            head_dim=reader.head_dim(),
            attention_bias=reader.get("attention_bias", bool, False),
            mlp_bias=reader.get("mlp_bias", bool, False),
            **{name: reader.fraction(name, 1.0, 1e6) for name in factors},
        )


class Attention(blocks.Attention):
    """Grouped-query attention whose scores are scaled by `attention_multiplier`."""

    def __init__(self, config: GraniteConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.scale = config.attention_multiplier


class DecoderLayer(PreNormLayer):
    """Attention and MLP, each applied to the normalised stream and added to it with a factor."""

    make_attention = Attention

    def __init__(self, config: GraniteConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.residual_multiplier = config.residual_multiplier

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [B, T, H]
        x = x + self.self_attn(self.input_layernorm(x), context) * self.residual_multiplier
        return x + self.mlp(self.post_attention_layernorm(x)) * self.residual_multiplier


class Decoder(blocks.Decoder):
    """All but the head. It applies the logits' factor to the hidden states, so that the head is a plain matmul."""

    def __init__(self, config: GraniteConfig, make_layer: Any) -> None:
        super().__init__(config, make_layer)
        self.embedding_multiplier, self.logits_scaling = config.embedding_multiplier, config.logits_scaling

    def embed(self, input_ids: Tensor) -> Tensor:  # [B, T]
        return self.embed_tokens(input_ids) * self.embedding_multiplier  # [B, T, H]

    def forward(self, input_ids: Tensor, context: Context) -> Tensor:  # [B, T]
        return super().forward(input_ids, context) / self.logits_scaling  # [B, T, H]


class GraniteForCausalLM(CausalLM):
    """Embedding, layers, norm and head."""

    make_layer, make_decoder = DecoderLayer, Decoder
