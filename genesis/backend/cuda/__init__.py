"""The CUDA backend: memory and streams through cuda-python, kernels in Triton. It does not import torch."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from genesis.backend import ArrayLike, Backend, Device, OpLike, as_device
from genesis.backend.cuda.dispatch import (
    Call,
    call_key,
    cuda_impl_named,
    cuda_impl_of,
    has_default_layout,
    is_value,
    record,
    remember,
)
from genesis.backend.cuda.driver import Driver, is_interpreted
from genesis.backend.cuda.faults import check as check_faults
from genesis.backend.cuda.launch import forget_plan, recorders, recording
from genesis.backend.cuda.memory import ALIGNMENT, CudaStorage, Pool
from genesis.backend.cuda.simulated import HostDriver, drivers
from genesis.backend.cuda.stream import CommStream, PinnedPool, SideStream
from genesis.backend.cuda.triton_driver import install
from genesis.errors import DeviceError
from genesis.shapes import contiguous_strides

__all__ = ["COUNTERS", "AnyDevice", "CudaBackend", "backend_of", "driver_for", "find_backend", "host_reads"]

COUNTERS = 1 << 14  # the most tiles in a launch that uses counters to find its last program
AnyDevice = Device | str | int | None
SIDE_STREAM_BYTES = 12 << 20  # bytes read; larger work fills the SMs alone
_CURRENT = nullcontext()


class _HostReads:
    """What happens when values are read on the host: 0 nothing, 1 a warning, 2 an error."""

    mode = 0

    def report(self) -> None:
        if self.mode == 2:
            raise DeviceError("device values were read on the host", next='set_sync_debug_mode("default") allows it')
        warnings.warn("device values were read on the host, which waits for the GPU", stacklevel=4)


host_reads = _HostReads()


class CudaBackend(Backend):
    """Memory and execution on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.driver = driver_for(device.index)
        self.pool = Pool(self.driver)
        self.pool.backend = self
        self.pool.describe = self._describe_blocks
        self.stream = 0  # launches go to this stream
        self.idle_streams: dict[int, list[int]] = {}  # unused handles, by priority
        self._temporary_range = (0, -1)  # the address range from which the running op takes temporaries
        self._calls: dict[Any, Call] = {}
        self._calls_into: dict[Any, Call] = {}  # calls with given outputs, whose operands start with the outputs

    @functools.cached_property
    def side_stream(self) -> SideStream:
        """The stream for work in a graph whose results are not read soon; created outside captures."""
        return SideStream(self)

    @functools.cached_property
    def comm_stream(self) -> CommStream:
        """The stream for communication between ranks that overlaps a step; created outside captures."""
        return CommStream(self)

    @functools.cached_property
    def counters(self) -> CudaStorage:
        """`COUNTERS` int32 counters, 0 between launches; allocated outside captures.

        Programs of a launch count themselves. The last one runs the step that depends on all, and resets the counter.
        """
        self.refuse_in_capture("counters were made")
        nbytes = 4 * COUNTERS
        block = self.pool.take(nbytes, self.stream, "counters")
        self.driver.fill(block.pointer, 0, nbytes, self.stream)
        self.driver.synchronize_stream(self.stream)  # other streams use them too
        return CudaStorage(self.pool, block, block.pointer, nbytes)

    @functools.cached_property
    def pinned(self) -> PinnedPool:
        """The pool of pinned host memory for copies from and to this device."""
        return PinnedPool(self)

    @property
    def is_capturing(self) -> bool:
        """Whether launches are captured into a CUDA graph, which computes their results at each replay."""
        return self.pool.capturing

    def call_before_replay(self, function: Callable[[], None]) -> bool:
        if self.pool.before_replay is None:
            return False
        self.pool.before_replay.append(function)
        return True

    def on_side_stream(self, nbytes: int) -> AbstractContextManager[None]:
        return self.side_stream.work() if self.pool.capturing and nbytes <= SIDE_STREAM_BYTES else _CURRENT

    def join_side_stream(self) -> None:
        if self.pool.capturing:
            self.side_stream.join()

    def on_comm_stream(self) -> AbstractContextManager[None]:
        return self.comm_stream.work()

    def join_comm_stream(self) -> None:
        self.comm_stream.join()

    def persistent_programs(self, per_sm: int = 1) -> int:
        """The number of programs that a persistent kernel launches when an SM runs `per_sm` of them at once."""
        return self.driver.properties.sm_count * per_sm

    def refuse_in_capture(self, what: str) -> None:
        """Raise DeviceError while a graph is captured; `what` names the operation that a graph cannot hold."""
        if self.pool.capturing:
            raise DeviceError(
                f"{what} inside the capture of a CUDA graph",
                next="copy inputs into static tensors before replay(), and read results after it",
            )

    def adopt(self, pointer: int, nbytes: int, owner: object) -> CudaStorage:
        """Wrap memory of another library; `owner` is released with the last view of the memory."""
        return CudaStorage(self.pool, None, pointer, nbytes, owner)

    def allocate(self, nbytes: int, owner: str | None = None) -> CudaStorage:
        """Allocate uninitialized device memory, reused in the order of the current stream.

        Args:
            owner: the name that snapshots and errors show; None is the running op.
        """
        recorder = recording()
        if recorder is None:
            block = self.pool.take(nbytes, self.stream, owner)
            return CudaStorage(self.pool, block, block.pointer, nbytes)
        storage = self.temporary(nbytes, owner)
        recorder.temporaries.append(storage)
        return storage

    def temporary(self, nbytes: int, owner: str | None = None) -> CudaStorage:
        """Allocate memory for the duration of an op, from the memory of `temporaries_from` if it has room."""
        start, end = self._temporary_range
        if start + nbytes <= end:
            self._temporary_range = start + (-(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT), end
            return CudaStorage(self.pool, None, start, nbytes)
        block = self.pool.take(nbytes, self.stream, owner)
        return CudaStorage(self.pool, block, block.pointer, nbytes)

    @contextmanager
    def owned_by(self, owner: str) -> Iterator[None]:
        """Attribute memory that is allocated inside the block to `owner`; an op inside it takes its own name."""
        before, self.pool.owner = self.pool.owner, owner
        try:
            yield
        finally:
            self.pool.owner = before

    def label(self, storage: CudaStorage, owner: str) -> None:
        """Attribute a storage to `owner` from now on, such as a parameter or an optimizer state."""
        if storage.block is not None:
            storage.block.owner = owner

    def _describe_blocks(self) -> dict[int, str]:
        """The dtype and shape of the largest tensor in each block, by address."""
        largest: dict[int, Any] = {}
        for each in gc.get_objects():  # by name: Array is defined in a layer above
            if type(each).__name__ == "Array" and getattr(each, "device", None) == self.device:
                pointer, known = each.storage.pointer, largest.get(each.storage.pointer)
                largest[pointer] = each if known is None or each.nbytes > known.nbytes else known
        return {pointer: f"{a.dtype.name} {list(a.shape)}" for pointer, a in largest.items()}

    @contextmanager
    def temporaries_from(self, memory: ArrayLike) -> Iterator[None]:
        """Take the temporaries of ops from `memory` inside the block, which overwrites it; one op at a time."""
        start = memory.data_ptr()
        aligned = -(-start // ALIGNMENT) * ALIGNMENT
        before, self._temporary_range = self._temporary_range, (aligned, start + memory.nbytes)
        try:
            yield
        finally:
            self._temporary_range = before

    def replay(
        self, op: OpLike, inputs: tuple[Any, ...], attrs: dict[str, Any], out: ArrayLike | None = None
    ) -> tuple[Any, ...] | None:
        """Replay a call that was recorded before and return its outputs, or None if it was not recorded.

        `out` was checked when the call was recorded: the check depends only on what the key contains.
        """
        if recorders and recording() is not None:
            return None
        operands = inputs if out is None else (out, *inputs)
        try:
            call = (self._calls if out is None else self._calls_into).get(call_key(op, operands, attrs))
        except TypeError:  # an attribute that is not hashable
            return None
        if call is None:
            return None
        if out is None:
            return call.run(operands)
        storage = out.storage
        for x in inputs:
            if x is not out and getattr(x, "storage", None) is storage:  # the key does not cover overlap with `out`
                return None
        call.run(operands)
        for changed in (storage, *(inputs[i].storage for i in op.mutates)):
            changed.version += 1
        return (out,)

    def run(self, op: OpLike, outputs: tuple[Any, ...], inputs: tuple[Any, ...], attrs: dict[str, Any]) -> None:
        """Run an op and record its launches, or replay the launches of a call with the same layouts."""
        out: Any = outputs[0] if len(outputs) == 1 else outputs
        cuda_impl = cuda_impl_of(op)
        if recording() is not None:  # nested in another CUDA implementation, which records the launches
            cuda_impl(out, *inputs, **attrs)
            return
        operands = (*outputs, *inputs)
        key: tuple[Any, ...] | None = call_key(op, operands, attrs)
        try:
            call = self._calls_into.get(key)
        except TypeError:  # an attribute that is not hashable
            key = call = None
        if call is not None:
            call.run(operands)
            return
        # A new call: run it, and remember its launches if its key contains everything they depend on.
        arrays = tuple([x for x in operands if hasattr(x, "storage")])
        with self.owned_by(op.name):
            plan = record(arrays, lambda: cuda_impl(out, *inputs, **attrs), self.driver, self.temporary, op.name)
        numbers = [x for x in inputs if not hasattr(x, "storage")]
        if plan is None or key is None or not all(map(is_value, (*numbers, *attrs.values()))):
            return
        remember(self._calls_into, key, Call(self, plan, (), operands))
        if has_default_layout(op, outputs, inputs, attrs):
            remember(self._calls, call_key(op, inputs, attrs), Call(self, plan, outputs, inputs, op.mutates))

    def to_numpy(self, array: ArrayLike) -> np.ndarray:
        """Copy the elements to the host; waits for the stream."""
        forget_plan()
        self.refuse_in_capture("device values were read on the host")
        if host_reads.mode:
            host_reads.report()
        if not array.is_contiguous:
            compact = self._like(array)
            cuda_impl_named("copy", "elementwise")(compact, array)
            array = compact
        values = np.empty(array.shape, array.dtype.numpy)
        if values.nbytes:
            self.driver.copy(values.ctypes.data, array.data_ptr(), values.nbytes, self.stream)
            self.driver.synchronize_stream(self.stream)
            check_faults(self.device)
        return values

    def from_numpy(self, values: np.ndarray, array: ArrayLike) -> None:
        """Copy host values into a device array, cast to its dtype."""
        self.refuse_in_capture("host values were copied to the device")
        source = np.ascontiguousarray(np.broadcast_to(values, array.shape).astype(array.dtype.numpy, copy=False))
        if not source.nbytes:
            return
        target = array if array.is_contiguous else self._like(array)
        self.driver.copy(target.data_ptr(), source.ctypes.data, source.nbytes, self.stream)
        if target is not array:
            cuda_impl_named("copy", "elementwise")(array, target)

    def _like(self, array: Any) -> Any:
        storage = self.allocate(array.nbytes)
        return type(array)(storage, array.shape, contiguous_strides(array.shape), array.dtype, array.device)


@functools.cache
def driver_for(index: int) -> Driver:
    """The driver of device `index`. Raises DeviceError if the device does not exist."""
    if index in drivers:
        return drivers[index]
    return HostDriver(index) if is_interpreted() else Driver(index)


def find_backend(which: AnyDevice = None) -> CudaBackend:
    """The backend of a `Device`, "cuda:1", an index, or None for the current device. Raises DeviceError without one."""
    device = as_device("cuda" if which is None else f"cuda:{which}" if isinstance(which, int) else which)
    if device.type != "cuda":
        raise DeviceError(f"{device} is not a CUDA device", next='use "cuda" or "cuda:<index>"')
    return backend_of(device)


@functools.cache
def backend_of(device: Device) -> CudaBackend:
    """The backend of a CUDA device."""
    _started.append(CudaBackend(device))
    if _started[-1].driver.prepare is None:
        install(backend_of)
    return _started[-1]


_started: list[CudaBackend] = []


def forget_calls() -> None:
    """Drop the recorded launches of all devices."""
    for each in _started:
        each._calls.clear()
        each._calls_into.clear()
