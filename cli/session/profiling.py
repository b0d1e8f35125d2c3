"""`genesis profile CONFIG`: a run set up as `train` does it, its first steps profiled. It leaves no run behind.

Ranks all take and record the same steps, and begin those together that are timed; rank 0 reports its own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from genesis.backend import CPU, Device
from genesis.backend.cpu import threads
from genesis.backend.cuda.compilations import cancelled_on_error
from genesis.data.loader import Batch
from genesis.files.atomic import temporary_folder
from genesis.measure.collectives import StepTimes
from genesis.measure.limits import limits_of
from genesis.measure.memory import Timeline
from genesis.measure.recorder import Nvtx
from genesis.measure.run import Recorded, Subject, memory_of, plain_steps, recorded_steps
from genesis.measure.session import Recording
from genesis.train.config import Config
from genesis.train.device_steps import DeviceSteps, steps_of
from genesis.train.loop import Training
from genesis.train.output import Output
from genesis.train.ranks import FIRST_STEPS_S, PREPARING_S, SAMPLING_S, Ranks
from genesis.train.signals import Interrupts
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.session.bench.steps import FAST, UNTIL_CAPTURED, Generation, Settings, generated, timed_collectives
from genesis_cli.session.dry_run import compiled_ahead, planned_memory
from genesis_cli.session.model import make_model, model_config
from genesis_cli.session.preparation import prepare_data, resolve_device
from genesis_cli.session.ranks import check_same_data, joined
from genesis_cli.session.settings import settled
from genesis_cli.session.training import advised, announce, arithmetic, assemble, same_settings
from genesis_models.blocks import CausalLM

WARM_UP: Final = 2
UNTIL_RECORDED: Final = 3
LONGEST = 256  # tokens of the sequence that is generated
Steps = tuple[list[Recorded], tuple[Timeline, Recording]]  # and the memory of one
EVERY = 4  # steps between two readings of their figures, at most


@dataclass(frozen=True)
class Profile:
    """Steps of a run as they were measured, and the memory of one.

    Attributes:
        recorded: eager steps, and where there is a GPU captured ones before them.
        ranks: how many took the steps.
        threads: of this rank on the CPU; None on a GPU.
        memory_step: the eager step whose memory that is.
        collectives: of a step of several ranks; None of one.
        generation: of one sequence by the model; None unless asked for.
    """

    device: Device
    model: CausalLM
    recorded: list[Recorded]
    memory: Timeline
    memory_step: Recording
    ranks: int
    threads: int | None
    collectives: StepTimes | None
    generation: Generation | None = None


def profile(
    config: Config, *, steps: int, console: Output, ranges: Nvtx | None = None, generates: bool = False
) -> Profile | None:
    """Profile `steps` steps of the run that `config` describes, and take as many without profiling.

    Args:
        generates: the model continues a sequence, too.
        ranges: where phases, modules and ops are shown to another profiler, too.

    Returns:
        Rank 0's profile; None on the other ranks.

    Raises:
        GenesisError: as `train` does.
    """
    with (
        advised(config),
        cancelled_on_error(),
        Interrupts(saves=False) as interrupts,
        joined(config, console, interrupts) as ranks,
        ranks.during("preparation", PREPARING_S),
        ExitStack() as stack,
    ):
        said = console if ranks.is_main else Output(None)
        training = _assembled(config, said, interrupts, ranks, stack)
        with ranks.during("profiling", FIRST_STEPS_S):
            found = profiled(training, steps, ranges)
        if generates:
            with ranks.during("generation", SAMPLING_S), ranks.main_first("generation"):
                if ranks.is_main:
                    found = replace(found, generation=_generation(found.model, found.device))
        return found if ranks.is_main else None


def _assembled(config: Config, console: Output, interrupts: Interrupts, ranks: Ranks, stack: ExitStack) -> Training:
    """The run before its first step; the stack ends what it needs meanwhile."""
    device = resolve_device(config.train.device, ranks)
    stack.enter_context(arithmetic(config, ranks))
    config, dtype = settled(config, device)
    config = same_settings(ranks, config)
    shape = model_config(config)
    with compiled_ahead(device):
        memory = planned_memory(config, shape, device, ranks)
    cache = ranks.from_main("cache", _cache(config, stack) if ranks.is_main else None)
    with ranks.main_first("data"):  # the others find it in the cache, except on a host that does not reach it
        own = cache if ranks.is_main or Path(cache).is_dir() else stack.enter_context(temporary_folder())
        data = prepare_data(config, shape, console, own)
    model = make_model(config, shape, data.tokenizer, device)
    announce(config, data, model, device, dtype, memory, console)
    training = assemble(config, data, model, device, interrupts, console, ranks=ranks)
    check_same_data(ranks, training.state.loader)
    model.train()
    return training


def _generation(model: CausalLM, device: Device) -> Generation:
    """Half a context at most, of which the last quarter is generated."""
    length, dtype = min(LONGEST, model.config.context_length // 2), model.head_weight.dtype
    settings = Settings(dtype.name, plan=FAST, new=max(2, length // 4))
    return generated(model, 1, max(1, length - settings.new), limits_of(device, dtype), settings)


def _cache(config: Config, stack: ExitStack) -> str:
    """Where tokens are kept: with those of the run, if there are some, else not beyond the profile."""
    known = Path(config.train.output_dir) / "cache"
    if config.data.cache_dir is not None:
        return config.data.cache_dir
    return str(known) if known.is_dir() else stack.enter_context(temporary_folder())


def profiled(training: Training, steps: int, ranges: Nvtx | None = None) -> Profile:
    """The profile of an assembled run's next steps: a call of all ranks."""
    model: Any = training.state.model
    is_on_cpu, ranks = training.device == CPU, training.state.ranks.size
    recorded, memory = (_recorded_on_cpu if is_on_cpu else _recorded_on_device)(training, steps, ranges)
    collectives = _collectives(training, steps) if ranks > 1 else None
    return Profile(training.device, model, recorded, *memory, ranks, threads() if is_on_cpu else None, collectives)


