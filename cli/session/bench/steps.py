"""Training steps on random tokens, as `genesis train` takes them, and generation: their times, parts and memory."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import numpy as np

from genesis import Tensor, cuda
from genesis.array import Array
from genesis.backend import CPU, Device, backend_for
from genesis.data.loader import Batch
from genesis.errors import (
    DeviceError,
    DistributedError,
    GenesisError,
    InterruptedRun,
    OutOfMemoryError,
    UsageError,
    escape,
    nearest,
)
from genesis.files.hf import read_json
from genesis.measure.limits import Limits, wait_for
from genesis.measure.memory import peak_bytes
from genesis.measure.record import Column, Failure, Table, table
from genesis.measure.recorder import COLLECTIVE, Key, by_key
from genesis.measure.run import Subject, recorded_steps
from genesis.measure.session import Recording
from genesis.measure.timing import Plan, Timing, measure, summarize
from genesis.op import Op, observe
from genesis.train.config import OptimConfig
from genesis.train.device_steps import steps_of
from genesis.train.optimizer import build_optimizer
from genesis.train.ranks import ALONE, Ranks
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.session.collectives import forget_graphs
from genesis_cli.session.dry_run import PlannedRanks, memory_plan
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.engine import Request, Runner, Sampling
from genesis_models.engine.device_rows import release
from genesis_models.folder import read_config
from genesis_models.generate import engine_for
from genesis_models.registry import PRESETS, build, parameter_count, preset
from genesis_models.weights import QUANTIZED, quantize

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

T = TypeVar("T")
NEW = 64  # tokens drawn for each sequence
TOP_K = 50  # where tokens are drawn by chance, as the schema has it
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


def trained_model(config: ModelConfig, device: Device, settings: Settings) -> CausalLM:
    """A model with random weights, ready to be trained as the settings say."""
    model = build(config, seed=0, device=str(device), dtype=settings.dtype)
    model.activation_checkpointing = settings.checkpointing
    model.train()
    return model


def new_state(model: CausalLM, batch: int, length: int, ranks: Ranks = ALONE) -> TrainState:
    """A run of `model` at its first step, with an optimizer of its own; each rank has a batch of a step."""
    loader: Any = RandomTokens(batch, length, model.config.vocab_size)
    optim = OptimConfig(name=OPTIMIZER, lr=LR)
    optimizer = build_optimizer(optim, model.named_parameters(), 0, ranks.size, ranks.group)
    return TrainState(model, optimizer, loader, ranks=ranks)


class Steps:
    """Each call takes a step. On a GPU it is a CUDA graph from the third on, unless `notes` gets the reason why not."""

    def __init__(self, state: TrainState, device: Device, notes: list[str]) -> None:
        self._state, self._device, self._batches = state, device, cast(Any, state.loader).batches()
        self.on_device = None if device == CPU else steps_of(state)(state, device, MAX_NORM, EVERY, notes.append)
        state.step = 0

    def __call__(self) -> None:
        batches = list(itertools.islice(self._batches, self._state.ranks.size))
        if self.on_device is None:
            take_step(self._state, batches, LR, MAX_NORM, self._device)
            return
        self.on_device.take(batches, LR)
        if self._state.step % EVERY == 0:
            self.finish()

    def finish(self) -> None:
        """Wait for the steps; raises NumericError where a loss was not finite."""
        if self.on_device is not None:
            self.on_device.reading().results()


def taking(state: TrainState, device: Device, notes: list[str]) -> Steps:
    """Returns what takes a step on the device; on a GPU it is captured already."""
    steps = Steps(state, device, notes)
    for _ in range(0 if device == CPU else UNTIL_CAPTURED + (state.ranks.size > 1)):
        steps()  # ranks exchange after the first step's backward
    return steps


def forget(model: CausalLM, device: Device) -> None:
    """Give back what a case took, except the weights."""
    for parameter in model.parameters():
        parameter.grad = None
    release(model)
    forget_graphs(device)


def each_case(
    name: str, model: CausalLM, device: Device, cases: Iterable[tuple[int, int]], measured: Callable[[int, int], T],
    tell: Callable[[str], None], new: str = "",
) -> Iterator[T | Failure]:  # fmt: skip
    """Measure each (batch, length); one that fails gives a `Failure`.

    Args:
        tell: called with what is measured next.
        new: what follows the label of a case.
    """
    cases = list(cases)
    for i, (batch, length) in enumerate(cases, 1):
        label = f"{batch}x{length}{new}"
        tell(f"{i} of {len(cases)}: {label}")
        found: T | Failure
        try:
            found = measured(batch, length)
        except (InterruptedRun, DistributedError):  # of the job, not of the case
            raise
        except (GenesisError, MemoryError) as error:
            what = error.what if isinstance(error, GenesisError) else f"the host has no memory: {error}"
            found = Failure(name, label, what, getattr(error, "exit_code", OutOfMemoryError.exit_code))
        forget(model, device)  # not while the error is there, whose frames hold the case's memory
        yield found


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


def planned_peak(
    config: ModelConfig, device: Device, batch: int, length: int, settings: Settings, ranks: Ranks = ALONE
) -> int:
    """Bytes at the peak of a rank's steps on a fake GPU."""
    return memory_plan(
        config,
        device,
        batch=batch,
        length=length,
        accumulation_steps=ranks.size,
        activation_checkpointing=settings.checkpointing,
        dtype=settings.dtype,
        optim=OptimConfig(name=OPTIMIZER, lr=LR),
        ranks=PlannedRanks(ranks.size, is_in_stream_order=ranks.group.is_in_stream_order),
    ).total


