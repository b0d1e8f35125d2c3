"""Causes come from what was changed: a fixed cost, the host, gaps, temporaries; and from simulated clocks of a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from unittest import mock

import numpy as np
import pytest

import genesis
from genesis import no_grad
from genesis.backend import CPU, Device
from genesis.backend.cpu import threads
from genesis.dtypes import float32
from genesis.measure import causes
from genesis.measure.causes import ISSUES, Examined, Finding, Subject, examine
from genesis.measure.kernels import Launch, Resources
from genesis.measure.limits import Limits
from genesis.measure.timing import Plan
from tests.measure.causes import cases, chain, of_function, waits
from tests.measure.quick import made_limits

CUDA = Device("cuda", 0)
PLAN = Plan(precision=0.5, seconds=0.06, warm_up=0.0, sample=1e-4)


def found(function: Callable[..., object], *shape: int) -> Finding | None:
    x = genesis.tensor(np.ones(shape, np.float32))
    with no_grad():
        return examine(of_function(function, (x,), CPU), made_limits(), PLAN)


def test_a_tiny_call_is_its_own_cost() -> None:
    named = found(lambda x: x + x, 8)
    assert named is not None and named.issue == "launch" and named.share > 0.5


def test_a_sleep_is_the_hosts() -> None:
    named = found(waits, 16)
    assert named is not None and named.issue == "host"


def test_gaps_are_found_by_closing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x = genesis.tensor(np.ones((64, 64), np.float32))
    with no_grad():
        seen = Examined(of_function(lambda x: x.t() + x, (x,), CPU), made_limits(), PLAN)
        monkeypatch.setattr(seen, "clock", lambda call: seen.seconds)
        for saved, issue in ((0.5, "strides"), (0.1, None)):
            monkeypatch.setattr(seen, "ratio", lambda call, base, saved=saved: 1 - saved)
            named = causes._strides(seen)
            assert (None if named is None else named.issue) == issue
        assert causes._strides(Examined(of_function(lambda x: x + x, (x,), CPU), made_limits(), PLAN)) is None


def test_a_function_is_scaled_where_it_can_be() -> None:
    x, w = genesis.ones(16, 4), genesis.ones(4, 3)
    longer = of_function(lambda x, w: x @ w, (x, w), CPU).scaled(2.0)
    assert longer is not None and longer[1] == 2.0 and longer[0]().shape == (32, 3)  # type: ignore[attr-defined]
    shorter = of_function(lambda x, w: x @ w, (x, w), CPU).scaled(1 / 8)
    assert shorter is not None and shorter[0]().shape == (2, 3)  # type: ignore[attr-defined]
    assert of_function(lambda x: x.reshape(16, 4), (x,), CPU).scaled(2.0) is None, "it needs its sizes"
    assert of_function(lambda: None, (), CPU).scaled(2.0) is None
    padded = of_function(lambda x, w: x @ w, (x, w), CPU).scaled(1.5)
    assert padded is not None and padded[1] == 1.5 and padded[0]().shape == (24, 3)  # type: ignore[attr-defined]


@pytest.mark.full
def test_thirty_cases_are_made() -> None:
    expected = [(case.name, set(case.expected.split())) for case in cases(CPU)]
    assert len(expected) == len(dict(expected)) >= 30
    assert all(issues <= set(ISSUES) for _, issues in expected)


# --- With given measurements ------------------------------------------------------------------------------------------


class Given(Examined):
    """What would be measured, given: times relative to the call's, and counted work."""

    def __init__(
        self, wall: float = 1e-3, gpu: float | None = 1e-3, moved: float = 0.1, multiplied: float = 0.0,
        other: tuple[float, float] | None = None, doubled: tuple[float, float] | None = None,
        launches: tuple[Launch, ...] = (), device: Device = CUDA, rows: int = 0, tile: int = 0,
    ) -> None:  # fmt: skip
        self.subject = Subject(lambda: None, device, rows=rows)
        self.limits = Limits(device, float32, 1e10, 1e12, 1e-6, 1e-7)
        self.wall, self.gpu, self.on_gpu, self.plan = wall, gpu, gpu is not None, PLAN
        self._doubled, self._tile = doubled, tile
        self.__dict__.update(launches=list(launches), steps=([], 0.0, 1e-3), other_size=other)
        self.__dict__.update(work=(int(moved * 1e10 * self.seconds), 0), moved=moved, multiplied=multiplied)

    def scaled(self, factor: float) -> tuple[float, float] | None:
        if not self._tile:
            return self._doubled
        rows = self.subject.rows  # a kernel of whole tiles
        return math.ceil(rows * factor / self._tile) / math.ceil(rows / self._tile), factor


