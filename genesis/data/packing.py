"""Turns samples into rows of T tokens: longer ones are dropped, truncated or cut into chunks, and chunks are packed.

A sample longer than T is cut into chunks that overlap by one token. The first token of a chunk is never predicted,
because nothing precedes it, so each token except for the sample's first is predicted exactly once. A chunk of T tokens
fills a row. The others are packed by best fit, longest first, over a window of chunks at a time: windows keep the
order random, and later windows fill the open rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from genesis.data.documents import Ints, TokenSet
from genesis.data.pairs import fit_pairs
from genesis.errors import DataError, escape

TooLong = Literal["drop", "truncate", "split", "fail"]

WINDOW = 1024


@dataclass(frozen=True, eq=False)
class Chunks:
    """C chunks: their samples, their offsets in the samples, and their lengths; all int64 `[C]`."""

    samples: Ints
    offsets: Ints
    lengths: Ints

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, chunks: npt.NDArray[np.bool_]) -> Chunks:
        """Return the chunks for which the mask `[C]` is true."""
        return Chunks(self.samples[chunks], self.offsets[chunks], self.lengths[chunks])


@dataclass(frozen=True, eq=False)
class Packing:
    """R rows of `seq_len` slots that hold C chunks.

    Attributes:
        chunks: the chunks, ordered by row and column.
        columns: int64 `[C]`, first slot of each chunk in its row.
        row_starts: int64 `[R + 1]`; row r holds the chunks `row_starts[r] : row_starts[r + 1]`.
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
        """Fraction of the slots that hold a token."""
        return float(self.chunks.lengths.sum()) / (self.num_rows * self.seq_len)


def chunk_counts(lengths: Ints, seq_len: int) -> Ints:
    """Return how many chunks samples of `lengths` tokens (at least 2) are cut into."""
    return (lengths - 1 + seq_len - 2) // (seq_len - 1)


def cut(samples: Ints, lengths: Ints, seq_len: int) -> Chunks:
    """Cut `samples` (indices) of `lengths` tokens (at least 2) into chunks, in the same order.

    A chunk begins every `seq_len - 1` tokens, but never at a sample's last token, so each has at least 2 tokens.
    """
    stride = seq_len - 1
    counts = chunk_counts(lengths, seq_len)
    owner = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts
    offsets = (np.arange(len(owner)) - first[owner]) * stride
    return Chunks(samples[owner], offsets, np.minimum(lengths[owner] - offsets, seq_len))


