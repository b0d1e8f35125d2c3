"""Samples longer than a row: each rule, what it counts, and the bytes that stay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from genesis.data.documents import TokenSet
from genesis.data.loader import PackedLoader
from genesis.data.packing import TooLong, fit
from genesis.errors import DataError
from tests.data.helpers import check_epoch, token_set

SEQ_LEN = 8
# Samples of 5, 20, 8 and 30 tokens; targets are the last token of each and ids 6 to 9, of the second sample.
LENGTHS = [5, 20, 8, 30]


def records() -> TokenSet:
    tokens = token_set(LENGTHS, mask=lambda place: 6 <= place <= 9)
    return dataclasses.replace(tokens, target_bytes=3 * tokens.target_counts)


def fitted(tokens: TokenSet, too_long: TooLong | None) -> tuple[TokenSet, list[tuple[int, str]]]:
    found, notes = fit(tokens, SEQ_LEN, too_long, lambda _: 3)
    return found, [(note.count, note.example) for note in notes]


@pytest.mark.parametrize("too_long", [None, "drop"])
def test_records_that_are_too_long_are_dropped_and_counted(too_long: TooLong | None) -> None:
    found, notes = fitted(records(), too_long)
    assert found.lengths.tolist() == [5, 8] and found.documents.tolist() == [0, 2]
    assert notes == [(2, "file1.txt, 20 tokens")]
    assert found.predicted_bytes == 3 * found.num_targets == 6


def test_a_truncated_record_keeps_its_beginning_or_has_no_target() -> None:
    found, notes = fitted(records(), "truncate")
    assert found.lengths.tolist() == [5, 8, 8] and found.documents.tolist() == [0, 1, 2]
    assert notes == [(2, "file1.txt, 20 tokens"), (1, "file3.txt, 30 tokens")]
    assert found.target_counts.tolist() == [1, 4, 1], "the first token of a sample is never a target"
    assert found.predicted_bytes == 3 * found.num_targets


def test_a_split_record_keeps_all_its_targets_and_no_chunk_without_one() -> None:
    tokens = records()
    found, notes = fitted(tokens, "split")
    assert found is tokens
    # Chunks of the second sample begin at its tokens 0, 7 and 14, of the fourth at 0, 7, 14, 21 and 28.
    assert notes == [(2, "file1.txt, 20 tokens"), (5, "file1.txt, 20 tokens")]
    packed = PackedLoader(found, batch_size=2, seq_len=SEQ_LEN, seed=1)
    check_epoch([packed.batch(0, i) for i in range(packed.num_batches(0))], tokens, (2, SEQ_LEN))
    assert packed.packing(0).chunks.lengths.sum() == 5 + 8 + 6 + 8 + 2


def test_a_record_that_is_too_long_can_be_an_error() -> None:
    with pytest.raises(DataError, match=r"20 tokens, more than the 8 of data\.seq_len.*truncate or split") as caught:
        fitted(records(), "fail")
    assert caught.value.where == "file1.txt"


@pytest.mark.parametrize("too_long, kept", [(None, 4), ("split", 4), ("drop", 2), ("truncate", 4)])
def test_texts_are_split_unless_something_else_is_asked_for(too_long: TooLong | None, kept: int) -> None:
    tokens = token_set(LENGTHS)
    found, notes = fitted(tokens, too_long)
    assert len(found) == kept and (found is tokens) == (not notes) == (too_long in (None, "split"))


def test_of_texts_and_records_only_the_records_are_dropped() -> None:
    tokens = records()
    index = dataclasses.replace(tokens.index, is_record=np.array([True, False, True, True]))
    found, notes = fitted(dataclasses.replace(tokens, index=index), None)
    assert found.documents.tolist() == [0, 1, 2] and notes == [(1, "file3.txt, 30 tokens")]


def test_what_fits_is_the_same_whatever_the_rule() -> None:
    for too_long in (None, "drop", "truncate", "split", "fail"):
        tokens = records()
        assert fit(tokens, 30, too_long, lambda _: 3) == (tokens, ())  # type: ignore[arg-type]
