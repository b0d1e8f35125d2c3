"""The engine's KV cache on a GPU: one array `[L, 2, B, K, S, D]`; the lengths of its rows are on the device.

Shapes: L layers, B rows, S capacity, T tokens, Q query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import genesis
from genesis import Tensor
from genesis.nn import functional as F
from genesis.nn import fused
from genesis.ops.attention_step import LARGEST
from genesis_models.blocks import LayerCache, PackedHeads, Rotary, Tables
from genesis_models.config import ModelConfig

GRAIN = 16  # tokens; few lengths, because a copy of keys and values is prepared once for each
KEY_BLOCK = 64  # keys per attention block; in exact mode prompts begin and are cut at its multiples


class Document(NamedTuple):
    """A prompt in a packed forward pass.

    Attributes:
        rows: rows of the cache that receive it.
        begin: offset in the pass, a multiple of the cache's grain.
    """

    rows: Sequence[int]
    ids: np.ndarray
    begin: int


class DeviceCache:
    """Keys and values of sequences of unequal length. Positions beyond a row's length are never read.

    Args:
        rows: the most concurrent sequences.
        capacity: the most tokens of each sequence.
        dtype: dtype of keys and values.
        rotaries: the model's rotary embeddings.
        exact: whether prompts begin and are cut at multiples of `KEY_BLOCK`.

    Attributes:
        data: `[L, 2, B, K, S, D]`, keys and values.
        lengths: tokens in each row, int64 `[B]`.
        left: tokens that each row may still draw; rows with 0 are inactive.
        tables: for each rotary embedding, cos and sin `[S, D/2]` of each position as a sequence's last.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        dtype: genesis.DType,
        device: genesis.Device,
        rotaries: Sequence[Rotary],
        exact: bool = False,
    ) -> None:
        self.grain = KEY_BLOCK if exact else GRAIN
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, capacity, config.head_dim)
        self.data = genesis.empty(shape, dtype=dtype, device=device)
        self.lengths, self.left = (genesis.zeros(rows, dtype="int64", device=device) for _ in range(2))
        self.rows, self.capacity, self._rotaries = rows, capacity, rotaries
        self.tables: list[tuple[Tensor, Tensor]] = []
        for cos, sin in (rotary.last(capacity) for rotary in rotaries):
            self.tables.append((genesis.tensor(cos, device=device), genesis.tensor(sin, device=device)))

    def aligned(self, length: int) -> int:
        """Return a prompt's length rounded up to the grain, which it occupies in a pass."""
        return -(-length // self.grain) * self.grain

    def packed_size(self, length: int) -> int:
        """Return the number of elements in the keys and values of `length` tokens of all layers."""
        return self.data.numel() // (self.rows * self.capacity) * length

    def packed_view(self, length: int, data: Tensor) -> Tensor:
        """Return `packed_size(T)` elements of `data` as `[L, 2, K, T, D]`."""
        layers, _, _, key_heads, _, size = self.data.shape
        return data.narrow(0, 0, self.packed_size(length)).view(layers, 2, key_heads, length, size)

    def take_over(self, documents: Sequence[Document], length: int, data: Tensor) -> None:
        """Copy each prompt's keys and values from the buffer of a pass of `length` tokens into its rows."""
        left = self.packed_view(length, data)  # [L, 2, K, T, D]
        for rows, ids, begin in documents:
            # Positions beyond a row's length are never read.
            if count := min(self.aligned(len(ids)), self.capacity, length - begin):
                for row in rows:
                    self.data[:, :, row, :, :count].copy_(left.narrow(3, begin, count))

    def copy_prompt(self, source: int, rows: Sequence[int], length: int) -> None:
        """Copy the first `length` keys and values of one row to others."""
        if count := min(self.aligned(length), self.capacity):
            for row in rows:
                self.data[:, :, row, :, :count].copy_(self.data[:, :, source, :, :count])

    def is_stretched(self, total: int) -> bool:
        """Whether the rotary angles of a sequence depend on its own length `total`."""
        return any(rotary.is_stretched(total) for rotary in self._rotaries)


class _PassCache(LayerCache):
    """The cache of one forward pass; it does not count tokens."""

    def advance(self, t: int) -> None:
        """Do nothing: prefill sets the lengths, and the op `next_tokens` advances them."""


class PromptCache(_PassCache):
    """A row of a `DeviceCache` to which a forward pass appends a part of a prompt.

    Args:
        begin: start of the part in the prompt.
        total: length of the prompt, on which rotary angles may depend.
    """

    def __init__(self, cache: DeviceCache, row: int, begin: int, total: int) -> None:
        self._cache, self._at, self._begin, self._total = cache, row, begin, total

    def tables(self, rotaries: Sequence[Rotary], t: int) -> Tables:
        """Return cos and sin `[T, D/2]` of the part."""
        end, found = self._begin + t, list[tuple[Tensor, Tensor]]()
        for rotary, (cos, sin) in zip(rotaries, self._cache.tables, strict=True):
            if rotary.is_stretched(self._total):
                positions = np.minimum(
                    np.arange(self._begin, end), self._total - 1
                )  # positions beyond the end are padding
                device, of_total = cos.device, rotary.rows(positions[None], [self._total])
                cos, sin = (each[0].to(device=device) for each in of_total)
            else:
                cos, sin = cos.narrow(0, self._begin, t), sin.narrow(0, self._begin, t)
            found.append((cos, sin))
        return found

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, layer: int, window: int, scale: float
    ) -> Tensor:
        """Append k, v `[1, T, K, D]`, and return attention of q `[1, T, Q, D]` over the prompt's keys so far."""
        for kept, new in zip(self._row(layer, self._begin, q.shape[1]), (k, v), strict=True):
            _store(kept, new[0].transpose(0, 1))
        return self._attend(q, k, v, layer, window, scale)

    def attention_packed(self, qkv: Tensor, form: PackedHeads, starts: Tensor | None, tables: Tables) -> Tensor:
        """Do the same with `[1, T, Q + 2·K, D]`; one copy stores keys and values."""
        qkv = form.prepared(qkv, tables)
        _store(self._row(form.layer, self._begin, qkv.shape[1]), _by_head(qkv, form))
        return self._attend(*form.split(qkv), form.layer, form.window, form.scale)

    def _row(self, layer: int, begin: int, count: int) -> Tensor:
        """Return keys and values of some positions of the row, `[2, K, count, D]`."""
        return self._cache.data[layer, :, self._at].narrow(2, begin, count)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int, scale: float) -> Tensor:
        """Return attention over k and v, and over the row's earlier keys and values."""
        if self._begin:
            low = max(0, self._begin + 1 - window) // self._cache.grain * self._cache.grain if window else 0
            seen = self._row(layer, low, self._begin + q.shape[1] - low).transpose(1, 2).to(q.dtype)  # [2, n, K, D]
            k, v = seen[0:1], seen[1:2]
        return F.attention(q, k, v, scale=scale, causal=True, window=window)


