"""The output folder: what is refused is left as it was, and what is not a run's is not taken for one."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from genesis.errors import ConfigError, DataError, GenesisError, InterruptedRun, OutOfMemoryError
from genesis.files.lock import FolderLock
from genesis.train.config_file import load_config
from genesis.train.output import Output
from genesis.train.report import page
from genesis_cli.session import training
from tests.files.faults import Recorder, check_folders_are_flushed
from tests.train.runs import load, no_waiting, observed, picture, rows, train


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder; of files their content."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def out_of_memory(*args: Any) -> Any:
    raise OutOfMemoryError("no room")


REFUSALS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "data": (("data.train=nowhere.txt",), 4, ""),
    "tokenizer": (("data.tokenizer=nowhere",), 5, ""),
    "vocabulary": (("model.config.vocab_size=260", "data.vocab_size=null"), 5, "prepare_data"),
    "configuration": (("model.config.note=0x" + "f" * 37,), 3, ""),
    "model": (("model.config.num_key_value_heads=3",), 3, ""),
    "memory": ((), 7, "planned_memory"),
    "package": (("log.wandb=true",), 6, ""),
    "resume": ((), 3, "resume"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refused_run_leaves_nothing(recipe: Path, tmp_path: Path, kind: str) -> None:
    """Neither folder, lock nor record, and no folder above it that was made for it."""
    overrides, code, place = REFUSALS[kind]
    config = load(recipe, str(tmp_path / "made" / "for" / "run"), f"data.cache_dir={tmp_path}/made/for/run/cache")
    config = load(recipe, config.train.output_dir, f"data.cache_dir={config.data.cache_dir}", *overrides)
    fails: Any = mock.patch.object(training, place, out_of_memory) if place == "planned_memory" else mock.MagicMock()
    if place == "prepare_data":  # a tokenizer that is too large is found once the data are cached
        prepared = training.prepare_data

        def too_large(config: Any, shape: Any, console: Any, **options: Any) -> Any:
            prepared(config, shape, console, **options)
            raise GenesisModelError("too large")

        fails = mock.patch.object(training, place, too_large)
    with fails, mock.patch.dict("sys.modules", {"wandb": None}), pytest.raises(GenesisError) as caught:
        train(config, resume=place == "resume")
    assert caught.value.exit_code == code
    assert os.listdir(tmp_path) == []


class GenesisModelError(GenesisError):
    exit_code = 5


@pytest.mark.parametrize("kind", ["empty", "killed early", "saved"])
def test_an_existing_folder_stays_as_it_was(recipe: Path, tmp_path: Path, halved: Path, kind: str) -> None:
    output = halved if kind == "saved" else tmp_path / "other"
    output.mkdir(exist_ok=True)
    if kind != "empty":
        (output / ".lock").write_text('{"pid": 1, "host": "elsewhere", "started": "2026-01-01"}\n')
    if kind == "killed early":
        record = load(recipe, str(output)).resolved_yaml()
        (output / "config.resolved.yaml").write_text(record)
        (output / "metrics.jsonl").write_text('{"train/global_step": 1}\n')
    before, times = tree(output), picture(output)
    for overrides in (("data.train=nowhere.txt",), ("optim.lr=0.5", "model.config.num_key_value_heads=3")):
        with pytest.raises(GenesisError):
            train(load(recipe, str(output), *overrides), resume="allow")
    assert tree(output) == before
    assert picture(output) == times


def test_a_busy_folder_stays_as_it_was(recipe: Path, tmp_path: Path) -> None:
    with FolderLock(tmp_path / "run"):
        before = tree(tmp_path)
        with pytest.raises(GenesisError, match="another run holds"):
            train(load(recipe, str(tmp_path / "run")))
        assert tree(tmp_path) == before


def test_a_stopped_start_is_no_refused_one(recipe: Path, tmp_path: Path) -> None:
    """What it prepared is kept, and the folder is known as ours."""
    config = load(recipe, str(tmp_path / "run"), f"data.cache_dir={tmp_path / 'run' / 'cache'}")
    stopped = InterruptedRun("", signal=signal.SIGTERM)
    with mock.patch.object(training, "make_model", side_effect=stopped), pytest.raises(InterruptedRun):
        train(config)
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "cache", "config.resolved.yaml"]
    assert train(config, resume=True).step == 6


def test_what_is_resumed_with_other_settings_says_so(recipe: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "run")
    train(load(recipe, output, "train.steps=2", "optim.warmup_steps=1"))
    said = []
    for given in ("log.every=2", "log.every=2", "log.every=1"):
        told = io.StringIO()
        train(load(recipe, output, "train.steps=4", "optim.warmup_steps=1", given), resume=True, console=told)
        said.append(
            [line for line in told.getvalue().splitlines() if line.startswith(("changed", "the learning rate"))]
        )
    rate = "the learning rate follows optim.schedule over all 4 steps from here on"
    assert said == [["changed: train.steps: 2 -> 4, log.every: 1 -> 2", rate], [], ["changed: log.every: 2 -> 1"]]


def test_a_run_for_its_configuration_is_told_the_name_of_that(recipe: Path, tmp_path: Path) -> None:
    train(load(recipe, str(tmp_path / "run"), "train.steps=1", "optim.warmup_steps=0"))
    with pytest.raises(ConfigError, match="the folder of a run") as error:
        load_config(tmp_path / "run")
    assert error.value.next == f"use its configuration, {tmp_path / 'run' / 'config.resolved.yaml'}"


def as_hydra(output: Path, config: str) -> None:
    (output / "config.resolved.yaml").write_text("model: {name: gpt}\ntrainer: {max_steps: 3}\n")


def as_trainer(output: Path, config: str) -> None:
    """transformers' Trainer."""
    (output / "checkpoint-500").mkdir()
    (output / "checkpoint-500" / "trainer_state.json").write_text("{}")
    (output / "all_results.json").write_text("{}")


