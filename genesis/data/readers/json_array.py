"""A file that is one JSON array, read element by element: memory is taken for one of them, not for the file.

The array is cut at its commas without looking at what is between them but for strings and brackets; each element is
then parsed as strictly as a line of JSONL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from genesis.data.readers.json_value import parse
from genesis.data.readers.stream import BOM, PIECE, Stream, decoded
from genesis.data.records import Defect, Position, Row
from genesis.data.sources import SourceFile

_SPACE = re.compile(rb"[ \t\r\n]*+")
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_OUTSIDE = re.compile(rb'[^"\[\]{},]*+')
_QUOTE, _BACKSLASH, _COMMA = b'"\\,'


def json_array_rows(file: SourceFile, stream: Stream, limit: int) -> Iterator[Row | Defect]:
    """The elements of the array, each with the line on which it begins.

    An element that is no JSON, or of more than `limit` bytes, is a defect of its own; what breaks the array itself
    (no `[`, no `]`, text after it) ends the file.
    """
    array = _Array(stream, limit)
    first = array.next_byte()
    if first not in (b"[", b""):
        yield Defect("bad JSON", "the file holds no JSON array", file.name, array.line, "write [{…}, {…}]")
    if first != b"[":
        return
    array.skip()
    while True:
        start, line = array.next_byte(), array.line
        if start == b"]" and array.elements == 0:
            array.skip()
            break
        element, end = array.element()
        if end not in (b",", b"]"):
            what = "the JSON array is not closed" if not end else "a } closes nothing"
            yield Defect("bad JSON", what, file.name, array.line, "write the file again")
            return
        array.skip()
        try:
            position = Position(file.name, line, f"[{array.elements - 1}]")
            yield Row(line, _value(file, position, element, limit), position.path)
        except Defect as defect:
            yield defect
        if end == b"]":
            break
    if array.next_byte():
        yield Defect("bad JSON", "text follows the JSON array", file.name, array.line, "write one array a file")


def _value(file: SourceFile, position: Position, element: bytes | None, limit: int) -> object:
    if element is None:
        what, next = f"the record has more than {limit:,} bytes", "split the record, raise data.max_line_bytes"
        raise position.defect("huge line", what, next)
    if not element:
        raise position.defect("bad JSON", "no record stands between two commas or before the end", "remove a comma")
    return parse(decoded(file, element, position.line), position, "record")


class _Array:
    """A position in the stream, and what is there; `line` is its line, `elements` how many elements are behind it."""

    def __init__(self, stream: Stream, limit: int) -> None:
        self._stream, self._limit = stream, limit
        self._piece, self._at, self._counted = stream.read(PIECE), 0, 0
        if self._piece.startswith(BOM):
            self._at = len(BOM)
        self.line = 1
        self.elements = 0

    def next_byte(self) -> bytes:
        """The next byte that is no space, which stays the next; none at the end."""
        while True:
            match = _SPACE.match(self._piece, self._at)
            assert match is not None
            self._move(match.end())
            if self._at < len(self._piece) or not self._more():
                return self._piece[self._at : self._at + 1]

    def skip(self) -> None:
        """Go past the next byte."""
        self._move(self._at + 1)

    def element(self) -> tuple[bytes | None, bytes]:
        """The bytes before the comma or bracket that ends an element (None: too many), and that byte; none at the end.

        The brackets inside are only counted: that they fit is for the parser to say.
        """
        parts: list[bytes] = []
        size = depth = 0
        in_string = escaped = False
        self.elements += 1
        while True:
            piece, begin = self._piece, self._at
            at = begin + escaped  # of the byte after a backslash at the end of the last piece
            escaped, end = False, b""
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
            size += at - begin
            if size <= self._limit:
                parts.append(piece[begin:at])
            self._move(at)
            if end or not self._more():
                # Space before the comma is no part of the record.
                return b"".join(parts).strip() if size <= self._limit else None, end

    def _move(self, at: int) -> None:
        self.line += self._piece.count(b"\n", self._counted, at)
        self._at = self._counted = at
        self._stream.line = self.line - 1

    def _more(self) -> bool:
        """The next piece, once this one is done; False at the end."""
        self._piece, self._at, self._counted = self._stream.read(PIECE), 0, 0
        return bool(self._piece)
