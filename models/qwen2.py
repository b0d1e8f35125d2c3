"""Qwen2 and Qwen2.5: biases on queries, keys and values; sliding windows on the layers that the config names."""

from __future__ import annotations

from genesis_models.blocks import Attention, CausalLM
from genesis_models.config import ModelConfig

__all__ = ["Qwen2ForCausalLM"]


class Qwen2ForCausalLM(CausalLM):
    """`model_type: qwen2` (Yang et al., "Qwen2.5 Technical Report", 2024)."""

    def make_attention(self, config: ModelConfig, layer: int) -> Attention:
        return Attention(config, layer, bias=True, out_bias=False, qk_norm=False)
