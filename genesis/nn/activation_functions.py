"""Activations and dropouts that are made of other ops, under the names of torch.nn.functional.

Two-byte floats are computed in float32 and rounded once. `inplace=True` overwrites the input and returns it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from genesis.autograd import apply
from genesis.autograd.modes import is_grad_enabled
from genesis.dtypes import BOOL, float32
from genesis.errors import DimensionError, DTypeError, ShapeError, UsageError, unknown_keyword
from genesis.functions import elementwise as ew
from genesis.functions import forms, reduce
from genesis.functions import pointwise as pw
from genesis.functions.create import zeros_like
from genesis.functions.index import scatter
from genesis.functions.random import rand
from genesis.functions.shape import chunk
from genesis.functions.surface import DTypeLike, array_of, bare, functional, functions, layer_function, methods, public
from genesis.ops import elementwise as elementwise_ops
from genesis.random import Generator
from genesis.tensor import Tensor

Formula = Callable[[Any], Any]


def wide(x: Tensor) -> Tensor:
    """Cast two-byte floats to float32; return others unchanged."""
    kind = x.array.dtype
    return ew.to_dtype(x, float32) if kind.is_floating_point and kind.itemsize < 4 else x


def check_float(name: str, x: Any) -> None:
    """Raise DTypeError if x is not a tensor of floats."""
    if not array_of(x, name).dtype.is_floating_point:
        raise DTypeError(f"{name} takes float tensors, got {x.dtype.name}", next="cast with .float()")


def _applied(
    name: str, x: Any, inplace: bool, formula: Formula, *, integers: bool = False, out: Tensor | None = None
) -> Tensor:
    """Return formula(x) in x's dtype, in `out` if given, or overwrite x with it."""
    kind = array_of(x, name).dtype
    if not kind.is_floating_point and (not integers or kind.category == BOOL):
        raise DTypeError(f"{name} takes float tensors, got {kind.name}", next="cast with .float()")
    # Backward reads the input, so an in-place call computes from a copy.
    source = ew.clone(x) if inplace and is_grad_enabled() and x.requires_grad else x
    y = ew.to_dtype(formula(wide(source)), kind)
    if out is not None:
        return apply(elementwise_ops.copy, y, out=out)  # type: ignore[no-any-return]
    return ew.copy_(x, y) if inplace else y  # type: ignore[no-any-return]


def _negative_part(x: Tensor) -> Any:
    """e^x - 1 for x ≤ 0; larger elements, which the caller replaces, must not overflow in backward."""
    return pw.expm1(ew.clamp(x, max=0.0))


# --- Activations ------------------------------------------------------------------------------------------------------


del functional["relu"], functional["silu"]  # replaced below by functions that take `inplace`


@layer_function
def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """max(x, 0)."""
    return methods["relu_"](input) if inplace else forms.relu(input)  # type: ignore[no-any-return]


@layer_function
def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """x·sigmoid(x)."""
    return _applied("silu", input, True, pw.silu) if inplace else bare(pw.silu)(input)


