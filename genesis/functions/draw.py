"""Random tensors of further distributions, made of uniform and normal values, and creation functions of ranges.

Named as in torch; the values are Genesis's own.
"""

from __future__ import annotations

import builtins
import math
from typing import Any

from genesis.autograd.modes import no_grad
from genesis.autograd.record import TensorBase
from genesis.dtypes import INTEGER, as_dtype, default_dtype, float64
from genesis.errors import DTypeError, NumericError, ShapeError, UsageError
from genesis.functions import pointwise as pw
from genesis.functions.create import _wrap as wrap
from genesis.functions.create import arange, as_tensor, empty, kind_and_place, linspace, tensor, to
from genesis.functions.elementwise import add, clamp, copy_, div, pow, sub, to_dtype, where
from genesis.functions.random import rand, randn
from genesis.functions.shape import permute
from genesis.functions.surface import DeviceLike, DTypeLike, Sizes, Tensor, array_of, public, sizes_of
from genesis.random import Generator


def _uniform(x: Any, generator: Generator | None) -> Any:
    """Return values in (0, 1) of x's shape, in float64."""
    a = array_of(x, "draw")
    drawn = rand(*a.shape, dtype=float64, device=a.device, generator=generator)
    return where(pw.eq(drawn, 0), 2.0**-53, drawn)


def _float_only(name: str, x: Any) -> None:
    if not array_of(x, name).dtype.is_floating_point:
        raise DTypeError(f"{name} takes floats, got {x.array.dtype}", next="cast with .to(...)")


@public
def exponential_(x: Tensor, lambd: float = 1, *, generator: Generator | None = None) -> Tensor:
    """Overwrite x with exponential values of rate `lambd`."""
    _float_only("exponential_", x)
    if lambd <= 0:
        raise UsageError(f"exponential_: lambd is {lambd}, expected more than 0")
    return copy_(x, div(pw.neg(pw.log(_uniform(x, generator))), lambd))


@public
def cauchy_(x: Tensor, median: float = 0, sigma: float = 1, *, generator: Generator | None = None) -> Tensor:
    """Overwrite x with Cauchy values."""
    _float_only("cauchy_", x)
    if sigma <= 0:
        raise UsageError(f"cauchy_: sigma is {sigma}, expected more than 0")
    angle = pw.mul(sub(_uniform(x, generator), 0.5), math.pi)
    return copy_(x, add(pw.mul(pw.tan(angle), sigma), median))


@public
def geometric_(x: Tensor, p: float, *, generator: Generator | None = None) -> Tensor:
    """Overwrite x with numbers of trials up to the first success of probability `p`."""
    if not 0 < p < 1:
        raise UsageError(f"geometric_: p is {p}, expected between 0 and 1")
    return copy_(x, pw.ceil(div(pw.log(_uniform(x, generator)), math.log1p(-p))))


@public
def log_normal_(x: Tensor, mean: float = 1, std: float = 2, *, generator: Generator | None = None) -> Tensor:
    """Overwrite x with e to the power of normal values of `mean` and `std`."""
    _float_only("log_normal_", x)
    if std <= 0:
        raise UsageError(f"log_normal_: std is {std}, expected more than 0")
    a = x.array
    drawn = randn(*a.shape, dtype=float64, device=a.device, generator=generator)
    return copy_(x, pw.exp(add(pw.mul(drawn, std), mean)))


@public(method=False)
def poisson(x: Tensor, generator: Generator | None = None) -> Tensor:
    """Return Poisson values with the rates in x. Each step blocks, to read whether another one is needed.

    Values for a rate above 16 are sums of values for parts of at most 16, by Knuth's products of uniform values.
    """
    _float_only("poisson", x)
    with no_grad():
        left = to_dtype(x, float64)
        if bool(pw.lt(left, 0).any()):
            raise NumericError("poisson: a rate is negative")
        total = pw.mul(left, 0)
        while bool(pw.gt(left, 0).any()):
            part = clamp(left, max=16.0)
            limit, product, left = pw.exp(pw.neg(part)), _uniform(x, generator), sub(left, part)
            while bool(pw.gt(product, limit).any()):
                total = add(total, to_dtype(pw.gt(product, limit), float64))
                product = pw.mul(product, _uniform(x, generator))
        return to_dtype(total, x.array.dtype)


