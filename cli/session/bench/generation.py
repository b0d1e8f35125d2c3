"""Generation measured: for each batch the time to the first token and of each further one, and what a token reads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from genesis import Tensor
from genesis.backend import CPU, backend_for
from genesis.errors import DeviceError, GenesisError, OutOfMemoryError
from genesis.measure.limits import Limits, wait_for
from genesis.measure.run import Subject, recorded_steps
from genesis.measure.timing import Plan, measure, summarize
from genesis.op import observe
from genesis.profile.generation import GenerationRow
from genesis.profile.schema import Failure, Time
from genesis_cli.session.bench.breakdown import OpWatch, add_kernels, summed
from genesis_cli.session.bench.measuring import failure_of, forget
from genesis_cli.session.bench.schema import Breakdown
from genesis_cli.session.bench.steps import UNTIL_CAPTURED
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.engine import Request, Runner, Sampling
from genesis_models.engine.device_rows import release
from genesis_models.generate import engine_for
from genesis_models.quantize import QUANTIZED, quantize
from genesis_models.registry import build

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

NEW = 64  # tokens drawn for each sequence
TOP_K = 50  # where tokens are drawn by chance, as the schema has it
RECORDED = 3  # runs whose kernels are recorded


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
    plan: Plan = field(default_factory=lambda: Plan(seconds=10.0, warm_up=0.5, most_calls=1))

    @property
    def sampling(self) -> Sampling:
        """For every request."""
        return Sampling(self.temperature, TOP_K if self.temperature else None)


def bench_generation(
    config: ModelConfig,
    cases: Iterable[tuple[int, int]],
    limits: Limits,
    settings: Settings,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[GenerationRow, Breakdown | None, list[str]] | Failure]:
    """A row for each (batch, prompt) of a model with random weights, in order; a case that fails gives a `Failure`.

    The last case has the times of ops, too, and notes on what is missing there.

    Args:
        tell: called with what is measured next.
    """
    cases = list(cases)
    model = build(config, seed=0, device=str(limits.device), dtype=settings.built)
    if settings.dtype in QUANTIZED:
        quantize(model, settings.dtype)
    for i, (batch, prompt) in enumerate(cases, 1):
        tell(f"{i} of {len(cases)}: {batch}x{prompt}+{settings.new}")
        found: tuple[GenerationRow, Breakdown | None, list[str]] | Failure
        try:
            row, notes = generation_row(model, batch, prompt, limits, settings), list[str]()
            by_op = generation_breakdown(model, batch, prompt, limits, settings, notes) if i == len(cases) else None
            found = row, by_op, notes
        except (GenesisError, MemoryError) as error:
            found = failure_of("generation", f"{batch}x{prompt}+{settings.new}", error)
        forget(model, limits.device)
        yield found


def generation_row(model: CausalLM, batch: int, prompt: int, limits: Limits, settings: Settings) -> GenerationRow:
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
    weights, cache = weight_bytes(model, batch), batch * cache_bytes(model, engine, prompt, settings.new)
    rate = (weights + cache) / token.seconds
    return GenerationRow(
        batch=batch,
        prompt=prompt,
        new=settings.new,
        engine=type(engine).__name__,
        first=Time.of(summarize(firsts[-(token.samples + token.outliers) :], 1, settings.plan.precision)),
        token=Time.of(token),
        tokens_per_second=batch / token.seconds,
        weight_bytes=weights,
        cache_bytes=cache,
        bytes_per_second=rate,
        share=rate / limits.bytes_per_second,
    )


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


def generation_breakdown(
    model: CausalLM, batch: int, prompt: int, limits: Limits, settings: Settings, notes: list[str]
) -> Breakdown | None:
    """A step of all sequences by op; None with a note where it cannot be measured."""
    requests = _requests(model, batch, prompt, settings.new, settings)
    engine = engine_for(model, requests, rows=batch)
    if limits.device == CPU:
        return _on_host(engine, requests, limits)
    try:
        return _on_gpu(model, engine, requests, limits, notes)
    except (DeviceError, OutOfMemoryError) as error:
        notes.append(f"no times of ops: {error.what}")
        return None


def _on_host(engine: Runner, requests: list[Request], limits: Limits) -> Breakdown:
    """The steps after the prompts."""
    watch, tokens, begun = OpWatch(limits), engine.run(requests), set[int]()
    for token in tokens:
        begun.add(token.request)
        if len(begun) == len(requests):
            break
    start = time.perf_counter()
    with observe(watch.ends, watch.begins):
        _drain(tokens)
    return summed(watch.runs, time.perf_counter() - start, requests[0].max_tokens - 1)


def _on_gpu(
    model: CausalLM, engine: Runner, requests: list[Request], limits: Limits, notes: list[str]
) -> Breakdown | None:
    """Ops are noted while a step is captured, their kernels timed in its replays."""
    backend = cast("CudaBackend", backend_for(limits.device))
    subject = Subject(
        model=model,
        device=limits.device,
        batches=tuple,
        take=lambda batches: _drain(engine.run(requests)),
        settle=lambda: None,
        regions=(),
        persistent=dict[Any, Any],
    )
    watch = OpWatch(limits, lambda: backend.driver.is_capturing(backend.stream))
    release(model)  # steps are captured under watch
    with observe(watch.ends, watch.begins):
        runs = recorded_steps(subject, RECORDED, UNTIL_CAPTURED)
    inside = [[kernel for kernel in run.kernels if kernel.in_graph] for run in runs]
    if not watch.runs or not all(inside):
        notes.append("no times of ops: the engine's steps are no CUDA graphs")
        return None
    for kernels in inside:
        add_kernels(watch.runs, kernels)
    steps = RECORDED * requests[0].max_tokens
    total = sum(kernel.end - kernel.start for kernels in inside for kernel in kernels)
    return summed(watch.runs, total, steps, replays=steps)
