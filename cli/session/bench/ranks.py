"""Steps of several ranks, each with a batch of its own: data parallel with ZeRO-1, compared with one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple, cast

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.errors import OutOfMemoryError
from genesis.measure.collectives import StepTimes, collective_table
from genesis.measure.limits import wait_for
from genesis.measure.record import Column, Failure, Table, table
from genesis.measure.timing import Plan, Timing, of_wall, summarize
from genesis.train.config import OptimConfig
from genesis.train.ranks import FIRST_STEPS_S, Ranks
from genesis.train.state import TrainState
from genesis_cli.session.bench.model import NOISY, STEP, SURE, Case, trained_model
from genesis_cli.session.bench.steps import (
    LR,
    OPTIMIZER,
    Memory,
    Settings,
    forget,
    host_memory,
    lasting,
    new_state,
    step_flops,
    taking,
)
from genesis_cli.session.collectives import forget_graphs, mean_of_ranks, timed_collectives
from genesis_cli.session.dry_run import PlannedRanks, memory_plan
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig

LEAST_STEPS, MOST_STEPS = 10, 500
NO_ROOM = "one rank alone has no room for it, so that its scaling is not known"
WATCHED_STEPS = {"cpu": 5, "cuda": 20}  # whose collectives are timed


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
    alone: Case | None = None
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
    model = trained_model(config, device, settings)
    for batch, length in cases:
        tell(f"{ranks.size} ranks: {batch}x{length}")
        with ranks.during(f"measuring {batch}x{length}", FIRST_STEPS_S):
            found = _measured(new_state(model, batch, length, ranks), device, rate, settings)
        forget(model, device)
        yield found


def with_scaling(found: Iterable[SharedCase], alone: Iterable[Case | Failure]) -> list[SharedCase]:
    """The cases compared with those of one rank, or with a note that one rank has no room for them."""
    of_one = {each.label: each for each in alone}
    return [_compared(case, of_one.get(case.label)) for case in found]


def _compared(case: SharedCase, one: Case | Failure | None) -> SharedCase:
    if isinstance(one, Case):
        return replace(case, scaling=case.tokens_per_second / case.ranks / one.tokens_per_second, alone=one)
    if one is not None and has_no_room(one):
        return replace(case, notes=[*case.notes, f"{case.label}: {NO_ROOM}"])
    return case


def has_no_room(failure: Failure) -> bool:
    """Whether it failed for want of memory, which is no fault of a case that several ranks have taken."""
    return failure.exit_code == OutOfMemoryError.exit_code


def _measured(state: TrainState, device: Device, rate: float | None, settings: Settings) -> SharedCase:
    ranks, notes, config = state.ranks, list[str](), cast(CausalLM, state.model).config
    batch, length = state.loader.batch_size, state.loader.seq_len
    forget_graphs(device)
    if device != CPU:
        cuda.reset_peak_memory_stats(device)
    by_step = timed(taking(state, device, notes), wait_for(device), ranks, settings.plan)
    memory = _of_ranks(_memory(state, device, settings), ranks)
    times = mean_of_ranks(collective_times(state, device, WATCHED_STEPS[device.type]), ranks)
    return SharedCase(
        batch,
        length,
        ranks.size,
        summarize([max(each) for each in by_step], 1, settings.plan.precision),
        [median(own) for own in zip(*by_step, strict=True)],
        times,
        memory,
        step_flops(config, batch, length),
        rate,
        notes=notes,
    )


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


def _memory(state: TrainState, device: Device, settings: Settings) -> Memory:
    """Of this rank; rank 0 has the plan."""
    ranks = state.ranks
    if device == CPU:
        return host_memory(state)
    peak, planned = cuda.max_memory_allocated(device), None
    if ranks.is_main:
        planned = memory_plan(
            cast(CausalLM, state.model).config,
            device,
            batch=state.loader.batch_size,
            length=state.loader.seq_len,
            accumulation_steps=ranks.size,
            activation_checkpointing=settings.checkpointing,
            dtype=settings.dtype,
            optim=OptimConfig(name=OPTIMIZER, lr=LR),
            ranks=PlannedRanks(ranks.size, is_in_stream_order=ranks.group.is_in_stream_order),
        ).total
    return Memory(**lasting(state), peak=peak, planned=planned)


def _of_ranks(own: Memory, ranks: Ranks) -> list[Memory]:
    """That of all ranks; each has rank 0's plan."""
    names = ("weights", "gradients", "optimizer", "peak")
    numbers, planned = ranks.in_turn([getattr(own, name) for name in names]), ranks.from_main("plan", own.planned)
    return [
        Memory(**dict(zip(names, map(int, numbers[rank :: ranks.size]), strict=True)), planned=planned)
        for rank in range(ranks.size)
    ]


# --- Tables -----------------------------------------------------------------------------------------------------------

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
    Column("rank", "rank", "count", "Number of the rank.", lambda r: r.number),
    Column("seconds", "step", "s", "Median of its own steps.", lambda r: r.seconds),
    Column("peak", "memory", "bytes", "The most at one time.", lambda r: r.memory.peak),
    Column("planned", "planned", "bytes", "Planned peak.", lambda r: r.memory.planned),
]


class _Rank(NamedTuple):
    number: int
    seconds: float
    memory: Memory


def shared_tables(cases: Sequence[SharedCase]) -> list[Table]:
    """The tables of a report about ranks: all cases, then ranks and collectives of the largest."""
    if not cases:
        return []
    largest = max(cases, key=lambda c: (c.batch * c.length, c.length))
    ranks = [_Rank(n, *each) for n, each in enumerate(zip(largest.rank_seconds, largest.memory, strict=True))]
    found = [
        table("ranks", f"{largest.ranks} ranks, each with a batch of its own", SHARED, cases),
        table("each", f"each rank, {largest.label}", RANKS, ranks),
    ]
    found[0].notes += dict.fromkeys(note for case in cases for note in case.notes)
    if largest.times.collectives:
        found.append(collective_table(largest.times, largest.ranks, largest.step.seconds))
    return found
