"""`genesis bench-ops` and `genesis bench all`: files, JSON, history, failing cases, and wrong command lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from genesis.errors import OutOfMemoryError
from genesis.measure import op as measuring
from genesis.measure import suite
from genesis.measure.cases import Kind
from genesis.measure.op import profile_case
from genesis.measure.timing import Plan
from genesis_cli import environment
from genesis_cli.session import bench_model as model_steps
from genesis_cli.session import bench_model as steps
from tests.cli.command import printed
from tests.measure import fake_torch
from tests.measure.quick import PLAN, small_limits

MODEL = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """Tiny shapes, little time for each figure, and no questions to the driver."""
    shape_of = Kind.shape_of
    plan = Plan(precision=0.5, seconds=0.05, warm_up=0.0, most_calls=1)
    with (
        small_limits(),
        mock.patch.object(Kind, "shape_of", lambda kind, size: tuple(min(n, 8) for n in shape_of(kind, size))),
        mock.patch.object(suite, "FAST", PLAN),
        mock.patch.object(steps, "FAST", plan),
        mock.patch.object(environment, "facts", return_value={"cpu": {"name": "a processor"}, "genesis": "0.0"}),
    ):
        yield


def run(*words: str, out: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `genesis words…` on the CPU, unless the words say otherwise."""
    where = [] if "--device" in words else ["--device", "cpu"]
    return printed(*words, *where, "--out", str(out))


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def rows_of(report: dict[str, Any], name: str = "ops") -> list[dict[str, Any]]:
    """Rows of a table; none where it is not there."""
    return next((table["rows"] for table in report["tables"] if table["name"] == name), [])


def test_two_files_and_a_summary(tmp_path: Path) -> None:
    code, text, told = run("bench-ops", "--op", "add", "--op", "sum", "--fast", out=tmp_path / "new" / "folder")
    assert (code, told) == (0, "")
    written = [line.split()[1] for line in text.splitlines() if line.startswith("written ")]
    assert [Path(name).suffix for name in written] == [".md", ".json"]
    assert all(Path(name).is_file() for name in written)
    (report,) = reports(tmp_path / "new" / "folder")
    assert report["command"] == "genesis bench ops --op add --op sum --fast --device cpu"
    assert (report["kind"], report["settings"]["fast"], report["settings"]["sizes"]) == ("bench-ops", True, "medium")
    assert [row["name"] for row in rows_of(report)] == ["add", "sum"]
    assert [(row["name"], row["cases"]) for row in rows_of(report, "sizes")] == [("medium", 2), ("all", 2)]
    assert str(tmp_path) not in json.dumps(report)
    assert {"device  a processor (cpu)", "by size class", "by category"} <= set(text.splitlines())


def test_json_alone_on_stdout(tmp_path: Path) -> None:
    words = ("--op", "matmul", "--op", "copy", "--size", "small", "--size", "large", "--fast", "--backward")
    code, text, told = run("bench", "ops", *words, "--json", "-", out=tmp_path)
    assert (code, told) == (0, "")
    report = json.loads(text)
    assert [(row["name"], row["category"], row["size"]) for row in rows_of(report)] == [
        ("matmul", "matmul", "small"), ("matmul", "matmul", "large"),
        ("copy", "memory", "small"), ("copy", "memory", "large"),
    ]  # fmt: skip
    assert all(row["backward"] is not None for row in rows_of(report))


def test_the_next_run_tells_what_changed(tmp_path: Path) -> None:
    for _ in range(2):
        assert run("bench-ops", "--op", "exp", "--fast", out=tmp_path)[0] == 0
    code, text, _ = run("bench-ops", "--op", "exp", "--fast", "--json", "-", out=tmp_path)
    report = json.loads(text)
    assert code == 0
    assert [row["case"] for row in rows_of(report, "changes")] == ["exp 8x8"]


