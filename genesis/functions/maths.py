"""Elementwise functions made of ops, with torch's names and semantics.

Each is a formula, so autograd, every device and every dtype follow from the ops. Formulas of several roundings compute
in float32 or wider (`wide`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from genesis import dtypes
from genesis.autograd.record import TensorBase, apply
from genesis.dtypes import BOOL, INTEGER, default_dtype, float32, float64
from genesis.errors import DTypeError, UsageError
from genesis.functions import pointwise as pw
from genesis.functions.elementwise import _common_type as common_type
from genesis.functions.elementwise import add, div, pow, sub, to_dtype, where
from genesis.functions.surface import Operand, Tensor, array_of, check_operands, functions, methods, public
from genesis.ops import elementwise as ops

composed = public(out=True, in_place=True)


def wide(name: str, formula: Callable[..., Any], *operands: Any, floats_only: bool = False) -> Any:
    """Return formula(*operands), computed in a float dtype of at least 4 bytes and rounded to the operands' dtype.

    Integer operands take the default dtype, or raise DTypeError with `floats_only`. Python numbers stay.
    """
    kind = common_type(*check_operands(name, *operands))
    if floats_only and not kind.is_floating_point:
        raise DTypeError(f"{name} takes floats, got {kind.name}", next="cast with .to(...)")
    kind = kind if kind.is_floating_point else default_dtype()
    work = kind if kind.itemsize >= 4 else float32
    return to_dtype(formula(*(to_dtype(v, work) if isinstance(v, TensorBase) else v for v in operands)), kind)


def _tensor_like(value: Any, other: Any) -> Any:
    """Return a number as a 0-d tensor in the dtype of its arithmetic with a tensor; a tensor unchanged."""
    if isinstance(value, TensorBase):
        return value
    kind, device = common_type(value, other), other.array.device
    return apply(ops.fill, value=value, shape=(), dtype=kind, device=device)


# --- Sums of products -------------------------------------------------------------------------------------------------


@composed
def addcmul(x: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    """Return x + value·tensor1·tensor2."""
    return _with_product(x, pw.mul, tensor1, tensor2, value)


@composed
def addcdiv(x: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    """Return x + value·tensor1 / tensor2. Raises DTypeError if both are integers."""
    if array_of(tensor1, "addcdiv").dtype.category < 2 and array_of(tensor2, "addcdiv").dtype.category < 2:
        raise DTypeError("addcdiv does not divide integers by integers", next="use div with a rounding_mode")
    return _with_product(x, div, tensor1, tensor2, value)


def _with_product(x: Any, operation: Callable[..., Any], a: Any, b: Any, value: float) -> Any:
    """Return x + value·operation(a, b), rounded once from float32 for narrower floats."""
    kind = common_type(*check_operands("addcmul", x, a, b))
    value = value if kind.is_floating_point else int(value)  # as in torch
    narrow = kind.is_floating_point and kind.itemsize < 4
    x, a, b = (to_dtype(v, float32 if narrow else kind) for v in (x, a, b))
    product = operation(a, b)
    return to_dtype(add(x, product if value == 1 else pw.mul(product, value)), kind)


# --- Remainders, signs, roots -----------------------------------------------------------------------------------------


@composed
def fmod(x: Operand, y: Operand) -> Tensor:
    """Return x - y·trunc(x / y): the remainder with the sign of x."""
    kind = common_type(*check_operands("fmod", x, y))
    x, y = to_dtype(_tensor_like(x, y), kind), to_dtype(_tensor_like(y, x), kind)
    size = pw.abs(y)
    return where(pw.lt(x, 0), pw.neg(pw.remainder(pw.neg(x), size)), pw.remainder(x, size))


@composed
def frac(x: Tensor) -> Tensor:
    """Return x - trunc(x)."""
    if not array_of(x, "frac").dtype.is_floating_point:
        raise DTypeError(f"frac takes floats, got {x.array.dtype}")
    return sub(x, pw.trunc(x))


@public(out=True)
def signbit(x: Tensor) -> Tensor:
    """Return whether the sign is negative; also for -0."""
    if not array_of(x, "signbit").dtype.is_floating_point:
        return pw.lt(x, 0)
    return pw.logical_or(pw.lt(x, 0), pw.logical_and(pw.eq(x, 0), pw.lt(pw.reciprocal(x), 0)))


@composed
def copysign(x: Operand, y: Operand) -> Tensor:
    """Return |x| with the sign of y, in a float dtype."""
    x, y = check_operands("copysign", x, y)
    kind = common_type(x, y)
    size = pw.abs(to_dtype(_tensor_like(x, y), kind if kind.is_floating_point else default_dtype()))
    return where(signbit(y if isinstance(y, TensorBase) else _tensor_like(y, size)), pw.neg(size), size)


@composed
def hypot(x: Tensor, y: Tensor) -> Tensor:
    """Return √(x² + y²), computed in float64."""

    def length(x: Any, y: Any) -> Any:
        far = pw.logical_or(pw.isinf(x), pw.isinf(y))  # even if the other is NaN
        x, y = to_dtype(x, float64), to_dtype(y, float64)
        is_large = pw.gt(pw.maximum(pw.abs(x.detach()), pw.abs(y.detach())), 1e150)  # their squares would overflow
        scale = pw.exp2(pw.mul(to_dtype(is_large, float64), -600.0))
        sides = add(pw.square(pw.mul(x, scale)), pw.square(pw.mul(y, scale)))
        return where(far, math.inf, div(pw.sqrt(sides), scale))

    return wide("hypot", length, x, y, floats_only=True)


@composed
def ldexp(x: Tensor, other: Operand) -> Tensor:
    """Return x·2^other, in a float dtype."""
    factor: Any = 2.0**other if not isinstance(other, TensorBase) else pow(2.0, other)
    is_float = isinstance(other, TensorBase) and other.array.dtype.is_floating_point
    own = array_of(x, "ldexp").dtype
    return pw.mul(x, factor if is_float or not own.is_floating_point else to_dtype(factor, own))


del functions["round"], methods["round"]  # replaced below by functions that take `decimals`


@public(out=True, in_place=True)
def round(x: Tensor, *, decimals: int = 0) -> Tensor:
    """Return x rounded to the nearest multiple of 10^-decimals, halves to the even one; integers stay unchanged."""
    if not decimals or not array_of(x, "round").dtype.is_floating_point:
        if decimals:
            raise DTypeError(f"round: {x.array.dtype} tensors take no decimals", next="cast with .to(...)")
        return pw.round(x)
    factor = 10.0 ** (decimals if decimals > 0 else -decimals)
    return div(pw.round(pw.mul(x, factor)), factor) if decimals > 0 else pw.mul(pw.round(div(x, factor)), factor)


@composed
def float_power(x: Operand, exponent: Operand) -> Tensor:
    """Return x^exponent in float64."""
    values = check_operands("float_power", x, exponent)
    return pow(*(to_dtype(v, float64) if isinstance(v, TensorBase) else v for v in values))


@public(out=True)
def positive(x: Tensor) -> Tensor:
    """Return x itself. Raises DTypeError for bools."""
    if array_of(x, "positive").dtype.category == BOOL:
        raise DTypeError("positive does not take bool tensors")
    return x


@composed
def deg2rad(x: Tensor) -> Tensor:
    """Return degrees as radians."""
    return pw.mul(x, math.pi / 180)


@composed
def rad2deg(x: Tensor) -> Tensor:
    """Return radians as degrees."""
    return pw.mul(x, 180 / math.pi)


@composed
def heaviside(x: Tensor, values: Tensor) -> Tensor:
    """Return 0 for negative elements, 1 for positive ones, and `values` where x is 0."""
    if array_of(x, "heaviside").dtype is not array_of(values, "heaviside").dtype:
        raise DTypeError("heaviside takes tensors of one dtype", next="cast one with .to(...)")
    step = to_dtype(pw.gt(x, 0), x.array.dtype)
    return where(pw.eq(x, 0), values, step)


@public(out=True)
def fmax(x: Tensor, y: Tensor) -> Tensor:
    """Return the larger of x and y; where one is NaN, the other."""
    return where(pw.isnan(x), y, where(pw.isnan(y), x, pw.maximum(x, y)))


@public(out=True)
def fmin(x: Tensor, y: Tensor) -> Tensor:
    """Return the smaller of x and y; where one is NaN, the other."""
    return where(pw.isnan(x), y, where(pw.isnan(y), x, pw.minimum(x, y)))


@composed
def gcd(x: Tensor, y: Tensor) -> Tensor:
    """Return the greatest common divisor of integers, by Euclid's algorithm; it blocks once a step."""
    kind = common_type(x, y)
    if kind.category != INTEGER:
        raise DTypeError(f"gcd takes integers, got {kind.name}")
    a, b = pw.abs(to_dtype(x, kind)), pw.abs(to_dtype(y, kind))
    while bool(pw.ne(b, 0).any()):
        is_done = pw.eq(b, 0)
        a, b = where(is_done, a, b), where(is_done, 0, pw.remainder(a, where(is_done, 1, b)))
    return add(a, pw.mul(b, 0)) if a.array.shape != b.array.shape else a


