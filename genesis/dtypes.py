"""Element types, and type promotion by category, as in torch.

A `DType` is a singleton. Its `str()` ends in `.float32`, `.bfloat16` and so on, because Triton looks for these endings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from genesis.errors import DTypeError
from genesis.keywords import check_calls

BOOL, INTEGER, FLOAT = 0, 1, 2  # categories; the higher one wins in promotion


class DType:
    """An element type: its name, its numpy dtype, its size in bytes and its category."""

    __slots__ = ("category", "is_floating_point", "itemsize", "name", "numpy")
    is_complex = False

    def __init__(self, name: str, numpy_type: type, category: int) -> None:
        self.name = name
        self.numpy: np.dtype = np.dtype(numpy_type)
        self.itemsize = self.numpy.itemsize
        self.category = category
        self.is_floating_point = category == FLOAT

    def __repr__(self) -> str:
        return f"genesis.{self.name}"

    def __reduce__(self) -> str:  # a copy or an unpickled dtype is the same singleton
        return "bool_" if self.name == "bool" else self.name


class ComplexType(DType):
    """The type of complex tensors, which only functions for complex numbers make."""

    __slots__ = ()
    is_complex = True


float64 = DType("float64", np.float64, FLOAT)
float32 = DType("float32", np.float32, FLOAT)
float16 = DType("float16", np.float16, FLOAT)
bfloat16 = DType("bfloat16", ml_dtypes.bfloat16, FLOAT)
int64 = DType("int64", np.int64, INTEGER)
int32 = DType("int32", np.int32, INTEGER)
int16 = DType("int16", np.int16, INTEGER)
int8 = DType("int8", np.int8, INTEGER)
uint8 = DType("uint8", np.uint8, INTEGER)
bool_ = DType("bool", np.bool_, BOOL)
# Only for quantized operands inside matmuls (ops/fp8.py). No other op computes in it, and no tensor has this dtype.
float8_e4m3fn = DType("float8_e4m3fn", ml_dtypes.float8_e4m3fn, FLOAT)

complex64 = ComplexType("complex64", np.complex64, 3)
complex128 = ComplexType("complex128", np.complex128, 3)

ALL = (float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8, bool_)
# Names under which `genesis` exports the dtypes; `_BY_NAME` adds spellings that are read from strings.
NAMES = {d.name: d for d in ALL} | {
    "double": float64,
    "float": float32,
    "half": float16,
    "long": int64,
    "int": int32,
    "short": int16,
}
COMPLEX = {"complex64": complex64, "cfloat": complex64, "complex128": complex128, "cdouble": complex128}
_BY_NAME = NAMES | {"fp64": float64, "fp32": float32, "fp16": float16, "bf16": bfloat16}
_BY_NUMPY = {d.numpy: d for d in ALL}
_BY_PYTHON: dict[type, DType] = {float: float32, int: int64, bool: bool_}  # dtypes of Python numbers


class Layout:
    """How a tensor's elements are stored; `strided` is the only layout."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"genesis.{self.name}"


class MemoryFormat(Layout):
    """The order of a result's elements: `contiguous_format` (row-major) or `preserve_format` (the input's order)."""


strided = Layout("strided")
contiguous_format, preserve_format = MemoryFormat("contiguous_format"), MemoryFormat("preserve_format")


def default_dtype() -> DType:
    """Return the dtype of Python floats, and of factories without a dtype."""
    return _BY_PYTHON[float]


def set_default_dtype(dtype: DType) -> None:
    """Set the default dtype. Raises DTypeError unless it is a float type."""
    if dtype.category != FLOAT or dtype not in ALL:
        raise DTypeError(f"the default dtype cannot be {dtype}", next="use a float type")
    _BY_PYTHON[float] = dtype


def as_dtype(value: object) -> DType:
    """Return the `DType` for a DType, a name ("bfloat16"), a numpy dtype or a Python type, as torch does.

    Raises:
        DTypeError: if Genesis does not have the type.
    """
    if value.__class__ is DType:
        return value
    found = None
    if isinstance(value, str):
        found = _BY_NAME.get(value.removeprefix("genesis.").removeprefix("torch."))
    elif value is not None:  # numpy would read None as float64
        try:
            found = _BY_NUMPY.get(np.dtype(value))  # type: ignore[call-overload]
        except TypeError:
            found = None
    if found is None:
        raise DTypeError(f"{value!r} is not a dtype Genesis has", next=f"use one of {', '.join(d.name for d in ALL)}")
    return found


