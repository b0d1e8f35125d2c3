"""SmolLM3 (Bakouch et al., "SmolLM3", 2025): every fourth layer has no rotary positions (NoPE).

Shapes: B batch, T tokens, H hidden size, Q query heads, K key/value heads, D head size, F inner size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from genesis import Tensor
from genesis_models import blocks
from genesis_models.blocks import CausalLM, Context, PreNormLayer
from genesis_models.config import ModelConfig, Reader, family


@family("smollm3", "SmolLM3")
@dataclass(frozen=True, slots=True)
class SmolLM3Config(ModelConfig):
    """`config.json` of `model_type: smollm3`.

    Attributes:
        layer_ropes: for each layer, whether it rotates queries and keys: from `no_rope_layers` (1 means that it does),
            otherwise all except every `no_rope_layer_interval`-th.
    """

    layer_ropes: tuple[bool, ...]

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
    }

    @classmethod
    def read(cls, reader: Reader) -> Self:
        interval = reader.get("no_rope_layer_interval", int, 4)
        if interval < 1:
            raise reader.fail(f"no_rope_layer_interval is {interval}, expected at least 1")
        layers = range(1, reader.count("num_hidden_layers") + 1)
        ropes = reader.by_layer("no_rope_layers", (0, 1), [int(i % interval != 0) for i in layers])
        has_window = reader.get("use_sliding_window", bool, False) and reader.raw.get("sliding_window") is not None
        windows = ["full_attention" if rope or not has_window else "sliding_attention" for rope in ropes]
        return reader.config(
            cls,
            head_dim=reader.head_dim(),
            attention_bias=reader.get("attention_bias", bool, False),
            mlp_bias=reader.get("mlp_bias", bool, False),
            layer_windows=reader.windows(windows),
            layer_ropes=tuple(map(bool, ropes)),
        )


class Attention(blocks.Attention):
    """Grouped-query attention with or without rotary positions."""

    def __init__(self, config: SmolLM3Config, layer: int) -> None:
        super().__init__(config, layer)
        self.use_rope = config.layer_ropes[layer]

    def placed(self, q: Tensor, k: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        return (context.rope(q), context.rope(k)) if self.use_rope else (q, k)


class DecoderLayer(PreNormLayer):
    """Attention and MLP, each applied to the normalised stream and added to it."""

    make_attention = Attention


class SmolLM3ForCausalLM(CausalLM):
    """Embedding, layers, norm and head."""

    make_layer = DecoderLayer
