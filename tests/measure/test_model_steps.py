"""What `genesis bench-model` measures: the formula, steps and their parts, memory, growth, and torch."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest

from genesis.backend import CPU, Device
from genesis.dtypes import float32
from genesis.errors import DeviceError, OutOfMemoryError
from genesis.measure.limits import Limits
from genesis.measure.peer import PeerError
from genesis.measure.record import Failure
from genesis.measure.timing import Plan, summarize
from genesis_cli.session import bench_model as model
from genesis_cli.session.bench_model import Case, Memory, Request, each_case, lean_config, step_flops, step_tables
from genesis_models.config import ModelConfig

RAW = {
    "model_type": "qwen2", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
CONFIG = ModelConfig.from_dict(RAW)
ONCE = Plan(seconds=0.0, warm_up=0.0, most_calls=1)
GPU = Device("cuda", 0)
pytestmark = pytest.mark.xdist_group("model steps")  # one set of measured cases


def limits(device: Device = CPU) -> Limits:
    """A machine that multiplies at 1 GFLOP/s."""
    return Limits(device, float32, 1e9, 1e9, 1e-6, None)


def asked(cases: Any, plan: Plan = ONCE, **more: Any) -> Request:
    return Request(CONFIG, list(cases), CPU, "float32", plan=plan, **more)


def made_case(batch: int, length: int, seconds: float) -> Case:
    """A case whose step takes so long, a quarter of it each in forward and the optimizer."""
    phases = {"forward": seconds / 4, "backward": seconds / 2, "optimizer": seconds / 4}
    ops = [{"name": "matmul", "calls": 2, "seconds": seconds / 2, "share": 0.5, "above": seconds / 4}]
    memory, flops = Memory(1 << 20, 1 << 20, 2 << 20, 7 << 20), step_flops(CONFIG, batch, length)
    return Case(batch, length, summarize([seconds] * 10), memory, flops, limits(), 1, phases, ops)


# --- Shapes -----------------------------------------------------------------------------------------------------------


def test_flops_by_hand() -> None:
    # Embedding; per layer q, k, v with biases, o, three matrices of the MLP and two norms; the last norm.
    layer = (16 * 16 + 16) + 2 * (16 * 8 + 8) + 16 * 16 + 3 * 16 * 24 + 2 * 16
    parameters = 32 * 16 + 2 * layer + 16
    assert step_flops(CONFIG, 3, 10) == 30 * (6 * parameters + 6 * 2 * 16 * 10)
    wide = ModelConfig.from_dict(RAW | {"model_type": "qwen3", "head_dim": 64})
    assert step_flops(wide, 1, 20) / 20 - step_flops(wide, 1, 10) / 10 == 6 * 2 * (2 * 64) * 10


# --- Steps ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    plan = Plan(seconds=0.1, warm_up=0.05, most_calls=1)
    told: list[str] = []
    with mock.patch.object(model, "show_progress", told.append):
        found = list(each_case(asked(product((1, 2), (8,)), plan), limits()))
    assert told == ["1 of 2: 1x8", "2 of 2: 2x8"]
    made = [case for case in found if isinstance(case, Case)]
    assert [case.label for case in made] == ["1x8", "2x8"]
    return made


def test_rates_follow_from_the_step(cases: list[Case]) -> None:
    rows = step_tables(cases)[0].rows
    for case, row in zip(cases, rows, strict=True):
        assert row["tokens_per_second"] == case.batch * case.length / case.step.seconds
        assert row["mfu"] == pytest.approx(step_flops(CONFIG, case.batch, case.length) / case.step.seconds / 1e9)
        assert case.notes == []


def test_phases_and_ops_add_up_to_the_step(cases: list[Case]) -> None:
    for case in cases:
        assert set(case.phases) >= {"forward", "backward", "optimizer"}
        assert sum(case.phases.values()) == pytest.approx(case.step.seconds)
        assert sum(op["share"] for op in case.ops) == pytest.approx(1)
        calls = {op["name"]: op["calls"] for op in case.ops}
        assert calls["embedding"] == calls["linear_cross_entropy"] == calls["total_norm"] == 1
        assert all(op["bandwidth"] > 0 for op in case.ops if op["name"] in ("linear_cross_entropy", "adamw_step"))


def test_memory_is_counted(cases: list[Case]) -> None:
    # Four bytes of each parameter, once as weight, once as gradient, twice as running average.
    parameters = 32 * 16 + 2 * (272 + 272 + 256 + 1152 + 32) + 16
    for case in cases:
        memory = case.memory
        assert (memory.weights, memory.gradients, memory.optimizer) == tuple(4 * parameters * k for k in (1, 1, 2))
        # At the least, SwiGLU's two inputs of all layers are kept for backward.
        assert memory.rest > case.batch * case.length * 2 * 2 * 24 * 4


def test_a_failing_case_leaves_the_others_and_no_memory() -> None:
    held: list[weakref.ref[np.ndarray[Any, Any]]] = []
    plain = model.measured_case

    def case(built: Any, batch: int, *rest: Any) -> Case:
        room = np.zeros(1000)
        assert all(ref() is None for ref in held), "memory of a failed case is still there"
        held.append(weakref.ref(room))
        if batch == 2:
            return plain(built, batch, *rest)
        raise DeviceError("a kernel failed") if batch == 1 else MemoryError("4 TiB")

    with mock.patch.object(model, "measured_case", case):
        found = list(each_case(asked([(1, 8), (3, 8), (2, 4)]), limits()))
    assert [type(each) for each in found] == [Failure, Failure, Case]
    failures = [each for each in found if isinstance(each, Failure)]
    assert [(f.name, f.label, f.exit_code) for f in failures] == [("step", "1x8", 6), ("step", "3x8", 7)]
    assert failures[0].error == "a kernel failed" and "4 TiB" in failures[1].error


@pytest.mark.full
def test_steps_on_cuda_are_captured() -> None:
    tiny = ModelConfig.from_dict(RAW | {"num_hidden_layers": 1, "num_attention_heads": 1})
    (case,) = each_case(Request(tiny, [(1, 8)], GPU, "float32", plan=ONCE), limits(GPU))
    assert isinstance(case, Case), case
    assert case.notes == [] and case.memory.rest > 0
    calls = {op["name"]: op["calls"] for op in case.ops}
    assert calls["linear_cross_entropy"] == calls["attention_packed"] == calls["clip_factor"] == 1
    assert sum(op["share"] for op in case.ops) == pytest.approx(1)
    assert all(op["above"] >= 0 for op in case.ops if op["name"] in ("linear_cross_entropy", "adamw_step"))
    assert all(case.phases[name] > 0 for name in model.PHASES)


def test_parts_that_cannot_be_recorded_are_a_note() -> None:
    with mock.patch.object(model, "recorded_steps", side_effect=OutOfMemoryError("no room for events")):
        (case,) = each_case(asked([(1, 8)]), limits())
    assert isinstance(case, Case)
    assert (case.ops, case.notes) == ([], ["no phases and ops: no room for events"])
    noisy = replace(made_case(2, 8, 1.0), step=summarize([1.0, 2.0, 3.0]))
    shown = step_tables([case, noisy, made_case(1, 8, 1.0)])[0]
    assert shown.rows[0]["forward"] is None and shown.notes == case.notes
    assert [row["is_noisy"] for row in shown.rows][1:] == ["noisy", ""]


def test_the_time_of_a_token_is_compared_with_the_first_case() -> None:
    rows = step_tables([made_case(1, 8, 1.0), made_case(2, 8, 1.0), made_case(1, 16, 3.0)])[0].rows
    assert [row["token_ratio"] for row in rows] == [None, 0.5, 1.5]


# --- Compared with torch ----------------------------------------------------------------------------------------------


class FakeChild:
    """Answers as torch's process does; it cannot take batches of 2."""

    version = "9.9"

    def __init__(self) -> None:
        self.asked = list[tuple[str, Any]]()

    def ask(self, what: str, /, **request: Any) -> dict[str, Any]:
        self.asked.append((what, request))
        if what == "open" and request["batch"] == 2:
            raise PeerError("no room")
        return {"samples": [0.25] * request["count"], "peak": 1 << 20} if what == "measure" else {}


