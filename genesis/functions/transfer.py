"""Copies of arrays between host and devices, blocking or not, and pinned memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from genesis.array import Array, empty, from_numpy, label, touch
from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import CpuStorage
from genesis.dtypes import DType
from genesis.errors import DeviceError
from genesis.shapes import Shape, contiguous_strides

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend
    from genesis.backend.cuda.stream import PinnedBlock


def cuda_backend(device: Device) -> CudaBackend:
    """Return the backend of a CUDA device."""
    return backend_for(device)  # type: ignore[return-value]


def pinned_empty(shape: Shape, dtype: DType, device: Device) -> Array:
    """Return a contiguous array in pinned memory for copies from and to `device`; contents undefined."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    block = cuda_backend(device).pinned.take(nbytes)
    storage = CpuStorage(block.bytes(nbytes), nbytes, owner=block)
    return Array(storage, tuple(shape), contiguous_strides(tuple(shape)), dtype)


def is_pinned(array: Array) -> bool:
    """Whether an array is in pinned memory that Genesis allocated."""
    return array.device == CPU and _block(array) is not None


def _block(array: Array) -> PinnedBlock | None:
    """Return the pinned block of a CPU array, or None for pageable memory."""
    from genesis.backend.cuda.stream import block_of

    return block_of(array.storage.block)  # type: ignore[attr-defined]


def moved(array: Array, device: Device, non_blocking: bool = False) -> Array:
    """Return the array on `device`: itself if it is there, else a copy.

    `non_blocking`: do not block on a copy from pinned memory, whose source must not be changed before it is done.
    """
    if array.device == device:
        return array
    if device == CPU:
        return from_numpy(array.numpy())
    if array.device != CPU:  # through the host
        return moved(from_numpy(array.numpy()), device)
    copied = label(empty(array.shape, array.dtype, device), "to")
    _upload(copied, array, non_blocking)
    return copied


def overwrite(target: Array, source: Array, non_blocking: bool = False) -> None:
    """Write `source` (broadcast, cast) into `target` on another device.

    `non_blocking`: do not block if one of them is in pinned memory, with the same layout and dtype as the other.
    """
    touch()
    target.storage.version += 1
    if source.device == CPU:
        _upload(target, source, non_blocking)
        return
    same = target.shape == source.shape and target.dtype is source.dtype
    direct = same and target.is_contiguous and source.is_contiguous
    block = _block(target) if direct and target.device == CPU else None
    if block is None or not non_blocking:
        backend_for(target.device).from_numpy(_castable(source.numpy(), target), target)
        return
    backend = cuda_backend(source.device)
    backend.refuse_in_capture("device values were copied to the host")
    if target.nbytes:
        backend.driver.copy(target.data_ptr(), source.data_ptr(), target.nbytes, backend.stream)
        block.streams.add(backend.stream)


def _upload(target: Array, source: Array, non_blocking: bool) -> None:
    """Copy from the host to a device."""
    backend = cuda_backend(target.device)
    block = _block(source)
    backend.from_numpy(_castable(source.view_np(), target), target)
    if block is None:  # the driver has finished reading pageable memory when the call returns
        return
    if non_blocking:
        block.streams.add(backend.stream)
    else:
        backend.driver.synchronize_stream(backend.stream)


def _castable(values: np.ndarray, target: Array) -> Any:
    with np.errstate(all="ignore"):  # a cast may overflow to inf, as in torch
        return values.astype(target.dtype.numpy, copy=False)


def record_stream(array: Array, stream: int) -> None:
    """Mark an array's memory as used by another stream. Raises DeviceError for pageable host memory."""
    if array.device == CPU:
        block = _block(array)
        if block is None:
            raise DeviceError("record_stream needs a tensor on CUDA or in pinned memory", next="call pin_memory()")
        block.streams.add(stream)
        return
    backend = cuda_backend(array.device)
    used = getattr(array.storage, "block", None)
    if used is not None and used.arena is not backend.pool.arenas.get(stream):  # its own stream already orders reuse
        backend.pool.record_stream(used, stream)
