"""Tensors of more than 2^31 elements on a GPU: elementwise, reductions, indexing."""

from __future__ import annotations

import numpy as np
import pytest

import genesis

pytestmark = pytest.mark.gpu

COUNT = (1 << 31) + 1_000_003  # odd, and past what an int32 can count
EDGES = (0, (1 << 31) - 5, (1 << 31), COUNT - 7)


def ramp() -> genesis.Tensor:
    """0, 1, 2, … modulo 2^8, as uint8."""
    return genesis.arange(256, device="cuda").to(genesis.uint8).repeat(COUNT // 256 + 1)[:COUNT]


def check(values: genesis.Tensor, expected: np.ndarray | None = None, step: int = 0) -> None:
    """Windows at the edges of the int32 range hold (index + step) modulo 256."""
    for start in EDGES:
        window = values[start : start + 7].numpy()
        wanted = ((np.arange(start, start + len(window)) + step) % 256).astype(np.uint8)
        assert np.array_equal(window, wanted if expected is None else expected), start


def test_elementwise() -> None:
    x = ramp()
    check(x)
    check(x + 1, step=1)
    pair = x[: COUNT // 2 * 2].reshape(2, -1).T  # strides of more than 2^30
    assert np.array_equal((pair + 0)[-3:].numpy(), pair[-3:].numpy())


def test_reduction() -> None:
    x = ramp()
    whole, rest = divmod(COUNT, 256)
    assert x.sum(dtype=genesis.int64).item() == whole * (255 * 128) + rest * (rest - 1) // 2
    assert x.amax().item() == 255
    ones = genesis.ones(COUNT, dtype=genesis.bfloat16, device="cuda")
    assert ones.sum(dtype=genesis.float32).item() == pytest.approx(COUNT, rel=1e-6)
    marked = x.clone()
    marked[:] = 0
    marked[COUNT - 2] = 9
    assert marked.argmax().item() == COUNT - 2


def test_indexing() -> None:
    x = ramp()
    picks = np.array([0, (1 << 31) - 1, 1 << 31, (1 << 31) + 77, COUNT - 1, 12345])
    index = genesis.tensor(picks, device="cuda")
    assert np.array_equal(x[index].numpy(), (picks % 256).astype(np.uint8))
    assert np.array_equal(x.index_select(0, index).numpy(), (picks % 256).astype(np.uint8))
    x[index] = genesis.tensor(np.full(len(picks), 200, np.uint8), device="cuda")
    assert np.array_equal(x[index].numpy(), np.full(len(picks), 200, np.uint8))
    kept = x[x == 201]
    assert kept.numel() == COUNT // 256 + (COUNT % 256 > 201) - int((picks % 256 == 201).sum())
