"""Pinned host memory, from and to which copies run while the host goes on: blocks kept for reuse, one pool a device.

A block that a copy may still read or write is not handed out again before that copy is done.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import numpy as np

from genesis.backend.cuda.driver import OutOfDeviceMemory
from genesis.backend.cuda.stream import Runtime
from genesis.errors import OutOfMemoryError

SMALLEST = 512  # bytes; sizes are powers of two


class PinnedBlock:
    """A run of pinned memory; goes back to its pool with the last view of it.

    Attributes:
        pointer, size: address and bytes.
        streams: those with copies that may still run.
    """

    def __init__(self, pool: PinnedPool, pointer: int, size: int) -> None:
        self.pool, self.pointer, self.size = pool, pointer, size
        self.streams: set[int] = set()

    def bytes(self, nbytes: int) -> np.ndarray:
        """The memory as numpy, `[nbytes]` uint8; views of it keep the block."""
        memory = (ctypes.c_uint8 * max(nbytes, 1)).from_address(self.pointer)
        memory._block = self  # type: ignore[attr-defined]
        whole: np.ndarray = np.ndarray((nbytes,), np.uint8, memoryview(memory))
        return whole

    def __del__(self) -> None:  # in any thread: events are recorded by one who may wait
        self.pool.given.append((self.pointer, self.size, self.streams))


class PinnedPool:
    """The pinned memory of a device.

    Attributes:
        reserved: bytes held, in use or kept for reuse.
    """

    def __init__(self, backend: Runtime) -> None:
        self.backend = backend
        self.free: dict[int, list[tuple[int, list[int]]]] = {}  # by size: pointer, events of its last uses
        self.given: deque[tuple[int, int, set[int]]] = deque()  # back from finalizers, with streams that used it
        self.reserved = 0

    def take(self, nbytes: int) -> PinnedBlock:
        """Pinned memory of at least `nbytes`, contents undefined.

        Raises:
            OutOfMemoryError: the host has no room. DeviceError: inside a capture.
        """
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
