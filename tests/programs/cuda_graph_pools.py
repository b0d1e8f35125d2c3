"""Two graphs that share one memory pool, replayed in the order of capture."""

import torch

x = torch.ones(1024, device="cuda")
pool = torch.cuda.graph_pool_handle()
a, b = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
(x * 2).sum()
torch.cuda.synchronize()
with torch.cuda.graph(a, pool=pool):
    y = x * 2 + 1
with torch.cuda.graph(b, pool=a.pool()):
    z = (y * 3).sum()
for value in (1.0, 5.0):
    x.fill_(value)
    a.replay()
    b.replay()
    torch.cuda.synchronize()
    print(z.item(), a.pool() == pool, b.pool() == pool)
