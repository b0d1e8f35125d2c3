"""One op measured: each case with its times, its counted work, what follows from them, and the columns that show it.

The least time of a call is that of the limit that binds: its bytes at the rate of a copy, or its FLOPs at the rate of
a large matrix product, whichever takes longer (Williams, Waterman & Patterson, 2009).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from genesis.array import Array
from genesis.autograd import TensorBase, apply, enable_grad, no_grad
from genesis.backend import CPU, Device, backend_for
from genesis.dtypes import DType
from genesis.errors import DeviceError, GenesisError, OutOfMemoryError, UsageError, of_user
from genesis.measure import causes, kernels
from genesis.measure.cases import Axes, Case, Passes, choices, label_of, make_case, op_named, passes_of
from genesis.measure.causes import Finding, Subject
from genesis.measure.kernels import Dispatch, Launch, launches_of, stages_of
from genesis.measure.limits import COLUMNS as LIMITS
from genesis.measure.limits import Limits, has_gpu_time, limits_of, time_on_gpu, wait_for
from genesis.measure.memory import peak_bytes
from genesis.measure.peer import Child, Peer, versus
from genesis.measure.record import Cell, Column, Failure, Table, Unit, table
from genesis.measure.timing import Plan, Timing, cold_calls, measure, of_wall
from genesis.op import execute
from genesis.shapes import Shape

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

BANDS = ((0.9, "excellent"), (0.7, "good"), (0.5, "fair"), (0.2, "poor"), (0.0, "critical"))
CALL_BOUND = ("launch", "host")  # issues with which the share of a limit says nothing about the kernel


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        backward: the gradient, too.
        cold: GPU time with an emptied L2.
        stages: those of dispatch, on CUDA.
        causes: what the time is spent on, by changing one thing at a time.
        plan: how hard to try, for each of the times.
        peer: what to compare with.
    """

    backward: bool = False
    cold: bool = False
    stages: bool = True
    causes: bool = True
    plan: Plan = field(default_factory=Plan)
    peer: Child | None = None


@dataclass(frozen=True)
class Backward:
    """What a gradient costs.

    Attributes:
        recorded: wall time of the call while it is recorded.
        recording: what recording adds to the call: a difference of two medians, which noise can make negative.
        wall, gpu: of the backward pass of this one op.
        launches: what it launches; None on the CPU.
    """

    recorded: Timing
    recording: float
    wall: Timing
    gpu: Timing | None
    launches: list[Launch] | None


@dataclass(frozen=True)
class Measured:
    """One op on one set of inputs.

    Attributes:
        wall: eager calls one after the other, without recording.
        gpu: None on the CPU, and where a CUDA graph cannot hold the call.
        flops, nbytes: counted by the op's own rule, the bytes once per operand.
        peak_bytes: the most memory taken beyond the inputs; on the CPU with Python's own objects.
        launches: what it puts on the GPU; None on the CPU.
        finding: None where no measurement named an issue.
        notes: what was left out, and why.
    """

    case: Case
    limits: Limits
    is_cold: bool
    wall: Timing
    gpu: Timing | None
    flops: int
    nbytes: int
    peak_bytes: int
    launches: list[Launch] | None = None
    dispatch: Dispatch | None = None
    backward: Backward | None = None
    peer: Peer | None = None
    finding: Finding | None = None
    notes: tuple[str, ...] = ()
    size: str = ""

    @property
    def name(self) -> str:
        """Op and shape."""
        return f"{self.case.name} {self.case.label}"

    @property
    def time(self) -> Timing:
        """Of the work: on the GPU, if there is one."""
        return self.gpu or self.wall

    @property
    def bandwidth_share(self) -> float:
        """Of the rate of a copy; above 1 where data came out of a cache."""
        return self.nbytes / self.limits.bytes_per_second / self.time.seconds

    @property
    def compute_share(self) -> float | None:
        """Of the rate of a large matrix product."""
        rate = self.limits.flops_per_second
        return self.flops / rate / self.time.seconds if rate else None

    @property
    def limit(self) -> str | None:
        """The limit that binds; None for a call that moves and computes nothing."""
        if not self.nbytes and not self.flops:
            return None
        return "compute" if (self.compute_share or 0.0) > self.bandwidth_share else "bandwidth"

    @property
    def share(self) -> float | None:
        """Of the limit that binds."""
        return None if self.limit is None else max(self.bandwidth_share, self.compute_share or 0.0)

    @property
    def band(self) -> str | None:
        """The word for the share."""
        return None if self.share is None else next(name for least, name in BANDS if self.share >= least)

    @property
    def is_loaded(self) -> bool:
        """Whether the share says something about the kernel, and not about the call."""
        return self.share is not None and (self.finding is None or self.finding.issue not in CALL_BOUND)

    @property
    def is_noisy(self) -> bool:
        """Whether any of its times is."""
        times = [self.wall, self.gpu, *((self.backward.wall, self.backward.gpu) if self.backward else ())]
        return any(t.is_noisy for t in times if t is not None)


