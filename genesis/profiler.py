"""Times and profiles of your own functions, under the names of `torch.profiler`.

`benchmark` times a function. `profile` shows where the time of a function, or of a block, goes; a `schedule` chooses
steps of the block. Perfetto draws the trace; flamegraph.pl and speedscope draw the stacks.
"""

from __future__ import annotations

import gzip
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

from genesis import cuda
from genesis.backend import CPU, Device, backend_for
from genesis.errors import UsageError, nearest
from genesis.files.atomic import write_file
from genesis.keywords import check_calls
from genesis.measure.record import Column, Table, Unit, aligned, format_seconds
from genesis.measure.recorder import OUTSIDE, Frame, Recorder, divided, recorders
from genesis.measure.session import Recording, Session
from genesis.measure.svg import flame_graph
from genesis.measure.timing import of_wall
from genesis.measure.trace import chrome_trace, collapsed, stacks
from genesis.shapes import Shape

__all__ = [
    "ProfilerAction", "ProfilerActivity", "benchmark", "profile", "record_function", "schedule",
    "tensorboard_trace_handler",
]  # fmt: skip

_running: list[Profiler] = []  # at most one


class ProfilerActivity(Enum):
    """The parts of a profile: the host, and the kernels of the current GPU."""

    CPU = "CPU"
    CUDA = "CUDA"


class ProfilerAction(Enum):
    """The action in a step."""

    NONE = 0
    WARMUP = 1  # watch without keeping
    RECORD = 2
    RECORD_AND_SAVE = 3  # record the last step of a cycle


_RECORDS = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
Schedule = Callable[[int], ProfilerAction]


def schedule(
    *, wait: int, warmup: int, active: int, repeat: int = 0, skip_first: int = 0, skip_first_wait: int = 0
) -> Schedule:
    """Chooses the steps to record: after `skip_first` steps, `repeat` cycles that wait, warm up and are recorded.

    `repeat=0` never ends. A `skip_first_wait` other than 0 leaves out the first cycle's wait. Raises UsageError.
    """
    if min(wait, warmup, repeat, skip_first) < 0 or active < 1:
        given = f"wait={wait}, warmup={warmup}, active={active}, repeat={repeat}, skip_first={skip_first}"
        raise UsageError(f"schedule({given}) is invalid", next="counts are 0 or more, and active at least 1")
    length, offset = wait + warmup + active, wait if skip_first_wait else 0

    def action(step: int) -> ProfilerAction:
        step += offset - skip_first
        at = step % length
        if step < offset or at < wait or (repeat and step >= repeat * length):
            return ProfilerAction.NONE
        if at < wait + warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD if at < length - 1 else ProfilerAction.RECORD_AND_SAVE

    return action


@contextmanager
def record_function(name: str, args: str | None = None) -> Iterator[None]:
    """Names a block, or each call of a function, in the running profile; `args` are appended to the name."""
    label = name if args is None else f"{name} {args}"
    with recorders[-1].frame("range", label) if recorders else nullcontext():
        yield


def _gpu() -> Any:
    """The current GPU's backend, or None if the program has not used a GPU so far."""
    loaded = sys.modules.get("genesis.backend.cuda")
    if loaded is None or not loaded.backend_of.cache_info().currsize:
        return None
    # A simulated device has a backend too, but it starts no driver.
    driver = sys.modules["genesis.backend.cuda.driver"]
    has_started = driver.is_interpreted() or driver.start.cache_info().currsize
    return backend_for(Device("cuda")) if has_started else None


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
    """The events of recordings by name, or also by shapes or `by_stack` inner calls; modules if `has_modules`."""
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


