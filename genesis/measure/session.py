"""Records a stretch of a program: frames on the host, kernels on the GPU, waits of the host, and memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

from genesis.backend import CPU, Device, backend_for
from genesis.measure.limits import wait_for
from genesis.measure.marks import Kernel, Marks
from genesis.measure.memory import MemoryWatch, Track
from genesis.measure.recorder import Frame, Recorder, callers, decorated, shadowed


@dataclass(frozen=True)
class Recording:
    """A stretch of time; moments are seconds of `time.perf_counter`.

    Attributes:
        launched: when the host had launched everything.
        marked: the zero of the kernels' times.
        tracks: memory over time.
    """

    start: float
    launched: float
    end: float
    frames: list[Frame]
    kernels: list[Kernel]
    marked: float
    tracks: list[Track] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end - self.start

    @property
    def waits(self) -> list[Frame]:
        """Calls in which the host waited for the GPU or read values; `lines` has the file:line that caused each."""
        return [frame for frame in self.frames if frame.level == "wait"]

    @property
    def own_kernels(self) -> list[Kernel]:
        """The kernels on the main stream, which ran one after the other."""
        return [kernel for kernel in self.kernels if not kernel.is_concurrent]


# Calls of a GPU's driver in which the host waits.
WAITS = {
    "synchronize_event": "an event waited for",
    "synchronize_stream": "a stream waited for",
    "synchronize": "the device waited for",
    "allocate": "memory taken from the driver",
    "free": "memory given back to the driver",
}


class Session:
    """Makes recordings while `watching` is entered.

    Args:
        device: its waits are recorded, and on a GPU its kernels.
        memory: devices whose memory is followed.
        launched: called after work is launched, before a wait for it.
        keeps_graphs: whether graphs captured under watch are replayed later.

    Attributes:
        started: when the current recording began.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: Device,
        memory: Sequence[Device] = (),
        launched: Callable[[], None] = lambda: None,
        keeps_graphs: bool = False,
    ) -> None:
        self.recorder, self.started = recorder, 0.0
        self._backend: Any = cast(Any, backend_for(device))
        self._launched, self._wait, self._marked = launched, wait_for(device), 0.0
        on_gpu = device != CPU
        self._marks = Marks(self._backend, recorder.current, launched, keeps_graphs) if on_gpu else None
        self._memory = [MemoryWatch(each, recorder.current) for each in memory]
        self._watches: list[Any] = [*filter(None, [self._marks]), recorder, *self._memory]
        self._waiting = threading.local()  # has `inside` while a thread's wait is recorded

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what happens inside the block."""
        with ExitStack() as stack:
            for each in self._watches:
                stack.enter_context(each.watching())
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
        self.started = time.perf_counter()

    def end(self) -> Recording:
        """The recording since `begin`, as soon as the device is idle."""
        launched = time.perf_counter()
        self._launched()
        self._wait()
        end, frames = time.perf_counter(), self.recorder.end()
        kernels = [] if self._marks is None else self._marks.kernels()
        tracks = [each.track() for each in self._memory]
        return Recording(self.started, launched, end, frames, kernels, self._marked, tracks)

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Record the block as a phase, an op and a kernel."""
        with self.recorder.collective(), nullcontext() if self._marks is None else self._marks.collective(name):
            yield

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
