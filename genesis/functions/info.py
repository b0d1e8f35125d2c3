"""What dtypes hold, and the type that operands meet in, named and behaving as torch's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from genesis import dtypes
from genesis.autograd.record import TensorBase
from genesis.dtypes import DType, as_dtype
from genesis.errors import DTypeError
from genesis.functions.surface import plain, public
from genesis.keywords import check_calls


class finfo:  # noqa: N801  torch's name
    """The limits of a float type (float32 unless given).

    Attributes:
        bits: of one value.
        eps: the distance from 1 to the next larger value.
        max, min: the largest value and the smallest, which is its negative.
        tiny, smallest_normal: the smallest positive value that is not subnormal.
        resolution: 10 to the minus number of decimal digits that are kept.
        dtype: the type's name.

    Raises:
        DTypeError: for a type that is no float type.
    """

    __slots__ = ("bits", "dtype", "eps", "max", "min", "resolution", "smallest_normal", "tiny")

    def __init__(self, type: Any = dtypes.float32) -> None:
        kind = as_dtype(type)
        if not kind.is_floating_point:
            raise DTypeError(f"finfo of {kind}", next="use iinfo for integers")
        facts = ml_dtypes.finfo(kind.numpy)  # type: ignore[no-untyped-call]
        self.bits, self.dtype = facts.bits, kind.name
        self.eps, self.max, self.min = float(facts.eps), float(facts.max), float(facts.min)
        self.tiny = self.smallest_normal = float(facts.smallest_normal)
        self.resolution = float(f"1e-{facts.precision}")

    def __repr__(self) -> str:
        return (
            f"finfo(resolution={self.resolution:g}, min={self.min:g}, max={self.max:g}, eps={self.eps:g},"
            f" smallest_normal={self.smallest_normal:g}, tiny={self.tiny:g}, dtype={self.dtype})"
        )


class iinfo:  # noqa: N801  torch's name
    """The limits of an integer type: `bits`, `min`, `max`, and its name as `dtype`.

    Raises:
        DTypeError: for a type that is no integer type.
    """

    __slots__ = ("bits", "dtype", "max", "min")

    def __init__(self, type: Any) -> None:
        kind = as_dtype(type)
        if kind.category != dtypes.INTEGER:
            raise DTypeError(f"iinfo of {kind}", next="use finfo for floats")
        facts = np.iinfo(kind.numpy)
        self.bits, self.min, self.max, self.dtype = facts.bits, int(facts.min), int(facts.max), kind.name

    def __repr__(self) -> str:
        return f"iinfo(min={self.min}, max={self.max}, dtype={self.dtype})"


@public(method=False)
def result_type(*operands: Any) -> DType:
    """The type that arithmetic on tensors and numbers gives: `result_type(x, 2.5)`, or one sequence of them."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    arrays = [x.array if isinstance(x, TensorBase) else x for x in given]
    if not arrays:
        raise DTypeError("result_type of no operands")
    return dtypes.result_type([v if (v := plain(x)) is not None else x for x in arrays])


check_calls(globals(), ("finfo", "iinfo"))
