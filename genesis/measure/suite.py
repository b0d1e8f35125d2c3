"""Many ops measured: which, in which sizes, one after the other, and the tables that sum them up.

A case that fails does not end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any, NamedTuple

from genesis.backend import Device
from genesis.dtypes import DType
from genesis.errors import GenesisError, UsageError
from genesis.files.paths import quote
from genesis.measure import op as measuring
from genesis.measure.cases import ALIASES, CATEGORIES, KINDS, SIZES, Axes, label_of, op_named, supported
from genesis.measure.causes import ISSUES
from genesis.measure.limits import COLUMNS as LIMITS
from genesis.measure.op import BANDS, COLUMNS, Measured, Settings, brief
from genesis.measure.record import Column, Failure, Table, table
from genesis.measure.timing import Plan
from genesis.shapes import Shape

THOROUGH = Plan(seconds=0.5)
FAST = Plan(precision=0.05, seconds=0.12, warm_up=0.01)
EXIT_BUG = 70
TARGET = 0.7  # of the limit that binds: the band "good"
TARGET_RATIO = 1.0  # of torch's speed
RANKED = 10  # of the best, and of the worst
CACHED = 1.05  # above this share of a copy's rate, data came out of a cache


class Job(NamedTuple):
    """One case to measure; `axes` are those of the op, None for all of them and where there are none."""

    name: str
    size: str
    shape: Shape
    axes: Axes

    @property
    def label(self) -> str:
        """Shape and axes."""
        return label_of(self.name, self.shape, self.axes)


class Skipped(NamedTuple):
    """A case that the op does not take."""

    name: str
    label: str
    reason: str


@dataclass
class Results:
    """What a run gave, in order.

    Attributes:
        left: cases that it did not come to, because somebody ended it.
    """

    measured: list[Measured]
    failures: list[Failure]
    skipped: list[Skipped]
    left: int = 0
    interrupted: bool = False


def names_of(ops: Sequence[str] = (), category: str | None = None) -> list[str]:
    """The ops that are asked for, each once, by category; all of them where none are named.

    Raises:
        UsageError: there is no such op or category, or no op of these is in the category.
    """
    if category is not None and category not in CATEGORIES:
        raise UsageError(
            f"{quote(category)} is no category", where="--category", next=f"use one of {', '.join(CATEGORIES)}"
        )
    categories = {name: op_named(name)[1].category for name in ops}
    if not ops:
        # An alias is the same op again, unless it is of a kind of its own, as a transpose is.
        kept = {name for kind in KINDS.values() for name in kind.calls}
        categories = {n: op_named(n)[1].category for n in supported() if n not in ALIASES or n in kept}
    chosen = [name for name, each in categories.items() if category in (None, each)]
    if not chosen:
        listed = ", ".join(ops)
        raise UsageError(f"no op of {listed} is in the category {category}", where="--category", next="leave it out")
    return sorted(chosen, key=lambda name: (CATEGORIES.index(categories[name]), name))


def jobs(names: Iterable[str], sizes: Sequence[str], *, every_axis: bool) -> list[Job]:
    """The cases of these ops: each size, over each of the kind's axes or over the first of them.

    Raises:
        UsageError: there is no such size.
    """
    for size in sizes:
        if size not in SIZES:
            raise UsageError(f"{quote(size)} is no size", where="--size", next=f"use one of {', '.join(SIZES)}")
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
    is_slower: Callable[[Measured], bool] = lambda measured: False,
) -> Results:
    """Every case in order. KeyboardInterrupt ends the run with what there is.

    Args:
        dtype: None takes the first of float32, int32 and bool that the op takes.
        settings: gradients are left out where an op has none.
        notify: is called with what comes next.
        is_slower: such a case is measured once more: another program may have been in the way.
    """
    found = Results([], [], [])
    for count, job in enumerate(planned):
        try:
            notify(f"{count + 1}/{len(planned)} {job.name} {job.size}")
            one = _measured(job, device, dtype, settings)
            if isinstance(one, Measured) and is_slower(one):
                notify(f"once more: {one.name}")
                again = _measured(job, device, dtype, settings)
                one = min(one, again, key=lambda m: m.time.seconds) if isinstance(again, Measured) else one
        except KeyboardInterrupt:
            found.left, found.interrupted = len(planned) - count, True
            return found
        if isinstance(one, Measured):
            found.measured.append(one)
        elif isinstance(one, Failure):
            found.failures.append(one)
        else:
            found.skipped.append(one)
    return found


def _measured(job: Job, device: Device, dtype: DType | None, settings: Settings) -> Measured | Failure | Skipped:
    """What an op does not take is skipped, and whatever else goes wrong is a failure."""
    axes = [job.axes] if op_named(job.name)[1].axes else []
    backward = settings.backward and op_named(job.name)[0].vjp is not None
    try:
        chosen = replace(settings, backward=backward)
        (found,) = measuring.profile_op(job.name, device, dtype, [job.shape], axes, chosen)
    except UsageError as error:
        if error.where == "--backward":  # of this dtype the result has no gradient
            return _measured(job, device, dtype, replace(settings, backward=False))
        return Skipped(job.name, job.label, error.what)
    except Exception as error:  # a bug in one op must not hide the others
        code = error.exit_code if isinstance(error, GenesisError) else EXIT_BUG
        text = error.what if isinstance(error, GenesisError) else f"{type(error).__name__}: {error}"
        return Failure(job.name, job.label, text, code)
    return replace(found, size=job.size) if isinstance(found, Measured) else found


# --- Tables -----------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Cases that belong together, such as those of a size."""

    name: str
    cases: list[Measured]

    @property
    def loaded(self) -> list[Measured]:
        """Those whose share says something about the kernel."""
        return [m for m in self.cases if m.is_loaded]

    @property
    def compared(self) -> list[Measured]:
        """Those with a ratio that is no noise."""
        return [m for m in self.cases if m.peer is not None and not m.peer.forward.is_noisy]


