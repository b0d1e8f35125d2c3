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
    "fmod",
    "log",
    "log1p",
    "log2",
    "log10",
    "power",
    "rint",
    "root",
    "sin",
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
    return libdevice.pow(x.to(tl.float64), p.to(tl.float64)).to(x.dtype)


@triton.jit
def fmod(x, y):
    return libdevice.fmod(x.to(tl.float64), y.to(tl.float64)).to(x.dtype)


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
    fmod, divide, root = _on_host(np.fmod), _on_host(np.divide), _on_host(np.sqrt)
