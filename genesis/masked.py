"""Functions of torch.masked: elements where `mask` is False do not count.

A row whose mask is False everywhere gives the function's neutral value (0 for a sum), or NaN if there is none.

>>> genesis.masked.mean(genesis.tensor([1.0, 5.0, 9.0]), mask=genesis.tensor([True, True, False]))
tensor(3.)
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

from genesis.dtypes import bool_, float32, iinfo, int64
from genesis.errors import DTypeError, UsageError
from genesis.functions.matrix_norms import vector_norm
from genesis.functions.surface import functions
from genesis.keywords import check_calls
from genesis.shapes import normalize_axis


def _filled(x: Any, mask: Any, value: float) -> Any:
    return x if mask is None else x.masked_fill(mask.logical_not(), value)


def _extreme(x: Any, sign: int) -> float:
    """Return the largest (sign 1) or the smallest value of x's type."""
    if x.is_floating_point():
        return sign * math.inf
    return iinfo(x.dtype).max if sign > 0 else iinfo(x.dtype).min


def _dims(x: Any, dim: Any) -> tuple[int, ...]:
    if dim is None or dim == () or dim == []:
        return tuple(range(x.ndim))
    return tuple([normalize_axis(d, x.ndim) for d in (dim if isinstance(dim, (tuple, list)) else (dim,))])


