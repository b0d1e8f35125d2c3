"""`--nproc N`: how many ranks a command asks for, and the command run as so many."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genesis.train.config import Config


def asked_ranks(nproc: str, device: str) -> int:
    """How many ranks `--nproc` asks for; "all" are as many as there are GPUs or CPU cores for `device`.

    Raises:
        UsageError: it is no number of ranks, or this process is a rank already.
    """
    from genesis.distributed.environment import rank_count, refuse_ranks

    refuse_ranks(os.environ)
    return rank_count(nproc, _available(device) if nproc == "all" else 0)


def _available(device: str) -> int:
    """How many GPUs or CPU cores ranks may use."""
    from genesis import cuda
    from genesis.backend.cpu import threads
    from genesis_cli.session.preparation import resolve_device

    return threads() if resolve_device(device).type == "cpu" else cuda.device_count()


def ranks_of_run(nproc: str, config: Config) -> int:
    """How many ranks a run is to have.

    Raises:
        UsageError: as `asked_ranks`. ConfigError: so many cannot share a step.
    """
    from genesis.train.ranks import check_divides

    count = asked_ranks(nproc, config.train.device)
    check_divides(count, config.train.accumulation_steps)
    return count


def is_rank() -> bool:
    """Whether a launcher started this process together with others."""
    from genesis.distributed.environment import read_world

    return read_world(os.environ).size > 1


def is_main() -> bool:
    """Whether this process is the one of a job that writes and prints, by the launcher's variables."""
    from genesis.distributed.environment import read_world

    return read_world(os.environ).rank == 0


def launched(command: str, words: Sequence[str], count: int) -> int:
    """Run `genesis command words…` as so many ranks of this host; their exit code."""
    from genesis.distributed.launch import launch

    # -P: what is in the current folder is no part of Genesis
    program = [sys.executable, "-P", "-m", "genesis_cli", *(["--debug"] if "--debug" in sys.argv else [])]
    return launch([*program, command, *words], count)
