"""File-system calls that must survive a crash. Tests can observe each call, make it fail, or end the process at it.

All durable writing of the project goes through a `FileSystem`, which offers single calls. `atomic` and `cache` build
protocols from them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from genesis.errors import DiskError, escape

Buffer = bytes | bytearray | memoryview

# The kernel writes at most 2 GiB per call; smaller pieces allow signals to be handled in time.
_CHUNK = 64 << 20
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP}


@dataclass(frozen=True, slots=True)
class Call:
    """A file-system call that is about to happen.

    Attributes:
        op: open, write, fsync, close, rename, unlink, mkdir, rmdir or fsync_dir.
        path: the file or folder; for a rename the source.
        target: the destination of a rename.
        size: bytes that a write still has to write.
    """

    op: str
    path: Path
    target: Path | None = None
    size: int = 0


Observer = Callable[[Call], int | None]


class FileSystem:
    """Durable file-system calls that convert every `OSError` into a `DiskError`.

    Args:
        observer: called before each call. It may record the call, raise an `OSError` instead, or return the most bytes
            that a write may write.
        elsewhere: the alternative place that errors suggest.
    """

    def __init__(self, observer: Observer | None = None, *, elsewhere: str = "another output folder") -> None:
        self._observer = observer
        self._elsewhere = elsewhere

    def shown(self, observer: Callable[[Call], None]) -> FileSystem:
        """A file system that also shows each call to `observer`, first; it may raise an `OSError` instead."""

        def show_both(call: Call) -> int | None:
            observer(call)
            return self.show(call)

        return FileSystem(show_both, elsewhere=self._elsewhere)

    def for_place(self, elsewhere: str) -> FileSystem:
        """A file system with the same observer whose errors suggest `elsewhere`."""
        return FileSystem(self.show, elsewhere=elsewhere)

    def show(self, call: Call) -> int | None:
        """Show a call to the observer before it happens; return the most bytes to write, or None for all."""
        return None if self._observer is None else self._observer(call)

    def create(self, path: Path) -> Writer:
        """Return a writer of the new file `path`, which must not exist."""
        return Writer(self, path, os.O_CREAT | os.O_EXCL)

    def append(self, path: Path) -> Writer:
        """Return a writer that appends to `path`, creating it if missing."""
        return Writer(self, path, os.O_CREAT | os.O_APPEND)

    def write(self, descriptor: int, path: Path, data: Buffer) -> None:
        """Write all of `data`, continuing after short writes."""
        view = as_bytes(data)
        while view:
            with self.calling("write", path, size=len(view)) as limit:
                done = os.write(descriptor, view[: min(limit, _CHUNK)])
                if done == 0:
                    raise OSError(errno.EIO, "the file accepts no more bytes")
            view = view[done:]

    def fsync(self, descriptor: int, path: Path) -> None:
        """Return once the file's bytes are on the disk."""
        with self.calling("fsync", path):
            _flush(descriptor)

    def close(self, descriptor: int, path: Path) -> None:
        """Close the descriptor, even if closing reports an error."""
        try:
            with self.calling("close", path):
                pass
        except BaseException:
            # Keep this error with its path and size, even if closing fails too.
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        with self.errors("close", path):
            os.close(descriptor)

    def fsync_dir(self, path: Path) -> None:
        """Return once the folder's entries (new names, renames, removals) are on the disk."""
        with self.calling("fsync_dir", path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
            try:
                _flush(descriptor)
            except OSError as error:
                # Some network file systems cannot flush a folder. There a rename is durable once the server confirms.
                if error.errno not in _NO_DIRECTORY_SYNC:
                    raise
            finally:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename atomically, replacing an existing target file."""
        with self.calling("rename", source, target=target):
            os.rename(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file or a link."""
        with self.calling("unlink", path):
            os.unlink(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        with self.calling("rmdir", path):
            os.rmdir(path)

    def mkdir(self, path: Path) -> None:
        """Create one folder."""
        with self.calling("mkdir", path):
            os.mkdir(path)

    def makedirs(self, path: Path) -> None:
        """Create the folder `path` and missing parents, and flush each new name."""
        with self.errors("look at", path):
            if path.is_dir():
                return
        self.makedirs(path.parent)
        try:
            self.mkdir(path)
        except DiskError:
            # Another process may have created it meanwhile.
            if not os.path.isdir(path):
                raise
        self.fsync_dir(path.parent)

    def rmtree(self, path: Path, *, last: tuple[str, ...] = ()) -> None:
        """Remove a folder and its contents without following links; the files in `last` are removed last, in order."""
        with self.errors("list", path), os.scandir(path) as listing:
            folders = {entry.name: entry.is_dir(follow_symlinks=False) for entry in listing}
        for name, is_folder in sorted(folders.items()):
            if is_folder:
                self.rmtree(path / name)
            elif name not in last:
                self.unlink(path / name)
        for name in last:
            if folders.get(name) is False:
                self.unlink(path / name)
        self.rmdir(path)

    @contextmanager
    def calling(self, op: str, path: Path, *, target: Path | None = None, size: int = 0) -> Iterator[int]:
        """Wrap the call `op`: show it to the observer first, and yield the most bytes that a write may write."""
        with self.errors(op, path, size=size):
            limit = self.show(Call(op, path, target, size))
            yield size if limit is None else min(size, limit)

    @contextmanager
    def errors(self, op: str, path: Path, *, size: int = 0) -> Iterator[None]:
        """Convert a failing system call inside the block into the `DiskError` of `op` on `path`."""
        try:
            yield
        except DiskError:
            raise
        except OSError as error:
            raise disk_error(error, op, path, needed=size, elsewhere=self._elsewhere) from error


class Writer:
    """A file being written: `finish` flushes and closes it, `abandon` only closes it; a `with` block does either."""

    def __init__(self, fs: FileSystem, path: Path, flags: int) -> None:
        self.path = path
        self.size = 0
        self._fs = fs
        with fs.calling("open", path):
            self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)

    @property
    def closed(self) -> bool:
        """Whether the file is finished or abandoned."""
        return self._descriptor is None

    def write(self, data: Buffer) -> None:
        """Append `data`; `size` counts the bytes written through this object."""
        self._fs.write(self._open(), self.path, data)
        self.size += memoryview(data).nbytes

    def sync(self) -> None:
        """Return once everything written is on the disk."""
        self._fs.fsync(self._open(), self.path)

    def finish(self) -> None:
        """Flush the file to the disk and close it."""
        try:
            self.sync()
        except BaseException:
            self.abandon()
            raise
        descriptor, self._descriptor = self._open(), None
        self._fs.close(descriptor, self.path)

    def abandon(self) -> None:
        """Close without flushing, ignoring errors."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        return self._descriptor

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abandon()
        elif not self.closed:
            self.finish()


def as_bytes(data: Buffer) -> memoryview:
    """The bytes of a buffer of any shape, as one row."""
    # An empty view of several dimensions cannot be cast.
    return memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")


def disk_error(
    error: OSError, op: str, path: Path, *, needed: int = 0, elsewhere: str = "another output folder"
) -> DiskError:
    """The `DiskError` for a failed call `op` on `path`; on a full disk it has the needed and free bytes."""
    what = f"{op} of {escape(path)} failed: {error.strerror or error}"
    if error.errno in _NO_ROOM:
        what += f" (needed {needed:,} bytes, free {_free_bytes(path):,} bytes)"
        advice = f"free space or quota on this disk, or choose {elsewhere}; earlier saves are intact"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = f"check the permissions, or choose {elsewhere}"
    else:
        advice = "check the disk and the path; earlier saves are intact"
    result = DiskError(what, where=escape(path), next=advice)
    result.errno = error.errno
    return result


def check_room(path: str | os.PathLike[str], needed: int) -> None:
    """Raise DiskError if the disk of `path` has less than `needed` bytes free. Quotas are not considered."""
    if _free_bytes(Path(path)) < needed:
        raise disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "save", Path(path), needed=needed)


def _free_bytes(path: Path) -> int:
    """Bytes that this user can still write on the disk of `path`, or of its nearest existing parent."""
    for folder in (path, *path.absolute().parents):
        try:
            info = os.statvfs(folder)
        except OSError:
            continue
        return info.f_bavail * info.f_frsize
    return 0


def _flush(descriptor: int) -> None:
    """Call fsync, or on macOS the stronger call that also flushes the drive's cache."""
    if (full := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


DEFAULT = FileSystem()
