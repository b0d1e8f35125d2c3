"""Decode with a growing cache and with a static cache; both equal the full pass."""

import numpy as np
import torch
import torch.nn.functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
rng = np.random.default_rng(15)
x = torch.from_numpy(rng.standard_normal((2, 7, 8))).float().to(device)
wq, wk, wv = (torch.from_numpy(rng.standard_normal((8, 8))).float().to(device) for _ in range(3))


def heads(t):
    return t.view(t.shape[0], -1, 2, 4).transpose(1, 2)


full = F.scaled_dot_product_attention(heads(x @ wq), heads(x @ wk), heads(x @ wv), is_causal=True)
grown = None
static = [torch.zeros(2, 2, 10, 4, device=device) for _ in range(2)]
errors = []
for t in range(x.size(1)):
    q, k, v = (heads(x[:, t : t + 1] @ w) for w in (wq, wk, wv))
    grown = (k, v) if grown is None else tuple(torch.cat([a, b], dim=2) for a, b in zip(grown, (k, v)))
    out = F.scaled_dot_product_attention(q, *grown)
    for cache, new in zip(static, (k, v)):
        cache.index_copy_(2, torch.tensor([t], device=device), new)
    mask = (torch.arange(10, device=device) <= t).view(1, 1, 1, 10)
    again = F.scaled_dot_product_attention(q, *static, attn_mask=mask)
    errors += [(out - full[:, :, t : t + 1]).abs().max().item(), (again - out).abs().max().item()]
print(max(errors) < 1e-4, grown[0].shape, full.sum().item(), static[0].count_nonzero().item())
