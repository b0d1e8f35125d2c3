"""float16 autocast with a gradient scaler that meets an overflow."""

import torch
from torch import nn

net = nn.Linear(4, 4).cuda()
nn.init.eye_(net.weight)
nn.init.zeros_(net.bias)
opt = torch.optim.SGD(net.parameters(), lr=0.125)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
x = torch.tensor([[1.0, 2.0, -1.0, 0.5]], device="cuda")
for step in range(4):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        out = net(x)
        loss = out.float().square().sum() * (float("inf") if step == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    print(out.dtype, scaler.get_scale(), [round(v, 2) for v in net.weight.diagonal().tolist()])
