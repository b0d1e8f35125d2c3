"""What `genesis_cli.session.bench` measures and says: the formula, the phases, memory, ratios, and failures apart."""

from __future__ import annotations

import json
import weakref
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from genesis.backend import CPU, Device
from genesis.dtypes import float32
from genesis.errors import DeviceError, ModelError, UsageError
from genesis.measure.limits import Limits
from genesis.measure.timing import Plan, summarize
from genesis.profile.schema import Failure, LimitsRow, Time
from genesis_cli.session.bench import measuring, phases
from genesis_cli.session.bench.cases import FORMULA, RandomTokens, check_lengths, shape_of, step_flops
from genesis_cli.session.bench.measuring import Settings, bench_model, measured_row, scaling_of
from genesis_cli.session.bench.report import WIDTH, render_lines
from genesis_cli.session.bench.schema import Memory, ModelFacts, Phases, Report, Row, SettingsRow
from genesis_models.config import ModelConfig

RAW: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CONFIG = ModelConfig.from_dict(RAW)
ONCE = Plan(seconds=0.0, warm_up=0.0, most_calls=1)


def limits(device: Device = CPU) -> Limits:
    """A machine that multiplies at 1 GFLOP/s."""
    return Limits(device, float32, 1e9, 1e9, 1e-6, None)


def exactly(seconds: float) -> Time:
    return Time.of(summarize([seconds] * 10))


def made_row(batch: int, length: int, *phases: float, planned: dict[str, int] | None = None) -> Row:
    """A row whose phases take so many seconds."""
    step = exactly(sum(phases))
    forward, backward, optimizer = map(exactly, phases)
    return Row(
        batch=batch,
        length=length,
        step=step,
        is_captured=False,
        phases=Phases(forward=forward, backward=backward, optimizer=optimizer, step=step),
        tokens_per_second=batch * length / step.seconds,
        flops=10**9,
        flops_per_second=1e9 / step.seconds,
        mfu=0.25,
        memory=Memory(weights=1 << 20, gradients=1 << 20, optimizer=2 << 20, peak=7 << 20, planned=planned),
        notes=[],
    )


def made_report(rows: list[Row], failures: tuple[Failure, ...] = ()) -> Report:
    return Report(
        date="2026-01-01T00:00:00+00:00",
        command="genesis bench-model --size tiny",
        device="cpu",
        device_name="a processor",
        machine={},
        limits=LimitsRow(
            dtype="float32", bytes_per_second=1e10, flops_per_second=4e9, call_seconds=1e-6, kernel_seconds=None
        ),
        model=ModelFacts(size="tiny", model_type="qwen2", parameters=1234567, config=RAW),
        settings=SettingsRow(dtype="float32", optimizer="adamw", checkpointing="none", threads=2, is_fast=True),
        formula=FORMULA,
        rows=rows,
        scaling=scaling_of(rows),
        failures=list(failures),
    )


# --- Cases ------------------------------------------------------------------------------------------------------------


def test_flops_by_hand() -> None:
    # Embedding; per layer q, k, v with biases, o, three matrices of the MLP and two norms; the last norm.
    layer = (16 * 16 + 16) + 2 * (16 * 8 + 8) + 16 * 16 + 3 * 16 * 24 + 2 * 16
    parameters = 32 * 16 + 2 * layer + 16
    assert step_flops(CONFIG, 3, 10) == 30 * (6 * parameters + 6 * 2 * 16 * 10)


def test_flops_count_heads_wider_than_the_model() -> None:
    wide = ModelConfig.from_dict(RAW | {"model_type": "qwen3", "head_dim": 64})
    growth = step_flops(wide, 1, 20) / 20 - step_flops(wide, 1, 10) / 10
    assert growth == 6 * 2 * (2 * 64) * 10


def test_a_size_is_a_preset_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert shape_of(str(tmp_path)) == shape_of(str(tmp_path / "config.json"))
    assert shape_of(str(tmp_path)).raw == RAW
    assert shape_of("qwen3-0.6B").hidden_size == 1024


@pytest.mark.parametrize(("size", "near"), [("0.6b", "qwen3-0.6B"), ("0.5b", "0.5B"), ("15B", "1.5B"), ("gpt", "")])
def test_an_unknown_size_names_the_nearest(size: str, near: str) -> None:
    with pytest.raises(UsageError) as found:
        shape_of(size)
    assert found.value.where == "--size"
    assert found.value.next.startswith(f"did you mean {near}? sizes: 0.5B" if near else "sizes: 0.5B")


def test_a_shape_of_another_kind_of_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ModelError):
        shape_of(str(tmp_path))


@pytest.mark.parametrize("length", [1, 65])
def test_lengths_that_no_step_can_have(length: int) -> None:
    check_lengths(CONFIG, [2, 64])
    with pytest.raises(UsageError, match="between 2 and the model's 64"):
        check_lengths(CONFIG, [8, length])


