"""Recordings of a user's code by name: the table that `torch.profiler` calls key averages; and stacks of recordings.

A row's own times and those of all other rows add up to the whole: what no op or range explains is a row of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from genesis.errors import UsageError, nearest
from genesis.measure.record import Column, Unit, aligned, format_seconds, table
from genesis.measure.recorder import OUTSIDE, Frame, aggregated, divided
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
    """All events of one name; times are microseconds. Each attribute of a device has a second name, with cuda.

    Attributes:
        key: name of the op, or of the range; what is in brackets is neither.
        cpu_time_total, device_time_total: with what is inside of the events; self_… without it.
        cpu_memory_usage, device_memory_usage: bytes taken less bytes given back; self_… without what is inside.
        input_shapes, stack: where rows are grouped by them; calls of Python, innermost first.
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

    def __getattr__(self, name: str) -> float:
        if "cuda" in name:
            return getattr(self, name.replace("cuda", "device"))  # type: ignore[no-any-return]
        if name in ("cpu_time", "device_time"):  # of one event
            return getattr(self, f"{name}_total") / max(self.count, 1)  # type: ignore[no-any-return]
        raise AttributeError(name)

    def add(self, what: str, amount: float, is_own: bool) -> None:
        """Add to the total of events, and to what is theirs alone."""
        setattr(self, what, getattr(self, what) + amount)
        if is_own:
            setattr(self, f"self_{what}", getattr(self, f"self_{what}") + amount)


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
    """Rows, in the order of their first events."""

    @property
    def self_cpu_time_total(self) -> float:
        """Microseconds of the whole."""
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
        shown = table("averages", "", _columns(host, device), rows[: None if row_limit < 0 else row_limit])
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


def _columns(host: float, device: float) -> list[Column]:
    """The table's columns; what no row has is left out. `host` and `device` are the sums of all rows."""

    def column(title: str, metric: str, unit: Unit, scale: float = 1.0) -> Column:
        return Column(title, title, unit, metric, lambda row: getattr(row, metric) * scale or None)

    return [
        Column("key", "Name", "text", "Op or range.", lambda row: row.key),
        column("Self CPU %", "self_cpu_time_total", "share", 1 / (host or 1)),
        column("Self CPU", "self_cpu_time_total", "s", 1e-6),
        column("CPU total %", "cpu_time_total", "share", 1 / (host or 1)),
        column("CPU total", "cpu_time_total", "s", 1e-6),
        column("CPU time avg", "cpu_time", "s", 1e-6),
        column("Self CUDA", "self_device_time_total", "s", 1e-6),
        column("Self CUDA %", "self_device_time_total", "share", 1 / (device or 1)),
        column("CUDA total", "device_time_total", "s", 1e-6),
        column("CUDA time avg", "device_time", "s", 1e-6),
        column("CPU Mem", "cpu_memory_usage", "bytes"),
        column("Self CPU Mem", "self_cpu_memory_usage", "bytes"),
        column("CUDA Mem", "device_memory_usage", "bytes"),
        column("Self CUDA Mem", "self_device_memory_usage", "bytes"),
        column("# of Calls", "count", "count"),
        Column("input_shapes", "Input Shapes", "text", "Of the op.", lambda row: str(row.input_shapes or "")),
        Column("stack", "Source Location", "text", "Innermost calls.", lambda row: "; ".join(row.stack)),
        column("Total FLOPs", "flops", "FLOP"),
    ]


class _Rows(dict[RowKey, Average]):
    def __missing__(self, key: RowKey) -> Average:
        row = Average(key.name, input_shapes=[list(shape) for shape in key.shapes], stack=list(key.stack))
        self[key] = row
        return row

    def add(self, keys: Sequence[RowKey], what: str, amount: float) -> None:
        """Add to the innermost event of these, and to the totals of those around it."""
        for key in dict.fromkeys(keys):
            self[key].add(what, amount, key == keys[0])


def averages(
    recordings: Sequence[Recording], has_modules: bool = False, by_shapes: bool = False, by_stack: int = 0
) -> EventList:
    """The events of recordings by name.

    Args:
        has_modules: whether modules are events.
        by_shapes: whether the shapes of inputs tell rows apart.
        by_stack: so many of the innermost Python calls tell rows apart.
    """
    rows = _Rows()

    def keys(frame: Frame | None) -> Iterator[RowKey]:
        """The rows of a frame and those around it, innermost first; an op that raised is no event."""
        while frame is not None:
            if frame.end > 0 and (frame.level != "module" or has_modules):
                yield RowKey(frame.name, frame.shapes[0] if by_shapes else (), frame.lines[:by_stack])
            frame = frame.parent

    for recording in recordings:
        for frame in sorted(recording.frames, key=lambda frame: frame.start):
            key, *around = keys(frame) if frame.level != "module" or has_modules else [None]
            if key is not None:
                rows[key].count += 1
                rows[key].flops += frame.flops
                if key not in around:
                    rows[key].cpu_time_total += (frame.end - frame.start) * 1e6
        rows[RowKey(OUTSIDE)].count += 1
        for innermost, seconds in divided(recording.frames, recording.start, recording.end).items():
            key = next(keys(innermost), RowKey(OUTSIDE))
            rows[key].self_cpu_time_total += seconds * 1e6
            rows[key].cpu_time_total += seconds * 1e6 * (key.name == OUTSIDE)
        for kernel in recording.kernels:
            events = list(keys(kernel.frame))
            if kernel.frame is None or kernel.frame.level != "op":  # a copy or a graph of no op
                events.insert(0, RowKey(kernel.op))
                rows[events[0]].count += kernel.op != OUTSIDE
            rows.add(events, "device_time_total", (kernel.end - kernel.start) * 1e6)
        for track in recording.tracks:
            what = "cpu_memory_usage" if track.device == "cpu" else "device_memory_usage"
            for change in track.changes:
                rows.add(list(keys(change.frame)) or [RowKey(OUTSIDE)], what, change.nbytes)
    return EventList(rows.values())


def stacks(recordings: Sequence[Recording], on_gpu: bool) -> dict[Stack, float]:
    """Seconds of a mean recording by stack, outermost first, of the host or of kernels, which the op ends.

    Before it stand the Python calls that led to it, where they were noted, else phases, ranges and modules, of which
    layers count together.
    """
    found: dict[Stack, float] = defaultdict(float)
    for recording in recordings:
        if on_gpu:
            for kernel in (kernel for kernel in recording.kernels if not kernel.is_concurrent):
                found[(*_stack(kernel.frame, kernel.op), kernel.name)] += kernel.end - kernel.start
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
        around = frame.parent
        is_inner = frame.level == "module" and around is not None and around.level == "module"
        name = frame.name.removeprefix(f"{around.name}.") if is_inner and around is not None else frame.name
        names += [aggregated(name)] if name else []
        frame = around
    return (*reversed(names), op)
