"""The report of a profile as data: what `genesis profile --json` writes. Times are seconds, shares are of 1.

`Report.model_json_schema()` gives its JSON schema. `schema_version` grows when a field goes or changes its meaning; new
fields leave it as it is.
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, JsonValue

from genesis.measure.timing import Timing

NOISY_RATIO = 0.2  # rounds that lie further apart


class StrictModel(BaseModel):
    """Data of a report: nothing unknown, nothing infinite, nothing changed later."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, frozen=True)


class Time(StrictModel):
    """The time of one call, as `genesis.measure.timing` measures it."""

    seconds: float
    """Median."""
    fastest: float
    """The shortest that is no outlier."""
    half_width: float | None
    """Of its 95 % confidence interval, as a share of the median; null with fewer than 6 samples."""
    spread: float
    """Distance of the quartiles, as a share of the median."""
    samples: int
    """Samples kept."""
    calls: int
    """Calls that one sample held."""
    outliers: int
    """Samples left out."""
    is_noisy: bool
    """The requested precision was not reached, or the spread is large, or outliers are many."""

    @classmethod
    def of(cls, timing: Timing) -> Self:
        """The model of a measurement."""
        half_width = timing.half_width if math.isfinite(timing.half_width) else None
        return cls(**{**timing._asdict(), "half_width": half_width})


class Resources(StrictModel):
    """What a kernel takes of the GPU. A program is what CUDA calls a block."""

    threads: int
    """Of a program."""
    warps: int
    registers: int
    """Of a thread."""
    shared_static: int
    """Bytes of shared memory of a program that the machine code names."""
    shared_dynamic: int
    """Bytes that its launch asks for."""
    local: int
    """Bytes of local memory of a thread: spilled registers, and arrays that are indexed at run time."""
    resident: int
    """Programs that an SM holds at once."""
    occupancy: float
    """Their threads, as a share of those that an SM can hold."""
    bound_by: Literal["threads", "programs", "registers", "shared memory"]
    """What keeps one more program from an SM."""
    slots: int
    """Programs that all SMs hold at once."""
    waves: float
    """The grid over `slots`: how often they are filled. A persistent kernel takes one wave or less."""
    idle: float
    """The share of slots that stay empty because the last wave does not fill them, over all waves."""


class Launch(StrictModel):
    """A kernel, or memory that is set."""

    kernel: str
    """The kernel's name; "fill" where memory is set."""
    grid: list[int]
    """Its programs in three dimensions; empty for a fill."""
    resources: Resources | None = None
    """What it takes of the GPU; null for a fill, and without a GPU."""


class Dispatch(StrictModel):
    """Host time of a call on CUDA by stage. Lookup, allocate and wrap are timed by themselves; the other two are
    differences of times, and null where noise makes them negative."""

    entry: float | None
    """From the call on tensors to the op on arrays."""
    lookup: float
    """The key under which the call's launches were recorded."""
    allocate: float
    """Memory for the outputs, taken and given back."""
    launch: float | None
    """Addresses packed into parameters, and the driver's launches."""
    wrap: float
    """Tensors around the outputs."""


class Backward(StrictModel):
    """What a gradient costs."""

    recorded: Time
    """Wall time of the call while it is recorded."""
    recording: float
    """What recording adds to the call: a difference of two medians, which noise can make negative."""
    wall: Time
    """Wall time of the backward pass of this one op."""
    gpu: Time | None
    """GPU time of the same; null on the CPU, and where a CUDA graph cannot hold it."""
    launches: list[Launch] | None = None
    """What the backward pass launches on the GPU, in order; null on the CPU."""


class Ratio(StrictModel):
    """The same work here and there, measured interleaved."""

    seconds: float
    """Ours: the median of the rounds' medians."""
    peer_seconds: float
    """The peer's."""
    ratio: float
    """The peer's time over ours, the median of the rounds: above 1 we are faster."""
    spread: float
    """The largest ratio of a round over the smallest, less 1."""
    rounds: int

    @property
    def is_noisy(self) -> bool:
        """Whether the rounds disagree so much that the ratio says little."""
        return self.spread > NOISY_RATIO


