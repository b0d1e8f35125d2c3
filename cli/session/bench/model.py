"""`genesis bench-model`: for each batch and length a step of one rank or several, and what growing costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple, cast

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.dtypes import as_dtype
from genesis.errors import DeviceError, OutOfMemoryError
from genesis.measure.collectives import StepTimes, collective_table
from genesis.measure.limits import Limits, limits_of, wait_for
from genesis.measure.record import Column, Failure, Table, table
from genesis.measure.timing import Plan, Timing, measure, of_wall, summarize
from genesis.train.ranks import FIRST_STEPS_S, Ranks
from genesis.train.state import TrainState
from genesis_cli.measured import show_progress
from genesis_cli.session.bench import versus
from genesis_cli.session.bench.steps import (
    FORMULA,
    Drawing,
    Generation,
    Memory,
    OpShare,
    Parts,
    Settings,
    Steps,
    bench_generation,
    each_case,
    forget,
    generation_table,
    memory_of,
    new_state,
    planned_peak,
    recorded_parts,
    step_flops,
    taking,
    trained_model,
)
from genesis_cli.session.collectives import forget_graphs, mean_of_ranks, timed_collectives
from genesis_cli.session.profiling import subject_of
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig

LISTED = 12  # ops of a step; the others are added up
PHASES = ("forward", "backward", "optimizer")
LEAST_STEPS, MOST_STEPS = 10, 500  # that ranks take together
NO_ROOM = "one rank alone has no room for it, so that its scaling is not known"
WATCHED_STEPS = {"cpu": 5, "cuda": 20}  # whose collectives are timed


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
    """Measure each (batch, length) of a model with random weights; `tell` is called with what is measured next."""
    model = trained_model(config, limits.device, settings)

    def measured(batch: int, length: int) -> Case:
        return measured_case(model, batch, length, limits, settings)

    return each_case("step", model, limits.device, cases, measured, tell)


def measured_case(model: CausalLM, batch: int, length: int, limits: Limits, settings: Settings) -> Case:
    """Take steps of one size, with an optimizer of their own: first unwatched, then recorded."""
    device, notes = limits.device, list[str]()
    state = new_state(model, batch, length)
    take = _begun(state, device, notes)
    step = measure(of_wall(take, wait_for(device)), settings.plan)
    take.finish()
    del take
    memory = memory_of(state, device, settings)
    flops = step_flops(model.config, batch, length)
    return Case(batch, length, step, memory, _parts(state, limits, notes), flops, limits.flops_per_second, notes)


def _begun(state: TrainState, device: Device, notes: list[str]) -> Steps:
    """What takes steps, whose memory counts from here on."""
    forget_graphs(device)
    if device != CPU:
        cuda.reset_peak_memory_stats(device)
    return taking(state, device, notes)


def _parts(state: TrainState, limits: Limits, notes: list[str]) -> Parts | None:
    """Recorded steps, divided; None with a note where that fails."""
    failed = list[str]()
    forget_graphs(limits.device)  # the graphs of steps before refer to themselves
    take = Steps(state, limits.device, failed)
    subject = subject_of(state, limits.device, take.on_device, tuple, lambda batches: take())
    try:
        found = recorded_parts(subject, limits)
        if found is not None and not failed:
            return found
        notes.append("no phases and ops: a step cannot be captured")
    except (DeviceError, OutOfMemoryError) as error:
        notes.append(f"no phases and ops: {error.what}")
    return None


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
        for axis in ("batch", "length"):
            larger = [c for c in _along(axis, small, cases) if getattr(c, axis) > getattr(small, axis)]
            if larger:
                next_ = min(larger, key=lambda c: getattr(c, axis))
                ratio = small.tokens_per_second / next_.tokens_per_second
                found.append(Growth(axis, small.label, next_.batch, next_.length, ratio, next_.step.seconds))
    for axis, rows, longer in (("batch", 2, 1), ("length", 1, 2)) if cases else ():
        largest = _largest(cases)
        batch, length = rows * largest.batch, longer * largest.length
        if length > config.packed_length:
            continue
        smaller = [c for c in _along(axis, largest, cases) if c.flops < largest.flops]
        per_flop = largest.step.seconds / largest.flops
        if smaller:
            before = max(smaller, key=lambda c: c.flops)
            growth = (largest.step.seconds - before.step.seconds) / (largest.flops - before.flops)
            per_flop = growth if growth > 0 else per_flop  # else noise hides what growth costs
        seconds = largest.step.seconds + per_flop * (step_flops(config, batch, length) - largest.flops)
        more = largest.memory.rest  # activations grow with the tokens
        if largest.memory.planned is not None:
            more = planned_peak(config, device, batch, length, settings) - largest.memory.planned
        ratio = seconds * largest.tokens_per_second / (batch * length)
        memory = largest.memory.peak + more
        found.append(Growth(axis, largest.label, batch, length, ratio, seconds, memory, room_of(device)))
    return found


def _along(axis: str, one: Case, cases: Sequence[Case]) -> list[Case]:
    """Those that differ from one along the axis alone."""
    fixed = "length" if axis == "batch" else "batch"
    return [c for c in cases if getattr(c, fixed) == getattr(one, fixed)]


def _largest(cases: Sequence[Any]) -> Any:
    return max(cases, key=lambda c: (c.batch * c.length, c.length))


def room_of(device: Device) -> int:
    """Bytes that a run may take: on a GPU what is free and what is held already, on the CPU all memory."""
    if device == CPU:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return cuda.mem_get_info(device)[0] + cuda.memory_reserved(device)


# --- Ranks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedCase:
    """Steps that ranks take together.

    Attributes:
        step: of each step the slowest rank's time; all begin at once.
        rank_seconds: of each rank, the median of its own steps.
        times: of further steps whose collectives were timed, the mean of ranks.
        memory: of each rank.
        scaling: tokens a second of a rank as a share of those of one rank alone; None where that failed.
    """

    batch: int
    length: int
    ranks: int
    step: Timing
    rank_seconds: list[float]
    times: StepTimes
    memory: list[Memory]
    flops: int
    rate: float | None
    scaling: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Batch and length of a rank for people."""
        return f"{self.batch}x{self.length}"

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.ranks * self.batch * self.length / self.step.seconds


