"""Weight norm, a symmetric matrix and a LoRA layer that merges."""

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


class LoRA(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(torch.ones(rank, base.in_features) / 3)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + (x @ self.a.T @ self.b.T) * self.scale

    @torch.no_grad()
    def merge(self):
        self.base.weight += self.b @ self.a * self.scale
        return self.base


rng = np.random.default_rng(22)
x = torch.from_numpy(rng.standard_normal((2, 3))).float()
weight = torch.from_numpy(rng.standard_normal((3, 3))).float()
layer = nn.Linear(3, 3, bias=False)
layer.weight.data.copy_(weight)
parametrize.register_parametrization(layer, "weight", Symmetric())
print(torch.equal(layer.weight, layer.weight.T), layer(x).sum().item(), [n for n, _ in layer.named_parameters()])
normed = nn.Linear(3, 3)
normed.weight.data.copy_(weight)
normed = parametrizations.weight_norm(normed)
normed(x).sum().backward()
print(normed.parametrizations.weight.original0.grad.flatten().tolist(), parametrize.is_parametrized(normed))
base = nn.Linear(3, 3, bias=False)
base.weight.data.copy_(weight)
lora = LoRA(base, rank=2, alpha=4)
opt = torch.optim.Adam([p for p in lora.parameters() if p.requires_grad], lr=0.1)
lora(x).square().sum().backward()
opt.step()
before = lora(x)
print(torch.allclose(before, lora.merge()(x), atol=1e-5), before.sum().item())
