"""Saving and loading a checkpoint: what a failing disk, bit rot and another run's files do to it and to older ones."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from genesis import random
from genesis.backend.cpu import threads
from genesis.errors import DataError, DeviceError, DiskError, GenesisError, InterruptedRun, ModelError
from genesis.files import filesystem
from genesis.files.atomic import AtomicFolder, read_manifest, sweep, verify_manifest
from genesis.files.filesystem import FileSystem
from genesis.train import checkpoint
from genesis.train.checkpoint import Checkpoints
from genesis.train.loop import Training
from genesis.train.state import Interval, Snapshot, TrainState
from tests.files.faults import FailAt, Recorder, ShortWrites, check_power_loss_order
from tests.train.runs import assembled, checkpoints, load, make, no_waiting, steps

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


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with no_waiting():
        yield


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Training:
    """A run after two steps, with nothing saved, in a folder of its own."""
    training = assembled(load(recipe, str(tmp_path / "run")))
    steps(training, 2)
    return training


def saver(training: Training, observer: Any = None, keep: int | None = None, **options: Any) -> Checkpoints:
    """The run's checkpoints, written through an observed file system."""
    own = training.checkpoints
    return Checkpoints(own.output_dir, own.write_model, keep, fs=FileSystem(observer), **options)


def bytes_of(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class TestSaving:
    def test_it_holds_a_model_folder_and_the_state(self, run: Training) -> None:
        digest = saver(run).save(run.state)
        folder = run.checkpoints.folder(2)
        manifest = verify_manifest(folder)
        assert set(manifest.files) >= FILES
        tokens = run.state.loader.tokens
        data = {"documents": tokens.num_documents, "tokens": tokens.num_tokens, "targets": tokens.num_targets}
        assert manifest.metadata == {"step": 2, "state_hash": digest, "threads": threads(), "data": data}
        assert digest == run.state.hash()

    def test_an_exact_run_resumes_on_its_gpu_and_triton_only(self, run: Training) -> None:
        run.state.platform = {"gpu": "NVIDIA H200", "triton": "3.6.0"}
        saver(run).save(run.state)
        saver(run).load(run.state, 2)
        run.state.platform = {"gpu": "NVIDIA H200", "triton": "3.9.0"}
        with pytest.raises(DeviceError, match=r"computed with triton 3\.6\.0, now 3\.9\.0"):
            saver(run).load(run.state, 2)
        run.state.platform = None

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

    @pytest.mark.sample(cases=1)
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

    def test_a_foreign_checkpoint_is_not_one_of_those_that_are_kept(self, run: Training) -> None:
        """Its number is above all of ours, so that it would stand for the one before the newest."""
        foreign, warned = run.checkpoints.folder(100), list[str]()
        foreign.mkdir()
        (foreign / "notes.txt").write_text("mine")
        checks = saver(run, keep=2, warn=warned.append)
        for _ in range(3):
            checks.save(run.state)
            steps(run, 1)
        assert run.checkpoints.steps() == [3, 4, 100]
        assert warned == [] and os.listdir(foreign) == ["notes.txt"]

    @pytest.mark.sample(cases=1)
    @pytest.mark.parametrize("kind", ["link", "foreign file", "read-only"])
    def test_rotation_goes_on_where_an_old_one_cannot_be_removed(
        self, run: Training, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It keeps its name and its content, one warning names it, and the others are rotated as ever."""
        output, warned = run.checkpoints.output_dir, list[str]()
        saver(run).save(run.state)
        old = run.checkpoints.folder(2)
        if kind == "link":
            old.rename(output.with_name("elsewhere"))
            old.symlink_to(output.with_name("elsewhere"))
        elif kind == "foreign file":
            (old / "notes.txt").write_text("mine")
        else:
            access = os.access
            monkeypatch.setattr(
                "genesis.files.atomic.os.access", lambda path, *a, **k: path != old and access(path, *a)
            )
        before, checks = bytes_of(old), saver(run, keep=1, warn=warned.append)
        for _ in range(3):
            steps(run, 1)
            checks.save(run.state)
        assert run.checkpoints.steps() == [2, 5]
        assert bytes_of(old) == before
        assert len(warned) == 1 and str(old) in warned[0]

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

    @pytest.mark.parametrize(
        "code, stride", [pytest.param(errno.ENOSPC, 1, marks=pytest.mark.full), (errno.ENOSPC, 4), (errno.EIO, 7)]
    )
    def test_every_call_failing_in_turn(self, run: Training, code: int, stride: int) -> None:
        """Exit 8, or a warning once the new one stands; the older one is whole, the newer whole or not there."""
        output, before = run.checkpoints.output_dir, run.checkpoints.output_dir.with_name("before")
        older = saver(run).save(run.state)
        shutil.copytree(output, before)
        steps(run, 1)
        recorder = Recorder()
        newer = saver(run, recorder, keep=1).save(run.state)
        assert len(recorder.calls) > 60
        targets = [call.target for call in recorder.calls]
        committed = targets.index(run.checkpoints.folder(3)) + 2  # the rename, and the flush of the parent
        for number in range(1, len(recorder.calls) + 1, stride):
            shutil.rmtree(output)
            shutil.copytree(before, output)
            fault = FailAt(number, code)
            warned: list[str] = []
            if number > committed:
                assert saver(run, fault, keep=1, warn=warned.append).save(run.state) == newer
                assert len(warned) == 1 and "cannot be removed" in warned[0], fault.failed
            else:
                with pytest.raises(DiskError) as caught:
                    saver(run, fault, keep=1).save(run.state)
                assert (caught.value.exit_code, caught.value.errno) == (8, code)
                assert ("bytes, free" in caught.value.what) == (code == errno.ENOSPC)
            assert checkpoints(output) in ({2: older}, {2: older, 3: newer}, {3: newer}), fault.failed
            assert not list(output.glob(".tmp-*")), fault.failed
            sweep(output)
            if recorder.calls[number - 1].op not in ("write", "fsync", "close"):  # of these one is like another
                assert saver(run, keep=1).save(run.state) == newer
                assert checkpoints(output) == {3: newer}

    def test_a_disk_that_stays_broken(self, run: Training) -> None:
        """Cleaning up fails too: what is left is not taken for a checkpoint, and swept at the next start."""
        older = saver(run).save(run.state)
        steps(run, 1)
        output = run.checkpoints.output_dir
        for number in range(2, 60, 7):
            with pytest.raises(DiskError):
                saver(run, FailAt(number, errno.EIO, forever=True)).save(run.state)
            assert checkpoints(output) == {2: older}
            assert list(output.glob(".tmp-*"))
            sweep(output)
            assert not list(output.glob(".tmp-*"))


class TestLoading:
    @pytest.fixture
    def saved(self, run: Training) -> Training:
        saver(run).save(run.state)
        steps(run, 1)
        return run

    def check_refused(self, run: Training, what: str, error: type[GenesisError] = ModelError) -> GenesisError:
        """Loading is refused with an error that names `what`."""
        with pytest.raises(error) as caught:
            run.checkpoints.load(run.state, 2)
        told = f"{caught.value.what} {caught.value.where}"
        assert what in told, f"{what!r} is not in {told!r}"
        assert caught.value.next
        return caught.value

    def test_it_brings_the_state_back(self, saved: Training) -> None:
        after = saved.state.hash()
        saved.checkpoints.load(saved.state, 2)
        assert saved.state.step == 2
        assert saved.state.hash() == read_manifest(saved.checkpoints.folder(2)).metadata["state_hash"]
        steps(saved, 1)
        assert saved.state.hash() == after

    def test_a_signal_while_it_is_read_stays_a_signal(self, saved: Training) -> None:
        stopped = InterruptedRun("stopped", signal=15)
        with mock.patch.object(random, "set_state", side_effect=stopped), pytest.raises(InterruptedRun) as caught:
            saved.checkpoints.load(saved.state, 2)
        assert caught.value is stopped

    def test_bit_rot_at_hundreds_of_places(self, saved: Training) -> None:
        """The file is named, and nothing is read from it; every file has its share of the places."""
        folder, generator = saved.checkpoints.folder(2), np.random.default_rng(5)
        files = sorted(folder.iterdir())
        assert {path.name for path in files} >= FILES | {"manifest.json"}
        for path in files:
            whole = path.read_bytes()
            count = 250 // len(files) + 1
            for place in generator.integers(0, 8 * len(whole), count).tolist():
                damaged = bytearray(whole)
                damaged[place // 8] ^= 1 << place % 8
                path.write_bytes(damaged)
                error = self.check_refused(saved, path.name)
                assert error.exit_code == 5
            path.write_bytes(whole)
        saved.checkpoints.load(saved.state, 2)

    def test_the_refusal_check_fails_on_another_name(self, saved: Training) -> None:
        (saved.checkpoints.folder(2) / "rng.json").write_bytes(b"{}")
        with pytest.raises(AssertionError, match="is not in"):
            self.check_refused(saved, "data_state.json")

    @pytest.mark.sample(cases=5)
    @pytest.mark.parametrize("name", [*sorted(FILES), "manifest.json"])
    def test_a_file_cut_short_or_gone(self, saved: Training, name: str) -> None:
        path = saved.checkpoints.folder(2) / name
        os.truncate(path, path.stat().st_size // 2)
        self.check_refused(saved, name)
        path.unlink()
        assert self.check_refused(saved, name).exit_code == 5

    def test_an_extra_file(self, saved: Training) -> None:
        (saved.checkpoints.folder(2) / "readme\x1b[2J.txt").write_text("hello")
        assert "\x1b" not in str(self.check_refused(saved, "readme"))

    def test_a_damaged_one_is_not_skipped_but_the_whole_one_is_named(self, saved: Training) -> None:
        """Also where the damage is in the manifest itself, which says that the folder is a checkpoint."""
        saver(saved).save(saved.state)
        for name in ("model.safetensors", "manifest.json"):
            with open(saved.checkpoints.folder(3) / name, "r+b") as file:
                file.write(b"?")
            assert saved.checkpoints.steps() == [2, 3]
            with pytest.raises(ModelError, match=name) as caught:
                saved.checkpoints.load(saved.state, 3)
            assert "--resume-from checkpoint-2" in caught.value.next

    def test_a_folder_under_another_name(self, saved: Training) -> None:
        os.rename(saved.checkpoints.folder(2), saved.checkpoints.folder(1))
        with pytest.raises(ModelError, match="of step 2"):
            saved.checkpoints.load(saved.state, 1)

    def test_only_folders_with_our_names_are_checkpoints(self, saved: Training) -> None:
        output = saved.checkpoints.output_dir
        for name in ("checkpoint-007", "checkpoint-", "checkpoint--1", "checkpoint-3x", "checkpoint-1234567890123"):
            (output / name).mkdir()
        (output / "checkpoint-9").write_text("a file")
        assert saved.checkpoints.steps() == [2]


class TestStateOfAnotherRun:
    """Files that are whole, and yet not this run's."""

    def other(self, recipe: Path, tmp_path: Path, *overrides: str) -> Training:
        training = assembled(load(recipe, str(tmp_path / "other"), *overrides))
        steps(training, 1)
        return training

    @pytest.mark.sample(cases=4)
    @pytest.mark.parametrize(
        "overrides, named",
        [
            (("optim.name=lion",), "saved state of parameter"),
            (("optim.name=muon",), "saved state of parameter"),
            (("optim.name=adafactor",), "saved state of parameter"),
            (("model.config.num_hidden_layers=2",), "layers.1"),
            (("model.config.intermediate_size=48",), "mlp"),
            (("model.config.model_type=qwen2", "model.config.num_key_value_heads=2"), "self_attn"),
            (("model.dtype=bfloat16",), "bfloat16"),
        ],
    )
    def test_another_model_or_optimizer(
        self, run: Training, recipe: Path, tmp_path: Path, overrides: tuple[str, ...], named: str
    ) -> None:
        saver(run).save(run.state)
        other = self.other(recipe, tmp_path, *overrides)
        with pytest.raises(ModelError, match=named) as caught:
            run.checkpoints.load(other.state, 2)
        assert caught.value.exit_code == 5

    def test_an_optimizer_file_of_another_model(self, run: Training, recipe: Path, tmp_path: Path) -> None:
        other = self.other(recipe, tmp_path, "model.config.intermediate_size=48")
        saver(other).save(other.state)
        saver(run).save(run.state)
        name = "optimizer.safetensors"
        recommit(run.checkpoints.folder(2), {name: (other.checkpoints.folder(1) / name).read_bytes()})
        with pytest.raises(ModelError, match=r"exp_avg.* is .*float32.*expected"):
            run.checkpoints.load(run.state, 2)

    def test_other_data(self, run: Training, recipe: Path, tmp_path: Path) -> None:
        saver(run).save(run.state)
        changed = make(tmp_path, documents=11)
        other = assembled(load(changed, "other"))
        with pytest.raises(DataError, match="differs from the run") as caught:
            run.checkpoints.load(other.state, 2)
        assert caught.value.exit_code == 4


def recommit(folder: Path, changed: dict[str, bytes]) -> None:
    """Write a checkpoint again with other files and a manifest that is true of them."""
    metadata = read_manifest(folder).metadata
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"} | changed
    with AtomicFolder(folder, replace=True, metadata=metadata) as writer:
        for name, data in files.items():
            writer.write(name, data)


def mutations(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The content without each of its keys, and with each value replaced by one of another kind."""
    for key, value in content.items():
        yield {k: v for k, v in content.items() if k != key}
        for wrong in (None, "x", [1], {"a": 1}, -1, 1e300, True, 1 << 70, 10**400):
            if wrong != value:
                yield {**content, key: wrong}


@pytest.mark.full
def test_malformed_state_is_refused_and_never_a_bug(run: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its manifest were true of it: what says that something is wrong is then the state itself."""
    saver(run).save(run.state)
    taken: set[str] = set()
    codes: dict[tuple[str, ...], int] = {}
    current: dict[str, Any] = {}
    read = checkpoint.read_json
    monkeypatch.setattr(checkpoint, "read_json", lambda path: current.get(path.name) or read(path))
    for name in ("trainer_state.json", "rng.json", "data_state.json"):
        whole = read(run.checkpoints.folder(2) / name)
        for mutant in mutations(whole):
            current[name] = mutant
            key = next(key for key in whole if mutant.get(key) != whole[key])
            try:
                run.checkpoints.load(run.state, 2)
            except GenesisError as error:
                codes[name, key, str(mutant.get(key))] = error.exit_code
            else:
                taken.add(key)
        current.clear()
    assert set(codes.values()) == {3, 4, 5}, codes
    # What H does not cover may be another number of the right kind; the hash that counts is the manifest's.
    assert taken == {"best", "num_tokens", "state_hash"}  # without "best" it is of an earlier version
    assert {("trainer_state.json", key, str(10**400)) for key in ("step", "num_tokens", "evaluated_at", "best")} <= set(
        codes
    )
    run.checkpoints.load(run.state, 2)


class TestSettingAside:
    def test_later_checkpoints_leave_the_way_and_stay_whole(self, run: Training) -> None:
        own = saver(run)
        hashes = {}
        for step in (2, 3, 4):
            hashes[step] = own.save(run.state)
            steps(run, 1)
        aside = own.set_aside(2)
        assert aside == own.output_dir / "abandoned-1"
        assert checkpoints(own.output_dir) == {2: hashes[2]}
        assert checkpoints(aside) == {3: hashes[3], 4: hashes[4]}
        assert own.set_aside(2) is None
        run.checkpoints.load(run.state, 2)
        steps(run, 1)
        own.save(run.state)
        assert own.set_aside(2) == own.output_dir / "abandoned-2"

    def test_whatever_has_the_name_of_a_later_one_leaves_the_way(self, run: Training) -> None:
        """Else the save that comes to it hours later would fail."""
        output = run.checkpoints.output_dir
        saver(run).save(run.state)
        (output / "checkpoint-3").write_text("mine")
        (output / "checkpoint-4").symlink_to("nowhere")
        aside = run.checkpoints.set_aside(2)
        assert aside is not None and sorted(os.listdir(aside)) == ["checkpoint-3", "checkpoint-4"]
        assert (aside / "checkpoint-3").read_text() == "mine"

    def test_a_crash_on_the_way_leaves_no_gap(self, run: Training) -> None:
        for _ in range(3):
            saver(run).save(run.state)
            steps(run, 1)
        with pytest.raises(DiskError):
            saver(run, FailAt(3)).set_aside(2)
        assert run.checkpoints.steps() == [2, 3]

    def test_they_are_flushed_where_they_arrive_before_where_they_leave(self, run: Training) -> None:
        """After a power loss each of them is at one place or at both, and never at none."""
        for _ in range(3):
            saver(run).save(run.state)
            steps(run, 1)
        recorder = Recorder()
        aside = saver(run, recorder).set_aside(2)
        output = run.checkpoints.output_dir
        assert aside == output / "abandoned-1"
        assert [(call.op, call.path, call.target) for call in recorder.calls] == [
            ("mkdir", aside, None),
            ("rename", output / "checkpoint-4", aside / "checkpoint-4"),
            ("rename", output / "checkpoint-3", aside / "checkpoint-3"),
            ("fsync_dir", aside, None),
            ("fsync_dir", output, None),
        ]


class TestHash:
    """H covers everything that decides how the run goes on, and nothing that only reports."""

    @pytest.mark.parametrize("part", ["parameter", "moment", "count", "random", "epoch", "index", "step"])
    def test_it_sees_the_smallest_change(self, run: Training, part: str) -> None:
        state, before = run.state, run.state.hash()
        changes: dict[str, Callable[[TrainState], None]] = {
            "parameter": lambda s: flip(next(p for _, p in s.model.named_parameters()).detach().numpy()),
            "moment": lambda s: flip(next(iter(Snapshot.of(s).optimizer.values())).read()),
            "count": lambda s: next(iter(s.optimizer.state.values())).update(step=9),
            "random": lambda s: setattr(random.default_generator, "offset", random.default_generator.offset + 1),
            "epoch": lambda s: setattr(s.loader, "epoch", s.loader.epoch + 1),
            "index": lambda s: setattr(s.loader, "index", s.loader.index + 1),
            "step": lambda s: setattr(s, "step", s.step + 1),
        }
        assert state.hash() == before
        changes[part](state)
        assert state.hash() != before

    def test_it_does_not_see_what_is_only_reported(self, run: Training) -> None:
        before = run.state.hash()
        reported = dataclasses.replace(run.state, interval=Interval(3.5, 7), evaluated_at=1, num_tokens=12345)
        for group in reported.optimizer.param_groups:
            group["lr"] = 123.0  # set anew in each step, from the schedule
        assert reported.hash() == before


def flip(array: np.ndarray) -> None:
    """Change one bit."""
    array.reshape(-1).view(np.uint8)[0] ^= 1
