"""Teacher forcing with nn.Transformer."""

import math

import numpy as np
import torch
import torch.nn as nn

rng = np.random.default_rng(6)
model = nn.Transformer(d_model=8, nhead=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=16, dropout=0.0)
for name, p in model.named_parameters():
    if "linear" in name and p.dim() == 1:
        nn.init.zeros_(p)
    elif p.dim() > 1:
        nn.init.constant_(p, 1 / math.sqrt(p.size(-1)))
        p.data.mul_(torch.from_numpy(rng.standard_normal(tuple(p.shape))).float())
source = torch.from_numpy(rng.standard_normal((6, 2, 8))).float()
target = torch.from_numpy(rng.standard_normal((4, 2, 8))).float()
mask = nn.Transformer.generate_square_subsequent_mask(4)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(3):
    out = model(source, target, tgt_mask=mask)
    loss = nn.functional.mse_loss(out, target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item())
print(out.shape, mask.dtype, mask[0].tolist())
