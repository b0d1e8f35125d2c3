"""The driver's contract over host memory: what lets every kernel run in Triton's interpreter on a machine with no GPU.

Streams run at once, so events have always happened. Nothing here is fast, and nothing here is for users.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from typing import Any

import numpy as np

from genesis.backend.cuda.driver import Function, OutOfDeviceMemory, Properties
from genesis.errors import DeviceError

__all__ = ["HostDriver"]

MEMORY = 8 << 30  # bytes that the pretended device has


class HostDriver:
    """Host memory behind the face of a device of compute capability 9.0."""

    def __init__(self, index: int) -> None:
        if index:
            raise DeviceError(f"device cuda:{index} was asked for; the interpreter has one device", next="use cuda:0")
        self.index = index
        self.properties = Properties("Triton's interpreter", (9, 0), MEMORY, 4, 227 << 10, 50 << 20)
        self.memory = MEMORY
        self._blocks: dict[int, np.ndarray] = {}
        self._handles = itertools.count(1)
        self._events: dict[int, float] = {}
        self._used = 0

    def allocate(self, nbytes: int) -> int:
        """Host memory at a multiple of 512 bytes."""
        if self._used + nbytes > self.memory:
            raise OutOfDeviceMemory
        block = np.empty(nbytes + 512, np.uint8)
        pointer = -(-int(block.ctypes.data) // 512) * 512
        self._blocks[pointer] = block
        self._used += nbytes
        return pointer

    def free(self, pointer: int) -> None:
        """Forget a block."""
        self._used -= self._blocks.pop(pointer).nbytes - 512

    allocate_pinned = allocate
    free_pinned = free

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes."""
        return self.memory - self._used, self.memory

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy now."""
        ctypes.memmove(target, source, nbytes)

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        """Set bytes now."""
        ctypes.memset(target, byte, nbytes)

    def load(self, image: bytes, name: str, shared: int) -> Function:
        """No machine code runs here."""
        raise DeviceError("the interpreter runs kernels from their source", next="unset TRITON_INTERPRET")

    def launch(
        self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, stream: int, parameters: int
    ) -> None:
        """Run a kernel now: `function` is a call that the launcher bound to its arguments."""
        function(grid)

    def create_stream(self, priority: int = 0) -> int:
        """A number."""
        return next(self._handles)

    def destroy_stream(self, stream: int) -> None:
        """Nothing to do."""

    def synchronize_stream(self, stream: int) -> None:
        """Nothing to wait for."""

    def is_stream_done(self, stream: int) -> bool:
        """Always."""
        return True

    def wait_event(self, stream: int, event: int) -> None:
        """Nothing to wait for."""

    def create_event(self, timing: bool) -> int:
        """A number."""
        return next(self._handles)

    def destroy_event(self, event: int) -> None:
        """Forget its time."""
        self._events.pop(event, None)

    def record_event(self, event: int, stream: int) -> None:
        """Note the time."""
        self._events[event] = time.perf_counter()

    def synchronize_event(self, event: int) -> None:
        """Nothing to wait for."""

    def is_event_done(self, event: int) -> bool:
        """Always."""
        return True

    def elapsed(self, start: int, end: int) -> float:
        """Seconds between two recorded events."""
        return self._events[end] - self._events[start]

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def begin_capture(self, stream: int) -> None:
        """Graphs need a GPU."""
        raise DeviceError("the interpreter has no graphs", next="run on a GPU")

    def end_capture(self, stream: int) -> int:
        """Graphs need a GPU."""
        raise DeviceError("the interpreter has no graphs", next="run on a GPU")

    def is_capturing(self, stream: int) -> bool:
        """Never."""
        return False

    def instantiate(self, graph: int) -> int:
        """Graphs need a GPU."""
        raise DeviceError("the interpreter has no graphs", next="run on a GPU")

    def launch_graph(self, executable: int, stream: int) -> None:
        """Graphs need a GPU."""
        raise DeviceError("the interpreter has no graphs", next="run on a GPU")

    def destroy_graph(self, graph: int, executable: int) -> None:
        """Nothing to forget."""