def memory_of(state: TrainState, device: Device, settings: Settings) -> Memory:
    """Of the steps since the peak was reset; on the CPU of one more. Rank 0 has the plan."""
    lasting = {name: sum(array.nbytes for array in arrays) for name, arrays in state.persistent().items()}
    loader, ranks, planned = state.loader, state.ranks, None
    if device == CPU:
        batches = [loader.batch(0, 0)] * ranks.size
        beyond = peak_bytes(lambda: take_step(state, batches, LR, MAX_NORM, CPU), CPU)
        return Memory(**lasting, peak=sum(lasting.values()) + beyond)
    peak, config = cuda.max_memory_allocated(device), cast(CausalLM, state.model).config
    if ranks.is_main:
        planned = planned_peak(config, device, loader.batch_size, loader.seq_len, settings, ranks)
    return Memory(**lasting, peak=peak, planned=planned)


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


def recorded_parts(subject: Subject, limits: Limits, per_take: int = 1) -> Parts | None:
    """Take steps under watch and divide their time; None where a GPU's step was not captured.

    Args:
        per_take: how many steps each call of `subject.take` takes.
    """
    warm_up = 0 if subject.device == CPU else UNTIL_CAPTURED
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


# --- Generation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawing:
    """How tokens are drawn, and measured.

    Attributes:
        dtype: of weights; "fp8" or "int8", to which they are quantized.
        built: the type in which they are made.
        new: tokens drawn for each sequence.
        temperature: 0 takes the likeliest token.
        plan: how hard to try, for each case.
    """

    dtype: str
    built: str
    new: int = NEW
    temperature: float = 0.0
    plan: Plan = field(default=THOROUGH)

    @property
    def sampling(self) -> Sampling:
        """For every request."""
        return Sampling(self.temperature, TOP_K if self.temperature else None)


class Generation(NamedTuple):
    """Sequences that were continued together.

    Attributes:
        first: from the request until every sequence has its first token.
        token: between two tokens of a sequence, by the difference of all tokens and the first alone.
        weights, cache: bytes that a step of all sequences reads, the cache's in the mean.
        copy: bytes a second of a copy, measured in the same process.
        parts: of the last case; `notes` say what is missing there.
    """

    batch: int
    prompt: int
    new: int
    engine: str
    first: Timing
    token: Timing
    weights: int
    cache: int
    copy: float
    parts: Parts | None = None
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Sequences, and tokens before and after, for people."""
        return f"{self.batch}x{self.prompt}+{self.new}"

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return (self.weights + self.cache) / self.token.seconds


def bench_generation(
    config: ModelConfig,
    cases: Sequence[tuple[int, int]],
    limits: Limits,
    settings: Drawing,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Generation | Failure]:
    """Measure each (batch, prompt) of a model with random weights; the last has its parts, too."""
    model = build(config, seed=0, device=str(limits.device), dtype=settings.built)
    if settings.dtype in QUANTIZED:
        quantize(model, settings.dtype)

    def measured(batch: int, prompt: int) -> Generation:
        row = generated(model, batch, prompt, limits, settings)
        return _with_parts(row, model, limits, settings) if (batch, prompt) == cases[-1] else row

    return each_case("generation", model, limits.device, cases, measured, tell, f"+{settings.new}")


def generated(model: CausalLM, batch: int, prompt: int, limits: Limits, settings: Drawing) -> Generation:
    """Continue `batch` prompts of `prompt` random tokens each."""
    whole, first = (_requests(model, batch, prompt, count, settings) for count in (settings.new, 1))
    engine, wait, firsts = engine_for(model, whole, rows=batch), wait_for(limits.device), list[float]()

    def seconds(requests: list[Request]) -> float:
        wait()
        begun = time.perf_counter()
        _drain(engine.run(requests))
        wait()
        return time.perf_counter() - begun

    def sample(count: int) -> float:
        """Seconds of a step: the time of all tokens less that of the first, over the steps between."""
        total = 0.0
        for _ in range(count):
            firsts.append(seconds(first))
            total += (seconds(whole) - firsts[-1]) / (settings.new - 1)
        return total

    token = measure(sample, settings.plan)
    until_first = summarize(firsts[-(token.samples + token.outliers) :], 1, settings.plan.precision)
    weights, cache = weight_bytes(model, batch), batch * cache_bytes(model, engine, prompt, settings.new)
    name, copy = type(engine).__name__, limits.bytes_per_second
    return Generation(batch, prompt, settings.new, name, until_first, token, weights, cache, copy)


def _requests(model: CausalLM, batch: int, prompt: int, new: int, settings: Drawing) -> list[Request]:
    rng = np.random.default_rng((batch, prompt))
    ids = rng.integers(0, model.config.vocab_size, (batch, prompt)).tolist()
    return [Request(each, settings.sampling, new, sequence=i) for i, each in enumerate(ids)]


def _drain(tokens: Iterator[object]) -> None:
    deque(tokens, maxlen=0)


def weight_bytes(model: CausalLM, batch: int) -> int:
    """Of all parameters as they are stored; of an embedding beside a head, the rows of a batch's tokens."""
    total = sum(parameter.nbytes for parameter in (*model.parameters(), *model.buffers()))
    embedding: Tensor = model.model.embed_tokens.weight
    rest = 0 if model.lm_head is None else embedding.nbytes - batch * embedding.nbytes // embedding.shape[0]
    return total - rest


