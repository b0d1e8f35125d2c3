"""`genesis bench-model`: the cases of a request measured, in one process or in ranks, and the tables about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from genesis import cuda
from genesis.backend import CPU
from genesis.dtypes import as_dtype
from genesis.errors import DeviceError, OutOfMemoryError
from genesis.measure.collectives import StepTimes, collective_table
from genesis.measure.limits import Limits, limits_of, wait_for
from genesis.measure.record import Column, Failure, Table, table
from genesis.measure.timing import Timing
from genesis.train.ranks import ALONE, FIRST_STEPS_S, Ranks
from genesis.train.state import TrainState
from genesis_cli.measured import show_progress
from genesis_cli.session.bench import steps, versus
from genesis_cli.session.bench.steps import Memory, Notify, Parts, Request
from genesis_cli.session.profiling import subject_of
from genesis_models.blocks import CausalLM

PHASES = ("forward", "backward", "optimizer")
NO_ROOM = "one rank alone has no room for it, so its scaling is not known"
WATCHED_STEPS = {"cpu": 5, "cuda": 20}  # whose collectives are timed


@dataclass
class Case:
    """Steps on batches of one size, measured in one process or in ranks.

    Attributes:
        batch, length: of a rank's batch.
        step: wall time of a step as `genesis train` takes it: on a GPU a captured one, in ranks the slowest rank's.
        by_rank: seconds of a step on each rank.
        memory: of each rank.
        parts: of recorded steps; None in ranks, and where recording failed.
        times: the collectives of a step; None in one process.
        scaling: tokens a second of a rank over those of one process alone; None if that is unknown.
    """

    batch: int
    length: int
    step: Timing
    by_rank: list[float]
    memory: list[Memory]
    flops: int
    limits: Limits
    parts: Parts | None = None
    times: StepTimes | None = None
    scaling: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Batch and length."""
        return f"{self.batch}x{self.length}"

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return len(self.by_rank) * self.batch * self.length / self.step.seconds

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase: its share of recorded steps times the step's."""
        parts = self.parts
        return {} if parts is None else {k: s / parts.seconds * self.step.seconds for k, s in parts.phases.items()}

    def over(self, rate: float | None) -> float | None:
        """FLOPs a second of a rank over a rate: model FLOP utilization."""
        return self.flops / self.step.seconds / rate if rate else None


def bench_model(
    request: Request, limits: Limits, notify: Notify = print, ranks: Ranks = ALONE
) -> Iterator[Case | Failure]:
    """Measure each case of a model with random weights: a call of all ranks.

    Raises:
        GenesisError: in ranks, where a case that fails ends the job, because other ranks wait in it.
    """
    model = steps.trained_model(request.config, request.device, request.settings)

    def measured(batch: int, length: int) -> Case:
        with ranks.during(f"measuring {batch}x{length}", FIRST_STEPS_S):
            return measured_case(model, batch, length, request, limits, ranks)

    return steps.each_case(request, model, measured, notify, ranks)


def measured_case(
    model: CausalLM, batch: int, length: int, request: Request, limits: Limits, ranks: Ranks = ALONE
) -> Case:
    """Take steps of one size with a new optimizer: first unwatched, then recorded or, in ranks, their collectives."""
    device, notes, state = request.device, list[str](), steps.new_state(model, batch, length, ranks)
    steps.forget_graphs(device)
    if device != CPU:
        cuda.reset_peak_memory_stats(device)
    take = steps.taking(state, device, notes)
    step, by_rank = steps.timed(take, wait_for(device), ranks, request.settings.plan)
    take.finish()
    del take
    memory, flops = steps.memory_of(state, device), steps.step_flops(model.config, batch, length)
    case = Case(batch, length, step, by_rank, memory, flops, limits, notes=notes)
    if ranks.size > 1:
        count = WATCHED_STEPS[device.type]
        case.times = steps.timed_collectives(state, device, lambda: steps.taking(state, device, []), count)
    else:
        case.parts = _parts(state, limits, notes)
    return case


