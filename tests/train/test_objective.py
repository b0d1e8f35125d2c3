"""An objective's figures: the same however a step is divided, in rows of metrics, evaluations and resumed runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from genesis.data.loader import Batch, PackedLoader
from genesis.errors import InterruptedRun
from genesis.train import step as shards
from genesis.train.metrics import MetricsWriter
from genesis.train.objective import NextTokens, Preparation
from genesis_cli.session import training
from tests.distributed.cases import Runs
from tests.train.counted import Counted, mean_id
from tests.train.runs import Forks, assembled, load, make, rows, signal_in_step, steps, train

QUIET = ("eval.every=null", "eval.prompts=[]", "checkpoint.every=null")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(training, "objective_of", lambda *run: Counted())
    return make(tmp_path)


def expected(loader: PackedLoader, steps: int, micro: int) -> list[float]:
    """The mean id of the targets of each of the first steps."""
    fresh = PackedLoader(loader.tokens, batch_size=loader.batch_size, seq_len=loader.seq_len, seed=loader.seed)
    return [mean_id([next(fresh) for _ in range(micro)]) for _ in range(steps)]


def check(found: list[dict[str, Any]], ids: list[float]) -> None:
    told = [row for row in found if "train/loss" in row]
    assert [row["counted/id"] for row in told] == pytest.approx(ids, rel=1e-5)
    assert [row["counted/loss"] for row in told] == pytest.approx([row["train/loss"] for row in told], rel=1e-5)


def test_figures_of_threads_and_accumulated_batches(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MIN_SHARE_TOKENS", 1)
    config = load(recipe, "run", *QUIET, "train.threads=2", "train.steps=3")
    loader = assembled(config).state.loader
    train(config)
    check(rows(config.train.output_dir), expected(loader, 3, 2))


@pytest.mark.full
def test_figures_of_a_device(recipe: Path) -> None:
    """Of steps that run as they are, and of one that is captured and replayed, several in one row."""
    small = ("train.device=cuda", "model.dtype=float32", "train.batch_size=1", "data.seq_len=8", "log.every=4")
    run = assembled(load(recipe, "run", *QUIET, *small, "train.accumulation_steps=3"))
    ids = expected(run.state.loader, 2, 3)
    steps(run, 2)
    assert run._on_device is not None and run._on_device._following.is_captured
    results = run._on_device.reading().results()
    assert [each.figures[0] / each.targets for each in results] == pytest.approx(ids, rel=1e-5)
    assert [each.figures[1] for each in results] == pytest.approx([each.loss_sum for each in results], rel=1e-5)


def test_a_resumed_run_writes_the_same_rows(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop comes between two rows, with the figures of a step that no row has yet. The objective is prepared with
    the weights at the start of the run, and with the sets that batches are of.
    """
    prepared: list[tuple[bytes, int]] = []

    def prepare(self: Counted, model: Any, run: Preparation) -> Sequence[str]:
        weights = b"".join(p.detach().numpy().tobytes() for _, p in model.named_parameters())
        self.sets = [loader.tokens for loader in (run.loader, *run.held_out)]
        prepared.append((weights, len(self.sets)))
        return ()

    def fields(self: Counted, batch: Batch) -> Any:
        assert batch.tokens in self.sets
        return NextTokens.fields(self, batch)

    monkeypatch.setattr(Counted, "prepare", prepare)
    monkeypatch.setattr(Counted, "fields", fields)
    how = ("train.device=cpu", "eval.prompts=[]", "train.steps=4", "log.every=2")
    whole, halted = load(recipe, "whole", *how), load(recipe, "halted", *how)
    train(whole)
    check(rows(whole.train.output_dir), expected(assembled(load(recipe, "again", *how)).state.loader, 2, 4))
    with signal_in_step(3), pytest.raises(InterruptedRun):
        train(halted)
    train(halted, resume=True)
    assert rows(halted.train.output_dir) == rows(whole.train.output_dir)
    assert len(prepared) == 4 and len({*prepared}) == 1 and prepared[0][1] == 2


def test_held_out_figures(recipe: Path) -> None:
    config = load(recipe, "run", "eval.prompts=[]", "train.steps=3", "eval.max_batches=null")
    run = assembled(config)
    assert run.held_out is not None
    held_out = PackedLoader(run.held_out.tokens, batch_size=2, seq_len=32, seed=0, shuffle=False)
    train(config)
    evaluations = [row for row in rows(config.train.output_dir) if "eval/loss" in row]
    assert all(0 <= row["eval/token_accuracy"] <= 1 for row in evaluations)
    found = [row["eval/counted/id"] for row in evaluations]
    batches = [held_out.batch(0, index) for index in range(held_out.num_batches(0))]
    assert found and found == pytest.approx([mean_id(batches)] * len(found), rel=1e-5)


def test_names_of_figures(tmp_path: Path) -> None:
    """Those of an objective are known in rows, also of named sets; others are not."""
    with MetricsWriter(tmp_path, more=("counted/id", "eval/counted/id")) as metrics:
        metrics.write(1, {"counted/id": 1.0, "eval/counted/id": 2.0, "eval/long/counted/id": 3.0})
        for name in ("counted/other", "long/counted/id", "eval/long/counted/other"):
            with pytest.raises(ValueError, match="unknown names"):
                metrics.write(1, {name: 1.0})
    assert [row["eval/long/counted/id"] for row in rows(tmp_path)] == [3.0]


@pytest.mark.full
def test_figures_of_ranks(recipe: Path) -> None:
    """Steps and evaluations of two ranks write the rows of one process."""
    how = ("eval.prompts=[]", "train.steps=2", "train.accumulation_steps=4", "eval.every=1", "eval.max_batches=3")
    alone = load(recipe, "alone", *how)
    train(alone)
    with Forks() as forks:
        runs = Runs(forks, recipe.parent)
        done = forks.run(*runs.words("ranks", 2, *how), fault=("on_rank", -1, "counted"))
    assert done.code == 0, done
    assert rows(recipe.parent / "ranks") == rows(alone.train.output_dir)
