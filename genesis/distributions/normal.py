"""The normal distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

from genesis.distributions import constraints
from genesis.distributions.distribution import Distribution, broadcast_all
from genesis.functions.random import randn
from genesis.shapes import Size
from genesis.tensor import Tensor


class Normal(Distribution):
    """The normal distribution with mean `loc` and standard deviation `scale`."""

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}  # noqa: RUF012
    support = constraints.real
    has_rsample = True

    def __init__(self, loc: Tensor | float, scale: Tensor | float, validate_args: bool | None = None) -> None:
        self.loc, self.scale = broadcast_all(loc, scale)
        super().__init__(self.loc.shape, validate_args=validate_args)

    mean = mode = property(lambda self: self.loc)
    stddev = property(lambda self: self.scale)
    variance = property(lambda self: self.scale.pow(2))

    def rsample(self, sample_shape: Sequence[int] = Size()) -> Tensor:
        """Draw samples as loc + scale·ε, with gradients."""
        shape = self._extended_shape(sample_shape)
        return self.loc + randn(shape, dtype=self.loc.dtype, device=self.loc.device) * self.scale

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the logarithm of the density."""
        self._validate_sample(value)
        return -((value - self.loc) ** 2) / (2 * self.variance) - self.scale.log() - math.log(2 * math.pi) / 2

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability of a sample ≤ `value`."""
        self._validate_sample(value)
        return 0.5 * (1 + ((value - self.loc) / self.scale / math.sqrt(2)).erf())

    def icdf(self, value: Tensor) -> Tensor:
        """Return the quantile of the probability `value`."""
        return self.loc + self.scale * (2 * value - 1).erfinv() * math.sqrt(2)

    def entropy(self) -> Tensor:
        """Return the differential entropy in nats."""
        return 0.5 + 0.5 * math.log(2 * math.pi) + self.scale.log()