def _recorded_on_cpu(training: Training, steps: int, ranges: Nvtx | None) -> Steps:
    subject = _subject(training, None)
    found = Recorded("eager", plain_steps(subject, steps, WARM_UP), recorded_steps(subject, steps, 1, ranges))
    return [found], memory_of(subject)


def _recorded_on_device(training: Training, steps: int, ranges: Nvtx | None) -> Steps:
    """Captured steps, unless they cannot be, and eager ones."""
    notes: list[str] = []
    warm_up = UNTIL_CAPTURED + (training.state.ranks.size > 1)  # ranks exchange after the first step's backward
    captured = plain_steps(_subject(training, _steps(training, EVERY, notes.append)), steps, warm_up)
    gc.collect()  # its graphs
    subject = _subject(training, _eager(_steps(training, EVERY)))
    plain = plain_steps(subject, steps, WARM_UP)
    found = [Recorded("eager", plain, recorded_steps(subject, steps, 1, ranges), list(notes))]
    memory = memory_of(subject)
    del subject
    gc.collect()
    if not notes:
        subject = _subject(training, _steps(training, EVERY, notes.append))
        found.insert(0, Recorded("captured", captured, recorded_steps(subject, steps, UNTIL_RECORDED, ranges), notes))
    return found, memory


def _collectives(training: Training, steps: int) -> StepTimes:
    """Of `steps` further steps, whose figures nobody reads."""
    state, device = training.state, training.device

    def taking() -> Callable[[], None]:
        if device == CPU:
            subject, warm_up = _subject(training, None), 0
        else:
            subject, warm_up = _subject(training, _steps(training, UNTIL_CAPTURED + steps)), UNTIL_CAPTURED

        def take() -> None:
            subject.take(subject.batches())

        for _ in range(warm_up):
            take()
        return take

    return timed_collectives(state, device, taking, steps)


def _steps(training: Training, every: int, note: Callable[[str], None] = lambda line: None) -> DeviceSteps:
    state = training.state
    return steps_of(state)(state, training.device, training.config.train.max_grad_norm, every, note)


def _eager(steps: DeviceSteps) -> DeviceSteps:
    """Steps that are launched kernel by kernel from now on."""
    parts: Any = (steps._run_first, steps._run_following, steps._run_update, steps._run_whole)
    steps._first, steps._following, steps._update, steps._whole = parts
    return steps


def _subject(training: Training, on_device: DeviceSteps | None) -> Subject:
    state, train = training.state, training.config.train

    def batches() -> list[Batch]:
        return [next(state.loader) for _ in range(train.accumulation_steps)]

    def take(batches: Sequence[Batch]) -> None:
        lr = training.lr_at(min(state.step, training.steps - 1))
        if on_device is None:
            take_step(state, batches, lr, train.max_grad_norm, training.device)
        else:
            on_device.take(batches, lr)

    return subject_of(state, training.device, on_device, batches, take)


def subject_of(
    state: TrainState,
    device: Device,
    on_device: DeviceSteps | None,
    batches: Callable[[], Sequence[Batch]],
    take: Callable[[Sequence[Batch]], None],
) -> Subject:
    """A run as it is measured: `take` makes a step on `batches`, by `on_device` where there is a GPU."""
    model: Any = state.model
    optimizer = ("zero_grad", "grad_norm", "clip_factor", "begin_step", "update")
    regions = [(state.objective, "loss", "forward"), *((state.optimizer, method, "optimizer") for method in optimizer)]
    if on_device is not None:
        regions.append((on_device.feed, "put", "data"))
    return Subject(
        model=model,
        device=device,
        batches=batches,
        take=take,
        settle=lambda: None if on_device is None else _read(on_device),
        regions=regions,
        persistent=lambda: cast(Any, state.persistent()),
        group=state.ranks.group,
        begin=lambda: state.ranks.barrier("a step"),
        launched=state.ranks.launched,
    )


def _read(steps: DeviceSteps) -> None:
    """Look at the figures: they say where a loss or gradient is not finite."""
    steps.reading().results()
