"""Launches in Triton's interpreter, over host memory: how kernels are tested where there is no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from genesis.backend.cuda.descriptor import is_descriptor
from genesis.backend.cuda.native import OPTIONS
from genesis.backend.cuda.recording import Step
from genesis.backend.cuda.signature import describe, is_array

if TYPE_CHECKING:
    from genesis.array import Array
    from genesis.backend.cuda import CudaBackend

__all__ = ["hosted_step", "interpreted_step"]

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
        step.run = backend.driver.launcher(interpret, grid, 0, 0, 0)

    return Step(prepare, lambda: True, kernel.__name__, grid)


def hosted_step(backend: CudaBackend, name: str, function: Callable[..., None], arrays: Sequence[Array]) -> Step:
    """A launch of plain Python on numpy arrays over the memory of `arrays`: what stands in for machine code here."""
    words = (ctypes.c_uint64 * max(len(arrays), 1))()
    values = [_Pointer(words, i, a.dtype) for i, a in enumerate(arrays)]
    forms = [(a.shape, tuple(s * a.dtype.itemsize for s in a.strides), a.dtype.numpy) for a in arrays]

    def interpret(whole: Grid) -> None:
        with np.errstate(all="ignore"):
            function(*[_over(value.data_ptr(), *form) for value, form in zip(values, forms, strict=True)])

    def prepare(step: Step) -> None:
        step.words, step.slots = words, tuple(range(len(arrays)))
        step.run = backend.driver.launcher(interpret, (1, 1, 1), 0, 0, 0)

    return Step(prepare, lambda: True, name, (1, 1, 1))


def _over(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """numpy's view of memory that somebody else keeps alive."""
    if 0 in shape:
        return np.empty(shape, dtype)
    extent = dtype.itemsize + sum(stride * (size - 1) for size, stride in zip(shape, strides, strict=True))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(address))
    return np.ndarray(shape, dtype, memory, 0, strides)
