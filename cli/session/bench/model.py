"""`genesis bench-model`: for each batch and length a step's time, phases, memory and rates, and what growing costs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.errors import DeviceError, DistributedError, GenesisError, InterruptedRun, OutOfMemoryError
from genesis.measure.limits import Limits, wait_for
from genesis.measure.record import Column, Failure, Table, table
from genesis.measure.timing import Timing, measure, of_wall
from genesis.train.config import OptimConfig
from genesis.train.state import TrainState
from genesis_cli.session.bench.steps import (
    FORMULA,
    LR,
    OPTIMIZER,
    UNTIL_CAPTURED,
    GraphSteps,
    Memory,
    OpShare,
    Parts,
    Settings,
    failure_of,
    forget,
    host_memory,
    lasting,
    new_state,
    recorded_parts,
    step_flops,
    taking,
)
from genesis_cli.session.dry_run import memory_plan
from genesis_cli.session.profiling import subject_of
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.registry import build

LISTED = 12  # ops of a step; the others are added up
PHASES = ("forward", "backward", "optimizer")


@dataclass
class Case:
    """Steps on batches of one size, measured.

    Attributes:
        step: wall time of a step as `genesis train` takes it: on a GPU a captured one.
        parts: of recorded steps; None where they could not be recorded.
        rate: FLOPs a second of a large matmul, measured.
        notes: what was not as usual.
    """

    batch: int
    length: int
    step: Timing
    memory: Memory
    parts: Parts | None
    flops: int
    rate: float | None
    notes: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Batch and length for people."""
        return f"{self.batch}x{self.length}"

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.length / self.step.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilization: the rate as a share of a large matmul's."""
        return None if self.rate is None else self.flops / self.step.seconds / self.rate

    def phase(self, name: str) -> float | None:
        """Seconds of a phase: its share of recorded steps times the step's."""
        if self.parts is None:
            return None
        return self.parts.phases.get(name, 0.0) / self.parts.seconds * self.step.seconds


def bench_model(
    config: ModelConfig,
    cases: Iterable[tuple[int, int]],
    limits: Limits,
    settings: Settings,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Case | Failure]:
    """Measure each (batch, length) of a model with random weights; a case that fails gives a `Failure`.

    Args:
        tell: called with what is measured next.
    """
    cases = list(cases)
    model = trained_model(config, limits.device, settings)
    for i, (batch, length) in enumerate(cases, 1):
        tell(f"{i} of {len(cases)}: {batch}x{length}")
        found: Case | Failure
        try:
            found = measured_case(model, batch, length, limits, settings)
        except (InterruptedRun, DistributedError):  # of the job, not of the case
            raise
        except (GenesisError, MemoryError) as error:
            found = failure_of("step", f"{batch}x{length}", error)
        forget(model, limits.device)  # not while the error is there, whose frames hold the case's memory
        yield found


def trained_model(config: ModelConfig, device: Device, settings: Settings) -> CausalLM:
    """A model with random weights, ready to be trained as the settings say."""
    model = build(config, seed=0, device=str(device), dtype=settings.dtype)
    model.activation_checkpointing = settings.checkpointing
    model.train()
    return model


def measured_case(model: CausalLM, batch: int, length: int, limits: Limits, settings: Settings) -> Case:
    """Take steps of one size, with an optimizer of their own: first unwatched, then recorded."""
    device, notes = limits.device, list[str]()
    state = new_state(model, batch, length)
    if device != CPU:
        gc.collect()
        cuda.empty_cache(device)
        cuda.reset_peak_memory_stats(device)
    take = taking(state, device, notes)
    peak = None if device == CPU else cuda.max_memory_allocated(device)
    step = measure(of_wall(take, wait_for(device)), settings.plan)
    if isinstance(take, GraphSteps):
        take.finish()
    del take
    if peak is None:
        memory = host_memory(state)
    else:
        planned = _planned(model.config, device, batch, length, settings)
        memory = Memory(**lasting(state), peak=peak, planned=planned)
    parts = _parts(state, limits, notes)
    return Case(
        batch, length, step, memory, parts, step_flops(model.config, batch, length), limits.flops_per_second, notes
    )


def _planned(config: ModelConfig, device: Device, batch: int, length: int, settings: Settings) -> int:
    optim, how = OptimConfig(name=OPTIMIZER, lr=LR), settings.checkpointing
    return memory_plan(
        config, device, batch=batch, length=length, activation_checkpointing=how, dtype=settings.dtype, optim=optim
    ).total


