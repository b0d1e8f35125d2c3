"""A training step by op: how often each ran, how long it took, and the least that its bytes and FLOPs would take.

On the CPU ops are timed by the clock of the thread that runs them; of threads that share a batch the busiest counts. On
a GPU the marks stand inside the CUDA graph of a step, so that nothing of the host's is in the times.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from genesis import cuda
from genesis.array import Array
from genesis.backend import CPU, backend_for
from genesis.bench.limits import Limits, wait_for
from genesis.errors import DeviceError, OutOfMemoryError
from genesis.op import Op, observe
from genesis.profile.run.recorder import shadowed
from genesis.train.state import TrainState
from genesis_models.bench.schema import Breakdown, OpShare
from genesis_models.bench.steps import UNTIL_CAPTURED, GraphSteps, taking

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

__all__ = ["breakdown_of", "summed"]

STEPS = 3  # that times are the mean of
ENOUGH = 2.0  # seconds on the CPU, after which fewer steps must do


@dataclass
class _Run:
    """One op that ran, not inside another one.

    Attributes:
        bytes_seconds, flops_seconds: what its counted work takes at the limits.
        thread: that ran it.
        marks: events before and behind it on the GPU.
    """

    op: str
    bytes_seconds: float
    flops_seconds: float
    thread: int
    seconds: float = 0.0
    marks: tuple[int, int] = (0, 0)


@dataclass
class _Watch:
    """What `observe` calls. Views are left out: they run nothing.

    Attributes:
        mark: makes a mark on the GPU; None on the CPU. It may decline.
    """

    limits: Limits
    mark: Callable[[], int | None] | None = None
    runs: list[_Run] = field(default_factory=list)
    state: threading.local = field(default_factory=threading.local)

    def begins(self, op: Op) -> None:
        """An op begins."""
        if op.view is not None:
            return
        depth = getattr(self.state, "depth", 0)
        if depth == 0 and self.mark is not None:
            self.state.begun = self.mark()
        self.state.depth = depth + 1

    def ends(
        self, op: Op, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], seconds: float
    ) -> None:
        """An op has ended."""
        if op.view is not None:
            return
        self.state.depth -= 1
        if self.state.depth:
            return
        marks = (0, 0)
        if self.mark is not None:
            end = self.mark()
            if self.state.begun is None or end is None:
                return
            marks, seconds = (self.state.begun, end), 0.0
        cost, rate = op.cost(inputs, outputs, attrs), self.limits.flops_per_second
        work = cost.bytes / self.limits.bytes_per_second, cost.flops / rate if rate else 0.0
        self.runs.append(_Run(op.name, *work, threading.get_ident(), seconds, marks))


def breakdown_of(state: TrainState, limits: Limits, notes: list[str]) -> Breakdown | None:
    """A step of a run by op; None with a note where it cannot be told."""
    if limits.device == CPU:
        return _on_host(state, limits)
    try:
        return _on_gpu(state, limits, notes)
    except (DeviceError, OutOfMemoryError) as error:
        notes.append(f"no times of ops: {error.what}")
        return None


def _on_host(state: TrainState, limits: Limits) -> Breakdown:
    watch, take = _Watch(limits), taking(state, CPU, [])
    steps, total = 0, 0.0
    with observe(watch.ends, watch.begins):
        while steps < STEPS and total < ENOUGH:
            begun = time.perf_counter()
            take()
            total += time.perf_counter() - begun
            steps += 1
    return summed(watch.runs, total, steps)


def _on_gpu(state: TrainState, limits: Limits, notes: list[str]) -> Breakdown | None:
    """The marks are made while the step is captured, and read after replays."""
    device, told = limits.device, list[str]()
    gc.collect()  # the graphs of steps before refer to themselves
    cuda.empty_cache(device)
    backend = cast("CudaBackend", backend_for(device))
    driver, events = backend.driver, list[int]()

    def mark() -> int | None:
        if not driver.is_capturing(backend.stream):
            return None
        events.append(driver.create_event(True))
        driver.record_time(events[-1], backend.stream)
        return events[-1]

    watch, steps, dependent = _Watch(limits, mark), GraphSteps(state, device, told), driver.dependent
    try:
        # One kernel after the other: none beside the others, and none brought up before the one before has ended.
        driver.dependent = False
        with observe(watch.ends, watch.begins), shadowed(backend, beside=lambda nbytes: nullcontext()):
            for _ in range(UNTIL_CAPTURED):
                steps()
        if told or not watch.runs:
            notes.append("no times of ops: a step cannot be captured")
            return None
        total = 0.0
        for _ in range(STEPS):
            steps()
            wait_for(device)()
            for run in watch.runs:
                run.seconds += driver.elapsed(*run.marks)
            total += driver.elapsed(events[0], events[-1])
        steps.finish()
    finally:
        driver.dependent = dependent
        wait_for(device)()
        for event in events:
            driver.destroy_event(event)
    return summed(watch.runs, total, STEPS, replays=STEPS)


def summed(runs: Iterable[_Run], total: float, steps: int, replays: int = 1) -> Breakdown:
    """The runs by op, the longest first, for one step of `total / steps` seconds.

    Args:
        replays: how often each run's time was added up while it was noted once.
    """
    by_op: dict[str, list[_Run]] = {}
    for run in runs:
        by_op.setdefault(run.op, []).append(run)
    step = total / steps
    noted = steps if replays == 1 else 1
    ops = []
    for name, some in by_op.items():
        threads: dict[int, float] = {}
        for run in some:
            threads[run.thread] = threads.get(run.thread, 0.0) + run.seconds / steps
        seconds = max(threads.values())
        least = sum(max(run.bytes_seconds, run.flops_seconds) for run in some) / noted
        moved, computed = (sum(getattr(run, f"{what}_seconds") for run in some) for what in ("bytes", "flops"))
        ops.append(
            OpShare(
                op=name,
                calls=len(some) // noted,
                seconds=seconds,
                share=seconds / step,
                least=least,
                limit=None if not least else "compute" if computed > moved else "bandwidth",
            )
        )
    ops.sort(key=lambda each: -each.seconds)
    rest = max(step - sum(each.seconds for each in ops), 0.0)
    return Breakdown(seconds=step, ops=ops, rest=rest)
