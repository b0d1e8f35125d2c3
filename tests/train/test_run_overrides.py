"""What a run was given on its command line holds when it is resumed; what changed since is taken, or refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from genesis.errors import ConfigError
from genesis.train import loop
from genesis.train.config_file import (
    Override,
    combined,
    load_config,
    output_dir,
    parse_config,
    read_overrides,
    with_overrides,
)
from genesis_cli import app
from tests.train.runs import make, make_lora, no_waiting, signal_in_step

Go = Callable[..., tuple[int, str]]
HASH = re.compile(r"state hash: (\w{64})")


@pytest.fixture
def go(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Go:
    """Runs `genesis train words…` here: its exit code, and what it wrote."""
    monkeypatch.setattr("genesis_cli.session.training.loss_picture", lambda *paths: None)
    monkeypatch.setattr(app, "settle_stdout", lambda: None)

    def run(*words: str | Path) -> tuple[int, str]:
        with no_waiting():
            code = app.run(["train", *map(str, words)])
        return code, "".join(capsys.readouterr())

    return run


def stopped(go: Go, *words: str | Path, step: int = 3) -> None:
    with signal_in_step(step):
        assert go(*words)[0] == 143


def hash_of(done: tuple[int, str]) -> str:
    found = HASH.search(done[1])
    assert done[0] == 0 and found, done
    return found[1]


def recorded(run: Path) -> dict[str, Any]:
    return dict(load_config(run / "config.resolved.yaml").settings())


@pytest.mark.sample(cases=1)
@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.lr=5e-3", "train.seed=3", "train.batch_size=1", "eval.prompts=['a=b, c: d', \"\\u2028\"]"],
        ["train.steps=null", " train . epochs = 0.9", "optim={name: sgd, lr: 0.1, warmup_steps: 1}", "optim.lr=0.2"],
    ],
)
def test_a_plain_resume_goes_on_as_the_run_began(tmp_path: Path, go: Go, overrides: list[str]) -> None:
    config, run = make(tmp_path), tmp_path / "run"
    whole = hash_of(go(config, *overrides))
    shutil.rmtree(run)
    stopped(go, config, *overrides, step=2)
    began = recorded(run)
    code, said = stopped_again = go(config, "--resume")
    assert hash_of(stopped_again) == whole
    assert recorded(run) == began and "changed:" not in said and code == 0
    kept = next(line for line in said.splitlines() if "recorded settings" in line)
    assert all(override.replace(" ", "").partition("=")[0] in kept for override in overrides[-2:])


def test_adapters_and_what_the_file_lacks(tmp_path: Path, go: Go) -> None:
    config, run = make_lora(tmp_path), tmp_path / "elsewhere"
    text = config.read_text()
    config.write_text(text.replace("steps: 6, ", "").replace("path:", "# path:").replace("lora:", "# lora:"))
    base = f"model={{path: {tmp_path / 'base'}}}"
    there = f"train.output_dir={run}"
    given = (base, "train.steps=6", "lora={r: 2, dropout: 0.3}", "lora.r=3", there)
    whole = hash_of(go(config, *given))
    shutil.rmtree(run)
    stopped(go, config, *given)
    assert hash_of(go(config, there, "--resume=allow")) == whole
    assert recorded(run)["lora.r"] == 3
    assert go(config, "--resume")[0] == 3, "the file names another folder, where nothing gives the steps"


def test_differences_are_taken_or_refused_by_what_they_change(tmp_path: Path, go: Go) -> None:
    config, run = make(tmp_path), tmp_path / "run"
    text = config.read_text()
    stopped(go, config, "optim.lr=5e-3", "train.steps=5", "optim.weight_decay=0.2", "eval.every=4")

    def edited(old: str, new: str) -> None:
        assert old in text
        config.write_text(text.replace(old, new))

    # Typed now, or changed in the file: refused with the difference, and nothing is recorded.
    before = (run / "config.resolved.yaml").read_text()
    code, said = go(config, "--resume", "optim.weight_decay=0.3")
    assert code == 3 and "optim.weight_decay: 0.2 -> 0.3" in said and "optim.lr" not in said
    edited("lr: 1e-2", "lr: 1e-2, weight_decay: 0.4")
    code, said = go(config, "--resume")
    assert code == 3 and "optim.weight_decay: 0.2 -> 0.4" in said
    edited("batch_size: 2", "batch_size: 1")
    code, said = go(config, "--resume", "train.seed=0")
    assert code == 3 and "train.batch_size: 2 -> 1" in said and "weight_decay" not in said
    assert (run / "config.resolved.yaml").read_text() == before
    # Allowed ones are taken, and hold from then on.
    edited("lr: 1e-2", "lr: 2e-2")
    stopped(go, config, "--resume", "checkpoint.every=1", "eval.prompts=[b]", step=4)
    found = recorded(run)
    assert (found["optim.lr"], found["optim.weight_decay"], found["train.steps"]) == (0.02, 0.2, 5)
    assert (found["eval.every"], found["eval.prompts"], found["checkpoint.every"]) == (4, ["b"], 1)
    code, said = go(config, "--resume", "train.steps=6")
    assert code == 0 and recorded(run) == found | {"train.steps": 6}
    assert "changed: train.steps: 5 -> 6\n" in said and "over all 6 steps from here on" in said


def test_a_new_rate_counts_from_where_the_run_goes_on(tmp_path: Path, go: Go) -> None:
    config = make(tmp_path)
    stopped(go, config, "optim.schedule=constant")
    code, said = go(config, "--resume", "optim.lr=4e-3", "log.every=1")
    assert code == 0 and "optim.lr is 0.004 from step 4 on" in said
    assert re.findall(r"step (\d)/6 .* lr (\S+)", said) == [("4", "4.00e-03"), ("5", "4.00e-03"), ("6", "4.00e-03")]


def test_the_folder_of_a_run_and_its_record_stand_for_its_configuration(tmp_path: Path, go: Go) -> None:
    config, run, moved = make(tmp_path), tmp_path / "run", tmp_path / 'mo "ved'
    whole = hash_of(go(config, "optim.lr=5e-3"))
    shutil.rmtree(run)
    stopped(go, config, "optim.lr=5e-3", step=2)
    stopped(go, run / "config.resolved.yaml", "--resume", "eval.every=1", step=3)
    stopped(go, run, "--resume", "checkpoint.every=1", step=4)
    run.rename(moved)
    code, said = go(moved, "--resume")
    assert hash_of((code, said)) == whole and recorded(moved)["eval.every"] == 1
    assert go(moved)[0] == 3, "it is no configuration to start from"
    # The configuration that the run began with has not changed meanwhile.
    code, said = go(config, f"train.output_dir='{moved}'", "--resume")
    assert (code, recorded(moved)["optim.lr"], recorded(moved)["eval.every"]) == (0, 0.005, 1)


def test_a_run_without_a_checkpoint_starts_over_as_it_was_started(tmp_path: Path, go: Go) -> None:
    config = make(tmp_path)
    with mock.patch.object(loop, "take_step", side_effect=KeyboardInterrupt):
        assert go(config, "optim.lr=5e-3", "checkpoint.every=null")[0] == 130
    shutil.rmtree(tmp_path / "run" / "checkpoint-0", ignore_errors=True)
    code, said = go(config, "--resume")
    assert code == 0 and "starting from the beginning" in said and recorded(tmp_path / "run")["optim.lr"] == 0.005


def test_a_record_of_an_older_version_has_no_overrides(tmp_path: Path, go: Go) -> None:
    config, record = make(tmp_path), tmp_path / "run" / "config.resolved.yaml"
    stopped(go, config, "optim.weight_decay=0.2")
    record.write_text("".join(line for line in record.read_text().splitlines(True) if line[:1] != "#"))
    assert go(config, "--resume")[0] == 3
    assert go(config, "--resume", "optim.weight_decay=0.2")[0] == 0
    assert go(config, "--resume")[0] == 0


SOURCE = "optim: {lr: 1e-3}\neval:\ntrain: {output_dir: ~/x}\n"


def test_which_overrides_hold() -> None:
    given = combined(SOURCE, "c", ["optim.lr=1", "eval.every=2", "lora={r: 1}", "optim.lr=3"], {})
    assert given == {
        "eval.every": Override("2", []),
        "lora": Override("{r: 1}", []),
        "optim.lr": Override("3", [0.001]),
    }
    assert list(combined(SOURCE, "c", [], given).items()) == [
        (key, replace(override, is_recorded=True)) for key, override in given.items()
    ]
    for now, dropped in (
        ("optim: {lr: 0.0010}\neval: {}", None),
        ("optim: {lr: 1e-4}", "optim.lr"),
        ("optim: {}", "optim.lr"),
        ("optim: {lr: 1e-3}\neval: {every: null}", "eval.every"),
        ("optim: {lr: 1e-3}\nlora: {alpha: 2}", "lora"),
    ):
        assert given.keys() - combined(now, "c", [], given).keys() == ({dropped} - {None}), now
    again = combined(SOURCE, "c", ["lora={r: 2}"], given)
    assert [(key, o.is_recorded) for key, o in again.items()] == [
        ("eval.every", True),
        ("optim.lr", True),
        ("lora", False),
    ]
    assert combined(SOURCE, "c", ["optim={lr: 2}"], given).keys() == {"eval.every", "lora", "optim"}, "lr is a part"


@pytest.mark.parametrize(
    ("file", "given", "file_now", "typed", "expected"),
    [
        ("steps: 6", "train.steps=null train.epochs=2", "steps: 6", "train.steps=9", (9, None)),
        ("epochs: 3", "train.steps=5 train.epochs=null", "epochs: 3", "train.steps=9", (9, None)),
        ("epochs: 3", "train.steps=5 train.epochs=null", "epochs: 3", "train.epochs=4", (None, 4)),
        ("epochs: 3", "train.steps=5 train.epochs=null", "epochs: 4", "", (None, 4)),
        ("steps: 6", "train.steps=null train.epochs=2", "steps: 9", "", (9, None)),
        ("steps: 6", "train.steps=null train.epochs=2", "{}", "", (None, 2)),
        ("steps: 6", "train.steps=null train.epochs=2", "steps: 6", "train.steps=null", (None, 2)),
    ],
)
def test_a_new_length_takes_the_place_of_the_old(
    file: str, given: str, file_now: str, typed: str, expected: tuple[int | None, float | None]
) -> None:
    text = "model: {preset: 0.5B}\ndata: {train: x}\ntrain:\n  output_dir: x\n  "
    kept = combined(text + file.replace("{}", ""), "c", given.split(), {})
    kept = combined(text + file_now.replace("{}", ""), "c", typed.split(), kept)
    words = [f"{key}={override.text}" for key, override in kept.items()]
    train = parse_config(text + file_now.replace("{}", ""), "c", words).train
    assert (train.steps, train.epochs) == expected


def test_the_record_keeps_them(tmp_path: Path) -> None:
    home = output_dir(SOURCE, "c", ["eval.every=1"])
    assert home is not None and home.endswith("/x") and "~" not in home
    assert output_dir("train: {output_dir: 3}", "c", []) is None and output_dir("", "c", []) is None
    typed = ["a.b='x\n # \t\x41é\u2028'".replace("\u2028", "\\u2028"), "train.output_dir=x", "c=[1, {d: e=f}]", "e="]
    overrides = combined("a: {b: {c: [1.5, null, 'no']}}\nc: '4'", "c", typed, {})
    text = with_overrides("# above\nx: 1\n", overrides)
    assert text.startswith("# above\nx: 1\n#") and all(line[:1] in ("#", "x") for line in text.splitlines())
    del overrides["train.output_dir"]
    assert read_overrides(text, "c") == overrides
    unknown = {"a.b": Override("1", None)}
    assert read_overrides(with_overrides("", unknown), "c") == unknown
    # What the reader would not take is not written: the run resumes as one of an older version.
    for key, value in (("k" * 2000, "1"), ("k", "1" * 300_000)):
        assert with_overrides("x: 1\n", {key: Override(value, [])}) == "x: 1\n"
    for row in ('["1", 2, 3]', "[1]", "3", "{a: b}"):
        with pytest.raises(ConfigError) as caught:
            read_overrides(text + f"# z: {row}\n", "c")
        assert caught.value.exit_code == 3 and "z" in caught.value.what
