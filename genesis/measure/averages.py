"""Recordings of a user's code by name: the table that `torch.profiler` calls key averages, and its stacks.

A row's own times and those of all other rows add up to the whole: what no op or range explains is a row of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from genesis.errors import UsageError, nearest
from genesis.measure.record import Column, aligned, format_seconds, table
from genesis.measure.recorder import OUTSIDE, Frame, by_thread, leaves
from genesis.measure.session import Recording
from genesis.shapes import Shape

Stack = tuple[str, ...]


class RowKey(NamedTuple):
    """What rows are told apart by."""

    name: str
    shapes: tuple[Shape, ...] = ()
    stack: Stack = ()


@dataclass
class Average:
    """All events of one name; times are microseconds. Names of attributes with cuda for device exist too.

    Attributes:
        key: name of the op, or of the range; what is in brackets is neither.
        count: events.
        cpu_time_total, device_time_total: of the events, with what is inside of them.
        self_cpu_time_total, self_device_time_total: without it.
        cpu_memory_usage, device_memory_usage: bytes taken less bytes given back; self_… without what is inside.
        input_shapes: of the events, where rows are grouped by them.
        stack: Python calls that led to them, innermost first, where rows are grouped by them.
        flops: of all events, where they were counted.
    """

    key: str
    count: int = 0
    cpu_time_total: float = 0.0
    self_cpu_time_total: float = 0.0
    device_time_total: float = 0.0
    self_device_time_total: float = 0.0
    cpu_memory_usage: int = 0
    self_cpu_memory_usage: int = 0
    device_memory_usage: int = 0
    self_device_memory_usage: int = 0
    input_shapes: list[list[int]] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    flops: float = 0.0

    @property
    def cpu_time(self) -> float:
        """Mean time of an event."""
        return self.cpu_time_total / max(self.count, 1)

    @property
    def device_time(self) -> float:
        """Mean time of an event on the GPU."""
        return self.device_time_total / max(self.count, 1)

    def __getattr__(self, name: str) -> float:
        if "cuda" in name:
            return getattr(self, name.replace("cuda", "device"))  # type: ignore[no-any-return]
        raise AttributeError(name)


METRICS = (
    *("cpu_time", "cpu_time_total", "self_cpu_time_total", "cpu_memory_usage", "self_cpu_memory_usage"),
    *("device_time", "device_time_total", "self_device_time_total", "device_memory_usage", "self_device_memory_usage"),
    *("count", "flops"),
)


def metric_of(name: str, known: Sequence[str] = METRICS) -> str:
    """An attribute of `Average` by its name in torch. Raises: UsageError."""
    found = str(name).replace("cuda", "device")
    if found not in known:
        near = nearest(found, known)
        hint = f"did you mean {near}?" if near else f"use one of {', '.join(known)}"
        raise UsageError(f"{name!r} is no metric of a profile", next=hint)
    return found


class EventList(list[Average]):
    """Rows, in the order of their first events.

    Attributes:
        has_memory: whether memory was followed.
    """

    has_memory = False

    @property
    def self_cpu_time_total(self) -> float:
        """Microseconds of the whole, of all threads together."""
        return sum(row.self_cpu_time_total for row in self)

    def table(
        self,
        sort_by: str | None = None,
        row_limit: int = 100,
        max_src_column_width: int | None = 75,
        max_name_column_width: int | None = 55,
        max_shapes_column_width: int | None = 80,
        header: str | None = None,
    ) -> str:
        """The rows as text.

        Args:
            sort_by: the metric whose largest values come first, such as "self_cpu_time_total" or "cuda_time_total";
                rows with equal values are sorted by their time on the host.
            row_limit: rows at most; -1 for all.
            max_src_column_width, max_name_column_width, max_shapes_column_width: characters; None for no limit.
            header: a line above the table.

        Raises:
            UsageError: there is no such metric.
        """
        rows = list(self)
        if sort_by is not None:
            metric = metric_of(sort_by)
            rows.sort(key=lambda row: (getattr(row, metric), row.cpu_time_total), reverse=True)
        host, device = self.self_cpu_time_total, sum(row.self_device_time_total for row in self)
        columns = _columns(host, device, self.has_memory)
        shown = table("averages", "", columns, rows[: None if row_limit < 0 else row_limit])
        for key, width in (
            ("key", max_name_column_width),
            ("shapes", max_shapes_column_width),
            ("source", max_src_column_width),
        ):
            for row in shown.rows:
                text = str(row[key] or "")
                if width is not None and len(text) > width:
                    row[key] = text[: max(0, width - 3)] + "..."
        lines = list(aligned(shown))
        rule = "-" * max(map(len, lines), default=0)
        sums = [f"Self CPU time total: {format_seconds(host * 1e-6)}"]
        if device:
            sums.append(f"Self CUDA time total: {format_seconds(device * 1e-6)}")
        return "\n".join([*([header] if header else []), rule, *lines[:1], rule, *lines[1:], rule, *sums, ""])


def _columns(host: float, device: float, has_memory: bool) -> list[Column]:
    """The table's columns; `host` and `device` are the sums of all rows."""
    found = [
        Column("key", "Name", "text", "Op or range.", lambda row: row.key),
        Column("self_cpu_share", "Self CPU %", "share", "Of the whole.",
               lambda row: row.self_cpu_time_total / host if host else None),
        Column("self_cpu", "Self CPU", "s", "On the host, without inner events.",
               lambda row: row.self_cpu_time_total * 1e-6),
        Column("cpu_share", "CPU total %", "share", "Of the whole.",
               lambda row: row.cpu_time_total / host if host else None),
        Column("cpu", "CPU total", "s", "On the host.", lambda row: row.cpu_time_total * 1e-6),
        Column("cpu_average", "CPU time avg", "s", "On the host, an event.", lambda row: row.cpu_time * 1e-6),
    ]  # fmt: skip
    if device:
        found += [
            Column("self_cuda", "Self CUDA", "s", "Kernels.", lambda row: row.self_device_time_total * 1e-6),
            Column("self_cuda_share", "Self CUDA %", "share", "Of all kernels.",
                   lambda row: row.self_device_time_total / device),
            Column("cuda", "CUDA total", "s", "With inner events.", lambda row: row.device_time_total * 1e-6),
            Column("cuda_average", "CUDA time avg", "s", "An event.", lambda row: row.device_time * 1e-6),
        ]  # fmt: skip
    if has_memory:
        found += [
            Column("cpu_memory", "CPU Mem", "bytes", "Taken.", lambda row: row.cpu_memory_usage),
            Column("self_cpu_memory", "Self CPU Mem", "bytes", "Taken.", lambda row: row.self_cpu_memory_usage),
            Column("cuda_memory", "CUDA Mem", "bytes", "Taken.", lambda row: row.device_memory_usage or None),
            Column("self_cuda_memory", "Self CUDA Mem", "bytes", "Taken.",
                   lambda row: row.self_device_memory_usage or None),
        ]  # fmt: skip
    return [
        *found,
        Column("count", "# of Calls", "count", "Events.", lambda row: row.count),
        Column("shapes", "Input Shapes", "text", "Of the op.", lambda row: str(row.input_shapes or "")),
        Column("source", "Source Location", "text", "Innermost call.", lambda row: "; ".join(row.stack)),
        Column("flops", "Total FLOPs", "FLOP", "Counted, not measured.", lambda row: row.flops or None),
    ]


