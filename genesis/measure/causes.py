"""Finds what limits a call, by counters and by experiments that change one thing at a time.

A CUDA graph removes launches, contiguous operands remove strided reads, smaller inputs leave the fixed cost or fit into
a cache, a single thread shows whether more threads help, and more rows show idle SMs. An issue needs a measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

from genesis.array import Array, empty
from genesis.backend import CPU, Device
from genesis.backend.cpu import one_blas_thread, set_threads, threads
from genesis.dtypes import float32, uint8
from genesis.errors import GenesisError
from genesis.measure.kernels import Launch, launches_of
from genesis.measure.limits import Limits, cuda_backend, filled, has_gpu_time, time_on_gpu, wait_for
from genesis.measure.record import format_bytes, format_seconds, format_share
from genesis.measure.session import peak_bytes
from genesis.measure.timing import Plan, cold_calls, measure, of_wall
from genesis.op import Op, execute, observe, registry

ADVICE = {
    "host": "a profile with stacks shows where the host works or waits",
    "launch": "make fewer calls on larger tensors, or fuse several ops",
    "strides": "store the operand in the order in which it is read",
    "temporaries": "fuse the ops, or write into one buffer with out=",
    "spills": "hold fewer values, or use more warps",
    "occupancy": "fill tiles and waves: split the work further, or batch more rows",
    "latency": "give the kernel independent work, or run several in one launch",
    "cache": "work on pieces that fit into the cache, in the order of memory",
    "bandwidth": "only fewer bytes help: a narrower dtype, or fusion",
    "compute": "fewer or cheaper operations per element help; moving less does not",
}
ISSUES = tuple(ADVICE)
LEAST = 0.3  # an issue must account for this share of the time
MOST_OF_IT = 0.5  # the same for a limit or a fixed cost, which every call has to some extent
FREE = 1.3  # two times that differ by this ratio differ by more than noise
NEAR = 0.8  # above this share of a limit, more rows cannot be nearly free
CACHED = 1.05  # above this share of a copy's rate, data came from a cache
ROUNDS, MOST_ROUNDS = 3, 8
NOISY = 1.15  # the two shortest times of a call must agree this well
SMALL = 4 << 20  # below this many bytes, inputs are enlarged to see the fixed cost; above, they are reduced
LARGE = 64 << 20  # above this many bytes, an eighth would not fit into the cache of a CPU core
TILES = (32, 64, 128, 256)  # rows of a matmul kernel's tile
COPIED, WIDTH = 32 << 20, 1024  # bytes of the copy and width of the matmul that calls on a CPU are compared with

Call = Callable[[], object]
Scaled = Callable[[float], tuple[Call, float] | None]


class Finding(NamedTuple):
    """An issue and its evidence."""

    issue: str  # one of `ISSUES`
    share: float  # share of the time that the issue accounts for
    evidence: str  # what was measured
    advice: str  # what would help


@dataclass(frozen=True)
class Subject:
    """A call to examine."""

    call: Call
    device: Device
    scaled: Scaled = lambda factor: None  # the call with that many times the rows, and the ratio of work
    rows: int = 0  # rows of the inputs; 0 if unknown


def examine(subject: Subject, limits: Limits, plan: Plan) -> Finding | None:
    """The first issue, in the order of `ISSUES`, that accounts for enough of the time; None if no issue does."""
    return next(findings(Examined(subject, limits, plan)), None)


def findings(seen: Examined) -> Iterator[Finding]:
    """All issues that measurements support, in the order of `ISSUES`."""
    questions = (_host, _launch, _strides, _temporaries, _spills, _occupancy, _cache, _bandwidth, _compute)
    return (found for question in questions if (found := question(seen)) is not None)


class Step(NamedTuple):
    """An op that the call ran."""

    op: Op
    inputs: tuple[Any, ...]
    outputs: tuple[Array, ...]
    attrs: dict[str, Any]
    seconds: float


class Examined:
    """The measurements of a subject. Each is taken when it is first needed; times are in seconds."""

    def __init__(self, subject: Subject, limits: Limits, plan: Plan) -> None:
        self.subject, self.limits = subject, limits
        self.plan = Plan(max(plan.precision, 0.03), plan.seconds / 15, min(plan.warm_up, 0.01), plan.sample)
        self.on_gpu = has_gpu_time(subject.device)
        self.wall = self.wall_of(subject.call)
        # None on the CPU, and if a CUDA graph cannot capture the call.
        self.gpu = self.gpu_of(subject.call, self.wall) if self.on_gpu else None

    @property
    def seconds(self) -> float:
        return self.wall if self.gpu is None else self.gpu

    def wall_of(self, call: Call) -> float:
        return measure(of_wall(call, wait_for(self.subject.device)), self.plan).fastest

    def gpu_of(self, call: Call, wall: float) -> float | None:
        try:
            return time_on_gpu(call, self.subject.device, wall, self.plan).fastest
        except GenesisError:
            return None

    def clock(self, call: Call) -> float:
        """GPU time; on the CPU this thread's CPU time, which excludes other programs."""
        if self.subject.device == CPU:
            return measure(of_wall(call, lambda: None, time.thread_time), self.plan).fastest
        wall = self.wall_of(call)
        return wall if self.gpu is None else self.gpu_of(call, wall) or wall

    def ratio(self, call: Call, base: Call | None = None, clock: Callable[[Call], float] | None = None) -> float | None:
        """The shortest times of `call` / of `base` in interleaved rounds; None if a call fails or is noisy."""
        times: tuple[list[float], list[float]] = ([], [])
        alone = self.subject.device == CPU and clock is None
        try:
            with _one_thread() if alone else nullcontext():
                for count in range(1, MOST_ROUNDS + 1):
                    for each, seconds in zip((call, base or self.subject.call), times, strict=True):
                        seconds.append((clock or self.clock)(each))
                    if count >= ROUNDS and all(sorted(t)[1] <= NOISY * min(t) for t in times):
                        return min(times[0]) / min(times[1])
        except (GenesisError, MemoryError):
            pass
        return None

    def scaled(self, factor: float) -> tuple[float, float] | None:
        """The ratios of time and of work at `factor` times the rows; None if they cannot be measured."""
        try:
            call, work = self.subject.scaled(factor) or (None, 0.0)
        except (GenesisError, MemoryError):
            return None
        longer = None if call is None else self.ratio(call)
        return None if longer is None else (longer, work)

    @cached_property
    def steps(self) -> tuple[list[Step], float, float]:
        """The ops of the fastest of three calls, the seconds outside of ops, and the seconds of the call."""
        runs = []
        for _ in range(3):
            recorded: list[Step] = []
            with observe(lambda *ran, recorded=recorded: recorded.append(Step(*ran))):
                start = time.perf_counter()
                self.subject.call()
                whole = time.perf_counter() - start
            runs.append((recorded, whole - sum(step.seconds for step in recorded), whole))
        return min(runs, key=lambda run: run[2])

    @cached_property
    def work(self) -> tuple[int, int]:
        costs = [step.op.cost(step.inputs, step.outputs, step.attrs) for step in self.steps[0]]
        return sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs)

    @cached_property
    def moved(self) -> float:
        """The time to copy the call's bytes, as a share of its time."""
        if self.subject.device == CPU:
            copy = partial(registry["copy"], filled((COPIED,), uint8), out=empty((COPIED,), uint8))
            if (copied := self.ratio(copy, clock=self.wall_of)) is not None:
                return self.work[0] / (2 * COPIED) * copied
        return self.work[0] / self.limits.bytes_per_second / self.seconds

    @cached_property
    def multiplied(self) -> float:
        """The time of a large matmul with the call's FLOPs, as a share of its time; 0 if no op is a matmul."""
        if not any(len(s.outputs) and s.op.autocast == "low_precision" for s in self.steps[0]):
            return 0.0
        if self.subject.device == CPU and (product := self.ratio(_product(WIDTH), clock=self.wall_of)) is not None:
            return self.work[1] / (2 * WIDTH**3) * product
        rate = self.limits.flops_per_second
        return self.work[1] / rate / self.seconds if rate else 0.0

    @cached_property
    def other_size(self) -> tuple[float, float] | None:
        """The ratios of time and work at a smaller size that fits into a cache, or at a larger one for a small call."""
        is_large = self.subject.device == CPU and max(self.work[0], self.peak) >= LARGE
        return self.scaled(8.0 if self.work[0] < SMALL else 1 / 32 if is_large else 1 / 8)

    @cached_property
    def peak(self) -> int:
        """Peak bytes of results and temporaries on the CPU, including numpy's."""
        return peak_bytes(self.subject.call, CPU)

    @property
    def saved_when_small(self) -> float:
        """The share of the time per byte that a cache saves; 0 if it was not measured."""
        if self.other_size is None or self.other_size[1] > 1:
            return 0.0
        return max(1 - self.other_size[0] / self.other_size[1], 0.0)

    @cached_property
    def launches(self) -> list[Launch]:
        return [] if self.subject.device == CPU else launches_of(self.subject.call, self.subject.device)


