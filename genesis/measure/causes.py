"""What the time of a call is spent on: found by changing one thing at a time, and by counters.

Each issue is a question that a measurement answers: a graph removes launches, contiguous operands remove jumps, smaller
inputs leave the fixed cost or fit into a cache, one thread shows whether the others help, more rows show idle places.
`share` is the part of the time that goes with the thing that was changed. An issue that no measurement found is not
named, and a ratio to a limit alone names none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from genesis.array import Array, empty
from genesis.autograd import TensorBase
from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import set_threads, threads
from genesis.dtypes import float32
from genesis.errors import GenesisError
from genesis.measure.kernels import Launch, launches_of
from genesis.measure.limits import Limits, has_gpu_time, time_on_gpu, wait_for
from genesis.measure.memory import peak_bytes
from genesis.measure.record import format_bytes, format_seconds, format_share
from genesis.measure.timing import Plan, cold_calls, measure, of_wall
from genesis.op import Op, execute, observe, registry

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

ISSUES = ("host", "launch", "strides", "temporaries", "spills", "occupancy", "latency", "cache", "bandwidth", "compute")
LEAST = 0.3  # of the time must go with what was changed
MOST_OF_IT = 0.5  # the same for a limit or a fixed cost, which every call has some of
FREE = 1.3  # twice the rows in less than this time: there was room for them
CACHED = 1.05  # above this share of a copy's rate, data came out of a cache
ROUNDS, MOST_ROUNDS = 3, 8
NOISY = 1.15  # two shortest times that lie further apart say nothing
SMALL = 4 << 20  # bytes below which inputs are made larger to see the fixed cost, and smaller above

Call = Callable[[], object]
Scaled = Callable[[float], tuple[Call, float] | None]


class Finding(NamedTuple):
    """One issue.

    Attributes:
        issue: one of `ISSUES`.
        share: of the time that goes with it.
        evidence: what was measured.
        advice: what would help.
    """

    issue: str
    share: float
    evidence: str
    advice: str


@dataclass(frozen=True)
class Subject:
    """A call to examine.

    Attributes:
        scaled: the call on inputs about so many times as large, and how many times its work really is; None where
            there is no such call.
    """

    call: Call
    device: Device
    scaled: Scaled = lambda factor: None


def of_function(function: Callable[..., object], inputs: Sequence[Any], device: Device) -> Subject:
    """A user's function. Tensors with as many rows as the first are made longer and shorter together."""
    arrays = [x.array for x in inputs if isinstance(x, TensorBase) and x.array.shape]
    rows = arrays[0].shape[0] if arrays else 0

    def scaled(factor: float) -> tuple[Call, float] | None:
        count = round(rows * factor)
        if not count or count == rows:
            return None
        changed = [_with_rows(x, rows, count) for x in inputs]
        call = partial(function, *changed)
        try:
            call()
        except Exception:  # the function needs these sizes
            return None
        return call, count / rows

    return Subject(partial(function, *inputs), device, scaled)


def _with_rows(x: Any, rows: int, count: int) -> Any:
    if not isinstance(x, TensorBase) or x.array.shape[:1] != (rows,):
        return x
    if count < rows:
        return TensorBase.wrap(registry["slice"](x.array, items=((0, count, 1),)))
    return TensorBase.wrap(registry["cat"](*[x.array] * round(count / rows), dim=0))


def examine(subject: Subject, limits: Limits, plan: Plan) -> Finding | None:
    """The first issue, in the order of `ISSUES`, with which enough of the time goes; None where no measurement says."""
    return next(_findings(_Examined(subject, limits, plan)), None)


def _findings(seen: _Examined) -> Iterator[Finding]:
    questions = (_host, _launch, _strides, _temporaries, _spills, _occupancy, _cache, _bandwidth, _compute)
    for question in questions:
        found = question(seen)
        if found is not None:
            yield found._replace(share=min(found.share, 1.0))


class _Step(NamedTuple):
    """An op that the call ran."""

    op: Op
    inputs: tuple[Any, ...]
    outputs: tuple[Array, ...]
    attrs: dict[str, Any]
    seconds: float


