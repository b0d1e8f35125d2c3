"""Elementwise special functions: inverse and hyperbolic functions, and the families of the error and gamma functions.

They follow the rules of `genesis.ops.elementwise`: operands broadcast, and integers and bools compute in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.array import Array
from genesis.op import Context, Grads, Op
from genesis.ops.elementwise import _binary as binary
from genesis.ops.elementwise import _from_x as from_x
from genesis.ops.elementwise import _from_y as from_y
from genesis.ops.elementwise import _unary as unary
from genesis.ops.elementwise import add, div, exp, floating, mul, neg, reciprocal, rsqrt, sub
from genesis.ops.error_function import erf_values
from genesis.ops.formula import elementary

# --- Numpy functions --------------------------------------------------------------------------------------------------


def _elementwise(name: str, pole: float) -> Callable[..., Any]:
    """Return a function of `math` over arrays; `pole` is its value where it raises ValueError."""
    function = getattr(math, name)

    def one(x: float) -> float:
        try:
            return function(x)
        except ValueError:
            return pole

    ufunc = np.frompyfunc(one, 1, 1)

    def values(x: np.ndarray, out: np.ndarray | None = None) -> Any:
        result = np.asarray(ufunc(x.astype(np.float64))).astype(x.dtype)
        return np.positive(result, out=out)

    values.__name__ = name
    return elementary(values)


erfc_values = _elementwise("erfc", math.nan)
lgamma_values = _elementwise("lgamma", math.inf)

# erfinv near 0 and near ±1, by powers of -log(1 - x²): M. Giles, "Approximating the erfinv function" (2010).
_CENTRAL = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip


@elementary
def erfinv_values(x: np.ndarray, out: np.ndarray | None = None) -> Any:
    """Return the inverse of erf: Giles's approximation, improved by two of Halley's steps in float64."""
    z = np.asarray(x, np.float64)
    size = np.minimum(np.abs(z), np.nextafter(1, 0))
    w = -np.log((1 - size) * (1 + size))
    y = np.where(w < 5, np.polyval(_CENTRAL, np.minimum(w, 5) - 2.5), np.polyval(_TAIL, np.sqrt(np.maximum(w, 5)) - 3))
    y = y * size
    for _ in range(2):
        above = np.where(size < 0.5, erf_values(y) - size, (1 - size) - erfc_values(y))
        step = above * np.exp(y * y) * (math.sqrt(math.pi) / 2)
        y = y - step / (1 + y * step)
    y = np.where(np.abs(z) == 1, np.inf, np.where(np.abs(z) <= 1, y, np.nan))
    return np.positive(np.copysign(y, z).astype(x.dtype), out=out)


def digamma_values(x: np.ndarray, out: np.ndarray | None = None) -> Any:
    """Return ψ(x) in float64: reflection below 0, ψ(x) = ψ(x + 1) - 1/x up to 10, and the asymptotic series.

    As in torch, ψ(±0) is ∓∞, and a negative integer gives NaN.
    """
    z = x.astype(np.float64)
    whole = (z <= 0) & (z == np.floor(z))
    inside = np.where(whole, 0.5, z)
    y = np.where(inside < 0, 1 - inside, inside)
    shift: Any = 0.0
    for _ in range(10):
        low = y < 10
        shift = shift - np.where(low, 1 / y, 0)
        y = np.where(low, y + 1, y)
    r = 1 / (y * y)
    series = 1 / 12 - r * (1 / 120 - r * (1 / 252 - r * (1 / 240 - r * (1 / 132 - r * (691 / 32760)))))
    result = shift + np.log(y) - 0.5 / y - r * series
    tangent = np.tan(math.pi * np.where(inside < 0, inside - np.trunc(inside), 0.25))
    result = np.where(inside < 0, result - math.pi / tangent, result)
    result = np.where(whole, np.where(z == 0, -1 / z, np.nan), result)
    return np.positive(result.astype(x.dtype), out=out)


def trigamma_values(x: np.ndarray, out: np.ndarray | None = None) -> Any:
    """Return ψ'(x) in float64, by the method of `digamma_values`; poles give ∞."""
    z = x.astype(np.float64)
    whole = (z <= 0) & (z == np.floor(z))
    inside = np.where(whole, 0.5, z)
    y = np.where(inside < 0, 1 - inside, inside)
    shift: Any = 0.0
    for _ in range(10):
        low = y < 10
        shift = shift + np.where(low, 1 / (y * y), 0)
        y = np.where(low, y + 1, y)
    r = 1 / (y * y)
    series = 1 / 6 - r * (1 / 30 - r * (1 / 42 - r * (1 / 30 - r * (5 / 66 - r * (691 / 2730)))))
    result = shift + (1 + 0.5 / y + r * series) / y
    sine = np.sin(math.pi * np.where(inside < 0, inside - np.trunc(inside), 0.5))
    result = np.where(inside < 0, math.pi**2 / (sine * sine) - result, result)
    return np.positive(np.where(whole, np.inf, result).astype(x.dtype), out=out)


