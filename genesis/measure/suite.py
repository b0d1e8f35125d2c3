"""Many ops measured: which cases, the tables that sum them up, and what changed since earlier runs.

A case that fails does not end the run. Reports are files of a folder; a case is compared by its row in their tables.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from genesis.backend import Device
from genesis.dtypes import DType
from genesis.errors import GenesisError, UsageError
from genesis.files.atomic import write_file
from genesis.files.paths import quote
from genesis.files.strict_json import parse_object, read_limited
from genesis.measure import op as measuring
from genesis.measure.cases import ALIASES, CATEGORIES, KINDS, SIZES, Axes, label_of, op_named, supported
from genesis.measure.causes import CACHED, ISSUES
from genesis.measure.limits import COLUMNS as LIMITS
from genesis.measure.op import BANDS, BRIEF, COLUMNS, Measured, Settings
from genesis.measure.record import Column, Failure, Report, Table, to_markdown
from genesis.measure.timing import Plan
from genesis.shapes import Shape

THOROUGH = Plan(seconds=0.5)
FAST = Plan(precision=0.05, seconds=0.12, warm_up=0.01)
TARGET = 0.7  # of the limit that binds: the band "good"
TARGET_RATIO = 1.0  # of torch's speed
RANKED = 10  # cases in the tables of the best and of the worst


class Job(NamedTuple):
    """One case to measure; `axes` is None for all of them, and for ops that have none."""

    name: str
    size: str
    shape: Shape
    axes: Axes


@dataclass
class Results:
    """The results of a run, in order."""

    measured: list[Measured] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)  # cases that the op does not take, with the reason


def names_of(ops: Sequence[str] = (), category: str | None = None) -> list[str]:
    """The requested ops, each once, sorted by category; all ops where none are named. Raises UsageError."""
    if category is not None and category not in CATEGORIES:
        known = ", ".join(CATEGORIES)
        raise UsageError(f"{quote(category)} is not a category", where="--category", next=f"use one of {known}")
    # An alias measures the same op again, unless it has its own kind, as a transpose does.
    own = {name for kind in KINDS.values() for name in kind.calls}
    names = ops or [name for name in supported() if name not in ALIASES or name in own]
    categories = {name: op_named(name)[1].category for name in names}
    chosen = [name for name, each in categories.items() if category in (None, each)]
    if not chosen:
        what = f"no op of {', '.join(ops)} is in the category {category}"
        raise UsageError(what, where="--category", next="leave it out")
    return sorted(chosen, key=lambda name: (CATEGORIES.index(categories[name]), name))


def jobs(names: Iterable[str], sizes: Sequence[str], *, every_axis: bool) -> list[Job]:
    """The cases of these ops: each size, over each of the kind's axes or over the first of them. Raises UsageError."""
    for size in sizes:
        if size not in SIZES:
            raise UsageError(f"{quote(size)} is not a size", where="--size", next=f"use one of {', '.join(SIZES)}")
    found = []
    for name in names:
        kind = op_named(name)[1]
        axes = (kind.axes if every_axis else kind.axes[:1]) or (None,)
        found += [Job(name, size, kind.shape_of(size), over) for size in sizes for over in axes]
    return found


def measure_all(
    planned: Sequence[Job],
    device: Device,
    dtype: DType | None,
    settings: Settings,
    notify: Callable[[str], None] = lambda text: None,
) -> Results:
    """Measure every case in order, without gradients for ops that have none; `notify` gets the name of the next one."""
    found = Results()

    def measure(job: Job, backward: bool) -> None:
        op, kind = op_named(job.name)
        label, axes = label_of(job.name, job.shape, job.axes), [job.axes] if kind.axes else []
        how = replace(settings, backward=backward and op.vjp is not None)
        try:
            one = next(measuring.profile_op(job.name, device, dtype, [job.shape], axes, how))
        except UsageError as error:
            if error.where == "--backward":  # the result has no gradient in this dtype
                return measure(job, False)
            return found.skipped.append({"case": f"{job.name} {label}", "reason": error.what})
        except Exception as error:  # a bug in one op must not hide the others
            one = Failure.of(job.name, label, error)
        if isinstance(one, Failure):
            found.failures.append(one)
        else:
            found.measured.append(replace(one, size=job.size))

    for count, job in enumerate(planned, 1):
        notify(f"{count}/{len(planned)} {job.name} {job.size}")
        measure(job, settings.backward)
    return found


class Group:
    """Cases that a row sums up, such as the cases of a size."""

    def __init__(self, name: str, cases: Sequence[Measured]) -> None:
        self.name, self.cases = name, cases
        self.loaded = sorted((m for m in cases if m.is_loaded), key=lambda m: m.share)
        self.worst, self.best = [*self.loaded[:1], None][0], [None, *self.loaded][-1]
        self.peers = [m.peer for m in cases if m.peer is not None]
        self.ratios = [peer.ratio for peer in self.peers if not peer.is_noisy]
        self.lost = {m.name: m.time.seconds * max(1 - m.share, 0.0) for m in cases}
        self.most = max(cases, key=lambda m: self.lost[m.name])