def as_a_copied_record(output: Path, config: str) -> None:
    """A model's folder into which somebody copied a record to start from."""
    (output / "config.resolved.yaml").write_text(config)
    (output / "config.json").write_text("{}")
    (output / "loss.png").write_bytes(b"mine")


def as_foreign_metrics(output: Path, config: str) -> None:
    (output / "config.resolved.yaml").write_text(config)
    (output / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')


def as_a_pipe(output: Path, config: str) -> None:
    os.mkfifo(output / "config.resolved.yaml")


def as_a_foreign_lock(output: Path, config: str) -> None:
    (output / ".lock").write_text("pid 17")


def as_empty_record(output: Path, config: str) -> None:
    (output / "config.resolved.yaml").touch()
    (output / "notes.md").write_text("mine")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (as_hydra, "its config.resolved.yaml is not the record of a run: unknown"),
        (as_trainer, "all_results.json, checkpoint-500"),
        (as_a_copied_record, "config.json, loss.png, which a run writes at its end, but no checkpoint"),
        (as_foreign_metrics, "its metrics.jsonl is not a run's"),
        (as_a_pipe, "config.resolved.yaml' is a FIFO"),
        (as_a_foreign_lock, ".lock"),
        (as_empty_record, "its config.resolved.yaml is not the record of a run"),
    ],
)
def test_another_tools_folder_is_refused_and_unchanged(
    recipe: Path, tmp_path: Path, make: Callable[[Path, str], None], found: str
) -> None:
    config = load(recipe, str(tmp_path))
    make(tmp_path, config.resolved_yaml())
    before, changed = tree(tmp_path), tmp_path.stat().st_mtime_ns
    for resume in (False, "allow"):
        with pytest.raises(ConfigError, match="files that are not a Genesis run's") as caught:
            train(config, resume=resume)  # type: ignore[arg-type]
        assert found in caught.value.what
    assert (tree(tmp_path), tmp_path.stat().st_mtime_ns) == (before, changed)


