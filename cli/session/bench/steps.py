"""Training steps on random tokens, taken as `genesis train` takes them: their times, phases, ops and memory."""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from genesis import cuda
from genesis.array import Array
from genesis.backend import CPU, Device, backend_for
from genesis.data.loader import Batch
from genesis.errors import GenesisError, OutOfMemoryError, UsageError, escape, nearest
from genesis.files.hf import read_json
from genesis.measure.limits import Limits
from genesis.measure.memory import peak_bytes
from genesis.measure.record import Failure
from genesis.measure.recorder import COLLECTIVE, Key, by_key
from genesis.measure.run import Subject, recorded_steps
from genesis.measure.session import Recording
from genesis.measure.timing import Plan
from genesis.op import Op, observe
from genesis.train.config import OptimConfig
from genesis.train.device_steps import steps_of
from genesis.train.optimizer import build_optimizer
from genesis.train.ranks import ALONE, Ranks
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.engine.device_rows import release
from genesis_models.folder import read_config
from genesis_models.registry import PRESETS, parameter_count, preset

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

FORMULA = "tokens × (6 N + 6 L h S)"
OPTIMIZER: Final = "adamw"
LR, MAX_NORM = 1e-5, 1.0
DRAWN = 4  # batches that differ; steps take them in turn
EVERY = 64  # steps between two readings of their figures
UNTIL_CAPTURED = 4  # two as they are, one captured, one replayed
RECORDED = 3  # steps whose ops are timed
FAST = Plan(precision=0.05, seconds=1.0, warm_up=0.2, most_calls=1)
THOROUGH = Plan(seconds=10.0, warm_up=0.5, most_calls=1)


@dataclass(frozen=True)
class Settings:
    """How steps are taken and measured.

    Attributes:
        dtype: of weights and activations.
        checkpointing: of activations: none, selective or full.
        plan: how hard to try, for each case.
    """

    dtype: str
    checkpointing: str = "none"
    plan: Plan = field(default=THOROUGH)


# --- Shapes -----------------------------------------------------------------------------------------------------------


def shape_of(size: str, option: str = "--size", others: Sequence[str] = ()) -> ModelConfig:
    """The shape that a preset, a config.json or a model folder describes; weights are not read.

    Args:
        option: where the name was given.
        others: names that the caller knows, for the error's advice.

    Raises:
        UsageError: there is no such size. ModelError: the file is malformed, or of a model that Genesis does not have.
    """
    path = Path(size)
    if size in PRESETS:
        return ModelConfig.from_dict(preset(size), where=option)
    if path.is_dir():
        return read_config(path)
    if path.is_file():
        return ModelConfig.from_dict(read_json(path), where=escape(path))
    names = (*PRESETS, *others)
    holding = [name for name in names if size and size.lower() in name.lower()]
    near = holding[0] if holding else nearest(size, names, 0.5)
    advice = f"did you mean {near}? " if near else ""
    what = f"{escape(size)!r} is neither a model size nor a file"
    raise UsageError(what, where=option, next=f"{advice}sizes: {', '.join(names)}")


def check_lengths(config: ModelConfig, lengths: Sequence[int]) -> None:
    """Raises: UsageError, for a length at which nothing can be predicted, or beyond the model's positions."""
    most = config.packed_length
    for length in lengths:
        if not 2 <= length <= most:
            what = f"a length of {length} is not between 2 and the model's {most} positions"
            raise UsageError(what, where="--seq-len", next="take lengths in that range")


def step_flops(config: ModelConfig, batch: int, length: int) -> int:
    """Operations of a step by `FORMULA`, without what checkpointing computes again.

    N are all parameters (a tied head counts once), each used in a multiplication and an addition forward and in two of
    each backward. Attention takes 12·L·h·S a token, h being the width of all heads; the causal half counts.
    """
    width = config.num_attention_heads * config.head_dim
    attention = 6 * config.num_hidden_layers * width * length
    return batch * length * (6 * parameter_count(config) + attention)


