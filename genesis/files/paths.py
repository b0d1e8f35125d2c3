"""Safe paths: the only code in which a name read from a file becomes a path on this machine.

It decides from the name and the files present. It does not protect against a process that changes them meanwhile.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
import stat
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

from genesis.errors import GenesisError, ModelError, escape
from genesis.files.boundary import boundary, closed_on_error, system_error

MAX_NAME_BYTES = 1024
MAX_COMPONENT_BYTES = 255
MAX_COMPONENTS = 16

_REVISION = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_NEXT = "download the model folder again from a source you trust"


def quote(name: object, limit: int = 120) -> str:
    """`name` escaped, cut to `limit` characters and quoted, for error messages."""
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    text = name if isinstance(name, str) else _as_json(name)
    # Cut before escaping, which takes several times the memory of the text.
    shown = escape(text[: limit + 1])
    return f"'{shown}'" if len(text) <= limit and len(shown) <= limit else f"'{shown[:limit]}…'"


def check_name(name: object, *, where: str = "") -> str:
    """Return `name` if it can only refer to a file below the folder that it is joined to.

    Allowed are printable names in Unicode's NFKC form, separated by single slashes, at most `MAX_COMPONENTS` deep.

    Raises:
        ModelError: the name is absolute, empty or too long, or has `..`, a colon, a backslash or control characters.
    """
    problem = _name_problem(name)
    if problem:
        raise ModelError(f"the file name {quote(name)} {problem}", where=where, next=_NEXT)
    assert isinstance(name, str)
    return name


@boundary(ModelError, "looking for a file")
def safe_join(root: str | os.PathLike[str], name: object, *, where: str = "") -> Path:
    """The path of the existing regular file `name` below the folder `root`.

    `root` is the user's choice and may be a symbolic link, but nothing below it may be a link. The exception is the
    Hugging Face cache, whose snapshots consist of links. If `root` is `models--*/snapshots/<40 hex>`, or the same of
    `datasets--*`, the last component may be a link to a regular file in the `blobs` folder next to `snapshots`, named
    by 40 or 64 hex digits. The path of the blob is returned.

    Raises:
        ModelError: `check_name` refuses the name, or the file is missing or is not a regular file.
    """
    checked = check_name(name, where=where)
    base = Path(os.path.realpath(root))
    *folders, last = checked.split("/")
    path = base
    for folder in folders:
        path = path / folder
        if not stat.S_ISDIR(_mode(path, checked, where)):
            raise _refusal(checked, f"goes through {quote(folder)}, which is not a plain folder", where)
    path = path / last
    mode = _mode(path, checked, where)
    if stat.S_ISLNK(mode):
        return _hub_blob(base, path, checked, where)
    if not stat.S_ISREG(mode):
        raise _refusal(checked, f"is {_kind(mode)}, not a regular file", where)
    return path


def open_regular(path: str | os.PathLike[str], kind: type[GenesisError] = ModelError) -> int:
    """Return a read-only descriptor of the regular file at `path`; the caller closes it. Does not block on a FIFO.

    Args:
        kind: class of the error, depending on what the file is read as.

    Raises:
        GenesisError: of class `kind`: the file does not exist, is not readable, or is not a regular file.
    """
    shown, where = quote(path, 400), escape(os.fspath(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        known = system_error(error, kind, f"opening {shown}", path)
        raise kind(f"cannot open {shown}: {error.strerror}", where=where, next=known.next) from error
    except ValueError as error:
        raise kind(f"cannot open {shown}: {error}", where=where, next="check the path") from error
    with closed_on_error(descriptor):
        try:
            mode = os.fstat(descriptor).st_mode
        except OSError as error:
            raise kind(f"cannot look at {shown}: {error.strerror}", where=where, next="check the disk") from error
        if not stat.S_ISREG(mode):
            raise kind(f"{shown} is {_kind(mode)}, not a regular file", where=where, next="check the path")
    return descriptor


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether something exists at `path`; a dangling link counts. Raises OSError if the answer is unknown, where
    `os.path.lexists` would return False and an existing file would be ignored.
    """
    return _mode_or_none(os.lstat, path) is not None


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder, or a link to a folder, exists at `path`. Raises OSError like `exists`."""
    mode = _mode_or_none(os.stat, path)
    return mode is not None and stat.S_ISDIR(mode)


def list_folder(path: str | os.PathLike[str]) -> list[str]:
    """The names in the folder `path`, sorted; empty if it does not exist. Raises OSError like `exists`."""
    return sorted(os.listdir(path)) if is_folder(path) else []


def _mode_or_none(look: Callable[[str | os.PathLike[str]], os.stat_result], path: str | os.PathLike[str]) -> int | None:
    try:
        return look(path).st_mode
    except ValueError:
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def _name_problem(name: object) -> str:
    if not isinstance(name, str):
        return "is not a string"
    if not name:
        return "is empty"
    if not name.isprintable():
        return "contains control or unprintable characters"
    if unicodedata.normalize("NFKC", name) != name:
        return "is not in Unicode's NFKC form, so other systems may read another name"
    if "\\" in name or ":" in name:
        return "contains a backslash or a colon, which other systems treat specially"
    if name.startswith(("/", "~")):
        return "is absolute"
    parts = name.split("/")
    if len(name.encode()) > MAX_NAME_BYTES or len(parts) > MAX_COMPONENTS:
        return f"is longer than {MAX_NAME_BYTES} bytes or deeper than {MAX_COMPONENTS} folders"
    for part in parts:
        if part in ("", ".", ".."):
            return f"has the component {part!r}"
        if part != part.strip() or len(part.encode()) > MAX_COMPONENT_BYTES:
            return f"has a component over {MAX_COMPONENT_BYTES} bytes, or with a space at an end"
    return ""


def _mode(path: Path, name: str, where: str) -> int:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        raise ModelError(
            f"the file {quote(name)} is missing from {quote(path.parent, 400)}", where=where, next=_NEXT
        ) from None
    except OSError as error:
        advice = system_error(error, ModelError, "").next
        what = f"the file {quote(name)} cannot be inspected: {error.strerror}"
        raise ModelError(what, where=where, next=advice) from error


def _hub_blob(base: Path, link: Path, name: str, where: str) -> Path:
    """The blob that `link` in a Hugging Face cache snapshot points to. Refuses every other link."""
    repository = base.parent.parent
    is_snapshot = (
        base.parent.name == "snapshots"
        and repository.name.startswith(("models--", "datasets--"))
        and _REVISION.fullmatch(base.name) is not None
    )
    target = Path(os.path.normpath(link.parent / os.readlink(link)))
    if not (is_snapshot and target.parent == repository / "blobs" and _BLOB.fullmatch(target.name)):
        raise _refusal(name, "is a symbolic link", where)
    mode = _mode(target, name, where)
    if not stat.S_ISREG(mode):
        raise _refusal(name, f"links to {_kind(mode)}, not a regular file", where)
    return target


def _refusal(name: str, problem: str, where: str) -> ModelError:
    return ModelError(f"the file {quote(name)} {problem}", where=where, next=_NEXT)


def _as_json(value: object) -> str:
    """A value other than a string, as JSON; only a summary if it is long."""
    if value is None or isinstance(value, bool):
        return str({None: "null", True: "true", False: "false"}[value])
    if isinstance(value, Mapping):
        return f"an object of {len(value):,} keys" if value else "{}"
    if isinstance(value, list | tuple):
        is_short = len(value) <= 6 and all(
            isinstance(item, str | int) and len(reprlib.repr(item)) < 40 for item in value
        )
        return json.dumps(list(value)) if is_short else f"a list of {len(value):,}"
    return reprlib.repr(value)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")
