"""The profile of a training run as data: what `report.json` holds. Times are seconds of one step, shares are of 1.

`Report.model_json_schema()` gives its JSON schema. `schema_version` grows when a field goes or changes its meaning; new
fields leave it as it is.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from genesis.profile.generation import GenerationRow
from genesis.profile.schema import Measured, StrictModel


class TimeRow(StrictModel):
    """An op, a module or a phase; means of the profiled steps."""

    name: str
    """The layer index in a module's name is a star; what is in brackets is no op or no module."""
    calls: float
    """Of an op; 0 for what is none."""
    cpu_seconds: float
    """Host time, of all threads together."""
    gpu_seconds: float | None
    """Time on the GPU; null on the CPU."""
    seconds: float
    """What adds up to the step: time on the GPU, or on the CPU wall time, which threads that work at once share."""
    share: float
    """Of the step."""


class KernelRow(StrictModel):
    """A kernel as an op launches it."""

    op: str
    kernel: str
    calls: float
    seconds: float
    share: float


class Sync(StrictModel):
    """A line that makes the host wait for the GPU, or that reads values."""

    what: str
    line: str
    """File and line of the innermost caller outside of the framework's inner parts."""
    count: float
    """In a step."""
    seconds: float
    """Host time in a step."""


class ModeRow(StrictModel):
    """Steps of one kind."""

    mode: Literal["eager", "captured"]
    """Launched one by one, or replayed as a CUDA graph."""
    steps: int
    """That were profiled, and as many that were not."""
    plain_seconds: float
    """Median wall time of a step that nobody watches."""
    profiled_seconds: float
    """The same under watch."""
    overhead: float
    """The second over the first, less 1."""
    measure: Literal["gpu", "wall"]
    """What `Row.seconds` are."""
    seconds: float
    """What the rows add up to: wall time of a profiled step, or its time on the GPU from the first kernel's start to
    the last one's end."""
    attributed: float
    """The part of it that has an op, or a module or a phase around Python."""
    idle: float
    """The rest."""
    launched: float
    """When the host had launched everything, from the beginning of a profiled step."""
    launches: float
    """Kernels, copies and fills of a step; 0 on the CPU."""
    phases: list[TimeRow]
    modules: list[TimeRow]
    ops: list[TimeRow]
    kernels: list[KernelRow]
    """Empty on the CPU."""
    syncs: list[Sync]
    notes: list[str]
    """What was not as usual."""


class Held(StrictModel):
    """Who holds memory at the peak."""

    category: str
    module: str
    """Empty for what was there before the step."""
    op: str
    bytes: int
    blocks: int


class Memory(StrictModel):
    """A step's memory at its peak."""

    peak: int
    """Bytes."""
    pool_peak: int
    """The same by the pool's own count."""
    peak_phase: str
    peak_seconds: float
    """When, from the beginning of the step."""
    categories: dict[str, int]
    """Bytes at the peak; they add up to it."""
    lasting: dict[str, int]
    """Bytes before the step."""
    held: list[Held]
    """The most first."""


class CollectiveRow(StrictModel):
    """The calls of one collective in a step: each time is the median over steps, and of these the mean over ranks."""

    name: str
    """What is called, and for what."""
    calls: int
    nbytes: int
    """Of the whole buffers: what a reduce-scatter reads, an all-gather writes, an all-reduce reads."""
    seconds: float
    """From when a rank could begin until it was done, with the wait for ranks that come later."""
    hidden: float
    """Of these, seconds behind the step's own work."""
    exposed: float
    """Of these, seconds in which the step waited."""
    bus_rate: float
    """Bytes a second that links need, as nccl-tests define it: `nbytes` / `seconds` · (W - 1)/W of W ranks, and twice
    that for an all-reduce."""


class RunReport(Measured):
    """The profile."""

    model_type: str
    parameters: int
    dtype: str
    batch: int
    """Rows of a micro-batch."""
    length: int
    """Tokens of a row."""
    micro_batches: int
    """Of a step, over all ranks."""
    ranks: int = 1
    """Processes that took the steps together; modes and memory are rank 0's."""
    threads: int | None
    """That share a batch; null on a GPU."""
    modes: list[ModeRow]
    collectives: list[CollectiveRow] = Field(default_factory=list)
    """From further steps, of which nothing else is watched; empty with one rank."""
    memory: Memory
    """Of an eager step."""
    generation: GenerationRow | None = None
    """A sequence that the model continues; null unless asked for."""
