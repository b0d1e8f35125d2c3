"""What the tests of whole runs share: a corpus, runs on it, and one warm process for runs in forks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from genesis.errors import InterruptedRun
from tests.train.runs import Forks, load, make, signal_in_step, train


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Started at its first use; tests that use it are in one xdist group, so that there is one."""
    with Forks() as forks:
        yield forks


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of runs on a corpus of the module's own."""
    return make(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def expected(recipe: Path) -> str:
    """H of the uninterrupted run."""
    return train(load(recipe, "whole")).state_hash


@pytest.fixture
def halved(recipe: Path, tmp_path: Path) -> Path:
    """The folder of a run that was stopped after step 3, with the checkpoints of 2 and 3."""
    with signal_in_step(3), pytest.raises(InterruptedRun):
        train(load(recipe, str(tmp_path / "run")))
    return tmp_path / "run"
