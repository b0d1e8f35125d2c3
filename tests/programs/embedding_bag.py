"""Bags of words with offsets, weights and three modes."""

import torch
from torch import nn
import torch.nn.functional as F

table = (torch.arange(20.0).view(10, 2) / 10).requires_grad_()
words = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9])
offsets = torch.tensor([0, 3, 3, 6])
for mode in ("sum", "mean", "max"):
    out = F.embedding_bag(words, table, offsets, mode=mode)
    (gradient,) = torch.autograd.grad(out.pow(2).sum(), table)
    print(mode, out.tolist(), gradient.sum(1).tolist())
weights = torch.linspace(0.1, 0.8, 8)
print(F.embedding_bag(words, table, offsets, mode="sum", per_sample_weights=weights).tolist())
bag = nn.EmbeddingBag.from_pretrained(table.detach(), mode="mean", freeze=False)
print(bag(words.view(2, 4)).tolist(), bag.weight.requires_grad)
emb = nn.Embedding.from_pretrained(table.detach(), freeze=True, padding_idx=0)
print(
    emb(torch.tensor([[0, 1], [9, 9]])).sum().item(), emb.weight.requires_grad, F.one_hot(words % 3, 3).sum(0).tolist()
)