COUNT = Column("cases", "cases", "count", "Cases of the group.", lambda g: len(g.cases))
GROUPS = (
    COUNT,
    Column("launch", "call-bound", "count", "Cases whose time is mostly the call's own.",
           lambda g: len(g.cases) - len(g.loaded)),
    Column("average", "average", "share", "Mean share of the limit that binds; above 1 counts as 1.",
           lambda g: fmean(min(m.share, 1.0) for m in g.loaded) if g.loaded else None),
    Column("best", "best", "share", "Highest share.", "best.share"),
    Column("worst", "worst", "share", "Lowest share.", "worst.share"),
    Column("worst_case", "worst case", "text", "The case with the lowest share.", "worst.name"),
    Column("target", "target", "share", "The share to reach.", lambda g: TARGET),
    Column("reached", "reach it", "count", "Cases that reach the target.",
           lambda g: sum(m.share >= TARGET for m in g.loaded)),
    *(Column(f"band_{name}", name, "count", f"Cases whose share is {name}.",
             lambda g, name=name: sum(m.band == name for m in g.loaded)) for _, name in BANDS),  # type: ignore[misc]
    Column("ratio", "vs torch", "ratio", "Median of torch's time / ours, without noisy ratios.",
           lambda g: median(g.ratios) if g.ratios else None),
    Column("ratio_best", "best", "ratio", "Highest ratio.", lambda g: max(g.ratios, default=None)),
    Column("ratio_worst", "worst", "ratio", "Lowest ratio.", lambda g: min(g.ratios, default=None)),
    Column("ratio_target", "target", "ratio", "The ratio to reach.", lambda g: TARGET_RATIO if g.ratios else None),
    Column("slower", "slower", "count", "Cases in which torch is faster by more than the noise.",
           lambda g: sum(peer.is_slower for peer in g.peers) if g.ratios else None),
    Column("noise", "noise", "count", "Ratios that are noise.", lambda g: len(g.peers) - len(g.ratios) or None),
)  # fmt: skip
PER_ISSUE = (
    Column("issue", "primary issue", "text", "What a measurement found.", "name"),
    COUNT,
    Column("lost", "time beyond the limit", "s", "Seconds of these cases beyond what the limits need.",
           lambda g: sum(g.lost.values())),
    Column("most", "most in", "text", "The case that loses most.", "most.name"),
    Column("next", "next", "text", "What would help there.", "most.finding.advice"),
)  # fmt: skip
SKIPPED = (
    Column("case", "left out", "text", "Op and shape."),
    Column("reason", "why", "text", "What the op does not take."),
)


def tables_of(results: Results) -> list[Table]:
    """The limits, sums by size class, category and issue, the best and the worst, and all cases."""
    cases = results.measured

    def groups(names: Iterable[str], of: Callable[[Measured], Any]) -> Iterator[Group]:
        found = ((name, [m for m in cases if of(m) == name]) for name in names)
        return (Group(name, each) for name, each in found if each)

    limits = {m.case.dtype.name: m.limits for m in cases}
    sizes = [*groups(SIZES, lambda m: m.size), *([Group("all", cases)] if cases else [])]
    loaded = sizes[-1].loaded if cases else []
    best = [m for m in reversed(loaded) if m.share >= TARGET and (m.limit == "compute" or m.share <= CACHED)]
    slower = [(m.peer.ratio, m.name, m) for m in cases if m.peer is not None and m.peer.is_slower]
    name = Column("name", "size", "text", "The group.")
    categories = [replace(name, title="category"), *GROUPS]
    tables = [
        Table("limits", "measured now", LIMITS, limits.values()),
        Table("sizes", "by size class", [name, *GROUPS], sizes),
        Table("categories", "by category", categories, groups(CATEGORIES, lambda m: m.case.category)),
        Table("issues", "by primary issue", PER_ISSUE, groups(ISSUES, lambda m: m.finding and m.finding.issue)),
        Table("worst", "farthest from the limit", BRIEF, [m for m in loaded if m.share < TARGET][:RANKED]),
        Table("best", "nearest to the limit", BRIEF, best[:RANKED]),
        Table("slower", "slower than torch", BRIEF, [m for *_, m in sorted(slower)[:RANKED]]),
        Table("skipped", "", SKIPPED, results.skipped, most=RANKED),
        Table("ops", "all cases", BRIEF, cases, notes=dict.fromkeys(note for m in cases for note in m.notes)),
    ]
    return [each for each in tables if each.rows]


