"""Batches from tokens. Each is a pure function of (data, seed, epoch, index), so a resume needs only arithmetic.

An epoch contains each sample once, or as often as its weight says, in an order drawn from (seed, epoch). Its rows are
packed and shuffled. No row is dropped: an epoch of R rows has ceil(R / B) batches that share the rows evenly. A batch
with fewer than B rows is padded with rows without tokens and targets, so shapes are fixed. Every batch has targets,
because each sample has one, and chunks of a long sample without a target are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from genesis.backend import mode
from genesis.data.documents import Ints, TokenSet
from genesis.data.packing import Chunks, Packing, chunk_counts, chunks_with_target, cut, pack
from genesis.data.pairs import ranges
from genesis.errors import ConfigError, DataError, IndexRangeError, ModelError, escape
from genesis.ops.attention import KEY_BLOCK

IGNORE_INDEX = -100
_SAMPLE_ORDER, _ROW_ORDER, _DRAW = 0, 1, 2
_MAX_SAMPLES = 1 << 31  # per epoch
_STATE_VERSION = 1


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of T slots; all arrays are int64 `[B, T]`.

    Attributes:
        input_ids: token ids; the tokenizer's pad id in slots without a token.
        labels: the same ids, unshifted: a model compares the logits of slot t with the label of t + 1. -100 at tokens
            that are not targets, at the first token of each chunk, and in slots without a token.
        position_ids: from 0 in each chunk, in the second sequence of a sample, and in empty slots: attention begins at
            slot - position. `[B, T, 4]` if sequences share prompts, as from `with_bounds`: a second sequence continues
            the positions of the prompt and skips the tokens of the first one's answer.
        num_targets: number of labels that are not -100, at least 1.
        num_tokens: number of slots with a token.
        samples: int64 `[n, 4]`: row, sample, first token in the sample, tokens; see `PackedLoader.describe`.
        tokens: the set of the samples; None in an empty batch.
        columns: int64 `[n]`, first slot of each sample in its row.
    """

    epoch: int
    index: int
    input_ids: Ints
    labels: Ints
    position_ids: Ints
    num_targets: int
    num_tokens: int
    samples: Ints = field(repr=False)
    tokens: TokenSet | None = field(default=None, repr=False)
    columns: Ints = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)

    @classmethod
    def empty(cls, rows: int, length: int) -> Batch:
        """Return a batch of zeros with one document per row, for plans and measurements."""
        ids = np.zeros((rows, length), np.int64)
        positions, samples = ids + np.arange(length), np.zeros((0, 4), np.int64)
        return cls(0, 0, ids, ids, positions, rows * (length - 1), rows * length, samples)