def _parts(state: TrainState, limits: Limits, notes: list[str]) -> Parts | None:
    """Records and divides steps; None with a note where that fails."""
    failed = list[str]()
    steps.forget_graphs(limits.device)
    take = steps.Steps(state, limits.device, failed)
    subject = subject_of(state, limits.device, take.on_device, tuple, lambda batches: take())
    try:
        found = steps.recorded_parts(subject, limits)
        if found is not None and not failed:
            return found
        notes.append("no phases and ops: a step cannot be captured")
    except (DeviceError, OutOfMemoryError) as error:
        notes.append(f"no phases and ops: {error.what}")
    return None


# --- Growth -----------------------------------------------------------------------------------------------------------


def growths(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Rows that compare each case with the next larger one along the batch and along the length."""
    rows = []
    for small in cases:
        for axis, fixed in (("batch", "length"), ("length", "batch")):
            larger = [c for c in cases if getattr(c, fixed) == getattr(small, fixed) and c.flops > small.flops]
            for large in sorted(larger, key=lambda c: c.flops)[:1]:
                ratio = small.tokens_per_second / large.tokens_per_second
                ends = {"before": small.label, "case": large.label}
                rows.append({"axis": axis, **ends, "ratio": ratio, "seconds": large.step.seconds})
    return rows


# --- Tables -----------------------------------------------------------------------------------------------------------

CASE = Column("case", "case", "text", "Rows x tokens of a rank's batch.", "label")
STEPS = [
    CASE,
    Column("step", "step", "s", "Median wall time of a step, as `genesis train` takes it.", "step.seconds"),
    Column("half_width", "±", "share", "Half of the median's 95 % confidence interval.", "step.half_width"),
    *(Column(n, n, "s", f"Time of {n}: its share of recorded steps.", f"phases.{n}") for n in PHASES),
    Column("tokens_per_second", "tokens/s", "token/s", "Trained tokens a second, of all ranks."),
    Column("scaling", "of one rank", "share", "Tokens/s of a rank as a share of one process alone."),
    Column("flops_per_second", "FLOP/s", "FLOP/s", f"Of a rank, by {steps.FORMULA}.",
           lambda c: c.flops / c.step.seconds),
    Column("mfu", "MFU", "share", "FLOP/s over the measured matmul's.", lambda c: c.over(c.limits.flops_per_second)),
    Column("mfu_sheet", "of the sheet", "share", "FLOP/s over the data sheet's peak.",
           lambda c: c.over(c.limits.data_sheet)),
    Column("exposed", "exposed", "s", "Time in which a step waits for collectives.",
           lambda c: c.times and sum(each.exposed for each in c.times.collectives)),
    Column("computing", "computing", "s", "Time until a rank first waits, after forward and backward.",
           "times.computing"),
    Column("peak", "memory", "bytes", "Peak memory, of the rank with the most.",
           lambda c: max(each.peak for each in c.memory)),
    Column("is_noisy", "note", "text", "Whether the machine was not quiet.", "step.note"),
]  # fmt: skip
MEMORY = [
    CASE,
    *(Column(n, n, "bytes", f"Bytes of {n}.", f"memory.0.{n}") for n in ("weights", "gradients", "optimizer")),
    Column("rest", "activations, workspace", "bytes", "At the peak.", "memory.0.rest"),
    Column("peak", "peak", "bytes", "The most at one time.", "memory.0.peak"),
]
GROWTH = [
    Column("axis", "grows", "text", "What grows."),
    Column("before", "from", "text", "The smaller case."),
    Column("case", "to", "text", "The larger case."),
    Column("ratio", "time of a token", "ratio", "Over that of the smaller case."),
    Column("seconds", "step", "s", "Time of a step of the larger case."),
]
RANKS = [
    Column("rank", "rank", "count", "Number of the rank.", "0"),
    Column("seconds", "step", "s", "Median of its own steps.", "1"),
    Column("peak", "memory", "bytes", "The most at one time.", "2.peak"),
]


def step_tables(cases: Sequence[Case]) -> list[Table]:
    """The tables about the steps of one process or of ranks; the last ones are about the largest case."""
    most = max(cases, key=lambda c: (c.batch * c.length, c.length))
    count, notes = len(most.by_rank), dict.fromkeys(note for case in cases for note in case.notes)
    if count == 1:
        memory, growth = table("memory", "memory", MEMORY, cases), table("growth", "growth", GROWTH, growths(cases))
        found = [table("steps", "", STEPS, cases, notes=notes), memory, growth]
        return found if most.parts is None else [*found, steps.ops_table(most.parts, most.label)]
    each = zip(range(count), most.by_rank, most.memory, strict=True)
    found = [
        table("ranks", f"{count} ranks, each with a batch of its own", STEPS, cases, notes=notes),
        table("each", f"each rank, {most.label}", RANKS, each),
    ]
    return [*found, collective_table(most.times, count, most.step.seconds)] if most.times else found


# --- The whole --------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """The results of a request, complete or interrupted."""

    request: Request
    limits: Limits
    cases: list[Any] = field(default_factory=list)  # Case, or Generation
    shared: list[Case] = field(default_factory=list)  # of ranks
    failures: list[Failure] = field(default_factory=list)
    peers: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False

    def tables(self) -> list[Table]:
        """The tables of the report."""
        ranks = len(self.shared[0].by_rank) if self.shared else 1
        if self.request.settings.new:
            found = [steps.generation_table(self.cases)] if self.cases else []
            return found + [steps.ops_table(c.parts, c.label) for c in self.cases if c.parts is not None]
        found = [each for cases in (self.cases, self.shared) if cases for each in step_tables(cases)]
        return [*found, versus.peers_table(self.peers, ranks)] if self.peers else found

    def compare_with_one(self) -> None:
        """Set the scaling of ranks. A case for which one process has no room gets a note and is not a failure."""
        alone = {each.label: each for each in self.cases}
        full = [each for each in self.failures if each.exit_code == OutOfMemoryError.exit_code]
        for case in self.shared:
            if one := alone.get(case.label):
                case.scaling = case.tokens_per_second / len(case.by_rank) / one.tokens_per_second
            elif any(each.label == case.label for each in full):
                case.notes.append(f"{case.label}: {NO_ROOM}")
        if self.shared:
            self.failures = [each for each in self.failures if each not in full]


def measure_model(request: Request, ranks: Ranks = ALONE) -> Measured:
    """All ranks measure each case together, the first does so alone, and all compare with torch.

    On a terminal stderr shows the progress. Only the first rank has all of it.
    """
    device, dtype = request.device, as_dtype(request.settings.dtype)
    rates = list(vars(limits_of(device, dtype)).values())[2:] if ranks.is_main else None
    limits = Limits(device, dtype, *ranks.from_main("limits", rates))
    measured, notify = Measured(request, limits), show_progress if ranks.is_main else lambda text: None
    try:
        if ranks.size > 1:
            measured.shared += cast("Iterator[Case]", bench_model(request, limits, notify, ranks))
        if ranks.is_main:
            alone = steps.bench_generation if request.settings.new else bench_model
            for each in alone(request, limits, notify):
                if isinstance(each, Failure):
                    measured.failures.append(each)
                else:
                    measured.cases.append(each)
            measured.compare_with_one()
        ranks.barrier("one rank's steps")
        times = [(case.step.seconds, max(each.peak for each in case.memory)) for case in measured.shared]
        for row in versus.versus_torch(request, notify, ranks, times):
            measured.peers.append(row)
    except KeyboardInterrupt:
        if not measured.cases or ranks.size > 1:
            raise
        measured.interrupted = True
    finally:
        notify("")
    return measured
