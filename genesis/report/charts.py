"""The geometry of a report's charts: where bars, points and lines are. `page.html` draws them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from genesis.measure.cases import CATEGORIES, SIZES
from genesis.profile.format import format_rate, format_seconds, format_share
from genesis.profile.roofline import BANDS
from genesis.profile.schema import LimitsRow, OpRow
from genesis.report.schema import Entry
from genesis.report.summary import is_call_bound, seconds_of


class Tick(NamedTuple):
    """A line of the grid, and its label."""

    at: float
    label: str


FULL = 1.25  # the share at the right end of a chart; longer bars are cut there
FIRST, FEW = 14, 4  # bars that are shown at once, and so many more that hiding them is not worth a click
MARKS = [Tick(100 * share / FULL, f"{share:.0%}") for share in (*sorted(least for least, _ in BANDS if least), 1.0)]


class OneBar(NamedTuple):
    """One bar: its length in per cent of the chart's width, and its words."""

    label: str
    detail: str
    percent: float
    look: str
    word: str
    text: str
    title: str


class Bars(NamedTuple):
    """A chart of bars, the shortest first: those are what one looks for."""

    category: str
    first: list[OneBar]
    rest: list[OneBar]
    """What is shown when asked for."""


def largest(entries: Iterable[Entry]) -> list[Entry]:
    """Each op at the largest size that was measured, over each of its axes: where the machine's limits show best."""
    found: dict[tuple[str, str], Entry] = {}
    for entry in sorted(entries, key=lambda entry: SIZES.index(entry.size)):
        found[entry.row.name, str(entry.row.axes)] = entry
    return list(found.values())


def bars_by_category(entries: Sequence[Entry]) -> Iterator[Bars]:
    """A chart for each category: the share of the limit by op."""
    for category in CATEGORIES:
        shown = [e for e in largest(entries) if e.category == category and e.row.share is not None]
        shown.sort(key=lambda entry: (is_call_bound(entry.row), entry.row.share or 0.0, entry.title))
        if shown:
            bars = [_bar(entry) for entry in shown]
            first = FIRST if len(bars) > FIRST + FEW else len(bars)
            yield Bars(category, bars[:first], bars[first:])


def _bar(entry: Entry) -> OneBar:
    row = entry.row
    assert row.share is not None and row.band is not None
    details = [row.label.replace("x", "×")] + ["noisy"] * row.is_noisy
    found = f"{format_seconds(seconds_of(row))}, {format_share(row.share)} of the limit, {row.band}"
    return OneBar(
        label=row.name,
        detail=", ".join(details),
        percent=100 * min(row.share, FULL) / FULL,
        look=look_of(row),
        word="launch bound" if is_call_bound(row) else row.band,
        text=format_share(row.share),
        title=f"{entry.title}, {row.dtype}: {found}",
    )


def look_of(row: OpRow) -> str:
    """The class of a mark in `page.css`: its band, or "launch" where that says nothing."""
    return "launch" if is_call_bound(row) else row.band or "launch"


def stacked(parts: Sequence[float]) -> list[tuple[float, float]]:
    """Start and width in per cent of parts that are side by side and fill the whole width."""
    total, found, start = sum(parts) or 1.0, [], 0.0
    for part in parts:
        found.append((100 * start / total, 100 * part / total))
        start += part
    return found


# --- Roofline ---------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A case under the roofline."""

    x: float
    y: float
    look: str
    title: str


class Roofline(NamedTuple):
    """The plot in its own coordinates, y down."""

    width: int
    height: int
    left: int
    bottom: float
    top: int
    right: float
    points: list[Point]
    roof: list[tuple[float, float]]
    columns: list[Tick]
    rows: list[Tick]
    bandwidth: str
    compute: str


LEFT, TOP, RIGHT, BELOW = 58, 16, 22, 40


def roofline(entries: Sequence[Entry], limits: LimitsRow, width: int, height: int) -> Roofline | None:
    """Cases of the dtype of `limits` by FLOPs a byte and FLOPs a second, on logarithmic axes; None without any."""
    rows = [e for e in entries if e.row.dtype == limits.dtype and e.row.flops and e.row.intensity]
    if not rows or limits.flops_per_second is None:
        return None
    ridge = limits.flops_per_second / limits.bytes_per_second
    xs = _decades([ridge, *(e.row.intensity or 1.0 for e in rows)])
    lowest_roof = min(limits.flops_per_second, limits.bytes_per_second * 10.0 ** xs[0])
    ys = _decades([limits.flops_per_second, lowest_roof, *(e.row.flops_per_second for e in rows)])

    def x(intensity: float) -> float:
        return round(LEFT + (math.log10(intensity) - xs[0]) / (xs[-1] - xs[0]) * (width - LEFT - RIGHT), 1)

    def y(flops: float) -> float:
        return round(height - BELOW - (math.log10(flops) - ys[0]) / (ys[-1] - ys[0]) * (height - TOP - BELOW), 1)

    top = y(limits.flops_per_second)
    return Roofline(
        width=width,
        height=height,
        left=LEFT,
        bottom=height - BELOW,
        top=TOP,
        right=width - RIGHT,
        points=[Point(x(e.row.intensity or 1.0), y(e.row.flops_per_second), look_of(e.row), _tooltip(e)) for e in rows],
        roof=[(x(10.0 ** xs[0]), y(lowest_roof)), (x(ridge), top), (width - RIGHT, top)],
        columns=[Tick(x(10.0**power), _power(power)) for power in _thinned(xs, width // 80)],
        rows=[Tick(y(10.0**power), format_rate(10.0**power, "").strip()) for power in _thinned(ys, height // 40)],
        bandwidth=format_rate(limits.bytes_per_second, "B/s"),
        compute=format_rate(limits.flops_per_second, "FLOP/s"),
    )  # fmt: skip


def _decades(values: Iterable[float]) -> range:
    """Powers of ten around the values."""
    logs = [math.log10(value) for value in values]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return range(low, max(high, low + 1) + 1)


def _thinned(powers: range, most: int) -> range:
    return powers[:: math.ceil(len(powers) / max(most, 2))]


def _power(power: int) -> str:
    return f"{10.0**power:g}"


def _tooltip(entry: Entry) -> str:
    row = entry.row
    assert row.share is not None
    where = f"{format_rate(row.flops_per_second, 'FLOP/s')} at {row.intensity:.3g} FLOP a byte"
    return f"{entry.title}: {where}, {format_share(row.share)} of the limit, {row.band}"


# --- Sparklines -------------------------------------------------------------------------------------------------------


def sparkline(values: Sequence[float | None], width: int, height: int) -> list[tuple[float, float]]:
    """Points of a line through the values, the least at the bottom; gaps are left out."""
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    margin = 3.0
    step = (width - 2 * margin) / max(len(values) - 1, 1)
    # Small differences must not look large: the height is at least a tenth of the values.
    room = max(high - low, 0.1 * high)
    middle = (high + low) / 2
    return [
        (round(margin + i * step, 1), round(height / 2 - (value - middle) / room * (height - 2 * margin), 1))
        for i, value in enumerate(values)
        if value is not None
    ]
