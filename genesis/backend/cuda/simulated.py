"""Simulated devices with the contract of `Driver`: host memory with Triton's interpreter, and fakes that run nothing.

Tests run every kernel in the interpreter on host memory. A fake device collects its launches with their signatures, and
its addresses have no memory behind them. `genesis profile --show` compiles for a fake device of any architecture, and
memory plans are counted on one, also for models that exceed every available machine.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from genesis.backend import ArrayLike, Device
from genesis.backend.cuda.compile import Signature, describe, is_array
from genesis.backend.cuda.driver import Driver, Function, Grid, KernelFacts, OutOfDeviceMemory, Properties, SMFacts
from genesis.backend.cuda.launch import OPTIONS, KernelLaunch, memory_of, plain_launch, signature_of
from genesis.backend.cuda.tma import is_descriptor
from genesis.errors import DeviceError

drivers: dict[int, Driver] = {}  # fake devices, under indices that no machine has

# --- Launches in Triton's interpreter ---------------------------------------------------------------------------------


class _Pointer:
    """An address with a dtype, in the form that Triton's interpreter takes; all memory is on the host, so no copies."""

    def __init__(self, words: Any, at: int, dtype: Any) -> None:
        self.words, self.at, self.dtype = words, at, dtype

    def data_ptr(self) -> int:
        return int(self.words[self.at])

    def untyped_storage(self) -> _Pointer:
        return self

    cpu = untyped_storage

    def new_empty(self, *args: Any, **keywords: Any) -> _Pointer:
        return self

    def set_(self, *args: Any) -> None: ...
    def copy_(self, *args: Any) -> None: ...
    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return ()

    stride = size


RunOrCapture = Callable[[int, Callable[[], Any]], None]  # (stream, work): runs work now, or at each replay of a graph


def interpreted_launch(
    run_or_capture: RunOrCapture, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]
) -> KernelLaunch:
    """A launch of a Triton kernel in the interpreter."""
    describe(args)  # refuses the arguments that machine code would refuse
    count = len(memory_of(args))
    words = (ctypes.c_uint64 * max(count, 1))()
    numbers = iter(range(count))

    def value(a: Any) -> Any:
        if isinstance(a, tuple):
            return tuple([value(each) for each in a])
        if is_descriptor(a):
            return a.interpreted(_Pointer(words, next(numbers), a.array.dtype))
        return _Pointer(words, next(numbers), a.dtype) if is_array(a) else a

    values = [value(a) for a in args]
    constants = {k: v for k, v in keywords.items() if k not in OPTIONS}

    return _host_launch(run_or_capture, kernel.__name__, lambda: kernel[grid](*values, **constants), grid, words, count)


def hosted_launch(
    run_or_capture: RunOrCapture, name: str, function: Callable[..., None], arrays: Sequence[ArrayLike]
) -> KernelLaunch:
    """A launch that calls `function` on numpy views of `arrays`, instead of machine code."""
    words = (ctypes.c_uint64 * max(len(arrays), 1))()
    values = [_Pointer(words, i, a.dtype) for i, a in enumerate(arrays)]
    forms = [(a.shape, tuple(s * a.dtype.itemsize for s in a.strides), a.dtype.numpy) for a in arrays]

    def call() -> None:
        function(*[_view_at(value.data_ptr(), *form) for value, form in zip(values, forms, strict=True)])

    return _host_launch(run_or_capture, name, call, (1, 1, 1), words, len(arrays))


def _host_launch(
    run_or_capture: RunOrCapture, name: str, call: Callable[[], None], grid: Grid, words: Any, count: int
) -> KernelLaunch:
    """A launch that runs `call`, which reads addresses from the first `count` of `words`."""

    def run(stream: int) -> None:
        present = bytes(words)  # a captured launch runs later, with the addresses that are set now

        def work() -> None:
            ctypes.memmove(words, present, len(present))
            with np.errstate(all="ignore"):  # a GPU does not warn about NaN and overflow
                call()

        run_or_capture(stream, work)

    return plain_launch(run, words, count, name, grid)


def _view_at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if 0 in shape:
        return np.empty(shape, dtype)
    extent = dtype.itemsize + sum(stride * (size - 1) for size, stride in zip(shape, strides, strict=True))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(address))
    return np.ndarray(shape, dtype, memory, 0, strides)


# --- Host memory ------------------------------------------------------------------------------------------------------


MEMORY = 8 << 30  # bytes of the simulated device


