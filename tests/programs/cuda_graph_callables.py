"""make_graphed_callables on two modules of a network that trains."""

import torch
from torch import nn

torch.manual_seed(0)
first, second = nn.Linear(4, 8).cuda(), nn.Sequential(nn.Tanh(), nn.Linear(8, 2)).cuda()
for module in (first, second):
    for p in module.parameters():
        nn.init.constant_(p, 0.1)
x = torch.arange(12.0, device="cuda").view(3, 4) / 12
h = torch.randn(3, 8, device="cuda", requires_grad=True)
first, second = torch.cuda.make_graphed_callables((first, second), ((x.clone(),), (h,)))
opt = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.5)
for _ in range(3):
    opt.zero_grad()
    loss = second(first(x)).square().sum()
    loss.backward()
    opt.step()
    print(round(loss.item(), 5))