# --- Creation ---------------------------------------------------------------------------------------------------------


@public(method=False, out=True, pin_memory=True)
def logspace(
    start: float,
    end: float,
    steps: int,
    base: float = 10.0,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return `base` to the power of `steps` evenly spaced values from start to end."""
    kind = default_dtype() if dtype is None else as_dtype(dtype)
    if kind.category == INTEGER:
        start, end = int(start), int(end)
    exponents = linspace(start, end, steps, dtype=float64, device=device)
    values = to_dtype(pow(float(base), exponents), kind)
    return values.requires_grad_() if requires_grad else values


@public(method=False, out=True, pin_memory=True)
def range(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return start, start + step, … up to and including end, in the default dtype unless `dtype` is given."""
    start, end = (0, start) if end is None else (start, end)
    if not step or (end - start) / step < 0:
        raise ShapeError(f"range cannot go from {start} to {end} in steps of {step}")
    count = math.floor((end - start) / step) + 1
    values = add(pw.mul(arange(count, dtype=float64, device=device), step), start)
    values = to_dtype(values, default_dtype() if dtype is None else dtype)
    return values.requires_grad_() if requires_grad else values


@public(method=False, pin_memory=True)
def scalar_tensor(s: Any, *, dtype: DTypeLike = None, device: DeviceLike = None, requires_grad: bool = False) -> Tensor:
    """Return a number as a tensor without dimensions, in the default dtype unless `dtype` is given."""
    return tensor(s, dtype=default_dtype() if dtype is None else dtype, device=device, requires_grad=requires_grad)


@public(method=False)
def asarray(
    obj: Any,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    copy: bool | None = None,
    requires_grad: bool | None = None,
) -> Tensor:
    """Return data as a tensor: with `copy` always a copy, with False never one, otherwise if needed."""
    found = as_tensor(obj, dtype=dtype, device=device)
    if copy:
        found = to(found, copy=True) if found is obj or not isinstance(obj, (int, float, list, tuple)) else found
    elif copy is False and (isinstance(obj, (int, float, list, tuple)) or (found is not obj and hasattr(obj, "array"))):
        raise UsageError("asarray cannot avoid a copy of these data", next="leave copy out")
    if requires_grad or (isinstance(obj, TensorBase) and obj.requires_grad and requires_grad is not None):
        found = found.detach().requires_grad_(requires_grad)
    return found


@public(method=False, pin_memory=True)
def empty_strided(
    size: Sizes,
    stride: Sizes,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor with undefined contents and the given strides, in elements."""
    shape, strides = sizes_of((size,), "empty_strided"), sizes_of((stride,), "empty_strided")
    if len(shape) != len(strides):
        raise ShapeError(f"empty_strided: {len(shape)} sizes and {len(strides)} strides")
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
    memory = empty(extent, dtype=dtype, device=device)
    return wrap(memory.array.view(shape, strides), requires_grad)


@public(method=False, out=True, pin_memory=True)
def empty_permuted(
    size: Sizes,
    physical_layout: Sizes,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor with undefined contents whose dimensions are stored in the order `physical_layout`."""
    shape, order = sizes_of((size,), "empty_permuted"), sizes_of((physical_layout,), "empty_permuted")
    if sorted(order) != [*builtins.range(len(shape))]:
        raise ShapeError(f"empty_permuted: {order} is not an order of {len(shape)} dimensions")
    memory = empty([shape[d] for d in order], dtype=dtype, device=device)
    inverse = [order.index(d) for d in builtins.range(len(shape))]
    return permute(memory, inverse).detach().requires_grad_(requires_grad)


@public(function=False, pin_memory=True)
def new_empty_strided(
    x: Tensor,
    size: Sizes,
    stride: Sizes,
    *,
    dtype: DTypeLike = None,
    device: DeviceLike = None,
    requires_grad: bool = False,
) -> Tensor:
    """Compute `empty_strided` with x's dtype and device by default."""
    kind, place = kind_and_place(x, "new_empty_strided", dtype, device)
    return empty_strided(size, stride, dtype=kind, device=place, requires_grad=requires_grad)
