"""Recordings as a Chrome trace, which Perfetto and chrome://tracing open, and as collapsed stacks.

Readers drop a span that overlaps another of its row without nesting in it, and Perfetto takes a thread 0 for the one
with its process's number. So spans of a row nest to the nanosecond, and no two rows of the trace have one number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genesis.errors import escape
from genesis.measure.marks import Kernel
from genesis.measure.recorder import Frame
from genesis.measure.session import Recording

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


def chrome_trace(recordings: Sequence[Recording], steps: Iterable[tuple[str, float, float]]) -> bytes:
    """Recordings as the JSON of a trace. Times are microseconds since the first one began.

    Args:
        steps: name, start and end of each step, by `time.perf_counter`.
    """
    made = _Spans(recordings)
    spans = [made.span(name, "step", (HOST, STEPS), start, end) for name, start, end in steps]
    for recording in recordings:
        spans += [*made.on_host(recording), *made.on_gpu(recording)]
    rows = sorted({(span.process, span.row) for span in spans})
    events = list(_names(rows))
    for track in rows:
        events += [span.event() for span in _nested(span for span in spans if (span.process, span.row) == track)]
    events += [event for recording in recordings for event in made.counters(recording)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False).encode()


def collapsed(stacks: Mapping[tuple[str, ...], float]) -> bytes:
    """Seconds by stack, outermost first, as lines with whole microseconds, as flamegraph.pl takes them."""
    counts = ((stack, round(seconds * 1e6)) for stack, seconds in sorted(stacks.items()))
    return "".join(f"{';'.join(map(_word, stack))} {count}\n" for stack, count in counts if count > 0).encode()


def _word(part: str) -> str:
    """A part of a stack, without what separates stacks and lines."""
    return escape(part).translate(str.maketrans(" ;\t\n", "____"))


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

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.begin = min((min(each.start, each.marked) for each in recordings), default=0.0)
        threads = dict.fromkeys(frame.thread for each in recordings for frame in each.frames)
        threads.update(dict.fromkeys(wait.thread for each in recordings for wait in each.waits))
        self.rows = {thread: row for row, thread in enumerate(threads, THREADS)}

    def counters(self, recording: Recording) -> Iterator[dict[str, Any]]:
        """The memory of a recording."""
        for track in recording.tracks:
            for at, values in track.samples:
                ts = max(0, round((at - self.begin) * 1e9)) / 1e3
                yield {"name": track.name, "cat": "memory", "ph": "C", "ts": ts, "pid": HOST, "args": values}

    def on_host(self, recording: Recording) -> Iterator[_Span]:
        """Frames and waits."""
        for frame in recording.frames:
            track, inputs = (HOST, self.rows[frame.thread]), [list(shape) for shape in frame.shapes[0]]
            args = _of(frame) | ({"shapes": inputs} if inputs else {})
            yield self.span(frame.name, frame.level, track, max(frame.start, recording.start), frame.end, **args)
        for wait in recording.waits:
            track = (HOST, self.rows[wait.thread])
            yield self.span(wait.what, "wait", track, wait.start, wait.start + wait.seconds, line=wait.line)

    def on_gpu(self, recording: Recording) -> Iterator[_Span]:
        """Kernels."""
        ends: list[float] = []  # of the rows of other streams, which run at the same time
        for kernel in sorted(recording.kernels, key=lambda k: k.start):
            row = COMPUTE
            if kernel.is_concurrent:
                free = next((i for i, end in enumerate(ends) if end <= kernel.start), len(ends))
                ends[free:] = [kernel.end, *ends[free + 1 :]]
                row = BESIDE + free
            start, end = recording.marked + kernel.start, recording.marked + kernel.end
            of = {"op": kernel.op, "grid": list(kernel.grid), "shapes": [list(shape) for shape in kernel.shapes]}
            yield self.span(kernel.name, "kernel", (GPU, row), start, end, **_of(kernel), **of)

    def span(self, name: str, kind: str, track: tuple[int, int], start: float, end: float, **args: Any) -> _Span:
        """A span between two times of `time.perf_counter`."""
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
