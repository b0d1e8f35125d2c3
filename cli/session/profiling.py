"""`genesis profile CONFIG`: a run set up as `train` does it, its first steps profiled. It leaves no run behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from genesis.backend import CPU, Device
from genesis.bench.limits import limits_of
from genesis.data.loader import Batch
from genesis.io.files import temporary_folder
from genesis.profile.generation import GenerationRow
from genesis.profile.run.measure import Recorded, Subject, memory_of, plain_steps, recorded_steps
from genesis.profile.run.memory_timeline import Timeline
from genesis.profile.run.nvtx import Ranges
from genesis.train.config import Config
from genesis.train.device_steps import DeviceSteps
from genesis.train.loop import Training
from genesis.train.output import Output
from genesis.train.signals import Interrupts
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.session.bench.generation import FAST, Settings, generation_row
from genesis_cli.session.bench.steps import UNTIL_CAPTURED
from genesis_cli.session.memory import advised, planned_memory
from genesis_cli.session.preparation import model_config, prepare_data, resolve_device
from genesis_cli.session.settings import settled
from genesis_cli.session.training import announce, arithmetic, assemble, make_model
from genesis_models.blocks import CausalLM

__all__ = ["Profile", "profile", "profiled", "subject_of"]

WARM_UP: Final = 2
UNTIL_RECORDED: Final = 3
LONGEST = 256  # tokens of the sequence that is generated
EVERY = 4  # steps between two readings of their figures, at most


@dataclass(frozen=True)
class Profile:
    """Steps of a run as they were measured, and the memory of one.

    Attributes:
        recorded: eager steps, and where there is a GPU captured ones before them.
        generation: of one sequence by the model; None unless asked for.
    """

    device: Device
    model: CausalLM
    recorded: list[Recorded]
    memory: Timeline
    generation: GenerationRow | None = None


@advised()
def profile(
    config: Config, *, steps: int, console: Output, ranges: Ranges | None = None, generates: bool = False
) -> Profile:
    """Profile `steps` steps of the run that `config` describes, and take as many without profiling.

    Args:
        generates: the model continues a sequence, too.
        ranges: where phases, modules and ops are shown to another profiler, too.

    Raises:
        GenesisError: as `train` does.
    """
    device = resolve_device(config.train.device)
    with ExitStack() as stack:
        stack.enter_context(arithmetic(config))
        config, dtype = settled(config, device)
        shape = model_config(config)
        memory = planned_memory(config, shape, device)
        data = prepare_data(config, shape, console, _cache(config, stack))
        model = make_model(config, shape, data.tokenizer, device)
        announce(config, data, model, device, dtype, memory, console)
        training = assemble(config, data, model, device, Interrupts(), console)
        model.train()
        found = profiled(training, steps, ranges)
        return replace(found, generation=_generation(model, device)) if generates else found


def _generation(model: CausalLM, device: Device) -> GenerationRow:
    """Half a context at most, of which the last quarter is generated."""
    length, dtype = min(LONGEST, model.config.context_length // 2), model.head_weight.dtype
    settings = Settings(dtype.name, dtype.name, max(2, length // 4), plan=FAST)
    return generation_row(model, 1, max(1, length - settings.new), limits_of(device, dtype), settings)


def _cache(config: Config, stack: ExitStack) -> str:
    """Where tokens are kept: with those of the run, if there are some, else not beyond the profile."""
    known = Path(config.train.output_dir) / "cache"
    if config.data.cache_dir is not None:
        return config.data.cache_dir
    return str(known) if known.is_dir() else stack.enter_context(temporary_folder())


def profiled(training: Training, steps: int, ranges: Ranges | None = None) -> Profile:
    """The profile of an assembled run's next steps."""
    model: Any = training.state.model
    if training.device == CPU:
        subject = _subject(training, None)
        found = [Recorded("eager", plain_steps(subject, steps, WARM_UP), recorded_steps(subject, steps, 1, ranges))]
        return Profile(CPU, model, found, memory_of(subject))
    notes: list[str] = []
    captured = plain_steps(_on_device(training, DeviceSteps, notes.append), steps, UNTIL_CAPTURED)
    gc.collect()  # its graphs
    subject = _on_device(training, _Eager, lambda line: None)
    plain = plain_steps(subject, steps, WARM_UP)
    found = [Recorded("eager", plain, recorded_steps(subject, steps, 1, ranges), list(notes))]
    memory = memory_of(subject)
    del subject
    gc.collect()
    if not notes:
        subject = _on_device(training, DeviceSteps, notes.append)
        found.insert(0, Recorded("captured", captured, recorded_steps(subject, steps, UNTIL_RECORDED, ranges), notes))
    return Profile(training.device, model, found, memory)


class _Eager(DeviceSteps):
    """Steps that are launched kernel by kernel."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        parts: Any = (self._run_first, self._run_following, self._run_update, self._run_whole)
        self._first, self._following, self._update, self._whole = parts


def _on_device(training: Training, kind: type[DeviceSteps], note: Callable[[str], None]) -> Subject:
    limit = training.config.train.max_grad_norm
    return _subject(training, kind(training.state, training.device, limit, EVERY, note))


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
    regions = [(model, "loss", "forward"), *((state.optimizer, method, "optimizer") for method in optimizer)]
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
    )


def _read(steps: DeviceSteps) -> None:
    """Look at the figures: they say where a loss or gradient is not finite."""
    steps.reading().results()
