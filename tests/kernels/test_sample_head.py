"""Draws from hidden states in bfloat16: the reference's tokens, in proportion to their probabilities, in any batch."""

from __future__ import annotations

import numpy as np

from genesis.array import Array, empty
from genesis.backend import Device, backend_for
from genesis.dtypes import DType, bfloat16, float64, int64
from genesis.ops.sample_head import sample_head

CUDA = Device("cuda", 0)


def on_gpu(values: np.ndarray, dtype: DType) -> Array:
    array = empty(values.shape, dtype, CUDA)
    backend_for(CUDA).from_numpy(np.ascontiguousarray(values), array)
    return array


def test_tokens_of_the_reference_alone_and_together() -> None:
    rng, rows, classes, width = np.random.default_rng(0), 40, 400, 136
    hidden = on_gpu(rng.normal(size=(rows, width)), bfloat16)
    weight = on_gpu(rng.normal(size=(classes, width)) / 4, bfloat16)
    keys, settings = rng.integers(0, 99, (rows, 3)), np.ones((rows, 4))
    settings[:, 0] = rng.choice([0, 0.5, 1.0, 2.0], rows)
    tokens, log_probs = (x.numpy() for x in sample_head(hidden, weight, on_gpu(keys, int64), on_gpu(settings, float64)))
    wide = hidden.numpy().astype(np.float32), weight.numpy().astype(np.float32)
    want = np.empty(rows, np.int64), np.empty(rows, np.float32)
    sample_head.reference(want, *wide, keys, settings)
    np.testing.assert_array_equal(tokens, want[0])
    np.testing.assert_allclose(log_probs, want[1], atol=2e-5)
    for row in (0, 39):
        one = on_gpu(wide[0][row : row + 1], bfloat16)
        alone = sample_head(one, weight, on_gpu(keys[row : row + 1], int64), on_gpu(settings[row : row + 1], float64))
        assert alone[0].numpy()[0] == tokens[row]
        np.testing.assert_allclose(alone[1].numpy()[0], log_probs[row], atol=2e-5)


def test_draws_are_in_proportion() -> None:
    """20,000 draws of the reference from a distribution over three blocks: a chi-squared test at 1e-4."""
    rng, classes, count = np.random.default_rng(1), 260, 20_000
    weight = rng.normal(size=(classes, 8)).astype(np.float32)
    hidden = np.repeat(rng.normal(size=(1, 8)).astype(np.float32), count, 0)
    keys = np.stack([np.full(count, 7), np.zeros(count, np.int64), np.arange(count)], 1)
    tokens, log_probs = np.empty(count, np.int64), np.empty(count, np.float32)
    sample_head.reference((tokens, log_probs), hidden, weight, keys, np.ones((count, 4)))
    logits = hidden[0].astype(np.float64) @ weight.T.astype(np.float64)
    chances = np.exp(logits - logits.max())
    expected = count * chances / chances.sum()
    many = expected >= 5
    found = np.bincount(tokens, minlength=classes)
    statistic = float(((found - expected)[many] ** 2 / expected[many]).sum())
    freedom = int(many.sum())
    assert freedom > 50
    assert statistic < freedom + 4 * np.sqrt(2 * freedom) + 10
