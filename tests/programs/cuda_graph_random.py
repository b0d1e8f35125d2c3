"""Random numbers in a graph differ between replays and repeat after a seed."""

import torch

torch.cuda.manual_seed(3)
x = torch.zeros(256, device="cuda")
torch.nn.functional.dropout(x, 0.5)
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    x.uniform_()
    mask = torch.nn.functional.dropout(torch.ones(256, device="cuda"), 0.5)
graph.replay()
first, first_mask = x.clone(), mask.clone()
graph.replay()
print(torch.equal(first, x), torch.equal(first_mask, mask), bool((x >= 0).all()), sorted(set(mask.tolist())))