# --- The ops ----------------------------------------------------------------------------------------------------------

_FACTS: dict[str, Any] = {"family": "special", "flops": 20}
_WIDE = {**_FACTS, "autocast": "fp32"}

asin = from_x("asin", "The arcsine.", floating, np.arcsin, lambda x: rsqrt(sub(1, mul(x, x))), **_WIDE)
acos = from_x("acos", "The arccosine.", floating, np.arccos, lambda x: neg(rsqrt(sub(1, mul(x, x)))), **_WIDE)
atan = from_x("atan", "The arctangent.", floating, np.arctan, lambda x: reciprocal(add(mul(x, x), 1)), **_FACTS)
sinh = from_x("sinh", "The hyperbolic sine.", floating, np.sinh, lambda x: cosh(x), **_WIDE)  # noqa: PLW0108
cosh: Op = from_x("cosh", "The hyperbolic cosine.", floating, np.cosh, lambda x: sinh(x), **_WIDE)  # noqa: PLW0108
asinh = from_x("asinh", "The inverse of sinh.", floating, np.arcsinh, lambda x: rsqrt(add(mul(x, x), 1)), **_FACTS)
acosh = from_x(
    "acosh", "The inverse of cosh, for x ≥ 1.", floating, np.arccosh, lambda x: rsqrt(sub(mul(x, x), 1)), **_FACTS
)
atanh = from_x("atanh", "The inverse of tanh.", floating, np.arctanh, lambda x: reciprocal(sub(1, mul(x, x))), **_FACTS)
erfc = from_x(
    "erfc",
    "1 - erf(x), exact for large x.",
    floating,
    erfc_values,
    lambda x: mul(exp(neg(mul(x, x))), -2 / math.sqrt(math.pi)),
    **_FACTS,
)
erfinv = from_y(
    "erfinv", "The inverse of erf.", erfinv_values, lambda y: mul(exp(mul(y, y)), math.sqrt(math.pi) / 2), **_WIDE
)
trigamma = unary(
    "trigamma", "The derivative of digamma.", floating, trigamma_values,
    public="", method=False, in_place=False, torch="", **_FACTS,
)  # fmt: skip
digamma = from_x("digamma", "The derivative of lgamma.", floating, digamma_values, trigamma, **_FACTS)
lgamma = from_x("lgamma", "log |Γ(x)|.", floating, lgamma_values, digamma, **_FACTS)


def _squared(x: Any) -> Any:
    return mul(x, x) if isinstance(x, Array) else x * x


def _atan2_vjp(ctx: Context, g: Array) -> Grads:
    """dx = g·y / (x² + y²), dy = -g·x / (x² + y²)."""
    x, y = ctx.inputs
    ratio = div(g, add(_squared(x), _squared(y)))
    return mul(ratio, y) if ctx.needs[0] else None, neg(mul(ratio, x)) if ctx.needs[1] else None


atan2 = binary(
    "atan2", "The angle of the point (y, x), from -π to π.", floating, np.arctan2, _atan2_vjp,
    saves=(0, 1), in_place=True, **_FACTS,
)  # fmt: skip
