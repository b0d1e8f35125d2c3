"""Self-attention and cross-attention with masks."""

import numpy as np
import torch
import torch.nn as nn

rng = np.random.default_rng(4)
mha = nn.MultiheadAttention(embed_dim=8, num_heads=2, batch_first=True)
for p in mha.parameters():
    p.data = torch.from_numpy(rng.standard_normal(tuple(p.shape))).float() * 0.2
query = torch.tensor(rng.standard_normal((2, 5, 8)), dtype=torch.float32, requires_grad=True)
memory = torch.tensor(rng.standard_normal((2, 7, 8)), dtype=torch.float32)
padding = torch.zeros(2, 7, dtype=torch.bool)
padding[1, 4:] = True
out, weights = mha(query, memory, memory, key_padding_mask=padding)
print(out.shape, weights.shape, weights.sum(-1).mean().item(), weights[1, :, 4:].abs().max().item())
causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
same, per_head = mha(query, query, query, attn_mask=causal, average_attn_weights=False)
print(per_head.shape, per_head.triu(1).abs().sum().item(), same.square().mean().item())
(out.sum() + same.pow(2).sum()).backward()
print(query.grad.norm().item(), mha.in_proj_weight.grad.norm().item(), mha.out_proj.bias.grad.sum().item())
print(mha(query, query, query, need_weights=False)[1])
