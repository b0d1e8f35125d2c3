"""The report as Markdown, for terminals, reviews and repositories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from genesis.errors import escape
from genesis.profile.format import format_seconds
from genesis.report import tables
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

WORDS = frozenset(
    (
        "category",
        "case",
        "op",
        "dtype",
        "band",
        "cause",
        "note",
        "advice",
        "verdict",
        "date",
        "Genesis",
        "error",
        "reason",
    )
)


def markdown_of(report: BenchReport) -> str:
    """The whole report."""
    return "\n".join(escape(line) for line in _lines(report)).rstrip() + "\n"


def markdown_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], words: Sequence[str] = ()
) -> Iterator[str]:
    """The lines of a table; columns of `words` are aligned left, numbers right."""
    yield _row(columns)
    yield "|" + "|".join(" --- " if name in words else " ---: " for name in columns) + "|"
    for row in rows:
        yield _row(row)


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(cell: object) -> str:
    return str(cell).replace("|", "\\|")


def _shown(table: tables.Table) -> Iterator[str]:
    columns = [name for name in table.columns if name != "trend"]
    words = [name for name in columns if name in WORDS]
    yield from markdown_table(columns, [[row[name] for name in columns] for row in table.rows], words)
    yield ""


def _lines(report: BenchReport) -> Iterator[str]:
    summary = report.summary
    yield f"# {subject(report)} on {report.device_name}, {report.date[:10]}"
    yield ""
    yield headline(report)
    yield ""
    yield f"{subtitle(report)}. Command: `{report.command}`; it took {format_seconds(report.seconds)}."
    yield ""
    yield "Limits, measured in the same process: " + ", ".join(
        f"{name} {value}" for name, value in limits_of_report(report.limits[0])
    ) + "."  # fmt: skip
    yield ""
    yield "## Summary"
    yield ""
    bands = ", ".join(f"{count} {name}" for name, count in summary.bands.items())
    rate = percent(summary.success_rate)
    yield f"{summary.measured} of {summary.cases} cases measured ({rate}): {bands}. {remarks(report)}".rstrip()
    yield ""
    if summary.categories:
        yield from _shown(tables.category_table(report))
    yield from _advice_and_changes(report)
    for title, rows in (("Farthest from the limit", summary.worst), ("Nearest to the limit", summary.best)):
        if rows:
            yield from (f"## {title}", "")
            yield from _shown(tables.ranked_table(rows))
    yield from _sections(report)
    yield from _rest(report)


def _advice_and_changes(report: BenchReport) -> Iterator[str]:
    if report.summary.recommendations:
        yield from ("## What to do next", "")
        yield from (f"{i}. {text}" for i, text in enumerate(report.summary.recommendations, 1))
        yield ""
    yield from ("## Since the last run", "")
    for text in about_changes(report):
        yield from (text, "")
    past = tables.past_table(report)
    for verdict in ("slower", "faster"):
        moved = tables.moved_table(report, verdict)
        if moved.rows:
            yield from (f"{verdict.capitalize()} beyond the noise:", "")
            yield from _shown(moved)
    if past.rows:
        yield from ("Earlier runs:", "")
        yield from _shown(past)


def _sections(report: BenchReport) -> Iterator[str]:
    for section in report.sections:
        yield from (f"## {section.title}", "")
        for text in section.text:
            yield from (text, "")
        if section.cells:
            yield from markdown_table(section.columns, section.cells, section.columns[:1])
            yield ""


def _rest(report: BenchReport) -> Iterator[str]:
    for category, table in tables.details(report):
        yield from (f"## Every case: {category}", "")
        yield from _shown(table)
    for title, table in (
        ("What failed", tables.failure_table(report)),
        ("What was left out", tables.skipped_table(report)),
    ):
        if table.rows:
            yield from (f"## {title}", "")
            yield from _shown(table)
    yield from ("## Machine", "")
    yield from (f"- {name}: {value}" for name, value in about_machine(report))
