"""Peaks of the memory of training steps, and the plans of them: run as a program, with cases as JSON on stdin.

The steps are those of `genesis train`, of models in full size, on a device that runs nothing and has no memory. It is a
process of its own because kernels are not interpreted in it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import numpy as np

from genesis import cuda
from genesis.backend import Device
from genesis.backend.cuda.simulated import EmptyDriver
from genesis.data.loader import Batch
from genesis.train.config import OptimConfig
from genesis.train.device_steps import DeviceSteps
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis_models.config import ModelConfig
from genesis_models.memory import memory_plan
from genesis_models.registry import build, preset
from tests.kernels.collecting import collecting

__all__ = ["peak"]


def peak(case: dict[str, Any]) -> dict[str, int]:
    """The peak of a case's steps as the pool counts it, and the plan's total and parts."""
    raw = preset(case["size"]) | case.get("changed", {})
    b, t, micro, how = case["batch"], case["length"], case.get("micro", 1), case.get("how", "none")
    dtype, optim = case.get("dtype", "bfloat16"), OptimConfig(**case.get("optim", {}))
    model = build(raw, device="cuda", dtype=dtype)
    model.activation_checkpointing, model.precision = how, case.get("precision")
    model.train()
    loader: Any = SimpleNamespace(batch_size=b, seq_len=t)
    state = TrainState(model, build_optimizer(optim, model.named_parameters(), 0, micro), loader)
    steps = DeviceSteps(state, Device("cuda", 0), 1.0, 8)
    cuda.reset_peak_memory_stats()
    ids = np.zeros((b, t), np.int64)
    batch = Batch(0, 0, ids, ids, ids + np.arange(t), b * (t - 1), b * t, np.zeros((0, 4), np.int64))
    for _ in range(2):
        steps.take([batch] * micro, 1e-5)
    plan = memory_plan(
        ModelConfig.from_dict(raw), batch=b, length=t, accumulation_steps=micro, activation_checkpointing=how,
        dtype=dtype, optim=optim,
    )  # fmt: skip
    return {"peak": cuda.max_memory_allocated(), "total": plan.total} | asdict(plan)


if __name__ == "__main__":
    with collecting(EmptyDriver):
        for given in json.load(sys.stdin):
            print(json.dumps(peak(given)), flush=True)
            gc.collect()