class HostDriver(Driver):
    """Host memory with the interface of a device of compute capability 9.0."""

    memory = MEMORY

    def __init__(self, index: int) -> None:
        if index:
            raise DeviceError(f"device cuda:{index} does not exist; the interpreter has one device", next="use cuda:0")
        self.index: int = index
        self.pending = deque()
        self.properties = Properties("Triton's interpreter", (9, 0), MEMORY, 4, 227 << 10, 50 << 20)
        self._blocks: dict[int, np.ndarray] = {}
        self._handles = itertools.count(16)  # 1 and 2 name the default streams
        self._events: dict[int, float] = {}
        self._used = 0
        self._captures: dict[int, list[Callable[[], None]]] = {}  # by stream; a side stream shares its origin's list
        self._recorded: dict[int, int] = {}  # the stream of each event recorded in a capture
        self._sides: set[int] = set()
        self._open: set[int] = set()  # side streams with work that their origin has not joined
        self.graphs: dict[int, list[Callable[[], None]]] = {}

    def run_or_capture(self, stream: int, work: Callable[[], Any]) -> None:
        """Run the work of a stream, or append it to the stream's capture."""
        capture = self._captures.get(stream)
        if capture is None:
            work()
        else:
            capture.append(work)
            if stream in self._sides:
                self._open.add(stream)

    # --- Memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Allocate host memory at a multiple of 512 bytes."""
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
        self.run_or_capture(stream, lambda: ctypes.memmove(target, source, nbytes))

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        self.run_or_capture(stream, lambda: ctypes.memset(target, byte, nbytes))

    # --- Kernels: only in the interpreter -----------------------------------------------------------------------------

    def prepare(
        self, backend: Any, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> KernelLaunch:
        """A launch in Triton's interpreter."""
        return interpreted_launch(self.run_or_capture, kernel, grid, args, keywords)

    def load(self, image: bytes, name: str, shared: int, parameters: int) -> Function:
        raise DeviceError("the interpreter runs kernels from their source", next="unset TRITON_INTERPRET")

    def launcher(
        self, function: Any, grid: Grid, block: Grid, shared: int, parameters: int, cluster: int = 1
    ) -> Callable[[int], None]:
        raise DeviceError("the interpreter does not run machine code", next="unset TRITON_INTERPRET")

    def kernel_facts(self, function: Any, threads: int, shared: int) -> KernelFacts:
        raise DeviceError("the interpreter does not report resources of kernels", next="unset TRITON_INTERPRET")

    def sm_facts(self) -> SMFacts:
        raise DeviceError("the interpreter does not simulate SMs", next="unset TRITON_INTERPRET")

    def enter(self) -> None: ...  # there is one device
    def flush(self) -> None: ...  # launches are never pending
    def serialize_next_launch(self) -> None: ...  # launches always run in order

    # --- Streams and events: complete immediately ---------------------------------------------------------------------

    def create_stream(self, priority: int = 0) -> int:
        return next(self._handles)

    def synchronize_stream(self, stream: int) -> None:
        """Return at once, because work runs synchronously; raise DeviceError while the stream is captured."""
        if stream in self._captures:
            raise DeviceError("cuStreamSynchronize during a capture", next="end the capture first")

    def wait_event(self, stream: int, event: int) -> None:
        """Join the stream to the capture that recorded the event, if any; otherwise there is nothing to wait for."""
        other = self._recorded.get(event)
        if other is None:
            return
        if stream not in self._captures:
            self._captures[stream] = self._captures[other]
            self._sides.add(stream)
        self._open.discard(other)

    def create_event(self, timing: bool, blocking: bool = False) -> int:
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

        self.run_or_capture(stream, note)

    def synchronize_event(self, event: int) -> None: ...

    def is_event_done(self, event: int) -> bool:
        return True

    has_happened = is_event_done

    def is_stream_done(self, stream: int) -> bool:
        return True

    def elapsed(self, start: int, end: int) -> float:
        return self._events[end] - self._events[start]

    def synchronize(self) -> None:
        """Return at once, because work runs synchronously; raise DeviceError during a capture, as CUDA does."""
        if self._captures:
            raise DeviceError("cuCtxSynchronize during a capture", next="end the capture first")

    # --- Graphs: lists of calls ---------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        if stream == 0 or stream in self._captures:
            raise DeviceError(f"stream {stream} cannot be captured", next="capture a new stream, and capture it once")
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


# --- Fakes ------------------------------------------------------------------------------------------------------------


OnKernel = Callable[[Any, Signature], object]

NOWHERE = 1 << 50  # addresses from here on belong to no process
_indices = itertools.count(1 << 16)  # fake devices; machines have fewer devices than this

# Bytes of shared memory that a block may use, by architecture: CUDA's programming guide, "Technical specifications".
SHARED = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}

