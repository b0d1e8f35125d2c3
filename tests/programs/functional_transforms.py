"""torch.func: gradients of functions and stateless calls of modules."""

import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vjp

net = nn.Linear(3, 2)
params = {"weight": torch.arange(6.0).view(2, 3) / 5, "bias": torch.tensor([0.1, -0.2])}
x = torch.tensor([[1.0, -1.0, 2.0], [0.0, 3.0, 1.0]])
y = torch.tensor([[1.0, 0.0], [0.0, 1.0]])


def loss(params, x, y):
    out = functional_call(net, params, (x,))
    return ((out - y) ** 2).mean(), out


grads, out = grad(loss, has_aux=True)(params, x, y)
print({k: g.tolist() for k, g in grads.items()}, out.shape)
(dx, dy), value = grad_and_value(lambda a, b: (a * b).sum(), argnums=(0, 1))(x, x + 1)
print(value.item(), dx.tolist(), dy.tolist())
out, pull = vjp(lambda t: t.sin() * 2, x)
print(out.sum().item(), pull(torch.ones_like(out))[0].sum().item())
print(grad(grad(lambda t: t**4))(torch.tensor(2.0)).item())
