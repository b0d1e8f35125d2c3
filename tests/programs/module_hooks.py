"""Hooks before and after forward and backward."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
for p in net.parameters():
    nn.init.constant_(p, 0.5)
seen = []
handles = [
    net[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    net[0].register_forward_hook(lambda module, args, output: seen.append(("forward", args[0].sum().item()))),
    net[2].register_forward_hook(lambda m, args, kwargs, out: out + kwargs.get("bias", 1), with_kwargs=True),
    net[2].register_full_backward_hook(lambda m, gi, go: seen.append(("backward", go[0].sum().item(), gi[0].shape))),
    net[0].register_full_backward_pre_hook(lambda m, go: (go[0] * 10,)),
]
x = torch.tensor([[1.0, 2.0]], requires_grad=True)
net(x).sum().backward()
print(seen, net[0].weight.grad.tolist(), x.grad.tolist())
for handle in handles:
    handle.remove()
seen.clear()
print(net(x).item(), seen)
