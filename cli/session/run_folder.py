"""The output folder of a run: whether it is ours to write to, held against other runs, left as it was by a refused one.

A run is refused when an error ends it before its first step, whatever the error; a signal is no refusal.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from genesis.errors import ConfigError, DataError, DiskError, InterruptedRun, ModelError, escape
from genesis.files.atomic import write_file
from genesis.files.filesystem import DEFAULT, disk_error
from genesis.files.hf import CHECKPOINT, INDEX_NAME, SIDE_FILES
from genesis.files.lock import LOCK_NAME, FolderLock, is_lock_file
from genesis.files.paths import safe_join
from genesis.files.strict_json import read_limited
from genesis.files.trust import check_owner
from genesis.train.checkpoint import TRAINER
from genesis.train.config import Config
from genesis.train.config_file import (
    RESOLVED,
    Change,
    Override,
    Overrides,
    check_reads_back,
    check_resume,
    parse_config,
    read_overrides,
    with_overrides,
)
from genesis.train.metrics import FILE_NAME, SAMPLES_NAME, check_metrics
from genesis.train.report.page import PICTURE_NAME
from genesis.train.strict_yaml import MAX_BYTES
from genesis_models.adapters import ADAPTER_CONFIG, BASE_NAME

# Go on from the newest checkpoint: never, always, or where there is a run.
Resume = bool | Literal["allow"]

_WEIGHTS = re.compile(r"(adapter_)?model.*\.safetensors")
# What only the end of a run writes, or wrote once (the picture as a PNG).
_AT_THE_END = {"config.json", INDEX_NAME, PICTURE_NAME, "loss.png", ADAPTER_CONFIG, BASE_NAME, TRAINER, *SIDE_FILES}
_MAX_NAMES = 5


class RunFolder:
    """The output folder of a run, with its record.

    Args:
        overrides: what the command line set, for the record.

    Raises:
        ConfigError: the record would not be read back, or the cache is where the run's own files are.
    """

    def __init__(self, config: Config, overrides: Overrides | None = None) -> None:
        check_reads_back(config)
        _check_cache(config)
        self._config, self.overrides = config, overrides or {}
        self.path = Path(os.path.abspath(config.train.output_dir))
        cache = Path(os.path.abspath(config.data.cache_dir or self.path / "cache"))
        inside = cache.is_relative_to(self.path) and cache != self.path
        # What a start writes there; nothing else is ever undone.
        self._written = {RESOLVED, FILE_NAME, SAMPLES_NAME, "tensorboard", "wandb"} | (
            {cache.relative_to(self.path).parts[0]} if inside else set()
        )
        self._lock = FolderLock(self.path)
        self._missing: list[Path] = []
        self._names: set[str] = set()
        self._record: bytes | None = None
        self._is_held = self._kept = False

    @contextmanager
    def held(self, is_main: bool = True) -> Iterator[None]:
        """Hold the folder in the block; before `keep`, an error leaves it as it was.

        Args:
            is_main: False for a rank that leaves all this to rank 0, and only reads there.

        Raises:
            ConfigError: it holds something else than a run of ours. BusyError: another run holds it.
            DiskError: it cannot be used.
        """
        if not is_main:
            yield
            return
        check_is_ours(self.path)
        self._missing = [level for level in (self.path, *self.path.parents) if not os.path.lexists(level)]
        try:
            self._lock.acquire()
            self._names = set(os.listdir(self.path))
        except BaseException:
            self._remove_levels()
            raise
        self._is_held, refused = True, False
        try:
            yield
        except Exception as error:
            if refused := not isinstance(error, InterruptedRun) and not self._kept:
                with contextlib.suppress(OSError):
                    self._undo()
            raise
        finally:
            self._lock.release(undo=refused)
            if refused:
                self._remove_levels()

    def begin(self) -> None:
        """Write what the run does where there is no record yet: by it the folder is known as ours."""
        if self._is_held and not os.path.lexists(self.path / RESOLVED):
            self._write_record()

    def keep(self) -> None:
        """The run starts, as its record now says: from now on an error leaves what there is."""
        if self._is_held:
            self._write_record()
        self._kept = True

    def _write_record(self) -> None:
        path = self.path / RESOLVED
        if RESOLVED in self._names and self._record is None:
            self._record = read_limited(path, MAX_BYTES)
        write_file(path, with_overrides(self._config.resolved_yaml(), self.overrides).encode())

    def check_previous(self, config: Config, resume: Resume, resume_from: str | None) -> list[Change]:
        """Refuse to write over a run, to continue none, or to continue one as another; else the settings in which the
        run that goes on differs from what it was.

        Args:
            config: the settled one, for the record.

        Raises:
            ConfigError: with what is there.
        """
        if not self._is_held:
            return []
        self._config = config
        names = os.listdir(self.path)
        saved = any(name.startswith(("checkpoint-", ".old-checkpoint-")) for name in names)
        final = any(_WEIGHTS.fullmatch(name) for name in names)
        asked = bool(resume) or resume_from is not None
        if (saved or final) and not asked:
            raise ConfigError(
                f"{escape(self.path)} holds a run",
                where="train.output_dir",
                next="continue it with --resume, or name another train.output_dir",
            )
        if not saved and (final or resume_from is not None or (resume is True and RESOLVED not in names)):
            found = "only the final model of a run, without a checkpoint" if final else "no run"
            raise ConfigError(
                f"there is nothing to resume: {escape(self.path)} holds {found}",
                where="--resume" if resume_from is None else "--resume-from",
                next="name another train.output_dir"
                if final
                else "start it without --resume; --resume=allow goes on where there is a run, and else starts one",
            )
        if not saved:
            return []
        return check_resume(_read_record(self.path), config, where=escape(self.path / RESOLVED))

    def _undo(self) -> None:
        for name in sorted(set(os.listdir(self.path)) - self._names, key=lambda name: name == RESOLVED):
            path = self.path / name
            if name in self._written and path.is_dir() and not path.is_symlink():
                DEFAULT.rmtree(path)
            elif name in self._written:
                DEFAULT.unlink(path)
        if self._record is not None:
            write_file(self.path / RESOLVED, self._record)

    def _remove_levels(self) -> None:
        for level in self._missing:
            with contextlib.suppress(OSError):
                os.rmdir(level)


def check_is_ours(output: Path) -> None:
    """Refuse a folder with content that no run of ours made; it is never written to.

    Raises:
        ConfigError: with what was found. DiskError: the folder cannot be listed.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"{escape(output)} is not a folder", where="train.output_dir", next="name another folder")
    try:
        names = set(os.listdir(output))
    except OSError as error:
        raise disk_error(error, "list", output) from error
    # A run that was killed before it could write its configuration has left its lock, and perhaps half a file.
    early = {n for n in names if n.startswith(".tmp-update-") or (n == LOCK_NAME and is_lock_file(output / n))}
    if RESOLVED not in names:
        if names - early:
            raise _not_ours(output, _listed(names - early))
        return
    try:
        _read_record(output)
    except (ConfigError, DiskError, ModelError) as error:
        raise _not_ours(output, f"its {RESOLVED} is not the record of a run: {error.what}") from None
    if not any(CHECKPOINT.fullmatch(name) or _WEIGHTS.fullmatch(name) for name in names):
        _check_nothing_to_overwrite(output, names)