class _Examined:
    """What was measured of a subject, each when it is first asked for."""

    def __init__(self, subject: Subject, limits: Limits, plan: Plan) -> None:
        self.subject, self.limits = subject, limits
        self.plan = Plan(max(plan.precision, 0.03), plan.seconds / 15, min(plan.warm_up, 0.01), plan.sample)
        self.wait, self.on_gpu = wait_for(subject.device), has_gpu_time(subject.device)
        self.wall = self.wall_of(subject.call)
        self.gpu = self.gpu_of(subject.call, self.wall)

    @property
    def seconds(self) -> float:
        """Of the work: on the GPU, where a graph holds the call."""
        return self.wall if self.gpu is None else self.gpu

    def wall_of(self, call: Call) -> float:
        return measure(of_wall(call, self.wait), self.plan).fastest

    def gpu_of(self, call: Call, wall: float) -> float | None:
        if not self.on_gpu:
            return None
        try:
            return time_on_gpu(call, self.subject.device, wall, self.plan).fastest
        except GenesisError:
            return None

    def ratio(self, call: Call, base: Call | None = None) -> float | None:
        """Another call's time over this one's: of each the shortest in interleaved rounds, as what slows the machine
        only adds time. None where the two shortest of one do not agree, or the call fails.
        """
        times: tuple[list[float], list[float]] = ([], [])
        try:
            for count in range(1, MOST_ROUNDS + 1):
                for each, seconds in zip((call, base or self.subject.call), times, strict=True):
                    seconds.append(self.clock(each))
                if count >= ROUNDS and all(sorted(t)[1] <= NOISY * min(t) for t in times):
                    return min(times[0]) / min(times[1])
        except (GenesisError, MemoryError):
            pass
        return None

    def clock(self, call: Call) -> float:
        """Seconds of a call, by the clock that `seconds` is of."""
        wall = self.wall_of(call)
        return wall if self.gpu is None else self.gpu_of(call, wall) or wall

    def scaled(self, factor: float) -> tuple[float, float] | None:
        """How many times as long the call takes on inputs that many times as large, and how many times the work is."""
        try:
            made = self.subject.scaled(factor)
        except (GenesisError, MemoryError):
            return None
        if made is None or (longer := self.ratio(made[0])) is None:
            return None
        return longer, made[1]

    @cached_property
    def steps(self) -> tuple[list[_Step], float, float]:
        """The ops of a call, the seconds outside of them, and of the whole: of the quickest of three calls."""
        best: tuple[list[_Step], float, float] | None = None
        for _ in range(3):
            found: list[_Step] = []
            with observe(lambda op, i, o, a, s, found=found: found.append(_Step(op, i, o, a, s))):  # type: ignore[misc]
                start = time.perf_counter()
                self.subject.call()
                whole = time.perf_counter() - start
            if best is None or whole < best[2]:
                best = (found, whole - sum(step.seconds for step in found), whole)
        assert best is not None
        return best

    @cached_property
    def work(self) -> tuple[int, int]:
        """Bytes and FLOPs of all ops."""
        costs = [step.op.cost(step.inputs, step.outputs, step.attrs) for step in self.steps[0]]
        return sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs)

    @property
    def moved(self) -> float:
        """The share of the time that a copy of the bytes would take."""
        return self.work[0] / self.limits.bytes_per_second / self.seconds

    @property
    def multiplied(self) -> float:
        """The share that a large matrix product of the FLOPs would take; 0 where the ops are no products."""
        is_product = any(len(s.outputs) and s.op.autocast == "low_precision" for s in self.steps[0])
        rate = self.limits.flops_per_second
        return self.work[1] / rate / self.seconds if is_product and rate else 0.0

    @cached_property
    def other_size(self) -> tuple[float, float] | None:
        """At an eighth of the size, or eight times it where the call is small."""
        return self.scaled(8.0 if self.work[0] < SMALL else 1 / 8)

    @property
    def saved_when_small(self) -> float:
        """The share of the time per byte that goes when the data fits into a cache; 0 where it was not measured."""
        if self.other_size is None or self.other_size[1] > 1:
            return 0.0
        return max(1 - self.other_size[0] / self.other_size[1], 0.0)

    @cached_property
    def launches(self) -> list[Launch]:
        return [] if self.subject.device == CPU else launches_of(self.subject.call, self.subject.device)


# --- The questions ----------------------------------------------------------------------------------------------------


def _host(seen: _Examined) -> Finding | None:
    """Time in Python outside of ops, beyond what calling them costs. A graph would remove it, so no more than that."""
    steps, outside, whole = seen.steps
    outside -= len(steps) * seen.limits.call_seconds
    share = outside / whole  # of one call, whatever else the machine does in others
    if seen.gpu is not None:
        share = min(share, 1 - seen.gpu / seen.wall)
    if share < LEAST:
        return None
    evidence = f"{format_seconds(outside)} of {format_seconds(whole)} pass in Python between {len(steps)} ops"
    return Finding("host", share, evidence, "a profile with stacks shows where the host works or waits")