def test_random_tokens_are_drawn_by_number() -> None:
    loader = RandomTokens(3, 7, 5)
    first, second = loader.batch(0, 0), loader.batch(0, 1)
    assert first.input_ids.shape == (3, 7) and first.num_targets == 18 and first.num_tokens == 21
    assert first.input_ids.min() >= 0 and first.input_ids.max() < 5
    assert not np.array_equal(first.input_ids, second.input_ids)
    assert np.array_equal(first.input_ids, next(loader.batches()).input_ids)
    assert loader.describe(second) == ["random tokens, batch 1"]


# --- Measuring --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    plan = Plan(seconds=0.2, warm_up=0.05, most_calls=1)
    told: list[str] = []
    found = list(bench_model(CONFIG, product((1, 2), (8, 16)), limits(), Settings("float32", plan=plan), told.append))
    assert told == ["1 of 4: 1x8", "2 of 4: 1x16", "3 of 4: 2x8", "4 of 4: 2x16"]
    assert [(row.batch, row.length) for row in found if isinstance(row, Row)] == [(1, 8), (1, 16), (2, 8), (2, 16)]
    return [row for row in found if isinstance(row, Row)]


def test_rates_follow_from_the_step(rows: list[Row]) -> None:
    for row in rows:
        assert row.tokens_per_second == row.batch * row.length / row.step.seconds
        assert row.flops == step_flops(CONFIG, row.batch, row.length)
        assert row.mfu == pytest.approx(row.flops / row.step.seconds / 1e9)
        assert (row.is_captured, row.notes, row.step) == (False, [], row.phases.step)


def test_phases_add_up_in_each_step() -> None:
    seconds = iter(range(1000))
    ticks: dict[str, Any] = {"perf_counter": lambda: float(next(seconds))}
    plan = Plan(seconds=0.0, warm_up=0.0, most_calls=1, clock=lambda: 0.0)
    with mock.patch.object(phases, "time", mock.Mock(**ticks)):
        (row,) = bench_model(CONFIG, [(1, 8)], limits(), Settings("float32", plan=plan))
    assert isinstance(row, Row)
    # The clock is read at the start, behind the loss, before the norm, and at the end.
    times = {name: getattr(row.phases, name).seconds for name in ("forward", "backward", "optimizer", "step")}
    assert times == {"forward": 1.0, "backward": 1.0, "optimizer": 1.0, "step": 3.0}


def test_phases_lie_within_the_step(rows: list[Row]) -> None:
    # Each phase is a part of the step it was measured in; medians of parts may leave the whole's by what times differ.
    for row in rows:
        parts = [row.phases.forward, row.phases.backward, row.phases.optimizer]
        assert all(0 < part.fastest <= row.step.seconds for part in parts)
        assert sum(part.fastest for part in parts) <= row.step.seconds
        assert sum(row.phases.shares.values()) == pytest.approx(1.0)


def test_memory_is_counted(rows: list[Row]) -> None:
    # Four bytes of each parameter, once as weight, once as gradient, twice as running average.
    parameters = 32 * 16 + 2 * (272 + 272 + 256 + 1152 + 32) + 16
    for row in rows:
        memory = row.memory
        assert (memory.weights, memory.gradients, memory.optimizer) == tuple(4 * parameters * k for k in (1, 1, 2))
        assert memory.planned is None
        # At the least, SwiGLU's two inputs of all layers are kept for backward.
        assert memory.rest > row.batch * row.length * 2 * 2 * 24 * 4


def test_checkpointing_reaches_the_model() -> None:
    seen = []

    def row(model: Any, *rest: Any) -> Row:
        seen.append((model.activation_checkpointing, model.training))
        return made_row(1, 8, 1.0, 1.0, 1.0)

    with mock.patch.object(measuring, "measured_row", row):
        list(bench_model(CONFIG, [(1, 8)], limits(), Settings("float32", "full")))
    assert seen == [("full", True)]


def test_a_failing_case_leaves_the_others_and_no_memory() -> None:
    held: list[weakref.ref[np.ndarray[Any, Any]]] = []

    def row(model: Any, batch: int, *rest: Any) -> Row:
        room = np.zeros(1000)
        assert all(ref() is None for ref in held), "memory of a failed case is still there"
        held.append(weakref.ref(room))
        if batch == 2:
            return measured_row(model, batch, *rest)
        raise DeviceError("a kernel failed") if batch == 1 else MemoryError("4 TiB")

    with mock.patch.object(measuring, "measured_row", row):
        found = list(bench_model(CONFIG, [(1, 8), (2, 8), (3, 8), (2, 4)], limits(), Settings("float32", plan=ONCE)))
    assert [type(each) for each in found] == [Failure, Row, Failure, Row]
    failures = [each for each in found if isinstance(each, Failure)]
    assert [(f.name, f.label, f.exit_code) for f in failures] == [("step", "1x8", 6), ("step", "3x8", 7)]
    assert failures[0].error == "a kernel failed" and "4 TiB" in failures[1].error


