"""Train against a penalty on the gradient of the input."""

import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(7)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))
for p in net.parameters():
    p.data.copy_(torch.from_numpy(rng.standard_normal(tuple(p.shape)) * 0.4))
opt = torch.optim.RMSprop(net.parameters(), lr=1e-2, alpha=0.9)
for _ in range(4):
    x = torch.from_numpy(rng.standard_normal((6, 4))).float().requires_grad_(True)
    score = net(x)
    (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
    loss = score.mean() + 10 * penalty
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{loss.item():.5f} {penalty.item():.5f} {net[0].weight.grad.norm().item():.5f}")
