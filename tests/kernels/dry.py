"""A CUDA device that runs nothing: it collects the signatures of the kernels that would be launched.

It is how kernels are compiled ahead of time, for any architecture, on a machine without a GPU; and how the memory of
steps of models that no test machine could hold is counted, on a device whose addresses lead nowhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

import genesis.backend.cuda as cuda
from genesis.backend import backend_for
from genesis.backend.cuda import native
from genesis.backend.cuda.compile import Binary
from genesis.backend.cuda.descriptor import Facts
from genesis.backend.cuda.driver import Function
from genesis.backend.cuda.host import HostDriver
from genesis.backend.cuda.signature import Signature

__all__ = ["DryDriver", "VoidDriver", "collecting"]

PARAMETERS = 96  # more than any kernel has
VOID = 1 << 50  # addresses from here on are no process's


class DryDriver(HostDriver):
    """Host memory, and launches that do nothing."""

    def load(self, image: bytes, name: str, shared: int, parameters: int) -> Function:
        """A kernel that is not there."""
        return Function(0, tuple((8 * i, 8) for i in range(PARAMETERS)))

    def launch(self, *args: Any) -> None:
        """Nothing."""


class VoidDriver(DryDriver):
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


class Encoder:
    """Makes no tensor maps."""

    def map(self, pointer: int) -> bytes:
        """128 bytes of nothing."""
        return bytes(128)


@contextmanager
def collecting(driver: type[DryDriver] = DryDriver) -> Iterator[dict[Any, tuple[Any, Signature]]]:
    """The kernels and signatures launched inside the block, by something that tells them apart."""
    found: dict[Any, tuple[Any, Signature]] = {}

    def compiling(kernel: Any, signature: Signature, capability: tuple[int, int]) -> Future[Binary]:
        key = (kernel.fn.__module__, kernel.fn.__name__, signature.types, repr(signature.constants), signature.options)
        found.setdefault(key, (kernel, signature))
        made: Future[Binary] = Future()
        made.set_result(Binary(b"", kernel.fn.__name__, 0, 4, PARAMETERS, (Facts(0, 0, 2, (1, 1)),) * 8))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "driver_for", driver)
        patch.setattr(native, "compiling", compiling)
        patch.setattr(native, "encoder", lambda *args: Encoder())
        patch.setattr(native, "_put", lambda *args: None)
        patch.setattr(native, "_compiling", {})
        patch.setattr(native, "_loaded", {})
        _forget_backends()
        try:
            yield found
        finally:
            _forget_backends()


def _forget_backends() -> None:
    """The next launches are those of a fresh device: what was recorded on another one is not replayed."""
    backend_for.cache_clear()
    cuda.backend_of.cache_clear()
