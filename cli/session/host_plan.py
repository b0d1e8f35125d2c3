"""The memory of a training step on the CPU: steps of a few layers and rows are taken and counted, and more follow.

What a step takes is nearly in proportion to layers, to rows and to both together. Four small steps therefore tell what
a whole one takes: Python's own count of allocations, which numpy's are part of, and no model of them. Threads share the
rows of a batch: one is counted, and all are taken to be at their peaks at the same time, which they may be.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from genesis.backend import CPU
from genesis.backend.cpu import pool, threads
from genesis.train.config import Config
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.session.memory_plan import saved_bytes, zeros
from genesis_cli.session.settings import usable_precision
from genesis_cli.session.trained_parameters import select_trained
from genesis_cli.session.training import cpu_threads
from genesis_models.config import ModelConfig
from genesis_models.registry import build

__all__ = ["HostPlan", "host_plan"]

LAYERS, ROWS = (2, 4), (2, 4)
STEPS = 2  # the second one has what the first made once


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Bytes of a step on the CPU, by what they are for.

    Attributes:
        saved: what a checkpoint holds of weights and optimizer.
    """

    parts: Mapping[str, int]
    saved: int

    @property
    def total(self) -> int:
        """The peak."""
        return sum(self.parts.values())

    reserved = total


def host_plan(config: Config, shape: ModelConfig) -> HostPlan:
    """The plan of a step of `config` with the threads of this process."""
    count = min(threads(), config.train.batch_size)
    share = -(-config.train.batch_size // count)
    few_rows = ROWS if share > ROWS[-1] else (share,)
    # Names of layers that are not there would be an error.
    few_layers = LAYERS if shape.num_hidden_layers > LAYERS[-1] and not config.train.freeze else ()
    layers = few_layers or (shape.num_hidden_layers,)
    with cpu_threads(1):
        counted = {(n, b): _counted(config, _with_layers(shape, n), b) for n in layers for b in few_rows}

    def at(key: str, n: int) -> float:
        """The value with `n` layers and all rows of a thread."""
        return _on_line(few_rows, [counted[n, b][key] for b in few_rows], share)

    names = next(iter(counted.values()))
    found = {key: round(_on_line(layers, [at(key, n) for n in layers], shape.num_hidden_layers)) for key in names}
    saved = found.pop("saved")
    found["activations"] *= count
    return HostPlan(found, saved)


def _on_line(at: tuple[int, ...], values: list[float], where: int) -> float:
    """The value at `where` of the line through one or two points."""
    if len(at) == 1:
        return values[0]
    return values[0] + (values[1] - values[0]) * (where - at[0]) / (at[1] - at[0])


def _with_layers(shape: ModelConfig, count: int) -> ModelConfig:
    if count == shape.num_hidden_layers:
        return shape
    raw = {**shape.raw, "num_hidden_layers": count}
    if isinstance(raw.get("layer_types"), list):
        raw["layer_types"] = raw["layer_types"][:count]
    return ModelConfig.from_dict(raw)


def _counted(config: Config, shape: ModelConfig, rows: int) -> dict[str, int]:
    """Takes steps, and counts."""
    gc.collect()
    pool.trim()  # only fresh memory is seen
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        model = build(shape, config.train.seed, dtype=config.model.dtype)
        select_trained(config, model)
        model.activation_checkpointing = config.train.activation_checkpointing
        model.precision = usable_precision(config, shape, CPU)[0]
        model.train()
        micro = config.train.accumulation_steps
        optimizer = build_optimizer(config.optim, model.named_parameters(), 0, micro)
        loader: Any = SimpleNamespace(batch_size=rows, seq_len=config.data.seq_len)
        state = TrainState(model, optimizer, loader)
        for _ in range(STEPS):
            # Sums over micro-steps need no more after the second one.
            take_step(state, [zeros(rows, config.data.seq_len)] * min(micro, 2), 1e-5, 1.0, CPU)
        peak = tracemalloc.get_traced_memory()[1] - before
        lasting = {name: sum(array.nbytes for array in arrays) for name, arrays in state.persistent().items()}
        saved = saved_bytes(state)
    finally:
        if not was_tracing:
            tracemalloc.stop()
    return {**lasting, "activations": peak - sum(lasting.values()), "saved": saved}
