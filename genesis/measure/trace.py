"""Recordings as a Chrome trace, for Perfetto and chrome://tracing, and as stacks, for flame graphs.

Readers drop a span that overlaps another one of its row without nesting in it, and Perfetto shows thread 0 as the
thread with its process's number. Spans of a row therefore nest to the nanosecond, and rows have unique numbers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from genesis.errors import escape
from genesis.measure.recorder import OUTSIDE, Frame, aggregated, divided
from genesis.measure.session import Recording

HOST, GPU = 1, 2  # processes; rows are numbered from 1000 times that
Stack = tuple[str, ...]


def chrome_trace(recordings: Sequence[Recording], steps: Iterable[tuple[str, float, float]]) -> bytes:
    """Recordings, and steps by name, start and end, as a trace in JSON. Times count from the first recording."""
    begin = min((min(each.start, each.marked) for each in recordings), default=0.0)

    def nanoseconds(at: float) -> int:
        return max(0, round((at - begin) * 1e9))

    spans: dict[tuple[int, int, str], list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)  # by `_spans`' row
    for name, kind, key, start, end, args in _spans(recordings, steps):
        first, row = nanoseconds(start), spans[key]
        if key[0] == GPU and row:
            first = max(first, row[-1][1])  # kernels of a stream run one after the other
        row.append((first, max(first, nanoseconds(end)), {"name": name, "cat": kind, "args": args}))
    events: list[dict[str, Any]] = []
    for pid, number, title in sorted(spans):
        place: dict[str, Any] = {"ph": "M", "pid": pid, "tid": 1000 * pid + number}
        if pid not in {event["pid"] for event in events}:
            events.append({"name": "process_name", **place, "args": {"name": "host" if pid == HOST else "GPU"}})
        events.append({"name": "thread_name", **place, "args": {"name": title}})
        row = spans[pid, number, title][::-1]  # of equal spans the outer one was recorded later, and comes first
        for first, last, event in sorted(row, key=lambda span: (span[0], -span[1])):
            events.append({**event, **place, "ph": "X", "ts": first / 1e3, "dur": (last - first) / 1e3})
    for track in (track for each in recordings for track in each.tracks):
        counter = {"name": f"memory of {track.device}", "cat": "memory", "ph": "C", "pid": HOST}
        for change in track.changes:
            events.append({**counter, "ts": nanoseconds(change.at) / 1e3, "args": {"allocated": change.allocated}})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False).encode()


def _spans(recordings: Sequence[Recording], steps: Iterable[tuple[str, float, float]]) -> Iterator[tuple[Any, ...]]:
    """Name, kind, row (process, number, title), start and end in seconds, and arguments of each span."""
    threads: dict[int, int] = {}  # numbers of rows, from 1
    for name, start, end in steps:
        yield name, "step", (HOST, 0, "steps"), start, end, {}
    for recording in recordings:
        for frame in recording.frames:
            args: dict[str, Any] = {"phase": frame.phase, "module": frame.module}
            if frame.level == "op":
                args["shapes"] = frame.shapes[0]
            elif frame.level == "wait":
                args["line"] = frame.lines[0]
            number = threads.setdefault(frame.thread, len(threads) + 1)
            row = HOST, number, f"thread {number}: phases, modules, ops"
            yield frame.name, frame.level, row, max(frame.start, recording.start), frame.end, args
        for kernel in recording.kernels:
            frame, title = kernel.frame, f"stream {kernel.stream + 1}" if kernel.stream else "kernels"
            args = {"op": kernel.op, "phase": frame.phase, "module": frame.module, "grid": kernel.grid}
            args["shapes"] = frame.shapes[0] + frame.shapes[1]
            start, end = (recording.marked + at for at in (kernel.start, kernel.end))
            yield kernel.name, "kernel", (GPU, kernel.stream, title), start, end, args


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
