"""Elementwise functions that Triton lacks, or has only in a fast, less exact form.

Reference: the numpy function of the same name, as `genesis/ops/elementwise.py` uses it.

On a GPU most of them are CUDA's libdevice functions. Under Triton libdevice's float32 functions flush subnormal numbers
to 0; where that matters, a function is computed in float64 or corrected. In Triton's interpreter numpy computes them.
All functions take and return tiles of any shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice
from triton.language.extra.cuda.libdevice import cos, exp, exp2, log, log2, rint, sin, tanh, trunc

from genesis.backend.cuda.driver import is_interpreted

fma = tl.fma


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
        return float32_power(x.to(tl.float32), p).to(x.dtype)


ROUND_MAGIC = tl.constexpr(1.5 * 2.0**52)  # adding it to a float64 and subtracting it again gives the nearest integer


@triton.jit
def approx_reciprocal(x):
    """Return 1 / x of a normal float32, with a relative error of 2^-22."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def float64_from_bits(bits):
    """Return a normal positive float32, given by its bits, as float64. This is faster than the conversion units."""
    return ((bits.to(tl.int64) << 29) + (896 << 52)).to(tl.float64, bitcast=True)


@triton.jit
def log2_float64(x):
    """Return log2 of a finite, normal, positive float32 in float64, with a relative error of 2^-39.

    For x = m·2^e with m near 1 this is e + log2 m, where log2 m is s times a polynomial in s^2, s = (m - 1) / (m + 1).
    """
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23  # m is at least sqrt(1/2)
    bits -= e << 23
    m = float64_from_bits(bits)
    near = float64_from_bits(approx_reciprocal(bits.to(tl.float32, bitcast=True) + 1.0).to(tl.int32, bitcast=True))
    s = (m - 1.0) * near
    s += ((m - 1.0) - s * (m + 1.0)) * near
    z = s * s
    y = 0.319906523040944 + 0.28288907081963255 * z
    y = 0.5770779425903104 + z * (0.41220923094222767 + z * y)
    y = 2.8853900817778504 + z * (0.9617966941125232 + z * y)
    e = (e.to(tl.int64) + 0x4338000000000000).to(tl.float64, bitcast=True) - ROUND_MAGIC  # the bits of ROUND_MAGIC
    return e + s * y


@triton.jit
def exp2_float64(x):
    """Return 2^x of a float64 below 512 in size, rounded to float32. The relative error before rounding is 2^-34."""
    lifted = x + ROUND_MAGIC
    n = lifted.to(tl.int64, bitcast=True)
    f = x - (lifted - ROUND_MAGIC)
    y = 0.00015469729211689803 + 1.5303701125383214e-05 * f
    y = 0.009618025613324529 + f * (0.0013333478471927386 + f * y)
    y = 0.24022651213498095 + f * (0.055504109063279704 + f * y)
    y = 0.9999999999595615 + f * (0.6931471805568319 + f * y)
    return (y.to(tl.int64, bitcast=True) + (n << 52)).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def high_bits(x):
    """Return the high 32 bits of a float64, which order like the sizes of its values of one sign."""
    return (x.to(tl.int64, bitcast=True) >> 32).to(tl.int32)


@triton.jit
def power_of_any(y, x, p):
    """Return x^p of float32 values, given y = |x|^p where x is neither 0 nor infinite."""
    size = tl.abs(x)
    infinite = size == float("inf")
    y = tl.where(size == 1, 1.0, y)
    y = tl.where((size == 0) | infinite, tl.where(infinite == (p > 0), float("inf"), 0.0), y)
    integral = tl.floor(p) == p
    odd = integral & (tl.floor(p * 0.5) != p * 0.5)  # a large p is an even integer
    negative = x.to(tl.int32, bitcast=True) < 0
    y = tl.where(negative & odd, copysign(y, x), y)  # Triton 3.6 computes -y as 0 - y, which gives 0 for 0
    y = tl.where((x < 0) & (integral == 0) & (infinite == 0), float("nan"), y)
    y = tl.where((x != x) | (p != p), float("nan"), y)
    return tl.where((p == 0) | (x == 1), 1.0, y)


@triton.jit
def float32_power(x, p):
    """Return x^p of a float32 x: 2^(p·log2 |x|) in float64, with a relative error of 2^-30 before rounding to float32.

    libdevice's float64 power takes twice the time. Tiles that hold more than positive normal x take a longer way.
    """
    y = p.to(tl.float64) * log2_float64(x)
    plain = (x >= 1.1754943508222875e-38) & (x < float("inf")) & ((high_bits(y) & 0x7FFFFFFF) < 0x40640000)  # 160
    found = exp2_float64(y)
    if tl.min(plain.to(tl.int32)) == 0:
        size = tl.abs(x)
        small = size < 1.1754943508222875e-38
        logarithm = log2_float64(tl.where(small, size * 16777216.0, size)) - tl.where(small, 24.0, 0.0)
        y = p.to(tl.float64) * logarithm
        high = high_bits(y)
        beyond = tl.where(high < 0, 0.0, float("inf"))
        found = power_of_any(tl.where((high & 0x7FFFFFFF) < 0x40640000, exp2_float64(y), beyond), x, p)
    return found