@composed
def lcm(x: Tensor, y: Tensor) -> Tensor:
    """Return the least common multiple of integers."""
    divisor = gcd(x, y)
    part = pw.floor_divide(x, where(pw.eq(divisor, 0), 1, divisor))
    return to_dtype(pw.abs(pw.mul(part, y)), divisor.array.dtype)


# --- Logarithms and exponentials --------------------------------------------------------------------------------------


@composed
def xlogy(x: Operand, y: Operand) -> Tensor:
    """Return x·log(y); 0 where x is 0 and y is not NaN."""
    check_operands("xlogy", x, y)
    return wide("xlogy", _xlogy, _tensor_like(x, y), _tensor_like(y, x))


def _xlogy(x: Any, y: Any) -> Any:
    vanishes = pw.logical_and(pw.eq(x, 0), pw.logical_or(pw.le(y, 0), pw.eq(y, math.inf)))
    return pw.mul(x, pw.log(where(vanishes, 1.0, y)))


def _log_of_sum(x: Any, y: Any, base: float = math.e) -> Any:
    same, wins = pw.logical_and(pw.eq(x, y), pw.isinf(x)), pw.gt(x, y)
    more, less = where(wins, x, y), where(wins, y, x)  # smooth also where both are equal
    apart = where(same, 0.0, sub(less, more))
    if base == 2:
        return add(more, pw.mul(pw.log1p(pw.exp2(apart)), 1 / math.log(2)))
    return add(more, pw.log1p(pw.exp(apart)))


