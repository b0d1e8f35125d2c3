"""The overrides of a run: what its command line set, kept in its record, so that they need not be typed at a resume."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from genesis.errors import ConfigError, escape
from genesis.train.config_file import apply_override
from genesis.train.config_help import show
from genesis.train.strict_yaml import MAX_BYTES, emit, parse

OUTPUT_DIR = "train.output_dir"
LENGTHS = ("train.steps", "train.epochs")  # of which a run has one
COMMENT = "# Set on the command line: what was typed, and what the configuration file had there.\n"


@dataclass(frozen=True)
class Override:
    """The value of a setting on the command line.

    Attributes:
        text: as it was typed.
        file: a list of the value in the configuration file, empty where that has none; None: not known.
        is_recorded: it is from the run's record, and was not typed now.
    """

    text: str
    file: list[Any] | None
    is_recorded: bool = False


Overrides = Mapping[str, Override]


def combined(
    source: str | bytes, name: str, typed: Sequence[str], recorded: Overrides, *, is_record: bool = False
) -> dict[str, Override]:
    """The overrides that hold, by setting: those recorded where the file is as it was, then those typed now.

    Args:
        is_record: the source is the run's own record, so it does not say what the configuration file has.
    """
    data, result = parse(source, name).data, dict[str, Override]()
    for key, override in recorded.items():
        file = override.file if is_record else _value_at(data, key)
        if override.file in (None, file):
            result[key] = replace(override, file=file, is_recorded=True)
    for word in typed:
        setting, _, text = word.partition("=")
        key = ".".join(part.strip() for part in setting.split("."))
        before = result.pop(key, None)  # so that the newest comes last
        known = None if before is None else before.file
        result[key] = Override(text, known if is_record else _value_at(data, key))
    for key, other in (LENGTHS, LENGTHS[::-1]):
        now, before = result.get(key), result.get(other)
        is_new = key in recorded and _value_at(data, key) if now is None else not now.is_recorded and now.text != "null"
        if is_new and before is not None and before.is_recorded and before.text != "null":
            del result[other]
    return result


def _value_at(data: Any, key: str) -> list[Any]:
    """A list of the value at `key`, empty where there is none."""
    for part in key.split("."):
        if not isinstance(data, dict) or part not in data:
            return []
        data = data[part]
    return [data]


def recorded_settings(overrides: Overrides) -> str | None:
    """A line about the overrides that come from the record; None where there are none."""
    kept = [
        f"{key}={override.text}" + (f" (the file: {show(override.file[0])})" if override.file else "")
        for key, override in overrides.items()
        if override.is_recorded
    ]
    return f"going on with the settings that the run was given: {escape(', '.join(kept))}" if kept else None


def output_dir(source: str | bytes, name: str, typed: Sequence[str]) -> str | None:
    """The folder that a configuration names for its run, although other settings may be missing."""
    document = parse(source, name)
    for word in typed:
        apply_override(document, word)
    found = _value_at(document.data, OUTPUT_DIR)
    return os.path.expanduser(found[0]) if found and isinstance(found[0], str) else None


def with_overrides(record: str, overrides: Overrides) -> str:
    """A run's record with its overrides below it; without them where the reader would not take them."""
    rows = {
        key: override.text if override.file is None else [override.text, *override.file]
        for key, override in overrides.items()
        if key != OUTPUT_DIR  # by which the record was found
    }
    text = record + COMMENT + "".join(f"# {line}\n" for line in emit(rows).splitlines())
    with suppress(ConfigError):
        if rows and len(text.encode()) <= MAX_BYTES and read_overrides(text, ""):
            return text
    return record


def read_overrides(record: str, name: str) -> dict[str, Override]:
    """The overrides in a run's record; none in that of an older version.

    Raises:
        ConfigError: they were changed to something else.
    """
    above, comment, below = record.partition(COMMENT)
    lines = "\n".join(line.removeprefix("# ") for line in below.splitlines())
    result = {}
    for key, row in parse("\n" * (above + comment).count("\n") + lines, name).data.items():
        text, *file = row if isinstance(row, list) and row else [row]
        if not isinstance(text, str) or len(file) > 1:
            next = "write [what was typed, what the file had], or remove the line and type the override again"
            raise ConfigError(f"the comment about {key} cannot be read", where=name, next=next)
        result[key] = Override(text, file if isinstance(row, list) else None)
    return result
