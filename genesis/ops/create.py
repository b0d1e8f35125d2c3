"""Ops that make values from Python numbers alone; they name their device. `fill` is in elementwise.py."""

from __future__ import annotations

import numpy as np

from genesis.array import Spec
from genesis.dtypes import DType
from genesis.errors import DTypeError, ShapeError
from genesis.op import op


def _ramp_infer(*, count: int, dtype: DType, **attrs: float) -> Spec:
    if count < 0:
        raise ShapeError(f"a range of {count} elements", next="let the step lead from start towards end")
    if dtype.name == "bool":
        raise DTypeError("a range of bools", next="use an integer or float dtype")
    return Spec((count,), dtype)


@op("arange", _ramp_infer)
def arange(out: np.ndarray, start: float, step: float, count: int, dtype: DType) -> None:
    """start + step·i for i = 0 .. count - 1, in float64, or exactly where start and step are integers."""
    np.copyto(out, np.arange(count) * step + start, casting="unsafe")


@op("linspace", _ramp_infer)
def linspace(out: np.ndarray, start: float, end: float, count: int, dtype: DType) -> None:
    """`count` values from start to end, both included, evenly spaced, in float64."""
    np.copyto(out, np.linspace(start, end, count), casting="unsafe")
