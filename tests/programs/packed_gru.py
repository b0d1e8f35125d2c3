"""Classify sequences of several lengths with a bidirectional GRU."""

import numpy as np
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

device = "cuda" if torch.cuda.is_available() else "cpu"
rng = np.random.default_rng(2)
sequences = [torch.tensor(rng.standard_normal((n, 5)), dtype=torch.float32, device=device) for n in (7, 5, 2)]
lengths = torch.tensor([len(s) for s in sequences])
padded = pad_sequence(sequences, batch_first=True, padding_value=0.0)
gru = nn.GRU(5, 6, batch_first=True, bidirectional=True).to(device)
for p in gru.parameters():
    p.data.copy_(torch.from_numpy(rng.uniform(-0.4, 0.4, tuple(p.shape))))
packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=True)
out, hidden = gru(packed)
out, sizes = pad_packed_sequence(out, batch_first=True)
print(out.shape, hidden.shape, sizes.tolist())
loss = out.pow(2).sum() + hidden.sum()
loss.backward()
print(loss.item(), gru.weight_ih_l0.grad.norm().item(), gru.bias_hh_l0_reverse.grad.abs().sum().item())
