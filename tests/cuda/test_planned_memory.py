"""A run on a GPU says what memory it will take, and one that cannot fit is refused before it takes any."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.backend.cuda.driver import Properties
from genesis.errors import OutOfMemoryError
from genesis.train.config import Config
from genesis.train.output import Output
from genesis_cli import session
from genesis_cli.session import training
from genesis_cli.session.dry_run import planned_memory, run_plan
from genesis_cli.session.model import model_config
from tests.kernels.test_gemm_warp_specialized import H200
from tests.train.runs import load, make, make_lora

CUDA = Device("cuda", 0)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    settings = "train.device=cuda", "model.dtype=float32", "train.batch_size=512", "data.seq_len=32"
    return load(make(tmp_path), str(tmp_path / "run"), *settings)


def leave(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    """Let a device of 8 GiB have so much free memory."""
    unused = cuda.memory_reserved(CUDA) - cuda.memory_allocated(CUDA)
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (int(free) - unused, 1 << 33))


def test_a_line_says_what_a_run_takes(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = model_config(config)
    plan = run_plan(config, shape, CUDA)
    leave(monkeypatch, 6 << 30)
    line = planned_memory(config, shape, CUDA)
    assert line is not None
    matched = re.fullmatch(r"memory: (\S+) of 8\.0 GiB: (.*)", line)
    assert matched is not None
    assert float(matched[1]) == pytest.approx(plan.total / 2**30, rel=0.05)
    assert [part.split()[0] for part in matched[2].split(", ")] == [n for n in plan.parts if n != "batch"]
    assert planned_memory(config, shape, CPU) is None
    leave(monkeypatch, plan.total * 0.98)  # the plan may be wrong by so much
    assert planned_memory(config, shape, CUDA) == line


@pytest.mark.parametrize("properties", [cuda.get_device_properties, lambda device: H200], ids=["this device", "H200"])
def test_a_run_that_cannot_fit_is_refused_with_what_lowers_its_memory(
    properties: Callable[[Device], Properties], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "get_device_properties", properties)
    shape = model_config(config)
    plan = run_plan(config, shape, CUDA)
    assert max(plan.parts, key=plan.parts.__getitem__) == "activations"
    leave(monkeypatch, plan.total * 0.95)
    with pytest.raises(
        OutOfMemoryError, match=r"needs .* GiB on cuda:0, but only .* of 8\.0 GiB are free: weights"
    ) as caught:
        planned_memory(config, shape, CUDA)
    assert "train.batch_size 512" in caught.value.where
    assert "activations: lower train.batch_size" in caught.value.next
    assert "set train.activation_checkpointing to selective, which needs" in caught.value.next
    full = run_plan(config, shape, CUDA, activation_checkpointing="full").total
    leave(monkeypatch, full)
    with pytest.raises(OutOfMemoryError, match="activation_checkpointing to full, which needs"):
        planned_memory(config, shape, CUDA)
    leave(monkeypatch, full - 1)
    with pytest.raises(OutOfMemoryError) as caught:
        planned_memory(config, shape, CUDA)
    assert "checkpointing" not in caught.value.next


def test_the_command_refuses_it_before_it_reads_data_or_makes_a_model(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 1 << 10)
    for name in ("prepare_data", "make_model"):
        monkeypatch.setattr(training, name, lambda *args: pytest.fail("it went on"))
    with pytest.raises(OutOfMemoryError) as caught:
        session.train(config, resume=False, console=Output(io.StringIO()))
    assert caught.value.exit_code == 7


def test_the_command_prints_the_line(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Exception):
        pass

    def stop(*args: object) -> None:
        raise Stop

    monkeypatch.setattr(training, "assemble", stop)
    leave(monkeypatch, 6 << 30)
    text = io.StringIO()
    with pytest.raises(Stop):
        session.train(config, resume=False, console=Output(text))
    assert re.search(r"^memory: \S+ of 8\.0 GiB: weights ", text.getvalue(), re.M)


def test_validate_prints_it_and_refuses_what_cannot_fit(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 6 << 30)
    text = io.StringIO()
    session.validate(config, console=Output(text))
    assert re.search(r"^memory: \S+ of 8\.0 GiB: weights ", text.getvalue(), re.M)
    leave(monkeypatch, 1 << 10)
    with pytest.raises(OutOfMemoryError, match="a step of this run needs"):
        session.validate(config, console=Output(io.StringIO()))


def test_frozen_parameters_are_planned_without_gradients_and_state(config: Config) -> None:
    frozen = config.model_copy(update={"train": config.train.model_copy(update={"freeze": ["*embed_tokens*"]})})
    shape = model_config(config)
    whole, less = run_plan(config, shape, CUDA), run_plan(frozen, shape, CUDA)
    embedding = shape.vocab_size * shape.hidden_size * 4
    assert whole.weights == less.weights
    assert (whole.gradients - less.gradients, whole.optimizer - less.optimizer) == (embedding, 2 * embedding)


def test_adapters_are_planned_beside_weights_without_gradients_and_state(tmp_path: Path) -> None:
    settings = "train.device=cuda", "model.dtype=float32", "train.batch_size=8", "data.seq_len=32"
    config = load(make_lora(tmp_path), str(tmp_path / "run"), *settings)
    shape = model_config(config)
    plan, whole = run_plan(config, shape, CUDA), run_plan(config.model_copy(update={"lora": None}), shape, CUDA)
    trained = plan.weights - whole.weights
    assert trained == 4 * (2 * 4 * (32 + 32) + 2 * 4 * (32 + 16) + 3 * 4 * (32 + 32))  # q and o, k and v, the MLP's
    assert (plan.gradients, plan.optimizer) == (trained, 2 * trained)
    assert plan.total < whole.total
