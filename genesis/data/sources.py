"""Sources: which files a source string of the configuration means, in which order and under which names; none is read.

| Source | Files |
|---|---|
| a file | itself, whatever its name |
| a glob: `corpus/**/*.txt` | the files that match, sorted; `**` descends, hidden names need their dot written |
| a folder | every file below it but hidden ones, sorted; links to folders are not followed |
| `stdlib:` | the running Python's standard library: `*.py` without tests, site-packages and idlelib, sorted |

Relative paths start at the working directory. A file that several sources match is read once, at its first place.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from genesis.errors import DataError
from genesis.io.paths import quote

__all__ = ["STDLIB", "SourceFile", "expand"]

STDLIB = "stdlib:"
_NOT_STDLIB = ("site-packages", "dist-packages", "idlelib")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read, how, and how errors and reports name it.

    Attributes:
        optional: the file is left out silently when it holds no usable text; the user did not choose it by name.
    """

    path: Path
    name: str
    format: Literal["text", "jsonl"]
    gzip: bool
    optional: bool = False


def expand(sources: Sequence[str]) -> tuple[SourceFile, ...]:
    """The files that `sources` name, in reading order, each once.

    Raises:
        DataError: a source that matches no file.
    """
    files: dict[str, SourceFile] = {}
    for source in sources:
        found = _stdlib() if source == STDLIB else [_source_file(path) for path in _paths(source)]
        if not found:
            raise _nothing(source)
        for file in found:
            files.setdefault(os.path.realpath(file.path), file)
    return tuple(files.values())


def _paths(source: str) -> list[str]:
    # A file whose name happens to hold `[` or `*` is meant literally.
    if os.path.isdir(source):
        return sorted(_below(source))
    if os.path.lexists(source):
        return [source]
    return sorted(path for path in glob.glob(source, recursive=True) if not os.path.isdir(path))


def _below(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(parent, name) for name in names if not name.startswith("."))


def _source_file(path: str) -> SourceFile:
    lower = path.lower()
    gzip = lower.endswith(".gz")
    jsonl = lower.removesuffix(".gz").endswith((".jsonl", ".ndjson"))
    return SourceFile(Path(path), path, "jsonl" if jsonl else "text", gzip)


def _stdlib() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not _is_left_out(name)]
        found += [Path(parent, name) for name in names if name.endswith(".py") and not _is_left_out(name)]
    named = sorted((path.relative_to(root).as_posix(), path) for path in found)
    return [SourceFile(path, STDLIB + name, "text", gzip=False, optional=True) for name, path in named]


def _is_left_out(name: str) -> bool:
    return name.startswith("test") or name in _NOT_STDLIB


def _nothing(source: str) -> DataError:
    if source.startswith(STDLIB):
        where = sysconfig.get_path("stdlib") if source == STDLIB else ""
        what = f"the source {quote(source)} gives no files"
        next = f"write `{STDLIB}` alone, and run a Python that has its sources as files"
        return DataError(what, where=where, next=next)
    if "://" in source:
        return DataError(f"the source {quote(source)} is an address, not a file", next="download it and name the file")
    tried = "a glob" if glob.has_magic(source) else "a file, a folder and a glob"
    what = f"the source {quote(source, 400)} matches no file; tried as {tried} from {quote(os.getcwd(), 400)}"
    return DataError(what, next="check the path; relative paths start at the working directory")
