"""The CUDA driver: a small typed wrapper around cuda-python with one method per call and errors as exceptions.

`Driver` is one GPU, and also the contract: `simulated.py` overrides every call for machines without a GPU. Pointers,
streams, events and functions are plain integers here; layers above wrap them in objects that own them.
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
    """The driver has no memory left. The pool turns this into an `OutOfMemoryError`."""


class Properties(NamedTuple):
    """The properties of a device.

    Attributes:
        capability: (major, minor), such as (9, 0).
        memory: total bytes.
        sm_count: streaming multiprocessors (SMs).
        shared_memory: most bytes of shared memory that one block may use.
        l2: bytes of L2 cache.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    sm_count: int
    shared_memory: int
    l2: int

    # These properties have torch's names.
    @property
    def total_memory(self) -> int:
        """Total bytes of memory."""
        return self.memory

    @property
    def multi_processor_count(self) -> int:
        """The number of SMs."""
        return self.sm_count

    @property
    def shared_memory_per_block_optin(self) -> int:
        """Most bytes of shared memory of a block."""
        return self.shared_memory

    @property
    def L2_cache_size(self) -> int:  # noqa: N802
        """Bytes of L2 cache."""
        return self.l2

    @property
    def warp_size(self) -> int:
        """The threads of a warp."""
        return 32

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

    handle: Any  # the handle that `launcher` takes
    parameters: tuple[tuple[int, int], ...]  # (offset, size) in bytes of each parameter in the launch buffer


class KernelFacts(NamedTuple):
    """The SM resources that a loaded kernel uses."""

    registers: int  # per thread
    shared: int  # bytes of static shared memory per block
    local: int  # bytes of local memory per thread: spilled registers, and arrays indexed at run time
    resident: int  # blocks that fit on one SM at once


class SMFacts(NamedTuple):
    """The resources of one SM, shared by all resident kernels."""

    threads: int  # most resident threads
    registers: int
    blocks: int  # most resident blocks
    shared: int  # bytes of shared memory
    reserved: int  # bytes of shared memory that the system reserves for each block


def is_interpreted() -> bool:
    """Whether Triton's interpreter replaces the GPU, which Triton's own setting TRITON_INTERPRET=1 decides."""
    # Read without importing Triton: the import takes long, and a signal during it would end the process.
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "on", "true", "y", "yes")


@functools.cache
def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            "device cuda needs cuda-python, which is not installed",
            next='pip install "cuda-python>=12.9" triton, or use the device cpu',
        ) from error
    return driver


@functools.cache
def start(index: int = 0) -> int:
    """Initialize the driver once and return the number of devices. Raises DeviceError if no NVIDIA driver works."""
    cuda = _bindings()
    try:
        code = cuda.cuInit(0)[0]
    except RuntimeError as error:  # libcuda is missing
        raise DeviceError(
            f"device cuda:{index} needs an NVIDIA driver, and none was found ({error})",
            next="install the driver, or use the device cpu",
        ) from error
    if code != cuda.CUresult.CUDA_SUCCESS:
        what = f"device cuda:{index} cannot be used: the NVIDIA driver did not start ({code.name})"
        raise DeviceError(what, next="use the device cpu")
    return int(cuda.cuDeviceGetCount()[1])


def device_count() -> int:
    """The number of devices that this process can use; 0 without a driver or without the Python packages."""
    try:
        return 1 if is_interpreted() else start()
    except (DeviceError, ImportError):
        return 0


def is_available() -> bool:
    """Whether a device is available: a GPU, or Triton's interpreter instead of one."""
    return device_count() > 0


class _CurrentDriver(threading.local):
    """The driver whose context is current in this thread."""

    driver: Driver | None = None


_current = _CurrentDriver()


