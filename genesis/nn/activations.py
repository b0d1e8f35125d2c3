"""Modules without parameters: activations and dropout.

An activation that takes one tensor and no settings is made of its op's record, as `ReLU` is.
"""

from __future__ import annotations

from genesis.errors import UsageError
from genesis.functions.surface import functional
from genesis.nn import functional as F
from genesis.nn.module import Module
from genesis.op import Op, registry
from genesis.random import Generator
from genesis.tensor import Tensor

__all__ = ["GELU", "Dropout", "Identity", "SwiGLU"]


class Identity(Module):
    """Its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class GELU(Module):
    """x·Φ(x), or its approximation by tanh.

    Args:
        approximate: "none" or "tanh".
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class SwiGLU(Module):
    """silu(gate)·up, of two arguments (Shazeer, 2020)."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.swiglu(gate, up)


class Dropout(Module):
    """In training, elements become 0 with probability p and the others are divided by 1 - p.

    Args:
        p: the probability.
        generator: of the draws; None means the default one.
    """

    def __init__(self, p: float = 0.5, *, generator: Generator | None = None) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise UsageError(f"dropout: {p} is no probability", next="give p in [0, 1]")
        self.p, self.generator = p, generator

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training, generator=self.generator)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _module_of(op: Op) -> type[Module]:
    """The activation module that an op's record names."""
    function = functional[op.public]

    def forward(self: Module, x: Tensor) -> Tensor:
        return function(x)  # type: ignore[no-any-return]

    return type(op.module, (Module,), {"__doc__": op.reference.__doc__, "__module__": __name__, "forward": forward})


for _op in registry.values():
    if _op.module:
        globals()[_op.module] = _module_of(_op)
        __all__.append(_op.module)