def test_a_failing_op_does_not_end_the_run(tmp_path: Path) -> None:
    def fails(case: Any, *rest: Any) -> Any:
        if case.name == "sub":
            raise ZeroDivisionError("a bug")
        return profile_case(case, *rest)

    with mock.patch.object(measuring, "profile_case", fails):
        code, text, told = run("bench-ops", *(f"--op={name}" for name in ("add", "sub", "mul")), "--fast", out=tmp_path)
    assert code == 70
    assert told == "error: ZeroDivisionError: a bug\n  where: sub 8x8, 1 of 3 cases failed\n"
    assert "\nfailed  sub 8x8: ZeroDivisionError: a bug\n" in text
    (report,) = reports(tmp_path)
    assert [row["name"] for row in rows_of(report)] == ["add", "mul"]
    assert report["failures"][0]["exit_code"] == 70


def test_beside_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(fake_torch.install(tmp_path / "site")))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.npy"))
    words = ("--op", "add", "--op", "mul", "--op", "div", "--op", "sub", "--fast", "--vs", "torch")
    code, _, _ = run("bench-ops", *words, out=tmp_path)
    assert code == 0  # the peer fails at some, which is no failure of ours
    (report,) = reports(tmp_path)
    assert report["command"].endswith("--device cpu --vs torch") and report["settings"]["torch"] == "9.9"
    assert [row["name"] for row in rows_of(report) if row["ratio"] is not None] == ["add"]
    notes = next(table["notes"] for table in report["tables"] if table["name"] == "ops")
    assert notes == ["not compared with torch: the peer's process ended with 7: divided"]


@pytest.mark.parametrize(
    ("words", "what", "where", "next"),
    [
        (["--op", "addd"], "there is no op addd", "--op", "did you mean add?"),
        (["--category", "fast"], "'fast' is not a category", "--category", "use one of element"),
        (["--size", "huge"], "'huge' is not a size", "--size", "use one of small"),
        (["--dtype", "f99"], "'f99' is not a dtype", "--dtype", "use one of float64"),
        (["--op", "add", "--category", "matmul"], "no op of add", "--category", "leave it out"),
        (["--op", "add", "--vs", "jax"], "'jax' is not a peer", "--vs", "use torch"),
        (["--op", "add", "--torch-python", "python"], "nothing to compare with", "--torch-python", "add --vs torch"),
        (["--op", "bitwise_and", "--dtype", "fp32", "--fast"], "does not take float32", "--dtype", "leave --dtype out"),
    ],
)
def test_a_wrong_command_line(words: list[str], what: str, where: str, next: str, tmp_path: Path) -> None:
    code, _, told = run("bench-ops", *words, out=tmp_path)
    assert code == 2
    assert what in told.splitlines()[0]
    assert f"  where: {where}\n" in told
    assert next in told


def test_a_folder_that_cannot_be_made_ends_the_command_before_it_measures(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, text, told = run("bench-ops", "--op", "add", out=tmp_path / "file" / "reports")
    assert (code, text) == (8, "")
    assert "  where: --out\n" in told


# --- genesis bench all ------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Iterator[str]:
    """A small model, and few ops beside it."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with mock.patch.object(suite, "names_of", return_value=["add", "matmul"]):
        yield str(tmp_path / "config.json")


def test_ops_and_the_model_in_one_report(model: str, tmp_path: Path) -> None:
    code, text, told = run("bench", "all", "--model", model, "--fast", out=tmp_path / "out")
    assert (code, told) == (0, "")
    assert "\nTraining steps of " in text
    (report,) = reports(tmp_path / "out")
    assert (report["kind"], report["command"].split()[:4]) == ("bench-all", ["genesis", "bench", "all", "--model"])
    assert [row["name"] for row in rows_of(report)] == ["add", "matmul"]
    assert len(rows_of(report, "steps")) == 1
    (file,) = (tmp_path / "out").glob("*.md")
    assert "## Training steps of " in file.read_text()


def test_a_model_that_fails_leaves_the_ops(model: str, tmp_path: Path) -> None:
    def lacks_room(*rest: Any) -> Any:
        raise OutOfMemoryError("no room for a step")

    with mock.patch.object(model_steps, "measured_case", lacks_room):
        code, text, told = run("bench", "all", "--model", model, "--fast", out=tmp_path / "out")
    assert code == 7
    assert "where: step 4x16, 1 of 3 cases failed" in told
    assert "failed  step 4x16: no room for a step" in text
    (report,) = reports(tmp_path / "out")
    assert len(rows_of(report)) == 2 and rows_of(report, "steps") == []
