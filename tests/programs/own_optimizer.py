"""Write an optimizer by subclassing, closures with LBFGS-free line search, per-parameter options, hooks of steps."""

import numpy as np
import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.0):
        if lr <= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["step"] = 0
                state["step"] += 1
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                m = state["exp_avg"]
                update = m.clone().mul_(b1).add(p.grad, alpha=1 - b1).sign_()
                p.add_(update, alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)
        return loss


w = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
b = torch.nn.Parameter(torch.tensor(0.5))
opt = Lion([{"params": [w], "weight_decay": 0.1}, {"params": b, "lr": 0.05}], lr=0.02)
x = torch.from_numpy(np.random.default_rng(0).normal(size=(8, 3))).float()
y = x @ torch.tensor([0.5, 1.0, -1.0]) + 2


def closure():
    opt.zero_grad()
    loss = ((x @ w + b - y) ** 2).mean()
    loss.backward()
    return loss


for i in range(4):
    print(opt.step(closure).item())
print(
    w.tolist(), b.item(), [sorted(g) for g in opt.param_groups], {k: type(v).__name__ for k, v in opt.state[w].items()}
)
sd = opt.state_dict()
print(sorted(sd), sorted(sd["state"]), sd["param_groups"][0]["params"], sd["param_groups"][1]["lr"])
other = Lion([{"params": [w]}, {"params": [b]}])
other.load_state_dict(sd)
print(
    other.param_groups[0]["weight_decay"],
    torch.equal(other.state[w]["exp_avg"], opt.state[w]["exp_avg"]),
    repr(opt).splitlines()[0],
)
calls = []
opt.register_step_post_hook(lambda o, a, k: calls.append(type(o).__name__))
opt.step(closure)
opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
print(calls, len(opt.param_groups), opt.defaults["lr"], isinstance(opt, torch.optim.Optimizer))
try:
    Lion([w], lr=-1)
except ValueError as e:
    print("ValueError", e)
try:
    opt.add_param_group({"params": [w]})
except ValueError:
    print("duplicate")
