"""All watches together: what a stretch of a program did on the host, on the GPU and in memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from genesis.backend import CPU, Device, backend_for
from genesis.measure.limits import wait_for
from genesis.measure.marks import Kernel, Marks
from genesis.measure.memory import MemoryWatch, Track
from genesis.measure.recorder import Frame, Recorder
from genesis.measure.waits import Wait, Waits


@dataclass(frozen=True)
class Recording:
    """A stretch of time: its beginning and end by `time.perf_counter`, and what happened in it.

    Attributes:
        launched: when the host had launched everything.
        marked: from when the kernels' times are counted.
        tracks: memory over time.
    """

    start: float
    launched: float
    end: float
    frames: list[Frame]
    kernels: list[Kernel]
    waits: list[Wait]
    marked: float
    tracks: list[Track] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the beginning to the end."""
        return self.end - self.start


class Session:
    """Makes recordings while `watching` is entered.

    Args:
        recorder: of what happens on the host.
        device: whose waits are noted, and whose kernels are marked on a GPU.
        memory: devices whose memory is followed.
        launched: called when work is launched, before a wait for it.

    Attributes:
        started: when the recording began, by `time.perf_counter`.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: Device,
        memory: Sequence[Device] = (),
        launched: Callable[[], None] = lambda: None,
    ) -> None:
        self.recorder, self._waits, self._launched = recorder, Waits(device), launched
        backend: Any = None if device == CPU else backend_for(device)
        self.marks = None if backend is None else Marks(backend, recorder.current, launched)
        self._memory = [MemoryWatch(each, recorder.current) for each in memory]
        self._wait = wait_for(device)
        self.started = self._marked = 0.0

    @contextmanager
    def watching(self, keeps_graphs: bool = False) -> Iterator[None]:
        """Watch what happens inside the block.

        Args:
            keeps_graphs: whether graphs that are captured inside are replayed after it.
        """
        with ExitStack() as stack:
            if self.marks is not None:
                stack.callback(self.marks.close, keeps_graphs)
                stack.callback(self._wait)
            stack.enter_context(self.recorder.watching())
            if self.marks is not None:
                stack.enter_context(self.marks.watching())
            for each in self._memory:
                stack.enter_context(each.watching())
            stack.enter_context(self._waits.watching())
            yield

    def begin(self) -> None:
        """A recording begins, once the device is idle."""
        self._wait()
        self.recorder.begin()
        self._marked = time.perf_counter()
        if self.marks is not None:
            self.marks.begin()
        for each in self._memory:
            each.begin()
        self._waits.found, self._waits.on = [], True
        self.started = time.perf_counter()

    def end(self) -> Recording:
        """The recording since `begin`, once the device is idle."""
        launched, self._waits.on = time.perf_counter(), False
        self._launched()
        self._wait()
        end, frames = time.perf_counter(), self.recorder.end()
        kernels = [] if self.marks is None else self.marks.kernels()
        tracks = [each.track() for each in self._memory]
        return Recording(self.started, launched, end, frames, kernels, self._waits.found, self._marked, tracks)


def marked(session: Session, collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that the session shows as a phase, an op and a kernel."""
    on_device = collective if session.marks is None else session.marks.collective(collective)
    return functools.wraps(collective)(session.recorder.collective(cast(Any, on_device)))
