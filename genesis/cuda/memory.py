"""Device memory under torch's names: counters, peaks, limits, pools, blocks and leaks. Sizes are in bytes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from genesis.backend.cuda import AnyDevice, find_backend
from genesis.backend.cuda.driver import is_available
from genesis.backend.cuda.memory import ALIGNMENT, Arenas, Block, Pool
from genesis.cuda.graphs import PoolHandle, graph_pool_handle
from genesis.cuda.streams import Stream
from genesis.errors import DTypeError, UsageError
from genesis.keywords import check_calls

__all__ = [
    "LeakReport", "MemPool", "MemoryBlock", "MemoryPool", "caching_allocator_alloc", "caching_allocator_delete",
    "device_memory_used", "empty_cache", "get_allocator_backend", "get_per_process_memory_fraction", "leak_check",
    "max_memory_allocated", "max_memory_cached", "max_memory_reserved", "mem_get_info", "memory_allocated",
    "memory_cached", "memory_pool", "memory_reserved", "memory_snapshot", "memory_stats", "memory_stats_as_nested_dict",
    "memory_summary", "pinned_memory_reserved", "reset_accumulated_memory_stats", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_peak_memory_stats", "set_per_process_memory_fraction", "set_poison",
    "use_mem_pool",
]  # fmt: skip


def memory_allocated(device: AnyDevice = None) -> int:
    """Bytes in use by tensors; 0 without a GPU, like the other counters."""
    return find_backend(device).pool.allocated if is_available() else 0


def max_memory_allocated(device: AnyDevice = None) -> int:
    """The most bytes in use since the last reset."""
    return find_backend(device).pool.max_allocated if is_available() else 0


def memory_reserved(device: AnyDevice = None) -> int:
    """Bytes allocated from the driver, in use or cached."""
    return find_backend(device).pool.reserved if is_available() else 0


def max_memory_reserved(device: AnyDevice = None) -> int:
    """The most bytes allocated from the driver since the last reset."""
    return find_backend(device).pool.max_reserved if is_available() else 0


memory_cached, max_memory_cached = memory_reserved, max_memory_reserved  # torch's older names


def pinned_memory_reserved(device: AnyDevice = None) -> int:
    """Bytes of pinned host memory, in use or cached."""
    return find_backend(device).pinned.reserved if is_available() else 0


def reset_peak_memory_stats(device: AnyDevice = None) -> None:
    """Reset the peaks to the present use."""
    if is_available():
        find_backend(device).pool.reset_peak()


reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def reset_accumulated_memory_stats(device: AnyDevice = None) -> None:
    """Reset the numbers of allocations in `memory_stats`."""
    if is_available():
        pool = find_backend(device).pool
        pool.allocations = pool.driver_allocations = 0


def empty_cache(device: AnyDevice = None) -> None:
    """Return memory that no tensor and no graph uses to the driver; waits for the device."""
    if not is_available():
        return
    backend = find_backend(device)
    backend.refuse_in_capture("cached memory was released")
    backend.pool.empty_cache()


def mem_get_info(device: AnyDevice = None) -> tuple[int, int]:
    """The (free, total) bytes of the device; other processes count as used."""
    return find_backend(device).driver.memory_info()


def device_memory_used(device: AnyDevice = None) -> int:
    """Bytes of the device in use by all processes."""
    free, total = mem_get_info(device)
    return total - free


def set_per_process_memory_fraction(fraction: float, device: AnyDevice = None) -> None:
    """Limit the memory that this process takes from the driver to a part of the device's, from 0 to 1.

    An allocation that exceeds the limit even without cached memory raises OutOfMemoryError.
    """
    if not isinstance(fraction, float):
        raise DTypeError(f"the fraction is a {type(fraction).__name__}", next="pass a float from 0 to 1")
    if not 0 <= fraction <= 1:
        raise UsageError(f"the fraction {fraction} is not between 0 and 1")
    backend = find_backend(device)
    backend.pool.limit = int(fraction * backend.driver.properties.memory)


def get_per_process_memory_fraction(device: AnyDevice = None) -> float:
    """The part of the device's memory that this process may take; 1.0 by default."""
    backend = find_backend(device)
    return min(1.0, backend.pool.limit / backend.driver.properties.memory)


