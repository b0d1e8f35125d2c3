"""Qwen2 and Qwen2.5 (Yang et al., "Qwen2.5 Technical Report", 2024): biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from genesis_models.blocks import Attention, CausalLM, PreNormLayer
from genesis_models.config import ModelConfig, Reader, family


@family("qwen2", "Qwen2, Qwen2.5")
@dataclass(frozen=True, slots=True)
class Qwen2Config(ModelConfig):
    """`config.json` of `model_type: qwen2`; it lists the layers that attend to a sliding window."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"sliding_window": 4096}

    @classmethod
    def read(cls, reader: Reader) -> Self:
        reader.require(mlp_bias=False)
        return reader.config(
            cls,
            head_dim=reader.head_dim(),
            max_position_embeddings=reader.count("max_position_embeddings", 32768),
            attention_bias=reader.get("attention_bias", bool, False),
            layer_windows=reader.windows(),
        )


class DecoderLayer(PreNormLayer):
    """Attention and MLP, each applied to the normalised stream and added to it."""

    make_attention = staticmethod(partial(Attention, bias=True, out_bias=False))


def size(hidden: int, inner: int, layers: int, heads: int, kv: int, tied: bool, **own: Any) -> dict[str, Any]:
    """Return the config of a published size of Qwen2, or of Qwen3 with the keys in `own`."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936 if hidden < 3584 else 152064,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_act": "silu",
        "max_position_embeddings": 32768 if hidden < 3584 else 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        **own,
    }


class Qwen2ForCausalLM(CausalLM):
    """Embedding, layers, norm and head."""

    make_layer = DecoderLayer
    presets: ClassVar = {
        "0.5B": size(896, 4864, 24, 14, 2, True),
        "1.5B": size(1536, 8960, 28, 12, 2, True),
        "3B": size(2048, 11008, 36, 16, 2, True),
        "7B": size(3584, 18944, 28, 28, 4, False),
    }