def _parts(state: TrainState, limits: Limits, notes: list[str]) -> Parts | None:
    """Recorded steps, divided; None with a note where that fails."""
    device, failed = limits.device, list[str]()
    gc.collect()  # the graphs of steps before refer to themselves
    if device != CPU:
        cuda.empty_cache(device)
    take = taking(state, CPU, []) if device == CPU else GraphSteps(state, device, failed)
    on_device = take.steps if isinstance(take, GraphSteps) else None
    subject = subject_of(state, device, on_device, tuple, lambda batches: take())
    try:
        found = recorded_parts(subject, limits, 0 if device == CPU else UNTIL_CAPTURED)
    except (DeviceError, OutOfMemoryError) as error:
        notes.append(f"no phases and ops: {error.what}")
        return None
    if found is None or failed:
        notes.append("no phases and ops: a step cannot be captured")
        return None
    return found


# --- Growth -----------------------------------------------------------------------------------------------------------


class Growth(NamedTuple):
    """What a larger batch or length costs: measured beside the smaller case, or predicted for twice the largest.

    Attributes:
        ratio: time of a token over that of the smaller case; below 1 where larger is more efficient.
        seconds: of the step; predicted on the line through the two largest steps along the axis, over their FLOPs.
        memory, room: predicted bytes at the peak, and bytes that a run may take here; None where measured.
    """

    axis: str
    before: str
    batch: int
    length: int
    ratio: float
    seconds: float
    memory: int | None = None
    room: int | None = None


def growths(config: ModelConfig, cases: Sequence[Case], settings: Settings, device: Device) -> list[Growth]:
    """The measured steps from case to case, then twice the batch and twice the length of the largest."""
    found = []
    for small in cases:
        for axis, fixed in (("batch", "length"), ("length", "batch")):
            along = [c for c in cases if getattr(c, fixed) == getattr(small, fixed)]
            larger = [c for c in along if getattr(c, axis) > getattr(small, axis)]
            if larger:
                next_ = min(larger, key=lambda c: getattr(c, axis))
                ratio = small.tokens_per_second / next_.tokens_per_second
                found.append(Growth(axis, small.label, next_.batch, next_.length, ratio, next_.step.seconds))
    if cases:
        largest = max(cases, key=lambda c: (c.batch * c.length, c.length))
        for axis, batch, length in (("batch", 2, 1), ("length", 1, 2)):
            if largest.length * length <= config.packed_length:
                found.append(_doubled(config, cases, largest, axis, batch, length, settings, device))
    return found


def _doubled(
    config: ModelConfig, cases: Sequence[Case], largest: Case, axis: str, rows: int, longer: int, settings: Settings,
    device: Device,
) -> Growth:  # fmt: skip
    batch, length = rows * largest.batch, longer * largest.length
    fixed = "length" if axis == "batch" else "batch"
    along = [c for c in cases if getattr(c, fixed) == getattr(largest, fixed) and c.flops < largest.flops]
    per_flop = largest.step.seconds / largest.flops
    if along:
        before = max(along, key=lambda c: c.flops)
        growth = (largest.step.seconds - before.step.seconds) / (largest.flops - before.flops)
        per_flop = growth if growth > 0 else per_flop  # else noise hides what growth costs
    seconds = largest.step.seconds + per_flop * (step_flops(config, batch, length) - largest.flops)
    memory = largest.memory
    if memory.planned is None:  # activations grow with the tokens
        peak = memory.peak + memory.rest
    else:
        peak = memory.peak + _planned(config, device, batch, length, settings) - memory.planned
    ratio = seconds * largest.tokens_per_second / (batch * length)
    return Growth(axis, largest.label, batch, length, ratio, seconds, peak, room_of(device))


def room_of(device: Device) -> int:
    """Bytes that a run may take: on a GPU what is free and what is held already, on the CPU all memory."""
    if device == CPU:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return cuda.mem_get_info(device)[0] + cuda.memory_reserved(device)


# --- Tables -----------------------------------------------------------------------------------------------------------

