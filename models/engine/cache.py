"""The engine's KV cache on the CPU: one array `[L, 2, B, K, S, D]`, a row of B for each sequence, written in place.

Shapes: L layers, B rows, S capacity, T tokens, Q query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import genesis
from genesis import Tensor
from genesis.nn import functional as F
from genesis_models.blocks import LayerCache, Tables
from genesis_models.config import ModelConfig
from genesis_models.rope import Rotary


class RowCache:
    """Keys and values of sequences of unequal length. What is behind a row's length is never read.

    Args:
        rows, capacity: sequences at a time, and the most tokens of each.

    Attributes:
        data: `[L, 2, B, K, S, D]`, keys and values.
        lengths: tokens of each row.
    """

    def __init__(self, config: ModelConfig, rows: int, capacity: int, dtype: genesis.DType) -> None:
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, capacity, config.head_dim)
        self._tensor = genesis.empty(shape, dtype=dtype)
        self.data = self._tensor.numpy()
        self.lengths = np.zeros(rows, np.int64)
        self.capacity = capacity

    def at(self, rows: np.ndarray, totals: Sequence[int] | None = None) -> CacheRows:
        """The cache of one forward pass of the sequences in `rows`.

        Args:
            totals: the lengths that rotary angles are for, where they depend on it: a prompt's in each of its chunks.
        """
        return CacheRows(self, rows, totals)


class CacheRows(LayerCache):
    """Some rows of a `RowCache`, to which a forward pass appends T tokens each."""

    def __init__(self, cache: RowCache, rows: np.ndarray, totals: Sequence[int] | None) -> None:
        self._cache, self._rows, self._totals = cache, rows, totals
        self._lengths = cache.lengths[rows]

    def tables(self, rotaries: Sequence[Rotary], t: int) -> Tables:
        """cos and sin `[B, T, D/2]` of the next T positions of each row."""
        positions = self._lengths[:, None] + np.arange(t)  # [B, T]
        return [rotary.rows(positions, self._totals) for rotary in rotaries]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, layer: int, window: int, scale: float
    ) -> Tensor:
        """Append k, v `[B, T, K, D]`; attention of q `[B, T, Q, D]` over each row's keys so far."""
        t, (keys, values) = q.shape[1], self._cache.data[layer]
        found = []
        for i, (row, begin) in enumerate(zip(self._rows.tolist(), self._lengths.tolist(), strict=True)):
            end = begin + t
            keys[row, :, begin:end] = k[i].numpy().swapaxes(0, 1)
            values[row, :, begin:end] = v[i].numpy().swapaxes(0, 1)
            low = max(0, begin + 1 - window) if window else 0
            seen = [genesis.from_numpy(x[row, :, low:end].swapaxes(0, 1)[None]) for x in (keys, values)]
            found.append(F.attention(q[i : i + 1], *seen, scale=scale, causal=True, window=window))
        return found[0] if len(found) == 1 else genesis.cat(found, 0)

    def advance(self, t: int) -> None:
        """T more tokens are in each row."""
        self._cache.lengths[self._rows] += t
