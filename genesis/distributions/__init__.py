"""Probability distributions as in torch.distributions: Bernoulli, Categorical, Normal and Uniform, and divergences.

>>> d = genesis.distributions.Normal(0.0, 2.0)
>>> d.log_prob(genesis.tensor(0.0))
tensor(-1.6121)
"""

from genesis.distributions import constraints
from genesis.distributions.bernoulli import Bernoulli
from genesis.distributions.categorical import Categorical
from genesis.distributions.distribution import Distribution
from genesis.distributions.kl import kl_divergence, register_kl
from genesis.distributions.normal import Normal
from genesis.distributions.uniform import Uniform
from genesis.keywords import check_calls

__all__ = [
    "Bernoulli", "Categorical", "Distribution", "Normal", "Uniform", "constraints", "kl_divergence", "register_kl",
]  # fmt: skip

check_calls(globals(), __all__)
