"""Parts of a step that become graphs: every call does its work once, captured or not."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import genesis
from genesis import cuda, random
from genesis.backend import Device, backend_for
from genesis.backend.cuda.graph import SHARED, close_graphs
from genesis.cuda.graphs import FunctionGraph
from genesis.errors import DeviceError, UsageError
from genesis.functions.random import dropout
from genesis.train.captured import Captured

CUDA = Device("cuda")


def counted() -> tuple[genesis.Tensor, Any, list[None]]:
    """A total on the device, a function that adds 1 to it, and a list as long as the function's runs on the host."""
    total, runs = genesis.zeros((), device="cuda"), []

    def function() -> None:
        runs.append(None)
        total.add_(1)

    return total, function, runs


def test_every_call_does_the_work_once_and_the_fourth_costs_the_host_nothing() -> None:
    total, function, runs = counted()
    part = Captured(function, CUDA, note=lambda line: pytest.fail(line))
    for calls in range(1, 7):
        part()
        assert total.item() == calls
        assert part.is_captured == (calls > 2)
    assert len(runs) == 3


def test_a_closed_part_begins_again_and_leaves_its_memory() -> None:
    # An open graph of an earlier test would keep memory of all graphs reserved, and this one would grow into it.
    pool = backend_for(CUDA).pool  # type: ignore[attr-defined]
    close_graphs(pool.backend)
    gc.collect()
    cuda.empty_cache()
    total, function, runs = counted()
    x = genesis.ones(1 << 18, device="cuda")
    part = Captured(lambda: function() or total.add_((x * 2).sum() * 0), CUDA, note=lambda line: pytest.fail(line))
    before = cuda.memory_reserved()
    for _ in range(4):
        part()
    assert sum(block.size for block in pool.graph_arena(SHARED).blocks.values()) >= x.nbytes
    part.close()
    cuda.empty_cache()
    assert cuda.memory_reserved() == before
    assert not part.is_captured
    for calls in range(5, 9):
        part()
        assert total.item() == calls
    assert len(runs) == 6
    assert part.is_captured


def test_a_function_that_draws_random_numbers_is_run_and_not_replayed() -> None:
    notes: list[str] = []
    x = genesis.zeros(4, device="cuda")

    def draws() -> None:
        x.uniform_()

    part = Captured(draws, CUDA, note=notes.append)
    seen = set()
    for _ in range(4):
        part()
        seen.add(tuple(x.cpu().tolist()))
    assert len(seen) == 4
    assert len(notes) == 1
    assert "random" in notes[0]


def test_a_function_that_reads_on_the_host_is_run_after_all() -> None:
    notes: list[str] = []
    total, function, _ = counted()

    def reads() -> None:
        function()
        total.item()

    part = Captured(reads, CUDA, note=notes.append)
    for calls in range(1, 6):
        part()
        assert total.item() == calls
    assert len(notes) == 1
    assert "read on the host" in notes[0]
    assert backend_for(CUDA).pool.private is None  # type: ignore[attr-defined]


def test_blocking_launches_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    notes: list[str] = []
    total, function, runs = counted()
    part = Captured(function, CUDA, note=notes.append)
    for _ in range(4):
        part()
    assert total.item() == len(runs) == 4
    assert "CUDA_LAUNCH_BLOCKING" in notes[0]


def test_an_error_of_the_function_itself_is_raised() -> None:
    def fails() -> None:
        raise DeviceError("broken")

    part = Captured(fails, CUDA, note=lambda line: None)
    with pytest.raises(DeviceError, match="broken"):
        part()


def test_warm_up_and_recording_refuse_what_capture_refuses() -> None:
    graph, x = FunctionGraph(), genesis.ones(1, device="cuda")
    with pytest.raises(DeviceError, match="read on the host"):
        graph.record(x.item)
    assert not graph.is_captured
    graph.warm_up(lambda: x.add_(1))
    graph.record(lambda: x.add_(1))
    assert x.item() == 2
    graph.replay()
    assert x.item() == 3
    for refused in (graph.warm_up, graph.record):
        with pytest.raises(UsageError, match="already captured"):
            refused(lambda: x.add_(1))


def test_dropout_draws_other_noise_at_each_replay_as_it_does_launched_one_by_one() -> None:
    x, seen = genesis.ones(64, device="cuda"), []
    position, mask = genesis.zeros(2, dtype="int64", device="cuda"), genesis.empty(64, device="cuda")
    generator = random.default_generator

    def drops() -> None:
        with generator.positioned_by(position):
            mask.copy_(dropout(dropout(x, 0.5), 0.5))

    part = Captured(drops, CUDA, note=lambda line: pytest.fail(line))
    random.manual_seed(2**40 + 3)
    generator.offset = 2**32 - 20  # crosses into the upper half of the counter
    for calls in range(5):
        position.copy_(genesis.tensor(generator.words()))
        part()
        seen.append(mask.cpu().tolist())
        assert generator.offset == 2**32 - 20 + 32 * (calls + 1)
    random.set_state({"seed": 2**40 + 3, "offset": 2**32 - 20})
    expected = [dropout(dropout(genesis.ones(64), 0.5), 0.5).tolist() for _ in range(5)]
    assert seen == expected
    assert len({tuple(each) for each in seen}) == 5
