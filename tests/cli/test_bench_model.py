"""`genesis bench-model`: text, JSON, a failing case, and what a wrong command line is answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from genesis.errors import OutOfMemoryError
from genesis.measure.timing import Plan
from genesis.profile import peer
from genesis_cli import environment
from genesis_cli.session.bench import measuring
from genesis_cli.session.bench.schema import Report
from tests.cli.command import printed
from tests.measure.quick import small_limits
from tests.profile import fake_torch

RAW = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GRID = ("--batch-size", "1,2", "--seq-len", "8,16", "--fast")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """Little time for each figure, and no questions to the driver."""
    facts = {"cpu": {"name": "a processor"}, "genesis": "0.0"}
    plan = Plan(precision=0.5, seconds=0.05, warm_up=0.0, most_calls=1)
    with (
        small_limits(),
        mock.patch.object(measuring, "FAST", plan),
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


def test_the_text_has_a_line_for_each_case(shape: str) -> None:
    code, text, told = benched("--size", shape, *GRID)
    assert (code, told) == (0, "")
    assert text.startswith("device    a processor (cpu, ")
    rows = [line.split()[0] for line in text.splitlines() if line[:1].isdigit()]
    assert rows == ["1x8", "1x16", "2x8", "2x16"]
    assert "\npriority  2x16: " in text
    assert max(map(len, text.splitlines())) <= 100 + len(shape)


def test_json_alone_on_stdout(shape: str) -> None:
    code, text, told = benched("--size", shape, *GRID, "--json", "-")
    assert (code, told) == (0, "")
    report = Report.model_validate_json(text)
    assert report.schema_version == 1
    assert report.command == (
        f"genesis bench-model --size {shape} --batch-size 1,2 --seq-len 8,16 --device cpu --checkpointing none --fast"
    )
    assert (report.machine["genesis"], report.limits.dtype, report.device_name) == ("0.0", "float32", "a processor")
    assert (report.model.model_type, report.model.config) == ("qwen3", RAW)
    assert [(row.batch, row.length) for row in report.rows] == [(1, 8), (1, 16), (2, 8), (2, 16)]
    assert {(s.axis, s.fixed) for s in report.scaling} == {("batch", 8), ("batch", 16), ("length", 1), ("length", 2)}


def test_json_into_a_file_beside_the_text(shape: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    words = ["--batch-size", "2,2", "--seq-len", "8", "--dtype", "bf16", "--checkpointing", "selective", "--fast"]
    code, text, _ = benched("--size", str(Path(shape).parent), *words, "--json", str(file))
    assert code == 0
    assert "bfloat16, adamw, checkpointing selective" in text
    report = Report.model_validate_json(file.read_text())
    assert [(row.batch, row.length) for row in report.rows] == [(2, 8)]
    assert (report.settings.dtype, report.settings.checkpointing) == ("bfloat16", "selective")
    # Masters have 2 bytes of each weight beside its own 2, running averages 8.
    memory = report.rows[0].memory
    assert memory.optimizer == 5 * memory.weights


def test_the_recipes_model_is_a_size() -> None:
    code, text, _ = benched("--size", "quickstart", "--batch-size", "1", "--seq-len", "16", "--fast")
    assert code == 0 and "model     quickstart: qwen3, 4,000,512 parameters" in text


def test_lengths_that_nobody_gave_fit_the_models_positions(shape: str, tmp_path: Path) -> None:
    for positions, lengths in ((64, (64,)), (300, (128, 256))):
        (tmp_path / "config.json").write_text(json.dumps({**RAW, "max_position_embeddings": positions}))
        code, text, told = benched("--size", shape, "--batch-size", "1", "--fast", "--json", "-")
        assert (code, told) == (0, "")
        report = Report.model_validate_json(text)
        assert [(row.batch, row.length) for row in report.rows] == [(1, length) for length in lengths]
        assert f" --seq-len {','.join(map(str, lengths))} " in report.command


def test_a_failing_case_does_not_end_the_run(shape: str) -> None:
    plain = measuring.measured_row

    def lacks_room(model: Any, batch: int, length: int, *rest: Any) -> Any:
        if batch == 1 and length == 16:
            raise OutOfMemoryError("no room for a step")
        return plain(model, batch, length, *rest)

    with mock.patch.object(measuring, "measured_row", lacks_room):
        code, text, told = benched("--size", shape, *GRID)
    assert code == 7
    assert "\n2x16 " in text and "\nfailed    1x16: no room for a step\n" in text
    assert told == "error: no room for a step\n  where: step 1x16, 1 of 4 cases failed\n"


@pytest.mark.parametrize(
    ("words", "what", "where", "next"),
    [
        (["--size", "0.6b"], "'0.6b' is neither a model size nor a file", "--size", "did you mean qwen3-0.6B?"),
        (["--size", "quickstrat"], "'quickstrat' is neither a model size nor a file", "--size", "mean quickstart?"),
        (["--size", "0.5B", "--batch-size", "0"], "'0' are no sizes", "--batch-size", "1,2,4"),
        (["--size", "0.5B", "--batch-size", "x"], "'x' are no sizes", "--batch-size", "1,2,4"),
        (["--size", "0.5B", "--seq-len", ""], "'' are no sizes", "--seq-len", "1,2,4"),
        (["--size", "0.5B", "--seq-len", "1"], "a length of 1 is not between", "--seq-len", "in that range"),
        (["--size", "0.5B", "--seq-len", "99999"], "the model's 32768 positions", "--seq-len", "in that range"),
        (
            ["--size", "0.5B", "--dtype", "fp8"],
            "--dtype must be one of auto, float32, bfloat16, not",
            "command line",
            "bf16",
        ),
        (["--size", "0.5B", "--checkpointing", "half"], "'half' is not known", "--checkpointing", "none, selective"),
        (["--size", "0.5B", "--vs", "jax"], "'jax' is no peer", "--vs", "use torch"),
        (["--size", "0.5B", "--vs", "torch", "--recipes", "quick"], "'quick' is no recipe", "--recipes", "eager, comp"),
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


def test_steps_against_a_peer(shape: str) -> None:
    from genesis_cli.session.bench import versus
    from genesis_cli.session.bench.schema import PeerStep

    given: list[Any] = []

    def steps(
        config: Any, cases: Any, limits: Any, settings: Any, recipes: Any, python: Any, tell: Any
    ) -> list[PeerStep]:
        given.append((cases, recipes, python))
        return [PeerStep(recipe="lean", version="9.9", batch=1, length=8, note="no room")]

    words = ["--batch-size", "1", "--seq-len", "8", "--fast", "--vs", "torch", "--recipes", "lean", "--json", "-"]
    with mock.patch.object(versus, "versus_torch", steps), mock.patch.object(peer, "started"):
        code, text, _ = benched("--size", shape, *words, "--torch-python", "p")
    report = Report.model_validate_json(text)
    assert (code, given) == (0, [([(1, 8)], ("lean",), "p")])
    assert report.command.endswith(" --vs torch --recipes lean --fast")
    assert [each.note for each in report.peers] == ["no room"]
    assert [each.axis for each in report.doublings] == ["batch", "length"]
    assert report.rows[0].breakdown is not None


def test_an_interrupted_run_tells_what_was_measured(shape: str) -> None:
    from genesis_cli.session.bench import versus
    from genesis_cli.session.bench.schema import PeerStep

    def steps(*given: Any) -> Iterator[PeerStep]:
        yield PeerStep(recipe="eager", version="9.9", batch=1, length=8, note="no room")
        raise KeyboardInterrupt

    words = ["--batch-size", "1", "--seq-len", "8", "--fast", "--vs", "torch", "--json", "-"]
    with mock.patch.object(versus, "versus_torch", steps), mock.patch.object(peer, "started"):
        code, text, _ = benched("--size", shape, *words)
    report = Report.model_validate_json(text)
    assert code == 130
    assert (len(report.rows), [each.recipe for each in report.peers]) == (1, ["eager"])
    with mock.patch.object(measuring, "bench_model", side_effect=KeyboardInterrupt):
        assert benched("--size", shape, *words[:5])[:2] == (130, "")


def test_a_peer_that_is_missing_is_told_before_anything_is_measured(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(fake_torch.install(tmp_path / "site", "raise ImportError('none here')")))
    with mock.patch.object(measuring, "bench_model", side_effect=AssertionError):
        code, text, told = benched("--size", shape, *GRID, "--vs", "torch")
    assert (code, text) == (6, "")
    assert "torch cannot be imported: none here" in told and "pip install torch" in told


def test_a_config_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{")
    code, text, told = benched("--size", str(file))
    assert (code, text) == (5, "")
    assert str(file) in told


def test_a_device_that_is_none() -> None:
    code, _, told = benched("--size", "0.5B", "--device", "tpu")
    assert code == 6
    assert "'tpu' is not a device" in told
