"""What every measuring command returns: a report of tables. One schema, for JSON, the terminal and Markdown alike.

A column says once what it is called, its unit, what it means and how it follows from what was measured. Adding a
column to a report is adding a `Column` to its table.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from genesis.errors import escape

SCHEMA_VERSION = 2  # grows when a field goes or changes its meaning; a new column leaves it as it is

Cell = float | int | str | bool | None
Unit = Literal["text", "count", "s", "bytes", "byte/s", "FLOP", "FLOP/s", "FLOP/byte", "share", "ratio", "token/s"]


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: name of the cell in JSON.
        title: name for people.
        unit: unit of the value in JSON; seconds, bytes and shares of 1 are scaled for people.
        about: what the value means, in a sentence; JSON and the page of the docs show it.
        of: the value for one measured object; None leaves the cell empty.
        hidden: whether only JSON has it.
    """

    key: str
    title: str
    unit: Unit
    about: str
    of: Callable[[Any], Cell] = field(default=lambda measured: None, repr=False, compare=False)
    hidden: bool = False


@dataclass
class Table:
    """Rows of cells under columns.

    Attributes:
        name: name in JSON, such as "ops".
        title: heading for people; may be empty.
        rows: one mapping of column keys to values per measured object.
        listed: shows each row as lines "title value", for tables of few rows and many columns.
        most: rows that people are shown; 0 for all. JSON has all.
        notes: sentences below the table.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: list[dict[str, Cell]]
    listed: bool = False
    most: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def first(self) -> list[dict[str, Cell]]:
        """The rows that people are shown."""
        return self.rows[: self.most or None]


def table(
    name: str, title: str, columns: Sequence[Column], measured: Iterable[object], *, listed: bool = False, most: int = 0
) -> Table:
    """The table of measured objects: each column computes its cell from each object."""
    return Table(
        name, title, columns, [{c.key: _finite(c.of(each)) for c in columns} for each in measured], listed, most
    )


def _finite(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


@dataclass(frozen=True)
class Failure:
    """A case that could not be measured; the others were."""

    name: str
    label: str
    error: str
    exit_code: int


@dataclass
class Report:
    """A measurement, as JSON stores it.

    Attributes:
        kind: "profile-op", "profile-run", "bench-ops", "bench-model", "bench-all" or "demo".
        command: the command without the options that say where the report goes.
        date: end of the measurement, UTC, ISO 8601.
        device: "cpu" or "cuda:N".
        device_name: name of the processor or GPU.
        machine: versions, processor and GPUs, as `genesis env --json` prints them.
        settings: what else the figures depend on, such as the dtype.
        failures: cases that could not be measured.
        notes: sentences about the whole.
    """

    kind: str
    command: str
    device: str
    device_name: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Cell] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    schema_version: int = SCHEMA_VERSION

    def table(self, name: str) -> Table | None:
        """The table of that name; None where there is none."""
        return next((each for each in self.tables if each.name == name), None)

    def to_json(self) -> bytes:
        """The report as JSON; a table carries the titles, units and meanings of its columns."""
        data = {one.name: getattr(self, one.name) for one in fields(self)}
        data["failures"] = [asdict(each) for each in self.failures]
        data["tables"] = [_table_data(each) for each in self.tables]
        return (json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()


def _table_data(one: Table) -> dict[str, Any]:
    columns = [{"key": c.key, "title": c.title, "unit": c.unit, "about": c.about} for c in one.columns]
    return {"name": one.name, "title": one.title, "columns": columns, "rows": one.rows, "notes": one.notes}


# --- For people -------------------------------------------------------------------------------------------------------


def to_text(report: Report) -> Iterator[str]:
    """The report as lines for a terminal."""
    yield f"device  {escape(report.device_name)} ({report.device})"
    if report.settings:
        yield "        " + ", ".join(f"{key} {value}" for key, value in report.settings.items() if value is not None)
    for one in report.tables:
        yield ""
        if one.title:
            yield escape(one.title)
        yield from listed(one) if one.listed else aligned(one)
        if len(one.rows) > len(one.first):
            yield f"  and {len(one.rows) - len(one.first)} others"
        yield from (f"  {escape(note)}" for note in one.notes)
    yield from ("", *map(escape, report.notes)) if report.notes else ()
    for failure in report.failures:
        yield escape(f"failed  {failure.name} {failure.label}: {failure.error}")


def to_markdown(report: Report) -> Iterator[str]:
    """The report as lines of Markdown."""
    yield f"# {_plain(report.command)}"
    yield ""
    yield f"{report.date[:16].replace('T', ' ')} UTC, {_plain(report.device_name)} ({report.device})"
    if report.settings:
        yield ", ".join(f"{key} {value}" for key, value in report.settings.items() if value is not None)
    for one in report.tables:
        yield from ("", f"## {_plain(one.title or one.name)}", "")
        yield from markdown_table(one)
        yield from ("", *map(_plain, one.notes)) if one.notes else ()
    if report.failures:
        yield from ("", "## Failed", "")
        yield from (f"- {_plain(f.name)} {_plain(f.label)}: {_plain(f.error)}" for f in report.failures)
    yield from ("", *map(_plain, report.notes)) if report.notes else ()


def markdown_table(one: Table) -> Iterator[str]:
    """A table as lines of Markdown."""
    shown = _shown(one)
    yield "| " + " | ".join(c.title for c in shown) + " |"
    yield "|" + "|".join("---" if c.unit == "text" else "---:" for c in shown) + "|"
    for row in one.first:
        yield "| " + " | ".join(_plain(cell_text(c, row.get(c.key))) for c in shown) + " |"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, in one cell."""
    return escape(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _shown(one: Table) -> list[Column]:
    """The columns for people that some row fills."""
    return [c for c in one.columns if not c.hidden and any(row.get(c.key) not in (None, "") for row in one.first)]


def aligned(one: Table) -> Iterator[str]:
    """A table as lines: text to the left, numbers to the right."""
    shown = _shown(one)
    cells = [[c.title for c in shown], *([escape(cell_text(c, row.get(c.key))) for c in shown] for row in one.first)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(shown))]
    for line in cells if shown else ():
        pairs = zip(line, widths, shown, strict=True)
        yield "  ".join(t.ljust(w) if c.unit == "text" else t.rjust(w) for t, w, c in pairs).rstrip()


