"""Saves in the background: the bytes of those at once, and the same promises when a run is killed, stopped or fails."""

from __future__ import annotations

import errno
import hashlib
import io
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from genesis.errors import DiskError, InterruptedRun, NumericError, OutOfMemoryError
from genesis.train import loop, saving, state
from genesis.train.checkpoint import Checkpoints
from genesis.train.saving import SAVER
from genesis.train.state import Snapshot, TrainState, snapshot_bytes
from tests.files.faults import FailAt, OfThread, Recorder
from tests.train.runs import Forks, assembled, checkpoints, load, make_lora, memory_folder, observed, rows, steps, train

pytestmark = pytest.mark.xdist_group("runs in forks")
# Steps 1 and 2 are saved in the background, the last one while all waits.
THREE_SAVES = ("train.steps=3", "checkpoint.every=1", "eval.every=null", "checkpoint.background=on")
KEEP_ALL = "checkpoint.save_total_limit=null"
STRIDE = 37  # of the calls of a save, those at which runs are killed


@pytest.fixture(scope="module")
def expected(recipe: Path) -> str:
    """H of the run of three steps that waits for its saves."""
    return train(load(recipe, "expected", *THREE_SAVES, "checkpoint.background=off", KEEP_ALL)).state_hash


def contents(output: Path) -> dict[str, str]:
    """The sha256 of every file of a run's checkpoints and of its final model."""
    files = (p for p in output.rglob("*") if p.suffix in (".json", ".safetensors"))
    return {str(p.relative_to(output)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def slowly(wait: Callable[[], Any]) -> Any:
    """Saves in the background begin to write when `wait` returns."""
    write = Checkpoints.write

    def slow(self: Checkpoints, *given: Any) -> str:
        if threading.current_thread().name == SAVER:
            wait()
        return write(self, *given)

    return mock.patch.object(Checkpoints, "write", slow)


def savers() -> list[threading.Thread]:
    """Threads that save, or make memory for it."""
    return [t for t in threading.enumerate() if t.name.startswith("genesis-s") and t is not threading.main_thread()]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not savers()


class TestBytes:
    """What is written is what a save at once writes: names, bytes, hashes."""

    @pytest.mark.parametrize("kind", ["model in bfloat16", "adapter"])
    def test_they_are_those_of_a_save_at_once(self, kind: str, recipe: Path, tmp_path: Path) -> None:
        settings = ("train.steps=5", "checkpoint.every=1", KEEP_ALL)
        if kind == "adapter":
            recipe = make_lora(tmp_path)
        else:
            settings += ("model.dtype=bfloat16",)  # with masters, whose residuals alone are copied
        found, hashes, waited = [], set(), Checkpoints.save
        for background in ("on", "off"):
            output, at_once = tmp_path / background, mock.Mock(side_effect=waited)
            with mock.patch.object(Checkpoints, "save", lambda *given, at_once=at_once: at_once(*given)):
                config = load(recipe, str(output), *settings, f"checkpoint.background={background}")
                hashes.add(train(config).state_hash)
            assert at_once.call_count == (1 if background == "on" else 5)
            found.append(contents(output))
        assert len(hashes) == 1
        assert found[0] == found[1] and "checkpoint-3/optimizer.safetensors" in found[0]

    def test_a_snapshot_is_of_its_step(self, recipe: Path, tmp_path: Path) -> None:
        """Training goes on while it is read, and the next one takes the same memory."""
        training = assembled(load(recipe, str(tmp_path / "run"), "model.dtype=bfloat16"))
        steps(training, 1)
        buffer = state.HostBuffer(snapshot_bytes(training.state), training.device)
        for _ in range(2):
            snapshot, digest = Snapshot.of(training.state, buffer), training.state.hash()
            steps(training, 1)
            buffer.wait()
            assert snapshot.digest() == digest != training.state.hash()
        own = {id(value.read().base) for value in snapshot.weights.values()}
        assert len(own) == 1, "the copies are in one piece of memory"
        buffer.close()

    def test_the_memory_is_that_of_the_state_as_it_is_kept(self, recipe: Path, tmp_path: Path) -> None:
        """bf16 weight, 16-bit residual, two float32 averages: 12 bytes a parameter, and what aligns tensors."""
        training = assembled(load(recipe, str(tmp_path / "run"), "model.dtype=bfloat16", "optim.name=adamw"))
        steps(training, 1)
        numbers = [p.numel() for _, p in training.state.own_parameters()]
        assert sum(numbers) * 12 <= snapshot_bytes(training.state) < sum(numbers) * 12 + 4 * 64 * len(numbers)

    def test_a_snapshot_that_grew_takes_a_larger_buffer(self, recipe: Path, tmp_path: Path) -> None:
        """A parameter that has its first gradient later has states that the first buffer has no room for."""
        training = assembled(load(recipe, str(tmp_path / "run"), "checkpoint.background=on"))
        state, lines = training.state, list[str]()
        with saving.Saves(training.checkpoints, "on", training.device, lines.append) as saves:
            saves.prepare(state)
            small = snapshot_bytes(state)
            steps(training, 1)
            assert snapshot_bytes(state) > 2 * small
            digest = state.hash()
            assert saves.save(state, waits=False) is None
            saves.wait(state)
            steps(training, 1)
        assert lines == [f"saved {training.checkpoints.folder(1)}"]
        training.checkpoints.load(state, 1)
        assert state.hash() == digest


class TestKills:
    def test_at_the_calls_of_saves(self, forks: Forks, expected: str, recipe: Path) -> None:
        with memory_folder() as folder:
            output, recorder = folder / "run", Recorder()
            output.mkdir()
            words = ("train", recipe, f"train.output_dir={output}", *THREE_SAVES)
            with observed(OfThread(SAVER, recorder)):
                train(load(recipe, str(output), *THREE_SAVES))
            reported, commits = rows(output), [call.op == "rename" for call in recorder.calls]
            assert sum(commits) >= 2 and len(commits) > 60
            for number in sorted({*range(0, len(commits), STRIDE), *np.flatnonzero(commits), len(commits) - 1}):
                shutil.rmtree(output)
                output.mkdir()
                killed = forks.run(*words, fault=("kill_in_save", int(number) + 1))
                at = f"call {number}: {recorder.calls[number]}"
                assert (killed.code, killed.err) == (-signal.SIGKILL, ""), at
                committed = [c.target.name for c in recorder.calls[:number] if c.op == "rename" and c.target]
                told = io.StringIO()
                again = train(load(recipe, str(output), *THREE_SAVES), resume="allow", console=told)
                assert again.state_hash == expected, at
                newest = next((name for name in reversed(committed) if name.startswith("checkpoint-")), None)
                assert ("resumed" in told.getvalue(), f"{newest}\n" in told.getvalue()) == (newest is not None,) * 2, at
                assert rows(output) == reported, at
                assert not [path.name for path in output.glob(".*") if path.name != ".lock"], at


class TestDisk:
    @pytest.mark.parametrize(("call", "code"), [(1, errno.ENOSPC), (40, errno.EIO), (-30, errno.ENOSPC)])
    def test_a_call_failing_ends_the_run(
        self, recipe: Path, tmp_path: Path, expected: str, call: int, code: int
    ) -> None:
        """At the next step, with exit 8 and the save's step; the older checkpoint is whole."""
        output, recorder = tmp_path / "run", Recorder()
        config = load(recipe, str(output), *THREE_SAVES, "train.steps=4", KEEP_ALL)
        with observed(OfThread(SAVER, recorder)):
            whole = train(config).state_hash
        number = call if call > 0 else len(recorder.calls) + call
        shutil.rmtree(output)
        with observed(OfThread(SAVER, FailAt(number, code))), pytest.raises(DiskError) as caught:
            train(config)
        assert (caught.value.exit_code, caught.value.errno) == (8, code)
        step = 3 if call < 0 else 1
        assert caught.value.what.startswith(f"the checkpoint of step {step} could not be saved: ")
        assert list(checkpoints(output)) == list(range(1, step))
        assert not list(output.glob(".tmp-*"))
        assert train(config, resume="allow").state_hash == whole

    def test_it_ends_at_the_next_step(self, recipe: Path, tmp_path: Path) -> None:
        """Not when the next checkpoint is due."""
        taken, take_step, failed = [], loop.take_step, threading.Event()

        def fail() -> None:
            failed.set()
            raise DiskError("planted")

        def noted(state: TrainState, *given: Any) -> Any:
            if state.step == 3:  # the fourth, after the save of the second has failed
                assert failed.wait(20)
                while any(t.name == SAVER for t in savers()):
                    time.sleep(0.001)
            taken.append(state.step)
            return take_step(state, *given)

        config = load(recipe, str(tmp_path / "run"), "train.steps=50", "checkpoint.every=2", "eval.every=null")
        with slowly(fail), mock.patch.object(loop, "take_step", noted), pytest.raises(DiskError) as caught:
            train(config)
        assert caught.value.what == "the checkpoint of step 2 could not be saved: planted"
        assert len(taken) in (3, 4)


class TestWaiting:
    def test_a_save_waits_for_the_one_before(self, recipe: Path, tmp_path: Path, expected: str) -> None:
        """And one line says that the disk is too slow; without a disk so slow none does."""
        under_way, told = [], io.StringIO()

        def wait() -> None:
            under_way.append(len([t for t in savers() if t.name == SAVER]))
            time.sleep(0.05)

        config = load(recipe, str(tmp_path / "run"), *THREE_SAVES, "train.steps=4")
        with slowly(wait), mock.patch.object(saving, "STANDSTILL_S", 0.01):
            train(config, console=told)
        assert under_way == [1, 1, 1]
        assert told.getvalue().count("training waits for the disk") == 1
        told = io.StringIO()
        with mock.patch.object(saving, "STANDSTILL_S", 60.0):
            assert train(load(recipe, str(tmp_path / "fast"), *THREE_SAVES), console=told).state_hash == expected
        assert "training waits" not in told.getvalue()
        saved = [line for line in told.getvalue().splitlines() if line.startswith("saved ")]
        assert [line.rpartition("-")[2] for line in saved] == ["1", "2", "3"]

    def test_the_end_by_an_error_waits(self, recipe: Path, tmp_path: Path) -> None:
        """The checkpoint before a bad step is there to go on from."""
        take_step = loop.take_step

        def bad(state: TrainState, *given: Any) -> Any:
            if state.step == 2:
                raise NumericError("planted")
            return take_step(state, *given)

        config = load(recipe, str(tmp_path / "run"), "checkpoint.every=2", "eval.every=null")
        with (
            slowly(lambda: time.sleep(0.2)),
            mock.patch.object(loop, "take_step", bad),
            pytest.raises(NumericError, match="planted"),
        ):
            train(config)
        assert list(checkpoints(tmp_path / "run")) == [2]

    @pytest.mark.parametrize(
        ("failure", "line"),
        [
            (DiskError("no disk"), "the checkpoint of step 1 could not be saved: no disk"),
            (MemoryError("none left"), "the last checkpoint was not saved: none left"),
        ],
    )
    def test_the_end_by_an_error_stays_that_error(
        self, recipe: Path, tmp_path: Path, failure: Exception, line: str
    ) -> None:
        """Also where the save under way fails, of which a line tells."""

        def fail() -> None:
            time.sleep(0.1)
            raise failure

        told = io.StringIO()
        config = load(recipe, str(tmp_path / "run"), "checkpoint.every=1", "eval.every=null")
        planted = mock.patch.object(loop.Training, "_report", side_effect=[None, NumericError("planted")])
        with slowly(fail), planted, pytest.raises(NumericError, match="planted"):
            train(config, console=told)
        assert f"warning: {line}\n" in told.getvalue()

    @pytest.mark.sample(cases=1)
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_waits(self, forks: Forks, expected: str, recipe: Path, tmp_path: Path, number: int) -> None:
        """One that comes while a save is under way ends the run when both saves are whole."""
        words = ("train", recipe, f"train.output_dir={tmp_path}", *THREE_SAVES, KEEP_ALL)
        done = forks.run(*words, fault=("several", ["slow_save", 0.2], ["signal_in", "saving", number]))
        assert done.code == 128 + number
        found = checkpoints(tmp_path)
        assert f"after step {max(found)}, which is saved" in done.err and list(found) == list(range(1, max(found) + 1))
        assert not list(tmp_path.glob(".tmp-*"))
        again = forks.run(*words, "--resume")
        assert f"state hash: {expected}\n" in again.out

    def test_a_second_signal_gives_it_up(self, recipe: Path, tmp_path: Path) -> None:
        """What was begun is removed, and is not committed later."""
        written, write = threading.Event(), Checkpoints.write

        def signalled(self: Checkpoints, snapshot: Snapshot, fs: Any = None) -> str:
            if threading.current_thread().name != SAVER:
                return write(self, snapshot)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0.1)  # the main thread is on its way
            try:
                return write(self, snapshot, fs)
            finally:
                written.set()

        config = load(recipe, str(tmp_path / "run"), *THREE_SAVES)
        with mock.patch.object(Checkpoints, "write", signalled), pytest.raises(InterruptedRun, match="second signal"):
            train(config)
        assert written.is_set()
        assert checkpoints(tmp_path / "run") == {} and not list((tmp_path / "run").glob(".tmp-*"))


class TestRoom:
    @pytest.mark.parametrize(("free", "fits"), [(10**4, False), (10**9, True), (None, True)])
    def test_a_snapshot_takes_half_of_what_is_free(
        self, recipe: Path, tmp_path: Path, expected: str, free: int | None, fits: bool
    ) -> None:
        """Else tensors are read one at a time while training waits, and a line says so; where nothing is known, half
        of all memory counts."""
        told, threads = io.StringIO(), []
        config = load(recipe, str(tmp_path / "run"), *THREE_SAVES, "checkpoint.background=auto")
        with slowly(lambda: threads.append(1)), mock.patch.object(saving, "free_host_memory", return_value=free):
            assert train(config, console=told).state_hash == expected
        assert len(threads) == (2 if fits else 0)
        line = ": a snapshot takes "
        assert told.getvalue().count(line) == (not fits)

    def test_on_asks_nobody(self, recipe: Path, tmp_path: Path, expected: str) -> None:
        told, threads = io.StringIO(), []
        with slowly(lambda: threads.append(1)), mock.patch.object(saving, "free_host_memory", return_value=0):
            assert train(load(recipe, str(tmp_path / "run"), *THREE_SAVES), console=told).state_hash == expected
        assert len(threads) == 2

    def test_no_memory_after_all(self, recipe: Path, tmp_path: Path) -> None:
        with (
            mock.patch.object(state.np, "empty", side_effect=MemoryError),
            pytest.raises(OutOfMemoryError, match="of a snapshot") as caught,
        ):
            state.HostBuffer(1 << 20, loop.CPU)
        assert (caught.value.exit_code, caught.value.next) == (7, "set it to off")

    def test_none_is_taken_where_nothing_is_saved_on_the_way(self, recipe: Path, tmp_path: Path) -> None:
        with mock.patch.object(saving, "HostBuffer", side_effect=AssertionError):
            train(load(recipe, str(tmp_path / "run"), *THREE_SAVES, "checkpoint.every=3"))
            train(load(recipe, str(tmp_path / "other"), *THREE_SAVES, "checkpoint.every=null"))
