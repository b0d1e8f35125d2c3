"""The CUDA backend: memory and streams through cuda-python, kernels in Triton. Nothing here imports torch."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from genesis.backend import Device
from genesis.backend.cuda.driver import driver_for
from genesis.backend.cuda.memory import Block, Pool
from genesis.backend.cuda.precision import allow_tf32
from genesis.backend.cuda.twins import twins
from genesis.errors import DeviceError
from genesis.shapes import contiguous_strides

if TYPE_CHECKING:
    from genesis.array import Array
    from genesis.op import Op

__all__ = ["CudaBackend", "CudaStorage", "backend_of"]

PLANS = 8192  # kept a device; numbers that change with every call would otherwise pile up


class CudaStorage:
    """Device bytes: a block of the pool, or memory that belongs to `owner` (another library's tensor)."""

    __slots__ = ("__weakref__", "block", "nbytes", "owner", "pointer", "pool", "version")

    def __init__(self, pool: Pool, block: Block | None, pointer: int, nbytes: int, owner: object = None) -> None:
        self.pool, self.block, self.pointer, self.nbytes, self.owner = pool, block, pointer, nbytes, owner
        self.version = 0

    def __del__(self) -> None:
        if self.block is not None:
            self.pool.give(self.block)


class CudaBackend:
    """Memory and execution on one device.

    Attributes:
        stream: the stream on which work is launched now.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.driver = driver_for(device.index)
        self.pool = Pool(self.driver)
        self.stream = 0
        self._plans: dict[Any, Any] = {}

    def allocate(self, nbytes: int) -> CudaStorage:
        """Uninitialized device memory, reused in the order of the current stream."""
        from genesis.backend.cuda.launch import recording

        block = self.pool.take(nbytes, self.stream)
        storage = CudaStorage(self.pool, block, block.pointer, nbytes)
        recorder = recording()
        if recorder is not None:
            recorder.temporaries.append(storage)
        return storage

    def run(self, op: Op, outputs: tuple[Array, ...], inputs: tuple[Any, ...], attrs: dict[str, Any]) -> None:
        """Run an op's twin, or replay what it launched before on operands of the same layout."""
        from genesis.backend.cuda.launch import record, recording

        out: Any = outputs[0] if len(outputs) == 1 else outputs
        if recording() is not None:  # inside another op's twin: its launches belong to that one
            twin_named(op.name, op.family)(out, *inputs, **attrs)
            return
        operands = (*outputs, *(x for x in inputs if hasattr(x, "storage")))
        key = _key(op, operands, inputs, attrs)
        plan = self._plans.get(key)
        if plan is not None:
            plan.run(operands, self.stream)
            return
        twin = twin_named(op.name, op.family)
        self.pool.owner = op.name
        try:
            plan = record(operands, lambda: twin(out, *inputs, **attrs), self.allocate)
        finally:
            self.pool.owner = ""
        if plan is not None and key is not None:
            if len(self._plans) >= PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan

    def to_numpy(self, array: Array) -> np.ndarray:
        """A host copy of the elements; waits for the stream."""
        from genesis.backend.cuda.launch import recording

        if (recorder := recording()) is not None:
            recorder.cacheable = False
        if not array.is_contiguous:
            array = self._move(array, self._like(array))
        values = np.empty(array.shape, array.dtype.numpy)
        if values.nbytes:
            self.driver.copy(values.ctypes.data, array.data_ptr(), values.nbytes, self.stream)
            self.driver.synchronize_stream(self.stream)
        return values

    def from_numpy(self, values: np.ndarray, array: Array) -> None:
        """Write host values into a device array, cast to its dtype."""
        source = np.ascontiguousarray(np.broadcast_to(values, array.shape).astype(array.dtype.numpy, copy=False))
        if not source.nbytes:
            return
        target = array if array.is_contiguous else self._like(array)
        self.driver.copy(target.data_ptr(), source.ctypes.data, source.nbytes, self.stream)
        if target is not array:
            self._move(target, array)

    def _like(self, array: Array) -> Array:
        """Contiguous memory of an array's shape and dtype."""
        storage = self.allocate(array.nbytes)
        return type(array)(storage, array.shape, contiguous_strides(array.shape), array.dtype, array.device)

    def _move(self, source: Array, target: Array) -> Array:
        twin_named("copy", "elementwise")(target, source)
        return target


def _key(op: Op, operands: tuple[Array, ...], inputs: tuple[Any, ...], attrs: dict[str, Any]) -> Any:
    """All that a twin's launches may depend on; None where that cannot be a key."""
    layouts = [(a.shape, a.strides, a.dtype, a.data_ptr() & 15) for a in operands]
    numbers = [None if hasattr(x, "storage") else _exact(x) for x in inputs]
    same = [i for i, a in enumerate(operands) for b in operands[:i] if a is b]
    key = (op.name, allow_tf32.on, *layouts, *numbers, *same, *((k, _exact(v)) for k, v in attrs.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _exact(value: Any) -> Any:
    """A number with its type and sign, so that 1, 1.0 and True differ, and 0.0 and -0.0."""
    return (value.__class__, repr(value)) if isinstance(value, (int, float)) else value


@functools.cache
def twin_named(name: str, family: str) -> Any:
    """The CUDA twin of an op, from the module of `genesis.kernels` that is named as the op's own.

    Raises:
        DeviceError: if the op has none.
    """
    if name not in twins:
        importlib.import_module(f"genesis.kernels.{family}")
    if name not in twins:
        raise DeviceError(f"{name} has no CUDA kernel", next="move its inputs to the CPU")
    return twins[name]


@functools.cache
def backend_of(device: Device) -> CudaBackend:
    """The backend of a CUDA device."""
    return CudaBackend(device)
