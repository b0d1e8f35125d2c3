"""Batches from tokens: each a pure function of (data, seed, epoch, index), so that resuming is arithmetic. No tensors.

An epoch takes every document once, in an order drawn from (seed, epoch); its rows are packed and shuffled. The last
rows are never dropped: an epoch of R rows has ceil(R / B) batches that share the rows evenly, and a batch with fewer
than B rows is filled up with rows that hold no token and no target. So shapes are fixed, and no batch lacks targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from genesis.data.documents import TokenSet
from genesis.data.packing import Packing, cut, pack
from genesis.errors import ConfigError, DataError, IndexRangeError, ModelError, escape

__all__ = ["IGNORE_INDEX", "Batch", "PackedLoader"]

Ints = npt.NDArray[np.int64]

IGNORE_INDEX = -100
_DOCUMENT_ORDER, _ROW_ORDER = 0, 1
_STATE_VERSION = 1


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of T slots, all arrays int64 `[B, T]`.

    Attributes:
        input_ids: token ids; the tokenizer's pad id in slots without a token.
        labels: the ids again, unshifted, for a model that compares the logits of slot t with the label of t + 1; -100
            at the first token of each chunk and in slots without a token.
        position_ids: from 0 in each chunk, and again in the empty end of a row: attention begins at slot - position.
        num_targets: labels that are not -100, at least 1.
        num_tokens: slots that hold a token.
        samples: int64 `[n, 4]`: row, document, first token in the document, tokens; see `PackedLoader.describe`.
    """

    epoch: int
    index: int
    input_ids: Ints
    labels: Ints
    position_ids: Ints
    num_targets: int
    num_tokens: int
    samples: Ints = field(repr=False)


class PackedLoader:
    """Packed batches of a `TokenSet`, by number or as an endless iterator with a position that can be saved.

    Args:
        tokens: the documents.
        batch_size: B, rows in a batch.
        seq_len: T, slots in a row, 2 at least.
        seed: decides all orders, 0 to 2^64 - 1.
        shuffle: false keeps documents and rows in the order of the data, the same in all epochs.

    Raises:
        ConfigError: sizes that make no batch. DataError: no documents, or one without a target.
    """

    def __init__(self, tokens: TokenSet, *, batch_size: int, seq_len: int, seed: int, shuffle: bool = True) -> None:
        if batch_size < 1 or seq_len < 2:
            what = f"batches of {batch_size} rows with {seq_len} tokens hold no target"
            raise ConfigError(what, next="give a batch size of 1 or more and data.seq_len of 2 or more")
        if not 0 <= seed < 1 << 64:
            raise ConfigError(f"seed {seed} is not between 0 and 2^64 - 1", next="give another seed")
        _check_targets(tokens)
        self.tokens = tokens
        self.batch_size, self.seq_len, self.seed, self.shuffle = batch_size, seq_len, seed, shuffle
        self.epoch = 0
        self.index = 0
        self._planned: tuple[int, Packing, Ints] | None = None

    def num_batches(self, epoch: int) -> int:
        """Batches of an epoch; epochs differ a little, as their documents are packed in another order."""
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
            what = "the data are not those of the run that is resumed: a document was changed, added or removed"
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
            f"row {row}: {escape(self.tokens.index.name(document))}, tokens {first} to {first + count - 1}"
            for row, document, first, count in batch.samples.tolist()
        ]

    def _plan(self, epoch: int) -> tuple[Packing, Ints]:
        """The packing of an epoch, and the order of its rows."""
        if self._planned is None or self._planned[0] != epoch:
            documents = self._order(epoch, _DOCUMENT_ORDER, len(self.tokens))
            packing = pack(cut(documents, self.tokens.lengths[documents], self.seq_len), self.seq_len)
            self._planned = epoch, packing, self._order(epoch, _ROW_ORDER, packing.num_rows)
        return self._planned[1:]

    def _order(self, epoch: int, purpose: int, count: int) -> Ints:
        """A permutation of 0 … count - 1, drawn from (seed, epoch, purpose).

        The bits come from numpy's Philox, whose stream is fixed, and are sorted here: numpy may change `permutation`.
        """
        if not self.shuffle:
            return np.arange(count)
        key, counter = np.array([self.seed, epoch], np.uint64), np.array([0, 0, 0, purpose], np.uint64)
        bits = np.random.Philox(key=key, counter=counter).random_raw(count)
        order: Ints = np.argsort(bits, kind="stable")
        return order

    def _assemble(self, packing: Packing, rows: Ints, epoch: int, index: int) -> Batch:
        begins, ends = packing.row_starts[rows], packing.row_starts[rows + 1]
        which = _ranges(begins, ends - begins)
        row = np.repeat(np.arange(len(rows)), ends - begins)
        lengths, columns = packing.chunks.lengths[which], packing.columns[which]
        documents, offsets = packing.chunks.documents[which], packing.chunks.offsets[which]
        within = _ranges(np.zeros_like(lengths), lengths)
        slots = np.repeat(row * self.seq_len + columns, lengths) + within
        ids = self.tokens.stream[np.repeat(self.tokens.starts[documents] + offsets, lengths) + within].astype(np.int64)

        shape = (self.batch_size, self.seq_len)
        input_ids = np.full(shape, self.tokens.pad_id, np.int64)
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        input_ids.reshape(-1)[slots] = ids
        labels.reshape(-1)[slots] = np.where(within > 0, ids, IGNORE_INDEX)
        filled = np.zeros(self.batch_size, np.int64)
        np.add.at(filled, row, lengths)
        position_ids = np.maximum(np.arange(self.seq_len) - filled[:, None], 0)
        position_ids.reshape(-1)[slots] = within
        samples = np.stack([row, documents, offsets, lengths], axis=1)
        targets = len(ids) - len(lengths)
        return Batch(epoch, index, input_ids, labels, position_ids, targets, len(ids), samples)


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """The ranges start … start + count - 1 one after the other, int64 `[sum of counts]`."""
    before = np.cumsum(counts) - counts
    ranges: Ints = np.arange(counts.sum()) + np.repeat(starts - before, counts)
    return ranges


def _check_targets(tokens: TokenSet) -> None:
    if len(tokens) == 0:
        raise DataError("there are no documents to make batches of", next="check data.train and data.eval")
    if (tokens.lengths < 2).any():
        name = escape(tokens.index.name(int(np.argmax(tokens.lengths < 2))))
        raise DataError("the document has no target token", where=name, next="remove the document")


def _not_a_state(what: str) -> ModelError:
    next = "resume from another checkpoint"
    return ModelError(f"the saved data position cannot be used: {what}", where="data_state.json", next=next)
