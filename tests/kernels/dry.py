"""A CUDA device that runs nothing: it collects the signatures of the kernels that would be launched.

It is how kernels are compiled ahead of time, for any architecture, on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

import genesis.backend.cuda as cuda
from genesis.backend.cuda import native
from genesis.backend.cuda.compile import Binary
from genesis.backend.cuda.descriptor import Facts
from genesis.backend.cuda.driver import Function
from genesis.backend.cuda.host import HostDriver
from genesis.backend.cuda.signature import Signature

__all__ = ["DryDriver", "collecting"]

PARAMETERS = 96  # more than any kernel has


class DryDriver(HostDriver):
    """Host memory, and launches that do nothing."""

    def load(self, image: bytes, name: str, shared: int, parameters: int) -> Function:
        """A kernel that is not there."""
        return Function(0, tuple((8 * i, 8) for i in range(PARAMETERS)))

    def launch(self, *args: Any) -> None:
        """Nothing."""


class Encoder:
    """Makes no tensor maps."""

    def map(self, pointer: int) -> bytes:
        """128 bytes of nothing."""
        return bytes(128)


@contextmanager
def collecting() -> Iterator[dict[Any, tuple[Any, Signature]]]:
    """The kernels and signatures launched inside the block, by something that tells them apart."""
    found: dict[Any, tuple[Any, Signature]] = {}

    def compiling(kernel: Any, signature: Signature, capability: tuple[int, int]) -> Future[Binary]:
        key = (kernel.fn.__module__, kernel.fn.__name__, signature.types, repr(signature.constants), signature.options)
        found.setdefault(key, (kernel, signature))
        made: Future[Binary] = Future()
        made.set_result(Binary(b"", kernel.fn.__name__, 0, 4, PARAMETERS, (Facts(0, 0, 2, (1, 1)),) * 8))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "driver_for", DryDriver)
        patch.setattr(native, "compiling", compiling)
        patch.setattr(native, "encoder", lambda *args: Encoder())
        patch.setattr(native, "_put", lambda *args: None)
        patch.setattr(native, "_compiling", {})
        patch.setattr(native, "_loaded", {})
        cuda.backend_of.cache_clear()
        try:
            yield found
        finally:
            cuda.backend_of.cache_clear()