@contextmanager
def _one_thread() -> Iterator[None]:
    count = threads()
    set_threads(1)
    try:
        with one_blas_thread():
            yield
    finally:
        set_threads(count)


def _product(width: int) -> Call:
    return partial(registry["matmul"], *[filled((width, width), float32)] * 2)


def named(issue: str, share: float, evidence: str, least: float = LEAST, advice: str = "") -> Finding | None:
    """The finding, or None if the issue accounts for less than `least` of the time."""
    return Finding(issue, min(share, 1.0), evidence, advice or ADVICE[issue]) if share >= least else None


def _host(seen: Examined) -> Finding | None:
    """Time in Python outside of ops, beyond the cost of calling them; at most the time that a CUDA graph saves."""
    steps, outside, whole = seen.steps
    outside -= len(steps) * seen.limits.call_seconds
    share = outside / whole  # both from one call, because another call may have been slower
    if seen.gpu is not None:
        share = min(share, 1 - seen.gpu / seen.wall)
    evidence = f"{format_seconds(outside)} of {format_seconds(whole)} are spent in Python between {len(steps)} ops"
    return named("host", share, evidence)


def _launch(seen: Examined) -> Finding | None:
    """The fixed cost: the time that a CUDA graph removes, or on the CPU the time that does not depend on the size."""
    if seen.gpu is not None:
        evidence = f"a CUDA graph takes {format_seconds(seen.gpu)} of {format_seconds(seen.wall)}"
        advice = "capture the calls in a CUDA graph, or fuse them"
        return named("launch", 1 - seen.gpu / seen.wall, evidence, advice=advice)
    if seen.other_size is not None:
        longer, factor = seen.other_size
        fixed = (factor - longer) / (factor - 1) * seen.wall
        evidence = f"{factor:.3g} times the work takes {longer:.2f} times as long: {format_seconds(fixed)} is fixed"
        return named("launch", fixed / seen.wall, evidence, MOST_OF_IT)
    fixed = len(seen.steps[0]) * seen.limits.call_seconds
    evidence = f"calls on one element would take {format_seconds(fixed)} of {format_seconds(seen.wall)}"
    return named("launch", fixed / seen.wall, evidence)


