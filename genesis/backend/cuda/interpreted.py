"""Launches in Triton's interpreter, over host memory: how kernels are tested where there is no GPU."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from genesis.backend.cuda.descriptor import is_descriptor
from genesis.backend.cuda.native import OPTIONS
from genesis.backend.cuda.recording import Step
from genesis.backend.cuda.signature import describe, is_array

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend

__all__ = ["interpreted_step"]

Grid = tuple[int, int, int]


class _Pointer:
    """An address with a dtype, as Triton's interpreter takes it; memory is the host's, so nothing is copied."""

    def __init__(self, words: Any, at: int, dtype: Any) -> None:
        self.words, self.at, self.dtype = words, at, dtype

    def data_ptr(self) -> int:
        return int(self.words[self.at])

    def untyped_storage(self) -> _Pointer:
        return self

    cpu = untyped_storage

    def new_empty(self, *args: Any, **keywords: Any) -> _Pointer:
        return self

    def set_(self, *args: Any) -> None: ...
    def copy_(self, *args: Any) -> None: ...
    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return ()

    stride = size


def interpreted_step(
    backend: CudaBackend, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]
) -> Step:
    """A launch in Triton's interpreter."""
    describe(args)  # what machine code does not take is refused here, too
    count = sum(is_array(a) or is_descriptor(a) for a in args)
    words = (ctypes.c_uint64 * max(count, 1))()
    numbers = iter(range(count))

    def value(a: Any) -> Any:
        if is_descriptor(a):
            return a.interpreted(_Pointer(words, next(numbers), a.array.dtype))
        return _Pointer(words, next(numbers), a.dtype) if is_array(a) else a

    values = [value(a) for a in args]
    constants = {k: v for k, v in keywords.items() if k not in OPTIONS}

    def interpret(whole: Grid) -> None:
        with np.errstate(all="ignore"):  # a GPU does not warn of NaN and overflow either
            kernel[whole](*values, **constants)

    def prepare(step: Step) -> None:
        step.words, step.slots = words, tuple(range(count))
        step.run = lambda stream: backend.driver.launch(interpret, grid, 0, 0, stream, 0)

    return Step(prepare, lambda: True, kernel.__name__, grid)