def cache_bytes(model: CausalLM, engine: Runner, prompt: int, new: int) -> int:
    """Keys and values of one sequence that a token reads, in the mean over its `new` tokens after the first."""
    config, cache = model.config, getattr(engine, "cache", None)
    size = (model.head_weight if cache is None else cache.data).dtype.itemsize
    lengths = np.arange(prompt + 1, prompt + new)  # with the token's own
    seen = sum(float(np.minimum(lengths, window or lengths).mean()) for window in config.layer_windows)
    return round(2 * config.num_key_value_heads * config.head_dim * size * seen)


def _with_parts(row: Generation, model: CausalLM, limits: Limits, settings: Drawing) -> Generation:
    """With a step of all sequences divided: with the prompts' pass on the CPU, of captured steps alone on a GPU."""
    requests = _requests(model, row.batch, row.prompt, row.new, settings)
    engine, note = engine_for(model, requests, rows=row.batch), ""
    subject = Subject(
        model=model,
        device=limits.device,
        batches=tuple,
        take=lambda batches: _drain(engine.run(requests)),
        settle=lambda: None,
        regions=(),
        persistent=dict[Any, Any],
    )
    release(model)  # steps are captured under watch
    try:
        if parts := recorded_parts(subject, limits, row.new):
            return row._replace(parts=parts)
        note = "the engine's steps are no CUDA graphs"
    except (DeviceError, OutOfMemoryError) as error:
        note = error.what
    return row._replace(notes=(f"no times of ops: {note}",))


ROWS = [
    Column("case", "case", "text", "Sequences x tokens of a prompt + new tokens.", lambda g: g.label),
    Column("first", "first token", "s", "Until every sequence has its first token.", lambda g: g.first.seconds),
    Column("token", "token", "s", "Median time between two tokens of a sequence.", lambda g: g.token.seconds),
    Column("half_width", "±", "share", "Half of the median's 95 % confidence interval.", lambda g: g.token.half_width),
    Column("tokens_per_second", "tokens/s", "token/s", "Of all sequences.", lambda g: g.batch / g.token.seconds),
    Column("weights", "weights", "bytes", "That a step reads, as they are stored.", lambda g: g.weights),
    Column("cache", "cache", "bytes", "Keys and values that a step reads, in the mean.", lambda g: g.cache),
    Column("bytes_per_second", "byte/s", "byte/s", "Weights and cache over a step's time.", lambda g: g.rate),
    Column("share", "of a copy", "share", "Their rate as a share of a copy's.", lambda g: g.rate / g.copy),
    Column("is_noisy", "note", "text", "Not quiet.", lambda g: "noisy" if g.token.is_noisy else ""),
    Column("engine", "engine", "text", "What generated.", lambda g: g.engine, hidden=True),
]


def generation_table(rows: Sequence[Generation], title: str = "") -> Table:
    """The table of a report about generation."""
    return table("generation", title, ROWS, rows)
