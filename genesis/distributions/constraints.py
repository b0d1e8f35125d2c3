"""Constraints on the arguments and the samples of distributions, which `validate_args` checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from genesis.tensor import Tensor


class Constraint:
    """A set of values. Subclasses define `check`, which returns a bool tensor, true where a value is allowed.

    Attributes:
        is_discrete: whether the set is countable.
        event_dim: number of last dimensions that `check` looks at together.
    """

    is_discrete = False
    event_dim = 0

    def check(self, value: Tensor) -> Tensor:
        """Return where `value` is allowed, without its last `event_dim` dimensions."""
        raise NotImplementedError(f"{type(self).__name__} does not define check()")

    def __repr__(self) -> str:
        return type(self).__name__


class _Named(Constraint):
    def __init__(self, text: str, check: Callable[[Any], Any], event_dim: int = 0, is_discrete: bool = False) -> None:
        self.text, self.is_allowed, self.event_dim, self.is_discrete = text, check, event_dim, is_discrete

    def check(self, value: Tensor) -> Tensor:
        return self.is_allowed(value)

    def __repr__(self) -> str:
        return self.text


def interval(lower_bound: Any, upper_bound: Any) -> Constraint:
    """The numbers from `lower_bound` to `upper_bound`, both included."""
    return _Named(f"from {lower_bound} to {upper_bound}", lambda x: (x >= lower_bound) & (x <= upper_bound))


def integer_interval(lower_bound: Any, upper_bound: Any) -> Constraint:
    """The integers from `lower_bound` to `upper_bound`, both included."""
    inside = interval(lower_bound, upper_bound)
    return _Named(f"integers {inside!r}", lambda x: (x % 1 == 0) & inside.check(x), is_discrete=True)


def greater_than(lower_bound: Any) -> Constraint:
    """The numbers above `lower_bound`."""
    return _Named(f"above {lower_bound}", lambda x: x > lower_bound)


def less_than(upper_bound: Any) -> Constraint:
    """The numbers below `upper_bound`."""
    return _Named(f"below {upper_bound}", lambda x: x < upper_bound)


dependent = Constraint()  # depends on other arguments, so `check` is never called
real = _Named("a number", lambda x: ~x.isnan())
real_vector = _Named("a vector of numbers", lambda x: ~x.isnan().any(-1), 1)
positive = greater_than(0.0)
nonnegative = _Named("at least 0", lambda x: x >= 0)
unit_interval = interval(0.0, 1.0)
boolean = _Named("0 or 1", lambda x: (x == 0) | (x == 1), is_discrete=True)
simplex = _Named("probabilities that add up to 1", lambda x: (x >= 0).all(-1) & ((x.sum(-1) - 1).abs() < 1e-6), 1)
