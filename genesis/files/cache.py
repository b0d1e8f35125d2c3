"""The cache itself: entries found, put and made in a folder that the rule of `trust` allows, else in a private one."""

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
_MOST = 2400  # pauses of a lock: 2 minutes
_NO_MEANS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # say nothing of the file that could not be opened


def user_folder(name: str) -> Path:
    """Where the user's own caches are: XDG_CACHE_HOME/genesis/`name`, by default below ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # as the XDG specification has it
        base = os.path.expanduser("~/.cache")
    return Path(base) / "genesis" / name


@dataclass(frozen=True, slots=True)
class Cached:
    """A checked entry, and whether it was found, made, or rebuilt because it was damaged."""

    entry: Entry
    state: State


def _warn(text: str) -> None:
    """One line on stderr, if there is one."""
    with suppress(OSError, ValueError, AttributeError):
        print(escape(text), file=sys.stderr, flush=True)


_warned: set[tuple[str, str]] = set()


class Cache:
    """The entries in `folder`, which is made when it is first needed. Threads may share it.

    Args:
        folder: where they are kept; not used when somebody else could write there.
        own: how many of the path's last folders are ours (see `trust.open_folder`).
        optional: a folder that cannot be made or opened is passed over like one that is not safe, and entries that
            cannot be written are not kept.
        setting: what names another folder, for messages.
        tell: takes warnings and what is waited for, a line each.
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
        """The cache in a `user_folder`; what cannot be kept there is not kept."""
        return cls(folder, own=2, optional=True, setting="XDG_CACHE_HOME")

    def find(self, name: str, *, limit: int | None = None) -> Entry | None:
        """The entry `name` of at most `limit` bytes, every byte of it checked; None where there is no good one."""
        try:
            return self._read(name, limit)
        except (OSError, Refused, Damaged):
            return None

    def put(self, name: str, parts: Mapping[str, Buffer]) -> None:
        """Keep an entry of these parts, instead of an older one; several processes may, and the last one stays.
        Raises: DiskError: it cannot be written, and the cache is not optional.
        """

        def make(writer: EntryWriter) -> None:
            for part, data in parts.items():
                writer.write(part, data)

        try:
            with self._fs.errors("write", self.folder):
                folder = self._open()
                if not self._swept:  # of what writers that died have left; a living one holds a lock on its file
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
        """Inside the block no other process or thread makes the entry `name`, as far as that can be had: look for the
        entry again. Where the folder cannot be locked, or who makes it takes two minutes, the block runs beside it.
        """
        lock = None
        with suppress(OSError):
            lock = EntryLock(self._open(), name, name, lambda line: None)
            lock.acquire(most=_MOST)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def get(self, kind: str, key: Mapping[str, Any], make: Callable[[EntryWriter], object]) -> Cached:
        """The entry of `kind` for `key` (JSON values that name everything the content depends on).

        While one process makes an entry, others wait for it and say so.

        Args:
            make: writes the entry's parts where there is none yet.

        Raises:
            DiskError: the entry cannot be written, or is not what was written when it is read back.
        """
        text = json.dumps(dict(key), sort_keys=True, separators=(",", ":"), allow_nan=False)
        name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        if (found := self._found(name)) is not None:
            return Cached(found, "found")
        folder, path = self._open(), self.folder / name
        with self._fs.errors("lock", path):
            lock = EntryLock(folder, name, f"{kind} in {self.folder}", self._tell)
            is_first = lock.acquire()
        try:
            if (found := self._found(name)) is not None:
                return Cached(found, "found")
            with self._fs.errors("remove", path):
                if is_first:  # a process that died while it made this entry may have left it
                    for other in os.listdir(folder):
                        if other.startswith(f"{_TEMPORARY}{name}-"):
                            _discard(folder, other)
                state: State = "rebuilt" if _discard(folder, name) else "made"
            self._write(folder, name, make, flush=True)
            entry = None
            with suppress(Refused, Damaged), self._fs.errors("read", path):
                entry = self._read(name, None)
        finally:
            lock.release()
        if entry is None:
            what = "the cached data that were just written read back as other bytes"
            next = f"check the disk, or choose another {self._setting}"
            raise DiskError(what, where=escape(path), next=next)
        return Cached(entry, state)

    def _found(self, name: str) -> Entry | None:
        """The entry `name`, or None; raises where nothing can be said about it."""
        try:
            return self._read(name, None)
        except (Refused, Damaged):
            return None
        except DiskError:
            raise
        except OSError as error:
            if error.errno in _NO_MEANS:
                with self._fs.errors("open", self.folder / name):
                    raise
            return None

    def _read(self, name: str, limit: int | None) -> Entry | None:
        with closed_after(open_file(self._open(), name)) as descriptor:
            return read_entry(descriptor, name, limit)

    def _write(self, folder: int, name: str, make: Callable[[EntryWriter], object], *, flush: bool) -> None:
        """Write to a temporary file and rename, so that no process ever reads half an entry."""
        assert _NAME.fullmatch(name), name
        path = self.folder / name
        staged = f"{_TEMPORARY}{name}-{secrets.token_hex(8)}"
        with self._fs.calling("open", path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(staged, flags, 0o600, dir_fd=folder)
        with closed_on_error(descriptor):
            try:
                with suppress(OSError):  # where the file system cannot lock, another's sweep may cost us this entry
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                writer = EntryWriter(descriptor, name, path, self._fs)
                make(writer)
                writer.finish(flush=flush)
                with self._fs.calling("rename", path):
                    try:
                        os.rename(staged, name, src_dir_fd=folder, dst_dir_fd=folder)
                    except (IsADirectoryError, FileExistsError):  # no entry, as the folder of an older version
                        _discard(folder, name)
                        os.rename(staged, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(staged, dir_fd=folder)
                raise
        writer.close()  # only now: the open file holds the lock that keeps it from being swept

    def _open(self) -> int:
        """The folder's descriptor, checked once: nobody else can change what it leads to."""
        with self._lock:
            if self._descriptor < 0:
                self._descriptor = self._opened()
                weakref.finalize(self, close_read, self._descriptor)
            return self._descriptor

    def _opened(self) -> int:
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
                f"warning: the cache {self.folder} is not used: {reason}; this process keeps one of its own."
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
            if not info.st_size:  # its writer may be between opening and locking
                return True
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except (OSError, Refused):
            return False


def _discard(folder: int, name: str) -> bool:
    """Remove whatever has this name; whether there was something. Links are not followed."""
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
# Named parts in one file, every byte of which is checked before anything of it is used. The file is a mark, the parts,
# each from a multiple of 64 bytes on, an index, and a tail:
#
#     "genesis cache 1\n", zeros | part | zeros | part | zeros | index (JSON) | length of the index, u64 | sha256
#
# The sha256 covers all before it. The index holds the entry's own name and the name and size of each part; nothing else
# is stored, so that nothing can contradict itself. What differs from the one file that these parts give is damaged.


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
    Raises: Damaged: it is not, byte for byte, what was written under this name. OSError: reading failed.
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
        self._is_open = False
        self._append(MARK + bytes(_aligned(len(MARK)) - len(MARK)))

    @contextmanager
    def part(self, name: str) -> Iterator[Callable[[Buffer], None]]:
        """A block that writes the part `name`, by the function that appends to it.
        Raises: DiskError: the disk is full or fails. ValueError: the name is taken, or another part is open.
        """
        if name in self._sizes or self._is_open:
            raise ValueError(f"the part {name!r} cannot begin here")
        self._sizes[name], self._is_open = 0, True

        def append(data: Buffer) -> None:
            self._append(data)
            self._sizes[name] += memoryview(data).nbytes

        yield append
        self._append(bytes(_aligned(self._place) - self._place))
        self._is_open = False

    def write(self, name: str, data: Buffer) -> None:
        """Write the whole part `name`; errors as in `part`."""
        with self.part(name) as append:
            append(data)

    def finish(self, *, flush: bool) -> None:
        """Write what makes the entry whole; with `flush`, return once it is on the medium."""
        if self._is_open:
            raise ValueError(f"a part of {self._name} was not finished")
        index = _index(self._name, self._sizes)
        self._append(index + LENGTH.pack(len(index)))
        self._append(self._digest.digest())
        if flush:
            self._fs.fsync(self._descriptor, self._path)

    def close(self) -> None:
        """Close the file. Raises: DiskError: what was written may be lost."""
        self._fs.close(self._descriptor, self._path)

    def _append(self, data: Buffer) -> None:
        view = as_bytes(data)
        self._digest.update(view)
        self._place += len(view)
        self._fs.write(self._descriptor, self._path, view)
