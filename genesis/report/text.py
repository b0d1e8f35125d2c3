"""The report in the terminal: the summary, and where the whole of it is."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from genesis.errors import escape
from genesis.profile.format import aligned, format_ratio, format_seconds
from genesis.report import tables
from genesis.report.phrases import about_changes, headline, limits_of_report, percent
from genesis.report.schema import BenchReport, Ranked
from genesis.report.summary import listed

WIDTH = 100
INDENT = 9


def render_lines(report: BenchReport, files: Iterable[Path]) -> Iterator[str]:
    """The summary."""
    summary = report.summary
    yield f"device   {escape(report.device_name)} ({report.device}), {report.settings.dtype}"
    limits = ", ".join(f"{name} {value}" for name, value in limits_of_report(report.limits[0]))
    yield from _titled("limits", f"measured now: {limits}")
    yield ""
    yield from textwrap.wrap(headline(report), WIDTH)
    if summary.categories:
        yield ""
        yield from aligned(tables.category_table(report).rows, ("category",))
        yield ""
    yield from _ranked("worst", summary.worst)
    yield from _ranked("best", summary.best)
    for text in about_changes(report):
        yield from _titled("since", text)
    slower = [f"{c.name} {c.label} ×{format_ratio(c.ratio)}" for c in report.changes if c.verdict == "slower"]
    if slower:
        yield from _titled("slower", listed(slower, 8))
    for text in summary.recommendations:
        yield from _titled("next", text)
    for section in report.sections:
        yield ""
        yield section.title
        for text in section.text:
            yield from _titled("", text)
    for failure in report.failures:
        yield from _titled("failed", f"{failure.name} {failure.label}: {failure.error}")
    if report.skipped:
        yield from _titled("left out", f"{len(report.skipped)} cases that the ops do not take; the report lists them")
    yield ""
    for file in files:
        yield f"written  {escape(_near(file))}"


def _near(file: Path) -> Path:
    """The path as seen from the current folder, where it is below that."""
    here = Path.cwd()
    return file.relative_to(here) if file.is_relative_to(here) else file


def _titled(title: str, text: str) -> list[str]:
    return textwrap.wrap(escape(text), WIDTH, initial_indent=title.ljust(INDENT), subsequent_indent=" " * INDENT)


def _ranked(title: str, rows: Sequence[Ranked]) -> Iterator[str]:
    names = [f"{row.name} {row.label} {percent(row.share)} ({format_seconds(row.seconds)})" for row in rows]
    if names:
        yield from _titled(title, ", ".join(names))
