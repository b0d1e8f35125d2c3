"""Packed samples with masks train as they would alone, in one batch or in several, and bits are per byte learned."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

import genesis
import genesis_models
from genesis.backend import CPU
from genesis.data.documents import TokenSet
from genesis.data.loader import IGNORE_INDEX, Batch, PackedLoader
from genesis.data.pipeline import HeldOut
from genesis.data.records import Defects
from genesis.train.evaluation import evaluate
from genesis.train.objective import NextTokens
from genesis.train.step import accumulate_gradients
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from tests.data.helpers import token_set
from tests.train.test_shards import RAW

LENGTHS = [7, 3, 12, 5, 9, 4, 2, 10, 15, 6]
SEQ_LEN = 16


def model(dtype: str = "float32", scale: float = 1.0) -> CausalLM:
    made = genesis_models.build(ModelConfig.from_dict(RAW), seed=0, device="cpu", dtype="float32").to(dtype=dtype)
    for parameter in made.parameters():
        parameter.data.mul_(scale)
    return made


def tokens() -> TokenSet:
    made = token_set(LENGTHS, mask=lambda place: place % 3 == 1)
    ids = np.random.default_rng(0).integers(0, RAW["vocab_size"], len(made.stream))
    target_bytes = 5 * made.target_counts
    return dataclasses.replace(made, stream=ids.astype(np.uint16), pad_id=0, target_bytes=target_bytes)


def batches(made: TokenSet, batch_size: int) -> list[Batch]:
    loader = PackedLoader(made, batch_size=batch_size, seq_len=SEQ_LEN, seed=3)
    return [loader.batch(0, index) for index in range(loader.num_batches(0))]


def logits(made: CausalLM, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    with genesis.no_grad():
        return made(genesis.from_numpy(ids), position_ids=genesis.from_numpy(positions)).numpy()


def summed(made: CausalLM, ids: np.ndarray, labels: np.ndarray, positions: np.ndarray) -> float:
    given = map(genesis.from_numpy, (ids, labels, positions))
    with genesis.no_grad():
        input_ids, targets, position_ids = given
        return float(made.loss(input_ids, targets, position_ids=position_ids, num_targets=1).item())


# Larger weights make the logits of a fresh model large, so that the smallest leak shows where float64 rounds little.
@pytest.mark.parametrize("dtype, scale, tolerance", [("float32", 1.0, 1e-5), ("float64", 4.0, 1e-12)])
def test_right_from_day_one_4_packed_samples_are_as_if_alone(dtype: str, scale: float, tolerance: float) -> None:
    made, data = model(dtype, scale), tokens()
    total, seen, leaks = 0.0, 0, 0.0
    for batch in batches(data, 2):
        packed = logits(made, batch.input_ids, batch.position_ids)
        leaking = logits(made, batch.input_ids, np.tile(np.arange(SEQ_LEN), (2, 1)))
        columns = [0, 0]
        for row, sample, first, count in batch.samples.tolist():
            assert first == 0, "no sample is longer than a row here"
            begin = int(data.starts[sample])
            ids = data.stream[begin : begin + count].astype(np.int64)[None]
            assert data.mask is not None
            is_target = (data.mask[begin : begin + count] != 0) & (np.arange(count) > 0)
            labels = np.where(is_target, ids, IGNORE_INDEX)
            positions = np.arange(count)[None]
            where = slice(columns[row], columns[row] + count)
            np.testing.assert_allclose(packed[row, where], logits(made, ids, positions)[0], rtol=0, atol=tolerance)
            assert (batch.labels[row, where] == labels[0]).all()
            leaks = max(leaks, float(np.abs(leaking[row, where] - packed[row, where]).max()))
            total += summed(made, ids, labels, positions)
            columns[row] += count
        seen += batch.num_targets
        together = summed(made, batch.input_ids, batch.labels, batch.position_ids)
        total -= together
        assert abs(total) <= tolerance * together
    assert seen == data.num_targets < data.num_tokens / 2
    assert leaks > 1e3 * tolerance, "the check would not see a leak"


def test_right_from_day_one_1_accumulation_with_masks_is_one_big_batch() -> None:
    data = tokens()
    small = batches(data, 1)
    (big,) = batches(data, len(small))
    counts = [batch.num_targets for batch in small]
    assert sum(counts) == big.num_targets and max(counts) > min(counts)

    def gradients(parts: list[Batch], divisors: list[int]) -> tuple[float, dict[str, np.ndarray]]:
        made = model("float64")
        loss = sum(
            accumulate_gradients(NextTokens(), made, part, n, CPU)[0] for part, n in zip(parts, divisors, strict=True)
        )
        return loss, {name: p.grad.numpy() for name, p in made.named_parameters()}

    def furthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
        return max(float(np.abs(one[n] - other[n]).max() / np.abs(other[n]).max()) for n in other)

    whole_loss, whole = gradients([big], [big.num_targets])
    loss, found = gradients(small, [big.num_targets] * len(small))
    assert loss == pytest.approx(whole_loss, rel=1e-6) and furthest(found, whole) < 1e-6
    _, means = gradients(small, [batch.num_targets * len(small) for batch in small])
    assert furthest(means, whole) > 1e-3, "the mean of means would be seen"


def test_bits_per_byte_of_records_are_per_byte_of_their_targets() -> None:
    data = tokens()
    found = evaluate(
        NextTokens(),
        model(),
        HeldOut(data, None, Defects()),
        batch_size=2,
        seq_len=SEQ_LEN,
        max_batches=None,
        device=CPU,
    )
    assert found is not None and found.targets == data.num_targets
    bits = found.loss / math.log(2) * data.num_targets
    assert found.bits_per_byte == pytest.approx(bits / (5 * data.num_targets), rel=1e-12)