@dataclass(frozen=True)
class Grouping:
    """How events become rows.

    Attributes:
        has_modules: whether modules have rows.
        by_shapes: whether the shapes of inputs tell rows apart.
        stack: so many of the innermost Python calls tell rows apart.
    """

    has_modules: bool = False
    by_shapes: bool = False
    stack: int = 0

    def shown(self, frame: Frame) -> bool:
        """Whether a frame is an event; an op that raised is none."""
        return frame.end > 0 and (frame.level != "module" or self.has_modules)

    def events(self, frame: Frame | None) -> Iterator[Frame]:
        """A frame and those around it that are events, innermost first."""
        while frame is not None:
            if self.shown(frame) and frame.name:
                yield frame
            frame = frame.parent

    def key(self, frame: Frame) -> RowKey:
        """The row of an event."""
        return RowKey(frame.name, frame.shapes[0] if self.by_shapes else (), frame.lines[: self.stack])


class _Rows(dict[RowKey, Average]):
    def __missing__(self, key: RowKey) -> Average:
        row = Average(key.name, input_shapes=[list(shape) for shape in key.shapes], stack=list(key.stack))
        self[key] = row
        return row


def averages(recordings: Sequence[Recording], thread: int, by: Grouping) -> EventList:
    """The events of recordings by name; `thread` is the one whose whole time counts, of others their events."""
    rows = _Rows()
    for recording in recordings:
        for frame in sorted(recording.frames, key=lambda frame: frame.start):
            if by.shown(frame):
                row, key = rows[by.key(frame)], by.key(frame)
                row.count += 1
                row.flops += frame.flops
                if all(by.key(each) != key for each in by.events(frame.parent)):
                    row.cpu_time_total += (frame.end - frame.start) * 1e6
        _add_own_times(rows, recording, thread, by)
        _add_kernels(rows, recording, by)
        _add_memory(rows, recording, by)
    found = EventList(rows.values())
    found.has_memory = any(recording.tracks for recording in recordings)
    return found