@public(out=True)
def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """Return log(e^x + e^y), without overflow."""
    return wide("logaddexp", _log_of_sum, x, y, floats_only=True)


@public(out=True)
def logaddexp2(x: Tensor, y: Tensor) -> Tensor:
    """Return log2(2^x + 2^y), without overflow."""
    return wide("logaddexp2", lambda a, b: _log_of_sum(a, b, 2), x, y, floats_only=True)


@composed
def logit(x: Tensor, eps: float | None = None) -> Tensor:
    """Return log(x / (1 - x)); with `eps`, of x limited to [eps, 1 - eps]."""

    def formula(x: Any) -> Any:
        if eps is not None:
            x = where(pw.lt(x, eps), eps, where(pw.gt(x, 1 - eps), 1 - eps, x))
            return pw.log(div(x, sub(1.0, x)))
        x = pw.mul(x, where(pw.logical_or(pw.lt(x, 0), pw.gt(x, 1)), math.nan, 1.0))  # NaN for the gradient, too
        return sub(pw.log(x), pw.log1p(pw.neg(x)))

    return wide("logit", formula, x)


# B₂ⱼ / (2j)! of the Euler-Maclaurin formula
_EULER_MACLAURIN = (1 / 12, -1 / 720, 1 / 30240, -1 / 1209600, 1 / 47900160, -691 / 1307674368000, 1 / 74724249600)


def _zeta(s: int, x: Any) -> Any:
    """Return Σ (x + k)^-s over k ≥ 0, for x > 0."""
    total, far = pow(x, -s), add(x, 12)
    for k in range(1, 12):
        total = add(total, pow(add(x, k), -s))
    total, rising = add(total, add(div(pow(far, 1 - s), s - 1), pw.mul(pow(far, -s), 0.5))), float(s)
    for j, factor in enumerate(_EULER_MACLAURIN):
        total = add(total, pw.mul(pow(far, -s - 2 * j - 1), factor * rising))
        rising *= (s + 2 * j + 1) * (s + 2 * j + 2)
    return total


