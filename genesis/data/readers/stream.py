"""The bytes of a data file, plain or gzipped, with limits on how far they may grow and how long a line is.

Failures of opening, reading and decompressing become a `Defect` with file and line.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from genesis.data.formats import HEAD_BYTES
from genesis.data.records import Defect
from genesis.data.sources import SourceFile
from genesis.errors import DataError, escape
from genesis.files.paths import open_regular

# Text shrinks 3 to 20 times; DEFLATE can grow a hostile file by 1032. Small files may grow to the floor regardless.
MAX_EXPANSION = 200
EXPANSION_FLOOR = 16 << 20
PIECE = 1 << 20
BOM = b"\xef\xbb\xbf"

_GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)


class Stream:
    """The bytes of an open file, decompressed if need be, with a limit on how far they may grow.

    Attributes:
        raw: the file itself. size: its bytes on disk. line: how many lines are done, which defects of reading name.
    """

    def __init__(self, file: SourceFile, raw: BinaryIO) -> None:
        self._file = file
        self._stream: Any = gzip.GzipFile(fileobj=raw) if file.gzip else raw
        self.raw = raw
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

    def grown(self, size: int) -> None:
        """Count `size` bytes that came out of the file. Raises: Defect, if they are too many for the file's size."""
        self._left -= size
        if self._left < 0:
            kind = "gzip" if self._file.gzip else "Parquet"
            what = f"the {kind} file grows to more than {MAX_EXPANSION} times its {self.size:,} bytes"
            next = f"{'decompress it' if self._file.gzip else 'write it as JSONL'} yourself if you trust it"
            raise Defect(f"bad {kind}", what, self._file.name, self.line + 1, next)

    def _take(self, read: Any, limit: int) -> bytes:
        data: bytes = read(limit)
        if self._file.gzip:
            self.grown(len(data))
        return data


@contextmanager
def opened(file: SourceFile) -> Iterator[Stream]:
    """The stream of `file`; failures of opening, reading and decompressing leave the block as a `Defect`."""
    try:
        descriptor = open_regular(file.path, DataError)
    except DataError as error:
        raise Defect("unreadable", error.what, file.name, 1, "check the path and who may read it") from error
    stream = None
    try:
        with open(descriptor, "rb") as raw:
            stream = Stream(file, raw)
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


def decoded(file: SourceFile, data: bytes, first_line: int) -> str:
    """`data` as text. Raises: Defect with the line of the first invalid byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        column = error.start - data.rfind(b"\n", 0, error.start)
        what = f"byte {column:,} of the line, 0x{data[error.start]:02x}, is not UTF-8: {error.reason}"
        raise Defect("invalid UTF-8", what, file.name, line, "save it as UTF-8") from error


def lines(stream: Stream, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """Number and bytes of each line, without its line end; None for one over `limit`, which is never held whole."""
    while line := stream.readline(limit + 2):
        number = stream.line + 1
        body = line.removesuffix(b"\n").removesuffix(b"\r")
        # What did not end within `limit` and a line end is too long already: its rest is only skipped.
        while not line.endswith(b"\n") and (line := stream.readline(PIECE)):
            pass
        stream.line = number
        if len(body) > limit:
            yield number, None
        else:
            yield number, body.removeprefix(BOM) if number == 1 else body
