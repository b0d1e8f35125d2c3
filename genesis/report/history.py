"""Earlier runs of the same machine, read from their JSON files, and what changed since.

Only what is compared is read, whatever else a file of an older or newer version holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from genesis.errors import GenesisError
from genesis.files.strict_json import read_limited
from genesis.measure.timing import MAD_TO_SIGMA
from genesis.profile.schema import OpRow
from genesis.report.schema import Change, Entry, PastRun, SettingsRow, Trend

MOST_BYTES = 64 << 20
MOST_RUNS = 30
PATTERN = "*-bench-*.json"
LEAST_NOISE = 0.05  # clocks, memory's layout and other programs differ this much from run to run
INTERVALS = 2.0  # half-widths of the 95 % intervals: of hundreds of cases, a twentieth would be beyond one
SIGMAS = 3.0
LEAST_RUNS = 3  # from which on their scatter is known
LEAST_CASES = 8  # the same for the cases of two runs

Key = tuple[str, str, str, bool]


class _Time(BaseModel):
    seconds: float = Field(gt=0)
    half_width: float | None = None
    spread: float = 0.0


class _Row(BaseModel):
    name: str
    label: str
    dtype: str
    is_cold: bool = False
    wall: _Time
    gpu: _Time | None = None


class _Entry(BaseModel):
    row: _Row


class _Limits(BaseModel):
    dtype: str
    bytes_per_second: float
    flops_per_second: float | None = None


class _Settings(BaseModel):
    dtype: str
    threads: int | None = None


class Past(BaseModel):
    """What is read of an earlier report."""

    date: str
    device_name: str
    machine: dict[str, object] = Field(default_factory=dict)
    settings: _Settings
    limits: list[_Limits]
    entries: list[_Entry]

    @property
    def rows(self) -> dict[Key, _Row]:
        """Its cases by what was measured."""
        return {_key(entry.row): entry.row for entry in self.entries}


def _key(row: OpRow | _Row) -> Key:
    return row.name, row.label, row.dtype, row.is_cold


def earlier_runs(folder: Path, device_name: str, settings: SettingsRow, entries: Sequence[Entry]) -> list[Past]:
    """Runs of the same device, dtype and number of threads that have some of the cases, oldest first.

    Files that are no such report are passed over.
    """
    wanted = {_key(entry.row) for entry in entries}
    found = []
    for path in sorted(folder.glob(PATTERN)):
        try:
            past = Past.model_validate_json(read_limited(path, MOST_BYTES))
        except (ValidationError, GenesisError):
            continue
        theirs = (past.device_name, past.settings.dtype, past.settings.threads)
        ours = (device_name, settings.dtype, settings.threads)
        if theirs == ours and not wanted.isdisjoint(past.rows):
            found.append(past)
    return sorted(found, key=lambda past: past.date)[-MOST_RUNS:]


def past_runs(earlier: Iterable[Past], entries: Sequence[Entry]) -> list[PastRun]:
    """What the report tells of each run."""
    now = {_key(entry.row): entry.row for entry in entries}
    found = []
    for past in earlier:
        limits = next((each for each in past.limits if each.dtype == past.settings.dtype), None)
        ratios = [_times(row, now[key]) for key, row in past.rows.items() if key in now]
        logs = [math.log(before.seconds / after.seconds) for before, after in ratios]
        found.append(
            PastRun(
                date=past.date,
                genesis=str(past.machine.get("genesis", "unknown")),
                bytes_per_second=None if limits is None else limits.bytes_per_second,
                flops_per_second=None if limits is None else limits.flops_per_second,
                common=len(logs),
                relative=math.exp(sum(logs) / len(logs)) if logs else None,
            )
        )
    return found


def trends_of(earlier: Sequence[Past], entries: Sequence[Entry]) -> list[Trend]:
    """The times of each case that an earlier run has, too."""
    runs, found = [past.rows for past in earlier], []
    for row in (entry.row for entry in entries):
        key = _key(row)
        before = [None if key not in run else _times(run[key], row)[0].seconds for run in runs]
        if any(seconds is not None for seconds in before):
            seconds = [*before, (row.gpu or row.wall).seconds]
            found.append(Trend(name=row.name, label=row.label, dtype=row.dtype, seconds=seconds))
    return found


# --- Changes ----------------------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    """Two times of one kind."""

    before: _Time
    after: _Time


def _times(before: _Row, now: OpRow) -> _Pair:
    """GPU times where both have one, else wall times."""
    ours = _Time.model_validate(((now.gpu if before.gpu else None) or now.wall).model_dump())
    return _Pair((before.gpu if now.gpu else None) or before.wall, ours)


class _Comparison(NamedTuple):
    """A case, and the last earlier run that has it."""

    row: OpRow
    since: str
    pair: _Pair
    earlier: list[float]
    """Seconds in all earlier runs."""

    @property
    def ratio(self) -> float:
        return self.pair.after.seconds / self.pair.before.seconds


def changes_since(earlier: Sequence[Past], entries: Sequence[Entry]) -> list[Change]:
    """Each case paired with the last run that has it."""
    found = list(_compared(earlier, entries))
    scatters = {since: scatter_of([each.ratio for each in found if each.since == since]) for since in _dates(found)}
    return [_change(each, scatters[each.since]) for each in found]


def _compared(earlier: Sequence[Past], entries: Sequence[Entry]) -> Iterator[_Comparison]:
    runs = [(past.date, past.rows) for past in earlier]
    for row in (entry.row for entry in entries):
        having = [(date, rows[_key(row)]) for date, rows in runs if _key(row) in rows]
        if having:
            since, last = having[-1]
            yield _Comparison(row, since, _times(last, row), [_times(each, row).before.seconds for _, each in having])


def _dates(found: Iterable[_Comparison]) -> set[str]:
    return {each.since for each in found}


def _change(found: _Comparison, scatter: float) -> Change:
    row, ratio, (before, after) = found.row, found.ratio, found.pair
    noise = max(noise_of(before, after, found.earlier), scatter)
    verdict: Literal["slower", "faster", "same"] = "same"
    if not 1 / (1 + noise) <= ratio <= 1 + noise:
        verdict = "slower" if ratio > 1 else "faster"
    return Change(
        name=row.name,
        label=row.label,
        dtype=row.dtype,
        since=found.since,
        before=before.seconds,
        now=after.seconds,
        ratio=ratio,
        noise=noise,
        verdict=verdict,
    )


def scatter_of(ratios: Sequence[float]) -> float:
    """How much two runs differ from case to case, as a share; 0 for too few cases to tell.

    Most cases have the same code in both runs, so what spreads their ratios is the machine and what else it did.
    A change that all cases share is not in it.
    """
    if len(ratios) < LEAST_CASES:
        return 0.0
    logs = [math.log(ratio) for ratio in ratios]
    middle = median(logs)
    return math.expm1(SIGMAS * MAD_TO_SIGMA * median([abs(x - middle) for x in logs]))


def noise_of(before: _Time, now: _Time, seconds: Sequence[float]) -> float:
    """How far two times can lie apart that mean the same, as a share: the largest of what is known about it.

    Args:
        seconds: of the earlier runs. Three or more of them show how much runs differ.
    """
    widths = [1.0 if time.half_width is None else time.half_width for time in (before, now)]
    known = [LEAST_NOISE, INTERVALS * math.hypot(*widths), before.spread, now.spread]
    if len(seconds) >= LEAST_RUNS:
        middle = median(seconds)
        known.append(SIGMAS * MAD_TO_SIGMA * median([abs(s - middle) for s in seconds]) / middle)
    return max(known)
