"""CUDA devices under torch's names: devices, streams, events, memory, graphs. The module is loaded on first use.

Importing it does not need a GPU. Sizes are in bytes, times of events in milliseconds.
"""

from __future__ import annotations

import importlib
import subprocess
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self

from genesis import random
from genesis.backend import current_cuda
from genesis.backend.cuda import AnyDevice, find_backend, host_reads
from genesis.backend.cuda.dispatch import allow_tf32
from genesis.backend.cuda.driver import Properties, device_count, is_available
from genesis.backend.cuda.faults import check as check_faults
from genesis.cuda import memory, nvtx
from genesis.cuda.graphs import (
    CUDAGraph,
    GraphedBatches,
    capture_sizes,
    graph,
    graph_batches,
    graph_pool_handle,
    make_graphed_callables,
)
from genesis.cuda.memory import *  # noqa: F403
from genesis.cuda.streams import (
    Event,
    ExternalStream,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    get_stream_from_external,
    set_stream,
    stream,
)
from genesis.errors import DeviceError, OutOfMemoryError, UsageError
from genesis.keywords import check_calls

__all__ = [  # noqa: PLE0604
    *memory.__all__, "AcceleratorError", "CUDAGraph", "CudaError", "Event", "ExternalStream", "GraphedBatches",
    "OutOfMemoryError", "Stream", "StreamContext", "allow_tf32", "can_device_access_peer", "capture_sizes",
    "check_error", "check_supported", "clock_rate", "current_device", "current_stream", "default_stream", "device",
    "device_count", "device_of", "get_arch_list", "get_device_capability", "get_device_name", "get_device_properties",
    "get_gencode_flags", "get_rng_state", "get_rng_state_all", "get_stream_from_external", "get_sync_debug_mode",
    "graph", "graph_batches", "graph_pool_handle", "init", "initial_seed", "ipc_collect", "is_available",
    "is_bf16_supported", "is_current_stream_capturing", "is_initialized", "is_tf32_supported", "list_gpu_processes",
    "make_graphed_callables", "manual_seed", "manual_seed_all", "memory_usage", "nvtx", "power_draw", "seed",
    "seed_all", "set_device", "set_rng_state", "set_rng_state_all", "set_stream", "set_sync_debug_mode", "stream",
    "synchronize", "temperature", "utilization",
]  # fmt: skip

MIN_CAPABILITY = (8, 0)  # Ampere, the first with bfloat16

# --- Devices ----------------------------------------------------------------------------------------------------------


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


def device_of(obj: Any) -> Any:
    """`with genesis.cuda.device_of(x):` makes "cuda" refer to the device of x; a CPU tensor changes nothing."""
    return device(obj.device) if obj.is_cuda else nullcontext()


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


def get_gencode_flags() -> str:
    """The flags with which nvcc compiles for the architectures of `get_arch_list`."""
    archs = [arch.removeprefix("sm_") for arch in get_arch_list()]
    return " ".join(f"-gencode compute=compute_{arch},code=sm_{arch}" for arch in archs)


def is_tf32_supported() -> bool:
    """Whether kernels can round float32 to TF32: on every GPU that Genesis supports."""
    return is_bf16_supported()


def can_device_access_peer(device: AnyDevice, peer_device: AnyDevice) -> bool:
    """Whether one device can read another's memory over NVLink. Raises DeviceError if one does not exist."""
    first, second = find_backend(device), find_backend(peer_device)
    return first is not second and first.driver.is_linked([second.device.index])


def utilization(device: AnyDevice = None) -> int:
    """The percentage of the last sampling period during which a kernel ran. Raises DeviceError without `nvidia-smi`."""
    return int(_query("gpu=utilization.gpu", device))


def memory_usage(device: AnyDevice = None) -> int:
    """The percentage of the last sampling period with memory traffic. Raises like `utilization`."""
    return int(_query("gpu=utilization.memory", device))


