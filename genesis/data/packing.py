"""Packing: samples cut into chunks of at most T tokens, and chunks laid into rows of T. It sees lengths, no tokens.

A sample longer than T is cut into chunks that overlap by one token: the first token of a chunk is never predicted, as
nothing precedes it, so each token but the sample's first is predicted exactly once. Chunks of T tokens are rows
by themselves. The others are packed by best fit, the longest first, over a window of chunks at a time: a window keeps
the order's randomness, and rows left open are filled by later windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

WINDOW = 1024


@dataclass(frozen=True, eq=False)
class Chunks:
    """C chunks: the sample of each, where it begins in that sample, and its length; all int64 `[C]`."""

    samples: Ints
    offsets: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, chunks: npt.NDArray[np.bool_]) -> Chunks:
        """The chunks for which the mask `[C]` is true."""
        return Chunks(self.samples[chunks], self.offsets[chunks], self.lengths[chunks])


@dataclass(frozen=True, eq=False)
class Packing:
    """R rows of `seq_len` slots that hold C chunks.

    Attributes:
        chunks: the chunks, ordered by row and column.
        columns: int64 `[C]`, the slot of its row at which a chunk begins.
        row_starts: int64 `[R + 1]`: row r holds the chunks `row_starts[r] : row_starts[r + 1]`.
    """

    seq_len: int
    chunks: Chunks
    columns: Ints
    row_starts: Ints

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.row_starts) - 1

    @property
    def fill_rate(self) -> float:
        """The fraction of all slots that hold a token."""
        return float(self.chunks.lengths.sum()) / (self.num_rows * self.seq_len)


def chunk_counts(lengths: Ints, seq_len: int) -> Ints:
    """How many chunks samples of `lengths` tokens, 2 at least, are cut into."""
    return (lengths - 1 + seq_len - 2) // (seq_len - 1)


def cut(samples: Ints, lengths: Ints, seq_len: int) -> Chunks:
    """The chunks of `samples` (indices, in the order of the result) with `lengths` tokens, 2 at least, in that order.

    A chunk begins every `seq_len - 1` tokens, and none begins at a sample's last token: each has 2 tokens or more.
    """
    stride = seq_len - 1
    counts = chunk_counts(lengths, seq_len)
    owner = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts
    offsets = (np.arange(len(owner)) - first[owner]) * stride
    return Chunks(samples[owner], offsets, np.minimum(lengths[owner] - offsets, seq_len))


def pack(chunks: Chunks, seq_len: int) -> Packing:
    """Lay `chunks` into as few rows as best fit finds; rows are numbered by their first chunk in the order given."""
    rows = _assign(chunks.lengths, seq_len)
    order = np.argsort(rows, kind="stable")
    sorted_rows = rows[order]
    lengths = chunks.lengths[order]
    row_starts = np.searchsorted(sorted_rows, np.arange(rows.max() + 2))
    ends = np.cumsum(lengths)
    before_row = np.concatenate([[0], ends])[row_starts[:-1]]
    columns = ends - lengths - before_row[sorted_rows]
    return Packing(seq_len, Chunks(chunks.samples[order], chunks.offsets[order], lengths), columns, row_starts)


def _assign(lengths: Ints, seq_len: int) -> Ints:
    """The row of each chunk."""
    rows = np.empty(len(lengths), np.int64)
    full = lengths == seq_len
    rows[full] = np.arange(full.sum())
    fit = _BestFit(seq_len, first_row=int(full.sum()))
    rest = np.flatnonzero(~full)
    for start in range(0, len(rest), WINDOW):
        window = rest[start : start + WINDOW]
        longest_first = window[np.argsort(-lengths[window], kind="stable")]
        rows[longest_first] = [fit.place(length) for length in lengths[longest_first].tolist()]
    return _renumbered(rows)


class _BestFit:
    """Open rows by the room they have. Bit r of `_rooms` says that some row has room r, so a search is one shift."""

    def __init__(self, seq_len: int, first_row: int) -> None:
        self._seq_len = seq_len
        self._next_row = first_row
        self._rooms = 0
        self._open: dict[int, list[int]] = {}

    def place(self, length: int) -> int:
        """The row for a chunk: of those with room enough one with the least, else a new one."""
        fitting = self._rooms >> length
        if fitting:
            room = (fitting & -fitting).bit_length() - 1 + length
            row = self._take(room)
        else:
            room, row = self._seq_len, self._next_row
            self._next_row += 1
        # A chunk has two tokens at least, so a single free slot is full.
        if room - length >= 2:
            self._open.setdefault(room - length, []).append(row)
            self._rooms |= 1 << (room - length)
        return row

    def _take(self, room: int) -> int:
        rows = self._open[room]
        row = rows.pop()
        if not rows:
            self._rooms ^= 1 << room
        return row


def _renumbered(rows: Ints) -> Ints:
    """Rows numbered in the order in which they first occur."""
    _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]