def _share(m: Measured) -> float:
    return m.share or 0.0


def _ratio(m: Measured) -> float:
    assert m.peer is not None
    return m.peer.forward.ratio


def _over(of: Callable[[Measured], float], pick: str, how: Callable[..., Any]) -> Callable[[Group], Any]:
    """A figure of a group; None where no case has one."""
    return lambda group: how(map(of, cases)) if (cases := getattr(group, pick)) else None


def _extreme(of: Callable[[Measured], float], pick: str, how: Callable[..., Any]) -> Callable[[Group], str]:
    return lambda group: how(cases, key=of).name if (cases := getattr(group, pick)) else ""


def _group_columns(title: str) -> list[Column]:
    share, ratio = (_share, "loaded"), (_ratio, "compared")
    return [
        Column("name", title, "text", "The group.", lambda group: group.name),
        Column("cases", "cases", "count", "Cases measured.", lambda group: len(group.cases)),
        Column("launch", "call-bound", "count", "Cases whose time is mostly the call's own.",
               lambda group: len(group.cases) - len(group.loaded)),
        Column("average", "average", "share", "Mean share of the limit that binds; above 1 counts as 1.",
               _over(lambda m: min(_share(m), 1.0), "loaded", fmean)),
        Column("median", "median", "share", "Median share.", _over(*share, median), True),
        Column("best", "best", "share", "Highest share.", _over(*share, max)),
        Column("best_case", "best case", "text", "Whose share that is.", _extreme(*share, max), True),
        Column("worst", "worst", "share", "Lowest share.", _over(*share, min)),
        Column("worst_case", "worst case", "text", "Whose share that is.", _extreme(*share, min)),
        Column("target", "target", "share", "The share to reach.", lambda group: TARGET),
        Column("reached", "reach it", "count", "Cases that do.",
               lambda group: sum(_share(m) >= TARGET for m in group.loaded)),
        *(Column(f"band_{n}", n, "count", f"Cases whose share is {n}.", partial(_in_band, n)) for _, n in BANDS),
        Column("ratio", "vs torch", "ratio", "Median of its time over ours, without noise.", _over(*ratio, median)),
        Column("ratio_best", "best", "ratio", "Highest ratio.", _over(*ratio, max)),
        Column("ratio_worst", "worst", "ratio", "Lowest ratio.", _over(*ratio, min)),
        Column("ratio_target", "target", "ratio", "The ratio to reach.",
               lambda group: TARGET_RATIO if group.compared else None),
        Column("slower", "slower", "count", "Cases in which torch is faster, and not by chance.",
               lambda group: sum(_is_slower(m) for m in group.cases) if group.compared else None),
        Column("noise", "noise", "count", "Ratios that are noise.",
               lambda group: sum(m.peer is not None for m in group.cases) - len(group.compared) or None),
    ]  # fmt: skip


