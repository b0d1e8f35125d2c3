"""Recordings as a Chrome trace, for Perfetto and chrome://tracing, and as stacks, for flame graphs.

Readers drop a span that overlaps another one of its row without nesting in it, and Perfetto shows thread 0 as the
thread with its process's number. Spans of a row therefore nest to the nanosecond, and rows have unique numbers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genesis.errors import escape
from genesis.measure.recorder import OUTSIDE, Frame, aggregated, divided
from genesis.measure.session import Recording

HOST, GPU = 1, 2  # processes, and the rows of steps and of kernels, which readers show first
THREADS, STREAMS = 10, 1000  # the first rows of threads and of other streams
Stack = tuple[str, ...]


@dataclass
class _Span:
    """A span of a row; times are nanoseconds since the trace begins."""

    start: int
    end: int
    event: dict[str, Any]


def chrome_trace(recordings: Sequence[Recording], steps: Iterable[tuple[str, float, float]]) -> bytes:
    """Recordings as the JSON of a trace. Times are microseconds since the first one began.

    Args:
        steps: name, start and end of each step, by `time.perf_counter`.
    """
    begin = min((min(each.start, each.marked) for each in recordings), default=0.0)

    def nanoseconds(at: float) -> int:
        return max(0, round((at - begin) * 1e9))

    rows: dict[tuple[int, int], list[_Span]] = defaultdict(list)
    for name, kind, (pid, tid), start, end, args in _spans(recordings, steps):
        event = {"name": name, "cat": kind, "ph": "X", "pid": pid, "tid": tid, "args": args}
        rows[pid, tid].append(_Span(nanoseconds(start), max(nanoseconds(start), nanoseconds(end)), event))
    events: list[dict[str, Any]] = []
    for pid, name in ((HOST, "host"), (GPU, "GPU")):
        tids = sorted(tid for process, tid in rows if process == pid)
        for kind, tid, title in (("process_name", pid, name), *(("thread_name", tid, _title(tid)) for tid in tids)):
            if tids:
                events.append({"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": title}})
    for span in (span for row in sorted(rows) for span in _nested(rows[row])):
        events.append({**span.event, "ts": span.start / 1e3, "dur": (span.end - span.start) / 1e3})
    for track in (track for each in recordings for track in each.tracks):
        counter = {"name": track.name, "cat": "memory", "ph": "C", "pid": HOST}
        events += [{**counter, "ts": nanoseconds(at) / 1e3, "args": values} for at, values in track.samples]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False).encode()


def _title(tid: int) -> str:
    if tid >= STREAMS:
        return f"other streams {tid - STREAMS + 1}"
    return {HOST: "steps", GPU: "kernels"}.get(tid, f"thread {tid - THREADS + 1}: phases, modules, ops")


def _spans(recordings: Sequence[Recording], steps: Iterable[tuple[str, float, float]]) -> Iterator[tuple[Any, ...]]:
    """Name, kind, row, start and end in seconds, and arguments of each span."""
    threads: dict[int, int] = {}  # rows by thread

    def row_of(thread: int) -> tuple[int, int]:
        return HOST, threads.setdefault(thread, THREADS + len(threads))

    for name, start, end in steps:
        yield name, "step", (HOST, HOST), start, end, {}
    for recording in recordings:
        for frame in recording.frames:
            args: dict[str, Any] = {"phase": frame.phase, "module": frame.module}
            if frame.level == "op":
                args["shapes"] = frame.shapes[0]
            elif frame.level == "wait":
                args["line"] = frame.lines[0]
            yield frame.name, frame.level, row_of(frame.thread), max(frame.start, recording.start), frame.end, args
        ends: list[float] = []  # of the last kernels in the rows of other streams
        for kernel in sorted(recording.kernels, key=lambda kernel: kernel.start):
            tid, frame = GPU, kernel.frame
            if kernel.is_concurrent:
                free = next((i for i, end in enumerate(ends) if end <= kernel.start), len(ends))
                ends[free:] = [kernel.end, *ends[free + 1 :]]
                tid = STREAMS + free
            args = {"op": kernel.op, "phase": frame.phase, "module": frame.module, "grid": kernel.grid}
            args["shapes"] = frame.shapes[0] + frame.shapes[1]
            yield kernel.name, "kernel", (GPU, tid), *(recording.marked + at for at in (kernel.start, kernel.end)), args


def _nested(row: Iterable[_Span]) -> list[_Span]:
    """A row's spans by their start, outer ones first.

    A span that ends inside another one is nested in it: the outer one's start moves to that of the first inner one.
    """
    before: list[_Span] = []  # the latest spans that no later one contains
    found: list[_Span] = []  # inner ones first
    for span in sorted(row, key=lambda s: (s.end, -s.start)):
        while before and before[-1].end > span.start:
            span.start = min(span.start, before.pop().start)
        before.append(span)
        found.append(span)
    found.reverse()  # the outer one of two equal spans was recorded later
    return sorted(found, key=lambda s: (s.start, -s.end))


def stacks(recordings: Sequence[Recording], on_gpu: bool) -> dict[Stack, float]:
    """Seconds of a mean recording by stack, outermost first: of the host, or of the GPU's kernels.

    The Python calls that led to an op precede it if they were recorded; otherwise phases, ranges and modules do, and
    layers count together.
    """
    found: dict[Stack, float] = defaultdict(float)
    for recording in recordings:
        if on_gpu:
            for kernel in recording.own_kernels:
                found[(*_stack(kernel.frame, kernel.op), kernel.name)] += kernel.seconds
        else:
            for frame, seconds in divided(recording.frames, recording.start, recording.end).items():
                found[_stack(frame, OUTSIDE)] += seconds
    return {stack: seconds / len(recordings) for stack, seconds in found.items()}


def _stack(frame: Frame | None, op: str) -> Stack:
    if frame is not None and frame.level == "op":
        op = frame.name
        if frame.lines:
            return (*reversed(frame.lines), op)
        frame = frame.parent
    names: list[str] = []
    while frame is not None:
        around, name = frame.parent, frame.name
        if around is not None and (frame.level, around.level) == ("module", "module"):
            name = name.removeprefix(f"{around.name}.")
        names += [aggregated(name)] if name else []
        frame = around
    return (*reversed(names), op)


def collapsed(stacks: Mapping[Stack, float]) -> bytes:
    """Stacks as lines with whole microseconds, the format of flamegraph.pl."""

    def word(part: str) -> str:
        return escape(part).translate(str.maketrans(" ;\t\n", "____"))

    counts = ((stack, round(seconds * 1e6)) for stack, seconds in sorted(stacks.items()))
    return "".join(f"{';'.join(map(word, stack))} {count}\n" for stack, count in counts if count > 0).encode()
