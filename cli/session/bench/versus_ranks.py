"""Steps of several ranks against torch's: each rank has a process of torch's, and those train together, as ours did."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from statistics import median
from typing import cast

from genesis.backend import Device
from genesis.errors import GenesisError
from genesis.profile.peer import Child, ratio_of, started
from genesis.train.ranks import PREPARING_S, Ranks
from genesis_cli.session.bench.measuring import Settings
from genesis_cli.session.bench.schema import PeerStep, SharedStep
from genesis_cli.session.bench.versus import lean_config
from genesis_models.config import ModelConfig

ROUNDS, LEAST_STEPS, MOST_STEPS = 3, 3, 100
SHARE = 1 / 6  # of the plan's time for each round


def versus_ranks(
    config: ModelConfig,
    cases: Sequence[tuple[int, int]],
    ours: Sequence[SharedStep],
    device: Device,
    settings: Settings,
    recipes: Sequence[str],
    ranks: Ranks,
    python: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[PeerStep]:
    """A row for each recipe and case: a call of all ranks. What a recipe cannot do is noted in its row.

    Our times were taken before: the two are not interleaved, and share no memory.

    Args:
        ours: a row for each case.
    """
    for recipe in recipes:
        tell(f"torch, {recipe}: starting")
        with ExitStack() as stack, ranks.during(f"measuring torch, {recipe}", PREPARING_S):
            # A file in which torch's processes find each other; it goes when all have ended.
            place = stack.enter_context(tempfile.TemporaryDirectory()) if ranks.is_main else ""
            place = ranks.from_main("torch's meeting place", place)
            child = stack.enter_context(started("steps", device, "torch", python))
            for (batch, length), row in zip(cases, ours, strict=True):
                tell(f"torch {child.version}, {recipe}: {batch}x{length}")
                found = PeerStep(recipe=recipe, version=child.version, batch=batch, length=length)
                place_of_case = {"rank": ranks.rank, "size": ranks.size, "place": f"{place}/{batch}x{length}"}
                figures, note = {}, ""
                try:
                    job = {"config": lean_config(config, length), "batch": batch, "length": length}
                    child.ask("open", recipe=recipe, dtype=settings.dtype, ranks=place_of_case, **job)
                except GenesisError as error:
                    note = error.what
                if ranks.all(not note):
                    figures = _compared(child, row, settings, ranks)
                yield found.model_copy(update={"note": note or ("" if figures else "another rank failed"), **figures})
            ranks.barrier("torch")


def _compared(child: Child, ours: SharedStep, settings: Settings, ranks: Ranks) -> dict[str, object]:
    """The ratio of the medians of some rounds, and the most memory of a rank on both sides."""
    count = min(max(round(settings.plan.seconds * SHARE / ours.step.seconds), LEAST_STEPS), MOST_STEPS)
    rounds, peak = list[tuple[float, float]](), cast("int | None", None)
    for _ in range(ROUNDS):
        said = child.ask("measure", what="step", count=count)
        every = ranks.in_turn(said["samples"])  # step by step
        slowest = [max(every[i : i + ranks.size]) for i in range(0, len(every), ranks.size)]
        rounds.append((ours.step.seconds, median(slowest)))
        peak = said["peak"]
    peaks = None if peak is None else int(max(ranks.in_turn([peak])))
    child.ask("close")
    own = None if peak is None else max(each.peak for each in ours.memory)
    return {"ratio": ratio_of(rounds), "peak": own, "peer_peak": peaks}
