"""Bounds of the settings of generated text. The schema, the Python API and the server all take them from here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from genesis.errors import UsageError, escape


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a number.

    Attributes:
        low: the minimum.
        high: the maximum.
        is_open: excludes `low` itself.
        is_whole: requires an integer.
        is_optional: allows None, which disables the setting.
    """

    low: int
    high: int
    is_open: bool = False
    is_whole: bool = False
    is_optional: bool = False

    def checked(self, value: Any, name: str, *, where: str) -> Any:
        """Return `value`, a Python or numpy number, as a Python number.

        Args:
            name: the user's name of the setting.
            where: where the value was given.

        Raises:
            UsageError: the value is not such a number; bools are refused.
        """
        if value is None and self.is_optional:
            return None
        is_whole = isinstance(value, Integral)
        if type(value) is not bool and (is_whole or (isinstance(value, Real) and not self.is_whole)):
            number = int(value) if is_whole else float(value)
            if math.isfinite(number) and self.low <= number <= self.high and not (self.is_open and number == self.low):
                return number
        raise UsageError(f"{name} is {escape(repr(value))[:60]}", where=where, next=f"give {self}")

    @property
    def limits(self) -> dict[str, Any]:
        """Arguments of a pydantic `Field`."""
        finite = {} if self.is_whole else {"allow_inf_nan": False}
        return {"gt" if self.is_open else "ge": self.low, "le": self.high, **finite}

    def __str__(self) -> str:
        kind = "an integer" if self.is_whole else "a number"
        begin = f"above {self.low} and at most" if self.is_open else f"from {self.low} to"
        return f"{kind} {begin} {self.high:,}" + (", or None" if self.is_optional else "")


BOUNDS: Mapping[str, Bounds] = {
    "max_tokens": Bounds(1, 1 << 20, is_whole=True),
    "temperature": Bounds(0, 100),
    "top_k": Bounds(1, 1_000_000, is_whole=True, is_optional=True),
    "top_p": Bounds(0, 1, is_open=True, is_optional=True),
    "min_p": Bounds(0, 1),
    "repetition_penalty": Bounds(0, 1_000_000, is_open=True),
    "seed": Bounds(0, (1 << 64) - 1, is_whole=True),
}
