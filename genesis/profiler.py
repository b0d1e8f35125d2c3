"""Times and profiles of your own functions, in the names of `torch.profiler`.

`benchmark` times a function, `profile` says what its time is spent on: as a function, or as a block whose steps a
`schedule` chooses. Perfetto draws the trace; flamegraph.pl and speedscope draw the stacks.
"""

from __future__ import annotations

import gzip
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

from genesis.backend import CPU, Device, backend_for
from genesis.errors import UsageError
from genesis.files.atomic import write_file
from genesis.keywords import check_calls
from genesis.measure.averages import EventList, averages, metric_of, stacks
from genesis.measure.limits import wait_for
from genesis.measure.recorder import Recorder, recorders
from genesis.measure.session import Recording, Session
from genesis.measure.svg import flame_graph
from genesis.measure.trace import chrome_trace, collapsed

__all__ = [
    "ProfilerAction",
    "ProfilerActivity",
    "benchmark",
    "profile",
    "record_function",
    "schedule",
    "tensorboard_trace_handler",
]

STACK_METRICS = ("self_cpu_time_total", "self_device_time_total")
_running: list[Profiler] = []  # at most one


class ProfilerActivity(Enum):
    """What a profile looks at: the host, and the kernels of the current GPU."""

    CPU = "CPU"
    CUDA = "CUDA"


class ProfilerAction(Enum):
    """What happens in a step: nothing, watching without keeping, recording, or recording the last step of a cycle."""

    NONE = 0
    WARMUP = 1
    RECORD = 2
    RECORD_AND_SAVE = 3


_RECORDS = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
Schedule = Callable[[int], ProfilerAction]


def schedule(
    *, wait: int, warmup: int, active: int, repeat: int = 0, skip_first: int = 0, skip_first_wait: int = 0
) -> Schedule:
    """What a profile does in each step: after `skip_first` steps cycles of steps that wait, warm up and are recorded.

    Args:
        repeat: cycles; 0 goes on to the end.
        skip_first_wait: other than 0 leaves out the wait of the first cycle.

    Raises:
        UsageError: a count is below 0, or no step is active.
    """
    if min(wait, warmup, repeat, skip_first) < 0 or active < 1:
        given = f"wait={wait}, warmup={warmup}, active={active}, repeat={repeat}, skip_first={skip_first}"
        raise UsageError(f"schedule({given}) is no schedule", next="counts are 0 or more, and active at least 1")
    length = wait + warmup + active

    def action(step: int) -> ProfilerAction:
        step += (wait if skip_first_wait else 0) - skip_first
        if step < (wait if skip_first_wait else 0) or (repeat and step >= repeat * length):
            return ProfilerAction.NONE
        at = step % length
        if at < wait:
            return ProfilerAction.NONE
        if at < wait + warmup:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD if at < length - 1 else ProfilerAction.RECORD_AND_SAVE

    return action


class record_function(ContextDecorator):  # noqa: N801  torch's name
    """Names a block, or each call of a function, for the profile that runs.

    Args:
        args: shown after the name.
    """

    def __init__(self, name: str, args: str | None = None) -> None:
        self.name, self.args = name, args
        self._entered: list[AbstractContextManager[None]] = []

    def _recreate_cm(self) -> record_function:
        return record_function(self.name, self.args)  # calls may be inside of each other

    def __enter__(self) -> record_function:
        if recorders:
            range_ = recorders[-1].range(self.name if self.args is None else f"{self.name} {self.args}")
            range_.__enter__()
            self._entered.append(range_)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._entered:
            self._entered.pop().__exit__(*error)


def _cuda_in_use() -> bool:
    """Whether the program has used a GPU so far."""
    loaded = sys.modules.get("genesis.backend.cuda")
    if loaded is None or not loaded.backend_of.cache_info().currsize:
        return False
    # Simulated devices have backends as well: without a driver that started there is no GPU to wait for.
    driver = sys.modules["genesis.backend.cuda.driver"]
    return bool(driver.is_interpreted() or driver.start.cache_info().currsize)


def _refuse_in_capture(what: str) -> None:
    if _cuda_in_use():
        backend: Any = backend_for(Device("cuda"))
        backend.refuse_in_capture(what)


