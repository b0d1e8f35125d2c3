"""Whose a file is that a command takes up by itself: what another user put where we look is never taken silently.

A file that the user names is the user's choice. This is for those that are found: the newest checkpoint, the record of
a run, a configuration in the current folder that has a recipe's name.
"""

from __future__ import annotations

import os
from pathlib import Path

from genesis.errors import DataError, DiskError, ModelError, escape
from genesis.files.boundary import boundary
from genesis.files.filesystem import disk_error
from genesis.files.paths import exists, safe_join

__all__ = ["check_owner", "run_file", "stranger"]


def stranger(path: str | os.PathLike[str]) -> int | None:
    """The user, neither this one nor root, to whom `path` itself belongs; else None, also where nothing is.

    Root also works in folders of others: there the folder's owner is no stranger. Raises: DiskError.
    """
    try:
        owner = os.lstat(path).st_uid
        if owner in (0, os.geteuid()):
            return None
        if os.geteuid() == 0 and owner == os.stat(Path(path).absolute().parent).st_uid:
            return None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise disk_error(error, "look at", Path(path)) from error
    return owner


def check_owner(path: Path, *, next: str, trusted: int | None = None) -> None:
    """Refuse a file, or a folder with the files in it, that another user has put there.

    Args:
        trusted: a user whose files are taken too: whose folder it is that the user named.

    Raises:
        ModelError: with the user. DiskError: the folder cannot be listed.
    """
    try:
        inside = [path / name for name in sorted(os.listdir(path))] if path.is_dir() else []
    except OSError as error:
        raise disk_error(error, "list", path) from error
    for one in (path, *inside):
        if (user := stranger(one)) not in (None, trusted):
            raise ModelError(f"{escape(one)} was put there by user {user}", where=escape(path), next=next)


def run_file(folder: Path, name: str) -> Path | None:
    """The path of the file `name` in the folder of a run; None where nothing has that name.

    Raises:
        DataError: it is a link or no regular file, or of a user other than this one, root and the folder's.
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
