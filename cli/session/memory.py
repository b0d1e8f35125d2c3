"""The memory of a run on a GPU, before any of it is taken: one line about it, or an error where it cannot fit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.errors import OutOfMemoryError
from genesis.train.config import Config
from genesis.train.objective import build_objective
from genesis.train.ranks import ALONE, Ranks
from genesis_cli.session.memory_plan import ONE_RANK, MemoryPlan, PlannedRanks, memory_plan
from genesis_cli.session.settings import usable_precision
from genesis_cli.session.trained_parameters import select_trained
from genesis_models.config import ModelConfig
from genesis_models.registry import parameter_count
from genesis_models.weights import check_fits

TOLERANCE = 0.03  # of a plan: a run that needs so much less than it may start
SAVING = ("none", "selective", "full")
SIZED = ("batch", "activations", "workspace")  # parts that grow with the tokens of a step
SHORTEST = 16  # tokens of a sequence that a run may be asked to have


@contextmanager
def advised(config: Config) -> Iterator[None]:
    """Names a run's own settings where what ran out of memory could not know them."""
    try:
        yield
    except OutOfMemoryError as error:
        if error.next == OutOfMemoryError.ADVICE:
            rows = "train.batch_size or " * (config.train.batch_size > 1)
            more = ", or set train.activation_checkpointing to full"
            error.next = f"lower {rows}data.seq_len{more * (config.train.activation_checkpointing != 'full')}"
        raise


def run_plan(config: Config, shape: ModelConfig, device: Device, **changed: Any) -> MemoryPlan:
    """The plan of a run's steps, with some settings of `memory_plan` changed."""
    settings: dict[str, Any] = {
        "batch": config.train.batch_size,
        "length": config.data.seq_len,
        "accumulation_steps": config.train.accumulation_steps,
        "activation_checkpointing": config.train.activation_checkpointing,
        "precision": usable_precision(config, shape, device)[0],
        "dtype": config.model.dtype,
        "optim": config.optim,
        "select": functools.partial(select_trained, config),
        "eval_batch": None if config.data.eval_fraction == 0 else config.eval_batch_size,
        "objective": build_objective(config),
    }
    return memory_plan(shape, device, **(settings | changed))


def planned_memory(config: Config, shape: ModelConfig, device: Device, ranks: Ranks = ALONE) -> str | None:
    """What a run on `device` will take, in a line; None on the CPU.

    Args:
        ranks: who shares the run; each has a device, and this is about one.

    Raises:
        OutOfMemoryError: the run cannot fit into what is free.
    """
    if device == CPU:
        check_fits(parameter_count(shape), config.model.dtype, device, where="model")
        return None
    planned = PlannedRanks(ranks.size, config.train.zero, ranks.group.is_in_stream_order)
    plan, (free, total) = run_plan(config, shape, device, ranks=planned), cuda.mem_get_info(device)
    room = free + cuda.memory_reserved(device) - cuda.memory_allocated(device)  # what the pool holds is free, too
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in plan.parts.items() if name != "batch")
    if plan.total * (1 - TOLERANCE) > room:
        raise OutOfMemoryError(
            f"a step of this run needs {_gib(plan.total)} GiB on {device}, of whose {_gib(total)} GiB {_gib(room)} are"
            f" free: {parts}",
            where=f"train.batch_size {config.train.batch_size}, data.seq_len {config.data.seq_len}",
            next=advice(config, shape, device, plan, room, planned),
        )
    return f"memory: {_gib(plan.total)} of {_gib(total)} GiB: {parts}; {_gib(plan.reserved)} reserved"


def advice(
    config: Config,
    shape: ModelConfig,
    device: Device,
    plan: MemoryPlan,
    room: int,
    ranks: PlannedRanks = ONE_RANK,
) -> str:
    """What the largest part is and what lowers it, as far as the run would fit then: of batch and length those that
    suffice, and the least checkpointing.
    """
    name = max(plan.parts, key=plan.parts.__getitem__)
    found = [f"the largest part is {name}: {_remedies(config, shape, device, name, room, ranks)}"]
    if name in ("gradients", "optimizer") and config.model.path is not None and config.lora is None:
        found.append("train adapters (lora: {}), which need little of both")
    for how in SAVING[SAVING.index(config.train.activation_checkpointing) + 1 :]:
        less = run_plan(config, shape, device, activation_checkpointing=how, ranks=ranks).total
        if less <= room:
            found.append(f"set train.activation_checkpointing to {how}, which needs {_gib(less)} GiB")
            break
    return ", or ".join(found)


def _remedies(config: Config, shape: ModelConfig, device: Device, name: str, room: int, ranks: PlannedRanks) -> str:
    optim, found = config.optim, list[str]()
    if name in SIZED:

        def fits(rows: int, length: int) -> bool:
            return run_plan(with_batch(config, rows, length), shape, device, ranks=ranks).reserved <= room

        rows, length = config.train.batch_size, config.data.seq_len
        shorter = min(length, SHORTEST)
        if rows > 1 and fits(1, length):
            found.append("lower train.batch_size")
        if length > shorter and fits(rows, shorter):
            found.append("lower data.seq_len")
        if not found and rows > 1 and fits(1, shorter):
            found.append("lower train.batch_size and data.seq_len")
    if name == "gradients" and config.model.dtype == "bfloat16" and optim.grad_dtype != "bfloat16":
        found.append("set optim.grad_dtype to bfloat16")
    if name == "optimizer" and optim.state_dtype != "bfloat16":
        found.append("set optim.state_dtype to bfloat16")
    if name == "optimizer" and config.model.dtype == "bfloat16" and optim.low_precision != "stochastic":
        found.append("set optim.low_precision to stochastic")
    return ", or ".join(found or ["take a smaller model"])


def with_batch(config: Config, rows: int, length: int | None = None) -> Config:
    """`config` with another train.batch_size, and another data.seq_len where one is given."""
    train = config.train.model_copy(update={"batch_size": rows})
    data = config.data.model_copy(update={"seq_len": length or config.data.seq_len})
    return config.model_copy(update={"train": train, "data": data})


def _gib(size: int) -> str:
    """In GiB: one digit behind the point, two significant ones below."""
    return f"{size / 2**30:.1f}" if size >= 2**30 else f"{size / 2**30:.2g}"
