"""The profiled steps as a Chrome trace, which Perfetto and chrome://tracing open: rows of the host and of the GPU.

Readers drop a span that overlaps another of its row without nesting in it, and Perfetto takes a thread 0 for the one
with its process's number. So spans of a row nest to the nanosecond, and no two rows of the trace have one number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from genesis.measure.marks import Kernel
from genesis.measure.run import Recorded, StepRecord
from genesis.measure.spans import Frame

HOST, GPU = 1, 2  # processes
STEPS, COMPUTE = HOST, GPU  # rows; readers show the one with its process's number first
THREADS, BESIDE = 10, 1000  # the first rows of those that may be several


@dataclass
class _Span:
    """A stretch of a row; times are nanoseconds since the trace begins."""

    name: str
    kind: str
    process: int
    row: int
    start: int
    end: int
    args: dict[str, Any]

    def event(self) -> dict[str, Any]:
        """As a complete event, in microseconds."""
        times = {"ts": self.start / 1e3, "dur": (self.end - self.start) / 1e3}
        event = {"name": self.name, "cat": self.kind, "ph": "X", **times, "pid": self.process, "tid": self.row}
        return {**event, "args": self.args} if self.args else event


def chrome_trace(recorded: Sequence[Recorded]) -> bytes:
    """The trace as JSON. Times are microseconds since the first step began."""
    spans = list(_Spans([step for each in recorded for step in each.steps]).of(recorded))
    rows = sorted({(span.process, span.row) for span in spans})
    events = list(_names(rows))
    for track in rows:
        events += [span.event() for span in _nested(span for span in spans if (span.process, span.row) == track)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False).encode()


def _nested(row: Iterable[_Span]) -> list[_Span]:
    """A row's spans by their start, outer ones first.

    A span that ends inside another one is nested in it, and that one begins with the first of what ends in it.
    """
    before: list[_Span] = []  # that nothing later has in it so far
    found: list[_Span] = []  # inner ones first
    for span in sorted(row, key=lambda s: (s.end, -s.start)):
        while before and before[-1].end > span.start:
            span.start = min(span.start, before.pop().start)
        before.append(span)
        found.append(span)
    found.reverse()  # of two that are alike the later is the outer one
    return sorted(found, key=lambda s: (s.start, -s.end))


class _Spans:
    """What the steps hold, as spans of rows."""

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        self.begin = min(min(step.start, step.marked) for step in steps)
        threads = dict.fromkeys(frame.thread for step in steps for frame in step.frames)
        threads.update(dict.fromkeys(wait.thread for step in steps for wait in step.waits))
        self.rows = {thread: row for row, thread in enumerate(threads, THREADS)}

    def of(self, recorded: Sequence[Recorded]) -> Iterator[_Span]:
        """All spans of the host and the GPU."""
        for each in recorded:
            for number, step in enumerate(each.steps, 1):
                yield self._span(f"{each.mode} step {number}", "step", (HOST, STEPS), step.start, step.end)
                yield from self._on_host(step)
                yield from self._on_gpu(step)

    def _on_host(self, step: StepRecord) -> Iterator[_Span]:
        for frame in step.frames:
            track = (HOST, self.rows[frame.thread])
            yield self._span(frame.name, frame.level, track, frame.start, frame.end, **_of(frame))
        for wait in step.waits:
            track = (HOST, self.rows[wait.thread])
            yield self._span(wait.what, "wait", track, wait.start, wait.start + wait.seconds, line=wait.line)

    def _on_gpu(self, step: StepRecord) -> Iterator[_Span]:
        ends: list[float] = []  # of the rows of other streams, which run at the same time
        for kernel in sorted(step.kernels, key=lambda k: k.start):
            row = COMPUTE
            if kernel.is_concurrent:
                free = next((i for i, end in enumerate(ends) if end <= kernel.start), len(ends))
                ends[free:] = [kernel.end, *ends[free + 1 :]]
                row = BESIDE + free
            start, end = step.marked + kernel.start, step.marked + kernel.end
            of = {"op": kernel.op, "grid": list(kernel.grid), "shapes": [list(shape) for shape in kernel.shapes]}
            yield self._span(kernel.name, "kernel", (GPU, row), start, end, **_of(kernel), **of)

    def _span(self, name: str, kind: str, track: tuple[int, int], start: float, end: float, **args: Any) -> _Span:
        first, last = (round((at - self.begin) * 1e9) for at in (start, end))
        return _Span(name, kind, *track, first, max(first, last), args)


def _of(what: Frame | Kernel) -> dict[str, Any]:
    return {"phase": what.phase, "module": what.module}


def _names(rows: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """The names of processes and rows."""
    for process, name in ((HOST, "host"), (GPU, "GPU")):
        if any(process == each for each, _ in rows):
            yield _name("process_name", process, process, name)
    for process, row in rows:
        yield _name("thread_name", process, row, _row_name(row))


def _row_name(row: int) -> str:
    if row in (STEPS, COMPUTE):
        return {STEPS: "steps", COMPUTE: "kernels"}[row]
    return f"thread {row - THREADS + 1}: phases, modules, ops" if row < BESIDE else f"other streams {row - BESIDE + 1}"


def _name(what: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
