"""Whether tensors are equal, or close to each other, named and behaving as torch's."""

from __future__ import annotations

from genesis.autograd.modes import no_grad
from genesis.errors import DTypeError, UsageError
from genesis.functions import elementwise as ew
from genesis.functions import pointwise as pw
from genesis.functions.reduce import all as all_of
from genesis.functions.shape import array_of
from genesis.functions.surface import public
from genesis.functions.types import Tensor


@public
def isclose(x: Tensor, y: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """Where |x - y| <= atol + rtol·|y|, or both are equal, as bools.

    Args:
        equal_nan: whether NaN is close to NaN.

    Raises:
        DTypeError: if the two have different types.
        UsageError: for a negative tolerance.
    """
    a, b = array_of(x, "isclose"), array_of(y, "isclose")
    if a.dtype is not b.dtype:
        raise DTypeError(f"isclose of {a.dtype.name} and {b.dtype.name}", next="cast one with .to(...)")
    if rtol < 0 or atol < 0:
        raise UsageError(f"isclose: rtol {rtol} and atol {atol} must be at least 0")
    with no_grad():
        close = pw.eq(x, y)
        if equal_nan and a.dtype.is_floating_point:
            close = pw.logical_or(close, pw.logical_and(pw.isnan(x), pw.isnan(y)))
        if a.dtype.category == 0 or (rtol == 0 and atol == 0):
            return close
        apart = pw.abs(ew.sub(x, y))
        allowed = ew.add(pw.abs(pw.mul(y, rtol)), atol)
        return pw.logical_or(close, pw.logical_and(pw.isfinite(apart), pw.le(apart, allowed)))


@public
def allclose(x: Tensor, y: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Whether `isclose` holds everywhere; waits for the device."""
    return bool(all_of(isclose(x, y, rtol, atol, equal_nan)).array.item())


@public
def equal(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have one shape and equal elements; waits for the device."""
    a, b = array_of(x, "equal"), array_of(y, "equal")
    return a.shape == b.shape and bool(all_of(pw.eq(x, y)).array.item())