def memory_snapshot(device: AnyDevice = None) -> list[dict[str, Any]]:
    """A row for every block, by address: address, size, state ("allocated" or "free"), and the op that allocated it.

    Memory that several ops share has a descriptive name: "parameter", "gradients", "AdamW exp_avg". Memory of
    `genesis.empty` is named "empty".
    """
    return find_backend(device).pool.snapshot()


class MemoryBlock(NamedTuple):
    """A block of device memory.

    Attributes:
        address: address of its first byte.
        size: number of bytes.
        op: the op that allocated it, or a name such as "parameter" or "AdamW exp_avg"; empty for a free block.
    """

    address: int
    size: int
    op: str


class MemoryPool:
    """The device memory that Genesis has allocated from the driver; its properties read the present state."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def _blocks(self, state: str) -> list[MemoryBlock]:
        rows = self._pool.snapshot()
        return [MemoryBlock(row["address"], row["size"], row["op"]) for row in rows if row["state"] == state]

    @property
    def allocated_blocks(self) -> list[MemoryBlock]:
        """The blocks in use, by address."""
        return self._blocks("allocated")

    @property
    def free_blocks(self) -> list[MemoryBlock]:
        """The cached blocks, by address."""
        return self._blocks("free")

    @property
    def alignment(self) -> int:
        """Every address and size of a block is a multiple of this many bytes."""
        return ALIGNMENT

    @property
    def allocated(self) -> int:
        """Bytes in use."""
        return self._pool.allocated

    @property
    def reserved(self) -> int:
        """Bytes allocated from the driver, the total of all blocks."""
        return self._pool.reserved

    def __repr__(self) -> str:
        used, free = len(self.allocated_blocks), len(self.free_blocks)
        return f"MemoryPool(allocated={self.allocated} in {used} blocks, reserved={self.reserved}, free blocks={free})"


def memory_pool(device: AnyDevice = None) -> MemoryPool:
    """The memory pool of a device, with its free and allocated blocks."""
    return MemoryPool(find_backend(device).pool)


def get_allocator_backend() -> str:
    """Return "native": the pool of this process."""
    return "native"


# Blocks that a program took without a tensor, by address.
_taken: dict[int, Block] = {}


def caching_allocator_alloc(size: int, device: AnyDevice = None, stream: Stream | int | None = None) -> int:
    """Take `size` bytes from the pool for another library, and return their address.

    Args:
        stream: the stream that uses the memory, or its handle; None is the current stream.
    """
    backend = find_backend(device)
    handle = stream.handle if isinstance(stream, Stream) else backend.stream if stream is None else stream
    block = backend.pool.take(size, handle, "caching_allocator_alloc")
    _taken[block.pointer] = block
    return block.pointer


def caching_allocator_delete(mem_ptr: int) -> None:
    """Return memory of `caching_allocator_alloc`. Raises UsageError for another address."""
    block = _taken.pop(mem_ptr, None)
    if block is None:
        raise UsageError(f"{mem_ptr:#x} is not an address of caching_allocator_alloc, or was deleted before")
    block.arena.pool.give(block)


class MemPool:
    """A pool whose memory is separate from all other memory, for the tensors made inside `use_mem_pool`.

    Args:
        allocator, use_on_oom, no_split: accepted with their defaults only.
    """

    def __init__(self, allocator: object = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        if allocator is not None or use_on_oom or no_split:
            raise UsageError("MemPool has no other allocator, use_on_oom or no_split", next="use MemPool()")
        self._id = graph_pool_handle()
        self._arenas: dict[int, Arenas] = {}  # by device

    def __del__(self) -> None:
        for own in getattr(self, "_arenas", {}).values():
            own.is_open = False

    @property
    def id(self) -> PoolHandle:
        """The handle of the pool. Graph captures accept it; their memory is separate from the memory of its tensors."""
        return self._id

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """The blocks of the pool, as `memory_snapshot` lists them. There are no traces."""
        return [row for i, own in self._arenas.items() for row in find_backend(i).pool.snapshot(list(own.values()))]


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: AnyDevice = None) -> Iterator[None]:
    """Take the memory of new tensors from `pool` inside the block, in all threads (torch: in this thread)."""
    memory = find_backend(device).pool
    own = pool._arenas.setdefault(memory.driver.index, memory.new_arenas())
    with memory.taking_from(own):
        yield


def memory_stats(device: AnyDevice = None) -> dict[str, int]:
    """All counters under torch's names: current and peak bytes, and numbers of allocations; empty without a GPU."""
    if not is_available():
        return {}
    pool = find_backend(device).pool
    return {
        "allocated_bytes.all.current": pool.allocated,
        "allocated_bytes.all.peak": pool.max_allocated,
        "reserved_bytes.all.current": pool.reserved,
        "reserved_bytes.all.peak": pool.max_reserved,
        "allocation.all.allocated": pool.allocations,
        "num_device_alloc": pool.driver_allocations,
        "segment.all.current": len(pool.segments),
        "pinned_bytes": pinned_memory_reserved(device),
    }


