"""What a kernel is compiled for: the types of its arguments, and what is known about them ahead of time.

As in Triton, an integer that is 1 becomes a constant, and integers and addresses that 16 divides are marked as such;
here 0 becomes a constant, too, inside tuples, where it is the stride of a broadcast dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from genesis.backend.cuda.descriptor import is_descriptor
from genesis.dtypes import DType

__all__ = ["Double", "Signature", "describe", "is_array", "pointer_type"]

_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
}


class Double(float):
    """A Python float that reaches the kernel as float64; a plain one reaches it as float32."""


class Signature(NamedTuple):
    """The key of a compiled kernel: for every argument its type, or ("constexpr", value), nested as the arguments are.

    Attributes:
        types: one entry an argument: a string such as "*fp32" or "i32", with a trailing ":16" where 16 divides the
            value, or "tensordesc<bf16[128, 64]>"; a pair for a constant; a tuple of entries for a tuple.
        constants: the keyword constants, sorted by name.
        options: num_warps and num_stages and the like, sorted by name.
    """

    types: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]


def is_array(value: object) -> bool:
    """Whether a kernel's argument is an array (which stands above this layer)."""
    return hasattr(value, "storage")


def pointer_type(dtype: DType) -> str:
    """Triton's name of a pointer to `dtype`."""
    return "*" + _NAMES[dtype.name]


def describe(value: Any, nested: bool = False, specialize: bool = True) -> Any:
    """The entry of one argument."""
    if is_array(value):
        return pointer_type(value.dtype) + (":16" if value.data_ptr() % 16 == 0 else "")
    if isinstance(value, bool) or value is None:
        return ("constexpr", value)
    if is_descriptor(value):
        layout = f",{value.layout}" if value.layout else ""
        return f"tensordesc<{_NAMES[value.array.dtype.name]}{list(value.block)}{layout}>"
    if isinstance(value, int):
        if specialize and (value == 1 or (nested and value == 0)):
            return ("constexpr", value)
        kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        return kind + ":16" if specialize and value % 16 == 0 else kind
    if isinstance(value, float):
        return "fp64" if isinstance(value, Double) else "fp32"
    if isinstance(value, tuple):
        return tuple(describe(item, True, specialize) for item in value)
    raise TypeError(f"a kernel takes arrays, numbers and tuples of them, not {type(value).__name__}")
