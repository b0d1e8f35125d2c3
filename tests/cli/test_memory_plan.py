"""Plans of memory against what was counted by hand for models in full size, and against steps that do allocate it."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from genesis import cuda
from genesis.backend import Device
from genesis.data.loader import Batch
from genesis.distributed.nccl import MAPPED_STAGING
from genesis.errors import ConfigError
from genesis.optim.shared import BUCKET
from genesis.train.config import OptimConfig
from genesis.train.device_steps import DeviceSteps
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis_cli.session.dry_run import MemoryPlan, PlannedRanks, memory_plan
from genesis_models.config import ModelConfig
from genesis_models.registry import build, parameter_count, preset

GPU = Device("cuda", 0)
TOLERANCE = 0.05  # of the sums below, which leave out parts of split products, sums over rows and Muon's products
TWO = {"num_hidden_layers": 2}
# Bytes by the shapes of what ops keep and need, added up by hand in formulas before plans were counted (0.1.0).
CASES: list[tuple[int, dict[str, Any]]] = [
    (7_044_985_088, {"size": "0.5B", "batch": 1, "length": 128}),
    (15_811_006_720, {"size": "0.5B", "batch": 8, "length": 1024}),
    (13_193_761_024, {"size": "0.5B", "batch": 8, "length": 1024, "how": "selective"}),
    (8_198_344_960, {"size": "0.5B", "batch": 8, "length": 1024, "how": "full"}),
    (38_889_780_224, {"size": "1.5B", "batch": 8, "length": 1024}),
    (20_125_976_576, {"size": "qwen3-0.6B", "batch": 8, "length": 1024}),
    (5_164_776_448, {"size": "qwen3-0.6B", "changed": TWO, "batch": 2, "length": 8192}),  # spilled dS
    (8_838_109_184, {"size": "0.5B", "batch": 1, "length": 512, "micro": 2}),
    (7_850_043_648, {"size": "0.5B", "batch": 1, "length": 512, "micro": 2, "optim": {"grad_dtype": "bfloat16"}}),
    (22_010_547_200, {"size": "7B", "changed": TWO, "batch": 2, "length": 256}),  # its head is not tied
    (1_674_047_744, {"size": "0.5B", "changed": TWO, "batch": 1, "length": 128, "optim": {"name": "lion"}}),
    (2_550_534_144, {"size": "0.5B", "changed": TWO, "batch": 1, "length": 128, "optim": {"name": "muon"}}),
    (2_479_163_648, {"size": "0.5B", "changed": TWO, "batch": 4, "length": 512, "optim": {"state_dtype": "bfloat16"}}),
    (3_632_162_816, {"size": "0.5B", "changed": TWO, "batch": 4, "length": 512, "dtype": "float32"}),
]


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(v) for v in case.values()).translate(str.maketrans("", "", "{}': "))


def plan_of(case: dict[str, Any]) -> MemoryPlan:
    return memory_plan(
        ModelConfig.from_dict(preset(case["size"]) | case.get("changed", {})),
        GPU,
        batch=case["batch"],
        length=case["length"],
        accumulation_steps=case.get("micro", 1),
        activation_checkpointing=case.get("how", "none"),
        precision=case.get("precision"),
        dtype=case.get("dtype", "bfloat16"),
        optim=OptimConfig(**case.get("optim", {})),
    )


@pytest.mark.sample(cases=5)
@pytest.mark.parametrize(("expected", "case"), CASES, ids=[name_of(case) for _, case in CASES])
def test_plans_are_the_sums_of_what_ops_keep(expected: int, case: dict[str, Any]) -> None:
    plan = plan_of(case)
    assert plan.total == pytest.approx(expected, rel=TOLERANCE), plan
    assert sum(plan.parts.values()) == plan.total
    assert min(plan.parts.values()) > 0


def test_parts_follow_the_settings() -> None:
    case = {"size": "0.5B", "batch": 8, "length": 1024}
    plan = plan_of(case)
    assert plan.weights == plan.gradients == plan.optimizer // 5 == 494_032_768 * 2
    twice, selective = plan_of(case | {"batch": 16}), plan_of(case | {"how": "selective"})
    assert twice.activations == pytest.approx(2 * plan.activations, rel=1e-3)
    assert plan.activations - selective.activations == pytest.approx(24 * 8192 * 2 * (2 * 896 + 4864), rel=1e-3)
    small = plan_of(case | {"optim": {"state_dtype": "bfloat16"}})
    assert plan.optimizer - small.optimizer == 494_032_768 * 4
    assert plan_of(case) == plan


# --- Against steps ----------------------------------------------------------------------------------------------------

TINY = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def peak_of(raw: dict[str, Any], batch: int, length: int, dtype: str) -> int:
    """Bytes that steps on the device allocate at the most."""
    gc.collect()
    cuda.empty_cache(GPU)
    before = cuda.memory_allocated(GPU)
    model = build(raw, device="cuda", dtype=dtype)
    model.train()
    loader: Any = SimpleNamespace(batch_size=batch, seq_len=length)
    steps = DeviceSteps(
        TrainState(model, build_optimizer(OptimConfig(), model.named_parameters(), 0), loader), GPU, 1.0, 2
    )
    cuda.reset_peak_memory_stats(GPU)
    ids = np.arange(batch * length).reshape(batch, length) % raw["vocab_size"]
    positions = np.broadcast_to(np.arange(length), (batch, length))
    given = Batch(0, 0, ids, ids, positions, batch * (length - 1), batch * length, np.zeros((0, 4), np.int64))
    for _ in range(2):
        steps.take([given], 1e-5)
    return cuda.max_memory_allocated(GPU) - before


@pytest.mark.full
def test_steps_take_what_is_planned() -> None:
    plan = memory_plan(ModelConfig.from_dict(TINY), GPU, batch=2, length=16, dtype="float32")
    assert peak_of(TINY, 2, 16, "float32") == plan.total


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "length"), [(1, 128), (8, 1024)])
def test_steps_on_a_gpu_take_what_is_planned(batch: int, length: int) -> None:
    raw = preset("0.5B")
    plan = memory_plan(ModelConfig.from_dict(raw), GPU, batch=batch, length=length)
    assert plan.total == pytest.approx(peak_of(raw, batch, length, "bfloat16"), rel=0.01)


def test_ranks_keep_parts() -> None:
    """ZeRO-1: a rank has all weights and gradients of a micro-batch, and its part of sums and states."""
    config = ModelConfig.from_dict(preset("0.5B") | TWO)
    size = parameter_count(config)

    def plan(count: int, zero: int = 1, is_in_stream_order: bool = True) -> MemoryPlan:
        ranks = PlannedRanks(count, zero, is_in_stream_order)
        return memory_plan(config, GPU, batch=1, length=128, accumulation_steps=4, ranks=ranks)

    for count in (2, 4):
        found = plan(count)
        assert found.weights == 2 * size
        assert found.gradients == pytest.approx(2 * size + 4 * size / count, rel=2e-3)
        assert found.optimizer == pytest.approx(10 * size / count, rel=2e-3)
        assert 2 * BUCKET <= found.parts["staging"] <= 2 * 2 * BUCKET + MAPPED_STAGING  # a bucket, in bfloat16
        assert sum(found.parts.values()) == found.total <= found.reserved
    whole, staged = plan(2, zero=0), plan(2, is_in_stream_order=False)
    assert (whole.gradients, whole.optimizer) == pytest.approx((6 * size, 10 * size), rel=2e-3)
    assert (staged.gradients, staged.optimizer) == pytest.approx((6 * size, 5 * size), rel=2e-3)
    assert "staging" not in plan(1).parts
    with pytest.raises(ConfigError, match="4 batches, which 3 ranks"):
        plan(3)
