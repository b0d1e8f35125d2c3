"""Skip-gram with negative samples."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

rng = np.random.default_rng(23)
centre, context = nn.Embedding(30, 8), nn.Embedding(30, 8)
for e in (centre, context):
    e.weight.data.copy_(torch.from_numpy(rng.uniform(-0.5, 0.5, (30, 8))))
opt = torch.optim.Adam([*centre.parameters(), *context.parameters()], lr=0.05)
for _ in range(5):
    words = torch.from_numpy(rng.integers(0, 30, 16))
    positive = torch.from_numpy(rng.integers(0, 30, (16, 1)))
    negative = torch.from_numpy(rng.integers(0, 30, (16, 5)))
    c = centre(words).unsqueeze(2)
    good = torch.bmm(context(positive), c).squeeze(2)
    bad = torch.bmm(context(negative), c).squeeze(2)
    loss = -(F.logsigmoid(good).sum(1) + F.logsigmoid(-bad).sum(1)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(round(loss.item(), 5))
similar = F.cosine_similarity(centre.weight[:1], centre.weight, dim=1)
print(similar.topk(3).indices.tolist(), torch.pdist(centre.weight[:4]).tolist() if hasattr(torch, "pdist") else None)
