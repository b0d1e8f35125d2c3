"""Timing on a clock that the test turns: when it stops, what it leaves out, when it calls a figure noisy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from genesis.measure.timing import LEAST_SAMPLES, Plan, Timing, measure, median_interval, of_wall, summarize


class Machine:
    """A call whose durations are given, and a clock that only it moves."""

    def __init__(self, durations: Callable[[int], float]) -> None:
        self.durations, self.now, self.count = durations, 0.0, 0

    def call(self) -> None:
        self.now += self.durations(self.count)
        self.count += 1

    def clock(self) -> float:
        return self.now

    def measured(self, **plan: float) -> Timing:
        sampler = of_wall(self.call, lambda: None, self.clock)
        return measure(sampler, Plan(**{"warm_up": 0.0, **plan}, clock=self.clock))  # type: ignore[arg-type]


def test_a_quiet_machine_is_believed_soon() -> None:
    machine = Machine(lambda i: 1e-3 * (1 + 0.005 * (i % 3 - 1)))
    found = machine.measured(seconds=10.0)
    assert found.seconds == pytest.approx(1e-3, rel=0.01)
    assert (found.samples, found.outliers, found.is_noisy) == (LEAST_SAMPLES, 0, False)
    assert machine.now < 0.1


def test_precision_is_reached_by_more_samples() -> None:
    rng = np.random.default_rng(1)
    times = rng.normal(1e-3, 5e-5, 100_000)
    rough = Machine(lambda i: times[i]).measured(precision=0.05, seconds=50.0)
    fine = Machine(lambda i: times[i]).measured(precision=0.005, seconds=50.0)
    assert rough.samples < fine.samples
    assert fine.half_width <= 0.005 < rough.half_width <= 0.05
    assert fine.seconds == pytest.approx(1e-3, rel=0.01)


def test_outliers_are_left_out_and_counted() -> None:
    found = Machine(lambda i: 0.2 if i % 10 == 7 else 1e-3 + 1e-6 * (i % 5)).measured(seconds=10.0, precision=1e-6)
    assert found.seconds == pytest.approx(1e-3, rel=0.01)
    assert found.outliers > 0
    assert found.outliers == pytest.approx((found.samples + found.outliers) / 10, abs=1)
    assert found.fastest == pytest.approx(1e-3)


def test_a_loud_machine_is_called_noisy_when_the_time_is_over() -> None:
    rng = np.random.default_rng(2)
    times = rng.uniform(1e-3, 9e-3, 100_000)
    machine = Machine(lambda i: times[i])
    found = machine.measured(seconds=0.2)
    assert found.is_noisy
    assert found.spread > 0.1
    assert 0.2 <= machine.now < 0.25


def test_many_outliers_are_noise() -> None:
    assert not summarize([1.0] * 90 + [9.0] * 10).is_noisy
    assert summarize([1.0] * 70 + [9.0] * 30).is_noisy


def test_short_calls_are_timed_several_at_once() -> None:
    assert Machine(lambda i: 1e-5).measured().calls == 100
    assert Machine(lambda i: 1e-2).measured().calls == 1
    assert Machine(lambda i: 1e-9).measured(most_calls=50).calls == 50
    assert Machine(lambda i: 0.0).measured(seconds=-1.0).calls == 1000


def test_the_first_calls_do_not_count() -> None:
    found = Machine(lambda i: 1.0 if i == 0 else 1e-3).measured(warm_up=1.001)
    assert found.seconds == pytest.approx(1e-3)
    assert found.outliers == 0


def coverage(count: int, low: int) -> float:
    """How often the median lies between the `low`-th least and greatest of `count` samples, counted from 0."""
    return 1 - 2 * sum(math.comb(count, k) for k in range(low + 1)) / 2**count


def test_the_interval_holds_the_median_19_times_in_20() -> None:
    for count in range(6, 300):
        low, high = median_interval(count)
        assert high == count - 1 - low
        assert coverage(count, low) >= 0.945
        assert coverage(count, low + 1) < 0.98  # and it is not wider than need be


def test_few_samples_have_no_interval() -> None:
    assert median_interval(5) == (0, 5)
    assert summarize([1.0] * 5).half_width == math.inf
    assert summarize([1.0] * 5).is_noisy
    assert summarize([1.0, 2.0]).spread == pytest.approx(2 / 3)


@pytest.fixture
def waiting() -> tuple[Machine, Callable[[], None]]:
    machine = Machine(lambda i: 1.0)

    def wait() -> None:
        machine.now += 10.0

    return machine, wait


def test_wall_time_holds_the_last_wait_and_host_time_none(waiting: tuple[Machine, Callable[[], None]]) -> None:
    machine, wait = waiting
    assert of_wall(machine.call, wait, machine.clock)(3) == 13.0
    assert of_wall(machine.call, wait, machine.clock, of_host=True)(3) == 3.0
