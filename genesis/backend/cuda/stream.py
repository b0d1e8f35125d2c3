"""Streams of a device, by their handles: the current stream, idle streams, the side stream, the communication stream.
Also the pinned host memory for asynchronous copies.

`genesis.cuda` wraps streams and events in objects. Handles are reused and streams are never destroyed: the pool reuses
memory in the order of a stream, so a stream must exist as long as its memory.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from genesis.backend import Device
from genesis.backend.cuda.driver import Driver, OutOfDeviceMemory
from genesis.backend.cuda.memory import CudaStorage, Pool
from genesis.errors import OutOfMemoryError

HIGHEST = -1000  # a priority; CUDA clamps it to the highest that it supports
LAG = 3  # pieces of work on the side stream before the main stream waits for the first


class Runtime(Protocol):
    """A device's `CudaBackend`, as its parts use it.

    Attributes:
        stream: the stream that launches go to now. The process has one, while torch has one per thread.
        idle_streams: handles without an owner, by priority.
    """

    device: Device
    driver: Driver
    pool: Pool
    stream: int
    idle_streams: dict[int, list[int]]

    @property
    def side_stream(self) -> SideStream: ...
    @property
    def comm_stream(self) -> CommStream: ...
    @property
    def counters(self) -> CudaStorage: ...
    def refuse_in_capture(self, what: str) -> None: ...
    def __hash__(self) -> int: ...


def take_stream(backend: Runtime, priority: int = 0) -> int:
    """Return an unused stream; a priority below 0 is served first. Return it with `give_stream`."""
    idle = backend.idle_streams.setdefault(priority, [])
    return idle.pop() if idle else backend.driver.create_stream(priority)


def give_stream(backend: Runtime, handle: int, priority: int = 0) -> None:
    """Make a stream available for reuse. Safe in any thread and in finalizers."""
    backend.idle_streams[priority].append(handle)


@contextmanager
def use(backend: Runtime, handle: int) -> Iterator[None]:
    """Launch on a stream inside the block, without any wait at its beginning or end."""
    before, backend.stream = backend.stream, handle
    try:
        yield
    finally:
        backend.stream = before


class SideStream:
    """A second stream in a graph, for kernels whose results are not read soon.

    The gradient of a weight is such a result. With small batches neither it nor the work after it fills the SMs, so the
    two overlap. While work is on the side stream, the pool keeps every block that is returned until the main stream has
    joined it: the order of a single stream no longer protects the memory.
    """

    def __init__(self, backend: Runtime) -> None:
        self.backend = backend
        self.stream = backend.driver.create_stream()
        self._ends: deque[int] = deque()  # an event behind each piece of work that was not joined

    @contextmanager
    def work(self) -> Iterator[None]:
        """Launch on the side stream inside the block, behind all previous work."""
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
        """Make later work wait for the side stream, except for the latest pieces, up to `most` of them."""
        passed, driver = 0, self.backend.driver
        while len(self._ends) > most:
            passed, end = passed + 1, self._ends.popleft()
            if len(self._ends) == most:
                driver.wait_once(self.backend.stream, end)
                driver.serialize_next_launch()
            else:
                driver.destroy_event(end)
        if passed:
            self.backend.pool.give_kept(passed)

    def precede(self, stream: int) -> None:
        """Make later work of another stream wait for the side stream; the current stream does not wait."""
        if self._ends:
            self.backend.driver.follow(stream, self.stream)

    def forget(self) -> None:
        """Reset after a failed capture."""
        self._ends.clear()


class CommStream:
    """A stream of the highest priority for communication between ranks that overlaps a step, in graphs and outside.

    Each piece of work follows all previous work, including work on the side stream that the current stream has not
    joined. Later work does not wait for this stream until `join`. Pieces run in launch order. They do not allocate from
    the pool, and access only memory that outlives a step, so the pool need not keep any block for this stream.
    """

    def __init__(self, backend: Runtime) -> None:
        self.backend, self.stream = backend, backend.driver.create_stream(HIGHEST)
        self._is_open = False

    @contextmanager
    def work(self) -> Iterator[None]:
        """Launch on this stream inside the block, behind all previous work."""
        backend, driver, main = self.backend, self.backend.driver, self.backend.stream
        driver.follow(self.stream, main)
        backend.side_stream.precede(self.stream)
        taken, dependent = backend.pool.allocations, driver.dependent
        backend.stream, driver.dependent, self._is_open = self.stream, False, True
        try:
            yield
        finally:
            backend.stream, driver.dependent = main, dependent
        assert not backend.pool.capturing or backend.pool.allocations == taken, "communication in a graph allocated"

    def join(self) -> None:
        """Make later work wait for this stream."""
        if self._is_open:
            self._is_open = False
            self.backend.driver.follow(self.backend.stream, self.stream)
            self.backend.driver.serialize_next_launch()

    def forget(self) -> None:
        """Reset after a failed capture."""
        self._is_open = False


# --- Pinned host memory -----------------------------------------------------------------------------------------------


SMALLEST = 512  # bytes; sizes are powers of two


class PinnedBlock:
    """A block of pinned memory, which returns to its pool when the last view of it is deleted."""

    def __init__(self, pool: PinnedPool, pointer: int, size: int) -> None:
        self.pool, self.pointer, self.size = pool, pointer, size
        self.streams: set[int] = set()  # streams whose copies may still be running

    def bytes(self, nbytes: int) -> np.ndarray:
        """The memory as a numpy array, `[nbytes]` uint8; its views keep the block alive."""
        memory = (ctypes.c_uint8 * max(nbytes, 1)).from_address(self.pointer)
        memory._block = self  # type: ignore[attr-defined]
        view: np.ndarray = np.ndarray((nbytes,), np.uint8, memoryview(memory))
        return view

    def __del__(self) -> None:  # runs in any thread, so `take` records the events
        self.pool.returned.append((self.pointer, self.size, self.streams))


class PinnedPool:
    """The pinned memory of a device; `reserved` counts all its bytes, in use or cached."""

    def __init__(self, backend: Runtime) -> None:
        self.backend = backend
        self.free: dict[int, list[tuple[int, list[int]]]] = {}  # by size: pointer, events of its last uses
        self.returned: deque[tuple[int, int, set[int]]] = deque()  # by finalizers, with the streams that used the block
        self.reserved = 0

    def take(self, nbytes: int) -> PinnedBlock:
        """Return pinned memory of at least `nbytes`, contents undefined.
        Raises OutOfMemoryError, or DeviceError if a new block is needed during a capture.
        """
        size = max(1 << max(nbytes - 1, 0).bit_length(), SMALLEST)
        driver, capturing = self.backend.driver, self.backend.pool.capturing
        for _ in range(len(self.returned)):
            self._settle(*self.returned.popleft(), capturing)
        # Reuse a block whose last uses are done. During a capture events must not be queried.
        kept = self.free.setdefault(size, [])
        for i, (pointer, events) in enumerate(kept):
            if not events or (not capturing and all(driver.is_event_done(event) for event in events)):
                del kept[i]
                for event in events:
                    driver.destroy_event(event)
                return PinnedBlock(self, pointer, size)
        self.backend.refuse_in_capture("pinned memory was allocated")
        try:
            pointer = driver.allocate_pinned(size)
        except OutOfDeviceMemory:
            raise OutOfMemoryError(
                f"the host has no room for {size:,} bytes of pinned memory; Genesis holds {self.reserved:,}",
                next=OutOfMemoryError.ADVICE,
            ) from None
        self.reserved += size
        return PinnedBlock(self, pointer, size)

    def _settle(self, pointer: int, size: int, streams: set[int], capturing: bool) -> None:
        """Make a block reusable after the streams that used it; postponed in a capture, which would record events."""
        if streams and capturing:
            self.returned.append((pointer, size, streams))
            return
        self.free[size].append((pointer, [self.backend.driver.mark(stream) for stream in streams]))


def block_of(memory: Any) -> PinnedBlock | None:
    """The pinned block that backs a numpy array, or None."""
    while isinstance(memory, np.ndarray):
        memory = memory.base
    return getattr(memory, "_block", None)
