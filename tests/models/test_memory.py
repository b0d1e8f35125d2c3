"""Plans of memory against what the pool counts while real steps of models in full size are launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from genesis.train.config import OptimConfig
from genesis_models.config import ModelConfig
from genesis_models.memory import memory_plan
from genesis_models.presets import preset

TOLERANCE = 0.03
SHAPES = [(1, 128), (4, 512), (8, 1024), (4, 4096), (16, 2048)]
HOWS = ("none", "selective", "full")
TWO = {"num_hidden_layers": 2}
CASES: list[dict[str, Any]] = [
    *({"size": "0.5B", "batch": b, "length": t, "how": how} for b, t in SHAPES for how in HOWS),
    *({"size": size, "batch": 8, "length": 1024, "how": how} for size in ("1.5B", "qwen3-0.6B") for how in HOWS),
    *({"size": "qwen3-0.6B", "changed": TWO, "batch": 2, "length": n} for n in (8192, 16384)),  # gradients of scores
    *({"size": "0.5B", "batch": 8, "length": 1024, "how": how, "precision": "fp8"} for how in HOWS),
    *({"size": "0.5B", "batch": b, "length": 512, "micro": 2} for b in (1, 8)),
    {"size": "0.5B", "batch": 1, "length": 512, "micro": 2, "optim": {"grad_dtype": "bfloat16"}},
    *({"size": "7B", "changed": TWO, "batch": 2, "length": 256, "micro": n} for n in (1, 2)),  # its head is not tied
    *({"size": "0.5B", "changed": TWO, "batch": 1, "length": 128, "optim": {"name": n}} for n in ("sgd", "lion")),
    *({"size": "0.5B", "changed": TWO, "batch": 1, "length": 128, "optim": {"name": n}} for n in ("muon", "adafactor")),
    {"size": "0.5B", "changed": TWO, "batch": 4, "length": 512, "optim": {"state_dtype": "bfloat16"}},
    {"size": "0.5B", "changed": TWO, "batch": 4, "length": 512, "optim": {"low_precision": "stochastic"}},
    {"size": "0.5B", "changed": TWO, "batch": 4, "length": 512, "dtype": "float32"},
]


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(v) for v in case.values()).translate(str.maketrans("", "", "{}': "))


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.models.peaks"]
    done = subprocess.run(
        command, env=environment, input=json.dumps(CASES), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {name_of(case): line for case, line in zip(CASES, lines, strict=True)}


def is_right(total: int, peak: int) -> bool:
    return abs(total - peak) <= TOLERANCE * peak


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_peak_is_the_plans(case: dict[str, Any], found: dict[str, dict[str, int]]) -> None:
    line = found[name_of(case)]
    assert is_right(line["total"], line["peak"]), (line["total"] / line["peak"], line)


def test_a_plan_that_leaves_something_out_is_not_right(found: dict[str, dict[str, int]]) -> None:
    line = found[name_of({"size": "0.5B", "batch": 8, "length": 1024, "how": "none"})]
    several = found[name_of({"size": "0.5B", "batch": 8, "length": 512, "micro": 2})]
    for part in ("weights", "gradients", "masters", "moments", "activations", "head"):
        line = several if part == "head" else line  # a single batch finds room where gradients will come
        assert not is_right(line["total"] - line[part], line["peak"]), part
        assert not is_right(line["total"] + line[part], line["peak"]), part
    last = found[name_of({"size": "1.5B", "batch": 8, "length": 1024, "how": "full"})]
    assert last["layer"] > last["head"] and not is_right(last["total"] - last["layer"] + last["head"], last["peak"])


def test_parts_add_up_and_follow_the_settings() -> None:
    shape = ModelConfig.from_dict(preset("0.5B"))
    plan = memory_plan(shape, batch=8, length=1024)
    assert sum(plan.parts.values()) == plan.total
    assert plan.weights == plan.gradients == plan.masters == plan.moments // 4 == 494_032_768 * 2
    twice = memory_plan(shape, batch=16, length=1024)
    assert twice.activations == 2 * plan.activations
    selective = memory_plan(shape, batch=8, length=1024, activation_checkpointing="selective")
    assert plan.activations - selective.activations == 24 * 8192 * 2 * (2 * 896 + 4864)
    small = memory_plan(shape, batch=8, length=1024, optim=OptimConfig(state_dtype="bfloat16"))
    assert small.moments == plan.moments // 2
