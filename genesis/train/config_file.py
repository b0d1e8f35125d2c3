"""Reads a `Config` from a YAML file and overrides. One error reports all mistakes, with line and remedy.

`config` defines the schema and `strict_yaml` reads YAML. A run records its overrides, so that a resume need not repeat
them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from genesis.errors import ConfigError, UsageError, escape
from genesis.files.boundary import boundary
from genesis.files.paths import exists, is_folder, open_regular
from genesis.train.config import RESUME, Config, section_class
from genesis.train.config_help import Problem, explain, show
from genesis.train.strict_yaml import MAX_BYTES, MAX_DEPTH, Document, KeyPath, emit, parse, parse_value, spell

RESOLVED = "config.resolved.yaml"
MAX_SHOWN = 10
MAX_KEYS_SHOWN = 6
MAX_KEY_CHARS = 1000  # YAML allows 1,024 in a plain key


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in a file, with `section.key=value` overrides applied in order.

    Relative paths inside are relative to the working directory, and `~` is the home folder. Environment variables are
    never expanded.

    Raises:
        ConfigError: the file cannot be read, or file or overrides are invalid; it lists all problems.
        UsageError: an override has no `=` or no key.
    """
    return parse_config(read_source(path), escape(path), overrides)


def read_source(path: str | Path) -> bytes:
    """Return the bytes of a configuration file, at most one more than the parser allows.

    Raises:
        ConfigError: the file cannot be read or is not a regular file. A FIFO is refused at once.
    """
    with boundary(ConfigError, "reading the configuration", path):
        if is_folder(path) and exists(recorded := Path(path) / RESOLVED):
            raise ConfigError(
                f"{escape(path)} is the folder of a run", next=f"use its configuration, {escape(recorded)}"
            )
        with open(open_regular(path, ConfigError), "rb") as file:
            return file.read(MAX_BYTES + 1)


def parse_config(source: str | bytes, name: str, overrides: Sequence[str] = ()) -> Config:
    """Like `load_config`, from text; errors use `name` as the file's name."""
    document = parse(source, name)
    for section, field in Config.model_fields.items():
        # A section with only comments is an empty section, unless it may be null.
        if section in document.data and document.data[section] is None and field.default is not None:
            document.data[section] = {}
    _spell_out(document)
    for override in overrides:
        apply_override(document, override)
        _spell_out(document)
    try:
        return Config.model_validate(document.data)
    except ValidationError as error:
        raise _as_config_error(document, explain(error)) from None


def _spell_out(document: Document) -> None:
    """Expand a bare `objective: NAME` into a section, so that overrides can set its keys."""
    if isinstance(name := document.data.get("objective"), str):
        document.data["objective"] = {"name": name}


def apply_override(document: Document, override: str) -> None:
    """Set the value that `section.key=value` names; create missing mappings.

    Raises:
        UsageError: it has no `=` or no key.
        ConfigError: the value is malformed, or a parent of the key holds a value.
    """
    key, equals, text = override.partition("=")
    shown = escape(override if len(override) <= 100 else override[:97] + "...")
    path: KeyPath = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise UsageError(
            f"'{shown}' is not an override",
            where="command line",
            next="write section.key=value, such as train.steps=100",
        )
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"the key has {len(path)} parts", where=f"override: {shown}", next="write section.key=value")
    value = parse_value(text, f"override: {shown}")
    parent = document.data
    for length, part in enumerate(path[:-1], start=1):
        child = parent.get(str(part))
        if child is None:
            child = parent[str(part)] = {}
            document.overrides[path[:length]] = shown
        if not isinstance(child, dict):
            what = f"{spell(path[:length])} is not a section: it holds a value"
            raise ConfigError(what, where=f"override: {shown}", next=f"replace it: {spell(path[:length])}=...")
        parent = child
    parent[str(path[-1])] = value
    document.overrides[path] = shown


def _as_config_error(document: Document, problems: Sequence[Problem]) -> ConfigError:
    """Return one error for all problems: the first one in full, the others in short."""

    def line_and_column(problem: Problem) -> tuple[int, int]:
        mark = document.keys.get(problem.path) or document.keys.get(problem.path[:-1])
        return (mark.line, mark.column) if mark else (MAX_BYTES, 0)

    first, *others = sorted(problems, key=line_and_column)
    next = first.next
    for other in others[: MAX_SHOWN - 1]:
        next += f"\nalso: {document.where(other.path, key=other.at_key)}: {other.what}; {other.next}"
    if len(others) >= MAX_SHOWN:
        next += f"\nand {len(others) - MAX_SHOWN + 1} more"
    return ConfigError(first.what, where=document.where(first.path, key=first.at_key), next=next)


