"""Whom a file may belong to: folders and files that nobody but this user can have written.

`open_folder` and `open_file` open what is ours alone, such as a cache. A path is walked from the root with one
descriptor a folder. What is checked is what the descriptor holds, and the next name is looked up in it, so a folder
that is renamed or replaced during the walk changes nothing.

`check_owner` is for what a command finds by itself (the newest checkpoint, the record of a run, a configuration in the
current folder that has a recipe's name): what another user put there is refused. A file that the user names is the
user's choice.
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
# A parent may be closed to reading; where the system has no descriptor for passing through, it must be readable.
_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class Refused(Exception):
    """A folder or file that somebody else could have written; says which and why."""


def open_folder(path: str | os.PathLike[str], *, own: int = 1) -> int:
    """A descriptor of the folder `path`, which is made where it is missing; the caller closes it.

    The last `own` folders of the path are ours: made with mode 0700, no links, owned by this user, writable by nobody
    else. Those above belong to this user or to root, and others write them only where the sticky bit keeps each from
    renaming what is another's. Links among them count as folders do.

    Raises:
        Refused: the path is not so. OSError: it cannot be made or opened.
    """
    parts = list(Path(os.path.abspath(path)).parts[1:])
    own = min(own, len(parts))
    above, ours = parts[: len(parts) - own], parts[len(parts) - own :]
    here, shown = _walk(above)
    for name in ours:
        shown = shown / name
        with closed_after(here):
            here = _open_own(here, name, shown)
    return here


def open_file(folder: int, name: str) -> int:
    """A read-only descriptor of the file `name` in an open folder; never follows a link, never waits for a FIFO.
    Raises: Refused: another user can have written it, or it is no regular file. OSError: it cannot be opened.
    """
    with closed_on_error(os.open(name, _FILE, dir_fd=folder)) as descriptor:
        check_file(os.fstat(descriptor), name)
    return descriptor


def check_file(info: os.stat_result, name: str) -> None:
    """Refuse what is no regular file of this user's alone. Raises: Refused."""
    if not stat.S_ISREG(info.st_mode):
        raise Refused(f"{name} is no regular file")
    _check_owned(info, name)
    if info.st_nlink > 1:  # 0: replaced between opening and looking, and what is open is whole
        raise Refused(f"{name} has {info.st_nlink} links")


def _check_owned(info: os.stat_result, name: str) -> None:
    if info.st_uid != os.geteuid():
        raise Refused(f"{name} belongs to user {info.st_uid}")
    if info.st_mode & OTHERS_WRITE:
        raise Refused(f"others may write {name} (mode {stat.S_IMODE(info.st_mode):04o})")


def _walk(names: list[str]) -> tuple[int, Path]:
    """A descriptor of the folder that the absolute path of `names` leads to, links followed, and its path."""
    left, links, shown = names[::-1], 0, Path("/")
    here = os.open("/", _PASS)
    try:
        _check_parent(here, shown)
        while left:
            name = left.pop()
            try:
                here = _replaced(here, os.open(name, _PASS, dir_fd=here))
            except FileNotFoundError:
                _make(here, shown / name, 0o755)
                left.append(name)
                continue
            except OSError:
                target = _link(here, name, shown)
                if target is None:
                    raise
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
                left += Path(target).parts[:0:-1] if target.startswith("/") else Path(target).parts[::-1]
                if target.startswith("/"):
                    here, shown = _replaced(here, os.open("/", _PASS)), Path("/")
                continue
            shown = Path(os.path.normpath(shown / name))
            _check_parent(here, shown)
    except BaseException:
        close_read(here)
        raise
    return here, shown


def _replaced(old: int, new: int) -> int:
    close_read(old)
    return new


def _make(folder: int, path: Path, mode: int) -> None:
    """Make the folder `path`, whose parent is open, and flush its name."""
    with DEFAULT.errors("mkdir", path):
        DEFAULT.show(Call("mkdir", path))
    try:
        os.mkdir(path.name, mode, dir_fd=folder)
    except FileExistsError:  # another process was faster
        return
    with DEFAULT.errors("fsync_dir", path.parent):
        DEFAULT.show(Call("fsync_dir", path.parent))
    # Not everybody may read it, nor every file system flush it; what is lost is rebuilt.
    with suppress(OSError), closed_after(os.open(".", _FOLDER, dir_fd=folder)) as parent:
        os.fsync(parent)


