"""Kullback-Leibler divergences, registered by pairs of classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from genesis.distributions.bernoulli import Bernoulli
from genesis.distributions.categorical import Categorical
from genesis.distributions.distribution import Distribution, NotDefinedError
from genesis.distributions.normal import Normal
from genesis.distributions.uniform import Uniform
from genesis.errors import UsageError
from genesis.functions.create import full_like
from genesis.nn.functional import softplus
from genesis.tensor import Tensor

Divergence = Callable[[Any, Any], Tensor]
_REGISTRY: dict[tuple[type, type], Divergence] = {}


def register_kl(type_p: type, type_q: type) -> Callable[[Divergence], Divergence]:
    """Register the decorated function as the divergence between two classes and their subclasses."""
    for each in (type_p, type_q):
        if not issubclass(each, Distribution):
            raise UsageError(f"register_kl takes classes of distributions, not {each!r}")

    def decorator(function: Divergence) -> Divergence:
        _REGISTRY[type_p, type_q] = function
        return function

    return decorator


def kl_divergence(p: Distribution, q: Distribution) -> Tensor:
    """Return ∫ p·log(p/q) for each distribution of the batches. Raises NotDefinedError, a NotImplementedError.

    If several registered pairs match, the nearest base class of `p` decides, then the nearest one of `q`.
    """
    for type_p in type(p).__mro__:
        for type_q in type(q).__mro__:
            if (type_p, type_q) in _REGISTRY:
                return _REGISTRY[type_p, type_q](p, q)
    raise NotDefinedError(
        f"no divergence between {type(p).__name__} and {type(q).__name__} is known", next="add it with register_kl"
    )


@register_kl(Bernoulli, Bernoulli)
def _bernoulli(p: Bernoulli, q: Bernoulli) -> Tensor:
    one = p.probs * (softplus(-q.logits) - softplus(-p.logits))
    zero = (1 - p.probs) * (softplus(q.logits) - softplus(p.logits))
    one = one.masked_fill(q.probs == 0, math.inf).masked_fill(p.probs == 0, 0)
    return one + zero.masked_fill(q.probs == 1, math.inf).masked_fill(p.probs == 1, 0)


@register_kl(Categorical, Categorical)
def _categorical(p: Categorical, q: Categorical) -> Tensor:
    each = p.probs * (p.logits - q.logits)
    return each.masked_fill(q.probs == 0, math.inf).masked_fill(p.probs == 0, 0).sum(-1)


@register_kl(Normal, Normal)
def _normal(p: Normal, q: Normal) -> Tensor:
    ratio, shift = (p.scale / q.scale).pow(2), ((p.loc - q.loc) / q.scale).pow(2)
    return 0.5 * (ratio + shift - 1 - ratio.log())


@register_kl(Uniform, Uniform)
def _uniform(p: Uniform, q: Uniform) -> Tensor:
    return (q.entropy() - p.entropy()).masked_fill((q.low > p.low) | (q.high < p.high), math.inf)


@register_kl(Uniform, Normal)
def _uniform_normal(p: Uniform, q: Normal) -> Tensor:
    squares = p.variance + (p.mean - q.loc).pow(2)
    return q.scale.log() + math.log(2 * math.pi) / 2 - p.entropy() + 0.5 * squares / q.variance


register_kl(Normal, Uniform)(lambda p, q: full_like(p.loc, math.inf))
