"""Steps measured: for each batch and length a row with the times of a step and of its phases, its memory, its rates.

A step is that of `genesis train`, made from the same parts: `take_step` on the CPU, `DeviceSteps` on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.errors import DistributedError, GenesisError, InterruptedRun, OutOfMemoryError
from genesis.measure.limits import Limits, wait_for
from genesis.measure.timing import Plan, Timing, measure, of_wall
from genesis.profile.call_memory import peak_bytes
from genesis.profile.schema import Failure, Time
from genesis.train.config import OptimConfig
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.session.bench.breakdown import breakdown_of
from genesis_cli.session.bench.cases import step_flops
from genesis_cli.session.bench.phases import host_phases, marking_phases
from genesis_cli.session.bench.schema import Memory, Phases, Row, Scaling
from genesis_cli.session.bench.steps import LR, MAX_NORM, OPTIMIZER, UNTIL_CAPTURED, GraphSteps, new_state
from genesis_cli.session.dry_run import memory_plan
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.engine.device_rows import release
from genesis_models.registry import build

FAST = Plan(precision=0.05, seconds=1.0, warm_up=0.2, most_calls=1)


@dataclass(frozen=True)
class Settings:
    """How steps are taken, and measured.

    Attributes:
        dtype: of weights and activations.
        checkpointing: of activations: none, selective or full.
        plan: how hard to try, for each case.
    """

    dtype: str
    checkpointing: str = "none"
    plan: Plan = field(default_factory=lambda: Plan(seconds=10.0, warm_up=0.5, most_calls=1))


def bench_model(
    config: ModelConfig,
    cases: Iterable[tuple[int, int]],
    limits: Limits,
    settings: Settings,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Row | Failure]:
    """A row for each (batch, length), in order. A case that fails gives a `Failure`, and the others are measured.

    The row of the most tokens has the times of ops, too.

    Args:
        tell: called with what is measured next.
    """
    cases = list(cases)
    largest = max(cases, key=lambda case: (case[0] * case[1], case[1]), default=None)
    model = build(config, seed=0, device=str(limits.device), dtype=settings.dtype)
    model.activation_checkpointing = settings.checkpointing
    model.train()
    for i, (batch, length) in enumerate(cases, 1):
        tell(f"{i} of {len(cases)}: {batch}x{length}")
        found: Row | Failure
        try:
            found = measured_row(model, batch, length, limits, settings, (batch, length) == largest)
        except (InterruptedRun, DistributedError):  # of the job, not of the case
            raise
        except (GenesisError, MemoryError) as error:
            found = failure_of("step", f"{batch}x{length}", error)
        forget(model, limits.device)  # not while the error is there, whose frames hold the case's memory
        yield found


def failure_of(name: str, label: str, error: GenesisError | MemoryError) -> Failure:
    """What becomes of a case that failed.

    Args:
        name, label: of what was measured, and of the case.
    """
    known = error if isinstance(error, GenesisError) else OutOfMemoryError(f"the host has no memory: {error}")
    return Failure(name=name, label=label, error=known.what, exit_code=known.exit_code)


def forget(model: CausalLM, device: Device) -> None:
    """Give back what a case took, the weights aside."""
    for parameter in model.parameters():
        parameter.grad = None
    release(model)
    gc.collect()
    if device != CPU:
        cuda.empty_cache(device)


def measured_row(
    model: CausalLM, batch: int, length: int, limits: Limits, settings: Settings, by_op: bool = False
) -> Row:
    """Take steps of one size, with an optimizer of their own.

    Args:
        by_op: measure the times of ops, too.
    """
    config, device, notes = model.config, limits.device, list[str]()
    state = new_state(model, batch, length)
    if device == CPU:
        phases = host_phases(state, settings.plan)
        step, is_captured, memory = phases.step, False, host_memory(state)
    else:
        captured, phases, peak, is_captured = _captured(state, device, settings.plan, notes)
        step = Time.of(captured)
        plan = memory_plan(
            config,
            device,
            batch=batch,
            length=length,
            activation_checkpointing=settings.checkpointing,
            dtype=settings.dtype,
            optim=OptimConfig(name=OPTIMIZER, lr=LR),
        )
        memory = Memory(**lasting(state), peak=peak, planned=plan.parts)
    flops, peak_rate = step_flops(config, batch, length), limits.flops_per_second
    return Row(
        batch=batch,
        length=length,
        step=step,
        is_captured=is_captured,
        phases=phases,
        tokens_per_second=batch * length / step.seconds,
        flops=flops,
        flops_per_second=flops / step.seconds,
        mfu=None if peak_rate is None else flops / step.seconds / peak_rate,
        memory=memory,
        breakdown=breakdown_of(state, limits, notes) if by_op else None,
        notes=notes,
    )


# --- Times ------------------------------------------------------------------------------------------------------------


def _captured(state: TrainState, device: Device, plan: Plan, notes: list[str]) -> tuple[Timing, Phases, int, bool]:
    """Time of a step as CUDA graph, its phases, the most memory allocated, and whether it is a graph indeed."""
    gc.collect()
    cuda.empty_cache(device)
    cuda.reset_peak_memory_stats(device)
    take = GraphSteps(state, device, notes)
    with marking_phases(state, device) as phases:
        for _ in range(UNTIL_CAPTURED):
            take()
        peak = cuda.max_memory_allocated(device)
        found, parts = measure(of_wall(take, wait_for(device)), plan), phases(take, plan)
    take.finish()
    return found, parts, peak, not notes


# --- Memory -----------------------------------------------------------------------------------------------------------


def lasting(state: TrainState) -> dict[str, int]:
    """Bytes of what is there from step to step."""
    return {name: sum(array.nbytes for array in arrays) for name, arrays in state.persistent().items()}


def host_memory(state: TrainState) -> Memory:
    """What lasts, and the most that one more step takes beyond it."""
    batches, kept = [state.loader.batch(0, 0)] * state.ranks.size, lasting(state)
    beyond = peak_bytes(lambda: take_step(state, batches, LR, MAX_NORM, CPU), CPU)
    return Memory(**kept, peak=sum(kept.values()) + beyond, planned=None)


# --- What follows -----------------------------------------------------------------------------------------------------


def scaling_of(rows: Iterable[Row]) -> list[Scaling]:
    """The ratios of neighbours: batches at each length, and lengths at each batch."""
    times = {(row.batch, row.length): row.step.seconds / (row.batch * row.length) for row in rows}
    found = []
    for (batch, length), seconds in sorted(times.items()):
        longer = min((t for b, t in times if b == batch and t > length), default=None)
        larger = min((b for b, t in times if t == length and b > batch), default=None)
        if larger is not None:
            ratio = times[larger, length] / seconds
            found.append(Scaling(axis="batch", fixed=length, start=batch, end=larger, ratio=ratio))
        if longer is not None:
            ratio = times[batch, longer] / seconds
            found.append(Scaling(axis="length", fixed=batch, start=length, end=longer, ratio=ratio))
    return sorted(found, key=lambda s: (s.axis, s.fixed, s.start))