def _in_band(name: str, group: Group) -> int:
    return sum(m.band == name for m in group.loaded)


def _is_slower(m: Measured) -> bool:
    """The peer is faster, and not by chance."""
    return m.peer is not None and m.peer.forward.ratio < 1 - m.peer.forward.spread


ISSUE_COLUMNS = (
    Column("issue", "primary issue", "text", "What a measurement found.", lambda group: group.name),
    Column("cases", "cases", "count", "Cases with it.", lambda group: len(group.cases)),
    Column("lost", "time beyond the limit", "s", "Seconds of these cases that their limits would not take.",
           lambda group: sum(m.time.seconds * max(1 - _share(m), 0) for m in group.cases)),
    Column("most", "most in", "text", "The case that loses most.",
           lambda group: max(group.cases, key=lambda m: m.time.seconds * (1 - _share(m))).name),
    Column("next", "next", "text", "What would help there.",
           lambda group: max(group.cases, key=lambda m: m.time.seconds * (1 - _share(m))).finding.advice),
)  # fmt: skip


def tables_of(results: Results) -> list[Table]:
    """The limits, sums by category, size class and issue, the best and the worst, and all cases."""
    cases = results.measured
    limits = {m.case.dtype.name: m.limits for m in cases}
    loaded = [m for m in cases if m.is_loaded]
    through_memory = [m for m in loaded if m.limit == "compute" or _share(m) <= CACHED]
    worst = sorted((m for m in loaded if _share(m) < TARGET), key=_share)
    best = sorted((m for m in through_memory if _share(m) >= TARGET), key=_share, reverse=True)
    slower = sorted((m for m in cases if _is_slower(m)), key=_ratio)
    total = [Group("all", cases)] if cases else []
    skipped = [
        Column("case", "left out", "text", "Op and shape.", lambda s: f"{s.name} {s.label}"),
        Column("reason", "why", "text", "What the op does not take.", lambda s: s.reason),
    ]
    tables = [
        table("limits", "measured now", LIMITS, limits.values()),
        table("sizes", "by size class", _group_columns("size"), [*_groups(cases, SIZES, lambda m: m.size), *total]),
        table("categories", "by category", _group_columns("category"), _groups(cases, CATEGORIES, _category)),
        table("issues", "by primary issue", ISSUE_COLUMNS, _groups(cases, ISSUES, _issue)),
        table("worst", "farthest from the limit", brief(), worst[:RANKED]),
        table("best", "nearest to the limit", brief(), best[:RANKED]),
        table("slower", "slower than torch", brief(), slower[:RANKED]),
        table("skipped", "", skipped, results.skipped, most=RANKED),
        table("ops", "all cases", brief(COLUMNS), cases),
    ]
    tables[-1].notes += dict.fromkeys(note for m in cases for note in m.notes)
    return [each for each in tables if each.rows]


def _category(m: Measured) -> str:
    return op_named(m.case.name)[1].category


def _issue(m: Measured) -> str | None:
    return m.finding and m.finding.issue


def _groups(cases: Sequence[Measured], names: Iterable[str], of: Callable[[Measured], Any]) -> Iterator[Group]:
    for name in names:
        if found := [m for m in cases if of(m) == name]:
            yield Group(name, found)


def notes_of(results: Results) -> Iterator[str]:
    """Sentences about the whole, the most pressing first."""
    cases, tried = results.measured, len(results.measured) + len(results.failures)
    yield f"{len(cases)} of {tried} cases were measured" + (
        f"; interrupted before the last {results.left} cases" if results.interrupted else ""
    )
    beaten = sum(m.limit == "compute" and _share(m) > CACHED for m in cases)
    if beaten:
        yield f"{beaten} products ran faster than the limit, which was measured while the machine had other work to do"
    noisy = sum(m.is_noisy for m in cases)
    if cases and noisy >= len(cases) / 4:
        yield f"{noisy} of {len(cases)} cases are noisy: measure again on a quiet machine, and with more time"
    if any(m.peer is not None and m.peer.forward.is_noisy for m in cases):
        yield "a ratio to torch whose rounds lie more than 20% apart is noise and counts nowhere"
