"""The report that every measuring command returns, as JSON, lines for a terminal, or Markdown.

A report holds tables, and a table declares each of its columns once: key, title, unit, meaning, and how a cell follows
from a measured object. Adding a column to a report is adding a `Column` to its table.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, Self

from genesis.errors import GenesisError, OutOfMemoryError, escape

SCHEMA_VERSION = 2  # raised when a field is removed or changes its meaning, not for a new column

Cell = float | int | str | bool | None
Unit = Literal["text", "count", "s", "bytes", "byte/s", "FLOP", "FLOP/s", "FLOP/byte", "share", "ratio", "token/s"]


@dataclass(frozen=True)
class Column:
    """One column of a table. None anywhere along the path `of` leaves a cell empty."""

    key: str  # of the cell in JSON
    title: str  # for people
    unit: Unit  # of the value in JSON; seconds, bytes and shares of 1 are scaled for people
    about: str  # the meaning in a sentence
    # Function of a measured object, or the path of an attribute: "step.seconds" or "0.name". The default is `key`.
    of: str | Callable[[Any], Cell] = field(default="", repr=False, compare=False)
    hidden: bool = False  # only JSON has it

    def cell(self, measured: Any) -> Cell:
        """The value for one measured object; None if it is missing or not finite."""
        value, path = measured, self.of or self.key
        for name in path.split(".") if isinstance(path, str) else ():
            if isinstance(value, Mapping):
                value = value.get(name)
            elif value is not None:
                value = value[int(name)] if name.isdigit() else getattr(value, name)
        value = value if isinstance(path, str) else path(measured)
        return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Table:
    """Measured objects under columns, which compute a cell from each object."""

    name: str  # in JSON, such as "ops"
    title: str  # for people; may be empty
    columns: Sequence[Column]
    rows: Any  # given as measured objects; each is stored as a dict of cells by column key
    listed: bool = False  # shows each row as lines "title value", for few rows and many columns
    most: int = 0  # rows that people are shown; 0 for all. JSON has all
    notes: Iterable[str] = ()  # sentences below the table

    def __post_init__(self) -> None:
        self.rows = [{c.key: c.cell(each) for c in self.columns} for each in self.rows]
        self.notes = list(self.notes)

    @property
    def first(self) -> list[dict[str, Cell]]:
        return self.rows[: self.most or None]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Failure:
    """A case that could not be measured; the others were."""

    name: str
    label: str
    error: str
    exit_code: int

    @classmethod
    def of(cls, name: str, label: str, error: Exception) -> Self:
        if isinstance(error, GenesisError):
            return cls(name, label, error.what, error.exit_code)
        kind = OutOfMemoryError if isinstance(error, MemoryError) else GenesisError
        return cls(name, label, f"{type(error).__name__}: {error}", kind.exit_code)


@dataclass
class Report:
    """A measurement, as JSON stores it."""

    kind: str  # "profile-op", "profile-run", "bench-ops", "bench-model", "bench-all" or "demo"
    command: str  # without places of files and interpreters
    device: str  # "cpu" or "cuda:N"
    device_name: str
    machine: Mapping[str, Any]  # versions, processor and GPUs, as `genesis env --json` prints them
    settings: Mapping[str, Cell] = field(default_factory=dict)  # what else the figures depend on, such as the dtype
    tables: list[Table] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # sentences about the whole report
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> bytes:
        """The report as JSON; a table carries the titles, units and meanings of its columns."""
        data = asdict(self)
        for one in data["tables"]:
            one["columns"] = [{key: c[key] for key in ("key", "title", "unit", "about")} for c in one["columns"]]
            del one["listed"], one["most"]  # how people see it
        return (json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()


def to_text(report: Report) -> Iterator[str]:
    """The report as lines for a terminal."""
    yield f"device  {escape(report.device_name)} ({report.device})"
    yield from [f"        {settings}"] if (settings := _settings(report)) else ()
    for one in report.tables:
        yield from ("", escape(one.title)) if one.title else ("",)
        yield from listed(one) if one.listed else aligned(one)
        if more := len(one.rows) - len(one.first):
            yield f"  and {more} others"
        yield from (f"  {escape(note)}" for note in one.notes)
    yield from ("", *map(escape, report.notes)) if report.notes else ()
    for failure in report.failures:
        yield escape(f"failed  {failure.name} {failure.label}: {failure.error}")


def to_markdown(report: Report) -> Iterator[str]:
    """The report as lines of Markdown."""
    yield from (f"# {_plain(report.command)}", "")
    yield f"{report.date[:16].replace('T', ' ')} UTC, {_plain(report.device_name)} ({report.device})"
    yield from filter(None, [_settings(report)])
    for one in report.tables:
        yield from ("", f"## {_plain(one.title or one.name)}", "", *markdown_table(one))
        yield from ("", *map(_plain, one.notes)) if one.notes else ()
    if report.failures:
        yield from ("", "## Failed", "")
        yield from (f"- {_plain(f'{each.name} {each.label}: {each.error}')}" for each in report.failures)
    yield from ("", *map(_plain, report.notes)) if report.notes else ()


def _settings(report: Report) -> str:
    return ", ".join(f"{key} {value}" for key, value in report.settings.items() if value is not None)


def _plain(text: str) -> str:
    return escape(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _shown(one: Table) -> list[Column]:
    return [c for c in one.columns if not c.hidden and any(row.get(c.key) not in (None, "") for row in one.first)]


def markdown_table(one: Table) -> Iterator[str]:
    """A table as lines of Markdown."""
    shown = _shown(one)
    rules = ("---" if c.unit == "text" else "---:" for c in shown)
    yield from (f"| {' | '.join(c.title for c in shown)} |", f"|{'|'.join(rules)}|")
    for row in one.first:
        yield f"| {' | '.join(_plain(cell_text(c, row.get(c.key))) for c in shown)} |"


def aligned(one: Table) -> Iterator[str]:
    """A table as lines: text to the left, numbers to the right."""
    columns = []
    for c in _shown(one):
        cells = [c.title, *(escape(cell_text(c, row.get(c.key))) for row in one.first)]
        width = max(map(len, cells))
        columns.append([cell.ljust(width) if c.unit == "text" else cell.rjust(width) for cell in cells])
    for line in zip(*columns, strict=True):
        yield "  ".join(line).rstrip()


def listed(one: Table) -> Iterator[str]:
    """A table as blocks of lines "title value", one block per row; the first column heads the block."""
    head, *rest = _shown(one)
    width = max((len(c.title) for c in rest), default=0)
    for row in one.rows:
        yield escape(cell_text(head, row.get(head.key)))
        for c in rest:
            if text := cell_text(c, row.get(c.key)):
                yield f"  {c.title.ljust(width)}  {escape(text)}"


def cell_text(column: Column, value: Cell) -> str:
    """A cell for people: three digits with the unit that suits; empty for None."""
    if value is None or isinstance(value, str):
        return value or ""
    return ("yes" if value else "no") if isinstance(value, bool) else UNITS[column.unit](value)


def format_seconds(seconds: float) -> str:
    """Three digits with the unit that suits: "12.3 ms"."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
    unit, name = next((each for each in units if abs(seconds) >= each[0]), units[-1])
    return f"{_digits(seconds / unit)} {name}"


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
    """Two decimals, and below 0.1 two significant digits: "1.25", "0.0045"."""
    size = abs(ratio)
    decimals = 1 - math.floor(math.log10(size)) if 0 < size < 0.1 else 2
    return f"{ratio:.{decimals}f}"


def format_share(share: float) -> str:
    """Whole percents, below 1 % with one decimal: "83%", "0.4%", "<0.1%"; only 0 itself gives "0%"."""
    for text in (f"{share:.0%}", f"{share:.1%}"):
        if share == 0 or text.strip("-0.%"):
            return text
    return "<0.1%"


def _digits(number: float) -> str:
    return f"{number:.{2 if abs(number) < 10 else 1 if abs(number) < 100 else 0}f}"


UNITS: dict[str, Callable[[float], str]] = {
    "text": str,
    "count": lambda number: f"{number:,.{0 if float(number).is_integer() else 1}f}",
    "s": format_seconds,
    "bytes": format_bytes,
    "byte/s": partial(format_rate, unit="B/s"),
    "FLOP": partial(format_rate, unit="FLOP"),
    "FLOP/s": partial(format_rate, unit="FLOP/s"),
    "FLOP/byte": lambda number: f"{_digits(number)} FLOP/byte",
    "share": format_share,
    "ratio": lambda ratio: f"{format_ratio(ratio)}x",
    "token/s": lambda rate: f"{rate:,.0f}",
}
