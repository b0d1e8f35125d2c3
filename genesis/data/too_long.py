"""What becomes of samples that are longer than a row: left out, truncated, split, or an error. It changes no tokens.

Tokens are cached whole, whatever the length of rows; this chooses among them when a run starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from genesis.data.documents import Ints, TokenSet
from genesis.data.loader import chunks_with_target
from genesis.data.packing import cut
from genesis.errors import DataError, escape

TooLong = Literal["drop", "truncate", "split", "fail"]


@dataclass(frozen=True, slots=True)
class Note:
    """What the user should know of some samples: how many they are, what happened to them, and the first of them.

    Attributes:
        setting: what decided it in a run; empty where nothing did.
    """

    count: int
    what: str
    example: str
    setting: str = ""

    def __str__(self) -> str:
        what = self.what
        if self.count == 1 and not what.startswith("of "):  # its noun comes first, then its verb
            what = re.sub(r"\b(are|have)\b", lambda verb: {"are": "is", "have": "has"}[verb[0]], what, count=1)
            what = re.sub(r"s\b", "", what, count=1)
        return f"{self.count:,} {what}; the first: {self.example}"


def fit(
    tokens: TokenSet, seq_len: int, too_long: TooLong | None, token_bytes: Callable[[int], int]
) -> tuple[TokenSet, tuple[Note, ...]]:
    """`tokens` for rows of `seq_len`, and what became of samples that are longer.

    Args:
        too_long: `drop` leaves them out. `truncate` keeps their first `seq_len` tokens, and leaves out those without a
            target among them. `split` keeps all: the loader cuts them into chunks. None: texts are split, samples of
            records dropped.
        token_bytes: the bytes of text that a token stands for.

    Raises:
        DataError: with `fail`, the first sample that is too long.
    """
    affected = tokens.lengths > seq_len
    if too_long in (None, "split"):  # texts are cut as a matter of course
        affected &= tokens.index.is_record[tokens.documents]
    if not affected.any():
        return tokens, ()
    if too_long == "fail":
        first = int(np.argmax(affected))
        raise DataError(
            f"the sample has {tokens.lengths[first]:,} tokens, more than the {seq_len:,} of data.seq_len",
            where=escape(tokens.index.name(int(tokens.documents[first]))),
            next="raise data.seq_len, shorten the record, or set data.too_long to drop, truncate or split",
        )
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


def _bytes_beyond(
    tokens: TokenSet, seq_len: int, affected: npt.NDArray[np.bool_], token_bytes: Callable[[int], int]
) -> Ints:
    """Bytes of text that the targets beyond the first `seq_len` tokens stand for, int64 `[S]`."""
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