# --- Measuring --------------------------------------------------------------------------------------------------------


def profile_op(
    name: str,
    device: Device,
    dtype: DType | None = None,
    shapes: Sequence[Shape] = (),
    axes: Sequence[Axes] = (),
    settings: Settings | None = None,
) -> Iterator[Measured | Failure]:
    """A row for each case of an op, in order. A case that fails gives a `Failure`, and the others are measured.

    Args:
        name: see `cases.op_named`.
        dtype: None takes the first of float32, int32 and bool that the op takes.
        shapes, axes: those of the default sizes where empty.

    Raises:
        UsageError: the op, a shape, an axis, the dtype or a setting makes no sense.
    """
    chosen = Settings() if settings is None else settings
    op, _ = op_named(name)
    if chosen.backward and op.vjp is None:
        raise UsageError(f"{name} has no gradient", where="--backward", next="leave --backward out")
    if chosen.cold and not has_gpu_time(device):
        raise UsageError("only a GPU's cache can be emptied", where="--cold", next="leave --cold out")
    for shape, over in choices(name, device, shapes, axes):
        try:
            case = make_case(name, shape, over, dtype, device)
            yield profile_case(case, limits_of(device, case.dtype), chosen)
        except (GenesisError, MemoryError) as error:
            if isinstance(error, UsageError) or of_user(error) is not None:
                raise
            known = error if isinstance(error, GenesisError) else OutOfMemoryError(f"the host has no memory: {error}")
            yield Failure(name, label_of(name, shape, over), known.what, known.exit_code)


def profile_case(case: Case, limits: Limits, settings: Settings) -> Measured:
    """Measure one case against the limits of its device and dtype.

    Raises:
        UsageError: a gradient was asked for and the result has none.
    """
    call, notes, on_cuda = call_of(case), list[str](), case.device != CPU
    with no_grad():
        wall = measure(of_wall(call, wait_for(case.device)), settings.plan)
        gpu = _gpu_time(call, case.device, wall, settings, notes)
        peak = peak_bytes(call, case.device)
        outputs = execute(case.op, case.inputs, dict(case.attrs))
        launches = launches_of(call, case.device) if on_cuda else None
        dispatch = stages_of(case, settings.plan) if on_cuda and settings.stages else None
        subject = Subject(call, case.device, partial(_scaled, case, limits))
        finding = causes.examine(subject, limits, settings.plan) if settings.causes else None
    cost = case.op.cost(case.inputs, outputs, case.attrs)
    passes = passes_of(case.op, case.inputs, case.attrs) if settings.backward else None
    backward = None if passes is None else _backward(case, passes, wall, settings, notes)
    peer = None
    if settings.peer is not None:
        backward_call = None if passes is None else passes.backward
        shape = outputs[0].shape if outputs else ()
        with no_grad():
            peer = versus(case, settings.peer, settings.plan, call, backward_call, shape, notes)
    return Measured(
        case, limits, settings.cold, wall, gpu, cost.flops, cost.bytes, peak, launches, dispatch, backward, peer,
        _recording(backward, wall) or finding, tuple(notes),
    )  # fmt: skip


