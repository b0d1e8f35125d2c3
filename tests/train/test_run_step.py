"""Accumulation: micro-batches with uneven numbers of targets give the gradients, loss and norm of one big batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import genesis
from genesis.backend import CPU
from genesis.data.loader import IGNORE_INDEX, Batch
from genesis.train.device_steps import Feed, Reading, _Step
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis.train.step import take_step
from tests.train.runs import assembled, load

EPSILON = float(np.finfo(np.float64).eps)


@pytest.fixture
def wide(recipe: Path, tmp_path: Path) -> tuple[TrainState, Any]:
    """A state whose model computes in float64, so that what is wrong stands out from what is rounding; its device."""
    config = load(recipe, str(tmp_path / "run"), "train.batch_size=3")
    training = assembled(config)
    model = training.state.model.to(dtype="float64")
    return dataclasses.replace(
        training.state, optimizer=build_optimizer(config.optim, model.named_parameters(), 0)
    ), training.device


def with_targets(batch: Batch, keep: Sequence[int]) -> Batch:
    """The batch with only the first `keep[row]` places of each row as labels."""
    labels = batch.labels.copy()
    for row, count in enumerate(keep):
        labels[row, count:] = IGNORE_INDEX
    return dataclasses.replace(batch, labels=labels, num_targets=int((labels[:, 1:] != IGNORE_INDEX).sum()))


def joined(batches: Sequence[Batch]) -> Batch:
    """One batch with the rows of all."""
    fields = {n: np.concatenate([getattr(b, n) for b in batches]) for n in ("input_ids", "labels", "position_ids")}
    counts = {n: sum(getattr(b, n) for b in batches) for n in ("num_targets", "num_tokens")}
    return dataclasses.replace(batches[0], **fields, **counts)


def figures(wide: tuple[TrainState, Any], batches: Sequence[Batch]) -> tuple[dict[str, np.ndarray], float, float]:
    """Gradients, mean loss and gradient norm of a step with rate 0 on `batches`."""
    state, device = wide
    result = take_step(state, batches, 0.0, None, device)
    gradients = {name: p.grad.numpy().copy() for name, p in state.model.named_parameters()}
    return gradients, result.loss_sum / result.targets, result.grad_norm


def furthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest difference of two gradients, relative to the largest entry of its tensor."""
    return max(float(np.abs(one[n] - other[n]).max() / np.abs(other[n]).max()) for n in other)


@pytest.fixture
def uneven(wide: tuple[TrainState, Any]) -> list[Batch]:
    """Three micro-batches with 62, 28 and 3 targets."""
    first, second, third = (wide[0].loader.batch(0, index) for index in range(3))
    batches = [first, with_targets(second, (2, 20, 9)), with_targets(third, (4, 0, 0))]
    assert batches[0].num_targets > 2 * batches[1].num_targets > 10 * batches[2].num_targets > 0
    return batches


def test_accumulation_equals_one_big_batch(wide: tuple[TrainState, Any], uneven: list[Batch]) -> None:
    gradients, loss, norm = figures(wide, uneven)
    whole, whole_loss, whole_norm = figures(wide, [joined(uneven)])
    # The sums over up to 288 places are made in another order, and the backward passes add a few more.
    tolerance = 288 * EPSILON
    assert furthest(gradients, whole) <= tolerance
    assert loss == pytest.approx(whole_loss, rel=tolerance)
    assert norm == pytest.approx(whole_norm, rel=tolerance)


def test_the_mean_of_the_micro_batches_is_something_else(wide: tuple[TrainState, Any], uneven: list[Batch]) -> None:
    """The mistake that the test above is about would be seen."""
    means = [figures(wide, [batch])[0] for batch in uneven]
    averaged = {name: sum(mean[name] for mean in means) / len(means) for name in means[0]}
    assert furthest(averaged, figures(wide, [joined(uneven)])[0]) > 0.01


def test_a_batch_repeated_weighs_as_much_as_once(wide: tuple[TrainState, Any]) -> None:
    batch = wide[0].loader.batch(0, 0)
    once, twice = figures(wide, [batch]), figures(wide, [batch, batch])
    assert furthest(twice[0], once[0]) <= 4 * EPSILON
    assert twice[1] == pytest.approx(once[1], rel=4 * EPSILON)


def test_gradients_do_not_outlive_their_step(wide: tuple[TrainState, Any]) -> None:
    first, second = (wide[0].loader.batch(0, index) for index in range(2))
    alone = figures(wide, [second])
    figures(wide, [first])
    assert furthest(figures(wide, [second])[0], alone[0]) == 0.0


@pytest.mark.parametrize("limit, clipped", [(None, False), (1e-3, True), (1e6, False)])
def test_clipping(wide: tuple[TrainState, Any], limit: float | None, clipped: bool) -> None:
    """The norm that is reported is that before clipping; the update is that of the clipped gradient."""
    state, device = wide
    batch = state.loader.batch(0, 0)
    _, _, norm = figures(wide, [batch])
    assert 1e-3 < norm < 1e6
    seen: list[float] = []
    step = state.optimizer.step

    def noted(*, grad_scale: float) -> None:
        seen.append(grad_scale)
        step(grad_scale=grad_scale)

    state.optimizer.step = noted  # type: ignore[method-assign,assignment]
    assert take_step(state, [batch], 0.0, limit, device).grad_norm == norm
    assert seen == [pytest.approx(limit / norm, rel=1e-3) if clipped and limit else 1.0]


class Instant:
    """A position in a stream, as an event of CUDA, at a known time."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def elapsed_time(self, later: Instant) -> float:
        return later.ms - self.ms


def test_each_step_of_one_reading_has_its_own_seconds() -> None:
    """The first is timed from where the reading began, the others from the end of the step before."""
    steps = [_Step(i, ((0, i),), 10, 20, Instant(end), {}) for i, end in enumerate((103.0, 104.0, 111.0))]  # type: ignore[arg-type]
    reading = Reading.__new__(Reading)
    vars(reading).update(_begun=Instant(100.0), _launched=steps, _arrived=mock.Mock(), _host=genesis.full((3, 2), 0.5))
    found = reading.results()
    assert [each.seconds for each in found] == pytest.approx([0.003, 0.001, 0.007])
    assert [(each.loss_sum, each.grad_norm) for each in found] == [(5.0, 0.5)] * 3


def test_a_batch_lies_in_one_piece_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy brings a batch, its targets, its scalars and its position."""
    monkeypatch.setattr("genesis.train.device_steps.cuda", mock.Mock())
    monkeypatch.setattr("genesis.train.device_steps._Slot", mock.Mock())
    feed = Feed(CPU, [np.zeros((2, 3), np.int64), np.zeros(4, np.int64)], 2)
    feed._words.array.numpy()[...] = np.arange(15)
    assert [each.numpy().tolist() for each in feed.fields] == [[[0, 1, 2], [3, 4, 5]], [6, 7, 8, 9]]
    assert feed.num_targets.item() == 10
    assert feed.position.tolist() == [13, 14]
    assert feed.scalars.numpy().view(np.int64).tolist() == [11, 12]
