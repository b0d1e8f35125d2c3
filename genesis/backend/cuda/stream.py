"""Streams of a device by their handles: the current one, those that nobody uses, and the side stream of a graph.

`genesis.cuda` has streams and events as objects. Handles are reused and streams never destroyed: memory is reused in
the order of a stream, so a stream must not end while its memory is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from genesis.backend import Device
from genesis.backend.cuda.driver import Driver
from genesis.backend.cuda.memory import Pool

__all__ = ["Runtime", "SideStream", "give_stream", "take_stream", "use"]

LAG = 3  # pieces of work on the side stream before the first of them is waited for
_idle: dict[tuple[int, int], list[int]] = {}  # handles without an owner, by device and priority


class Runtime(Protocol):
    """A device's `CudaBackend` as its parts see it.

    Attributes:
        stream: the stream on which work is launched now; one for the process, not for each thread as in torch.
    """

    device: Device
    driver: Driver
    pool: Pool
    stream: int

    @property
    def side_stream(self) -> SideStream: ...
    def refuse_in_capture(self, what: str) -> None: ...
    def __hash__(self) -> int: ...


def take_stream(backend: Runtime, priority: int = 0) -> int:
    """A stream that nobody uses; below 0 it is served first. It goes back by `give_stream`."""
    idle = _idle.setdefault((backend.device.index, priority), [])
    return idle.pop() if idle else backend.driver.create_stream(priority)


def give_stream(backend: Runtime, handle: int, priority: int = 0) -> None:
    """Keep a stream for the next who asks; in any thread, also in a finalizer."""
    _idle[backend.device.index, priority].append(handle)


@contextmanager
def use(backend: Runtime, handle: int) -> Iterator[None]:
    """Launch on a stream inside the block; nothing waits when it begins or ends."""
    before, backend.stream = backend.stream, handle
    try:
        yield
    finally:
        backend.stream = before


class SideStream:
    """A second stream of a graph, for kernels whose results nobody reads for a while.

    The gradient of a weight is such a result. Where batches are small, neither it nor what follows it fills the SMs,
    so they run at the same time. Blocks that are given back while work is on the side stream, by whomever, wait until
    that has joined: the order of one stream no longer says who uses memory first.
    """

    def __init__(self, backend: Runtime) -> None:
        self.backend = backend
        self.stream = backend.driver.create_stream()
        self._ends: deque[int] = deque()  # an event behind each piece of work that was not waited for

    @contextmanager
    def work(self) -> Iterator[None]:
        """Launch on the side stream, behind all work so far."""
        self.join(LAG - 1)
        backend, driver, main = self.backend, self.backend.driver, self.backend.stream
        driver.follow(self.stream, main)
        backend.pool.keep()
        backend.stream, driver.dependent = self.stream, False
        try:
            yield
        finally:
            backend.stream, driver.dependent = main, True
            self._ends.append(driver.mark(self.stream))

    def join(self, most: int = 0) -> None:
        """Let later work follow the side stream's, but for the `most` latest pieces."""
        passed, driver = 0, self.backend.driver
        while len(self._ends) > most:
            passed, end = passed + 1, self._ends.popleft()
            if len(self._ends) == most:
                driver.wait_once(self.backend.stream, end)
                driver.begin_again()
            else:
                driver.destroy_event(end)
        if passed:
            self.backend.pool.give_kept(passed)

    def forget(self) -> None:
        """The capture failed."""
        self._ends.clear()
