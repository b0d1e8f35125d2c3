"""The report about many ops as data: what `genesis bench-ops` and `genesis bench all` write as JSON.

Times are seconds, shares are of 1. `Report.model_json_schema()` gives its JSON schema. `schema_version` grows when a
field goes or changes its meaning; new fields leave it as it is.
"""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from genesis.profile.schema import Failure, LimitsRow, Measured, OpRow, StrictModel


class Entry(StrictModel):
    """A measured case, and where it belongs."""

    category: str
    size: str
    """small, medium, batch, large or xlarge."""
    row: OpRow

    @property
    def title(self) -> str:
        """Op and shape for people."""
        return f"{self.row.name} {self.row.label}"


class Skipped(StrictModel):
    """A case that the op does not take, such as another dtype's."""

    name: str
    label: str
    reason: str


class SettingsRow(StrictModel):
    """What was asked for."""

    dtype: str
    """Of the inputs, where an op takes it."""
    sizes: list[str]
    backward: bool
    """Gradients were measured, too."""
    is_fast: bool
    """Little time was taken for each case."""
    threads: int | None
    """That numpy's products may take; null on a GPU."""


class Ranked(StrictModel):
    """A case among the best or the worst."""

    name: str
    label: str
    dtype: str
    seconds: float
    share: float
    band: str
    cause: str
    advice: str


class Category(StrictModel):
    """A category in figures."""

    category: str
    ops: int
    cases: int
    launch_bound: int
    median_share: float | None
    """Of the limit that binds, over the cases in `bands`."""
    bands: dict[str, int]


class PeerSummary(StrictModel):
    """The cases compared with another library."""

    name: str
    version: str
    cases: int
    """That the peer has, too."""
    median_ratio: float
    """The peer's time over ours: above 1 we are faster."""
    slower: int
    """Cases in which the peer is faster, beyond the spread of the rounds."""


class Summary(StrictModel):
    """What the cases say together."""

    cases: int
    """That were tried: measured and failed; skipped ones are none."""
    measured: int
    success_rate: float
    median_share: float | None
    """Of the limit that binds, over the cases in `bands`."""
    bands: dict[str, int]
    """How many cases are in each band, from excellent to critical; those that are bound by the call are left out."""
    launch_bound: int
    """Bound by the cost of the call itself, so that their share says nothing about the kernel."""
    cached: int
    """Faster than a copy through memory: their data stayed in a cache."""
    noisy: int
    categories: list[Category]
    best: list[Ranked]
    """Of those whose data came out of memory."""
    worst: list[Ranked]
    """Of those that are not bound by launches."""
    peer: PeerSummary | None
    """Null unless asked for."""
    recommendations: list[str]


class Change(StrictModel):
    """A case compared with the last earlier run that has it."""

    name: str
    label: str
    dtype: str
    since: str
    """The date of that run."""
    before: float
    now: float
    ratio: float
    """now / before."""
    noise: float
    """A ratio within 1 ± this says nothing."""
    verdict: Literal["slower", "faster", "same"]


class PastRun(StrictModel):
    """An earlier run of the same machine."""

    date: str
    genesis: str
    bytes_per_second: float | None
    flops_per_second: float | None
    """The limits of the same dtype as they were then."""
    common: int
    """Cases of this run that it has, too."""
    relative: float | None
    """Its times over those of this run: the geometric mean over the common cases."""


class Trend(StrictModel):
    """The time of a case from run to run."""

    name: str
    label: str
    dtype: str
    seconds: list[float | None]
    """For each of `Report.history`, and then for this run; null where a run lacks it."""


class Bar(StrictModel):
    """A share to draw."""

    label: str
    share: float
    text: str


class Section(StrictModel):
    """A part of the report about something else than ops: sentences, a table, and the full data."""

    title: str
    text: list[str]
    columns: list[str]
    cells: list[list[str]]
    bars: list[Bar]
    """Parts of a whole."""
    data: dict[str, JsonValue]


class BenchReport(Measured):
    """The report."""

    kind: Literal["bench-ops", "bench-all"]
    seconds: float
    """That the measurement took."""
    settings: SettingsRow
    limits: list[LimitsRow]
    """The first is of the dtype of the settings."""
    entries: list[Entry]
    failures: list[Failure]
    skipped: list[Skipped]
    left: int = 0
    """Cases that were not come to, because the run was interrupted."""
    summary: Summary
    history: list[PastRun]
    """Oldest first, without this one."""
    changes: list[Change]
    trends: list[Trend]
    sections: list[Section]
