"""Batches from tokens: each a pure function of (data, seed, epoch, index), so that resuming is arithmetic. No tensors.

An epoch takes every sample once, or as often as its weight says, in an order drawn from (seed, epoch); its rows are
packed and shuffled. The last rows are never dropped: an epoch of R rows has ceil(R / B) batches that share the rows
evenly, and a batch with fewer than B rows is filled up with rows that hold no token and no target. So shapes are fixed,
and no batch lacks targets: each sample has one, and of a sample that is cut only the chunks that have one are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from genesis.data.documents import Ints, TokenSet
from genesis.data.packing import Chunks, Packing, chunk_counts, chunks_with_target, cut, pack
from genesis.errors import ConfigError, DataError, IndexRangeError, ModelError, escape

IGNORE_INDEX = -100
_SAMPLE_ORDER, _ROW_ORDER, _DRAW = 0, 1, 2
_MAX_SAMPLES = 1 << 31  # of an epoch
_STATE_VERSION = 1


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of T slots, all arrays int64 `[B, T]`.

    Attributes:
        input_ids: token ids; the tokenizer's pad id in slots without a token.
        labels: the ids again, unshifted, for a model that compares the logits of slot t with the label of t + 1; -100
            at tokens that are no targets, the first of each chunk among them, and in slots without a token.
        position_ids: from 0 in each chunk, and again in the empty end of a row: attention begins at slot - position.
        num_targets: labels that are not -100, at least 1.
        num_tokens: slots that hold a token.
        samples: int64 `[n, 4]`: row, sample, first token in the sample, tokens; see `PackedLoader.describe`.
        tokens: the set that the samples are of; None in a batch that was made without one.
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

    @classmethod
    def empty(cls, rows: int, length: int) -> Batch:
        """A batch of zeros, one document a row, for plans and measurements."""
        ids = np.zeros((rows, length), np.int64)
        positions, samples = ids + np.arange(length), np.zeros((0, 4), np.int64)
        return cls(0, 0, ids, ids, positions, rows * (length - 1), rows * length, samples)


class PackedLoader:
    """Packed batches of a `TokenSet`, by number or as an endless iterator with a position that can be saved.

    Args:
        tokens: the samples.
        batch_size: B, rows in a batch.
        seq_len: T, slots in a row, 2 at least.
        seed: decides all orders, 0 to 2^64 - 1.
        shuffle: false keeps samples and rows in the order of the data, the same in all epochs.

    Raises:
        ConfigError: sizes that make no batch. DataError: no samples, or one without a target, or weights that give no
            epoch.
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
        self.epoch = 0
        self.index = 0
        self._planned: tuple[int, Packing, Ints] | None = None
        self._has_target = chunks_with_target(tokens, seq_len)

    def num_batches(self, epoch: int) -> int:
        """Batches of an epoch; epochs differ a little, as their samples are packed in another order."""
        return -(-self.packing(epoch).num_rows // self.batch_size)

    def packing(self, epoch: int) -> Packing:
        """The rows of an epoch before they are shuffled; the last epoch asked for is kept."""
        return self._plan(epoch)[0]

    def batch(self, epoch: int, index: int) -> Batch:
        """Batch `index` of `epoch`; any, in any order.

        Raises:
            IndexRangeError: the epoch has no such batch.
        """
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
        """The position of the next batch and what it depends on, as JSON values."""
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
        """Continue at the position in `state`; costs nothing.

        Raises:
            DataError: other data. ModelError: another tokenizer, or no position of this loader. ConfigError: another
                seed or other sizes.
        """
        mine = self.state()
        if set(state) != set(mine) or state["version"] != _STATE_VERSION:
            raise _not_a_state("it has other fields")
        epoch, index = state["epoch"], state["index"]
        if state["data"] != mine["data"]:
            what = "the data are not those of the run that is resumed: a document was changed, added or removed, or its"
            what += " weight or what makes samples of it was changed"
            raise DataError(what, where="data.train, data.eval", next="restore the data, or start a new run")
        if state["tokenizer"] != mine["tokenizer"]:
            what = "the tokenizer is not the one of the run that is resumed"
            raise ModelError(what, where="data.tokenizer", next="restore the tokenizer, or start a new run")
        for key, section in (("seed", "train"), ("batch_size", "train"), ("seq_len", "data"), ("shuffle", "data")):
            if state[key] != mine[key]:
                what = f"{key} is {mine[key]}, and {escape(state[key])} in the run that is resumed"
                raise ConfigError(what, where=f"{section}.{key}", next="restore the setting, or start a new run")
        if type(epoch) is not int or type(index) is not int or epoch < 0 or not 0 <= index < self.num_batches(epoch):
            raise _not_a_state(f"it names batch {escape(index)} of epoch {escape(epoch)}, which does not exist")
        self.epoch, self.index = epoch, index

    def describe(self, batch: Batch) -> list[str]:
        """What the batch holds, a line for each chunk: row, document and its tokens; for reports of bad losses."""
        return [
            f"row {row}: {escape(self.tokens.index.name(int(self.tokens.documents[sample])))}, tokens {first} to"
            f" {first + count - 1}"
            for row, sample, first, count in batch.samples.tolist()
        ]

    def _plan(self, epoch: int) -> tuple[Packing, Ints]:
        if self._planned is None or self._planned[0] != epoch:
            samples = self._drawn(epoch)
            samples = samples[self._order(epoch, _SAMPLE_ORDER, len(samples))]
            packing = pack(self._chunks(samples), self.seq_len)
            self._planned = epoch, packing, self._order(epoch, _ROW_ORDER, packing.num_rows)
        return self._planned[1:]

    def _drawn(self, epoch: int) -> Ints:
        """The samples of an epoch: each as often as its weight's whole part, and once more with the rest's probability.

        An epoch for which none would be drawn has the one that came nearest.
        """
        weights = self.tokens.weights
        if weights is None:
            return np.arange(len(self.tokens))
        # 53 bits, so that the division is exact and a rest is never passed by chance.
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
        """A permutation of 0 … count - 1, drawn from (seed, epoch, purpose).

        The bits come from numpy's Philox, whose stream is fixed, and are sorted here: numpy may change `permutation`.
        """
        if not self.shuffle:
            return np.arange(count)
        order: Ints = np.argsort(self._bits(epoch, purpose, count), kind="stable")
        return order

    def _bits(self, epoch: int, purpose: int, count: int) -> npt.NDArray[np.uint64]:
        """64 random bits for each of 0 … count - 1; the first ones are the same for any count."""
        key, counter = np.array([self.seed, epoch], np.uint64), np.array([0, 0, 0, purpose], np.uint64)
        bits: npt.NDArray[np.uint64] = np.random.Philox(key=key, counter=counter).random_raw(count)
        return bits

    def _assemble(self, packing: Packing, rows: Ints, epoch: int, index: int) -> Batch:
        begins, ends = packing.row_starts[rows], packing.row_starts[rows + 1]
        which = _ranges(begins, ends - begins)
        row = np.repeat(np.arange(len(rows)), ends - begins)
        lengths, columns = packing.chunks.lengths[which], packing.columns[which]
        chosen, offsets = packing.chunks.samples[which], packing.chunks.offsets[which]
        within = _ranges(np.zeros_like(lengths), lengths)
        slots = np.repeat(row * self.seq_len + columns, lengths) + within
        places = np.repeat(self.tokens.starts[chosen] + offsets, lengths) + within
        ids = self.tokens.stream[places].astype(np.int64)
        is_target = within > 0
        if self.tokens.mask is not None:
            is_target &= self.tokens.mask[places] != 0

        shape = (self.batch_size, self.seq_len)
        input_ids = np.full(shape, self.tokens.pad_id, np.int64)
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        input_ids.reshape(-1)[slots] = ids
        labels.reshape(-1)[slots] = np.where(is_target, ids, IGNORE_INDEX)
        filled = np.zeros(self.batch_size, np.int64)
        np.add.at(filled, row, lengths)
        position_ids = np.maximum(np.arange(self.seq_len) - filled[:, None], 0)
        position_ids.reshape(-1)[slots] = within
        samples = np.stack([row, chosen, offsets, lengths], axis=1)
        targets = int(is_target.sum())
        return Batch(epoch, index, input_ids, labels, position_ids, targets, len(ids), samples, self.tokens)


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """The ranges start … start + count - 1 one after the other, int64 `[sum of counts]`."""
    before = np.cumsum(counts) - counts
    ranges: Ints = np.arange(counts.sum()) + np.repeat(starts - before, counts)
    return ranges


def _check_samples(tokens: TokenSet) -> None:
    if len(tokens) == 0:
        raise DataError("there are no documents to make batches of", next="check data.train and data.eval")
    if not (tokens.target_counts > 0).all():
        name = escape(tokens.index.name(int(tokens.documents[np.argmin(tokens.target_counts > 0)])))
        raise DataError("the document has no target token", where=name, next="remove the document")
    weights = tokens.weights
    if weights is None:
        return
    if len(weights) != len(tokens) or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        what = "weights are numbers of 0 or more, one for each sample, and not all 0"
        raise DataError(what, where="data.train", next="check the weights of the sources")
    if weights.sum() > _MAX_SAMPLES:
        what = f"the weights make an epoch of {weights.sum():,.0f} samples; {_MAX_SAMPLES:,} are the most"
        raise DataError(what, where="data.train", next="lower the weights of the sources")


def _not_a_state(what: str) -> ModelError:
    next = "resume from another checkpoint"
    return ModelError(f"the saved data position cannot be used: {what}", where="data_state.json", next=next)
