"""In-place initialization of parameters from seeded generators. A seed gives the same weights on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import NoneType
from typing import Any

from genesis.autograd import no_grad
from genesis.errors import ShapeError, UsageError
from genesis.functions import elementwise as ew
from genesis.functions import pointwise as pw
from genesis.functions.create import empty
from genesis.functions.factorizations import qr_of
from genesis.keywords import check_calls
from genesis.random import Generator
from genesis.tensor import Tensor

__all__ = [
    "calculate_gain",
    "constant_",
    "dirac_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "orthogonal_",
    "shapes_only",
    "skip_init",
    "sparse_",
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
    """Skip initialization of layers built inside the block, because their weights will be loaded.

    `device` and `dtype` are the defaults for layers that are built without them.
    """
    token, place = _skipping.set(True), _place.set((device, dtype))
    try:
        yield
    finally:
        _skipping.reset(token)
        _place.reset(place)


def is_skipped() -> bool:
    """Whether initialization is currently skipped."""
    return _skipping.get()


@contextmanager
def shapes_only() -> Iterator[None]:
    """Give layers built inside the block parameters with shapes but without memory, for example to count them."""
    token = _shapes_only.set(True)
    try:
        with skip_init():
            yield
    finally:
        _shapes_only.reset(token)


def new(shape: Sequence[int], device: Any, dtype: Any) -> Tensor:
    """Allocate a layer's weight. `device` and `dtype` default to the settings of `skip_init`."""
    default_device, default_dtype = _place.get()
    place = {
        "device": default_device if device is None else device,
        "dtype": default_dtype if dtype is None else dtype,
    }
    if _shapes_only.get():
        return empty(1, **place).expand(tuple(shape))  # type: ignore[no-any-return]
    return empty(tuple(shape), **place)  # type: ignore[no-any-return]


def constant_(tensor: Tensor, val: float) -> Tensor:
    """Set every element to `val`."""
    if _skipping.get():
        return tensor
    with no_grad():
        return tensor.fill_(val)


def zeros_(tensor: Tensor) -> Tensor:
    """Set every element to 0."""
    return constant_(tensor, 0.0)


def ones_(tensor: Tensor) -> Tensor:
    """Set every element to 1."""
    return constant_(tensor, 1.0)


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Draw from the uniform distribution on [a, b)."""
    if _skipping.get():
        return tensor
    with no_grad():
        return tensor.uniform_(a, b, generator=generator)


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Draw from the normal distribution with the given mean and standard deviation."""
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
    """Draw from the normal distribution truncated to [a, b]; `mean` and `std` apply before truncation.

    It inverts the normal distribution function, with one uniform draw per element.
    """
    low, high = _cdf((a - mean) / std), _cdf((b - mean) / std)
    if not low < high:
        raise UsageError(f"trunc_normal_: [{a}, {b}] has probability 0 under mean {mean} and deviation {std}")
    if _skipping.get():
        return tensor
    with no_grad():
        share = empty(tensor.shape, dtype="float64", device=tensor.device).uniform_(low, high, generator=generator)
        values = ew.clamp(_probit(share) * std + mean, min=a, max=b)
        return tensor.copy_(values)


# Initial weights whose elements are not drawn independently.


def _check_dims(tensor: Tensor, function: str, least: int, most: float) -> None:
    if not least <= tensor.ndim <= most:
        many = str(least) if least == most else f"{least} or more" if most == math.inf else f"{least} to {most}"
        raise ShapeError(f"{function} takes tensors of {many} dimensions, not of shape {tensor.shape}")


def eye_(tensor: Tensor) -> Tensor:
    """Set a matrix to ones on the diagonal and zeros elsewhere."""
    _check_dims(tensor, "eye_", 2, 2)
    zeros_(tensor)
    constant_(tensor.detach().diagonal(), 1.0)
    return tensor


