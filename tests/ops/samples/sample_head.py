"""Samples of the draw from hidden states; the oracle inverts the cumulative distribution in float64."""

from __future__ import annotations

import numpy as np

from genesis.errors import DTypeError, ShapeError
from tests.ops.samples.sample import keys_of
from tests.ops.sampling import Case, Rows, normal


def drawn(
    hidden: np.ndarray, weight: np.ndarray, keys: np.ndarray, settings: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    from genesis.ops.sample import uniforms

    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
    tokens, log_probs = np.full(len(hidden), -1), np.full(len(hidden), np.nan)
    for row, (line, uniform) in enumerate(zip(logits, uniforms(keys), strict=True)):
        if np.isfinite(line).all():
            temperature = float(settings[row, 0])
            scores = line / (temperature or 1.0)
            weights = np.exp(scores - scores.max())
            heights = weights.cumsum()
            place = np.searchsorted(heights, uniform * heights[-1], side="right")
            tokens[row] = line.argmax() if temperature == 0 else place
            log_probs[row] = np.log(weights[tokens[row]] / weights.sum())
    return tokens, log_probs


def settings_of(temperatures: list[float]) -> np.ndarray:
    return np.array([[t, 1.0, 0.0, 1.0] for t in temperatures])


def cases(rng: np.random.Generator) -> list[Case]:
    found = []
    for vocabulary, width, rows in ((1, 8, 3), (128, 16, 5), (300, 40, 2)):
        settings = settings_of([(0.0, 1.0, 0.5, 2.0)[i % 4] for i in range(rows)])
        hidden, weight = normal(rng, rows, width), normal(rng, vocabulary, width)
        found.append(Case((hidden, weight, keys_of(rng, rows), settings)))
    wrong = np.array([[np.nan] * 8, [1.0] * 8])
    found.append(Case((wrong, np.ones((9, 8)), keys_of(rng, 2), settings_of([1.0, 1.0]))))
    return [*found, Case((np.zeros((0, 8)), np.ones((9, 8)), np.zeros((0, 3), np.int64), np.zeros((0, 4))))]


ONE = (np.zeros((1, 3), np.int64), settings_of([1.0]))

ROWS = [
    Rows(
        "sample_head",
        drawn,
        cases,
        dtypes=("float32",),
        reduction=lambda case: case.inputs[0].shape[-1],
        errors=(
            (Case((np.zeros((1, 8)), np.zeros((9, 4)), *ONE)), ShapeError, "weight"),
            (Case((np.zeros((2, 8)), np.zeros((9, 8)), *ONE)), ShapeError, r"keys \[2, 3\]"),
            (Case((np.zeros((1, 8), np.int64), np.zeros((9, 8), np.int64), *ONE)), DTypeError, "floats"),
            (Case((np.zeros((1, 8), np.float32), np.zeros((9, 8), np.float32), ONE[0].astype(np.int32), ONE[1])),
             DTypeError, "int64 keys"),
        ),
    )
]  # fmt: skip
