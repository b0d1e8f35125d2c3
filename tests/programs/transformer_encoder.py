"""A padded batch through nn.TransformerEncoder, in training and evaluation."""

import numpy as np
import torch
import torch.nn as nn

device = "cuda" if torch.cuda.is_available() else "cpu"
rng = np.random.default_rng(5)
layer = nn.TransformerEncoderLayer(d_model=16, nhead=4, dim_feedforward=32, dropout=0.0, activation="gelu",
                                   batch_first=True, norm_first=True)  # fmt: skip
encoder = nn.TransformerEncoder(layer, num_layers=2, norm=nn.LayerNorm(16), enable_nested_tensor=False).to(device)
with torch.no_grad():
    for p in encoder.parameters():
        p.copy_(torch.from_numpy(rng.standard_normal(tuple(p.shape)) * 0.15))
x = torch.from_numpy(rng.standard_normal((3, 6, 16))).float().to(device)
padding = torch.arange(6, device=device)[None, :] >= torch.tensor([6, 4, 3], device=device)[:, None]
out = encoder(x, src_key_padding_mask=padding)
loss = out.masked_fill(padding.unsqueeze(-1), 0.0).pow(2).mean()
loss.backward()
print(loss.item(), encoder.layers[0].self_attn.in_proj_weight.grad.norm().item())
encoder.eval()
with torch.inference_mode():
    again = encoder(x, src_key_padding_mask=padding)
    print(again.shape, again[~padding].sum().item())
print(len(list(encoder.state_dict())), list(encoder.state_dict())[0])
