"""Safe paths: the only code in which a name read from a file becomes a path on this machine.

It decides from the name and from the files as they lie; it is no sandbox against a process that changes them meanwhile.
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
_NEXT = "take the model folder again from a source you trust; Genesis opens only plain files inside it"


def quote(name: object, limit: int = 120) -> str:
    """`name` escaped and cut to `limit` characters, in quotes, as error messages show it."""
    name = os.fspath(name) if isinstance(name, os.PathLike) else name
    text = name if isinstance(name, str) else _as_json(name)
    # Cut before escaping too, which takes several times the text's memory.
    shown = escape(text[: limit + 1])
    return f"'{shown}'" if len(text) <= limit and len(shown) <= limit else f"'{shown[:limit]}…'"


def check_name(name: object, *, where: str = "") -> str:
    """`name` itself if it can only mean a file below the folder it is joined to.

    Allowed are printable names in Unicode's NFKC form, parted by single slashes, at most `MAX_COMPONENTS` deep.

    Raises:
        ModelError: absolute, `..`, drive letters, backslashes, control characters, empty or over-long names.
    """
    problem = _name_problem(name)
    if problem:
        raise ModelError(f"the file name {quote(name)} {problem}", where=where, next=_NEXT)
    assert isinstance(name, str)
    return name


@boundary(ModelError, "looking for a file")
def safe_join(root: str | os.PathLike[str], name: object, *, where: str = "") -> Path:
    """The path of the existing regular file `name` below the folder `root`.

    `root` is the user's own choice and may be a symbolic link; nothing below it may be one. The one exception is the
    Hugging Face cache, whose snapshots are made of links: where `root` is `models--*/snapshots/<40 hex>`, or the same
    of `datasets--*`, the last component may be a link to a regular file directly in the `blobs` folder next to
    `snapshots`, named by 40 or 64 hex digits; the blob's path is returned.

    Raises:
        ModelError: a name that `check_name` refuses, a missing file, a link, a folder, a FIFO, a socket or a device.
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
    """A read-only descriptor of the regular file at `path`; the caller closes it. Never blocks on a FIFO.

    Args:
        kind: the class of the error: what the file is read as.

    Raises:
        GenesisError: of class `kind`: there is no such file, it may not be read, or it is not a regular file.
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
    """Whether something is at `path`, a dangling link too.
    Raises: OSError: it is not known. `os.path.lexists` would say no, and what is there be passed over.
    """
    return _mode_or_none(os.lstat, path) is not None


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is at `path`, or a link leads to one; errors as in `exists`."""
    mode = _mode_or_none(os.stat, path)
    return mode is not None and stat.S_ISDIR(mode)


def list_folder(path: str | os.PathLike[str]) -> list[str]:
    """The names in the folder `path`, sorted; none where it does not exist. Errors as in `exists`."""
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
        return "holds control or unprintable characters"
    if unicodedata.normalize("NFKC", name) != name:
        return "is not in Unicode's NFKC form: it may read as another name elsewhere"
    if "\\" in name or ":" in name:
        return "holds a backslash or a colon: a separator or a drive on other systems"
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
        what = f"the file {quote(name)} cannot be looked at: {error.strerror}"
        raise ModelError(what, where=where, next=advice) from error


def _hub_blob(base: Path, link: Path, name: str, where: str) -> Path:
    """The blob that `link` of a Hugging Face cache snapshot points to; refuses every other link."""
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
        raise _refusal(name, f"leads to {_kind(mode)}, not a regular file", where)
    return target


def _refusal(name: str, problem: str, where: str) -> ModelError:
    return ModelError(f"the file {quote(name)} {problem}", where=where, next=_NEXT)


def _as_json(value: object) -> str:
    """A value that is no text, in JSON's words; only what it is where it is long."""
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
