"""Measures the steps of a run, unwatched and recorded, and divides a step by phase, module, op and kernel.

The rows of each of those tables add up to the step. Unwatched steps show what watching costs.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.measure.limits import Limits, wait_for
from genesis.measure.record import Column, Table, format_seconds, format_share, table
from genesis.measure.recorder import NOTHING, Key, Nvtx, Recorder, aggregated, by_key, decorated
from genesis.measure.session import Recording, Session
from genesis.nn import Module

PHASES = ("forward", "backward", "optimizer", "data", "idle")
MOST = 12  # rows of a table that people are shown
UNTIL_CAPTURED = 4  # steps on a GPU: two are eager, one is captured, one is replayed


@dataclass(frozen=True)
class Subject:
    """A training run to measure.

    Attributes:
        batches: returns the next step's batches.
        take: launches a step on them.
        settle: reads the figures of the steps so far; its time is not measured.
        regions: (object, method, phase): the methods that make up each phase, except backward.
        begin: waits until all ranks begin a step.
        launched: called after a step is launched, before a wait for it.
    """

    model: Module
    device: Device
    batches: Callable[[], Sequence[Any]]
    take: Callable[[Sequence[Any]], None]
    settle: Callable[[], object]
    regions: Sequence[tuple[object, str, str]]
    begin: Callable[[], None] = lambda: None
    launched: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Recorded:
    """Steps of one kind; `plain` are the seconds of unwatched ones."""

    mode: Literal["eager", "captured"]
    plain: list[float]
    steps: list[Recording]
    notes: list[str] = field(default_factory=list)


def step_seconds(subject: Subject) -> float:
    """Wall time of a step that all ranks begin together."""
    wait = wait_for(subject.device)
    wait()
    subject.begin()
    started = time.perf_counter()
    subject.take(subject.batches())
    subject.launched()  # before the wait, which never ends where another rank is gone
    wait()
    return time.perf_counter() - started


def plain_steps(subject: Subject, count: int, warm_up: int) -> list[float]:
    """Seconds of each of `count` steps after `warm_up` others."""
    seconds = []
    for _ in range(warm_up + count):
        seconds.append(step_seconds(subject))
        subject.settle()
    return seconds[warm_up:]


def free_graphs(device: Device) -> None:
    """Free the memory of CUDA graphs that nothing uses any more; they refer to themselves."""
    gc.collect()
    if device != CPU:
        cuda.empty_cache(device)


def recorded_steps(
    subject: Subject, count: int, warm_up: int, ranges: Nvtx | None = None, *, has_memory: bool = False
) -> list[Recording]:
    """Recordings of `count` steps after `warm_up` others; with memory they have no kernels."""
    if has_memory:  # on a GPU, marks of kernels would take memory
        session = Session(Recorder(subject.model), CPU, [subject.device])
    else:
        session = Session(Recorder(subject.model, ranges, has_costs=True), subject.device)
    batches, wait = session.recorder.phase("data")(subject.batches), wait_for(subject.device)
    found = []
    with ExitStack() as stack:
        stack.enter_context(session.watching())
        for owner, method, phase in subject.regions:
            stack.enter_context(decorated(owner, **{method: session.recorder.phase(phase)}))
        stack.enter_context(_frozen())
        for number in range(warm_up + count):
            wait()
            session.begin()
            subject.take(batches())
            if has_memory:
                wait()
            recording = session.end()
            if number >= warm_up:
                found.append(recording)
            subject.settle()
    return found


@contextmanager
def _frozen() -> Iterator[None]:
    """Hide existing objects from the garbage collector, which recorded objects would trigger more often."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


Entry = tuple[tuple[str, ...], float, float, int]  # names of a row, seconds of the step, seconds on the host, calls


