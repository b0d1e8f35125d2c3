"""Records a stretch of a program: frames on the host, kernels on the GPU, waits of the host, and memory.

Events time each kernel: around every launch, and after every kernel inside a CUDA graph. Between the events of separate
launches the GPU is idle. Inside a graph a kernel's time starts where the previous kernel ended. Kernels run one after
the other: neither a graph nor the comm stream overlaps them while they are marked.
"""

from __future__ import annotations

import itertools
import threading
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import pool
from genesis.backend.cuda.launch import KernelLaunch, watching_launches
from genesis.measure.limits import cuda_backend, wait_for
from genesis.measure.recorder import OUTSIDE, Frame, Recorder, callers, decorated, shadowed


class Kernel(NamedTuple):
    """A kernel, copy or fill as it ran."""

    name: str
    frame: Frame  # the host's at the launch; for a kernel in a graph, at the capture
    grid: tuple[int, ...] = ()
    outside: str = OUTSIDE  # the op it counts for if no op launched it: a copy, or an earlier graph
    stream: int = 0  # 0 is the step's main stream
    in_graph: bool = False
    is_first: bool = True  # the first kernel of its op's call
    before: int = 0  # events
    after: int = 0
    start: float = 0.0  # seconds since the first mark of the step
    end: float = 0.0

    @property
    def op(self) -> str:
        return self.frame.name if self.frame.level == "op" else self.outside

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Marks:
    """Records events around launches while `watching` is entered; graphs captured meanwhile keep theirs."""

    def __init__(self, backend: Any, current: Callable[[], Frame], keeps_graphs: bool) -> None:
        self.backend, self._current = backend, current
        self._keeps_graphs, self._wait = keeps_graphs, backend.driver.synchronize
        self._marks: list[Kernel] = []
        self._kernels: list[Kernel] = []  # of graphs that were replayed again
        self._capture: list[Kernel] = []  # begins with a mark for the start of the capture
        self._graphs: dict[int, list[Kernel]] = {}  # by executable
        self._replayed: list[int] = []
        self._base, self._streams = 0, dict[int, int]()  # an event; streams in the order of their first launch
        self._events, self._graph_events = list[int](), list[int]()

    def begin(self) -> None:
        self._destroy(self._events)
        self._marks, self._kernels, self._replayed = [], [], []
        self._base, self._streams = self._event(self._events), {self.backend.stream: 0}
        self.backend.driver.record_time(self._base, self.backend.stream)

    def kernels(self) -> list[Kernel]:
        """The kernels since `begin` by their start. The device must be idle."""
        self._read_graphs()
        return sorted([*self._kernels, *map(self._timed, self._marks)], key=lambda kernel: kernel.start)

    def _timed(self, kernel: Kernel) -> Kernel:
        start, end = (self.backend.driver.elapsed(self._base, event) for event in (kernel.before, kernel.after))
        return kernel._replace(start=start, end=end)

    def _read_graphs(self) -> None:
        """Read the events of replayed graphs, which the next replay overwrites."""
        for executable in self._replayed:
            self._kernels += map(self._timed, self._graphs[executable][1:])
        self._replayed = []

    def _event(self, into: list[int]) -> int:
        event: int = self.backend.driver.create_event(True)
        into.append(event)
        return event

    def _destroy(self, events: list[int]) -> None:
        while events:
            self.backend.driver.destroy_event(events.pop())

    @contextmanager
    def _marked(self, name: str, grid: tuple[int, ...], stream: int, outside: str = OUTSIDE) -> Iterator[None]:
        driver = self.backend.driver
        in_graph = bool(self._capture) and bool(self.backend.pool.capturing)
        if in_graph:
            into, before = self._capture, self._capture[-1].after
            yield
            after = self._event(self._graph_events)
        else:
            into, before = self._marks, self._event(self._events)
            after = self._event(self._events)
            driver.record_time(before, stream)
            yield
        driver.record_time(after, stream)
        number = 0 if in_graph else self._streams.setdefault(stream, len(self._streams))
        frame = self._current()
        is_first = frame.level != "op" or not into or into[-1].frame is not frame
        into.append(Kernel(name, frame, grid, outside, number, in_graph, is_first, before, after))

    @contextmanager
    def watching(self) -> Iterator[None]:
        driver, backend = self.backend.driver, self.backend
        plain_copy, plain_capture = driver.copy, driver.begin_capture
        plain_instantiate, plain_replay = driver.instantiate, driver.launch_graph

        def launch(launched: KernelLaunch, stream: int) -> None:
            with self._marked(launched.name, tuple(launched.grid), stream):
                launched.run(stream)

        def copy(target: int, source: int, nbytes: int, stream: int) -> None:
            with self._marked("copy", (), stream, "(copy)"):
                plain_copy(target, source, nbytes, stream)

        def begin_capture(stream: int) -> None:
            plain_capture(stream)
            event = self._event(self._graph_events)
            driver.record_time(event, stream)
            self._capture = [Kernel("capture", self._current(), before=event, after=event)]

        def instantiate(graph: int) -> int:
            executable: int = plain_instantiate(graph)
            self._graphs[executable], self._capture = self._capture, []
            return executable

        def launch_graph(executable: int, stream: int) -> None:
            if executable not in self._graphs:
                with self._marked("graph", (), stream, "(CUDA graph)"):
                    plain_replay(executable, stream)
                return
            if executable in self._replayed:
                driver.synchronize()
                self._read_graphs()
            plain_replay(executable, stream)
            self._replayed.append(executable)

        with ExitStack() as stack:
            if not self._keeps_graphs:
                stack.callback(self._destroy, self._graph_events)
            stack.callback(self._destroy, self._events)
            stack.callback(self._wait)
            stack.callback(setattr, driver, "dependent", driver.dependent)
            driver.dependent = False
            stack.enter_context(watching_launches(launch))
            one_stream = shadowed(backend, on_side_stream=lambda nbytes: nullcontext(), on_comm_stream=nullcontext)
            stack.enter_context(one_stream)
            calls: dict[str, Callable[..., Any]] = {"copy": copy, "begin_capture": begin_capture}
            calls |= {"instantiate": instantiate, "launch_graph": launch_graph}
            stack.enter_context(shadowed(driver, **calls))
            yield


