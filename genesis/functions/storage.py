"""UntypedStorage: the bytes that a tensor shares with its views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from genesis.array import Array, empty, from_numpy
from genesis.autograd.record import TensorBase
from genesis.backend import CPU, Device, Storage, backend_for
from genesis.dtypes import uint8
from genesis.errors import DTypeError, ShapeError
from genesis.shapes import Shape, contiguous_strides


class UntypedStorage:
    """Memory on a device, as bytes. Two objects are equal if they name the same memory."""

    __slots__ = ("_memory", "device")

    def __init__(self, memory: Storage, device: Device) -> None:
        self._memory, self.device = memory, device

    def data_ptr(self) -> int:
        """Return the address of the first byte."""
        return self._memory.pointer

    def nbytes(self) -> int:
        """Return the number of bytes."""
        return self._memory.nbytes

    size = nbytes
    __len__ = nbytes

    def element_size(self) -> int:
        """Return 1."""
        return 1

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def tolist(self) -> list[int]:
        """Return the bytes."""
        return self._bytes().numpy().tolist()  # type: ignore[no-any-return]

    def clone(self) -> UntypedStorage:
        """Return a copy in new memory."""
        from genesis.ops.elementwise import copy

        return UntypedStorage(copy(self._bytes()).storage, self.device)

    def cpu(self) -> UntypedStorage:
        """Return the bytes in host memory: the same memory on the CPU, otherwise a copy."""
        if not self.is_cuda:
            return self
        return UntypedStorage(from_numpy(self._bytes().numpy()).storage, CPU)

    def copy_(self, source: UntypedStorage, non_blocking: bool | None = None) -> UntypedStorage:
        """Copy the bytes of a storage of the same size. Raises ShapeError for another size."""
        if source.nbytes() != self.nbytes():
            raise ShapeError(f"copy_ of {source.nbytes()} bytes into {self.nbytes()} bytes of storage")
        if source != self:
            backend_for(self.device).from_numpy(source._bytes().numpy(), self._bytes())
        return self

    def _bytes(self) -> Array:
        return Array(self._memory, (self.nbytes(),), (1,), uint8, self.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UntypedStorage) and self._memory is other._memory

    def __hash__(self) -> int:
        return id(self._memory)

    def __getitem__(self, index: int) -> int:
        return int(self._bytes().numpy()[index])


def window(own: Array, source: Any, offset: int, size: Sequence[int] | None, stride: Sequence[int] | None) -> Array:
    """Return the elements of `source`, of own's dtype, that `Tensor.set_` describes."""
    if source is None:
        return empty((0,), own.dtype, own.device)
    if isinstance(source, TensorBase):
        source = UntypedStorage(source.array.storage, source.array.device)
    if not isinstance(source, UntypedStorage):
        raise DTypeError(f"set_ takes a tensor or its untyped_storage(), not a {type(source).__name__}")
    item = own.dtype.itemsize
    shape: Shape = (source.nbytes() // item - offset,) if size is None else tuple(int(s) for s in size)
    strides: Shape = contiguous_strides(shape) if stride is None else tuple(int(s) for s in stride)
    if len(strides) != len(shape) or offset < 0 or min((*shape, *strides), default=0) < 0:
        raise ShapeError(f"set_: the offset {offset}, sizes {shape} and strides {strides} do not fit together")
    last = offset + int(np.dot([s - 1 for s in shape], strides)) if 0 not in shape else -1
    if (last + 1) * item > source.nbytes():
        raise ShapeError(f"set_: element {last} is beyond the {source.nbytes()} bytes of the storage")
    return Array(source._memory, shape, strides, own.dtype, source.device, offset)
