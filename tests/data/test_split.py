"""The held-out split: decided by content, stable, never empty on either side."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis.data.documents import holdout_points, index_documents, split
from genesis.data.records import Document
from genesis.errors import DataError


def parts(texts: list[str]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    index = index_documents(Document(text, "file") for text in texts)
    return index.digests, index.text_bytes


MANY = [f"text {n}" for n in range(4000)]


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_about_the_fraction_is_held_out(seed: int, fraction: float) -> None:
    held_out = split(*parts(MANY), seed=seed, fraction=fraction)
    deviation = (len(MANY) * fraction * (1 - fraction)) ** 0.5
    assert abs(held_out.sum() - len(MANY) * fraction) < 4 * deviation


def test_adding_removing_and_reordering_documents_moves_no_other() -> None:
    before = dict(zip(MANY[:3000], split(*parts(MANY[:3000]), seed=3, fraction=0.1), strict=True))
    changed = [*reversed(MANY[1000:]), "new"]
    after = dict(zip(changed, split(*parts(changed), seed=3, fraction=0.1), strict=True))
    assert all(after[text] == before[text] for text in MANY[1000:3000])


def test_another_seed_holds_out_others() -> None:
    first, second = (split(*parts(MANY), seed=seed, fraction=0.5) for seed in (0, 1))
    assert 1800 < (first ^ second).sum() < 2200


@given(
    kinds=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    seed=st.integers(0, 2**63 - 1),
    fraction=st.sampled_from([1e-9, 0.05, 0.5, 1.0]),
)
def test_both_sides_have_a_document_and_copies_stay_together(kinds: list[int], seed: int, fraction: float) -> None:
    contents = parts([f"kind {kind}" for kind in kinds])
    if len(set(kinds)) == 1:
        with pytest.raises(DataError, match="only one document, copies of one"):
            split(*contents, seed=seed, fraction=fraction)
        return
    held_out = split(*contents, seed=seed, fraction=fraction)
    sides = {bool(side): {k for k, s in zip(kinds, held_out, strict=True) if s == side} for side in (True, False)}
    assert sides[True] and sides[False]
    assert not sides[True] & sides[False]


def test_a_fraction_of_zero_holds_out_nothing() -> None:
    assert not split(*parts(["only one"]), seed=0, fraction=0.0).any()


def test_nothing_to_split_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"no document.*data\.eval_fraction=0"):
        split(*parts([]), seed=0, fraction=0.1)


def test_the_points_are_fixed() -> None:
    # A change of these numbers would move documents between training and held-out data of runs that are resumed.
    assert holdout_points(parts(["a", "b"])[0], seed=5).tolist() == [0.8025294859570262, 0.6748859745009783]


def test_a_document_that_would_be_most_of_the_held_out_text_stays_in_training() -> None:
    for seed in range(20):
        texts = ["x" * 50_000, *(f"text {n} " * 10 for n in range(400))]
        held_out = split(*parts(texts), seed=seed, fraction=0.2)
        assert not held_out[0]
        assert held_out.any()


def test_large_documents_alone_are_split_all_the_same() -> None:
    held_out = split(*parts(["a" * 1000, "b" * 1000, "c" * 1000]), seed=0, fraction=0.05)
    assert held_out.sum() == 1


def test_a_small_document_is_held_out_whatever_its_hash() -> None:
    contents = parts(["x" * 50_000, "y" * 40_000, "small"])
    for seed in range(50):
        assert split(*contents, seed=seed, fraction=0.2).tolist() == [False, False, True]
