"""Batch, group, instance, layer and RMS norms in training and evaluation."""

import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(18)
x = torch.from_numpy(rng.standard_normal((4, 6, 5))).float()
for layer in (
    nn.BatchNorm1d(6, momentum=0.3),
    nn.GroupNorm(3, 6),
    nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
    nn.LayerNorm([6, 5], elementwise_affine=False),
    nn.RMSNorm(5, eps=1e-5),
):
    inputs = x.clone().requires_grad_()
    out = layer(inputs)
    (out**3).sum().backward()
    layer.eval()
    print(type(layer).__name__, out.std().item(), inputs.grad.norm().item(), layer(x).pow(2).mean().item())
    print({k: v.float().mean().item() for k, v in layer.state_dict().items()})
print(nn.functional.normalize(x, p=2, dim=1).norm(dim=1).mean().item())
