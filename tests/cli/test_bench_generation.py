"""`genesis bench-model --generate`: its figures, the bytes that a token reads, wrong command lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import genesis_models
from genesis.errors import OutOfMemoryError
from genesis.measure.timing import Plan
from genesis_cli import environment
from genesis_cli.session.bench import generation, measuring
from genesis_cli.session.bench.generation import Settings, cache_bytes, generation_row, weight_bytes
from genesis_cli.session.bench.generation_report import GenerationReport
from genesis_models.engine import Engine, Request, Token
from tests.cli.command import printed
from tests.measure.quick import made_limits, small_limits
from tests.models.golden import extra, golden

RAW = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
PLAN = Plan(precision=0.5, seconds=0.05, warm_up=0.0, most_calls=1)
GRID = ("--generate", "--batch-size", "1,2", "--seq-len", "8,16", "--new-tokens", "4", "--fast", "--device", "cpu")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """Little time for each figure, and no questions to the driver."""
    facts = {"cpu": {"name": "a processor"}, "genesis": "0.0"}
    with (
        small_limits(),
        mock.patch.object(measuring, "FAST", PLAN),
        mock.patch.object(environment, "facts", return_value=facts),
    ):
        yield


@pytest.fixture
def shape(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    return str(tmp_path / "config.json")


def test_the_text_has_a_line_for_each_case_and_the_ops_of_the_last(shape: str) -> None:
    code, text, told = printed("bench-model", "--size", shape, *GRID)
    assert (code, told) == (0, "")
    rows = [line.split()[0] for line in text.splitlines() if line[:1].isdigit()]
    assert rows == ["1x8+4", "1x16+4", "2x8+4", "2x16+4"]
    assert "\nstep 2x16+4 " in text and "\nsample " in text and "greedy" in text
    assert max(map(len, text.splitlines())) <= 100 + len(shape)


def test_json(shape: str) -> None:
    code, text, _ = printed("bench-model", "--size", shape, *GRID, "--temperature", "0.8", "--json", "-")
    report = GenerationReport.model_validate_json(text)
    assert code == 0 and report.settings.temperature == 0.8
    assert report.command == (
        f"genesis bench-model --generate --size {shape} --batch-size 1,2 --seq-len 8,16 --device cpu --new-tokens 4"
        " --temperature 0.8 --fast"
    )
    for row in report.rows:
        bytes_ = row.weight_bytes + row.cache_bytes
        assert row.tokens_per_second == pytest.approx(row.batch / row.token.seconds)
        assert row.bytes_per_second == pytest.approx(bytes_ / row.token.seconds)
        assert row.share == pytest.approx(row.bytes_per_second / report.limits.bytes_per_second)
        assert (row.engine, row.new) == ("Engine", 4)
    assert report.breakdown is not None
    assert {"sample": 1, "attention": 4}.items() <= {each.op: each.calls for each in report.breakdown.ops}.items()


def test_weights_in_8_bits_are_fewer_bytes(shape: str) -> None:
    found = {}
    for kind in ("fp32", "int8", "fp8"):
        code, text, _ = printed("bench-model", "--size", shape, *GRID, "--dtype", kind, "--json", "-")
        report = GenerationReport.model_validate_json(text)
        assert code == 0 and report.limits.dtype == "float32"
        found[report.settings.dtype] = report.rows[0].weight_bytes
    assert found["int8"] == found["fp8"] < 0.6 * found["float32"]


def test_a_token_takes_what_the_engine_takes_for_it() -> None:
    """An engine that takes 20 ms for the first token and 5 ms for each further one, by a clock of its own."""
    now = [0.0]

    class Timed:
        def run(self, requests: list[Request]) -> Iterator[Token]:
            for number in range(requests[0].max_tokens):
                now[0] += 0.005 if number else 0.020
                yield Token(0, number)

    model = genesis_models.load(golden("qwen3-tied").folder)
    settings = Settings("float32", "float32", 9, plan=Plan(seconds=0.0, warm_up=0.0, most_calls=1))
    with (
        mock.patch.object(generation, "engine_for", return_value=Timed()),
        mock.patch.object(generation, "time", mock.Mock(perf_counter=lambda: now[0])),
    ):
        row = generation_row(model, 1, 8, made_limits(), settings)
    assert row.token.seconds == pytest.approx(0.005)
    assert row.first.seconds == pytest.approx(0.020)
    assert row.tokens_per_second == pytest.approx(200)


def test_bytes_are_those_of_the_arrays() -> None:
    """A tied embedding is read whole, as the head; another one by a row a token; a window bounds the keys."""
    tied, untied = (genesis_models.load(golden(name).folder) for name in ("qwen3-tied", "qwen2-untied-sharded"))
    assert weight_bytes(tied, 8) == sum(each.detach().numpy().nbytes for each in tied.parameters())
    embedding = untied.model.embed_tokens.weight
    whole = sum(each.detach().numpy().nbytes for each in untied.parameters())
    assert weight_bytes(untied, 3) == whole - embedding.nbytes + 3 * embedding.shape[1] * embedding.dtype.itemsize
    windowed = genesis_models.load(extra("qwen2-window").folder)
    for model in (tied, windowed):
        config, engine = model.config, Engine(model, rows=1, capacity=40)
        one = engine.cache.data[0, 0, 0, :, 0].nbytes  # a key of one layer
        found = sum(
            2 * one * np.mean([min(length, window) if window else length for length in range(31, 40)])
            for window in config.layer_windows
        )
        assert cache_bytes(model, engine, 30, 10) == pytest.approx(found, abs=1)
    assert any(windowed.config.layer_windows) and min(filter(None, windowed.config.layer_windows)) < 30


def test_a_case_that_fails_does_not_end_the_others(shape: str) -> None:
    real = generation.generation_row

    def some(model, batch, prompt, *rest):  # type: ignore[no-untyped-def]
        if batch == 1:
            raise OutOfMemoryError("no room")
        return real(model, batch, prompt, *rest)

    with mock.patch.object(generation, "generation_row", some):
        code, text, told = printed("bench-model", "--size", shape, *GRID)
    assert code == 7 and "2 of 4 cases failed" in told
    assert "failed    1x8+4: no room" in text and "\n2x16+4" in text


@pytest.mark.parametrize(
    "words,said",
    [
        (("--generate", "--vs", "torch"), "--vs is for training steps"),
        (("--generate", "--checkpointing", "full"), "--checkpointing is for training steps"),
        (("--generate", "--new-tokens", "1"), "no time between them"),
        (("--generate", "--seq-len", "60"), "beyond the model's 64 positions"),
        (("--generate", "--temperature", "-1", "--seq-len", "8", "--new-tokens", "4"), "temperature is -1"),
        (("--generate", "--batch-size", "x"), "'x' are no sizes"),
        (("--new-tokens", "3"), "--new-tokens is for generation"),
        (("--temperature", "1"), "--temperature is for generation"),
    ],
)
def test_wrong_command_lines(shape: str, words: tuple[str, ...], said: str) -> None:
    code, _, told = printed("bench-model", "--size", shape, "--device", "cpu", *words)
    assert code == 2 and said in told
