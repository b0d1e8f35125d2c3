"""Distillation: golden cases of a plain torch program, and runs on the CPU, a device and ranks, with their refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genesis.backend import CPU
from genesis.data.loader import Batch
from genesis.errors import ConfigError, InterruptedRun, ModelError, NumericError
from genesis.optim import AdamW
from genesis.train import step as shards
from genesis.train.objective import Distillation
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.main import main
from genesis_models.config import ModelConfig
from genesis_models.registry import build
from tests.train.golden import (
    ADAMW,
    DISTILLATION,
    STEPS,
    STUDENT,
    TEACHER,
    conversations,
    fresh_weight,
    projections,
)
from tests.train.runs import Forks, assembled, checkpoints, load, make, make_base, rows, signal_in_step, steps, train

TOLERANCE = 1e-4
QUIET = ("eval.prompts=[]", "train.device=cpu")


def make_model(shape: dict[str, Any], seed: int) -> Any:
    model = build(ModelConfig.from_dict({"model_type": "qwen3", **shape}), 0)
    for name, parameter in model.named_parameters():
        parameter.detach().copy_(genesis_array(fresh_weight(seed, name, parameter.shape)))
    return model


def genesis_array(values: np.ndarray) -> Any:
    import genesis

    return genesis.from_numpy(values)


def packed(seed: int, length: int = 64) -> Batch:
    """The conversations of a seed in one row, one after the other."""
    batch = Batch.empty(1, length)
    ids, labels, positions = (np.full((1, length), fill, np.int64) for fill in (0, -100, 0))
    at = 0
    for tokens, targets in conversations(seed):
        part = slice(at, at + len(tokens))
        ids[0, part], labels[0, part], positions[0, part] = tokens, targets, range(len(tokens))
        at = part.stop
    positions[0, at:] = range(length - at)
    return Batch(0, 0, ids, labels, positions, int((labels >= 0).sum()), at, batch.samples)


CASES = json.loads(DISTILLATION.read_text())["cases"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case['seed']}-{case['beta']}-{case['temperature']}",
            marks=[pytest.mark.full] if case["seed"] else [],
        )
        for case in CASES
    ],
)
def test_torch(case: dict[str, Any]) -> None:
    """Losses and gradients of ten steps, packed here and padded there."""
    student, teacher = make_model(STUDENT, case["seed"]).train(), make_model(TEACHER, case["seed"] + 100).eval()
    objective = Distillation(case["beta"], case["temperature"])
    objective.teacher = teacher
    state = TrainState(student, AdamW(student.named_parameters(), **ADAMW), loader=None, objective=objective)  # type: ignore[arg-type]
    batch, losses = packed(case["seed"]), []
    for _ in range(STEPS):
        found = take_step(state, [batch], ADAMW["lr"], None, CPU)
        losses.append(found.loss_sum / found.targets)
    assert losses == pytest.approx(case["losses"], rel=TOLERANCE)
    for name, parameter in student.named_parameters():
        expected = case["gradients"][name]
        assert projections(parameter.grad.numpy()) == pytest.approx(expected, abs=TOLERANCE * expected[0]), name
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A run whose student and teacher are two models with one tokenizer."""
    path = make(tmp_path)
    student, teacher = make_base(tmp_path, path, name="student"), make_base(tmp_path, path, name="teacher", seed=1)
    lines = path.read_text().split("\n")
    start, end = lines.index("  config:"), next(n for n, line in enumerate(lines) if line.startswith("data:"))
    objective = f"objective: {{name: distill, teacher: {teacher}}}"
    path.write_text("\n".join([*lines[:start], f"  path: {student}", *lines[end:], objective]))
    return path


def test_a_run_approaches_its_teacher(recipe: Path) -> None:
    config = load(recipe, "run", *QUIET, "train.steps=30", "checkpoint.every=null", "eval.every=null")
    train(config)
    found = rows(config.train.output_dir)
    before, after = found[0], found[-1]
    assert after["eval/loss"] < 0.5 * before["eval/loss"]
    assert after["eval/teacher_agreement"] > before["eval/teacher_agreement"]
    assert after["eval/teacher_cross_entropy"] == before["eval/teacher_cross_entropy"]
    assert "eval/perplexity" not in after
    assert {"train/cross_entropy", "train/teacher_cross_entropy", "train/teacher_agreement"} <= found[1].keys()


