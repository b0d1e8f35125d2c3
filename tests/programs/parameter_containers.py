"""Parameters in lists and dicts, modules in dicts, and their names."""

import torch
import torch.nn as nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.full((2, 2), float(i))) for i in range(3)])
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(2 * torch.ones(2))})
        self.acts = nn.ModuleDict({"relu": nn.ReLU(), "lrelu": nn.LeakyReLU(0.1)})

    def forward(self, x, act, scale):
        for w in self.weights:
            x = x @ w - 1
        return self.acts[act](x) * self.scales[scale]


model = Experts()
x = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
for act, scale in (("relu", "a"), ("lrelu", "b")):
    y = model(x, act, scale)
    print(y.tolist())
y.sum().backward()
print({n: None if p.grad is None else p.grad.sum().item() for n, p in model.named_parameters()})
model.weights.append(nn.Parameter(torch.eye(2)))
print(len(model.weights), "a" in model.scales, sorted(model.scales.keys()), len(model.state_dict()))
