"""Measures the cases of an op: times, bytes and FLOPs, the share of this machine's limits, and a report's columns.

The lower bound of a call's time is its bytes at the rate of a copy, or its FLOPs at the rate of a large matmul,
whichever takes longer (Williams, Waterman & Patterson, 2009). The larger one is the limit that binds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from genesis.autograd import enable_grad, no_grad
from genesis.backend import CPU, Device
from genesis.dtypes import DType
from genesis.errors import DeviceError, GenesisError, UsageError, of_user
from genesis.measure import causes, kernels
from genesis.measure.cases import Axes, Case, choices, label_of, make_case, op_named, passes_of
from genesis.measure.causes import Call, Finding, Subject
from genesis.measure.kernels import Launch, launches_of, stages_of
from genesis.measure.limits import COLUMNS as LIMITS
from genesis.measure.limits import Limits, has_gpu_time, limits_of, time_on_gpu, wait_for
from genesis.measure.peer import Child, Ratio, versus
from genesis.measure.record import Column, Failure, Table
from genesis.measure.session import peak_bytes
from genesis.measure.timing import Plan, Timing, measure, of_wall
from genesis.op import execute
from genesis.shapes import Shape

BANDS = ((0.9, "excellent"), (0.7, "good"), (0.5, "fair"), (0.2, "poor"), (0.0, "critical"))
CALL_BOUND = ("launch", "host")  # with these issues, the share of a limit says nothing about the kernel


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement."""

    backward: bool = False  # whether to measure the backward pass
    stages: bool = True  # whether to time the stages of dispatch, on CUDA
    causes: bool = True  # whether to find the primary issue
    plan: Plan = field(default_factory=Plan)  # duration and precision of each time
    peer: Child | None = None  # the library to compare with


class Backward(NamedTuple):
    """The cost of a gradient."""

    recorded: Timing  # wall time of the call while it is recorded
    recording: float  # seconds that recording adds: a difference of two medians, negative if noise exceeds it
    wall: Timing  # of the op's backward pass, as are the next two
    gpu: Timing | None
    launches: list[Launch]


@dataclass(frozen=True)
class Measured:
    """The measurements of an op on one set of inputs."""

    case: Case
    limits: Limits
    wall: Timing  # consecutive eager calls, without recording
    gpu: Timing | None  # None on the CPU, and if a CUDA graph cannot capture the call
    flops: int  # by the op's cost rule
    nbytes: int  # by the op's cost rule, each operand once
    peak_bytes: int  # peak memory in addition to the inputs; on the CPU it includes Python objects
    launches: list[Launch] = field(default_factory=list)  # kernels and fills; empty on the CPU
    dispatch: dict[str, float] = field(default_factory=dict)  # host seconds by stage; see `kernels.stages_of`
    backward: Backward | None = None
    peer: Ratio | None = None  # the same op in the other library
    finding: Finding | None = None  # None if no measurement names an issue
    notes: tuple[str, ...] = ()  # measurements that were left out, and why
    size: str = ""  # the size class, if one was requested

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.case.label}"

    @property
    def time(self) -> Timing:
        return self.gpu or self.wall

    @property
    def bandwidth_share(self) -> float:
        """The byte rate as a share of a copy's; above 1 if data came from a cache."""
        return self.nbytes / self.limits.bytes_per_second / self.time.seconds

    @property
    def compute_share(self) -> float | None:
        """The FLOP rate as a share of a large matmul's; None if that is unknown."""
        rate = self.limits.flops_per_second
        return self.flops / rate / self.time.seconds if rate else None

    @property
    def limit(self) -> str | None:
        """The limit that binds: "bandwidth" or "compute"; None for a call without bytes and FLOPs."""
        if not self.nbytes and not self.flops:
            return None
        return "compute" if (self.compute_share or 0.0) > self.bandwidth_share else "bandwidth"

    @property
    def share(self) -> float:
        """Share of the limit that binds; 0 without a limit."""
        return max(self.bandwidth_share, self.compute_share or 0.0)

    @property
    def band(self) -> str | None:
        return self.limit and next(name for least, name in BANDS if self.share >= least)

    @property
    def is_loaded(self) -> bool:
        """Whether the share describes the kernel rather than the overhead of the call."""
        return self.limit is not None and (self.finding is None or self.finding.issue not in CALL_BOUND)

    @property
    def is_noisy(self) -> bool:
        times = [self.wall, self.gpu, *((self.backward.wall, self.backward.gpu) if self.backward else ())]
        return any(t.is_noisy for t in times if t is not None)


