"""The Genesis side of training_step.py: steps as `genesis train` makes them, on random tokens."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np

import genesis_models
from benchmarks.gpu.timing import environment
from genesis import cuda
from genesis.backend import Device
from genesis.data.loader import Batch
from genesis.measure.run import recorded_steps
from genesis.train.config import OptimConfig
from genesis.train.device_steps import DeviceSteps
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis_cli.session.profiling import subject_of
from genesis_models.registry import preset

__all__ = ["measured"]

DEVICE = Device("cuda", 0)
WARM_UP = 6


def sizes(shape: str) -> tuple[int, int, int]:
    """Batch, length and micro-steps of `8x1024` or `32x1024x8`."""
    b, t, *more = (int(x) for x in shape.split("x"))
    return b, t, more[0] if more else 1


def measured(job: dict[str, Any], shape: str, started: float) -> dict[str, Any]:
    """One shape's row."""
    b, t, micro = sizes(shape)
    gc.collect()
    cuda.empty_cache()
    model, steps = prepared(job, b, t, micro)
    cuda.empty_cache()  # of making weights
    cuda.reset_peak_memory_stats()  # a replay takes no memory, so this is never done again
    n = sum(p.numel() for p in model.parameters())
    config = model.config
    rng = np.random.default_rng(0)

    def batches() -> list[Batch]:
        return [batch(rng, b, t, config.vocab_size) for _ in range(micro)]

    begun = time.perf_counter()
    for _ in range(WARM_UP):
        steps.take(batches(), 1e-5)
    losses = [r.loss_sum / r.targets for r in steps.reading().results()]
    warm = time.perf_counter() - begun
    first_fast = time.perf_counter() - started
    made = [batches() for _ in range(job["steps"])]
    times = []
    for each in made:
        begun = time.perf_counter()
        steps.take(each, 1e-5)
        cuda.synchronize()
        times.append(time.perf_counter() - begun)
    results = steps.reading().results()
    losses += [r.loss_sum / r.targets for r in results]
    seconds = statistics.median(times) / micro
    flops = b * t * (6 * n + 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * t)
    row = {
        "side": "genesis", "size": job["size"], "shape": shape, "ms": seconds * 1e3, "min_ms": min(times) / micro * 1e3,
        "gpu_ms": statistics.median([r.seconds for r in results[1:] if r.seconds]) / micro * 1e3,
        "tokens_per_second": b * t / seconds, "model_tflops": flops / seconds / 1e12,
        "peak_gib": cuda.max_memory_allocated() / 2**30, "reserved_gib": cuda.max_memory_reserved() / 2**30,
        "checkpointing": job["checkpointing"] or "none", "warm_s": warm, "since_start_s": first_fast,
        "loss": losses[0], "last_loss": losses[-1], "parameters": n, **environment(),
    }  # fmt: skip
    if job["profile"]:
        row["profile"] = profile(steps, batches())
    return row


def prepared(job: dict[str, Any], b: int, t: int, micro: int) -> tuple[Any, DeviceSteps]:
    """The model and what makes its steps."""
    model = genesis_models.build(preset(job["size"]), seed=0, device="cuda", dtype="bfloat16")
    if job["checkpointing"]:
        model.activation_checkpointing = job["checkpointing"]
    model.precision = job.get("precision")
    model.train()
    optimizer = build_optimizer(OptimConfig(name="adamw", lr=1e-5), model.named_parameters(), 0)
    loader: Any = SimpleNamespace(batch_size=b, seq_len=t)
    state = TrainState(model, optimizer, loader)
    return model, DeviceSteps(state, DEVICE, 1.0, 1000, note=lambda line: print(line, file=sys.stderr))


def batch(rng: np.random.Generator, b: int, t: int, vocabulary: int) -> Batch:
    """Random tokens, one document a row."""
    ids = rng.integers(0, vocabulary, (b, t))
    positions = np.broadcast_to(np.arange(t), (b, t))
    samples = np.zeros((0, 4), np.int64)
    return Batch(0, 0, ids, ids, positions, b * (t - 1), b * t, samples)


# --- The time of each kernel ------------------------------------------------------------------------------------------


def profile(steps: DeviceSteps, batches: list[Batch]) -> list[dict[str, Any]]:
    """Microseconds of each kernel in a captured step, by phase, op, kernel and shapes, longest first.

    An event after every launch costs about a microsecond and keeps kernels from overlapping.
    """
    again = DeviceSteps(steps.state, DEVICE, 1.0, 4, note=lambda line: print(line, file=sys.stderr))
    subject = subject_of(steps.state, DEVICE, again, lambda: batches, lambda given: again.take(given, 1e-5))
    found: dict[str, list[float]] = defaultdict(list)
    for step in recorded_steps(subject, count=3, warm_up=3):
        for kernel in step.kernels:
            shapes = ",".join(str(shape).replace(" ", "") for shape in kernel.shapes[:4])
            found[f"{kernel.phase} {kernel.op}/{kernel.name} {shapes}"].append((kernel.end - kernel.start) * 1e6)
    rows = [{"op": k, "calls": len(v) / 3, "us": sum(v) / 3, "each": statistics.median(v)} for k, v in found.items()]
    return sorted(rows, key=lambda r: -float(str(r["us"])))
