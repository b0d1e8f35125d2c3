"""Initialization of parameters, in place, from seeded generators: the same seed gives the same weights everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from genesis.autograd import no_grad
from genesis.errors import ShapeError, UsageError
from genesis.functions import elementwise as ew
from genesis.functions import pointwise as pw
from genesis.functions.create import empty
from genesis.keywords import check_calls
from genesis.random import Generator
from genesis.tensor import Tensor

__all__ = [
    "calculate_gain",
    "constant_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "shapes_only",
    "skip_init",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]


_skipping: ContextVar[bool] = ContextVar("skipping", default=False)
_shapes_only: ContextVar[bool] = ContextVar("shapes_only", default=False)
_place: ContextVar[tuple[Any, Any]] = ContextVar("place", default=(None, None))


@contextmanager
def skip_init(device: Any = None, dtype: Any = None) -> Iterator[None]:
    """Layers made inside the block keep undefined weights, which are about to be loaded.

    `device` and `dtype` are of weights for which the layer is not told otherwise.
    """
    token, place = _skipping.set(True), _place.set((device, dtype))
    try:
        yield
    finally:
        _skipping.reset(token)
        _place.reset(place)


def is_skipped() -> bool:
    """Whether weights keep undefined values here."""
    return _skipping.get()


@contextmanager
def shapes_only() -> Iterator[None]:
    """Layers made inside the block have parameters of their shapes without the memory: to ask a model about them."""
    token = _shapes_only.set(True)
    try:
        with skip_init():
            yield
    finally:
        _shapes_only.reset(token)


def new(shape: Sequence[int], device: Any, dtype: Any) -> Tensor:
    """Memory for a layer's weights, where and of the type that the layer was told, or else `skip_init`."""
    device_here, dtype_here = _place.get()
    place = {"device": device_here if device is None else device, "dtype": dtype_here if dtype is None else dtype}
    if _shapes_only.get():
        return empty(1, **place).expand(tuple(shape))  # type: ignore[no-any-return]
    return empty(tuple(shape), **place)  # type: ignore[no-any-return]


def constant_(tensor: Tensor, value: float) -> Tensor:
    """Every element is `value`."""
    if _skipping.get():
        return tensor
    with no_grad():
        return tensor.fill_(value)


def zeros_(tensor: Tensor) -> Tensor:
    """Every element is 0."""
    return constant_(tensor, 0.0)


def ones_(tensor: Tensor) -> Tensor:
    """Every element is 1."""
    return constant_(tensor, 1.0)


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Uniform in [a, b)."""
    if _skipping.get():
        return tensor
    with no_grad():
        return tensor.uniform_(a, b, generator=generator)


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Normal with the given mean and standard deviation."""
    if _skipping.get():
        return tensor
    with no_grad():
        return tensor.normal_(mean, std, generator=generator)


def trunc_normal_(
    tensor: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: Generator | None = None,
) -> Tensor:
    """Normal with the given mean and standard deviation before it was cut to [a, b] (values outside are drawn anew).

    By the inverse of the normal distribution function: one uniform draw for each element.
    """
    low, high = _cdf((a - mean) / std), _cdf((b - mean) / std)
    if not low < high:
        raise UsageError(f"trunc_normal_: [{a}, {b}] holds nothing of a normal with mean {mean} and deviation {std}")
    if _skipping.get():
        return tensor
    with no_grad():
        share = empty(tensor.shape, dtype="float64", device=tensor.device).uniform_(low, high, generator=generator)
        values = ew.clamp(_probit(share) * std + mean, min=a, max=b)
        return tensor.copy_(values)


def _cdf(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


# Rational approximation of the inverse normal distribution function by P. J. Acklam (2003), error below 1.2e-9.
_CENTRE = (
    (
        -3.969683028665376e01,
        2.209460984245205e02,
        -2.759285104469687e02,
        1.383577518672690e02,
        -3.066479806614716e01,
        2.506628277459239e00,
    ),
    (
        -5.447609879822406e01,
        1.615858368580409e02,
        -1.556989798598866e02,
        6.680131188771972e01,
        -1.328068155288572e01,
        1.0,
    ),
)
_TAIL = (
    (
        -7.784894002430293e-03,
        -3.223964580411365e-01,
        -2.400758277161838e00,
        -2.549732539343734e00,
        4.374664141464968e00,
        2.938163982698783e00,
    ),
    (7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e00, 3.754408661907416e00, 1.0),
)
_SPLIT = 0.02425


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    value = x * 0 + coefficients[0]
    for c in coefficients[1:]:
        value = value * x + c
    return value


def _probit(p: Tensor) -> Tensor:
    """x with Φ(x) = p, for float64 p in (0, 1)."""
    centred = p - 0.5
    square = centred * centred
    middle = centred * _polynomial(square, _CENTRE[0]) / _polynomial(square, _CENTRE[1])
    rest = pw.sqrt(pw.log(ew.clamp(pw.minimum(p, 1 - p), min=1e-300)) * -2)
    tail = _polynomial(rest, _TAIL[0]) / _polynomial(rest, _TAIL[1])
    outside = ew.where(centred < 0, tail, -tail)
    return ew.where(pw.abs(centred) <= 0.5 - _SPLIT, middle, outside)  # type: ignore[no-any-return]


def _fans(tensor: Tensor) -> tuple[int, int]:
    """(inputs, outputs) of a weight `[out, in, …]`; further dimensions are a receptive field."""
    if tensor.ndim < 2:
        raise ShapeError(f"fan-in and fan-out of shape {tensor.shape}", next="give a weight [out, in, ...]")
    field = math.prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """How much a layer's weights must be larger because of the nonlinearity after it.

    That is linear, sigmoid, tanh, relu, leaky_relu or selu; `param` is the slope of leaky_relu, 0.01 unless given.
    """
    gains = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2), "selu": 3 / 4}
    if nonlinearity == "leaky_relu":
        return math.sqrt(2 / (1 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in gains:
        raise UsageError(f"no gain is known for {nonlinearity!r}", next=f"use one of {', '.join(gains)}, leaky_relu")
    return gains[nonlinearity]


def xavier_uniform_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Uniform within ±gain·√(6 / (in + out)) (Glorot & Bengio, 2010)."""
    bound = gain * math.sqrt(6 / sum(_fans(tensor)))
    return uniform_(tensor, -bound, bound, generator)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Normal with deviation gain·√(2 / (in + out)) (Glorot & Bengio, 2010)."""
    return normal_(tensor, 0.0, gain * math.sqrt(2 / sum(_fans(tensor))), generator)


def _kaiming_std(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise UsageError(f"mode is {mode!r}", next='use "fan_in" or "fan_out"')
    return calculate_gain(nonlinearity, a) / math.sqrt(_fans(tensor)[mode == "fan_out"])


def kaiming_uniform_(
    tensor: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    """Uniform within ±gain·√(3 / fan) (He et al., 2015); `a` is the slope of leaky_relu."""
    bound = math.sqrt(3) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, generator)


def kaiming_normal_(
    tensor: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    """Normal with deviation gain / √fan (He et al., 2015); `a` is the slope of leaky_relu."""
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity), generator)


check_calls(globals(), __all__)