class RandomTokens:
    """Stands for a run's loader: batches of random tokens, each row one document."""

    def __init__(self, batch_size: int, seq_len: int, vocab_size: int) -> None:
        self.batch_size, self.seq_len, self.vocab_size = batch_size, seq_len, vocab_size

    def batch(self, epoch: int, index: int) -> Batch:
        """Batch `index`; there is no end."""
        b, t = self.batch_size, self.seq_len
        ids = np.random.default_rng((epoch, index)).integers(0, self.vocab_size, (b, t))
        positions = np.broadcast_to(np.arange(t), (b, t))
        return Batch(epoch, index, ids, ids, positions, b * (t - 1), b * t, np.zeros((0, 4), np.int64))

    def batches(self) -> Iterator[Batch]:
        """A few batches in turn, drawn before the first is given."""
        return itertools.cycle([self.batch(0, index) for index in range(DRAWN)])

    def describe(self, batch: Batch) -> list[str]:
        """What is in a batch, for an error about it."""
        return [f"random tokens, batch {batch.index}"]


# --- Steps ------------------------------------------------------------------------------------------------------------


def new_state(model: CausalLM, batch: int, length: int, ranks: Ranks = ALONE) -> TrainState:
    """A run of `model` at its first step, with an optimizer of its own; each rank has a batch of a step."""
    loader: Any = RandomTokens(batch, length, model.config.vocab_size)
    optim = OptimConfig(name=OPTIMIZER, lr=LR)
    optimizer = build_optimizer(optim, model.named_parameters(), 0, ranks.size, ranks.group)
    return TrainState(model, optimizer, loader, ranks=ranks)


class GraphSteps:
    """Each call takes a step. From the third on it is a CUDA graph, unless `notes` gets the reason why not."""

    def __init__(self, state: TrainState, device: Device, notes: list[str]) -> None:
        self._state, self._batches = state, cast(Any, state.loader).batches()
        self.steps = steps_of(state)(state, device, MAX_NORM, EVERY, notes.append)
        state.step = 0

    def __call__(self) -> None:
        self.steps.take(list(itertools.islice(self._batches, self._state.ranks.size)), LR)
        if self._state.step % EVERY == 0:
            self.finish()

    def finish(self) -> None:
        """Wait for the steps; raises NumericError where a loss was not finite."""
        self.steps.reading().results()


def taking(state: TrainState, device: Device, notes: list[str]) -> Callable[[], None]:
    """Returns what takes a step on the device; on a GPU it is captured already."""
    if device == CPU:
        batches = cast(Any, state.loader).batches()

        def take() -> None:
            take_step(state, list(itertools.islice(batches, state.ranks.size)), LR, MAX_NORM, device)

        return take
    steps = GraphSteps(state, device, notes)
    for _ in range(UNTIL_CAPTURED + (state.ranks.size > 1)):  # ranks exchange after the first step's backward
        steps()
    return steps


def forget(model: CausalLM, device: Device) -> None:
    """Give back what a case took, except the weights."""
    for parameter in model.parameters():
        parameter.grad = None
    release(model)
    gc.collect()
    if device != CPU:
        cuda.empty_cache(device)


def failure_of(name: str, label: str, error: GenesisError | MemoryError) -> Failure:
    """The record of a case that failed; `name` is what was measured, `label` the case."""
    known = error if isinstance(error, GenesisError) else OutOfMemoryError(f"the host has no memory: {error}")
    return Failure(name, label, known.what, known.exit_code)


