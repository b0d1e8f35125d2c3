"""Locks between processes: `flock` on a file that names its holder. The kernel releases a lock when its process ends.

`FolderLock` refuses a second run in an output folder without waiting. With `EntryLock` one process builds a cache entry
while others wait for it. The content of the file is only used in messages: the file of a dead process locks nobody out,
and no clock is involved.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from genesis.errors import BusyError, DiskError, ModelError, escape
from genesis.files.boundary import close_read, closed_on_error
from genesis.files.filesystem import DEFAULT
from genesis.files.strict_json import parse_object, read_limited
from genesis.files.trust import Refused, check_file

LOCK_NAME = ".lock"
POLL_S = 0.05
PATIENCE = 40  # polls before an `EntryLock` reports whom it waits for: 2 s
_MAX_BYTES = 4096
_TRIES = 200
_OPENING = '{"pid": '
_PAUSE_S = 0.01
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES)  # from opening something other than our own file
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EACCES)

_held: dict[int, object] = {}  # the lock that each descriptor holds


class FolderLock:
    """Locks the folder `path` against other runs, from `acquire` to `release` or in a `with` block.

    A missing folder is created. The file `<folder>/.lock` remains after the release, because removing it could admit
    two runs at once. On a file system that cannot lock, `acquire` fails instead of continuing without a lock.

    Raises:
        BusyError: another run holds the lock; the message names its process and host.
        DiskError: the folder cannot be used or locked.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.abspath(path))
        self.path = self.folder / LOCK_NAME
        self._descriptor = -1
        self._made = False
        self._before = b"", 0, 0  # content and times of an existing lock file

    @property
    def held(self) -> bool:
        """Whether this object holds the lock in this process."""
        return _held.get(self._descriptor) is self

    def acquire(self) -> None:
        """Take the lock without waiting, or raise."""
        if self.held:
            raise ValueError(f"the lock on {self.folder} is already held by this object")
        try:
            with DEFAULT.errors("lock", self.path, size=_MAX_BYTES):
                DEFAULT.makedirs(self.folder)
                self._descriptor = self._lock_file()
                _held[self._descriptor] = self
                if not self._made:
                    info = os.fstat(self._descriptor)
                    self._before = os.pread(self._descriptor, _MAX_BYTES, 0), info.st_atime_ns, info.st_mtime_ns
                _write_holder(self._descriptor)
        except OSError:
            self.release()
            raise

    def release(self, *, undo: bool = False) -> None:
        """Release the lock and empty its file. With `undo` the previous file is restored, or a new one removed."""
        if not self.held:
            return
        # Closing the descriptor releases the lock. A process that opened a file which we remove notices after locking
        # that the name now refers to another file or to none.
        with contextlib.suppress(OSError):
            if undo and self._made:
                os.unlink(self.path)
            else:
                os.ftruncate(self._descriptor, 0)
            if undo and not self._made:
                content, *times = self._before
                os.pwrite(self._descriptor, content, 0)
                os.utime(self._descriptor, ns=(times[0], times[1]))
        _held.pop(self._descriptor, None)
        close_read(self._descriptor)

    def _lock_file(self) -> int:
        for _ in range(_TRIES):
            try:
                descriptor = self._open_file()
            except FileNotFoundError:
                # Another run that was refused has just removed the folder that it had created.
                DEFAULT.makedirs(self.folder)
                continue
            with closed_on_error(descriptor):
                info = os.fstat(descriptor)
                if not stat.S_ISREG(info.st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                if info.st_nlink > 1:  # writing the holder would change another file
                    raise OSError(errno.EMLINK, "the file has another name as well")
                self._flock(descriptor)
                # Another process may have removed or replaced the file between opening and locking.
                if _is_at(descriptor, self.path):
                    return descriptor
            close_read(descriptor)
        raise OSError(errno.EAGAIN, "other processes keep removing it")

    def _open_file(self) -> int:
        try:
            descriptor = os.open(self.path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            self._made = False
            return os.open(self.path, _FLAGS)
        self._made = True
        return descriptor

    def _flock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._busy(descriptor) from None
        except OSError as error:
            what = f"the file system of {escape(self.folder)} cannot lock files: {error.strerror}"
            next = "choose an output folder on a local disk, or mount this one with locking"
            raise DiskError(what, where=escape(self.path), next=next) from error

    def _busy(self, descriptor: int) -> BusyError:
        """The error that names the holder. Waits briefly, in case the holder is about to write its name."""
        holder: dict[str, Any] = {}
        for _ in range(_TRIES):
            holder = _read_holder(descriptor)
            if _is_credible(holder):
                break
            time.sleep(_PAUSE_S)
        pid, host = escape(holder.get("pid", "unknown")), escape(holder.get("host", "unknown"))
        return BusyError(
            f"another run holds {escape(self.folder)}: process {pid} on host {host}",
            where=f"{escape(self.path)}, held since {escape(holder.get('started', 'unknown'))}",
            next="wait until it ends, stop it, or choose another output folder",
        )

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def is_lock_file(path: Path) -> bool:
    """Whether `path` is a file that a lock may have left: empty, or naming a holder."""
    try:
        content = read_limited(path, _MAX_BYTES)
        return not path.is_symlink() and _OPENING.encode().startswith(content[: len(_OPENING)])
    except (DiskError, ModelError):
        return False


# --- Entries of a cache -----------------------------------------------------------------------------------------------

_threads: dict[tuple[int, int, str], int] = {}  # the thread of this process that builds an entry
_guard = threading.Lock()


class EntryLock:
    """The lock on `entry` in an open folder. The thread that holds it may take it again.

    On a file system that cannot lock, nobody waits: entries appear by rename, so at worst two processes build the same
    one. The lock file is removed on release; a process that opened it earlier notices that and retries.

    Args:
        folder: descriptor of the folder.
        entry: name of the entry.
        what: description of the entry for messages.
        tell: called once with a line that names the holder, if this process has to wait.
    """

    def __init__(self, folder: int, entry: str, what: str, tell: Callable[[str], None]) -> None:
        info = os.fstat(folder)
        self._key, self._folder, self._name = (info.st_dev, info.st_ino, entry), folder, f".lock-{entry}"
        self._what, self._tell = what, tell
        self._descriptor = -1

    def acquire(self, most: int | None = None) -> bool:
        """Take the lock, waiting for its holder. Returns whether this thread did not already hold it.

        Args:
            most: polls after which to continue without the lock; None waits without a limit.

        Raises:
            OSError: the lock file cannot be created.
        """
        if _threads.get(self._key) == threading.get_ident():
            return False
        polls = 0  # counted instead of timed
        while (holder := self._holder()) is not None:
            if polls == most:
                break
            if polls == PATIENCE:
                self._tell(f"waiting for {holder}, which is building {self._what}")
            time.sleep(POLL_S)
            polls += 1
        return True

    def release(self) -> None:
        """Release the lock if this object took it."""
        if _held.get(self._descriptor) is self:
            with contextlib.suppress(OSError):
                if _is_at(self._descriptor, self._name, self._folder):
                    os.unlink(self._name, dir_fd=self._folder)
            _held.pop(self._descriptor, None)
            close_read(self._descriptor)
            _threads.pop(self._key, None)

    def _holder(self) -> str | None:
        """Try to take the lock; return the other holder, or None without one."""
        with _guard:
            if _threads.setdefault(self._key, threading.get_ident()) != threading.get_ident():
                return "another thread of this process"
        try:
            self._descriptor, holder = _try(self._folder, self._name)
        finally:
            if self._descriptor == -1:
                _threads.pop(self._key, None)
            else:
                _held[self._descriptor] = self
        return holder


def _try(folder: int, name: str) -> tuple[int, str | None]:
    """Return a descriptor that holds the lock, or who else holds it; -1 and None if the file system cannot lock."""
    while True:
        # Open or create the file, removing anything that is not ours.
        try:
            descriptor = os.open(name, _FLAGS | os.O_CREAT, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno not in _NOT_A_FILE:
                raise
            _remove_foreign(folder, name, error)
            continue
        with closed_on_error(descriptor):
            is_ours = _is_ours(descriptor, name)
        if not is_ours:
            close_read(descriptor)
            _remove_foreign(folder, name, None)
            continue
        # Lock it. If the file was replaced meanwhile, start over.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, name, folder):
                _write_holder(descriptor)
                return descriptor, None
        except BlockingIOError:
            holder = _read_holder(descriptor)
            close_read(descriptor)
            return -1, f"process {holder['pid']} of host {escape(holder['host'])}" if holder else "another process"
        except OSError as error:
            close_read(descriptor)
            if error.errno in _CANNOT_LOCK:
                return -1, None
            raise
        close_read(descriptor)


def _remove_foreign(folder: int, name: str, why: OSError | None) -> None:
    """Remove what is not our lock: a link, a FIFO, another user's file, a folder. The folder around it is ours."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        if why is not None and why.errno == errno.EACCES:  # there is no file, so the folder denied access
            raise why from None


def _is_ours(descriptor: int, name: str) -> bool:
    try:
        check_file(os.fstat(descriptor), name)
    except Refused:
        # The file was removed after it was opened; it is checked again once it is locked.
        return os.fstat(descriptor).st_nlink == 0 and stat.S_ISREG(os.fstat(descriptor).st_mode)
    return True


# --- Helpers of both locks --------------------------------------------------------------------------------------------


def _is_at(descriptor: int, name: str | Path, folder: int | None = None) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _write_holder(descriptor: int) -> None:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}) + "\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _read_holder(descriptor: int) -> dict[str, Any]:
    """The holder in the lock file; empty if the file does not name a process and a host."""
    try:
        holder = parse_object(os.pread(descriptor, _MAX_BYTES, 0), where=LOCK_NAME)
    except (ModelError, OSError):
        return {}
    is_named = type(holder.get("pid")) is int and isinstance(holder.get("host"), str) and len(holder["host"]) <= 100
    return holder if is_named else {}


def _is_credible(holder: dict[str, Any]) -> bool:
    """Whether this can be the present holder, rather than an earlier one that has died."""
    if not holder or not 0 < holder["pid"] < 1 << 31:
        return False
    if holder["host"] != socket.gethostname():
        return True
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _forget_in_child() -> None:
    """Close a forked child's copies, so that a lock ends with the process that took it and not with its children."""
    for descriptor in _held:
        close_read(descriptor)
    _held.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_in_child)
