"""One builder an entry: a lock of the entry's own name, which the kernel gives back when its process ends.

Who waits says for whom. Where the file system cannot lock, nobody waits: entries appear by rename, so the worst is that
two processes make the same one. The file goes when the lock is given back; who opened it before sees that and starts
again.
"""

from __future__ import annotations

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

from genesis.errors import escape
from genesis.files.entry import close_read
from genesis.files.trust import Refused, check_file

__all__ = ["EntryLock"]

POLL_S = 0.05
PATIENCE = 40  # pauses until the one who waits says so: 2 s
_MAX_BYTES = 4096
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_OTHERS = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES)  # what opening another thing than a file of ours gives
_CANNOT = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EACCES)

_threads: dict[tuple[int, int, str], int] = {}  # which thread of this process makes an entry
_held: set[int] = set()
_guard = threading.Lock()


class EntryLock:
    """The lock on `entry` in an open folder; in the thread that holds it already, another one is no obstacle.

    Args:
        what: what is made, as a message names it.
        tell: called once with a line that says for whom we wait.
    """

    def __init__(self, folder: int, entry: str, what: str, tell: Callable[[str], None]) -> None:
        info = os.fstat(folder)
        self._key, self._folder, self._name = (info.st_dev, info.st_ino, entry), folder, f".lock-{entry}"
        self._what, self._tell = what, tell
        self._descriptor: int | None = None

    def acquire(self, most: int | None = None) -> bool:
        """Take the lock, waiting for who holds it; whether this thread did not hold it before.

        Args:
            most: pauses after which it goes on without the lock.

        Raises:
            OSError: the lock's file cannot be made.
        """
        if _threads.get(self._key) == threading.get_ident():
            return False
        pauses = 0  # counted, so that no clock is asked
        while (holder := self._taken()) is not None:
            if pauses == most:
                break
            if pauses == PATIENCE:
                self._tell(f"waiting for {holder} that makes {self._what}")
            time.sleep(POLL_S)
            pauses += 1
        return True

    def release(self) -> None:
        """Give it back, where this object took it."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            _release(self._folder, self._name, descriptor)
            _threads.pop(self._key, None)

    def _taken(self) -> str | None:
        """Try to take it; who else has it, or None."""
        if (holder := _begin(self._key)) is not None:
            return holder
        try:
            self._descriptor, holder = _try(self._folder, self._name)
        finally:
            if self._descriptor is None or holder is not None:
                _threads.pop(self._key, None)
        if holder is not None:
            self._descriptor = None
        return holder


def _begin(key: tuple[int, int, str]) -> str | None:
    """Take the entry among this process's threads; who has it, or None."""
    with _guard:
        taken = _threads.setdefault(key, threading.get_ident())
    return None if taken == threading.get_ident() else "another thread of this process"


def _try(folder: int, name: str) -> tuple[int, str | None]:
    """A descriptor that holds the lock, or who else does; -1 and nobody where the file system cannot lock."""
    while True:
        try:
            descriptor = os.open(name, _FLAGS, 0o600, dir_fd=folder)
        except OSError as error:
            if error.errno not in _OTHERS:
                raise
            _give_way(folder, name, error)
            continue
        try:
            is_ours = _is_ours(descriptor, name)
        except OSError:
            close_read(descriptor)
            raise
        if not is_ours:
            close_read(descriptor)
            _give_way(folder, name, None)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _stands(folder, name, descriptor):
                os.pwrite(descriptor, _holder().ljust(_MAX_BYTES // 8), 0)
                _held.add(descriptor)
                return descriptor, None
        except BlockingIOError:
            holder = _read_holder(descriptor)
            close_read(descriptor)
            return -1, holder
        except OSError as error:
            close_read(descriptor)
            if error.errno in _CANNOT:
                return -1, None
            raise
        close_read(descriptor)


def _give_way(folder: int, name: str, why: OSError | None) -> None:
    """Remove what is no lock of ours: a link, a FIFO, another user's file, a folder. The folder it is in is ours."""
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


def _stands(folder: int, name: str, descriptor: int) -> bool:
    """Whether the open file is still the one of this name."""
    try:
        there = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)


def _holder() -> bytes:
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()


def _read_holder(descriptor: int) -> str:
    try:
        found = json.loads(os.pread(descriptor, _MAX_BYTES, 0))
        return f"process {int(found['pid'])} of host {escape(str(found['host'])[:100])}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"


def _release(folder: int, name: str, descriptor: int) -> None:
    if descriptor not in _held:
        return
    _held.discard(descriptor)
    try:
        if _stands(folder, name, descriptor):
            os.unlink(name, dir_fd=folder)
    except OSError:
        pass
    close_read(descriptor)


def _forget_in_child() -> None:
    """Close a forked child's copies, so that the lock ends with the process that took it."""
    for descriptor in _held:
        close_read(descriptor)
    _held.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_in_child)
