"""Leaves take their gradients as soon as these are whole, so that no backward pass keeps them all until its end."""

from __future__ import annotations

import numpy as np

import genesis
from genesis.backend.cpu import pool
from genesis.optim.flat import FlatBuffers

LAYERS, SIZE = 8, 1024  # gradients that the pool counts


def test_a_leaf_does_not_wait_for_the_nodes_below_it() -> None:
    """In the second pass, too, for which the leaf was seen before all other nodes."""
    weight, x = genesis.tensor([2.0], requires_grad=True), genesis.tensor([3.0], requires_grad=True)
    for _ in range(2):
        seen: list[str] = []
        weight._post_hooks = (lambda leaf, seen=seen: seen.append("weight"),)
        below = x.exp()
        below.register_hook(lambda g, seen=seen: seen.append("below"))
        middle = below.sin()
        (middle * weight).sum().backward()
        assert seen == ["weight", "below"]


def test_gradients_that_are_wider_than_weights_are_not_kept_twice() -> None:
    weights = [genesis.tensor(np.eye(SIZE), dtype="bfloat16", requires_grad=True) for _ in range(LAYERS)]
    flat = FlatBuffers(weights, grad_dtype=genesis.float32)
    assert flat.gradients.dtype is genesis.float32
    grown = []
    for _ in range(2):
        x = genesis.ones(1, SIZE, dtype="bfloat16")
        for weight in weights:
            x = x @ weight
        before = pool.allocated
        pool.max_allocated = pool.allocated
        x.sum().backward()
        grown.append(pool.max_allocated - before)
    assert max(grown) < 4 * SIZE * SIZE * 2  # of LAYERS gradients
    assert all(w.grad is not None for w in weights)
