"""How float32 GEMMs are computed: the one switch, with its getter and setter. It is off unless somebody turns it on.

With tf32 the tensor cores read 10 bits of each operand's mantissa (sums stay float32): 8 times faster, with relative
errors near 3e-4 instead of 1e-6.
"""

from __future__ import annotations


class Switch:
    """A process-wide flag. `CudaBackend` keys its plans on `on`, so a change takes effect at the next call."""

    __slots__ = ("on",)

    def __init__(self, on: bool) -> None:
        self.on = on

    def __bool__(self) -> bool:
        return self.on

    def get(self) -> bool:
        """Whether it is on."""
        return self.on

    def set(self, on: bool) -> bool:
        """Turn it on or off; what it was before."""
        before, self.on = self.on, bool(on)
        return before


allow_tf32 = Switch(False)