def kernel(programs: int, local: int = 0, idle: float = 0.0) -> Launch:
    return Launch("fold", (programs, 1, 1), Resources(128, 40, 0, local, 4, 0.25, 132, 1.0, idle))


@pytest.mark.parametrize(
    ("given", "issue"),
    [
        (partial(Given, wall=1e-3, gpu=2e-4), "launch"),
        (partial(Given, launches=(kernel(1000, local=64),)), "spills"),
        (partial(Given, launches=(kernel(1000, local=64),), moved=0.8), "bandwidth"),
        (partial(Given, launches=(kernel(4),), doubled=(1.05, 2.0)), "occupancy"),
        (partial(Given, launches=(kernel(1000, idle=0.4),), doubled=(1.1, 2.0)), "occupancy"),
        (partial(Given, launches=(kernel(1000),), doubled=(1.1, 2.0)), "latency"),
        (partial(Given, launches=(kernel(4),), doubled=(1.9, 2.0)), None),
        (partial(Given, rows=129, tile=64, multiplied=0.65), "occupancy"),
        (partial(Given, rows=129, tile=128, multiplied=0.5), "occupancy"),
        (partial(Given, rows=4097, tile=128, multiplied=0.75), "compute"),
        (partial(Given, other=(0.05, 0.125)), "cache"),
        (partial(Given, other=(0.125, 0.125)), "compute"),
        (partial(Given, moved=0.6, other=(0.09, 0.125)), "bandwidth"),
        (partial(Given, moved=0.6, other=(0.125, 0.125)), "compute"),
        (partial(Given, multiplied=0.7), "compute"),
        (partial(Given), None),
    ],
)
def test_an_issue_follows_from_measurements_alone(given: Callable[[], Given], issue: str | None) -> None:
    first = next(causes.findings(given()), None)
    assert (None if first is None else first.issue) == issue
    assert first is None or (0 < first.share <= 1 and first.evidence and first.advice)


def test_data_in_the_l2_is_told_by_emptying_it() -> None:
    seen = Given(moved=1.5)
    with mock.patch.object(causes, "cold_calls") as cold, mock.patch.object(causes, "measure") as measure:
        cold.return_value.__enter__.return_value = None
        with mock.patch.object(causes, "cuda_backend"):
            for seconds, issue in ((2e-3, "cache"), (1.1e-3, "bandwidth")):
                measure.return_value.fastest = seconds
                first = next(causes.findings(seen))
                assert first.issue == issue


def test_a_chain_moves_what_only_the_next_op_reads() -> None:
    x = genesis.tensor(np.ones((512, 512), np.float32))
    with no_grad():
        seen = Examined(of_function(partial(chain, 8), (x,), CPU), made_limits(), PLAN)
        one = Examined(of_function(partial(chain, 1), (x,), CPU), made_limits(), PLAN)
        found = causes._temporaries(seen)
        assert found is not None and "11.0 MiB of temporaries" not in found.evidence
        assert "2.0 MiB of operands" in found.evidence
        assert causes._temporaries(one) is None


def test_the_end_of_a_tile_and_of_a_wave_are_tried() -> None:
    assert causes._row_factors(Given(rows=129)) == [2.0, 1.488, 1.984]
    assert causes._row_factors(Given(rows=128)) == [2.0]
    few = Resources(128, 40, 0, 0, 4, 0.25, 132, 2.05, 0.3)
    assert causes._row_factors(Given(launches=(Launch("fold", (1083, 1, 1), few),))) == [2.0, 1.463]


def test_ratios_that_do_not_agree_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, count = Given(device=CPU, gpu=None), threads()
    times = iter([1.0, 2.0] * 3)
    monkeypatch.setattr(seen, "clock", lambda call: next(times))
    assert seen.ratio(lambda: None) == 0.5 and threads() == count, "work was timed in one thread"
    rising = iter(2.0**n for n in range(100))
    monkeypatch.setattr(seen, "clock", lambda call: next(rising))
    assert seen.ratio(lambda: None) is None
