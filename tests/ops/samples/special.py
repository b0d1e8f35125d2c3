"""Rows for special functions: inverse and hyperbolic functions, and relatives of the error and gamma functions."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np

from tests.ops.samples.elementwise import ALL_INTS, Make, binary, precise, signed, unary
from tests.ops.sampling import Rows, uniform


def between(low: float, high: float) -> Make:
    """Values between two bounds."""
    return lambda rng, *shape: uniform(rng, low, high, *shape)


def _digamma(x: float) -> float:
    """ψ(x + 100) by its asymptotic series, less 1 / (x + n) for the 100 steps to it."""
    far = x + 100
    steps = math.fsum(1 / (x + n) for n in range(100))
    return math.log(far) - 1 / (2 * far) - 1 / (12 * far**2) + 1 / (120 * far**4) - steps


def _trigamma(x: float) -> float:
    """Σ 1 / (x + n)² of 100 terms, and of the rest by Euler and Maclaurin."""
    far = x + 100
    steps = math.fsum(1 / (x + n) ** 2 for n in range(100))
    return steps + 1 / far + 1 / (2 * far**2) + 1 / (6 * far**3) - 1 / (30 * far**5)


def _lgamma(x: float) -> float:
    """Stirling's series at x + 30 less the logarithm of the product of the 30 steps to it, in 28 digits."""
    far, steps = Decimal(x) + 30, math.prod(Decimal(x) + n for n in range(30))
    terms = ((1, 12, 1), (-1, 360, 3), (1, 1260, 5), (-1, 1680, 7), (1, 1188, 9))
    series = sum(Decimal(a) / (b * far**n) for a, b, n in terms)
    return float(
        (far - Decimal("0.5")) * far.ln() - far + Decimal("0.9189385332046727417803297364") + series - steps.ln()
    )


def _inverse_of_erf(x: float) -> float:
    """Bisection."""
    low, high = -6.0, 6.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle) < x else (low, middle)
    return low


def each(function: Any) -> Any:
    return np.vectorize(lambda x: function(float(x)), otypes=[float])


INSIDE: Make = between(-0.9, 0.9)
ABOVE: Make = between(1.2, 4)
# Integers are not sampled where most of them lie outside the domain.
STEPS = {"reduction": lambda case: 30, "extremes": False}  # ψ and ψ' are sums
LANCZOS = {"reduction": lambda case: 13, "extremes": False}  # Python sums 13 terms for lgamma
ROWS: list[Rows] = [
    unary("asin", precise(np.arcsin), INSIDE),
    unary("acos", precise(np.arccos), INSIDE),
    unary("atan", precise(np.arctan), int_dtypes=ALL_INTS),
    unary("sinh", precise(np.sinh), between(-4, 4)),
    unary("cosh", precise(np.cosh), between(-4, 4)),
    unary("asinh", precise(np.arcsinh), int_dtypes=ALL_INTS),
    unary("acosh", precise(np.arccosh), ABOVE),
    unary("atanh", precise(np.arctanh), INSIDE),
    unary("erfc", each(math.erfc), int_dtypes=ALL_INTS),
    unary("erfinv", each(_inverse_of_erf), INSIDE, extremes=False),
    unary("lgamma", each(_lgamma), between(0.2, 6), **LANCZOS),
    unary("digamma", each(_digamma), between(0.6, 6), **STEPS),
    replace(unary("trigamma", each(_trigamma), between(0.2, 6), **STEPS), grads=None),
    binary("atan2", precise(np.arctan2), signed, signed),
]
