"""Truncated backpropagation through time with an LSTM."""

import numpy as np
import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
rng = np.random.default_rng(1)
emb, lstm, head = nn.Embedding(11, 8), nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 11)
model = nn.ModuleDict({"emb": emb, "lstm": lstm, "head": head}).to(device)
for name, p in model.named_parameters():
    p.data.copy_(torch.from_numpy(rng.uniform(-0.3, 0.3, tuple(p.shape))))
ids = torch.from_numpy(rng.integers(0, 11, (4, 25))).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
state = None
for start in range(0, 24, 8):
    x, y = ids[:, start : start + 8], ids[:, start + 1 : start + 9]
    out, state = lstm(emb(x), state)
    loss = nn.CrossEntropyLoss()(head(out).flatten(0, 1), y.reshape(-1))
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    opt.step()
    state = tuple(s.detach() for s in state)
    print(loss.item(), state[0].shape, state[1].abs().mean().item())
print([name for name, _ in lstm.named_parameters()])
