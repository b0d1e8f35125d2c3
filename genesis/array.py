"""Array: storage, shape, strides, dtype and device. Gradients and ops belong to the layers above."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np

from genesis.backend import CPU, Device, Storage, backend_for
from genesis.backend.cpu import CpuStorage
from genesis.dtypes import DType, as_dtype
from genesis.shapes import Shape, as_index, contiguous_strides, is_contiguous, is_dense, numel, preserved_strides


class Spec(NamedTuple):
    """Shape and dtype of an array that may not exist yet."""

    shape: Shape
    dtype: DType


class Array:
    """A strided window on a storage that all its views share. Strides and `offset` count elements."""

    __slots__ = ("__weakref__", "_np", "_spec", "device", "dtype", "layout", "offset", "shape", "storage", "strides")

    def __init__(
        self, storage: Storage, shape: Shape, strides: Shape, dtype: DType, device: Device = CPU, offset: int = 0
    ) -> None:
        self.storage, self.shape, self.strides, self.dtype = storage, shape, strides, dtype
        self.device, self.offset = device, offset
        self._np: np.ndarray | None = None
        self._spec: Spec | None = None
        self.layout: Any = None  # cache of the device's backend for this shape, strides, dtype, device and offset

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return numel(self.shape)

    @property
    def nbytes(self) -> int:
        return numel(self.shape) * self.dtype.itemsize

    @property
    def spec(self) -> Spec:
        """Shape and dtype; always the same object, because autograd saves it for every recorded op."""
        if self._spec is None:
            self._spec = Spec(self.shape, self.dtype)
        return self._spec

    @property
    def is_contiguous(self) -> bool:
        return is_contiguous(self.shape, self.strides)

    def data_ptr(self) -> int:
        """Address of the first element."""
        if makers:
            touch()
        return self.storage.pointer + self.offset * self.dtype.itemsize

    def view(self, shape: Shape, strides: Shape, offset: int | None = None) -> Array:
        """Return another window on the same storage; `offset` is absolute, in elements."""
        offset = self.offset if offset is None else offset
        return Array(self.storage, shape, strides, self.dtype, self.device, offset)

    def like(self, storage: Storage) -> Array:
        """Return an array of the same shape, strides, dtype and device at the beginning of another storage."""
        array: Array = object.__new__(Array)  # every op runs this: the constructor would take twice as long
        array.storage, array.shape, array.strides = storage, self.shape, self.strides
        array.dtype, array.device, array.offset = self.dtype, self.device, 0
        array.layout, array._spec, array._np = self.layout, self._spec, None
        return array

    def view_np(self) -> np.ndarray:
        """Return the elements as a numpy array over the same memory (CPU only)."""
        if self._np is None:
            storage: Any = self.storage
            assert self.device is CPU, "view_np of device memory"
            item = self.dtype.itemsize
            strides = tuple([s * item for s in self.strides])
            self._np = np.ndarray(self.shape, self.dtype.numpy, storage.block, self.offset * item, strides)
        return self._np

    def numpy(self) -> np.ndarray:
        """Return the elements on the host: shared memory on the CPU, a blocking copy from a device."""
        touch()
        return backend_for(self.device).to_numpy(self)

    def item(self) -> Any:
        """Return the only element as a Python number (blocks until the device is done)."""
        return self.numpy().item()

    def overlaps_itself(self) -> bool:
        """Whether two indices may reach the same element, as in an expanded view, which must not be written to."""
        if 0 in self.shape:  # numpy may give empty arrays strides of 0
            return False
        order = sorted((st, s) for s, st in zip(self.shape, self.strides, strict=True) if s > 1)
        reach = 0
        for stride, size in order:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
        return False

    def __repr__(self) -> str:
        return f"Array(shape={self.shape}, strides={self.strides}, dtype={self.dtype}, device={self.device})"


def constant(x: Array) -> Array:
    """Return x without the history that a second backward pass gives to arrays; see `genesis.autograd.double`."""
    return x if type(x) is Array else Array(x.storage, x.shape, x.strides, x.dtype, x.device, x.offset)


# By thread: the trace that makes its arrays, while `genesis.compiler` traces that thread.
makers: dict[int, Any] = {}


def touch() -> None:
    """Tell this thread's tracer that code outside of ops reads or writes memory."""
    if makers and (trace := makers.get(get_ident())) is not None:
        trace.touch()