class PackedCache(_PassCache):
    """Keys and values of packed prompts in one forward pass; they are copied to the prompts' rows afterwards.

    Args:
        data: buffer of keys and values, `[L, 2, K, T, D]`.
        starts: start of each token's prompt `[T]`.
        positions: position of each token in its prompt `[T]`.
    """

    def __init__(self, cache: DeviceCache, data: Tensor, starts: Tensor, positions: Tensor) -> None:
        self._cache, self._data, self._starts, self._positions = cache, data, starts.unsqueeze(0), positions

    def tables(self, rotaries: Sequence[Rotary], t: int) -> Tables:
        """Return cos and sin `[T, D/2]` of the tokens' positions."""
        at = self._positions
        return [(F.embedding(at, cos), F.embedding(at, sin)) for cos, sin in self._cache.tables]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, layer: int, window: int, scale: float
    ) -> Tensor:
        """Return attention of q `[1, T, Q, D]` over the keys of each token's own prompt."""
        for kept, new in zip(self._data[layer], (k, v), strict=True):
            _store(kept, new[0].transpose(0, 1))
        return F.attention(q, k, v, self._starts, scale=scale, causal=True, window=window)

    def attention_packed(self, qkv: Tensor, form: PackedHeads, starts: Tensor | None, tables: Tables) -> Tensor:
        """Do the same with `[1, T, Q + 2·K, D]`; one copy stores keys and values."""
        qkv = form.prepared(qkv, tables)
        _store(self._data[form.layer], _by_head(qkv, form))
        how: dict[str, Any] = {"scale": form.scale, "causal": True, "window": form.window}
        return F.attention_packed(qkv, form.heads, form.key_heads, starts=self._starts, **how)


