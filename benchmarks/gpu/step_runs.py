"""The Genesis side of training_step.py: steps as `genesis train` makes them, on random tokens."""

from __future__ import annotations

import gc
import itertools
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
from genesis.backend.cuda import backend_of, native
from genesis.data.loader import Batch
from genesis.op import observe
from genesis.train.config import OptimConfig
from genesis.train.device_steps import DeviceSteps
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis_models.presets import preset

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
    cuda.reset_peak_memory_stats()  # of making weights; a replay takes no memory, so this is never done again
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
    """Microseconds of each kernel in a captured step without update, by op, kernel and shapes, longest first.

    An event behind every launch costs about a microsecond and keeps kernels from overlapping.
    """
    backend = backend_of(DEVICE)
    driver = backend.driver
    marks = Marks(backend)
    placed = steps._feed.put(batches[0], batches[0].num_targets, steps.state.optimizer.step_numbers())
    model, optimizer = steps.state.model, steps.state.optimizer

    def once() -> None:
        optimizer.zero_grad()
        marks.phase = "forward"
        loss = model.loss(
            placed.input_ids, placed.labels, position_ids=placed.position_ids, num_targets=placed.num_targets
        )
        marks.phase = "backward"
        loss.backward()
        marks.phase = "norm"
        optimizer.grad_norm()

    backend._calls.clear()  # recorded launches hold the driver's own method
    backend._plans.clear()
    plain = driver.launch
    driver.launch = lambda handle, *args: (plain(handle, *args), marks.launched(handle))
    try:
        once()
        graph = cuda.Graph()
        with observe(marks.seen):
            graph.capture(once)
    finally:
        del driver.launch
        backend._calls.clear()
        backend._plans.clear()
    runs = []
    for _ in range(4):
        graph.replay()
        cuda.synchronize()
        runs.append([driver.elapsed(a, b) for a, b in itertools.pairwise(marks.events)])
    found: dict[str, list[float]] = defaultdict(list)
    for name, seconds in zip(marks.names[1:], zip(*runs[1:], strict=True), strict=True):
        found[name].append(statistics.median(seconds) * 1e6)
    rows = [{"op": k, "calls": len(v), "us": sum(v), "each": statistics.median(v)} for k, v in found.items()]
    return sorted(rows, key=lambda r: -float(str(r["us"])))


class Marks:
    """Events in a graph that is being captured, one behind every launch, and what was launched before each."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.phase = backend, ""
        self.events: list[int] = []
        self.names: list[str] = []
        self.unnamed = 0  # launches of the op that is running, whose name follows

    def launched(self, handle: int) -> None:
        """Put an event behind a launch."""
        from cuda.bindings import driver as cu

        if not self.backend.pool.capturing:
            return
        driver = self.backend.driver
        self.events.append(driver.create_event(True))
        driver._call(
            cu.cuEventRecordWithFlags,
            self.events[-1],
            self.backend.stream,
            cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL,
        )
        kernels = {loaded.function.handle: key[1].__name__ for key, loaded in native._loaded.items()}
        self.names.append(kernels.get(handle, "?"))
        self.unnamed += 1

    def seen(self, op: Any, inputs: Any, outputs: Any, attrs: Any, seconds: float) -> None:
        """Name the launches of an op that has run."""
        if self.unnamed:
            shapes = ",".join(str(x.shape).replace(" ", "") for x in (*inputs, *outputs)[:4] if hasattr(x, "shape"))
            for i in range(len(self.names) - self.unnamed, len(self.names)):
                self.names[i] = f"{self.phase} {op.name}/{self.names[i]} {shapes}"
        self.unnamed = 0
