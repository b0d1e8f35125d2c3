"""Llama 2 and 3: no biases unless the config asks for them; Llama 3.1's stretched rotary frequencies."""

from __future__ import annotations

from genesis_models.blocks import Attention, CausalLM
from genesis_models.config import ModelConfig

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(CausalLM):
    """`model_type: llama` (Grattafiori et al., "The Llama 3 Herd of Models", 2024)."""

    def make_attention(self, config: ModelConfig, layer: int) -> Attention:
        return Attention(config, layer, bias=config.attention_bias, out_bias=config.attention_bias, qk_norm=False)
