"""Mixture of experts with top-2 routing, load balancing loss, index_add, einsum."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

rng = np.random.default_rng(9)


class Expert(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, h), nn.SiLU(), nn.Linear(h, d))

    def forward(self, x):
        return self.net(x)


class MoE(nn.Module):
    def __init__(self, d, h, n, k):
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.k, self.n = k, n
        self.experts = nn.ModuleList(Expert(d, h) for _ in range(n))

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        logits = self.gate(x)
        weights, selected = torch.topk(logits.softmax(dim=1, dtype=torch.float), self.k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        mask = F.one_hot(selected, num_classes=self.n).permute(2, 1, 0)
        for e in range(self.n):
            idx, top_x = torch.where(mask[e])
            if top_x.shape[0] == 0:
                continue
            cur = self.experts[e](x[None, top_x].reshape(-1, shape[-1])) * weights[top_x, idx, None]
            out.index_add_(0, top_x, cur.to(x.dtype))
        density = F.one_hot(selected, self.n).float().mean(dim=(0, 1))
        aux = self.n * torch.sum(density * logits.softmax(-1).mean(0))
        return out.reshape(shape), aux


m = MoE(6, 8, 4, 2)
for p in m.parameters():
    p.data = torch.from_numpy(rng.normal(0, 0.5, tuple(p.shape)).astype(np.float32))
x = torch.from_numpy(rng.normal(size=(2, 5, 6)).astype(np.float32)).requires_grad_()
y, aux = m(x)
loss = y.pow(2).mean() + 0.01 * aux
loss.backward()
print(y.shape, loss.item(), aux.item(), x.grad.norm().item())
print(
    [round(e.net[0].weight.grad.norm().item(), 5) if e.net[0].weight.grad is not None else None for e in m.experts],
    m.gate.weight.grad.norm().item(),
)
W = torch.stack([e.net[0].weight for e in m.experts])
print(torch.einsum("bsd,ehd->bseh", x, W).sum(dim=(0, 1)).shape, torch.einsum("ij,kj->ik", W[0], W[1]).trace().item())
