"""What the tests of whole runs share: a corpus, runs on it, and one warm process for runs in forks."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from genesis.errors import InterruptedRun
from tests.train.runs import Forks, load, make, signal_in_step, train


@contextmanager
def hangup_ends() -> Iterator[None]:
    """SIGHUP as a terminal leaves it, also where these tests run under nohup; children keep it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Started at its first use; tests that use it are in one xdist group, so that there is one."""
    with ExitStack() as stack:
        with hangup_ends():
            forks = stack.enter_context(Forks())
        yield forks


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of runs on a corpus of the module's own."""
    return make(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def expected(recipe: Path) -> str:
    """H of the uninterrupted run."""
    return train(load(recipe, "whole")).state_hash


@pytest.fixture(scope="module")
def stopped(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped after step 3, with the checkpoints of 2 and 3; not to be changed."""
    output = tmp_path_factory.mktemp("stopped") / "run"
    with signal_in_step(3), pytest.raises(InterruptedRun):
        train(load(recipe, str(output)))
    return output


@pytest.fixture
def halved(stopped: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))