def call_of(case: Case) -> Callable[[], Any]:
    """The case as a call on tensors."""
    tensors = [TensorBase.wrap(x) if isinstance(x, Array) else x for x in case.inputs]
    return lambda: apply(case.op, *tensors, **case.attrs)


def _scaled(case: Case, limits: Limits, factor: float) -> tuple[Callable[[], object], float] | None:
    """The case with more or fewer rows, and the ratio of their work at the limits."""
    shape = case.shape
    if len(shape) == 1 and op_named(case.name)[1].letters:
        shape = shape * 3
    at = next((i for i, n in enumerate(shape) if round(n * factor) >= 1 and round(n * factor) != n), None)
    if at is None:
        return None
    longer = tuple(round(n * factor) if i == at else n for i, n in enumerate(shape))
    other = make_case(case.name, longer, case.axes, case.dtype, case.device)

    def work(each: Case) -> float:
        cost = each.op.cost(each.inputs, execute(each.op, each.inputs, dict(each.attrs)), each.attrs)
        return max(cost.bytes / limits.bytes_per_second, cost.flops / (limits.flops_per_second or math.inf))

    before = work(case)
    return (call_of(other), work(other) / before) if before else None


def _gpu_time(
    call: Callable[[], object], device: Device, wall: Timing, settings: Settings, notes: list[str]
) -> Timing | None:
    """GPU time, or None with a note where it cannot be measured."""
    if not has_gpu_time(device):
        return None
    if settings.cold:
        with cold_calls(call, cast("CudaBackend", backend_for(device))) as sample:
            return measure(sample, settings.plan)
    try:
        return time_on_gpu(call, device, wall.seconds, settings.plan)
    except DeviceError as error:
        notes.append(f"no GPU time: {error.what}")
        return None


def _backward(case: Case, passes: Passes, wall: Timing, settings: Settings, notes: list[str]) -> Backward:
    """The cost of recording the call, and of its backward pass."""
    wait = wait_for(case.device)
    with enable_grad():
        recorded = measure(of_wall(passes.forward, wait), settings.plan)
    back = measure(of_wall(passes.backward, wait), settings.plan)
    gpu = _gpu_time(passes.backward, case.device, back, settings, notes)
    launches = None if case.device == CPU else launches_of(passes.backward, case.device)
    return Backward(recorded, recorded.seconds - wall.seconds, back, gpu, launches)


def _recording(backward: Backward | None, wall: Timing) -> Finding | None:
    """Recording takes longer than the call, where both times are sure."""
    if backward is None or backward.recording <= wall.seconds or wall.is_noisy or backward.recorded.is_noisy:
        return None
    evidence = "recording for backward takes longer than the call itself"
    advice = "use no_grad() where no gradient is needed, or one fused op instead of several"
    return Finding("host", backward.recording / backward.recorded.seconds, evidence, advice)


# --- Columns ----------------------------------------------------------------------------------------------------------


def _of(key: str, title: str, unit: Unit, about: str, of: Callable[[Measured], Any], hidden: bool = False) -> Column:
    return Column(key, title, unit, about, of, hidden)


