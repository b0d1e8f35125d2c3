"""Temperature, top-k, top-p, repetition penalty and min-p on logits."""

import numpy as np
import torch
import torch.nn.functional as F

rng = np.random.default_rng(13)
logits = torch.from_numpy(rng.standard_normal((3, 12))).float() * 3
previous = torch.tensor([[1, 2, 2], [0, 5, 7], [11, 11, 3]])
score = torch.gather(logits, 1, previous)
logits = logits.scatter(1, previous, torch.where(score < 0, score * 1.3, score / 1.3)) / 0.8
top = torch.topk(logits, 6)
logits[logits < top.values[:, [-1]]] = -float("inf")
ordered, order = torch.sort(logits, descending=True)
cumulative = F.softmax(ordered, dim=-1).cumsum(dim=-1)
remove = cumulative > 0.9
remove[..., 1:] = remove[..., :-1].clone()
remove[..., 0] = False
logits = logits.masked_fill(remove.scatter(1, order, remove), float("-inf"))
probs = torch.softmax(logits, dim=-1)
print(probs.argmax(-1).tolist(), (probs > 0).sum(-1).tolist(), probs.max(-1).values.tolist())
draws = torch.multinomial(probs, num_samples=50, replacement=True)
print(bool((probs.gather(1, draws) > 0).all()), draws.shape)
uniform = torch.rand(5)
print(bool(((uniform >= 0) & (uniform < 1)).all()), torch.log_softmax(logits, -1).max().item())
