"""Sums recordings of a user's code by name, into the rows and the table that `torch.profiler` calls key averages.

The rows' self times add up to the total time: time outside every op and range has its own row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from genesis.errors import UsageError, nearest
from genesis.measure.record import Column, Table, Unit, aligned, format_seconds
from genesis.measure.recorder import OUTSIDE, Frame, divided
from genesis.measure.session import Recording
from genesis.shapes import Shape

RowKey = tuple[str, tuple[Shape, ...], tuple[str, ...]]  # name, shapes of inputs, Python calls


@dataclass
class Average:
    """The events of one row. Times are in microseconds.

    Every attribute with "device" in its name can also be read with "cuda" instead. `cpu_time` and `device_time` are
    the mean times of an event. Totals include inner events; attributes that begin with `self_` exclude them.
    """

    key: str  # name of the op or range; a name in brackets for other time
    count: int = 0
    cpu_time_total: float = 0.0
    self_cpu_time_total: float = 0.0
    device_time_total: float = 0.0
    self_device_time_total: float = 0.0
    cpu_memory_usage: int = 0  # bytes allocated minus bytes freed on the host
    self_cpu_memory_usage: int = 0
    device_memory_usage: int = 0
    self_device_memory_usage: int = 0
    input_shapes: list[list[int]] = field(default_factory=list)  # empty unless rows are grouped by shape
    stack: list[str] = field(default_factory=list)  # Python calls, innermost first; empty unless rows are grouped by it
    flops: float = 0.0  # of all events; 0 if they were not counted

    def __getattr__(self, name: str) -> float:
        if "cuda" in name:
            return getattr(self, name.replace("cuda", "device"))  # type: ignore[no-any-return]
        if name in ("cpu_time", "device_time"):
            return getattr(self, f"{name}_total") / max(self.count, 1)  # type: ignore[no-any-return]
        raise AttributeError(name)


# Every number of a row.
METRICS = ("cpu_time", "device_time", *(each.name for each in fields(Average) if each.type in ("int", "float")))


def metric_of(name: str, known: Sequence[str] = METRICS) -> str:
    """The attribute of `Average` that torch calls `name`. Raises UsageError if none does."""
    metric = str(name).replace("cuda", "device")
    if metric not in known:
        near = nearest(metric, known)
        hint = f"did you mean {near}?" if near else f"use one of {', '.join(known)}"
        raise UsageError(f"a profile has no metric {name!r}", next=hint)
    return metric


class EventList(list[Average]):
    """Rows, in the order of their first events."""

    @property
    def self_cpu_time_total(self) -> float:
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
            sort_by: metric to sort by in descending order, such as "self_cpu_time_total" or "cuda_time_total"; host
                time breaks ties. UsageError if it does not exist.
            row_limit: maximum number of rows; -1 for all.
            max_src_column_width, max_name_column_width, max_shapes_column_width: width limits of the columns of stacks,
                names and shapes in characters; None for no limit.
            header: line above the table.
        """
        rows = list(self)
        if sort_by is not None:
            metric = metric_of(sort_by)
            rows.sort(key=lambda row: (getattr(row, metric), row.cpu_time_total), reverse=True)
        host, device = self.self_cpu_time_total, sum(row.self_device_time_total for row in self)
        shown = Table("averages", "", list(_columns(host, device)), rows[: None if row_limit < 0 else row_limit])
        widths = {"key": max_name_column_width, "input_shapes": max_shapes_column_width, "stack": max_src_column_width}
        for row in shown.rows:
            for key, width in widths.items():
                text = str(row[key] or "")
                if width is not None and len(text) > width:
                    row[key] = text[: max(0, width - 3)] + "..."
        lines = list(aligned(shown))
        rule = "-" * max(map(len, lines), default=0)
        sums = [f"Self CPU time total: {format_seconds(host * 1e-6)}"]
        sums += [f"Self CUDA time total: {format_seconds(device * 1e-6)}"] if device else []
        return "\n".join([*([header] if header else []), rule, *lines[:1], rule, *lines[1:], rule, *sums, ""])