def shared_cases(
    config: ModelConfig,
    cases: Iterable[tuple[int, int]],
    device: Device,
    rate: float | None,
    settings: Settings,
    ranks: Ranks,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[SharedCase]:
    """Measure each (batch, length): a call of all ranks.

    Args:
        device: this rank's.
        rate: FLOPs a second of a large matmul there; rank 0's is reported.
        tell: called with what is measured next.

    Raises:
        GenesisError: a rank cannot take the steps, which ends the job: the others wait for it in theirs.
    """
    model, wait = trained_model(config, device, settings), wait_for(device)
    for batch, length in cases:
        tell(f"{ranks.size} ranks: {batch}x{length}")
        with ranks.during(f"measuring {batch}x{length}", FIRST_STEPS_S):
            state, notes = new_state(model, batch, length, ranks), list[str]()
            by_step = timed(_begun(state, device, notes), wait, ranks, settings.plan)
            step = summarize([max(each) for each in by_step], 1, settings.plan.precision)
            own, memory = [median(own) for own in zip(*by_step, strict=True)], _of_ranks(state, device, settings)
            times = mean_of_ranks(collective_times(state, device, WATCHED_STEPS[device.type]), ranks)
            flops = step_flops(config, batch, length)
            found = SharedCase(batch, length, ranks.size, step, own, times, memory, flops, rate, notes=notes)
            del state
        forget(model, device)
        yield found


def with_scaling(found: Iterable[SharedCase], alone: Iterable[Case | Failure]) -> list[SharedCase]:
    """The cases compared with those of one rank, or with a note that one rank has no room for them."""
    of_one = {each.label: each for each in alone}
    return [_compared(case, of_one.get(case.label)) for case in found]


def _compared(case: SharedCase, one: Case | Failure | None) -> SharedCase:
    if isinstance(one, Case):
        return replace(case, scaling=case.tokens_per_second / case.ranks / one.tokens_per_second)
    if one is not None and has_no_room(one):
        return replace(case, notes=[*case.notes, f"{case.label}: {NO_ROOM}"])
    return case


def has_no_room(failure: Failure) -> bool:
    """Whether it failed for want of memory, which is no fault of a case that several ranks have taken."""
    return failure.exit_code == OutOfMemoryError.exit_code


def timed(take: Callable[[], object], wait: Callable[[], object], ranks: Ranks, plan: Plan) -> list[tuple[float, ...]]:
    """Seconds of each step on each rank; all begin a step together."""

    def launch() -> None:
        take()
        ranks.launched()  # before the wait, which has no end where another rank is gone

    sample = of_wall(launch, wait)
    first = max(ranks.in_turn([min(sample(1) for _ in range(2))]))
    count = min(max(round(plan.seconds / first), LEAST_STEPS), MOST_STEPS)
    own = list[float]()
    for _ in range(count):
        ranks.barrier("a step")
        own.append(sample(1))
        ranks.took(own[-1])
    every = ranks.in_turn(own)  # step by step
    return list(zip(*[iter(every)] * ranks.size, strict=True))


def collective_times(state: TrainState, device: Device, count: int) -> StepTimes:
    """Medians of this rank over `count` further steps: a call of all ranks. On a GPU they are captured once more."""
    return timed_collectives(state, device, lambda: taking(state, device, []), count)


def _of_ranks(state: TrainState, device: Device, settings: Settings) -> list[Memory]:
    """Of all ranks; each has rank 0's plan."""
    own, ranks, names = memory_of(state, device, settings), state.ranks, ("weights", "gradients", "optimizer", "peak")
    numbers, planned = ranks.in_turn([getattr(own, name) for name in names]), ranks.from_main("plan", own.planned)
    each = [dict(zip(names, map(int, numbers[rank :: ranks.size]), strict=True)) for rank in range(ranks.size)]
    return [Memory(**one, planned=planned) for one in each]


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


SHARED = [
    Column("case", "case", "text", "Rows x tokens of a rank's batch.", lambda c: c.label),
    STEP,
    SURE,
    Column("tokens_per_second", "tokens/s", "token/s", "Of all ranks.", lambda c: c.tokens_per_second),
    Column("scaling", "of one rank", "share", "Tokens/s of a rank as a share of one rank alone.", lambda c: c.scaling),
    Column("mfu", "MFU", "share", "Of a rank: FLOP/s as a share of the measured matmul's.",
           lambda c: None if c.rate is None else c.flops / c.step.seconds / c.rate),
    Column("exposed", "exposed", "s", "Time in which a step waits for collectives.",
           lambda c: sum(each.exposed for each in c.times.collectives)),
    Column("computing", "computing", "s", "Time until a rank first waits, with forward and backward done.",
           lambda c: c.times.computing),
    Column("peak", "memory", "bytes", "Of the rank with the most.", lambda c: max(each.peak for each in c.memory)),
    NOISY,
]  # fmt: skip
RANKS = [
    Column("rank", "rank", "count", "Number of the rank.", lambda r: r[0]),
    Column("seconds", "step", "s", "Median of its own steps.", lambda r: r[1]),
    Column("peak", "memory", "bytes", "The most at one time.", lambda r: r[2].peak),
    Column("planned", "planned", "bytes", "Planned peak.", lambda r: r[2].planned),
]


def model_tables(config: ModelConfig, cases: Sequence[Case], settings: Settings, device: Device) -> list[Table]:
    """The tables of a report about training steps."""
    if not cases:
        return []
    largest = _largest(cases)
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


def shared_tables(cases: Sequence[SharedCase]) -> list[Table]:
    """The tables of a report about ranks: all cases, then ranks and collectives of the largest."""
    if not cases:
        return []
    largest = _largest(cases)
    ranks = zip(range(largest.ranks), largest.rank_seconds, largest.memory, strict=True)
    found = [
        table("ranks", f"{largest.ranks} ranks, each with a batch of its own", SHARED, cases),
        table("each", f"each rank, {largest.label}", RANKS, ranks),
    ]
    found[0].notes += dict.fromkeys(note for case in cases for note in case.notes)
    if largest.times.collectives:
        found.append(collective_table(largest.times, largest.ranks, largest.step.seconds))
    return found


# --- The whole --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        cases: (batch, length).
        settings: of training steps, or of generation.
        recipes: of torch, to compare with; none without --vs.
        python: the interpreter that has torch; None means this one.
    """

    config: ModelConfig
    cases: list[tuple[int, int]]
    device: Device
    settings: Settings | Drawing
    recipes: tuple[str, ...] = ()
    python: str | None = None


@dataclass
class Measured:
    """What was measured, also of a run that was interrupted."""

    limits: Limits
    cases: list[Any] = field(default_factory=list)  # Case, or Generation
    shared: list[SharedCase] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    peers: list[versus.PeerStep] = field(default_factory=list)
    interrupted: bool = False

    def tables(self, request: Request) -> list[Table]:
        """The tables of the report."""
        if isinstance(request.settings, Drawing):
            parts = [(each.label, each.parts) for each in self.cases if each.parts is not None]
            ops = [ops_table(each, f"ops of a step, {label}") for label, each in parts]
            return [generation_table(self.cases), *ops] if self.cases else []
        found = model_tables(request.config, self.cases, request.settings, request.device) + shared_tables(self.shared)
        ranks = self.shared[0].ranks if self.shared else 1
        return [*found, versus.peers_table(self.peers, ranks)] if self.peers else found

    def add(self, request: Request) -> None:
        """Measure every case on one rank."""
        given: Any = request.config, request.cases, self.limits, request.settings, show_progress
        found: Iterable[Case | Generation | Failure] = (
            bench_generation(*given) if isinstance(request.settings, Drawing) else bench_model(*given)
        )
        for each in found:
            if isinstance(each, Failure):
                self.failures.append(each)
            else:
                self.cases.append(each)


def limits_for(request: Request) -> Limits:
    """Of the device and the type of weights."""
    settings = request.settings
    return limits_of(request.device, as_dtype(settings.built if isinstance(settings, Drawing) else settings.dtype))


def measure_alone(request: Request) -> Measured:
    """Every case, and then each recipe of torch; on a terminal stderr shows how far it is."""
    measured, recipes = Measured(limits_for(request)), request.recipes
    try:
        measured.add(request)
        if recipes:
            given: Any = (request.config, request.cases, measured.limits, request.settings, recipes, request.python)
            given += (show_progress,)
            for step in versus.versus_torch(*given):
                measured.peers.append(step)
    except KeyboardInterrupt:
        if not measured.cases:
            raise
        measured.interrupted = True
    finally:
        show_progress("")
    return measured


def measured_by(request: Request, ranks: Ranks) -> Measured | None:
    """What all ranks do together, then (on rank 0, alone) what one does; None on the others."""
    config, cases, device, settings = request.config, request.cases, request.device, cast(Settings, request.settings)
    measured = Measured(limits_for(request)) if ranks.is_main else None
    ranks.barrier("limits")
    rate = None if measured is None else measured.limits.flops_per_second
    tell = show_progress if ranks.is_main else (lambda text: None)
    try:
        shared = list(shared_cases(config, cases, device, rate, settings, ranks, tell))
        times = [(each.step.seconds, max(memory.peak for memory in each.memory)) for each in shared]
        peers = versus.versus_ranks(
            config, cases, times, device, settings, request.recipes, ranks, request.python, tell
        )
        found = list(peers)
        if measured is not None:
            measured.add(request)
            measured.shared = with_scaling(shared, [*measured.cases, *measured.failures])
            measured.failures = [each for each in measured.failures if not has_no_room(each)]
            measured.peers = found
    finally:
        tell("")
    ranks.barrier("one rank's steps")
    return measured
