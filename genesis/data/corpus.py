"""Documents from sources: text files (one document each) and JSONL (one a line), plain or gzipped. It knows no tokens.

Every defect of the data is an error with file and line, or is counted and left out when asked for. A byte order mark
at the start of a file is no part of its text; line ends are kept as they are; blank lines of a JSONL file mean nothing.
A file of more than `MAX_DOCUMENT_BYTES` is no text document, and a gzip file may grow by `MAX_EXPANSION` at most: both
are checked before the memory is taken. A file whose first bytes are no text is an error where the user named it; in a
folder or a glob it is left out and counted (`FileCounts`).
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

from genesis.data.formats import HEAD_BYTES, SUPPORTED, kind_by_content
from genesis.data.records import Defect, Defects, Document
from genesis.data.sources import SourceFile, expand, not_text
from genesis.errors import DataError, escape
from genesis.io.paths import open_regular, quote

__all__ = ["MAX_DOCUMENT_BYTES", "MAX_EXPANSION", "Corpus", "FileCounts"]

MAX_DOCUMENT_BYTES = 1 << 30
# Text shrinks 3 to 20 times; DEFLATE can grow a hostile file by 1032. Small files may grow to the floor regardless.
MAX_EXPANSION = 200
EXPANSION_FLOOR = 16 << 20

_PIECE = 1 << 20
_BOM = b"\xef\xbb\xbf"
_GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)


@dataclass(frozen=True)
class FileCounts:
    """How many files of each kind were read, and how many were found that are no text.

    Attributes:
        read: `text`, `jsonl`, `text.gz`, `jsonl.gz` -> files. not_read: `png`, `csv`, … -> files.
    """

    read: dict[str, int] = field(default_factory=dict)
    not_read: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """Such as `read: 24 text, 1 jsonl.gz; not read: 2 png, 1 parquet`."""
        parts = (("read", self.read), ("not read", self.not_read))
        return "; ".join(
            f"{name}: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items(), key=_most_first))
            for name, counts in parts
            if counts
        )


def _most_first(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


class Corpus:
    """The documents of some sources, in an order that only the sources and their files decide; readable many times.

    Args:
        sources: see `genesis.data.sources`.
        on_error: `fail` raises at the first defect, `skip` counts defects and leaves the documents out.
        text_field: the field of a JSONL record that holds its text.
        max_line_bytes: the longest JSONL line, without its line end.

    Raises:
        DataError: a source that matches no file, a named file that is no text, or sources without any text.
    """

    def __init__(
        self, sources: Sequence[str], *, on_error: Literal["fail", "skip"], text_field: str, max_line_bytes: int
    ) -> None:
        found = expand(sources)
        self.files = tuple(file for file in found if file.kind is None)
        self._labels = {file.name: file.label for file in found if file.kind is not None}
        self._read_files: set[str] = set()
        self._tail: float | None = None
        if not self.files:
            what = f"the sources hold no text; {self.counts()}"
            raise DataError(what, where=escape(found[0].name), next=SUPPORTED)
        self._skip = on_error == "skip"
        self._text_field = text_field
        self._max_line_bytes = max_line_bytes

    def counts(self) -> FileCounts:
        """The files by what they are; complete once the documents have been read."""
        read = Counter(self._labels[name] for name in self._read_files)
        return FileCounts(dict(read), dict(Counter(self._labels.values()) - read))

    @property
    def is_divided(self) -> bool:
        """Whether the only document is given as two."""
        return self._tail is not None

    def hold_out_tail(self, fraction: float) -> None:
        """From now on, give the only document as two: the last `fraction` of it, from the start of a line, is its own.

        Raises:
            DataError: the text has no line and no word that could begin the second.
        """
        self._tail = fraction

    def documents(self, defects: Defects | None = None) -> Iterator[Document]:
        """The documents; those left out are added to `defects`.

        Raises:
            DataError: the first defect, with file and line, unless defects are skipped.
        """
        for document in self._documents(defects):
            if self._tail is None:
                yield document
            else:
                yield from _divided(document, self._tail)

    def _documents(self, defects: Defects | None) -> Iterator[Document]:
        for file in self.files:
            for item in self._read(file):
                if isinstance(item, Document):
                    yield item
                elif file.optional:  # left out silently
                    self._labels.pop(file.name, None)
                    self._read_files.discard(file.name)
                elif not self._skip:
                    raise item
                elif defects is not None:
                    defects.add(item)

    def _read(self, file: SourceFile) -> Iterator[Document | Defect]:
        try:
            with _opened(file) as stream:
                kind = kind_by_content(stream.head())
                if kind is not None and file.named:
                    raise not_text(file, kind)
                self._labels[file.name] = kind or file.label
                if kind is not None:
                    return
                self._read_files.add(file.name)
                if file.format == "text":
                    yield _text_document(file, stream)
                else:
                    yield from self._records(file, stream)
        except Defect as defect:
            yield defect

    def _records(self, file: SourceFile, stream: _Stream) -> Iterator[Document | Defect]:
        empty = True
        for number, line in _lines(stream, self._max_line_bytes):
            if line is None:
                what = f"the line has more than {self._max_line_bytes:,} bytes"
                yield Defect("huge line", what, file.name, number, "split the record, raise data.max_line_bytes")
            elif line.isspace() or not line:
                continue
            else:
                yield _record(file, number, line, self._text_field)
            empty = False
        if empty:
            yield Defect("empty file", "the file holds no records", file.name, 1)


class _Stream:
    """The bytes of a file, decompressed if need be, with a limit on how far they may grow."""

    def __init__(self, file: SourceFile, raw: BinaryIO) -> None:
        self._file = file
        self._gzip = file.gzip
        self._stream: Any = gzip.GzipFile(fileobj=raw) if file.gzip else raw
        self.size = os.fstat(raw.fileno()).st_size
        self._left = max(self.size * MAX_EXPANSION, EXPANSION_FLOOR)
        self.line = 0

    def head(self) -> bytes:
        """The first `HEAD_BYTES` bytes; the next read starts at the beginning all the same."""
        head: bytes = self._stream.read(HEAD_BYTES)
        self._stream.seek(0)
        return head

    def read(self, limit: int) -> bytes:
        """At most `limit` bytes; none at the end."""
        return self._take(self._stream.read, limit)

    def readline(self, limit: int) -> bytes:
        """The bytes up to and with the next line end, at most `limit`; none at the end."""
        return self._take(self._stream.readline, limit)

    def _take(self, read: Any, limit: int) -> bytes:
        data: bytes = read(limit)
        self._left -= len(data)
        if self._gzip and self._left < 0:
            what = f"the gzip file grows to more than {MAX_EXPANSION} times its {self.size:,} bytes"
            raise Defect("bad gzip", what, self._file.name, self.line + 1, "decompress it yourself if you trust it")
        return data


@contextmanager
def _opened(file: SourceFile) -> Iterator[_Stream]:
    """The stream of `file`; failures of opening, reading and decompressing leave the block as a `Defect`."""
    try:
        descriptor = open_regular(file.path, DataError)
    except DataError as error:
        raise Defect("unreadable", error.what, file.name, 1, "check the path and who may read it") from error
    stream = None
    try:
        with open(descriptor, "rb") as raw:
            stream = _Stream(file, raw)
            yield stream
    except DataError:
        raise
    except _GZIP_ERRORS as error:
        line = stream.line + 1 if stream else 1
        what = f"the gzip data are damaged or cut short: {escape(error)}"
        raise Defect("bad gzip", what, file.name, line, "make the .gz file again") from error
    except OSError as error:
        line = stream.line + 1 if stream else 1
        what = f"reading failed: {escape(error.strerror or error)}"
        raise Defect("unreadable", what, file.name, line, "check the disk") from error


def _text_document(file: SourceFile, stream: _Stream) -> Document:
    """The whole file as one document. Raises: Defect."""
    if not file.gzip and stream.size > MAX_DOCUMENT_BYTES:
        raise _too_large(file)
    pieces, total = [], 0
    while piece := stream.read(_PIECE):
        pieces.append(piece)
        total += len(piece)
        if total > MAX_DOCUMENT_BYTES:
            raise _too_large(file)
        stream.line += piece.count(b"\n")
    if not total:
        raise Defect("empty file", "the file is empty", file.name, 1, "remove it")
    data = b"".join(pieces).removeprefix(_BOM)
    text = _decoded(file, data, first_line=1)
    if (nul := data.find(b"\0")) >= 0:
        raise _nul(file, 1 + data.count(b"\n", 0, nul))
    if text.isspace() or not text:
        raise Defect("empty document", "the file holds only white space", file.name, 1, "remove it")
    return Document(text, file.name)


def _divided(document: Document, fraction: float) -> Iterator[Document]:
    """The document without its last `fraction`, and that: cut at the line's start nearest to it, or before a word."""
    text, aim = document.text, int(len(document.text) * (1 - fraction))
    for mark in "\n", " ":
        candidates = (text.rfind(mark, 0, aim) + 1, text.find(mark, aim) + 1)
        for cut in sorted(candidates, key=lambda cut: abs(cut - aim)):
            near = min(4 * fraction, 0.5) * len(text) >= len(text) - cut
            if near and text[:cut].strip() and text[cut:].strip():
                yield Document(text[:cut], document.file)
                yield Document(text[cut:], document.file, 1 + text.count("\n", 0, cut))
                return
    what = f"the only document has no line of which the last {fraction:.0%} of the text could begin, to be held out"
    next = "name held-out sources in data.eval, or set data.eval_fraction=0"
    raise DataError(what, where=escape(document.name), next=next)


