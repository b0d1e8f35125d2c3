"""Rewords errors for a command: settings of a training run are replaced with the command's own options."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from genesis.errors import GenesisError, OutOfMemoryError
from genesis.train.config import setting_names

# Not inside a path or a longer name; `_settings` decides whether it is a setting.
_SETTING = re.compile(r"(?<![\w./-])([a-z]+\.[a-z_]+)(?![\w/-]|\.\w)")
_CLAUSES = re.compile(r"(,? or |; |, )(?![^()]*\))")  # not in parentheses


@contextmanager
def phrased_for(options: Mapping[str, str], *, memory: str) -> Iterator[None]:
    """Within the block, errors name `options` instead of settings; advice about other settings is removed.

    Args:
        options: setting ("train.batch_size") -> the command's option ("--batch-size").
        memory: advice that lowers this command's memory.
    """
    try:
        yield
    except GenesisError as error:
        error.what, error.where = _named(error.what, options), _named(error.where, options)
        error.next = memory if isinstance(error, OutOfMemoryError) else _advice(error.next, options)
        error.args = (" | ".join(part for part in (error.what, error.where, error.next) if part),)
        raise
    except MemoryError as error:
        raise OutOfMemoryError("the host has too little memory for a request", next=memory) from error


@functools.cache
def _settings() -> frozenset[str]:
    return frozenset(setting_names())


def _named(text: str, options: Mapping[str, str]) -> str:
    """Return `text` with options for its settings; a setting without an option loses its section."""

    def option_of(found: re.Match[str]) -> str:
        setting = found[1]
        return options.get(setting, setting.partition(".")[2]) if setting in _settings() else setting

    # Two settings with the same option ("data.train, data.eval") are named once.
    return re.sub(r"(--[\w-]+)(, \1| and \1)+", r"\1", _SETTING.sub(option_of, text))


def _advice(text: str, options: Mapping[str, str]) -> str:
    """Return `text` without clauses about settings that have no option."""
    first, *rest = _CLAUSES.split(text)
    kept = [] if _is_foreign(first, options) else [first]
    for joint, clause in zip(rest[::2], rest[1::2], strict=True):
        if not _is_foreign(clause, options):
            kept += [joint, clause] if kept else [clause]
    return _named("".join(kept), options)


def _is_foreign(clause: str, options: Mapping[str, str]) -> bool:
    return any(name in _settings() and name not in options for name in _SETTING.findall(clause))