def _launch(seen: _Examined) -> Finding | None:
    """The fixed cost: what a CUDA graph removes; without a GPU, what stays when the inputs shrink."""
    if seen.gpu is not None:
        share = 1 - seen.gpu / seen.wall
        if share < LEAST:
            return None
        evidence = f"a CUDA graph takes {format_seconds(seen.gpu)} of {format_seconds(seen.wall)}"
        return Finding("launch", share, evidence, "capture the calls in a CUDA graph, or fuse them")
    if seen.other_size is not None:
        longer, factor = seen.other_size
        fixed, least = (factor - longer) / (factor - 1) * seen.wall, MOST_OF_IT
        evidence = f"{factor:.3g} times the work takes {longer:.2f} times as long: {format_seconds(fixed)} are fixed"
    else:
        fixed, least = len(seen.steps[0]) * seen.limits.call_seconds, LEAST
        evidence = f"calls on one element would take {format_seconds(fixed)} of {format_seconds(seen.wall)}"
    if fixed < least * seen.wall:
        return None
    return Finding("launch", fixed / seen.wall, evidence, "make fewer calls on larger tensors, or fuse several ops")


def _strides(seen: _Examined) -> Finding | None:
    """What operands without gaps save, for the ops that were given others."""
    saved, names = 0.0, list[str]()
    for op, inputs, _, attrs, _ in seen.steps[0]:
        if op.view is not None or op.mutates or not any(_jumps(x) for x in inputs):
            continue
        plain = tuple(registry["copy"](x) if _jumps(x) else x for x in inputs)
        jumping = partial(_run, op, inputs, attrs)
        ratio = seen.ratio(partial(_run, op, plain, attrs), jumping)
        saved += 0.0 if ratio is None else (1 - ratio) * seen.clock(jumping)
        names.append(op.name)
    if saved < LEAST * seen.seconds:
        return None
    evidence = f"operands of {', '.join(dict.fromkeys(names))} made contiguous save {format_seconds(saved)}"
    return Finding("strides", saved / seen.seconds, evidence, "store the operand in the order in which it is read")


def _run(op: Op, inputs: tuple[Any, ...], attrs: dict[str, Any]) -> object:
    return execute(op, inputs, dict(attrs))


def _jumps(x: Any) -> bool:
    return isinstance(x, Array) and x.size > 1 and not x.is_contiguous