_SIGNED_BY_SIZE = {1: int8, 2: int16, 4: int32, 8: int64}


def promote_types(type1: DType, type2: DType) -> DType:
    """Return the smallest type that both convert to without changing category (`torch.promote_types`).

    Raises:
        DTypeError: if an argument is not a dtype.
    """
    if type1 is type2 and type1.__class__ is DType:
        return type1
    a, b = as_dtype(type1), as_dtype(type2)
    if a.category != b.category:
        return a if a.category > b.category else b
    if a.category == FLOAT:
        if a.itemsize != b.itemsize:
            return a if a.itemsize > b.itemsize else b
        return float32  # float16 with bfloat16
    if uint8 in (a, b):  # with int8, uint8 needs int16; any other signed type holds its values
        signed = b if a is uint8 else a
        return int16 if signed is int8 else signed
    return _SIGNED_BY_SIZE[max(a.itemsize, b.itemsize)]


def _type_of_number(x: object) -> DType | None:
    """Return the dtype of a subclass of Python's numbers or of a numpy scalar, which counts as a Python number."""
    floats = _BY_PYTHON[float]
    for kinds, dtype in (((bool, np.bool_), bool_), ((int, np.integer), int64), ((float, np.floating), floats)):
        if isinstance(x, kinds):
            return dtype
    scalar_type = _BY_NUMPY.get(x.dtype) if isinstance(x, np.generic) else None
    return floats if scalar_type is bfloat16 else None


def result_type(operands: Iterable[object]) -> DType:
    """Return the dtype in which an arithmetic op computes (`torch.result_type`).

    `operands` are numbers, and objects with a dtype and a shape. Operands with dimensions outrank zero-dimensional
    ones, which outrank Python numbers; a lower rank changes the result only if its category (bool < integer < float)
    is higher.
    """
    ranks: list[DType | None] = [None, None, None]  # dimensioned, zero-dimensional, Python number
    for x in operands:
        dtype = getattr(x, "dtype", None)
        if isinstance(dtype, DType):
            rank = 0 if x.shape else 1  # type: ignore[attr-defined]
        else:
            rank, dtype = 2, _BY_PYTHON.get(type(x)) or _type_of_number(x)
            if dtype is None:
                raise DTypeError(f"an operand of type {type(x).__name__} is neither a tensor nor a number")
        known = ranks[rank]
        ranks[rank] = dtype if known is None else promote_types(known, dtype)
    result: DType | None = None
    for dtype in ranks:
        if dtype is not None and (result is None or dtype.category > result.category):
            result = dtype
    assert result is not None, "result_type of no operands"
    return result


class finfo:  # noqa: N801  torch's name
    """Limits of a float type, by default the default dtype. Raises DTypeError for any other type.

    Attributes:
        bits: bits of a value.
        dtype: name of the type.
        eps: distance from 1 to the next larger value.
        max: largest value.
        min: smallest value, `-max`.
        tiny: smallest positive normal value.
        smallest_normal: the same as `tiny`.
        resolution: 10 to the minus number of decimal digits that the type keeps.
    """

    __slots__ = ("bits", "dtype", "eps", "max", "min", "resolution", "smallest_normal", "tiny")

    def __init__(self, type: Any = None) -> None:
        kind = default_dtype() if type is None else as_dtype(type)
        if not kind.is_floating_point:
            raise DTypeError(f"finfo takes float dtypes, got {kind}", next="use iinfo for integers")
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
    """Limits of an integer type: `bits`, `min`, `max`, and its name `dtype`. Raises DTypeError for any other type."""

    __slots__ = ("bits", "dtype", "max", "min")

    def __init__(self, type: Any) -> None:
        kind = as_dtype(type)
        if kind.category != INTEGER:
            raise DTypeError(f"iinfo takes integer dtypes, got {kind}", next="use finfo for floats")
        facts = np.iinfo(kind.numpy)
        self.bits, self.min, self.max, self.dtype = facts.bits, int(facts.min), int(facts.max), kind.name

    def __repr__(self) -> str:
        return f"iinfo(min={self.min}, max={self.max}, dtype={self.dtype})"


check_calls(globals(), ("finfo", "iinfo"))
