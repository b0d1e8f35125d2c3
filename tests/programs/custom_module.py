"""A module with buffers, parameters made later, apply, and lists of its parts."""

import torch
from torch import nn


class Whiten(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("steps", torch.tensor(0), persistent=False)
        self.register_parameter("gain", nn.Parameter(torch.ones(features)))
        self.register_parameter("shift", None)

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0).detach(), 0.5)
            self.steps += 1
        return (x - self.mean) * self.gain

    def extra_repr(self):
        return f"features={self.gain.numel()}"


def fill(module):
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)


net = nn.Sequential(nn.Linear(3, 4), Whiten(4), nn.Tanh(), nn.Linear(4, 1)).apply(fill)
x = torch.arange(6.0).reshape(2, 3) / 10
print(net(x).sum().item(), net[1].steps.item(), net[1].mean.tolist())
net.eval()
net(x)
print(net[1].steps.item(), list(net.state_dict()), [n for n, _ in net.named_buffers()])
print([n for n, m in net.named_modules()], [type(m).__name__ for m in net.children()])
print(net.get_parameter("1.gain").shape, net.get_submodule("3").out_features, repr(net[1]))
net.double().requires_grad_(False)
print(next(net.parameters()).dtype, any(p.requires_grad for p in net.parameters()))
