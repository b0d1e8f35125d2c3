"""A CUDA device that runs nothing: it collects the signatures of the kernels that would be launched.

It is how kernels are compiled ahead of time, for any architecture, on a machine without a GPU; and how the memory of
steps of models that no test machine could hold is counted, on a device whose addresses lead nowhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import genesis.backend.cuda as cuda
from genesis.backend import backend_for
from genesis.backend.cuda import launch, native
from genesis.backend.cuda.descriptor import is_descriptor
from genesis.backend.cuda.host import HostDriver
from genesis.backend.cuda.recording import Step
from genesis.backend.cuda.signature import Signature, is_array
from genesis.kernels import select

__all__ = ["VoidDriver", "collecting"]

VOID = 1 << 50  # addresses from here on are no process's


class VoidDriver(HostDriver):
    """Addresses in order with nothing behind them; what is read from there is 0."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.memory = 1 << 40
        self._sizes: dict[int, int] = {}
        self._end = VOID

    def allocate(self, nbytes: int) -> int:
        """The next addresses."""
        pointer = self._end
        self._end += -(-nbytes // 512) * 512
        self._sizes[pointer] = nbytes
        self._used += nbytes
        return pointer

    def free(self, pointer: int) -> None:
        """Forget a block."""
        self._used -= self._sizes.pop(pointer)

    def allocate_pinned(self, nbytes: int) -> int:
        """Host memory, which is there."""
        return super().allocate(nbytes)

    def free_pinned(self, pointer: int) -> None:
        """Forget a block of it."""
        super().free(pointer)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Zeros to the host, nothing to the device."""
        if target < VOID:
            self._do(stream, lambda: ctypes.memset(target, 0, nbytes))

    def fill(self, target: int, byte: int, nbytes: int, stream: int) -> None:
        """Nothing."""


@contextmanager
def collecting(driver: type[HostDriver] = HostDriver) -> Iterator[dict[Any, tuple[Any, Signature]]]:
    """The kernels and signatures launched inside the block, by something that tells them apart; nothing runs."""
    found: dict[Any, tuple[Any, Signature]] = {}

    def step(backend: Any, kernel: Any, grid: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Step:
        signature = native._signature(kernel, args, keywords)
        key = (kernel.fn.__module__, kernel.fn.__name__, signature.types, repr(signature.constants), signature.options)
        found.setdefault(key, (kernel, signature))
        count = sum(is_array(a) or is_descriptor(a) for a in args)

        def prepare(step: Step) -> None:
            step.words, step.slots, step.run = [0] * count, tuple(range(count)), lambda stream: None

        return Step(prepare, lambda: True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "driver_for", driver)
        patch.setattr(launch, "native_step", step)
        _forget_backends()
        try:
            yield found
        finally:
            _forget_backends()


def _forget_backends() -> None:
    """The next launches are those of a fresh device: what was recorded on another one is not replayed."""
    backend_for.cache_clear()
    cuda.backend_of.cache_clear()
    select._plans.clear()
