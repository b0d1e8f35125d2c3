"""Gradient accumulation, clipping by value, EMA and stochastic weight averaging."""

import copy

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

rng = np.random.default_rng(21)
net = nn.Linear(4, 1)
net.weight.data.copy_(torch.from_numpy(rng.standard_normal((1, 4))))
nn.init.zeros_(net.bias)
start = copy.deepcopy(net)
mean, ema = AveragedModel(net), AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
swa = SWALR(opt, swa_lr=0.02, anneal_epochs=3)
for step in range(8):
    for micro in range(2):
        x = torch.from_numpy(rng.standard_normal((3, 4))).float()
        (net(x).square().mean() / 2).backward()
    nn.utils.clip_grad_value_(net.parameters(), 0.5)
    opt.step()
    opt.zero_grad()
    swa.step()
    mean.update_parameters(net)
    ema.update_parameters(net)
print(net.weight.tolist(), mean.module.weight.tolist(), ema.module.weight.tolist())
print(mean.n_averaged.item(), opt.param_groups[0]["lr"], torch.equal(start.weight, net.weight))