@public(method=False, out=True, keywords={"input": "x"})
def polygamma(n: int, x: Tensor) -> Tensor:
    """Return the n-th derivative of digamma. Raises UsageError for a negative n."""
    if n < 0:
        raise UsageError(f"polygamma: n is {n}", next="pass 0 or more")
    if n == 0:
        return pw.digamma(x)
    sign = -1.0 if n % 2 == 0 else 1.0

    def formula(x: Any) -> Any:
        # ψn(x) = (-1)ⁿ·ψn(1 - x) - π·dⁿ/dxⁿ cot πx below ½, where the derivative is a polynomial in the cotangent
        x = to_dtype(x, float64)
        whole, below = pw.logical_and(pw.le(x, 0), pw.eq(x, pw.floor(x))), pw.lt(x, 0.5)
        inside = where(whole, 0.25, x)
        right = pw.mul(_zeta(n + 1, where(below, sub(1.0, inside), inside)), sign * math.factorial(n))
        cotangent, polynomial = div(1.0, pw.tan(pw.mul(where(below, inside, 0.25), math.pi))), [0.0, 1.0]
        for _ in range(n):  # P → -(1 + c²)·P'
            slope = [*[k * c for k, c in enumerate(polynomial)][1:], 0.0, 0.0]
            polynomial = [-(c + (slope[k - 2] if k > 1 else 0.0)) for k, c in enumerate(slope)]
        turned = pw.mul(cotangent, 0.0)
        for c in reversed(polynomial):
            turned = add(pw.mul(cotangent, turned), c)
        mirrored = sub(pw.mul(right, -sign), pw.mul(turned, math.pi ** (n + 1)))
        return where(whole, sign * math.inf, where(below, mirrored, right))

    return wide("polygamma", formula, x)


def _polygamma(x: Tensor, n: int) -> Tensor:
    """Return the n-th derivative of digamma."""
    return polygamma(n, x)


_polygamma.__name__ = _polygamma.__qualname__ = "polygamma"
public(function=False, in_place=True)(_polygamma)


@composed
def sinc(x: Tensor) -> Tensor:
    """Return sin(πx) / (πx); 1 at 0."""
    return wide("sinc", _sinc, x)


def _sinc(x: Any) -> Any:
    is_zero = pw.eq(x, 0)
    angle = pw.mul(where(is_zero, 1.0, x), math.pi)
    return where(is_zero, 1.0, div(pw.sin(angle), angle))


@composed
def mvlgamma(x: Tensor, p: int) -> Tensor:
    """Return the logarithm of the multivariate gamma function of dimension `p`."""
    total = sum((pw.lgamma(sub(x, i / 2)) for i in range(1, p)), pw.lgamma(x))
    return add(total, p * (p - 1) / 4 * math.log(math.pi))


# --- Tests and replacements -------------------------------------------------------------------------------------------


@composed
def nan_to_num(x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    """Return x with NaN, ∞ and -∞ replaced: by 0 and the dtype's largest and smallest values unless given."""
    kind = array_of(x, "nan_to_num").dtype
    if not kind.is_floating_point:
        return pw.mul(x, 1) if kind.category else pw.logical_or(x, x)
    limits = dtypes.finfo(kind)
    high, low = limits.max if posinf is None else posinf, limits.min if neginf is None else neginf
    kept = where(pw.isnan(x), 0.0 if nan is None else nan, x)
    return where(pw.eq(x, math.inf), high, where(pw.eq(x, -math.inf), low, kept))


@public(out=True)
def isposinf(x: Tensor) -> Tensor:
    """Return whether elements are ∞."""
    return pw.eq(x, math.inf) if array_of(x, "isposinf").dtype.is_floating_point else pw.ne(x, x)


@public(out=True)
def isneginf(x: Tensor) -> Tensor:
    """Return whether elements are -∞."""
    return pw.eq(x, -math.inf) if array_of(x, "isneginf").dtype.is_floating_point else pw.ne(x, x)


@public
def isreal(x: Tensor) -> Tensor:
    """Return whether elements are real: True for every dtype of Genesis."""
    return pw.logical_not(pw.logical_and(x, False))


@public(out=True)
def rsub(x: Tensor, other: Operand, *, alpha: float = 1) -> Tensor:
    """Return other - alpha·x."""
    return sub(other, x, alpha=alpha)


@public
def is_complex(x: Tensor) -> bool:
    """Return whether a tensor is complex, as results of `polar` and `view_as_complex` are."""
    return hasattr(x, "pairs") or array_of(x, "is_complex").dtype.is_complex


@public
def is_signed(x: Tensor) -> bool:
    """Return whether a tensor's dtype has negative values."""
    return array_of(x, "is_signed").dtype.numpy.kind not in "bu"


@public
def is_nonzero(x: Tensor) -> bool:
    """Return whether the only element is not 0. Raises ShapeError unless there is just one."""
    return bool(x)


@public
def is_same_size(x: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape."""
    return array_of(x, "is_same_size").shape == array_of(other, "is_same_size").shape


@public(method=False)
def fill(x: Tensor, value: Operand) -> Tensor:
    """Return a tensor like x filled with `value`, a number or a 0-d tensor."""
    if isinstance(value, TensorBase) and value.array.shape:
        raise UsageError(f"fill takes a number or a 0-d tensor, got shape {value.array.shape}")
    return apply(ops.overwrite, x, value)
