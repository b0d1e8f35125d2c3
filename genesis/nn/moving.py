"""Moving and casting a module's tensors: what `Module.to` takes, and what becomes of a leaf and its gradient."""

from __future__ import annotations

from typing import Any

from genesis.backend import Device, as_device
from genesis.dtypes import DType, as_dtype
from genesis.errors import DeviceError, DTypeError, UsageError
from genesis.nn.parameter import replace_array
from genesis.tensor import Tensor

__all__ = ["cuda_device", "move", "targets"]


def cuda_device(device: Any = None) -> Device:
    """The CUDA device meant by an index, "cuda:1" or a `Device`; None means the current one.

    Raises:
        DeviceError: for a device of another kind.
    """
    if device is None:
        return as_device("cuda")
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return Device("cuda", device)
    found = as_device(device)
    if found.type != "cuda":
        raise DeviceError(f"cuda() got the device {device!r}", next="use .cpu(), or .to(device)")
    return found


def _as_device(value: Any) -> Device | None:
    """The device meant by a positional argument; None where it is none."""
    if isinstance(value, Device) or (isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda")):
        return as_device(value)
    return cuda_device(value) if isinstance(value, int) and not isinstance(value, bool) else None


def targets(args: tuple[Any, ...], device: Any, dtype: Any) -> tuple[Device | None, DType | None]:
    """Device and float type that `to(device)`, `to(dtype)`, `to(device, dtype)` or `to(tensor)` means.

    Raises:
        UsageError: for a device or a dtype that is given twice.
        DTypeError: for what is neither, and for a dtype that is no float type.
    """
    devices, dtypes = [x for x in (device,) if x is not None], [x for x in (dtype,) if x is not None]
    for value in args:
        if isinstance(value, Tensor):
            devices.append(value.device)
            dtypes.append(value.dtype)
        elif value is not None:
            found = _as_device(value)
            (dtypes if found is None else devices).append(value if found is None else found)
    for name, given in (("device", devices), ("dtype", dtypes)):
        if len(given) > 1:
            raise UsageError(f"to() got more than one {name}: {', '.join(map(str, given))}", next="give it once")
    place = None
    if devices:
        place = devices[0] if isinstance(devices[0], Device) else _as_device(devices[0]) or as_device(devices[0])
    kind = as_dtype(dtypes[0]) if dtypes else None
    if kind is not None and not kind.is_floating_point:
        raise DTypeError(f"a module is cast to a float type, not to {kind.name}")
    return place, kind


def move(tensor: Tensor, device: Device | None, dtype: DType | None, non_blocking: bool = False) -> None:
    """Give a leaf memory of another kind, its gradient too; the tensor stays the same object."""
    kind = dtype if tensor.is_floating_point() else None
    moved = tensor.detach().to(device=device, dtype=kind, non_blocking=non_blocking)
    if moved.array is not tensor.array:
        grad = tensor.grad
        replace_array(tensor, moved.array)
        if grad is not None:
            tensor.grad = grad.detach().to(device=device, dtype=kind, non_blocking=non_blocking)
