"""The device that the op suite runs on: the CPU, or a CUDA device (a GPU, or Triton's interpreter in its place)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from genesis.array import Array, empty
from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import pool
from genesis.dtypes import uint8

__all__ = ["CUDA", "current", "moved", "poisoned", "using"]

CUDA = Device("cuda", 0)
_current: list[Device] = [CPU]


def current() -> Device:
    """Where the checks run now."""
    return _current[-1]


@contextmanager
def using(device: Device) -> Iterator[None]:
    """Run the checks inside the block on `device`."""
    _current.append(device)
    try:
        yield
    finally:
        _current.pop()


def moved(array: Array) -> Array:
    """An array of the CPU on the current device: its whole storage, gaps included, and the same window on it."""
    if current() == CPU:
        return array
    whole = array.storage.block[: array.storage.nbytes]  # type: ignore[attr-defined]
    raw = empty(whole.shape, uint8, current())
    backend_for(current()).from_numpy(np.asarray(whole), raw)
    return Array(raw.storage, array.shape, array.strides, array.dtype, current(), array.offset)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is filled with NaN, so that elements which are never written show."""
    pools = [pool] if current() == CPU else [pool, backend_for(current()).pool]  # type: ignore[attr-defined]
    before = [p.poison for p in pools]
    for p in pools:
        p.poison = True
    try:
        yield
    finally:
        for p, old in zip(pools, before, strict=True):
            p.poison = old