def notes_of(results: Results) -> list[str]:
    """Sentences about the whole, the most important first."""
    cases, tried = results.measured, len(results.measured) + len(results.failures)
    notes = [f"{len(cases)} of {tried} cases were measured"]
    noisy = sum(m.is_noisy for m in cases)
    if cases and noisy >= len(cases) / 4:
        notes.append(f"{noisy} of {len(cases)} cases are noisy: measure again on a quiet machine, and with more time")
    if any(m.peer is not None and m.peer.is_noisy for m in cases):
        notes.append("a ratio to torch is noise and is left out if its rounds differ by more than 20%")
    return notes


MOST_BYTES = 64 << 20
LEAST_NOISE = 0.05  # runs differ by this share because of clocks, memory layout and other programs
INTERVALS = 2.0  # tolerance in half-widths of the 95 % intervals; at 1, one case in twenty would exceed it
FIGURES = tuple(clock + figure for clock in ("wall", "gpu") for figure in ("", "_half_width", "_spread"))
CHANGES = (
    Column("case", "case", "text", "Op and shape."),
    Column("since", "since", "text", "The last report with the case."),
    Column("before", "before", "s", "Its time in that report."),
    Column("now", "now", "s", "Its time now."),
    Column("ratio", "now/before", "ratio", "Above 1 the case is slower now."),
    Column("noise", "noise", "share", "Difference that noise explains."),
    Column("verdict", "verdict", "text", "slower, faster or same."),
)
Rows = Mapping[tuple[str, str], Mapping[str, Any]]  # figures by case and dtype


def earlier_runs(folder: Path, report: Report) -> Rows:
    """The latest figures of each case from reports with the same device, dtype and threads; other files are skipped."""
    runs = []
    for path in folder.glob("*-bench-*.json"):
        try:
            data = parse_object(read_limited(path, MOST_BYTES), where=path.name)
            theirs, date, found = data["settings"], str(data["date"]), {}
            for row in next((each["rows"] for each in data["tables"] if each["name"] == "ops"), []):
                # JSON cannot store an infinite half-width, so it stores None.
                found[row["case"], row["dtype"]] = {"since": date} | {n: float(row.get(n) or 0.0) for n in FIGURES}
        except (GenesisError, KeyError, TypeError, AttributeError, ValueError):
            continue
        same = [theirs.get(name) == report.settings.get(name) for name in ("dtype", "threads")]
        if data["device_name"] == report.device_name and all(same):
            runs.append((date, found))
    return {key: row for _, run in sorted(runs, key=lambda run: run[0]) for key, row in run.items()}


def changes_table(earlier: Rows, measured: Iterable[Measured]) -> Table:
    """Each case compared with the last run that has it. People see the changes beyond noise, or else the largest."""
    changes = []
    for row in Table("ops", "", COLUMNS, measured).rows:
        before = earlier.get((row["case"], row["dtype"])) or dict[str, Any](wall=0.0, gpu=0.0)
        clock = "gpu" if before["gpu"] and row["gpu"] else "wall"
        if then := before[clock]:
            half_widths, spreads = (
                [each[f"{clock}_{name}"] or 0.0 for each in (before, row)] for name in ("half_width", "spread")
            )
            noise, ratio = max(LEAST_NOISE, INTERVALS * math.hypot(*half_widths), *spreads), row[clock] / then
            is_same = 1 / (1 + noise) <= ratio <= 1 + noise
            changes.append({
                "case": row["case"], "since": before["since"][:16].replace("T", " "), "before": then,
                "now": row[clock], "ratio": ratio, "noise": noise,
                "verdict": "same" if is_same else "slower" if ratio > 1 else "faster",
            })  # fmt: skip
    changes.sort(key=lambda change: (change["verdict"] == "same", -abs(math.log(change["ratio"]))))
    most = max(sum(change["verdict"] != "same" for change in changes), 1)
    return Table("changes", "changed since the last run", CHANGES, changes, most=most)


def default_folder() -> Path:
    """`benchmarks/results` in a clone of Genesis, otherwise `genesis-bench`."""
    return Path("benchmarks/results" if Path("genesis/measure/suite.py").is_file() else "genesis-bench")


def save(report: Report, folder: Path) -> list[Path]:
    """Write the report as Markdown and JSON, named by date, kind, device and dtype. Raises DiskError."""
    stamp = re.sub(r"[^0-9-]", "", report.date[:19].replace("T", "-"))
    device = re.sub(r"[^a-z0-9]+", "-", report.device_name.lower()).strip("-")[:32].strip("-")
    stem = f"{stamp}-{report.kind}-{device or 'unknown'}-{report.settings.get('dtype')}"
    # A report from the same second already has this name, so append a number.
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    stem += next(ending for ending in endings if not (folder / f"{stem}{ending}.json").exists())
    paths = folder / f"{stem}.md", folder / f"{stem}.json"
    write_file(paths[0], "\n".join([*to_markdown(report), ""]).encode())
    write_file(paths[1], report.to_json())
    return list(paths)
