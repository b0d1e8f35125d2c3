"""Save a model and an optimizer to memory, load both, and go on as if nothing had happened."""

import io

import numpy as np
import torch
from torch import nn


def make():
    rng = np.random.default_rng(9)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    for p in net.parameters():
        p.data.copy_(torch.from_numpy(rng.standard_normal(tuple(p.shape))))
    decay = [p for p in net.parameters() if p.dim() > 1]
    rest = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
    return net, torch.optim.AdamW(groups, lr=0.01)


def train(net, opt, steps):
    x = torch.linspace(-1, 1, 12).view(4, 3)
    for _ in range(steps):
        loss = net(x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


net, opt = make()
train(net, opt, 3)
buffer = io.BytesIO()
torch.save({"model": net.state_dict(), "optim": opt.state_dict(), "step": 3}, buffer)
straight = train(net, opt, 3)
buffer.seek(0)
saved = torch.load(buffer, map_location="cpu", weights_only=True)
net2, opt2 = make()
print(net2.load_state_dict(saved["model"]))
opt2.load_state_dict(saved["optim"])
print(straight, train(net2, opt2, 3), saved["step"], [g["lr"] for g in opt2.param_groups])
print(sorted(opt2.state_dict()), opt2.state_dict()["param_groups"][0]["params"])
