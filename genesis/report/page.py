"""The report as one HTML page: no scripts, nothing from elsewhere, light and dark, for phones and screens."""

from __future__ import annotations

from importlib import resources
from typing import Any

from genesis.profile.format import format_ratio, format_seconds
from genesis.profile.roofline import BANDS
from genesis.report import tables
from genesis.report.charts import MARKS, bars_by_category, roofline, sparkline, stacked
from genesis.report.phrases import (
    about_changes,
    about_machine,
    headline,
    limits_of_report,
    percent,
    remarks,
    subject,
    subtitle,
)
from genesis.report.schema import BenchReport

WIDE, NARROW = (1040, 460), (340, 380)  # of the roofline


def page_of(report: BenchReport) -> str:
    """The page."""
    import jinja2

    folder = resources.files("genesis.report")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False)
    template = environment.from_string(folder.joinpath("page.html").read_text("utf-8"))
    css = folder.joinpath("page.css").read_text("utf-8")
    return template.render(
        report=report, css=css, percent=percent, **_head(report), **_charts(report), **_tables(report)
    )


def _head(report: BenchReport) -> dict[str, Any]:
    return {
        "title": f"{subject(report)} on {report.device_name}",
        "called": report.kind if report.kind == "bench-ops" else "bench all",
        "remarks": remarks(report),
        "subtitle": subtitle(report),
        "headline": headline(report),
        "summary": report.summary,
        "limits": limits_of_report(report.limits[0]),
        "changes_text": list(about_changes(report)),
        "machine": about_machine(report),
        "took": format_seconds(report.seconds),
    }


def _charts(report: BenchReport) -> dict[str, Any]:
    bands = {**report.summary.bands, "launch": report.summary.launch_bound}
    uppers = [None, *(least for least, _ in BANDS)]
    relative = [past.relative for past in report.history]
    return {
        "bands": bands,
        "strip": dict(zip(bands, stacked(list(bands.values())), strict=True)),
        "ranges": {name: _range(least, upper) for (least, name), upper in zip(BANDS, uppers, strict=False)},
        "marks": MARKS,
        "charts": list(bars_by_category(report.entries)),
        "wide_roof": roofline(report.entries, report.limits[0], *WIDE),
        "narrow_roof": roofline(report.entries, report.limits[0], *NARROW),
        "past": report.history,
        "past_ends": f"{format_ratio(next((r for r in relative if r), 1.0))} times at first, 1 now",
        "past_line": sparkline([*relative, 1.0], 600, 90),
    }


def _range(least: float, upper: float | None) -> str:
    """The shares of a band."""
    if upper is None:
        return f"{least:.0%} and more"
    return f"{least:.0%} to {upper:.0%}" if least else f"below {upper:.0%}"


def _tables(report: BenchReport) -> dict[str, Any]:
    found: dict[str, Any] = {}
    named = {
        "category_columns categories": tables.category_table(report),
        "_ worst": tables.ranked_table(report.summary.worst),
        "_ best": tables.ranked_table(report.summary.best),
        "moved_columns slower": tables.moved_table(report, "slower"),
        "moved_columns faster": tables.moved_table(report, "faster"),
        "past_columns past_rows": tables.past_table(report),
        "_ failures": tables.failure_table(report),
        "_ skipped": tables.skipped_table(report),
    }
    for names, table in named.items():
        columns, rows = names.split()
        found[columns] = table.columns or found.get(columns, [])
        found[rows] = table.rows
    found["details"] = [(category, table.columns, table.rows) for category, table in tables.details(report)]
    found["section_rows"] = [
        [dict(zip(section.columns, cells, strict=True)) for cells in section.cells] for section in report.sections
    ]
    return found
