"""Mistral (Jiang et al., "Mistral 7B", 2023): Llama's layers, all with a sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from genesis_models.blocks import CausalLM, PreNormLayer
from genesis_models.config import ModelConfig, Reader, family


@family("mistral", "Mistral 7B, Mistral Nemo")
@dataclass(frozen=True, slots=True)
class MistralConfig(ModelConfig):
    """`config.json` of `model_type: mistral`; `sliding_window: null` (from version 0.2 on) attends to all keys."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.require(attention_bias=False, mlp_bias=False)
        return reader.config(cls, head_dim=reader.head_dim(), layer_windows=reader.same_windows())


class MistralForCausalLM(CausalLM):
    """Embedding, layers, norm and head."""

    make_layer = PreNormLayer
