"""Sources: the files that a source string of the configuration names, their order and their names. It reads no file.

| Source | Files |
|---|---|
| a file | itself; an error if its name implies that it is not text (`genesis.data.readers`) |
| a glob: `corpus/**/*.txt` | the files that match, sorted; `**` descends, and only a written dot matches hidden names |
| a folder | every file below it except for hidden ones, sorted; links to folders are not followed |
| `stdlib:` | the running Python's standard library: `*.py` without tests, site-packages and idlelib, sorted |
| `example:chats` | the chats that ship with Genesis, about its settings |
| `hf:ORG/NAME` | the files of a split of a data set that was pulled from the hub |

Relative paths start at the working directory, and `~` is the home folder. A file that several sources match is read
once, at its first position. In globs and folders, files whose names imply that they are not text are skipped and
counted.

A source may have a weight, which is how often an epoch contains its documents, and its own names of fields. A file has
the weight and names of the last source that matches it.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from genesis.data.readers import format_by_name, kind_by_name, way_out
from genesis.data.readers.stream import TEXT, DataFile
from genesis.data.record_formats import FieldNames
from genesis.errors import DataError, escape
from genesis.files.boundary import boundary
from genesis.files.hf import read_head
from genesis.files.hub import DATA_SOURCE, HubName, in_cache, pull_advice, pulled_data
from genesis.files.paths import exists, is_folder, quote, safe_join

STDLIB, CHATS = "stdlib:", "example:chats"
_NOT_STDLIB = ("site-packages", "dist-packages", "idlelib")


class WeightedSource(Protocol):
    """A source with its own settings; a source that is a string has weight 1.

    Attributes:
        path: a file, a folder, a glob, `stdlib:`, `example:chats` or `hf:ORG/NAME`.
        weight: how often an epoch contains its documents, above 0.
        config, split: the part to read of a data set of the hub.
    """

    path: str
    weight: float
    config: str | None
    split: str | None

    @property
    def fields(self) -> FieldNames | None:
        """Names of the fields in its records; None: the names for all data."""


@dataclass(frozen=True, slots=True)
class SourceFile(DataFile):
    """A file of the sources.

    Attributes:
        optional: whether a file without usable text is skipped silently, because the user did not name it.
        named: whether the user named this file, so that it is an error if it is not text.
        kind: the kind that its name implies, if that is not text; None for a file to read.
        weight: how often an epoch contains its documents.
        fields: names of the fields in its records; None: the names for all data.
    """

    optional: bool = False
    named: bool = False
    kind: str | None = None
    weight: float = 1.0
    fields: FieldNames | None = None

    @property
    def label(self) -> str:
        """Name of the file's kind in reports: `text`, `jsonl.gz`, `parquet`, `png`."""
        return self.kind or self.format.name + ".gz" * self.gzip


