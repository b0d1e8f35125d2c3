"""A small model with tied weights trained by each implementation: the same weights to the bit, and it learns."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import genesis.nn as nn
from genesis import optim
from genesis.backend.cpu import pool
from genesis.functions.create import tensor
from genesis.nn import functional as F
from genesis.random import manual_seed
from genesis.tensor import Tensor


class Model(nn.Module):
    """Embedding, attention, gated MLP, head tied to the embedding."""

    def __init__(self, width: int = 16, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.norm = nn.RMSNorm(width)
        self.attention = nn.Attention(width, 4, 2)
        self.gate, self.up, self.down = (nn.Linear(width, width) for _ in range(3))
        self.unused = nn.Linear(2, 2)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)

    def loss(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        x = x + self.attention(self.norm(x))
        x = x + self.down(F.swiglu(self.gate(x), self.up(x)))
        return F.linear_cross_entropy(self.norm(x)[:, :-1], self.embed_tokens.weight, ids[:, 1:])


IDS = np.random.default_rng(0).integers(0, 11, (4, 9))


def train(steps: int, accumulate: int = 1, dtype: str = "float32", **kind: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses, and the weights at the end in float64."""
    manual_seed(1)
    model = Model().to(dtype=dtype)
    groups = optim.decay_groups(model.named_parameters(), 0.1)
    optimizer = optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), **kind)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part in np.split(IDS, accumulate):
            loss = model.loss(tensor(part)) / accumulate
            loss.backward()
            total += loss.item()
        losses.append(total)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.item() > 0
        optimizer.step()
    return losses, {n: p.detach().double().numpy().copy() for n, p in model.named_parameters()}


KINDS: dict[str, dict[str, Any]] = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_implementations_give_the_same_weights(accumulate: int, dtype: str) -> None:
    found = {name: train(5, accumulate, dtype, **kind)[1] for name, kind in KINDS.items()}
    for name, weights in found["plain"].items():
        np.testing.assert_array_equal(found["foreach"][name], weights, err_msg=name)
        np.testing.assert_array_equal(found["fused"][name], weights, err_msg=name)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("AdamW", {"lr": 1e-2}),
        ("Muon", {"lr": 1e-2, "adjust_lr_fn": "match_rms_adamw"}),
        pytest.param("Adam", {"lr": 1e-2}, marks=pytest.mark.full),
        pytest.param("SGD", {"lr": 0.3, "momentum": 0.9, "nesterov": True}, marks=pytest.mark.full),
        pytest.param("Lion", {"lr": 3e-3}, marks=pytest.mark.full),
        pytest.param("Adafactor", {"lr": 1e-1}, marks=pytest.mark.full),
    ],
)
def test_every_optimizer_learns_the_batch(optimizer: str, settings: dict[str, Any]) -> None:
    """Random tokens, 4 rows of 8 targets: log 11 = 2.4 nats without learning, about 0 when learnt by heart."""
    manual_seed(1)
    model = Model()
    groups = optim.muon_groups(model.named_parameters(), 0.0)
    if optimizer != "Muon":
        groups = [{"params": [p for g in groups for p in g["params"]]}]
    made = getattr(optim, optimizer)(groups, fused=True, **settings)
    for _ in range(120):
        made.zero_grad()
        loss = model.loss(tensor(IDS))
        loss.backward()
        made.step(grad_scale=nn.utils.clip_scale(made.grad_norm(), 1.0))
    assert loss.item() < 0.3
    assert model.unused.weight.grad is None


def test_training_loses_no_memory() -> None:
    """Gradients live in their flat buffer: the pool holds as much after 30 steps as after 5."""
    gc.collect()  # what earlier tests left must not be freed in between
    manual_seed(1)
    model = Model()
    optimizer = optim.AdamW(model.parameters(), fused=True)
    held = []
    for _ in range(30):
        optimizer.zero_grad()
        model.loss(tensor(IDS)).backward()
        optimizer.step()
        held.append(pool.allocated)
    assert len(set(held[4:])) == 1
