"""A rank that is at work of its own while another one goes: interrupted, or ended where nothing interrupts it."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genesis.distributed import Peers
from genesis.distributed.watch import Watch
from genesis.errors import NumericError
from genesis.train.signals import Interrupts
from tests.distributed.forks import ended, start_ranks


def in_python() -> None:
    until = time.monotonic() + 15
    while time.monotonic() < until:
        pass


def in_native_code() -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000_000)


def leave(peers: Peers) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(peers: Peers) -> None:
    raise NumericError("the loss is nan")


@pytest.mark.sample(cases=2)
@pytest.mark.parametrize("busy", [0, 1])
@pytest.mark.parametrize("go", [leave, fail])
def test_a_rank_at_work_is_interrupted(busy: int, go: Callable[[Peers], None], tmp_path: Path) -> None:
    """By the error that it would see at its next call."""

    def work(peers: Peers) -> Any:
        with Interrupts() as interrupts, Watch(peers, interrupts.interrupt):
            peers.barrier("ready")
            go(peers) if peers.rank != busy else in_python()

    forks = ended(start_ranks(2, work, tmp_path, limit_s=20))
    assert forks[busy].code == 10 and forks[busy].error["kind"] == "PeerGoneError"
    assert forks[busy].error["rank"] == 1 - busy and forks[busy].seconds < 2.5
    if go is fail:
        assert "the loss is nan" in forks[busy].error["what"]


def test_a_rank_in_native_code_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def work(peers: Peers) -> Any:
        with Interrupts() as interrupts, Watch(peers, interrupts.interrupt):
            peers.barrier("ready")
            leave(peers) if peers.rank else in_native_code()

    forks = ended(start_ranks(2, work, tmp_path, limit_s=20))
    assert forks[0].code == 10 and forks[0].seconds < 3.5
    assert "error: rank 1 is gone" in capfd.readouterr().err


def test_ranks_that_end_well_are_not_interrupted(tmp_path: Path) -> None:
    """Not even one that takes longer to end than the other."""

    def work(peers: Peers) -> int:
        with Interrupts() as interrupts, Watch(peers, interrupts.interrupt):
            peers.barrier("ready")
            peers.close()
            time.sleep(1.0 * peers.rank)
        return peers.rank

    forks = ended(start_ranks(2, work, tmp_path, limit_s=20))
    assert [each.value for each in forks] == [0, 1]