@dataclass(eq=False)
class Profiler:
    """A profile of the block that it is entered for; `profile` says what its settings mean.

    Attributes:
        step_num: the step that runs, from 0.
    """

    activities: Iterable[ProfilerActivity] | None
    schedule: Schedule | None
    on_trace_ready: Callable[[Profiler], object] | None
    profile_memory: bool
    with_stack: bool
    with_flops: bool
    with_modules: bool
    acc_events: bool
    step_num: int = field(default=0, init=False)
    _action: ProfilerAction = field(default=ProfilerAction.NONE, init=False)
    _watch: ExitStack = field(default_factory=ExitStack, init=False)
    _session: Session | None = field(default=None, init=False)
    _outermost: FrameType | None = field(default=None, init=False)
    _is_recording: bool = field(default=False, init=False)
    _step_began: float = field(default=0.0, init=False)
    _recordings: list[Recording] = field(default_factory=list, init=False)
    _steps: list[tuple[str, float, float]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.activities = None if self.activities is None else list(self.activities)
        for each in self.activities or ():
            if not isinstance(each, ProfilerActivity):
                raise UsageError(f"{each!r} is no activity", next="use ProfilerActivity.CPU or .CUDA")

    # --- Steps --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Profiler:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin with step 0, as entering the block does.

        Raises:
            UsageError: a profile runs already.
            DeviceError: a CUDA graph is being captured; so does `step`.
        """
        if _running or recorders:
            raise UsageError("a profile inside a profile", next="end the other one first; record_function names parts")
        _refuse_in_capture("a profile was started")
        self.step_num, self._recordings, self._steps = 0, [], []
        caller: Any = sys._getframe(1)
        self._outermost = caller.f_back if caller.f_code is Profiler.__enter__.__code__ else caller
        _running.append(self)
        try:
            self._enter(self._action_of(0))
        except BaseException:
            self._end()
            raise

    def step(self) -> None:
        """The next step begins. Raises: UsageError: the profile does not run."""
        if self not in _running:
            raise UsageError("step() of a profile that does not run", next="call it inside the block")
        _refuse_in_capture("a profile went to its next step")
        action, before = self._action_of(self.step_num + 1), self._action
        self._end_step()
        self.step_num += 1
        if before is ProfilerAction.RECORD_AND_SAVE or action not in _RECORDS:
            self._save()
        self._enter(action)

    def stop(self) -> None:
        """End, as leaving the block does; what was recorded stays."""
        if self not in _running:
            return
        try:
            self._end_step()
            self._save()
        finally:
            self._end()

    def _end_step(self) -> None:
        if self._is_recording:
            began, self._step_began = self._step_began, time.perf_counter()
            self._steps.append((f"ProfilerStep#{self.step_num}", began, self._step_began))

    def _end(self) -> None:
        _running.remove(self)
        self._action, self._is_recording, self._session, self._outermost = ProfilerAction.NONE, False, None, None
        self._watch.close()

    def _action_of(self, step: int) -> ProfilerAction:
        action = ProfilerAction.RECORD if self.schedule is None else self.schedule(step)
        if not isinstance(action, ProfilerAction):
            raise UsageError(f"the schedule gives {action!r} for step {step}", next="return a ProfilerAction")
        return action

    def _enter(self, action: ProfilerAction) -> None:
        self._action = action
        if action is ProfilerAction.NONE:
            self._session = None
            self._watch.close()
            return
        if self._session is None:
            self._session = self._new_session()
            self._watch.enter_context(self._session.watching(keeps_graphs=True))
        if action in _RECORDS and not self._is_recording:
            self._session.begin()
            self._is_recording, self._step_began = True, self._session.started

    def _new_session(self) -> Session:
        from genesis import cuda

        on_gpu = _cuda_in_use() if self.activities is None else ProfilerActivity.CUDA in self.activities
        device = Device("cuda") if on_gpu and cuda.is_available() else CPU
        recorder = Recorder(ambient="", has_lines=self.with_stack, has_flops=self.with_flops)
        recorder.outermost = self._outermost
        return Session(recorder, device, list(dict.fromkeys([CPU, device])) if self.profile_memory else [])

    def _save(self) -> None:
        if not self._is_recording or self._session is None:
            return
        self._is_recording, recording = False, self._session.end()
        if not self.acc_events:
            self._recordings, self._steps = [], [step for step in self._steps if step[1] >= recording.start]
        self._recordings.append(recording)
        if self.on_trace_ready is not None:
            self.on_trace_ready(self)

    # --- Results ------------------------------------------------------------------------------------------------------

    def _recorded(self) -> list[Recording]:
        if not self._recordings:
            what = "the profile has recorded nothing so far"
            raise UsageError(what, next="read results behind the block, or in on_trace_ready; the schedule may be long")
        return self._recordings

    def key_averages(self, group_by_input_shape: bool = False, group_by_stack_n: int = 0) -> EventList:
        """Ops, ranges and the rest of the time by name, which add up to the whole.

        Args:
            group_by_input_shape: different shapes are different rows.
            group_by_stack_n: so are different innermost calls, as many as this, if the profile has stacks.

        Raises:
            UsageError: nothing was recorded; the exports as well.
        """
        return averages(self._recorded(), self.with_modules, group_by_input_shape, group_by_stack_n)

    def export_stacks(self, path: str | os.PathLike[str], metric: str = "self_cpu_time_total") -> None:
        """Write stacks, outermost first, with microseconds: the format of flamegraph.pl.

        Args:
            metric: "self_cpu_time_total", or "self_cuda_time_total" for kernels; another is a UsageError.
        """
        write_file(Path(path), collapsed(self._stacks(metric)))

    def export_flame_graph(self, path: str | os.PathLike[str], metric: str = "self_cpu_time_total") -> None:
        """Write the same stacks as an SVG."""
        write_file(Path(path), flame_graph(self._stacks(metric), f"Flame graph of {metric}"))

    def _stacks(self, metric: str) -> dict[tuple[str, ...], float]:
        on_gpu = metric_of(metric, STACK_METRICS) == STACK_METRICS[1]
        return stacks(self._recorded(), on_gpu)

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
    """The profile of a function as a table, or a profile of the block that it is entered for.

    `profile("gelu", run)` returns the ten rows with the longest time, as text; with stacks it writes
    `var/stacks_gelu.txt` and `var/stacks_gelu.svg`. `with profile() as p: …` gives a `Profiler`.

    Args:
        description: what the function is called.
        run: the function.
        num_warmups: calls before the one that is profiled.
        with_stack: ops know the Python calls that led to them.
        activities: None is the host, and the GPU if the program has used one.
        schedule: which steps are recorded; None is all, as one.
        on_trace_ready: called with the profile at the end of each cycle.
        record_shapes: for torch's programs; the shapes of inputs are always recorded.
        profile_memory: the memory that ops take is recorded, and a trace has it as counters.
        with_flops: ops know their FLOPs.
        with_modules: modules have rows as well.
        acc_events: results are those of all cycles, not of the last.

    Raises:
        UsageError: of a function's profile: a profile runs already; a description without a function.
    """
    made = Profiler(
        activities, schedule, on_trace_ready, profile_memory, with_stack, with_flops, with_modules, acc_events
    )
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
    """Mean milliseconds of a call of `run`, with the work that it leaves to the GPU.

    Args:
        description: what the function is called, for errors.
        num_warmups: calls before those that are timed, which compile kernels.
        num_trials: calls that are timed.

    Raises:
        UsageError: no call is timed.
    """
    if num_trials < 1:
        raise UsageError(f"{description}: num_trials={num_trials} times no call", next="use 1 or more")
    for _ in range(num_warmups):
        run()
    milliseconds = []
    for _ in range(num_trials):
        _wait()
        started = time.perf_counter()
        run()
        _wait()
        milliseconds.append((time.perf_counter() - started) * 1e3)
    return fmean(milliseconds)


def _wait() -> None:
    if _cuda_in_use():
        wait_for(Device("cuda"))()


def tensorboard_trace_handler(
    dir_name: str | os.PathLike[str], worker_name: str | None = None, use_gzip: bool = False
) -> Callable[[Profiler], None]:
    """For `on_trace_ready`: writes each cycle's trace into a folder, under a name that TensorBoard's plugin knows."""

    def handler(profiler: Profiler) -> None:
        folder, worker = Path(dir_name), worker_name or f"{socket.gethostname()}_{os.getpid()}"
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(folder / f"{worker}.{time.time_ns()}.pt.trace.json{'.gz' * use_gzip}")

    return handler


check_calls(globals(), ("benchmark", "profile", "record_function", "schedule", "tensorboard_trace_handler"))