def profile_op(
    name: str,
    device: Device,
    dtype: DType | None = None,
    shapes: Sequence[Shape] = (),
    axes: Sequence[Axes] = (),
    settings: Settings | None = None,
) -> Iterator[Measured | Failure]:
    """Measure the cases of an op in order, as `choices` and `make_case` describe; one that fails yields a `Failure`."""
    settings = settings or Settings()
    if settings.backward and op_named(name)[0].vjp is None:
        raise UsageError(f"{name} has no gradient", where="--backward", next="leave --backward out")
    for shape, over in choices(name, device, shapes, axes):
        try:
            case = make_case(name, shape, over, dtype, device)
            yield profile_case(case, limits_of(device, case.dtype), settings)
        except (GenesisError, MemoryError) as error:
            if isinstance(error, UsageError) or of_user(error) is not None:
                raise
            yield Failure.of(name, label_of(name, shape, over), error)


def profile_case(case: Case, limits: Limits, settings: Settings) -> Measured:
    """Measure one case. Raises UsageError: the settings request a gradient, and the result has none."""
    notes, device, plan = list[str](), case.device, settings.plan

    def times(call: Call) -> tuple[Timing, Timing | None, list[Launch]]:
        """Wall and GPU time and the launches; a note says why a CUDA graph cannot measure GPU time."""
        wall, gpu = measure(of_wall(call, wait_for(device)), plan), None
        try:
            gpu = time_on_gpu(call, device, wall.seconds, plan) if has_gpu_time(device) else None
        except DeviceError as error:
            notes.append(f"no GPU time: {error.what}")
        return wall, gpu, [] if device == CPU else launches_of(call, device)

    with no_grad():
        wall, gpu, launches = times(case.call)
        peak = peak_bytes(case.call, device)
        outputs = execute(case.op, case.inputs, dict(case.attrs))
        dispatch = stages_of(case, plan) if settings.stages and device != CPU else {}
        subject = Subject(case.call, device, partial(scaled, case, limits), case.shape[0] if case.shape else 0)
        finding = causes.examine(subject, limits, plan) if settings.causes else None
        shape = outputs[0].shape if outputs else ()
        peer = None if settings.peer is None else versus(case, settings.peer, plan, shape)
        notes += [peer] if isinstance(peer, str) else []
    backward = None
    if settings.backward:
        forward, back = passes_of(case.op, case.inputs, case.attrs)
        with enable_grad():
            recorded = measure(of_wall(forward, wait_for(device)), plan)
        backward = Backward(recorded, recorded.seconds - wall.seconds, *times(back))
        if backward.recording > wall.seconds and not wall.is_noisy and not recorded.is_noisy:
            evidence = "recording for backward takes longer than the call itself"
            advice = "use no_grad() where no gradient is needed, or one fused op instead of several"
            finding = Finding("host", backward.recording / recorded.seconds, evidence, advice)
    cost = case.op.cost(case.inputs, outputs, case.attrs)
    work, ratio = (cost.flops, cost.bytes, peak), None if isinstance(peer, str) else peer
    return Measured(case, limits, wall, gpu, *work, launches, dispatch, backward, ratio, finding, tuple(notes))


def scaled(case: Case, limits: Limits, factor: float) -> tuple[Call, float] | None:
    """The call with `factor` times the rows, and the ratio of the lower bounds; None if the rows cannot change."""
    shape = case.shape * 3 if len(case.shape) == 1 and op_named(case.name)[1].letters else case.shape
    at = next((i for i, n in enumerate(shape) if round(n * factor) >= 1 and round(n * factor) != n), None)
    if at is None:
        return None
    longer = tuple(round(n * factor) if i == at else n for i, n in enumerate(shape))
    other = make_case(case.name, longer, case.axes, case.dtype, case.device)

    def work(each: Case) -> float:
        cost = each.op.cost(each.inputs, execute(each.op, each.inputs, dict(each.attrs)), each.attrs)
        return max(cost.bytes / limits.bytes_per_second, cost.flops / (limits.flops_per_second or math.inf))

    before = work(case)
    return (other.call, work(other) / before) if before else None


def _timing(key: str, title: str, about: str) -> Iterator[Column]:
    yield Column(key, title, "s", f"{about} Median.", f"{key}.seconds")
    half = "Half of the median's 95 % confidence interval."
    yield Column(f"{key}_half_width", "±", "share", half, f"{key}.half_width")
    yield Column(f"{key}_spread", "spread", "share", "Interquartile range / median.", f"{key}.spread", True)


