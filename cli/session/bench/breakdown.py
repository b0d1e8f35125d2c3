"""A training step by op: how often each ran, how long it took, and the least that its bytes and FLOPs would take.

On the CPU ops are timed by the clock of the thread that runs them; of threads that share a batch the busiest counts. On
a GPU an op takes what its kernels take inside the CUDA graph of a step, as `genesis.measure.run` records them, so that
nothing of the host's is in the times.
"""

from __future__ import annotations

import bisect
import gc
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from genesis import cuda
from genesis.array import Array
from genesis.backend import CPU, backend_for
from genesis.errors import DeviceError, OutOfMemoryError
from genesis.measure.limits import Limits
from genesis.measure.marks import Kernel
from genesis.measure.run import Subject, recorded_steps
from genesis.op import Op, observe
from genesis.train.state import TrainState
from genesis_cli.session.bench.schema import Breakdown, OpShare
from genesis_cli.session.bench.steps import UNTIL_CAPTURED, GraphSteps, taking

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

STEPS = 3  # that times are the mean of
ENOUGH = 2.0  # seconds on the CPU, after which fewer steps must do


@dataclass
class _Run:
    """One op that ran, not inside another one.

    Attributes:
        bytes_seconds, flops_seconds: what its counted work takes at the limits.
        thread: that ran it.
        seconds: that it took, over all steps that are measured.
        start, end: of the call on the host, by `time.perf_counter`.
    """

    op: str
    bytes_seconds: float
    flops_seconds: float
    thread: int
    seconds: float = 0.0
    start: float = 0.0
    end: float = 0.0


@dataclass
class OpWatch:
    """What `observe` calls. Views are left out: they run nothing.

    Attributes:
        is_captured: whether what runs now goes into a CUDA graph, whose ops alone are noted; None notes all of them.
    """

    limits: Limits
    is_captured: Callable[[], bool] | None = None
    runs: list[_Run] = field(default_factory=list)
    state: threading.local = field(default_factory=threading.local)

    def begins(self, op: Op) -> None:
        """An op begins."""
        if op.view is not None:
            return
        depth = getattr(self.state, "depth", 0)
        if depth == 0:
            self.state.start = time.perf_counter()
        self.state.depth = depth + 1

    def ends(
        self, op: Op, inputs: tuple[Any, ...], outputs: tuple[Array, ...], attrs: dict[str, Any], seconds: float
    ) -> None:
        """An op has ended."""
        if op.view is not None:
            return
        self.state.depth -= 1
        if self.state.depth or not (self.is_captured is None or self.is_captured()):
            return
        end = time.perf_counter()
        cost, rate = op.cost(inputs, outputs, attrs), self.limits.flops_per_second
        work = cost.bytes / self.limits.bytes_per_second, cost.flops / rate if rate else 0.0
        taken = seconds if self.is_captured is None else 0.0  # its kernels' follow
        self.runs.append(_Run(op.name, *work, threading.get_ident(), taken, self.state.start, end))


def breakdown_of(state: TrainState, limits: Limits, notes: list[str]) -> Breakdown | None:
    """A step of a run by op; None with a note where it cannot be measured."""
    if limits.device == CPU:
        return _on_host(state, limits)
    try:
        return _on_gpu(state, limits, notes)
    except (DeviceError, OutOfMemoryError) as error:
        notes.append(f"no times of ops: {error.what}")
        return None


def _on_host(state: TrainState, limits: Limits) -> Breakdown:
    watch, take = OpWatch(limits), taking(state, CPU, [])
    steps, total = 0, 0.0
    with observe(watch.ends, watch.begins):
        while steps < STEPS and total < ENOUGH:
            begun = time.perf_counter()
            take()
            total += time.perf_counter() - begun
            steps += 1
    return summed(watch.runs, total, steps)


def _on_gpu(state: TrainState, limits: Limits, notes: list[str]) -> Breakdown | None:
    """Ops are noted while the step is captured, their kernels timed in replays."""
    device, failed = limits.device, list[str]()
    gc.collect()  # the graphs of steps before refer to themselves
    cuda.empty_cache(device)
    backend, take = cast("CudaBackend", backend_for(device)), GraphSteps(state, device, failed)
    subject = Subject(
        model=cast(Any, state.model),
        device=device,
        batches=tuple,
        take=lambda batches: take(),  # which makes its own
        settle=take.finish,
        regions=(),
        persistent=lambda: cast(Any, state.persistent()),
    )
    watch = OpWatch(limits, lambda: backend.driver.is_capturing(backend.stream))
    with observe(watch.ends, watch.begins):
        steps = recorded_steps(subject, STEPS, UNTIL_CAPTURED)
    if failed or not watch.runs:
        notes.append("no times of ops: a step cannot be captured")
        return None
    total = 0.0
    for step in steps:
        inside = [kernel for kernel in step.kernels if kernel.in_graph]
        total += inside[-1].end - inside[0].start
        add_kernels(watch.runs, inside)
    return summed(watch.runs, total, STEPS, replays=STEPS)


def add_kernels(runs: Sequence[_Run], kernels: Iterable[Kernel]) -> None:
    """Each kernel's time to the run that launched it; `runs` are in order, and none contains another."""
    starts = [run.start for run in runs]
    for kernel in kernels:
        index = bisect.bisect_right(starts, kernel.launched) - 1
        if index >= 0 and kernel.launched <= runs[index].end:
            runs[index].seconds += kernel.end - kernel.start


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
