"""Distributions: densities against sums and integrals, samples against moments, shapes, checks, divergences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import genesis
from genesis import distributions as d
from genesis.distributions import constraints
from genesis.errors import UsageError

LOW, WIDTH = [[-1.0, 0.5, 2.0]], [[0.5], [3.0]]


def tensor(values: Any, dtype: str = "float64") -> genesis.Tensor:
    return genesis.tensor(values, dtype=dtype)


def made(name: str) -> d.Distribution:
    low, width = tensor(LOW), tensor(WIDTH)
    return {
        "normal": lambda: d.Normal(low, width),
        "uniform": lambda: d.Uniform(low, low + width),
        "bernoulli of probs": lambda: d.Bernoulli(tensor([0.2, 0.9, 0.5])),
        "bernoulli of logits": lambda: d.Bernoulli(logits=low),
        "categorical of probs": lambda: d.Categorical(tensor([[0.2, 0.3, 1.5], [1.0, 2.0, 1.0]])),
        "categorical of logits": lambda: d.Categorical(logits=low + width),
    }[name]()


CONTINUOUS = ("normal", "uniform")
NAMES = (*CONTINUOUS, "bernoulli of probs", "bernoulli of logits", "categorical of probs", "categorical of logits")


def points(dist: d.Distribution) -> tuple[genesis.Tensor, Any]:
    """Return values over the support in a first dimension, and the weight of each in an integral."""
    if dist.has_enumerate_support:
        return dist.enumerate_support(), 1.0
    edges = np.linspace(0, 1, 20_001).reshape(-1, 1, 1)
    start, stop = (dist.mean + sign * (8 if isinstance(dist, d.Normal) else 3**0.5) * dist.stddev for sign in (-1, 1))
    middle = tensor((edges[1:] + edges[:-1]) / 2)
    return start + middle * (stop - start), (stop - start) / 20_000


@pytest.mark.parametrize("name", NAMES)
def test_densities_sum_to_1_and_have_their_moments_and_entropy(name: str) -> None:
    dist = made(name)
    values, weight = points(dist)
    logs = dist.log_prob(values)
    mass = logs.exp() * weight
    total = mass.sum(0)
    np.testing.assert_allclose(total.tolist(), np.ones(dist.batch_shape), atol=1e-6)
    np.testing.assert_allclose(-(mass * logs).sum(0).numpy(), dist.entropy().numpy(), atol=1e-6)
    np.testing.assert_allclose(dist.perplexity().numpy(), np.exp(dist.entropy().numpy()))
    if not isinstance(dist, d.Categorical):
        mean = (mass * values).sum(0)
        np.testing.assert_allclose(mean.numpy(), dist.mean.expand(mean.shape).numpy(), atol=1e-6)
        np.testing.assert_allclose((mass * (values - mean).square()).sum(0).numpy(), dist.variance.numpy(), atol=1e-5)
        np.testing.assert_allclose(dist.stddev.square().numpy(), dist.variance.numpy())
    if name in CONTINUOUS:
        below = mass.cumsum(0) - mass / 2
        np.testing.assert_allclose(dist.cdf(values).numpy(), below.numpy(), atol=1e-4)
        inner = values[2_000:-2_000:500]
        np.testing.assert_allclose(dist.icdf(dist.cdf(inner)).numpy(), inner.numpy(), atol=1e-6)
    else:
        largest = values[mass.argmax(0)] if values.ndim == 1 else values.gather(0, mass.argmax(0, keepdim=True))[0]
        kept = ~dist.mode.isnan() if dist.mode.is_floating_point() else genesis.ones_like(largest, dtype=bool)
        assert (dist.mode == largest)[kept].all()


@pytest.mark.parametrize("name", NAMES)
def test_samples_have_the_moments_and_no_gradient(name: str) -> None:
    genesis.manual_seed(0)
    dist, n = made(name), 20_000
    drawn = dist.sample((n, 1))
    assert drawn.shape == (n, 1, *dist.batch_shape) and not drawn.requires_grad
    mean = dist.mean if not isinstance(dist, d.Categorical) else (dist.probs * genesis.arange(3)).sum(-1)
    error = 5 * (dist.stddev if not isinstance(dist, d.Categorical) else 1.0) / n**0.5
    assert ((drawn.double().mean(0)[0] - mean).abs() < error).all()
    assert drawn.dtype is (genesis.int64 if isinstance(dist, d.Categorical) else genesis.float64)
    assert dist.has_rsample == (name in CONTINUOUS)
    if not dist.has_rsample:
        with pytest.raises(NotImplementedError, match="no rsample"):
            dist.rsample()


def test_gradients_of_samples_and_of_lazy_parameters() -> None:
    scale = tensor([1.0, 2.0]).requires_grad_()
    d.Normal(tensor([0.0, 0.0]), scale).rsample((5,)).sum().backward()
    assert scale.grad is not None
    logits = tensor([0.5, -1.0]).requires_grad_()
    dist = d.Categorical(logits=logits)
    with genesis.no_grad():
        _ = dist.probs
    dist.probs[0].backward()
    p = 1 / (1 + math.exp(-1.5))
    np.testing.assert_allclose(logits.grad.tolist(), [p * (1 - p), -p * (1 - p)])  # type: ignore[union-attr]


@pytest.mark.parametrize("name", NAMES)
def test_expanded_distributions_share_memory(name: str) -> None:
    dist = made(name)
    wide = dist.expand((4, *dist.batch_shape))
    assert type(wide) is type(dist) and wide.batch_shape == (4, *dist.batch_shape) == wide.entropy().shape
    parameter = next(iter(set(dist.arg_constraints) & set(vars(dist))))
    assert getattr(wide, parameter).data_ptr() == getattr(dist, parameter).data_ptr()
    assert wide.sample().shape == wide.batch_shape and repr(dist).startswith(type(dist).__name__)


PAIRS = (
    (made("normal"), d.Normal(0.3, 1.2)),
    (made("uniform"), d.Normal(tensor(0.3), 1.2)),
    (made("uniform"), d.Uniform(tensor(-3.0), 7.0)),
    (made("bernoulli of probs"), made("bernoulli of logits")),
    (made("categorical of probs"), made("categorical of logits")),
)


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_divergences(p: d.Distribution, q: d.Distribution) -> None:
    divergence = d.kl_divergence(p, q)
    p = p.expand(divergence.shape)
    values, weight = points(p)
    logs = p.log_prob(values)
    expected = ((logs - q.log_prob(values.to(q.sample().dtype))) * logs.exp() * weight).sum(0)
    np.testing.assert_allclose(divergence.numpy(), expected.numpy(), atol=2e-6)


def test_divergences_of_users_and_without_limit() -> None:
    class Own(d.Normal):
        pass

    one, other = Own(0.0, 1.0), d.Normal(1.0, 1.0)
    assert d.kl_divergence(one, other).item() == 0.5
    d.register_kl(Own, d.Normal)(lambda p, q: p.loc + 7)
    assert d.kl_divergence(one, other).item() == 7 and d.kl_divergence(other, one).item() == 0.5
    assert d.kl_divergence(d.Normal(0.0, 1.0), d.Uniform(0.0, 1.0)).item() == math.inf
    assert d.kl_divergence(d.Uniform(0.0, 2.0), d.Uniform(0.0, 1.0)).item() == math.inf
    assert d.kl_divergence(d.Bernoulli(0.5), d.Bernoulli(0.0)).item() == math.inf
    zero = d.Categorical(tensor([0.0, 1.0]))
    assert d.kl_divergence(zero, d.Categorical(tensor([0.5, 0.5]))).item() == pytest.approx(math.log(2))
    assert d.kl_divergence(d.Categorical(tensor([0.5, 0.5])), zero).item() == math.inf
    with pytest.raises(NotImplementedError, match="between Normal and Bernoulli"):
        d.kl_divergence(other, d.Bernoulli(0.5))
    with pytest.raises(UsageError, match="classes of distributions"):
        d.register_kl(int, d.Normal)


REFUSED: list[tuple[Any, str]] = [
    (lambda: d.Normal(0.0, -1.0), "scale of shape .* not above 0.0"),
    (lambda: d.Normal(tensor([math.nan]), 1.0), "loc of shape"),
    (lambda: d.Normal("a", 1.0), "not a str"),
    (lambda: d.Uniform(1.0, 1.0), "low of shape"),
    (lambda: d.Bernoulli(1.5), "probs of shape"),
    (lambda: d.Bernoulli(), "got none"),
    (lambda: d.Categorical(tensor([1.0]), tensor([1.0])), "got both"),
    (lambda: d.Categorical(tensor([-1.0, 2.0])), "not probabilities"),
    (lambda: d.Categorical(tensor(1.0)), r"a tensor \[\.\.\., K\]"),
    (lambda: d.Normal(0.0, 1.0).log_prob(1.0), "not a tensor"),
    (lambda: d.Bernoulli(0.5).log_prob(tensor(0.5)), "not 0 or 1"),
    (lambda: d.Categorical(tensor([1.0, 2.0])).log_prob(tensor(2)), "not integers from 0 to 1"),
    (lambda: d.Uniform(0.0, 1.0).cdf(tensor(2.0)), "the value of shape"),
    (lambda: d.Normal(tensor([0.0, 1.0]), 1.0).log_prob(tensor([1.0, 2.0, 3.0])), "does not broadcast"),
    (lambda: d.Distribution.set_default_validate_args(2), "True or False"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_meant(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_checks_can_be_switched_off() -> None:
    assert d.Normal(0.0, -1.0, validate_args=False).scale.item() == -1
    assert d.Uniform(0.0, 1.0, validate_args=False).log_prob(tensor(2.0)).item() == -math.inf
    try:
        d.Distribution.set_default_validate_args(False)
        assert d.Bernoulli(7.0).probs.item() == 7
    finally:
        d.Distribution.set_default_validate_args(True)


class Dirac(d.Distribution):
    """A distribution of a user, with events of one dimension."""

    arg_constraints = {"place": constraints.real_vector}  # noqa: RUF012

    def __init__(self, place: genesis.Tensor, validate_args: bool | None = None) -> None:
        self.place = place
        super().__init__(place.shape[:-1], place.shape[-1:], validate_args)

    def rsample(self, sample_shape: Any = ()) -> genesis.Tensor:
        return self.place.expand(self._extended_shape(sample_shape))


def test_a_distribution_of_a_user() -> None:
    dist = Dirac(genesis.zeros(2, 3))
    assert dist.expand((4, 2)).sample((5,)).shape == (5, 4, 2, 3) and dist.sample_n(7).shape == (7, 2, 3)
    for missing in (
        lambda: dist.mean,
        lambda: dist.entropy(),
        lambda: dist.log_prob(tensor(1.0)),
        lambda: dist.support,
    ):
        with pytest.raises(NotImplementedError, match="Dirac has no"):
            missing()
    with pytest.raises(ValueError, match="place of shape"):
        Dirac(genesis.full((2, 3), math.nan))
