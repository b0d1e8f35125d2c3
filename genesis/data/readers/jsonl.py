"""JSONL: one JSON value a line. Blank lines mean nothing."""

from __future__ import annotations

from collections.abc import Iterator

from genesis.data.readers.json_value import parse
from genesis.data.readers.stream import Stream, decoded, lines
from genesis.data.records import Defect, Position, Row
from genesis.data.sources import SourceFile


def jsonl_rows(file: SourceFile, stream: Stream, limit: int) -> Iterator[Row | Defect]:
    """The values of the lines; one of more than `limit` bytes is a defect, and never held whole."""
    for number, line in lines(stream, limit):
        if line is None:
            what, next = f"the line has more than {limit:,} bytes", "split the record, raise data.max_line_bytes"
            yield Defect("huge line", what, file.name, number, next)
        elif line and not line.isspace():
            try:
                yield Row(number, _value(file, number, line))
            except Defect as defect:
                yield defect


def _value(file: SourceFile, number: int, line: bytes) -> object:
    begins_array = number == 1 and line.lstrip().startswith(b"[")
    try:
        value = parse(decoded(file, line, number), Position(file.name, number))
    except Defect as error:
        raise _array(file) if begins_array else error from error
    if begins_array and value and isinstance(value[0], dict):
        raise _array(file)
    return value


def _array(file: SourceFile) -> Defect:
    what = "the file holds a JSON array, not one object a line"
    return Defect("bad JSON", what, file.name, 1, "name the file .json")
