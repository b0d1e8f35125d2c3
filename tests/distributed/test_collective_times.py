"""What a step in ranks sends, and what of it the step waits for: counted from its plan, and with streams in an order.

Over a fake of NCCL, on the interpreter's device, whose graphs run in an order that streams and events allow: with the
comm stream first all collectives are done before the step would wait for them, with it last only when it does.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import genesis
from genesis.backend import Device
from genesis.backend.cuda import driver_for
from genesis.backend.cuda.simulated import drivers
from genesis.distributed import Peers
from genesis.measure.collectives import (
    Collective,
    CollectiveWatch,
    StepTimes,
    bus_factor,
    collectives_of,
    medians,
    timed_collectives,
)
from genesis.optim import AdamW
from genesis.optim.optimizer import Optimizer
from genesis.train.captured import Captured
from genesis.train.ranks import Ranks
from genesis_cli.session.bench_steps import captured_steps, new_state
from genesis_models.config import ModelConfig
from genesis_models.registry import build
from tests.cuda.fresh import forget_backends
from tests.cuda.stream_order import STAGING, OrderedDriver, small_spans
from tests.cuda.test_ranks import MODEL
from tests.distributed import fake_nccl
from tests.distributed.forks import ended, start_ranks
from tests.distributed.nccl_ranks import fake_group

CUDA = Device("cuda", 0)
EXCHANGE, NORM, GATHER = "reduce-scatter, gradients", "all-reduce, norm", "all-gather, weights"
LATE_S = 0.02


def test_what_falls_into_waits_is_exposed() -> None:
    calls = [("a", 10, 0.0, 1.0), ("b", 5, 1.0, 2.0), ("a", 10, 2.0, 5.0), ("c", 1, 6.0, 7.0)]
    found = collectives_of(calls, [(0.75, 1.25), (4.0, 5.5), (6.0, 8.0)])
    assert found == [
        Collective("a", 2, 20, 4.0, 1.25),
        Collective("b", 1, 5, 1.0, 0.25),
        Collective("c", 1, 1, 1.0, 1.0),
    ]
    assert [each.hidden for each in found] == [2.75, 0.75, 0.0]
    assert collectives_of(calls[:1], []) == [Collective("a", 1, 10, 1.0, 0.0)]


def test_medians_are_of_like_steps() -> None:
    def step(seconds: float, exposed: float, calls: int = 2) -> StepTimes:
        return StepTimes(10 * seconds, [Collective("a", calls, 20, seconds, exposed)])

    found = medians([step(3.0, 0.5), step(1.0, 1.0), step(2.0, 0.0)])
    assert found == StepTimes(20.0, [Collective("a", 2, 20, 2.0, 0.5)])
    with pytest.raises(AssertionError, match="the same calls"):
        medians([step(1.0, 0.0), step(1.0, 0.0, calls=3)])


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert [bus_factor(name, 4) for name in (EXCHANGE, GATHER, NORM)] == [0.75, 0.75, 1.5]
    assert bus_factor(EXCHANGE, 2) == 0.5 and bus_factor(NORM, 2) == 1.0


# --- In captured steps ------------------------------------------------------------------------------------------------


def _slow_gathers() -> None:
    """Every gather of the fake takes longer."""
    gathered = fake_nccl.Comm.together

    def together(self: fake_nccl.Comm, what: list[Any], data: bytes = b"") -> list[bytes] | None:
        if what[0] == "all_gather":
            time.sleep(LATE_S)
        return gathered(self, what, data)

    fake_nccl.Comm.together = together  # type: ignore[method-assign]


def ordered(peers: Peers, folder: Path, order: str) -> Ranks:
    """Ranks over the fake of NCCL, and this fork's device, whose graphs run in an order."""
    forget_backends()
    driver_for.cache_clear()
    drivers[0] = OrderedDriver(0, order)
    small_spans()
    return Ranks(peers, fake_group(peers, folder, STAGING))


def counted(optimizer: Optimizer) -> list[int]:
    """What a step exchanges: buckets, elements, and partial sums of squares."""
    counts = [(len(flat.buckets), flat.size, flat.squares.size) for flat in optimizer._shared()]
    return [sum(each) for each in zip(*counts, strict=True)]


def _of_model(ranks: Ranks) -> tuple[StepTimes, Optimizer]:
    """Steps of a model, as `bench-model` takes them."""
    model = build(ModelConfig.from_dict(MODEL), seed=0, device="cuda", dtype="bfloat16")
    model.train()
    state = new_state(model, 1, 8, ranks)
    captured = partial(captured_steps, state, CUDA, [])
    return timed_collectives(state.optimizer, ranks.group, captured, 2, ranks.in_turn), state.optimizer


def _of_parameters(ranks: Ranks) -> tuple[StepTimes, Optimizer]:
    """Steps of some parameters without a model, in a tenth of the time."""
    params = [genesis.ones(size, dtype="bfloat16", device="cuda").requires_grad_() for size in (2048, 1024, 2048)]
    optimizer = AdamW(params, lr=0.1, fused=True, ranks=ranks.group)
    report, losses = genesis.zeros(4, device="cuda"), genesis.zeros(2, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with optimizer.exchanging(adds=False):
            for param in params:
                param.sum().backward()
        optimizer.complete()
        optimizer.update(grad_scale=optimizer.clip_factor(report, losses, None))
        optimizer.share()

    watch, steps = CollectiveWatch(optimizer, ranks.group, CUDA), Captured(step, CUDA, print, ranks.all)
    with watch.watching():
        for _ in range(4):
            watch.begin()
            optimizer.begin_step()
            steps()
        assert steps.is_captured
        found = watch.times()
        steps.close()
    return found, optimizer


def _check(make: Any, order: str, folder: Path) -> None:
    """Bytes and calls are those of the plan. What is late is hidden where the step goes on, and exposed where not."""

    def work(peers: Peers) -> Any:
        ranks = ordered(peers, folder, order)
        _slow_gathers()
        times, optimizer = make(ranks)
        counts = counted(optimizer)
        ranks.group.close()
        return [times, counts]

    forks = ended(start_ranks(2, work, folder), 100)
    assert [each.code for each in forks] == [0, 0], [each.error for each in forks]
    for each in forks:
        (computing, rows), (buckets, elements, spans) = each.value
        found = {row[0]: Collective(*row) for row in rows}
        assert buckets > 3 and computing > 0
        assert {name: row[1:3] for name, row in found.items()} == {
            EXCHANGE: (buckets, 2 * elements),
            NORM: (1, 8 * (2 + spans)),  # float64: the losses of both, and the partial sums of squares
            GATHER: (buckets, 2 * elements),
        }
        for row in found.values():
            assert (row.exposed if order == "comm stream first" else row.hidden) == pytest.approx(0, abs=1e-9), row
        assert found[GATHER].seconds > LATE_S  # in one bucket at least, whose parts are alike


@pytest.mark.host
@pytest.mark.parametrize("order", ["comm stream first", "comm stream last"])
def test_a_slow_collective(order: str, tmp_path: Path) -> None:
    _check(_of_parameters, order, tmp_path)


@pytest.mark.full
@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("order", ["comm stream first", "comm stream last"])
def test_a_slow_collective_of_a_model(order: str, tmp_path: Path) -> None:
    _check(_of_model, order, tmp_path)
