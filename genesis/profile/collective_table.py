"""The collectives of a step in ranks as rows of a report, and these as text. `collectives.py` times them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from genesis.measure.collectives import StepTimes, bus_factor
from genesis.profile.format import aligned, format_bytes, format_rate, format_seconds
from genesis.profile.schema import StrictModel


class CollectiveRow(StrictModel):
    """The calls of one collective in a step: each time is the median over steps, and of these the mean over ranks."""

    name: str
    """What is called, and for what."""
    calls: int
    nbytes: int
    """Of the whole buffers: what a reduce-scatter reads, an all-gather writes, an all-reduce reads."""
    seconds: float
    """From when a rank could begin until it was done, with the wait for ranks that come later."""
    hidden: float
    """Of these, seconds behind the step's own work."""
    exposed: float
    """Of these, seconds in which the step waited."""
    bus_rate: float
    """Bytes a second that links need, as nccl-tests define it: `nbytes` / `seconds` · (W - 1)/W of W ranks, and twice
    that for an all-reduce."""


def collective_rows(times: StepTimes, ranks: int) -> list[CollectiveRow]:
    """A row for each collective of a step of so many ranks."""
    return [
        CollectiveRow(
            name=each.name,
            calls=each.calls,
            nbytes=each.nbytes,
            seconds=each.seconds,
            hidden=each.hidden,
            exposed=each.exposed,
            bus_rate=each.nbytes * bus_factor(each.name, ranks) / each.seconds,
        )
        for each in times.collectives
    ]


def render_collectives(rows: Sequence[CollectiveRow], step: str = "a step") -> Iterator[str]:
    """A table under its title.

    Args:
        step: whose collectives they are.
    """
    yield f"collectives of {step}: the median of steps, the mean of ranks"
    yield from aligned([_cells(row) for row in rows], ("collective",))


def _cells(row: CollectiveRow) -> dict[str, str]:
    return {
        "collective": row.name,
        "calls": f"{row.calls:,}",
        "bytes": format_bytes(row.nbytes),
        "time": format_seconds(row.seconds),
        "bus": format_rate(row.bus_rate, "B/s"),
        "hidden": format_seconds(row.hidden) if row.hidden else "none",
        "exposed": format_seconds(row.exposed) if row.exposed else "none",
    }
