"""Ranges and marks for Nsight Systems and Nsight Compute, through NVIDIA's NVTX library, named as in torch.

Without the library (`pip install nvidia-nvtx-cu12`) they do nothing; `is_available` says whether it was found.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["is_available", "mark", "range", "range_end", "range_pop", "range_push", "range_start"]


@functools.cache
def library() -> Any:
    """The NVTX library, or None if it was not found."""
    names = ("libnvToolsExt.so.1", "libnvToolsExt.so", "libnvtx3interop.so.1", "libnvtx3interop.so")
    folders = ("", *(f"{folder}/nvidia/nvtx/lib/" for folder in sys.path))
    for path in (folder + name for folder in folders for name in names):
        with contextlib.suppress(OSError, AttributeError):  # the file or its function is missing
            nvtx = ctypes.CDLL(path)
            for name in ("nvtxRangePushA", "nvtxRangeStartA", "nvtxMarkA"):
                getattr(nvtx, name).argtypes = [ctypes.c_char_p]
            nvtx.nvtxRangeStartA.restype, nvtx.nvtxRangeEnd.argtypes = ctypes.c_uint64, [ctypes.c_uint64]
            return nvtx
    return None


def is_available() -> bool:
    """Whether the NVTX library was found."""
    return library() is not None


def range_push(msg: str) -> int:
    """Begin a range inside the present one, and return its depth, or -1 without the library."""
    return int(library().nvtxRangePushA(msg.encode())) if is_available() else -1


def range_pop() -> int:
    """End the innermost range, and return its depth, or -1 without the library."""
    return int(library().nvtxRangePop()) if is_available() else -1


def range_start(msg: str) -> int:
    """Begin a range that `range_end` ends, also in another thread; return its number, or 0 without the library."""
    return int(library().nvtxRangeStartA(msg.encode())) if is_available() else 0


def range_end(range_id: int) -> None:
    """End the range of `range_start`."""
    if is_available():
        library().nvtxRangeEnd(range_id)


def mark(msg: str) -> None:
    """Mark a moment."""
    if is_available():
        library().nvtxMarkA(msg.encode())


@contextmanager
def range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """`with range("forward"):` shows the block as a range; `args` and `kwargs` are formatted into `msg`."""
    range_push(msg.format(*args, **kwargs) if args or kwargs else msg)
    try:
        yield
    finally:
        range_pop()
