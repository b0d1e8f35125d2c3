"""How long a run is: steps of epochs, and schedules that do not fit it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from genesis.train.config import OptimConfig
from genesis.train.loop import total_steps
from genesis.train.optimizer import overlong_schedule


@pytest.mark.parametrize(
    ("epochs", "batches", "accumulated", "steps"),
    [(0.07, 100, 1, 7), (0.55, 100, 1, 55), (0.56, 50, 1, 28), (1.1, 10, 1, 11), (2, 7, 2, 7), (0.5, 25, 1, 13),
     (1e-7, 10, 1, 1)],
)  # fmt: skip
def test_the_last_step_is_the_first_that_completes_the_epochs(
    epochs: float, batches: int, accumulated: int, steps: int
) -> None:
    """Whatever binary fractions make of what was written."""
    train = SimpleNamespace(steps=None, epochs=epochs, accumulation_steps=accumulated)
    config: Any = SimpleNamespace(train=train)
    loader: Any = SimpleNamespace(num_batches=lambda epoch: batches)
    assert total_steps(config, loader) == steps


def test_a_schedule_longer_than_the_run_is_warned_of() -> None:
    def said(steps: int, **settings: Any) -> str | None:
        return overlong_schedule(OptimConfig(lr=1e-2, **settings), steps)

    found = said(4, warmup_steps=100)
    assert found is not None and "100 is more than the run's 4 steps: the rate ends at 0.0004" in found
    jumps = said(10, schedule="wsd", warmup_steps=9, decay_ratio=0.5)
    assert jumps is not None and "9 steps and a decay of 5 do not fit a run of 10" in jumps
    fits: list[dict[str, Any]] = [{"warmup_steps": 4}, {"warmup_ratio": 0.5}, {"schedule": "wsd", "warmup_steps": 2}]
    assert [said(4, **settings) for settings in fits] == [None, None, None]
    assert said(3, schedule="wsd", warmup_ratio=0.5, decay_ratio=0.5) is None