# Title, attribute and unit of the table's columns of numbers.
NUMBERS: tuple[tuple[str, str, Unit], ...] = (
    ("Self CPU %", "self_cpu_time_total", "share"), ("Self CPU", "self_cpu_time_total", "s"),
    ("CPU total %", "cpu_time_total", "share"), ("CPU total", "cpu_time_total", "s"), ("CPU time avg", "cpu_time", "s"),
    ("Self CUDA", "self_device_time_total", "s"), ("Self CUDA %", "self_device_time_total", "share"),
    ("CUDA total", "device_time_total", "s"), ("CUDA time avg", "device_time", "s"),
    ("CPU Mem", "cpu_memory_usage", "bytes"), ("Self CPU Mem", "self_cpu_memory_usage", "bytes"),
    ("CUDA Mem", "device_memory_usage", "bytes"), ("Self CUDA Mem", "self_device_memory_usage", "bytes"),
    ("# of Calls", "count", "count"), ("Total FLOPs", "flops", "FLOP"),
)  # fmt: skip


def _columns(host: float, device: float) -> Iterator[Column]:
    """The table's columns; `host` and `device` are the sums of all rows in microseconds."""
    yield Column("key", "Name", "text", "Op or range.")
    for title, name, unit in NUMBERS:
        scale = {"share": 1 / ((device if "CUDA" in title else host) or 1), "s": 1e-6}.get(unit, 1.0)
        # `or None` leaves a zero's cell empty, and a table omits columns without values.
        of: Any = lambda row, name=name, scale=scale: getattr(row, name) * scale or None  # noqa: E731
        yield Column(title, title, unit, name, of)
    yield Column("input_shapes", "Input Shapes", "text", "Of the op.", lambda row: str(row.input_shapes or ""))
    yield Column("stack", "Source Location", "text", "Innermost calls.", lambda row: "; ".join(row.stack))


def averages(
    recordings: Sequence[Recording], has_modules: bool = False, by_shapes: bool = False, by_stack: int = 0
) -> EventList:
    """The events of recordings by name; modules may be events, and shapes or so many Python calls may separate rows."""
    nowhere, hidden = (OUTSIDE, (), ()), ("wait",) if has_modules else ("wait", "module")
    rows: dict[RowKey, Average] = {}

    def row_of(key: RowKey) -> Average:
        if key not in rows:
            name, shapes, stack = key
            rows[key] = Average(name, input_shapes=list(map(list, shapes)), stack=list(stack))
        return rows[key]

    def keys(frame: Frame | None) -> Iterator[RowKey]:
        """The rows of a frame and its parents, innermost first. An op that raised has no row."""
        while frame is not None:
            if frame.end > 0 and frame.level not in hidden:
                yield frame.name, frame.shapes[0] if by_shapes else (), frame.lines[:by_stack]
            frame = frame.parent

    def add(around: Sequence[RowKey], metric: str, amount: float) -> None:
        """Add to the innermost row, and to the totals of its parents' rows."""
        for key in dict.fromkeys(around):
            row = row_of(key)
            for name in (metric, f"self_{metric}")[: 1 + (key == around[0])]:
                setattr(row, name, getattr(row, name) + amount)

    for recording in recordings:
        for frame in sorted(recording.frames, key=lambda frame: frame.start):
            if frame.level not in hidden:
                key, *around = keys(frame)
                row = row_of(key)
                row.count += 1
                row.flops += frame.flops
                row.cpu_time_total += 0 if key in around else (frame.end - frame.start) * 1e6
        outside = row_of(nowhere)
        outside.count += 1
        for innermost, seconds in divided(recording.frames, recording.start, recording.end).items():
            row = row_of(next(keys(innermost), nowhere))
            row.self_cpu_time_total += seconds * 1e6
            row.cpu_time_total += seconds * 1e6 if row is outside else 0
        for kernel in recording.kernels:
            around = list(keys(kernel.frame))
            if kernel.frame.level != "op":  # a copy or a graph
                around.insert(0, (kernel.op, (), ()))
                row_of(around[0]).count += kernel.op != OUTSIDE
            add(around, "device_time_total", kernel.seconds * 1e6)
        for track in recording.tracks:
            metric = "cpu_memory_usage" if track.device.type == "cpu" else "device_memory_usage"
            for change in track.changes[1:]:
                add(list(keys(change.frame)) or [nowhere], metric, change.nbytes)
    return EventList(rows.values())
