"""Steps of several ranks measured: for each batch and length how long all of them take together, and each one's memory.

All ranks take the same number of steps, which rank 0 chooses, and begin each of them together. Rank 0 measures alone
what one rank does; that is `measuring.py`, after the steps of all, because it changes rank 0's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any, cast

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.errors import OutOfMemoryError
from genesis.measure.collectives import StepTimes
from genesis.measure.limits import wait_for
from genesis.measure.timing import Plan, of_wall, summarize
from genesis.profile.collective_table import collective_rows
from genesis.profile.schema import Failure, Time
from genesis.train.config import OptimConfig
from genesis.train.ranks import FIRST_STEPS_S, Ranks
from genesis.train.state import TrainState
from genesis_cli.session.bench.cases import step_flops
from genesis_cli.session.bench.measuring import Settings, forget, host_memory, lasting
from genesis_cli.session.bench.schema import Memory, Row, SharedStep
from genesis_cli.session.bench.steps import LR, OPTIMIZER, new_state, taking
from genesis_cli.session.collectives import forget_graphs, mean_of_ranks, timed_collectives
from genesis_cli.session.dry_run import PlannedRanks, memory_plan
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.registry import build

LEAST_STEPS, MOST_STEPS = 10, 500
NO_ROOM = "one rank alone has no room for it, so that its scaling is not known"
WATCHED_STEPS = {"cpu": 5, "cuda": 20}  # whose collectives are timed


def shared_steps(
    config: ModelConfig,
    cases: Iterable[tuple[int, int]],
    device: Device,
    peak_rate: float | None,
    settings: Settings,
    ranks: Ranks,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[SharedStep]:
    """A row for each (batch, length), in order: a call of all ranks.

    Args:
        device: this rank's.
        peak_rate: FLOPs a second of a large matmul there; rank 0's is reported.
        tell: called with what is measured next.

    Raises:
        GenesisError: a rank cannot take the steps, which ends the job: the others wait for it in theirs.
    """
    model = build(config, seed=0, device=str(device), dtype=settings.dtype)
    model.activation_checkpointing = settings.checkpointing
    model.train()
    for batch, length in cases:
        tell(f"{ranks.size} ranks: {batch}x{length}")
        with ranks.during(f"measuring {batch}x{length}", FIRST_STEPS_S):
            found = _measured(new_state(model, batch, length, ranks), device, peak_rate, settings)
        forget(model, device)
        yield found


def with_scaling(found: Iterable[SharedStep], alone: Iterable[Row | Failure], size: int) -> list[SharedStep]:
    """The rows of `size` ranks, compared with those of one, or with a note that one has no room for the case."""
    of_one = {each.label: each for each in alone}
    return [row.model_copy(update=_compared(row, of_one.get(row.label), size)) for row in found]


def _compared(row: SharedStep, one: Row | Failure | None, size: int) -> dict[str, Any]:
    if isinstance(one, Row):
        return {"scaling": row.tokens_per_second / size / one.tokens_per_second}
    if one is not None and has_no_room(one):
        return {"notes": [*row.notes, f"{row.label}: {NO_ROOM}"]}
    return {}


def has_no_room(failure: Failure) -> bool:
    """Whether it failed for want of memory, which is no fault of a case that several ranks have taken."""
    return failure.exit_code == OutOfMemoryError.exit_code


def _measured(state: TrainState, device: Device, peak_rate: float | None, settings: Settings) -> SharedStep:
    ranks, notes, config = state.ranks, list[str](), cast(CausalLM, state.model).config
    batch, length = state.loader.batch_size, state.loader.seq_len
    forget_graphs(device)
    if device != CPU:
        cuda.reset_peak_memory_stats(device)
    by_step = timed(taking(state, device, notes), wait_for(device), ranks, settings.plan)
    step = Time.of(summarize([max(each) for each in by_step], 1, settings.plan.precision))
    memory = _of_ranks(_memory(state, device, settings), ranks)
    flops = step_flops(config, batch, length)
    times = mean_of_ranks(collective_times(state, device, WATCHED_STEPS[device.type]), ranks)
    return SharedStep(
        batch=batch,
        length=length,
        step=step,
        rank_seconds=[median(times) for times in zip(*by_step, strict=True)],
        is_captured=device != CPU and not notes,
        tokens_per_second=ranks.size * batch * length / step.seconds,
        flops_per_second=ranks.size * flops / step.seconds,
        mfu=None if peak_rate is None else flops / step.seconds / peak_rate,
        memory=memory,
        collectives=collective_rows(times, ranks.size),
        computing=times.computing,
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
    """Of this rank."""
    ranks = state.ranks
    if device == CPU:
        return host_memory(state)
    peak, planned = cuda.max_memory_allocated(device), None
    if ranks.is_main:
        plan = memory_plan(
            cast(CausalLM, state.model).config,
            device,
            batch=state.loader.batch_size,
            length=state.loader.seq_len,
            accumulation_steps=ranks.size,
            activation_checkpointing=settings.checkpointing,
            dtype=settings.dtype,
            optim=OptimConfig(name=OPTIMIZER, lr=LR),
            ranks=PlannedRanks(ranks.size, is_in_stream_order=ranks.group.is_in_stream_order),
        )
        planned = plan.parts
    return Memory(**lasting(state), peak=peak, planned=planned)


def _of_ranks(own: Memory, ranks: Ranks) -> list[Memory]:
    """That of all ranks; each has rank 0's plan."""
    names = ("weights", "gradients", "optimizer", "peak")
    numbers, planned = ranks.in_turn([getattr(own, name) for name in names]), ranks.from_main("plan", own.planned)
    return [
        Memory(**dict(zip(names, map(int, numbers[rank :: ranks.size]), strict=True)), planned=planned)
        for rank in range(ranks.size)
    ]
