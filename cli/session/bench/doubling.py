"""What a step on twice the rows or twice the tokens would take: time from how it grew so far, memory from the plan."""

from __future__ import annotations

import os
from collections.abc import Sequence

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.train.config import OptimConfig
from genesis_cli.session.bench.cases import step_flops
from genesis_cli.session.bench.schema import Doubling, Memory, Row
from genesis_cli.session.bench.steps import OPTIMIZER
from genesis_cli.session.dry_run import memory_plan
from genesis_models.config import ModelConfig


def room_of(device: Device) -> int:
    """Bytes that a run may take: on a GPU what is free and what is held already, on the CPU all memory."""
    if device == CPU:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return cuda.mem_get_info(device)[0] + cuda.memory_reserved(device)


def doublings(
    config: ModelConfig, rows: Sequence[Row], checkpointing: str, dtype: str, device: Device, room: int
) -> list[Doubling]:
    """Twice the batch and twice the length of the largest row, as far as the model's positions go.

    Args:
        room: bytes that a run may take.
    """
    if not rows:
        return []
    largest = max(rows, key=lambda row: (row.batch * row.length, row.length))
    found = []
    for axis, batch, length in (
        ("batch", 2 * largest.batch, largest.length),
        ("length", largest.batch, 2 * largest.length),
    ):
        if length > config.packed_length:
            continue
        seconds = _seconds(config, rows, largest, axis, batch, length)
        memory = _memory(config, largest, batch, length, checkpointing, dtype, device)
        found.append(
            Doubling(
                axis="batch" if axis == "batch" else "length",
                batch=batch,
                length=length,
                seconds=seconds,
                tokens_per_second=batch * length / seconds,
                memory=memory,
                room=room,
                fits=memory <= room,
            )
        )
    return found


def _seconds(config: ModelConfig, rows: Sequence[Row], largest: Row, axis: str, batch: int, length: int) -> float:
    """The line through the two largest steps along the axis, over FLOPs; through 0 where there is one alone."""
    fixed = "length" if axis == "batch" else "batch"
    along = [r for r in rows if getattr(r, fixed) == getattr(largest, fixed) and r.flops < largest.flops]
    more = step_flops(config, batch, length) - largest.flops
    per_flop = largest.step.seconds / largest.flops
    if along:
        before = max(along, key=lambda row: row.flops)
        growth = (largest.step.seconds - before.step.seconds) / (largest.flops - before.flops)
        if growth > 0:  # else noise hides what growth costs
            per_flop = growth
    return largest.step.seconds + per_flop * more


def _memory(
    config: ModelConfig, largest: Row, batch: int, length: int, checkpointing: str, dtype: str, device: Device
) -> int:
    """What was measured and the plan's growth; on the CPU, which has no plan, activations grow with the tokens."""
    memory: Memory = largest.memory
    if memory.planned is None:
        return memory.peak + memory.rest * (batch * length - largest.batch * largest.length) // (
            largest.batch * largest.length
        )
    plan = memory_plan(
        config,
        device,
        batch=batch,
        length=length,
        activation_checkpointing=checkpointing,
        dtype=dtype,
        optim=OptimConfig(name=OPTIMIZER),
    )
    return memory.peak + plan.total - sum(memory.planned.values())
