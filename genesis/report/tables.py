"""The tables of a report as rows of cells, for the page and the Markdown alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from genesis.measure.cases import CATEGORIES
from genesis.profile.format import format_rate, format_seconds
from genesis.profile.roofline import BANDS
from genesis.report.charts import sparkline
from genesis.report.phrases import cells_of, changed, marked, percent
from genesis.report.schema import BenchReport, Ranked

Cells = dict[str, Any]


class Table(NamedTuple):
    """Columns, and rows by column."""

    columns: list[str]
    rows: list[Cells]


def _table(rows: Sequence[Cells]) -> Table:
    """A table without the columns that no row fills."""
    return Table([name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)], list(rows))


def category_table(report: BenchReport) -> Table:
    """Categories with their bands."""
    return _table(
        [
            {
                "category": each.category,
                "ops": str(each.ops),
                "cases": str(each.cases),
                "launch bound": str(each.launch_bound or ""),
                "median share": percent(each.median_share),
                **{name: str(each.bands.get(name, 0)) for _, name in BANDS},
            }
            for each in report.summary.categories
        ]
    )


def ranked_table(rows: Sequence[Ranked]) -> Table:
    """The best or the worst."""
    return _table(
        [
            {
                "case": f"{row.name} {row.label.replace('x', '×')}",
                "time": format_seconds(row.seconds),
                "share": percent(row.share),
                "band": row.band,
                "advice": row.advice,
            }
            for row in rows
        ]
    )


def moved_table(report: BenchReport, verdict: str) -> Table:
    """The cases that are slower, or those that are faster, the largest changes first."""
    moved = [change for change in report.changes if change.verdict == verdict]
    return _table([changed(each) for each in sorted(moved, key=lambda c: -abs(math.log(c.ratio)))])


def past_table(report: BenchReport) -> Table:
    """Earlier runs, the newest first."""
    return _table(
        [
            {
                "date": past.date[:16].replace("T", " "),
                "Genesis": past.genesis,
                "copy": "" if past.bytes_per_second is None else format_rate(past.bytes_per_second, "B/s"),
                "matmul": "" if past.flops_per_second is None else format_rate(past.flops_per_second, "FLOP/s"),
                "common cases": str(past.common),
                "time beside now": "" if past.relative is None else marked(past.relative),
            }
            for past in reversed(report.history)
        ]
    )


def details(report: BenchReport) -> Iterator[tuple[str, Table]]:
    """Every case, by category."""
    trends = {(t.name, t.label, t.dtype): t.seconds for t in report.trends}
    changes = {(c.name, c.label, c.dtype): c for c in report.changes}
    for category in CATEGORIES:
        rows: list[Cells] = []
        for row in (entry.row for entry in report.entries if entry.category == category):
            key = row.name, row.label, row.dtype
            change, trend = changes.get(key), trends.get(key)
            rows.append(
                {
                    **cells_of(row),
                    "change": "" if change is None else marked(change.ratio),
                    "trend": sparkline(trend, 84, 22) if trend else [],
                }
            )
        if rows:
            yield category, _table(rows)


def failure_table(report: BenchReport) -> Table:
    """What failed, and why."""
    return _table([{"op": f.name, "case": f.label, "error": f.error} for f in report.failures])


def skipped_table(report: BenchReport) -> Table:
    """What ops do not take."""
    return _table([{"op": s.name, "case": s.label, "reason": s.reason} for s in report.skipped])