COLUMNS: tuple[Column, ...] = (
    Column("case", "case", "text", "Op and shape.", "name"),
    Column("name", "name", "text", "The op as requested.", "case.name", True),
    Column("category", "category", "text", "The kind of work.", "case.category", True),
    Column("size", "size", "text", "Size class, if one was requested.", "size", True),
    Column("label", "shape", "text", "Shape and axes.", "case.label", True),
    Column("dtype", "dtype", "text", "Dtype of the inputs.", "case.dtype.name", True),
    Column("inputs", "inputs", "text", "Dtype and shape of each array.",
           lambda m: ", ".join(f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for x in m.case.arrays), True),
    *_timing("wall", "wall", "Wall time of eager calls."),
    *_timing("gpu", "GPU", "Time on the GPU alone."),
    Column("bytes", "moves", "bytes", "The fewest bytes the call can move: each operand once.", "nbytes"),
    Column("bytes_per_second", "rate", "byte/s", "Bytes per second.", lambda m: m.nbytes / m.time.seconds),
    Column("bandwidth_share", "of a copy", "share", "Share of the rate of a copy."),
    Column("flops", "computes", "FLOP", "Arithmetic operations, by the op's rule."),
    Column("flops_per_second", "FLOP rate", "FLOP/s", "FLOPs per second.", lambda m: m.flops / m.time.seconds),
    Column("compute_share", "of a matmul", "share", "Share of the rate of a large matmul."),
    Column("intensity", "intensity", "FLOP/byte", "FLOPs per byte.",
           lambda m: m.flops / m.nbytes if m.nbytes else None),
    Column("limit", "limit", "text", "The limit that binds: bandwidth or compute."),
    Column("share", "share", "share", "Share of the limit that binds; above 1, data came from a cache.",
           lambda m: m.share if m.limit else None),
    Column("band", "band", "text", "Band of the share: excellent from 90%, good 70%, fair 50%, poor 20%, critical."),
    Column("mfu", "MFU (data sheet)", "share", "Share of this GPU's dense peak by its data sheet.",
           lambda m: m.flops / m.limits.data_sheet / m.time.seconds if m.limits.data_sheet and m.flops else None, True),
    Column("peak_bytes", "memory", "bytes", "Peak memory in addition to the inputs."),
    Column("recording", "recording", "s", "Time that recording for backward adds.", "backward.recording"),
    Column("backward", "backward", "s", "GPU time of the backward pass; on the CPU, wall time.",
           lambda m: m.backward and (m.backward.gpu or m.backward.wall).seconds),
    Column("peer", "torch", "s", "Time of the same op in torch.", "peer.peer_seconds"),
    Column("ratio", "vs torch", "ratio", "torch's time / ours, in interleaved rounds.", "peer.ratio"),
    Column("ratio_spread", "rounds", "share", "Highest ratio of a round / lowest, minus 1.", "peer.spread"),
    Column("ratio_band", "band of torch", "text",
           "Band of the ratio: faster from 1.05, level, near from 0.8, slower from 0.5, far; noise.", "peer.band"),
    *(
        Column(f"dispatch_{stage}", stage, "s", f"Host time of dispatch: {stage}.", f"dispatch.{stage}")
        for stage in ("entry", "lookup", "allocate", "launch", "wrap")
    ),
    Column("issue", "primary issue", "text", "The issue that measurements found; empty if none.", "finding.issue"),
    Column("issue_share", "of the time", "share", "Share of the time that the issue accounts for.", "finding.share"),
    Column("evidence", "because", "text", "The measurement that shows the issue.", "finding.evidence"),
    Column("advice", "next", "text", "A change that helps.", "finding.advice"),
    Column("noise", "noise", "text", "noisy: the machine was not quiet.", lambda m: "noisy" if m.is_noisy else ""),
)  # fmt: skip
SHOWN = ["case", "wall", "wall_half_width", "gpu", "backward", "share", "band", "ratio", "ratio_band", "issue", "noise"]
BRIEF = tuple(replace(each, hidden=each.key not in SHOWN) for each in COLUMNS)  # fits on a terminal's line


def tables_of(measured: Sequence[Measured]) -> list[Table]:
    """The tables of the limits, of the cases and of their kernels. A single case is shown with all columns."""
    if not measured:
        return []
    limits = {each.case.dtype.name: each.limits for each in measured}
    one = len(measured) == 1
    title = f"{measured[0].case.name}, {measured[0].case.dtype.name}"
    notes = dict.fromkeys(note for each in measured for note in each.notes)
    ops = Table("ops", "" if one else title, COLUMNS if one else BRIEF, measured, listed=one, notes=notes)
    rows = [(m.name, "forward", each) for m in measured for each in m.launches]
    rows += [(m.name, "backward", each) for m in measured if m.backward for each in m.backward.launches]
    found = [Table("limits", "measured now", LIMITS, limits.values()), ops]
    return [*found, Table("kernels", "kernels", kernels.COLUMNS, rows)] if rows else found