@layer_function
def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x where x > 0, else alpha·(e^x - 1)."""
    return _applied("elu", input, inplace, lambda x: ew.where(x > 0, x, _negative_part(x) * alpha))


@public(method=False, nn=True)
def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """x where x > 0, else alpha·(e^(x/alpha) - 1)."""
    if not alpha:
        raise UsageError("celu: alpha is 0", next="choose another alpha")
    return _applied("celu", input, inplace, lambda x: ew.where(x > 0, x, _negative_part(x / alpha) * alpha))


@public(method=False, nn=True)
def selu(input: Tensor, inplace: bool = False) -> Tensor:
    """1.0507·elu(x, 1.6733), which keeps mean 0 and variance 1 (Klambauer et al., 2017)."""
    alpha, scale = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
    return _applied("selu", input, inplace, lambda x: ew.where(x > 0, x, _negative_part(x) * alpha) * scale)


@layer_function
def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """x where x > 0, else negative_slope·x."""
    return _applied("leaky_relu", input, inplace, lambda x: ew.where(x > 0, x, x * negative_slope))


@public(method=False, nn=True)
def rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    """leaky_relu with a slope drawn for each element from [lower, upper]; their mean outside of training."""
    if not lower <= upper:
        raise UsageError(f"rrelu: lower is {lower} and upper is {upper}", next="choose lower <= upper")
    slope: Any = (lower + upper) / 2
    if training:
        slope = rand(input.shape, dtype=wide(input).dtype, device=input.device) * (upper - lower) + lower
    return _applied("rrelu", input, inplace, lambda x: ew.where(x > 0, x, x * slope))


@layer_function
def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """x limited to [min_val, max_val]; the gradient is 0 at the limits and outside."""
    if min_val > max_val:
        raise UsageError(f"hardtanh: min_val {min_val} is greater than max_val {max_val}", next="exchange them")
    formula: Formula = lambda x: ew.where(x <= min_val, min_val, ew.where(x >= max_val, max_val, x))  # noqa: E731
    if not array_of(input, "hardtanh").dtype.is_floating_point:
        min_val, max_val = int(min_val), int(max_val)
    return _applied("hardtanh", input, inplace, formula, integers=True)


@layer_function
def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    """min(max(x, 0), 6)."""
    return hardtanh(input, 0.0, 6.0, inplace)


@layer_function
def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """x/6 + 1/2, limited to [0, 1]."""
    return _applied("hardsigmoid", input, inplace, lambda x: hardtanh(x + 3, 0.0, 6.0) / 6)


@layer_function
def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    """x·hardsigmoid(x) (Howard et al., 2019)."""
    return _applied(
        "hardswish",
        input,
        inplace,
        lambda x: ew.where(x <= -3, 0.0, ew.where(x >= 3, x, x * (ew.clamp(x, -3.0, 3.0) + 3) / 6)),
    )


@layer_function
def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """x·tanh(log(1 + e^x)) (Misra, 2019)."""
    return _applied("mish", input, inplace, lambda x: x * pw.tanh(softplus(x)))


@layer_function
def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0, *, out: Tensor | None = None) -> Tensor:
    """log(1 + e^(beta·x)) / beta; x itself where beta·x > threshold."""

    def formula(x: Tensor) -> Any:
        scaled = x * beta
        return ew.where(scaled > threshold, x, pw.log1p(pw.exp(ew.clamp(scaled, max=threshold))) / beta)

    return _applied("softplus", input, False, formula, out=out)


@layer_function
def logsigmoid(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log(sigmoid(x)), without overflow."""
    # At x = 0, abs has the derivative 0 and minimum passes half of the gradient, so the sum has 1/2.
    formula: Formula = lambda x: pw.minimum(x, 0.0) - pw.log1p(pw.exp(-pw.abs(x)))  # noqa: E731
    return _applied("logsigmoid", input, False, formula, out=out)


