"""A convolution over time on embedded text."""

import numpy as np
import torch
from torch import nn


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 6, padding_idx=0)
        self.convs = nn.ModuleList([nn.Conv1d(6, 4, k, padding=k // 2) for k in (1, 3, 5)])
        self.wide = nn.Conv1d(12, 12, 3, stride=2, dilation=2, groups=3, bias=False)
        self.out = nn.Linear(12, 2)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        x = torch.cat([torch.relu(conv(x)) for conv in self.convs], dim=1)
        return self.out(self.wide(x).amax(dim=-1))


rng = np.random.default_rng(19)
net = TextCNN()
for p in net.parameters():
    p.data.copy_(torch.from_numpy(rng.standard_normal(tuple(p.shape)) * 0.3))
ids = torch.from_numpy(rng.integers(0, 20, (5, 11)))
opt = torch.optim.Adagrad(net.parameters(), lr=0.1)
for _ in range(3):
    loss = nn.functional.cross_entropy(net(ids), ids[:, 0] % 2)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item(), net.embed.weight.grad[0].abs().sum().item(), net.wide.weight.grad.norm().item())
