"""Which CUDA devices there are, what they can do, and which one "cuda" means."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from genesis.backend import Device, as_device, backend_for, current_cuda
from genesis.backend.cuda import CudaBackend
from genesis.backend.cuda.driver import Properties, is_interpreted, start
from genesis.backend.cuda.faults import check as check_faults
from genesis.errors import DeviceError

MIN_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16

AnyDevice = Device | str | int | None


def backend(which: AnyDevice = None) -> CudaBackend:
    """The backend of a device: a `Device`, "cuda:1", an index, or None for the current one.

    Raises:
        DeviceError: it is no CUDA device, or this machine has not got it.
    """
    place = as_device("cuda" if which is None else f"cuda:{which}" if isinstance(which, int) else which)
    if place.type != "cuda":
        raise DeviceError(f"{place} is no CUDA device", next='use "cuda" or "cuda:<index>"')
    return backend_for(place)  # type: ignore[return-value]


def device_count() -> int:
    """Devices that the driver shows to this process; 0 where driver or packages are missing."""
    try:
        return 1 if is_interpreted() else start()
    except (DeviceError, ImportError):
        return 0


def is_available() -> bool:
    """Whether there is a device: a GPU, or Triton's interpreter in its place."""
    return device_count() > 0


def current_device() -> int:
    """The index of the device that "cuda" means in this thread."""
    return current_cuda.index


def set_device(which: AnyDevice) -> None:
    """Let "cuda" mean another device in this thread; `device` does it for a block."""
    current_cuda.index = backend(which).device.index


class device:  # noqa: N801  torch's name
    """`with genesis.cuda.device(1):` lets "cuda" mean that device inside the block, in this thread."""

    def __init__(self, which: AnyDevice) -> None:
        self.index = backend(which).device.index
        self._before: list[int] = []

    def __enter__(self) -> Self:
        self._before.append(current_cuda.index)
        current_cuda.index = self.index
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current_cuda.index = self._before.pop()


def get_device_properties(which: AnyDevice = None) -> Properties:
    """Name, compute capability, memory, SMs, shared memory and L2 cache of a device; also under torch's
    names: `total_memory` in bytes, `multi_processor_count`, `major` and `minor`.

    Raises:
        DeviceError: there is no such device.
    """
    return backend(which).driver.properties


def get_device_name(which: AnyDevice = None) -> str:
    """The device's name, such as "NVIDIA H200"."""
    return get_device_properties(which).name


def get_device_capability(which: AnyDevice = None) -> tuple[int, int]:
    """(major, minor) compute capability."""
    return get_device_properties(which).capability


def synchronize(which: AnyDevice = None) -> None:
    """Wait until all work of a device is done.

    Raises:
        DeviceError: a kernel failed, or a graph is being captured. IndexRangeError: a kernel met a bad index.
    """
    found = backend(which)
    found.refuse_in_capture("the device was waited for")
    found.driver.synchronize()
    check_faults(found.device)


def check_supported(which: AnyDevice = None) -> str:
    """The device in a few words, for people.

    Raises:
        DeviceError: it is missing, or older than what the kernels are compiled for.
    """
    found = backend(which)
    name, capability, memory, *_ = found.driver.properties
    if capability < MIN_CAPABILITY:
        raise DeviceError(
            f"{found.device} is a {name} of compute capability {capability[0]}.{capability[1]};"
            f" Genesis needs {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or above",
            next="use another GPU, or use the device cpu",
        )
    return f"{name}, {memory / 2**30:.0f} GiB"
