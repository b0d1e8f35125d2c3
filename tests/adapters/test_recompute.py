"""Adapters with dropout under activation checkpointing."""

from __future__ import annotations

import numpy as np
import pytest

import genesis
from genesis import nn, random
from genesis_models.adapters import AdapterConfig, apply_adapters
from genesis_models.registry import build

SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("use_dora", [False, True])
def test_what_is_recomputed_drops_the_same_elements(use_dora: bool) -> None:
    """To the bit: the noise is drawn again, not kept."""
    found = []
    for how in ("none", "selective", "full"):
        random.manual_seed(1)
        config = AdapterConfig(r=4, alpha=8.0, target_modules="all-linear", dropout=0.3, use_dora=use_dora)
        model = apply_adapters(build(SHAPE, 3), config).train()
        for module in model.modules():
            if isinstance(module, nn.LoRALinear):
                nn.init.normal_(module.lora_B.weight, std=0.1)
        model.activation_checkpointing = how
        random.manual_seed(5)
        ids = genesis.tensor(np.arange(32).reshape(2, 16))
        loss = model.loss(ids, ids)
        loss.backward()
        gradients = {n: p.grad.numpy().tobytes() for n, p in model.named_parameters() if p.grad is not None}
        assert set(gradients) == {n for n, p in model.named_parameters() if p.requires_grad}
        found.append((loss.item(), gradients, random.get_state()))
    assert found[0] == found[1] == found[2]
