"""Qwen3 (Yang et al., "Qwen3 Technical Report", 2025): RMSNorm on each query and key head, an independent head size.

Shapes: B batch, T tokens, H hidden size, Q query heads, K key/value heads, D head size, F inner size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from genesis import Tensor, nn
from genesis_models import blocks
from genesis_models.blocks import CausalLM, Context, PreNormLayer
from genesis_models.config import ModelConfig, Reader, family
from genesis_models.qwen2 import size


@family("qwen3", "Qwen3 without experts")
@dataclass(frozen=True, slots=True)
class Qwen3Config(ModelConfig):
    """`config.json` of `model_type: qwen3`; it lists the layers that attend to a sliding window."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"sliding_window": 4096}

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.require(mlp_bias=False)
        return reader.config(
            cls,
            head_dim=reader.head_dim(128),
            max_position_embeddings=reader.count("max_position_embeddings", 32768),
            attention_bias=reader.get("attention_bias", bool, False),
            layer_windows=reader.windows(),
        )


class Attention(blocks.Attention):
    """Grouped-query attention; each query and key head is normalised before it is rotated."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def placed(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        return context.rope(self.q_norm(q)), context.rope(self.k_norm(k))


class DecoderLayer(PreNormLayer):
    """Attention and MLP, each applied to the normalised stream and added to it."""

    make_attention = Attention


OWN = {  # in addition to the keys of Qwen2
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "attention_bias": False,
}


class Qwen3ForCausalLM(CausalLM):
    """Embedding, layers, norm and head."""

    make_layer = DecoderLayer
    presets: ClassVar = {
        "qwen3-0.6B": size(1024, 3072, 28, 16, 8, True, **OWN),
        "qwen3-1.7B": size(2048, 6144, 28, 16, 8, True, **OWN),
        "qwen3-4B": size(2560, 9728, 36, 32, 8, True, **OWN),
        "qwen3-8B": size(4096, 12288, 36, 32, 8, False, **OWN),
    }
