"""Batches: each token a target once an epoch, the same everywhere, and a position that can be saved."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genesis import exact
from genesis.data.documents import TokenSet
from genesis.data.loader import IGNORE_INDEX, Batch, PackedLoader
from genesis.errors import ConfigError, DataError, IndexRangeError, ModelError
from genesis.ops.attention import KEY_BLOCK
from tests.data.helpers import check_epoch, raised, run_python, token_set

LENGTHS = [2, 90, 3, 17, 16, 15, 33, 2, 5, 48, 7, 31, 11]
BATCHES = """
import hashlib, json, sys
from genesis.data.loader import PackedLoader
from tests.data.helpers import token_set
loader = PackedLoader(token_set(range(2, 60)), batch_size=3, seq_len=24, seed=11)
digest = hashlib.sha256()
for _ in range(90):
    batch = next(loader)
    for array in (batch.input_ids, batch.labels, batch.position_ids, batch.samples):
        digest.update(array.tobytes())
print(json.dumps([digest.hexdigest(), loader.state()]))
"""
# Of the program above. Another value means that resumed runs would see other batches than before.
GOLDEN = "75973ee0480ad103d59ae6c0d7e3166616bfa9c32ecf1f6997827c6780133f41"


def loader(lengths: Any = LENGTHS, **changes: Any) -> PackedLoader:
    settings = {"batch_size": 3, "seq_len": 16, "seed": 5}
    return PackedLoader(token_set(lengths), **settings | changes)


def epoch_of(loader: PackedLoader, epoch: int) -> list[Batch]:
    return [loader.batch(epoch, index) for index in range(loader.num_batches(epoch))]


def same(first: Batch, second: Batch) -> bool:
    """Whether two batches are equal, whichever set of tokens they are of."""
    one, other = ({key: value for key, value in vars(each).items() if key != "tokens"} for each in (first, second))
    return all(np.array_equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


@given(
    lengths=st.lists(st.integers(2, 70), min_size=1, max_size=40),
    batch_size=st.integers(1, 7),
    seq_len=st.integers(2, 33),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 10**6),
    shuffle=st.booleans(),
    gap=st.integers(0, 3),
    every=st.sampled_from([None, 1, 2, 7, 40]),
)
def test_an_epoch_predicts_each_target_exactly_once(
    lengths: list[int], batch_size: int, seq_len: int, seed: int, epoch: int, shuffle: bool, gap: int, every: int | None
) -> None:
    """With masks too, where chunks and rows of prompts alone could come about."""
    tokens = token_set(lengths, gap=gap, mask=None if every is None else lambda place: place % every == 0)
    packed = PackedLoader(tokens, batch_size=batch_size, seq_len=seq_len, seed=seed, shuffle=shuffle)
    batches = epoch_of(packed, epoch)
    check_epoch(batches, tokens, (batch_size, seq_len))
    assert sum(batch.num_targets for batch in batches) == tokens.num_targets


def put(name: str, row: int, column: int, value: int) -> Callable[[list[Batch]], list[Batch]]:
    def change(batches: list[Batch]) -> list[Batch]:
        array = getattr(batches[0], name).copy()
        array[row, column] = value
        return [dataclasses.replace(batches[0], **{name: array}), *batches[1:]]

    return change


@pytest.mark.parametrize(
    "spoil",
    [
        lambda batches: batches[1:],
        lambda batches: [*batches, batches[0]],
        lambda batches: [dataclasses.replace(batches[0], num_targets=batches[0].num_targets - 1), *batches[1:]],
        lambda batches: [dataclasses.replace(batches[0], num_tokens=batches[0].num_tokens + 1), *batches[1:]],
        lambda batches: [dataclasses.replace(batches[0], samples=batches[0].samples[1:]), *batches[1:]],
        lambda batches: [dataclasses.replace(batches[0], labels=batches[1].labels), *batches[1:]],
        put("labels", 0, 0, 1),
        put("labels", 0, 1, IGNORE_INDEX),
        put("labels", 0, 1, 3),
        put("input_ids", 0, 1, 3),
        put("input_ids", 0, 0, sum(LENGTHS) + 7),
        put("position_ids", 0, 1, 0),
        put("position_ids", 0, 2, 1),
        put("position_ids", 0, 0, 1),
    ],
)
def test_the_checker_of_epochs_sees_every_fault(spoil: Callable[[list[Batch]], list[Batch]]) -> None:
    packed = loader()
    batches = epoch_of(packed, 0)
    check_epoch(batches, packed.tokens, (3, 16))
    with pytest.raises(AssertionError):
        check_epoch(spoil(batches), packed.tokens, (3, 16))


def test_two_processes_give_the_same_batches_as_ever() -> None:
    digest, state = run_python(BATCHES, PYTHONHASHSEED="1")
    assert run_python(BATCHES, PYTHONHASHSEED="2") == [digest, state]
    assert digest == GOLDEN


def test_the_state_of_numpys_generator_plays_no_part() -> None:
    np.random.seed(1)
    first = loader().batch(3, 1)
    np.random.seed(2)
    assert same(first, loader().batch(3, 1))


def test_seed_and_epoch_change_the_order_and_index_alone_does_not() -> None:
    first = loader().batch(0, 0)
    assert not same(dataclasses.replace(loader().batch(1, 0), epoch=0), first)
    assert not same(loader(seed=6).batch(0, 0), first)
    packed = loader()
    packed.batch(4, 1)
    assert same(packed.batch(0, 0), first)


def test_documents_meet_other_documents_in_other_epochs() -> None:
    packed = loader([5] * 60, seq_len=10, batch_size=1)

    def pairs(epoch: int) -> set[tuple[int, ...]]:
        return {tuple(sorted(batch.samples[:, 1].tolist())) for batch in epoch_of(packed, epoch)}

    assert len(pairs(0)) == 30
    assert len(pairs(0) & pairs(1)) < 5


def test_without_shuffling_every_epoch_is_the_data_in_order() -> None:
    packed = loader(shuffle=False, batch_size=2)
    for epoch in (0, 1):
        firsts = [batch.samples[:, 1].min() for batch in epoch_of(packed, epoch)]
        assert firsts == sorted(firsts)
    assert same(dataclasses.replace(packed.batch(1, 2), epoch=0), packed.batch(0, 2))


@given(rows=st.integers(1, 60), batch_size=st.integers(1, 9))
def test_batches_share_the_rows_evenly(rows: int, batch_size: int) -> None:
    packed = loader([16] * rows, batch_size=batch_size)
    counts = [len(batch.samples) for batch in epoch_of(packed, 0)]
    assert len(counts) == -(-rows // batch_size) and sum(counts) == rows
    assert max(counts) - min(counts) <= 1


def test_rows_beyond_the_data_hold_no_token_and_no_target() -> None:
    batch = loader([16] * 4).batch(0, 0)
    assert batch.input_ids.shape == (3, 16)
    assert (batch.input_ids[2] == loader([16] * 4).tokens.pad_id).all()
    assert (batch.labels[2] == IGNORE_INDEX).all()
    assert batch.position_ids[2].tolist() == list(range(16))
    assert (batch.num_tokens, batch.num_targets) == (32, 30)


def test_labels_follow_the_mask_and_a_chunk_of_prompts_alone_is_left_out() -> None:
    tokens = token_set([12, 3], mask=lambda place: False)
    batch = PackedLoader(tokens, batch_size=1, seq_len=5, seed=0, shuffle=False).batch(0, 0)
    assert batch.input_ids.tolist() == [[8, 9, 10, 11, tokens.pad_id]] and batch.samples.tolist() == [[0, 0, 8, 4]]
    assert batch.labels.tolist() == [[-100, -100, -100, 11, -100]] and batch.num_targets == 1
    first = PackedLoader(tokens, batch_size=1, seq_len=16, seed=0, shuffle=False).batch(0, 0)
    assert first.labels[0, [11, 14]].tolist() == [11, 14] and first.num_targets == tokens.num_targets == 2
    assert tokens.target_counts.tolist() == [1, 1]


def test_an_epoch_has_a_sample_as_often_as_its_weight_says() -> None:
    weights = np.array([0.0, 1.0, 2.0, 0.5, 1.25] * 40)
    tokens = dataclasses.replace(token_set([4] * 200), weights=weights)
    packed = PackedLoader(tokens, batch_size=7, seq_len=16, seed=5)
    counts = np.zeros(200)
    for epoch in range(40):
        seen = np.bincount(np.concatenate([b.samples[:, 1] for b in epoch_of(packed, epoch)]), minlength=200)
        assert (seen >= np.floor(weights)).all() and (seen <= np.ceil(weights)).all()
        counts += seen
    for weight in np.unique(weights):
        mean, spread = counts[weights == weight].mean() / 40, np.sqrt(weight % 1 * (1 - weight % 1) / 1600)
        assert abs(mean - weight) <= 4 * spread
    whole = list(itertools.islice(PackedLoader(tokens, batch_size=7, seq_len=16, seed=5), 60))
    resumed = PackedLoader(tokens, batch_size=7, seq_len=16, seed=5)
    resumed.load_state({**resumed.state(), "epoch": whole[30].epoch, "index": whole[30].index})
    assert all(same(a, b) for a, b in zip(resumed, whole[30:], strict=False))


def test_unshuffled_samples_of_fractional_weights_are_the_same_in_every_epoch() -> None:
    tokens = dataclasses.replace(token_set([4] * 60), weights=np.array([0.5, 1.5, 0.25] * 20))
    packed = PackedLoader(tokens, batch_size=4, seq_len=16, seed=5, shuffle=False)
    first = epoch_of(packed, 0)
    order = np.concatenate([batch.samples[:, 1] for batch in first])
    assert (np.diff(order) >= 0).all() and 0 < len(set(order.tolist()) & set(range(0, 60, 3))) < 20
    for epoch in (1, 2, 0, 7):
        again = epoch_of(packed, epoch)
        assert [b.input_ids.tolist() for b in again] == [b.input_ids.tolist() for b in first]
        assert [b.samples.tolist() for b in again] == [b.samples.tolist() for b in first]


def test_weights_of_one_change_nothing() -> None:
    plain = loader()
    weighted = PackedLoader(
        dataclasses.replace(plain.tokens, weights=np.ones(len(LENGTHS))), batch_size=3, seq_len=16, seed=5
    )
    assert all(same(a, b) for a, b in zip(epoch_of(plain, 3), epoch_of(weighted, 3), strict=True))
    assert weighted.state() == plain.state()


def test_no_epoch_is_empty_however_small_the_weights() -> None:
    tokens = dataclasses.replace(token_set([4] * 3), weights=np.array([1e-9, 0.0, 1e-9]))
    packed = PackedLoader(tokens, batch_size=2, seq_len=8, seed=0)
    seen = [next(packed).samples[:, 1].tolist() for _ in range(30)]
    assert {len(samples) for samples in seen} == {1} and {sample for (sample,) in seen} == {0, 2}


@pytest.mark.parametrize("weights", [[1.0, -1.0], [0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], [1.0], [1e12, 1.0]])
def test_weights_that_make_no_epoch_are_refused(weights: list[float]) -> None:
    with pytest.raises(DataError, match="weights"):
        PackedLoader(dataclasses.replace(token_set([4, 4]), weights=np.array(weights)), batch_size=1, seq_len=8, seed=0)


def test_padding_is_told_by_length_when_the_pad_id_also_ends_texts() -> None:
    tokens = dataclasses.replace(token_set([5]), stream=np.array([0, 8, 9, 8, 0], np.uint16), pad_id=0)
    batch = PackedLoader(tokens, batch_size=1, seq_len=8, seed=0).batch(0, 0)
    assert batch.input_ids.tolist() == [[0, 8, 9, 8, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[-100, 8, 9, 8, 0, -100, -100, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]


def test_the_samples_of_a_batch_are_described_for_reports() -> None:
    packed = loader([20, 3])
    lines = [line for batch in epoch_of(packed, 0) for line in packed.describe(batch)]
    assert sorted(line.partition(": ")[2] for line in lines) == [
        "file0.txt, tokens 0 to 15",
        "file0.txt, tokens 15 to 19",
        "file1.txt, tokens 0 to 2",
    ]


@pytest.mark.parametrize("consumed", range(0, 19, 3))
def test_a_resumed_loader_goes_on_where_the_other_stopped(consumed: int) -> None:
    whole = list(itertools.islice(loader(), consumed + 12))
    stopped = loader()
    for _ in range(consumed):
        next(stopped)
    resumed = loader()
    resumed.load_state(json.loads(json.dumps(stopped.state())))
    assert resumed.epochs_done == stopped.epochs_done
    assert all(same(a, b) for a, b in zip(itertools.islice(resumed, 12), whole[consumed:], strict=True))


def test_iteration_passes_through_epochs() -> None:
    packed = loader()
    seen = [(batch.epoch, batch.index) for batch in itertools.islice(packed, 3 * packed.num_batches(0) + 2)]
    assert seen[0] == (0, 0) and (1, 0) in seen and (2, 0) in seen
    assert seen == sorted(seen)
    assert 3 <= packed.epochs_done < 4


class _Changed:
    """Ways in which a saved state can differ, with the error that each must give."""

    CASES: tuple[tuple[dict[str, Any], str], ...] = (
        ({"data": "other"}, "DataError 4"),
        ({"tokenizer": "other"}, "ModelError 5"),
        # New data also give a new tokenizer where it is trained on them: the data are to blame.
        ({"data": "other", "tokenizer": "other"}, "DataError 4"),
        ({"seed": 6}, "ConfigError 3"),
        ({"batch_size": 4}, "ConfigError 3"),
        ({"seq_len": 17}, "ConfigError 3"),
        ({"shuffle": False}, "ConfigError 3"),
        ({"version": 2}, "ModelError 5"),
        ({"index": -1}, "ModelError 5"),
        ({"index": 10**6}, "ModelError 5"),
        ({"index": "0"}, "ModelError 5"),
        ({"epoch": -1}, "ModelError 5"),
        ({"epoch": 1.0}, "ModelError 5"),
        ({"epoch": True}, "ModelError 5"),
        ({"extra": 1}, "ModelError 5"),
    )


@pytest.mark.parametrize("change,error", _Changed.CASES)
def test_a_state_of_another_run_is_refused_and_changes_nothing(change: dict[str, Any], error: str) -> None:
    packed = loader()
    next(packed)
    before = packed.state()
    assert raised(lambda: packed.load_state(before)) == ""
    assert raised(lambda: packed.load_state(before | change)) == error
    assert packed.state() == before


def test_a_state_without_a_field_is_refused() -> None:
    packed = loader()
    for key in packed.state():
        state = {name: value for name, value in packed.state().items() if name != key}
        with pytest.raises(ModelError, match="it has other fields"):
            packed.load_state(state)


@pytest.mark.parametrize("epoch,index", [(0, -1), (0, 10**6)])
def test_a_batch_outside_the_epoch_is_an_error(epoch: int, index: int) -> None:
    with pytest.raises(IndexRangeError, match=f"not {index}"):
        loader().batch(epoch, index)


@pytest.mark.parametrize("change", [{"batch_size": 0}, {"seq_len": 1}, {"seed": -1}, {"seed": 2**64}])
def test_sizes_that_make_no_batch_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        loader(**change)


def test_a_document_without_a_target_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match="no target token") as caught:
        loader([5, 1, 5])
    assert caught.value.where == "file1.txt"


def test_no_documents_are_an_error() -> None:
    tokens = token_set([4])
    none: TokenSet = tokens.select(np.array([False]))
    with pytest.raises(DataError, match="no documents"):
        PackedLoader(none, batch_size=1, seq_len=8, seed=0)


@pytest.mark.parametrize("seq_len", [256, 200])
def test_documents_of_exact_runs_begin_at_key_blocks(seq_len: int) -> None:
    """Also in rows that are no multiple of the block. Every token is a target once."""
    lengths = [2, 90, 3, 64, 65, 190, 33, 200, 5, 128, 7, 130, 450]
    with exact():
        packed = loader(lengths, seq_len=seq_len)
    packing = packed.packing(0)
    assert not (packing.columns % KEY_BLOCK).any() and packing.columns.any()
    assert (packing.columns + packing.chunks.lengths <= seq_len).all()
    batches = epoch_of(packed, 0)
    assert sum(batch.num_targets for batch in batches) == sum(lengths) - len(lengths)
    for batch in batches:
        starts = np.arange(seq_len) - batch.position_ids
        assert not (starts[batch.labels != IGNORE_INDEX] % KEY_BLOCK).any()
        assert (np.diff(starts) >= 0).all() and (starts >= 0).all()