@triton.jit
def fast_power(x, p):
    """Return x^p of float32 values: 2^(p·log2 |x|) in float32, with a relative error of 2^-16 at 2^±127."""
    y = p * log2(x)
    plain = (x >= 1.1754943508222875e-38) & (x < float("inf")) & (tl.abs(y) < 126)
    found = tl.exp2(y)
    if tl.min(plain.to(tl.int32)) == 0:
        size = tl.abs(x)
        small = size < 1.1754943508222875e-38  # libdevice flushes such numbers to 0
        y = p * (log2(tl.where(small, size * 16777216.0, size)) - tl.where(small, 24.0, 0.0))
        half = tl.exp2(y * 0.5)  # the square root of the result, because `tl.exp2` flushes subnormal results
        found = power_of_any(half * half, x, p)
    return found


@triton.jit
def fast_exp(x):
    """Return e^x of a float32 x, with a relative error of 2^-16 at 2^±127."""
    half = tl.exp(x * 0.5)  # `tl.exp` flushes subnormal results to 0
    return half * half


@triton.jit
def fast_erf(x):
    """Return erf of a float32 x (Abramowitz and Stegun, 7.1.26), with errors below 7e-7 and below 2^-14 of it."""
    size = tl.abs(x)
    t = approx_reciprocal(0.3275911 * size + 1.0)
    y = 1.421413741 + t * (1.061405429 * t - 1.453152027)
    y = t * (0.254829592 + t * (t * y - 0.284496736))
    return tl.where(size < 0.01, x * 1.1283791670955126, copysign(1.0 - y * tl.exp2(x * x * -1.4426950408889634), x))


@triton.jit
def rounded_product(x, y):
    """Return x·y, rounded. It is never contracted with a later addition. x and y must have the same shape."""
    return fma(x, y, tl.where(x == x, 0.0, 0.0).to(x.dtype))  # Gluon has no `tl.zeros_like`


@triton.jit
def quotient_remainder(x, y):
    """Return |x| // |y| and |x| % |y| of float32, and a mask of the elements for which both are exact.

    They are exact for quotients below 2^18 and divisors with a normal reciprocal. The quotient is x·(1/y) rounded to an
    integer, with an error of at most 2^-4 before rounding. The remainder is then at most 9/16 of y in size, and exact,
    because it is a multiple of y's last place.
    """
    x, y = tl.abs(x), tl.abs(y)
    exact = (y > 2.0**-100) & (y < 2.0**100) & (x < y * 262144.0)
    quotient = (x * approx_reciprocal(y) + 12582912.0) - 12582912.0  # 1.5·2^23 rounds to an integer
    remainder = fma(-quotient, y, x)
    over = remainder < 0
    return tl.where(over, quotient - 1, quotient), tl.where(over, remainder + y, remainder), exact


