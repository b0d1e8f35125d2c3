"""Checkpoints: folders `checkpoint-<step>` that transformers or PEFT loads and that a run resumes from. No pickle.

A checkpoint is committed atomically (see `genesis.files.atomic`). Older ones are removed only after it is complete.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from genesis import random
from genesis.backend import backend_for
from genesis.dtypes import as_dtype
from genesis.errors import (
    ConfigError,
    DataError,
    DeviceError,
    DiskError,
    GenesisError,
    InterruptedRun,
    ModelError,
    OutOfMemoryError,
    escape,
)
from genesis.files.atomic import (
    AtomicFolder,
    FolderShare,
    FolderWriter,
    Manifest,
    read_manifest,
    remove_folder,
    verify_manifest,
)
from genesis.files.boundary import boundary
from genesis.files.filesystem import DEFAULT, FileSystem, check_room
from genesis.files.hashing import StateHash
from genesis.files.hf import CHECKPOINT, MAX_SHARDS, WeightFolder, read_json, shard_name, write_index
from genesis.files.paths import is_folder, list_folder, safe_join
from genesis.files.safetensors import TensorSource, write_tensors
from genesis.files.strict_json import indented_bytes
from genesis.optim.saving import StoredTensor
from genesis.optim.states import MASTER
from genesis.tensor import Tensor
from genesis.train.optimizer import restore_optimizer
from genesis.train.ranks import SAVING_S, Ranks
from genesis.train.state import Best, Interval, Share, Snapshot, TrainState, platform_changes

BEST = "best"  # value of `--resume-from` for the checkpoint of the best evaluation

OPTIMIZER, TRAINER, RNG, DATA = "optimizer.safetensors", "trainer_state.json", "rng.json", "data_state.json"
OPTIMIZER_FILE = re.compile(r"optimizer(-\d{5}-of-\d{5})?\.safetensors")

WriteModel = Callable[[FolderWriter, Snapshot], None]
ReadMasters = Callable[[Path], Mapping[str, np.ndarray]]


class _Part(NamedTuple):
    """The part of a checkpoint that one rank hashes (`share`) and writes (`tensors` to `file`; None without any)."""

    share: Share
    tensors: list[str]
    file: str | None


NO_PART = _Part(Share([], []), [], None)


class Checkpoints:
    """The checkpoints of one output folder. The caller holds the folder's lock.

    Args:
        output_dir: the run's folder.
        write_model: writes the model's own files (config, weights, tokenizer).
        read_masters: reads the run's own parameters from a checkpoint in float32; the optimizer's file then has no
            masters. None: the folder holds the model's weights unchanged.
        keep: number of checkpoints to keep; None keeps all.
        keep_best: also keep the checkpoint of the best evaluation. Each checkpoint records the best step so far, and
            the newest record is valid: a best checkpoint is committed together with its record.
        warn: called once for each old checkpoint that cannot be removed.
    """

    def __init__(
        self,
        output_dir: Path,
        write_model: WriteModel,
        keep: int | None,
        *,
        keep_best: bool = False,
        read_masters: ReadMasters | None = None,
        fs: FileSystem = DEFAULT,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.output_dir, self.keep, self.keep_best = output_dir, keep, keep_best
        self.write_model, self._read_masters, self.fs, self._warn = write_model, read_masters, fs, warn
        self._stuck: set[int] = set()

    @boundary(ModelError, "listing the checkpoints")
    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in order, also of damaged ones, so that none is skipped silently."""
        return [step for step in self._numbers() if is_folder(self.folder(step))]

    @boundary(ModelError, "listing the checkpoints")
    def _numbers(self) -> list[int]:
        """Return the step numbers in the names of the folder's entries, ascending."""
        return sorted(int(match[1]) for name in list_folder(self.output_dir) if (match := CHECKPOINT.fullmatch(name)))

    def folder(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`."""
        return self.output_dir / f"checkpoint-{step}"

    def save(self, state: TrainState) -> str:
        """Write the checkpoint of the current step, then remove the oldest ones. Returns the state hash.

        All ranks must call it: each writes and hashes a share of the arrays, and rank 0 commits. If another rank does
        not see rank 0's folder, rank 0 writes everything.

        Raises:
            DiskError: the disk is full or fails; the older checkpoints remain intact.
        """
        ranks, hashed, digest = state.ranks, StateHash(), ""
        with ranks.during("saving", SAVING_S):
            with ExitStack() as stack:
                with state.optimizer.gathered_states():
                    snapshot = Snapshot.of(state)
                    folder = stack.enter_context(self._staged(snapshot, self.fs)) if ranks.is_main else None
                    path = Path(ranks.from_main("staged", None if folder is None else str(folder.staged)))
                    parts = self._parts(snapshot, min(ranks.size, MAX_SHARDS) if ranks.all(path.is_dir()) else 1)
                    part = parts[ranks.rank] if ranks.rank < len(parts) else NO_PART
                    own = stack.enter_context(FolderShare(path, self.fs)) if folder is None else folder
                    self._write_part(own, snapshot, part, hashed)
                written = own.records if isinstance(own, FolderShare) else {}
                for records, digests in ranks.to_main("written", [written, hashed.array_digests()])[1:]:
                    assert folder is not None, "rank 0"
                    folder.take_in(records)
                    hashed.add_digests(digests)
                if folder is not None:
                    digest = self._complete(folder, snapshot, hashed, parts)
            if ranks.is_main:
                self.rotate(state.step, state.best.step)
            return str(ranks.from_main("saved", digest))

    def write(self, snapshot: Snapshot, fs: FileSystem | None = None) -> str:
        """Like `save`, in one process.

        Args:
            fs: file system to write through; None uses the default one of this object.
        """
        fs, hashed = fs or self.fs, StateHash()
        with self._staged(snapshot, fs) as folder:
            parts = self._parts(snapshot)
            self._write_part(folder, snapshot, parts[0], hashed)
            digest = self._complete(folder, snapshot, hashed, parts)
        self.rotate(snapshot.step, snapshot.counters["best"]["step"], fs)
        return digest

    def _staged(self, snapshot: Snapshot, fs: FileSystem) -> AtomicFolder:
        """Open the folder to write. Raises: DiskError, if the disk has not enough room."""
        in_float32 = self._read_masters is not None
        weights = sum(math.prod(w.shape) * 4 if in_float32 else w.nbytes for w in snapshot.weights.values())
        check_room(self.output_dir, weights + sum(source.nbytes for source in self._kept(snapshot).values()))
        return AtomicFolder(self.folder(snapshot.step), fs=fs, replace=True)

    def _kept(self, snapshot: Snapshot) -> Mapping[str, TensorSource]:
        """Return the optimizer's tensors to write, without the masters if the weights already have their values."""
        if self._read_masters is None:
            return snapshot.optimizer
        return {name: source for name, source in snapshot.optimizer.items() if not name.endswith(f".{MASTER}")}

    def _parts(self, snapshot: Snapshot, size: int = 1) -> list[_Part]:
        kept, shares = self._kept(snapshot), [snapshot.share(rank, size) for rank in range(size)]
        tensors = [[name for name in share.optimizer if name in kept] for share in shares]
        writers = [rank for rank, names in enumerate(tensors) if names] or [0]
        count = len(writers)
        files = {r: OPTIMIZER if count == 1 else shard_name("optimizer", i, count) for i, r in enumerate(writers)}
        return [_Part(share, names, files.get(r)) for r, (share, names) in enumerate(zip(shares, tensors, strict=True))]

    def _write_part(
        self, folder: AtomicFolder | FolderShare, snapshot: Snapshot, part: _Part, hashed: StateHash
    ) -> None:
        """Write a rank's optimizer tensors, and on rank 0 the model; add the arrays of its share to `hashed`."""
        if isinstance(folder, AtomicFolder):
            self.write_model(folder, snapshot)
        if part.file is not None:
            kept = self._kept(snapshot)
            tensors = {name: _hashed(f"optimizer.{name}", kept[name], hashed) for name in part.tensors}
            with folder.create(part.file) as file:
                write_tensors(file, tensors)
        snapshot.hash_arrays(part.share, hashed)

    def _complete(self, folder: AtomicFolder, snapshot: Snapshot, hashed: StateHash, parts: Sequence[_Part]) -> str:
        """Write the other files, once all parts are written; return the state hash."""
        digest, kept = snapshot.digest(hashed), self._kept(snapshot)
        files = {name: part.file for part in parts for name in part.tensors if part.file is not None}
        if len(set(files.values())) > 1:
            write_index(folder, "optimizer", files, sum(source.nbytes for source in kept.values()))
        counters = dict(snapshot.counters)
        about = {"step": snapshot.step, "state_hash": digest, "threads": snapshot.threads, "data": counters.pop("data")}
        folder.metadata.update(about | ({} if snapshot.platform is None else {"exact": snapshot.platform}))
        folder.write(RNG, indented_bytes(snapshot.rng))
        folder.write(DATA, indented_bytes(snapshot.data))
        trainer = {**counters, "evaluated_at": snapshot.evaluated_at, "state_hash": digest}
        folder.write(TRAINER, indented_bytes(trainer))
        return digest

    def rotate(self, newest: int, best: int, fs: FileSystem | None = None) -> None:
        """Remove the oldest checkpoints beyond the limit, but never `newest`, which was just written or loaded.

        With `keep_best`, the checkpoint of the step `best` also remains and does not count. One that cannot be removed
        causes a warning and no longer counts.
        """
        if self.keep is None:
            return
        kept = {newest, best} if self.keep_best else {newest}
        older = [s for s in self.steps() if s not in kept | self._stuck and self.has(s)]
        keep = self.keep - (not self.keep_best or newest != best)
        for step in older[: max(0, len(older) - keep)]:
            try:
                remove_folder(self.folder(step), fs=fs or self.fs)
            except (DiskError, ModelError) as error:
                self._stuck.add(step)
                self._warn(f"warning: an old checkpoint cannot be removed: {error.what}")

    @boundary(ModelError, "reading the checkpoint")
    def load(self, state: TrainState, step: int, prepare: Callable[[], None] = lambda: None) -> int | None:
        """Load the checkpoint of `step` into `state`; return the number of CPU threads that computed it.

        All ranks must call it: each reads the files, but of the optimizer's states only its own shards. `prepare` is
        called once the files and the run's data have been checked, before the weights change.

        Raises:
            ModelError: a file is damaged, missing or belongs to another model. No older checkpoint is used instead.
            DataError: the data has changed since.
            DeviceError: an exact run was computed on another GPU model or with another version of Triton.
        """
        folder = self.folder(step)
        manifest = self._verified(folder, step, state.ranks)
        if manifest.metadata.get("step") != step:
            what = f"the folder holds the checkpoint of step {escape(manifest.metadata.get('step'))}"
            raise ModelError(what, where=escape(folder), next="restore the folder's original name")
        _check_platform(manifest.metadata.get("exact"), state.platform, folder)
        state.loader.load_state(read_json(safe_join(folder, DATA)))
        prepare()
        self._read(state, folder)
        if state.hash() != manifest.metadata.get("state_hash"):
            raise ModelError("the restored state differs from the saved one", where=escape(folder))
        count = manifest.metadata.get("threads")
        return count if isinstance(count, int) else None

    def has(self, step: int) -> bool:
        """Whether a complete checkpoint of `step` exists."""
        try:
            read_manifest(self.folder(step))
        except (ModelError, OSError):
            return False
        return True

    @boundary(ModelError, "reading the checkpoint")
    def best(self, newest: int) -> Best:
        """Return the best evaluation that the checkpoint of step `newest` records. Raises: ModelError."""
        return _best(read_json(safe_join(self.folder(newest), TRAINER)), self.folder(newest))

    def set_aside(self, step: int) -> Path | None:
        """Move the checkpoints after `step` to a separate folder, because the run now takes another path.

        They are then neither resumed from nor rotated. Returns that folder, or None if nothing had to move.

        Raises:
            DiskError: moving failed.
        """
        later = [s for s in self._numbers() if s > step]
        if not later:
            return None
        folders = (self.output_dir / f"abandoned-{n}" for n in itertools.count(1))
        staging = next(folder for folder in folders if not os.path.lexists(folder))
        self.fs.mkdir(staging)
        for number in reversed(later):  # a crash then leaves no gap among the remaining ones
            self.fs.rename(self.folder(number), staging / self.folder(number).name)
        self.fs.fsync_dir(staging)
        self.fs.fsync_dir(self.output_dir)
        return staging

    def _verified(self, folder: Path, step: int, ranks: Ranks) -> Manifest:
        """Verify the files against the manifest and return it. All ranks must call it.

        Each hashes some of the shared optimizer files and all other files. If one finds an error, all ranks raise it.
        """
        manifest, error = None, None
        try:
            shared = [name for name in read_manifest(folder).files if OPTIMIZER_FILE.fullmatch(name)]
            own = sorted(shared)[ranks.rank :: ranks.size]
            manifest = verify_manifest(folder, without=set(shared) - set(own))
        except ModelError as found:
            error = found
        every = ranks.to_main("verified", None if error is None else [error.what, error.where, error.next])
        failure = ranks.from_main("verified", next((each for each in every if each is not None), None))
        if error is None and failure is not None:
            error = ModelError(failure[0], where=failure[1], next=failure[2])
        if error is not None:
            others = [s for s in self.steps() if s != step and self.has(s)]
            instead = f"with --resume-from checkpoint-{others[-1]}" if others else "in a new train.output_dir"
            next_step = f"{error.next or 'restore the folder'}, or continue {instead}"
            raise ModelError(error.what, where=error.where or escape(folder), next=next_step) from error
        assert manifest is not None, "no error, so a manifest"
        return manifest

    def _read(self, state: TrainState, folder: Path) -> None:
        counters = read_json(safe_join(folder, TRAINER))
        try:
            # Restore weights and optimizer.
            masters = {}
            if self._read_masters is None:
                with WeightFolder(folder) as weights:
                    for name, parameter in state.model.named_parameters():
                        _copy_into(parameter, weights.read(name), name, folder)
            else:
                masters = _read_adapter(state, self._read_masters(folder), counters["optimizer"], folder)
            with optimizer_tensors(folder) as stored:
                restore_optimizer(state.optimizer, {**stored, **masters}, counters["optimizer"])
            # Restore random generators and counters.
            random.set_state(read_json(safe_join(folder, RNG)))
            state.step, state.num_tokens = _count(counters["step"]), _count(counters["num_tokens"])
            state.evaluated_at = _count(counters["evaluated_at"])
            sums = counters["interval"]
            state.interval = Interval(float(sums["loss_sum"]), _count(sums["targets"]))
            state.interval.figures = tuple(map(float, sums.get("figures", ())))
            if len(state.interval.figures) not in (0, len(state.objective.figures)):
                raise ValueError("the step sums belong to another objective")
            state.best = _best(counters, folder)
            _check_identity(counters.get("objective", {}), state.objective.identity, folder)
        except (ConfigError, DataError, InterruptedRun, ModelError, OutOfMemoryError):  # a signal may arrive
            raise
        except (GenesisError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(f"the training state is malformed: {escape(error)}", where=escape(folder)) from error


@contextmanager
def optimizer_tensors(folder: Path) -> Iterator[dict[str, StoredTensor]]:
    """Yield the optimizer's tensors of a checkpoint, readable inside the block. Raises: ModelError."""
    with WeightFolder(folder, "optimizer") as files:
        entries = {name: files.entry(name) for name in files.names}
        yield {
            name: StoredTensor(as_dtype(entry.dtype), entry.shape, functools.partial(files.read_elements, name))
            for name, entry in entries.items()
        }


def _hashed(name: str, source: TensorSource, into: StateHash) -> TensorSource:
    """Return the same tensor; reading it also adds it to `into`."""

    def read() -> np.ndarray:
        values = source.read()
        into.add_array(name, values)
        return values

    return replace(source, read=read)


def _read_adapter(
    state: TrainState, values: Mapping[str, np.ndarray], updated: Mapping[str, Any], folder: Path
) -> dict[str, np.ndarray]:
    """Set the run's own parameters to `values`, rounded to their dtype; return the optimizer's masters."""
    masters = {}
    for name, parameter in state.own_parameters():
        _copy_into(parameter, values[name].astype(parameter.dtype.numpy), name, folder)
        if name in updated and state.optimizer.keeps_master(parameter):
            masters[f"{name}.{MASTER}"] = values[name]
    return masters


def _count(value: Any) -> int:
    """Return a number of steps, tokens or targets; -1 marks an evaluation that never happened."""
    if type(value) is not int or not -1 <= value < 1 << 63:
        raise ValueError(f"a count is {reprlib.repr(value)}")
    return value


def _check_identity(found: Mapping[str, str], expected: Mapping[str, str], folder: Path) -> None:
    for name in expected:
        if found[name] != expected[name]:
            what = f"the {name} is not the one with which the run began"
            raise ModelError(what, where=escape(folder), next=f"restore the {name}, or start a new run")


def _best(counters: Mapping[str, Any], folder: Path) -> Best:
    """Return the best evaluation that a checkpoint records; earlier versions record none. Raises: ModelError."""
    values = counters.get("best", Best().to_json())
    try:
        loss = float(values["loss"]) if values["step"] != -1 else math.inf
        return Best(_count(values["step"]), loss, _count(values["targets"]), _count(values["since"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"the best evaluation is malformed: {escape(error)}", where=escape(folder)) from error


def _copy_into(target: Tensor, source: np.ndarray, name: str, folder: Path) -> None:
    if target.shape != source.shape or target.dtype.numpy != source.dtype:
        raise ModelError(
            f"{escape(name)} is {source.dtype} {source.shape}, the model's is {target.dtype} {target.shape}",
            where=escape(folder),
        )
    backend_for(target.device).from_numpy(source, target.array)


def _check_platform(recorded: Any, now: dict[str, str] | None, folder: Path) -> None:
    """Refuse to continue an exact run on another GPU model or with another version of Triton."""
    if now is not None and (changes := platform_changes(recorded, now)):
        what = f"train.exact: the checkpoint was computed with {changes}: sums would differ"
        next = "resume with the recorded GPU model and Triton, or start a new run from this checkpoint's model"
        raise DeviceError(what, where=escape(folder), next=next)
