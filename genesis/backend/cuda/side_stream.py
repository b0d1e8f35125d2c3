"""A side stream: in a graph, kernels whose results nobody reads for a while run next to the main stream's.

The gradient of a weight is such a result. Where batches are small, neither it nor what follows it fills the SMs,
so they run at the same time. Blocks that are given back while work is on the side stream, by whomever, wait until that
has joined: the order of one stream no longer says who uses memory first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

__all__ = ["SideStream"]


LAG = 3  # pieces of work on the side stream before the first of them is waited for


class SideStream:
    """The one side stream of a device, on which pieces of work follow each other while a graph is captured."""

    def __init__(self, backend: CudaBackend) -> None:
        self.backend = backend
        self.stream = backend.driver.create_stream()
        self._ends: deque[int] = deque()  # an event behind each piece of work that was not waited for

    @contextmanager
    def work(self) -> Iterator[None]:
        """Launch on the side stream, behind all work so far."""
        self.join(LAG - 1)
        backend, driver, main = self.backend, self.backend.driver, self.backend.stream
        self._wait(self.stream, self._mark(main))
        backend.pool.keep()
        backend.stream, driver.dependent = self.stream, False
        try:
            yield
        finally:
            backend.stream, driver.dependent = main, True
            self._ends.append(self._mark(self.stream))

    def join(self, most: int = 0) -> None:
        """Let later work follow the side stream's, but for the `most` latest pieces."""
        passed = 0
        while len(self._ends) > most:
            passed, end = passed + 1, self._ends.popleft()
            if len(self._ends) == most:
                self._wait(self.backend.stream, end)
                self.backend.driver.begin_again()
            else:
                self.backend.driver.destroy_event(end)
        if passed:
            self.backend.pool.give_kept(passed)

    def forget(self) -> None:
        """The capture failed."""
        self._ends.clear()

    def _mark(self, stream: int) -> int:
        event = self.backend.driver.create_event(False)
        self.backend.driver.record_event(event, stream)
        return event

    def _wait(self, stream: int, event: int) -> None:
        self.backend.driver.wait_event(stream, event)
        self.backend.driver.destroy_event(event)
