"""Locks between processes: `flock` on a file that names its holder. The kernel releases a lock when its process ends.

`FolderLock` keeps a second run out of an output folder and never waits. `EntryLock` lets one process build a cache
entry while others wait for it. What the file says serves messages alone; a file that a dead process left locks nobody
out, and no clock decides anything.
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
PATIENCE = 40  # polls until an `EntryLock` says whom it waits for: 2 s
_MAX_BYTES = 4096
_TRIES = 200
_OPENING = '{"pid": '
_PAUSE_S = 0.01
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES)  # from opening anything but a file of ours
_CANNOT_LOCK = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EACCES)

_held: dict[int, object] = {}  # the lock that each descriptor holds


class FolderLock:
    """Holds the folder `path` (made if missing) against other runs, from `acquire` to `release` or in a `with` block.

    The file `<folder>/.lock` stays after release, since removing it could let two runs in. Where the file system cannot
    lock, `acquire` fails: a lock that nobody honours would be worse than none.

    Raises:
        BusyError: another run holds it; names its process and host. DiskError: the folder cannot be used or locked.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.abspath(path))
        self.path = self.folder / LOCK_NAME
        self._descriptor = -1
        self._made = False
        self._before = b"", 0, 0  # content of a file that was there, and its times

    @property
    def held(self) -> bool:
        """Whether this object holds the lock in this process."""
        return _held.get(self._descriptor) is self

    def acquire(self) -> None:
        """Take the lock now or raise; never waits for the holder."""
        if self.held:
            raise ValueError(f"the lock on {self.folder} is held by this object already")
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
        """Give the lock back; the file stays, empty. With `undo` it is left as it was before, or not at all."""
        if not self.held:
            return
        # The lock goes with the descriptor. Who opened a file that we remove finds another or none under its name once
        # it has the lock.
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
                # A run that was refused has just removed the folder that it had made.
                DEFAULT.makedirs(self.folder)
                continue
            with closed_on_error(descriptor):
                info = os.fstat(descriptor)
                if not stat.S_ISREG(info.st_mode):
                    raise OSError(errno.EINVAL, "it is not a regular file")
                if info.st_nlink > 1:  # what the lock says of its holder would be written into another file
                    raise OSError(errno.EMLINK, "it is also another file's name")
                self._flock(descriptor)
                # Somebody may have removed or replaced the file between opening and locking.
                if _is_at(descriptor, self.path):
                    return descriptor
            close_read(descriptor)
        raise OSError(errno.EAGAIN, "others remove it again and again")

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
        """The error that names the holder, who may be about to write its name: a short wait, counted in tries."""
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
    """Whether `path` is a file that a lock may have left: empty, or with its holder's words."""
    try:
        content = read_limited(path, _MAX_BYTES)
        return not path.is_symlink() and _OPENING.encode().startswith(content[: len(_OPENING)])
    except (DiskError, ModelError):
        return False


# --- Entries of a cache -----------------------------------------------------------------------------------------------

_threads: dict[tuple[int, int, str], int] = {}  # which thread of this process makes an entry
_guard = threading.Lock()


class EntryLock:
    """The lock on `entry` in an open folder; the thread that holds it may take it again.

    Where the file system cannot lock, nobody waits: entries appear by rename, so that at worst two processes make the
    same one. The lock's file is removed on release; who opened it before sees that and starts again.

    Args:
        what: what is made, as a message names it.
        tell: called once with a line that says whom this process waits for.
    """

    def __init__(self, folder: int, entry: str, what: str, tell: Callable[[str], None]) -> None:
        info = os.fstat(folder)
        self._key, self._folder, self._name = (info.st_dev, info.st_ino, entry), folder, f".lock-{entry}"
        self._what, self._tell = what, tell
        self._descriptor = -1

    def acquire(self, most: int | None = None) -> bool:
        """Take the lock, waiting for its holder. Returns whether this thread did not hold it before.

        Args:
            most: polls after which it goes on without the lock.

        Raises:
            OSError: the lock's file cannot be made.
        """
        if _threads.get(self._key) == threading.get_ident():
            return False
        polls = 0  # counted, so that no clock is asked
        while (holder := self._holder()) is not None:
            if polls == most:
                break
            if polls == PATIENCE:
                self._tell(f"waiting for {holder} that makes {self._what}")
            time.sleep(POLL_S)
            polls += 1
        return True

    def release(self) -> None:
        """Give it back, where this object took it."""
        if _held.get(self._descriptor) is self:
            with contextlib.suppress(OSError):
                if _is_at(self._descriptor, self._name, self._folder):
                    os.unlink(self._name, dir_fd=self._folder)
            _held.pop(self._descriptor, None)
            close_read(self._descriptor)
            _threads.pop(self._key, None)

    def _holder(self) -> str | None:
        """Try to take it; who else has it, or None."""
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
    """A descriptor that holds the lock, or who else does; -1 and None where the file system cannot lock."""
    while True:
        try:
            descriptor = os.open(name, _FLAGS | os.O_CREAT, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno not in _NOT_A_FILE:
                raise
            _give_way(folder, name, error)
            continue
        with closed_on_error(descriptor):
            is_ours = _is_ours(descriptor, name)
        if not is_ours:
            close_read(descriptor)
            _give_way(folder, name, None)
            continue
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


def _give_way(folder: int, name: str, why: OSError | None) -> None:
    """Remove what is not a lock of ours: a link, a FIFO, another user's file, a folder. The folder it is in is ours."""
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        if why is not None and why.errno == errno.EACCES:  # nothing is there: it is the folder that refuses
            raise why from None


def _is_ours(descriptor: int, name: str) -> bool:
    try:
        check_file(os.fstat(descriptor), name)
    except Refused:
        # Removed between opening and looking: it is checked again when it is locked.
        return os.fstat(descriptor).st_nlink == 0 and stat.S_ISREG(os.fstat(descriptor).st_mode)
    return True


# --- What both share --------------------------------------------------------------------------------------------------


def _is_at(descriptor: int, name: str | Path, folder: int | None = None) -> bool:
    """Whether the open file is still the one of this name."""
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
    """What the lock's file says of its holder; empty where it names no process and host."""
    try:
        holder = parse_object(os.pread(descriptor, _MAX_BYTES, 0), where=LOCK_NAME)
    except (ModelError, OSError):
        return {}
    is_named = type(holder.get("pid")) is int and isinstance(holder.get("host"), str) and len(holder["host"]) <= 100
    return holder if is_named else {}


def _is_credible(holder: dict[str, Any]) -> bool:
    """Whether these can be the holder's words, not those of a dead one before it."""
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
    """Close a forked child's copies, so that a lock ends with the process that took it, not with its workers."""
    for descriptor in _held:
        close_read(descriptor)
    _held.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_in_child)
