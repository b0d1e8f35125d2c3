"""Schedulers that torch and Genesis are both given: `CASES[name](module, optimizer)` makes one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIXTURE = Path(__file__).parent / "fixtures" / "schedulers.npz"
STEPS = 24
RATES = (0.5, 0.02)  # of the two groups

CASES: dict[str, Callable[[Any, Any], Any]] = {
    "LambdaLR": lambda m, o: m.LambdaLR(o, lambda s: 0.9**s),
    "LambdaLR of each group": lambda m, o: m.LambdaLR(o, [lambda s: 0.9**s, lambda s: 1 / (1 + s)]),
    "MultiplicativeLR": lambda m, o: m.MultiplicativeLR(o, lambda s: 1 - s / 40),
    "StepLR": lambda m, o: m.StepLR(o, 5, 0.3),
    "MultiStepLR": lambda m, o: m.MultiStepLR(o, [3, 8, 8, 15], gamma=0.5),
    "ConstantLR": lambda m, o: m.ConstantLR(o, 0.25, 6),
    "LinearLR": lambda m, o: m.LinearLR(o, 0.1, 0.8, 7),
    "LinearLR as it comes": lambda m, o: m.LinearLR(o),
    "ExponentialLR": lambda m, o: m.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda m, o: m.PolynomialLR(o, 15, 2.0),
    "CosineAnnealingLR": lambda m, o: m.CosineAnnealingLR(o, 20, 0.01),
    "CosineAnnealingLR past its end": lambda m, o: m.CosineAnnealingLR(o, T_max=7, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda m, o: m.CosineAnnealingWarmRestarts(o, 4, 2, 0.001),
    "CosineAnnealingWarmRestarts of one length": lambda m, o: m.CosineAnnealingWarmRestarts(o, T_0=5),
    "OneCycleLR": lambda m, o: m.OneCycleLR(o, 1.5, STEPS),
    "OneCycleLR linear, three phases": lambda m, o: m.OneCycleLR(
        o,
        [1.5, 0.3],
        epochs=4,
        steps_per_epoch=6,
        pct_start=0.4,
        anneal_strategy="linear",
        three_phase=True,
        base_momentum=[0.7, 0.8],
        div_factor=10.0,
        final_div_factor=50.0,
    ),
    "OneCycleLR without momentum": lambda m, o: m.OneCycleLR(o, 1.5, STEPS, cycle_momentum=False),
    "CyclicLR": lambda m, o: m.CyclicLR(o, 0.1, 1.1, 4, 3),
    "CyclicLR halved": lambda m, o: m.CyclicLR(o, [0.1, 0.2], [1.1, 0.7], step_size_up=4, mode="triangular2"),
    "CyclicLR exp_range": lambda m, o: m.CyclicLR(o, 0.1, 1.1, 4, mode="exp_range", gamma=0.95, cycle_momentum=False),
    "CyclicLR by a function": lambda m, o: m.CyclicLR(o, 0.1, 1.1, 4, scale_fn=math.sqrt, scale_mode="iterations"),
    "SequentialLR": lambda m, o: m.SequentialLR(
        o, [m.LinearLR(o, 0.2, total_iters=5), m.CosineAnnealingLR(o, 12), m.ExponentialLR(o, 0.8)], milestones=[5, 17]
    ),
    "SequentialLR of steps": lambda m, o: m.SequentialLR(
        o, [m.ConstantLR(o, 0.5, 4), m.StepLR(o, 3), m.PolynomialLR(o, 6)], [4, 12]
    ),
    "SequentialLR of others": lambda m, o: m.SequentialLR(
        o, [m.MultiStepLR(o, [2]), m.LambdaLR(o, lambda s: 0.5**s), m.CosineAnnealingWarmRestarts(o, 3)], [6, 10]
    ),
    "ChainedScheduler": lambda m, o: m.ChainedScheduler([m.ConstantLR(o, 0.1, 4), m.ExponentialLR(o, 0.9)]),
    "SequentialLR of chained": lambda m, o: m.SequentialLR(
        o, [m.SequentialLR(o, [m.ConstantLR(o), m.StepLR(o, 2)], [3]), m.ExponentialLR(o, 0.9)], [8]
    ),
}


def two_side_by_side(m: Any, o: Any) -> Callable[[], None]:
    """Two schedulers of one optimizer, whose factors multiply."""
    both = [m.ExponentialLR(o, 0.9), m.MultiStepLR(o, [4, 9], 0.1)]

    def step() -> None:
        for each in both:
            each.step()

    return step


def plateau(m: Any, o: Any, how: dict[str, Any]) -> Callable[[], None]:
    """Losses that stop falling, twice."""
    scheduler, losses = m.ReduceLROnPlateau(o, **how), iter([5, 4, 3, 3, 3, 2.999, 3, 3, 3, 1, 0.9, *[0.9] * 20])
    sign = -1 if how.get("mode") == "max" else 1
    return lambda: scheduler.step(sign * next(losses))


def fractions(m: Any, o: Any) -> Callable[[], None]:
    """Warm restarts at places between two steps."""
    scheduler, places = m.CosineAnnealingWarmRestarts(o, 2, 2), iter(i * 0.7 for i in range(STEPS + 1))
    return lambda: scheduler.step(next(places))


def steps() -> dict[str, Callable[[Any, Any], Callable[[], None]]]:
    """For each name what makes a function that steps once."""
    found: dict[str, Callable[[Any, Any], Callable[[], None]]] = {
        name: lambda m, o, make=make: make(m, o).step for name, make in CASES.items()
    }
    found["side by side"] = two_side_by_side
    found["fractions"] = fractions
    for name, how in {
        "plateau": {"patience": 2},
        "plateau max": {"mode": "max", "patience": 1, "factor": 0.5, "threshold_mode": "abs", "threshold": 0.01},
        "plateau cooldown": {"patience": 1, "cooldown": 3, "min_lr": [0.01, 0.001]},
    }.items():
        found[name] = lambda m, o, how=how: plateau(m, o, how)
    return found


def followed(module: Any, optimizer: Any, make: Callable[[Any, Any], Callable[[], None]]) -> list[list[float]]:
    """The rates and the momenta of both groups at the start and after each step."""
    step = make(module, optimizer)

    def now() -> list[float]:
        groups = optimizer.param_groups
        return [g["lr"] for g in groups] + [g["momentum"] if "momentum" in g else g["betas"][0] for g in groups]

    rows = [now()]
    for _ in range(STEPS):
        optimizer.step()
        step()
        rows.append(now())
    return rows
