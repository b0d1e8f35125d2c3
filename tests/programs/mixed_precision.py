"""Autocast in bfloat16 with a disabled scaler."""

import numpy as np
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
rng = np.random.default_rng(20)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
for p in net.parameters():
    p.data.copy_(torch.from_numpy(rng.integers(-2, 3, tuple(p.shape)) / 4))
x = torch.from_numpy(rng.integers(-3, 4, (5, 8)) / 2).float().to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.125)
scaler = torch.amp.GradScaler(device, enabled=False)
for _ in range(2):
    with torch.autocast(device_type=device, dtype=torch.bfloat16):
        out = net(x)
        inner = out.dtype
        loss = out.float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    print(inner, loss.dtype, round(loss.item(), 1), net[0].weight.dtype)
print(torch.is_autocast_enabled(), scaler.is_enabled(), torch.finfo(torch.bfloat16).eps)