def _too_large(file: SourceFile) -> Defect:
    what = f"the text file has more than {MAX_DOCUMENT_BYTES:,} bytes, the most for one document"
    return Defect("huge document", what, file.name, 1, "split it into several files or JSONL records")


def _nul(file: SourceFile, line: int) -> Defect:
    return Defect("NUL byte", "the text holds a NUL character: it is binary data or UTF-16", file.name, line)


def _decoded(file: SourceFile, data: bytes, first_line: int) -> str:
    """`data` as text. Raises: Defect with the line of the first invalid byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        column = error.start - data.rfind(b"\n", 0, error.start)
        what = f"byte {column:,} of the line, 0x{data[error.start]:02x}, is not UTF-8: {error.reason}"
        raise Defect("invalid UTF-8", what, file.name, line, "save it as UTF-8") from error


def _lines(stream: _Stream, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Number and bytes of each line, without its line end; None for one over `limit`, which is never held whole."""
    while line := stream.readline(limit + 2):
        number = stream.line + 1
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        # What did not end within `limit` and a line end is too long already: its rest is only skipped.
        while not line.endswith(b"\n") and (line := stream.readline(_PIECE)):
            pass
        stream.line = number
        if len(body) > limit:
            yield number, None
        else:
            yield number, body.removeprefix(_BOM) if number == 1 else body


