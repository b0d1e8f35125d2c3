"""Second derivatives through autograd.grad and gradgradcheck."""

import torch

a = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)


def f(x):
    return (x @ a @ x) / 2 + x.exp().sum() + torch.log1p(x.square()).sum()


x = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
v = torch.tensor([1.0, 2.0], dtype=torch.float64)
(g,) = torch.autograd.grad(f(x), x, create_graph=True)
(hv,) = torch.autograd.grad(g, x, grad_outputs=v, retain_graph=True)
rows = [torch.autograd.grad(g[i], x, retain_graph=True)[0] for i in range(2)]
print(g.tolist(), hv.tolist(), torch.stack(rows).tolist())
print(torch.allclose(torch.stack(rows) @ v, hv), torch.autograd.gradgradcheck(f, (x,)))
third = torch.autograd.grad(torch.autograd.grad(g.sum(), x, create_graph=True)[0].sum(), x)
print(third[0].tolist())
