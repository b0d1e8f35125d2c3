"""The text of a demo: a table for each section, and the sentences that follow from it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from genesis.demos import DEMOS
from genesis.demos.schema import DemoReport, DemoRow, Section
from genesis.errors import escape
from genesis.profile.format import aligned, format_bytes, format_rate, format_seconds, format_share

WIDTH = 100
LEFT = ("way", "note")
MANY_FLOPS = 16  # a byte: with more, arithmetic is what a way is measured by


def render_lines(report: DemoReport) -> Iterator[str]:
    """The whole report."""
    copied = format_rate(report.copy_bytes_per_second, "B/s")
    yield f"demo    {DEMOS[report.demo]}"
    yield f"code    genesis/demos/{report.demo}.py"
    yield f"device  {escape(report.device_name)} ({report.device}), which copies {copied}"
    for section in report.sections:
        yield ""
        yield from _section(section, "ops" if report.device == "cpu" else "launches")


def _section(section: Section, launches: str) -> Iterator[str]:
    yield section.title
    yield from aligned([_cells(row, section, launches) for row in section.rows], LEFT)
    for sentence in section.sentences:
        yield from textwrap.wrap(sentence, WIDTH)
    for note in section.notes:
        yield from textwrap.wrap(f"note: {escape(note)}", WIDTH, subsequent_indent=" " * 6)


def _cells(row: DemoRow, section: Section, launches: str) -> dict[str, str]:
    by_arithmetic = section.rows[0].flops > MANY_FLOPS * section.rows[0].bytes
    return {
        "way": row.name,
        launches: str(row.launches),
        "read+written": format_bytes(row.bytes),
        "wall": format_seconds(row.wall.seconds),
        "GPU": format_seconds(row.gpu.seconds) if row.gpu else "",
        "rate": format_rate(row.flops / row.seconds, "FLOP/s")
        if by_arithmetic
        else format_rate(row.bytes_per_second, "B/s"),
        "of a copy": "" if by_arithmetic else format_share(row.share),
        "peak memory": "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        "note": "noisy" if (row.gpu or row.wall).is_noisy else "",
    }
