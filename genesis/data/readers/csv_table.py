"""CSV with a header row (RFC 4180): a row maps the header's names to strings. The header also determines the delimiter:
commas, semicolons or tabs.

A row whose length differs from the header's is a separate defect. A defect that hides the start of the next row (an
unclosed quote, text after a closing quote, a row beyond the limit) ends the file.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

from genesis.data.readers.stream import BOM, Columns, FileFormat, Stream
from genesis.data.records import Defect, Row
from genesis.errors import escape
from genesis.files.paths import quote
from genesis.files.strict_json import is_unicode

MAX_COLUMNS = 10_000
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_QUOTED = re.compile(r'"[^"]*("|$)')
_REST = "; the rest of the file is not read"


def csv_rows(stream: Stream, limit: int, _columns: Columns) -> Iterator[Row | Defect]:
    """Yield the rows below the header, each with its first line; a row has at most `limit` bytes."""
    delimiter = _delimiter(stream)
    source = _Lines(stream, limit)
    reader = csv.reader(source, strict=True, delimiter=delimiter)
    header: list[str] | None = None
    while True:
        # Read one row. If this fails, the start of the next row is unknown.
        line = source.begin_row()
        try:
            values = _next(reader, limit)
        except csv.Error as error:
            what = f"the row is not CSV: {escape(error)}{_REST}"
            yield Defect("bad CSV", what, stream.name, line, "check its quotes")
            return
        except Defect as defect:
            yield defect
            return
        # Skip blank rows, keep the first row as the header, and compare the others with it.
        if values is None:
            return
        if not values or (header is None and values == ["sep=", ""]):  # Excel puts the delimiter on a line before
            continue
        if header is None:
            header = values
            _check_header(stream, header, line)
        elif len(values) != len(header):
            what = f"the row has {len(values):,} columns, the header {len(header):,}"
            advice = f"quote values that hold {_DELIMITERS[delimiter]} or line ends"
            yield Defect("bad CSV", what, stream.name, line, advice)
        else:
            yield _row(stream, header, values, line)


def _delimiter(stream: Stream) -> str:
    """Return the delimiter in the header; a comma for a single column. Raises: Defect."""
    text = _QUOTED.sub("", stream.head().removeprefix(BOM).decode("utf-8", "replace")).lstrip("\r\n")
    header = text.partition("\n")[0]
    found = {mark: name for mark, name in _DELIMITERS.items() if mark in header}
    if "\t" in found and stream.name.lower().removesuffix(".gz").endswith((".tsv", ".tab")):
        return "\t"
    if len(found) > 1:
        what = f"the header has {' and '.join(found.values())}, and either may separate its columns"
        raise Defect("bad CSV", what, stream.name, 1, "quote the names that contain them")
    return next(iter(found), ",")


def _next(reader: Iterator[list[str]], limit: int) -> list[str] | None:
    # The csv module has one limit per process: 131,072 characters, which texts may exceed.
    before = csv.field_size_limit(limit + 1)
    try:
        return next(reader, None)
    finally:
        csv.field_size_limit(before)


def _check_header(stream: Stream, header: list[str], line: int) -> None:
    if len(header) > MAX_COLUMNS:
        raise Defect("bad CSV", f"the header has more than {MAX_COLUMNS:,} columns", stream.name, line)
    twice = next((name for number, name in enumerate(header) if name in header[:number]), None)
    if twice is not None:
        raise Defect("bad CSV", f"the column {quote(twice)} appears twice in the header", stream.name, line)
    invalid = next((name for name in header if not is_unicode(name)), None)
    if invalid is not None:
        raise Defect("invalid UTF-8", "the header is not UTF-8", stream.name, line, "save the file as UTF-8")


def _row(stream: Stream, header: list[str], values: list[str], line: int) -> Row | Defect:
    row = dict(zip(header, values, strict=True))
    for name, value in row.items():
        if not is_unicode(value):
            return Defect("invalid UTF-8", "the value is not UTF-8", stream.name, line, "save the file as UTF-8", name)
    return Row(line, row)


class _Lines:
    """The lines of the file for the csv module, which neither limits rows nor reports their start."""

    def __init__(self, stream: Stream, limit: int) -> None:
        self._stream, self._limit = stream, limit
        self._first_line, self._left = 1, 0

    def begin_row(self) -> int:
        """Return the line on which the next row begins."""
        self._first_line, self._left = self._stream.line + 1, self._limit + len(b"\r\n")
        return self._first_line

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        data = self._stream.readline(self._left + 1)
        if not data:
            raise StopIteration
        self._left -= len(data)
        if self._left < 0:
            what = f"the row has more than {self._limit:,} bytes, or a quote is never closed{_REST}"
            next = "check its quotes, raise data.max_line_bytes"
            raise Defect("huge line", what, self._stream.name, self._first_line, next)
        if self._stream.line == 0:
            data = data.removeprefix(BOM)
        self._stream.line += 1
        # An invalid byte is reported with the value that contains it, so that the row remains complete.
        return data.decode("utf-8", "surrogateescape")


CSV = FileFormat("csv", "CSV and TSV", ("csv", "tsv", "tab"), csv_rows)