def _check_nothing_to_overwrite(output: Path, names: set[str]) -> None:
    """Before its first checkpoint a run has written none of these; and its metrics are rows of metrics."""
    taken = names & _AT_THE_END
    if taken:
        raise _not_ours(output, f"{_listed(taken)}, which a run writes at its end, but no checkpoint")
    if FILE_NAME in names:
        try:
            check_metrics(output / FILE_NAME)
        except (DataError, DiskError) as error:
            raise _not_ours(output, f"its {FILE_NAME} is not that of a run: {error.what}") from None


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - _MAX_NAMES} more" if len(shown) > _MAX_NAMES else ""
    return ", ".join(escape(name) for name in shown[:_MAX_NAMES]) + more


def _not_ours(output: Path, found: str) -> ConfigError:
    return ConfigError(
        f"{escape(output)} holds files of something else than a Genesis run: {found}",
        where="train.output_dir",
        next="name an empty or new folder",
    )


def _read_record(output: Path) -> Config:
    return parse_config(_record_bytes(output), escape(output / RESOLVED))


def _record_bytes(output: Path) -> bytes:
    path = safe_join(output, RESOLVED, where=escape(output))
    check_owner(path, next="name another train.output_dir, or remove the file")
    return read_limited(path, MAX_BYTES)


def recorded_overrides(output: str) -> dict[str, Override] | None:
    """What the command line set of the run in `output`; None where there is no run.

    Raises:
        ConfigError: the folder is not that of a run, or its record cannot be read.
    """
    path = Path(os.path.abspath(output))
    check_is_ours(path)
    if not os.path.lexists(path / RESOLVED):
        return None
    return read_overrides(_record_bytes(path).decode(), escape(path / RESOLVED))


def _check_cache(config: Config) -> None:
    """Refuse a cache where the run's own files are, which the run moves and removes."""
    if config.data.cache_dir is None:
        return
    cache, output = (Path(os.path.realpath(p)) for p in (config.data.cache_dir, config.train.output_dir))
    if not cache.is_relative_to(output):
        return
    first = next(iter(cache.relative_to(output).parts), "")
    if not first or first.startswith((".", "checkpoint-", "abandoned-")) or first in ("tensorboard", "wandb"):
        raise ConfigError(
            f"data.cache_dir {escape(config.data.cache_dir)} is where the run keeps its own files",
            where="data.cache_dir",
            next="leave it out for `cache` in train.output_dir, or name a folder of its own",
        )
