"""Creating tensors: from Python and numpy data, filled, as ranges, like other tensors; and casts and device copies.

All functions take `dtype` (a DType or its name), `device` (a Device or "cpu", "cuda", "cuda:1") and `requires_grad`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis import array as arrays
from genesis.array import Array
from genesis.autograd.function import Function
from genesis.autograd.record import TensorBase
from genesis.backend import Device, as_device
from genesis.dtypes import INTEGER, ComplexType, DType, as_dtype, bfloat16, complex64, default_dtype, int64, result_type
from genesis.errors import DeviceError, DTypeError, ShapeError
from genesis.functions.elementwise import clone, to_dtype
from genesis.functions.exchange import from_cuda_array_interface
from genesis.functions.surface import DeviceLike, DTypeLike, Sizes, Tensor, array_of, fitting, number, public, sizes_of
from genesis.functions.transfer import is_pinned, moved, pinned_empty
from genesis.ops import elementwise
from genesis.shapes import Shape

# --- From data --------------------------------------------------------------------------------------------------------


def _wrap(array: Array, requires_grad: bool = False) -> Any:
    wrapped = TensorBase.wrap(array)
    return wrapped.requires_grad_() if requires_grad else wrapped


def _values(data: Any) -> tuple[np.ndarray, DType]:
    """Return `data` as numpy, and the dtype that torch gives it. Raises as `tensor` does."""
    if isinstance(data, TensorBase):
        return data.array.numpy(), data.array.dtype
    try:
        values = np.asarray(data)
    except ValueError as error:
        raise ShapeError("nested lists must have equal lengths at each level") from error
    leaf = data
    while isinstance(leaf, (list, tuple)) and leaf:
        leaf = leaf[0]
    if values.dtype.kind in "OUSVcMm" and values.dtype != bfloat16.numpy:
        raise DTypeError(
            f"a tensor cannot be made from {type(leaf).__name__} values",
            next="pass numbers, bools, numpy arrays or nested lists of them",
        )
    if values.dtype.kind == "f" and not isinstance(leaf, (np.ndarray, np.generic, TensorBase)):
        return values, default_dtype()
    return values, as_dtype(values.dtype)


@public(method=False, pin_memory=True)
def tensor(data: Any, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False) -> Tensor:
    """Return a tensor with a copy of `data`: a number, nested lists of numbers, or a numpy array.

    Without `dtype`, Python floats become the default dtype, ints int64 and bools bool; numpy arrays keep their dtype.

    Raises:
        ShapeError: for ragged lists.
        DTypeError: for data that are not numbers.
    """
    values, own_dtype = _values(data)
    # Arrays wrap around in a cast; Python numbers must fit.
    if dtype is not None and values.size and not isinstance(data, (np.ndarray, TensorBase)):
        for extreme in (values.min(), values.max()):
            fitting(extreme.item(), as_dtype(dtype), "tensor")
    place = as_device(device)
    with np.errstate(all="ignore"):  # a cast may overflow to inf, as in torch
        array = arrays.from_host(values, own_dtype if dtype is None else as_dtype(dtype), place)
    return _wrap(arrays.label(array, "tensor"), requires_grad)


@public(method=False)
def as_tensor(data: Any, *, dtype: DTypeLike = None, device: DeviceLike = None) -> Tensor:
    """Return `data` as a tensor, without a copy if possible.

    Tensors, numpy arrays and objects with `__cuda_array_interface__` share memory if dtype and device match.
    """
    if isinstance(data, TensorBase):
        return to(data, dtype=dtype, device=device)
    if hasattr(data, "__cuda_array_interface__"):
        return to(_wrap(from_cuda_array_interface(data)), dtype=dtype, device=device)
    if isinstance(data, np.ndarray) and as_device(device).type == "cpu":
        return to(from_numpy(data), dtype=dtype)
    return tensor(data, dtype=dtype, device=device)


@public(method=False, keywords={"ndarray": "values"})
def from_numpy(values: np.ndarray) -> Tensor:
    """Return a tensor over numpy's memory; read-only arrays are copied.

    Raises:
        DTypeError: if `values` is not a numpy array, or has a dtype that Genesis lacks.
        ShapeError: for negative strides.
    """
    if not isinstance(values, np.ndarray):
        raise DTypeError(f"from_numpy takes a numpy array, got {type(values).__name__}", next="use genesis.tensor()")
    if any(s < 0 for s in values.strides):
        raise ShapeError(f"from_numpy: the strides {values.strides} are negative", next="pass values.copy()")
    return _wrap(arrays.from_numpy(values))


@public(method=False)
def frombuffer(
    buffer: bytes | bytearray | memoryview,
    *,
    dtype: DTypeLike,
    count: int = -1,
    offset: int = 0,
    requires_grad: bool = False,
) -> Tensor:
    """Return a vector over the memory of a buffer, such as bytes; read-only memory is copied."""
    if count == 0:
        raise ShapeError("frombuffer: count is 0", next="pass a positive count, or leave it out")
    try:
        values = np.frombuffer(buffer, as_dtype(dtype).numpy, count, offset)
    except ValueError as error:
        raise ShapeError(f"frombuffer: {error}") from None
    return from_numpy(values).requires_grad_(requires_grad)


# --- Filled -----------------------------------------------------------------------------------------------------------


def _filled(shape: Shape, value: Any, dtype: Any, device: Any, requires_grad: bool) -> Any:
    if any(s < 0 for s in shape):
        raise ShapeError(f"shape {shape} has a negative size")
    chosen = default_dtype() if dtype is None else as_dtype(dtype)
    fitting(value, chosen, "full")
    array = elementwise.fill(value=value, shape=shape, dtype=chosen, device=as_device(device))
    return _wrap(array, requires_grad)


@public(method=False, out=True, pin_memory=True)
def zeros(*size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False) -> Tensor:
    """Return a tensor of zeros, of the default dtype unless `dtype` is given."""
    return _filled(sizes_of(size, "zeros"), 0, dtype, device, requires_grad)


@public(method=False, out=True, pin_memory=True)
def ones(*size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False) -> Tensor:
    """Return a tensor of ones, of the default dtype unless `dtype` is given."""
    return _filled(sizes_of(size, "ones"), 1, dtype, device, requires_grad)


@public(method=False, out=True, pin_memory=True)
def full(
    size: Sizes, fill_value: float, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
) -> Tensor:
    """Return a tensor filled with `fill_value`, whose type determines the default dtype: float32, int64 or bool."""
    shape = sizes_of((size,), "full")
    value = number(fill_value, "full", "fill_value")
    return _filled(shape, value, result_type((value,)) if dtype is None else dtype, device, requires_grad)


@public(method=False, out=True, pin_memory=True, memory_format=True)
def empty(*size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False) -> Tensor:
    """Return a tensor with undefined contents, of the default dtype unless `dtype` is given."""
    shape = sizes_of(size, "empty")
    if any(s < 0 for s in shape):
        raise ShapeError(f"shape {shape} has a negative size")
    chosen = default_dtype() if dtype is None else as_dtype(dtype)
    return _wrap(arrays.empty(shape, chosen, as_device(device)), requires_grad)


@public(method=False, out=True, pin_memory=True)
def eye(
    n: int, m: int | None = None, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
) -> Tensor:
    """Return an `[n, m]` matrix (square unless m is given) with ones on the diagonal."""
    a = zeros(n, n if m is None else m, dtype=dtype, device=device).array
    diagonal = a.view((min(a.shape),), (a.strides[0] + 1,))
    if diagonal.size:
        elementwise.fill(out=diagonal, value=1, shape=diagonal.shape, dtype=a.dtype)
    return _wrap(a, requires_grad)


@public(method=False, out=True, pin_memory=True)
def arange(
    *bounds: Any,
    start: Any = None,
    end: Any = None,
    step: Any = None,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return start, start + step, … up to but excluding end, for arange([start,] end[, step]).

    The dtype is int64 for integers and the default dtype if any bound is a float, unless `dtype` is given.

    Raises:
        ShapeError: for a step of 0 or in the wrong direction, and for infinite or NaN bounds.
    """
    start, end, step = _bounds(bounds, start, end, step)
    if not step or not math.isfinite(start + end + step) or (end - start) / step < 0:
        raise ShapeError(f"arange cannot go from {start} to {end} in steps of {step}")
    is_integer = all(isinstance(v, int) for v in (start, end, step))
    count = -(-(end - start) // step) if is_integer else math.ceil((end - start) / step)
    chosen = as_dtype(dtype) if dtype is not None else int64 if is_integer else default_dtype()
    if chosen.category == INTEGER:
        start, step = int(start), int(step)
    array = elementwise.arange(start=start, step=step, count=count, dtype=chosen, device=as_device(device))
    return _wrap(array, requires_grad)


def _bounds(bounds: tuple[Any, ...], start: Any, end: Any, step: Any) -> tuple[Any, Any, Any]:
    """Return (start, end, step) as Python numbers, from arange's positional and keyword arguments."""
    names = ("start", "end", "step") if len(bounds) > 1 or end is not None else ("end",)
    values, placed = {"start": start, "end": end, "step": step}, dict(zip(names, bounds, strict=False))
    wrong = len(bounds) > 3 or any(values[name] is not None for name in placed)
    values |= placed
    if wrong or values["end"] is None:
        raise ShapeError(
            f"arange takes end, (start, end) or (start, end, step), got {bounds} with start={start}, end={end},"
            f" step={step}"
        )
    values = {"start": 0, "step": 1} | {name: value for name, value in values.items() if value is not None}
    try:
        start, end, step = (number(values[name], "arange", name) for name in ("start", "end", "step"))
    except DTypeError as error:
        raise DTypeError(f"arange takes numbers: {error.what}") from None
    return start, end, step


@public(method=False, out=True, pin_memory=True)
def linspace(
    start: float,
    end: float,
    steps: int,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return `steps` evenly spaced values from start to end, both included."""
    chosen = default_dtype() if dtype is None else as_dtype(dtype)
    if chosen.category == INTEGER:
        for value in (start, end):
            fitting(value, chosen, "linspace")
        start, end = (int(np.int64(value).astype(chosen.numpy)) for value in (start, end))
    array = elementwise.linspace(start=start, end=end, count=steps, dtype=chosen, device=as_device(device))
    return _wrap(array, requires_grad)


# --- Like another tensor ----------------------------------------------------------------------------------------------


def kind_and_place(x: Any, name: str, dtype: Any, device: Any) -> tuple[DType, Device]:
    """Return `dtype` and `device`, by default x's own."""
    a = array_of(x, name)
    return a.dtype if dtype is None else as_dtype(dtype), a.device if device is None else as_device(device)


@public(method=False, pin_memory=True)
def full_like(
    x: Tensor, fill_value: float, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
) -> Tensor:
    """Return a tensor filled with `fill_value`, with x's shape, dtype and device by default."""
    value, (kind, place) = number(fill_value, "full_like", "fill_value"), kind_and_place(x, "full_like", dtype, device)
    fitting(value, kind, "full_like")
    array = arrays.preserved(x.array, kind, place)
    elementwise.fill(out=array, value=value, shape=array.shape, dtype=kind)
    return _wrap(array, requires_grad)


@public(method=False, pin_memory=True)
def zeros_like(x: Tensor, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False) -> Tensor:
    """Return zeros with x's shape, dtype and device by default."""
    return full_like(x, 0, dtype=dtype, device=device, requires_grad=requires_grad)


@public(method=False, pin_memory=True)
def ones_like(x: Tensor, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False) -> Tensor:
    """Return ones with x's shape, dtype and device by default."""
    return full_like(x, 1, dtype=dtype, device=device, requires_grad=requires_grad)


@public(method=False, pin_memory=True)
def empty_like(x: Tensor, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False) -> Tensor:
    """Return a tensor with undefined contents, with x's shape, dtype and device by default."""
    kind, place = kind_and_place(x, "empty_like", dtype, device)
    return _wrap(arrays.preserved(x.array, kind, place), requires_grad)


def _new(make: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return the method that calls `make` with a tensor's dtype and device by default."""

    def method(
        x: Tensor, *size: Sizes, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
    ) -> Tensor:
        kind, place = kind_and_place(x, method.__name__, dtype, device)
        return make(*size, dtype=kind, device=place, requires_grad=requires_grad)

    method.__name__ = method.__qualname__ = f"new_{make.__name__}"
    method.__doc__ = f"Return a tensor of {what} in the given shape, with x's dtype and device by default."
    return public(function=False, pin_memory=True)(method)


new_zeros, new_ones, new_empty = _new(zeros, "zeros"), _new(ones, "ones"), _new(empty, "undefined contents")


@public(function=False, pin_memory=True)
def new_full(
    x: Tensor,
    size: Sizes,
    fill_value: float,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor of shape `size` filled with `fill_value`, with x's dtype and device by default."""
    kind, place = kind_and_place(x, "new_full", dtype, device)
    return full(size, fill_value, dtype=kind, device=place, requires_grad=requires_grad)


@public(function=False, pin_memory=True)
def new_tensor(
    x: Tensor, data: Any, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False
) -> Tensor:
    """Return a tensor with a copy of `data`, with x's dtype and device by default."""
    kind, place = kind_and_place(x, "new_tensor", dtype, device)
    return tensor(data, dtype=kind, device=place, requires_grad=requires_grad)


# --- Type and device --------------------------------------------------------------------------------------------------


class _Moved(Function):
    """A copy on another device; its gradient is copied back to the source's device."""

    @staticmethod
    def forward(ctx: Any, x: Any, device: Device, non_blocking: bool) -> Any:
        ctx.device = x.array.device
        return TensorBase.wrap(moved(x.array, device, non_blocking))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return TensorBase.wrap(moved(grad.array, ctx.device)), None, None


def to(
    x: Any, *args: Any, dtype: Any = None, device: Any = None, copy: bool = False, non_blocking: bool = False
) -> Any:
    """Return x with another dtype or on another device: to(dtype), to(device), to(device, dtype), to(other).

    Args:
        copy: return a copy even if nothing changes; otherwise x itself is returned then.
        non_blocking: do not block on a copy from pinned memory (`pin_memory`) to a device. The source must not be
            changed before the copy is done.

    Raises:
        DeviceError: for a device that this machine lacks.
        DTypeError: for an argument that is neither a dtype nor a device.
    """
    a = array_of(x, "to")
    booleans: tuple[bool, ...] = ()
    for value in args:
        if isinstance(value, TensorBase):
            dtype, device = value.array.dtype, value.array.device
        elif isinstance(value, Device) or (isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda")):
            device = value
        elif type(value) is bool:
            booleans = (*booleans, value)
        elif value is not None:
            dtype = value
    if booleans:
        non_blocking, copy = (*booleans, *(non_blocking, copy)[len(booleans) :])
    if dtype.__class__ is ComplexType:
        moved_x = to(x, device=device, copy=copy, non_blocking=non_blocking)
        return moved_x.cfloat() if dtype is complex64 else moved_x.cdouble()
    place = a.device if device is None else as_device(device)
    result = x
    # Narrow before the transfer and widen after it, so that fewer bytes are copied.
    if dtype is not None and as_dtype(dtype).itemsize <= a.dtype.itemsize:
        result = to_dtype(result, as_dtype(dtype))
    if place != a.device:
        result = _Moved.apply(result, place, non_blocking)
    if dtype is not None:
        result = to_dtype(result, as_dtype(dtype))
    return clone(x) if copy and result is x else result


@public(function=False)
def pin_memory(x: Tensor, device: DeviceLike = None) -> Tensor:
    """Return a copy in pinned host memory, or x itself if it is pinned. See `to(non_blocking=True)`.

    Raises:
        DeviceError: if x is not on the CPU, or if the device does not exist.
    """
    a = array_of(x, "pin_memory")
    if a.device.type != "cpu":
        raise DeviceError(f"pin_memory needs a tensor on the CPU, got one on {a.device}", next="call .cpu() first")
    if is_pinned(a):
        return x
    pinned = pinned_empty(a.shape, a.dtype, as_device("cuda" if device is None else device))
    elementwise.copy(a, out=pinned)
    return _wrap(pinned)