@triton.jit
def copysign(x, y):
    """Return a non-negative float32 x with the sign of y."""
    sign = y.to(tl.int32, bitcast=True) & -0x80000000
    return (x.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def fmod(x, y):
    return libdevice.fmod(x.to(tl.float64), y.to(tl.float64)).to(x.dtype)


@triton.jit
def floored_remainder(rest, y):
    """Return the remainder with the sign of y, given the remainder with the sign of x."""
    return tl.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


@triton.jit
def exact_modulo(x, y):
    """Return x - y·floor(x / y), which has the sign of y."""
    return floored_remainder(fmod(x, y), y)


@triton.jit
def modulo(x, y):
    """Return `exact_modulo`, which runs only in tiles that need it: those with quotients of 2^18 or more."""
    if x.dtype == tl.float64:
        return exact_modulo(x, y)
    else:
        _, rest, exact = quotient_remainder(x, y)
        found = floored_remainder(copysign(rest, x), y)
        if tl.min(exact.to(tl.int32)) == 0:
            found = tl.where(exact, found, exact_modulo(x, y))
        return found


@triton.jit
def exact_floor_divide(x, y):
    remainder = fmod(x, y)
    quotient = divide(x - remainder, y) - ((remainder != 0) & ((remainder < 0) != (y < 0))).to(x.dtype)
    floored = floor(quotient)
    floored = tl.where(quotient - floored > 0.5, floored + 1, floored)  # the quotient was rounded down
    return tl.where(y == 0, divide(x, y), floored)


@triton.jit
def floor_divide(x, y):
    """Return `exact_floor_divide`, which runs only in tiles that need it: those with quotients of 2^18 or more."""
    if x.dtype == tl.float64:
        return exact_floor_divide(x, y)
    else:
        floored, remainder, exact = quotient_remainder(x, y)
        opposite = (x.to(tl.int32, bitcast=True) ^ y.to(tl.int32, bitcast=True)) < 0
        found = tl.where(opposite, -(floored + (remainder != 0).to(tl.float32)), floored)
        if tl.min(exact.to(tl.int32)) == 0:
            found = tl.where(exact, found, exact_floor_divide(x, y))
        return found


@triton.jit
def divide(x, y):
    """Return x / y rounded to nearest. The error of Triton's float32 division is up to two ulps."""
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y


@triton.jit
def root(x):
    """Return the square root rounded to nearest."""
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def maximum(a, b):
    """Return the larger of a and b, or NaN if one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    """Return the smaller of a and b, or NaN if one is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


# --- Integers wrap around; division by 0 gives 0, because raising an error would require waiting for the GPU ----------


@triton.jit
def integer_floor_divide(x, y):
    """Return floor(x / y)."""
    safe = tl.where(y == 0, 1, y).to(x.dtype)
    quotient = x // safe
    quotient = (quotient - ((x % safe != 0) & ((x < 0) != (safe < 0))).to(x.dtype)).to(x.dtype)
    return tl.where(y == 0, 0, quotient).to(x.dtype)


@triton.jit
def integer_remainder(x, y):
    """Return x - y·floor(x / y), which has the sign of y."""
    safe = tl.where(y == 0, 1, y).to(x.dtype)
    rest = floored_remainder(x % safe, safe)
    return tl.where(y == 0, 0, rest).to(x.dtype)


@triton.jit
def integer_power(x, p):
    """Return x^p by squaring. A negative power of anything but 1 and -1 is 0."""
    one = (x * 0 + 1).to(x.dtype)
    result, base, left = one, x, p
    for _ in range(x.dtype.primitive_bitwidth):
        result = tl.where((left & 1) != 0, result * base, result).to(x.dtype)
        base = (base * base).to(x.dtype)
        left = (left >> 1).to(x.dtype)
    flipped = tl.where((p & 1) != 0, x, one)
    unit = tl.where(x == 1, one, tl.where((x < 0) & (x + one == 0), flipped, 0)).to(x.dtype)
    return tl.where(p < 0, unit, result)


@triton.jit
def left_shift(x, y):
    """Return x << y. A shift by the type's width or more gives 0."""
    inside = (y >= 0) & (y < x.dtype.primitive_bitwidth)
    return tl.where(inside, x << tl.where(inside, y, 0).to(x.dtype), 0).to(x.dtype)


@triton.jit
def right_shift(x, y):
    """Return x >> y. A shift by the type's width or more gives 0 or -1, by the sign."""
    inside = (y >= 0) & (y < x.dtype.primitive_bitwidth)
    gone = tl.where(x < 0, -1, 0).to(x.dtype)
    return tl.where(inside, x >> tl.where(inside, y, 0).to(x.dtype), gone).to(x.dtype)


def in_numpy(function: Callable[..., np.ndarray]) -> Callable[..., Any]:
    """Return a version of `function` that takes interpreted tiles and computes with their numpy arrays."""

    def interpreted(*tiles: Any) -> Any:
        first = tiles[0]
        with np.errstate(all="ignore"):
            values = function(*(t.handle.data for t in tiles)).astype(first.handle.data.dtype)
        return tl.tensor(type(first.handle)(values, first.dtype.scalar), first.type)

    return interpreted


if is_interpreted():
    exp, exp2, log, log2 = in_numpy(np.exp), in_numpy(np.exp2), in_numpy(np.log), in_numpy(np.log2)
    sin, cos, tanh = in_numpy(np.sin), in_numpy(np.cos), in_numpy(np.tanh)
    rint, trunc, power = in_numpy(np.rint), in_numpy(np.trunc), in_numpy(np.power)
    approx_reciprocal = in_numpy(np.reciprocal)
    fma = in_numpy(lambda x, y, z: x.astype(np.float64) * y + z)  # exact if x·y is about -z
    fmod, divide, root = in_numpy(np.fmod), in_numpy(np.divide), in_numpy(np.sqrt)


# --- Sums whose bits do not depend on the order -----------------------------------------------------------------------


@triton.jit
def size_bits(x):
    """Return the bits of |x| for float32 x. They order like |x|, with infinity and then NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def in_units(x, top):
    """Return float32 x in units of 2^-47 of the largest power of 2 in `top`, truncated to int64.

    Args:
        top: the largest of `size_bits` of all terms of the sum, of x's shape or broadcast to it.
    """
    return (x * ((301 - tl.maximum(top >> 23, 64)) << 23).to(tl.float32, bitcast=True)).to(tl.int64)


@triton.jit
def from_units(units, top):
    """Return a sum of `in_units` as float32: infinite or NaN if the largest term is."""
    total = units.to(tl.float32) * ((tl.maximum(top >> 23, 64) - 47) << 23).to(tl.float32, bitcast=True)
    return tl.where(top >= 0x7F800000, top.to(tl.float32, bitcast=True), total)


@triton.jit
def order_free_sum(x, AXIS: tl.constexpr):
    """Return the sum of float32 x along an axis of at most 2^15 terms. Integers are added, so no layout, tile or number
    of warps changes a bit of it. Its error is below 2^-32 of the largest term, before rounding to float32.
    """
    top = tl.max(size_bits(x), AXIS)
    return from_units(tl.sum(in_units(x, tl.expand_dims(top, AXIS)), AXIS), top)
