"""`genesis profile CONFIG`: sets a run up as `genesis train` does, profiles its first steps and leaves no files."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genesis.backend import CPU, Device
from genesis.backend.cpu import threads
from genesis.backend.cuda.compilations import cancelled_on_error
from genesis.data.loader import Batch
from genesis.files.atomic import temporary_folder
from genesis.measure.run import UNTIL_CAPTURED, Recorded, Subject, plain_steps, recorded_steps
from genesis.measure.session import Recording
from genesis.train.config import Config
from genesis.train.device_steps import DeviceSteps, steps_of
from genesis.train.loop import Training
from genesis.train.output import Output
from genesis.train.ranks import ALONE
from genesis.train.signals import Interrupts
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.session.dry_run import compiled_ahead, planned_memory
from genesis_cli.session.model import make_model, model_config
from genesis_cli.session.preparation import prepare_data, resolve_device
from genesis_cli.session.settings import settled
from genesis_cli.session.training import advised, announce, arithmetic, assemble, prepare_objective
from genesis_models.blocks import CausalLM

WARM_UP = 2  # eager steps before the measured ones
UNTIL_RECORDED = 3  # steps until a captured one is recorded
EVERY = 4  # the most steps between two readings of their figures


@dataclass(frozen=True)
class Profile:
    """Measured steps of a run.

    Attributes:
        recorded: eager steps, preceded by captured ones on a GPU.
        memory_step: an eager step with its memory.
        threads: threads on the CPU; None on a GPU.
    """

    device: Device
    model: CausalLM
    recorded: list[Recorded]
    memory_step: Recording
    threads: int | None


def profile(config: Config, *, steps: int, console: Output, has_ranges: bool = False) -> Profile:
    """Profile `steps` steps of the run that `config` describes, and take as many unwatched.

    Args:
        has_ranges: shows phases, modules and ops to Nsight as NVTX ranges.

    Raises:
        GenesisError: as `genesis train` does.
    """
    with advised(config), cancelled_on_error(), Interrupts(saves=False) as interrupts, ExitStack() as stack:
        return profiled(_assembled(config, console, interrupts, stack), steps, has_ranges)


def _assembled(config: Config, console: Output, interrupts: Interrupts, stack: ExitStack) -> Training:
    """The run before its first step; the stack closes what it opened."""
    device = resolve_device(config.train.device)
    stack.enter_context(arithmetic(config, ALONE))
    config, dtype = settled(config, device)
    shape = model_config(config)
    with compiled_ahead(device):
        memory = planned_memory(config, shape, device, ALONE)
    data = prepare_data(config, shape, console, _cache(config, stack))
    model = make_model(config, shape, data.tokenizer, device)
    announce(config, data, model, device, dtype, memory, console)
    training = assemble(config, data, model, device, interrupts, console)
    prepare_objective(training, config, data, console)
    model.train()
    return training


def _cache(config: Config, stack: ExitStack) -> str:
    """The folder of tokens: the one in the configuration or of an earlier run, otherwise a temporary one."""
    known = Path(config.train.output_dir) / "cache"
    if config.data.cache_dir is not None:
        return config.data.cache_dir
    return str(known) if known.is_dir() else stack.enter_context(temporary_folder())


def profiled(training: Training, steps: int, has_ranges: bool = False) -> Profile:
    """The profile of an assembled run's next steps."""
    model: Any = training.state.model
    is_on_cpu = training.device == CPU
    notes: list[str] = []
    captured: list[float] = []
    if not is_on_cpu:
        captured = plain_steps(_subject(training, _steps(training, EVERY, notes.append)), steps, UNTIL_CAPTURED)
        gc.collect()  # frees the graphs
    subject = _subject(training, None if is_on_cpu else _eager(_steps(training, EVERY)))
    plain = plain_steps(subject, steps, WARM_UP)
    recorded = [Recorded("eager", plain, recorded_steps(subject, steps, 1, has_ranges), list(notes))]
    (memory_step,) = recorded_steps(subject, 1, 0, has_memory=True)
    del subject
    gc.collect()
    if not is_on_cpu and not notes:  # the steps were captured
        subject = _subject(training, _steps(training, EVERY, notes.append))
        under_watch = recorded_steps(subject, steps, UNTIL_RECORDED, has_ranges)
        recorded.insert(0, Recorded("captured", captured, under_watch, notes))
    return Profile(training.device, model, recorded, memory_step, threads() if is_on_cpu else None)


def _steps(training: Training, every: int, note: Callable[[str], None] = lambda line: None) -> DeviceSteps:
    state = training.state
    return steps_of(state)(state, training.device, training.config.train.max_grad_norm, every, note)


def _eager(steps: DeviceSteps) -> DeviceSteps:
    """Replace captured parts by plain ones, which launch kernel by kernel."""
    parts: Any = (steps._run_first, steps._run_following, steps._run_update, steps._run_whole)
    steps._first, steps._following, steps._update, steps._whole = parts
    return steps


def _subject(training: Training, on_device: DeviceSteps | None) -> Subject:
    state, train = training.state, training.config.train

    def batches() -> list[Batch]:
        return [next(state.loader) for _ in range(train.accumulation_steps)]

    def lr() -> float:
        return training.lr_at(min(state.step, training.steps - 1))

    return subject_of(state, training.device, on_device, batches, lr, train.max_grad_norm)


def subject_of(
    state: TrainState,
    device: Device,
    on_device: DeviceSteps | None,
    batches: Callable[[], Sequence[Batch]],
    lr: Callable[[], float],
    max_grad_norm: float | None,
) -> Subject:
    """The subject of a run, whose steps are taken by `on_device` on a GPU."""

    def take(batches: Sequence[Batch]) -> None:
        if on_device is None:
            take_step(state, batches, lr(), max_grad_norm, device)
        else:
            on_device.take(batches, lr())

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
        settle=lambda: None if on_device is None else on_device.reading().results(),  # raises if a loss is not finite
        regions=regions,
        begin=lambda: state.ranks.barrier("a step"),
        launched=state.ranks.launched,
    )
