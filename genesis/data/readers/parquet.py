"""Parquet through pyarrow, which is imported when such a file is read: batches of rows with the columns that are used.

Arrow gives every struct all of its fields and fills missing ones with null, so a null inside a value means "absent".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from genesis.data.readers.stream import Columns, FileFormat, Stream
from genesis.data.records import Defect, Row
from genesis.errors import DataError, escape
from genesis.files.paths import quote

MAX_FOOTER_BYTES = 64 << 20
MAX_FOOTER_PARTS = 1_000_000
# Columns and their inner fields. pyarrow before 26 recurses into their nesting without a limit.
MAX_SCHEMA_PARTS = 2000
BATCH_ROWS = 64
_MAGIC = b"PAR1"
# Start of a footer in Thrift's compact protocol: its version, and the length of the list that holds the schema.
_FOOTER = re.compile(rb"\x15[\x80-\xff]{0,4}[\0-\x7f]\x19(?:\xfc([\x80-\xff]{0,4}[\0-\x7f])|[^\xfc])", re.DOTALL)


def parquet_rows(stream: Stream, limit: int, columns: Columns) -> Iterator[Row | Defect]:
    """Yield the rows, counted from one; a row of more than `limit` bytes is a defect.

    Args:
        columns: takes the file's columns and returns those to read.

    Raises:
        DataError: pyarrow is not installed.
        Defect: the file is not Parquet, or is damaged.
    """
    arrow, parquet = _pyarrow(stream)
    _check_footer(stream)
    try:
        with parquet.ParquetFile(
            stream.raw,
            pre_buffer=False,
            buffer_size=1 << 20,
            thrift_string_size_limit=MAX_FOOTER_BYTES,
            thrift_container_size_limit=MAX_FOOTER_PARTS,
        ) as table:
            names = list(table.schema_arrow.names)
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise Defect("bad Parquet", f"the column {quote(twice)} appears twice", stream.name, 1)
            chosen = list(columns(names))
            for batch in table.iter_batches(BATCH_ROWS, columns=chosen, use_threads=False):
                yield from _rows(stream, limit, batch)
                stream.line += batch.num_rows
    # pyarrow raises more than ArrowException on damaged files.
    except (arrow.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        if isinstance(error, DataError):
            raise
        what = f"the Parquet data is damaged or of an unknown kind: {escape(str(error)[:200])}"
        raise Defect("bad Parquet", what, stream.name, stream.line + 1, "write the file again") from error


def _rows(stream: Stream, limit: int, batch: Any) -> Iterator[Row | Defect]:
    batch.validate(full=True)  # the reader does not check offsets and UTF-8
    stream.grown(batch.nbytes)
    if batch.nbytes <= limit:
        for number, values in enumerate(batch.to_pylist(), start=stream.line + 1):
            yield Row(number, _without_nulls(values))
        return
    for index in range(batch.num_rows):
        row, number = batch.slice(index, 1), stream.line + 1 + index
        if row.nbytes > limit:
            what, next = f"the row has more than {limit:,} bytes", "split the record, raise data.max_line_bytes"
            yield Defect("huge line", what, stream.name, number, next)
        else:
            yield Row(number, _without_nulls(row.to_pylist()[0]))


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with all columns, but without null fields of the structs inside."""
    return {name: _present(value) for name, value in row.items()}


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value


def _check_footer(stream: Stream) -> None:
    raw, size = stream.raw, stream.size
    tail = b""
    if size >= 12:
        raw.seek(size - 8)
        tail = raw.read(8)
        raw.seek(0)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or raw.read(4) != _MAGIC or not 0 < length <= size - 12:
        what = "the file is not Parquet: its footer is damaged or cut off"
        raise Defect("bad Parquet", what, stream.name, 1, "write the file again")
    if length > MAX_FOOTER_BYTES:
        what = f"the Parquet footer has {length:,} bytes, more than the {MAX_FOOTER_BYTES:,} allowed"
        raise Defect("bad Parquet", what, stream.name, 1, "write the file with larger row groups")
    raw.seek(size - 8 - length)
    begin = _FOOTER.match(raw.read(min(length, 32)))
    raw.seek(0)
    # A length below 15 is stored in the byte before the list, a greater one in groups of 7 bits.
    groups = enumerate(begin[1] or b"") if begin else ()
    if begin is None or sum((byte & 127) << 7 * place for place, byte in groups) > MAX_SCHEMA_PARTS:
        what = f"the Parquet schema is damaged, or has more than {MAX_SCHEMA_PARTS:,} columns and fields"
        raise Defect("bad Parquet", what, stream.name, 1, "write the columns that are needed")


def _pyarrow(stream: Stream) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        what = "pyarrow, which reads Parquet files, is not installed"
        next = "pip install 'pyarrow>=18' (the extra `parquet` of Genesis)"
        raise DataError(what, where=escape(stream.name), next=next) from error
    return pyarrow, pyarrow.parquet


PARQUET = FileFormat(
    "parquet",
    "Parquet",
    ("parquet", "pq"),
    parquet_rows,
    magic=re.compile(rb"PAR[1E][\0-\x08\x0e-\x1f\x80-\xff]"),
    way_out="name the file .parquet; Parquet is compressed already, without .gz",
)
