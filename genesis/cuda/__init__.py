"""CUDA devices under torch's names: devices, streams, events, memory, graphs. The module is loaded on first use.

Importing it does not need a GPU. Sizes are in bytes, times of events in milliseconds.
"""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from genesis import random
from genesis.backend import current_cuda
from genesis.backend.cuda import AnyDevice, find_backend
from genesis.backend.cuda.dispatch import allow_tf32
from genesis.backend.cuda.driver import Properties, is_interpreted, start
from genesis.backend.cuda.faults import check as check_faults
from genesis.backend.cuda.memory import ALIGNMENT, Pool
from genesis.cuda import nvtx
from genesis.cuda.graphs import (
    CUDAGraph,
    GraphedBatches,
    capture_sizes,
    graph,
    graph_batches,
    graph_pool_handle,
    make_graphed_callables,
)
from genesis.cuda.streams import Event, ExternalStream, Stream, current_stream, default_stream, set_stream, stream
from genesis.errors import DeviceError, OutOfMemoryError
from genesis.keywords import check_calls

__all__ = [
    "CUDAGraph",
    "Event",
    "ExternalStream",
    "GraphedBatches",
    "LeakReport",
    "MemoryBlock",
    "MemoryPool",
    "OutOfMemoryError",
    "Stream",
    "allow_tf32",
    "can_device_access_peer",
    "capture_sizes",
    "check_supported",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_arch_list",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "graph",
    "graph_batches",
    "graph_pool_handle",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "leak_check",
    "make_graphed_callables",
    "manual_seed",
    "manual_seed_all",
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
    "memory_summary",
    "nvtx",
    "pinned_memory_reserved",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_poison",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
    "temperature",
    "utilization",
]

MIN_CAPABILITY = (8, 0)  # Ampere, the first with bfloat16

# --- Devices ----------------------------------------------------------------------------------------------------------


def device_count() -> int:
    """The number of devices that this process can use; 0 without a driver or without the Python packages."""
    try:
        return 1 if is_interpreted() else start()
    except (DeviceError, ImportError):
        return 0


def is_available() -> bool:
    """Whether a device is available: a GPU, or Triton's interpreter instead of one."""
    return device_count() > 0


def current_device() -> int:
    """The index of the device that "cuda" means in this thread."""
    return current_cuda.index


def set_device(device: AnyDevice) -> None:
    """Make "cuda" refer to another device in this thread; `device` does this for a block."""
    current_cuda.index = find_backend(device).device.index


class device:  # noqa: N801  torch's name
    """`with genesis.cuda.device(1):` makes "cuda" refer to that device inside the block, in this thread."""

    def __init__(self, device: AnyDevice) -> None:
        self.index = find_backend(device).device.index
        self._before: list[int] = []

    def __enter__(self) -> Self:
        self._before.append(current_cuda.index)
        current_cuda.index = self.index
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current_cuda.index = self._before.pop()


def get_device_properties(device: AnyDevice = None) -> Properties:
    """The name, compute capability, memory, SMs, shared memory and L2 cache of a device.

    torch's names also work: `total_memory` in bytes, `multi_processor_count`, `major` and `minor`.

    Raises:
        DeviceError: the device does not exist.
    """
    return find_backend(device).driver.properties


def get_device_name(device: AnyDevice = None) -> str:
    """The device's name, such as "NVIDIA H200"."""
    return get_device_properties(device).name


def get_device_capability(device: AnyDevice = None) -> tuple[int, int]:
    """The compute capability, as (major, minor)."""
    return get_device_properties(device).capability


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether kernels compute in bfloat16: on every GPU that Genesis supports."""
    return is_available() and get_device_capability() >= MIN_CAPABILITY


def get_arch_list() -> list[str]:
    """The architectures that kernels are compiled for: the present device's, such as ["sm_90"]."""
    return ["sm_{}{}".format(*get_device_capability())] if is_available() else []


def can_device_access_peer(device: AnyDevice, peer_device: AnyDevice) -> bool:
    """Whether one device can read another's memory over NVLink. Raises DeviceError if one does not exist."""
    first, second = find_backend(device), find_backend(peer_device)
    return first is not second and first.driver.is_linked([second.device.index])


