"""Hooks on tensors, retained gradients, and hooks after accumulation."""

import torch

w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
h = w * 2
h.retain_grad()
order = []
h.register_hook(lambda g: order.append("first") or g * 3)
handle = h.register_hook(lambda g: order.append("second"))
w.register_post_accumulate_grad_hook(lambda p: order.append(p.grad.sum().item()))
(h**2).sum().backward()
print(order, h.grad.tolist(), w.grad.tolist(), h.grad_fn is not None, w.is_leaf, h.is_leaf)
handle.remove()
w.grad = None
(w * 5).sum().backward()
print(order, w.grad.tolist())
grads = torch.autograd.grad((w**3).sum(), w)
print(grads[0].tolist(), w.grad.tolist())
