"""Mistral (Jiang et al., "Mistral 7B", 2023): Llama's layers, and all of them attend to a sliding window.

Shapes: B batch, T tokens, H hidden size, Q query heads, K key/value heads, D head size, F inner size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from genesis import Tensor, nn
from genesis_models.blocks import MLP, Attention, CausalLM, Context
from genesis_models.config import ModelConfig, Reader, family


@family("mistral", "Mistral 7B, Mistral Nemo")
@dataclass(frozen=True, slots=True)
class MistralConfig(ModelConfig):
    """`config.json` of `model_type: mistral`; `sliding_window: null` (from version 0.2 on) means that all is seen."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.require(attention_bias=False, mlp_bias=False)
        return reader.config(cls, head_dim=reader.head_dim(), layer_windows=reader.same_windows())


class DecoderLayer(nn.Module):
    """Attention and MLP, each on the normalised stream and added to it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, bias=False, out_bias=False)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:  # [B, T, H]
        x = x + self.self_attn(self.input_layernorm(x), context)
        return x + self.mlp(self.post_attention_layernorm(x))


class MistralForCausalLM(CausalLM):
    """Embedding, layers, norm and head."""

    make_layer = DecoderLayer
