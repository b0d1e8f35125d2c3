"""Greedy decoding: one captured step with static ids, positions and caches."""

import numpy as np
import torch

rng = np.random.default_rng(1)
emb = torch.from_numpy(rng.standard_normal((13, 8))).float().cuda()
ids, position = torch.zeros(2, 1, dtype=torch.long, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
cache = torch.zeros(2, 10, 8, device="cuda")


def step():
    cache.index_copy_(1, position, emb[ids])
    mask = torch.arange(10, device="cuda") <= position
    out = torch.nn.functional.scaled_dot_product_attention(emb[ids], cache, cache, attn_mask=mask[None, None])
    ids.copy_((out @ emb.T).argmax(-1))
    position.add_(1)


step()
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    step()
ids.copy_(torch.tensor([[1], [2]]))
position.zero_()
made = []
for _ in range(6):
    graph.replay()
    made.append(ids.flatten().tolist())
print(made, position.item(), round(cache.abs().sum().item(), 3))