@layer_function
def softsign(input: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return input / (pw.abs(input) + 1)  # type: ignore[no-any-return]


@layer_function
def tanhshrink(input: Tensor) -> Tensor:
    """x - tanh(x)."""
    return input - pw.tanh(input)  # type: ignore[no-any-return]


@layer_function
def softshrink(input: Tensor, lambd: float = 0.5, *, out: Tensor | None = None) -> Tensor:
    """x moved towards 0 by lambd, and 0 within ±lambd."""
    if not lambd >= 0:
        raise UsageError(f"softshrink: lambd is {lambd}, and must be at least 0")
    formula: Formula = lambda x: ew.where(x > lambd, x - lambd, ew.where(x < -lambd, x + lambd, x * 0.0))  # noqa: E731
    return _applied("softshrink", input, False, formula, out=out)


@public(nn=True)
def hardshrink(input: Tensor, lambd: float = 0.5, *, out: Tensor | None = None) -> Tensor:
    """x, and 0 within ±lambd."""
    formula: Formula = lambda x: ew.where(pw.logical_and(x >= -lambd, x <= lambd), 0.0, x)  # noqa: E731
    return _applied("hardshrink", input, False, formula, out=out)


@public(method=False, nn=True)
def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """x where x > threshold, else value."""
    if not array_of(input, "threshold").dtype.is_floating_point:
        value = int(value)
    return _applied("threshold", input, inplace, lambda x: ew.where(x <= threshold, value, x), integers=True)


@public(nn=True)
def prelu(input: Tensor, weight: Tensor) -> Tensor:
    """x where x > 0, else weight·x; `weight` has one element, or one for each channel (dimension 1)."""
    array_of(input, "prelu")
    if array_of(weight, "prelu").dtype is not input.dtype:
        raise DTypeError(f"prelu: the weight is {weight.dtype.name}, and the input is {input.dtype.name}")
    channels = input.shape[1] if input.ndim > 1 else 1
    if weight.ndim > 1 or weight.numel() not in (1, channels):
        raise ShapeError(f"prelu: the weight has shape {weight.shape}", next=f"pass 1 or {channels} elements")
    if weight.numel() > 1:
        weight = weight.reshape(-1, *(1,) * (input.ndim - 2))
    elif weight.ndim > input.ndim:
        weight = weight.reshape(())
    return ew.where(input > 0, input, input * weight)  # type: ignore[no-any-return]


@layer_function
def glu(input: Tensor, dim: int = -1) -> Tensor:
    """a·sigmoid(b), where a and b are the halves of x along `dim` (Dauphin et al., 2017)."""
    check_float("glu", input)
    if not input.ndim:
        raise DimensionError("glu does not take a 0-d tensor")
    if not -input.ndim <= dim < input.ndim:
        raise DimensionError(f"glu: dimension {dim} does not exist in shape {input.shape}")
    if input.shape[dim] % 2 or not input.shape[dim]:
        raise ShapeError(f"glu: dimension {dim} of shape {input.shape} has no halves", next="pass an even size")
    a, b = chunk(input, 2, dim)
    return a * pw.sigmoid(b)  # type: ignore[no-any-return]


# --- Softmax ----------------------------------------------------------------------------------------------------------


def _axis(x: Any, dim: int | None) -> int:
    """Return dim; None is dimension 0 of 0-, 1- and 3-dimensional tensors, and dimension 1 of others."""
    if dim is not None:
        return dim
    return int(array_of(x, "softmax").ndim not in (0, 1, 3))


@layer_function
def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DTypeLike = None) -> Tensor:
    """e^(x - max) / Σ e^(x - max) over `dim`, after a cast to `dtype`. By default `dim` is 0 or 1, as in torch."""
    return bare(reduce.softmax)(input, _axis(input, dim), dtype=dtype)  # type: ignore[no-any-return]


@layer_function
def log_softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DTypeLike = None) -> Tensor:
    """x - log Σ e^x over `dim`, after a cast to `dtype`. By default `dim` is 0 or 1, as in torch."""
    return bare(reduce.log_softmax)(input, _axis(input, dim), dtype=dtype)  # type: ignore[no-any-return]


@layer_function
def softmin(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DTypeLike = None) -> Tensor:
    """softmax(-x) over `dim`."""
    return reduce.softmax(-input, _axis(input, dim), dtype=dtype)  # type: ignore[no-any-return]


