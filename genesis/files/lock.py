"""The lock on an output folder: one run at a time, given back by the kernel when its process ends, however it ends.

The lock is `flock` on `<folder>/.lock`; what the file says only serves messages. A file left by a dead process locks
nobody out, and no clock decides anything. The file itself stays after release, since removing it could let two runs in.
Where the file system cannot `flock`, taking the lock fails: a lock that nobody honours would be worse than none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from genesis.errors import BusyError, DiskError, ModelError, escape
from genesis.files.boundary import close_read
from genesis.files.filesystem import DEFAULT, disk_error
from genesis.files.strict_json import parse_object, read_limited

__all__ = ["LOCK_NAME", "FolderLock", "is_lock_file"]

LOCK_NAME = ".lock"
_MAX_BYTES = 4096
_TRIES = 200
_OPENING = '{"pid": '
_PAUSE_S = 0.01


class FolderLock:
    """Holds the folder `path` (made if missing) against other runs, from `acquire` to `release` or in a `with` block.

    Raises:
        BusyError: another run holds it; names its process and host. DiskError: the folder cannot be used or locked.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.abspath(path))
        self.path = self.folder / LOCK_NAME
        self._descriptor: int | None = None
        self._made = False
        self._before = b"", 0, 0  # content of a file that was there, and its times

    @property
    def held(self) -> bool:
        """Whether this object holds the lock in this process."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Take the lock now or raise; never waits for the holder."""
        if self.held:
            raise ValueError(f"the lock on {self.folder} is held by this object already")
        try:
            DEFAULT.makedirs(self.folder)
            self._descriptor = self._lock_file()
            self._write_holder(self._descriptor)
        except OSError as error:
            self.release()
            if isinstance(error, DiskError):
                raise
            raise disk_error(error, "lock", self.path, needed=_MAX_BYTES) from error
        _held.add(self)

    def release(self, *, undo: bool = False) -> None:
        """Give the lock back; the file stays, empty. With `undo` it is left as it was before, or not at all."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        _held.discard(self)
        # Its content serves messages only, and the lock goes with the descriptor. Who opened a file that we remove
        # finds another or none under its name once it has the lock.
        with contextlib.suppress(OSError):
            if undo and self._made:
                os.unlink(self.path)
            else:
                os.ftruncate(descriptor, 0)
            if undo and not self._made:
                content, *times = self._before
                os.pwrite(descriptor, content, 0)
                os.utime(descriptor, ns=(times[0], times[1]))
        close_read(descriptor)

    def _lock_file(self) -> int:
        """A descriptor that holds the lock on the file that is at `path` now."""
        for _ in range(_TRIES):
            try:
                descriptor = self._open_file()
            except FileNotFoundError:
                # A run that was refused has just removed the folder that it had made.
                DEFAULT.makedirs(self.folder)
                continue
            try:
                info = os.fstat(descriptor)
                if not stat.S_ISREG(info.st_mode):
                    raise OSError(errno.EINVAL, "it is not a regular file")
                if info.st_nlink > 1:  # what the lock says of its holder would be written into another file
                    raise OSError(errno.EMLINK, "it is also another file's name")
                self._flock(descriptor)
                # Somebody may have removed or replaced the file between opening and locking.
                if _same_file(descriptor, self.path):
                    return descriptor
            except BaseException:
                close_read(descriptor)
                raise
            close_read(descriptor)
        raise OSError(errno.EAGAIN, "others remove it again and again")

    def _open_file(self) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            self._made = False
            return os.open(self.path, flags)
        self._made = True
        return descriptor

    def _flock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._busy(descriptor) from None
        except OSError as error:
            raise DiskError(
                f"the file system of {escape(self.folder)} cannot lock files: {error.strerror}",
                where=escape(self.path),
                next="choose an output folder on a local disk, or mount this one with locking",
            ) from error

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

    def _write_holder(self, descriptor: int) -> None:
        if not self._made:
            found = os.fstat(descriptor)
            self._before = os.pread(descriptor, _MAX_BYTES, 0), found.st_atime_ns, found.st_mtime_ns
        started = datetime.now(UTC).isoformat(timespec="seconds")
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}) + "\n"
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_lock_file(path: Path) -> bool:
    """Whether `path` is a file that a lock may have left: empty, or with its holder's words."""
    try:
        content = read_limited(path, _MAX_BYTES)
        return not path.is_symlink() and _OPENING.encode().startswith(content[: len(_OPENING)])
    except (DiskError, ModelError):
        return False


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _read_holder(descriptor: int) -> dict[str, Any]:
    """What the lock file says of its holder; empty where it says nothing readable."""
    try:
        return parse_object(os.pread(descriptor, _MAX_BYTES, 0), where=LOCK_NAME)
    except (ModelError, OSError):
        return {}


def _is_credible(holder: dict[str, Any]) -> bool:
    """Whether these can be the holder's words rather than those of a dead one before it."""
    pid = holder.get("pid")
    if type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _forget_in_child() -> None:
    """Close a forked child's copies, so that the lock ends with the process that took it, not with its workers."""
    for lock in list(_held):
        descriptor, lock._descriptor = lock._descriptor, None
        if descriptor is not None:
            close_read(descriptor)
    _held.clear()


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_in_child)
