"""Sources on the hub, as `hf:ORG/NAME`: which files of a pulled data set are of a configuration and a split.

`configs` in the head of its README decide, else the files' names, in this order: `data/SPLIT-00000-of-00001.parquet`;
a word of the file's name or of a folder's that means a split, as in `test.jsonl` and `dev/a.csv`; else all are `train`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from genesis.data.formats import format_by_name, kind_by_name
from genesis.data.readers.stream import TEXT
from genesis.errors import DataError
from genesis.files.boundary import boundary
from genesis.files.cards import read_head
from genesis.files.hub_cache import DATA_SOURCE, HubName, in_cache, pull_advice, pulled_data
from genesis.files.paths import quote, safe_join

HUB, TRAIN = "hf:", "train"
# Files about the data, which have the endings of data.
_ABOUT = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*")
_WORDS = {
    "train": TRAIN, "training": TRAIN, "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
MAX_PATTERNS = 1000

Splits = Mapping[str, Sequence[str]]  # name -> files


def is_data_file(name: str) -> bool:
    """Whether a file of a data set holds records or texts to learn, by its name."""
    last = name.rpartition("/")[2].lower()
    is_read = format_by_name(last) is not TEXT or last.removesuffix(".gz").endswith(".txt")
    return is_read and kind_by_name(last) is None and last not in _ABOUT and not last.startswith(".")


@boundary(DataError, "reading the data set")
def hub_files(source: str, config: str | None = None, split: str | None = None) -> list[tuple[str, Path]]:
    """Names and paths of the files that `hf:ORG/NAME[/CONFIG][@REVISION][:SPLIT]` names, sorted.

    Args:
        config, split: what stands beside the source; None: what it says itself, else the data set's own
            configuration, and `train`.

    Raises:
        DataError: the data set was not pulled, or has no such configuration or split, with those that it has.
    """
    found = DATA_SOURCE.fullmatch(source)
    if found is None or ".." in source or "--" in found[1]:
        what = f"the source {quote(source)} is not the name of a data set on the hub"
        raise DataError(what, next="write hf:ORG/NAME, with a split as hf:ORG/NAME:test")
    name, config, split = HubName(found[1], found[3], is_data=True), config or found[2], split or found[4] or TRAIN
    folder = in_cache(name)
    if folder is None:
        what = f"the data set {name} is not on this machine, and nothing is downloaded unasked"
        raise DataError(what, where=quote(source), next=pull_advice(name))
    names = [each for each in pulled_data(folder) if is_data_file(each)]
    declared = read_head(folder).get("configs")
    entries = [each for each in declared if isinstance(each, dict)] if isinstance(declared, list) else []
    configs = {str(each.get("config_name", "default")): each for each in entries} or {"default": {}}
    usual = [each for each, entry in configs.items() if entry.get("default") is True or each == "default"]
    config = config or (usual or list(configs))[0] if usual or len(configs) == 1 else config
    if config not in configs:
        has = "several configs" if config is None else f"no config {quote(config)}"
        what = f"the data set {name} has {has}; its configs: {', '.join(map(quote, configs))}"
        raise DataError(what, where=f"config of {quote(source)}", next="name one of them, as hf:ORG/NAME/CONFIG")
    splits = {each: files for each, files in _splits(configs[config], names).items() if files}
    if split not in splits:
        what = f"{name} has no split {quote(split)}; its splits: {', '.join(map(quote, splits)) or 'none'}"
        raise DataError(what, where=f"split of {quote(source)}", next="name one of them, as hf:ORG/NAME:SPLIT")
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
    """Whether a path in parts has a pattern, in which `**` stands for any number of folders."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return _fits(name, pattern[1:]) or (bool(name) and _fits(name[1:], pattern))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _fits(name[1:], pattern[1:])


def _by_names(names: Sequence[str]) -> Splits:
    """The files by the splits that their names say; of each split those of its most frequent format, as data are often
    there both as JSONL and as Parquet.
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
    """The split that a word of a file's name means, or one of the folders that it is in, the innermost first."""
    words = (word for part in reversed(name.lower().split("/")) for word in re.split(r"[-._ 0-9]+", part))
    return next((_WORDS[word] for word in words if word in _WORDS), None)
