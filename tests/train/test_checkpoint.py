"""Saving and loading a checkpoint: what a failing disk, bit rot and another run's files do to it, and to those before."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genesis import random
from genesis.errors import DataError, DiskError, GenesisError, ModelError
from genesis.io import filesystem
from genesis.io.files import AtomicFolder, FileSystem, sweep
from genesis.io.manifest import read_manifest, verify_manifest
from genesis.train import checkpoint
from genesis.train.checkpoint import Checkpoints
from genesis.train.loop import Training
from genesis.train.state import Interval, TrainState
from tests.io.faults import FailAt, Recorder, ShortWrites, check_power_loss_order
from tests.train.runs import assembled, checkpoints, load, make, steps

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "optimizer.safetensors",
    "trainer_state.json",
    "rng.json",
    "data_state.json",
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Training:
    """A run after two steps, with nothing saved, in a folder of its own."""
    training = assembled(load(recipe, str(tmp_path / "run")))
    steps(training, 2)
    return training


def saver(training: Training, observer: Any = None, keep: int | None = None) -> Checkpoints:
    """The run's checkpoints, written through an observed file system."""
    own = training.checkpoints
    return Checkpoints(own.output_dir, own._write_model, keep, fs=FileSystem(observer))


def bytes_of(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class TestSaving:
    def test_it_holds_a_model_folder_and_the_state(self, run: Training) -> None:
        digest = saver(run).save(run.state)
        folder = run.checkpoints.folder(2)
        manifest = verify_manifest(folder)
        assert FILES <= set(manifest.files)
        assert manifest.metadata == {"step": 2, "state_hash": digest}
        assert digest == run.state.hash()

    def test_the_order_of_calls_survives_a_power_loss(self, run: Training) -> None:
        for _ in range(2):  # a new checkpoint, and one that replaces it
            recorder = Recorder()
            saver(run, recorder).save(run.state)
            target = run.checkpoints.folder(2)
            check_power_loss_order(recorder.calls, target)
            written = {call.path.name for call in recorder.calls if call.op == "fsync"}
            assert written >= FILES | {"manifest.json"}

    def test_nothing_is_removed_before_the_new_one_stands(self, run: Training) -> None:
        saver(run).save(run.state)
        steps(run, 1)
        recorder = Recorder()
        saver(run, recorder, keep=1).save(run.state)
        calls = [(call.op, call.target or call.path) for call in recorder.calls]
        commit = calls.index(("rename", run.checkpoints.folder(3)))
        parent = calls.index(("fsync_dir", run.checkpoints.output_dir), commit)
        old = run.checkpoints.folder(2)
        touched = [i for i, call in enumerate(recorder.calls) if call.path == old or old in call.path.parents]
        assert touched and min(touched) > parent
        assert run.checkpoints.steps() == [3]

    @pytest.mark.parametrize("keep, kept", [(1, [6]), (2, [5, 6]), (None, [2, 3, 4, 5, 6])])
    def test_rotation(self, run: Training, keep: int | None, kept: list[int]) -> None:
        for _ in range(5):
            saver(run, keep=keep).save(run.state)
            steps(run, 1)
        assert run.checkpoints.steps() == kept

    def test_rotation_leaves_what_is_not_a_whole_checkpoint_of_ours(self, run: Training) -> None:
        output = run.checkpoints.output_dir
        (output / "checkpoint-1").mkdir()
        (output / "checkpoint-1" / "notes.txt").write_text("mine")
        (output / "checkpoint-x").mkdir()
        for _ in range(3):
            saver(run, keep=1).save(run.state)
            steps(run, 1)
        assert sorted(p.name for p in output.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-4", "checkpoint-x"]
        assert (output / "checkpoint-1" / "notes.txt").read_text() == "mine"

    def test_short_writes_change_nothing(self, run: Training) -> None:
        saver(run).save(run.state)
        before = bytes_of(run.checkpoints.folder(2))
        saver(run, ShortWrites(997)).save(run.state)
        assert bytes_of(run.checkpoints.folder(2)) == before

    def test_no_room_is_told_before_anything_is_written(self, run: Training, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(filesystem, "_free_bytes", lambda path: 1000)
        recorder = Recorder()
        with pytest.raises(DiskError, match=r"needed [0-9,]{6,} bytes, free 1,000 bytes") as caught:
            saver(run, recorder).save(run.state)
        assert caught.value.exit_code == 8
        assert recorder.calls == []

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
    def test_every_call_failing_in_turn(self, run: Training, code: int) -> None:
        """Exit 8; the older checkpoint is whole, the newer one whole or not there; the next save works."""
        older = saver(run).save(run.state)
        steps(run, 1)
        recorder = Recorder()
        newer = saver(run, recorder, keep=1).save(run.state)
        count = len(recorder.calls)
        assert count > 60
        output = run.checkpoints.output_dir
        saved = {step: run.checkpoints.folder(step) for step in (2, 3)}
        shutil.rmtree(saved[3])
        steps_back = output.with_name("before")
        run.state.step = 2
        saver(run).save(run.state)
        run.state.step = 3
        del older
        shutil.copytree(output, steps_back)
        expected = checkpoints(steps_back)
        for number in range(1, count + 1):
            fault = FailAt(number, code)
            with pytest.raises(DiskError) as caught:
                saver(run, fault, keep=1).save(run.state)
            assert (caught.value.exit_code, caught.value.errno) == (8, code)
            assert ("bytes, free" in caught.value.what) == (code == errno.ENOSPC)
            found = checkpoints(output)
            assert found in (expected, {**expected, 3: newer}, {3: newer}), fault.failed
            sweep(output)
            assert not list(output.glob(".tmp-*")) and not list(output.glob(".del-*"))
            assert saver(run, keep=1).save(run.state) == newer
            assert checkpoints(output) == {3: newer}
            shutil.rmtree(output)
            shutil.copytree(steps_back, output)