def _record(file: SourceFile, number: int, line: bytes, text_field: str) -> Document | Defect:
    """The document in one JSONL line, or what is wrong with it."""
    try:
        record = _parsed(file, number, _decoded(file, line, number))
    except Defect as defect:
        return defect
    if not isinstance(record, dict):
        what = f"the line holds {_kind(record)}, not an object with the field {quote(text_field)}"
        return Defect("no record", what, file.name, number, "write one JSON object a line")
    if text_field not in record:
        found = ", ".join(quote(key, 40) for key in list(record)[:10]) or "none"
        what = f"the record has no field {quote(text_field)}; its fields: {found}"
        return Defect("missing field", what, file.name, number, "name the field with data.text_field")
    text = record[text_field]
    if not isinstance(text, str):
        what = f"the field {quote(text_field)} holds {_kind(text)}, not a string"
        return Defect("wrong type", what, file.name, number, "write the text as a string")
    if "\0" in text:
        return _nul(file, number)
    if text.isspace() or not text:
        what = f"the field {quote(text_field)} holds no text"
        return Defect("empty document", what, file.name, number, "remove the record")
    return Document(text, file.name, number)


def _parsed(file: SourceFile, number: int, line: str) -> Any:
    """The JSON value of `line`. Raises: Defect."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise Defect("bad JSON", f"the field {quote(twice)} appears twice in one object", file.name, number)
        return result

    try:
        value = json.loads(line, object_pairs_hook=unique)
        if "\\u" in line:
            # An escape can encode half a character, which no UTF-8 text holds.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except Defect:
        raise
    except UnicodeEncodeError as error:
        raise Defect("bad JSON", "an escape encodes half a surrogate pair", file.name, number) from error
    except json.JSONDecodeError as error:
        if number == 1 and line.lstrip().startswith("["):
            what = "the file holds a JSON array, not one object a line"
            raise Defect(
                "bad JSON", what, file.name, number, "write each of its objects on a line of its own"
            ) from error
        what = f"the line is not JSON: {escape(error.msg)} (column {error.colno:,})"
        raise Defect("bad JSON", what, file.name, number) from error
    except (ValueError, RecursionError) as error:
        what = "the JSON holds a number or a nesting beyond every use"
        raise Defect("bad JSON", what, file.name, number) from error


def _kind(value: object) -> str:
    """What a JSON value is, for a message."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