def test_steps_are_compared_with_torch_or_a_note_says_why_not() -> None:
    child: Any = FakeChild()
    plan = Plan(seconds=0.01, warm_up=0.0, most_calls=1)
    found = list(each_case(asked([(1, 8), (2, 8)], plan=plan), limits(), child))
    first, second = (case for case in found if isinstance(case, Case))
    rows = step_tables([first, second])[0].rows
    assert (rows[0]["peer_step"], rows[0]["peer_memory"], rows[1]["ratio"]) == (0.25, 1 << 20, None)
    assert first.peer is not None and first.peer.ratio == pytest.approx(0.25 / first.peer.seconds, rel=0.9)
    assert (first.notes, second.notes) == ([], ["2x8 is not compared with torch: no room"])
    config = lean_config(CONFIG, 8)
    sizes = {"batch": 1, "length": 8, "dtype": "float32"}
    assert child.asked[0] == ("open", {"config": config, "ranks": None, **sizes})
    assert (config["hidden_size"], config["qkv_bias"], config["head_norms"]) == (RAW["hidden_size"], True, False)


@pytest.mark.parametrize(
    ("changed", "lacks"),
    [
        ({"model_type": "llama", "mlp_bias": True}, "layers have no"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "layers differ from those of smollm3"),
        ({"model_type": "mistral", "sliding_window": 8}, "no sliding window, and one of 8 is shorter than 9 tokens"),
        ({"model_type": "mistral", "sliding_window": 9}, ""),
        ({"model_type": "qwen3", "head_dim": 64}, ""),
    ],
)
def test_torch_s_model_refuses_layers_that_it_does_not_compute(changed: dict[str, Any], lacks: str) -> None:
    config = ModelConfig.from_dict({key: value for key, value in RAW.items() if "window" not in key} | changed)
    if not lacks:
        found = lean_config(config, 9)
        assert (found["qkv_bias"], found["head_norms"]) == (False, changed["model_type"] == "qwen3")
        return
    with pytest.raises(PeerError, match=lacks):
        lean_config(config, 9)
