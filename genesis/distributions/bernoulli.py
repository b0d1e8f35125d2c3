"""The Bernoulli distribution, and what it shares with the categorical one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from genesis.autograd import no_grad
from genesis.distributions import constraints
from genesis.distributions.distribution import Distribution, broadcast_all, lazy_property
from genesis.dtypes import finfo
from genesis.errors import UsageError
from genesis.functions.create import arange
from genesis.functions.random import bernoulli
from genesis.nn.functional import binary_cross_entropy_with_logits
from genesis.shapes import Size
from genesis.tensor import Tensor


class Discrete(Distribution):
    """Base of distributions with `probs` or `logits`; the one that is not given is computed at its first use."""

    has_enumerate_support = True
    probs: Any
    logits: Any

    def _choose_parameter(self, probs: Any, logits: Any) -> Any:
        if (probs is None) == (logits is None):
            both = "none" if probs is None else "both"
            raise UsageError(f"{type(self).__name__} takes probs or logits, and got {both}")
        return logits if probs is None else probs

    @property
    def _param(self) -> Tensor:
        return self.probs if "probs" in self.__dict__ else self.logits

    def _clamped(self) -> Tensor:
        """The probabilities, clamped to [ε, 1 - ε] with their dtype's ε."""
        return self.probs.clamp(finfo(self.probs.dtype).eps, 1 - finfo(self.probs.dtype).eps)

    @property
    def param_shape(self) -> Size:
        """The shape of the probabilities."""
        return self._param.size()

    def _support(self, count: int, dtype: Any, expand: bool) -> Tensor:
        values = arange(count, dtype=dtype, device=self._param.device).view(-1, *(1 for _ in self._batch_shape))
        return values.expand(-1, *self._batch_shape) if expand else values


class Bernoulli(Discrete):
    """1 with probability `probs`, or σ(`logits`), else 0. Samples have the dtype of the parameter."""

    arg_constraints = {"probs": constraints.unit_interval, "logits": constraints.real}  # noqa: RUF012
    support = constraints.boolean

    def __init__(self, probs: Any = None, logits: Any = None, validate_args: bool | None = None) -> None:
        (given,) = broadcast_all(self._choose_parameter(probs, logits))
        self.__dict__["logits" if probs is None else "probs"] = given
        super().__init__(given.shape, validate_args=validate_args)

    probs = lazy_property(lambda self: self.logits.sigmoid())
    logits = lazy_property(lambda self: self._clamped().log() - (-self._clamped()).log1p())
    mean = property(lambda self: self.probs)
    mode = property(lambda self: (self.probs >= 0.5).to(self.probs).masked_fill(self.probs == 0.5, math.nan))
    variance = property(lambda self: self.probs * (1 - self.probs))

    def sample(self, sample_shape: Sequence[int] = Size()) -> Tensor:
        """Draw samples of shape sample_shape + batch_shape."""
        with no_grad():
            return bernoulli(self.probs.expand(self._extended_shape(sample_shape)))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the logarithm of the probability."""
        self._validate_sample(value)
        logits, value = broadcast_all(self.logits, value)
        return -binary_cross_entropy_with_logits(logits, value, reduction="none")

    def entropy(self) -> Tensor:
        """Return the entropy in nats."""
        return binary_cross_entropy_with_logits(self.logits, self.probs, reduction="none")

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return 0 and 1 along a new first dimension, repeated for each distribution if `expand`."""
        return self._support(2, self._param.dtype, expand)