def _add_own_times(rows: _Rows, recording: Recording, thread: int, by: Grouping) -> None:
    outside = recording.seconds
    for number, frames in by_thread(recording.frames).items():
        for piece in leaves(frames):
            seconds = piece.end - piece.start
            event = next(by.events(piece.frame), None)
            if event is not None:
                rows[by.key(event)].self_cpu_time_total += seconds * 1e6
                outside -= seconds if number == thread else 0.0
            elif number != thread:
                outside += seconds
    row = rows[RowKey(OUTSIDE)]
    row.count += 1
    row.self_cpu_time_total += max(outside, 0.0) * 1e6
    row.cpu_time_total += max(outside, 0.0) * 1e6


def _add_kernels(rows: _Rows, recording: Recording, by: Grouping) -> None:
    for kernel in recording.kernels:
        seconds = kernel.end - kernel.start
        events = list(by.events(kernel.frame))
        keys = [by.key(event) for event in events]
        if kernel.frame is None or kernel.frame.level != "op":
            keys.insert(0, RowKey(kernel.op))
            rows[keys[0]].count += kernel.op != OUTSIDE
        rows[keys[0]].self_device_time_total += seconds * 1e6
        for key in dict.fromkeys(keys):
            rows[key].device_time_total += seconds * 1e6


def _add_memory(rows: _Rows, recording: Recording, by: Grouping) -> None:
    for track in recording.tracks:
        name = "cpu_memory_usage" if track.device == "cpu" else "device_memory_usage"
        for change in track.changes:
            keys = [by.key(event) for event in by.events(change.frame)] or [RowKey(OUTSIDE)]
            own = f"self_{name}"
            setattr(rows[keys[0]], own, getattr(rows[keys[0]], own) + change.nbytes)
            for key in dict.fromkeys(keys):
                setattr(rows[key], name, getattr(rows[key], name) + change.nbytes)


def stacks(recordings: Sequence[Recording], thread: int, on_gpu: bool) -> dict[Stack, float]:
    """Seconds by stack, outermost first: Python calls where they were noted, else ranges and modules; then the op."""
    found: dict[Stack, float] = defaultdict(float)
    for recording in recordings:
        if on_gpu:
            for kernel in recording.kernels:
                found[(*_stack(kernel.frame, kernel.op), kernel.name)] += kernel.end - kernel.start
            continue
        outside = recording.seconds
        for number, frames in by_thread(recording.frames).items():
            for piece in leaves(frames):
                found[_stack(piece.frame, OUTSIDE)] += piece.end - piece.start
                outside -= piece.end - piece.start if number == thread else 0.0
        found[OUTSIDE,] += max(outside, 0.0)
    return dict(found)


def _stack(frame: Frame | None, op: str) -> Stack:
    if frame is not None and frame.level == "op":
        op = frame.name
        if frame.lines:
            return (*reversed(frame.lines), op)
        frame = frame.parent
    names: list[str] = []
    while frame is not None:
        if frame.name:
            names.append(frame.name)
        frame = frame.parent
    return (*reversed(names), op)
