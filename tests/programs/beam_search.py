"""Beam search over a table of transitions."""

import numpy as np
import torch

rng = np.random.default_rng(14)
vocab, beams, eos = 9, 3, 0
table = torch.from_numpy(rng.standard_normal((vocab, vocab))).float().log_softmax(-1)
sequences = torch.full((2, beams, 1), 4)
sequences[1] = 7
scores = torch.tensor([0.0] + [-1e9] * (beams - 1)).repeat(2, 1)
done = torch.zeros(2, beams, dtype=torch.bool)
for _ in range(6):
    step = table[sequences[:, :, -1]]
    frozen = torch.full((vocab,), -1e9).index_fill(0, torch.tensor(eos), 0.0)
    step = torch.where(done.unsqueeze(-1), frozen, step)
    total = (scores.unsqueeze(-1) + step).flatten(1)
    scores, flat = total.topk(beams, dim=-1)
    parent = torch.div(flat, vocab, rounding_mode="floor")
    token = flat % vocab
    sequences = sequences.take_along_dim(parent.unsqueeze(-1), dim=1)
    sequences = torch.cat([sequences, token.unsqueeze(-1)], dim=-1)
    done = done.gather(1, parent) | (token == eos)
    if done.all():
        break
print(sequences[:, 0].tolist(), scores.tolist(), done.tolist())
