"""Adapters: LoRA, rsLoRA and DoRA of a linear layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.errors import ShapeError, UsageError
from genesis.nn import functional as F
from genesis.random import Generator

KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}


def adapter(kind: str, trained: bool = True, dropout: float = 0.0) -> tuple[nn.Linear, nn.LoRALinear]:
    """A linear layer and an adapter of it; `trained`: B is not 0."""
    genesis.manual_seed(3)
    linear = nn.Linear(12, 10)
    layer = nn.LoRALinear.from_linear(linear, r=3, alpha=6, dropout=dropout, **KINDS[kind])
    if trained:
        nn.init.normal_(layer.lora_B.weight)
    return linear, layer


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_begins_as_its_layer_and_ends_as_its_merged_weight(kind: str) -> None:
    x = genesis.randn(5, 12)
    linear, layer = adapter(kind, trained=False)
    np.testing.assert_allclose(layer(x).detach().numpy(), linear(x).detach().numpy(), atol=1e-6)
    linear, layer = adapter(kind)
    merged = F.linear(x, layer.merged_weight(), layer.bias)
    assert not np.allclose(merged.detach().numpy(), linear(x).detach().numpy(), atol=0.1)
    np.testing.assert_allclose(layer(x).detach().numpy(), merged.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_adapter_learns(kind: str) -> None:
    linear, layer = adapter(kind)
    assert layer.weight is linear.weight and layer.bias is linear.bias  # no second copy in memory
    layer(genesis.randn(5, 12)).sum().backward()
    learning = {name for name, p in layer.named_parameters() if p.grad is not None}
    assert learning == {name for name, p in layer.named_parameters() if p.requires_grad}
    expected = {"lora_A.weight", "lora_B.weight"}
    assert learning == expected | ({"lora_magnitude_vector.weight"} if kind == "dora" else set())


def test_the_scale_is_alpha_over_the_rank_or_its_root() -> None:
    assert nn.LoRALinear(4, 4, r=4, alpha=8).scaling == 2
    assert nn.LoRALinear(4, 4, r=4, alpha=8, use_rslora=True).scaling == 4


def test_a_starts_uniform_and_follows_its_generator() -> None:
    a = nn.LoRALinear(64, 8, r=16, alpha=1, generator=Generator(5)).lora_A.weight.detach().numpy()
    b = nn.LoRALinear(64, 8, r=16, alpha=1, generator=Generator(5)).lora_A.weight.detach().numpy()
    np.testing.assert_array_equal(a, b)
    assert 0.9 < np.abs(a).max() * math.sqrt(64) <= 1


def test_the_magnitude_of_a_low_precision_layer_is_float32() -> None:
    layer = nn.LoRALinear(16, 16, False, r=4, alpha=8, use_dora=True, dtype="bfloat16")
    assert layer.lora_A.weight.dtype is layer.lora_B.weight.dtype is genesis.bfloat16
    assert layer.lora_magnitude_vector is not None
    assert layer.lora_magnitude_vector.weight.dtype is genesis.float32
    x = genesis.randn(3, 16).to("bfloat16")
    expected = F.linear(x, layer.weight).numpy()
    np.testing.assert_array_equal(layer(x).detach().numpy(), expected)  # c is exactly 1


def test_dropout_acts_on_the_low_rank_path_in_training_alone() -> None:
    linear, layer = adapter("lora", trained=False, dropout=0.5)
    x = genesis.randn(5, 12)
    np.testing.assert_array_equal(layer(x).detach().numpy(), linear(x).detach().numpy())
    _, layer = adapter("lora", dropout=0.5)
    assert not np.array_equal(layer(x).detach().numpy(), layer(x).detach().numpy())
    layer.eval()
    np.testing.assert_array_equal(layer(x).detach().numpy(), layer(x).detach().numpy())


def test_an_adapter_refuses_a_rank_of_0_and_a_dropout_of_1() -> None:
    with pytest.raises(ShapeError, match="rank r of an adapter is 0"):
        nn.LoRALinear(4, 4, r=0, alpha=1)
    with pytest.raises(UsageError, match="dropout of an adapter is 1"):
        nn.LoRALinear(4, 4, r=1, alpha=1, dropout=1.0)
