"""Samples of what follows a draw; the oracle goes row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError
from tests.ops.sampling import Case, Rows, apart, integers, mask


def followed(drawn: Any, log_probs: Any, stops: Any, *state: np.ndarray) -> tuple[np.ndarray, ...]:
    """From the definition."""
    tokens, lengths, left, keys, seen, ring, ring_log_probs, step = (x.copy() for x in state)
    place = step[0] % len(ring)
    for row, token in enumerate(drawn.tolist()):
        is_active = left[row] > 0
        ring[place, row] = token if is_active else -2
        if len(log_probs):
            ring_log_probs[place, row] = log_probs[row] if is_active else math.nan
        if not is_active:
            continue
        left[row] -= 1
        if token == -1 or token in stops[row].tolist():
            left[row] = 0
        if token != -1:
            tokens[row] = token
            lengths[row] += 1
            keys[row, 2] += 1
            seen[row, token : token + 1] = True
    step[0] += 1
    return tokens, lengths, left, keys, seen, ring, ring_log_probs, step


def next_tokens_cases(rng: np.random.Generator) -> list[Case]:
    """Batches below and above a tile of rows; each has rows that stop, fail, come to their end and are not active."""
    found = []
    for rows, vocabulary, places, stops, step in (
        (1, 9, 1, 0, 0),
        (7, 12, 4, 16, 3),
        (45, 0, 3, 5, 1000),
        (0, 4, 2, 1, 1),
    ):
        for has_log_probs in (False, True):
            drawn = integers(rng, 0, 12, rows)
            drawn[::5] = -1
            few = integers(rng, 0, 12, rows, stops)
            few[:, stops // 2 + 1 :] = -1
            left = integers(rng, 0, 3, rows)
            state = (
                integers(rng, 0, 12, rows), integers(rng, 0, 99, rows), left, integers(rng, 0, 99, rows, 3),
                mask(rng, rows, vocabulary), integers(rng, 0, 12, places, rows),
                apart(rng, places, rows if has_log_probs else 0), np.array([step]),
            )  # fmt: skip
            found.append(Case((drawn, apart(rng, rows if has_log_probs else 0), few, *state)))
    return found


def batch(rows: int = 2, **changed: np.ndarray) -> Case:
    """Arrays of an idle batch, but for some."""
    arrays = {name: np.zeros(rows, np.int64) for name in ("tokens", "lengths", "left")}
    whole = {
        "drawn": np.zeros(rows, np.int64), "log_probs": np.zeros(rows), "stops": np.zeros((rows, 1), np.int64),
        **arrays, "keys": np.zeros((rows, 3), np.int64), "seen": np.zeros((rows, 5), bool),
        "ring": np.zeros((4, rows), np.int64), "ring_log_probs": np.zeros((4, rows)), "step": np.zeros(1, np.int64),
    }  # fmt: skip
    return Case(tuple((whole | changed).values()))


ROWS = [
    Rows(
        "next_tokens",
        followed,
        next_tokens_cases,
        dtypes=("float32", "float64"),
        exact=True,
        strided=False,  # the state of a batch is contiguous
        errors=(
            (batch(ring=np.zeros((0, 2), np.int64)), ShapeError, r"ring \[R, B\]"),
            (batch(left=np.zeros(3, np.int64)), ShapeError, r"\[2\] four times"),
            (batch(seen=np.zeros((3, 5), bool)), ShapeError, r"seen \[2, V\]"),
            (batch(log_probs=np.zeros(0)), ShapeError, r"their ring \[4, 2\]"),
            (batch(step=np.zeros(1, np.int32)), DTypeError, "int64 arrays"),
            (batch(log_probs=np.zeros(2, np.float32)), DTypeError, "one float type"),
            (batch(ring=np.zeros((2, 4), np.int64).T), ShapeError, "contiguous"),
        ),
    )
]
