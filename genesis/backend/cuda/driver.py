"""The CUDA driver as Genesis uses it: a small typed face over cuda-python, one call a method, errors as exceptions.

`Driver` is one GPU, and the contract: `simulated.py` overrides every call, for machines without one. Pointers, streams,
events and functions are plain integers here; owners with a lifetime are layers above.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from genesis.errors import DeviceError

Grid = tuple[int, int, int]


class OutOfDeviceMemory(Exception):
    """The driver has no memory left; the pool turns it into the user's error."""


class Properties(NamedTuple):
    """What a device is.

    Attributes:
        capability: (major, minor), such as (9, 0).
        memory: bytes in all.
        sm_count: streaming multiprocessors (SMs).
        shared_memory: bytes that one block may take.
        l2: bytes of L2.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    sm_count: int
    shared_memory: int
    l2: int

    # torch's names
    @property
    def total_memory(self) -> int:
        """Bytes in all."""
        return self.memory

    @property
    def multi_processor_count(self) -> int:
        """Streaming SMs."""
        return self.sm_count

    @property
    def major(self) -> int:
        """The first number of the compute capability."""
        return self.capability[0]

    @property
    def minor(self) -> int:
        """The second number of the compute capability."""
        return self.capability[1]


class Function(NamedTuple):
    """A loaded kernel."""

    handle: Any  # what `launcher` takes
    parameters: tuple[tuple[int, int], ...]  # (offset, size) in bytes of each parameter in the launch buffer


class KernelFacts(NamedTuple):
    """What a loaded kernel takes of an SM."""

    registers: int  # of one thread
    shared: int  # bytes of static shared memory of a block
    local: int  # bytes of local memory of a thread: spilled registers, and arrays that are indexed at run time
    resident: int  # blocks that one SM holds at once


class SMFacts(NamedTuple):
    """What one SM has: threads, registers and blocks at once, of all kernels."""

    threads: int
    registers: int
    blocks: int
    shared: int  # bytes of shared memory
    reserved: int  # bytes of it that the system takes for each block


def is_interpreted() -> bool:
    """Whether Triton's interpreter stands in for the GPU (its own setting, TRITON_INTERPRET=1, decides)."""
    # Read here, not asked of Triton: importing it takes time, and a signal that arrives meanwhile ends the process.
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "on", "true", "y", "yes")


@functools.cache
def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            "device cuda was asked for and cuda-python is not installed",
            next='pip install "cuda-python>=12.9" triton, or use the device cpu',
        ) from error
    return driver


@functools.cache
def start(index: int = 0) -> int:
    """Initialize the driver once; the number of devices. Raises DeviceError where no NVIDIA driver answers."""
    cuda = _bindings()
    try:
        code = cuda.cuInit(0)[0]
    except RuntimeError as error:  # libcuda itself is missing
        raise DeviceError(
            f"device cuda:{index} was asked for and no NVIDIA driver was found ({error})",
            next="install the driver, or use the device cpu",
        ) from error
    if code != cuda.CUresult.CUDA_SUCCESS:
        what = f"device cuda:{index} was asked for and the NVIDIA driver did not start: {code.name}"
        raise DeviceError(what, next="use the device cpu")
    return int(cuda.cuDeviceGetCount()[1])


class _Current(threading.local):
    """Whose context is current in this thread: one for all drivers of the process, which take turns."""

    driver: Driver | None = None


_current = _Current()


