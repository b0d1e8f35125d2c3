"""The disk cache: entries are found, stored and built in a folder that `trust` accepts, or else in a private one."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import secrets
import shutil
import stat
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from genesis.errors import DiskError, escape
from genesis.files.boundary import close_read, closed_after, closed_on_error
from genesis.files.filesystem import DEFAULT, Buffer, FileSystem, as_bytes
from genesis.files.lock import EntryLock
from genesis.files.trust import Refused, check_file, open_file, open_folder, private_folder

State = Literal["found", "made", "rebuilt"]
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,150}")
_TEMPORARY = ".tmp-"
_MAX_POLLS = 2400  # polls of a lock: 2 minutes
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # a lack of resources, which says nothing about the file


def user_folder(name: str) -> Path:
    """The user's own cache folder: XDG_CACHE_HOME/genesis/`name`, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # required by the XDG specification
        base = os.path.expanduser("~/.cache")
    return Path(base) / "genesis" / name


@dataclass(frozen=True, slots=True)
class Cached:
    """A checked entry, and whether it was found, built, or rebuilt after damage."""

    entry: Entry
    state: State


def _warn(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):
        print(escape(text), file=sys.stderr, flush=True)


_warned: set[tuple[str, str]] = set()


class Cache:
    """The entries in `folder`, which is created when it is first needed. Threads may share a cache.

    Args:
        folder: the folder of the entries; it is not used if somebody else could write there.
        own: how many of the path's last folders must be ours (see `trust.open_folder`).
        optional: treat a folder that cannot be created or opened like one that is not safe, and skip entries that
            cannot be written.
        setting: the setting that chooses another folder, for messages.
        tell: called with each line of warnings and waits.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        own: int = 1,
        optional: bool = False,
        setting: str = "data.cache_dir",
        tell: Callable[[str], None] = _warn,
    ) -> None:
        self.folder = Path(os.path.abspath(folder))
        self._own, self._optional, self._setting, self._tell = own, optional, setting, tell
        self._fs = DEFAULT.for_place(f"another {setting}")
        self._descriptor, self._lock, self._swept = -1, threading.Lock(), False

    @classmethod
    def of_user(cls, folder: str | os.PathLike[str]) -> Cache:
        """The cache in a `user_folder`, which skips entries that cannot be stored."""
        return cls(folder, own=2, optional=True, setting="XDG_CACHE_HOME")

    def find(self, name: str, *, limit: int | None = None) -> Entry | None:
        """The entry `name` of at most `limit` bytes, fully checked; None if it is missing, unsafe or damaged."""
        try:
            return self._read(name, limit)
        except (OSError, Refused, Damaged):
            return None

    def put(self, name: str, parts: Mapping[str, Buffer]) -> None:
        """Store an entry with these parts, replacing an older one. If several processes store it, the last one wins.
        Raises DiskError if the entry cannot be written, unless the cache is optional.
        """

        def make(writer: EntryWriter) -> None:
            for part, data in parts.items():
                writer.write(part, data)

        try:
            with self._fs.errors("write", self.folder):
                folder = self._open()
                # Once per process, remove files of writers that died. A living writer holds a lock on its file.
                if not self._swept:
                    self._swept = True
                    for other in os.listdir(folder):
                        if other.startswith(_TEMPORARY) and not _is_claimed(folder, other):
                            with suppress(OSError):
                                os.unlink(other, dir_fd=folder)
                self._write(folder, name, make, flush=False)
        except DiskError:
            if not self._optional:
                raise

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Keep other processes and threads from building the entry `name` inside the block.

        Call `find` first inside the block, because the previous holder may have built the entry. If the folder cannot
        be locked, or the holder takes longer than two minutes, the block runs without the lock.
        """
        lock = None
        with suppress(OSError):
            lock = EntryLock(self._open(), name, name, lambda line: None)
            lock.acquire(most=_MAX_POLLS)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def get(self, kind: str, key: Mapping[str, Any], make: Callable[[EntryWriter], object]) -> Cached:
        """Return the entry of `kind` for `key`, building it if it is missing or damaged.

        While one process builds an entry, others wait for it and report that.

        Args:
            key: JSON values that name everything the content depends on.
            make: writes the parts of a missing entry.

        Raises:
            DiskError: the entry cannot be written, or its content differs when it is read back.
        """
        text = json.dumps(dict(key), sort_keys=True, separators=(",", ":"), allow_nan=False)
        name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        if (entry := self._find(name)) is not None:
            return Cached(entry, "found")
        # Wait for another process that is building the entry, then look again.
        folder, path = self._open(), self.folder / name
        with self._fs.errors("lock", path):
            lock = EntryLock(folder, name, f"{kind} in {self.folder}", self._tell)
            is_first = lock.acquire()
        try:
            if (entry := self._find(name)) is not None:
                return Cached(entry, "found")
            # Remove what is damaged or left over, and build the entry.
            with self._fs.errors("remove", path):
                if is_first:  # left by a process that died while it built this entry
                    for other in os.listdir(folder):
                        if other.startswith(f"{_TEMPORARY}{name}-"):
                            _discard(folder, other)
                state: State = "rebuilt" if _discard(folder, name) else "made"
            self._write(folder, name, make, flush=True)
            # Read it back, so that a faulty disk is noticed now.
            entry = None
            with suppress(Refused, Damaged), self._fs.errors("read", path):
                entry = self._read(name, None)
        finally:
            lock.release()
        if entry is None:
            what = "the cache entry that was just written differs when it is read back"
            next = f"check the disk, or choose another {self._setting}"
            raise DiskError(what, where=escape(path), next=next)
        return Cached(entry, state)

    def _find(self, name: str) -> Entry | None:
        """The entry `name`, or None if it is missing or bad. Raises DiskError if that cannot be determined."""
        try:
            return self._read(name, None)
        except (Refused, Damaged):
            return None
        except DiskError:
            raise
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                with self._fs.errors("open", self.folder / name):
                    raise
            return None

    def _read(self, name: str, limit: int | None) -> Entry | None:
        with closed_after(open_file(self._open(), name)) as descriptor:
            return read_entry(descriptor, name, limit)

    def _write(self, folder: int, name: str, make: Callable[[EntryWriter], object], *, flush: bool) -> None:
        """Write a temporary file and rename it, so that no process reads a partial entry."""
        assert _NAME.fullmatch(name), name
        path = self.folder / name
        staged = f"{_TEMPORARY}{name}-{secrets.token_hex(8)}"
        with self._fs.calling("open", path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(staged, flags, 0o600, dir_fd=folder)
        with closed_on_error(descriptor):
            try:
                with suppress(OSError):  # without a lock, another process may sweep this file
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                writer = EntryWriter(descriptor, name, path, self._fs)
                make(writer)
                writer.finish(flush=flush)
                with self._fs.calling("rename", path):
                    try:
                        os.rename(staged, name, src_dir_fd=folder, dst_dir_fd=folder)
                    except (IsADirectoryError, FileExistsError):  # a folder of an older version
                        _discard(folder, name)
                        os.rename(staged, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(staged, dir_fd=folder)
                raise
        writer.close()  # only now, because the open file holds the lock that protects it from sweeping

    def _open(self) -> int:
        """The descriptor of the folder, checked once: nobody else can change where it leads."""
        with self._lock:
            if self._descriptor < 0:
                self._descriptor = self._open_safe_folder()
                weakref.finalize(self, close_read, self._descriptor)
            return self._descriptor

    def _open_safe_folder(self) -> int:
        try:
            with self._fs.calling("open", self.folder):
                return open_folder(self.folder, own=self._own)
        except Refused as error:
            reason = str(error)
        except DiskError as error:
            if not self._optional:
                raise
            reason = os.strerror(error.errno or errno.EIO)
        if (str(self.folder), reason) not in _warned:
            _warned.add((str(self.folder), reason))
            self._tell(
                f"warning: the cache {self.folder} is not used: {reason}; this process uses a private one instead."
                f" Let nobody else write there, or set {self._setting} to another folder"
            )
        try:
            name = hashlib.sha256(str(self.folder).encode(errors="surrogateescape")).hexdigest()[:16]
            return open_folder(private_folder() / name)
        except (OSError, Refused) as error:
            with self._fs.errors("open", self.folder):
                raise OSError(error.errno if isinstance(error, OSError) else errno.EACCES, str(error)) from error


def _is_claimed(folder: int, name: str) -> bool:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return False
    with closed_after(descriptor):
        try:
            info = os.fstat(descriptor)
            check_file(info, name)
            if not info.st_size:  # the writer may be about to lock it
                return True
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except (OSError, Refused):
            return False


def _discard(folder: int, name: str) -> bool:
    """Remove the file or folder with this name, without following links; return whether it existed."""
    try:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(info.st_mode):
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)
    return True


# --- An entry ---------------------------------------------------------------------------------------------------------
# An entry is one file with named parts, which is checked completely before any part is used. It consists of a mark, the
# parts, each aligned to 64 bytes, an index, and a tail:
#
#     "genesis cache 1\n", zeros | part | zeros | part | zeros | index (JSON) | length of the index, u64 | sha256
#
# The sha256 covers everything before it. The index contains the entry's name and the name and size of each part, and
# nothing redundant that could contradict it. A file that differs from what these parts produce is damaged.


MARK = b"genesis cache 1\n"
ALIGNMENT = 64
LENGTH = struct.Struct("<Q")
TAIL = LENGTH.size + hashlib.sha256().digest_size
MAX_INDEX = 1 << 16
_CHUNK = 1 << 20
_SMALL = 1 << 20  # bytes; a larger entry is memory-mapped


class Damaged(Exception):
    """A file that differs from what was written."""


class Entry:
    """The parts of a checked entry. They remain readable after its file is replaced or removed."""

    def __init__(self, data: memoryview, parts: Mapping[str, tuple[int, int]]) -> None:
        self._data, self._parts = data, parts

    def part(self, name: str) -> memoryview:
        """The bytes of a part, read-only; aligned to 64 bytes if the entry is mapped."""
        begin, size = self._parts[name]
        return self._data[begin : begin + size]

    def names(self) -> list[str]:
        """The names of the parts, in the order they were written."""
        return list(self._parts)


def read_entry(descriptor: int, name: str, limit: int | None = None) -> Entry:
    """Read and check the entry `name` from an open file of at most `limit` bytes.
    Raises Damaged if the file differs from what was written under this name, and OSError if reading fails.
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
    """The offset and size of each part, from an index that must match this entry exactly."""
    try:
        sizes = {str(part): int(size) for part, size in json.loads(index)["parts"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged("its index") from None
    if _index(name, sizes) != index:
        raise Damaged("its index")
    places, offset = {}, ALIGNMENT
    for part, size in sizes.items():
        if not 0 <= size <= end - offset:
            raise Damaged("its index")
        places[part] = offset, size
        offset = _aligned(offset + size)
    if offset != end:
        raise Damaged("its index")
    return places


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


class EntryWriter:
    """Writes the parts of an entry into an open file, one after the other; `finish` completes it.

    Args:
        descriptor: a new file, which this object closes.
        name: name of the entry.
        path: path of the file for errors.
        fs: the file system to write through.
    """

    def __init__(self, descriptor: int, name: str, path: Path, fs: FileSystem) -> None:
        self._descriptor, self._name, self._path, self._fs = descriptor, name, path, fs
        self._digest, self._offset = hashlib.sha256(), 0
        self._sizes: dict[str, int] = {}
        self._is_open = False
        self._append(MARK + bytes(_aligned(len(MARK)) - len(MARK)))

    @contextmanager
    def part(self, name: str) -> Iterator[Callable[[Buffer], None]]:
        """Yield a function that appends to the part `name`, which ends with the block.
        Raises DiskError if writing fails, and ValueError if the name is taken or another part is open.
        """
        if name in self._sizes or self._is_open:
            raise ValueError(f"the part {name!r} is taken, or another part is open")
        self._sizes[name], self._is_open = 0, True

        def append(data: Buffer) -> None:
            self._append(data)
            self._sizes[name] += memoryview(data).nbytes

        yield append
        self._append(bytes(_aligned(self._offset) - self._offset))
        self._is_open = False

    def write(self, name: str, data: Buffer) -> None:
        """Write the complete part `name`. Raises the errors of `part`."""
        with self.part(name) as append:
            append(data)

    def finish(self, *, flush: bool) -> None:
        """Write the index and the checksum; with `flush`, return once the entry is on the disk."""
        if self._is_open:
            raise ValueError(f"a part of {self._name} is not finished")
        index = _index(self._name, self._sizes)
        self._append(index + LENGTH.pack(len(index)))
        self._append(self._digest.digest())
        if flush:
            self._fs.fsync(self._descriptor, self._path)

    def close(self) -> None:
        """Close the file. Raises DiskError if written data may be lost."""
        self._fs.close(self._descriptor, self._path)

    def _append(self, data: Buffer) -> None:
        view = as_bytes(data)
        self._digest.update(view)
        self._offset += len(view)
        self._fs.write(self._descriptor, self._path, view)
