"""Cutting and packing: every token in one chunk as a target, rows that hold, as few as best fit gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.data.packing import Chunks, cut, pack

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=80)


def chunks_of(lengths: list[int], seq_len: int) -> Chunks:
    return cut(np.arange(len(lengths)), np.array(lengths), seq_len)


@given(lengths=LENGTHS, seq_len=st.integers(2, 40))
def test_each_token_but_the_first_is_past_the_start_of_exactly_one_chunk(lengths: list[int], seq_len: int) -> None:
    chunks = chunks_of(lengths, seq_len)
    assert chunks.lengths.min() >= 2 and chunks.lengths.max() <= seq_len
    targets = [
        (document, place)
        for document, offset, length in zip(*map(np.ndarray.tolist, vars(chunks).values()), strict=True)
        for place in range(offset + 1, offset + length)
    ]
    assert targets == [(document, place) for document, length in enumerate(lengths) for place in range(1, length)]


@given(lengths=LENGTHS, seq_len=st.integers(2, 40))
def test_rows_hold_their_chunks_without_gaps_and_every_chunk_once(lengths: list[int], seq_len: int) -> None:
    chunks = chunks_of(lengths, seq_len)
    packing = pack(chunks, seq_len)
    assert packing.row_starts[0] == 0 and packing.row_starts[-1] == len(chunks)
    for begin, end in zip(packing.row_starts[:-1], packing.row_starts[1:], strict=True):
        row = packing.chunks.lengths[begin:end]
        assert len(row) and row.sum() <= seq_len
        assert packing.columns[begin:end].tolist() == (np.cumsum(row) - row).tolist()
    packed = zip(packing.chunks.samples.tolist(), packing.chunks.offsets.tolist(), strict=True)
    assert sorted(packed) == sorted(zip(chunks.samples.tolist(), chunks.offsets.tolist(), strict=True))
    assert packing.fill_rate == pytest.approx(chunks.lengths.sum() / packing.num_rows / seq_len)


@given(lengths=LENGTHS, seq_len=st.integers(2, 40))
def test_no_two_rows_could_have_been_one(lengths: list[int], seq_len: int) -> None:
    packing = pack(chunks_of(lengths, seq_len), seq_len)
    filled = np.sort(np.add.reduceat(packing.chunks.lengths, packing.row_starts[:-1]))
    # Best fit opens a row only for a chunk that fits in no other, so at most one row is half full or less.
    assert (filled <= seq_len / 2).sum() <= 1


def test_rows_are_numbered_by_their_first_chunk() -> None:
    packing = pack(chunks_of([3, 10, 4, 6, 7], 10), 10)
    rows = np.split(packing.chunks.samples, packing.row_starts[1:-1])
    assert [sorted(row.tolist()) for row in rows] == [[0, 4], [1], [2, 3]]


def test_chunks_of_many_windows_fill_the_rows() -> None:
    lengths = np.random.Philox(key=1).random_raw(20_000) % 200 + 2
    packing = pack(cut(np.arange(20_000), lengths.astype(np.int64), 1024), 1024)
    assert packing.fill_rate > 0.999
    one_row_each = lengths.sum() / len(lengths) / 1024
    assert packing.fill_rate > 5 * one_row_each


def test_long_documents_leave_no_row_unfilled_but_the_last() -> None:
    packing = pack(chunks_of([1000 * 15 + 1], 16), 16)
    assert packing.num_rows == 1000 and packing.fill_rate == 1.0