class Driver:
    """One GPU through cuda-python, in its primary context, which other libraries of the process share.

    Addresses and handles are integers, sizes are bytes, and copies follow stream order.
    """

    index: int
    properties: Properties
    pending: deque[Callable[[], None]]  # launches that wait for a kernel to compile, in order
    capturing = False  # whether a graph is being captured, when launches must not wait
    dependent = True  # whether launches in a graph may start before the preceding kernel has ended
    # prepares a launch of a Triton kernel without machine code: (backend, kernel, grid, args, keywords)
    prepare: Callable[..., Any] | None = None

    def __init__(self, index: int) -> None:
        count = start(index)
        if not 0 <= index < count:
            raise DeviceError(f"cuda:{index} does not exist; this machine has {count} GPUs", next="use cuda:0")
        self.index = index
        self._cuda = cuda = _bindings()
        self._success = cuda.CUresult.CUDA_SUCCESS
        self._device = self._call(cuda.cuDeviceGet, index)
        self._context = self._call(cuda.cuDevicePrimaryCtxRetain, self._device)
        self.pending, self._is_first = deque(), True
        self._modules: dict[bytes, Any] = {}  # by machine code: its kernels share its variables
        self._flushing = threading.RLock()
        self._is_flushing = False
        self.enter()
        self.properties = self._properties()

    def enter(self) -> None:
        """Make the device current in this thread, also for other libraries that query the current device."""
        if _current.driver is not self:
            self._call(self._cuda.cuCtxSetCurrent, self._context)
            _current.driver = self

    def _call_unordered(self, function: Any, *args: Any) -> Any:
        """Call the driver for an operation that does not follow stream order."""
        self.enter()
        return self._call(function, *args)

    def _call_ordered(self, function: Any, *args: Any) -> Any:
        """Call the driver for an operation in stream order, after all pending launches."""
        self._enter_and_flush()
        return self._call(function, *args)

    def _enter_and_flush(self) -> None:
        self.enter()
        if self.pending:
            self.flush()

    def flush(self) -> None:
        """Launch what is pending, waiting for each kernel to compile."""
        with self._flushing:
            if self._is_flushing:  # called again by pending work, such as a fill
                return
            self._is_flushing = True
            try:
                while self.pending:
                    self.pending[0]()  # stays queued until done: later work must not overtake it
                    self.pending.popleft()
            except BaseException:
                self.pending.clear()
                raise
            finally:
                self._is_flushing = False

    def _call(self, function: Any, *args: Any) -> Any:
        """Call the driver and return its result without the code. Raises OutOfDeviceMemory or DeviceError."""
        code, *results = function(*args)
        if code != self._success:
            self._raise(code, function.__name__)
        return results[0] if len(results) == 1 else tuple(results)

    def _raise(self, code: Any, name: str) -> None:
        if code == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfDeviceMemory
        text = self._cuda.cuGetErrorString(code)[1]
        meaning = text.decode() if isinstance(text, bytes) else code.name
        raise DeviceError(
            f"{name} on cuda:{self.index} failed: {code.name} ({meaning})",
            next="set CUDA_LAUNCH_BLOCKING=1 and run again; an earlier kernel may be the cause",
        )

    def _attribute(self, name: str) -> int:
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

    @property
    def uuid(self) -> str:
        """The GPU's identifier, as `nvidia-smi` takes it."""
        code = bytes(self._call(self._cuda.cuDeviceGetUuid, self._device).bytes).hex()
        return f"GPU-{code[:8]}-{code[8:12]}-{code[12:16]}-{code[16:20]}-{code[20:]}"

    # --- Memory -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory."""
        self.enter()
        if not self.capturing:
            return int(self._call(self._cuda.cuMemAlloc, nbytes))
        # Allocating would invalidate the capture unless the thread's capture mode is relaxed.
        exchange, modes = self._cuda.cuThreadExchangeStreamCaptureMode, self._cuda.CUstreamCaptureMode
        before = self._call(exchange, modes.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            return int(self._call(self._cuda.cuMemAlloc, nbytes))
        finally:
            self._call(exchange, before)

    def free(self, pointer: int) -> None:
        """Free device memory; waits for the device."""
        self._call_ordered(self._cuda.cuMemFree, pointer)

    def allocate_pinned(self, nbytes: int) -> int:
        """Allocate pinned host memory, for asynchronous copies."""
        return int(self._call_unordered(self._cuda.cuMemHostAlloc, nbytes, 0))

    def register_host(self, pointer: int, nbytes: int) -> None:
        """Pin host memory that other code allocated."""
        self._call_unordered(self._cuda.cuMemHostRegister, pointer, nbytes, 0)

    def unregister_host(self, pointer: int) -> None:
        """Unpin memory that `register_host` pinned."""
        self._call_unordered(self._cuda.cuMemHostUnregister, pointer)

    def cuda_version(self) -> int:
        """The newest CUDA version that the NVIDIA driver supports: 13010 is 13.1."""
        return int(self._call_unordered(self._cuda.cuDriverGetVersion))

    def is_linked(self, devices: Iterable[int]) -> bool:
        """Whether all of these devices are visible and reach this device's memory over NVLink."""
        cuda, count = self._cuda, int(self._call_unordered(self._cuda.cuDeviceGetCount))
        native = cuda.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED  # not supported over PCIe
        others = [index for index in devices if index != self.index]
        try:
            return all(index < count for index in others) and all(
                self._call(cuda.cuDeviceGetP2PAttribute, native, self._call(cuda.cuDeviceGet, index), self._device)
                for index in others
            )
        except DeviceError:  # a device of another kind, or one that this process may not use
            return False

    def memory_info(self) -> tuple[int, int]:
        """The (free, total) bytes of the device."""
        free, total = self._call_unordered(self._cuda.cuMemGetInfo)
        return int(free), int(total)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between any two addresses, host or device, in stream order."""
        self._call_ordered(self._cuda.cuMemcpyAsync, target, source, nbytes, stream)

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        """Set every byte of a range, in stream order."""
        self._call_ordered(self._cuda.cuMemsetD8Async, target, byte, nbytes, stream)

    # --- Kernels ------------------------------------------------------------------------------------------------------

    def load(self, image: bytes, name: str, shared: int, parameters: int) -> Function:
        """Load a cubin and return its kernel `name`, which has `parameters` parameters.

        Args:
            shared: bytes of dynamic shared memory, in addition to the static memory that the code declares.

        Raises:
            DeviceError: a block would need more shared memory than the device has.
        """
        self.enter()
        cuda, of = self._cuda, self._cuda.CUfunction_attribute
        module = self._modules.get(image)  # remains loaded until the process ends
        if module is None:
            module = self._modules[image] = self._call(cuda.cuModuleLoadData, image)
        function = self._call(cuda.cuModuleGetFunction, module, name.encode())
        static = int(self._call(cuda.cuFuncGetAttribute, of.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        available = self.properties.shared_memory
        if static + shared > available:  # the driver's own error would only say "invalid value"
            raise DeviceError(
                f"the kernel {name} needs {static + shared} bytes of shared memory per block; cuda:{self.index} has"
                f" {available}",
                next="report this: the kernel's tiles are too large for this GPU",
            )
        if static + shared > 48 << 10:  # above the default limit, a kernel must opt in
            limit = of.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call(cuda.cuFuncSetAttribute, function, limit, available - static)
        # The launch buffer needs the offset and size of each parameter.
        places = [self._call(cuda.cuFuncGetParamInfo, function, i) for i in range(parameters)]
        return Function(function, tuple((int(offset), int(size)) for offset, size in places))

    def launcher(
        self, function: Any, grid: Grid, block: Grid, shared: int, parameters: int, cluster: int = 1
    ) -> Callable[[int], None]:
        """Return `run(stream)`, which launches a kernel in blocks of `block` threads and can be called repeatedly.

        Args:
            parameters: address of an array of pointers to the kernel's parameters, which every launch reads.
            cluster: neighbouring blocks in the first dimension that form a cluster.
        """
        launch, success, current = self._cuda.cuLaunchKernelEx, self._success, _current
        plain: dict[int, Any] = {}  # cached by stream: one argument instead of eight
        early: dict[int, Any] = {}

        def run(stream: int) -> None:
            if current.driver is not self:
                self.enter()
            is_early = self.capturing and self._may_start_early()
            configurations = early if is_early else plain
            config = configurations.get(stream)
            if config is None:
                config = configurations[stream] = self._configuration(grid, block, shared, stream, cluster, is_early)
            code = launch(config, function, parameters, 0)[0]
            if code != success:
                self._raise(code, "a kernel launch")

        return run

    def _may_start_early(self) -> bool:
        """Whether a launch in a graph may start early; the first launch of a graph may not."""
        if not (self.dependent and self.properties.capability >= (9, 0)):
            return False
        was_first, self._is_first = self._is_first, False
        return not was_first

    def _configuration(self, grid: Grid, block: Grid, shared: int, stream: int, cluster: int, is_early: bool) -> Any:
        """A launch configuration. With `is_early` the kernel may start while the preceding one runs (programmatic
        dependent launch, see `compile.dependent`). That costs the host more, so only graphs use it.
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
        """The resources of a kernel in blocks of `threads` with `shared` bytes of dynamic shared memory."""
        self.enter()
        cuda, of = self._cuda, self._cuda.CUfunction_attribute
        names = ("NUM_REGS", "SHARED_SIZE_BYTES", "LOCAL_SIZE_BYTES")
        attributes = (getattr(of, f"CU_FUNC_ATTRIBUTE_{name}") for name in names)
        registers, static, local = (int(self._call(cuda.cuFuncGetAttribute, a, function)) for a in attributes)
        resident = int(self._call(cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor, function, threads, shared))
        return KernelFacts(registers, static, local, resident)

    def sm_facts(self) -> SMFacts:
        """The resources of one SM."""
        self.enter()
        get = self._attribute
        return SMFacts(
            threads=get("MAX_THREADS_PER_MULTIPROCESSOR"),
            registers=get("MAX_REGISTERS_PER_MULTIPROCESSOR"),
            blocks=get("MAX_BLOCKS_PER_MULTIPROCESSOR"),
            shared=get("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            reserved=get("RESERVED_SHARED_MEMORY_PER_BLOCK"),
        )

    def serialize_next_launch(self) -> None:
        """Launch the next kernel without an early start, because it depends on more than the preceding kernel."""
        self._is_first = True

    # --- Streams and events -------------------------------------------------------------------------------------------

    def create_stream(self, priority: int = 0) -> int:
        """Create a stream that does not wait for the default stream; lower priority numbers run first."""
        flags = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._call_unordered(self._cuda.cuStreamCreateWithPriority, flags, priority))

    def synchronize_stream(self, stream: int) -> None:
        """Wait for all work of a stream."""
        self._call_ordered(self._cuda.cuStreamSynchronize, stream)

    def is_stream_done(self, stream: int) -> bool:
        """Whether a stream has finished all its work."""
        self._enter_and_flush()
        return self._is_finished(self._cuda.cuStreamQuery, stream)

    def _is_finished(self, query: Any, handle: int) -> bool:
        (code,) = query(handle)
        if code == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if code != self._success:
            self._raise(code, query.__name__)
        return True

    def wait_event(self, stream: int, event: int) -> None:
        """Make the stream's later work wait for the event."""
        self._call_ordered(self._cuda.cuStreamWaitEvent, stream, event, 0)

    def create_event(self, timing: bool, blocking: bool = False) -> int:
        """Create an event; `timing` allows `elapsed` to read it, and a `blocking` one lets its waiting thread sleep."""
        of = self._cuda.CUevent_flags
        flags = of.CU_EVENT_BLOCKING_SYNC * blocking | of.CU_EVENT_DISABLE_TIMING * (not timing)
        return int(self._call_unordered(self._cuda.cuEventCreate, flags))

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""
        self._call_unordered(self._cuda.cuEventDestroy, event)

    def record_event(self, event: int, stream: int) -> None:
        """Record the event behind the stream's present work."""
        self._call_ordered(self._cuda.cuEventRecord, event, stream)

    def record_time(self, event: int, stream: int) -> None:
        """Record an event like `record_event`. In a captured graph, each replay records the time again."""
        flags = self._cuda.CUevent_record_flags
        how = flags.CU_EVENT_RECORD_EXTERNAL if self.capturing else flags.CU_EVENT_RECORD_DEFAULT
        self._call_ordered(self._cuda.cuEventRecordWithFlags, event, stream, how)

    def synchronize_event(self, event: int) -> None:
        """Wait until the event has happened."""
        self._call_ordered(self._cuda.cuEventSynchronize, event)

    def is_event_done(self, event: int) -> bool:
        """Whether the event has happened."""
        self._enter_and_flush()
        return self._is_finished(self._cuda.cuEventQuery, event)

    def has_happened(self, event: int) -> bool:
        """Whether the event has happened. Any thread may call it, because it flushes no launches."""
        self.enter()
        return self._is_finished(self._cuda.cuEventQuery, event)

    def elapsed(self, start: int, end: int) -> float:
        """Seconds between two events that have happened."""
        return float(self._call_ordered(self._cuda.cuEventElapsedTime, start, end)) / 1e3

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        self._call_ordered(self._cuda.cuCtxSynchronize)

    def mark(self, stream: int) -> int:
        """Create an event behind the stream's present work."""
        event = self.create_event(False)
        self.record_event(event, stream)
        return event

    def wait_once(self, stream: int, event: int) -> None:
        """Make the stream's later work wait for an event, and destroy the event."""
        self.wait_event(stream, event)
        self.destroy_event(event)  # safe: CUDA keeps the event until the wait is done

    def follow(self, later: int, earlier: int) -> None:
        """Make later work of one stream wait for the present work of another; the host does not wait."""
        if later != earlier:
            self.wait_once(later, self.mark(earlier))

    # --- Graphs -------------------------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        """Capture the stream's work into a graph instead of running it, until `end_capture`."""
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call_ordered(self._cuda.cuStreamBeginCapture, stream, mode)
        self.capturing = True

    def end_capture(self, stream: int) -> int:
        """End the capture and return the graph."""
        self.capturing = False
        return int(self._call_unordered(self._cuda.cuStreamEndCapture, stream))

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream's work is being captured."""
        return bool(int(self._call_unordered(self._cuda.cuStreamIsCapturing, stream)))

    def instantiate(self, graph: int) -> int:
        """Instantiate a graph. Its kernels keep the priorities of the streams that they were launched on."""
        flags = self._cuda.CUgraphInstantiate_flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
        return int(self._call_unordered(self._cuda.cuGraphInstantiate, graph, int(flags)))

    def launch_graph(self, executable: int, stream: int) -> None:
        """Launch an instantiated graph in stream order."""
        self._call_ordered(self._cuda.cuGraphLaunch, executable, stream)

    def destroy_graph(self, graph: int, executable: int | None) -> None:
        """Destroy a graph and its executable, if any."""
        if executable is not None:
            self._call_unordered(self._cuda.cuGraphExecDestroy, executable)
        self._call_unordered(self._cuda.cuGraphDestroy, graph)
