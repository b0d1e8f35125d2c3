"""A CUDA device that runs nothing: it collects the signatures of the kernels that would be launched.

It is how kernels are compiled ahead of time, for any architecture, on a machine without a GPU; and how the memory of
steps of models that no test machine could hold is counted, on a device whose addresses lead nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import genesis.backend.cuda as cuda
from genesis.backend.cuda.compile import Signature
from genesis.backend.cuda.launch import KernelLaunch, signature_of
from genesis.backend.cuda.simulated import EmptyDriver, HostDriver, noted_launch
from tests.cuda.fresh import forget_backends

__all__ = ["EmptyDriver", "collecting"]


@contextmanager
def collecting(driver: type[HostDriver] = HostDriver) -> Iterator[dict[Any, tuple[Any, Signature]]]:
    """The kernels and signatures launched inside the block, by something that tells them apart; nothing runs."""
    found: dict[Any, tuple[Any, Signature]] = {}

    def prepare(
        self: Any, backend: Any, kernel: Any, grid: Any, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> KernelLaunch:
        signature = signature_of(kernel, args, keywords)
        key = (kernel.fn.__module__, kernel.fn.__name__, signature.types, repr(signature.constants), signature.options)
        found.setdefault(key, (kernel, signature))
        return noted_launch(kernel.__name__, grid, args, lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "driver_for", driver)
        patch.setattr(driver, "prepare", prepare)
        forget_backends()
        try:
            yield found
        finally:
            forget_backends()
