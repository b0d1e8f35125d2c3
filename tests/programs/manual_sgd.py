"""Gradient descent without an optimizer, through .data and under no_grad."""

import numpy as np
import torch

rng = np.random.default_rng(10)
x = torch.from_numpy(rng.standard_normal((16, 3))).float()
y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3
w = torch.zeros(3, requires_grad=True)
b = torch.zeros(1, requires_grad=True)
for step in range(20):
    loss = ((x @ w + b - y) ** 2).mean()
    loss.backward()
    if step % 2:
        w.data -= 0.1 * w.grad
        b.data.sub_(0.1 * b.grad.data)
    else:
        with torch.no_grad():
            w -= 0.1 * w.grad
            b.add_(b.grad, alpha=-0.1)
    w.grad.zero_()
    b.grad = None
print(loss.item(), w.tolist(), b.item())
w.data = torch.ones(3)
print((w * 2).sum().item(), w.requires_grad, w.is_leaf, b.grad is None)