@layer_function
def gumbel_softmax(
    logits: Tensor,
    tau: float = 1.0,
    hard: bool = False,
    eps: float = 1e-10,
    dim: int = -1,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """softmax((logits + Gumbel noise) / tau) over `dim` (Jang et al., 2017). `eps` has no effect, as in torch.

    `hard`: return one-hot vectors, with the gradient of the soft ones.
    """
    check_float("gumbel_softmax", logits)
    uniform = rand(logits.shape, dtype=wide(logits).dtype, device=logits.device, generator=generator)
    noise = -pw.log(-pw.log(ew.clamp(uniform, min=1e-38)))
    soft = reduce.softmax((logits + ew.to_dtype(noise, logits.dtype)) / tau, dim)
    if not hard:
        return soft  # type: ignore[no-any-return]
    chosen = scatter(zeros_like(soft), dim, reduce.argmax(soft, dim, keepdim=True), 1.0)
    return chosen - soft.detach() + soft  # type: ignore[no-any-return]


# --- Dropout ----------------------------------------------------------------------------------------------------------


def _check_share(name: str, p: float) -> None:
    if not 0 <= p <= 1:
        raise UsageError(f"{name}: p is {p}", next="choose p in [0, 1]")


def _kept(x: Tensor, p: float, features: bool) -> Any:
    """Draw where elements, or whole features [N, C, 1, …], are kept."""
    shape = (*x.shape[:2], *(1,) * (x.ndim - 2)) if features else x.shape
    return rand(shape, device=x.device) >= p


def _dropped(name: str, x: Tensor, p: float, training: bool, inplace: bool, features: bool, alpha: bool) -> Tensor:
    """Drop elements or features to 0, or with `alpha` to selu's lower limit and keep mean and variance."""
    array_of(x, name)
    _check_share(name, p)
    if not training or not p:
        return x
    if p == 1:
        y = x * 0.0
    elif alpha:
        low = -1.7580993408473766
        scale = 1 / math.sqrt((low * low * p + 1) * (1 - p))
        y = ew.to_dtype(ew.where(_kept(x, p, features), wide(x), low) * scale - low * scale * p, x.dtype)
    else:
        y = ew.where(_kept(x, p, features), x / (1 - p), 0.0)
    return ew.copy_(x, y) if inplace else y


@public(method=False, nn=True)
def alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """Set elements to selu's lower limit with probability p, and scale and shift so that mean and variance stay."""
    return _dropped("alpha_dropout", input, p, training, inplace, False, True)


@public(method=False, nn=True)
def feature_alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """`alpha_dropout` of whole channels, `[N, C, …]`."""
    if input.ndim < 2 and training and p:
        raise ShapeError(f"feature_alpha_dropout takes [N, C, ...], got shape {input.shape}")
    return _dropped("feature_alpha_dropout", input, p, training, inplace, True, True)


@layer_function
def dropout1d(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Set whole channels of `[C, L]` or `[N, C, L]` to 0 with probability p, and divide the others by 1 - p."""
    if array_of(input, "dropout1d").ndim not in (2, 3):
        raise ShapeError(f"dropout1d takes [C, L] or [N, C, L], got shape {input.shape}")
    if input.ndim == 3:
        return _dropped("dropout1d", input, p, training, inplace, True, False)
    dropped = _dropped("dropout1d", input.unsqueeze(0), p, training, False, True, False).squeeze(0)
    return ew.copy_(input, dropped) if inplace else dropped


# --- In-place names ---------------------------------------------------------------------------------------------------


def _in_place_form(function: Any) -> Any:
    """Return f_ for a function f with a parameter `inplace`."""
    found, name = inspect.signature(function), f"{function.__name__}_"
    kept = {key: parameter for key, parameter in found.parameters.items() if key != "inplace"}

    @functools.wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        for keyword in given:
            if keyword not in kept:
                raise unknown_keyword(name, keyword, kept)
        return function(*args, inplace=True, **given)

    called.__name__ = called.__qualname__ = name
    called.__doc__ = f"Compute `{function.__name__}` in place."
    called.__signature__ = found.replace(parameters=list(kept.values()))  # type: ignore[attr-defined]
    return called


for _function in (celu, elu, hardtanh, leaky_relu, relu, rrelu, selu, threshold):
    _name = f"{_function.__name__}_"
    functional[_name] = _in_place_form(_function)
    if _function.__name__ in functions:
        functions.setdefault(_name, functional[_name])
