"""Functions of one tile that Triton's language lacks or has only in a fast, less exact form.

On a GPU they come from CUDA's libdevice, whose float32 forms take subnormal numbers for 0 under Triton: where that
shows, the function is computed in float64 or patched. In Triton's interpreter numpy computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice

from genesis.backend.cuda.driver import is_interpreted

__all__ = [
    "ceil",
    "cos",
    "divide",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "floor_divide",
    "log",
    "log1p",
    "log2",
    "log10",
    "modulo",
    "power",
    "rint",
    "root",
    "rounded_product",
    "sin",
    "single_power",
    "tan",
    "tanh",
    "trunc",
]


@triton.jit
def exp(x):
    return libdevice.exp(x)


@triton.jit
def exp2(x):
    return libdevice.exp2(x)


@triton.jit
def expm1(x):
    return libdevice.expm1(x)


@triton.jit
def log(x):
    return libdevice.log(x)


@triton.jit
def log2(x):
    return libdevice.log2(x)


@triton.jit
def log10(x):
    return libdevice.log10(x)


@triton.jit
def log1p(x):
    return libdevice.log1p(x)


@triton.jit
def sin(x):
    return libdevice.sin(x)


@triton.jit
def cos(x):
    return libdevice.cos(x)


@triton.jit
def tan(x):
    return libdevice.tan(x)


@triton.jit
def tanh(x):
    return libdevice.tanh(x)


@triton.jit
def erf(x):
    return tl.where(tl.abs(x) < 1e-30, x * 1.1283791670955126, libdevice.erf(x))


@triton.jit
def rint(x):
    return libdevice.rint(x)


@triton.jit
def trunc(x):
    return libdevice.trunc(x)


@triton.jit
def floor(x):
    return tl.where((x < 0) & (x > -1), -1.0, tl.floor(x))


@triton.jit
def ceil(x):
    return tl.where((x > 0) & (x < 1), 1.0, tl.ceil(x))


@triton.jit
def power(x, p):
    if x.dtype == tl.float64:
        return libdevice.pow(x, p.to(tl.float64))
    else:
        return single_power(x.to(tl.float32), p).to(x.dtype)


ROUNDER = tl.constexpr(1.5 * 2.0**52)  # added to a float64 and taken away again, it leaves the nearest whole number


@triton.jit
def near_reciprocal(x):
    """1 / x of a normal float32, to 2^-22 of it."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def widened(bits):
    """The float64 of a normal positive float32, given by its bits: sooner there than by the units that convert."""
    return ((bits.to(tl.int64) << 29) + (896 << 52)).to(tl.float64, bitcast=True)


@triton.jit
def binary_logarithm(x):
    """log2 of a finite positive float32, as float64, to 2^-39 of it: with x = m·2^e, m around 1, e + log2 m by a
    polynomial in s^2, s = (m - 1) / (m + 1).
    """
    small = x < 1.1754943508222875e-38
    bits = tl.where(small, x * 16777216.0, x).to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23  # m is from sqrt(1/2) on
    bits -= e << 23
    e -= tl.where(small, 24, 0)
    m = widened(bits)
    near = widened(near_reciprocal(bits.to(tl.float32, bitcast=True) + 1.0).to(tl.int32, bitcast=True))
    s = (m - 1.0) * near
    s += ((m - 1.0) - s * (m + 1.0)) * near
    z = s * s
    y = 0.319906523040944 + 0.28288907081963255 * z
    y = 0.5770779425903104 + z * (0.41220923094222767 + z * y)
    y = 2.8853900817778504 + z * (0.9617966941125232 + z * y)
    e = (e.to(tl.int64) + 0x4338000000000000).to(tl.float64, bitcast=True) - ROUNDER  # ROUNDER's bits
    return e + s * y


@triton.jit
def power_of_two(x):
    """2^x as float32, of any float64 but NaN: to 2^-34 of it before the rounding."""
    lifted = x + ROUNDER
    n = lifted.to(tl.int64, bitcast=True)
    f = x - (lifted - ROUNDER)
    y = 0.00015469729211689803 + 1.5303701125383214e-05 * f
    y = 0.009618025613324529 + f * (0.0013333478471927386 + f * y)
    y = 0.24022651213498095 + f * (0.055504109063279704 + f * y)
    y = 0.9999999999595615 + f * (0.6931471805568319 + f * y)
    y = (y.to(tl.int64, bitcast=True) + (n << 52)).to(tl.float64, bitcast=True).to(tl.float32)
    high = (x.to(tl.int64, bitcast=True) >> 32).to(tl.int32)
    beyond = tl.where(high < 0, 0.0, float("inf"))
    return tl.where((high & 0x7FFFFFFF) >= 0x40640000, beyond, y)  # 160 and more


