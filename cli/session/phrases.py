"""Errors of a command in the words of its own options, where what it calls speaks of the settings of a training run."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from genesis.errors import GenesisError, OutOfMemoryError
from genesis.train.config import setting_names

# Not inside a path or a longer name; whether it is a setting of the schema is looked up.
_SETTING = re.compile(r"(?<![\w./-])([a-z]+\.[a-z_]+)(?![\w/-]|\.\w)")
_CLAUSES = re.compile(r"(,? or |; |, )")


@contextmanager
def phrased_for(options: Mapping[str, str], *, memory: str) -> Iterator[None]:
    """Inside the block, errors name `options` instead of settings; advice about any other setting is left out.

    Args:
        options: setting ("train.batch_size") -> what the user typed for it ("--batch-size").
        memory: what lowers the memory of this command.
    """
    try:
        yield
    except GenesisError as error:
        error.what, error.where = _named(error.what, options), _named(error.where, options)
        error.next = memory if isinstance(error, OutOfMemoryError) else _advice(error.next, options)
        error.args = (" | ".join(part for part in (error.what, error.where, error.next) if part),)
        raise
    except MemoryError as error:
        raise OutOfMemoryError("the host has no memory for a request", next=memory) from error


@functools.cache
def _settings() -> frozenset[str]:
    return frozenset(setting_names())


def _named(text: str, options: Mapping[str, str]) -> str:
    """`text` with the options for its settings; one without an option loses its section."""

    def said(found: re.Match[str]) -> str:
        setting = found[1]
        return options.get(setting, setting.partition(".")[2]) if setting in _settings() else setting

    # Two settings that are one option ("data.train, data.eval") are named once.
    return re.sub(r"(--[\w-]+)(, \1| and \1)+", r"\1", _SETTING.sub(said, text))


def _advice(text: str, options: Mapping[str, str]) -> str:
    """`text` without the clauses about settings that have no option."""
    first, *rest = _CLAUSES.split(text)
    kept = [] if _is_foreign(first, options) else [first]
    for joint, clause in zip(rest[::2], rest[1::2], strict=True):
        if not _is_foreign(clause, options):
            kept += [joint, clause] if kept else [clause]
    return _named("".join(kept), options)


def _is_foreign(clause: str, options: Mapping[str, str]) -> bool:
    return any(name in _settings() and name not in options for name in _SETTING.findall(clause))
