"""`genesis bench-model --nproc N`: brings the ranks together, and has them measure one after the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from genesis_cli.measured import show_progress
from genesis_cli.nproc import is_rank

if TYPE_CHECKING:
    from genesis.backend import Device
    from genesis.measure.limits import Limits
    from genesis.profile.schema import Failure
    from genesis.train.ranks import Ranks
    from genesis_cli.session.bench.measuring import Settings
    from genesis_cli.session.bench.schema import PeerStep, Row, SharedStep
    from genesis_models.config import ModelConfig


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        cases: (batch, length).
        recipes: of torch, to compare with; none without --vs.
        python: the interpreter that has torch; None means this one.
    """

    config: ModelConfig
    cases: list[tuple[int, int]]
    device: Device
    settings: Settings
    recipes: tuple[str, ...]
    python: str | None


@dataclass
class Measured:
    """What was measured, also of a run that was interrupted."""

    limits: Limits
    rows: list[Row] = field(default_factory=list)
    shared: list[SharedStep] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    peers: list[PeerStep] = field(default_factory=list)
    interrupted: bool = False

    def add(self, found: Row | Failure) -> None:
        """One more case, measured or failed."""
        from genesis.profile.schema import Failure

        if isinstance(found, Failure):
            self.failures.append(found)
        else:
            self.rows.append(found)


@contextmanager
def together(device: str, options: Mapping[str, str], *, is_quiet: bool) -> Iterator[Ranks]:
    """The ranks that measure, which end together; this process alone where nothing started others.

    Args:
        options: of the command, which must be the same on all ranks.
        is_quiet: print nothing about ranks.
    """
    from genesis.backend.cpu import threads
    from genesis.train.output import Output
    from genesis.train.ranks import ALONE, PREPARING_S
    from genesis.train.signals import Interrupts
    from genesis_cli.session.ranks import met
    from genesis_cli.session.training import cpu_threads

    if not is_rank():
        yield ALONE
        return
    facts = {"the options of bench-model": " ".join(f"{name}={value}" for name, value in options.items())}
    console = Output(None if is_quiet else sys.stdout)
    with (
        Interrupts(saves=False) as interrupts,
        met(facts, device, console, interrupts) as ranks,
        cpu_threads(max(1, threads() // (ranks.local_size or 1))),
        ranks.during("measuring", PREPARING_S),
    ):
        yield ranks


def measured_by(request: Request, ranks: Ranks) -> Measured | None:
    """What all ranks do together, then (on rank 0, alone) what one does; None on the others."""
    from genesis.dtypes import as_dtype
    from genesis.measure.limits import limits_of
    from genesis_cli.session.bench import measuring
    from genesis_cli.session.bench.shared import has_no_room, shared_steps, with_scaling
    from genesis_cli.session.bench.versus_ranks import versus_ranks

    config, cases, device, settings = request.config, request.cases, request.device, request.settings
    measured = Measured(limits_of(device, as_dtype(settings.dtype))) if ranks.is_main else None
    ranks.barrier("limits")
    rate = None if measured is None else measured.limits.flops_per_second
    tell = show_progress if ranks.is_main else (lambda text: None)
    try:
        shared = list(shared_steps(config, cases, device, rate, settings, ranks, tell))
        against = versus_ranks(config, cases, shared, device, settings, request.recipes, ranks, request.python, tell)
        peers = list(against)
        if measured is not None:
            for found in measuring.bench_model(config, cases, measured.limits, settings, tell):
                measured.add(found)
            measured.shared = with_scaling(shared, [*measured.rows, *measured.failures], ranks.size)
            measured.failures = [each for each in measured.failures if not has_no_room(each)]
            measured.peers = peers
    finally:
        tell("")
    ranks.barrier("one rank's steps")
    return measured
