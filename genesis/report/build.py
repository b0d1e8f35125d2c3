"""A report put together: cases measured, then what follows from them and from earlier runs."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from genesis.backend import CPU, Device
from genesis.backend.cpu import threads
from genesis.dtypes import DType, float32
from genesis.errors import escape
from genesis.profile.op import Settings
from genesis.profile.schema import Failure, LimitsRow
from genesis.report.history import Past, changes_since, earlier_runs, past_runs, trends_of
from genesis.report.schema import BenchReport, Entry, Section, SettingsRow, Skipped
from genesis.report.suite import FAST, Job, run
from genesis.report.summary import seconds_of, summarize

Notify = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Setup:
    """With what cases are measured, and where reports lie.

    Attributes:
        dtype, settings: see `suite.run`.
        sizes: names of sizes, for the report.
        folder: of reports, earlier ones too.
        device_name, machine: of the processor or GPU, as they are to be shown.
    """

    device: Device
    dtype: DType | None
    settings: Settings
    sizes: tuple[str, ...]
    folder: Path
    device_name: str
    machine: dict[str, Any]

    @property
    def row(self) -> SettingsRow:
        """As a part of the report."""
        return SettingsRow(
            dtype=(float32 if self.dtype is None else self.dtype).name,
            sizes=list(self.sizes),
            backward=self.settings.backward,
            is_fast=self.settings.plan is FAST,
            threads=threads() if self.device == CPU else None,
        )

    def earlier(self, entries: Sequence[Entry]) -> list[Past]:
        """Earlier runs of the same machine that have some of the cases."""
        return earlier_runs(self.folder, self.device_name, self.row, entries)


class Measured(NamedTuple):
    """What a run gave, in order, and the seconds that it took.

    Attributes:
        interrupted: somebody ended it.
        left: cases that it did not come to.
    """

    entries: list[Entry]
    failures: list[Failure]
    skipped: list[Skipped]
    seconds: float
    interrupted: bool = False
    left: int = 0


def measure_all(planned: Sequence[Job], setup: Setup, notify: Notify = lambda text: None) -> Measured:
    """Every case; those that look slower than in the last run once more. KeyboardInterrupt ends it with what there is.

    Args:
        notify: is called with what comes next.
    """
    found, done = Measured([], [], [], 0.0), dict[int, Job]()
    start = time.perf_counter()
    try:
        for count, job in enumerate(planned, 1):
            notify(f"{count}/{len(planned)} {job.name} {job.size}")
            for each in run([job], setup.device, setup.dtype, setup.settings):
                match each:
                    case Entry():
                        done[len(found.entries)] = job
                        found.entries.append(each)
                    case Failure():
                        found.failures.append(each)
                    case Skipped():
                        found.skipped.append(each)
        _measure_slower_again(found.entries, done, setup, notify)
    except KeyboardInterrupt:
        left = len(planned) - len(found.entries) - len(found.failures) - len(found.skipped)
        found = found._replace(interrupted=True, left=left)
    return found._replace(seconds=time.perf_counter() - start)


def _measure_slower_again(entries: list[Entry], done: dict[int, Job], setup: Setup, notify: Notify) -> None:
    """What looks slower than in the last run gets a second chance: another program may have been in the way."""
    changes = changes_since(setup.earlier(entries), entries)
    slower = {(each.name, each.label, each.dtype) for each in changes if each.verdict == "slower"}
    for i, entry in enumerate(entries):
        row = entry.row
        if (row.name, row.label, row.dtype) in slower:
            notify(f"once more: {row.name} {row.label}")
            for again in run([done[i]], setup.device, setup.dtype, setup.settings):
                if isinstance(again, Entry) and seconds_of(again.row) < seconds_of(row):
                    entries[i] = again


def dtypes_of(measured: Measured, setup: Setup) -> list[str]:
    """The dtype that was asked for (float32 by default), and those that ops took instead."""
    return list(dict.fromkeys([setup.row.dtype, *(entry.row.dtype for entry in measured.entries)]))


def build(
    kind: Literal["bench-ops", "bench-all"],
    command: str,
    setup: Setup,
    measured: Measured,
    limits: Sequence[LimitsRow],
    sections: Sequence[Section] = (),
) -> BenchReport:
    """The report.

    Args:
        limits: of each of `dtypes_of`.
        sections: about something else than ops.
    """
    entries, failures, skipped, seconds, _, left = measured
    earlier = setup.earlier(entries)
    changes = changes_since(earlier, entries)
    return BenchReport(
        kind=kind,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=escape(command),
        seconds=seconds,
        device=str(setup.device),
        device_name=setup.device_name,
        machine=setup.machine,
        settings=setup.row,
        limits=list(limits),
        entries=entries,
        failures=failures,
        skipped=skipped,
        left=left,
        summary=summarize(entries, failures, changes),
        history=past_runs(earlier, entries),
        changes=changes,
        trends=trends_of(earlier, entries),
        sections=list(sections),
    )
