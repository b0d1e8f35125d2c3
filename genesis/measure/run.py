"""Steps taken and recorded: some as they are, then as many under watch, so that what watching costs is known."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from genesis.array import Array
from genesis.backend import CPU, Device
from genesis.distributed.group import Alone, Group
from genesis.measure.limits import wait_for
from genesis.measure.memory import Category, MemoryWatch, Timeline, Track, timeline
from genesis.measure.recorder import Ranges, Recorder, shadowed
from genesis.measure.session import Recording, Session, marked
from genesis.nn import Module

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
class Recorded:
    """Steps of one kind.

    Attributes:
        plain: seconds of steps that nobody watched.
    """

    mode: Mode
    plain: list[float]
    steps: list[Recording]
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


def recorded_steps(subject: Subject, count: int, warm_up: int, ranges: Ranges | None = None) -> list[Recording]:
    """`count` steps under watch, after `warm_up` others under watch."""
    session = Session(Recorder(subject.model, ranges), subject.device, launched=subject.launched)
    found = []
    with session.watching(), _regions(subject, session), _frozen():
        for number in range(warm_up + count):
            wait_for(subject.device)()
            subject.begin()
            session.begin()
            _take(subject, session.recorder)
            recording = session.end()
            if number >= warm_up:
                found.append(recording)
            subject.settle()
    return found


def _take(subject: Subject, recorder: Recorder) -> None:
    with recorder.phase("data"):
        batches = subject.batches()
    subject.take(batches)


@contextmanager
def _regions(subject: Subject, session: Session) -> Iterator[None]:
    """Inside the block phases and collectives are marked."""
    with ExitStack() as stack:
        for of, method, phase in subject.regions:
            stack.enter_context(shadowed(of, **{method: session.recorder.marked(getattr(of, method), phase)}))
        for name in COLLECTIVES:
            stack.enter_context(shadowed(subject.group, **{name: marked(session, getattr(subject.group, name))}))
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


def memory_of(subject: Subject) -> tuple[Timeline, Recording]:
    """One more eager step, whose memory is followed by category."""
    recorder, wait = Recorder(subject.model), wait_for(subject.device)
    watch = MemoryWatch(subject.device, recorder.current, resets_peak=True)
    session = Session(recorder, CPU)  # without marks, which take memory
    with recorder.watching(), _regions(subject, session):
        gc.collect()
        wait()
        recorder.begin()
        with watch.watching():
            started = time.perf_counter()
            _take(subject, recorder)
            launched = time.perf_counter()
            subject.launched()
            wait()
            end = time.perf_counter()
    frames = recorder.end()
    found = timeline(watch, subject.persistent(), frames)
    subject.settle()
    samples = [(found.began + at, {str(key): size for key, size in totals.items()}) for at, totals in found.samples]
    track = Track("memory by category", samples)
    return found, Recording(started, launched, end, frames, [], [], started, [track])