def temperature(device: AnyDevice = None) -> int:
    """The GPU's temperature in degrees Celsius. Raises like `utilization`."""
    return int(_query("gpu=temperature.gpu", device))


def power_draw(device: AnyDevice = None) -> int:
    """The GPU's power draw in milliwatts. Raises like `utilization`."""
    return round(1000 * float(_query("gpu=power.draw", device)))


def clock_rate(device: AnyDevice = None) -> int:
    """The clock rate of the SMs in MHz. Raises like `utilization`."""
    return int(_query("gpu=clocks.sm", device))


def list_gpu_processes(device: AnyDevice = None) -> str:
    """The processes on the GPU and their memory, as a text of lines. Raises like `utilization`."""
    rows = [row.split(", ") for row in _query("compute-apps=pid,used_memory", device).splitlines()]
    lines = [f"process {pid:>10} uses {used:>12} MB GPU memory" for pid, used in rows]
    return "\n".join([f"GPU:{find_backend(device).device.index}", *(lines or ["no processes are running"])])


def _query(what: str, device: AnyDevice) -> str:
    backend = find_backend(device)
    command = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader,nounits", f"--id={backend.driver.uuid}"]
    try:
        text = subprocess.run(command, capture_output=True, check=True, text=True, timeout=10).stdout.strip()
        if "N/A" in text and "gpu=" in what:
            raise ValueError(text)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise DeviceError(
            f"nvidia-smi gave no {what.partition('=')[2]} of {backend.device}", next="install NVIDIA's driver tools"
        ) from error
    return text


def init() -> None:
    """Do nothing: a device is initialized when it is first used."""


def is_initialized() -> bool:
    """Whether a device can be used; it is initialized when it is first used."""
    return is_available()


def ipc_collect() -> None:
    """Do nothing: no memory is shared with other processes."""


CudaError = AcceleratorError = DeviceError


def check_error(res: int) -> None:
    """Raise DeviceError if `res`, the result of a call of CUDA's runtime, is not 0."""
    if int(res) != 0:
        raise DeviceError(f"CUDA error {int(res)}", next="look the number up under cudaError in CUDA's documentation")


_SYNC_MODES = ("default", "warn", "error")


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Choose what happens when values are read on the host, which waits: "default" (0), "warn" (1) or "error" (2)."""
    if debug_mode not in (*_SYNC_MODES, 0, 1, 2):
        raise UsageError(f"the debug mode {debug_mode!r} is not known", next="use default, warn or error")
    host_reads.mode = _SYNC_MODES.index(debug_mode) if isinstance(debug_mode, str) else debug_mode


def get_sync_debug_mode() -> int:
    """The mode that `set_sync_debug_mode` chose, as a number."""
    return host_reads.mode


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
    backend.refuse_in_capture("the device was synchronized")
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


# torch's names that Genesis does not have, and why.
_ABSENT = {
    "CUDAPluggableAllocator change_current_allocator caching_allocator_enable caching_allocator_disabled": (
        "there is one allocator, which CUDA graphs and memory plans rely on"
    ),
    "cudart": "kernels are launched through CUDA's driver, not through its runtime library",
    "current_blas_handle current_solver_handle": "kernels are in Triton; cuBLAS and cuSOLVER are not loaded",
    "host_memory_stats reset_peak_host_memory_stats reset_accumulated_host_memory_stats": (
        "pinned memory has one counter, pinned_memory_reserved()"
    ),
    "jiterator tunable": "write a kernel with genesis.custom",
}


def __getattr__(name: str) -> Any:
    if name == "amp":  # it uses modules of higher layers
        return importlib.import_module("genesis.cuda.amp")
    if name == "default_generators":
        return (random.default_generator,) * device_count()
    reason = next((f": {reason}" for names, reason in _ABSENT.items() if name in names.split()), "")
    raise AttributeError(f"module 'genesis.cuda' has no attribute {name!r}{reason}")


has_half, has_magma = True, False

check_calls(globals(), __all__)
