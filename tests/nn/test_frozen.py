"""What is frozen costs nothing: no gradient, no work for one, no optimizer state."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import nn
from genesis.nn import functional as F
from genesis.nn import fused
from genesis.op import observe
from genesis.optim import AdamW
from genesis.optim.states import decay_groups


def head_and_states() -> tuple[nn.Embedding, genesis.Tensor, genesis.Tensor]:
    genesis.manual_seed(2)
    return nn.Embedding(11, 8), genesis.randn(6, 8).requires_grad_(), genesis.arange(6)


def test_a_frozen_head_gives_the_same_gradient_to_what_it_reads() -> None:
    found = []
    for frozen in (False, True):
        table, x, labels = head_and_states()
        table.requires_grad_(not frozen)
        loss = F.linear_cross_entropy(x, table.weight, labels)
        loss.backward()
        assert (table.weight.grad is None) == frozen
        assert x.grad is not None
        found.append((loss.item(), x.grad.numpy()))
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert found[0][0] == found[1][0]


def test_a_frozen_embedding_that_is_also_the_head_is_not_touched_in_backward() -> None:
    table, _, ids = head_and_states()
    table.requires_grad_(False)
    scale = nn.Parameter(genesis.ones(8))
    seen: Counter[str] = Counter()
    outputs: list[int] = []

    def note(op: Any, inputs: Any, made: tuple[Any, ...], *_: Any) -> None:
        seen[op.name] += 1
        outputs.extend([len(made)] if op.name == "linear_cross_entropy" else [])

    with observe(note):
        F.linear_cross_entropy(table(ids) * scale, table.weight, ids).backward()
    assert outputs == [2]  # the loss and dx
    assert not [name for name in seen if name.startswith("embedding_")]
    assert table.weight.grad is None
    assert scale.grad is not None


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_frozen_weight_has_neither_gradient_nor_state_nor_matmul(use_dora: bool) -> None:
    layer = nn.LoRALinear(16, 12, r=2, alpha=4, use_dora=use_dora)
    optimizer = AdamW(decay_groups(layer.named_parameters(), 0.0), lr=0.1, fused=True)
    products: list[tuple[int, ...]] = []
    with observe(lambda op, i, made, *_: products.extend(o.shape for o in made if "matmul" in op.name)):
        layer(genesis.randn(5, 16)).sum().backward()
    assert (12, 16) not in products
    optimizer.step()
    assert layer.weight not in optimizer.state and layer.bias not in optimizer.state
    assert layer.weight.grad is None
    held = sum(
        value.numel() for state in optimizer.state.values() for value in state.values() if hasattr(value, "numel")
    )
    assert held == 2 * sum(p.numel() for p in layer.parameters() if p.requires_grad)  # two moments of what learns


@pytest.mark.parametrize("recompute", [False, True])
def test_a_frozen_norm_makes_no_gradient_of_its_weight(recompute: bool) -> None:
    """By itself and in fused ops, also where it gives its result again."""
    found = []
    for frozen in (False, True):
        genesis.manual_seed(4)
        norm, gate, up, down = nn.RMSNorm(8), nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)
        norm.requires_grad_(not frozen)
        x, made = genesis.randn(2, 5, 8).requires_grad_(), Counter[bool]()

        def note(op: Any, _: Any, outputs: Any, attrs: Any, *rest: Any, made: Counter[bool] = made) -> None:
            if op.name == "rms_norm_backward":
                made[len(outputs) == 2 + attrs.get("with_result", False)] += 1

        with observe(note):
            y = fused.gated_mlp(norm(x), norm, (gate, up), down, recompute)
            (y.sum() + fused.packed_linear(x, (up,), norm, recompute).sum()).backward()
        assert made == {not frozen: 3}
        assert norm.weight is not None
        assert (norm.weight.grad is None) == frozen
        assert x.grad is not None
        assert up.weight.grad is not None
        found.append((x.grad.numpy(), up.weight.grad.numpy()))
    for learned, kept in zip(*found, strict=True):
        np.testing.assert_array_equal(learned, kept)


def test_frozen_norms_of_heads_make_no_gradient_of_their_weights() -> None:
    found = []
    for frozen in (False, True):
        genesis.manual_seed(4)
        x, table = genesis.randn(2, 3, 5, 4).requires_grad_(), genesis.randn(3, 2)
        query, key = (genesis.randn(4).requires_grad_(not frozen) for _ in range(2))
        counts: list[int] = []

        def note(op: Any, _: Any, outputs: Any, *rest: Any, counts: list[int] = counts) -> None:
            counts.extend([len(outputs)] if op.name == "norm_rope_backward" else [])

        with observe(note):
            F.norm_rope(x, query, key, table.cos(), table.sin(), heads=2, key_heads=2, eps=1e-6).sum().backward()
        assert counts == [1 if frozen else 3]
        assert x.grad is not None
        found.append(x.grad.numpy())
    np.testing.assert_array_equal(*found)