@triton.jit
def single_power(x, p):
    """x^p of a float32 x: 2^(p·log2 |x|) in float64, of which 2^-30 may be wrong, so that rounding decides.

    libdevice's power of float64 takes twice the time for digits that the rounding drops.
    """
    size = tl.abs(x)
    exponent = p.to(tl.float64)
    y = tl.where(size == 1, 1.0, power_of_two(exponent * binary_logarithm(size)))
    infinite = size == float("inf")
    y = tl.where((size == 0) | infinite, tl.where(infinite == (p > 0), float("inf"), 0.0), y)

    lifted = exponent + ROUNDER
    large = tl.abs(p) >= 16777216.0  # then it is whole and even
    whole = (lifted - ROUNDER == exponent) | large
    odd = whole & ((lifted.to(tl.int64, bitcast=True) & 1) != 0) & (large == 0)
    negative = x.to(tl.int32, bitcast=True) < 0
    y = tl.where(negative & odd, like(y, x), y)  # Triton 3.6 has 0 - y for -y, which makes 0 of 0
    y = tl.where((x < 0) & (whole == 0) & (infinite == 0), float("nan"), y)
    y = tl.where((x != x) | (p != p), float("nan"), y)
    return tl.where((p == 0) | (x == 1), 1.0, y)


@triton.jit
def fused(x, y, z):
    """x·y + z, rounded once."""
    return tl.fma(x, y, z)


@triton.jit
def rounded_product(x, y):
    """x·y of one shape, rounded: never fused with an addition behind it."""
    return fused(x, y, tl.zeros_like(x))


@triton.jit
def whole_parts(x, y):
    """|x| // |y| and what is left of |x|, both exact, of float32; and for which elements they hold: those whose
    quotient is below 2^18, and whose divisor has a reciprocal.

    The quotient is the nearest whole number to x·(1/y), of which 2^-4 may be wrong: what is left is at most 9/16 of y,
    either way, and as a multiple of y's last place it is exact.
    """
    x, y = tl.abs(x), tl.abs(y)
    held = (y > 2.0**-100) & (y < 2.0**100) & (x < y * 262144.0)
    whole = (x * near_reciprocal(y) + 12582912.0) - 12582912.0  # 1.5·2^23, which leaves no fraction
    rest = fused(-whole, y, x)
    over = rest < 0
    return tl.where(over, whole - 1, whole), tl.where(over, rest + y, rest), held


@triton.jit
def like(x, y):
    """A float32 that is not negative, with the sign of y."""
    sign = y.to(tl.int32, bitcast=True) & -0x80000000
    return (x.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def fmod(x, y):
    return libdevice.fmod(x.to(tl.float64), y.to(tl.float64)).to(x.dtype)


@triton.jit
def floored_modulo(rest, y):
    """The remainder with the sign of y, from the one with the sign of x."""
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@triton.jit
def any_modulo(x, y):
    """x - y·floor(x / y): the sign of y."""
    return floored_modulo(fmod(x, y), y)


@triton.jit
def modulo(x, y):
    """The same; what only `any_modulo` can do is done in tiles that have some of it."""
    if x.dtype == tl.float64:
        return any_modulo(x, y)
    else:
        _, rest, held = whole_parts(x, y)
        found = floored_modulo(like(rest, x), y)
        if tl.min(held.to(tl.int32)) == 0:
            found = tl.where(held, found, any_modulo(x, y))
        return found


@triton.jit
def any_floor_divide(x, y):
    """floor(x / y)."""
    rest = fmod(x, y)
    quotient = divide(x - rest, y) - ((rest != 0) & ((rest < 0) != (y < 0))).to(x.dtype)
    whole = floor(quotient)
    whole = tl.where(quotient - whole > 0.5, whole + 1, whole)  # the quotient was a rounding below
    return tl.where(y == 0, divide(x, y), whole)


@triton.jit
def floor_divide(x, y):
    """The same; what only `any_floor_divide` can do is done in tiles that have some of it."""
    if x.dtype == tl.float64:
        return any_floor_divide(x, y)
    else:
        whole, rest, held = whole_parts(x, y)
        opposite = (x.to(tl.int32, bitcast=True) ^ y.to(tl.int32, bitcast=True)) < 0
        found = tl.where(opposite, -(whole + (rest != 0).to(tl.float32)), whole)
        if tl.min(held.to(tl.int32)) == 0:
            found = tl.where(held, found, any_floor_divide(x, y))
        return found


@triton.jit
def divide(x, y):
    """x / y rounded to nearest (Triton's own division of float32 is off by up to two units)."""
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y


@triton.jit
def root(x):
    """The square root rounded to nearest."""
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


def _on_host(function: Callable[..., np.ndarray]) -> Callable[..., Any]:
    """`function` on the numpy values behind interpreted tiles, in their own type."""

    def interpreted(*tiles: Any) -> Any:
        first = tiles[0]
        with np.errstate(all="ignore"):
            values = function(*(t.handle.data for t in tiles)).astype(first.handle.data.dtype)
        return tl.tensor(type(first.handle)(values, first.dtype.scalar), first.type)

    return interpreted


if is_interpreted():
    from genesis.ops.elementwise import erf_values

    exp, exp2, expm1 = _on_host(np.exp), _on_host(np.exp2), _on_host(np.expm1)
    log, log2, log10, log1p = _on_host(np.log), _on_host(np.log2), _on_host(np.log10), _on_host(np.log1p)
    sin, cos, tan, tanh = _on_host(np.sin), _on_host(np.cos), _on_host(np.tan), _on_host(np.tanh)
    rint, trunc, power, erf = _on_host(np.rint), _on_host(np.trunc), _on_host(np.power), _on_host(erf_values)
    near_reciprocal = _on_host(np.reciprocal)
    fused = _on_host(lambda x, y, z: x.astype(np.float64) * y + z)  # exact where the product is about -z
    fmod, divide, root = _on_host(np.fmod), _on_host(np.divide), _on_host(np.sqrt)
