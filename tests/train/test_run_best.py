"""The best checkpoint and early stopping: which evaluation is the best, what is kept of it, and where a run ends."""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from genesis.errors import ConfigError, InterruptedRun, ModelError
from genesis.train import loop
from genesis.train.checkpoint import _best
from genesis.train.config import Config
from genesis.train.evaluation import Evaluation
from genesis.train.state import Best
from tests.files.faults import Recorder
from tests.train.runs import (
    Forks,
    checkpoints,
    load,
    make,
    make_lora,
    memory_folder,
    observed,
    rows,
    signal_in_step,
    train,
)

pytestmark = pytest.mark.xdist_group("runs in forks")
QUICK = ("eval.every=1", "eval.prompts=[]", "checkpoint.every=2", "checkpoint.background=off", "checkpoint.best=true")
# A lower one, one that is not a number, one that is equal: the best is from step 2, and step 5 the third after it.
LOSSES = (5.0, 3.0, 4.0, math.nan, 3.0, 2.0, 6.0, 7.0)
BEST = 2


@contextmanager
def evaluated(losses: Sequence[float] = LOSSES) -> Iterator[None]:
    """Evaluations find these losses after the steps from 1 on, and 1.0 before them; training is what it is."""

    def evaluate(*args: Any, **how: Any) -> Evaluation | None:
        if how["stop"]():
            return None
        step = next(each.step for each in states)
        return Evaluation((1.0, *losses)[step], 1, 1, {"token_accuracy": 0.5}, 1.0)

    states: list[Any] = []
    begin = loop.Training.__post_init__

    def noted(self: loop.Training) -> None:
        states[:] = [self.state]
        begin(self)

    with mock.patch.object(loop, "evaluate", evaluate), mock.patch.object(loop.Training, "__post_init__", noted):
        yield


def ended(config: Config, **how: Any) -> tuple[loop.Summary, str]:
    """A run, and what it printed."""
    console = io.StringIO()
    with evaluated():
        return train(config, console=console, **how), console.getvalue()


def recorded(output: Path, step: int) -> Best:
    """The best evaluation as a checkpoint records it."""
    return _best(json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text()), output)


