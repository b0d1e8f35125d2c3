"""`--nproc N`: the number of ranks of a command, and the launch of that many ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genesis.train.config import Config


def asked_ranks(nproc: str, device: str) -> int:
    """Return how many ranks `--nproc` asks for; "all" means one for each GPU or CPU core of `device`.

    Raises:
        UsageError: it is not a number of ranks, or this process is a rank already.
    """
    from genesis.distributed.environment import rank_count, refuse_ranks

    refuse_ranks(os.environ)
    return rank_count(nproc, _available(device) if nproc == "all" else 0)


def _available(device: str) -> int:
    """Return how many GPUs or CPU cores ranks may use."""
    from genesis import cuda
    from genesis.backend.cpu import threads
    from genesis_cli.session.preparation import resolve_device

    return threads() if resolve_device(device).type == "cpu" else cuda.device_count()


def ranks_of_run(nproc: str, config: Config) -> int:
    """Return how many ranks a run has.

    Raises:
        UsageError: as in `asked_ranks`. ConfigError: so many ranks cannot share a step.
    """
    from genesis.train.ranks import check_divides

    count = asked_ranks(nproc, config.train.device)
    check_divides(count, config.train.accumulation_steps)
    return count


def is_rank() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    from genesis.distributed.environment import read_world

    return read_world(os.environ).size > 1


def launched(command: str, words: Sequence[str], count: int) -> int:
    """Run `genesis command words…` as `count` ranks of this host, and return their exit code."""
    from genesis.distributed.launch import launch

    # -P: modules in the current folder must not shadow Genesis.
    program = [sys.executable, "-P", "-m", "genesis_cli", *(["--debug"] if "--debug" in sys.argv else [])]
    return launch([*program, command, *words], count)
