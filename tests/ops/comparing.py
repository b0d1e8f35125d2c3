"""Comparison of results with an oracle in float64, under the tolerance that `sampling.py` states."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from genesis.ops.blocks import is_narrow

__all__ = ["compare", "same_bits", "tolerance"]


def _info(dtype: np.dtype) -> Any:
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def tolerance(
    expected: np.ndarray, dtype: np.dtype, terms: int, scale: Any, inner: int = 0, factors: np.dtype | None = None
) -> np.ndarray:
    """The error allowed in each element of a result of type `dtype`; see the formula in `sampling.py`.

    Args:
        terms: how many terms are added up in an element.
        scale: s of the formula, a number or one for each element.
        inner: the sum of |factors| that are rounded to a 2-byte type before their products are added up.
        factors: that type; None means `dtype`, where that has 2 bytes.
    """
    work = np.dtype(np.float32) if is_narrow(dtype) else dtype
    size = np.abs(np.nan_to_num(expected, nan=0.0, posinf=0.0, neginf=0.0))
    summed = size + (np.sqrt(terms) * scale if terms > 1 else 0.0)
    half = float(_info(dtype).eps) / 2 if is_narrow(dtype) else 0.0
    rounding = half if factors is None else float(_info(factors).eps) / 2
    allowed = half * size + rounding * inner * scale + 4 * float(_info(work).eps) * summed
    return np.asarray(allowed + float(_info(dtype).smallest_subnormal))


def compare(
    actual: np.ndarray, expected: Any, *, terms: int = 1, scale: Any = 1.0, exact: bool = False, inner: int = 0,
    factors: np.dtype | None = None,
) -> str:  # fmt: skip
    """What is wrong with `actual`, in a sentence; empty where nothing is.

    Args:
        expected: the oracle's float64, integer or bool values.
        exact: demand equality to the bit (all NaNs count as one).
    """
    expected = np.asarray(expected)
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, expected {expected.shape}"
    if (expected.dtype == np.bool_) != (actual.dtype == np.bool_):
        return f"a {actual.dtype} result where the oracle gives {expected.dtype}"
    with np.errstate(all="ignore"):
        rounded = expected.astype(actual.dtype)
        if actual.dtype.kind in "iub":
            good = actual == rounded
        else:
            got, want = actual.astype(np.float64), expected.astype(np.float64)
            good = (actual == rounded) | (np.isnan(got) & np.isnan(want))
            if exact:
                good &= (np.signbit(got) == np.signbit(want)) | np.isnan(got)
            else:
                good |= np.abs(got - want) <= tolerance(want, actual.dtype, terms, scale, inner, factors)
    if good.all():
        return ""
    at = tuple(int(i) for i in np.argwhere(~good)[0])
    count = f"{int((~good).sum())} of {good.size} elements differ"
    return f"element {at} is {actual[at]!r}, expected {expected[at]!r} ({count})"


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays agree in type, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
