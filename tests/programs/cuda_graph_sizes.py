"""A graph for each batch size, the largest first; smaller batches are padded to the next size."""

import torch
from torch import nn

net = nn.Linear(8, 3).cuda().eval()
nn.init.constant_(net.weight, 0.25)
nn.init.constant_(net.bias, 1.0)
sizes = [1, 2, 4] + [8 * i for i in range(1, 3)]
inputs = torch.zeros(max(sizes), 8, device="cuda")
outputs = torch.zeros(max(sizes), 3, device="cuda")
graphs, pool = {}, None
with torch.no_grad():
    for size in reversed(sizes):
        outputs[:size] = net(inputs[:size])
        torch.cuda.synchronize()
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size], pool=pool):
            outputs[:size] = net(inputs[:size])
        pool = pool or graphs[size].pool()
for n in (1, 3, 7, 16):
    size = next(s for s in sizes if s >= n)
    inputs[:n] = torch.arange(n, device="cuda")[:, None]
    graphs[size].replay()
    print(n, size, outputs[:n].sum().item())