def _link(folder: int, name: str, shown: Path) -> str | None:
    """Where the link `name` leads to; None where it is none that can be seen."""
    info = _looked_at(folder, name)
    if info is None or not stat.S_ISLNK(info.st_mode):
        return None
    if info.st_uid not in _trusted():
        raise Refused(f"the link {shown / name} belongs to user {info.st_uid}")
    return os.readlink(name, dir_fd=folder)


def _looked_at(folder: int, name: str) -> os.stat_result | None:
    """What `name` is, links not followed; None where it is not known, and why it could not be opened says more."""
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
        info = _looked_at(folder, name)
        if info is not None and stat.S_ISLNK(info.st_mode):
            raise Refused(f"{shown} is a symbolic link") from None
        raise
    with closed_on_error(descriptor):
        _check_owned(os.fstat(descriptor), str(shown))
    return descriptor


def _check_parent(descriptor: int, shown: Path) -> None:
    """Refuse a folder in which somebody else could exchange what is below it."""
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
    """Whose folders may be above ours: this user's and root's, also where a container shows root as nobody."""
    users = {os.geteuid(), 0}
    with suppress(OSError, ValueError):
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if all(int(first) != 0 for first, _, _ in ranges):  # a user namespace without root
            users.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return users


def _is_private_group(group: int) -> bool:
    """Whether `group` is the one of this user alone that many systems make for every user."""
    if os.geteuid() == 0:
        return False
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def stranger(path: str | os.PathLike[str]) -> int | None:
    """The user, neither this one nor root, to whom `path` itself belongs; else None, also where nothing is.

    Root also works in folders of others: there the folder's owner is no stranger. Raises: DiskError.
    """
    with DEFAULT.errors("look at", Path(path)), suppress(FileNotFoundError):
        owner = os.lstat(path).st_uid
        is_root = os.geteuid() == 0
        if owner not in _trusted() and not (is_root and owner == os.stat(Path(path).absolute().parent).st_uid):
            return owner
    return None


def check_owner(path: Path, *, next: str, trusted: int | None = None) -> None:
    """Refuse a file, or a folder with the files in it, that another user has put there.

    Args:
        trusted: a user whose files are taken too: whose folder it is that the user named.

    Raises:
        ModelError: with the user. DiskError: the folder cannot be listed.
    """
    with DEFAULT.errors("list", path):
        inside = [path / name for name in sorted(os.listdir(path))] if path.is_dir() else []
    for one in (path, *inside):
        if (user := stranger(one)) not in (None, trusted):
            raise ModelError(f"{escape(one)} was put there by user {user}", where=escape(path), next=next)


def run_file(folder: Path, name: str) -> Path | None:
    """The path of the file `name` in the folder of a run; None where nothing has that name.
    Raises: DataError: it is a link or no regular file, or of a user other than this one, root and the folder's.
    DiskError: it cannot be looked at.
    """
    path = folder / name
    with boundary(DiskError, "reading the run", path):
        if not exists(path):
            return None
        of_folder = os.stat(folder).st_uid
    next = "move the file away, or name the folder of another run"
    try:
        safe_join(folder, name)
        check_owner(path, next=next, trusted=of_folder)
    except ModelError as error:
        raise DataError(error.what, where=escape(path), next=next) from None
    return path


_private: dict[int, Path] = {}
_lock = threading.Lock()


def private_folder() -> Path:
    """A folder that this process alone uses, mode 0700, where nobody can exchange it; removed when the process ends.
    Raises: DiskError: no folder for temporary files will do.
    """
    with _lock:
        process = os.getpid()
        if process not in _private:
            _private[process] = _new_private()
            atexit.register(_remove, process, _private[process])
        return _private[process]


def _new_private() -> Path:
    reason = ""
    # Volumes of containers are often open to all without a sticky bit; memory and home come last.
    others = ("/tmp", "/var/tmp", os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm", os.path.expanduser("~"))
    for base in dict.fromkeys(filter(os.path.isabs, (tempfile.gettempdir(), *others))):
        path = Path(os.path.realpath(base)) / f"genesis-{secrets.token_hex(8)}"
        try:
            close_read(open_folder(path))
            return path
        except (OSError, Refused) as error:
            reason = reason or f"{base}: {(isinstance(error, OSError) and error.strerror) or error}"
    what = f"there is no safe folder for temporary files: {escape(reason)}"
    raise DiskError(what, where="TMPDIR", next="set TMPDIR to a folder that only you can write")


def _remove(process: int, folder: Path) -> None:
    if os.getpid() == process:  # a forked child leaves its parent's folder alone
        shutil.rmtree(folder, ignore_errors=True)