def expand(sources: Sequence[str | WeightedSource]) -> tuple[SourceFile, ...]:
    """Return the files that `sources` name, in reading order and without duplicates; those with a `kind` are not read.
    Raises: DataError: a source matches no file, a named file is not text by its name, or a folder cannot be listed.
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
            raise _no_files(source)
        for file in found:
            if file.named and file.kind is not None:
                raise not_text(file, file.kind)
            key = os.path.realpath(file.path)
            known = files.get(key, file)
            fields, weight = (own.fields, own.weight) if own else (None, 1.0)
            files[key] = replace(known, named=file.named or known.named, weight=weight, fields=fields)
    return tuple(files.values())


def not_text(file: SourceFile, kind: str) -> DataError:
    """Return the error of a named file of this `kind`."""
    by_name = "" if file.kind is None else ", by its name"
    what = f"the file is not text: {'binary data' if kind == 'binary' else kind}{by_name}"
    return DataError(what, where=escape(file.name), next=way_out(kind))


def _files(source: str) -> list[SourceFile]:
    # An existing file is taken literally, even if its name contains `[` or `*`.
    with boundary(DataError, "looking for the data", source):
        if is_folder(source):
            return [_source_file(path) for path in sorted(_files_below(source))]
        if exists(source):
            return [_source_file(source, named=True)]
        _check_readable(source)
        found = sorted(path for path in glob.glob(source, recursive=True) if not is_folder(path))
        return [_source_file(path) for path in found]


def _check_readable(pattern: str) -> None:
    """List the folders that a glob looks into; `glob` itself skips unreadable ones. Raises: OSError."""
    parts = Path(pattern).parts
    plain = list(itertools.takewhile(lambda part: not glob.has_magic(part), parts[:-1]))
    root, levels = Path(*plain), len(parts) - len(plain)
    for parent, folders, _ in os.walk(root if plain else ".", onerror=_raise):
        depth = len(Path(parent).relative_to(root).parts)
        folders[:] = [name for name in folders if not name.startswith(".")]
        if "**" not in parts and depth + 1 >= levels:
            folders.clear()


def _raise(error: OSError) -> None:
    # A missing folder holds nothing; an unreadable one may hold anything.
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _files_below(folder: str) -> Iterator[str]:
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
        folders[:] = [name for name in folders if not _is_excluded(name)]
        found += [Path(parent, name) for name in names if name.endswith(".py") and not _is_excluded(name)]
    named = sorted((path.relative_to(root).as_posix(), path) for path in found)
    return [SourceFile(path, STDLIB + name, TEXT, gzip=False, optional=True) for name, path in named]


def _is_excluded(name: str) -> bool:
    return name.startswith("test") or name in _NOT_STDLIB


def _chats() -> list[SourceFile]:
    path = Path(str(resources.files("genesis_configs") / "chats.jsonl"))
    return [SourceFile(path, CHATS, format_by_name(path.name), gzip=False, named=True)]


_SHIPPED = {STDLIB: _stdlib, CHATS: _chats}


def _no_files(source: str) -> DataError:
    if source.startswith(STDLIB):
        where = sysconfig.get_path("stdlib") if source == STDLIB else ""
        what = f"the source {quote(source)} has no files"
        next = f"write `{STDLIB}` alone, and use a Python that has its sources as files"
        return DataError(what, where=where, next=next)
    if "://" in source:
        return DataError(f"the source {quote(source)} is an address, not a file", next="download it and name the file")
    tried = "a glob" if glob.has_magic(source) else "a file, a folder and a glob"
    what = f"the source {quote(source, 400)} matches no file; tried as {tried} from {quote(os.getcwd(), 400)}"
    return DataError(what, next="check the path; relative paths start at the working directory")


# --- Sources on the hub -----------------------------------------------------------------------------------------------
# `configs` in the head of a data set's README define the files of a split. Otherwise the files' names do, in this
# order: `data/SPLIT-00000-of-00001.parquet`; a word in the name of the file or of a folder that means a split, such as
# `test.jsonl` and `dev/a.csv`; else all files belong to `train`.


HUB, TRAIN = "hf:", "train"
# Files that describe the data but have the suffixes of data.
_ABOUT = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*")
_WORDS = {
    "train": TRAIN, "training": TRAIN, "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
MAX_PATTERNS = 1000

Splits = Mapping[str, Sequence[str]]  # name -> files


def is_data_file(name: str) -> bool:
    """Whether a file of a data set holds records or texts to learn, according to its name."""
    last = name.rpartition("/")[2].lower()
    is_read = format_by_name(last) is not TEXT or last.removesuffix(".gz").endswith(".txt")
    return is_read and kind_by_name(last) is None and last not in _ABOUT and not last.startswith(".")


@boundary(DataError, "reading the data set")
def hub_files(source: str, config: str | None = None, split: str | None = None) -> list[tuple[str, Path]]:
    """Return names and paths of the files that `hf:ORG/NAME[/CONFIG][@REVISION][:SPLIT]` names, sorted.

    Args:
        config: overrides CONFIG. None: CONFIG, or else the data set's default configuration.
        split: overrides SPLIT. None: SPLIT, or else `train`.

    Raises:
        DataError: the data set was not pulled, or it has no such configuration or split; the error lists existing ones.
    """
    found = DATA_SOURCE.fullmatch(source)
    if found is None or ".." in source or "--" in found[1]:
        what = f"the source {quote(source)} is not the name of a data set on the hub"
        raise DataError(what, next="write hf:ORG/NAME, with a split as hf:ORG/NAME:test")
    name, config, split = HubName(found[1], found[3], is_data=True), config or found[2], split or found[4] or TRAIN
    folder = in_cache(name)
    if folder is None:
        what = f"the data set {name} is not on this machine, and only genesis pull downloads data"
        raise DataError(what, where=quote(source), next=pull_advice(name))
    # Find the configuration, then the split.
    names = [each for each in pulled_data(folder) if is_data_file(each)]
    declared = read_head(folder).get("configs")
    entries = [each for each in declared if isinstance(each, dict)] if isinstance(declared, list) else []
    configs = {str(each.get("config_name", "default")): each for each in entries} or {"default": {}}
    usual = [each for each, entry in configs.items() if entry.get("default") is True or each == "default"]
    config = config or (usual or list(configs))[0] if usual or len(configs) == 1 else config
    if config not in configs:
        has = "several configs" if config is None else f"no config {quote(config)}"
        what = f"the data set {name} has {has}; its configs: {', '.join(map(quote, configs))}"
        raise DataError(what, where=f"config of {quote(source)}", next="name one of them: hf:ORG/NAME/CONFIG")
    splits = {each: files for each, files in _splits(configs[config], names).items() if files}
    if split not in splits:
        what = f"{name} has no split {quote(split)}; its splits: {', '.join(map(quote, splits)) or 'none'}"
        raise DataError(what, where=f"split of {quote(source)}", next="name one of them: hf:ORG/NAME:SPLIT")
    return [(f"{HUB}{name.id}/{each}", safe_join(folder, each)) for each in sorted(splits[split])]


def _splits(entry: Mapping[str, Any], names: Sequence[str]) -> Splits:
    root, declared = entry.get("data_dir"), entry.get("data_files")
    prefix = f"{root.strip('./')}/" if isinstance(root, str) and root.strip("./") else ""
    if declared is None:
        return _by_names([name for name in names if name.startswith(prefix)])
    if isinstance(declared, list) and any(isinstance(each, dict) for each in declared):
        declared = {str(each.get("split", TRAIN)): each.get("path") for each in declared if isinstance(each, dict)}
    elif not isinstance(declared, dict):
        declared = {TRAIN: declared}
    return {str(split): _matching(prefix, patterns, names) for split, patterns in declared.items()}


def _matching(prefix: str, patterns: Any, names: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for pattern in (patterns if isinstance(patterns, list) else [patterns])[:MAX_PATTERNS]:
        parts = (prefix + str(pattern).removeprefix("./")).split("/")
        found |= dict.fromkeys(name for name in names if _fits(name.split("/"), parts))
    return list(found)


def _fits(name: list[str], pattern: list[str]) -> bool:
    """Whether the parts of a path match a pattern, in which `**` matches any number of folders."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return _fits(name, pattern[1:]) or (bool(name) and _fits(name[1:], pattern))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _fits(name[1:], pattern[1:])


def _by_names(names: Sequence[str]) -> Splits:
    """Return the files by the splits that their names imply. Of each split it keeps the most frequent format, because
    data is often published as both JSONL and Parquet.
    """
    shards = {name: found[1] for name in names if (found := _SHARD.fullmatch(name))}
    worded = {name: split for name in names if (split := _split_word(name))}
    splits: dict[str, list[str]] = {}
    for name, split in (shards or worded or dict.fromkeys(names, TRAIN)).items():
        splits.setdefault(split, []).append(name)
    for split, files in splits.items():
        [(usual, _)] = Counter(map(format_by_name, files)).most_common(1)
        splits[split] = [name for name in files if format_by_name(name) == usual]
    return splits


def _split_word(name: str) -> str | None:
    """Return the split that a word of a file's name implies, or of one of its folders, innermost first."""
    words = (word for part in reversed(name.lower().split("/")) for word in re.split(r"[-._ 0-9]+", part))
    return next((_WORDS[word] for word in words if word in _WORDS), None)
