"""The ranks of a run: how this process joins the others, and what they do together at the start."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from genesis import __version__
from genesis.backend import CPU
from genesis.data.loader import PackedLoader
from genesis.distributed import Peers, PeersGroup, job_key, read_world
from genesis.distributed.environment import LAUNCHER
from genesis.distributed.group import StagedGroup
from genesis.distributed.watch import Watch
from genesis.errors import InterruptedRun, PeerGoneError
from genesis.files.strict_json import canonical_bytes
from genesis.train.config import Config
from genesis.train.output import Output
from genesis.train.ranks import ALONE, SAVING_S, Ranks, check_divides
from genesis.train.signals import Interrupts
from genesis_cli.session.preparation import resolve_device

JOIN_S = 120.0  # how long ranks wait for each other: hosts of a cluster do not start at the same moment


@contextmanager
def joined(
    config: Config, console: Output, interrupts: Interrupts, environ: Mapping[str, str] = os.environ
) -> Iterator[Ranks]:
    """Join the other ranks, which must train with the same `config`; they end together.

    Raises:
        UsageError: the launcher's variables contradict each other. ConfigError: ranks differ, or their number does not
            divide a step. DistributedError: a rank does not join.
    """
    facts = {"the configuration": hashlib.sha256(config.resolved_yaml().encode()).hexdigest()}
    check = functools.partial(check_divides, accumulation_steps=config.train.accumulation_steps)
    with joined_ranks(facts, config.train.device, console, interrupts, environ, check) as ranks:
        yield ranks


@contextmanager
def joined_ranks(
    facts: Mapping[str, str],
    device: str,
    console: Output,
    interrupts: Interrupts,
    environ: Mapping[str, str] = os.environ,
    check: Callable[[int], None] = lambda size: None,
) -> Iterator[Ranks]:
    """Join the other ranks; they end together.

    Args:
        facts: values that must be equal on all ranks.
        device: requested device of each rank.
        check: raises if this number of ranks cannot work together.

    Raises:
        UsageError: the launcher's variables contradict each other. ConfigError: ranks differ. DistributedError: a rank
            does not join.
    """
    is_launched, have_met = LAUNCHER in environ, False
    try:
        world = read_world(environ)
        if world.size == 1:
            yield ALONE
            return
        # Connect, check that all ranks agree, and watch for lost ones.
        with Peers.connect(world, job_key(world, environ), version=__version__, limit_s=JOIN_S) as peers:
            have_met = True
            ranks = Ranks(peers, StagedGroup(PeersGroup(peers)), world.local_rank, world.local_size)
            with ranks.during("start", JOIN_S):
                ranks.compare(facts)
                check(ranks.size)
            interrupts.is_quiet = not ranks.is_main
            main_console = console if ranks.is_main else Output(None)
            main_console.line(str(world))
            with Watch(peers, interrupts.interrupt) as watch, _collectives(ranks, peers, device, watch, main_console):
                yield ranks
            with ranks.during("the end", SAVING_S):
                ranks.leave()
    except PeerGoneError as error:
        error.is_echo = is_launched  # the rank with the cause reports it
        raise
    except InterruptedRun as error:
        error.is_echo |= is_launched and not have_met  # one rank reports it for all
        raise


@contextmanager
def _collectives(ranks: Ranks, peers: Peers, asked: str, watch: Watch, main_console: Output) -> Iterator[None]:
    """Connect the GPU collectives of the ranks, if they use GPUs; an error in the block aborts them."""
    device = resolve_device(asked, ranks)
    ranks.compare({"their kind of device": device.type})
    if device == CPU:
        yield
        return
    from genesis.distributed.nccl import group_for

    with ranks.during("start", JOIN_S):
        group, line = group_for(peers, device, one_host=ranks.local_size == ranks.size)
    if line:
        main_console.line(line)
    ranks.group = group
    if isinstance(group, StagedGroup):
        yield
        return
    ranks.launched, watch.collectives = group.mark, group
    try:
        yield
    except BaseException:
        group.abort()
        raise


def check_same_data(ranks: Ranks, loader: PackedLoader) -> None:
    """Refuse ranks that have prepared different data. Raises: ConfigError."""
    if ranks.size > 1:
        ranks.compare({"the data": hashlib.sha256(canonical_bytes(loader.state())).hexdigest()})
