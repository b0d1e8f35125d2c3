"""The output folder of a run: checks that it belongs to Genesis, locks it, and restores it when a run is refused.

A run is refused when any error ends it before its first step; a signal does not count.
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

# Continue from the newest checkpoint: never, always, or if there is a run.
Resume = bool | Literal["allow"]

_WEIGHTS = re.compile(r"(adapter_)?model.*\.safetensors")
# Files written only at the end of a run (and a PNG of the picture, which older versions wrote).
_AT_THE_END = {"config.json", INDEX_NAME, PICTURE_NAME, "loss.png", ADAPTER_CONFIG, BASE_NAME, TRAINER, *SIDE_FILES}
_MAX_NAMES = 5


class RunFolder:
    """The output folder of a run, with its record.

    Args:
        overrides: settings from the command line, for the record.

    Raises:
        ConfigError: the record could not be read back, or the cache overlaps with the run's own files.
    """

    def __init__(self, config: Config, overrides: Overrides | None = None) -> None:
        check_reads_back(config)
        _check_cache(config)
        self._config, self.overrides = config, overrides or {}
        self.path = Path(os.path.abspath(config.train.output_dir))
        cache = Path(os.path.abspath(config.data.cache_dir or self.path / "cache"))
        inside = cache.is_relative_to(self.path) and cache != self.path
        # The files that a start writes; only these are ever removed.
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
        """Lock the folder within the block; an error before `keep` restores it.

        Args:
            is_main: False for a rank that only reads the folder and leaves the rest to rank 0.

        Raises:
            ConfigError: it holds something other than a Genesis run. BusyError: another run uses it.
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
        """Write the record if there is none yet; it identifies the folder as a run's."""
        if self._is_held and not os.path.lexists(self.path / RESOLVED):
            self._write_record()

    def keep(self) -> None:
        """Write the record and start the run: from now on an error leaves all files in place."""
        if self._is_held:
            self._write_record()
        self._kept = True

    def _write_record(self) -> None:
        path = self.path / RESOLVED
        if RESOLVED in self._names and self._record is None:
            self._record = read_limited(path, MAX_BYTES)
        write_file(path, with_overrides(self._config.resolved_yaml(), self.overrides).encode())

    def check_previous(self, config: Config, resume: Resume, resume_from: str | None) -> list[Change]:
        """Check that the run may start or resume here, and return the settings that differ from the previous run's.

        Args:
            config: the settled configuration, for the record.

        Raises:
            ConfigError: it would overwrite a run, resume a missing one, or resume one as a different run.
        """
        if not self._is_held:
            return []
        self._config = config
        names = os.listdir(self.path)
        saved = any(name.startswith(("checkpoint-", ".old-checkpoint-")) for name in names)
        final = any(_WEIGHTS.fullmatch(name) for name in names)
        asked = bool(resume) or resume_from is not None
        # Never overwrite a run.
        if (saved or final) and not asked:
            raise ConfigError(
                f"{escape(self.path)} holds a run",
                where="train.output_dir",
                next="continue it with --resume, or name another train.output_dir",
            )
        # A run to resume needs a checkpoint, or at least a record.
        if not saved and (final or resume_from is not None or (resume is True and RESOLVED not in names)):
            found = "only the final model of a run, without a checkpoint" if final else "no run"
            raise ConfigError(
                f"there is nothing to resume: {escape(self.path)} holds {found}",
                where="--resume" if resume_from is None else "--resume-from",
                next="name another train.output_dir"
                if final
                else "start it without --resume; --resume=allow resumes a run if there is one, and else starts one",
            )
        # Resume only with compatible settings.
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
    """Refuse a folder with files that no Genesis run wrote; such a folder is never written to.

    Raises:
        ConfigError: it names the files. DiskError: the folder cannot be listed.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"{escape(output)} is not a folder", where="train.output_dir", next="name another folder")
    try:
        names = set(os.listdir(output))
    except OSError as error:
        raise disk_error(error, "list", output) from error
    # A run that was killed before it wrote its configuration leaves its lock, and perhaps a partial file.
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
    """Refuse files that a run cannot have written before its first checkpoint, and a foreign metrics file."""
    taken = names & _AT_THE_END
    if taken:
        raise _not_ours(output, f"{_listed(taken)}, which a run writes at its end, but no checkpoint")
    if FILE_NAME in names:
        try:
            check_metrics(output / FILE_NAME)
        except (DataError, DiskError) as error:
            raise _not_ours(output, f"its {FILE_NAME} is not a run's: {error.what}") from None


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - _MAX_NAMES} more" if len(shown) > _MAX_NAMES else ""
    return ", ".join(escape(name) for name in shown[:_MAX_NAMES]) + more


def _not_ours(output: Path, found: str) -> ConfigError:
    return ConfigError(
        f"{escape(output)} holds files that are not a Genesis run's: {found}",
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
    """Return the command-line settings of the run in `output`, or None without a run.

    Raises:
        ConfigError: the folder is not a run's, or its record cannot be read.
    """
    path = Path(os.path.abspath(output))
    check_is_ours(path)
    if not os.path.lexists(path / RESOLVED):
        return None
    return read_overrides(_record_bytes(path).decode(), escape(path / RESOLVED))


def _check_cache(config: Config) -> None:
    """Refuse a cache that overlaps with the run's own files, which the run moves and removes."""
    if config.data.cache_dir is None:
        return
    cache, output = (Path(os.path.realpath(p)) for p in (config.data.cache_dir, config.train.output_dir))
    if not cache.is_relative_to(output):
        return
    first = next(iter(cache.relative_to(output).parts), "")
    if not first or first.startswith((".", "checkpoint-", "abandoned-")) or first in ("tensorboard", "wandb"):
        raise ConfigError(
            f"data.cache_dir {escape(config.data.cache_dir)} overlaps with the run's own files",
            where="data.cache_dir",
            next="remove it to use `cache` in train.output_dir, or name a separate folder",
        )