@dataclass(eq=False)
class Profiler:
    """A profile of the block that enters it; `profile` explains its settings."""

    activities: Iterable[ProfilerActivity] | None
    schedule: Schedule | None
    on_trace_ready: Callable[[Profiler], object] | None
    profile_memory: bool
    with_stack: bool
    with_flops: bool
    with_modules: bool
    acc_events: bool
    step_num: int = field(default=0, init=False)  # the current step
    _action: ProfilerAction = field(default=ProfilerAction.NONE, init=False)
    _watch: ExitStack = field(default_factory=ExitStack, init=False)
    _session: Session | None = field(default=None, init=False)  # None in steps that wait
    _step_began: float | None = field(default=None, init=False)  # None in steps that are not recorded
    _outermost: FrameType | None = field(default=None, init=False)
    _recordings: list[Recording] = field(default_factory=list, init=False)
    _steps: list[tuple[str, float, float]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.activities = None if self.activities is None else list(self.activities)
        for each in self.activities or ():
            if not isinstance(each, ProfilerActivity):
                raise UsageError(f"{each!r} is not an activity", next="use ProfilerActivity.CPU or .CUDA")

    def __enter__(self) -> Profiler:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin step 0, as the block does. Raises UsageError in another profile, DeviceError in a capture."""
        if _running or recorders:
            raise UsageError("a profile inside a profile", next="end the other one first; record_function names parts")
        self.step_num, self._recordings, self._steps = 0, [], []
        caller: Any = sys._getframe(1)
        self._outermost = caller.f_back if caller.f_code is Profiler.__enter__.__code__ else caller
        _running.append(self)
        try:
            self._begin_step(self._action_of(0))
        except BaseException:
            self._end()
            raise

    def step(self) -> None:
        """Begin the next step. Raises: UsageError: the profile is not running."""
        if self not in _running:
            raise UsageError("step() of a profile that is not running", next="call it inside the block")
        number, action = self.step_num, self._action_of(self.step_num + 1)
        self.step_num += 1
        self._end_step(number, saves=self._action is ProfilerAction.RECORD_AND_SAVE or action not in _RECORDS)
        self._begin_step(action)

    def stop(self) -> None:
        """End, as leaving the block does, and keep the recordings."""
        if self in _running:
            try:
                self._end_step(self.step_num, saves=True)
            finally:
                self._end()

    def _end(self) -> None:
        _running.remove(self)
        self._outermost = self._step_began = None
        self._begin_step(ProfilerAction.NONE)

    def _action_of(self, step: int) -> ProfilerAction:
        if (gpu := _gpu()) is not None:
            gpu.refuse_in_capture("a step of a profile was begun")
        action = ProfilerAction.RECORD if self.schedule is None else self.schedule(step)
        if not isinstance(action, ProfilerAction):
            raise UsageError(f"the schedule returned {action!r} for step {step}", next="return a ProfilerAction")
        return action

    def _begin_step(self, action: ProfilerAction) -> None:
        self._action = action
        if action is ProfilerAction.NONE:
            self._session = None
            self._watch.close()
            return
        if self._session is None:
            on_gpu = _gpu() is not None if self.activities is None else ProfilerActivity.CUDA in self.activities
            device = Device("cuda") if on_gpu and cuda.is_available() else CPU
            outermost = self._outermost if self.with_stack else None
            recorder = Recorder(ambient="", has_costs=self.with_flops, outermost=outermost)
            memory = list(dict.fromkeys([CPU, device])) if self.profile_memory else []
            self._session = Session(recorder, device, memory, keeps_graphs=True)
            self._watch.enter_context(self._session.watching())
        if action in _RECORDS and self._step_began is None:
            self._session.begin()
            self._step_began = self._session.started

    def _end_step(self, number: int, saves: bool) -> None:
        if self._session is None or self._step_began is None:
            return
        began, self._step_began = self._step_began, time.perf_counter()
        self._steps.append((f"ProfilerStep#{number}", began, self._step_began))
        if saves:
            self._step_began, recording = None, self._session.end()
            if not self.acc_events:
                self._recordings, self._steps = [], [step for step in self._steps if step[1] >= recording.start]
            self._recordings.append(recording)
            if self.on_trace_ready is not None:
                self.on_trace_ready(self)

    def _recorded(self) -> list[Recording]:
        if not self._recordings:
            what = "the profile has recorded nothing so far"
            raise UsageError(what, next="read results after the block, or in on_trace_ready; the schedule may be long")
        return self._recordings

    def key_averages(self, group_by_input_shape: bool = False, group_by_stack_n: int = 0) -> EventList:
        """Ops, ranges and other time by name, or also by shapes or inner calls; self times add up to the whole."""
        return averages(self._recorded(), self.with_modules, group_by_input_shape, group_by_stack_n)

    def export_stacks(self, path: str | os.PathLike[str], metric: str = "self_cpu_time_total") -> None:
        """Write stacks, outermost first, in microseconds for flamegraph.pl; "self_cuda_time_total" selects kernels."""
        write_file(Path(path), collapsed(self._stacks(metric)))

    def export_flame_graph(self, path: str | os.PathLike[str], metric: str = "self_cpu_time_total") -> None:
        """Write the same stacks as an SVG."""
        write_file(Path(path), flame_graph(self._stacks(metric), f"Flame graph of {metric}"))

    def _stacks(self, metric: str) -> dict[tuple[str, ...], float]:
        found = metric_of(metric, ("self_cpu_time_total", "self_device_time_total"))
        return stacks(self._recorded(), on_gpu="device" in found)

    def export_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for ui.perfetto.dev, compressed if the name ends with ".gz"."""
        content = chrome_trace(self._recorded(), self._steps)
        write_file(Path(path), gzip.compress(content) if os.fspath(path).endswith(".gz") else content)


def profile(
    description: str | None = None,
    run: Callable[[], object] | None = None,
    num_warmups: int = 1,
    with_stack: bool = False,
    *,
    activities: Iterable[ProfilerActivity] | None = None,
    schedule: Schedule | None = None,
    on_trace_ready: Callable[[Any], object] | None = None,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_flops: bool = False,
    with_modules: bool = False,
    acc_events: bool = False,
) -> Any:
    """The profile of a function as a table, or a `Profiler` for a block: `with profile() as p: …`.

    `profile("gelu", run)` returns the ten longest rows as text; with stacks it also writes `var/stacks_gelu.txt` and
    `var/stacks_gelu.svg`.

    Args:
        num_warmups: calls of `run` before the profiled one.
        with_stack: record the Python calls that led to each op.
        activities: by default the host, and the GPU if the program has used one.
        schedule: chooses the steps to record; by default all of them, as one.
        on_trace_ready: called with the profile at the end of each cycle.
        record_shapes: ignored, because the shapes of inputs are always recorded.
        profile_memory: record the memory that ops allocate; a trace shows it as counters.
        with_flops: count the FLOPs of each op.
        with_modules: show modules as rows.
        acc_events: results cover all cycles instead of the last one.

    Raises:
        UsageError: a description without a function; or, from a function's profile, another profile is running.
    """
    shown = profile_memory, with_stack, with_flops, with_modules, acc_events
    made = Profiler(activities, schedule, on_trace_ready, *shown)
    if description is None and run is None:
        return made
    if not isinstance(description, str) or not callable(run):
        raise UsageError("profile() takes a description and a function", next='profile("gelu", lambda: gelu(x))')
    for _ in range(num_warmups):
        run()
    with made:
        run()
    if with_stack:
        name = re.sub(r"[^\w.+-]+", "_", description)
        metric = "self_cuda_time_total" if made._recorded()[0].kernels else "self_cpu_time_total"
        Path("var").mkdir(exist_ok=True)
        made.export_stacks(f"var/stacks_{name}.txt", metric)
        made.export_flame_graph(f"var/stacks_{name}.svg", metric)
    return made.key_averages().table(sort_by="cuda_time_total", max_name_column_width=80, row_limit=10)


def benchmark(description: str, run: Callable[[], object], num_warmups: int = 1, num_trials: int = 3) -> float:
    """Mean milliseconds of a call of `run`, including the work it leaves to the GPU; errors show the description."""
    if num_trials < 1:
        raise UsageError(f"{description}: num_trials={num_trials} times no call", next="use 1 or more")
    for _ in range(num_warmups):
        run()

    def wait() -> None:
        if (gpu := _gpu()) is not None:  # the first call may be the first to use it
            gpu.driver.synchronize()

    sample = of_wall(run, wait)
    return sum(sample(1) for _ in range(num_trials)) / num_trials * 1e3


def tensorboard_trace_handler(
    dir_name: str | os.PathLike[str], worker_name: str | None = None, use_gzip: bool = False
) -> Callable[[Profiler], None]:
    """For `on_trace_ready`: writes each cycle's trace into a folder, under a name that TensorBoard's plugin reads."""

    def handler(profiler: Profiler) -> None:
        folder, worker = Path(dir_name), worker_name or f"{socket.gethostname()}_{os.getpid()}"
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(folder / f"{worker}.{time.time_ns()}.pt.trace.json{'.gz' * use_gzip}")

    return handler


check_calls(globals(), ("benchmark", "profile", "record_function", "schedule", "tensorboard_trace_handler"))
