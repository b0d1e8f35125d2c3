"""Whole-network capture: forward, loss, backward and the optimizer's step in one graph."""

import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
for p in net.parameters():
    p.data.copy_(torch.from_numpy(rng.standard_normal(tuple(p.shape)) * 0.3))
batches = [torch.from_numpy(rng.standard_normal((6, 12))).float().cuda() for _ in range(5)]
static = batches[0].clone()
opt = torch.optim.SGD(net.parameters(), lr=0.1)


def step():
    opt.zero_grad(set_to_none=True)
    loss = nn.functional.mse_loss(net(static[:, :8]), static[:, 8:])
    loss.backward()
    opt.step()
    return loss


stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
opt.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    loss = step()
for batch in batches:
    static.copy_(batch)
    graph.replay()
    print(round(loss.item(), 5), round(net[0].weight.norm().item(), 5))
