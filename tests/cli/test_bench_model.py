"""`genesis bench-model`: text, JSON, a failing case, and what a wrong command line is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from genesis.backend import CPU
from genesis.errors import DeviceError, OutOfMemoryError
from genesis.measure.timing import Plan
from genesis_cli import environment
from genesis_cli.session import bench_model as model
from tests.cli.command import printed
from tests.measure import fake_torch
from tests.measure.quick import small_limits

RAW = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
GRID = ("--batch-size", "1,2", "--seq-len", "8,16", "--fast")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """Little time for each figure, and no questions to the driver."""
    facts = {"cpu": {"name": "a processor"}, "genesis": "0.0"}
    plan = Plan(precision=0.5, seconds=0.05, warm_up=0.0, most_calls=1)
    with (
        small_limits(),
        mock.patch.object(model, "FAST", plan),
        mock.patch.object(environment, "facts", return_value=facts),
    ):
        yield


@pytest.fixture
def shape(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    return str(tmp_path / "config.json")


def benched(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `genesis bench-model words…` on the CPU, unless the words say otherwise."""
    where = [] if "--device" in words else ["--device", "cpu"]
    return printed("bench-model", *words, *where)


def tables(text: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table of a report in JSON."""
    return {table["name"]: table["rows"] for table in json.loads(text)["tables"]}


def test_text_and_json(shape: str, tmp_path: Path) -> None:
    code, text, told = benched("--size", shape, *GRID, "--json", str(tmp_path / "report.json"))
    assert (code, told) == (0, "")
    assert text.startswith("device  a processor (cpu)\n")
    rows = [line.split()[0] for line in text.splitlines() if line[:1].isdigit()]
    assert rows == 2 * ["1x8", "1x16", "2x8", "2x16"]  # steps and memory
    data = (tmp_path / "report.json").read_text()
    report, found = json.loads(data), tables(data)
    assert (report["kind"], report["schema_version"], report["device_name"]) == ("bench-model", 2, "a processor")
    options = "--batch-size 1,2 --seq-len 8,16 --device cpu --fast"
    assert report["command"] == f"genesis bench-model --size {shape} {options}"
    assert (report["settings"]["type"], report["settings"]["dtype"]) == ("qwen3", "float32")
    assert [row["case"] for row in found["steps"]] == rows[:4]
    assert sum(row["share"] for row in found["ops"]) == pytest.approx(1.0)


def test_weights_in_2_bytes(shape: str) -> None:
    words = ["--batch-size", "2,2", "--seq-len", "8", "--dtype", "bf16", "--checkpointing", "selective", "--fast"]
    code, text, _ = benched("--size", str(Path(shape).parent), *words, "--json", "-")
    settings, (memory,) = json.loads(text)["settings"], tables(text)["memory"]
    assert (code, settings["dtype"], settings["checkpointing"]) == (0, "bfloat16", "selective")
    # Masters have 2 bytes of each weight beside its own 2, running averages 8.
    assert (memory["case"], memory["optimizer"]) == ("2x8", 5 * memory["weights"])


@pytest.mark.full
def test_the_recipes_model_is_a_size() -> None:
    code, text, _ = benched("--size", "quickstart", "--batch-size", "1", "--seq-len", "16", "--fast", "--json", "-")
    assert code == 0 and json.loads(text)["settings"]["parameters"] == 4_000_512


def test_lengths_that_nobody_gave_fit_the_models_positions(shape: str, tmp_path: Path) -> None:
    for positions, lengths in ((64, (64,)), (300, (128, 256))):
        (tmp_path / "config.json").write_text(json.dumps({**RAW, "max_position_embeddings": positions}))
        code, text, told = benched("--size", shape, "--batch-size", "1", "--fast", "--json", "-")
        assert (code, told) == (0, "")
        assert [row["case"] for row in tables(text)["steps"]] == [f"1x{length}" for length in lengths]


def test_a_failing_case_does_not_end_the_run(shape: str) -> None:
    plain = model.measured_case

    def lacks_room(built: Any, batch: int, length: int, *rest: Any) -> Any:
        if batch == 1 and length == 16:
            raise OutOfMemoryError("no room for a step")
        return plain(built, batch, length, *rest)

    with mock.patch.object(model, "measured_case", lacks_room):
        code, text, told = benched("--size", shape, *GRID)
    assert code == 7
    assert "\n2x16 " in text and "\nfailed  step 1x16: no room for a step\n" in text
    assert told == "error: no room for a step\n  where: step 1x16, 1 of 4 cases failed\n"


@pytest.mark.parametrize(
    ("words", "what", "where", "next"),
    [
        (["--size", "0.6b"], "'0.6b' is neither a model size nor a file", "--size", "did you mean qwen3-0.6B?"),
        (["--size", "quickstrat"], "'quickstrat' is neither a model size nor a file", "--size", "mean quickstart?"),
        (["--size", "0.5B", "--batch-size", "0"], "'0' is not a list of sizes", "--batch-size", "1,2,4"),
        (["--size", "0.5B", "--seq-len", "1"], "a length of 1 is not between", "--seq-len", "in that range"),
        (["--size", "0.5B", "--seq-len", "99999"], "the model's 32768 positions", "--seq-len", "in that range"),
        (["--size", "0.5B", "--dtype", "fp8"], "--dtype must be one of auto, float32", "command line", "bf16"),
        (["--size", "0.5B", "--checkpointing", "half"], "'half' is not known", "--checkpointing", "none, selective"),
        (["--size", "0.5B", "--vs", "jax"], "'jax' is not a peer", "--vs", "use torch"),
        (["--size", "0.5B", "--torch-python", "x"], "nothing to compare with", "--torch-python", "add --vs torch"),
        ([], "Missing option '--size'", "command line", "genesis bench-model --help"),
    ],
)
def test_a_wrong_command_line(words: list[str], what: str, where: str, next: str) -> None:
    code, text, told = benched(*words)
    assert (code, text) == (2, "")
    assert what in told.splitlines()[0]
    assert f"  where: {where}\n" in told
    assert next in told


def test_the_request_to_compare_with_torch_is_passed_on(shape: str) -> None:
    given: list[Any] = []

    def started(*how: Any) -> Any:
        given.append(how)
        raise DeviceError("enough")

    with mock.patch.object(model, "started", started):
        code, *_ = benched("--size", shape, *GRID, "--vs", "torch", "--torch-python", "p")
    assert (code, given) == (6, [("steps", CPU, "p")])


def test_a_peer_that_is_missing_is_told_before_anything_is_measured(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(fake_torch.install(tmp_path / "site", "raise ImportError('none here')")))
    with mock.patch.object(model, "each_case", side_effect=AssertionError):
        code, text, told = benched("--size", shape, *GRID, "--vs", "torch")
    assert (code, text) == (6, "")
    assert "torch cannot be imported: none here" in told and "pip install torch" in told