class Change(NamedTuple):
    """An allocation, or a free with negative `nbytes`, and the bytes allocated after it."""

    at: float  # seconds of `time.perf_counter`
    nbytes: int
    frame: Frame | None  # the host's innermost one; None for the first entry, the bytes that exist before
    allocated: int


class Track(NamedTuple):
    """A device's memory over time, which a trace shows as a counter."""

    device: Device
    changes: Sequence[Change]


@dataclass(frozen=True)
class Recording:
    """A stretch of time; moments are seconds of `time.perf_counter`."""

    start: float
    launched: float  # when the host had launched everything
    end: float
    frames: list[Frame]
    kernels: list[Kernel]
    marked: float  # the zero of the kernels' times
    tracks: list[Track] = field(default_factory=list)  # memory over time

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def own_kernels(self) -> list[Kernel]:
        """The kernels on the main stream, which ran one after the other."""
        return [kernel for kernel in self.kernels if not kernel.stream]


# Calls of a GPU's driver in which the host waits.
WAITS = {
    "synchronize_event": "an event waited for",
    "synchronize_stream": "a stream waited for",
    "synchronize": "the device waited for",
    "allocate": "memory taken from the driver",
    "free": "memory given back to the driver",
}


class Session:
    """Makes recordings while `watching` is entered: of a device's waits and kernels, and the memory of devices."""

    def __init__(
        self, recorder: Recorder, device: Device, memory: Sequence[Device] = (), keeps_graphs: bool = False
    ) -> None:
        self.recorder, self.started = recorder, 0.0  # when the current recording began
        self._backend: Any = backend_for(device)
        self._wait, self._marked = wait_for(device), 0.0
        self._marks = None if device == CPU else Marks(self._backend, recorder.current, keeps_graphs)
        self._watches: list[Any] = [*filter(None, [self._marks]), recorder]
        self._pools: dict[Device, Any] = {each: pool if each == CPU else cuda_backend(each).pool for each in memory}
        self._changes = defaultdict[Device, list[tuple[float, int, Frame | None]]](list)
        self._waiting = threading.local()  # has `inside` while a thread's wait is recorded

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self._watches:
                stack.enter_context(each.watching())
            for device, each in self._pools.items():
                each.watch = partial(self._changed, device)
                stack.callback(setattr, each, "watch", None)
            stack.enter_context(decorated(self._backend, to_numpy=self._waits_in("values read on the host")))
            if self._marks is not None:
                driver = self._backend.driver
                calls = {name: self._waits_in(what)(getattr(driver, name)) for name, what in WAITS.items()}
                plain, waiting = driver.synchronize_event, calls["synchronize_event"]
                calls["synchronize_event"] = lambda event: (plain if driver.is_event_done(event) else waiting)(event)
                stack.enter_context(shadowed(driver, **calls))
            yield

    def begin(self) -> None:
        """Begin a recording as soon as the device is idle."""
        self._wait()
        self._marked = time.perf_counter()
        for each in self._watches:
            each.begin()
        self._changes.clear()
        for device, each in self._pools.items():
            self._changes[device].append((time.perf_counter(), each.allocated, None))
        self.started = time.perf_counter()

    def _changed(self, device: Device, address: int, nbytes: int) -> None:
        self._changes[device].append((time.perf_counter(), nbytes, self.recorder.current()))

    def end(self) -> Recording:
        """The recording since `begin`, as soon as the device is idle."""
        launched = time.perf_counter()
        self._wait()
        end, frames = time.perf_counter(), self.recorder.end()
        kernels = [] if self._marks is None else self._marks.kernels()
        tracks = []
        for device, changes in self._changes.items():
            totals = itertools.accumulate(nbytes for _, nbytes, _ in changes)
            tracks.append(Track(device, [Change(*each, total) for each, total in zip(changes, totals, strict=True)]))
        return Recording(self.started, launched, end, frames, kernels, self._marked, tracks)

    @contextmanager
    def _waits_in(self, what: str) -> Iterator[None]:
        """Record the block as a wait, unless it is part of one."""
        if getattr(self._waiting, "inside", False):
            yield
            return
        self._waiting.inside, around, started = True, self.recorder.current(), time.perf_counter()
        try:
            yield
        finally:
            self._waiting.inside, end = False, time.perf_counter()
            file, line, _ = next(callers(), ("genesis", 0, ""))
            wait = replace(around, level="wait", name=what, start=started, end=end, lines=(f"{file}:{line}",))
            self.recorder.frames.append(wait)


def peak_bytes(call: Callable[[], object], device: Device) -> int:
    """Peak bytes of a call's outputs and temporaries, on the CPU including numpy's. The call must have run before."""
    if device != CPU:
        backend = cuda_backend(device)
        backend.driver.synchronize()
        backend.pool.settle()
        backend.pool.reset_peak()
        before = backend.pool.allocated
        call()
        return int(backend.pool.max_allocated - before)
    pool.trim()  # only fresh memory is traced
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
