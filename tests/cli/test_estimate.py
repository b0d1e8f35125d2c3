"""`genesis estimate`: the parts of memory, the largest batch, and the times of steps that were measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genesis.backend.cuda.simulated import ARCHITECTURES, counting_device
from genesis.dtypes import bfloat16
from genesis.errors import OutOfMemoryError
from genesis.train.config_file import parse_config
from genesis.train.strict_yaml import emit
from genesis_cli.session.dry_run import PlannedRanks, advice, run_plan, with_batch
from genesis_cli.session.estimate import ASSUMED, DRIVER, Place, _largest, estimate, generation_width, measured_step
from genesis_cli.session.host_plan import _counted as counted
from genesis_cli.session.host_plan import host_plan
from genesis_cli.session.model import model_config
from genesis_cli.session.training import advised, cpu_threads
from genesis_models.engine.device_rows import ROOM, width
from tests.cli.command import printed
from tests.models.golden import golden

LASTING = ("weights", "gradients", "optimizer")
TINY = {
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
}


def raw_config(**changed: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "model": {"config": TINY},
        "data": {"train": "nothing.txt", "seq_len": 64},
        "train": {"output_dir": "run", "steps": 3, "batch_size": 4},
    }
    for section, values in changed.items():
        raw[section] = {**raw.get(section, {}), **values}
    return raw


def config_of(**changed: Any) -> Any:
    return parse_config(json.dumps(raw_config(**changed)), "a test")


def simulated(room: int | None = None) -> Place:
    return Place(counting_device(ARCHITECTURES[ASSUMED]), "simulated", room, room, False)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- The largest batch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "needed",
    [
        lambda n: 100 + 7 * n,
        lambda n: 100 + 7 * n + n * n // 50,
        lambda n: 64 * ((100 + 7 * n) // 64),  # in pieces, as an allocator takes it
        lambda n: 5000,
    ],
)
@pytest.mark.parametrize("start", [1, 8, 900])
@pytest.mark.parametrize("room", [0, 106, 107, 400, 6000])
def test_the_largest_is_found_from_anywhere(needed: Callable[[int], int], start: int, room: int) -> None:
    most = 1 << 16
    expected = max((n for n in (0, *range(1, most + 1)) if n == 0 or needed(n) <= room), default=0)
    asked: list[int] = []
    assert _largest(lambda n: (asked.append(n), needed(n))[1], room, start) == expected
    assert len(set(asked)) == len(asked) <= 30


# --- The estimate ------------------------------------------------------------------------------------------


def test_an_estimate_is_the_plan_of_the_run() -> None:
    config = config_of(model={"dtype": "bfloat16"})
    found, plan = estimate(config, "x", simulated()), run_plan(config, model_config(config), simulated().device)
    assert (found.memory, found.peak, found.reserved) == (plan.parts, plan.total, plan.reserved)
    assert found.fits is found.largest_batch is found.advice is found.step is None
    # bfloat16 weights and, in float32 with a split master, two averages and the other half of the masters
    assert found.memory["weights"] + found.memory["optimizer"] == found.parameters * (2 + 2 + 4 + 4)
    assert found.snapshot == pytest.approx(found.parameters * 12, rel=0.05)  # its tensors are aligned


def test_the_width_of_generation_is_what_half_of_the_memory_holds() -> None:
    config = config_of(model={"dtype": "bfloat16"})
    shape, capacity = model_config(config), 1 << 20
    row = 2 * shape.num_hidden_layers * shape.num_key_value_heads * capacity * shape.head_dim * 2
    for rows in (512, 128, 32):
        assert width(shape, 512, capacity, bfloat16, 2 * rows * row + ROOM) == rows
    assert width(shape, 512, capacity, bfloat16, 8 * row + ROOM) == 8  # a few rows may take all
    assert width(shape, 512, capacity, bfloat16, row) == 0
    assert generation_width(config, shape, bfloat16, simulated()) is None
    assert generation_width(config, shape, bfloat16, simulated(80 << 30)) == 512


def test_of_adapters_a_save_holds_the_adapters_alone() -> None:
    whole = estimate(config_of(model={"config": None, "path": str(golden("qwen3-tied").folder)}), "x", simulated())
    config = config_of(model={"config": None, "path": str(golden("qwen3-tied").folder)}, lora={"r": 4})
    found = estimate(config, "x", simulated())
    assert found.memory["gradients"] < whole.memory["gradients"] / 3
    assert found.snapshot < whole.snapshot / 3
    assert found.memory["weights"] > whole.memory["weights"]


def test_the_command_says_what_fits(folder: Path) -> None:
    (folder / "c.yaml").write_text(json.dumps(raw_config()))
    code, out, told = printed("estimate", "c.yaml", "--gpu-memory", "0.7")
    assert code == 0, told
    for part in ("weights", "optimizer", "activations", "peak", "reserved", "host: a save", "fit: fits"):
        assert part in out
    assert "no such step was measured" in out
    assert not (folder / "run").exists(), "nothing is written"


def test_as_json_with_what_would_make_it_fit(folder: Path) -> None:
    (folder / "c.yaml").write_text(json.dumps(raw_config()))
    code, out, told = printed("estimate", "c.yaml", "train.batch_size=4096", "--gpu-memory", "0.7", "--json", "-")
    assert code == 0, told
    found = json.loads(out)
    assert found["total"] - found["room"] == DRIVER
    assert found["fits"] is False and 4 < found["largest_batch"] < 4096
    assert "the largest part is" in found["advice"]
    assert sum(found["memory"].values()) == found["peak"] <= found["reserved"]
    config, place = config_of(model={"dtype": "bfloat16"}), simulated(found["room"])
    most, shape = found["largest_batch"], model_config(config)
    fits, not_any_more = (run_plan(with_batch(config, rows), shape, place.device).reserved for rows in (most, most + 1))
    assert fits <= found["room"] < not_any_more


@pytest.mark.full
def test_advice_names_only_what_would_make_it_fit() -> None:
    """Where a batch has one row, or even one row does not fit, it is no advice to lower it."""
    longer = {**TINY, "max_position_embeddings": 4096}
    config = config_of(model={"config": longer, "dtype": "bfloat16"}, data={"seq_len": 4096})
    shape, device = model_config(config), simulated().device
    need = {size: run_plan(with_batch(config, *size), shape, device).reserved for size in ((1, 4096), (1, 16))}

    def advice_for(rows: int, room: int) -> str:
        changed = with_batch(config, rows)
        return advice(changed, shape, device, run_plan(changed, shape, device), room).partition(", or set")[0]

    assert advice_for(4, need[1, 4096]).endswith("lower train.batch_size, or lower data.seq_len")
    assert advice_for(1, need[1, 4096] - 1).endswith(": lower data.seq_len")
    assert advice_for(512, need[1, 16]).endswith(": lower train.batch_size and data.seq_len")
    assert advice_for(4, need[1, 16] // 2).endswith(": use a smaller model")


@pytest.mark.parametrize("rows, how", [(4, "none"), (1, "selective"), (1, "full")])
def test_a_run_without_memory_is_advised_what_it_has_left_to_lower(rows: int, how: str) -> None:
    config = config_of(train={"batch_size": rows, "activation_checkpointing": how})
    with pytest.raises(OutOfMemoryError) as caught, advised(config):
        raise OutOfMemoryError("none is left", next=OutOfMemoryError.ADVICE)
    assert "data.seq_len" in caught.value.next
    assert ("train.batch_size" in caught.value.next) is (rows > 1)
    assert ("activation_checkpointing" in caught.value.next) is (how != "full")


def test_no_batch_that_fits_is_said_so(folder: Path) -> None:
    (folder / "c.yaml").write_text(json.dumps(raw_config()))
    code, out, told = printed("estimate", "c.yaml", "train.batch_size=1", "--gpu-memory", "0.626")
    assert code == 0, told
    assert "even one row does not fit" in out and "batch_size" not in out.partition("to make it fit: ")[2]


@pytest.mark.full
def test_the_largest_batch_of_ranks_is_that_of_their_plans() -> None:
    """Two ranks stage what they exchange, and so each has room for fewer rows than a rank alone."""
    config, ranks = config_of(model={"dtype": "bfloat16"}, train={"accumulation_steps": 2}), PlannedRanks(2)
    shape, device = model_config(config), simulated().device

    def need(rows: int) -> int:
        return run_plan(with_batch(config, rows), shape, device, ranks=ranks).reserved

    room = need(8)
    alone, shared = (estimate(config, "x", simulated(room), nproc).largest_batch for nproc in (1, 2))
    assert alone is not None and shared is not None and 8 <= shared < alone
    assert need(shared) <= room < need(shared + 1)


def test_mistakes(folder: Path) -> None:
    (folder / "c.yaml").write_text(json.dumps(raw_config()))
    assert printed("estimate", "nowhere")[0] == 3
    assert printed("estimate", "c.yaml", "--gpu-memory", "0")[0] == 2
    code, _, told = printed("estimate", "c.yaml", "model.config=null", "model.path=org/name", "--gpu-memory", "1")
    assert code == 5 and "genesis pull org/name" in told


# --- Times --------------------------------------------------------------------------------------------------------


def test_a_time_is_that_of_the_same_run(folder: Path) -> None:
    config = config_of()
    run = folder / "run"
    run.mkdir()
    (run / "config.resolved.yaml").write_text(config.resolved_yaml())
    rows = [{"step": n, "perf/step_ms": ms} for n, ms in enumerate((30.0, 10.0, 20.0))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"step": 0}, *rows]))
    found = measured_step(config, model_config(config))
    assert found is not None and found.milliseconds == 20.0 and "median of 3 rows of the run in run" in found.source
    for other in (config_of(train={"batch_size": 8}), config_of(data={"seq_len": 32})):
        assert measured_step(other, model_config(other)) is None
    (run / "metrics.jsonl").write_text("no JSON\n")
    assert measured_step(config, model_config(config)) is None


def test_a_time_is_that_of_a_benchmark_of_the_same_step(folder: Path) -> None:
    results = folder / "genesis-bench"
    results.mkdir()
    row = {"side": "genesis", "size": "0.5B", "shape": "4 x 64", "step": 7e-3, "checkpointing": "none"}
    rows = [{**row, "side": "lean"}, {**row, "kind": "lora", "r": 8, "step": 5e-3}, row]
    report = {"device_name": "GPU X", "settings": {}, "tables": [{"name": "steps", "rows": rows}]}
    # `genesis bench-model` names the model and the checkpointing once for all rows.
    of_command = {"settings": {"model": "0.5B", "checkpointing": "full"}}
    of_command["tables"] = [{"name": "steps", "rows": [{"case": "4x64", "step": 9e-3}]}]  # type: ignore[assignment]
    (results / "2-other.json").write_text("[1]")
    (results / "1-steps.json").write_text(json.dumps(report))
    (results / "0-model.json").write_text(json.dumps(report | of_command))
    preset = {"model": {"config": None, "preset": "0.5B"}}

    def time_of(**changed: Any) -> float | None:
        config = config_of(**{**preset, **changed})
        found = measured_step(config, model_config(config))
        assert found is None or "GPU X" in found.source
        return None if found is None else found.milliseconds

    assert time_of() == 7.0
    assert time_of(train={"batch_size": 8}) is None
    assert time_of(train={"activation_checkpointing": "full"}) == 9.0
    assert time_of(optim={"name": "lion"}) is None
    assert time_of(model={"config": None, "preset": "1.5B"}) is None


# --- The CPU ----------------------------------------------------------------------------------------------------------


# Of a large vocabulary the losses of few rows are in chunks, and so rows are few.
@pytest.mark.full
@pytest.mark.parametrize(
    ("vocabulary", "settings"),
    [
        pytest.param(16384, {"train": {"batch_size": 15}}, marks=pytest.mark.full),
        (320, {"optim": {"name": "muon"}, "train": {"batch_size": 8, "accumulation_steps": 2}}),
    ],
)
def test_on_the_cpu_a_few_layers_and_rows_tell_what_all_take(vocabulary: int, settings: dict[str, Any]) -> None:
    """Against the whole step, counted in the same way; benchmarks/cpu_estimates.py compares with the process.

    Of one thread: of several it is chance which of their peaks meet.
    """
    model = {**TINY, "num_hidden_layers": 6, "vocab_size": vocabulary}
    given = {**settings, "model": {"config": model, "dtype": "float32"}}
    config = config_of(**given)
    shape = model_config(config)
    with cpu_threads(1):
        plan, whole = host_plan(config, shape), counted(config, shape, config.train.batch_size, count=1)
    assert whole["saved"] == plan.saved
    assert {key: plan.parts[key] for key in LASTING} == {key: whole[key] for key in LASTING}
    assert plan.total == pytest.approx(whole["start and steps"] + whole["others"], rel=0.1)


@pytest.mark.full
def test_of_several_threads_each_holds_its_share_and_its_gradients() -> None:
    """With twice the rows on two threads: the update is taken once, activations and gradients of shares twice."""
    model = {**TINY, "num_hidden_layers": 2}
    config = config_of(model={"config": model, "dtype": "float32"}, train={"batch_size": 4})
    shape = model_config(config)
    with cpu_threads(1):
        found = [counted(config, shape, 4, count) for count in (1, 2, 3)]
    one, two, three = (each["steps"] for each in found)
    assert two - one > found[0]["gradients"] + (one - sum(found[0][key] for key in LASTING)) / 2
    assert three - two == pytest.approx(two - one, rel=0.3)


def test_the_command_on_the_cpu(folder: Path) -> None:
    (folder / "c.yaml").write_text(json.dumps(raw_config()))
    code, out, told = printed("estimate", "c.yaml", "train.device=cpu")
    assert code == 0, told
    assert "device: the CPU" in out and "peak" in out and "fit:" not in out


@pytest.mark.full
def test_the_plan_of_a_gpu_on_a_machine_without_one(tmp_path: Path) -> None:
    """In a process of its own, because the interpreter of kernels in this one counts as a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    (tmp_path / "c.yaml").write_text(emit(raw_config(objective={"name": "simpo"})))
    words = [sys.executable, "-m", "genesis_cli", "estimate", "c.yaml", "--gpu-memory", "24", "--json", "-"]
    hidden = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, cwd=tmp_path, env=hidden, capture_output=True, text=True, check=True)
    memory = json.loads(done.stdout)["memory"]
    assert all(memory[name] > 0 for name in ("weights", "batch", "activations", "workspace"))
