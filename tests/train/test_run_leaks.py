"""A long run holds no more memory, descriptors or threads at its end than soon after its start."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from genesis.backend.cpu import pool
from genesis.train import loop
from genesis.train.saving import SAVER
from tests.train.runs import load, make, train

STEPS, WARM_UP, PERIOD = 200, 60, 20  # in each period evaluations, samples and saves come at the same places


def descriptors() -> int:
    """How many file descriptors this process has open."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            return len(os.listdir(folder))
    pytest.skip("this system does not list open descriptors")


def check_flat(samples: Sequence[tuple[int, ...]]) -> None:
    """Assert that no quantity is larger in any later period than it was in the first one after the warm-up."""
    first = samples[WARM_UP : WARM_UP + PERIOD]
    limits = [max(column) for column in zip(*first, strict=True)]
    for start in range(WARM_UP + PERIOD, len(samples), PERIOD):
        found = [max(column) for column in zip(*samples[start : start + PERIOD], strict=True)]
        assert all(a <= b for a, b in zip(found, limits, strict=True)), f"step {start}: {found}, before {limits}"


def test_live_bytes_descriptors_and_threads_are_flat(tmp_path: Path) -> None:
    samples: list[tuple[int, ...]] = []
    take_step = loop.take_step

    def watched(*args: Any) -> Any:
        result = take_step(*args)
        for thread in threading.enumerate():
            if thread.name == SAVER:  # one that is under way holds a file
                thread.join()
        samples.append((pool.allocated, descriptors(), threading.active_count()))
        return result

    overrides = (f"train.steps={STEPS}", "eval.every=20", "checkpoint.every=10", "train.accumulation_steps=1")
    small = ("train.batch_size=1", "eval.max_batches=1", "log.every=5")
    gc.collect()
    with mock.patch.object(loop, "take_step", watched):
        train(load(make(tmp_path), "run", *overrides, *small))
    assert len(samples) == STEPS
    assert samples[0][0] > 100_000
    check_flat(samples)


@pytest.mark.parametrize("column", range(3))
def test_the_check_sees_a_slow_leak(column: int) -> None:
    steady = [(1000 + step % PERIOD, 7, 2) for step in range(STEPS)]
    check_flat(steady)
    leaking = [(*row[:column], row[column] + step // 50, *row[column + 1 :]) for step, row in enumerate(steady)]
    with pytest.raises(AssertionError, match="before"):
        check_flat(leaking)


def test_a_run_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ten runs in one process, as a notebook makes them."""
    recipe, samples = make(tmp_path), []
    for number in range(8):
        train(load(recipe, f"run{number}", "train.steps=1"))
        gc.collect()
        samples.append((pool.allocated, descriptors(), threading.active_count()))
    assert samples[2:] == samples[2:3] * 6