class StepCache(_PassCache):
    """The first rows of a `DeviceCache` with at most `keys` tokens each; a forward pass appends a token to each row."""

    def __init__(self, cache: DeviceCache, rows: int, keys: int) -> None:
        self._cache, self._rows, self._keys = cache, rows, keys

    def tables(self, rotaries: Sequence[Rotary], t: int) -> Tables:
        """Return cos and sin `[B, 1, D/2]` of the rows' next positions; they are looked up on access."""
        return _Tables(self._cache, self._rows, len(rotaries))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, layer: int, window: int, scale: float
    ) -> Tensor:
        """Append k, v `[B, 1, K, D]`, and return attention of q `[B, 1, Q, D]` over each row's keys so far."""
        form = PackedHeads(layer, q.shape[2], k.shape[2], window, scale, rope=None)
        return self._attend(genesis.cat([q, k, v], 2), form)

    def attention_packed(self, qkv: Tensor, form: PackedHeads, starts: Tensor | None, tables: Tables) -> Tensor:
        """Do the same with `[B, 1, Q + 2·K, D]` in one launch."""
        return self._attend(qkv, form)

    def _attend(self, qkv: Tensor, form: PackedHeads) -> Tensor:
        rows, cache = self._rows, self._cache
        both = cache.data[form.layer].narrow(1, 0, rows).narrow(3, 0, self._keys)  # [2, B, K, S, D]
        lengths, active = (each.narrow(0, 0, rows) for each in (cache.lengths, cache.left))
        tables = None if form.rope is None else cache.tables[form.rope]
        # A graph is one step, which updates lengths at its end: every input but qkv is ready before it begins.
        how: dict[str, Any] = {"scale": form.scale, "window": form.window, "early": True}
        return fused.attention_step(qkv[:, 0], both, lengths, tables, form.norms, active, **how).unsqueeze(1)


class _Tables(Sequence[tuple[Tensor, Tensor]]):
    """Tables of rotary embeddings at the rows' lengths; fused layers do not use them."""

    def __init__(self, cache: DeviceCache, rows: int, count: int) -> None:
        self._cache, self._rows, self._count = cache, rows, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, which: Any) -> Any:
        positions = self._cache.lengths.narrow(0, 0, self._rows).unsqueeze(1)  # [B, 1]
        cos, sin = self._cache.tables[which]
        return F.embedding(positions, cos), F.embedding(positions, sin)  # [B, 1, D/2]


def _store(kept: Tensor, new: Tensor) -> None:
    """Write into the cache, in its dtype; values are clamped for e4m3, which has no infinity."""
    kept.copy_(new.clip(-LARGEST, LARGEST) if kept.dtype.itemsize == 1 else new)


def _by_head(qkv: Tensor, form: PackedHeads) -> Tensor:
    """Return keys and values `[2, K, T, D]` of `[1, T, Q + 2·K, D]`."""
    t, size = qkv.shape[1::2]
    return qkv.narrow(2, form.heads, 2 * form.key_heads).view(t, 2, form.key_heads, size).permute(1, 2, 0, 3)
