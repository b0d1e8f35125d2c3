"""Peak memory of a run's device, for its metrics."""

from __future__ import annotations

from genesis.backend import CPU, Device
from genesis.backend.cpu import pool


def peak_memory(device: Device) -> tuple[int, int]:
    """(allocated, reserved): the most bytes that tensors used, and that were taken from the system or the driver."""
    if device == CPU:
        return pool.max_allocated, pool.max_allocated + pool.cached
    from genesis import cuda

    return cuda.max_memory_allocated(device), cuda.max_memory_reserved(device)