def weights(folder: Path) -> str:
    """The sha256 of a folder's model."""
    (file,) = folder.glob("*model.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("corpus"))


def run_of(recipe: Path, tmp_path: Path, *settings: str) -> Config:
    return load(recipe, str(tmp_path / "run"), *QUICK, *settings)


def test_the_best_evaluation_is_the_first_of_the_lowest() -> None:
    best = Best()
    found = []
    for step, loss in enumerate((math.inf, math.nan, 3.0, 3.0, -math.inf, 2.0), 1):
        best = best.after(step, loss, 8)
        assert _best(json.loads(json.dumps({"best": best.to_json()})), Path()) == best
        found.append((best.step, best.since))
    assert found == [(-1, 1), (-1, 2), (3, 0), (3, 1), (3, 2), (6, 0)]
    assert best.after(7, math.nan, 9) == Best(6, 2.0, 8, 1)
    assert best.after(7, 5.0, 9) == Best(7, 5.0, 9), "with another eval.max_batches, say"


@pytest.mark.parametrize(
    "wrong", [{"loss": None}, {"targets": "8"}, {"loss": "x"}, {"since": -2}, {"step": -2}, {"step": 1.0}, {"step": []}]
)
def test_a_record_of_the_best_that_is_malformed_is_refused(wrong: dict[str, Any]) -> None:
    assert _best({}, Path()) == Best()  # of an earlier version
    with pytest.raises(ModelError):
        _best({"best": {"step": 2, "loss": 1.5, "targets": 8, "since": 0, **wrong}}, Path())


@pytest.mark.parametrize(("background", "recipe_of"), [("off", make), ("on", make_lora)])
def test_early_stopping_keeps_the_best_checkpoint_and_makes_it_the_model(
    background: str, recipe_of: Any, tmp_path: Path
) -> None:
    settings = ("train.early_stop=3", "checkpoint.save_total_limit=1", f"checkpoint.background={background}")
    summary, said = ended(run_of(recipe_of(tmp_path), tmp_path, "train.steps=8", *settings))
    output = tmp_path / "run"
    assert summary.step == 5 and summary.best == Best(BEST, 3.0, 1, 3)
    assert summary.state_hash == checkpoints(output)[5]
    final = json.loads((output / "trainer_state.json").read_text())
    assert (final["step"], final["state_hash"]) == (BEST, checkpoints(output)[BEST])
    assert list(checkpoints(output)) == [BEST, 5]
    assert weights(output) == weights(output / f"checkpoint-{BEST}") != weights(output / "checkpoint-5")
    assert [line for line in said.splitlines() if "step 5" in line and f"step {BEST}" in line]
    assert f"is from step {BEST}" in said


def test_without_a_best_checkpoint_the_model_is_that_of_the_last_step(corpus: Path, tmp_path: Path) -> None:
    settings = ("train.early_stop=3", "checkpoint.best=false", "checkpoint.save_total_limit=1")
    summary, said = ended(run_of(corpus, tmp_path, "train.steps=8", *settings))
    assert (summary.step, list(checkpoints(tmp_path / "run"))) == (5, [5])
    assert weights(tmp_path / "run") == weights(tmp_path / "run" / "checkpoint-5")
    assert "is from step 5" in said and "checkpoint.best" in said


def test_the_evaluation_before_the_first_step_does_not_count(corpus: Path, tmp_path: Path) -> None:
    """It has no checkpoint, and here the lowest loss."""
    summary, _ = ended(run_of(corpus, tmp_path, "train.steps=3", "eval.at_start=true", "train.early_stop=2"))
    assert (summary.step, summary.best) == (3, Best(BEST, 3.0, 1, 1))
    assert [row["eval/loss"] for row in rows(tmp_path / "run") if "eval/loss" in row] == [1.0, 5.0, 3.0, 4.0]


def test_a_run_that_stops_and_resumes_is_the_uninterrupted_one(corpus: Path, tmp_path: Path) -> None:
    settings = ("train.steps=8", "train.early_stop=3", "checkpoint.save_total_limit=null")
    whole, chopped = (load(corpus, str(tmp_path / name), *QUICK, *settings) for name in ("whole", "chopped"))
    expected, _ = ended(whole)
    for step in (2, 3):
        with evaluated(), signal_in_step(step), pytest.raises(InterruptedRun):
            train(chopped, resume=step > 2)
    found, _ = ended(chopped, resume=True)
    assert (found.step, found.state_hash, found.best) == (5, expected.state_hash, expected.best)
    assert rows(tmp_path / "chopped") == rows(tmp_path / "whole")
    for step in (2, 4, 5):
        assert recorded(tmp_path / "chopped", step).step == recorded(tmp_path / "whole", step).step == BEST
    assert recorded(tmp_path / "chopped", 5) == recorded(tmp_path / "whole", 5) == Best(BEST, 3.0, 1, 3)
    assert weights(tmp_path / "chopped") == weights(tmp_path / "whole")
    again, _ = ended(chopped, resume=True)  # it is complete
    assert (again.step, again.state_hash) == (5, expected.state_hash)


def test_a_run_that_stopped_early_goes_on_with_more_patience(corpus: Path, tmp_path: Path) -> None:
    ended(run_of(corpus, tmp_path, "train.steps=8", "train.early_stop=3"))
    found, _ = ended(run_of(corpus, tmp_path, "train.steps=8", "train.early_stop=4"), resume=True)
    whole, _ = ended(load(corpus, str(tmp_path / "whole"), *QUICK, "train.steps=8"))
    assert (found.step, found.best, found.state_hash) == (8, Best(6, 2.0, 1, 2), whole.state_hash)
    assert (list(checkpoints(tmp_path / "run")), list(checkpoints(tmp_path / "whole"))) == ([5, 6, 8], [4, 6, 8])


def test_resuming_from_the_best(corpus: Path, tmp_path: Path) -> None:
    config = run_of(corpus, tmp_path, "train.steps=8", "train.early_stop=3", "checkpoint.save_total_limit=1")
    ended(config)
    found, said = ended(config, resume_from="best")
    assert (found.step, found.best) == (5, Best(BEST, 3.0, 1, 3)) and f"resumed at step {BEST} " in said
    assert (tmp_path / "run" / "abandoned-1" / "checkpoint-5").is_dir()
    other = load(corpus, str(tmp_path / "none"), *QUICK, "train.steps=1")
    with evaluated([math.nan]):
        train(other)
    with pytest.raises(ConfigError) as caught:
        train(other, resume_from="best")
    assert (caught.value.exit_code, caught.value.where) == (3, "--resume-from")


def test_the_best_of_an_abandoned_future_is_no_longer_the_best(corpus: Path, tmp_path: Path) -> None:
    """Step 6 is the best, and rotation has removed the one before it, step 2."""
    config = run_of(corpus, tmp_path, "train.steps=8", "checkpoint.save_total_limit=3")
    ended(config)
    assert list(checkpoints(tmp_path / "run")) == [2, 4, 6, 8]
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    with evaluated((5.0, 3.0, 4.0, 4.0, 4.5, 3.5, 6.0, 7.0)):
        console = io.StringIO()
        found = train(config, resume_from="checkpoint-4", console=console)
    assert "checkpoint-2, which" in console.getvalue()
    assert found.best == Best(6, 3.5, 1, 2) == recorded(tmp_path / "run", 8)
    assert weights(tmp_path / "run") == weights(tmp_path / "run" / "checkpoint-6")
    assert list(checkpoints(tmp_path / "run" / "abandoned-1")) == [6, 8]


@pytest.mark.parametrize("killed", [False, True])
def test_an_evaluation_that_a_signal_put_off_counts_once(corpus: Path, tmp_path: Path, killed: bool) -> None:
    """Its checkpoint was saved before it was known to be the best, and is saved again."""
    config = run_of(corpus, tmp_path, "train.steps=3", "checkpoint.every=null")
    with signal_in_step(2, signal.SIGINT), evaluated(), pytest.raises(InterruptedRun):
        train(config)
    assert recorded(tmp_path / "run", 2) == Best(1, 5.0, 1)
    if killed:  # after the evaluation that was owed, before its checkpoint
        with (
            evaluated(),
            mock.patch.object(loop.Training, "_save", side_effect=RuntimeError("killed")),
            pytest.raises(RuntimeError),
        ):
            train(config, resume=True)
    with (
        evaluated(),
        mock.patch.object(loop, "take_step", side_effect=RuntimeError("stop")),
        pytest.raises(RuntimeError),
    ):
        train(config, resume=True)
    assert recorded(tmp_path / "run", 2) == Best(2, 3.0, 1)
    assert ended(config, resume=True)[0].best == Best(2, 3.0, 1, 1)
    assert [row["eval/loss"] for row in rows(tmp_path / "run") if "eval/loss" in row] == [5.0, 3.0, 4.0]


@pytest.mark.parametrize("row", [{"eval/loss": "low"}, {"eval/loss": None, "eval/num_tokens": []}, {"eval/loss": -1.0}])
def test_a_row_that_somebody_changed_is_no_bug(corpus: Path, tmp_path: Path, row: dict[str, Any]) -> None:
    config = run_of(corpus, tmp_path, "train.steps=2", "checkpoint.every=null")
    with signal_in_step(1, signal.SIGINT), evaluated(), pytest.raises(InterruptedRun):
        train(config)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"train/global_step": 1, **row}) + "\n")
    assert ended(config, resume=True)[0].best.step == 2