class Peer(StrictModel):
    """An op against the same of another library, which ran in a process of its own."""

    name: str
    version: str
    clock: Literal["GPU", "wall"]
    """What was timed: replays of a CUDA graph, or eager calls by the clock on the wall."""
    threads: int | None
    """That both may use on the CPU; null on a GPU."""
    forward: Ratio
    backward: Ratio | None
    """Null unless gradients were asked for."""


class OpRow(StrictModel):
    """One op on one set of inputs."""

    name: str
    """As it was asked for."""
    op: str
    """Name in the registry."""
    family: str
    """The file of `genesis/ops` that defines it."""
    shape: list[int]
    """As it was asked for; `inputs` tells what was made from it."""
    axes: list[int] | None
    """Dimensions that were reduced, or the one along which the op works; null for all, and where there are none."""
    label: str
    """Shape and axes for people."""
    dtype: str
    inputs: list[str]
    """Dtype and shape of each array."""
    is_cold: bool
    """GPU time was measured with an emptied L2."""
    wall: Time
    """Eager calls one after the other, by the clock on the wall, without recording."""
    gpu: Time | None
    """Time on the GPU; null on the CPU, and where a CUDA graph cannot hold the call."""
    flops: int
    """Arithmetic operations, counted by the op's own rule."""
    bytes: int
    """The fewest that the call can move: each operand once."""
    bytes_per_second: float
    flops_per_second: float
    intensity: float | None
    """FLOPs a byte; null where nothing is moved."""
    ridge: float | None
    """The intensity from which on compute is the limit; null where no product was measured."""
    limit: Literal["bandwidth", "compute"] | None
    """The limit that binds."""
    bandwidth_share: float
    """Of the rate of a copy; above 1 where data came out of a cache."""
    compute_share: float | None
    """Of the rate of a large matrix product."""
    share: float | None
    """Of the limit that binds."""
    band: Literal["excellent", "good", "fair", "poor", "critical"] | None
    """Of `share`: from 0.9, 0.7, 0.5, 0.2 and 0 on."""
    cause: Literal["launch", "bandwidth", "compute", "autograd"]
    """What the time is spent on, mostly."""
    advice: str
    """What would help."""
    peak_bytes: int
    """The most memory taken beyond the inputs: the outputs and temporaries; on the CPU with Python's own objects."""
    launches: list[Launch] | None
    """What the op puts on the GPU, in order; null on the CPU."""
    dispatch: Dispatch | None
    """Null but on a GPU, for ops whose launches are recorded."""
    backward: Backward | None
    """Null unless asked for."""
    peer: Peer | None = None
    """Null unless asked for, and where the peer has no such op: `notes` says so."""
    notes: list[str]
    """What was left out, and why."""

    @property
    def is_noisy(self) -> bool:
        """Whether any of its times is."""
        times = [self.wall, self.gpu, *((self.backward.wall, self.backward.gpu) if self.backward else ())]
        return any(t.is_noisy for t in times if t is not None)


class Failure(StrictModel):
    """A case that could not be measured; the others were."""

    name: str
    label: str
    error: str
    exit_code: int


class LimitsRow(StrictModel):
    """What this machine reached, measured in the same process."""

    dtype: str
    bytes_per_second: float
    """Read and written by a copy far larger than the caches."""
    flops_per_second: float | None
    """Of a large matrix product; null for dtypes that have none."""
    call_seconds: float
    """Wall time of the smallest call."""
    kernel_seconds: float | None
    """GPU time of the smallest kernel; null on the CPU."""


class Measured(StrictModel):
    """How a report begins."""

    schema_version: Literal[1] = 1
    date: str
    """Of its end, UTC, ISO 8601."""
    command: str
    """Without where the report went."""
    device: str
    """cpu, or cuda:N."""
    device_name: str
    machine: dict[str, JsonValue]
    """Versions, processor and GPUs: what `genesis env --json` prints."""


class OpReport(Measured):
    """A profile."""

    limits: list[LimitsRow]
    rows: list[OpRow]
    failures: list[Failure]
