"""An entry of a cache: named parts in one file, every byte of which is checked before anything of it is used.

The file is a mark, the parts, each from a multiple of 64 bytes on, an index, and a tail:

    "genesis cache 1\\n", zeros | part | zeros | part | zeros | index (JSON) | length of the index, u64 | sha256

The sha256 covers all before it. The index holds the entry's own name and the name and size of each part; nothing else
is stored, so that nothing can contradict itself. What differs from the one file that these parts give is damaged.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from genesis.files.filesystem import Buffer, FileSystem, as_bytes

MARK = b"genesis cache 1\n"
ALIGNMENT = 64
LENGTH = struct.Struct("<Q")
TAIL = LENGTH.size + hashlib.sha256().digest_size
MAX_INDEX = 1 << 16
_CHUNK = 1 << 20
_SMALL = 1 << 20  # bytes; a larger entry is mapped, not read


class Damaged(Exception):
    """A file that is not what was written."""


class Entry:
    """The parts of a checked entry; they stay readable when its file is replaced or removed."""

    def __init__(self, data: memoryview, parts: Mapping[str, tuple[int, int]]) -> None:
        self._data, self._parts = data, parts

    def part(self, name: str) -> memoryview:
        """The bytes of a part, read-only; they begin at a multiple of 64 bytes where the entry is mapped."""
        begin, size = self._parts[name]
        return self._data[begin : begin + size]

    def names(self) -> list[str]:
        """The names of the parts, in the order in which they were written."""
        return list(self._parts)


def read_entry(descriptor: int, name: str, limit: int | None = None) -> Entry:
    """The entry `name` in an open file of at most `limit` bytes.

    Raises:
        Damaged: it is not, byte for byte, what was written under this name. OSError: reading failed.
    """
    size = os.fstat(descriptor).st_size
    if not len(MARK) + TAIL <= size <= (size if limit is None else limit):
        raise Damaged("its size")
    if size <= _SMALL:
        data = memoryview(_read(descriptor, size))
        digest = hashlib.sha256(data[:-32]).digest()
    else:
        digest = _hash(descriptor, size - 32)
        data = memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))
    if len(data) != size or digest != data[-32:]:
        raise Damaged("its checksum")
    (length,) = LENGTH.unpack(data[size - TAIL : size - 32])
    if data[: len(MARK)] != MARK or length > min(MAX_INDEX, size - TAIL):
        raise Damaged("its structure")
    begin = size - TAIL - length
    return Entry(data, _parts(bytes(data[begin : begin + length]), name, begin))


def _read(descriptor: int, size: int) -> bytes:
    pieces, offset = [], 0
    while offset < size and (piece := os.pread(descriptor, size - offset, offset)):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces)


def _hash(descriptor: int, size: int) -> bytes:
    digest, offset = hashlib.sha256(), 0
    while offset < size and (piece := os.pread(descriptor, min(_CHUNK, size - offset), offset)):
        digest.update(piece)
        offset += len(piece)
    return digest.digest() if offset == size else b""


def _index(name: str, sizes: Mapping[str, int]) -> bytes:
    return json.dumps({"entry": name, "parts": list(map(list, sizes.items()))}, separators=(",", ":")).encode("ascii")


def _parts(index: bytes, name: str, end: int) -> dict[str, tuple[int, int]]:
    """Where each part is, from the one index that such an entry can have."""
    try:
        sizes = {str(part): int(size) for part, size in json.loads(index)["parts"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged("its index") from None
    if _index(name, sizes) != index:
        raise Damaged("its index")
    found, offset = {}, ALIGNMENT
    for part, size in sizes.items():
        if not 0 <= size <= end - offset:
            raise Damaged("its index")
        found[part] = offset, size
        offset = _aligned(offset + size)
    if offset != end:
        raise Damaged("its index")
    return found


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


class EntryWriter:
    """Writes an entry's parts one after the other into an open file; `finish` makes it whole.

    Args:
        descriptor: of a new file; this object closes it.
        name: the entry's.
        path: how errors name the file.
        fs: the file system to write through.
    """

    def __init__(self, descriptor: int, name: str, path: Path, fs: FileSystem) -> None:
        self._descriptor, self._name, self._path, self._fs = descriptor, name, path, fs
        self._digest, self._place = hashlib.sha256(), 0
        self._sizes: dict[str, int] = {}
        self._open: PartWriter | None = None
        self._append(MARK)
        self._pad()

    def create(self, name: str) -> PartWriter:
        """A writer of the part `name`, to be finished before the next one is begun.

        Raises:
            DiskError: the disk is full or fails. ValueError: the name is taken, or another part is open.
        """
        if name in self._sizes or (self._open is not None and not self._open.finished):
            raise ValueError(f"the part {name!r} cannot begin here")
        self._sizes[name] = 0
        self._open = PartWriter(self, name)
        return self._open

    def write(self, name: str, data: Buffer) -> None:
        """Write the whole part `name`; errors as in `create`."""
        with self.create(name) as part:
            part.write(data)

    def finish(self, *, flush: bool) -> None:
        """Write what makes the entry whole; with `flush`, return once it is on the medium."""
        if self._open is not None and not self._open.finished:
            raise ValueError(f"a part of {self._name} was not finished")
        index = _index(self._name, self._sizes)
        self._append(index + LENGTH.pack(len(index)))
        self._append(self._digest.digest())
        if flush:
            self._fs.fsync(self._descriptor, self._path)

    def close(self) -> None:
        """Close the file; closing again does nothing. Raises: DiskError: what was written may be lost."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._fs.close(descriptor, self._path)

    def _part(self, name: str, data: Buffer) -> None:
        self._append(data)
        self._sizes[name] += memoryview(data).nbytes

    def _pad(self) -> None:
        if gap := _aligned(self._place) - self._place:
            self._append(bytes(gap))

    def _append(self, data: Buffer) -> None:
        view = as_bytes(data)
        self._digest.update(view)
        self._place += len(view)
        self._fs.write(self._descriptor, self._path, view)


class PartWriter:
    """Appends to one part of an entry; a context manager."""

    def __init__(self, entry: EntryWriter, name: str) -> None:
        self._entry, self._name, self.finished = entry, name, False

    def write(self, data: Buffer) -> None:
        """Append `data`. Raises: DiskError."""
        assert not self.finished, "a part that is finished"
        self._entry._part(self._name, data)

    def finish(self) -> None:
        """Nothing more comes."""
        self._entry._pad()
        self.finished = True

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self.finished:
            self.finish()
