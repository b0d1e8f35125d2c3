"""The cache itself: entries found, put and made in a folder that the rule of `trust` allows, else in a private one."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from genesis.errors import DiskError, escape
from genesis.files.boundary import close_read
from genesis.files.entry import Damaged, Entry, EntryWriter, read_entry
from genesis.files.filesystem import DEFAULT, Buffer
from genesis.files.lock import EntryLock
from genesis.files.trust import Refused, check_file, open_file, open_folder, private_folder

State = Literal["found", "made", "rebuilt"]
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,150}")
_TEMPORARY = ".tmp-"
_MOST = 2400  # pauses of a lock: 2 minutes
_NO_MEANS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # say nothing of the file that could not be opened


class _Settings(TypedDict):
    own: int
    optional: bool
    setting: str


USER: _Settings = {"own": 2, "optional": True, "setting": "XDG_CACHE_HOME"}
"""Settings of a `Cache` in a `user_folder`."""


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


def _nothing(text: str) -> None: ...


def _warn(text: str) -> None:
    """One line on stderr, if there is one."""
    try:
        print(escape(text), file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass


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

    def find(self, name: str, *, limit: int | None = None) -> Entry | None:
        """The entry `name` of at most `limit` bytes, every byte of it checked; None where there is no good one."""
        try:
            return self._read(name, limit)
        except (OSError, Refused, Damaged):
            return None

    def put(self, name: str, parts: Mapping[str, Buffer]) -> None:
        """Keep an entry of these parts, instead of an older one; several processes may, and the last one stays.

        Raises:
            DiskError: it cannot be written, and the cache is not optional.
        """

        def make(writer: EntryWriter) -> None:
            for part, data in parts.items():
                writer.write(part, data)

        try:
            with self._fs.errors("write", self.folder):
                folder = self._open()
                self._sweep(folder)
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
            lock = EntryLock(self._open(), name, name, _nothing)
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
                if is_first:
                    _discard_temporary(folder, name)
                state: State = "rebuilt" if _discard(folder, name) else "made"
            self._write(folder, name, make, flush=True)
            entry = self._written(name)
        finally:
            lock.release()
        if entry is None:
            what = "the cached data that were just written read back as other bytes"
            next = f"check the disk, or choose another {self._setting}"
            raise DiskError(what, where=escape(self.folder / name), next=next)
        return Cached(entry, state)

    def _found(self, name: str) -> Entry | None:
        """The entry `name`, or None; raises where nothing can be said about it."""
        try:
            return self._read(name, None)
        except (Refused, Damaged):
            return None
        except OSError as error:
            if isinstance(error, DiskError):
                raise
            if error.errno in _NO_MEANS:
                with self._fs.errors("open", self.folder / name):
                    raise
            return None

    def _written(self, name: str) -> Entry | None:
        """The entry that this process has just written, None where its bytes are others. Raises: DiskError."""
        try:
            with self._fs.errors("read", self.folder / name):
                return self._read(name, None)
        except (Refused, Damaged):
            return None

    def _read(self, name: str, limit: int | None) -> Entry | None:
        descriptor = open_file(self._open(), name)
        try:
            return read_entry(descriptor, name, limit)
        finally:
            close_read(descriptor)

    def _write(self, folder: int, name: str, make: Callable[[EntryWriter], object], *, flush: bool) -> None:
        """Write to a temporary file and rename, so that no process ever reads half an entry."""
        assert _NAME.fullmatch(name), name
        path = self.folder / name
        staged = f"{_TEMPORARY}{name}-{secrets.token_hex(8)}"
        with self._fs.calling("open", path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(staged, flags, 0o600, dir_fd=folder)
        try:
            _claim(descriptor)
            writer = EntryWriter(descriptor, name, path, self._fs)
            make(writer)
            writer.finish(flush=flush)
            with self._fs.calling("rename", path):
                _take_place(folder, staged, name)
        except BaseException:
            _unlink(folder, staged)
            close_read(descriptor)
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

    def _sweep(self, folder: int) -> None:
        """Once: remove what writers that died have left; a living one holds a lock on its file."""
        if self._swept:
            return
        self._swept = True
        for name in os.listdir(folder):
            if name.startswith(_TEMPORARY) and not _is_claimed(folder, name):
                _unlink(folder, name)


def _claim(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # the file system cannot: the sweep of another process may cost us this entry
        pass


def _is_claimed(folder: int, name: str) -> bool:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return False
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
    finally:
        close_read(descriptor)


def _take_place(folder: int, staged: str, name: str) -> None:
    """Rename; what is not an entry (a folder of an older version, say) gives way."""
    try:
        os.rename(staged, name, src_dir_fd=folder, dst_dir_fd=folder)
    except (IsADirectoryError, FileExistsError):
        _discard(folder, name)
        os.rename(staged, name, src_dir_fd=folder, dst_dir_fd=folder)


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


def _discard_temporary(folder: int, name: str) -> None:
    """Remove what a process that died while it made this entry has left; call it under the entry's lock."""
    for other in os.listdir(folder):
        if other.startswith(f"{_TEMPORARY}{name}-"):
            _discard(folder, other)


def _unlink(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        pass