def _temporaries(seen: _Examined) -> Finding | None:
    """Results that only the next op reads, and what a reference allocates inside, at the rate of a copy or more."""
    steps = [step for step in seen.steps[0] if step.op.view is None]
    made = {id(x.storage) for step in steps for x in step.outputs}
    read = {id(x.storage): x.nbytes for step in steps for x in step.inputs if isinstance(x, Array)}
    between = sum(x.nbytes for step in steps for x in step.outputs if id(x.storage) in read)
    outside = sum(size for key, size in read.items() if key not in made)
    results = sum(x.nbytes for step in steps for x in step.outputs if id(x.storage) not in read)
    extra = max(seen.work[0] - outside - results, 0) if between else 0
    share = seen.saved_when_small if extra > outside + results else 0.0
    if not between and seen.subject.device == CPU:
        hidden = peak_bytes(seen.subject.call, CPU) - results
        if hidden >= max(results, SMALL // 4):  # fresh memory, which is slower than a copy's: so the smaller call tells
            extra, share = 2 * hidden, seen.saved_when_small
    share = max(share, extra / seen.limits.bytes_per_second / seen.seconds)
    if share < LEAST:
        return None
    evidence = f"{format_bytes(extra)} of temporaries are moved beside {format_bytes(outside + results)} of operands"
    return Finding("temporaries", share, evidence, "fuse the ops, or write into one buffer with out=")


def _spills(seen: _Examined) -> Finding | None:
    """Registers that a kernel stores in local memory, where no limit is reached."""
    worst = max((each for each in seen.launches if each.resources), key=lambda e: e.resources.local, default=None)  # type: ignore[union-attr]
    if worst is None or worst.resources is None or not worst.resources.local:
        return None
    if max(seen.moved, seen.multiplied) >= MOST_OF_IT:
        return None
    evidence = f"{worst.kernel} stores {worst.resources.local} bytes per thread in local memory"
    return Finding("spills", 1 - max(seen.moved, seen.multiplied), evidence, "hold fewer values, or use more warps")


def _occupancy(seen: _Examined) -> Finding | None:
    """Places that stay empty: on a GPU twice the rows are free; on the CPU one thread is as quick as all."""
    if max(seen.moved, seen.multiplied) >= MOST_OF_IT:
        return None
    if seen.subject.device == CPU:
        return _idle_threads(seen)
    doubled = seen.scaled(2.0) if seen.on_gpu else None
    if doubled is None or doubled[0] > FREE or doubled[1] < 1.5:
        return None
    share = 2 - doubled[0]
    evidence = f"{doubled[1]:.3g} times the work takes {doubled[0]:.2f} times as long"
    most = max(seen.launches, key=lambda each: each.programs, default=None)
    if most is not None and most.resources is not None:
        taken = most.resources
        evidence += f"; {most.kernel} has {most.programs} programs for {taken.sm_count} SMs"
        if most.programs >= taken.sm_count and taken.idle < LEAST:
            return Finding("latency", share, evidence, "give the kernel independent work, or run several in one launch")
    return Finding("occupancy", share, evidence, "split the work further, or batch more rows")


def _idle_threads(seen: _Examined) -> Finding | None:
    count = threads()
    if count < 2 or (ratio := seen.ratio(_alone(seen.subject.call))) is None or ratio > 1.1:
        return None
    x = empty((512, 512), float32)
    known = seen.ratio(_alone(product := partial(_run, registry["matmul"], (x, x), {})), product)
    if known is None or known < FREE:  # now the machine has no second core for anybody
        return None
    share = 1 - (ratio - 1) / (count - 1)  # 0 where all threads help fully, 1 where none does
    evidence = f"one thread takes {ratio:.2f} of the time of {count}, and {known:.2f} for a product"
    return Finding("occupancy", share, evidence, "it runs in one thread: give it more rows")


def _alone(call: Call) -> Call:
    """The call in one thread."""

    def one() -> object:
        count = threads()
        set_threads(1)
        try:
            return call()
        finally:
            set_threads(count)

    return one


def _cache(seen: _Examined) -> Finding | None:
    """Whether the data come from a cache, or would at a smaller size."""
    if seen.gpu is not None and seen.moved > CACHED:
        with cold_calls(seen.subject.call, cast("CudaBackend", backend_for(seen.subject.device))) as sample:
            cold = measure(sample, seen.plan).fastest
        if cold > FREE * seen.gpu:
            evidence = f"{format_seconds(seen.gpu)} with its data in L2, {format_seconds(cold)} without"
            return Finding("cache", 1 - seen.gpu / cold, evidence, "a larger shape, or --cold, shows memory's cost")
    if seen.moved >= MOST_OF_IT:
        return None
    saved = seen.saved_when_small
    if saved < LEAST:
        return None
    evidence = f"an eighth of the data takes {format_share(1 - saved)} of the time per byte"
    return Finding("cache", saved, evidence, "work on pieces that fit into the cache, in the order of memory")


def _bandwidth(seen: _Examined) -> Finding | None:
    """Bytes at the rate of a copy."""
    is_cached = seen.other_size is not None and seen.other_size[1] < 1 and seen.saved_when_small < 0.1
    if seen.moved < (0.9 if is_cached else MOST_OF_IT) or seen.multiplied > seen.moved:
        return None  # what takes as long in a cache does not wait for memory
    source = ", out of a cache" if seen.moved > CACHED else ""
    evidence = f"{format_bytes(seen.work[0])} at {format_share(seen.moved)} of a copy's rate{source}"
    return Finding("bandwidth", seen.moved, evidence, "only fewer bytes help: a narrower dtype, or fusion")


def _compute(seen: _Examined) -> Finding | None:
    """Products at the rate of large ones; or arithmetic that takes as long when the data is in a cache."""
    if seen.multiplied >= MOST_OF_IT:
        evidence = f"{format_share(seen.multiplied)} of the largest product's rate"
        return Finding("compute", seen.multiplied, evidence, "only fewer FLOPs or a narrower dtype help")
    if seen.other_size is None:
        return None
    longer, factor = seen.other_size
    if not 0.7 < longer / factor < 1.5:
        return None
    evidence = f"{factor:.3g} times the work takes {longer:.2f} times as long, in a cache or not"
    advice = "fewer or cheaper operations per element help; moving less does not"
    return Finding("compute", 1 - seen.moved, evidence, advice)
