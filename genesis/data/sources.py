"""Sources: which files a source string of the configuration means, in which order and under which names; none is read.

| Source | Files |
|---|---|
| a file | itself; an error if its name says that it is no text (`genesis.data.formats`) |
| a glob: `corpus/**/*.txt` | the files that match, sorted; `**` descends, hidden names need their dot written |
| a folder | every file below it but hidden ones, sorted; links to folders are not followed |
| `stdlib:` | the running Python's standard library: `*.py` without tests, site-packages and idlelib, sorted |
| `example:chats` | the chats that ship with Genesis, about its settings |
| `hf:ORG/NAME` | the files of a split of a data set that was pulled from the hub (`genesis.data.hub_source`) |

Relative paths start at the working directory, `~` is the home folder. A file that several sources match is read once,
at its first position. Of globs and folders, files that are no text by their names are left out and counted.

A source may have a weight, how often its documents are seen in an epoch, and names of fields of its own; a file has
those of the last source that matches it.
"""

from __future__ import annotations

import glob
import itertools
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Protocol

from genesis.data.formats import format_by_name, kind_by_name, way_out
from genesis.data.hub_source import HUB, hub_files
from genesis.data.readers.stream import TEXT, DataFile
from genesis.data.record_formats import FieldNames
from genesis.errors import DataError, escape
from genesis.files.boundary import boundary
from genesis.files.paths import exists, is_folder, quote

STDLIB, CHATS = "stdlib:", "example:chats"
_NOT_STDLIB = ("site-packages", "dist-packages", "idlelib")


class WeightedSource(Protocol):
    """A source with settings of its own; one that is a string weighs 1.

    Attributes:
        path: a file, a folder, a glob, `stdlib:`, `example:chats` or `hf:ORG/NAME`.
        weight: above 0: how often its documents are seen in an epoch.
        config, split: of a data set of the hub.
    """

    path: str
    weight: float
    config: str | None
    split: str | None

    @property
    def fields(self) -> FieldNames | None:
        """The names that fields of a record have in it; None: those of the whole data."""


@dataclass(frozen=True, slots=True)
class SourceFile(DataFile):
    """A file to read as the sources name it.

    Attributes:
        optional: the file is left out silently when it holds no usable text; the user did not choose it by name.
        named: the user named this file, so that it is an error if it is no text.
        kind: what it is instead of text by its name; None for a file to read.
        weight: how often its documents are seen in an epoch.
        fields: the names of fields in its records; None: those of the whole data.
    """

    optional: bool = False
    named: bool = False
    kind: str | None = None
    weight: float = 1.0
    fields: FieldNames | None = None

    @property
    def label(self) -> str:
        """How reports count the file: `text`, `jsonl.gz`, `parquet`, `png`."""
        return self.kind or self.format.name + ".gz" * self.gzip


def expand(sources: Sequence[str | WeightedSource]) -> tuple[SourceFile, ...]:
    """The files that `sources` name, in reading order, each once; those with a `kind` are not to be read.

    Raises:
        DataError: a source that matches no file, a named file that is no text by its name, or a folder, or one in it,
            that cannot be listed.
    """
    files: dict[str, SourceFile] = {}
    for item in sources:
        source, own = (item, None) if isinstance(item, str) else (item.path, item)
        if source.startswith(HUB):
            pulled = hub_files(source) if own is None else hub_files(source, own.config, own.split)
            found = [_source_file(path, name, named=True) for name, path in pulled]
        else:
            shipped = _SHIPPED.get(source)
            found = _files(os.path.expanduser(source)) if shipped is None else shipped()
        if not found:
            raise _nothing(source)
        for file in found:
            if file.named and file.kind is not None:
                raise not_text(file, file.kind)
            key = os.path.realpath(file.path)
            known = files.get(key, file)
            fields, weight = (own.fields, own.weight) if own else (None, 1.0)
            files[key] = replace(known, named=file.named or known.named, weight=weight, fields=fields)
    return tuple(files.values())


def not_text(file: SourceFile, kind: str) -> DataError:
    """The error of a named file that is of `kind`."""
    by_name = "" if file.kind is None else ", by its name"
    what = f"the file is no text: {'binary data' if kind == 'binary' else kind}{by_name}"
    return DataError(what, where=escape(file.name), next=way_out(kind))


def _files(source: str) -> list[SourceFile]:
    # A file whose name happens to hold `[` or `*` is meant literally.
    with boundary(DataError, "looking for the data", source):
        if is_folder(source):
            return [_source_file(path) for path in sorted(_below(source))]
        if exists(source):
            return [_source_file(source, named=True)]
        _check_readable(source)
        found = sorted(path for path in glob.glob(source, recursive=True) if not is_folder(path))
        return [_source_file(path) for path in found]


def _check_readable(pattern: str) -> None:
    """List the folders that a glob looks into; `glob` itself passes over those that it cannot read. Raises: OSError."""
    parts = Path(pattern).parts
    plain = list(itertools.takewhile(lambda part: not glob.has_magic(part), parts[:-1]))
    root, levels = Path(*plain), len(parts) - len(plain)
    for parent, folders, _ in os.walk(root if plain else ".", onerror=_raise):
        depth = len(Path(parent).relative_to(root).parts)
        folders[:] = [name for name in folders if not name.startswith(".")]
        if "**" not in parts and depth + 1 >= levels:
            folders.clear()


def _raise(error: OSError) -> None:
    # A folder that does not exist holds nothing; one that cannot be read may hold anything.
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _below(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(parent, name) for name in names if not name.startswith("."))


def _source_file(path: str | Path, name: str = "", *, named: bool = False) -> SourceFile:
    name = name or str(path)
    gzip = name.lower().endswith(".gz")
    return SourceFile(Path(path), name, format_by_name(name), gzip, named=named, kind=kind_by_name(name))


def _stdlib() -> list[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for parent, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not _is_left_out(name)]
        found += [Path(parent, name) for name in names if name.endswith(".py") and not _is_left_out(name)]
    named = sorted((path.relative_to(root).as_posix(), path) for path in found)
    return [SourceFile(path, STDLIB + name, TEXT, gzip=False, optional=True) for name, path in named]


def _is_left_out(name: str) -> bool:
    return name.startswith("test") or name in _NOT_STDLIB


def _chats() -> list[SourceFile]:
    path = Path(str(resources.files("genesis_configs") / "chats.jsonl"))
    return [SourceFile(path, CHATS, format_by_name(path.name), gzip=False, named=True)]


_SHIPPED = {STDLIB: _stdlib, CHATS: _chats}


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