def test_steps_on_cuda_are_captured() -> None:
    tiny = ModelConfig.from_dict(RAW | {"num_hidden_layers": 1, "num_attention_heads": 1})
    (row,) = bench_model(tiny, [(1, 8)], limits(Device("cuda", 0)), Settings("float32", plan=ONCE))
    assert isinstance(row, Row), row
    assert (row.is_captured, row.notes) == (True, [])
    parts = [row.phases.forward, row.phases.backward, row.phases.optimizer]
    assert all(part.fastest > 0 for part in parts)
    assert sum(part.seconds for part in parts) == pytest.approx(row.phases.step.seconds)  # one step was taken
    assert row.memory.planned is not None and set(row.memory.planned) >= {"weights", "activations", "workspace"}
    assert row.memory.rest > 0
    # The times of ops stand in the graph, which holds one step, and together make it up.
    assert row.breakdown is not None
    calls = {each.op: each.calls for each in row.breakdown.ops}
    assert calls["linear_cross_entropy"] == calls["attention_packed"] == calls["clip_factor"] == 1
    assert sum(each.seconds for each in row.breakdown.ops) + row.breakdown.rest == pytest.approx(row.breakdown.seconds)
    assert all(each.seconds > 0 for each in row.breakdown.ops)


# --- What is said -----------------------------------------------------------------------------------------------------


@pytest.fixture
def grid() -> list[Row]:
    times = {(1, 8): 1.0, (2, 8): 1.0, (4, 8): 4.0, (1, 16): 3.0}
    return [made_row(b, t, total / 4, total / 2, total / 4) for (b, t), total in times.items()]


def test_scaling_compares_the_time_of_a_token(grid: list[Row]) -> None:
    found = [(s.axis, s.fixed, s.start, s.end, s.ratio) for s in scaling_of(grid)]
    assert found == [("batch", 8, 1, 2, 0.5), ("batch", 8, 2, 4, 2.0), ("length", 1, 8, 16, 1.5)]
    assert scaling_of(grid[:1]) == []


def test_the_text(grid: list[Row]) -> None:
    failure = Failure(name="step", label="8x8", error="no \x1b room " + "x " * 60, exit_code=7)
    lines = list(render_lines(made_report(grid, (failure,))))
    assert lines[:3] == [
        "device    a processor (cpu, 2 threads)",
        "limit     matmul float32 4.00 GFLOP/s, measured now",
        "model     tiny: qwen2, 1,234,567 parameters, float32, adamw, checkpointing none",
    ]
    assert lines[4] == "case        step ±  forward  backward  optimizer  tokens/s  FLOP/s  MFU   memory"
    assert lines[5] == "1x8   1.00 s  0.0%   250 ms    500 ms     250 ms         8  1.00 G  25%  7.0 MiB"
    memory = "memory    4x8: weights 1.0 MiB, gradients 1.0 MiB, optimizer 2.0 MiB, activations and workspace 3.0 MiB"
    assert memory in "\n".join(lines).replace("\n" + " " * 10, " ")
    assert "scaling   length 8: time of a token ×0.50 from batch 1 to 2, ×2.00 from batch 2 to 4" in lines
    assert "scaling   batch 1: time of a token ×1.50 from length 8 to 16" in lines
    assert "priority  4x8: backward takes most, 50% of the phases; forward 25%, optimizer 25%" in lines
    assert any(line.startswith("failed    8x8: no \\x1b room") for line in lines)
    assert sum(FORMULA in line for line in lines) == 1
    assert max(map(len, lines)) <= WIDTH


def test_the_widest_table_fits() -> None:
    planned = dict.fromkeys(("weights", "gradients", "optimizer", "activations", "workspace"), 123 << 30)
    row = made_row(1024, 32768, 0.0123, 0.0123, 0.0123, planned=planned)
    noisy = row.step.model_copy(update={"is_noisy": True, "half_width": 0.123})
    memory = row.memory.model_copy(update={"peak": 1234 << 30})
    big = {"step": noisy, "tokens_per_second": 1234567.0, "memory": memory, "notes": ["word " * 40]}
    report = made_report([row.model_copy(update=big)])
    on_gpu = report.settings.model_copy(update={"threads": None})
    lines = list(render_lines(report.model_copy(update={"settings": on_gpu})))
    assert any(line.startswith("1024x32768") and line.endswith("noisy") for line in lines)
    assert "step: a CUDA graph" in " ".join(lines)
    assert any("without --fast" in line for line in lines)
    assert max(map(len, lines)) <= WIDTH


def test_failures_alone_are_told() -> None:
    failure = Failure(name="step", label="8x8", error="no room", exit_code=7)
    assert list(render_lines(made_report([], (failure,))))[-1] == "failed    8x8: no room"