# A GPU of each architecture: name, GiB of memory, SMs, MiB of L2, as published by the vendor.
_GPUS = {
    80: ("A100", 80, 108, 40),
    86: ("A40", 48, 84, 6),
    87: ("Orin", 32, 16, 4),
    89: ("L40S", 48, 142, 96),
    90: ("H200", 141, 132, 50),
    100: ("B200", 180, 148, 126),
    120: ("RTX 5090", 32, 170, 96),
}
ARCHITECTURES = {
    arch: Properties(name, divmod(arch, 10), memory << 30, sm_count, SHARED[arch], l2 << 20)
    for arch, (name, memory, sm_count, l2) in _GPUS.items()
}


class EmptyDriver(HostDriver):
    """Addresses in ascending order without memory behind them; copies to the host read 0."""

    memory = 1 << 40

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._sizes: dict[int, int] = {}
        self._end = NOWHERE

    def allocate(self, nbytes: int) -> int:
        """Return the next addresses."""
        pointer = self._end
        self._end += -(-nbytes // 512) * 512
        self._sizes[pointer] = nbytes
        self._used += nbytes
        return pointer

    def free(self, pointer: int) -> None:
        self._used -= self._sizes.pop(pointer)

    def allocate_pinned(self, nbytes: int) -> int:
        return super().allocate(nbytes)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Write zeros to the host; ignore copies to the device."""
        if target < NOWHERE:
            self.run_or_capture(stream, lambda: ctypes.memset(target, 0, nbytes))

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        """Ignore the fill."""


class Launched(NamedTuple):
    """A launch that was collected instead of run."""

    kernel: Any  # a Triton function or a `genesis.custom.cuda_source.SourceKernel`
    signature: Signature  # the signature that it would be compiled for
    grid: Grid  # programs in three dimensions


class FakeDriver(EmptyDriver):
    """A device with given properties that collects its launches."""

    def __init__(self, properties: Properties) -> None:
        super().__init__(0)
        self.index, self.properties = next(_indices), properties
        self.launched: list[Launched] = []
        drivers[self.index] = self

    def prepare(
        self, backend: Any, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> KernelLaunch:
        """A launch that does nothing but append itself to `launched`, at each replay."""
        return self.noted(kernel, signature_of(kernel, args, keywords), grid, args)

    def noted(self, kernel: Any, signature: Signature, grid: Grid, args: tuple[Any, ...]) -> KernelLaunch:
        """The same for any kernel, in Triton or CUDA C++."""
        launched = Launched(kernel, signature, grid)
        return noted_launch(kernel.__name__, grid, args, lambda: self.launched.append(launched))


def noted_launch(name: str, grid: tuple[int, ...], args: tuple[Any, ...], note: Callable[[], None]) -> KernelLaunch:
    """A launch that accepts the addresses of its arrays and only calls `note`."""
    count = len(memory_of(args))
    return plain_launch(lambda stream: note(), [0] * count, count, name, grid)


@functools.cache
def fake_device(properties: Properties) -> tuple[Device, FakeDriver]:
    """A device with these properties that runs nothing, and its driver."""
    driver = FakeDriver(properties)
    return Device("cuda", driver.index), driver


class _CountingDriver(FakeDriver):
    """A fake GPU with unlimited memory that collects no launches; calls `on_kernel` at the first launch of a kernel."""

    memory = 1 << 60
    on_kernel: OnKernel | None = None

    def prepare(
        self, backend: Any, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> KernelLaunch:
        """A launch that does nothing."""
        if self.on_kernel is not None:
            self.on_kernel(kernel, signature_of(kernel, args, keywords))
        return noted_launch(kernel.__name__, grid, args, lambda: None)

    def noted(self, kernel: Any, signature: Any, grid: Grid, args: tuple[Any, ...]) -> KernelLaunch:
        """The same for a kernel in CUDA C++."""
        return noted_launch(kernel.__name__, grid, args, lambda: None)


_counting_driver = functools.cache(_CountingDriver)


def counting_device(properties: Properties) -> Device:
    """A device with these properties and unlimited memory, on which only memory is counted."""
    return Device("cuda", _counting_driver(properties).index)


@contextmanager
def watching_kernels(properties: Properties, on_kernel: OnKernel) -> Iterator[None]:
    """Call `on_kernel(kernel, signature)` inside the block for kernels launched on the counting device.

    A call that is replayed reports its kernels only the first time.
    """
    driver = _counting_driver(properties)
    before, driver.on_kernel = driver.on_kernel, on_kernel
    try:
        yield
    finally:
        driver.on_kernel = before