def memory_stats_as_nested_dict(device: AnyDevice = None) -> dict[str, Any]:
    """`memory_stats` as dicts in dicts, by the words of its names."""
    nested: dict[str, Any] = {}
    for key, value in memory_stats(device).items():
        *words, last = key.split(".")
        inner = nested
        for word in words:
            inner = inner.setdefault(word, {})
        inner[last] = value
    return nested


def memory_summary(device: AnyDevice = None, abbreviated: bool = False) -> str:
    """The counters as a readable table; unless `abbreviated`, the largest owners of memory follow."""
    stats = memory_stats(device)
    lines = [f"{key:32}{value:>20,}" for key, value in stats.items()]
    if not abbreviated and stats:
        owners: dict[str, int] = {}
        for block in memory_pool(device).allocated_blocks:
            owners[block.op] = owners.get(block.op, 0) + block.size
        largest = sorted(owners.items(), key=lambda item: -item[1])[:10]
        lines += ["", *(f"bytes of {owner:23}{size:>20,}" for owner, size in largest)]
    return "\n".join(lines)


def set_poison(on: bool, device: AnyDevice = None) -> bool:
    """Fill new memory with NaN patterns, so that reads of uninitialized memory show; return the previous setting."""
    pool = find_backend(device).pool
    before, pool.poison = pool.poison, on
    return before


class LeakReport(NamedTuple):
    """The memory that repeated calls leaked, in bytes.

    Attributes:
        before: bytes in use before the counted calls.
        after: bytes in use after the counted calls.
        peak: most bytes in use during the counted calls.
        calls: number of counted calls.
    """

    before: int
    after: int
    peak: int
    calls: int

    @property
    def growth(self) -> int:
        """Bytes that the calls left in use; 0 without a leak."""
        return self.after - self.before


def leak_check(
    function: Callable[[], object], calls: int = 100, *, warm_up: int = 2, device: AnyDevice = None
) -> LeakReport:
    """Run `function` `warm_up` times, then `calls` times, and compare the memory in use before and after."""
    for _ in range(warm_up):
        function()
    before = _bytes_after_cleanup(device)
    reset_peak_memory_stats(device)
    for _ in range(calls):
        function()
    return LeakReport(before, _bytes_after_cleanup(device), max_memory_allocated(device), calls)


def _bytes_after_cleanup(device: AnyDevice) -> int:
    """Bytes in use after a garbage collection and after waiting blocks have returned."""
    gc.collect()
    find_backend(device).driver.synchronize()
    pool = find_backend(device).pool
    pool.settle()
    return pool.allocated


check_calls(globals(), __all__)