def check_reads_back(config: Config) -> None:
    """Refuse a configuration that could not be read back from `config.resolved.yaml` at a resume.

    Raises:
        ConfigError: with the key of the unreadable value, and the reason.
    """
    whole, reason = config.model_dump(), "it reads back as another value"
    try:
        if _is_identical(parse_config(config.resolved_yaml(), RESOLVED).model_dump(), whole):
            return
    except ConfigError as error:
        reason = error.what
    except (TypeError, ValueError, RecursionError) as error:  # only a program can pass such values
        reason = escape(error)
    path, reason = _first_unreadable(whole, reason)
    raise ConfigError(
        f"{RESOLVED} could not be read back, so this run could not be resumed: {reason}",
        where=spell(path[:MAX_KEYS_SHOWN]) or RESOLVED,
        next="change this setting",
    )


def _first_unreadable(value: Any, reason: str) -> tuple[KeyPath, str]:
    """Return path and reason of the innermost unreadable value; if only the size is at fault, of its largest part."""
    path: KeyPath = ()
    while len(path) <= MAX_DEPTH:
        parts: list[tuple[str | int, Any]] = list(enumerate(value)) if isinstance(value, list | tuple) else []
        if isinstance(value, Mapping):
            parts = [(key, item) for key, item in value.items() if isinstance(key, str)]
        found = _unreadable_part(parts, path) if parts else None
        if found is None:
            sizes = [len(emit({"": item})) for _, item in parts]
            found = next((parts[i] for i, size in enumerate(sizes) if 2 * size > sum(sizes)), None)
        if found is None:
            break
        path, value = (*path, found[0]), found[1]
        reason = _unreadable(value, path) or reason
    return path, reason


def _unreadable_part(parts: list[tuple[str | int, Any]], path: KeyPath) -> tuple[str | int, Any] | None:
    """Return the first part that is unreadable by itself, found by bisection."""
    group = [item for _, item in parts] if isinstance(parts[0][0], int) else dict(parts)
    if _unreadable(group, path) is None:
        return None
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return _unreadable_part(parts[:middle], path) or _unreadable_part(parts[middle:], path)


def _unreadable(value: Any, path: KeyPath = ()) -> str | None:
    """Return why `value` at `path` would not be read back unchanged, or None if it would."""
    try:
        for part in reversed(path):
            if isinstance(part, str) and len(emit({part: None})) > MAX_KEY_CHARS:
                return f"a key has {len(part):,} characters"
            value = [value] if isinstance(part, int) else {part: value}
        return None if _is_identical(parse(emit(value), RESOLVED).data, value) else "it reads back as another value"
    except ConfigError as error:
        return error.what
    except (TypeError, ValueError, RecursionError) as error:
        return escape(error)


def _is_identical(read: Any, written: Any) -> bool:
    """Whether both are equal to the last bit and in the same order; a tuple is written as a list."""
    if isinstance(written, Mapping):
        return list(read) == list(written) and all(_is_identical(read[key], written[key]) for key in written)
    if isinstance(written, list | tuple):
        return len(read) == len(written) and all(map(_is_identical, read, written))
    return type(read) is type(written) and repr(read) == repr(written)


@dataclass(frozen=True)
class Change:
    """A setting that differs between two configurations."""

    key: str
    old: Any
    new: Any
    allowed: bool

    def __str__(self) -> str:
        return f"{escape(self.key)}: {show(self.old)} -> {show(self.new)}"


def changes(old: Config, new: Config) -> list[Change]:
    """Return the settings in which `new` differs from `old`; `allowed` says whether a resumed run may change it."""
    found = []
    for (key, before), (_, after) in zip(old.settings(), new.settings(), strict=True):
        section, name = key.split(".")
        schema = section_class(section)
        marks = schema.model_config.get("json_schema_extra"), schema.model_fields[name].json_schema_extra
        # The base of adapters may move; its fingerprint is checked separately.
        is_moved = key == "model.path" and None not in (old.lora, new.lora, before, after)
        found += [Change(key + rest, a, b, is_moved or RESUME in marks) for rest, a, b in _differences(before, after)]
    return found


def check_resume(old: Config, new: Config, where: str = "") -> list[Change]:
    """Return the settings that differ, or refuse to resume `old` as `new` if one lacks `x-resume: may change`.

    Raises:
        ConfigError: with each refused setting, its old and its new value.
    """
    found = changes(old, new)
    refused = [change for change in found if not change.allowed]
    if not refused:
        return found
    shown = "\n".join(str(change) for change in refused[:MAX_SHOWN])
    if len(refused) > MAX_SHOWN:
        shown += f"\nand {len(refused) - MAX_SHOWN} more"
    next = "undo the changes, or start a new run with another train.output_dir"
    raise ConfigError(f"the configuration differs from the run to resume:\n{shown}", where=where, next=next)


