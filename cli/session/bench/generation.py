"""Generation measured: for each batch the time to the first token and of each further one, and what a token reads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from genesis import Tensor
from genesis.backend import CPU
from genesis.errors import DeviceError, GenesisError, OutOfMemoryError
from genesis.measure.limits import Limits, wait_for
from genesis.measure.record import Column, Failure, Table, table
from genesis.measure.run import Subject
from genesis.measure.timing import Plan, Timing, measure, summarize
from genesis_cli.session.bench.steps import THOROUGH, UNTIL_CAPTURED, Parts, failure_of, forget, recorded_parts
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.engine import Request, Runner, Sampling
from genesis_models.engine.device_rows import release
from genesis_models.generate import engine_for
from genesis_models.registry import build
from genesis_models.weights import QUANTIZED, quantize

NEW = 64  # tokens drawn for each sequence
TOP_K = 50  # where tokens are drawn by chance, as the schema has it


@dataclass(frozen=True)
class Settings:
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
    cases: Iterable[tuple[int, int]],
    limits: Limits,
    settings: Settings,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Generation, Parts | None, list[str]] | Failure]:
    """Measure each (batch, prompt) of a model with random weights; a case that fails gives a `Failure`.

    The last case has its parts, too, and notes on what is missing there.

    Args:
        tell: called with what is measured next.
    """
    cases = list(cases)
    model = build(config, seed=0, device=str(limits.device), dtype=settings.built)
    if settings.dtype in QUANTIZED:
        quantize(model, settings.dtype)
    for i, (batch, prompt) in enumerate(cases, 1):
        tell(f"{i} of {len(cases)}: {batch}x{prompt}+{settings.new}")
        found: tuple[Generation, Parts | None, list[str]] | Failure
        try:
            row, notes = generated(model, batch, prompt, limits, settings), list[str]()
            parts = generation_parts(model, batch, prompt, limits, settings, notes) if i == len(cases) else None
            found = row, parts, notes
        except (GenesisError, MemoryError) as error:
            found = failure_of("generation", f"{batch}x{prompt}+{settings.new}", error)
        forget(model, limits.device)
        yield found


def generated(model: CausalLM, batch: int, prompt: int, limits: Limits, settings: Settings) -> Generation:
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


def _requests(model: CausalLM, batch: int, prompt: int, new: int, settings: Settings) -> list[Request]:
    rng = np.random.default_rng((batch, prompt))
    ids = rng.integers(0, model.config.vocab_size, (batch, prompt)).tolist()
    return [Request(each, settings.sampling, new, sequence=i) for i, each in enumerate(ids)]


def _drain(tokens: Iterator[object]) -> None:
    deque(tokens, maxlen=0)


# --- What a token reads -----------------------------------------------------------------------------------------------


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


# --- By op ------------------------------------------------------------------------------------------------------------


def generation_parts(
    model: CausalLM, batch: int, prompt: int, limits: Limits, settings: Settings, notes: list[str]
) -> Parts | None:
    """A step of all sequences, divided; None with a note where it cannot be measured.

    On the CPU the prompts' pass is in it, on a GPU the captured steps alone.
    """
    requests = _requests(model, batch, prompt, settings.new, settings)
    engine = engine_for(model, requests, rows=batch)
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
        found = recorded_parts(subject, limits, 0 if limits.device == CPU else UNTIL_CAPTURED, settings.new)
    except (DeviceError, OutOfMemoryError) as error:
        notes.append(f"no times of ops: {error.what}")
        return None
    if found is None:
        notes.append("no times of ops: the engine's steps are no CUDA graphs")
    return found


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