def test_threads_and_accumulation_change_no_figure(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MIN_SHARE_TOKENS", 1)
    how = (*QUIET, "train.steps=3", "eval.every=null", "checkpoint.every=null")
    for name, more in (("one", ()), ("two", ("train.threads=2",))):
        train(load(recipe, name, *how, *more))
    one, two = (rows(recipe.parent / name) for name in ("one", "two"))
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        assert {k: v for k, v in b.items() if isinstance(v, float)} == pytest.approx(
            {k: v for k, v in a.items() if isinstance(v, float)}, rel=1e-4
        )


def test_a_resumed_run_ends_in_the_same_state(recipe: Path) -> None:
    how = (*QUIET, "train.steps=4", "checkpoint.every=2")
    whole, halted = load(recipe, "whole", *how), load(recipe, "halted", *how)
    train(whole)
    with signal_in_step(3), pytest.raises(InterruptedRun):
        train(halted)
    train(halted, resume=True)
    assert checkpoints(halted.train.output_dir)[4] == checkpoints(whole.train.output_dir)[4]
    assert rows(halted.train.output_dir) == rows(whole.train.output_dir)


@pytest.mark.full
def test_a_device_computes_the_same_steps(recipe: Path) -> None:
    """Steps that run as they are, and one that is captured and replayed."""
    small = ("eval.prompts=[]", "model.dtype=float32", "train.batch_size=1", "data.seq_len=8")
    small = (*small, "train.accumulation_steps=3", "log.every=4", "eval.every=null", "checkpoint.every=null")
    run, reference = (
        assembled(load(recipe, name, f"train.device={device}", *small))
        for name, device in (("device", "cuda"), ("host", "cpu"))
    )
    steps(run, 2)
    assert run._on_device is not None and run._on_device._following.is_captured
    found = run._on_device.reading().results()
    expected = [take_step(reference.state, reference._batches(), reference.lr_at(n), 1.0, CPU) for n in range(2)]
    for a, b in zip(found, expected, strict=True):
        assert a.loss_sum == pytest.approx(b.loss_sum, rel=1e-4)
        assert a.figures == pytest.approx(b.figures, rel=1e-4)


@pytest.mark.full
def test_ranks_end_in_the_same_state(recipe: Path) -> None:
    how = (*QUIET, "train.steps=2", "train.accumulation_steps=4", "checkpoint.every=null", "eval.every=null")
    alone = load(recipe, "alone", *how)
    train(alone)
    with Forks() as forks:
        output = f"train.output_dir={recipe.parent / 'ranks'}"
        done = forks.run("train", recipe, output, *how, "--nproc", "2")
    assert done.code == 0, done
    assert rows(recipe.parent / "ranks") == rows(alone.train.output_dir)
    assert checkpoints(recipe.parent / "ranks") == checkpoints(recipe.parent / "alone")


def change_tokenizer(teacher: Path) -> None:
    """Swap the ids of two tokens."""
    path = teacher / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))


def poison(teacher: Path) -> None:
    import genesis_models

    model = genesis_models.load(teacher)
    model.model.norm.weight.detach()[0].fill_(float("nan"))
    genesis_models.save(model, teacher)


@pytest.mark.parametrize(
    ("spoil", "overrides", "error", "message"),
    [
        (lambda teacher: None, ("objective.teacher=nowhere",), ModelError, "nowhere"),
        (change_tokenizer, (), ModelError, "another vocabulary: the token 'a' has the id"),
        (lambda teacher: (teacher / "tokenizer.json").unlink(), (), ModelError, "the teacher has no tokenizer.json"),
        (lambda teacher: (teacher / "model.safetensors").unlink(), (), ModelError, "model.safetensors"),
        (poison, (), NumericError, "norm.weight"),
    ],
    ids=("missing", "another vocabulary", "no tokenizer", "no weights", "NaN"),
)
def test_bad_teachers(recipe: Path, spoil: Any, overrides: tuple[str, ...], error: Any, message: str) -> None:
    spoil(recipe.parent / "teacher")
    with pytest.raises(error, match=message):
        train(load(recipe, "run", *QUIET, *overrides))


def test_rows_beyond_the_teachers_context(recipe: Path) -> None:
    config = recipe.parent / "teacher" / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 32', '"max_position_embeddings": 16'))
    with pytest.raises(ConfigError, match="the teacher's 16 positions"):
        train(load(recipe, "run", *QUIET))


def test_a_changed_teacher_is_noticed_by_a_resume(recipe: Path) -> None:
    how = (*QUIET, "train.steps=4", "checkpoint.every=2")
    with signal_in_step(3), pytest.raises(InterruptedRun):
        train(load(recipe, "run", *how))
    shutil.copy(recipe.parent / "student" / "model.safetensors", recipe.parent / "teacher")
    with pytest.raises(ModelError, match="the teacher is not the one with which the run began"):
        train(load(recipe, "run", *how), resume=True)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("distill", "needs objective.teacher"),
        ("{name: distil, teacher: t}", "distill"),
        ("{name: distill, teacher: t, beta: 1.5}", "beta"),
        ("{name: distill, teacher: t, temperature: 0}", "temperature"),
        ("{name: next_tokens, teacher: t}", "has no meaning for the objective next_tokens"),
    ],
)
def test_bad_settings(tmp_path: Path, objective: str, message: str) -> None:
    path = make(tmp_path)
    path.write_text(f"{path.read_text()}objective: {objective}\n")
    with pytest.raises(ConfigError, match=message):
        load(path, "run")


@pytest.mark.full
def test_validate_and_estimate_know_the_teacher(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(recipe), *QUIET, f"train.output_dir={recipe.parent / 'run'}"]
    assert main(["validate", *words]) == 0
    capsys.readouterr()
    for more in ([], ["--gpu-memory", "1"]):
        report = recipe.parent / "estimate.json"
        assert main(["estimate", *words, "--json", str(report), *more]) == 0
        memory = json.loads(report.read_text())["memory"]
        assert memory["frozen"] == memory["weights"]  # of two equal shapes
    change_tokenizer(recipe.parent / "teacher")
    assert main(["validate", *words]) == 5


def test_three_commands(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From two folders and data to an exported student, as in docs/distillation.md."""
    monkeypatch.chdir(recipe.parent)
    models = ("--model", "student", "--teacher", "teacher")
    assert main(["init", "d.yaml", "--goal", "distill", *models, "--data", "doc*.txt"]) == 0
    quick = ("train.epochs=null", "train.steps=2", "eval.every=null", "eval.prompts=[]", "data.template=null")
    assert main(["train", "d.yaml", *quick]) == 0
    assert main(["export", "runs/d", "--check"]) == 0
    capsys.readouterr()
    assert main(["init", "e.yaml", "--goal", "distill", "--model", "student"]) == 2
    assert main(["init", "e.yaml", "--goal", "full", *models]) == 2
    assert "--teacher" in capsys.readouterr().err
