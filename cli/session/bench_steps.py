"""Runs, times and divides training steps on random tokens, as `genesis train` takes them, and generation."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import numpy as np

from genesis import Tensor, cuda
from genesis.array import Array
from genesis.backend import CPU, Device
from genesis.data.loader import Batch
from genesis.errors import DistributedError, GenesisError, InterruptedRun
from genesis.measure.limits import Limits, wait_for
from genesis.measure.memory import peak_bytes
from genesis.measure.record import Column, Failure
from genesis.measure.run import UNTIL_CAPTURED, Subject, free_graphs, plain_steps, step_seconds
from genesis.measure.timing import Plan, Timing, measure, summarize
from genesis.nn.quantized import Kind
from genesis.train.config import OptimConfig
from genesis.train.device_steps import steps_of
from genesis.train.optimizer import build_optimizer
from genesis.train.ranks import ALONE, Ranks
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.session.profiling import subject_of
from genesis_models import engine as engines
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.engine.device_rows import release
from genesis_models.generate import engine_for
from genesis_models.registry import build, parameter_count
from genesis_models.weights import quantize

if TYPE_CHECKING:
    pass

T = TypeVar("T")
Notify = Callable[[str], None]  # shows the progress
FORMULA = "tokens × (6 N + 6 L h S)"
OPTIMIZER: Final = "adamw"
LR, MAX_NORM = 1e-5, 1.0
DRAWN = 4  # different batches, which steps take in turn
EVERY = 64  # steps between two readings of their figures
RECORDED = 3  # steps whose ops are timed
FAST = Plan(precision=0.05, seconds=1.0, warm_up=0.2, most_calls=1)
THOROUGH = Plan(seconds=10.0, warm_up=0.5, most_calls=1)


@dataclass(frozen=True)
class Settings:
    """How a model is measured.

    Attributes:
        dtype: of weights and activations.
        checkpointing: of activations: none, selective or full.
        plan: how hard to try, for each case; a sample holds one call.
        new: tokens to generate for each sequence; 0 measures training steps.
        quantized: type to which weights are quantized for generation.
    """

    dtype: str
    checkpointing: str = "none"
    plan: Plan = field(default=THOROUGH)
    new: int = 0
    quantized: Kind | None = None


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        cases: (batch, length) of training steps, or (batch, prompt) of generation.
        recipes: of torch, to compare with; none without --vs.
        python: the interpreter that has torch; None means this one.
        title: of the table of steps.
    """

    config: ModelConfig
    cases: Sequence[tuple[int, int]]
    device: Device
    settings: Settings
    recipes: tuple[str, ...] = ()
    python: str | None = None
    title: str = ""


def each_case(
    request: Request, model: CausalLM, measured: Callable[[int, int], T], notify: Notify, ranks: Ranks = ALONE
) -> Iterator[T | Failure]:
    """Measure each case. In one process, a case that fails gives a `Failure`; in ranks it ends the job."""
    new = request.settings.new
    for i, (batch, length) in enumerate(request.cases, 1):
        label = f"{batch}x{length}" + (f"+{new}" if new else "")
        notify(f"{i} of {len(request.cases)}: {label}")
        found: T | Failure
        try:
            found = measured(batch, length)
        except (InterruptedRun, DistributedError):
            raise
        except (GenesisError, MemoryError) as error:
            if ranks.size > 1:
                raise
            found = Failure.of("generation" if new else "step", label, error)
        forget(model, request.device)  # after the error is gone, whose frames hold the case's memory
        yield found


def forget(model: CausalLM, device: Device) -> None:
    """Free the memory of a case, except the weights."""
    for parameter in model.parameters():
        parameter.grad = None
    release(model)
    free_graphs(device)


# --- Steps ------------------------------------------------------------------------------------------------------------


def step_flops(config: ModelConfig, batch: int, length: int) -> int:
    """Operations of a step by `FORMULA`, without those that checkpointing repeats.

    N counts all parameters (a tied head once), each used in a multiplication and an addition forward and in two of
    each backward. Attention takes 12·L·h·S a token, where h is the width of all heads; the causal half counts.
    """
    width = config.num_attention_heads * config.head_dim
    attention = 6 * config.num_hidden_layers * width * length
    return batch * length * (6 * parameter_count(config) + attention)


