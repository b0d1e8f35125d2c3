"""Formats of data files, and the bytes of a file, plain or gzipped, with limits on their expansion.

Failures of opening, reading and decompressing become a `Defect` with file and line.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from genesis.data.records import Defect, Document, Row
from genesis.errors import DataError, escape
from genesis.files.paths import open_regular

HEAD_BYTES = 8192
# Text shrinks 3 to 20 times; DEFLATE can expand a hostile file 1032 times. Any file may expand to the floor.
MAX_EXPANSION = 200
EXPANSION_FLOOR = 16 << 20
PIECE = 1 << 20
BOM = b"\xef\xbb\xbf"

_GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)


Columns = Callable[[Sequence[str]], Sequence[str]]  # the columns of a file -> those to read
Rows = Callable[["Stream", int, Columns], Iterator[Row | Defect]]


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A format of files: how they are recognized and read.

    Attributes:
        name: name in reports.
        title: name in sentences.
        endings: suffixes of such files.
        rows: `rows(stream, limit, columns)` yields the records of at most `limit` bytes each; None: a file is one text.
        begins: required start of a file from a folder or a glob, after white space.
        magic: pattern at the start of every file of a binary format. None: text, which may be gzipped.
        way_out: advice for such a file under another name.
    """

    name: str
    title: str
    endings: tuple[str, ...]
    rows: Rows | None
    begins: bytes = b""
    magic: re.Pattern[bytes] | None = None
    way_out: str = ""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of data, its name in errors and reports, and its format."""

    path: Path
    name: str
    format: FileFormat
    gzip: bool


class Stream:
    """The bytes of an open file, decompressed if necessary, with a limit on their expansion.

    Attributes:
        name: name of the file in errors.
        raw: the file itself.
        size: its bytes on disk.
        is_gzip: whether the bytes are decompressed.
        line: number of lines done, for defects of reading.
    """

    def __init__(self, file: DataFile, raw: BinaryIO) -> None:
        self.name, self._format = file.name, file.format
        self._stream: Any = gzip.GzipFile(fileobj=raw) if file.gzip else raw
        self.raw, self.is_gzip = raw, file.gzip
        self.size = os.fstat(raw.fileno()).st_size
        self._left = max(self.size * MAX_EXPANSION, EXPANSION_FLOOR)
        self.line = 0

    def begins(self, mark: bytes) -> bool:
        """Whether the file begins with `mark`, after white space and a byte order mark."""
        return self.head().removeprefix(BOM).lstrip().startswith(mark)

    def head(self) -> bytes:
        """Return the first `HEAD_BYTES` bytes; the next read starts at the beginning again."""
        head: bytes = self._stream.read(HEAD_BYTES)
        self._stream.seek(0)
        return head

    def read(self, limit: int) -> bytes:
        """Return at most `limit` bytes; empty at the end."""
        return self._take(self._stream.read, limit)

    def readline(self, limit: int) -> bytes:
        """Return the bytes up to and including the next line end, at most `limit`; empty at the end."""
        return self._take(self._stream.readline, limit)

    def grown(self, size: int) -> None:
        """Count `size` bytes of output. Raises: Defect, if there are too many for the file's size."""
        self._left -= size
        if self._left < 0:
            kind = "gzip" if self.is_gzip else self._format.title
            what = f"the {kind} file grows to more than {MAX_EXPANSION} times its {self.size:,} bytes"
            next = f"{'decompress it' if self.is_gzip else 'write it as JSONL'} yourself if you trust it"
            raise Defect(f"bad {kind}", what, self.name, self.line + 1, next)

    def _take(self, read: Any, limit: int) -> bytes:
        data: bytes = read(limit)
        if self.is_gzip:
            self.grown(len(data))
        return data


@contextmanager
def opened(file: DataFile) -> Iterator[Stream]:
    """Open `file` as a stream; failures of opening, reading and decompressing raise a `Defect`."""
    try:
        descriptor = open_regular(file.path, DataError)
    except DataError as error:
        raise Defect("unreadable", error.what, file.name, 1, "check the path and its permissions") from error
    stream = None
    try:
        with open(descriptor, "rb") as raw:
            stream = Stream(file, raw)
            yield stream
    except DataError:
        raise
    except _GZIP_ERRORS as error:
        line = stream.line + 1 if stream else 1
        what = f"the gzip data is damaged or cut short: {escape(error)}"
        raise Defect("bad gzip", what, file.name, line, "create the .gz file again") from error
    except OSError as error:
        line = stream.line + 1 if stream else 1
        what = f"reading failed: {escape(error.strerror or error)}"
        raise Defect("unreadable", what, file.name, line, "check the disk") from error


def decoded(stream: Stream, data: bytes, first_line: int) -> str:
    """Return `data` as text. Raises: Defect with the line of the first invalid byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        column = error.start - data.rfind(b"\n", 0, error.start)
        what = f"byte {column:,} of the line, 0x{data[error.start]:02x}, is not UTF-8: {error.reason}"
        raise Defect("invalid UTF-8", what, stream.name, line, "save it as UTF-8") from error


def lines(stream: Stream, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield number and bytes of each line without its line end; None for one over `limit`, which is skipped."""
    while line := stream.readline(limit + 2):
        number = stream.line + 1
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        # A line that has not ended within `limit` plus a line end is too long; skip the rest.
        while not line.endswith(b"\n") and (line := stream.readline(PIECE)):
            pass
        stream.line = number
        if len(body) > limit:
            yield number, None
        else:
            yield number, body.removeprefix(BOM) if number == 1 else body


# --- A text -----------------------------------------------------------------------------------------------------------


EMPTY = ("empty file", "empty document")  # kinds of defects

MAX_DOCUMENT_BYTES = 1 << 30


def text_document(stream: Stream) -> Document:
    """Return the whole file as one document. Raises: Defect."""
    if not stream.is_gzip and stream.size > MAX_DOCUMENT_BYTES:
        raise _too_large(stream)
    pieces, total = [], 0
    while piece := stream.read(PIECE):
        pieces.append(piece)
        total += len(piece)
        if total > MAX_DOCUMENT_BYTES:
            raise _too_large(stream)
        stream.line += piece.count(b"\n")
    if not total:
        raise Defect(EMPTY[0], "the file is empty", stream.name, 1, "remove it")
    data = b"".join(pieces).removeprefix(BOM)
    text = decoded(stream, data, first_line=1)
    if (nul := data.find(b"\0")) >= 0:
        what = "the text holds a NUL character: it is binary data or UTF-16"
        raise Defect("NUL byte", what, stream.name, 1 + data.count(b"\n", 0, nul))
    if text.isspace() or not text:
        raise Defect(EMPTY[1], "the file holds only white space", stream.name, 1, "remove it")
    return Document(text, stream.name)


def _too_large(stream: Stream) -> Defect:
    what = f"the text file has more than {MAX_DOCUMENT_BYTES:,} bytes, the limit of one document"
    return Defect("huge document", what, stream.name, 1, "split it into several files or JSONL records")


TEXT = FileFormat("text", "UTF-8 text", (), None)
