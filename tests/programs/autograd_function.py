"""A function with its own backward, checked by gradcheck."""

import torch


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, limit):
        ctx.save_for_backward(x, scale)
        ctx.limit = limit
        return (x * scale).clamp(-limit, limit)

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        inside = ((x * scale).abs() < ctx.limit).to(grad.dtype)
        dx = grad * scale * inside if ctx.needs_input_grad[0] else None
        dscale = (grad * x * inside).sum() if ctx.needs_input_grad[1] else None
        return dx, dscale, None


class SplitSign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        sign = x.sign().long()
        ctx.mark_non_differentiable(sign)
        ctx.set_materialize_grads(False)
        return x.abs(), sign

    @staticmethod
    def backward(ctx, dabs, dsign):
        return dabs


x = torch.linspace(-2, 2, 7, dtype=torch.float64, requires_grad=True)
scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
y = Clip.apply(x, scale, 2.0)
y.sum().backward()
print(y.tolist(), x.grad.tolist(), scale.grad.item())
print(torch.autograd.gradcheck(lambda a, s: Clip.apply(a, s, 2.1), (x.detach().requires_grad_(), scale)))
magnitude, sign = SplitSign.apply(x)
print(magnitude.sum().item(), sign.tolist(), sign.requires_grad, magnitude.requires_grad)
