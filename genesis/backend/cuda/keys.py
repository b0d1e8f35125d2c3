"""Values as parts of keys: of remembered calls, loaded kernels, compiled sources.

Python's own equality does not do: 1, 1.0 and True are equal, 0.0 and -0.0 are, and NaN equals nothing.
"""

from __future__ import annotations

import enum
from typing import Any

from genesis.backend import Device
from genesis.dtypes import DType

__all__ = ["exact", "is_value"]

_ALONE = frozenset((str, type(None), DType, Device))  # equal to their own kind alone, and equal means the same
_VALUES = frozenset((int, bool, float, str, type(None), DType, Device))


def exact(value: Any) -> Any:
    """A value with its type and sign, so that what computes differently is unequal; all NaNs are one."""
    kind = value.__class__
    if kind is float:  # no other kind's key is a float
        return value if value and value == value else (float, value.hex())
    if kind in _ALONE:
        return value
    if kind is tuple:
        for each in value:
            if each.__class__ is not int:
                break
        else:  # nearly all: dimensions
            return value
    # Of what `is_value` takes, the text says type, sign and all digits, at any depth.
    return (kind, repr(value) if isinstance(value, tuple) else value)


def is_value(value: Any) -> bool:
    """Whether a value cannot change, so that what it made may be found again under it.

    An object of another class may hold other things at the next call, and numpy's scalars are equal where their bits
    are not.
    """
    if isinstance(value, tuple):
        return all(map(is_value, value))
    return value.__class__ in _VALUES or isinstance(value, enum.Enum)