def empty(shape: Sequence[int], dtype: DType, device: Device = CPU) -> Array:
    """Return a contiguous array with undefined contents."""
    if makers and (trace := makers.get(get_ident())) is not None:
        return trace.new(shape, dtype, device)  # type: ignore[no-any-return]
    return allocated(shape, dtype, device)


def allocated(shape: Sequence[int], dtype: DType, device: Device) -> Array:
    """Return what `empty` returns, in memory even while the thread is traced."""
    shape = tuple(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes.__class__ is not int:  # numpy integers or tensors: convert every size to a Python int
        shape = tuple([as_index("the size", s) for s in shape])
        nbytes = math.prod(shape) * dtype.itemsize
    storage = backend_for(device).allocate(nbytes)
    return Array(storage, shape, contiguous_strides(shape), dtype, device)


def is_sole_owner(x: Array) -> bool:
    """Whether x is contiguous and nothing but x refers to its memory, not even a numpy array of the caller."""
    values: Any = x._np
    storage: Any = x.storage
    if sys.getrefcount(storage) != _HELD + 1 or storage.owner is not None:
        return False
    if storage.nbytes != x.nbytes or not is_contiguous(x.shape, x.strides):
        return False
    if x.device is not CPU:
        return True
    if values is None:
        return sys.getrefcount(storage.block) == 2
    return sys.getrefcount(values) == _HELD + 1 and sys.getrefcount(storage.block) == 3


def _held() -> int:
    x = object()
    return sys.getrefcount(x)


_HELD = _held()  # the count of an object to which only a local variable refers


def empty_strided(shape: Shape, strides: Shape, dtype: DType, device: Device = CPU) -> Array:
    """Return an array with undefined contents and the given strides, which leave no gaps."""
    return empty(shape, dtype, device).view(shape, strides)


def preserved(x: Array, dtype: DType, device: Device) -> Array:
    """Return an array with undefined contents in x's shape, whose dimensions are stored in the order of x's."""
    strides = x.strides if x.is_contiguous else preserved_strides(x.shape, (x.shape, x.strides))
    return empty_strided(x.shape, strides, dtype, device)


def overlap_in_part(x: Array, y: Array) -> bool:
    """Whether two arrays share memory, but not element by element; False if their gaps make it hard to tell."""
    if x.storage is not y.storage or not (is_dense(x.shape, x.strides) and is_dense(y.shape, y.strides)):
        return False
    (a, m), (b, n) = ((each.offset * each.dtype.itemsize, each.nbytes) for each in (x, y))
    return a < b + n and b < a + m and not (a == b and m == n and x.strides == y.strides)


def label(array: Array, owner: str) -> Array:
    """Set the owner of an array's memory, such as "parameter", for snapshots and errors (default: the op that ran)."""
    if array.__class__ is Array:  # an array of a trace has no memory
        array.storage.backend.label(array.storage, owner)
    return array


def from_host(values: np.ndarray, dtype: DType, device: Device) -> Array:
    """Return a copy of numpy's values, cast to `dtype`, on a device."""
    array = allocated(values.shape, dtype, device)
    trace = makers.pop(get_ident(), None)  # writing into new memory is not a break
    try:
        backend_for(device).from_numpy(values, array)
    finally:
        if trace is not None:
            makers[get_ident()] = trace
    return array if trace is None else trace.keep(array, is_shared=False)


def from_numpy(values: np.ndarray, *, share: bool = True) -> Array:
    """Return an array over numpy's memory, or over a copy of it.

    Memory is shared if `share` is set, the values are writable and aligned, and their strides are non-negative
    multiples of the element size.
    """
    values = np.asarray(values)
    dtype = as_dtype(values.dtype)
    item = dtype.itemsize
    usable = values.flags.writeable and values.flags.aligned and all(s >= 0 and s % item == 0 for s in values.strides)
    if not share or not usable:
        return from_host(values, dtype, CPU)
    strides = tuple(s // item for s in values.strides)
    extent = 1 + sum(st * (s - 1) for s, st in zip(values.shape, strides, strict=True)) if values.size else 0
    # The block spans all bytes from first to last element, gaps included. Every view of it keeps `values` alive.
    run = np.lib.stride_tricks.as_strided(values, (extent,), (item,))
    block = run.view(np.uint8) if extent else np.empty(0, np.uint8)
    array = Array(CpuStorage(block, extent * item, owner=values), values.shape, strides, dtype)
    array._np = values
    trace = makers.get(get_ident())
    return array if trace is None else trace.keep(array, is_shared=True)
