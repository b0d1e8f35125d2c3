"""Special functions: inverse and hyperbolic functions, and relatives of the error and gamma functions.

Reference: `genesis/ops/special.py`, under the same names. libdevice computes them; its float32 functions flush
subnormal numbers to 0, so near 0 an odd function returns its first term. ψ and ψ' are computed in float64.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels.maths import in_numpy
from genesis.kernels.pointwise.elementwise import elementwise


@triton.jit
def asin(x):
    return tl.where(tl.abs(x) < 1e-30, x, libdevice.asin(x))


@triton.jit
def acos(x):
    return libdevice.acos(x)


@triton.jit
def atan(x):
    return tl.where(tl.abs(x) < 1e-30, x, libdevice.atan(x))


@triton.jit
def sinh(x):
    return tl.where(tl.abs(x) < 1e-30, x, libdevice.sinh(x))


@triton.jit
def cosh(x):
    return libdevice.cosh(x)


@triton.jit
def asinh(x):
    return tl.where(tl.abs(x) < 1e-30, x, libdevice.asinh(x))


@triton.jit
def acosh(x):
    return libdevice.acosh(x)


@triton.jit
def atanh(x):
    return tl.where(tl.abs(x) < 1e-30, x, libdevice.atanh(x))


@triton.jit
def erfc(x):
    return libdevice.erfc(x.to(tl.float64)).to(x.dtype)


@triton.jit
def erfinv(x):
    return tl.where(tl.abs(x) < 1e-30, x * 0.8862269254527580, libdevice.erfinv(x))


@triton.jit
def lgamma(x):
    return libdevice.lgamma(x.to(tl.float64)).to(x.dtype)


@triton.jit
def atan2(x, y):
    return libdevice.atan2(x.to(tl.float64), y.to(tl.float64)).to(x.dtype)


@triton.jit
def digamma(x):
    z = x.to(tl.float64)
    whole = (z <= 0) & (z == tl.floor(z))
    inside = tl.where(whole, 0.5, z)
    y = tl.where(inside < 0, 1 - inside, inside)
    shift = y * 0
    for _ in range(10):
        shift -= tl.where(y < 10, 1 / y, 0.0)
        y = tl.where(y < 10, y + 1, y)
    r = 1 / (y * y)
    series = 0.08333333333333333 - r * (0.008333333333333333 - r * (0.003968253968253968 - r * (
        0.004166666666666667 - r * (0.007575757575757576 - r * 0.021092796092796094))))  # fmt: skip
    result = shift + libdevice.log(y) - 0.5 / y - r * series
    part = tl.where(inside < 0, inside - libdevice.trunc(inside), 0.25)
    result = tl.where(inside < 0, result - 3.141592653589793 / libdevice.tan(3.141592653589793 * part), result)
    pole = tl.where(z == 0, -1 / z, float("nan"))  # ∓∞ at ±0
    return tl.where(whole, pole, result).to(x.dtype)


@triton.jit
def trigamma(x):
    z = x.to(tl.float64)
    whole = (z <= 0) & (z == tl.floor(z))
    inside = tl.where(whole, 0.5, z)
    y = tl.where(inside < 0, 1 - inside, inside)
    shift = y * 0
    for _ in range(10):
        shift += tl.where(y < 10, 1 / (y * y), 0.0)
        y = tl.where(y < 10, y + 1, y)
    r = 1 / (y * y)
    series = 0.16666666666666666 - r * (0.03333333333333333 - r * (0.023809523809523808 - r * (
        0.03333333333333333 - r * (0.07575757575757576 - r * 0.2531135531135531))))  # fmt: skip
    result = shift + (1 + 0.5 / y + r * series) / y
    sine = libdevice.sin(3.141592653589793 * tl.where(inside < 0, inside - libdevice.trunc(inside), 0.5))
    result = tl.where(inside < 0, 9.869604401089358 / (sine * sine) - result, result)
    return tl.where(whole, float("inf"), result).to(x.dtype)


FUNCTIONS = {
    "asin": asin, "acos": acos, "atan": atan, "sinh": sinh, "cosh": cosh, "asinh": asinh, "acosh": acosh,
    "atanh": atanh, "erfc": erfc, "erfinv": erfinv, "lgamma": lgamma, "atan2": atan2, "digamma": digamma,
    "trigamma": trigamma,
}  # fmt: skip
if is_interpreted():
    from genesis.ops import special

    _NUMPY = {
        "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh,
        "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "atan2": np.arctan2,
    }  # fmt: skip
    for _name in FUNCTIONS:
        FUNCTIONS[_name] = in_numpy(_NUMPY.get(_name) or getattr(special, f"{_name}_values"))


def _run(function: Any, out: Array, *operands: Any) -> None:
    elementwise(function, out, *operands)


for _name, _function in FUNCTIONS.items():
    cuda_impl(_name)(functools.partial(_run, _function))
