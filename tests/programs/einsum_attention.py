"""Attention, bilinear forms and traces through einsum and its relatives."""

import numpy as np
import torch

rng = np.random.default_rng(11)
q, k, v = (torch.from_numpy(rng.standard_normal((2, 5, 3, 4))).requires_grad_() for _ in range(3))
scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.size(-1) ** 0.5
mask = torch.ones(5, 5, dtype=torch.bool).tril()
weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
out.square().sum().backward()
print(out.sum().item(), q.grad.norm().item(), k.grad.norm().item(), v.grad.norm().item())
a = torch.from_numpy(rng.standard_normal((3, 4)))
b = torch.from_numpy(rng.standard_normal((4, 3)))
print(torch.einsum("ij,ji", a, b).item(), torch.einsum("ij->j", a).tolist(), torch.einsum("...i->...", a).tolist())
print(torch.einsum("ii->i", a @ b).tolist(), torch.einsum("i,j->ij", a[0], b[:, 0]).shape)
print(
    torch.tensordot(a, b, dims=1).trace().item(),
    torch.kron(a[:1], b[:, :1]).shape,
    torch.outer(a[0], a[1]).sum().item(),
)
print(torch.einsum("bn,anm,bm->ba", a[:, :3], a.new_ones(2, 3, 4), a).tolist())