def _product(x: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    kind = dtype or (x.dtype if x.is_floating_point() else int64)
    for d in sorted(_dims(x, dim), reverse=True):
        x = x.prod(d, keepdim, dtype=kind)
    return x.to(kind)


def _reduction(name: str, neutral: Callable[[Any], float], compute: Callable[..., Any]) -> Any:
    def function(input: Any, dim: Any = None, *, keepdim: bool = False, dtype: Any = None, mask: Any = None) -> Any:
        return compute(_filled(input, mask, neutral(input)), dim, builtins.bool(keepdim), dtype)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Compute `{name}` of the elements where `mask` is True."
    return function


def _scan(name: str, neutral: Callable[[Any], float], compute: Callable[..., Any]) -> Any:
    def function(input: Any, dim: int, *, dtype: Any = None, mask: Any = None) -> Any:
        kind = input.dtype if dtype is None else dtype
        return compute(_filled(input, mask, neutral(input)), dim, dtype=kind).to(kind)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Compute `{name}` along `dim` of the elements where `mask` is True."
    return function


def _low(x: Any) -> float:
    return _extreme(x, -1)


def _high(x: Any) -> float:
    return _extreme(x, 1)


sum = _reduction("sum", lambda x: 0, lambda x, d, keep, t: x.sum(d, keep, dtype=t))
prod = _reduction("prod", lambda x: 1, _product)
amax = _reduction("amax", _low, lambda x, d, keep, t: x.amax(_dims(x, d), keep).to(t or x.dtype))
amin = _reduction("amin", _high, lambda x, d, keep, t: x.amin(_dims(x, d), keep).to(t or x.dtype))
argmax = _reduction("argmax", _low, lambda x, d, keep, t: x.argmax(d, keep).to(t or x.dtype))
argmin = _reduction("argmin", _high, lambda x, d, keep, t: x.argmin(d, keep).to(t or x.dtype))
logsumexp = _reduction("logsumexp", _low, lambda x, d, keep, t: x.logsumexp(_dims(x, d), keep).to(t or x.dtype))
cumsum = _scan("cumsum", lambda x: 0, functions["cumsum"])
cumprod = _scan("cumprod", lambda x: 1, functions["cumprod"])
softmax = _scan("softmax", _low, functions["softmax"])
log_softmax = _scan("log_softmax", _low, functions["log_softmax"])
softmin = _scan("softmin", _high, lambda x, d, dtype: functions["softmax"](-x, d, dtype=dtype))


def _count(x: Any, dim: Any, keepdim: bool, mask: Any) -> Any:
    mask = functions["ones"](x.shape, dtype=bool_, device=x.device) if mask is None else mask.expand(x.shape)
    return mask.sum(dim, bool(keepdim))


def mean(input: Any, dim: Any = None, *, keepdim: bool = False, dtype: Any = None, mask: Any = None) -> Any:
    """Return the mean of the elements where `mask` is True."""
    kind = input.dtype if dtype is None else dtype
    if not kind.is_floating_point:
        raise DTypeError(f"masked.mean takes floats, got {kind}", next="pass dtype=")
    return sum(input, dim, keepdim=keepdim, dtype=kind, mask=mask) / _count(input, dim, keepdim, mask)


def median(input: Any, dim: int = -1, *, keepdim: bool = False, dtype: Any = None, mask: Any = None) -> Any:
    """Return the lower median along `dim` of the elements where `mask` is True."""
    is_float = input.is_floating_point()
    found = _filled(input if is_float else input.float(), mask, math.nan).nanmedian(dim, bool(keepdim)).values
    if not is_float and bool(found.isnan().any()):
        raise UsageError("masked.median of integers has a row without elements", next="cast with .float()")
    return found if is_float else found.to(input.dtype if dtype is None else dtype)


def norm(
    input: Any, ord: float = 2.0, dim: Any = None, *, keepdim: bool = False, dtype: Any = None, mask: Any = None
) -> Any:
    """Return the `ord`-norm of the elements where `mask` is True."""
    x = _filled(input, mask, math.inf if ord == -math.inf else 0)
    return vector_norm(x, ord, _dims(x, dim), bool(keepdim), dtype=dtype or x.dtype)


def var(
    input: Any, dim: Any = None, unbiased: bool | None = None, *, correction: float | None = None,
    keepdim: bool = False, dtype: Any = None, mask: Any = None,
) -> Any:  # fmt: skip
    """Return the variance of the elements where `mask` is True."""
    if unbiased is not None and correction is not None:
        raise UsageError("masked.var got both unbiased and correction", next="pass one")
    fewer = float(unbiased is not False) if correction is None else float(correction)
    kind = dtype or (input.dtype if input.is_floating_point() else float32)
    count = _count(input, dim, True, mask)
    apart = input - sum(input, dim, keepdim=True, dtype=kind, mask=mask) / count
    total = sum(apart * apart, dim, keepdim=keepdim, dtype=kind, mask=mask)
    return (total / (count.reshape(total.shape).to(kind) - fewer).clamp(min=0)).to(kind)


def std(
    input: Any, dim: Any = None, unbiased: bool | None = None, *, correction: float | None = None,
    keepdim: bool = False, dtype: Any = None, mask: Any = None,
) -> Any:  # fmt: skip
    """Return the standard deviation of the elements where `mask` is True."""
    return var(input, dim, unbiased, correction=correction, keepdim=keepdim, dtype=dtype, mask=mask).sqrt()


def normalize(input: Any, ord: float, dim: int, *, eps: float = 1e-12, dtype: Any = None, mask: Any = None) -> Any:
    """Return the elements where `mask` is True divided by their `ord`-norm along `dim`, which is at least `eps`."""
    return _filled(input, mask, 0) / norm(input, ord, dim, keepdim=True, dtype=dtype, mask=mask).clamp(min=eps)


def logaddexp(input: Any, other: Any, *, dtype: Any = None, input_mask: Any = None, other_mask: Any = None) -> Any:
    """Return log(e^input + e^other), where an operand's elements count if its mask is True."""
    x, y = _filled(input, input_mask, _low(input)), _filled(other, other_mask, _low(other))
    return functions["logaddexp"](x, y).to(input.dtype if dtype is None else dtype)


__all__ = [
    "amax", "amin", "argmax", "argmin", "cumprod", "cumsum", "log_softmax", "logaddexp", "logsumexp", "mean", "median",
    "norm", "normalize", "prod", "softmax", "softmin", "std", "sum", "var",
]  # fmt: skip

check_calls(globals(), __all__)
