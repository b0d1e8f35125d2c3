"""The phases of a step: forward, backward and optimizer, separated where calls of the model and the optimizer end.

On the CPU the clock is read there. On a GPU events are recorded there, in the step's CUDA graph as well, so that the
step is the one that `genesis train` makes: nothing waits between the phases.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from genesis.backend import CPU, Device, backend_for
from genesis.measure.limits import wait_for
from genesis.measure.recorder import shadowed
from genesis.measure.timing import Plan, measure, summarize
from genesis.profile.schema import Time
from genesis.train.state import TrainState
from genesis.train.step import take_step
from genesis_cli.session.bench.schema import Phases
from genesis_cli.session.bench.steps import LR, MAX_NORM

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

Parts = tuple[float, float, float]  # seconds of forward, backward and optimizer
Taking = Callable[[], None]


def host_phases(state: TrainState, plan: Plan) -> Phases:
    """Steps on the CPU. Where threads share a batch, forward is their mean."""
    batches = cast(Any, state.loader).batches()

    def step() -> Parts:
        ends: list[float] = []  # of the loss in each thread
        begins: list[float] = []  # of the gradient norm
        with (
            shadowed(state.model, loss=_after(cast(Any, state.model).loss, lambda: ends.append(time.perf_counter()))),
            shadowed(
                state.optimizer,
                grad_norm=_before(state.optimizer.grad_norm, lambda: begins.append(time.perf_counter())),
            ),
        ):
            begun = time.perf_counter()
            take_step(state, [next(batches)], LR, MAX_NORM, CPU)
            ended = time.perf_counter()
        forward, backward = fmean(ends), begins[0]
        return forward - begun, backward - forward, ended - backward

    return _measured(step, plan)


@contextmanager
def marking_phases(state: TrainState, device: Device) -> Iterator[Callable[[Taking, Plan], Phases]]:
    """Steps that are made, or captured, inside the block have marks; what it gives measures what makes them."""
    backend = cast("CudaBackend", backend_for(device))
    driver, wait = backend.driver, wait_for(device)
    begun, forward, backward, ended = events = [driver.create_event(True) for _ in range(4)]

    def mark(event: int) -> Callable[[], None]:
        return lambda: driver.record_time(event, backend.stream)

    def phases(take: Taking, plan: Plan) -> Phases:
        def step() -> Parts:
            driver.record_event(begun, backend.stream)
            take()
            driver.record_event(ended, backend.stream)
            wait()
            return driver.elapsed(begun, forward), driver.elapsed(forward, backward), driver.elapsed(backward, ended)

        return _measured(step, plan)

    model, optimizer = cast(Any, state.model), state.optimizer
    try:
        with (
            shadowed(model, loss=_after(model.loss, mark(forward))),
            shadowed(optimizer, clip_factor=_before(optimizer.clip_factor, mark(backward))),
        ):
            yield phases
    finally:
        wait()
        for event in events:
            driver.destroy_event(event)


def _measured(step: Callable[[], Parts], plan: Plan) -> Phases:
    """All four times come from the same steps."""
    samples: list[tuple[float, ...]] = []

    def sample(count: int) -> float:
        steps = [step() for _ in range(count)]
        samples.append(tuple(fmean(parts) for parts in zip(*steps, strict=True)))
        return sum(map(sum, steps))

    whole = measure(sample, plan)
    parts = zip(*samples[-(whole.samples + whole.outliers) :], strict=True)  # those before were to warm up
    forward, backward, optimizer = (Time.of(summarize(part, whole.calls, plan.precision)) for part in parts)
    return Phases(forward=forward, backward=backward, optimizer=optimizer, step=Time.of(whole))


def _after(method: Callable[..., Any], tell: Callable[[], object]) -> Callable[..., Any]:
    """`method`, which calls `tell` when it has ended."""

    @functools.wraps(method)
    def call(*args: Any, **settings: Any) -> Any:
        result = method(*args, **settings)
        tell()
        return result

    return call


def _before(method: Callable[..., Any], tell: Callable[[], object]) -> Callable[..., Any]:
    """`method`, which calls `tell` when it begins."""

    @functools.wraps(method)
    def call(*args: Any, **settings: Any) -> Any:
        tell()
        return method(*args, **settings)

    return call
