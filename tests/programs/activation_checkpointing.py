"""Recompute activations in backward; gradients stay the same."""

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

rng = np.random.default_rng(8)
net = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(4)])
for p in net.parameters():
    p.data.copy_(torch.from_numpy(rng.standard_normal(tuple(p.shape)) * 0.5))
x = torch.from_numpy(rng.standard_normal((3, 6))).float().requires_grad_()
net(x).sum().backward()
plain = [p.grad.clone() for p in net.parameters()]
net.zero_grad()
h = x
for layer in net:
    h = checkpoint(layer, h, use_reentrant=False)
h.sum().backward()
print(max((a - p.grad).abs().max().item() for a, p in zip(plain, net.parameters())) < 1e-6)
net.zero_grad()
checkpoint_sequential(net, 2, x, use_reentrant=False).sum().backward()
print(max((a - p.grad).abs().max().item() for a, p in zip(plain, net.parameters())) < 1e-6, h.sum().item())
