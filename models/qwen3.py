"""Qwen3: RMSNorm on each query and key head instead of biases; a head size of its own."""

from __future__ import annotations

from genesis_models.blocks import Attention, CausalLM
from genesis_models.config import ModelConfig

__all__ = ["Qwen3ForCausalLM"]


class Qwen3ForCausalLM(CausalLM):
    """`model_type: qwen3` (Yang et al., "Qwen3 Technical Report", 2025)."""

    def make_attention(self, config: ModelConfig, layer: int) -> Attention:
        return Attention(config, layer, bias=config.attention_bias, out_bias=config.attention_bias, qk_norm=True)
