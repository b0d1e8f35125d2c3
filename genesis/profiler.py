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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

from genesis.backend import CPU, Device, backend_for
from genesis.errors import UsageError
from genesis.files.atomic import write_file
from genesis.keywords import check_calls
from genesis.measure.averages import EventList, averages, metric_of
from genesis.measure.recorder import Recorder, recorders
from genesis.measure.session import Recording, Session
from genesis.measure.svg import flame_graph
from genesis.measure.timing import of_wall
from genesis.measure.trace import chrome_trace, collapsed, stacks

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

    0 cycles have no end. Any `skip_first_wait` but 0 leaves out the wait of the first cycle. Raises UsageError.
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
            self._session = self._new_session()
            self._watch.enter_context(self._session.watching())
        if action in _RECORDS and self._step_began is None:
            self._session.begin()
            self._step_began = self._session.started

    def _new_session(self) -> Session:
        from genesis import cuda

        on_gpu = _gpu() is not None if self.activities is None else ProfilerActivity.CUDA in self.activities
        device = Device("cuda") if on_gpu and cuda.is_available() else CPU
        outermost = self._outermost if self.with_stack else None
        recorder = Recorder(ambient="", has_costs=self.with_flops, outermost=outermost)
        memory = list(dict.fromkeys([CPU, device])) if self.profile_memory else []
        return Session(recorder, device, memory, keeps_graphs=True)

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
        """Ops, ranges and other time by name; their own times add up to the whole. Raises UsageError: there are none.

        Different shapes can be different rows, and so can different calls, by so many of the innermost.
        """
        return averages(self._recorded(), self.with_modules, group_by_input_shape, group_by_stack_n)

    def export_stacks(self, path: str | os.PathLike[str], metric: str = "self_cpu_time_total") -> None:
        """Write stacks, outermost first, with microseconds: for flamegraph.pl; "self_cuda_time_total" is of kernels."""
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
        description: the function's name.
        run: the function.
        num_warmups: calls before the profiled one.
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
    """Mean milliseconds of a call of `run`, including the work it leaves to the GPU.

    `num_warmups` calls compile kernels, `num_trials` calls are timed; errors show the description.
    """
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
