"""SIGINT and SIGTERM at every stage of a run: what is saved, how it ends, and that it then resumes to the same end."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from genesis.errors import InterruptedRun
from genesis.train import loop, signals
from genesis.train.signals import STOPPING_LINE, Interrupts
from tests.train.conftest import hangup_ends
from tests.train.runs import ENVIRONMENT, ROOT, Ended, Forks, checkpoints, load, make, rows, train

pytestmark = pytest.mark.xdist_group("runs in forks")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
AT_ONCE = "checkpoint.background=off"  # else training may be in the next step when a save meets the signal


class TestInterrupts:
    @pytest.mark.parametrize("number", SIGNALS)
    def test_the_first_is_remembered_where_it_is_deferred(self, number: int) -> None:
        with Interrupts() as interrupts:
            interrupts.deferred = True
            assert interrupts.received is None
            signal.raise_signal(number)
            assert interrupts.received == number

    @pytest.mark.parametrize("number", SIGNALS)
    def test_the_first_stops_at_once_where_it_is_not(self, number: int) -> None:
        with pytest.raises(InterruptedRun, match="nothing to save") as caught, Interrupts():
            signal.raise_signal(number)
        assert caught.value.exit_code == 128 + number

    def test_where_nothing_is_ever_saved_nothing_is_said_of_it(self) -> None:
        with pytest.raises(InterruptedRun) as caught, Interrupts(saves=False):
            signal.raise_signal(signal.SIGTERM)
        assert (caught.value.exit_code, caught.value.what) == (143, "SIGTERM ended the command")
        assert "resume" not in caught.value.next

    @pytest.mark.parametrize("first, second", [SIGNALS, SIGNALS[::-1]])
    def test_the_second_stops_now(self, first: int, second: int) -> None:
        with Interrupts() as interrupts:
            interrupts.deferred = True
            signal.raise_signal(first)
            with pytest.raises(InterruptedRun, match="without saving") as caught:
                signal.raise_signal(second)
        assert caught.value.exit_code == 128 + second

    @pytest.mark.parametrize("number", SIGNALS)
    def test_the_same_at_once_is_the_first_still(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """As `timeout` sends it: to the process and to its group."""
        now = iter((5.0, 5.2, 5.26))
        monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: next(now)))
        with Interrupts() as interrupts:
            interrupts.deferred = True
            signal.raise_signal(number)
            signal.raise_signal(number)
            assert interrupts.received == number
            with pytest.raises(InterruptedRun, match="without saving"):
                signal.raise_signal(number)

    def test_handlers_and_hook_are_put_back(self) -> None:
        numbers = (*SIGNALS, signal.SIGALRM)
        before, hook = [signal.getsignal(number) for number in numbers], sys.unraisablehook
        with Interrupts():
            assert signal.getsignal(signal.SIGTERM) != before[1]
            with pytest.raises(InterruptedRun):
                signal.raise_signal(signal.SIGTERM)
        assert [signal.getsignal(number) for number in numbers] == before
        assert sys.unraisablehook == hook
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)

    def test_a_signal_in_a_finalizer_is_not_lost(self) -> None:
        """Python drops what a finalizer raises, and the memory of every tensor has one."""

        class Finalized:
            def __del__(self) -> None:
                signal.raise_signal(signal.SIGTERM)

        def work() -> None:
            Finalized()
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                time.sleep(0.001)

        with Interrupts(), pytest.raises(InterruptedRun):
            work()

    def test_a_stop_that_a_library_catches_is_not_lost(self) -> None:
        def work() -> None:
            with contextlib.suppress(Exception):
                signal.raise_signal(signal.SIGTERM)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                time.sleep(0.01)

        with pytest.raises(InterruptedRun), Interrupts():
            work()

    def test_what_cleans_up_after_a_stop_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(signals, "_LOST_CHECK_SECONDS", 0.001)
        cleaned = []

        def work() -> None:
            with contextlib.ExitStack() as stack:
                stack.callback(cleaned.append, "stack")
                stack.callback(time.sleep, 0.02)
                try:
                    signal.raise_signal(signal.SIGTERM)
                finally:
                    with contextlib.suppress(OSError):
                        raise OSError
                    time.sleep(0.02)
                    cleaned.append("block")

        with pytest.raises(InterruptedRun), Interrupts():
            work()
        assert cleaned == ["block", "stack"]

    def test_other_errors_of_finalizers_go_where_they_went(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[Any] = []
        monkeypatch.setattr(sys, "unraisablehook", seen.append)

        class Broken:
            def __del__(self) -> None:
                raise ValueError("broken")

        with Interrupts():
            Broken()
        assert [type(one.exc_value) for one in seen] == [ValueError]

    def test_outside_the_main_thread_it_does_nothing(self) -> None:
        before, seen = signal.getsignal(signal.SIGTERM), []

        def work() -> None:
            with Interrupts():
                seen.append(signal.getsignal(signal.SIGTERM))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [before]


@pytest.fixture(scope="module")
def expected(recipe: Path) -> tuple[str, list[dict[str, Any]]]:
    """H and the metrics of the uninterrupted run."""
    return train(load(recipe, "whole")).state_hash, rows(recipe.parent / "whole")


def check_resumes(forks: Forks, recipe: Path, output: Path, expected: tuple[str, list[dict[str, Any]]]) -> None:
    """The run in `output` goes on to the same end."""
    done = forks.run("train", recipe, "--resume=allow", f"train.output_dir={output}")
    assert (done.code, done.err) == (0, "")
    assert f"state hash: {expected[0]}\n" in done.out
    assert rows(output) == expected[1]


def test_the_check_fails_on_another_run(
    forks: Forks, recipe: Path, tmp_path: Path, expected: tuple[str, list[dict[str, Any]]]
) -> None:
    with pytest.raises(AssertionError):
        check_resumes(forks, recipe, tmp_path / "run", ("0" * 64, expected[1]))
    with pytest.raises(AssertionError):
        check_resumes(forks, recipe, tmp_path / "run", (expected[0], expected[1][:-1]))


@pytest.mark.sample
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("place, step", [("step", 1), ("evaluation", 3), ("sampling", 3), ("saving", 2)])
def test_a_signal_at_any_stage(
    forks: Forks,
    recipe: Path,
    tmp_path: Path,
    expected: tuple[str, list[dict[str, Any]]],
    place: str,
    step: int,
    number: int,
) -> None:
    words = ("train", recipe, f"train.output_dir={tmp_path}", AT_ONCE)
    done = forks.run(*words, fault=("signal_in", place, number))
    assert done.code == 128 + number
    name = signal.Signals(number).name
    assert done.err.startswith(f"{STOPPING_LINE}\nstopped: {name} ended the run after step {step}, which is saved\n")
    assert str(tmp_path / f"checkpoint-{step}") in done.err and "--resume" in done.err
    assert "Traceback" not in done.err
    assert max(checkpoints(tmp_path)) == step
    check_resumes(forks, recipe, tmp_path, expected)


@pytest.mark.parametrize("place, saved", [("step", []), ("evaluation", [2]), ("sampling", [2]), ("saving", [])])
def test_a_second_signal_stops_now(
    forks: Forks,
    recipe: Path,
    tmp_path: Path,
    expected: tuple[str, list[dict[str, Any]]],
    place: str,
    saved: list[int],
) -> None:
    words = ("train", recipe, f"train.output_dir={tmp_path}", AT_ONCE)
    done = forks.run(*words, fault=("signal_in", place, *SIGNALS))
    assert (done.code, "without saving" in done.err) == (143, True)
    assert list(checkpoints(tmp_path)) == saved
    assert not list(tmp_path.glob(".tmp-*"))
    check_resumes(forks, recipe, tmp_path, expected)


@pytest.mark.sample
@pytest.mark.parametrize(
    "place, number",
    [
        *((place, number) for place in ("preparation", "tokenizer", "tokens", "closing") for number in SIGNALS),
        *((place, signal.SIGTERM) for place in ("reading", "gzip", "model")),
        ("tokens", signal.SIGHUP),
    ],
)
def test_with_nothing_to_save_it_stops_at_once(
    forks: Forks, recipe: Path, tmp_path: Path, expected: tuple[str, list[dict[str, Any]]], place: str, number: int
) -> None:
    words = ("train", recipe, f"train.output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}")
    done = forks.run(*words, fault=("signal_in", place, number))
    assert (done.code, "nothing to save" in done.err) == (128 + number, True)
    assert "Traceback" not in done.err
    assert list(checkpoints(tmp_path / "run")) == ([4, 6] if place == "closing" else [])
    check_resumes(forks, recipe, tmp_path / "run", expected)


def test_before_the_first_step_there_is_nothing_to_save(recipe: Path, tmp_path: Path) -> None:
    """A signal that comes when it is deferred already, and before anything was trained."""

    def signalled(training: loop.Training) -> None:
        signal.raise_signal(signal.SIGTERM)

    begun = mock.patch.object(loop.Training, "_recall_evaluation", signalled)
    with begun, pytest.raises(InterruptedRun, match="before the first step") as caught:
        train(load(recipe, str(tmp_path / "run")))
    assert (caught.value.exit_code, "--resume" in caught.value.next) == (143, False)
    assert checkpoints(tmp_path / "run") == {}


def test_at_random_instants(
    forks: Forks, recipe: Path, tmp_path: Path, expected: tuple[str, list[dict[str, Any]]]
) -> None:
    """The same run is stopped again and again, each time within the time that a whole one takes here and now."""
    begun = time.perf_counter()
    forks.run("train", recipe, f"train.output_dir={tmp_path / 'whole'}")
    whole, tmp_path = time.perf_counter() - begun, tmp_path / "run"
    generator, codes = random.Random(3), []
    for turn in range(8):
        child = forks.start("train", recipe, "--resume=allow", f"train.output_dir={tmp_path}")
        time.sleep(generator.uniform(0, whole))
        number = SIGNALS[turn % 2]
        os.kill(child.pid, number)
        done = child.wait()
        codes.append(done.code)
        assert done.code in (0, 128 + number, -number), done.err
        assert "Traceback" not in done.err
    assert any(code >= 128 for code in codes), codes
    check_resumes(forks, recipe, tmp_path, expected)


@pytest.mark.parametrize("number", [signal.SIGHUP])
def test_a_closed_terminal_is_saved_as_at_sigterm(
    forks: Forks, recipe: Path, tmp_path: Path, expected: tuple[str, list[dict[str, Any]]], number: int
) -> None:
    done = forks.run("train", recipe, f"train.output_dir={tmp_path}", fault=("signal_in", "step", number))
    assert (done.code, max(checkpoints(tmp_path))) == (129, 1)
    assert "after step 1, which is saved" in done.err
    check_resumes(forks, recipe, tmp_path, expected)


def test_a_signal_while_a_checkpoint_is_read(
    forks: Forks, recipe: Path, tmp_path: Path, expected: tuple[str, list[dict[str, Any]]]
) -> None:
    words = ("train", recipe, f"train.output_dir={tmp_path}")
    assert forks.run(*words, fault=("signal_in", "step", signal.SIGTERM)).code == 143
    done = forks.run(*words, "--resume", fault=("signal_in", "loading", signal.SIGTERM))
    assert (done.code, "nothing to save" in done.err) == (143, True)
    check_resumes(forks, recipe, tmp_path, expected)


def test_a_signal_while_the_picture_is_drawn(forks: Forks, recipe: Path, tmp_path: Path) -> None:
    fault = ("signal_in", "picture", signal.SIGTERM)
    done = forks.run("train", recipe, f"train.output_dir={tmp_path}", fault=fault, picture=True)
    assert (done.code, "nothing to save" in done.err) == (143, True)
    assert (tmp_path / "model.safetensors").exists()


def test_a_tokenizer_in_training_is_left_at_once(tmp_path: Path) -> None:
    """The library works for many seconds in one call, and a process of its own must end without it."""
    chance, recipe = random.Random(0), make(tmp_path)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=9)) for _ in range(60_000)]
    (tmp_path / "doc99.txt").write_text(" ".join(words))
    output, settings = tmp_path / "run", ("model.config.vocab_size=60000", "data.eval_fraction=0")
    line = [sys.executable, "-m", "genesis_cli.main", "train", str(recipe), f"train.output_dir={output}", *settings]
    process = subprocess.Popen(line, cwd=ROOT, env=os.environ | ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").glob(".tmp-tokenizer-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)  # the texts are handed over: the library is alone
    begun = time.monotonic()
    process.terminate()
    told = process.communicate(timeout=60)[1]
    assert time.monotonic() - begun < 1
    assert process.returncode == 143
    assert told.splitlines()[0] == "stopped: SIGTERM ended the run while there was nothing to save"
    assert not list((tmp_path / "cache").glob(".tmp-*")), "the work was not unwound"


class TestTold:
    """What the first signal says, from the handler, whatever the interrupted code does with stderr."""

    def tell(self, descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
        with Interrupts() as interrupts, open(descriptor, "w", closefd=False) as stderr:
            monkeypatch.setattr(sys, "stderr", stderr)
            interrupts.deferred = True
            signal.raise_signal(signal.SIGINT)

    def test_a_line_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reader, writer = os.pipe()
        self.tell(writer, monkeypatch)
        assert (
            os.read(reader, 1000).decode()
            == STOPPING_LINE + "\n"
            == "finishing this step, then saving (again: stop now)\n"
        )
        os.close(reader)
        os.close(writer)

    def test_a_bar_on_the_terminal_is_erased(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm")
        leader, follower = pty.openpty()
        self.tell(follower, monkeypatch)
        assert os.read(leader, 1000).decode() == f"\r\x1b[2K{STOPPING_LINE}\r\n"
        os.close(follower)
        os.close(leader)

    @pytest.mark.parametrize("kind", ["full", "closed"])
    def test_a_stderr_that_takes_nothing_is_not_waited_for(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        reader, writer = os.pipe()
        if kind == "closed":
            os.close(reader)
        else:
            os.set_blocking(writer, False)
            with contextlib.suppress(BlockingIOError):
                while os.write(writer, bytes(1 << 16)):
                    pass
            os.set_blocking(writer, True)
        self.tell(writer, monkeypatch)
        os.close(writer)
        if kind == "full":
            os.close(reader)


class TestHangup:
    @pytest.fixture(autouse=True)
    def from_a_terminal(self) -> Iterator[None]:
        with hangup_ends():
            yield

    def test_what_nohup_ignores_stays_ignored(self) -> None:
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            with Interrupts() as interrupts:
                signal.raise_signal(signal.SIGHUP)
                assert interrupts.received is None
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        finally:
            signal.signal(signal.SIGHUP, before)

    def test_one_right_behind_another_signal_is_no_second(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """systemd sends one behind its SIGTERM."""
        now = iter((5.0, 5.1, 5.3))
        monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: next(now)))
        with Interrupts() as interrupts:
            interrupts.deferred = True
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
            assert interrupts.received == signal.SIGTERM
            with pytest.raises(InterruptedRun, match="without saving"):
                signal.raise_signal(signal.SIGHUP)


class TestTerminal:
    """The cursor that a bar hides comes back however the run ends, and the terminal's settings are what they were."""

    def run(self, forks: Forks, recipe: Path, output: Path, *fault: Any, overrides: tuple[str, ...] = ()) -> Ended:
        """The run on a terminal; `out` is what the terminal got."""
        leader, follower = pty.openpty()
        data, over = bytearray(), threading.Event()

        def read() -> None:
            while select.select([leader], [], [], 0.05)[0] or not over.is_set():
                data.extend(os.read(leader, 65536) if select.select([leader], [], [], 0)[0] else b"")

        reader = threading.Thread(target=read)
        try:
            before = termios.tcgetattr(follower)
            reader.start()
            words = ("train", recipe, f"train.output_dir={output}", *overrides)
            done = forks.run(*words, fault=fault, out=os.ttyname(follower), environment={"TERM": "xterm"})
            assert termios.tcgetattr(follower) == before
        finally:
            over.set()
            reader.join()
            os.close(leader)
            os.close(follower)
        return Ended(done.code, data.decode(), done.err)

    @pytest.mark.sample(cases=2)
    @pytest.mark.parametrize(
        "code, fault",
        [
            (0, ()),
            (143, ("signal_in", "step", signal.SIGTERM)),
            (130, ("signal_in", "evaluation", signal.SIGINT, signal.SIGINT)),
            (143, ("signal_in", "tokens", signal.SIGTERM)),
            (9, ("nan_at", 2)),
        ],
    )
    def test_it_is_left_as_it_was(
        self, forks: Forks, recipe: Path, tmp_path: Path, code: int, fault: tuple[Any, ...]
    ) -> None:
        done = self.run(forks, recipe, tmp_path / "run", *fault, overrides=(f"data.cache_dir={tmp_path / 'cache'}",))
        assert done.code == code
        hidden, shown = (len(re.findall(rf"\x1b\[\?25{letter}", done.out)) for letter in "lh")
        assert hidden >= 1, "no bar was shown: the test proves nothing"
        assert hidden == shown
        assert done.out.rindex("\x1b[?25h") > done.out.rindex("\x1b[?25l")
