"""Llama 2 and 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024): biases only if the config enables them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from genesis_models.blocks import CausalLM, PreNormLayer
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


class LlamaForCausalLM(CausalLM):
    """Embedding, layers, norm and head."""

    make_layer = PreNormLayer
