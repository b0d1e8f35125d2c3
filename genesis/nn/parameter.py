"""Parameter (a tensor that a module registers), and functions that allocate, move and cast the memory of parameters.

Parameters of neighbouring layers share a contiguous run of memory. Linear layers of a block (such as queries, keys and
values) are then one GEMM operand, and so are their biases. An optimizer arranges this for the parameters it trains
(`genesis.optim.flat`), and `take_memory` for a whole model, including frozen parts. A run is not larger than a block,
so little memory stays unused when some of its parameters move to an optimizer's buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from genesis.array import Array, empty, label
from genesis.backend import Device, as_device
from genesis.dtypes import DType, as_dtype, default_dtype
from genesis.errors import DeviceError, DTypeError, UsageError
from genesis.op import registry
from genesis.shapes import Shape, contiguous_strides, numel
from genesis.tensor import Tensor

PLACE = 64  # alignment in bytes of a tensor in a run; most weights have multiples of it and leave no gaps


class Parameter(Tensor):
    """A leaf tensor that belongs to a module. It requires a gradient by default and shares the memory of `data`."""

    __slots__ = ()

    def __init__(self, data: Tensor | None = None, requires_grad: bool = True) -> None:
        if data is None:
            data = Tensor(empty((0,), default_dtype(), as_device(None)))
        if not isinstance(data, Tensor):
            raise DTypeError(
                f"a Parameter takes a tensor, not {type(data).__name__}", next="call genesis.tensor() on it"
            )
        super().__init__(label(data.array, "parameter"), requires_grad=requires_grad)

    def __repr__(self) -> str:
        return f"Parameter containing:\n{super().__repr__()}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        copied = Parameter(Tensor(registry["copy"](self.array)), self._requires_grad)
        memo[id(self)] = copied
        return copied


class Buffer(Tensor):
    """A tensor that a module registers as a buffer when it is assigned; see `Module.register_buffer`."""

    __slots__ = ("persistent",)

    def __init__(self, data: Tensor | None = None, *, persistent: bool = True) -> None:
        data = Parameter(requires_grad=False) if data is None else data
        super().__init__(data.array, requires_grad=data.requires_grad)
        self.persistent = persistent


def replace_array(tensor: Tensor, array: Array) -> None:
    """Replace the memory of a leaf, for example by memory on another device. References to the tensor stay valid."""
    tensor.array = label(array, "parameter") if isinstance(tensor, Parameter) else array
    tensor._accumulate = None  # its node holds the old dtype
    tensor._gradient_buffer = None


def cuda_device(device: Any = None) -> Device:
    """Return the CUDA device for an index, "cuda:1", a `Device`, or None (the current one). Raises DeviceError."""
    if device is None:
        return as_device("cuda")
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return Device("cuda", device)
    resolved = as_device(device)
    if resolved.type != "cuda":
        raise DeviceError(f"cuda() got the device {device!r}", next="use .cpu() or .to(device)")
    return resolved


def _as_device(value: Any) -> Device | None:
    """Return the device that a positional argument names, or None if it is not a device."""
    if isinstance(value, Device) or (isinstance(value, str) and value.split(":")[0] in ("cpu", "cuda")):
        return as_device(value)
    return cuda_device(value) if isinstance(value, int) and not isinstance(value, bool) else None


def targets(args: tuple[Any, ...], device: Any, dtype: Any) -> tuple[Device | None, DType | None]:
    """Return the device and float type in the arguments of `Module.to`, which lists the errors."""
    devices, dtypes = [x for x in (device,) if x is not None], [x for x in (dtype,) if x is not None]
    for value in args:
        if isinstance(value, Tensor):
            devices.append(value.device)
            dtypes.append(value.dtype)
        elif value is not None:
            as_a_device = _as_device(value)
            (dtypes if as_a_device is None else devices).append(value if as_a_device is None else as_a_device)
    for name, values in (("device", devices), ("dtype", dtypes)):
        if len(values) > 1:
            raise UsageError(f"to() got more than one {name}: {', '.join(map(str, values))}", next="pass one")
    place = None
    if devices:
        place = devices[0] if isinstance(devices[0], Device) else _as_device(devices[0]) or as_device(devices[0])
    kind = as_dtype(dtypes[0]) if dtypes else None
    if kind is not None and not kind.is_floating_point:
        raise DTypeError(f"a module can only be cast to a float type, not to {kind.name}")
    return place, kind


def run_of(shapes: Sequence[Shape], dtype: DType, device: Device) -> list[Array]:
    """Allocate one uninitialized run of memory, and return consecutive arrays of these shapes in it."""
    place, starts, end = max(PLACE // dtype.itemsize, 1), [], 0
    for shape in shapes:
        starts.append(end)
        end += -(-numel(shape) // place) * place
    run = empty((end + place,), dtype, device)
    first = run.offset + -run.data_ptr() % PLACE // dtype.itemsize
    return [
        run.view(shape, contiguous_strides(shape), first + start) for shape, start in zip(shapes, starts, strict=True)
    ]


def move(tensors: Iterable[Tensor], device: Device | None, dtype: DType | None, non_blocking: bool = False) -> None:
    """Move leaves and their gradients to another device or dtype, in place. Runs of parameters stay contiguous."""
    runs: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_complex():
            move((tensor.pairs,), device, None, non_blocking)  # type: ignore[attr-defined]
        else:
            runs.setdefault(id(tensor.array.storage), []).append(tensor)
    for members in runs.values():
        kind = dtype if members[0].is_floating_point() else None
        if _is_run(members):
            _move_run(members, device, kind, non_blocking)
            continue
        for tensor in members:
            moved = tensor.detach().to(device=device, dtype=kind, non_blocking=non_blocking)
            if moved.array is not tensor.array:
                _replace(tensor, moved.array, device, kind, non_blocking)


def _is_run(members: Sequence[Tensor]) -> bool:
    """Whether several tensors of one dtype and storage do not overlap and have only alignment gaps between them."""
    if len(members) < 2 or any(m.dtype is not members[0].dtype or not m.array.is_contiguous for m in members):
        return False
    ends = sorted((m.array.offset, m.array.offset + m.array.size) for m in members)
    place = PLACE // members[0].dtype.itemsize
    return all(end <= start < end + place for (_, end), (start, _) in pairwise(ends))


def _move_run(members: Sequence[Tensor], device: Device | None, dtype: DType | None, non_blocking: bool) -> None:
    old = members[0]
    place, kind = old.device if device is None else device, old.dtype if dtype is None else dtype
    if place == old.device and kind is old.dtype:
        return
    ordered = sorted(members, key=lambda m: m.array.offset)
    for tensor, array in zip(ordered, run_of([m.shape for m in ordered], kind, place), strict=True):
        Tensor(array).copy_(tensor.detach(), non_blocking=non_blocking)
        _replace(tensor, array, device, dtype, non_blocking)


def _replace(tensor: Tensor, array: Array, device: Device | None, dtype: DType | None, non_blocking: bool) -> None:
    grad = tensor.grad
    replace_array(tensor, array)
    if grad is not None:
        tensor.grad = grad.detach().to(device=device, dtype=dtype, non_blocking=non_blocking)


def take_memory(named: Iterable[tuple[str, Parameter]], device: Any, dtype: Any) -> None:
    """Allocate uninitialized memory for named parameters, with one run for the parameters of each block of layers.

    A run holds the matrices first and then the vectors, each in their order.
    """
    blocks: dict[str, list[Parameter]] = {}
    for name, parameter in named:
        blocks.setdefault(".".join(name.split(".")[:-2]), []).append(parameter)
    for members in blocks.values():
        ordered = sorted(members, key=lambda p: p.ndim < 2)
        arrays = run_of([p.shape for p in ordered], as_dtype(dtype), as_device(device))
        for parameter, array in zip(ordered, arrays, strict=True):
            replace_array(parameter, array)