def _differences(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = dict.fromkeys((*old, *new))
        return [row for key in keys for row in _differences(old.get(key), new.get(key), f"{path}.{key}")]
    # 1 and 1.0 are equal settings, True and 1 are not. A program's tuple was recorded as a list.
    old, new = (list(value) if isinstance(value, tuple) else value for value in (old, new))
    same = old == new and isinstance(old, bool) == isinstance(new, bool)
    return [] if same else [(path, old, new)]


# --- Overrides of a run and its record --------------------------------------------------------------------------------


OUTPUT_DIR = "train.output_dir"
LENGTHS = ("train.steps", "train.epochs")  # a run has one of them
COMMENT = "# Set on the command line: what was typed, and what the configuration file had there.\n"


@dataclass(frozen=True)
class Override:
    """The value of a setting on the command line.

    Attributes:
        text: the typed value.
        file: `[value]` from the configuration file, `[]` if it has none; None if unknown.
        is_recorded: whether it comes from the run's record instead of this command line.
    """

    text: str
    file: list[Any] | None
    is_recorded: bool = False


Overrides = Mapping[str, Override]


def combined(
    source: str | bytes, name: str, typed: Sequence[str], recorded: Overrides, *, is_record: bool = False
) -> dict[str, Override]:
    """Return the overrides that apply: recorded ones whose setting is unchanged in the file, then the typed ones.

    Args:
        is_record: whether the source is the run's own record, which does not contain the file's values.
    """
    data, result = parse(source, name).data, dict[str, Override]()
    # A recorded override applies while the file has the same value.
    for key, override in recorded.items():
        file = override.file if is_record else _value_at(data, key)
        if override.file in (None, file):
            result[key] = replace(override, file=file, is_recorded=True)
    # A typed override replaces recorded ones of the same setting and of its parts.
    for word in typed:
        setting, _, text = word.partition("=")
        key = ".".join(part.strip() for part in setting.split("."))
        before = result.pop(key, None)  # the latest one comes last
        known = None if before is None else before.file
        result = {each: kept for each, kept in result.items() if not each.startswith(f"{key}.")}
        result[key] = Override(text, known if is_record else _value_at(data, key))
    # A new length of the run replaces the recorded one.
    for key, other in (LENGTHS, LENGTHS[::-1]):
        now, before = result.get(key), result.get(other)
        is_new = key in recorded and _value_at(data, key) if now is None else not now.is_recorded and now.text != "null"
        if is_new and before is not None and before.is_recorded and before.text != "null":
            del result[other]
    return result


def _value_at(data: Any, key: str) -> list[Any]:
    """Return `[value]` for the value at `key`, or `[]` if it has none."""
    for part in key.split("."):
        if not isinstance(data, dict) or part not in data:
            return []
        data = data[part]
    return [data]


def recorded_settings(overrides: Overrides) -> str | None:
    """Return a line that lists the recorded overrides, or None without any."""
    kept = [
        f"{key}={override.text}" + (f" (the file: {show(override.file[0])})" if override.file else "")
        for key, override in overrides.items()
        if override.is_recorded
    ]
    return f"continuing with the recorded settings of the run: {escape(', '.join(kept))}" if kept else None


def output_dir(source: str | bytes, name: str, typed: Sequence[str]) -> str | None:
    """Return the folder that a configuration names for its run, even if other settings are missing."""
    document = parse(source, name)
    for word in typed:
        apply_override(document, word)
    found = _value_at(document.data, OUTPUT_DIR)
    return os.path.expanduser(found[0]) if found and isinstance(found[0], str) else None


def with_overrides(record: str, overrides: Overrides) -> str:
    """Append the overrides to a run's record as comments, unless the reader could not read them back."""
    rows = {
        key: override.text if override.file is None else [override.text, *override.file]
        for key, override in overrides.items()
        if key != OUTPUT_DIR  # it locates the record
    }
    text = record + COMMENT + "".join(f"# {line}\n" for line in emit(rows).splitlines())
    with suppress(ConfigError):
        if rows and len(text.encode()) <= MAX_BYTES and read_overrides(text, ""):
            return text
    return record


def read_overrides(record: str, name: str) -> dict[str, Override]:
    """Return the overrides in a run's record; empty for an older version's.

    Raises:
        ConfigError: the comment was edited and is malformed.
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