def listed(one: Table) -> Iterator[str]:
    """A table as blocks of lines "title value", one block per row; the first column heads the block."""
    head, *rest = _shown(one)
    width = max((len(c.title) for c in rest), default=0)
    for row in one.rows:
        yield escape(cell_text(head, row.get(head.key)))
        for c in rest:
            if (text := cell_text(c, row.get(c.key))) != "":
                yield f"  {c.title.ljust(width)}  {escape(text)}"


def cell_text(column: Column, value: Cell) -> str:
    """A cell for people: three digits with the unit that suits; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return UNITS[column.unit](value)


def format_seconds(seconds: float) -> str:
    """Three digits with the unit that suits: "12.3 ms"."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= unit:
            return f"{_digits(seconds / unit)} {name}"
    return f"{_digits(seconds * 1e9)} ns"


def format_rate(number: float, unit: str) -> str:
    """Three digits with a decimal prefix: "26.1 GB/s"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{_digits(number / size)} {prefix}{unit}"
    return f"{number:.0f} {unit}"


def format_bytes(size: float) -> str:
    """Bytes with a binary prefix above 10 KiB: "7.0 MiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= (10 * unit if unit == 1 << 10 else unit):
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} bytes"


def format_ratio(ratio: float) -> str:
    """Two decimals, and below 0.1 as many as two digits take: "1.25", "0.0045"."""
    size = abs(ratio)
    decimals = 1 - math.floor(math.log10(size)) if 0 < size < 0.1 else 2
    return f"{ratio:.{decimals}f}"


def format_share(share: float) -> str:
    """Whole percents, and one more digit where that would be none: "83%", "0.4%", "<0.1%"; "0%" is nothing at all."""
    for text in (f"{share:.0%}", f"{share:.1%}"):
        if share == 0 or text.strip("-0.%"):
            return text
    return "<0.1%"


def _digits(number: float) -> str:
    return f"{number:.{2 if abs(number) < 10 else 1 if abs(number) < 100 else 0}f}"


def _count(number: float) -> str:
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,.1f}"


UNITS: dict[str, Callable[[float], str]] = {
    "text": str,
    "count": _count,
    "s": format_seconds,
    "bytes": format_bytes,
    "byte/s": lambda rate: format_rate(rate, "B/s"),
    "FLOP": lambda number: format_rate(number, "FLOP"),
    "FLOP/s": lambda rate: format_rate(rate, "FLOP/s"),
    "FLOP/byte": lambda number: f"{_digits(number)} FLOP/byte",
    "share": format_share,
    "ratio": lambda ratio: f"{format_ratio(ratio)}x",
    "token/s": lambda rate: f"{rate:,.0f}",
}
