"""Every optimizer for eight steps on the same quadratic."""

import torch

target = torch.tensor([1.0, -2.0, 3.0])
kinds = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.5},
    "Adadelta": {"lr": 1.0},
    "Adamax": {"lr": 0.1},
    "NAdam": {"lr": 0.1},
    "RAdam": {"lr": 0.1},
    "RMSprop": {"lr": 0.05, "centered": True, "momentum": 0.5},
    "Rprop": {"lr": 0.1},
    "ASGD": {"lr": 0.1},
}
for name, settings in kinds.items():
    p = torch.nn.Parameter(torch.zeros(3))
    opt = getattr(torch.optim, name)([p], **settings)
    for _ in range(8):
        opt.zero_grad()
        loss = ((p - target) ** 2).sum()
        loss.backward()
        opt.step()
    print(name, [round(v, 4) for v in p.tolist()], len(opt.state[p]))
