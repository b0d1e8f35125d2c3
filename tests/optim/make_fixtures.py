"""Writes fixtures/reference.npz: trajectories, schedules and clipped gradients as torch computes them.

Run once, in an environment with torch 2.13: `python -m tests.optim.make_fixtures`. No test needs torch. Two things are
not torch's: Lion, which torch lacks, comes from the formula of its paper, and Muon runs without torch's rounding to
bfloat16, which would hide errors of less than one percent.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tests.optim.trajectories import FIXTURE, KEPT, NEW_LR_AT, RUNS, inputs


def _lion(params: list[np.ndarray], grads: Any, settings: dict[str, Any], lrs: list[float]) -> dict[int, Any]:
    beta1, beta2 = settings.get("betas", (0.9, 0.99))
    decay, kept = settings.get("weight_decay", 0.0), {}
    params, averages = [p.copy() for p in params], [np.zeros_like(p) for p in params]
    for step, (row, lr) in enumerate(zip(grads, lrs, strict=True), 1):
        for i, g in enumerate(row):
            if g is not None:
                direction = np.sign(beta1 * averages[i] + (1 - beta1) * g)
                params[i] = params[i] - lr * (direction + decay * params[i])
                averages[i] = beta2 * averages[i] + (1 - beta2) * g
        kept[step] = [p.copy() for p in params]
    return kept


def _torch(name: str, params: list[np.ndarray], grads: Any, settings: dict[str, Any], dtype: Any) -> dict[int, Any]:
    tensors = [torch.tensor(p, dtype=dtype, requires_grad=True) for p in params]
    optimizer = getattr(torch.optim, name)(tensors, **settings)
    kept = {}
    for step, row in enumerate(grads, 1):
        if step == NEW_LR_AT:
            optimizer.param_groups[0]["lr"] *= 0.3
        for tensor, g in zip(tensors, row, strict=True):
            tensor.grad = None if g is None else torch.tensor(g, dtype=dtype)
        optimizer.step()
        kept[step] = [t.detach().numpy().copy() for t in tensors]
    return kept


def _trajectories() -> dict[str, np.ndarray]:
    found = {}
    for run, optimizer, settings in RUNS:
        params, grads = inputs(optimizer)
        lrs = [settings["lr"] * (0.3 if s >= NEW_LR_AT else 1.0) for s in range(1, len(grads) + 1)]
        for dtype in (torch.float64, torch.float32):
            if optimizer == "Lion":
                if dtype == torch.float32:
                    continue
                kept = _lion(params, grads, settings, lrs)
            else:
                kept = _torch(optimizer, params, grads, settings, dtype)
            kind = "float64" if dtype == torch.float64 else "float32"
            for step in KEPT:
                flat = np.concatenate([p.reshape(-1) for p in kept[step]])
                found[f"{run}/{kind}/{step}"] = flat
    return found


def _rates(make: Any, steps: int) -> np.ndarray:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(rates)


def _schedules() -> dict[str, np.ndarray]:
    s = torch.optim.lr_scheduler

    def warm(after: Any) -> Any:
        def make(o: Any) -> Any:
            rise = s.LinearLR(o, start_factor=1 / 5, end_factor=1.0, total_iters=4)
            return s.SequentialLR(o, [rise, after(o)], milestones=[5])

        return make

    cosine = lambda o: s.CosineAnnealingLR(o, T_max=25, eta_min=0.05)  # noqa: E731
    linear = lambda o: s.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=25)  # noqa: E731
    step = lambda o: s.StepLR(o, step_size=7, gamma=0.3)  # noqa: E731
    factories = {
        "cosine": cosine,
        "linear": linear,
        "step": step,
        "warm_cosine": warm(cosine),
        "warm_linear": warm(linear),
        "warm_step": warm(step),
        "one_cycle": lambda o: s.OneCycleLR(o, max_lr=0.5, total_steps=30, pct_start=0.3, cycle_momentum=False),
    }
    lengths = {"cosine": 26, "linear": 26, "one_cycle": 30}
    return {f"schedule/{name}": _rates(make, lengths.get(name, 30)) for name, make in factories.items()}


def _clipping() -> dict[str, np.ndarray]:
    found = {}
    _, grads = inputs("SGD")
    for order in (2.0, 1.0, 3.0, math.inf):
        for max_norm in (0.5, 1e6):
            tensors = [torch.zeros(g.shape, requires_grad=True) for g in grads[0]]
            for t, g in zip(tensors, grads[0], strict=True):
                t.grad = torch.tensor(g, dtype=torch.float32)
            norm = torch.nn.utils.clip_grad_norm_(tensors, max_norm, order)
            flat = np.concatenate([t.grad.numpy().reshape(-1) for t in tensors])
            found[f"clip/{order}/{max_norm}"] = np.concatenate([[norm.item()], flat])
    return found


def main() -> None:
    """Write the fixture."""
    bfloat16 = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda self: self.clone()
    try:
        found = _trajectories()
    finally:
        torch.Tensor.bfloat16 = bfloat16
    found |= _schedules() | _clipping()
    FIXTURE.parent.mkdir(exist_ok=True)
    np.savez_compressed(FIXTURE, **found)
    print(f"{FIXTURE.name}: {len(found)} arrays, {FIXTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
