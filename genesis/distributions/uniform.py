"""The continuous uniform distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

from genesis.distributions import constraints
from genesis.distributions.distribution import Distribution, broadcast_all
from genesis.functions.random import rand
from genesis.shapes import Size
from genesis.tensor import Tensor


class Uniform(Distribution):
    """The uniform distribution on [low, high)."""

    has_rsample = True
    arg_constraints = property(
        lambda self: {"low": constraints.less_than(self.high), "high": constraints.greater_than(self.low)}
    )

    def __init__(self, low: Tensor | float, high: Tensor | float, validate_args: bool | None = None) -> None:
        self.low, self.high = broadcast_all(low, high)
        super().__init__(self.low.shape, validate_args=validate_args)

    support = property(lambda self: constraints.interval(self.low, self.high))
    mean = property(lambda self: (self.high + self.low) / 2)
    mode = property(lambda self: math.nan * self.high)
    variance = property(lambda self: (self.high - self.low).pow(2) / 12)
    stddev = property(lambda self: (self.high - self.low) / math.sqrt(12))

    def rsample(self, sample_shape: Sequence[int] = Size()) -> Tensor:
        """Draw samples as low + (high - low)·u, with gradients."""
        share = rand(self._extended_shape(sample_shape), dtype=self.low.dtype, device=self.low.device)
        return self.low + share * (self.high - self.low)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the logarithm of the density: -inf outside [low, high) if checks are off."""
        self._validate_sample(value)
        inside = (self.low <= value) & (self.high > value)
        return inside.type_as(self.low).log() - self.entropy()

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability of a sample ≤ `value`."""
        self._validate_sample(value)
        return ((value - self.low) / (self.high - self.low)).clamp(0, 1)

    def icdf(self, value: Tensor) -> Tensor:
        """Return the quantile of the probability `value`."""
        return value * (self.high - self.low) + self.low

    def entropy(self) -> Tensor:
        """Return the differential entropy in nats."""
        return (self.high - self.low).log()
