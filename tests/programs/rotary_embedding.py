"""Rotary position embeddings with complex numbers, as Llama's reference code has them."""

import numpy as np
import torch


def precompute(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    freqs = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def rotate(x, freqs_cis):
    x_ = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, x_.shape[1], 1, x_.shape[-1])
    return torch.view_as_real(x_ * freqs_cis).flatten(3).type_as(x)


rng = np.random.default_rng(12)
q = torch.from_numpy(rng.standard_normal((2, 6, 3, 8))).float().requires_grad_()
freqs_cis = precompute(8, 6)
out = rotate(q, freqs_cis)
out.pow(3).sum().backward()
print(freqs_cis.dtype, freqs_cis.shape, out.shape, out.sum().item(), q.grad.norm().item())
print(torch.allclose(out.norm(dim=-1), q.norm(dim=-1), atol=1e-5))
