"""Records in JSON, one per line or all in one array: stricter than JSON itself, with the line of each defect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from genesis.data.readers.stream import BOM, PIECE, Columns, FileFormat, Stream, decoded, lines
from genesis.data.records import Defect, Position, Row
from genesis.errors import ModelError, escape
from genesis.files.paths import quote
from genesis.files.strict_json import check_structure

# An empty object takes 64 bytes of memory for about 3 bytes of the file.
MAX_CONTAINERS = 100_000
# Python 3.11 parses fewer than 1,000 levels, Python 3.13 up to 10,000; records must not depend on it.
MAX_LEVELS = 500


def parse(text: str, position: Position, what: str = "line", field: str = "") -> Any:
    """Return the JSON value of `text`, which begins at `position`.

    NaN and infinities pass, as Python writes them: only the values that are used are checked, later.

    Args:
        what: name of the text in errors.
        field: field that holds the text, if it is the string of one.

    Raises:
        Defect: the text is not JSON, a field occurs twice in an object, an escape encodes half a character, nesting or
            a number is excessive (`MAX_LEVELS`), or there are more than `MAX_CONTAINERS` lists and objects.
    """
    # Count lists and objects first, because the parser would allocate all of them.
    if text.count("[") + text.count("{") > min(MAX_LEVELS, MAX_CONTAINERS):  # some may be inside strings
        try:
            check_structure(text.encode("utf-8"), where="", max_depth=MAX_LEVELS, max_containers=MAX_CONTAINERS)
        except ModelError as error:
            raise position.defect("bad JSON", error.what, field=field) from error

    # JSON allows repeated fields; records do not.
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise position.defect("bad JSON", f"the field {quote(twice)} appears twice in one object", field=field)
        return result

    try:
        value = json.loads(text, object_pairs_hook=unique)
        if "\\u" in text:
            # An escape can encode half a character, which UTF-8 text cannot hold.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except Defect:
        raise
    except UnicodeEncodeError as error:
        raise position.defect("bad JSON", "an escape encodes half a surrogate pair", field=field) from error
    except json.JSONDecodeError as error:
        inside = position if field else position._replace(line=position.line + error.lineno - 1)
        message = f"the {what} is not JSON: {escape(error.msg)} (column {error.colno:,})"
        raise inside.defect("bad JSON", message, field=field) from error
    except (ValueError, RecursionError) as error:
        message = "the JSON holds a number or a nesting that is too large"
        raise position.defect("bad JSON", message, field=field) from error


# --- JSONL ------------------------------------------------------------------------------------------------------------


def jsonl_rows(stream: Stream, limit: int, _columns: Columns) -> Iterator[Row | Defect]:
    """Yield the values of nonblank lines. A line of more than `limit` bytes is a defect and never held in memory."""
    for number, line in lines(stream, limit):
        if line is None:
            what, next = f"the line has more than {limit:,} bytes", "split the record, raise data.max_line_bytes"
            yield Defect("huge line", what, stream.name, number, next)
        elif line and not line.isspace():
            try:
                yield Row(number, _line(stream, number, line))
            except Defect as defect:
                yield defect


def _line(stream: Stream, number: int, line: bytes) -> object:
    begins_array = number == 1 and line.lstrip().startswith(b"[")
    try:
        value = parse(decoded(stream, line, number), Position(stream.name, number))
    except Defect as error:
        raise _array_defect(stream) if begins_array else error from error
    if begins_array and value and isinstance(value[0], dict):
        raise _array_defect(stream)
    return value


def _array_defect(stream: Stream) -> Defect:
    what = "the file holds a JSON array, not one object per line"
    return Defect("bad JSON", what, stream.name, 1, "name the file .json")


# --- A JSON array -----------------------------------------------------------------------------------------------------
# The array is read element by element, so memory is needed for one of them, not for the file. It is split at its
# commas, and only strings and brackets are recognized between them. Each element is then parsed as strictly as a line.


_SPACE = re.compile(rb"[ \t\r\n]*+")
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_OUTSIDE = re.compile(rb'[^"\[\]{},]*+')
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'


def _array_rows(stream: Stream, limit: int) -> Iterator[Row | Defect]:
    """Yield the elements of the array, each with its first line.

    An element that is not JSON or has more than `limit` bytes is a separate defect. A broken array (no `[`, no `]`,
    text after it) ends the file.
    """
    # Find the start of the array.
    array = _Array(stream, limit)
    first = array.next_byte()
    if first not in (b"[", b""):
        yield Defect("bad JSON", "the file does not hold a JSON array", stream.name, array.line, "write [{…}, {…}]")
    if first != b"[":
        return
    array.skip()
    while True:
        # Read the next element and the comma or bracket that ends it.
        start, line = array.next_byte(), array.line
        if start == b"]" and array.elements == 0:
            array.skip()
            break
        element, end = array.element()
        if end not in (b",", b"]"):
            what = "the JSON array is not closed" if not end else "a } has no opening bracket"
            yield Defect("bad JSON", what, stream.name, array.line, "write the file again")
            return
        # Parse the element.
        array.skip()
        try:
            position = Position(stream.name, line, f"[{array.elements - 1}]")
            yield Row(line, _element(stream, position, element, limit), position.path)
        except Defect as defect:
            yield defect
        if end == b"]":
            break
    if array.next_byte():
        yield Defect("bad JSON", "text follows the JSON array", stream.name, array.line, "write one array per file")


def json_rows(stream: Stream, limit: int, columns: Columns) -> Iterator[Row | Defect]:
    """Yield the elements of the array, or the lines of a file named .json that is JSONL."""
    return jsonl_rows(stream, limit, columns) if stream.begins(b"{") else _array_rows(stream, limit)


def _element(stream: Stream, position: Position, element: bytes | None, limit: int) -> object:
    if element is None:
        what, next = f"the record has more than {limit:,} bytes", "split the record, raise data.max_line_bytes"
        raise position.defect("huge line", what, next)
    if not element:
        raise position.defect("bad JSON", "a record is missing between two commas or at the end", "remove a comma")
    return parse(decoded(stream, element, position.line), position, "record")


class _Array:
    """A position in the stream; `line` is its line, `elements` the number of elements before it."""

    def __init__(self, stream: Stream, limit: int) -> None:
        self._stream, self._limit = stream, limit
        self._piece, self._at, self._counted = stream.read(PIECE), 0, 0
        if self._piece.startswith(BOM):
            self._at = len(BOM)
        self.line = 1
        self.elements = 0

    def next_byte(self) -> bytes:
        """Return the next byte that is not a space, without consuming it; empty at the end."""
        while True:
            match = _SPACE.match(self._piece, self._at)
            assert match is not None
            self._move(match.end())
            if self._at < len(self._piece) or not self._more():
                return self._piece[self._at : self._at + 1]

    def skip(self) -> None:
        """Consume the next byte."""
        self._move(self._at + 1)

    def element(self) -> tuple[bytes | None, bytes]:
        """Return the bytes before the comma or bracket that ends an element (None: too many), and that byte.

        The second value is empty at the end. Inner brackets are only counted; the parser checks that they match.
        """
        parts: list[bytes] = []
        size = depth = 0
        in_string = escaped = False
        self.elements += 1
        while True:
            piece, begin = self._piece, self._at
            at = begin + escaped  # skip the byte after a backslash at the end of the last piece
            escaped, end = False, b""
            # Scan the piece up to the end of the element.
            while at < len(piece):
                match = (_IN_STRING if in_string else _OUTSIDE).match(piece, at)
                assert match is not None
                at = match.end()
                if at == len(piece):
                    break
                byte = piece[at]
                if in_string:
                    in_string, escaped = byte == _BACKSLASH, byte == _BACKSLASH
                elif byte == _QUOTE:
                    in_string = True
                elif byte in b"[{":
                    depth += 1
                elif depth == 0:
                    end = piece[at : at + 1]
                    break
                elif byte != _COMMA:
                    depth -= 1
                at += 1
            # Keep the scanned bytes unless the element is too large, and continue in the next piece.
            size += at - begin
            if size <= self._limit:
                parts.append(piece[begin:at])
            self._move(at)
            if end or not self._more():
                # Space before the comma is not part of the record.
                return b"".join(parts).strip() if size <= self._limit else None, end

    def _move(self, at: int) -> None:
        self.line += self._piece.count(b"\n", self._counted, at)
        self._at = self._counted = at
        self._stream.line = self.line - 1

    def _more(self) -> bool:
        self._piece, self._at, self._counted = self._stream.read(PIECE), 0, 0
        return bool(self._piece)


JSONL = FileFormat("jsonl", "JSONL", ("jsonl", "ndjson"), jsonl_rows)
JSON = FileFormat("json", "arrays in JSON", ("json",), json_rows, begins=b"[")
