"""Streams of a device (current, unused, side stream of a graph, comm stream), and pinned host memory for copies that
overlap with the host.

`genesis.cuda` has streams and events as objects. Handles are reused and streams never destroyed: memory is reused in
the order of a stream, so a stream must not end while its memory is known.
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
from genesis.backend.cuda.memory import Pool
from genesis.errors import OutOfMemoryError

HIGHEST = -1000  # of priorities; CUDA takes the nearest that it has
LAG = 3  # pieces of work on the side stream before the first of them is waited for


class Runtime(Protocol):
    """A device's `CudaBackend` as its parts see it.

    Attributes:
        stream: the stream on which work is launched now; one for the process, not for each thread as in torch.
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
    def refuse_in_capture(self, what: str) -> None: ...
    def __hash__(self) -> int: ...


def take_stream(backend: Runtime, priority: int = 0) -> int:
    """A stream that nobody uses; below 0 it is served first. It goes back by `give_stream`."""
    idle = backend.idle_streams.setdefault(priority, [])
    return idle.pop() if idle else backend.driver.create_stream(priority)


def give_stream(backend: Runtime, handle: int, priority: int = 0) -> None:
    """Keep a stream for the next who asks; in any thread, also in a finalizer."""
    backend.idle_streams[priority].append(handle)


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

    def precede(self, stream: int) -> None:
        """Let later work of another stream follow what is on the side stream now; the current one need not."""
        if self._ends:
            self.backend.driver.follow(stream, self.stream)

    def forget(self) -> None:
        """The capture failed."""
        self._ends.clear()


class CommStream:
    """A stream of the highest priority for collectives that overlap with a step, in graphs and outside them.

    Work on it follows all work launched so far, including work on the side stream that the current stream has not
    waited for. Later work follows it only after `join`. Its pieces run in launch order. They allocate nothing from the
    pool and touch only memory that outlives a step, so no block has to wait for this stream.
    """

    def __init__(self, backend: Runtime) -> None:
        self.backend, self.stream = backend, backend.driver.create_stream(HIGHEST)
        self._is_open = False

    @contextmanager
    def work(self) -> Iterator[None]:
        """Launch on this stream, behind all work so far."""
        backend, driver, main = self.backend, self.backend.driver, self.backend.stream
        driver.follow(self.stream, main)
        backend.side_stream.precede(self.stream)
        taken, dependent = backend.pool.allocations, driver.dependent
        backend.stream, driver.dependent, self._is_open = self.stream, False, True
        try:
            yield
        finally:
            backend.stream, driver.dependent = main, dependent
        assert not backend.pool.capturing or backend.pool.allocations == taken, "the comm stream of a graph took memory"

    def join(self) -> None:
        """Let later work follow the work of this stream."""
        if self._is_open:
            self._is_open = False
            self.backend.driver.follow(self.backend.stream, self.stream)
            self.backend.driver.begin_again()

    def forget(self) -> None:
        """The capture failed."""
        self._is_open = False


# --- Pinned host memory -----------------------------------------------------------------------------------------------


SMALLEST = 512  # bytes; sizes are powers of two


class PinnedBlock:
    """A run of pinned memory; goes back to its pool with the last view of it."""

    def __init__(self, pool: PinnedPool, pointer: int, size: int) -> None:
        self.pool, self.pointer, self.size = pool, pointer, size
        self.streams: set[int] = set()  # those with copies that may still run

    def bytes(self, nbytes: int) -> np.ndarray:
        """The memory as numpy, `[nbytes]` uint8; views of it keep the block."""
        memory = (ctypes.c_uint8 * max(nbytes, 1)).from_address(self.pointer)
        memory._block = self  # type: ignore[attr-defined]
        whole: np.ndarray = np.ndarray((nbytes,), np.uint8, memoryview(memory))
        return whole

    def __del__(self) -> None:  # in any thread: events are recorded by one who may wait
        self.pool.given.append((self.pointer, self.size, self.streams))


class PinnedPool:
    """The pinned memory of a device; `reserved` bytes are held, in use or kept for reuse."""

    def __init__(self, backend: Runtime) -> None:
        self.backend = backend
        self.free: dict[int, list[tuple[int, list[int]]]] = {}  # by size: pointer, events of its last uses
        self.given: deque[tuple[int, int, set[int]]] = deque()  # back from finalizers, with streams that used it
        self.reserved = 0

    def take(self, nbytes: int) -> PinnedBlock:
        """Pinned memory of `nbytes` or more, contents undefined. Raises OutOfMemoryError; in a capture DeviceError."""
        size = max(1 << max(nbytes - 1, 0).bit_length(), SMALLEST)
        driver, capturing = self.backend.driver, self.backend.pool.capturing
        for _ in range(len(self.given)):
            self._settle(*self.given.popleft(), capturing)
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
        """Keep a block for reuse with an event of each stream that used it; after a capture, which would hold them."""
        if streams and capturing:
            self.given.append((pointer, size, streams))
            return
        self.free[size].append((pointer, [self.backend.driver.mark(stream) for stream in streams]))


def block_of(memory: Any) -> PinnedBlock | None:
    """The block below numpy memory, if it is pinned memory of ours."""
    while isinstance(memory, np.ndarray):
        memory = memory.base
    return getattr(memory, "_block", None)