class RandomTokens:
    """Replaces a run's loader: batches of random tokens, each row one document."""

    def __init__(self, batch_size: int, seq_len: int, vocab_size: int) -> None:
        self.batch_size, self.seq_len, self.vocab_size = batch_size, seq_len, vocab_size

    def batch(self, epoch: int, index: int) -> Batch:
        """Batch `index`; the epoch has no last one."""
        b, t = self.batch_size, self.seq_len
        ids = np.random.default_rng((epoch, index)).integers(0, self.vocab_size, (b, t))
        positions = np.broadcast_to(np.arange(t), (b, t))
        return Batch(epoch, index, ids, ids, positions, b * (t - 1), b * t, np.zeros((0, 4), np.int64))

    def batches(self) -> Iterator[Batch]:
        """`DRAWN` batches in turn, all made before the first is yielded."""
        return itertools.cycle([self.batch(0, index) for index in range(DRAWN)])

    def describe(self, batch: Batch) -> list[str]:
        """Describes a batch for an error about it."""
        return [f"random tokens, batch {batch.index}"]


def trained_model(config: ModelConfig, device: Device, settings: Settings) -> CausalLM:
    """A model with random weights, ready to be trained as the settings say."""
    model = build(config, seed=0, device=str(device), dtype=settings.dtype)
    model.activation_checkpointing = settings.checkpointing
    model.train()
    return model


def new_state(model: CausalLM, batch: int, length: int, ranks: Ranks = ALONE) -> TrainState:
    """A run of `model` at its first step, with a new optimizer; each rank has one batch of a step."""
    loader: Any = RandomTokens(batch, length, model.config.vocab_size)
    optim = OptimConfig(name=OPTIMIZER, lr=LR)
    optimizer = build_optimizer(optim, model.named_parameters(), 0, ranks.size, ranks.group)
    return TrainState(model, optimizer, loader, ranks=ranks)


def random_steps(state: TrainState, device: Device, notes: list[str]) -> Subject:
    """The steps of a run; a GPU replays a CUDA graph from the third on, unless `notes` gets a reason why not."""
    batches, state.step = cast(Any, state.loader).batches(), 0
    on_device = None if device == CPU else steps_of(state)(state, device, MAX_NORM, EVERY, notes.append)

    def drawn() -> list[Batch]:
        return list(itertools.islice(batches, state.ranks.size))

    return subject_of(state, device, on_device, drawn, lambda: LR, MAX_NORM)


def captured_steps(state: TrainState, device: Device, notes: list[str]) -> Subject:
    """The same steps, on a GPU after their capture."""
    subject = random_steps(state, device, notes)
    # Ranks exchange after the first step's backward.
    plain_steps(subject, 0, 0 if device == CPU else UNTIL_CAPTURED + (state.ranks.size > 1))
    return subject


def timed(subject: Subject, ranks: Ranks, plan: Plan) -> tuple[Timing, list[float]]:
    """The time of a step on the slowest rank, and the median of each rank: a call of all ranks.

    The plan's clock adds up the times that ranks exchanged, so that all take the same number of steps.
    """
    every, clock = list[list[float]](), 0.0

    def sample(_: int) -> float:
        nonlocal clock
        own = step_seconds(subject)
        subject.settle()
        ranks.record_seconds(own)
        every.append(ranks.in_turn([own]))
        clock += max(every[-1])
        return max(every[-1])

    step = measure(sample, replace(plan, clock=lambda: clock))
    return step, [median(each) for each in zip(*every[-step.samples - step.outliers :], strict=True)]


# --- Memory -----------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes of a step.

    Attributes:
        optimizer: running averages, and masters of 2-byte weights.
        peak: the most at one time. On a GPU allocated bytes; on the CPU the three others and the most that a step took
            beyond them, Python's objects included.
    """

    weights: int
    gradients: int
    optimizer: int
    peak: int

    @property
    def rest(self) -> int:
        """Activations and workspace at the peak."""
        return self.peak - self.weights - self.gradients - self.optimizer


def memory_of(state: TrainState, device: Device) -> list[Memory]:
    """The memory of each rank's steps since the peak was reset, on the CPU of one more: a call of all ranks."""
    ranks, persistent = state.ranks, cast("dict[str, Sequence[Array]]", state.persistent())
    own = [sum(each.nbytes for each in persistent[name]) for name in ("weights", "gradients", "optimizer")]
    if device == CPU:
        batches = [cast(Any, state.loader).batch(0, 0)] * ranks.size
        own.append(sum(own) + peak_bytes(lambda: take_step(state, batches, LR, MAX_NORM, CPU), CPU))
    else:
        own.append(cuda.max_memory_allocated(device))
    every = [int(number) for number in ranks.in_turn(own)]
    return [Memory(*every[rank :: ranks.size]) for rank in range(ranks.size)]


