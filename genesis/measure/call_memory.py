"""The most memory that a call takes beyond what was there before it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from genesis.backend import CPU, Device, backend_for
from genesis.backend.cpu import pool

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend


def peak_bytes(call: Callable[[], object], device: Device) -> int:
    """Bytes of outputs and temporaries of a call that ran before; on the CPU numpy's temporaries are among them."""
    return _on_host(call) if device == CPU else _on_device(call, device)


def _on_host(call: Callable[[], object]) -> int:
    # Only fresh memory is seen: nothing may come out of the pool.
    pool.trim()
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()


def _on_device(call: Callable[[], object], device: Device) -> int:
    backend = cast("CudaBackend", backend_for(device))
    backend.driver.synchronize()
    backend.pool.settle()
    backend.pool.reset_peak()
    before = backend.pool.allocated
    call()
    return backend.pool.max_allocated - before
