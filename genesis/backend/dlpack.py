"""DLPack capsules in both forms, plain and versioned: ctypes structs and their lifetime, independent of arrays.

The producer's memory lives until the consumer calls the struct's deleter. If nobody takes a capsule, its memory is
released when the next capsule is made after it was deleted. The structs follow dlpack.h, version 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any, NamedTuple

from genesis.shapes import contiguous_strides

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
VERSION = (1, 0)
_READ_ONLY, _COPIED = 1, 2  # flags of the versioned form
_PLAIN, _VERSIONED = b"dltensor", b"dltensor_versioned"


class Described(NamedTuple):
    """The array that a struct describes."""

    pointer: int
    device: tuple[int, int]  # (DLDeviceType, number)
    kind: tuple[int, int]  # (DLDataTypeCode, bits)
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_python = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _python)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _python))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _python))

# --- Out --------------------------------------------------------------------------------------------------------------

_exported: dict[int, tuple[Any, ...]] = {}  # by the struct's address: struct, shape and strides, owner of the memory


def _end(address: int) -> None:
    _exported.pop(address, None)


_release = _Deleter(_end)


# A capsule may be destroyed while an exception propagates, when Python code must not run, so it has no destructor.
# Instead we keep a reference and check from time to time whether it is the last one.
_untaken: list[tuple[Any, int]] = []  # capsules and the addresses of their structs


def release_dropped() -> None:
    """Release the memory of capsules that were deleted without being taken."""
    for capsule, address in [_untaken.pop() for _ in range(len(_untaken))]:
        if not (_is_valid(capsule, _PLAIN) or _is_valid(capsule, _VERSIONED)):
            continue  # taken: the consumer calls the deleter
        if sys.getrefcount(capsule) > 3:  # in the pair, the loop variable and the argument
            _untaken.append((capsule, address))
        else:
            _exported.pop(address, None)


def capsule(described: Described, owner: Any, *, versioned: bool, copied: bool = False) -> Any:
    """Return a capsule that exports the described memory; the memory lives as long as `owner`."""
    release_dropped()
    ndim = len(described.shape)
    shape, strides = (ctypes.c_int64 * ndim)(*described.shape), (ctypes.c_int64 * ndim)(*described.strides)
    tensor = _Tensor(described.pointer, *described.device, ndim, *described.kind, 1, shape, strides, 0)
    managed: _Managed | _ManagedVersioned
    deleter = ctypes.cast(_release, ctypes.c_void_p)
    if versioned:
        managed = _ManagedVersioned(*VERSION, None, deleter, _COPIED if copied else 0, tensor)
    else:
        managed = _Managed(tensor, None, deleter)
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, strides, owner)
    exported = _new(address, _VERSIONED if versioned else _PLAIN, None)
    _untaken.append((exported, address))
    return exported


# --- In ---------------------------------------------------------------------------------------------------------------


class Taken:
    """A struct taken out of a capsule. The producer's deleter runs when this object is deleted."""

    def __init__(self, address: int, versioned: bool) -> None:
        kind: Any = _ManagedVersioned if versioned else _Managed
        self._struct = kind.from_address(address)
        self._address = address
        tensor = self._struct.tensor
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        self.lanes = int(tensor.lanes)
        # whether writing to the memory is forbidden
        self.read_only = versioned and bool(self._struct.flags & _READ_ONLY)
        self.described = Described(
            (tensor.data or 0) + tensor.byte_offset,
            (tensor.device_type, tensor.device_id),
            (tensor.code, tensor.bits),
            shape,
            tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else contiguous_strides(shape),
        )

    def __del__(self) -> None:
        address, self._address = getattr(self, "_address", 0), 0
        if address and self._struct.deleter:
            with contextlib.suppress(TypeError):  # at interpreter exit
                _Deleter(self._struct.deleter)(address)


def take(capsule: Any) -> Taken:
    """Take the struct out of a capsule, which works once.
    Raises ValueError if it is not a DLPack capsule, was taken before, or has an unsupported version.
    """
    for name in (_VERSIONED, _PLAIN):
        if _is_valid(capsule, name):
            address = _pointer(capsule, name)
            versioned = name is _VERSIONED
            if versioned and _ManagedVersioned.from_address(address).major != VERSION[0]:
                raise ValueError(f"DLPack version {_ManagedVersioned.from_address(address).major}")
            _set_name(capsule, _USED[name])
            return Taken(address, versioned)
    raise ValueError("the object is not a DLPack capsule, or the capsule was already taken")


# Kept alive at module level because a capsule does not copy its name.
_USED = {_PLAIN: b"used_dltensor", _VERSIONED: b"used_dltensor_versioned"}