class Driver:
    """One GPU through cuda-python, in its primary context (shared with other libraries of the process).

    Addresses and handles are integers, sizes bytes; copies follow stream order.
    """

    index: int
    properties: Properties
    pending: deque[Callable[[], None]]  # launches that wait for a kernel's compilation, in order
    capturing = False  # a graph is being captured: nothing waits
    dependent = True  # launches in a graph may be brought to the SMs before the one before has ended
    # makes a launch of a Triton kernel where no machine code runs: (backend, kernel, grid, args, keywords)
    prepare: Callable[..., Any] | None = None

    def __init__(self, index: int) -> None:
        count = start(index)
        if not 0 <= index < count:
            raise DeviceError(f"device cuda:{index} was asked for; this machine has {count}", next="use cuda:0")
        self.index = index
        self._cuda = cuda = _bindings()
        self._success = cuda.CUresult.CUDA_SUCCESS
        self._device = self._call(cuda.cuDeviceGet, index)
        self._context = self._call(cuda.cuDevicePrimaryCtxRetain, self._device)
        self.pending, self._is_first = deque(), True
        self._flushing = threading.RLock()
        self._inside = False
        self.enter()
        self.properties = self._properties()

    def enter(self) -> None:
        """Make the device this thread's current one, also for a library that asks CUDA which it is."""
        if _current.driver is not self:
            self._call(self._cuda.cuCtxSetCurrent, self._context)
            _current.driver = self

    def _now(self, function: Any, *args: Any) -> Any:
        """Call the driver for what follows no stream's order."""
        self.enter()
        return self._call(function, *args)

    def _in_order(self, function: Any, *args: Any) -> Any:
        """Call the driver for what follows stream order: first launch what waited for its kernel."""
        self._ordered()
        return self._call(function, *args)

    def _ordered(self) -> None:
        self.enter()
        if self.pending:
            self.flush()

    def flush(self) -> None:
        """Launch what waited for its kernel, waiting with it."""
        with self._flushing:
            if self._inside:  # a waiting piece of work that sets memory, say
                return
            self._inside = True
            try:
                while self.pending:
                    self.pending[0]()  # stays in the queue meanwhile: others must not overtake it
                    self.pending.popleft()
            except BaseException:
                self.pending.clear()
                raise
            finally:
                self._inside = False

    def _call(self, function: Any, *args: Any) -> Any:
        """Call the driver; its result without the code. Raises OutOfDeviceMemory or DeviceError, as the code says."""
        code, *rest = function(*args)
        if code != self._success:
            self._raise(code, function.__name__)
        return rest[0] if len(rest) == 1 else tuple(rest)

    def _raise(self, code: Any, name: str) -> None:
        if code == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfDeviceMemory
        text = self._cuda.cuGetErrorString(code)[1]
        meaning = text.decode() if isinstance(text, bytes) else code.name
        raise DeviceError(
            f"{name} on cuda:{self.index} failed: {code.name} ({meaning})",
            next="an earlier kernel may be the cause: set CUDA_LAUNCH_BLOCKING=1 to stop at it",
        )

    def _attribute(self, name: str) -> int:
        """A number of the device."""
        which = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call(self._cuda.cuDeviceGetAttribute, which, self._device))

    def _properties(self) -> Properties:
        get = self._attribute
        name = self._call(self._cuda.cuDeviceGetName, 256, self._device)
        return Properties(
            name=name.split(b"\0")[0].decode(),
            capability=(get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR")),
            memory=int(self._call(self._cuda.cuDeviceTotalMem, self._device)),
            sm_count=get("MULTIPROCESSOR_COUNT"),
            shared_memory=get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            l2=get("L2_CACHE_SIZE"),
        )

    # --- Memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Device memory."""
        self.enter()
        if not self.capturing:
            return int(self._call(self._cuda.cuMemAlloc, nbytes))
        # The call would end the capture, unless the thread says that it knows what it does.
        exchange, modes = self._cuda.cuThreadExchangeStreamCaptureMode, self._cuda.CUstreamCaptureMode
        before = self._call(exchange, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            return int(self._call(self._cuda.cuMemAlloc, nbytes))
        finally:
            self._call(exchange, before)

    def free(self, pointer: int) -> None:
        """Give device memory back; waits for the device."""
        self._in_order(self._cuda.cuMemFree, pointer)

    def allocate_pinned(self, nbytes: int) -> int:
        """Pinned host memory, from and to which copies are asynchronous."""
        return int(self._now(self._cuda.cuMemHostAlloc, nbytes, 0))

    def register_host(self, pointer: int, nbytes: int) -> None:
        """Pin host memory that others allocated."""
        self._now(self._cuda.cuMemHostRegister, pointer, nbytes, 0)

    def unregister_host(self, pointer: int) -> None:
        """Let pinned memory of `register_host` go."""
        self._now(self._cuda.cuMemHostUnregister, pointer)

    def cuda_version(self) -> int:
        """The newest CUDA that the NVIDIA driver serves: 13010 for 13.1."""
        return int(self._now(self._cuda.cuDriverGetVersion))

    def is_linked(self, devices: Iterable[int]) -> bool:
        """Whether these devices are here, and each of them but this one reaches its memory over NVLink."""
        cuda, count = self._cuda, int(self._now(self._cuda.cuDeviceGetCount))
        native = cuda.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED  # not over PCIe
        others = [index for index in devices if index != self.index]
        try:
            return all(index < count for index in others) and all(
                self._call(cuda.cuDeviceGetP2PAttribute, native, self._call(cuda.cuDeviceGet, index), self._device)
                for index in others
            )
        except DeviceError:  # a device of another kind, or one that is not for this process
            return False

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        free, total = self._now(self._cuda.cuMemGetInfo)
        return int(free), int(total)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between any two addresses, host or device, in stream order."""
        self._in_order(self._cuda.cuMemcpyAsync, target, source, nbytes, stream)

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        """Set every byte, in stream order."""
        self._in_order(self._cuda.cuMemsetD8Async, target, byte, nbytes, stream)

    # --- Kernels ------------------------------------------------------------------------------------------------------

    def load(self, image: bytes, name: str, shared: int, parameters: int) -> Function:
        """Load a cubin and find the kernel `name` of so many parameters, allowed `shared` bytes of dynamic shared
        memory besides what the code declares. Raises DeviceError where the device has less for a block.
        """
        self.enter()
        cuda, of = self._cuda, self._cuda.CUfunction_attribute
        module = self._call(cuda.cuModuleLoadData, image)  # stays loaded while the process lives
        function = self._call(cuda.cuModuleGetFunction, module, name.encode())
        static = int(self._call(cuda.cuFuncGetAttribute, of.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        there = self.properties.shared_memory
        if static + shared > there:  # the driver would only say that a value is invalid
            raise DeviceError(
                f"the kernel {name} takes {static + shared} bytes of shared memory; cuda:{self.index} has {there} for a"
                " block",
                next="report it: its tiles are too large for this GPU",
            )
        if static + shared > 48 << 10:  # more than a launch has without asking
            self._call(cuda.cuFuncSetAttribute, function, of.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
        places = [self._call(cuda.cuFuncGetParamInfo, function, i) for i in range(parameters)]
        return Function(function, tuple((int(offset), int(size)) for offset, size in places))

    def launcher(
        self, function: Any, grid: Grid, block: Grid, shared: int, parameters: int, cluster: int = 1
    ) -> Callable[[int], None]:
        """What launches a kernel in a stream, in blocks of `block` threads, as often as it is called.

        Args:
            parameters: the address of an array of pointers to the kernel's own, read at each launch.
            cluster: blocks, neighbours in the first dimension, of a cluster.
        """
        launch, success, current = self._cuda.cuLaunchKernelEx, self._success, _current
        plain: dict[int, Any] = {}  # configurations by stream: made once, one argument instead of eight
        early: dict[int, Any] = {}

        def run(stream: int) -> None:
            if current.driver is not self:
                self.enter()
            is_early = self.capturing and self._follows()
            made = early if is_early else plain
            config = made.get(stream)
            if config is None:
                config = made[stream] = self._configuration(grid, block, shared, stream, cluster, is_early)
            code = launch(config, function, parameters, 0)[0]
            if code != success:
                self._raise(code, "a kernel launch")

        return run

    def _follows(self) -> bool:
        """Whether a launch in a graph may be brought to the SMs early: not the first of the graph."""
        if not (self.dependent and self.properties.capability >= (9, 0)):
            return False
        was_first, self._is_first = self._is_first, False
        return not was_first

    def _configuration(self, grid: Grid, block: Grid, shared: int, stream: int, cluster: int, is_early: bool) -> Any:
        """How a kernel is launched; `is_early`: it may be brought to the SMs while the one before runs, see
        `compile.dependent`. That costs the host more than a plain launch, so only graphs have it.
        """
        cuda = self._cuda
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes, config.hStream = shared, cuda.CUstream(stream)
        attributes = []
        if is_early:
            allowed = cuda.CUlaunchAttribute()
            allowed.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            allowed.value.programmaticStreamSerializationAllowed = 1
            attributes.append(allowed)
        if cluster > 1:
            together = cuda.CUlaunchAttribute()
            together.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            together.value.clusterDim.x, together.value.clusterDim.y, together.value.clusterDim.z = cluster, 1, 1
            attributes.append(together)
        if attributes:
            config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def kernel_facts(self, function: Any, threads: int, shared: int) -> KernelFacts:
        """What a kernel takes in blocks of `threads` with `shared` bytes of dynamic shared memory."""
        self.enter()
        cuda, of = self._cuda, self._cuda.CUfunction_attribute
        names = ("NUM_REGS", "SHARED_SIZE_BYTES", "LOCAL_SIZE_BYTES")
        attributes = (getattr(of, f"CU_FUNC_ATTRIBUTE_{name}") for name in names)
        registers, static, local = (int(self._call(cuda.cuFuncGetAttribute, a, function)) for a in attributes)
        resident = int(self._call(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor, function, threads, shared))
        return KernelFacts(registers, static, local, resident)

    def sm_facts(self) -> SMFacts:
        """What one SM has."""
        self.enter()
        get = self._attribute
        return SMFacts(
            threads=get("MAX_THREADS_PER_MULTIPROCESSOR"),
            registers=get("MAX_REGISTERS_PER_MULTIPROCESSOR"),
            blocks=get("MAX_BLOCKS_PER_MULTIPROCESSOR"),
            shared=get("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            reserved=get("RESERVED_SHARED_MEMORY_PER_BLOCK"),
        )

    def begin_again(self) -> None:
        """The next launch has more than the one before to wait for, and waits as usual."""
        self._is_first = True

    # --- Streams and events -------------------------------------------------------------------------------------------

    def create_stream(self, priority: int = 0) -> int:
        """A stream that does not wait for the default one; a lower number is served first."""
        flags = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._now(self._cuda.cuStreamCreateWithPriority, flags, priority))

    def synchronize_stream(self, stream: int) -> None:
        """Wait for all work of a stream."""
        self._in_order(self._cuda.cuStreamSynchronize, stream)

    def is_stream_done(self, stream: int) -> bool:
        """Whether a stream has nothing left to do."""
        self._ordered()
        return self._answer(self._cuda.cuStreamQuery, stream)

    def _answer(self, query: Any, handle: int) -> bool:
        (code,) = query(handle)
        if code == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if code != self._success:
            self._raise(code, query.__name__)
        return True

    def wait_event(self, stream: int, event: int) -> None:
        """Let the stream's later work wait for the event."""
        self._in_order(self._cuda.cuStreamWaitEvent, stream, event, 0)

    def create_event(self, timing: bool) -> int:
        """An event; `timing` lets `elapsed` read it."""
        of = self._cuda.CUevent_flags
        flags = of.CU_EVENT_DEFAULT if timing else of.CU_EVENT_DISABLE_TIMING
        return int(self._now(self._cuda.cuEventCreate, flags))

    def destroy_event(self, event: int) -> None:
        """Forget an event."""
        self._now(self._cuda.cuEventDestroy, event)

    def record_event(self, event: int, stream: int) -> None:
        """Mark the stream's present end."""
        self._in_order(self._cuda.cuEventRecord, event, stream)

    def record_time(self, event: int, stream: int) -> None:
        """The same in a graph that is captured, too: after each replay `elapsed` reads when the event happened."""
        flags = self._cuda.CUevent_record_flags
        how = flags.CU_EVENT_RECORD_EXTERNAL if self.capturing else flags.CU_EVENT_RECORD_DEFAULT
        self._in_order(self._cuda.cuEventRecordWithFlags, event, stream, how)

    def synchronize_event(self, event: int) -> None:
        """Wait until the event has happened."""
        self._in_order(self._cuda.cuEventSynchronize, event)

    def is_event_done(self, event: int) -> bool:
        """Whether the event has happened."""
        self._ordered()
        return self._answer(self._cuda.cuEventQuery, event)

    def has_happened(self, event: int) -> bool:
        """The same asked by another thread than the one that launches work: it launches nothing that waits."""
        self.enter()
        return self._answer(self._cuda.cuEventQuery, event)

    def elapsed(self, start: int, end: int) -> float:
        """Seconds between two events that have happened."""
        return float(self._in_order(self._cuda.cuEventElapsedTime, start, end)) / 1e3

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        self._in_order(self._cuda.cuCtxSynchronize)

    def mark(self, stream: int) -> int:
        """An event at the stream's present end."""
        event = self.create_event(False)
        self.record_event(event, stream)
        return event

    def wait_once(self, stream: int, event: int) -> None:
        """Let the stream's later work wait for an event that nobody else needs."""
        self.wait_event(stream, event)
        self.destroy_event(event)  # CUDA keeps what waits

    def follow(self, later: int, earlier: int) -> None:
        """Let later work of one stream wait for what is in another now; the host does not wait."""
        if later != earlier:
            self.wait_once(later, self.mark(earlier))

    # --- Graphs -------------------------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        """Capture the stream's work instead of running it, until `end_capture`."""
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._in_order(self._cuda.cuStreamBeginCapture, stream, mode)
        self.capturing = True

    def end_capture(self, stream: int) -> int:
        """The graph captured since `begin_capture`."""
        self.capturing = False
        return int(self._now(self._cuda.cuStreamEndCapture, stream))

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream's work is being captured."""
        return bool(int(self._now(self._cuda.cuStreamIsCapturing, stream)))

    def instantiate(self, graph: int) -> int:
        """An executable of a graph, whose kernels keep the priorities of the streams that they were launched on."""
        flags = self._cuda.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
        return int(self._now(self._cuda.cuGraphInstantiate, graph, int(flags)))

    def launch_graph(self, executable: int, stream: int) -> None:
        """Run a graph in stream order."""
        self._in_order(self._cuda.cuGraphLaunch, executable, stream)

    def destroy_graph(self, graph: int, executable: int | None) -> None:
        """Forget a graph and its executable, where there is one."""
        if executable is not None:
            self._now(self._cuda.cuGraphExecDestroy, executable)
        self._now(self._cuda.cuGraphDestroy, graph)
