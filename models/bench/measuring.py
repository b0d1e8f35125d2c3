"""Steps measured: for each batch and length a row with the times of a step and of its phases, its memory, its rates.

A step is that of `genesis train`, made from the same parts: `take_step` on the CPU, `DeviceSteps` on a GPU. Phases are
told apart in `take_step`, by the clock at the ends of its calls of the model and the optimizer.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final, cast

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.bench.limits import Limits, wait_for
from genesis.bench.timing import Plan, Timing, measure, of_wall, summarize
from genesis.errors import GenesisError, OutOfMemoryError
from genesis.profile.memory import peak_bytes
from genesis.profile.schema import Failure, Time
from genesis.tensor import Tensor
from genesis.train.config import OptimConfig
from genesis.train.device_steps import DeviceSteps
from genesis.train.optimizer import build_optimizer
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_models.bench.cases import RandomTokens, step_flops
from genesis_models.bench.schema import Memory, Phases, Row, Scaling
from genesis_models.blocks import CausalLM
from genesis_models.config import ModelConfig
from genesis_models.memory import memory_plan
from genesis_models.registry import build

__all__ = ["FAST", "OPTIMIZER", "Settings", "bench_model", "measured_row", "scaling_of"]

FAST = Plan(precision=0.05, seconds=1.0, warm_up=0.2, most_calls=1)
OPTIMIZER: Final = "adamw"
LR, MAX_NORM = 1e-5, 1.0
EVERY = 64  # steps between two readings of their figures
UNTIL_CAPTURED = 4  # two as they are, one captured, one replayed


@dataclass(frozen=True)
class Settings:
    """How steps are taken, and measured.

    Attributes:
        dtype: of weights and activations.
        checkpointing: of activations: none, selective or full.
        plan: how hard to try, for each case.
    """

    dtype: str
    checkpointing: str = "none"
    plan: Plan = field(default_factory=lambda: Plan(seconds=10.0, warm_up=0.5, most_calls=1))


def bench_model(
    config: ModelConfig, cases: Iterable[tuple[int, int]], limits: Limits, settings: Settings
) -> Iterator[Row | Failure]:
    """A row for each (batch, length), in order. A case that fails gives a `Failure`, and the others are measured."""
    model = build(config, seed=0, device=str(limits.device), dtype=settings.dtype)
    model.activation_checkpointing = settings.checkpointing
    model.train()
    for batch, length in cases:
        found: Row | Failure
        try:
            found = measured_row(model, batch, length, limits, settings)
        except (GenesisError, MemoryError) as error:
            found = _failure(f"{batch}x{length}", error)
        _forget(model, limits.device)  # not while the error is there, whose frames hold the case's memory
        yield found


def _failure(label: str, error: GenesisError | MemoryError) -> Failure:
    known = error if isinstance(error, GenesisError) else OutOfMemoryError(f"the host has no memory: {error}")
    return Failure(name="step", label=label, error=known.what, exit_code=known.exit_code)


def _forget(model: CausalLM, device: Device) -> None:
    """Give back what a case took, the weights aside."""
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    if device != CPU:
        cuda.empty_cache(device)


def measured_row(model: CausalLM, batch: int, length: int, limits: Limits, settings: Settings) -> Row:
    """Take steps of one size, with an optimizer of their own."""
    config, device, notes = model.config, limits.device, list[str]()
    loader: Any = RandomTokens(batch, length, config.vocab_size)
    optim = OptimConfig(name=OPTIMIZER, lr=LR)
    state = TrainState(model, build_optimizer(optim, model.named_parameters(), 0), loader)
    phases = _phases(state, device, settings.plan)
    if device == CPU:
        step, is_captured, memory = phases.step, False, _host_memory(state)
    else:
        captured, peak, is_captured = _captured(state, device, settings.plan, notes)
        step = Time.of(captured)
        plan = memory_plan(
            config,
            batch=batch,
            length=length,
            activation_checkpointing=settings.checkpointing,
            dtype=settings.dtype,
            optim=optim,
        )
        memory = Memory(**_lasting(state), peak=peak, planned=plan.parts)
    flops, peak_rate = step_flops(config, batch, length), limits.flops_per_second
    return Row(
        batch=batch,
        length=length,
        step=step,
        is_captured=is_captured,
        phases=phases,
        tokens_per_second=batch * length / step.seconds,
        flops=flops,
        flops_per_second=flops / step.seconds,
        mfu=None if peak_rate is None else flops / step.seconds / peak_rate,
        memory=memory,
        notes=notes,
    )


# --- Times ------------------------------------------------------------------------------------------------------------


class _Noted:
    """Stands for a model or an optimizer, and notes when calls of one of its methods begin and end."""

    def __init__(self, of: object, method: str, clock: Callable[[], float]) -> None:
        self._of, self._method, self._clock = of, method, clock
        self.calls: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        return self._noting(found) if name == self._method else found

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            begun = self._clock()
            result = method(*args, **settings)
            self.calls.append((begun, self._clock()))
            return result

        return call


def _phases(state: TrainState, device: Device, plan: Plan) -> Phases:
    """Steps kernel by kernel. All four times come from the same steps."""
    wait, batches = wait_for(device), cast(Any, state.loader).batches()
    samples: list[tuple[float, ...]] = []

    def clock() -> float:
        wait()
        return time.perf_counter()

    def sample(count: int) -> float:
        steps = [_step_phases(state, next(batches), device, clock) for _ in range(count)]
        samples.append(tuple(fmean(parts) for parts in zip(*steps, strict=True)))
        return sum(map(sum, steps))

    whole = measure(sample, plan)
    parts = zip(*samples[-(whole.samples + whole.outliers) :], strict=True)  # those before were to warm up
    forward, backward, optimizer = (Time.of(summarize(part, whole.calls, plan.precision)) for part in parts)
    return Phases(forward=forward, backward=backward, optimizer=optimizer, step=Time.of(whole))


def _step_phases(
    state: TrainState, batch: Any, device: Device, clock: Callable[[], float]
) -> tuple[float, float, float]:
    """Seconds of forward, backward and optimizer in one step."""
    model, optimizer = _Noted(state.model, "loss", clock), _Noted(state.optimizer, "grad_norm", clock)
    noted = TrainState(cast(Any, model), cast(Any, optimizer), state.loader)
    begun = clock()
    take_step(noted, [batch], LR, MAX_NORM, device)
    ended = clock()
    forward = fmean(end for _, end in model.calls)
    ((gradients, _),) = optimizer.calls
    return forward - begun, gradients - forward, ended - gradients


def _captured(state: TrainState, device: Device, plan: Plan, notes: list[str]) -> tuple[Timing, int, bool]:
    """Time of a step as CUDA graph, the most memory that was allocated, and whether it is a graph indeed."""
    state.optimizer.zero_grad()
    gc.collect()
    cuda.empty_cache(device)
    cuda.reset_peak_memory_stats(device)
    steps, batches = DeviceSteps(state, device, MAX_NORM, EVERY, notes.append), cast(Any, state.loader).batches()

    def take() -> None:
        steps.take([next(batches)], LR)
        if state.step % EVERY == 0:
            steps.reading().results()

    state.step = 0
    for _ in range(UNTIL_CAPTURED):
        take()
    peak = cuda.max_memory_allocated(device)
    found = measure(of_wall(take, wait_for(device)), plan)
    steps.reading().results()  # raises where a loss was not finite
    return found, peak, not notes


# --- Memory -----------------------------------------------------------------------------------------------------------


def _lasting(state: TrainState) -> dict[str, int]:
    """Bytes of what is there from step to step, counted from the tensors."""
    parameters = [p for _, p in state.model.named_parameters()]
    kept = (x for values in state.optimizer.state.values() for x in values.values() if isinstance(x, Tensor))
    return {
        "weights": sum(p.array.nbytes for p in parameters),
        "gradients": sum(p.grad.array.nbytes for p in parameters if p.grad is not None),
        "optimizer": sum(x.array.nbytes for x in kept),
    }


def _host_memory(state: TrainState) -> Memory:
    """What lasts, and the most that one more step takes beyond it."""
    batch, lasting = state.loader.batch(0, 0), _lasting(state)
    beyond = peak_bytes(lambda: take_step(state, [batch], LR, MAX_NORM, CPU), CPU)
    return Memory(**lasting, peak=sum(lasting.values()) + beyond, planned=None)


# --- What follows -----------------------------------------------------------------------------------------------------


def scaling_of(rows: Iterable[Row]) -> list[Scaling]:
    """The ratios of neighbours: batches at each length, and lengths at each batch."""
    times = {(row.batch, row.length): row.step.seconds / (row.batch * row.length) for row in rows}
    found = []
    for (batch, length), seconds in sorted(times.items()):
        longer = min((t for b, t in times if b == batch and t > length), default=None)
        larger = min((b for b, t in times if t == length and b > batch), default=None)
        if larger is not None:
            ratio = times[larger, length] / seconds
            found.append(Scaling(axis="batch", fixed=length, start=batch, end=larger, ratio=ratio))
        if longer is not None:
            ratio = times[batch, longer] / seconds
            found.append(Scaling(axis="length", fixed=batch, start=length, end=longer, ratio=ratio))
    return sorted(found, key=lambda s: (s.axis, s.fixed, s.start))
