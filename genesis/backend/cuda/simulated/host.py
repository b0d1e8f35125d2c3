"""The driver over host memory: what lets every kernel run in Triton's interpreter on a machine with no GPU.

Streams run at once, so events have always happened. A graph is a list of the calls that were captured. Nothing here is
fast, and nothing here is for users. Methods do what `Driver` says.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from genesis.backend.cuda.driver import Driver, Function, Grid, KernelFacts, OutOfDeviceMemory, Properties, SMFacts
from genesis.backend.cuda.launch import KernelLaunch
from genesis.backend.cuda.simulated.interpreter import interpreted_launch
from genesis.errors import DeviceError

MEMORY = 8 << 30  # bytes that the pretended device has


class HostDriver(Driver):
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

    def do(self, stream: int, work: Callable[[], Any]) -> None:
        """Work of a stream: done, or captured."""
        capture = self._captures.get(stream)
        if capture is None:
            work()
        else:
            capture.append(work)
            if stream in self._sides:
                self._open.add(stream)

    # --- Memory -------------------------------------------------------------------------------------------------------

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
        self._used -= self._blocks.pop(pointer).nbytes - 512

    allocate_pinned = allocate

    def register_host(self, pointer: int, nbytes: int) -> None: ...
    def unregister_host(self, pointer: int) -> None: ...

    def is_linked(self, devices: Iterable[int]) -> bool:
        return all(index == self.index for index in devices)

    def cuda_version(self) -> int:
        return 13000

    def memory_info(self) -> tuple[int, int]:
        return self.memory - self._used, self.memory

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.do(stream, lambda: ctypes.memmove(target, source, nbytes))

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        self.do(stream, lambda: ctypes.memset(target, byte, nbytes))

    # --- Kernels: none but those of the interpreter -------------------------------------------------------------------

    def prepare(
        self, backend: Any, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> KernelLaunch:
        """A launch in Triton's interpreter."""
        return interpreted_launch(self.do, kernel, grid, args, keywords)

    def load(self, image: bytes, name: str, shared: int, parameters: int) -> Function:
        raise DeviceError("the interpreter runs kernels from their source", next="unset TRITON_INTERPRET")

    def launcher(
        self, function: Any, grid: Grid, block: Grid, shared: int, parameters: int, cluster: int = 1
    ) -> Callable[[int], None]:
        raise DeviceError("the interpreter runs no machine code", next="unset TRITON_INTERPRET")

    def kernel_facts(self, function: Any, threads: int, shared: int) -> KernelFacts:
        raise DeviceError("kernels take no resources in the interpreter", next="unset TRITON_INTERPRET")

    def sm_facts(self) -> SMFacts:
        raise DeviceError("the interpreter has no SMs", next="unset TRITON_INTERPRET")

    def enter(self) -> None: ...  # there is one device
    def flush(self) -> None: ...  # nothing waits for its kernel
    def begin_again(self) -> None: ...  # all launches wait

    # --- Streams and events: done at once -----------------------------------------------------------------------------

    def create_stream(self, priority: int = 0) -> int:
        return next(self._handles)

    def synchronize_stream(self, stream: int) -> None:
        """Nothing to wait for; refused while the stream is captured."""
        if stream in self._captures:
            raise DeviceError("cuStreamSynchronize during a capture", next="end the capture first")

    def is_stream_done(self, stream: int) -> bool:
        return True

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
        return next(self._handles)

    def destroy_event(self, event: int) -> None:
        self._events.pop(event, None)
        self._recorded.pop(event, None)

    def record_event(self, event: int, stream: int) -> None:
        self._events[event] = time.perf_counter()
        self._recorded.pop(event, None)
        if stream in self._captures:
            self._recorded[event] = stream

    def record_time(self, event: int, stream: int) -> None:
        def note() -> None:
            self._events[event] = time.perf_counter()

        self.do(stream, note)

    def synchronize_event(self, event: int) -> None: ...

    def is_event_done(self, event: int) -> bool:
        return True

    def has_happened(self, event: int) -> bool:
        return True

    def elapsed(self, start: int, end: int) -> float:
        return self._events[end] - self._events[start]

    def synchronize(self) -> None:
        """Nothing to wait for; refused during a capture, as the driver does."""
        if self._captures:
            raise DeviceError("cuCtxSynchronize during a capture", next="end the capture first")

    # --- Graphs: lists of calls ---------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        if stream == 0 or stream in self._captures:
            raise DeviceError(f"stream {stream} cannot be captured", next="capture a stream of your own, once")
        self._captures[stream] = []

    def end_capture(self, stream: int) -> int:
        graph, work = next(self._handles), self._captures[stream]
        self._captures = {s: w for s, w in self._captures.items() if w is not work}
        unjoined, self._open, self._sides = bool(self._open), set(), set()
        if unjoined:
            raise DeviceError("CUDA_ERROR_STREAM_CAPTURE_UNJOINED", next="join the side stream before the capture ends")
        self.graphs[graph] = work
        return graph

    def is_capturing(self, stream: int) -> bool:
        return stream in self._captures

    def instantiate(self, graph: int) -> int:
        return graph

    def launch_graph(self, executable: int, stream: int) -> None:
        for work in self.graphs[executable]:
            work()

    def destroy_graph(self, graph: int, executable: int | None) -> None:
        del self.graphs[graph]
