"""Devices, per-thread modes, and the contract of a backend: it allocates memory, copies to and from the host, runs ops.

`cpu.py` is the numpy backend. A backend is loaded when its device is first used.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from genesis.dtypes import DType
from genesis.errors import DeviceError
from genesis.shapes import Shape

if TYPE_CHECKING:
    import numpy as np

__all__ = ["CPU", "ArrayLike", "Backend", "Device", "OpLike", "Storage", "as_device", "backend_for"]


class _Current(threading.local):
    """The CUDA device that "cuda" means in this thread; `genesis.cuda.device` sets it."""

    index = 0


current_cuda = _Current()


class Mode(threading.local):
    """Whether ops are recorded for a backward pass; one setting per thread, which `genesis.autograd.modes` switches.

    Code that runs for every op reads these attributes without a call. CUDA implementations read them too: results that
    are not recorded need not match a training step bit for bit, so a matmul of few rows may use another kernel.
    """

    grad = True  # ops record what backward needs
    anomaly = False  # nodes record their lines, and backward checks every gradient for NaN
    check_nan = True  # False: with `anomaly`, only record the lines
    fixed_weights = False  # see `genesis.autograd.modes.fixed_weights`
    exact = False  # see `genesis.autograd.modes.exact`
    tf32 = False  # `allow_tf32` of the process, which sets it on the class; the lazy tier overrides it in its thread


mode = Mode()


def _parse_device(value: object) -> tuple[str | None, int | None]:
    if isinstance(value, Device):
        return value.type, value.index
    kind, colon, index = value.partition(":") if isinstance(value, str) else ("", "", "")
    if kind not in ("cpu", "cuda") or (colon and not (index.isascii() and index.isdigit())):
        return None, None
    return kind, int(index) if index else None


@dataclass(frozen=True, slots=True, init=False)
class Device:
    """A device that holds memory and runs ops: `type` is "cpu" or "cuda".

    `Device("cuda")` is the current CUDA device, `Device("cuda:1")` and `Device("cuda", 1)` the device with index 1.

    Raises:
        DeviceError: the value does not name a device.
    """

    type: str
    index: int

    def __init__(self, type: Device | str, index: int | None = None) -> None:
        kind, number = _parse_device(type)
        if kind is None or (index is not None and number is not None):
            shown = repr(type) if index is None else f"{type!r} with index {index!r}"
            raise DeviceError(f"{shown} is not a device", next='use "cpu", "cuda" or "cuda:<index>"')
        if index is not None and not (index.__class__ is int and index >= 0):
            raise DeviceError(f"{index!r} is not the index of a device", next="use 0, 1, ...")
        number = index if number is None else number
        object.__setattr__(self, "type", kind)
        object.__setattr__(self, "index", 0 if kind == "cpu" else current_cuda.index if number is None else number)

    def __enter__(self) -> Device:
        """Make this the default device inside the block."""
        _default.append(as_device(self))
        return self

    def __exit__(self, *error: object) -> None:
        _default.pop()

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"


CPU = Device("cpu")


def as_device(value: Device | str | None) -> Device:
    """The device meant by "cpu", "cuda", "cuda:1", a `Device`, or None (the default device).
    Raises DeviceError if the value does not name a device.
    """
    if isinstance(value, Device):
        return CPU if value.type == "cpu" else value
    if value is None:
        return _default[-1]
    if value == "cpu":
        return CPU
    device = Device(value)
    return CPU if device.type == "cpu" else device


_default: list[Device] = [CPU]  # the last is the device of factories; `with device:` adds one


def set_default_device(device: Device | str | None) -> None:
    """Set the device that None means. Raises DeviceError if the value does not name a device."""
    _default[-1] = CPU if device is None else as_device(device)


class Storage(Protocol):
    """A run of bytes on a device, shared by every view of it."""

    nbytes: int
    version: int  # counts in-place changes; autograd compares it

    @property
    def pointer(self) -> int: ...

    @property
    def backend(self) -> Backend: ...


class ArrayLike(Protocol):
    """A `genesis.array.Array`, as backends use it: strided elements of a storage."""

    storage: Any
    shape: Shape
    strides: Shape
    dtype: DType
    device: Device
    offset: int
    layout: Any

    @property
    def nbytes(self) -> int: ...
    @property
    def is_contiguous(self) -> bool: ...
    def data_ptr(self) -> int: ...
    def view_np(self) -> np.ndarray: ...


class OpLike(Protocol):
    """A `genesis.op.Op`, as backends use it."""

    name: str
    family: str
    mutates: tuple[int, ...]
    cuda_impl: Callable[..., None] | None

    @property
    def reference(self) -> Callable[..., Any]: ...
    @property
    def infer(self) -> Callable[..., Any]: ...


class Backend(Protocol):
    """The contract of a device. The defaults suit a device that runs all work synchronously."""

    def allocate(self, nbytes: int) -> Storage: ...
    def run(self, op: Any, outputs: tuple[Any, ...], inputs: tuple[Any, ...], attrs: dict[str, Any]) -> None: ...
    def to_numpy(self, array: Any) -> np.ndarray: ...
    def from_numpy(self, values: np.ndarray, array: Any) -> None: ...

    def replay(
        self, op: Any, inputs: tuple[Any, ...], attrs: dict[str, Any], out: Any = None
    ) -> tuple[Any, ...] | None:
        """Replay a remembered call and return its outputs; None if the caller has to `run` it."""
        return None

    @property
    def is_capturing(self) -> bool:
        """Whether work is captured instead of run."""
        return False

    def call_before_replay(self, function: Callable[[], None]) -> bool:
        """Call `function` before each replay of the block that is being captured; return whether there is one."""
        return False

    def on_side_stream(self, nbytes: int) -> AbstractContextManager[None]:
        """Launch on the side stream inside the block. The work reads `nbytes`; use its results after the join."""
        return _NOTHING

    def join_side_stream(self) -> None:
        """Make later work wait for the side stream."""
        return

    def on_comm_stream(self) -> AbstractContextManager[None]:
        """Launch communication between ranks inside the block; it overlaps later work until `join_comm_stream`."""
        return _NOTHING

    def join_comm_stream(self) -> None:
        """Make later work wait for the communication stream."""
        return

    def owned_by(self, owner: str) -> AbstractContextManager[None]:
        """Attribute memory that is allocated inside the block to `owner`."""
        return _NOTHING

    def label(self, storage: Any, owner: str) -> None:
        """Attribute a storage to `owner` from now on."""
        return

    def temporaries_from(self, memory: Any) -> AbstractContextManager[None]:
        """Take the temporaries of ops from `memory` inside the block."""
        return _NOTHING


_NOTHING = nullcontext()


@functools.cache
def backend_for(device: Device) -> Backend:
    """The backend of `device`. Raises DeviceError if this build does not support it."""
    if device.type == "cpu":
        return importlib.import_module("genesis.backend.cpu").backend  # type: ignore[no-any-return]
    return importlib.import_module("genesis.backend.cuda").backend_of(device)  # type: ignore[no-any-return]