def pack(chunks: Chunks, seq_len: int, align: int = 1) -> Packing:
    """Pack `chunks` into rows by best fit. Rows are numbered by their first chunk in the given order.

    Args:
        align: every chunk begins at a multiple of this many slots.
    """
    sizes, capacity = -(-chunks.lengths // align) * align, max(seq_len // align * align, 1)
    rows = _assign(np.minimum(sizes, capacity), capacity)  # a chunk that needs the remainder gets its own row
    order = np.argsort(rows, kind="stable")
    sorted_rows = rows[order]
    lengths, sizes = chunks.lengths[order], sizes[order]
    row_starts = np.searchsorted(sorted_rows, np.arange(rows.max() + 2))
    ends = np.cumsum(sizes)
    before_row = np.concatenate([[0], ends])[row_starts[:-1]]
    columns = ends - sizes - before_row[sorted_rows]
    return Packing(seq_len, Chunks(chunks.samples[order], chunks.offsets[order], lengths), columns, row_starts)


def _assign(lengths: Ints, seq_len: int) -> Ints:
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
    """Open rows by free slots. Bit n of `_rooms` is set if a row has n free slots, so a search is one shift."""

    def __init__(self, seq_len: int, first_row: int) -> None:
        self._seq_len = seq_len
        self._next_row = first_row
        self._rooms = 0
        self._open: dict[int, list[int]] = {}

    def place(self, length: int) -> int:
        """Return the row for a chunk: one with the fewest sufficient free slots, or else a new one."""
        fitting = self._rooms >> length
        if fitting:
            room = (fitting & -fitting).bit_length() - 1 + length
            row = self._open[room].pop()
            if not self._open[room]:
                self._rooms ^= 1 << room
        else:
            room, row = self._seq_len, self._next_row
            self._next_row += 1
        # A chunk has at least two tokens, so a row with a single free slot is full.
        if room - length >= 2:
            self._open.setdefault(room - length, []).append(row)
            self._rooms |= 1 << (room - length)
        return row


def _renumbered(rows: Ints) -> Ints:
    _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def chunks_with_target(tokens: TokenSet, seq_len: int) -> npt.NDArray[np.bool_] | None:
    """Return which chunks of all samples, cut for rows of `seq_len`, have a target; None if all have."""
    if tokens.mask is None or not (tokens.lengths > seq_len).any():
        return None
    chunks = cut(np.arange(len(tokens)), tokens.lengths, seq_len)
    begins = tokens.starts[chunks.samples] + chunks.offsets
    return tokens.targets_between(begins, begins + chunks.lengths) > 0


# --- Samples that are too long ----------------------------------------------------------------------------------------
# The cache holds complete samples, whatever the length of rows. A run selects among them when it starts.


@dataclass(frozen=True, slots=True)
class Note:
    """A remark about `count` samples for the user: what happened to them, the first of them as `example`, and the
    `setting` that decides it (empty without one).
    """

    count: int
    what: str
    example: str
    setting: str = ""

    def __str__(self) -> str:
        what = self.what
        if self.count == 1 and not what.startswith("of "):  # the noun comes first, then its verb
            what = re.sub(r"\b(are|have)\b", lambda verb: {"are": "is", "have": "has"}[verb[0]], what, count=1)
            what = re.sub(r"s\b", "", what, count=1)
        return f"{self.count:,} {what}; the first: {self.example}"


def fit(
    tokens: TokenSet, seq_len: int, too_long: TooLong | None, token_bytes: Callable[[int], int]
) -> tuple[TokenSet, tuple[Note, ...]]:
    """Return `tokens` for rows of `seq_len`, and notes about longer samples.

    A pair must fit into one row, a judged answer into half of a row. The answers of a pair are truncated after the same
    number of tokens. Pairs and judged answers are never split: None drops those that are too long.

    Args:
        too_long: `drop` drops them. `truncate` keeps their first `seq_len` tokens and drops those without a target
            among them. `split` keeps all, and the loader cuts them into chunks. None splits texts and drops samples of
            records.
        token_bytes: returns the bytes of text that a token encodes.

    Raises:
        DataError: with `fail`, for the first sample that is too long.
    """
    is_preference = tokens.splits is not None or tokens.is_good is not None
    seq_len = seq_len // 2 if tokens.is_good is not None else seq_len
    affected = tokens.lengths > seq_len
    if is_preference and too_long == "split":
        too_long = None
    if not is_preference and too_long in (None, "split"):  # splitting texts needs no note
        affected &= tokens.index.is_record[tokens.documents]
    if not affected.any():
        return tokens, ()
    if too_long == "fail":
        first, ways = int(np.argmax(affected)), "drop or truncate" if is_preference else "drop, truncate or split"
        raise DataError(
            f"the sample has {tokens.lengths[first]:,} tokens, more than the {seq_len:,} of data.seq_len",
            where=escape(tokens.index.name(int(tokens.documents[first]))),
            next=f"raise data.seq_len, shorten the record, or set data.too_long to {ways}",
        )
    if too_long == "truncate" and tokens.splits is not None:
        return _truncated_pairs(tokens, seq_len, affected)
    if too_long == "truncate":
        return _truncated(tokens, seq_len, affected, token_bytes)
    if too_long == "split":
        return tokens, _split_notes(tokens, seq_len, affected)
    return tokens.select_samples(~affected), (_note(tokens, affected, seq_len, "left out"),)


def _truncated(
    tokens: TokenSet, seq_len: int, affected: npt.NDArray[np.bool_], token_bytes: Callable[[int], int]
) -> tuple[TokenSet, tuple[Note, ...]]:
    notes = [_note(tokens, affected, seq_len, "truncated")]
    target_bytes = tokens.index.text_bytes[tokens.documents] if tokens.target_bytes is None else tokens.target_bytes
    target_bytes = target_bytes - _bytes_beyond(tokens, seq_len, affected, token_bytes)
    short = replace(tokens, lengths=np.minimum(tokens.lengths, seq_len), target_bytes=np.maximum(target_bytes, 0))
    empty = short.target_counts == 0
    if empty.any():
        what = f"of them have no target in their first {seq_len:,} tokens and are left out"
        notes.append(Note(int(empty.sum()), what, _name(tokens, int(np.argmax(empty)))))
    return short.select_samples(~empty), tuple(notes)


def _truncated_pairs(
    tokens: TokenSet, seq_len: int, affected: npt.NDArray[np.bool_]
) -> tuple[TokenSet, tuple[Note, ...]]:
    notes = [_note(tokens, affected, seq_len, "truncated, both answers alike")]
    short, is_left = fit_pairs(tokens, seq_len)
    if not is_left.all():
        what = "of them have equal answers or an answer without a target after truncation, and are left out"
        notes.append(Note(int((~is_left).sum()), what, _name(tokens, int(np.argmin(is_left)))))
    return short.select_samples(is_left), tuple(notes)


def _bytes_beyond(
    tokens: TokenSet, seq_len: int, affected: npt.NDArray[np.bool_], token_bytes: Callable[[int], int]
) -> Ints:
    """Return the bytes of text that the targets after the first `seq_len` tokens encode, int64 `[S]`."""
    lost = np.zeros(len(tokens), np.int64)
    sizes: dict[int, int] = {}
    for sample in np.flatnonzero(affected).tolist():
        begin, end = int(tokens.starts[sample]) + seq_len, int(tokens.starts[sample] + tokens.lengths[sample])
        ids = tokens.stream[begin:end]
        if tokens.mask is not None:
            ids = ids[tokens.mask[begin:end] != 0]
        for token, count in zip(*(found.tolist() for found in np.unique(ids, return_counts=True)), strict=True):
            if token not in sizes:
                sizes[token] = token_bytes(token)
            lost[sample] += sizes[token] * count
    return lost


def _split_notes(tokens: TokenSet, seq_len: int, affected: npt.NDArray[np.bool_]) -> tuple[Note, ...]:
    notes = [_note(tokens, affected, seq_len, "split")]
    has_target = chunks_with_target(tokens, seq_len)
    if has_target is not None and not has_target.all():
        first = cut(np.arange(len(tokens)), tokens.lengths, seq_len).samples[np.argmin(has_target)]
        what = "of their chunks have no target and are left out"
        notes.append(Note(int((~has_target).sum()), what, _name(tokens, int(first))))
    return tuple(notes)


def _note(tokens: TokenSet, affected: npt.NDArray[np.bool_], seq_len: int, fate: str) -> Note:
    what = f"of {len(tokens):,} samples have more than {seq_len:,} tokens and are {fate}"
    return Note(int(affected.sum()), what, _name(tokens, int(np.argmax(affected))), "data.too_long")


def _name(tokens: TokenSet, sample: int) -> str:
    return f"{escape(tokens.index.name(int(tokens.documents[sample])))}, {tokens.lengths[sample]:,} tokens"
