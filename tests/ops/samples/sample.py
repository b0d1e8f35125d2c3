"""Samples of drawing tokens; the oracle orders the whole vocabulary and adds probabilities one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError
from genesis.random import philox
from tests.ops.sampling import Case, Rows, apart, integers, mask


def drawn(
    logits: np.ndarray,
    keys: np.ndarray,
    settings: np.ndarray,
    top_k: np.ndarray,
    seen: np.ndarray | None = None,
    log_probs: bool = False,
) -> tuple[Any, Any]:
    """Token by token, from the definition."""
    tokens, chances = [], []
    for row, line in enumerate(logits.astype(np.float64).tolist()):
        temperature, top_p, min_p, penalty = settings[row].tolist()
        if not all(map(math.isfinite, line)):
            tokens.append(-1)
            chances.append(math.nan)
            continue
        scores = list(line)
        for i in range(len(line)):
            if seen is not None and seen[row, i]:
                scores[i] = line[i] / penalty if line[i] > 0 else line[i] * penalty
        order = sorted(range(len(line)), key=lambda i: (-scores[i], i))
        tokens.append(_chosen(scores, order, temperature, int(top_k[row]), top_p, min_p, keys[row]))
        most = max(line)
        chances.append(line[tokens[-1]] - most - math.log(math.fsum(math.exp(x - most) for x in line)))
    return np.array(tokens, np.int64), np.array(chances if log_probs else [], np.float64)


def _chosen(
    scores: list[float], order: list[int], temperature: float, top_k: int, top_p: float, min_p: float, key: np.ndarray
) -> int:
    if temperature == 0:
        return order[0]
    top, order = scores[order[0]], order[: top_k or None]
    if len(order) == len(scores) and top_p == 1 and min_p == 0:
        order = sorted(order)
    weights = [math.exp((scores[i] - top) / temperature) for i in order]
    whole, kept, reached = math.fsum(weights), 0, 0.0
    while kept < len(order) and (top_p == 1 or reached < top_p) and weights[kept] >= min_p:
        reached += weights[kept] / whole
        kept += 1
    seed, sequence, position = (int(k) for k in key)
    assert sequence == 0 or position < 1 << 32
    high, low = (int(w) for w in philox(seed, position, 1)[0, :2]) if sequence == 0 else _words(*map(int, key))
    rest = ((high << 21) | (low >> 11)) * 2.0**-53 * math.fsum(weights[:kept])
    for i in range(kept):
        rest -= weights[i]
        if rest < 0:
            return order[i]
    return order[kept - 1]


def _words(seed: int, sequence: int, position: int) -> tuple[int, int]:
    """Philox 4x32-10 in Python's integers (Salmon et al., 2011)."""
    c = [position, 0, sequence & 0xFFFFFFFF, sequence >> 32]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c[0], c[1]


def keys_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    return np.stack([integers(rng, 0, 9, rows), integers(rng, 0, 3, rows), integers(rng, 0, 999, rows)], axis=1)


# (temperature, top-k, top-p, min-p, repetition penalty), in numbers that all dtypes hold
SETTINGS = [
    (0.0, 0, 1.0, 0.0, 1.0),
    (1.0, 0, 1.0, 0.0, 1.0),
    (0.5, 3, 1.0, 0.0, 1.0),
    (2.0, 0, 0.75, 0.0, 1.0),
    (1.0, 50, 0.875, 0.25, 2.0),
    (1.0, 0, 1.0, 0.125, 1.5),
]


def sample_cases(rng: np.random.Generator) -> list[Case]:
    found = []
    for vocabulary in (1, 7, 900):
        for log_probs in (False, True):
            rows = len(SETTINGS)
            numbers = np.array([(t, p, m, r) for t, _, p, m, r in SETTINGS])
            top_k = np.array([k for _, k, *_ in SETTINGS])
            logits = apart(rng, rows, vocabulary, gap=0.015625 if vocabulary > 100 else 0.5)
            for seen in (None, mask(rng, rows, vocabulary)):
                inputs = (logits, keys_of(rng, rows), numbers, top_k, *(() if seen is None else (seen,)))
                found.append(Case(inputs, {"log_probs": log_probs}))
    one = (keys_of(rng, 2), np.array([[1.0, 1.0, 0.0, 1.0]] * 2), np.zeros(2, np.int64))
    found.append(Case((np.zeros((2, 600)), *one)))  # all are equal, beyond the first that are put in order
    many = (keys_of(rng, 36), np.tile(numbers, (6, 1)), np.tile(top_k, 6))
    found.append(Case((apart(rng, 36, 90, gap=0.5), *many)))
    found.append(Case((np.array([[1.0, math.nan, 2.0], [math.inf, 0.0, 0.0]]), *one), {"log_probs": True}))
    return [*found, Case((np.zeros((0, 5)), np.zeros((0, 3), np.int64), np.zeros((0, 4)), np.zeros(0, np.int64)))]


ONE = (np.zeros((1, 3), np.int64), np.ones((1, 4)), np.zeros(1, np.int64))

ROWS = [
    Rows(
        "sample",
        drawn,
        sample_cases,
        dtypes=("float64", "float32"),
        reduction=lambda case: case.inputs[0].shape[-1],
        errors=(
            (Case((np.zeros((1, 0)), *ONE)), ShapeError, "not empty"),
            (Case((np.zeros((2, 5)), *ONE)), ShapeError, r"keys \[2, 3\]"),
            (Case((np.zeros((1, 5)), *ONE, np.zeros((1, 4), bool))), ShapeError, r"bool \[1, 5\]"),
            (Case((np.zeros((1, 5), np.int64), *ONE)), DTypeError, "float types"),
            (Case((np.zeros((1, 5)), ONE[0].astype(np.int32), *ONE[1:])), DTypeError, "int64 keys"),
        ),
    )
]
