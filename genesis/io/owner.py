"""Whose a file is that a command takes up by itself: what another user put where we look is never taken silently.

A file that the user names is the user's choice. This is for those that are found: the newest checkpoint, the record of
a run, a configuration in the current folder that has a recipe's name.
"""

from __future__ import annotations

import os
from pathlib import Path

from genesis.errors import ModelError, escape
from genesis.io.filesystem import disk_error

__all__ = ["check_owner", "stranger"]


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


def check_owner(path: Path, *, next: str) -> None:
    """Refuse a file, or a folder with the files in it, that another user has put there.

    Raises:
        ModelError: with the user. DiskError: the folder cannot be listed.
    """
    try:
        inside = [path / name for name in sorted(os.listdir(path))] if path.is_dir() else []
    except OSError as error:
        raise disk_error(error, "list", path) from error
    for one in (path, *inside):
        if (user := stranger(one)) is not None:
            raise ModelError(f"{escape(one)} was put there by user {user}", where=escape(path), next=next)