@pytest.mark.full
def test_killed_at_the_calls_of_a_run(forks: Forks) -> None:
    """Each evaluation is the best, and one checkpoint is kept beside it: the newest always names one that is there."""
    with memory_folder() as folder:
        recipe, output = make(folder), folder / "run"
        settings = (*QUICK, "train.steps=3", "checkpoint.save_total_limit=1", "checkpoint.every=null")
        train(load(recipe, "run", *settings))
        shutil.rmtree(output)
        output.mkdir()
        recorder = Recorder()
        with observed(recorder):
            expected = train(load(recipe, "run", *settings))
        end = (checkpoints(output), rows(output), weights(output))
        assert [*end[0]] == [2, 3] and expected.best.step == 3
        numbers = [n for n, call in enumerate(recorder.calls) if call.op in ("rename", "fsync_dir", "rmdir")]
        for number in numbers[1::19]:
            shutil.rmtree(output)
            output.mkdir()
            words = ("train", recipe, f"train.output_dir={output}", *settings)
            assert forks.run(*words, fault=("kill_at", number + 1)).code == -signal.SIGKILL
            train_again = load(recipe, "run", *settings)
            if steps := checkpoints(output):
                assert recorded(output, max(steps)).step in steps
            assert train(train_again, resume="allow").state_hash == expected.state_hash
            assert (checkpoints(output), rows(output), weights(output)) == end


@pytest.mark.full
def test_ranks_end_where_one_process_ends(forks: Forks, tmp_path: Path) -> None:
    """With a rate at which the loss rises after the second step."""
    recipe, found = make(tmp_path), []
    settings = (*QUICK, "train.steps=6", "train.early_stop=2", "checkpoint.save_total_limit=1")
    settings += ("optim.name=sgd", "optim.lr=1.0", "optim.schedule=constant")
    for ranks in ("1", "2"):
        output = tmp_path / ranks
        done = forks.run("train", recipe, f"train.output_dir={output}", *settings, "--nproc", ranks)
        assert (done.code, done.err) == (0, "")
        found.append((checkpoints(output), rows(output), weights(output)))
    assert found[0] == found[1]
    assert [*found[0][0]] == [2, 4] and weights(tmp_path / "2") == weights(tmp_path / "2" / "checkpoint-2")
