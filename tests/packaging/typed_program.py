"""A small program as a user writes it, which `make types` checks: what editors and mypy know of the public functions.

Where a comment ignores an error mypy must find it, because an unused one is an error itself.
"""

from __future__ import annotations

from typing import assert_type

import genesis
from genesis import Tensor, nn
from genesis.nn import functional as F

__all__ = ["main"]


class Gate(nn.Module):
    """tanh(x)·σ(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Tanh(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return assert_type(self.left.forward(x) * self.right.forward(x), Tensor)


def main() -> Tensor:
    """One of each form: function, method, operator, in place, functional, module."""
    x = assert_type(genesis.ones(2, 3, dtype="float32", requires_grad=True), Tensor)
    y = assert_type(genesis.add(x, 1, alpha=0.5), Tensor)
    z = assert_type(y.mul(x).sum(dim=-1, keepdim=True), Tensor)
    assert_type(genesis.clamp(z, min=0), Tensor)
    assert_type(genesis.zeros(2).add_(1), Tensor)
    assert_type(1 - z, Tensor)
    assert_type(x[0], Tensor)
    assert_type(z.reshape(1, -1).transpose(0, 1).shape, genesis.Size)
    assert_type(F.silu(x), Tensor)
    assert_type(F.cross_entropy(x, genesis.tensor([0, 1])), Tensor)
    assert_type(genesis.allclose(x, x), bool)
    return assert_type(Gate().forward(y).mean(), Tensor)


def wrong(x: Tensor) -> None:
    """What is refused."""
    genesis.add(x, x, alpah=2)  # type: ignore[call-arg]
    genesis.add("x", x)  # type: ignore[arg-type]
    x.sum(keepdim="no")  # type: ignore[arg-type]
    x.no_such_method()  # type: ignore[attr-defined]
    genesis.no_such_function(x)  # type: ignore[attr-defined]
    F.relu()  # type: ignore[call-arg]
