"""Values that move between devices and types, and a step in bfloat16."""

import torch
from torch import nn

net = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1)).to(device="cuda", dtype=torch.bfloat16)
for p in net.parameters():
    nn.init.constant_(p, 0.25)
opt = torch.optim.AdamW(net.parameters(), lr=0.0625, fused=True)
x = torch.ones(2, 4, device="cuda", dtype=torch.bfloat16)
for _ in range(2):
    loss = net(x).float().sum()
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(round(loss.item(), 1), net[0].weight.dtype, net[0].weight.device.type)
moved = net.cpu().float()
print(moved[0].weight.device, moved[2].bias.dtype, x.to("cpu", torch.float32).sum().item())
