"""Many ops measured: which cases, one after the other, and the tables that sum them up.

A case that fails does not end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any, NamedTuple

from genesis.backend import Device
from genesis.dtypes import DType
from genesis.errors import UsageError
from genesis.files.paths import quote
from genesis.measure import op as measuring
from genesis.measure.cases import ALIASES, CATEGORIES, KINDS, SIZES, Axes, label_of, op_named, supported
from genesis.measure.causes import CACHED, ISSUES
from genesis.measure.limits import COLUMNS as LIMITS
from genesis.measure.op import BANDS, COLUMNS, Measured, Settings, brief
from genesis.measure.record import Column, Failure, Table, table
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
    """The requested ops, each once, sorted by category; all ops where none are named.

    Raises:
        UsageError: there is no such op or category, or none of these ops is in the category.
    """
    if category is not None and category not in CATEGORIES:
        known = ", ".join(CATEGORIES)
        raise UsageError(f"{quote(category)} is not a category", where="--category", next=f"use one of {known}")
    # An alias measures the same op again, unless it has a kind of its own, as a transpose has.
    own = {name for kind in KINDS.values() for name in kind.calls}
    names = ops or [name for name in supported() if name not in ALIASES or name in own]
    categories = {name: op_named(name)[1].category for name in names}
    chosen = [name for name, each in categories.items() if category in (None, each)]
    if not chosen:
        what = f"no op of {', '.join(ops)} is in the category {category}"
        raise UsageError(what, where="--category", next="leave it out")
    return sorted(chosen, key=lambda name: (CATEGORIES.index(categories[name]), name))


def jobs(names: Iterable[str], sizes: Sequence[str], *, every_axis: bool) -> list[Job]:
    """The cases of these ops: each size, over each of the kind's axes or over the first of them.

    Raises:
        UsageError: there is no such size.
    """
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
    """Measure every case in order.

    Args:
        dtype: None takes the first of float32, int32 and bool that the op takes.
        settings: gradients are left out for ops without one.
        notify: is called with the name of the next case.
    """
    found = Results()
    for count, job in enumerate(planned, 1):
        notify(f"{count}/{len(planned)} {job.name} {job.size}")
        one = _measured(job, device, dtype, settings)
        if isinstance(one, Measured):
            found.measured.append(replace(one, size=job.size))
        elif isinstance(one, Failure):
            found.failures.append(one)
        else:
            found.skipped.append({"case": f"{job.name} {label_of(job.name, job.shape, job.axes)}", "reason": one})
    return found


def _measured(job: Job, device: Device, dtype: DType | None, settings: Settings) -> Measured | Failure | str:
    """The case measured, the failure, or why the op does not take the case."""
    op, kind = op_named(job.name)
    chosen = replace(settings, backward=settings.backward and op.vjp is not None)
    try:
        axes = [job.axes] if kind.axes else []
        return next(measuring.profile_op(job.name, device, dtype, [job.shape], axes, chosen))
    except UsageError as error:
        if error.where == "--backward":  # the result has no gradient in this dtype
            return _measured(job, device, dtype, replace(settings, backward=False))
        return error.what
    except Exception as error:  # a bug in one op must not hide the others
        return Failure.of(job.name, label_of(job.name, job.shape, job.axes), error)


GROUPS = (
    Column("cases", "cases", "count", "Cases measured."),
    Column("launch", "call-bound", "count", "Cases whose time is mostly the call's own."),
    Column("average", "average", "share", "Mean share of the limit that binds; above 1 counts as 1."),
    Column("best", "best", "share", "Highest share."),
    Column("worst", "worst", "share", "Lowest share."),
    Column("worst_case", "worst case", "text", "The case with the lowest share."),
    Column("target", "target", "share", "The share to reach."),
    Column("reached", "reach it", "count", "Cases that reach the target."),
    *(Column(f"band_{name}", name, "count", f"Cases whose share is {name}.") for _, name in BANDS),
    Column("ratio", "vs torch", "ratio", "Median of its time over ours, without noise."),
    Column("ratio_best", "best", "ratio", "Highest ratio."),
    Column("ratio_worst", "worst", "ratio", "Lowest ratio."),
    Column("ratio_target", "target", "ratio", "The ratio to reach."),
    Column("slower", "slower", "count", "Cases in which torch is faster by more than the noise."),
    Column("noise", "noise", "count", "Ratios that are noise."),
)
PER_ISSUE = (
    Column("issue", "primary issue", "text", "What a measurement found."),
    Column("cases", "cases", "count", "Cases with it."),
    Column("lost", "time beyond the limit", "s", "Seconds of these cases that their limits would not take."),
    Column("most", "most in", "text", "The case that loses most."),
    Column("next", "next", "text", "What would help there."),
)
SKIPPED = (
    Column("case", "left out", "text", "Op and shape."),
    Column("reason", "why", "text", "What the op does not take."),
)


def rows_of(measured: Iterable[Measured]) -> list[dict[str, Any]]:
    """The rows of the table of all cases."""
    return [{column.key: column.cell(each) for column in COLUMNS} for each in measured]


def share_of(m: Measured) -> float:
    """Share of the limit that binds; 0 where no limit does."""
    return m.share or 0.0


def sums_of(name: str, cases: Sequence[Measured]) -> dict[str, Any]:
    """The row of a group of cases, such as those of a size."""
    loaded = sorted((m for m in cases if m.is_loaded), key=share_of)
    peers = [m.peer for m in cases if m.peer is not None]
    ratios = [ratio.ratio for ratio in peers if not ratio.is_noisy]
    row: dict[str, Any] = {"name": name, "cases": len(cases), "launch": len(cases) - len(loaded), "target": TARGET}
    row["reached"] = sum(share_of(m) >= TARGET for m in loaded)
    row |= {f"band_{band}": sum(m.band == band for m in loaded) for _, band in BANDS}
    if loaded:
        row |= {"average": fmean(min(share_of(m), 1.0) for m in loaded), "best": loaded[-1].share}
        row |= {"worst": loaded[0].share, "worst_case": loaded[0].name}
    if ratios:
        row |= {"ratio": median(ratios), "ratio_best": max(ratios), "ratio_worst": min(ratios)}
        row |= {"ratio_target": TARGET_RATIO, "slower": sum(ratio.is_slower for ratio in peers)}
    return row | {"noise": len(peers) - len(ratios) or None}


def issue_row(issue: str, cases: Sequence[Measured]) -> dict[str, Any]:
    """The row of an issue: where it costs most."""
    lost = {m.name: m.time.seconds * max(1 - share_of(m), 0.0) for m in cases}
    most = max(cases, key=lambda m: lost[m.name])
    advice = most.finding and most.finding.advice
    return {"issue": issue, "cases": len(cases), "lost": sum(lost.values()), "most": most.name, "next": advice}


def tables_of(results: Results) -> list[Table]:
    """The limits, sums by size class, category and issue, the best and the worst, and all cases."""
    cases = results.measured

    def grouped(names: Iterable[str], of: Callable[[Measured], Any]) -> Iterator[tuple[str, list[Measured]]]:
        groups = ((name, [m for m in cases if of(m) == name]) for name in names)
        return ((name, group) for name, group in groups if group)

    def sums(key: str, names: Iterable[str], title: str, more: Mapping[str, list[Measured]]) -> Table:
        columns = [Column("name", title, "text", "The group."), *GROUPS]
        groups = [*grouped(names, lambda m: getattr(m, title)), *more.items()]
        return table(key, f"by {'size class' if title == 'size' else title}", columns, [sums_of(*g) for g in groups])

    limits = {m.case.dtype.name: m.limits for m in cases}
    loaded = sorted((m for m in cases if m.is_loaded), key=share_of)
    best = [m for m in reversed(loaded) if share_of(m) >= TARGET and (m.limit == "compute" or share_of(m) <= CACHED)]
    worst = [m for m in loaded if share_of(m) < TARGET]
    slower = [(m.peer.ratio, m.name, m) for m in cases if m.peer is not None and m.peer.is_slower]
    issues = [issue_row(*group) for group in grouped(ISSUES, lambda m: m.finding and m.finding.issue)]
    notes = dict.fromkeys(note for m in cases for note in m.notes)
    tables = [
        table("limits", "measured now", LIMITS, limits.values()),
        sums("sizes", SIZES, "size", {"all": cases} if cases else {}),
        sums("categories", CATEGORIES, "category", {}),
        table("issues", "by primary issue", PER_ISSUE, issues),
        table("worst", "farthest from the limit", brief(), worst[:RANKED]),
        table("best", "nearest to the limit", brief(), best[:RANKED]),
        table("slower", "slower than torch", brief(), [m for *_, m in sorted(slower)[:RANKED]]),
        table("skipped", "", SKIPPED, results.skipped, most=RANKED),
        table("ops", "all cases", brief(), cases, notes=notes),
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
        notes.append("a ratio to torch whose rounds lie more than 20% apart is noise and counts nowhere")
    return notes
