"""What the reference trajectories were run with: the same parameters, gradients and settings for both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

FIXTURE = Path(__file__).parent / "fixtures" / "reference.npz"

SHAPES: tuple[tuple[int, ...], ...] = ((6, 4), (5,), (3, 4, 2), (), (3, 7))
MATRICES = (0, 4)  # what torch's Muon takes
STEPS = 20
KEPT = (1, 2, 5, 10, 20)  # steps after which parameters are stored
SKIPPED = (4, 1)  # in step 4 parameter 1 has no gradient
NEW_LR_AT = 11  # from this step on the learning rate is multiplied by 0.3

# Name, optimizer, settings. torch and Genesis share the names of settings.
RUNS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("sgd", "SGD", {"lr": 0.1}),
    ("sgd_decay", "SGD", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("sgd_momentum", "SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05}),
    ("sgd_dampening", "SGD", {"lr": 0.05, "momentum": 0.8, "dampening": 0.3}),
    ("sgd_nesterov", "SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    ("adam", "Adam", {"lr": 0.02}),
    ("adam_l2", "Adam", {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    ("adamw", "AdamW", {"lr": 0.02}),
    ("adamw_llm", "AdamW", {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1, "maximize": True}),
    ("adafactor", "Adafactor", {"lr": 0.05}),
    (
        "adafactor_decay",
        "Adafactor",
        {"lr": 0.3, "weight_decay": 0.1, "eps": (1e-6, 0.01), "d": 1.5, "beta2_decay": -0.6},
    ),
    ("muon", "Muon", {"lr": 0.02}),
    ("muon_heavy", "Muon", {"lr": 0.02, "nesterov": False, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}),
    ("lion", "Lion", {"lr": 0.01, "weight_decay": 0.1}),
    ("lion_betas", "Lion", {"lr": 0.01, "betas": (0.95, 0.98)}),
)


def shapes_of(optimizer: str) -> list[tuple[int, ...]]:
    """The shapes of the parameters in a run of `optimizer`."""
    return [SHAPES[i] for i in MATRICES] if optimizer == "Muon" else list(SHAPES)


def inputs(optimizer: str) -> tuple[list[np.ndarray], list[list[np.ndarray | None]]]:
    """Initial parameters, and for each step the gradients (None where one is missing), in float64.

    Values are multiples of 2^-10 below 8, the same in float32 and float64.
    """
    rng = np.random.default_rng(20)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return np.asarray(np.round(np.clip(rng.standard_normal(shape), -8, 8) * 1024) / 1024)

    shapes = shapes_of(optimizer)
    params = [draw(s) for s in shapes]
    grads: list[list[np.ndarray | None]] = []
    for step in range(1, STEPS + 1):
        row: list[np.ndarray | None] = [draw(s) for s in shapes]
        if step == SKIPPED[0]:
            row[SKIPPED[1]] = None
        grads.append(row)
    return params, grads
