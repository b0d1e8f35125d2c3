"""The CUDA backend: memory and streams through cuda-python, kernels in Triton. Nothing here imports torch."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from genesis.backend import ArrayLike, Backend, Device, OpLike, as_device
from genesis.backend.cuda.dispatch import (
    Call,
    are_as_made,
    call_key,
    cuda_impl_named,
    cuda_impl_of,
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
from genesis.errors import DeviceError
from genesis.shapes import contiguous_strides

__all__ = ["COUNTERS", "AnyDevice", "CudaBackend", "backend_of", "driver_for", "find_backend"]

COUNTERS = 1 << 14  # the most tiles of a launch whose last program is to be known
AnyDevice = Device | str | int | None
SIDE_STREAM_BYTES = 12 << 20  # bytes that are read: work on more fills the SMs by itself
_CURRENT = nullcontext()


class CudaBackend(Backend):
    """Memory and execution on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.driver = driver_for(device.index)
        self.pool = Pool(self.driver)
        self.pool.backend = self
        self.pool.describe = self._described
        self.stream = 0  # on which work is launched now
        self.idle_streams: dict[int, list[int]] = {}  # that nobody uses, by priority
        self._given = (0, -1)  # addresses from which the running op takes temporaries
        self._calls: dict[Any, Call] = {}
        self._into: dict[Any, Call] = {}  # into memory that is given, which comes before the inputs

    @functools.cached_property
    def side_stream(self) -> SideStream:
        """Where a graph's work goes whose results nobody reads for a while; made outside captures."""
        return SideStream(self)

    @functools.cached_property
    def comm_stream(self) -> CommStream:
        """Where what ranks send each other goes while a step goes on; made outside captures."""
        return CommStream(self)

    @functools.cached_property
    def counters(self) -> CudaStorage:
        """`COUNTERS` int32 counters of programs that arrived, 0 between launches; made outside captures.

        The program that arrives last does what needs all others of a launch, and sets the counter to 0.
        """
        self.refuse_in_capture("counters were made")
        nbytes = 4 * COUNTERS
        block = self.pool.take(nbytes, self.stream, "counters")
        self.driver.fill(block.pointer, 0, nbytes, self.stream)
        self.driver.synchronize_stream(self.stream)  # before other streams use them
        return CudaStorage(self.pool, block, block.pointer, nbytes)

    @functools.cached_property
    def pinned(self) -> PinnedPool:
        """Pinned host memory that this device copies from and to."""
        return PinnedPool(self)

    @property
    def is_capturing(self) -> bool:
        """Whether launches enter a CUDA graph, which will compute their results whenever it is replayed."""
        return self.pool.capturing

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
        """How many programs a persistent kernel has, of which an SM runs `per_sm` at a time."""
        return self.driver.properties.sm_count * per_sm

    def refuse_in_capture(self, what: str) -> None:
        """Raise DeviceError while a graph is captured, for what a graph cannot hold."""
        if self.pool.capturing:
            raise DeviceError(
                f"{what} inside the capture of a CUDA graph",
                next="copy inputs into static tensors before replay(), and read results after it",
            )

    def adopt(self, pointer: int, nbytes: int, owner: object) -> CudaStorage:
        """Memory that another library owns; it is let go with the last view of it."""
        return CudaStorage(self.pool, None, pointer, nbytes, owner)

    def allocate(self, nbytes: int, owner: str | None = None) -> CudaStorage:
        """Uninitialized device memory, reused in the order of the current stream. `owner` is who asks, for snapshots
        and errors; None is the op that runs.
        """
        recorder = recording()
        if recorder is None:
            block = self.pool.take(nbytes, self.stream, owner)
            return CudaStorage(self.pool, block, block.pointer, nbytes)
        storage = self.temporary(nbytes, owner)
        recorder.temporaries.append(storage)
        return storage

    def temporary(self, nbytes: int, owner: str | None = None) -> CudaStorage:
        """The same for the length of an op: from memory that it was given, where that is enough."""
        start, end = self._given
        if start + nbytes <= end:
            self._given = start + (-(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT), end
            return CudaStorage(self.pool, None, start, nbytes)
        block = self.pool.take(nbytes, self.stream, owner)
        return CudaStorage(self.pool, block, block.pointer, nbytes)

    @contextmanager
    def owned_by(self, owner: str) -> Iterator[None]:
        """Inside the block, memory is taken for `owner`; an op that runs in it takes its own."""
        before, self.pool.owner = self.pool.owner, owner
        try:
            yield
        finally:
            self.pool.owner = before

    def label(self, storage: CudaStorage, owner: str) -> None:
        """Say whose a storage is from now on: a parameter's, an optimizer state's."""
        if storage.block is not None:
            storage.block.owner = owner

    def _described(self) -> dict[int, str]:
        """Dtype and shape of the largest tensor in each block, by address."""
        found: dict[int, Any] = {}
        for each in gc.get_objects():  # by name: Array is a layer above
            if type(each).__name__ == "Array" and getattr(each, "device", None) == self.device:
                pointer, known = each.storage.pointer, found.get(each.storage.pointer)
                found[pointer] = each if known is None or each.nbytes > known.nbytes else known
        return {pointer: f"{a.dtype.name} {list(a.shape)}" for pointer, a in found.items()}

    @contextmanager
    def temporaries_from(self, memory: ArrayLike) -> Iterator[None]:
        """Inside the block, ops take temporaries from `memory`, whose contents nobody needs; one op at a time."""
        start = memory.data_ptr()
        aligned = -(-start // ALIGNMENT) * ALIGNMENT
        before, self._given = self._given, (aligned, start + memory.nbytes)
        try:
            yield
        finally:
            self._given = before

    def replay(
        self, op: OpLike, inputs: tuple[Any, ...], attrs: dict[str, Any], out: ArrayLike | None = None
    ) -> tuple[Any, ...] | None:
        """The outputs of a call like one before, in `out` where it is given; None where there was none.

        Whether `out` fits was found when the call was recorded: that depends on what the key holds.
        """
        if recorders and recording() is not None:
            return None
        operands = inputs if out is None else (out, *inputs)
        try:
            call = (self._calls if out is None else self._into).get(call_key(op, operands, attrs))
        except TypeError:  # an attribute that cannot be a key
            return None
        if call is None:
            return None
        if out is None:
            return call.run(operands)
        storage = out.storage
        for x in inputs:
            if x is not out and getattr(x, "storage", None) is storage:  # the key does not say how they overlap
                return None
        call.run(operands)
        for changed in (storage, *(inputs[i].storage for i in op.mutates)):
            changed.version += 1
        return (out,)

    def run(self, op: OpLike, outputs: tuple[Any, ...], inputs: tuple[Any, ...], attrs: dict[str, Any]) -> None:
        """Run an op and remember what it launched, or replay that on operands of the same layout."""
        out: Any = outputs[0] if len(outputs) == 1 else outputs
        cuda_impl = cuda_impl_of(op)
        if recording() is not None:  # inside another op's CUDA implementation: its launches belong to that one
            cuda_impl(out, *inputs, **attrs)
            return
        operands = (*outputs, *inputs)
        key: tuple[Any, ...] | None = call_key(op, operands, attrs)
        try:
            call = self._into.get(key)
        except TypeError:  # an attribute that cannot be a key
            key = call = None
        if call is not None:
            call.run(operands)
            return
        arrays = tuple([x for x in operands if hasattr(x, "storage")])
        with self.owned_by(op.name):
            plan = record(arrays, lambda: cuda_impl(out, *inputs, **attrs), self.driver, self.temporary, op.name)
        numbers = [x for x in inputs if not hasattr(x, "storage")]
        if plan is None or key is None or not all(map(is_value, (*numbers, *attrs.values()))):
            return
        remember(self._into, key, Call(self, plan, (), operands))
        if are_as_made(op, outputs, inputs, attrs):
            remember(self._calls, call_key(op, inputs, attrs), Call(self, plan, outputs, inputs, op.mutates))

    def to_numpy(self, array: ArrayLike) -> np.ndarray:
        """A host copy of the elements; waits for the stream."""
        forget_plan()
        self.refuse_in_capture("device values were read on the host")
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
        """Write host values into a device array, cast to its dtype."""
        self.refuse_in_capture("host values were copied to the device")
        source = np.ascontiguousarray(np.broadcast_to(values, array.shape).astype(array.dtype.numpy, copy=False))
        if not source.nbytes:
            return
        target = array if array.is_contiguous else self._like(array)
        self.driver.copy(target.data_ptr(), source.ctypes.data, source.nbytes, self.stream)
        if target is not array:
            cuda_impl_named("copy", "elementwise")(array, target)

    def _like(self, array: Any) -> Any:
        """Contiguous memory of an array's shape and dtype."""
        storage = self.allocate(array.nbytes)
        return type(array)(storage, array.shape, contiguous_strides(array.shape), array.dtype, array.device)


@functools.cache
def driver_for(index: int) -> Driver:
    """The driver of device `index`. Raises DeviceError where there is no such device."""
    if index in drivers:
        return drivers[index]
    return HostDriver(index) if is_interpreted() else Driver(index)


def find_backend(which: AnyDevice = None) -> CudaBackend:
    """The backend of a `Device`, "cuda:1", an index, or None for the current device. Raises DeviceError without one."""
    place = as_device("cuda" if which is None else f"cuda:{which}" if isinstance(which, int) else which)
    if place.type != "cuda":
        raise DeviceError(f"{place} is no CUDA device", next='use "cuda" or "cuda:<index>"')
    return backend_of(place)


@functools.cache
def backend_of(device: Device) -> CudaBackend:
    """The backend of a CUDA device."""
    return CudaBackend(device)
