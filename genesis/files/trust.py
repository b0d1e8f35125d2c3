"""File ownership: folders and files that only this user, and no other, can have written.

`open_folder` and `open_file` open what must belong to this user alone, such as a cache. They walk a path from the root
with one descriptor per folder. Checks apply to the open descriptor, and the next name is looked up in it, so renaming
or replacing a folder during the walk has no effect.

`check_owner` is for files that a command discovers implicitly: the newest checkpoint, the record of a run, or a
configuration in the current folder with the name of a recipe. It refuses files that another user put there. A file that
the user names explicitly is the user's choice.
"""

from __future__ import annotations

import atexit
import errno
import grp
import os
import pwd
import secrets
import shutil
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from genesis.errors import DataError, DiskError, ModelError, escape
from genesis.files.boundary import boundary, close_read, closed_after, closed_on_error
from genesis.files.filesystem import DEFAULT, Call
from genesis.files.paths import exists, safe_join

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40
# A parent may deny reading. On systems without a descriptor for traversal only (O_PATH) it must be readable.
_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class Refused(Exception):
    """A folder or file that somebody else could have written; the message has its path and the reason."""


def open_folder(path: str | os.PathLike[str], *, own: int = 1) -> int:
    """Return a descriptor of the folder `path`, creating it if missing; the caller closes it.

    The last `own` folders of the path must be ours: created with mode 0700, not links, owned by this user and writable
    by nobody else. The folders above must belong to this user or to root. Others may write to those only if the sticky
    bit protects entries of other users. Links among them are treated like folders.

    Raises:
        Refused: the path does not meet these conditions. OSError: it cannot be created or opened.
    """
    parts = list(Path(os.path.abspath(path)).parts[1:])
    own = min(own, len(parts))
    above, ours = parts[: len(parts) - own], parts[len(parts) - own :]
    descriptor, shown = _walk(above)
    for name in ours:
        shown = shown / name
        with closed_after(descriptor):
            descriptor = _open_own(descriptor, name, shown)
    return descriptor


def open_file(folder: int, name: str) -> int:
    """Return a read-only descriptor of the file `name` in an open folder. Does not follow links or wait for a FIFO.
    Raises Refused if it is not a regular file or another user can have written it, and OSError if opening fails.
    """
    with closed_on_error(os.open(name, _FILE, dir_fd=folder)) as descriptor:
        check_file(os.fstat(descriptor), name)
    return descriptor


def check_file(info: os.stat_result, name: str) -> None:
    """Raise Refused unless the file is a regular file that only this user can write."""
    if not stat.S_ISREG(info.st_mode):
        raise Refused(f"{name} is not a regular file")
    _check_owned(info, name)
    if info.st_nlink > 1:  # 0: replaced after it was opened, and the open file is complete
        raise Refused(f"{name} has {info.st_nlink} links")


def _check_owned(info: os.stat_result, name: str) -> None:
    if info.st_uid != os.geteuid():
        raise Refused(f"{name} belongs to user {info.st_uid}")
    if info.st_mode & OTHERS_WRITE:
        raise Refused(f"others may write {name} (mode {stat.S_IMODE(info.st_mode):04o})")


def _walk(names: list[str]) -> tuple[int, Path]:
    """A descriptor of the folder at the absolute path of `names`, with links followed, and the path."""
    left, links, shown = names[::-1], 0, Path("/")
    descriptor = os.open("/", _PASS)
    try:
        _check_parent(descriptor, shown)
        while left:
            name = left.pop()
            # Step into the next folder, creating it if it is missing.
            try:
                descriptor = _replaced(descriptor, os.open(name, _PASS, dir_fd=descriptor))
            except FileNotFoundError:
                _make(descriptor, shown / name, 0o755)
                left.append(name)
                continue
            except OSError:
                # A link cannot be opened: continue with the names of its target.
                target = _link(descriptor, name, shown)
                if target is None:
                    raise
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
                left += Path(target).parts[:0:-1] if target.startswith("/") else Path(target).parts[::-1]
                if target.startswith("/"):
                    descriptor, shown = _replaced(descriptor, os.open("/", _PASS)), Path("/")
                continue
            shown = Path(os.path.normpath(shown / name))
            _check_parent(descriptor, shown)
    except BaseException:
        close_read(descriptor)
        raise
    return descriptor, shown


def _replaced(old: int, new: int) -> int:
    close_read(old)
    return new


def _make(folder: int, path: Path, mode: int) -> None:
    """Create the folder `path` in its open parent, and flush the new name."""
    with DEFAULT.errors("mkdir", path):
        DEFAULT.show(Call("mkdir", path))
    try:
        os.mkdir(path.name, mode, dir_fd=folder)
    except FileExistsError:  # another process was faster
        return
    with DEFAULT.errors("fsync_dir", path.parent):
        DEFAULT.show(Call("fsync_dir", path.parent))
    # The parent may not be readable, or the file system cannot flush it. A lost folder is created again.
    with suppress(OSError), closed_after(os.open(".", _FOLDER, dir_fd=folder)) as parent:
        os.fsync(parent)


