"""The driver's contract over host memory: what lets every kernel run in Triton's interpreter on a machine with no GPU.

Streams run at once, so events have always happened. A graph is a list of the calls that were recorded. Nothing here is
fast, and nothing here is for users.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.backend.cuda.driver import Function, Grid, KernelFacts, OutOfDeviceMemory, Properties, SMFacts
from genesis.backend.cuda.launch import KernelLaunch
from genesis.backend.cuda.simulated.interpreter import interpreted_launch
from genesis.errors import DeviceError

__all__ = ["HostDriver"]

MEMORY = 8 << 30  # bytes that the pretended device has


class HostDriver:
    """Host memory behind the face of a device of compute capability 9.0."""

    def __init__(self, index: int) -> None:
        if index:
            raise DeviceError(f"device cuda:{index} was asked for; the interpreter has one device", next="use cuda:0")
        self.index: int = index
        self.pending: deque[Callable[[], None]] = deque()
        self.capturing, self.dependent = False, True
        self.properties = Properties("Triton's interpreter", (9, 0), MEMORY, 4, 227 << 10, 50 << 20)
        self.memory = MEMORY
        self._blocks: dict[int, np.ndarray] = {}
        self._handles = itertools.count(16)  # 1 and 2 name the default streams
        self._events: dict[int, float] = {}
        self._used = 0
        self._captures: dict[int, list[Callable[[], None]]] = {}  # by stream; a side stream has its origin's
        self._recorded: dict[int, int] = {}  # the streams of events in captures
        self._sides: set[int] = set()
        self._open: set[int] = set()  # side streams with work that their origin has not waited for
        self.graphs: dict[int, list[Callable[[], None]]] = {}

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
        self._do(stream, lambda: ctypes.memmove(target, source, nbytes))

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        """Set bytes now."""
        self._do(stream, lambda: ctypes.memset(target, byte, nbytes))

    def _do(self, stream: int, work: Callable[[], Any]) -> None:
        """Work of a stream: done, or recorded."""
        capture = self._captures.get(stream)
        if capture is None:
            work()
        else:
            capture.append(work)
            if stream in self._sides:
                self._open.add(stream)

    def load(self, image: bytes, name: str, shared: int, parameters: int) -> Function:
        """No machine code runs here."""
        raise DeviceError("the interpreter runs kernels from their source", next="unset TRITON_INTERPRET")

    def kernel_facts(self, function: Any, threads: int, shared: int) -> KernelFacts:
        """No machine code, no registers."""
        raise DeviceError("kernels take no resources in the interpreter", next="unset TRITON_INTERPRET")

    def sm_facts(self) -> SMFacts:
        """No SMs either."""
        raise DeviceError("the interpreter has no SMs", next="unset TRITON_INTERPRET")

    def flush(self) -> None:
        """Nothing waits for its kernel."""

    def prepare(
        self, backend: Any, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> KernelLaunch:
        """A launch in Triton's interpreter."""
        return interpreted_launch(self, kernel, grid, args, keywords)

    def launcher(self, function: Any, grid: Grid, block: Grid, shared: int, parameters: int) -> Callable[[int], None]:
        """What runs a kernel at once: `function` is a call that is bound to its arguments."""

        def run(stream: int) -> None:
            bound = _with_present_addresses(function) if stream in self._captures else function
            self._do(stream, lambda: bound(grid))

        return run

    def create_stream(self, priority: int = 0) -> int:
        """A number."""
        return next(self._handles)

    def destroy_stream(self, stream: int) -> None:
        """Nothing to do."""

    def synchronize_stream(self, stream: int) -> None:
        """Nothing to wait for; refused while the stream is captured."""
        if stream in self._captures:
            raise DeviceError("cuStreamSynchronize during a capture", next="end the capture first")

    def is_stream_done(self, stream: int) -> bool:
        """Always."""
        return True

    def begin_again(self) -> None:
        """All launches wait."""

    def wait_event(self, stream: int, event: int) -> None:
        """Nothing to wait for; a stream that waits for a captured one is captured with it."""
        other = self._recorded.get(event)
        if other is None:
            return
        if stream not in self._captures:
            self._captures[stream] = self._captures[other]
            self._sides.add(stream)
        self._open.discard(other)

    def create_event(self, timing: bool) -> int:
        """A number."""
        return next(self._handles)

    def destroy_event(self, event: int) -> None:
        """Forget its time."""
        self._events.pop(event, None)
        self._recorded.pop(event, None)

    def record_event(self, event: int, stream: int) -> None:
        """Note the time."""
        self._events[event] = time.perf_counter()
        self._recorded.pop(event, None)
        if stream in self._captures:
            self._recorded[event] = stream

    def record_time(self, event: int, stream: int) -> None:
        """Note the time, in a graph that of each replay."""

        def note() -> None:
            self._events[event] = time.perf_counter()

        self._do(stream, note)

    def synchronize_event(self, event: int) -> None:
        """Nothing to wait for."""

    def is_event_done(self, event: int) -> bool:
        """Always."""
        return True

    def elapsed(self, start: int, end: int) -> float:
        """Seconds between two recorded events."""
        return self._events[end] - self._events[start]

    def synchronize(self) -> None:
        """Nothing to wait for; refused during a capture, as the driver does."""
        if self._captures:
            raise DeviceError("cuCtxSynchronize during a capture", next="end the capture first")

    def begin_capture(self, stream: int) -> None:
        """Record the stream's work from here on."""
        if stream == 0 or stream in self._captures:
            raise DeviceError(f"stream {stream} cannot be captured", next="capture a stream of your own, once")
        self._captures[stream] = []

    def end_capture(self, stream: int) -> int:
        """What was recorded."""
        graph, work = next(self._handles), self._captures[stream]
        self._captures = {s: w for s, w in self._captures.items() if w is not work}
        unjoined, self._open, self._sides = bool(self._open), set(), set()
        if unjoined:
            raise DeviceError("CUDA_ERROR_STREAM_CAPTURE_UNJOINED", next="join the side stream before the capture ends")
        self.graphs[graph] = work
        return graph

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream's work is being recorded."""
        return stream in self._captures

    def instantiate(self, graph: int) -> int:
        """The graph itself."""
        return graph

    def launch_graph(self, executable: int, stream: int) -> None:
        """Do what was recorded, in its order."""
        for work in self.graphs[executable]:
            work()

    def destroy_graph(self, graph: int, executable: int | None) -> None:
        """Forget a graph."""
        del self.graphs[graph]


def _with_present_addresses(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """A bound kernel that will run with the addresses it has now: its launcher changes them for every launch."""
    values = [getattr(value, "base", value) for value in inspect.getclosurevars(function).nonlocals.get("values", ())]
    saved = [(value.words, bytes(value.words)) for value in values if hasattr(value, "words")]

    def run(grid: Any) -> None:
        later = [bytes(words) for words, _ in saved]
        for words, then in saved:
            ctypes.memmove(words, then, len(then))
        function(grid)
        for (words, _), now in zip(saved, later, strict=True):
            ctypes.memmove(words, now, len(now))

    return run