def test_a_final_model_without_checkpoints_is_not_trained_over(recipe: Path, tmp_path: Path) -> None:
    config = load(recipe, str(tmp_path))
    (tmp_path / "config.resolved.yaml").write_text(config.resolved_yaml())
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = tree(tmp_path)
    for resume, what in ((True, "only the final model"), ("allow", "only the final model"), (False, "holds a run")):
        with pytest.raises(ConfigError, match=what):
            train(config, resume=resume)  # type: ignore[arg-type]
    assert tree(tmp_path) == before


def test_resume_allow_goes_on_where_there_is_a_run(recipe: Path, halved: Path, tmp_path: Path, expected: str) -> None:
    assert train(load(recipe, str(halved)), resume="allow").state_hash == expected
    assert train(load(recipe, str(tmp_path / "fresh")), resume="allow").state_hash == expected


@pytest.mark.parametrize("inside", ["", "checkpoint-4", "abandoned-1/x", ".hidden", "tensorboard"])
def test_a_cache_among_the_runs_own_files_is_refused(recipe: Path, tmp_path: Path, inside: str) -> None:
    """The folder itself hung for ever: the cache waited for the lock that its own run held."""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    config = load(recipe, str(tmp_path / "run"), f"data.cache_dir={tmp_path / 'link' / inside}")
    with pytest.raises(ConfigError, match="overlaps with the run's own files") as caught:
        train(config)
    assert caught.value.where == "data.cache_dir"
    assert not (tmp_path / "run").exists()


def test_every_folder_that_a_run_makes_is_flushed_to_its_parent(recipe: Path, tmp_path: Path) -> None:
    recorder, output = Recorder(), tmp_path / "a" / "b" / "run"
    with observed(recorder):
        train(load(recipe, str(output), f"data.cache_dir={output / 'cache'}", "train.steps=1", "eval.every=null"))
    made = check_folders_are_flushed(recorder.calls)
    assert {output.parent.parent, output.parent, output} <= made


@pytest.mark.parametrize("problem", [FileNotFoundError("gone"), MemoryError("none"), ValueError("odd")])
def test_a_picture_that_cannot_be_drawn_is_a_warning(problem: Exception, recipe: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    with mock.patch.object(training, "loss_picture", side_effect=problem), no_waiting():
        config = load(recipe, str(tmp_path / "run"), "train.steps=1", "eval.every=null")
        summary = training.train(config, resume=False, console=Output(said))
    assert f"warning: the loss picture was not drawn: {problem}" in said.getvalue()
    assert summary.state_hash in said.getvalue()


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-5", "1.5", "true"])
def test_a_step_that_is_none_is_refused_before_anything_changes(recipe: Path, halved: Path, number: str) -> None:
    path = halved / "metrics.jsonl"
    path.write_text(path.read_text() + f'{{"train/global_step": {number}}}\n')
    before = tree(halved)
    with pytest.raises(DataError, match="not a row of metrics") as caught:
        train(load(recipe, str(halved), "log.every=2"), resume=True)
    assert caught.value.where.endswith("metrics.jsonl:4")
    assert tree(halved) == before


def test_numbers_without_end_in_metrics_are_no_bug(recipe: Path, halved: Path) -> None:
    path = halved / "metrics.jsonl"
    lines = path.read_text().splitlines()
    for value in ("1" + "0" * 400, "-" + "9" * 5000):
        row = {**json.loads(lines[0]), "train/loss": "HERE"}
        path.write_text(json.dumps(row).replace('"HERE"', value) + "\n" + "\n".join(lines[1:]) + "\n")
        with pytest.raises(DataError, match="not a row of metrics"):
            train(load(recipe, str(halved)), resume=True)
        with pytest.raises(DataError):
            page.loss_picture(halved)
    path.write_text("\n".join(lines) + "\n")
    assert train(load(recipe, str(halved)), resume=True).step == 6
    assert rows(halved)[-1]["train/global_step"] == 6