# --- Generation -------------------------------------------------------------------------------------------------------


class Generation(NamedTuple):
    """Sequences that were continued together, each with its likeliest tokens.

    Attributes:
        label: sequences, and tokens before and after.
        first: from the request until every sequence has its first token.
        token: between two tokens of a sequence: the time of all tokens less that of the first.
        tokens_per_second: of all sequences.
        weights, cache: bytes that a step of all sequences reads, the mean over steps.
        rate: these bytes a second.
    """

    label: str
    engine: str
    first: Timing
    token: Timing
    tokens_per_second: float
    weights: int
    cache: int
    rate: float
    share: float


def bench_generation(request: Request, limits: Limits, notify: Notify = print) -> Iterator[Generation | Failure]:
    """Measure each case of a model with random weights."""
    settings = request.settings
    model = build(request.config, seed=0, device=str(request.device), dtype=settings.dtype)
    if settings.quantized:
        quantize(model, settings.quantized)

    def measured(batch: int, prompt: int) -> Generation:
        return generated(model, batch, prompt, limits, settings)

    return each_case(request, model, measured, notify)


def generated(model: CausalLM, batch: int, prompt: int, limits: Limits, settings: Settings) -> Generation:
    """Continue `batch` prompts of `prompt` random tokens each."""
    ids = np.random.default_rng((batch, prompt)).integers(0, model.config.vocab_size, (batch, prompt)).tolist()
    whole, first = (
        [engines.Request(each, engines.Sampling(0.0), count, sequence=i) for i, each in enumerate(ids)]
        for count in (settings.new, 1)
    )
    engine, wait, firsts = engine_for(model, whole, rows=batch), wait_for(limits.device), list[float]()

    def seconds(requests: list[engines.Request]) -> float:
        wait()
        begun = time.perf_counter()
        deque(engine.run(requests), maxlen=0)
        wait()
        return time.perf_counter() - begun

    def sample(_: int) -> float:
        firsts.append(seconds(first))
        return (seconds(whole) - firsts[-1]) / (settings.new - 1)

    token = measure(sample, settings.plan)
    until_first = summarize(firsts[-(token.samples + token.outliers) :], 1, settings.plan.precision)
    weights, cache = weight_bytes(model, batch), batch * cache_bytes(model, engine, prompt, settings.new)
    label, name = f"{batch}x{prompt}+{settings.new}", type(engine).__name__
    rate, speed = (weights + cache) / token.seconds, batch / token.seconds
    share = rate / limits.bytes_per_second
    return Generation(label, name, until_first, token, speed, weights, cache, rate, share)


def weight_bytes(model: CausalLM, batch: int) -> int:
    """Bytes of all parameters as stored; an embedding that is not the head counts the rows of a batch's tokens."""
    embedding: Tensor = model.model.embed_tokens.weight
    unread = 0 if model.lm_head is None else embedding.shape[0] - batch
    total = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    return int(total - unread * (embedding.nbytes // embedding.shape[0]))


def cache_bytes(model: CausalLM, engine: engines.Runner, prompt: int, new: int) -> int:
    """Bytes of keys and values of one sequence that a token reads: the mean over its `new` tokens after the first."""
    config, cache = model.config, getattr(engine, "cache", None)
    size = (model.head_weight if cache is None else cache.data).dtype.itemsize
    lengths = np.arange(prompt + 1, prompt + new)  # with the token's own
    seen = sum(float(np.minimum(lengths, window or lengths).mean()) for window in config.layer_windows)
    return round(2 * config.num_key_value_heads * config.head_dim * size * seen)


GENERATION = [
    Column("case", "case", "text", "Sequences x tokens of a prompt + new tokens.", "label"),
    Column("first", "first token", "s", "Until every sequence has its first token.", "first.seconds"),
    Column("token", "token", "s", "Median time between two tokens of a sequence.", "token.seconds"),
    Column("half_width", "±", "share", "Half of the median's 95 % confidence interval.", "token.half_width"),
    Column("tokens_per_second", "tokens/s", "token/s", "Of all sequences."),
    Column("weights", "weights", "bytes", "Weights that a step reads, as stored."),
    Column("cache", "cache", "bytes", "Keys and values that a step reads, the mean over steps."),
    Column("bytes_per_second", "byte/s", "byte/s", "Weights and cache over a step's time.", "rate"),
    Column("share", "of a copy", "share", "Their rate as a share of a copy's."),
    Column("is_noisy", "note", "text", "Whether the machine was not quiet.", "token.note"),
    Column("engine", "engine", "text", "The engine that generated.", hidden=True),
]
