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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from genesis import cuda
from genesis.backend import CPU, Device
from genesis.measure.limits import Limits, wait_for
from genesis.measure.record import Column, Table, format_seconds, format_share
from genesis.measure.recorder import OUTSIDE, Frame, Recorder, aggregated, decorated, divided
from genesis.measure.session import Recording, Session
from genesis.nn import Module

PHASES = ("forward", "backward", "optimizer", "data", "idle")
IDLE = "(idle)"
MOST = 12  # rows of a table that people are shown
UNTIL_CAPTURED = 4  # steps on a GPU: two are eager, one is captured, one is replayed


@dataclass(frozen=True)
class Subject:
    """A training run to measure."""

    model: Module
    device: Device
    batches: Callable[[], Sequence[Any]]  # returns the next step's batches
    take: Callable[[Sequence[Any]], None]  # launches a step on them
    settle: Callable[[], object]  # reads the figures of the steps so far; its time is not measured
    regions: Sequence[tuple[object, str, str]]  # object, method, phase: what makes up each phase, except backward
    begin: Callable[[], None] = lambda: None  # waits until all ranks begin a step
    launched: Callable[[], None] = lambda: None  # called after a step is launched, before a wait for it


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
    subject.launched()  # before the wait, which never ends if another rank is gone
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
    subject: Subject, count: int, warm_up: int, has_ranges: bool = False, *, has_memory: bool = False
) -> list[Recording]:
    """Recordings of `count` steps after `warm_up` others; with memory they have no kernels."""
    if has_memory:  # on a GPU, marks of kernels would take memory
        session = Session(Recorder(subject.model), CPU, [subject.device])
    else:
        session = Session(Recorder(subject.model, has_ranges, has_costs=True), subject.device)
    batches, wait = session.recorder.phase("data")(subject.batches), wait_for(subject.device)
    found = []
    with ExitStack() as stack:
        stack.enter_context(session.watching())
        for owner, method, phase in subject.regions:
            stack.enter_context(decorated(owner, **{method: session.recorder.phase(phase)}))
        # Recorded objects would trigger the garbage collector more often; hide existing ones from it.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        for number in range(warm_up + count):
            wait()
            session.begin()
            subject.take(batches())
            if has_memory:
                wait()
            recording = session.end()
            found += [recording] if number >= warm_up else []
            subject.settle()
    return found


Rows = list[dict[str, Any]]
Entry = tuple[tuple[str, ...], float, float, int]  # names of a row, seconds of the step, seconds on the host, calls


class Sums:
    """A mean recorded step, on a GPU from the first kernel to the last. With `limits`, ops have shares of them."""

    def __init__(self, recorded: Recorded, on_gpu: bool, limits: Limits | None = None) -> None:
        self.mode, self.steps, self.on_gpu, self._limits = recorded.mode, recorded.steps, on_gpu, limits
        self.measure, self.count = "gpu" if on_gpu else "wall", len(recorded.steps)
        # Frame, op, seconds of the step, seconds on the host; no frame in idle time.
        self.entries = list[tuple[Frame | None, str, float, float]]()
        for step in self.steps:
            for frame, seconds in divided(step.frames, step.start, step.end).items():
                op = IDLE if frame is None else frame.name if frame.level == "op" else OUTSIDE
                self.entries.append((frame, op, 0.0 if on_gpu else seconds, seconds))
            if kernels := step.own_kernels:
                self.entries += [(kernel.frame, kernel.op, kernel.seconds, 0.0) for kernel in kernels]
                whole = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)
                self.entries.append((None, IDLE, whole - sum(kernel.seconds for kernel in kernels), 0.0))
        self.whole = sum(seconds for *_, seconds, _ in self.entries) / self.count
        self.idle = sum(seconds for frame, _, seconds, _ in self.entries if frame is None) / self.count
        self.attributed = self.whole - self.idle
        self.plain = statistics.median(recorded.plain)
        self.watched = statistics.median(step.seconds for step in self.steps)
        self.overhead = self.watched / self.plain - 1
        self.launches = statistics.fmean(len(step.kernels) for step in self.steps) if on_gpu else None
        self.launched = statistics.fmean(step.launched - step.start for step in self.steps) if on_gpu else None

    def rows(self, entries: Iterable[Entry], *titles: str) -> Rows:
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

    def parts(self, name: Callable[[Frame | None, str], str], calls: Iterable[str] = ()) -> Rows:
        """Rows by a name of each frame and op; `calls` has a name for each call."""
        entries: list[Entry] = [((name(frame, op),), *seconds, 0) for frame, op, *seconds in self.entries]  # type: ignore[misc]
        return self.rows([*entries, *(((each,), 0.0, 0.0, 1) for each in calls)], "name")

    def phases(self) -> Rows:
        rows = self.parts(lambda frame, op: frame.phase if frame else "idle")
        return sorted(rows, key=lambda row: PHASES.index(row["name"]) if row["name"] in PHASES else len(PHASES))

    def ops(self) -> Rows:
        if self.mode == "captured" and self.on_gpu:  # a graph calls no ops, but it has their kernels
            calls = [(k.op, k.frame) for step in self.steps for k in step.kernels if k.is_first]
        else:
            calls = [(frame.name, frame) for step in self.steps for frame in step.frames if frame.level == "op"]
        rows = self.parts(lambda frame, op: op, (op for op, _ in calls))
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

    def tables(self) -> dict[str, Rows]:
        kernels = [kernel for step in self.steps for kernel in step.own_kernels]
        here, waits = os.getcwd() + os.sep, [f for step in self.steps for f in step.frames if f.level == "wait"]
        lines = [((wait.name, wait.lines[0].removeprefix(here)), wait.end - wait.start, 0.0, 1) for wait in waits]
        timed = self.rows([((kernel.op, kernel.name), kernel.seconds, 0.0, 1) for kernel in kernels], "op", "kernel")
        return {
            "phases": self.phases(),
            "modules": self.parts(lambda frame, op: aggregated(frame.module) if frame else IDLE),
            "ops": self.ops(),
            **({"kernels": timed} if self.on_gpu else {}),
            "waits": self.rows(lines, "what", "line"),
        }


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
    yield Table("steps", "", STEP, sums, listed=True)
    for each, source in zip(sums, recorded, strict=True):
        rows = each.tables()
        notes = [] if rows["waits"] else ["The host waits for nothing, and reads no values."]
        if on_gpu and each.mode == "captured":
            notes.append("An event follows every kernel of the graph, so that kernels run one after the other.")
        elif on_gpu:
            notes.append("Where the GPU waits for the host, a short kernel's time includes part of that wait.")
            if sums[0].mode == "captured":
                times = f"{format_seconds(sums[0].plain)} ({format_seconds(each.plain)} eager)"
                notes.append(f"Captured as a CUDA graph, an unwatched step takes {times}.")
        for op in [row for row in rows["ops"] if not row["name"].startswith("(")][:1]:
            longest = f"The longest op is {op['name']}, {format_share(op['share'])}"
            notes.append(f"{longest}: see genesis profile --op {op['name']}.")
        for name, found in rows.items():
            columns, title = COLUMNS.get(name) or part_columns(name[:-1], on_gpu), f"{name} of the {each.mode} step"
            last = [*notes, *source.notes] if name == "waits" else []
            yield Table(f"{each.mode}-{name}", title, columns, found, most=MOST, notes=last)


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
