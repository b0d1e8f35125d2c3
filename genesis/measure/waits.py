"""Where the host waits for the GPU inside a step, or reads values: each with the line that caused it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from genesis.backend import CPU, Device, backend_for
from genesis.measure.recorder import callers, shadowed

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend


class Wait(NamedTuple):
    """The host waited once, or read values.

    Attributes:
        what: the call, for people.
        line: file:line that caused it.
        start, seconds: when by `time.perf_counter`, and how long it took.
        thread: which waited.
    """

    what: str
    line: str
    start: float
    seconds: float
    thread: int


class _Thread(threading.local):
    """Whether a call of this thread is being noted."""

    inside = False


class Waits:
    """Notes waits while `watching` is entered and `on` is set."""

    def __init__(self, device: Device) -> None:
        self.device, self.on = device, False
        self.found: list[Wait] = []
        self._thread = _Thread()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what happens inside the block."""
        backend: Any = backend_for(self.device)
        with ExitStack() as stack:
            stack.enter_context(shadowed(backend, to_numpy=self._noting(backend.to_numpy, "values read on the host")))
            if self.device != CPU:
                stack.enter_context(self._watching_driver(backend))
            yield

    def _watching_driver(self, backend: CudaBackend) -> Any:
        driver = backend.driver
        plain, noted = driver.synchronize_event, self._noting(driver.synchronize_event, "an event waited for")

        def synchronize_event(event: int) -> None:
            (plain if driver.is_event_done(event) else noted)(event)  # what has happened makes nobody wait

        return shadowed(
            driver,
            synchronize_event=synchronize_event,
            synchronize_stream=self._noting(driver.synchronize_stream, "a stream waited for"),
            synchronize=self._noting(driver.synchronize, "the device waited for"),
            allocate=self._noting(driver.allocate, "memory taken from the driver"),
            free=self._noting(driver.free, "memory given back to the driver"),
        )

    def _noting(self, method: Callable[..., Any], what: str) -> Callable[..., Any]:
        """`method`, whose calls are noted, but for those that others of these make."""

        def call(*args: Any) -> Any:
            own = self._thread
            if not self.on or own.inside:
                return method(*args)
            own.inside, started = True, time.perf_counter()
            try:
                return method(*args)
            finally:
                own.inside = False
                seconds = time.perf_counter() - started
                file, line, _ = next(callers(), ("genesis", 0, ""))
                self.found.append(Wait(what, f"{file}:{line}", started, seconds, threading.get_ident()))

        return call