def dirac_(tensor: Tensor, groups: int = 1) -> Tensor:
    """Set the weight `[out, in, ...]` of a convolution so that it passes on its inputs, in each of the groups."""
    _check_dims(tensor, "dirac_", 3, 5)
    if len(tensor) % groups:
        raise ShapeError(f"dirac_ cannot split {len(tensor)} output channels into {groups} groups")
    zeros_(tensor)
    for part in tensor.detach().chunk(groups):
        centre = part[(..., *(size // 2 for size in tensor.shape[2:]))]  # [out / groups, in]
        constant_(centre.diagonal(), 1.0)
    return tensor


def orthogonal_(tensor: Tensor, gain: float = 1, generator: Generator | None = None) -> Tensor:
    """Fill with a random matrix of orthogonal rows or columns times `gain` (Saxe et al., 2013).

    Dimensions after the first count as columns. The matrix is the Q of a QR decomposition, so it is computed in float32
    at least.
    """
    _check_dims(tensor, "orthogonal_", 2, math.inf)
    if _skipping.get() or not tensor.numel():
        return tensor
    rows, columns = tensor.shape[0], tensor.numel() // tensor.shape[0]
    kind = "float64" if tensor.dtype.itemsize == 8 else "float32"
    drawn = normal_(empty(rows, columns, dtype=kind, device=tensor.device), generator=generator)
    with no_grad():
        q, r = qr_of(drawn.T if rows < columns else drawn, "reduced")
        q = q * r.diagonal().sign()  # makes the distribution uniform
        return tensor.copy_((q.T if rows < columns else q).reshape(tensor.shape) * gain)


def sparse_(tensor: Tensor, sparsity: float, std: float = 0.01, generator: Generator | None = None) -> Tensor:
    """Draw a matrix from a normal with deviation `std`, and set a fraction `sparsity` of each column to 0."""
    _check_dims(tensor, "sparse_", 2, 2)
    normal_(tensor, 0.0, std, generator)
    if _skipping.get():
        return tensor
    order = uniform_(empty(tensor.shape, device=tensor.device), generator=generator).argsort(0)
    with no_grad():
        return tensor.scatter_(0, order[: math.ceil(sparsity * len(tensor))], 0.0)


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
    root = pw.sqrt(pw.log(ew.clamp(pw.minimum(p, 1 - p), min=1e-300)) * -2)
    tail = _polynomial(root, _TAIL[0]) / _polynomial(root, _TAIL[1])
    outside = ew.where(centred < 0, tail, -tail)
    return ew.where(pw.abs(centred) <= 0.5 - _SPLIT, middle, outside)  # type: ignore[no-any-return]


def _calculate_fan_in_and_fan_out(tensor: Tensor) -> tuple[int, int]:
    """(fan-in, fan-out) of a weight `[out, in, …]`. Dimensions after the second are a receptive field."""
    if tensor.ndim < 2:
        raise ShapeError(f"shape {tensor.shape} has no fan-in and fan-out", next="pass a weight [out, in, ...]")
    field = math.prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return the factor by which a layer's weights must be larger because of the nonlinearity after it.

    `nonlinearity` is linear (or a convolution, as conv1d), sigmoid, tanh, relu, leaky_relu (with the negative slope
    `param`, 0.01 by default) or selu.
    """
    gains = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5 / 3, "relu": math.sqrt(2), "selu": 3 / 4}
    gains |= {f"conv{kind}{n}d": 1.0 for kind in ("", "_transpose") for n in (1, 2, 3)}
    if nonlinearity == "leaky_relu":
        if type(param) not in (int, float, NoneType):
            raise UsageError(f"the slope of leaky_relu is {param!r}, and must be a number")
        return math.sqrt(2 / (1 + (0.01 if param is None else param) ** 2))
    if nonlinearity not in gains:
        raise UsageError(f"nonlinearity is {nonlinearity!r}", next="use linear, sigmoid, tanh, relu, leaky_relu, selu")
    return gains[nonlinearity]


def xavier_uniform_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Draw uniformly from ±gain·√(6 / (in + out)) (Glorot & Bengio, 2010)."""
    bound = gain * math.sqrt(6 / sum(_calculate_fan_in_and_fan_out(tensor)))
    return uniform_(tensor, -bound, bound, generator)


def xavier_normal_(tensor: Tensor, gain: float = 1.0, generator: Generator | None = None) -> Tensor:
    """Draw from a normal with deviation gain·√(2 / (in + out)) (Glorot & Bengio, 2010)."""
    return normal_(tensor, 0.0, gain * math.sqrt(2 / sum(_calculate_fan_in_and_fan_out(tensor))), generator)


def _kaiming_std(tensor: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise UsageError(f"mode is {mode!r}", next='use "fan_in" or "fan_out"')
    return calculate_gain(nonlinearity, a) / math.sqrt(_calculate_fan_in_and_fan_out(tensor)[mode == "fan_out"])


def kaiming_uniform_(
    tensor: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    """Draw uniformly from ±gain·√(3 / fan) (He et al., 2015). `a` is the negative slope of leaky_relu."""
    bound = math.sqrt(3) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, generator)


def kaiming_normal_(
    tensor: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    """Draw from a normal with deviation gain / √fan (He et al., 2015). `a` is the negative slope of leaky_relu."""
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity), generator)


check_calls(globals(), __all__)
