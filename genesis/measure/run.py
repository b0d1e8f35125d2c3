"""Steps taken and recorded: some as they are, then as many under watch, so that what watching costs is known."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from genesis.array import Array
from genesis.backend import CPU, Device, backend_for
from genesis.distributed.group import Alone, Group
from genesis.measure.limits import wait_for
from genesis.measure.marks import Kernel, Marks
from genesis.measure.memory import Category, MemoryWatch, Timeline
from genesis.measure.nvtx import Ranges
from genesis.measure.recorder import Recorder, shadowed
from genesis.measure.spans import Frame
from genesis.measure.waits import Wait, Waits
from genesis.nn import Module

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

Mode = Literal["eager", "captured"]
COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")  # of a step, by the methods of a group


@dataclass(frozen=True)
class Subject:
    """A training run as it is measured.

    Attributes:
        batches: the next step's batches.
        take: launches a step on them.
        begin: waits until all ranks begin a step.
        launched: called when a step is launched, before a wait for it, which has no end where another rank is gone.
        settle: reads the figures of the steps so far, outside of what is measured.
        regions: (object, method, phase): what belongs to which phase, apart from backward.
        persistent: the arrays that stay from step to step, by what they are for.
        group: whose collectives are a part of a step.
    """

    model: Module
    device: Device
    batches: Callable[[], Sequence[Any]]
    take: Callable[[Sequence[Any]], None]
    settle: Callable[[], None]
    regions: Sequence[tuple[object, str, str]]
    persistent: Callable[[], Mapping[Category, Sequence[Array]]]
    group: Group = field(default_factory=Alone)
    begin: Callable[[], None] = lambda: None
    launched: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class StepRecord:
    """A step: its beginning and end by `time.perf_counter`, and what happened in it.

    Attributes:
        launched: when the host had launched everything.
        marked: from when the kernels' times are counted.
    """

    start: float
    launched: float
    end: float
    frames: list[Frame]
    kernels: list[Kernel]
    waits: list[Wait]
    marked: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Recorded:
    """Steps of one kind.

    Attributes:
        plain: seconds of steps that nobody watched.
    """

    mode: Mode
    plain: list[float]
    steps: list[StepRecord]
    notes: list[str] = field(default_factory=list)


def plain_steps(subject: Subject, count: int, warm_up: int) -> list[float]:
    """Seconds of each of `count` steps after `warm_up` others, each waited for."""
    wait, seconds = wait_for(subject.device), []
    for number in range(warm_up + count):
        wait()
        subject.begin()
        started = time.perf_counter()
        subject.take(subject.batches())
        subject.launched()
        wait()
        if number >= warm_up:
            seconds.append(time.perf_counter() - started)
        subject.settle()
    return seconds


def recorded_steps(subject: Subject, count: int, warm_up: int, ranges: Ranges | None = None) -> list[StepRecord]:
    """`count` steps under watch, after `warm_up` others under watch."""
    recorder, waits = Recorder(subject.model, ranges), Waits(subject.device)
    marks = None if subject.device == CPU else Marks(_backend(subject), recorder.location, subject.launched)
    found = []
    try:
        with _watched(subject, recorder, marks), waits.watching(), _frozen():
            for number in range(warm_up + count):
                record = _step(subject, recorder, marks, waits)
                if number >= warm_up:
                    found.append(record)
                subject.settle()
    finally:
        if marks is not None:
            wait_for(subject.device)()
            marks.close()
    return found


@contextmanager
def _watched(subject: Subject, recorder: Recorder, marks: Marks | None) -> Iterator[None]:
    """Inside the block all watches are on."""
    with ExitStack() as stack:
        stack.enter_context(recorder.watching())
        if marks is not None:
            recorder.after_op.append(marks.op_ended)
            stack.enter_context(marks.watching())
        for of, method, phase in subject.regions:
            stack.enter_context(shadowed(of, **{method: recorder.marked(getattr(of, method), phase)}))
        for name in COLLECTIVES:
            collective = getattr(subject.group, name)
            marked = collective if marks is None else marks.collective(collective)
            stack.enter_context(shadowed(subject.group, **{name: recorder.collective(marked)}))
        yield


@contextmanager
def _frozen() -> Iterator[None]:
    """Inside the block the collector does not go through what was there before: what is recorded would call it more
    often than a step does.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _step(subject: Subject, recorder: Recorder, marks: Marks | None, waits: Waits) -> StepRecord:
    wait = wait_for(subject.device)
    wait()
    subject.begin()
    recorder.begin()
    marked = time.perf_counter()
    if marks is not None:
        marks.begin()
    waits.found, waits.on = [], True
    start = time.perf_counter()
    with recorder.phase("data"):
        batches = subject.batches()
    subject.take(batches)
    launched, waits.on = time.perf_counter(), False
    subject.launched()
    wait()
    end = time.perf_counter()
    kernels = [] if marks is None else marks.kernels()
    return StepRecord(start, launched, end, recorder.frames, kernels, waits.found, marked)


def memory_of(subject: Subject) -> Timeline:
    """One more step, whose memory is followed."""
    recorder = Recorder(subject.model)
    watch = MemoryWatch(subject.device, recorder.location)
    recorder.after_op.append(watch.op_ended)
    wait = wait_for(subject.device)
    with _watched(subject, recorder, None):
        gc.collect()
        wait()
        recorder.begin()
        with watch.watching():
            with recorder.phase("data"):
                batches = subject.batches()
            subject.take(batches)
            subject.launched()
            wait()
    found = watch.timeline(subject.persistent(), recorder.frames)
    subject.settle()
    return found


def _backend(subject: Subject) -> CudaBackend:
    return cast("CudaBackend", backend_for(subject.device))
