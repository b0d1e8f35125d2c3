"""Memory of a device: counters, peaks, a snapshot, and looking for leaks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

from genesis.backend.cuda.memory import Pool
from genesis.cuda.devices import AnyDevice, backend, synchronize


def _pool(device: AnyDevice) -> Pool:
    return backend(device).pool


def memory_allocated(device: AnyDevice = None) -> int:
    """Bytes in use by tensors."""
    return _pool(device).allocated


def max_memory_allocated(device: AnyDevice = None) -> int:
    """The most bytes in use since the last reset."""
    return _pool(device).max_allocated


def memory_reserved(device: AnyDevice = None) -> int:
    """Bytes taken from the driver, in use or kept for reuse."""
    return _pool(device).reserved


def max_memory_reserved(device: AnyDevice = None) -> int:
    """The most bytes taken from the driver since the last reset."""
    return _pool(device).max_reserved


memory_cached, max_memory_cached = memory_reserved, max_memory_reserved  # torch's older names


def pinned_memory_reserved(device: AnyDevice = None) -> int:
    """Bytes of pinned host memory, in use or kept for reuse."""
    return backend(device).pinned.reserved


def reset_peak_memory_stats(device: AnyDevice = None) -> None:
    """Let the peaks start from what is in use now."""
    _pool(device).reset_peak()


def empty_cache(device: AnyDevice = None) -> None:
    """Give memory that no tensor and no graph uses back to the driver; waits for the device."""
    found = backend(device)
    found.refuse_in_capture("memory was given back")
    found.pool.empty_cache()


def mem_get_info(device: AnyDevice = None) -> tuple[int, int]:
    """(free, total) bytes of the device, other processes included."""
    return backend(device).driver.memory_info()


def memory_snapshot(device: AnyDevice = None) -> list[dict[str, Any]]:
    """Every block by address: size, state ("allocated" or "free"), and the op whose result is in it. Memory that
    belongs to more than one op is named for what it is: "parameter", "gradients", "AdamW exp_avg"; that of
    `genesis.empty` is "empty".
    """
    return _pool(device).snapshot()


class MemoryBlock(NamedTuple):
    """A run of device memory.

    Attributes:
        address, size: where it starts, and bytes.
        op: who holds it: the op that made what is there, "parameter", "AdamW exp_avg", ...; empty where it is free.
    """

    address: int
    size: int
    op: str


class MemoryPool:
    """The memory of a device that Genesis has taken from the driver, as it is now; see `memory_pool`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def _blocks(self, state: str) -> list[MemoryBlock]:
        rows = self._pool.snapshot()
        return [MemoryBlock(row["address"], row["size"], row["op"]) for row in rows if row["state"] == state]

    @property
    def allocated_blocks(self) -> list[MemoryBlock]:
        """Blocks in use, by address."""
        return self._blocks("allocated")

    @property
    def free_blocks(self) -> list[MemoryBlock]:
        """Blocks that are kept for reuse, by address."""
        return self._blocks("free")

    @property
    def allocated(self) -> int:
        """Bytes in use."""
        return self._pool.allocated

    @property
    def reserved(self) -> int:
        """Bytes taken from the driver: those of all blocks."""
        return self._pool.reserved

    def __repr__(self) -> str:
        used, free = len(self.allocated_blocks), len(self.free_blocks)
        return f"MemoryPool(allocated={self.allocated} in {used} blocks, reserved={self.reserved}, free blocks={free})"


def memory_pool(device: AnyDevice = None) -> MemoryPool:
    """The pool of a device's memory, with its free and its allocated blocks."""
    return MemoryPool(_pool(device))


def memory_stats(device: AnyDevice = None) -> dict[str, int]:
    """All counters by name: bytes now and at their peak, and how often memory was asked for."""
    pool = _pool(device)
    return {
        "allocated_bytes.current": pool.allocated,
        "allocated_bytes.peak": pool.max_allocated,
        "reserved_bytes.current": pool.reserved,
        "reserved_bytes.peak": pool.max_reserved,
        "allocations": pool.allocations,
        "driver_allocations": pool.driver_allocations,
        "segments": len(pool.segments),
        "pinned_bytes": pinned_memory_reserved(device),
    }


def set_poison(on: bool, device: AnyDevice = None) -> bool:
    """Fill fresh memory with NaN patterns, so that reading what was never written shows; whether it did before."""
    pool = _pool(device)
    before, pool.poison = pool.poison, on
    return before


class LeakReport(NamedTuple):
    """What repeated calls leaked, in bytes.

    Attributes:
        before, after: in use before the counted calls, and after them.
        peak: the most in use meanwhile.
        calls: how many were counted.
    """

    before: int
    after: int
    peak: int
    calls: int

    @property
    def growth(self) -> int:
        """Bytes that the calls left in use; 0 where nothing leaks."""
        return self.after - self.before


def leak_check(
    function: Callable[[], object], calls: int = 100, *, warm_up: int = 2, device: AnyDevice = None
) -> LeakReport:
    """Run `function` `warm_up` times, and then `calls` times with the memory in use before and after compared."""
    for _ in range(warm_up):
        function()
    before = _settled(device)
    reset_peak_memory_stats(device)
    for _ in range(calls):
        function()
    return LeakReport(before, _settled(device), max_memory_allocated(device), calls)


def _settled(device: AnyDevice) -> int:
    """Bytes in use after everything unreachable is gone and waiting blocks came back."""
    gc.collect()
    synchronize(device)
    pool = _pool(device)
    pool.settle()
    return pool.allocated