def _timing(key: str, title: str, about: str, of: Callable[[Measured], Timing | None]) -> list[Column]:
    """The median of a time, and what is known about it."""

    def part(get: Callable[[Timing], Cell]) -> Callable[[Measured], Cell]:
        return lambda m: None if (timing := of(m)) is None else get(timing)

    return [
        Column(key, title, "s", f"{about} Median.", part(lambda t: t.seconds)),
        Column(f"{key}_half_width", "±", "share", "Half of the median's 95 % confidence interval.",
               part(lambda t: t.half_width)),
        Column(f"{key}_fastest", "fastest", "s", "The shortest that is no outlier.", part(lambda t: t.fastest), True),
        Column(f"{key}_spread", "spread", "share", "Distance of the quartiles.", part(lambda t: t.spread), True),
        Column(f"{key}_samples", "samples", "count", "Samples kept.", part(lambda t: t.samples), True),
        Column(f"{key}_calls", "calls", "count", "Calls that one sample held.", part(lambda t: t.calls), True),
        Column(f"{key}_outliers", "outliers", "count", "Samples left out.", part(lambda t: t.outliers), True),
    ]  # fmt: skip


def _in_backward(of: Callable[[Backward], Any]) -> Callable[[Measured], Any]:
    return lambda m: None if m.backward is None else of(m.backward)


def _in_peer(of: Callable[[Peer], Any]) -> Callable[[Measured], Any]:
    return lambda m: None if m.peer is None else of(m.peer)


def _stage(name: str) -> Column:
    about = f"Host time of dispatch: {name}."
    return _of(f"dispatch_{name}", name, "s", about, lambda m: getattr(m.dispatch, name, None))


COLUMNS: tuple[Column, ...] = (
    _of("case", "case", "text", "Op and shape.", lambda m: m.name),
    _of("name", "name", "text", "The op as it was asked for.", lambda m: m.case.name, True),
    _of("op", "op", "text", "Name in the registry.", lambda m: m.case.op.name, True),
    _of("category", "category", "text", "What kind of work it is.", lambda m: op_named(m.case.name)[1].category, True),
    _of("size", "size", "text", "Size class, where one was asked for.", lambda m: m.size, True),
    _of("label", "shape", "text", "Shape and axes.", lambda m: m.case.label, True),
    _of("dtype", "dtype", "text", "Of the inputs.", lambda m: m.case.dtype.name, True),
    _of("inputs", "inputs", "text", "Dtype and shape of each array.",
        lambda m: ", ".join(f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for x in m.case.arrays), True),
    *_timing("wall", "wall", "Eager calls by the clock on the wall.", lambda m: m.wall),
    *_timing("gpu", "GPU", "Time on the GPU alone.", lambda m: m.gpu),
    _of("is_cold", "cold", "text", "Whether the L2 was emptied before each call.", lambda m: m.is_cold or None),
    _of("bytes", "moves", "bytes", "The fewest bytes the call can move: each operand once.", lambda m: m.nbytes),
    _of("bytes_per_second", "rate", "byte/s", "Bytes per second.", lambda m: m.nbytes / m.time.seconds),
    _of("bandwidth_share", "of a copy", "share", "Of the rate of a copy.", lambda m: m.bandwidth_share),
    _of("flops", "computes", "FLOP", "Arithmetic operations, by the op's rule.", lambda m: m.flops),
    _of("flops_per_second", "FLOP rate", "FLOP/s", "FLOPs per second.", lambda m: m.flops / m.time.seconds),
    _of("compute_share", "of a matmul", "share", "Of the rate of a large product.", lambda m: m.compute_share),
    _of("intensity", "intensity", "FLOP/byte", "FLOPs per byte.", lambda m: m.flops / m.nbytes if m.nbytes else None),
    _of("limit", "limit", "text", "The limit that binds: bandwidth or compute.", lambda m: m.limit),
    _of("share", "share", "share", "Of the limit that binds; above 1 data came out of a cache.", lambda m: m.share),
    _of("band", "band", "text", "Of the share: excellent from 90%, good 70%, fair 50%, poor 20%, critical.",
        lambda m: m.band),
    _of("mfu", "MFU (data sheet)", "share", "Of the data sheet's dense peak of this GPU.",
        lambda m: m.flops / m.limits.data_sheet / m.time.seconds if m.limits.data_sheet and m.flops else None, True),
    _of("peak_bytes", "memory", "bytes", "The most memory taken beyond the inputs.", lambda m: m.peak_bytes),
    _of("recording", "recording", "s", "What recording for backward adds.", _in_backward(lambda b: b.recording)),
    _of("backward", "backward", "s", "The backward pass, on the GPU where there is one.",
        _in_backward(lambda b: (b.gpu or b.wall).seconds)),
    _of("backward_wall", "eager backward", "s", "By the wall.", _in_backward(lambda b: b.wall.seconds), True),
    _of("peer", "torch", "s", "The same in torch.", _in_peer(lambda p: p.forward.peer_seconds)),
    _of("ratio", "vs torch", "ratio", "torch's time over ours, in interleaved rounds.",
        _in_peer(lambda p: p.forward.ratio)),
    _of("ratio_spread", "rounds", "share", "How far the rounds lie apart.", _in_peer(lambda p: p.forward.spread)),
    _of("ratio_band", "band of torch", "text", "faster from 1.05, level, near from 0.8, slower from 0.5, far; noise.",
        _in_peer(lambda p: p.forward.band)),
    _of("backward_ratio", "backward vs torch", "ratio", "The same for the backward pass.",
        _in_peer(lambda p: p.backward and p.backward.ratio)),
    _of("peer_clock", "clock", "text", "What was compared: GPU or wall time.", _in_peer(lambda p: p.clock), True),
    _of("peer_version", "torch version", "text", "Of torch.", _in_peer(lambda p: p.version), True),
    _of("peer_threads", "threads", "count", "That both may use on the CPU.", _in_peer(lambda p: p.threads), True),
    *map(_stage, ("entry", "lookup", "allocate", "launch", "wrap")),
    _of("issue", "primary issue", "text", "What a measurement found the time to go with; empty where none did.",
        lambda m: m.finding and m.finding.issue),
    _of("issue_share", "of the time", "share", "The part of the time that goes with it.",
        lambda m: m.finding and m.finding.share),
    _of("evidence", "because", "text", "What was measured.", lambda m: m.finding and m.finding.evidence),
    _of("advice", "next", "text", "What would help.", lambda m: m.finding and m.finding.advice),
    _of("noise", "noise", "text", "noisy: the machine was not quiet.", lambda m: "noisy" if m.is_noisy else ""),
)  # fmt: skip
BRIEF = {
    "case", "wall", "wall_half_width", "gpu", "backward", "share", "band", "ratio", "ratio_band", "issue", "noise"
}  # fmt: skip