def _strides(seen: Examined) -> Finding | None:
    """The time that contiguous operands would save in ops that read strided ones."""

    def jumps(x: Any) -> bool:
        return isinstance(x, Array) and x.size > 1 and not x.is_contiguous

    saved, names = 0.0, list[str]()
    for op, inputs, _, attrs, _ in seen.steps[0]:
        if op.view is None and not op.mutates and any(map(jumps, inputs)):
            plain = tuple(registry["copy"](x) if jumps(x) else x for x in inputs)
            closed, jumping = (partial(lambda op, x, a: execute(op, x, dict(a)), op, x, attrs) for x in (plain, inputs))
            ratio = seen.ratio(closed, jumping)
            saved += 0.0 if ratio is None else (1 - ratio) * seen.clock(jumping)
            names.append(op.name)
    if not names:
        return None
    evidence = f"contiguous operands of {', '.join(dict.fromkeys(names))} save {format_seconds(saved)}"
    return named("strides", saved / seen.clock(seen.subject.call), evidence)


def _temporaries(seen: Examined) -> Finding | None:
    """Results that later ops read, and memory that a reference allocates internally, at the rate of a copy."""
    steps = [step for step in seen.steps[0] if step.op.view is None]
    made = {id(x.storage) for step in steps for x in step.outputs}
    read = {id(x.storage): x.nbytes for step in steps for x in step.inputs if isinstance(x, Array)}
    between = sum(x.nbytes for step in steps for x in step.outputs if id(x.storage) in read)
    outside = sum(size for key, size in read.items() if key not in made)
    results = sum(x.nbytes for step in steps for x in step.outputs if id(x.storage) not in read)
    extra = max(seen.work[0] - outside - results, 0) if between else 0
    share = seen.saved_when_small if extra > outside + results else 0.0
    if not between and seen.subject.device == CPU:
        hidden = seen.peak - results
        # Fresh memory is slower to write than a copy's target; the call at a smaller size shows by how much.
        if hidden >= max(results, SMALL // 4):
            extra, share = 2 * hidden, seen.saved_when_small
    if not extra:
        return None
    evidence = f"{format_bytes(extra)} of temporaries are moved"
    evidence += f", and {format_bytes(outside + results)} of operands and results"
    return named("temporaries", max(share, extra / seen.work[0] * seen.moved), evidence)


def _spills(seen: Examined) -> Finding | None:
    """Registers that a kernel spills to local memory while it is far from every limit."""
    kernels = [(each.resources.local, each.kernel) for each in seen.launches if each.resources is not None]
    local, kernel = max(kernels, default=(0, ""))
    if not local:
        return None
    evidence = f"{kernel} stores {local} bytes per thread in local memory"
    return named("spills", 1 - max(seen.moved, seen.multiplied), evidence, MOST_OF_IT)


def _occupancy(seen: Examined) -> Finding | None:
    """Idle SMs or threads: on a GPU more rows are nearly free; on the CPU one thread is as fast as all."""
    reached = max(seen.moved, seen.multiplied)
    if seen.subject.device == CPU:
        return None if reached >= MOST_OF_IT else _idle_threads(seen)
    tried = [seen.scaled(factor) for factor in _row_factors(seen)] if seen.on_gpu and reached < NEAR else []
    longer, factor = min((pair for pair in tried if pair is not None), key=lambda p: p[0] / p[1], default=(1.0, 1.0))
    evidence = f"{factor:.3g} times the work takes {longer:.2f} times as long"
    issue, most = "occupancy", max(seen.launches, key=lambda each: each.programs, default=None)
    if most is not None and most.resources is not None:
        taken = most.resources
        evidence += f"; {most.kernel} has {most.programs} programs for {taken.sm_count} SMs"
        is_full = most.programs >= taken.sm_count and taken.idle < LEAST
        issue = "latency" if is_full and factor > 1.9 else issue
    return named(issue, 1 - longer / factor, evidence)


def _row_factors(seen: Examined) -> list[float]:
    """Factors of the rows that may cost no time: twice the rows, or rows that fill the last tile or the last wave."""
    rows = seen.subject.rows
    factors = [-(-rows // tile) * tile / rows for tile in TILES] if rows else []
    waves = max((each.resources.waves for each in seen.launches if each.resources is not None), default=0.0)
    factors += [math.ceil(waves) / waves] if waves else []
    return [2.0, *sorted({round(factor, 3) for factor in factors if 1.3 < factor < 1.99})]


def _idle_threads(seen: Examined) -> Finding | None:
    """Threads that do not speed up the call, on a machine where they speed up a matmul."""

    def gained(call: Call) -> float:
        every = min(seen.wall_of(call) for _ in range(ROUNDS))
        with _one_thread():
            return min(seen.wall_of(call) for _ in range(ROUNDS)) / every

    count = threads()
    if count < 2 or not 0.8 < (ratio := gained(seen.subject.call)) < 1.1:
        return None
    if (known := gained(_product(512))) < FREE:  # other programs occupy the other cores
        return None
    share = 1 - max(ratio - 1, 0.0) / (count - 1)  # 0 where all threads help fully, 1 where none does
    evidence = f"one thread takes {ratio:.2f} times as long as {count}; in a matmul, {known:.2f} times"
    return named("occupancy", share, evidence, advice="it runs in one thread: give it more rows")


def _cache(seen: Examined) -> Finding | None:
    """Data that comes from a cache now, or would at a smaller size."""
    if seen.gpu is not None and seen.moved > CACHED:
        with cold_calls(seen.subject.call, cuda_backend(seen.subject.device)) as sample:
            cold = measure(sample, seen.plan).fastest
        if cold > FREE * seen.gpu:
            evidence = f"{format_seconds(seen.gpu)} with its data in L2, {format_seconds(cold)} without"
            return named("cache", 1 - seen.gpu / cold, evidence, 0.0, "a larger shape shows memory's cost")
    if seen.moved >= MOST_OF_IT or seen.other_size is None:
        return None
    share = format_share(1 - seen.saved_when_small)
    evidence = f"{seen.other_size[1]:.3g} times the data takes {share} of the time per byte"
    return named("cache", seen.saved_when_small, evidence)


def _bandwidth(seen: Examined) -> Finding | None:
    """Bytes that move at the rate of a copy. A call that takes as long with cached data does not wait for memory."""
    is_cached = seen.other_size is not None and seen.other_size[1] < 1 and seen.saved_when_small < 0.1
    if seen.multiplied > seen.moved:
        return None
    source = ", from a cache" if seen.moved > CACHED else ""
    evidence = f"{format_bytes(seen.work[0])} at {format_share(seen.moved)} of a copy's rate{source}"
    return named("bandwidth", seen.moved, evidence, 0.9 if is_cached else MOST_OF_IT)


def _compute(seen: Examined) -> Finding | None:
    """A matmul at the rate of a large one, or arithmetic that takes as long when the data is in a cache."""
    if seen.multiplied >= MOST_OF_IT:
        evidence = f"{format_share(seen.multiplied)} of the largest product's rate"
        return named("compute", seen.multiplied, evidence, advice="only fewer FLOPs or a narrower dtype help")
    if seen.other_size is None or not 0.7 < seen.other_size[0] / seen.other_size[1] < 1.5:
        return None
    longer, factor = seen.other_size
    evidence = f"{factor:.3g} times the work takes {longer:.2f} times as long, in a cache or not"
    return named("compute", 1 - seen.moved, evidence, 0.0)
