"""CUDA devices under torch's names: devices, streams, events, memory, graphs. Loaded at its first use.

Nothing here needs a GPU to be imported. Sizes are bytes, times of events milliseconds.
"""

from __future__ import annotations

from genesis.backend.cuda.dispatch import allow_tf32
from genesis.cuda.devices import (
    check_supported,
    current_device,
    device,
    device_count,
    get_device_capability,
    get_device_name,
    get_device_properties,
    is_available,
    set_device,
    synchronize,
)
from genesis.cuda.graphs import Graph, make_graphed
from genesis.cuda.memory import (
    LeakReport,
    MemoryBlock,
    MemoryPool,
    empty_cache,
    leak_check,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_pool,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    pinned_memory_reserved,
    reset_peak_memory_stats,
    set_poison,
)
from genesis.cuda.streams import Event, Stream, current_stream, default_stream, stream
from genesis.keywords import check_calls

__all__ = [
    "Event",
    "Graph",
    "LeakReport",
    "MemoryBlock",
    "MemoryPool",
    "Stream",
    "allow_tf32",
    "check_supported",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "is_available",
    "leak_check",
    "make_graphed",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_pool",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "pinned_memory_reserved",
    "reset_peak_memory_stats",
    "set_device",
    "set_poison",
    "stream",
    "synchronize",
]

check_calls(globals(), __all__)