# --- Memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of a step.

    Attributes:
        optimizer: running averages, and masters of 2-byte weights.
        peak: the most at one time. On a GPU what was allocated; on the CPU the three others, and the most that a step
            took beyond them, with Python's own objects.
        planned: the planned peak, from steps on a fake GPU; None on the CPU.
    """

    weights: int
    gradients: int
    optimizer: int
    peak: int
    planned: int | None = None

    @property
    def rest(self) -> int:
        """Activations and workspace at the peak."""
        return self.peak - self.weights - self.gradients - self.optimizer


def lasting(state: TrainState) -> dict[str, int]:
    """Bytes of what is there from step to step."""
    return {name: sum(array.nbytes for array in arrays) for name, arrays in state.persistent().items()}


def host_memory(state: TrainState) -> Memory:
    """What lasts, and the most that one more step takes beyond it."""
    batches, kept = [state.loader.batch(0, 0)] * state.ranks.size, lasting(state)
    beyond = peak_bytes(lambda: take_step(state, batches, LR, MAX_NORM, CPU), CPU)
    return Memory(**kept, peak=sum(kept.values()) + beyond)


# --- Phases and ops ---------------------------------------------------------------------------------------------------


@dataclass
class OpShare:
    """An op in a step.

    Attributes:
        calls: in one step.
        seconds: all its calls together.
        share: of the step.
        moved, computed: seconds that its counted bytes and FLOPs would take at the measured limits.
    """

    op: str
    calls: float
    seconds: float
    share: float = 0.0
    moved: float = 0.0
    computed: float = 0.0

    @property
    def above(self) -> float:
        """Seconds beyond what the limits need: the room for improvement."""
        return max(self.seconds - max(self.moved, self.computed), 0.0)


@dataclass(frozen=True)
class Parts:
    """A recorded step divided: seconds by phase, the ops with the longest first, and seconds in no op."""

    seconds: float
    phases: dict[str, float]
    ops: list[OpShare]
    rest: float


def recorded_parts(subject: Subject, limits: Limits, warm_up: int, per_take: int = 1) -> Parts | None:
    """Take steps under watch and divide their time; None where a GPU's step was not captured.

    Args:
        per_take: how many steps each call of `subject.take` takes.
    """
    on_gpu = subject.device != CPU
    backend = cast("CudaBackend", backend_for(subject.device)) if on_gpu else None
    counted: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])

    def count(op: Op, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], _: float) -> None:
        if op.view is not None or (backend is not None and not backend.driver.is_capturing(backend.stream)):
            return
        cost, rate = op.cost(inputs, outputs, attrs), limits.flops_per_second
        found = counted[op.name]
        found[0] += 1
        found[1] += cost.bytes / limits.bytes_per_second
        found[2] += cost.flops / rate if rate else 0.0

    with observe(count):
        records = recorded_steps(subject, RECORDED, warm_up)
    found = [_kernel_times(record) if on_gpu else by_key(record.frames, record.start, record.end) for record in records]
    if not all(found):
        return None
    noted, taken = (1 if on_gpu else RECORDED + warm_up) * per_take, RECORDED * per_take
    phases, ops = defaultdict[str, float](float), dict[str, OpShare]()
    for key, seconds in ((key, s / taken) for shares in found for key, s in shares.items()):
        phases[key.phase] += seconds
        if key.op in counted or key.op == COLLECTIVE:
            ops.setdefault(key.op, OpShare(key.op, 0, 0.0)).seconds += seconds
    whole = sum(phases.values())
    for name, op in ops.items():
        calls, moved, computed = counted[name]
        op.calls, op.moved, op.computed, op.share = calls / noted, moved / noted, computed / noted, op.seconds / whole
    listed = sorted(ops.values(), key=lambda op: -op.seconds)
    return Parts(whole, dict(phases), listed, max(whole - sum(op.seconds for op in listed), 0.0))


def _kernel_times(record: Recording) -> dict[Key, float]:
    """Seconds of the kernels inside CUDA graphs by what they count for."""
    found: dict[Key, float] = defaultdict(float)
    for kernel in record.kernels:
        if kernel.in_graph and not kernel.is_concurrent:
            found[Key(kernel.phase, kernel.module, kernel.op)] += kernel.end - kernel.start
    return dict(found)
