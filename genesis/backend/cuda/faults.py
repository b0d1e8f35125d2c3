"""Data-dependent errors, such as a bad index: kernels record them, and the host raises them after it has synchronized.

A kernel that meets a bad index does not access memory with it. It writes one 64-bit word to pinned host memory: the
number of a site (an op and the size of a dimension) and the index. The host reads the word after each synchronization.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from genesis.backend import Device, backend_for
from genesis.dtypes import DType, int64
from genesis.errors import IndexRangeError, ShapeError

INDEX_BITS = 32  # of the word; the bits above contain the site's number


class Site(NamedTuple):
    """An op and a dimension for which kernels check indices."""

    op: str  # the name of the op
    dim: int | None  # the indexed dimension; None if the index is a count of elements
    size: int  # exclusive upper bound of the index
    lowest: int  # inclusive lower bound of the index


_sites: list[Site | None] = [None]  # number 0 means no error
_numbers: dict[Site, int] = {}


def site(op: str, dim: int | None, size: int, lowest: int = 0) -> int:
    """The number under which kernels report a bad index for this op and dimension."""
    key = Site(op, dim, size, lowest)
    if key not in _numbers:
        _numbers[key] = len(_sites)
        _sites.append(key)
    return _numbers[key]


@dataclass(eq=False)
class Word:
    """The error word of a device, with the attributes that a launch needs from an array."""

    storage: Any
    device: Device
    dtype: DType = int64

    def data_ptr(self) -> int:
        """The address of the word, which host and device share."""
        return int(self.storage.pointer)


@functools.cache
def flag(device: Device) -> Word:
    """The error word of a device: one int64 in host memory that its kernels can write."""
    backend: Any = backend_for(device)
    pointer = backend.driver.allocate_pinned(int64.itemsize)
    ctypes.c_int64.from_address(pointer).value = 0
    _words[device] = ctypes.c_int64.from_address(pointer)
    # The memory belongs to no pool, so a plan that is being recorded keeps the address.
    return Word(backend.adopt(pointer, int64.itemsize, None), device)


_words: dict[Device, ctypes.c_int64] = {}


def check(device: Device) -> None:
    """Raise the error that kernels have recorded since the last call: IndexRangeError, or ShapeError if a result has
    another size than the caller specified. The stream must be synchronized.
    """
    word = _words.get(device)
    if word is None or word.value == 0:
        return
    code, word.value = word.value, 0
    bad, index = _sites[code >> INDEX_BITS], ctypes.c_int32(code & 0xFFFFFFFF).value
    assert bad is not None, "a fault without a site"
    if bad.dim is None:
        raise ShapeError(
            f"{bad.op}: the data gives {index} elements, but size is {bad.size}",
            next="take size from the counting op",
        )
    raise IndexRangeError(
        f"{bad.op}: index {index} is out of range for dimension {bad.dim} of size {bad.size}",
        where=f"an earlier kernel on {device}; it read zeros instead and wrote nothing",
        next=f"use {bad.lowest} to {bad.size - 1}" if bad.size else "an empty dimension has no elements to index",
    )
