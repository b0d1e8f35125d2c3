"""The categorical distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from genesis.autograd import no_grad
from genesis.distributions import constraints
from genesis.distributions.bernoulli import Discrete
from genesis.distributions.distribution import broadcast_all, lazy_property
from genesis.dtypes import finfo, int64
from genesis.errors import UsageError
from genesis.functions.create import full_like
from genesis.functions.random import multinomial
from genesis.shapes import Size
from genesis.tensor import Tensor


class Categorical(Discrete):
    """The integers from 0 to K - 1 with `probs` or softmax(`logits`) `[..., K]`, both normalized here."""

    arg_constraints = {"probs": constraints.simplex, "logits": constraints.real_vector}  # noqa: RUF012

    def __init__(self, probs: Any = None, logits: Any = None, validate_args: bool | None = None) -> None:
        given = self._choose_parameter(probs, logits)
        if not isinstance(given, Tensor) or given.ndim < 1:
            raise UsageError(f"Categorical takes a tensor [..., K], not {given!r}")
        if probs is None:
            self.logits = given - given.logsumexp(-1, keepdim=True)
        else:
            self.probs = given / given.sum(-1, keepdim=True)
        self._num_events = given.shape[-1]
        super().__init__(given.shape[:-1], validate_args=validate_args)

    probs = lazy_property(lambda self: self.logits.softmax(-1))
    logits = lazy_property(lambda self: self._clamped().log())
    support = property(lambda self: constraints.integer_interval(0, self._num_events - 1))
    mode = property(lambda self: self.probs.argmax(-1))
    mean = variance = property(lambda self: full_like(self.probs.sum(-1), math.nan))

    def sample(self, sample_shape: Sequence[int] = Size()) -> Tensor:
        """Draw int64 samples of shape sample_shape + batch_shape."""
        with no_grad():
            drawn = multinomial(self.probs.reshape(-1, self._num_events), math.prod(sample_shape), True)
        return drawn.T.reshape(self._extended_shape(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the logarithm of the probability of the integers in `value`, of any dtype."""
        self._validate_sample(value)
        index, logits = broadcast_all(value.long().unsqueeze(-1), self.logits)
        return logits.gather(-1, index[..., :1]).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return the entropy in nats."""
        least = finfo(self.logits.dtype).min
        return -(self.logits.clamp(min=least) * self.probs).sum(-1)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return 0 to K - 1 along a new first dimension, repeated for each distribution if `expand`."""
        return self._support(self._num_events, int64, expand)