def _link(folder: int, name: str, shown: Path) -> str | None:
    """The target of the link `name`, or None if it is not a visible link."""
    info = _status_of(folder, name)
    if info is None or not stat.S_ISLNK(info.st_mode):
        return None
    if info.st_uid not in _trusted():
        raise Refused(f"the link {shown / name} belongs to user {info.st_uid}")
    return os.readlink(name, dir_fd=folder)


def _status_of(folder: int, name: str) -> os.stat_result | None:
    """The status of `name` without following links, or None if unknown; the error of opening says more."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None


def _open_own(folder: int, name: str, shown: Path) -> int:
    try:
        descriptor = os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        _make(folder, shown, 0o700)
        descriptor = os.open(name, _FOLDER, dir_fd=folder)
    except OSError:
        info = _status_of(folder, name)
        if info is not None and stat.S_ISLNK(info.st_mode):
            raise Refused(f"{shown} is a symbolic link") from None
        raise
    with closed_on_error(descriptor):
        _check_owned(os.fstat(descriptor), str(shown))
    return descriptor


def _check_parent(descriptor: int, shown: Path) -> None:
    """Raise Refused for a folder in which somebody else could replace its contents."""
    info = os.fstat(descriptor)
    if info.st_uid not in _trusted():
        raise Refused(f"{shown} belongs to user {info.st_uid}")
    others = info.st_mode & OTHERS_WRITE
    if not others or info.st_mode & stat.S_ISVTX:
        return
    if others == stat.S_IWGRP and _is_private_group(info.st_gid):
        return
    raise Refused(f"others may write {shown} (mode {stat.S_IMODE(info.st_mode):04o})")


def _trusted() -> set[int]:
    """The users whose folders may be above ours: this user and root, also if a container shows root as nobody."""
    users = {os.geteuid(), 0}
    with suppress(OSError, ValueError):
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if all(int(first) != 0 for first, _, _ in ranges):  # a user namespace without root
            users.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return users


def _is_private_group(group: int) -> bool:
    """Whether `group` is this user's private group, which many systems create for every user."""
    if os.geteuid() == 0:
        return False
    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}


def foreign_owner(path: str | os.PathLike[str]) -> int | None:
    """The owner of `path` if it is neither this user nor root, otherwise None, also if nothing exists there.

    For root, the owner of the folder around the path is accepted too. Raises DiskError.
    """
    with DEFAULT.errors("look at", Path(path)), suppress(FileNotFoundError):
        owner = os.lstat(path).st_uid
        is_root = os.geteuid() == 0
        if owner not in _trusted() and not (is_root and owner == os.stat(Path(path).absolute().parent).st_uid):
            return owner
    return None


def check_owner(path: Path, *, next: str, trusted: int | None = None) -> None:
    """Refuse a file, or a folder and the files in it, that another user has put there.

    Args:
        next: the advice in the error.
        trusted: a user whose files are accepted too: the owner of a folder that the user named.

    Raises:
        ModelError: another user owns one of them; the message has the user. DiskError: the folder cannot be listed.
    """
    with DEFAULT.errors("list", path):
        inside = [path / name for name in sorted(os.listdir(path))] if path.is_dir() else []
    for entry in (path, *inside):
        if (user := foreign_owner(entry)) not in (None, trusted):
            raise ModelError(f"{escape(entry)} belongs to user {user}", where=escape(path), next=next)


def run_file(folder: Path, name: str) -> Path | None:
    """The path of the file `name` in the folder of a run, or None if it does not exist.
    Raises DataError for a link, for a file that is not regular, and for one that belongs neither to this user, nor to
    root, nor to the folder's owner. Raises DiskError if it cannot be inspected.
    """
    path = folder / name
    with boundary(DiskError, "reading the run", path):
        if not exists(path):
            return None
        folder_owner = os.stat(folder).st_uid
    next = "move the file away, or name the folder of another run"
    try:
        safe_join(folder, name)
        check_owner(path, next=next, trusted=folder_owner)
    except ModelError as error:
        raise DataError(error.what, where=escape(path), next=next) from None
    return path


_private: dict[int, Path] = {}
_lock = threading.Lock()


def private_folder() -> Path:
    """A folder with mode 0700 that only this process uses and nobody else can replace; removed when the process ends.
    Raises DiskError if no folder for temporary files is safe.
    """
    with _lock:
        process = os.getpid()
        if process not in _private:
            _private[process] = _new_private()
            atexit.register(_remove, process, _private[process])
        return _private[process]


def _new_private() -> Path:
    reason = ""
    # Volumes of containers are often writable by all without a sticky bit. Memory and home are the last resort.
    others = ("/tmp", "/var/tmp", os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm", os.path.expanduser("~"))
    for base in dict.fromkeys(filter(os.path.isabs, (tempfile.gettempdir(), *others))):
        path = Path(os.path.realpath(base)) / f"genesis-{secrets.token_hex(8)}"
        try:
            close_read(open_folder(path))
            return path
        except (OSError, Refused) as error:
            reason = reason or f"{base}: {(isinstance(error, OSError) and error.strerror) or error}"
    what = f"no folder for temporary files is safe: {escape(reason)}"
    raise DiskError(what, where="TMPDIR", next="set TMPDIR to a folder that only you can write")


def _remove(process: int, folder: Path) -> None:
    if os.getpid() == process:  # a forked child does not remove its parent's folder
        shutil.rmtree(folder, ignore_errors=True)
