"""Comparison of results in tests, as in torch.testing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from genesis.errors import DTypeError, UsageError
from genesis.functions.create import as_tensor
from genesis.tensor import Tensor

__all__ = ["assert_close"]

# (rtol, atol) by dtype; others compare exactly. Of two dtypes the larger of each counts.
_TOLERANCES = {
    "float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float32": (1.3e-6, 1e-5), "float64": (1e-7, 1e-7),
}  # fmt: skip
_NUMBERS = (bool, int, float)


def assert_close(
    actual: Any,
    expected: Any,
    *,
    allow_subclasses: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    check_device: bool = True,
    check_dtype: bool = True,
    check_layout: bool = True,
    check_stride: bool = False,
    msg: str | Callable[[str], str] | None = None,
) -> None:
    """Raise AssertionError unless |actual - expected| <= atol + rtol·|expected|, and shapes, dtypes, devices agree.

    Sequences and mappings are compared item by item; numbers and arrays count as tensors.

    Args:
        allow_subclasses: whether `actual` and `expected` may have different classes, one derived from the other.
        rtol: relative tolerance, with `atol`; by default both depend on the dtype (1.3e-6 and 1e-5 for float32).
        atol: absolute tolerance.
        equal_nan: whether NaN is close to NaN.
        check_device: whether devices must agree.
        check_dtype: whether dtypes must agree.
        check_layout: has no effect: all tensors are strided.
        check_stride: whether strides must agree.
        msg: the error's text, or a function that makes it of the usual text.

    >>> genesis.testing.assert_close(genesis.ones(2) + 1e-6, genesis.ones(2))
    """
    if (rtol is None) != (atol is None):
        raise UsageError("assert_close takes both rtol and atol or neither")
    checks = {"allow_subclasses": allow_subclasses, "equal_nan": equal_nan, "device": check_device}
    checks |= {"dtype": check_dtype, "stride": check_stride}
    found = _fault(actual, expected, None if rtol is None or atol is None else (rtol, atol), checks, "")
    if found:
        raise AssertionError(found if msg is None else msg(found) if callable(msg) else msg)


def _fault(a: Any, b: Any, tolerances: tuple[float, float] | None, checks: dict[str, bool], where: str) -> str:
    """Return how the first unequal item differs; empty if all are close."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return f"The keys{where} differ: {sorted(map(str, a))} and {sorted(map(str, b))}"
        pairs = ((f"{where}[{key!r}]", a[key], b[key]) for key in a)
    elif all(isinstance(v, Sequence) and not isinstance(v, str) for v in (a, b)):
        if len(a) != len(b):
            return f"The lengths{where} differ: {len(a)} and {len(b)}"
        pairs = ((f"{where}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True)))
    elif a is None or b is None:
        return "" if a is b else f"Only one item{where} is None"
    else:
        return _difference(a, b, tolerances, checks, f" at{where}" if where else "")
    return next((text for at, x, y in pairs if (text := _fault(x, y, tolerances, checks, at))), "")


def _difference(a: Any, b: Any, tolerances: tuple[float, float] | None, checks: dict[str, bool], where: str) -> str:
    related = isinstance(a, type(b)) or isinstance(b, type(a))
    numbers = all(isinstance(v, _NUMBERS) for v in (a, b))
    if not numbers and not (related if checks["allow_subclasses"] else type(a) is type(b)):
        raise DTypeError(f"assert_close of {type(a).__name__} and {type(b).__name__}{where}", next="pass tensors")
    if numbers and checks["dtype"] and type(a) is not type(b):
        return f"The types{where} differ: {type(a).__name__} and {type(b).__name__}"
    x, y = (v if isinstance(v, Tensor) else as_tensor(v, dtype=_kind(v)) for v in (a, b))
    for name in ("shape", "device", "dtype", "stride"):
        found = [each.stride() if name == "stride" else getattr(each, name) for each in (x, y)]
        if checks.get(name, name == "shape") and found[0] != found[1]:
            return f"The values of {name}{where} differ: {found[0]} and {found[1]}"
    known = [_TOLERANCES.get(each.dtype.name, (0.0, 0.0)) for each in (x, y)]
    rtol, atol = tolerances or (max(known[0][0], known[1][0]), max(known[0][1], known[1][1]))
    exact = not (x.dtype.is_floating_point or y.dtype.is_floating_point)
    one, two = (v.detach().cpu().numpy().astype(np.int64 if exact else np.float64) for v in (x, y))
    wrong = ~np.isclose(one, two, rtol, atol, checks["equal_nan"])
    if not wrong.any():
        return ""
    apart = np.where(wrong, np.abs(one - two), 0)
    worst = np.unravel_index(int(np.argmax(apart)), apart.shape)
    return (
        f"{int(wrong.sum())} of {wrong.size} elements{where} are not close: the largest difference is {apart[worst]:g}"
        f" at index {tuple(map(int, worst))}, {one[worst]:g} instead of {two[worst]:g} (rtol {rtol:g}, atol {atol:g})"
    )


def _kind(value: Any) -> Any:
    return {bool: "bool", int: "int64", float: "float64"}.get(type(value))
