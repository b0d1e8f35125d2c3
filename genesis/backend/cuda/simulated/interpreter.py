"""Launches in Triton's interpreter, over host memory: how kernels are tested where there is no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genesis.backend import ArrayLike
from genesis.backend.cuda.compile import describe, is_array
from genesis.backend.cuda.driver import Grid
from genesis.backend.cuda.launch import OPTIONS, KernelLaunch
from genesis.backend.cuda.tma import is_descriptor


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


Do = Callable[[int, Callable[[], Any]], None]  # `do(stream, work)`: now, or at each replay of the graph


def interpreted_launch(
    do: Do, kernel: Any, grid: Grid, args: tuple[Any, ...], keywords: dict[str, Any]
) -> KernelLaunch:
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

    return _hosted(do, kernel.__name__, lambda: kernel[grid](*values, **constants), grid, words, count)


def hosted_launch(do: Do, name: str, function: Callable[..., None], arrays: Sequence[ArrayLike]) -> KernelLaunch:
    """A launch of plain Python on numpy arrays over the memory of `arrays`, in the place of machine code."""
    words = (ctypes.c_uint64 * max(len(arrays), 1))()
    values = [_Pointer(words, i, a.dtype) for i, a in enumerate(arrays)]
    forms = [(a.shape, tuple(s * a.dtype.itemsize for s in a.strides), a.dtype.numpy) for a in arrays]

    def call() -> None:
        function(*[_over(value.data_ptr(), *form) for value, form in zip(values, forms, strict=True)])

    return _hosted(do, name, call, (1, 1, 1), words, len(arrays))


def _hosted(do: Do, name: str, call: Callable[[], None], grid: Grid, words: Any, count: int) -> KernelLaunch:
    """A launch whose `call` reads addresses from the first `count` of `words`."""

    def run(stream: int) -> None:
        present = bytes(words)  # a captured launch runs later, with the addresses that it has now

        def work() -> None:
            ctypes.memmove(words, present, len(present))
            with np.errstate(all="ignore"):  # a GPU does not warn of NaN and overflow either
                call()

        do(stream, work)

    def prepare(made: KernelLaunch) -> None:
        made.words, made.slots, made.run = words, tuple(range(count)), run

    return KernelLaunch(prepare, lambda: True, name, grid)


def _over(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """numpy's view of memory that somebody else keeps alive."""
    if 0 in shape:
        return np.empty(shape, dtype)
    extent = dtype.itemsize + sum(stride * (size - 1) for size, stride in zip(shape, strides, strict=True))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(address))
    return np.ndarray(shape, dtype, memory, 0, strides)
