"""What the golden cases of TRL share with their tests: the records, the noise of a seed's weights, the steps.

`tests.peers.preferences` makes the cases with TRL, and test_trl.py compares them with Genesis. This file imports
neither.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "ADAMW", "BASE", "DISTILLATION", "DIVERGENCES", "FIXTURES", "KTO_RECORDS", "PAIRS", "SEEDS", "STEPS", "STUDENT",
    "TEACHER", "conversations", "fresh_weight", "noise", "projections",
]  # fmt: skip

BASE = Path(__file__).parent / "fixtures" / "sums"
FIXTURES = BASE.parent / "trl"
SEEDS = (0, 1, 2)
STEPS = 10
# With the usual eps of 1e-8, an element whose gradient is nearly 0 moves by the learning rate in a direction that
# rounding decides.
ADAMW: dict[str, float] = {"lr": 2e-4, "weight_decay": 0.01, "eps": 1e-4}
NOISE = 0.01  # standard deviation of the noise on each weight

QUESTIONS = (
    ("What is the sum of 3 and 4?", "7", "9"),
    ("Add 2 and 2", "The answer is 4", "5"),
    ("please: 1+1", "2 equals 1+1", "11 or 12 or 13 and please answer"),
    ("8 plus 9?", "17", "The sum of 8 and 9 is 18"),
    ("What is 5+5?", "10, and please add", "equals 55"),
    ("0+0", "0", "plus"),
)


def _pairs(seed: int) -> list[dict[str, Any]]:
    chosen = [QUESTIONS[(seed + i) % len(QUESTIONS)] for i in range(4 + seed % 2)]
    if seed == 2:
        return [{"prompt": q, "chosen": f" {a}", "rejected": f" {b}"} for q, a, b in chosen]
    return [
        {
            "prompt": [{"role": "user", "content": q}],
            "chosen": [{"role": "assistant", "content": a}],
            "rejected": [{"role": "assistant", "content": b}],
        }
        for q, a, b in chosen
    ]


PAIRS = {seed: _pairs(seed) for seed in SEEDS}
# Desirable and undesirable answers, of different numbers.
KTO_RECORDS = {
    seed: [
        {"prompt": pair["prompt"], "completion": pair["chosen" if i % 3 else "rejected"], "label": bool(i % 3)}
        for i, pair in enumerate(PAIRS[seed])
    ]
    for seed in SEEDS
}


def noise(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the noise, float32, that a seed adds to the weight of this name."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return (NOISE * generator.standard_normal(shape)).astype(np.float32)


def projections(gradient: np.ndarray) -> list[float]:
    """Return three numbers that a wrong gradient changes: its norm, and its products with two fixed directions."""
    values = gradient.astype(np.float64).reshape(-1)
    index = np.arange(values.size)
    return [float(np.linalg.norm(values)), float(values @ np.cos(index)), float(values @ np.sin(1.7 * index))]


# --- Distillation -----------------------------------------------------------------------------------------------------


DISTILLATION = FIXTURES.parent / "distillation.json"
DIVERGENCES = ((0.0, 1.0), (1.0, 1.0), (0.5, 1.0), (0.1, 2.0))  # beta, temperature
_SHAPE: dict[str, Any] = {
    "vocab_size": 80, "num_hidden_layers": 1, "head_dim": 8, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
STUDENT = _SHAPE | {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
TEACHER = _SHAPE | {"hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 3, "num_hidden_layers": 2}


def fresh_weight(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a weight of a fresh model: noise of standard deviation 0.3, around 1 for norms."""
    return noise(seed, name, shape) * np.float32(0.3 / NOISE) + np.float32("norm" in name)


def conversations(seed: int) -> list[tuple[list[int], list[int]]]:
    """Return ids and labels of four conversations of 5 to 20 tokens, whose first third has no label."""
    generator = np.random.default_rng(seed)
    rows = [generator.integers(1, 80, size).tolist() for size in generator.integers(5, 21, 4)]
    return [(ids, [-100] * (len(ids) // 3) + ids[len(ids) // 3 :]) for ids in rows]