def utilization(device: AnyDevice = None) -> int:
    """The percentage of the last moments in which a kernel ran. Raises DeviceError without `nvidia-smi`."""
    return _query("utilization.gpu", device)


def temperature(device: AnyDevice = None) -> int:
    """The GPU's temperature in degrees Celsius. Raises DeviceError without `nvidia-smi`."""
    return _query("temperature.gpu", device)


def _query(key: str, device: AnyDevice) -> int:
    backend = find_backend(device)
    command = ["nvidia-smi", f"--query-gpu={key}", "--format=csv,noheader,nounits", f"--id={backend.driver.uuid}"]
    try:
        return int(subprocess.run(command, capture_output=True, check=True, text=True, timeout=10).stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise DeviceError(
            f"nvidia-smi gave no {key} of {backend.device}", next="install NVIDIA's driver tools"
        ) from error


def init() -> None:
    """Do nothing: a device is initialized when it is first used."""


def is_initialized() -> bool:
    """Whether a device can be used; it is initialized when it is first used."""
    return is_available()


def is_current_stream_capturing() -> bool:
    """Whether launches are captured into a CUDA graph instead of run."""
    return is_available() and find_backend(None).pool.capturing


# --- Random numbers: one generator serves all devices -----------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the default generator, which all devices share. Does nothing without a GPU, as in torch."""
    if is_available():
        random.manual_seed(seed)


def seed() -> None:
    """Seed the default generator with a random number."""
    if is_available():
        random.default_generator.seed()


manual_seed_all, seed_all = manual_seed, seed


def initial_seed() -> int:
    """The seed of the default generator."""
    return random.default_generator.initial_seed()


def get_rng_state(device: AnyDevice = "cuda") -> Any:
    """The state of the default generator, which all devices share, as a uint8 tensor."""
    return random.default_generator.get_state()


def get_rng_state_all() -> list[Any]:
    """The generator's state, once for each device."""
    return [get_rng_state() for _ in range(device_count())]


def set_rng_state(new_state: Any, device: AnyDevice = "cuda") -> None:
    """Restore a state from `get_rng_state`."""
    random.default_generator.set_state(new_state)


def set_rng_state_all(new_states: list[Any]) -> None:
    """Restore the states from `get_rng_state_all`; the last one counts, because devices share a generator."""
    for each in new_states:
        set_rng_state(each)


def synchronize(device: AnyDevice = None) -> None:
    """Wait until all work of a device is done.
    Raises DeviceError if a kernel failed or a graph is being captured, and IndexRangeError if a kernel got a bad index.
    """
    backend = find_backend(device)
    backend.refuse_in_capture("the device was waited for")
    backend.driver.synchronize()
    check_faults(backend.device)


def check_supported(device: AnyDevice = None) -> str:
    """A short description of the device for users.
    Raises DeviceError if the device does not exist, or is older than the kernels support.
    """
    backend = find_backend(device)
    name, capability, memory, *_ = backend.driver.properties
    if capability < MIN_CAPABILITY:
        raise DeviceError(
            f"{backend.device} is a {name} of compute capability {capability[0]}.{capability[1]};"
            f" Genesis needs {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or above",
            next="use another GPU, or use the device cpu",
        )
    return f"{name}, {memory / 2**30:.0f} GiB"


# --- Memory: counters, peaks, a snapshot, leaks -----------------------------------------------------------------------


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
    return find_backend(device).pinned.reserved


def reset_peak_memory_stats(device: AnyDevice = None) -> None:
    """Reset the peaks to the present use."""
    if is_available():
        find_backend(device).pool.reset_peak()


def empty_cache(device: AnyDevice = None) -> None:
    """Return memory that no tensor and no graph uses to the driver; waits for the device."""
    if not is_available():
        return
    backend = find_backend(device)
    backend.refuse_in_capture("memory was given back")
    backend.pool.empty_cache()


def mem_get_info(device: AnyDevice = None) -> tuple[int, int]:
    """The (free, total) bytes of the device; other processes count as used."""
    return find_backend(device).driver.memory_info()


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
    synchronize(device)
    pool = find_backend(device).pool
    pool.settle()
    return pool.allocated


check_calls(globals(), __all__)
