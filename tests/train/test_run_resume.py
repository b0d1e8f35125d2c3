"""A run that was stopped and resumed ends bit by bit where the uninterrupted one ends, and reports the same numbers."""

from __future__ import annotations

import hashlib
import io
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import threadpoolctl

import genesis.files.lock
from genesis import random
from genesis.backend import cpu
from genesis.errors import InterruptedRun
from genesis.ops import fp8
from genesis.train import loop
from genesis.train.config import Config
from genesis.train.metrics import read_metrics
from genesis.train.output import Output
from genesis.train.step import StepResult
from genesis_cli import session
from genesis_models.engine import Piece
from tests.sampling import some_full
from tests.train.runs import assembled, checkpoints, command, load, make, rows, signal_in_step, train

STEPS = 6
OPTIMIZERS = {
    "adamw": ("optim.name=adamw",),
    "sgd": ("optim.name=sgd", "optim.schedule=wsd", "optim.warmup_steps=1"),
    "lion": ("optim.name=lion", "optim.lr=1e-3", "train.max_grad_norm=null"),
    "muon": ("optim.name=muon",),
    "adafactor": ("optim.name=adafactor",),
    "bfloat16": ("model.dtype=bfloat16",),
    "bfloat16-adafactor": ("model.dtype=bfloat16", "optim.name=adafactor"),
    "recomputed": ("train.activation_checkpointing=full", "train.accumulation_steps=3", "train.batch_size=1"),
    "fp8": ("train.precision=fp8", "model.dtype=bfloat16"),
    "threads": ("train.threads=2", "train.batch_size=4", "train.accumulation_steps=1"),
    "epochs": ("train.steps=null", "train.epochs=2.5", "eval.every=null", "log.every=2"),
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A corpus that six steps pass over more than twice."""
    return make(tmp_path, documents=6)


def interrupted(config: Config, step: int, *, resume: bool) -> None:
    """A run that a signal stops at `step`."""
    with signal_in_step(step), pytest.raises(InterruptedRun, match=f"after step {step}, which is saved") as caught:
        train(config, resume=resume)
    assert caught.value.exit_code == 128 + signal.SIGTERM


def weights(config: Config) -> str:
    """The sha256 of the final model."""
    return hashlib.sha256((Path(config.train.output_dir) / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize("stop", (3, 1, 2, 4, 5))
def test_stopped_at_any_step(recipe: Path, stop: int) -> None:
    whole, halved = load(recipe, "whole"), load(recipe, "halved")
    expected = train(whole)
    interrupted(halved, stop, resume=False)
    found = train(halved, resume=True)
    assert (found.step, found.state_hash) == (STEPS, expected.state_hash)
    assert rows(halved.train.output_dir) == rows(whole.train.output_dir)
    assert weights(halved) == weights(whole)


@pytest.mark.parametrize("name", some_full(OPTIMIZERS, ("bfloat16-adafactor", "fp8", "epochs")))
def test_stopped_at_every_step(recipe: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "MIN_COLUMNS", 1)  # the model is narrow
    whole, chopped = load(recipe, "whole", *OPTIMIZERS[name]), load(recipe, "chopped", *OPTIMIZERS[name])
    expected = train(whole)
    assert expected.step > 4
    for step in range(1, expected.step):
        interrupted(chopped, step, resume=step > 1)
    found = train(chopped, resume=True)
    assert found.state_hash == expected.state_hash
    assert rows(chopped.train.output_dir) == rows(whole.train.output_dir)
    assert weights(chopped) == weights(whole)
    losses = [row["train/loss"] for row in rows(whole.train.output_dir) if "train/loss" in row]
    assert len(losses) == len(set(losses)) >= 3, "the run stood still"


def test_the_comparison_sees_what_differs(recipe: Path) -> None:
    """Without these differences the tests above would pass on a run that ignores its checkpoint."""
    base = load(recipe, "base")
    expected, reported = train(base), rows(base.train.output_dir)
    for number, override in enumerate(("train.seed=1", "optim.lr=1.01e-2", "train.batch_size=1", "train.steps=5")):
        other = load(recipe, f"other{number}", override)
        assert train(other).state_hash != expected.state_hash, override
        assert rows(other.train.output_dir) != reported, override


@pytest.mark.parametrize("lost", ["step", "loader", "optimizer", "masters", "model"])
def test_each_part_of_the_state_counts(recipe: Path, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that forgets one part of the state is refused when it is loaded: H notices."""
    from genesis.errors import ModelError
    from genesis.train import checkpoint

    config = load(recipe, "run", "model.dtype=bfloat16")
    interrupted(config, 3, resume=False)
    read = checkpoint.Checkpoints._read

    def forgetful(self: Any, state: Any, folder: Path) -> None:
        read(self, state, folder)
        if lost == "step":
            state.step = 2
        elif lost == "loader":
            state.loader.index = 0
        elif lost == "model":
            next(p for _, p in state.model.named_parameters()).detach().numpy().reshape(-1)[:1] = 0
        else:
            kept = ((n, t) for each in state.optimizer.state.values() for n, t in each.items() if n != "step")
            tensor = next(t for n, t in kept if (n == "master_low") == (lost == "masters"))
            tensor.numpy().reshape(-1)[:1] += 1

    monkeypatch.setattr(checkpoint.Checkpoints, "_read", forgetful)
    with pytest.raises(ModelError, match="the restored state differs"):
        train(config, resume=True)


def test_killed_before_the_first_save_starts_over(recipe: Path) -> None:
    whole, config = load(recipe, "whole"), load(recipe, "run", "checkpoint.every=null")
    with mock.patch.object(loop, "take_step", side_effect=RuntimeError("killed")), pytest.raises(RuntimeError):
        train(config)
    assert checkpoints(config.train.output_dir) == {}
    assert train(config, resume=True).state_hash == train(whole).state_hash


def test_a_finished_run_resumed_again_only_closes_again(recipe: Path) -> None:
    config = load(recipe, "run")
    expected, reported = train(config), rows(config.train.output_dir)
    with mock.patch.object(loop, "take_step", side_effect=AssertionError("trained on")):
        again = train(config, resume=True)
    assert (again.step, again.state_hash) == (STEPS, expected.state_hash)
    assert rows(config.train.output_dir) == reported


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize(
    "change",
    [
        ("log.every=2",),
        ("checkpoint.every=1", "checkpoint.save_total_limit=null"),
        ("checkpoint.save_final=false", "checkpoint.every=null"),
    ],
)
def test_reporting_and_saving_may_change_on_the_way(recipe: Path, change: tuple[str, ...]) -> None:
    expected = train(load(recipe, "whole"))
    interrupted(load(recipe, "run"), 3, resume=False)
    changed = load(recipe, "run", *change)
    assert train(changed, resume=True).state_hash == expected.state_hash


def test_a_run_may_go_on_beyond_its_first_end(recipe: Path) -> None:
    """With a rate that does not depend on the length of the run, a longer run passes through the shorter one's end."""
    constant = ("optim.schedule=constant", "checkpoint.save_total_limit=null")
    expected = train(load(recipe, "whole", *constant, "train.steps=9"))
    train(load(recipe, "run", *constant))
    assert train(load(recipe, "run", *constant, "train.steps=9"), resume=True).state_hash == expected.state_hash


def test_evaluation_and_samples_leave_no_trace(recipe: Path) -> None:
    silent = ("eval.every=null", "eval.prompts=[]")
    busy = ("eval.every=1", 'eval.prompts=["alpha beta", "gamma"]', "eval.temperature=2.0", "eval.batch_size=1")
    quiet, watched = load(recipe, "quiet", *silent), load(recipe, "watched", *busy)
    assert train(quiet).state_hash == train(watched).state_hash
    losses = [[r for r in rows(c.train.output_dir) if "train/loss" in r] for c in (quiet, watched)]
    assert losses[0] == losses[1]
    evaluations = [sum("eval/loss" in r for r in rows(c.train.output_dir)) for c in (quiet, watched)]
    assert evaluations == [1, STEPS]


def test_sampling_does_not_touch_the_random_generator(recipe: Path) -> None:
    states = []

    def noted(training: loop.Training, waits: bool) -> None:
        before = random.get_state()
        assert all(training.sample())
        states.append((before, random.get_state()))
        assert training.state.model.training, "the model was left as it is evaluated"

    with mock.patch.object(loop.Training, "_save", noted):
        train(load(recipe, "run"))
    assert len(states) == 3
    assert all(before == after for before, after in states)


class TestEvaluationsThatASignalCutShort:
    """What was not measured is measured after the resumption; what was is not written twice."""

    @pytest.fixture
    def expected(self, recipe: Path) -> list[dict[str, Any]]:
        train(load(recipe, "whole"))
        return rows(recipe.parent / "whole")

    def stop_in(self, recipe: Path, name: str, replacement: Callable[..., Any]) -> Config:
        config = load(recipe, "run")
        with mock.patch.object(loop, name, replacement), pytest.raises(InterruptedRun, match="after step 3"):
            train(config)
        return config

    @pytest.mark.sample(cases=1)
    @pytest.mark.parametrize("killed", [False, True])
    def test_while_measuring(self, recipe: Path, expected: list[dict[str, Any]], killed: bool) -> None:
        evaluate = loop.evaluate

        def signalled(*args: Any, **kwargs: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return evaluate(*args, **kwargs)

        config = self.stop_in(recipe, "evaluate", signalled)
        assert not [row for row in rows(config.train.output_dir) if "eval/loss" in row]
        if killed:  # after the evaluation that was owed, before the next save
            with mock.patch.object(loop, "take_step", side_effect=RuntimeError("killed")), pytest.raises(RuntimeError):
                train(config, resume=True)
            assert len([row for row in rows(config.train.output_dir) if "eval/loss" in row]) == 1
        train(config, resume=True)
        assert rows(config.train.output_dir) == expected

    def test_while_sampling(self, recipe: Path, expected: list[dict[str, Any]]) -> None:
        config = load(recipe, "run")

        def signalled(*args: Any, **how: Any) -> Iterator[Piece]:
            signal.raise_signal(signal.SIGINT)
            yield Piece(0, "never shown, as the signal came before it", 1)
            raise AssertionError("the sample went on after the signal")

        sampling = mock.patch("genesis_cli.session.training.continue_texts", signalled)
        with sampling, pytest.raises(InterruptedRun, match="after step 3") as caught:
            train(config)
        assert caught.value.exit_code == 128 + signal.SIGINT
        assert len([row for row in rows(config.train.output_dir) if "eval/loss" in row]) == 1
        train(config, resume=True)
        assert rows(config.train.output_dir) == expected


@contextmanager
def clock(years: int) -> Iterator[None]:
    """The wall clock put forward or back."""
    seconds, now, now_ns = years * 365 * 86400, time.time, time.time_ns

    class Skewed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(seconds=seconds)

    with (
        mock.patch("time.time", side_effect=lambda: now() + seconds),
        mock.patch("time.time_ns", side_effect=lambda: now_ns() + seconds * 10**9),
        mock.patch.object(genesis.files.lock, "datetime", Skewed),
    ):
        yield


def test_the_wall_clock_decides_nothing(recipe: Path) -> None:
    expected = train(load(recipe, "whole")).state_hash
    config = load(recipe, "run")
    with clock(10):
        interrupted(config, 2, resume=False)
    with clock(-10):
        interrupted(config, 4, resume=True)
    assert train(config, resume=True).state_hash == expected


def test_the_skewed_clock_is_seen() -> None:
    now = time.time()
    with clock(-10):
        assert time.time() < now - 9 * 365 * 86400
        assert genesis.files.lock.datetime.now().year < datetime.now().year - 8


def test_the_same_in_another_process(recipe: Path) -> None:
    expected = train(load(recipe, "here")).state_hash
    output = recipe.parent / "there"
    done = command("train", str(recipe), f"train.output_dir={output}", env={"PYTHONHASHSEED": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert f"state hash: {expected}\n" in done.stdout
    assert "<polyline" in (output / "loss.svg").read_text()


def test_the_thread_count_holds_for_blas_too(recipe: Path) -> None:
    """How BLAS splits a product decides its last bits, so `train.threads` must fix it whatever the environment says."""
    seen: list[int] = []
    before = cpu.threads()
    take_step = loop.take_step

    def observed(*args: Any) -> Any:
        seen.extend(pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas")
        return take_step(*args)

    np.ones((2, 2)) @ np.ones((2, 2))
    with threadpoolctl.threadpool_limits(2, user_api="blas"), mock.patch.object(loop, "take_step", observed):
        train(load(recipe, "run", "train.steps=1", "train.threads=1"))
        after = [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    assert set(seen) == {1}
    assert (set(after), cpu.threads()) == ({2}, before)


def test_a_resume_on_another_number_of_threads_says_so(tmp_path: Path) -> None:
    config, said, usual = make(tmp_path), [], cpu.threads()
    for threads, steps in ((1, 2), (2, 3), (2, 4)):
        told = io.StringIO()
        cpu.set_threads(threads)
        try:
            changed = load(config, "run", f"train.steps={steps}", "train.threads=null", "optim.schedule=constant")
            train(changed, resume=steps > 2, console=told)
        finally:
            cpu.set_threads(usual)
        said.append("last bits may differ" in told.getvalue())
    assert said == [False, True, False]


def test_the_last_lines_say_what_this_process_did_and_where_the_run_stands(recipe: Path, tmp_path: Path) -> None:
    config = load(recipe, tmp_path / "run", "eval.prompts=[]")
    interrupted(config, 2, resume=False)
    for wanted, absent in (("done: 4 steps", "6 steps"), ("nothing was left to do", " steps in ")):
        told = io.StringIO()
        session.train(config, resume=True, console=Output(told))
        [line] = [line for line in told.getvalue().splitlines() if line.startswith("done: ")]
        assert wanted in line and line.endswith("complete at step 6") and absent not in line


def test_a_run_shows_loss_and_time_before_the_first_row(recipe: Path, tmp_path: Path) -> None:
    config = load(recipe, tmp_path / "run", "eval.prompts=[]", "eval.every=null", "log.every=6")
    for resume in (False, True):
        told = io.StringIO()
        with suppress(InterruptedRun), signal_in_step(3) if not resume else nullcontext():
            session.train(config, resume=resume, console=Output(told))
        first = 5 if resume else 2
        lines = [line for line in told.getvalue().splitlines() if line.startswith("step ")]
        assert lines[0].startswith(f"step {first}/6  loss ") and "ETA 0:0" in lines[0], lines
        assert len(lines) == 1 + resume  # the row of step 6
    assert [row["train/global_step"] for row in rows(tmp_path / "run") if "train/loss" in row] == [6]


class FakeDevice:
    """Steps whose loss is their number, and a record of when their figures are asked for and read."""

    def __init__(self, state: Any) -> None:
        self.state, self.made, self.read = state, list[StepResult](), list[tuple[int, int]]()

    def take(self, batches: Any, lr: float) -> None:
        self.state.step += 1
        self.made.append(StepResult(float(self.state.step), 1, 1, 1.0, 0.5))

    def reading(self) -> Any:
        made, self.made, asked = self.made, [], self.state.step

        def results() -> list[StepResult]:
            self.read.append((asked, self.state.step))
            return made

        return SimpleNamespace(results=results)


@pytest.mark.parametrize("every, read", [(9, (3, 8)), (6, (6, 8)), (3, (3, 6))])
def test_first_figures_of_a_device_are_read_when_they_are_there(
    recipe: Path, tmp_path: Path, every: int, read: tuple[int, int]
) -> None:
    """Asked for after step 3 and read when the host, which is a few steps ahead, need not wait; no row changes."""
    config = load(recipe, tmp_path / "run", f"log.every={every}", "train.steps=18")
    training = assembled(config)
    with training.open():
        device: Any = FakeDevice(training.state)
        training._on_device, told = device, io.StringIO()
        training.progress._output = Output(told)
        while training.state.step < 18:
            training._step([])
            training._report()
        training._catch_up()
        assert device.read[0] == read
        found = {row["train/global_step"]: row["train/loss"] for row in read_metrics(training.metrics.path)}
        assert found == {step: step - (every - 1) / 2 for step in range(every, 19, every)} | (
            {18: 17.0} if 18 % every else {}
        )
        first = next(line for line in told.getvalue().splitlines() if line.startswith("step "))
        assert first.startswith("step 3/18  loss 2.0000") if every > 8 else "lr" in first
