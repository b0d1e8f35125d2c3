"""Learning rates of the schedulers, printed over ten steps."""

import torch
from torch.optim import lr_scheduler as sched

makers = {
    "step": lambda o: sched.StepLR(o, step_size=3, gamma=0.5),
    "multi": lambda o: sched.MultiStepLR(o, milestones=[2, 6], gamma=0.1),
    "exp": lambda o: sched.ExponentialLR(o, gamma=0.9),
    "cosine": lambda o: sched.CosineAnnealingLR(o, T_max=8, eta_min=0.01),
    "restarts": lambda o: sched.CosineAnnealingWarmRestarts(o, T_0=4),
    "lambda": lambda o: sched.LambdaLR(o, lambda s: min(1.0, (s + 1) / 5)),
    "linear": lambda o: sched.LinearLR(o, start_factor=0.1, total_iters=5),
    "cycle": lambda o: sched.OneCycleLR(o, max_lr=1.0, total_steps=12),
    "poly": lambda o: sched.PolynomialLR(o, total_iters=6, power=2.0),
    "chain": lambda o: sched.SequentialLR(
        o, [sched.ConstantLR(o, factor=0.1, total_iters=3), sched.ExponentialLR(o, 0.8)], milestones=[3]
    ),
}
for name, make in makers.items():
    opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
    scheduler, rates = make(opt), []
    for _ in range(10):
        rates.append(round(opt.param_groups[0]["lr"], 6))
        opt.step()
        scheduler.step()
    print(name, rates, round(scheduler.get_last_lr()[0], 6))
opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
plateau = sched.ReduceLROnPlateau(opt, mode="min", factor=0.5, patience=1)
for loss in (1.0, 0.9, 0.95, 0.96, 0.97, 0.5):
    plateau.step(loss)
print(opt.param_groups[0]["lr"], plateau.num_bad_epochs)