def brief(columns: Sequence[Column] = COLUMNS) -> list[Column]:
    """The columns with which many cases fit on a line."""
    return [replace(each, hidden=each.key not in BRIEF) for each in columns]


def tables_of(measured: Sequence[Measured]) -> list[Table]:
    """The limits, the cases (in full where there is one), and the kernels of the cases."""
    if not measured:
        return []
    limits = {each.case.dtype.name: each.limits for each in measured}
    one = len(measured) == 1
    title = f"{measured[0].case.name}, {measured[0].case.dtype.name}"
    ops = table("ops", "" if one else title, COLUMNS if one else brief(), measured, listed=one)
    ops.notes += dict.fromkeys(note for each in measured for note in each.notes)
    found = [table("limits", "measured now", LIMITS, limits.values()), ops]
    worst = min((m for m in measured if m.share is not None), key=lambda m: m.share or 0.0, default=None)
    if not one and worst is not None and worst.finding is not None:
        ops.notes.append(f"next: {worst.name}: {worst.finding.evidence}; {worst.finding.advice}")
    rows = [(m.name, "forward", each) for m in measured for each in m.launches or ()]
    rows += [(m.name, "backward", each) for m in measured if m.backward for each in m.backward.launches or ()]
    return [*found, table("kernels", "kernels", kernels.COLUMNS, rows)] if rows else found