class Sums:
    """A mean recorded step. On a GPU its time runs from the first kernel's start to the last one's end.

    Args:
        limits: compares the times of ops with the least that their bytes and FLOPs take.
    """

    def __init__(self, recorded: Recorded, on_gpu: bool, limits: Limits | None = None) -> None:
        self.mode, self.steps, self.on_gpu, self._limits = recorded.mode, recorded.steps, on_gpu, limits
        self.measure, self.count = "gpu" if on_gpu else "wall", len(recorded.steps)
        self.entries = list[tuple[Key, float, float]]()
        for step in self.steps:
            host = by_key(step.frames, step.start, step.end)
            self.entries += [(key, 0.0 if on_gpu else seconds, seconds) for key, seconds in host.items()]
            self.entries += [(key, seconds, 0.0) for key, seconds in kernel_seconds(step).items()]
        self.whole = sum(seconds for _, seconds, _ in self.entries) / self.count
        self.idle = sum(seconds for key, seconds, _ in self.entries if key == NOTHING) / self.count
        self.attributed = self.whole - self.idle
        self.plain = statistics.median(recorded.plain)
        self.watched = statistics.median(step.seconds for step in self.steps)
        self.overhead = self.watched / self.plain - 1
        self.launches = statistics.fmean(len(step.kernels) for step in self.steps) if on_gpu else None
        self.launched = statistics.fmean(step.launched - step.start for step in self.steps) if on_gpu else None

    def rows(self, entries: Iterable[Entry], *titles: str) -> list[dict[str, Any]]:
        """Rows by name, the longest first."""
        sums = defaultdict[tuple[str, ...], list[float]](lambda: [0.0, 0.0, 0.0])
        for names, *amounts in entries:
            sums[names] = [a + b for a, b in zip(sums[names], amounts, strict=True)]
        rows = []
        for names, amounts in sorted(sums.items(), key=lambda item: [-amount for amount in item[1]]):
            seconds, host, calls = (amount / self.count for amount in amounts)
            share = seconds / self.whole if self.whole else 0.0
            figures = {"seconds": seconds, "share": share, "cpu_seconds": host or None, "calls": calls or None}
            rows.append({**dict(zip(titles, names, strict=True)), **figures})
        return rows

    def parts(self, name: Callable[[Key], str], calls: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Rows by a name of each key; `calls` has a name for each call."""
        entries: list[Entry] = [((name(key),), seconds, host, 0) for key, seconds, host in self.entries]
        return self.rows([*entries, *(((each,), 0.0, 0.0, 1) for each in calls)], "name")

    def phases(self) -> list[dict[str, Any]]:
        rows = self.parts(lambda key: key.phase)
        return sorted(rows, key=lambda row: PHASES.index(row["name"]) if row["name"] in PHASES else len(PHASES))

    def ops(self) -> list[dict[str, Any]]:
        if self.mode == "captured" and self.on_gpu:  # a graph calls no ops, but it has their kernels
            calls = [(k.op, k.frame) for step in self.steps for k in step.kernels if k.is_first]
        else:
            calls = [(frame.name, frame) for step in self.steps for frame in step.frames if frame.level == "op"]
        rows = self.parts(lambda key: key.op, (op for op, _ in calls))
        if (limits := self._limits) is not None:
            least = defaultdict[str, list[float]](lambda: [0.0, 0.0])  # seconds by bytes, and by FLOPs
            for op, frame in calls:
                least[op][0] += frame.nbytes / limits.bytes_per_second / self.count
                least[op][1] += frame.flops / (limits.flops_per_second or math.inf) / self.count
            for row in (row for row in rows if row["seconds"] and row["name"] in least):
                moved, computed = least[row["name"]]
                rates = {"bandwidth": moved / row["seconds"] or None, "compute": computed / row["seconds"] or None}
                row.update(rates, above=max(row["seconds"] - max(moved, computed), 0.0))
        return rows

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        kernels = [(kernel.op, kernel) for step in self.steps for kernel in step.kernels]
        timed = [((op, kernel.name), kernel.seconds, 0.0, 1) for op, kernel in kernels if not kernel.is_concurrent]
        here, waits = os.getcwd() + os.sep, [wait for step in self.steps for wait in step.waits]
        lines = [((wait.name, wait.lines[0].removeprefix(here)), wait.end - wait.start, 0.0, 1) for wait in waits]
        return {
            "phases": self.phases(),
            "modules": self.parts(lambda key: aggregated(key.module)),
            "ops": self.ops(),
            **({"kernels": self.rows(timed, "op", "kernel")} if self.on_gpu else {}),
            "waits": self.rows(lines, "what", "line"),
        }


def kernel_seconds(step: Recording) -> dict[Key, float]:
    """Seconds of the main stream's kernels by key, and of the GPU's idle time between them."""
    found = defaultdict[Key, float](float)
    if kernels := step.own_kernels:
        for kernel in kernels:
            found[Key(kernel.frame.phase, kernel.frame.module, kernel.op)] += kernel.seconds
        whole = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)
        found[NOTHING] += whole - sum(found.values())
    return found


STEP = (
    Column("mode", "step", "text", "Captured: as a CUDA graph; eager: op by op."),
    Column("measure", "measured", "text", "gpu: from the first kernel's start to the last one's end; wall: clock."),
    Column("seconds", "time", "s", "What the rows of the other tables add up to; a mean.", "whole"),
    Column("steps", "recorded", "count", "Recorded steps; as many were unwatched.", "count"),
    Column("plain_seconds", "unwatched", "s", "Median wall time of an unwatched step.", "plain"),
    Column("profiled_seconds", "watched", "s", "Median wall time of a recorded step.", "watched"),
    Column("overhead", "overhead", "share", "Watched over unwatched, less 1."),
    Column("attributed", "attributed", "s", "Time that belongs to a phase."),
    Column("idle", "idle", "s", "The rest."),
    Column("launches", "launches", "count", "Kernels, copies and fills of a step."),
    Column("launched", "host done", "s", "When the host had launched everything."),
)
SECONDS = Column("seconds", "GPU", "s", "Time on the GPU in a step.")
SHARE = Column("share", "share", "share", "Share of the step.")
CALLS = Column("calls", "calls", "count", "Calls in a step.")
COLUMNS = {
    "kernels": (
        Column("op", "op", "text", "The op that launches the kernel."),
        Column("kernel", "kernel", "text", "Its name in Triton or CUDA C++."),
        *(CALLS, SECONDS, SHARE),
    ),
    "waits": (
        Column("count", "times", "count", "Waits in a step.", "calls"),
        Column("seconds", "host", "s", "Time in a step."),
        Column("what", "what", "text", "What the host waits for, or reads."),
        Column("line", "line", "text", "Innermost caller outside the framework."),
    ),
}


def step_tables(recorded: Sequence[Recorded], on_gpu: bool) -> Iterator[Table]:
    """The tables of the steps of each kind: times, phases, modules, ops, kernels, waits."""
    sums = [Sums(each, on_gpu) for each in recorded]
    yield table("steps", "", STEP, sums, listed=True)
    for each, source in zip(sums, recorded, strict=True):
        rows = each.tables()
        notes = [] if rows["waits"] else ["The host waits for nothing, and reads no values."]
        notes += [*_notes(each, sums[0], rows["ops"]), *source.notes]
        for name, found in rows.items():
            columns, title = COLUMNS.get(name) or part_columns(name[:-1], on_gpu), f"{name} of the {each.mode} step"
            last = notes if name == "waits" else []
            yield table(f"{each.mode}-{name}", title, columns, found, most=MOST, notes=last)


def part_columns(name: str, on_gpu: bool) -> Sequence[Column]:
    """The columns of a table that divides a step."""
    wall = Column("seconds", "wall", "s", "Wall time in a step.")
    return (
        Column("name", name, "text", "A star is a layer number; brackets: not an op or a module."),
        *(CALLS, SECONDS if on_gpu else wall, SHARE),
        Column("cpu_seconds", "host", "s", "Time on the host.", hidden=not on_gpu),
        Column("bandwidth", "of a copy", "share", "Of the rate of a copy."),
        Column("compute", "of a matmul", "share", "Of the rate of a matmul."),
        Column("above", "above", "s", "Time beyond what its bytes or FLOPs need at the limits."),
    )


def _notes(sums: Sums, first: Sums, ops: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Sentences about the timing of kernels, the gain from a CUDA graph, and the longest op."""
    if sums.on_gpu and sums.mode == "captured":
        yield "An event follows every kernel of the graph, so that kernels run one after the other."
    elif sums.on_gpu:
        yield "Where the GPU waits for the host, a short kernel's time includes part of that wait."
        if first.mode == "captured":
            times = f"{format_seconds(first.plain)} ({format_seconds(sums.plain)} eager)"
            yield f"Captured as a CUDA graph, an unwatched step takes {times}."
    for op in [row for row in ops if not row["name"].startswith("(")][:1]:
        yield f"The longest op is {op['name']}, {format_share(op['share'])}: see genesis profile --op {op['name']}."
