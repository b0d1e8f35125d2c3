"""REINFORCE with torch.distributions, on fixed actions."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Normal, Uniform, kl_divergence

rng = np.random.default_rng(16)
logits = nn.Parameter(torch.from_numpy(rng.standard_normal((5, 4))).float())
old = Categorical(logits=logits.detach().roll(1, 0))
actions = torch.tensor([0, 3, 1, 2, 2])
advantage = torch.tensor([1.0, -0.5, 0.2, 2.0, -1.0])
dist = Categorical(logits=logits)
ratio = (dist.log_prob(actions) - old.log_prob(actions)).exp()
clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
loss = -clipped.mean() - 0.01 * dist.entropy().mean() + 0.1 * kl_divergence(old, dist).mean()
loss.backward()
print(loss.item(), logits.grad.norm().item(), dist.probs.sum(-1).tolist(), dist.sample((3,)).shape)
normal = Normal(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
print(normal.log_prob(torch.tensor(0.5)).tolist(), normal.entropy().tolist(), normal.cdf(torch.tensor(0.0)).tolist())
print(kl_divergence(normal, Normal(0.0, 1.0)).tolist(), normal.mean.tolist(), normal.variance.tolist())
print(Bernoulli(probs=torch.tensor([0.2, 0.9])).log_prob(torch.tensor([1.0, 0.0])).tolist())
print(Uniform(0.0, 2.0).log_prob(torch.tensor(1.0)).item(), normal.rsample((2,)).shape, normal.batch_shape)
