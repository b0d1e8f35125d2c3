"""`genesis profile CONFIG`: the text, the files, JSON, and what a wrong command line is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest

from genesis.profile.run.report import render_lines
from genesis.profile.run.schema import RunReport
from genesis_cli import environment
from tests.cli.command import printed
from tests.train.runs import make, picture

FILES = {"trace.json", "stacks.txt", "flamegraph.svg", "memory.json", "memory.svg", "report.json"}


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


def test_text_and_files(recipe: Path, tmp_path: Path) -> None:
    before = picture(recipe.parent)
    code, text, told = profiled(
        recipe, "train.threads=2", "train.device=cpu", "--steps", "2", "--out", tmp_path / "found"
    )
    assert code == 0
    assert "model: qwen3" in told
    lines = text.splitlines()
    assert lines[0] == "device    a processor (cpu, 2 threads)"
    assert lines[2] == "step      2 micro-batches of 2 rows of 32 tokens"
    assert any(line.startswith("eager step: ") and "mean of 2; " in line for line in lines)
    assert [line.split()[0] for line in lines if line.startswith(("forward", "backward", "total"))].count("total") == 3
    assert "genesis/train/step.py:" in text
    assert max(len(line) for line in lines if not line.startswith("wrote")) <= 120
    found = tmp_path / "found"
    assert {path.name for path in found.iterdir()} == FILES
    report = RunReport.model_validate_json((found / "report.json").read_text())
    assert [mode.mode for mode in report.modes] == ["eager"]
    mode = report.modes[0]
    for table in (mode.phases, mode.modules, mode.ops):
        assert sum(row.seconds for row in table) == pytest.approx(mode.seconds, rel=0.02)
    assert mode.seconds == pytest.approx(mode.profiled_seconds, rel=0.5)  # a mean of two and their median
    assert {"model.layers.*.self_attn", "model.layers.*.mlp", "Qwen3ForCausalLM"} <= {row.name for row in mode.modules}
    assert sum(report.memory.categories.values()) == report.memory.peak == report.memory.pool_peak
    assert json.loads((found / "trace.json").read_text())["traceEvents"]
    for name in ("flamegraph.svg", "memory.svg"):
        markup = (found / name).read_text()
        assert ElementTree.fromstring(markup).tag.endswith("svg")
        assert "prefers-color-scheme: dark" in markup
    # Nothing of a run remains: neither checkpoints nor metrics, nor their folder.
    after = picture(recipe.parent)
    assert {name for name in after.keys() - before.keys() if "/cache/" not in name} == set()
    assert not (recipe.parent / "run").exists()


def test_generation_on_request(recipe: Path) -> None:
    code, text, _ = profiled(recipe, "train.device=cpu", "--steps", "1", "--generate", "--json", "-")
    report = RunReport.model_validate_json(text)
    assert code == 0 and report.command.endswith("--steps 1 --generate")
    row = report.generation
    assert row is not None and (row.batch, row.prompt, row.new, row.engine) == (1, 12, 4, "Engine")
    assert "\ngeneration\ncase " in "\n".join(render_lines(report))


def test_json_alone_on_stdout(recipe: Path) -> None:
    code, text, _ = profiled(recipe, "train.device=cpu", "--steps", "1", "--json", "-")
    assert code == 0
    report = RunReport.model_validate_json(text)
    assert report.schema_version == 1
    assert report.command == f"genesis profile {recipe} train.device=cpu --steps 1"
    assert (report.device, report.micro_batches, report.batch, report.length) == ("cpu", 2, 2, 32)


def test_captured_and_eager_steps_on_cuda(recipe: Path) -> None:
    words = ["train.device=cuda", "train.batch_size=1", "train.accumulation_steps=1", "data.seq_len=8"]
    code, text, _ = profiled(recipe, *words, "--steps", "1")
    assert code == 0
    modes = [line for line in text.splitlines() if " step: " in line and "mean of" in line]
    assert [line.split()[0] for line in modes] == ["captured", "eager"]
    assert all("on the GPU" in line for line in modes)
    assert text.count("waits     the host waits for nothing in a step\n") == 2
    assert "\nlinear_cross_entropy/" in text  # a kernel
    assert "\nnext      " in text and "\nmemory    peak " in text


@pytest.mark.parametrize(
    ("words", "code", "what", "where", "next"),
    [
        ([], 2, "Missing option '--op'", "command line", "genesis profile --help"),
        (["CONFIG", "--op", "add"], 2, "exclude each other", "command line", "genesis profile CONFIG"),
        (["CONFIG", "--shape", "4"], 2, "--shape is for ops", "--shape", "leave it out"),
        (["CONFIG", "--device", "cpu"], 2, "--device is for ops", "--device", "train.device=cpu"),
        (["--op", "add", "--steps", "3"], 2, "--steps is for runs", "--steps", "leave it out"),
        (["--op", "add", "--nvtx"], 2, "--nvtx is for runs", "--nvtx", "leave it out"),
        (["--op", "add", "--nproc", "2"], 2, "--nproc is for runs", "--nproc", "leave it out"),
        (["CONFIG", "--nproc", "0"], 2, "--nproc 0 is no number of ranks", "command line", "or all"),
        (["CONFIG", "--nproc", "3"], 3, "a step has 2 batches, which 3 ranks", "accumulation_steps", "=3, or start 2"),
        (["CONFIG", "--steps", "0"], 2, "0 steps cannot be profiled", "--steps", "1 to 1000"),
        (["CONFIG", "--out", "CONFIG"], 2, "is not a folder", "--out", "another folder"),
        (["CONFIG", "train.nothing=3"], 3, "nothing", "", ""),
        (["quickstrat"], 3, "no such file or recipe", "quickstrat", "did you mean the recipe quickstart?"),
    ],
)
def test_a_wrong_command_line(recipe: Path, words: list[str], code: int, what: str, where: str, next: str) -> None:
    ended, text, told = profiled(*(str(recipe) if word == "CONFIG" else word for word in words))
    assert (ended, text) == (code, "")
    assert what in told.splitlines()[0]
    assert where in told and next in told