class PackedLoader:
    """Packed batches of a `TokenSet`, by number or as an endless iterator whose position can be saved.

    Args:
        tokens: the samples.
        batch_size: B, rows per batch.
        seq_len: T, slots per row, at least 2.
        seed: determines all orders, 0 to 2^64 - 1.
        shuffle: False keeps samples and rows in the order of the data in all epochs.

    A loader created inside `genesis.exact` begins every chunk at a multiple of `KEY_BLOCK` slots.

    Raises:
        ConfigError: the sizes allow no batch.
        DataError: the set is empty, a sample has no target, or the weights allow no epoch.
    """

    def __init__(self, tokens: TokenSet, *, batch_size: int, seq_len: int, seed: int, shuffle: bool = True) -> None:
        if batch_size < 1 or seq_len < 2:
            what = f"batches of {batch_size} rows with {seq_len} tokens hold no target"
            raise ConfigError(what, next="give a batch size of 1 or more and data.seq_len of 2 or more")
        if not 0 <= seed < 1 << 64:
            raise ConfigError(f"seed {seed} is not between 0 and 2^64 - 1", next="give another seed")
        _check_samples(tokens)
        self.tokens = tokens
        self.batch_size, self.seq_len, self.seed, self.shuffle = batch_size, seq_len, seed, shuffle
        self._align = KEY_BLOCK if mode.exact else 1
        self.epoch = 0
        self.index = 0
        self._planned: tuple[int, Packing, Ints] | None = None
        self._has_target = chunks_with_target(tokens, seq_len)

    def num_batches(self, epoch: int) -> int:
        """Return the number of batches of an epoch. It varies a little, because each epoch packs another order."""
        return -(-self.packing(epoch).num_rows // self.batch_size)

    def packing(self, epoch: int) -> Packing:
        """Return the rows of an epoch before they are shuffled; the latest epoch is cached."""
        return self._plan(epoch)[0]

    def batch(self, epoch: int, index: int) -> Batch:
        """Return batch `index` of `epoch`, in any order. Raises: IndexRangeError: the epoch has fewer batches."""
        packing, row_order = self._plan(epoch)
        rows, count = packing.num_rows, self.num_batches(epoch)
        if not 0 <= index < count:
            raise IndexRangeError(f"epoch {epoch} has batches 0 to {count - 1}, not {index}")
        chosen = row_order[index * rows // count : (index + 1) * rows // count]
        return self._assemble(packing, chosen, epoch, index)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self.batch(self.epoch, self.index)
        self.index += 1
        if self.index == self.num_batches(self.epoch):
            self.epoch, self.index = self.epoch + 1, 0
        return batch

    @property
    def epochs_done(self) -> float:
        """The position in epochs, such as 1.25."""
        return self.epoch + self.index / self.num_batches(self.epoch)

    def state(self) -> dict[str, Any]:
        """Return the position of the next batch and its dependencies, as JSON values."""
        return {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "index": self.index,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "shuffle": self.shuffle,
            "data": self.tokens.data_fingerprint,
            "tokenizer": self.tokens.tokenizer_fingerprint,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in `state`.

        Raises:
            DataError: the data differs.
            ModelError: the tokenizer differs, or the position does not exist in this loader.
            ConfigError: the seed or a size differs.
        """
        mine = self.state()
        if set(state) != set(mine) or state["version"] != _STATE_VERSION:
            raise _not_a_state("it has other fields")
        epoch, index = state["epoch"], state["index"]
        if state["data"] != mine["data"]:
            what = "the data differs from the run that is resumed: a document was changed, added or removed, or its"
            what += " weight or the way it becomes samples was changed"
            raise DataError(what, where="data.train, data.eval", next="restore the data, or start a new run")
        if state["tokenizer"] != mine["tokenizer"]:
            what = "the tokenizer differs from the run that is resumed"
            raise ModelError(what, where="data.tokenizer", next="restore the tokenizer, or start a new run")
        for key, section in (("seed", "train"), ("batch_size", "train"), ("seq_len", "data"), ("shuffle", "data")):
            if state[key] != mine[key]:
                what = f"{key} is {mine[key]}, but {escape(state[key])} in the run that is resumed"
                raise ConfigError(what, where=f"{section}.{key}", next="restore the setting, or start a new run")
        if type(epoch) is not int or type(index) is not int or epoch < 0 or not 0 <= index < self.num_batches(epoch):
            raise _not_a_state(f"it names batch {escape(index)} of epoch {escape(epoch)}, which does not exist")
        self.epoch, self.index = epoch, index

    def describe(self, batch: Batch) -> list[str]:
        """Return a line per chunk of a batch: row, document and its tokens; for reports of bad losses."""
        return [
            f"row {row}: {escape(self.tokens.index.name(int(self.tokens.documents[sample])))}, tokens {first} to"
            f" {first + count - 1}"
            for row, sample, first, count in batch.samples.tolist()
        ]

    def _plan(self, epoch: int) -> tuple[Packing, Ints]:
        if self._planned is None or self._planned[0] != epoch:
            samples = self._drawn(epoch)
            samples = samples[self._order(epoch, _SAMPLE_ORDER, len(samples))]
            packing = pack(self._chunks(samples), self.seq_len, self._align)
            self._planned = epoch, packing, self._order(epoch, _ROW_ORDER, packing.num_rows)
        return self._planned[1:]

    def _drawn(self, epoch: int) -> Ints:
        """Return the samples of an epoch: each as often as the integer part of its weight, and once more at random.

        The fractional part is the probability. If this selects none, the epoch has the sample that came closest.
        """
        weights = self.tokens.weights
        if weights is None:
            return np.arange(len(self.tokens))
        # 53 bits make the division exact, so that chance never exceeds the fractional part.
        bits = self._bits(epoch if self.shuffle else 0, _DRAW, len(weights))
        missing = (bits >> np.uint64(11)) / float(1 << 53) - weights % 1
        times = np.floor(weights).astype(np.int64) + (missing < 0)
        if not times.any():
            times[np.argmin(np.where(weights > 0, missing, np.inf))] = 1
        return np.repeat(np.arange(len(weights)), times)

    def _chunks(self, samples: Ints) -> Chunks:
        chunks = cut(samples, self.tokens.lengths[samples], self.seq_len)
        if self._has_target is None:
            return chunks
        counts = chunk_counts(self.tokens.lengths, self.seq_len)
        first = np.cumsum(counts) - counts
        return chunks.select(self._has_target[first[chunks.samples] + chunks.offsets // (self.seq_len - 1)])

    def _order(self, epoch: int, purpose: int, count: int) -> Ints:
        """Return a permutation of 0 … count - 1, drawn from (seed, epoch, purpose).

        It sorts bits of numpy's Philox, whose stream is fixed; numpy may change `permutation`.
        """
        if not self.shuffle:
            return np.arange(count)
        order: Ints = np.argsort(self._bits(epoch, purpose, count), kind="stable")
        return order

    def _bits(self, epoch: int, purpose: int, count: int) -> npt.NDArray[np.uint64]:
        """Return 64 random bits for each of 0 … count - 1; the first ones do not depend on the count."""
        key, counter = np.array([self.seed, epoch], np.uint64), np.array([0, 0, 0, purpose], np.uint64)
        bits: npt.NDArray[np.uint64] = np.random.Philox(key=key, counter=counter).random_raw(count)
        return bits

    def _assemble(self, packing: Packing, rows: Ints, epoch: int, index: int) -> Batch:
        # Gather the tokens of the chosen rows' chunks.
        begins, ends = packing.row_starts[rows], packing.row_starts[rows + 1]
        which = ranges(begins, ends - begins)
        row = np.repeat(np.arange(len(rows)), ends - begins)
        lengths, columns = packing.chunks.lengths[which], packing.columns[which]
        chosen, offsets = packing.chunks.samples[which], packing.chunks.offsets[which]
        within = ranges(np.zeros_like(lengths), lengths)
        slots = np.repeat(row * self.seq_len + columns, lengths) + within
        places = np.repeat(self.tokens.starts[chosen] + offsets, lengths) + within
        ids = self.tokens.stream[places].astype(np.int64)
        is_target = within > 0
        if self.tokens.mask is not None:
            is_target &= self.tokens.mask[places] != 0

        # Scatter them into their slots; positions continue from 0 in the slots between and after chunks.
        shape = (self.batch_size, self.seq_len)
        input_ids = np.full(shape, self.tokens.pad_id, np.int64)
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        input_ids.reshape(-1)[slots] = ids
        labels.reshape(-1)[slots] = np.where(is_target, ids, IGNORE_INDEX)
        ends, splits, shared = columns + lengths, self.tokens.splits, self.tokens.shared
        middle = ends if splits is None else columns + splits[chosen]  # where the second sequences of samples begin
        continued = np.zeros_like(middle) if shared is None else shared[chosen]
        origins = np.zeros((self.batch_size, self.seq_len + 1), np.int64)
        origins[row, ends], origins[row, middle] = ends, middle - continued
        origins[row, columns] = columns
        position_ids = np.arange(self.seq_len) - np.maximum.accumulate(origins[:, :-1], axis=1)
        if shared is not None:
            position_ids, is_second = with_bounds(position_ids), within >= np.repeat(middle - columns, lengths)
            bounds = np.stack([columns, columns + continued, middle], axis=1)
            position_ids.reshape(-1, 4)[slots[is_second], 1:] = np.repeat(bounds, lengths, axis=0)[is_second]
        samples = np.stack([row, chosen, offsets, lengths], axis=1)
        targets = int(is_target.sum())
        held = samples, self.tokens, columns
        return Batch(epoch, index, input_ids, labels, position_ids, targets, len(ids), *held)


def with_bounds(position_ids: Ints) -> Ints:
    """Return positions `[B, T]` with what each token sees, `[B, T, 4]`: position, start of its document, and begin and
    end of the tokens that it skips (none).
    """
    starts = np.arange(position_ids.shape[1]) - position_ids
    return np.stack([position_ids, starts, 0 * starts, 0 * starts], axis=2)


def _check_samples(tokens: TokenSet) -> None:
    if len(tokens) == 0:
        raise DataError("the data has no documents for batches", next="check data.train and data.eval")
    if not (tokens.target_counts > 0).all():
        name = escape(tokens.index.name(int(tokens.documents[np.argmin(tokens.target_counts > 0)])))
        raise DataError("the document has no target token", where=name, next="remove the document")
    weights = tokens.weights
    if weights is None:
        return
    if len(weights) != len(tokens) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        what = "weights must be numbers of 0 or more, one per sample, and not all 0"
        raise DataError(what, where="data.train", next="check the weights of the sources")
    if weights.sum() > _MAX_SAMPLES:
        what = f"the weights give an epoch of {weights.sum():,.0f} samples; the limit is {_MAX_SAMPLES:,}"
        raise DataError(what, where="data.train", next="lower the weights of the sources")


def _not_a_state(what: str) -> ModelError:
    next = "resume from another checkpoint"
    return ModelError(f"the saved data position cannot be used: {what}", where="data_state.json", next=next)
