"""Sharing memory with other libraries without a copy, in both directions: DLPack and `__cuda_array_interface__`.

On CUDA, the consumer names the stream that it will use, and that stream waits for the producer's.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from genesis.array import Array, from_numpy
from genesis.autograd.record import TensorBase
from genesis.backend import CPU, Device, as_device, dlpack
from genesis.backend.cpu import CpuStorage
from genesis.dtypes import ALL, FLOAT, DType, as_dtype, bfloat16, bool_, uint8
from genesis.errors import DeviceError, DTypeError
from genesis.functions.surface import Tensor, public
from genesis.functions.transfer import cuda_backend, moved, record_stream
from genesis.op import registry
from genesis.shapes import contiguous_strides

# DLDataTypeCode and bits: 0 for signed integers, 1 for unsigned ones, 2 for floats, 4 for bfloat16, 6 for bools.
_CODES = {bfloat16: 4, bool_: 6, uint8: 1}
_KINDS = {d: (_CODES.get(d, 2 if d.category == FLOAT else 0), 8 * d.itemsize) for d in ALL}
_DTYPES = {kind: dtype for dtype, kind in _KINDS.items()}
_LEGACY = 1  # number of the default stream in other libraries and the driver; Genesis uses 0


# --- DLPack -----------------------------------------------------------------------------------------------------------


def dlpack_device(device: Device) -> tuple[int, int]:
    """Return (DLDeviceType, number) of a device."""
    return (dlpack.CPU, 0) if device == CPU else (dlpack.CUDA, device.index)


def to_dlpack(array: Array, stream: Any, max_version: Any, dl_device: Any, copy: bool | None) -> Any:
    """Return a capsule over `array`; the arguments are as for `__dlpack__` in the array API standard.

    Args:
        stream: address of the consumer's stream; None or 1 for the default stream, -1 for no synchronization. Must be
            None on the CPU.
        max_version: newest (major, minor) that the consumer reads; None requests an unversioned capsule.
        dl_device: device on which the consumer wants the memory; another device than the array's is a host copy.
        copy: True forces a copy, False forbids one.

    Raises:
        BufferError: if the request requires a copy that `copy` forbids, or a copy to a device other than the host.
    """
    versioned = max_version is not None and max_version[0] >= dlpack.VERSION[0]
    copied = bool(copy)
    if dl_device is not None and tuple(dl_device) != dlpack_device(array.device):
        if copy is False or tuple(dl_device) != (dlpack.CPU, 0):
            raise BufferError(
                f"a tensor on {array.device} cannot be shared with device {tuple(dl_device)} without a copy"
            )
        array, copied = moved(array, CPU), True
    elif copied:
        array = registry["copy"](array)
    if array.device != CPU and stream != -1:
        # The consumer's stream waits for ours, and our pool reuses the memory only after the consumer's stream.
        backend, theirs = cuda_backend(array.device), 0 if stream in (None, _LEGACY) else int(stream)
        if theirs != backend.stream:
            backend.driver.follow(theirs, backend.stream)
            record_stream(array, theirs)
    described = dlpack.Described(
        array.data_ptr(), dlpack_device(array.device), _KINDS[array.dtype], array.shape, array.strides
    )
    return dlpack.capsule(described, array.storage, versioned=versioned, copied=copied)


@public(method=False, keywords={"ext_tensor": "source"})
def from_dlpack(source: Any) -> Tensor:
    """Return a tensor over the memory of any object with `__dlpack__`, on the host or on CUDA.

    Read-only memory is copied. Raises DTypeError for an element type that Genesis lacks, DeviceError for memory of
    other devices.
    """
    # Take the capsule; a CUDA producer synchronizes with our stream.
    try:
        kind, number = source.__dlpack_device__()
        is_cuda = kind in (dlpack.CUDA, dlpack.CUDA_MANAGED)
        options = {"stream": cuda_backend(Device("cuda", number)).stream or _LEGACY} if is_cuda else {}
        try:
            capsule = source.__dlpack__(max_version=dlpack.VERSION, **options)
        except TypeError:  # the producer does not support versioned capsules
            capsule = source.__dlpack__(**options)
        taken = dlpack.take(capsule)
    except (AttributeError, BufferError, RuntimeError, ValueError) as error:
        raise DTypeError(f"from_dlpack: cannot share memory of {type(source).__name__}: {error}") from error
    # Check the dtype, then wrap the memory.
    dtype = _DTYPES.get(taken.described.kind)
    if dtype is None or taken.lanes != 1:
        code, bits = taken.described.kind
        raise DTypeError(f"from_dlpack: elements of DLPack type {code} with {bits} bits are not supported")
    place = taken.described.device[0]
    if place in (dlpack.CPU, dlpack.CUDA_HOST):
        array = _host_array(taken, dtype)
    elif place in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        pointer, (_, number), _, shape, strides = taken.described
        array = _adopted(pointer, shape, strides, dtype, Device("cuda", number), taken, taken.read_only)
    else:
        raise DeviceError(
            f"from_dlpack cannot use memory of DLPack device {place}", next="move it to the host or to CUDA"
        )
    return TensorBase.wrap(array)


def _host_array(taken: dlpack.Taken, dtype: DType) -> Array:
    described, item = taken.described, dtype.itemsize
    if 0 in described.shape:
        return from_numpy(np.empty(described.shape, dtype.numpy))
    reach = [(size - 1) * stride for size, stride in zip(described.shape, described.strides, strict=True)]
    before, extent = sum(r for r in reach if r < 0), 1 + sum(abs(r) for r in reach)
    memory = (ctypes.c_uint8 * (extent * item)).from_address(described.pointer + before * item)
    memory._taken = taken  # type: ignore[attr-defined]  # every view of the memory keeps `taken` alive
    block: np.ndarray = np.ndarray((extent * item,), np.uint8, memoryview(memory))
    if before == 0 and not taken.read_only and described.pointer % item == 0:
        return Array(CpuStorage(block, extent * item, owner=taken), described.shape, described.strides, dtype)
    strides = tuple(stride * item for stride in described.strides)
    return from_numpy(np.ndarray(described.shape, dtype.numpy, block, -before * item, strides), share=False)


def _adopted(
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DType,
    device: Device,
    owner: object,
    read_only: bool,
) -> Array:
    """Return an array over memory of another library, or over a copy if that memory is read-only."""
    if any(stride < 0 for stride in strides):
        raise DeviceError("CUDA memory with negative strides cannot be shared", next="make it contiguous first")
    extent = 0 if 0 in shape else 1 + sum((n - 1) * st for n, st in zip(shape, strides, strict=True))
    storage = cuda_backend(device).adopt(pointer, extent * dtype.itemsize, owner)
    array = Array(storage, shape, strides, dtype, device)
    return registry["copy"](array) if read_only else array


# --- __cuda_array_interface__ -----------------------------------------------------------------------------------------


def cuda_array_interface(array: Array, requires_grad: bool) -> dict[str, Any]:
    """Return version 3 of the interface. AttributeError: on the CPU, for bfloat16, and if a gradient is required."""
    if array.device == CPU:
        raise AttributeError("a tensor on the CPU has no __cuda_array_interface__")
    if array.dtype is bfloat16:
        raise AttributeError("__cuda_array_interface__ has no bfloat16: use DLPack, or .view of another dtype")
    if requires_grad:
        raise AttributeError("the tensor requires a gradient: use .detach()")
    return {
        "shape": array.shape,
        "typestr": array.dtype.numpy.str,
        "data": (array.data_ptr() if array.size else 0, False),
        "strides": None if array.is_contiguous else tuple(st * array.dtype.itemsize for st in array.strides),
        "stream": cuda_backend(array.device).stream or _LEGACY,
        "version": 3,
    }


def from_cuda_array_interface(source: Any) -> Array:
    """Return an array over the CUDA memory that `source` describes; our stream waits for the producer's.

    Raises DTypeError for a dtype that Genesis lacks, and for masked memory.
    """
    facts = source.__cuda_array_interface__
    if facts.get("mask") is not None:
        raise DTypeError("__cuda_array_interface__ with a mask cannot be a tensor")
    dtype = as_dtype(np.dtype(facts["typestr"]))
    shape, (pointer, read_only) = tuple(facts["shape"]), facts["data"]
    steps = facts.get("strides")
    if steps is not None and any(step % dtype.itemsize for step in steps):
        raise DTypeError(f"strides of {steps} bytes are not multiples of the element size, {dtype.itemsize} bytes")
    strides = contiguous_strides(shape) if steps is None else tuple(step // dtype.itemsize for step in steps)
    device = as_device("cuda")
    stream = facts.get("stream")
    if stream is not None:
        backend = cuda_backend(device)
        backend.driver.follow(backend.stream, 0 if stream == _LEGACY else int(stream))
    return _adopted(pointer if math.prod(shape) else 0, shape, strides, dtype, device, source, read_only)
