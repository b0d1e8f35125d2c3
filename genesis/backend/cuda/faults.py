"""Errors that only the data shows: found by kernels, raised at the next wait for the device, without one of their own.

A kernel that meets a bad index touches no memory with it and leaves one 64-bit word in pinned host memory: the number
of a site (an op and a dimension's size) and the index. The host looks at the word after each synchronisation.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from genesis.backend import Device, backend_for
from genesis.dtypes import DType, int64
from genesis.errors import IndexRangeError, ShapeError

INDEX_BITS = 32  # of the word; the site's number is above them


class Site(NamedTuple):
    """Where an index can be wrong."""

    op: str  # what found it
    dim: int | None  # the dimension that was indexed; None where the index counts something else
    size: int  # the index must be smaller than that
    lowest: int  # and not smaller than that


_sites: list[Site | None] = [None]  # 0 says that nothing is wrong
_numbers: dict[Site, int] = {}


def site(op: str, dim: int | None, size: int, lowest: int = 0) -> int:
    """The number by which kernels name a place where an index can be wrong."""
    found = Site(op, dim, size, lowest)
    if found not in _numbers:
        _numbers[found] = len(_sites)
        _sites.append(found)
    return _numbers[found]


@dataclass(eq=False)
class Word:
    """The word as kernels take it: what a launch asks of an array (of a layer above)."""

    storage: Any
    device: Device
    dtype: DType = int64

    def data_ptr(self) -> int:
        """Its address, which host and device share."""
        return int(self.storage.pointer)


@functools.cache
def flag(device: Device) -> Word:
    """The word of a device, one int64 in host memory that its kernels can write."""
    backend: Any = backend_for(device)
    pointer = backend.driver.allocate_pinned(int64.itemsize)
    ctypes.c_int64.from_address(pointer).value = 0
    _words[device] = ctypes.c_int64.from_address(pointer)
    # memory of no pool, so that a plan which is recorded now keeps its address
    return Word(backend.adopt(pointer, int64.itemsize, None), device)


_words: dict[Device, ctypes.c_int64] = {}


def check(device: Device) -> None:
    """Raise what kernels have left since the last call; the device's stream has been waited for.

    That is IndexRangeError, or ShapeError where a result's size that was given ahead is not that of the data.
    """
    word = _words.get(device)
    if word is None or word.value == 0:
        return
    found, word.value = word.value, 0
    place, index = _sites[found >> INDEX_BITS], ctypes.c_int32(found & 0xFFFFFFFF).value
    assert place is not None, "a fault without a site"
    if place.dim is None:
        raise ShapeError(
            f"{place.op}: the data gives {index} elements, size is {place.size}", next="take it from the counting op"
        )
    raise IndexRangeError(
        f"{place.op}: index {index} is out of range for dimension {place.dim} of size {place.size}",
        where=f"a kernel that ran on {device} before this wait; it read zeros there and wrote nothing",
        next=f"use {place.lowest} to {place.size - 1}" if place.size else "an empty dimension has no elements to index",
    )
