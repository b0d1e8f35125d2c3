"""Modules without parameters: activations and dropout."""

from __future__ import annotations

from genesis.errors import UsageError
from genesis.nn import functional as F
from genesis.nn.module import Module
from genesis.random import Generator
from genesis.tensor import Tensor

__all__ = ["GELU", "Dropout", "Identity", "ReLU", "SiLU", "Sigmoid", "SwiGLU", "Tanh"]


class Identity(Module):
    """Its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)  # type: ignore[no-any-return]


class SiLU(Module):
    """x·sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)  # type: ignore[no-any-return]


class Sigmoid(Module):
    """1 / (1 + e^-x)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.sigmoid(x)  # type: ignore[no-any-return]


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        return F.tanh(x)  # type: ignore[no-any-return]


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
        return F.dropout(x, self.p, self.training, generator=self.generator)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"p={self.p}"
