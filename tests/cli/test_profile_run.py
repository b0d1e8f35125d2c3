"""`genesis profile CONFIG`: the text, the files, JSON, and what a wrong command line is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest

from genesis.measure.record import format_bytes
from genesis_cli import environment
from tests.cli.command import printed
from tests.train.runs import make, picture

FILES = {"trace.json", "stacks.txt", "flamegraph.svg", "report.json"}


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """No questions to the driver."""
    facts = {"cpu": {"name": "a processor"}, "genesis": "0.0"}
    with mock.patch.object(environment, "facts", return_value=facts):
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("corpus"))


def profiled(*words: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `genesis profile words…`."""
    return printed("profile", *words)


def tables_of(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table."""
    return {table["name"]: table["rows"] for table in report["tables"]}


def test_text_and_files(recipe: Path, tmp_path: Path) -> None:
    before = picture(recipe.parent)
    code, text, told = profiled(
        recipe, "train.threads=2", "train.device=cpu", "--steps", "2", "--out", tmp_path / "found"
    )
    assert code == 0
    assert "model: qwen3" in told
    assert "device  a processor (cpu)\n" in text and "micro-batches 2, threads 2\n" in text
    assert "genesis/train/step.py:" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("wrote")) <= 130
    found = tmp_path / "found"
    assert {path.name for path in found.iterdir()} == FILES
    report = json.loads((found / "report.json").read_text())
    assert (report["schema_version"], report["kind"]) == (2, "profile-run")
    tables = tables_of(report)
    (step,) = tables["steps"]
    assert (step["mode"], step["steps"]) == ("eager", 2)
    for name in ("eager-phases", "eager-modules", "eager-ops"):
        assert sum(row["seconds"] for row in tables[name]) == pytest.approx(step["seconds"], rel=0.02)
    assert step["seconds"] == pytest.approx(step["profiled_seconds"], rel=0.5)  # a mean of two and their median
    modules = {row["name"] for row in tables["eager-modules"]}
    assert {"model.layers.*.self_attn", "model.layers.*.mlp", "Qwen3ForCausalLM"} <= modules
    events = json.loads((found / "trace.json").read_text())["traceEvents"]
    peak = max(event["args"]["allocated"] for event in events if event["ph"] == "C")
    assert f"Memory peaks at {format_bytes(peak)}, " in text
    markup = (found / "flamegraph.svg").read_text()
    assert ElementTree.fromstring(markup).tag.endswith("svg") and "prefers-color-scheme: dark" in markup
    # Nothing of a run remains: neither checkpoints nor metrics, nor their folder.
    after = picture(recipe.parent)
    assert {name for name in after.keys() - before.keys() if "/cache/" not in name} == set()
    assert not (recipe.parent / "run").exists()


def test_json_alone_on_stdout(recipe: Path) -> None:
    code, text, _ = profiled(recipe, "train.device=cpu", "--steps", "1", "--json", "-")
    assert code == 0
    report = json.loads(text)
    assert report["command"] == f"genesis profile {recipe} train.device=cpu --steps 1"
    settings = report["settings"]
    assert (report["device"], settings["micro-batches"], settings["rows"], settings["tokens"]) == ("cpu", 2, 2, 32)


@pytest.mark.full
def test_captured_and_eager_steps_on_cuda(recipe: Path) -> None:
    words = ["train.device=cuda", "train.batch_size=1", "train.accumulation_steps=1", "data.seq_len=8"]
    code, text, _ = profiled(recipe, *words, "--steps", "1", "--json", "-")
    assert code == 0
    report = json.loads(text)
    tables = tables_of(report)
    assert [(row["mode"], row["measure"]) for row in tables["steps"]] == [("captured", "gpu"), ("eager", "gpu")]
    for mode in ("captured", "eager"):
        assert tables[f"{mode}-waits"] == []
        assert "linear_cross_entropy" in {row["op"] for row in tables[f"{mode}-kernels"]}


@pytest.mark.parametrize(
    ("words", "code", "what", "where", "next"),
    [
        ([], 2, "Missing option '--op'", "command line", "genesis profile --help"),
        (["CONFIG", "--op", "add"], 2, "exclude each other", "command line", "genesis profile CONFIG"),
        (["CONFIG", "--shape", "4"], 2, "--shape is for ops", "--shape", "leave it out"),
        (["CONFIG", "--device", "cpu"], 2, "--device is for ops", "--device", "train.device=cpu"),
        (["--op", "add", "--steps", "3"], 2, "--steps is for runs", "--steps", "leave it out"),
        (["--op", "add", "--nvtx"], 2, "--nvtx is for runs", "--nvtx", "leave it out"),
        (["CONFIG", "--steps", "0"], 2, "0 steps cannot be profiled", "--steps", "1 to 1000"),
        (["CONFIG", "--out", "CONFIG"], 2, "is not a folder", "--out", "another folder"),
        (["CONFIG", "train.nothing=3"], 3, "nothing", "", ""),
        (["quickstrat"], 3, "the file or recipe does not exist", "quickstrat", "did you mean the recipe quickstart?"),
    ],
)
def test_a_wrong_command_line(recipe: Path, words: list[str], code: int, what: str, where: str, next: str) -> None:
    ended, text, told = profiled(*(str(recipe) if word == "CONFIG" else word for word in words))
    assert (ended, text) == (code, "")
    assert what in told.splitlines()[0]
    assert where in told and next in told