CASE = Column("case", "case", "text", "Rows x tokens of a batch.", lambda c: c.label)
STEP = Column("step", "step", "s", "Median wall time of a step, as `genesis train` takes it.", lambda c: c.step.seconds)
SURE = Column("half_width", "±", "share", "Half of the median's 95 % confidence interval.", lambda c: c.step.half_width)
NOISY = Column(
    "is_noisy", "note", "text", "Whether the machine was not quiet.", lambda c: "noisy" if c.step.is_noisy else ""
)
TOKENS = Column("tokens_per_second", "tokens/s", "token/s", "Trained tokens a second.", lambda c: c.tokens_per_second)
STEPS = [
    CASE,
    STEP,
    SURE,
    *(
        Column(name, name, "s", f"Time of {name}: its share of recorded steps.", lambda c, name=name: c.phase(name))  # type: ignore[misc]
        for name in PHASES
    ),
    TOKENS,
    Column("flops_per_second", "FLOP/s", "FLOP/s", f"By {FORMULA}.", lambda c: c.flops / c.step.seconds),
    Column("mfu", "MFU", "share", "FLOP/s as a share of the measured matmul's.", lambda c: c.mfu),
    Column("peak", "memory", "bytes", "The most at one time.", lambda c: c.memory.peak),
    NOISY,
]
MEMORY = [
    CASE,
    *(
        Column(name, name, "bytes", f"Bytes of {name}.", lambda c, name=name: getattr(c.memory, name))  # type: ignore[misc]
        for name in ("weights", "gradients", "optimizer")
    ),
    Column("rest", "activations, workspace", "bytes", "At the peak.", lambda c: c.memory.rest),
    Column("peak", "peak", "bytes", "The most at one time.", lambda c: c.memory.peak),
    Column("planned", "planned", "bytes", "Planned peak, from steps on a fake GPU.", lambda c: c.memory.planned),
]
OPS = [
    Column("op", "op", "text", "Name in the registry.", lambda op: op.op),
    Column("calls", "calls", "count", "In one step.", lambda op: op.calls),
    Column("seconds", "time", "s", "All its calls together.", lambda op: op.seconds),
    Column("share", "share", "share", "Of the step.", lambda op: op.share),
    Column("bandwidth", "of a copy", "share", "Of the rate of a copy.", lambda op: op.moved / op.seconds or None),
    Column("compute", "of a matmul", "share", "Of the rate of a matmul.", lambda op: op.computed / op.seconds or None),
    Column("above", "above", "s", "Time beyond what its bytes or FLOPs need at the limits.", lambda op: op.above),
]
GROWTH = [
    Column("axis", "grows", "text", "What grows.", lambda g: g.axis),
    Column("before", "from", "text", "The smaller case.", lambda g: g.before),
    Column("case", "to", "text", "The larger case.", lambda g: f"{g.batch}x{g.length}"),
    Column("ratio", "time of a token", "ratio", "Over that of the smaller case.", lambda g: g.ratio),
    Column("seconds", "step", "s", "Of the larger case.", lambda g: g.seconds),
    Column("memory", "memory", "bytes", "Predicted peak.", lambda g: g.memory),
    Column("room", "room", "bytes", "That a run may take here.", lambda g: g.room),
    Column(
        "verdict", "", "text", "Whether a predicted step fits.",
        lambda g: "" if g.room is None else "predicted: fits" if g.memory <= g.room else "predicted: does not fit",
    ),
]  # fmt: skip


def model_tables(config: ModelConfig, cases: Sequence[Case], settings: Settings, device: Device) -> list[Table]:
    """The tables of a report about training steps."""
    if not cases:
        return []
    largest = max(cases, key=lambda c: (c.batch * c.length, c.length))
    found = [
        table("steps", "", STEPS, cases),
        table("memory", "memory", MEMORY, cases),
        table("growth", "growth", GROWTH, growths(config, cases, settings, device)),
    ]
    found[0].notes += dict.fromkeys(note for case in cases for note in case.notes)
    if largest.parts is not None:
        found.append(ops_table(largest.parts, f"ops of a step, {largest.label}"))
    return found


def ops_table(parts: Parts, title: str) -> Table:
    """The longest ops of a step; the others, and the time in no op, as one row each."""
    shown, others = parts.ops[:LISTED], parts.ops[LISTED:]
    rest = [
        OpShare(f"other ops ({len(others)})", sum(op.calls for op in others), sum(op.seconds for op in others)),
        OpShare("between ops", 0, parts.rest),
    ]
    for row in rest:
        row.share, row.moved = row.seconds / parts.seconds, row.seconds
    rows = [*shown, *(row for row in rest if row.seconds)]
    made = table("ops", title, OPS, rows)
    for cells in made.rows[len(shown) :]:
        cells["bandwidth"] = cells["above"] = None
    first = max(parts.ops, key=lambda op: op.above, default=None)
    if first is not None:
        made.notes.append(
            f"{first.op} has the most room: it takes {first.above / parts.seconds:.0%} of the step more than its limit"
        )
    return made
