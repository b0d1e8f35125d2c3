"""Samples of attention over a KV cache; the oracle goes key by key."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError
from tests.ops.sampling import Case, Rows, normal, positive


def _head(x: np.ndarray, weight: np.ndarray | None, eps: float, angles: tuple[np.ndarray, np.ndarray] | None) -> Any:
    if weight is not None:
        x = x / math.sqrt(sum(x * x) / len(x) + eps) * weight
    if angles is not None:
        half = len(x) // 2
        z = (x[:half] + 1j * x[half:]) * (angles[0] + 1j * angles[1])
        x = np.concatenate([z.real, z.imag])
    return x


def stepped(
    qkv: np.ndarray,
    cache: np.ndarray,
    lengths: np.ndarray,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    query_weight: np.ndarray | None = None,
    key_weight: np.ndarray | None = None,
    active: np.ndarray | None = None,
    *,
    scale: float,
    window: int = 0,
    eps: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Row by row and head by head."""
    cache = cache.copy()
    _, rows, key_heads, capacity, size = cache.shape
    heads = qkv.shape[1] - 2 * key_heads
    out = np.zeros((rows, heads, size))
    for b in range(rows):
        n = int(lengths[b])
        if n < 0 or n >= capacity or (active is not None and not active[b]):
            continue
        angles = None if cos is None or sin is None else (cos[n], sin[n])
        for k in range(key_heads):
            cache[0, b, k, n] = _head(qkv[b, heads + k], key_weight, eps, angles)
            cache[1, b, k, n] = qkv[b, heads + key_heads + k]
        seen = range(max(0, n + 1 - window) if window else 0, n + 1)
        for h in range(heads):
            k, q = h * key_heads // heads, _head(qkv[b, h], query_weight, eps, angles)
            weights = [math.exp(scale * float(q @ cache[0, b, k, i])) for i in seen]
            out[b, h] = sum(w * cache[1, b, k, i] for w, i in zip(weights, seen, strict=True)) / math.fsum(weights)
    return out, cache


# query heads, key heads, capacity, head size; lengths; the further arrays that there are
SHAPES = [
    (4, 2, 9, 4, (0, 3, 8), "tables norms active"),
    (3, 3, 5, 6, (4, 5, -1, 1), "active"),
    (2, 1, 40, 16, (39, 17), "tables"),
    (7, 1, 3, 2, (2,), "norms"),
    (2, 2, 1, 5, (0, 0), ""),
    (2, 1, 6, 4, (), "tables"),
    (2, 1, 600, 8, (520,), "tables"),  # in several parts
]


def steps(rng: np.random.Generator) -> list[Case]:
    found = []
    for heads, key_heads, capacity, size, lengths, further in SHAPES:
        rows, half = len(lengths), size // 2
        angles = uniform_quarters(rng, capacity + 2, half)
        tables = (np.cos(angles), np.sin(angles)) if "tables" in further else (None, None)
        norms = (positive(rng, size), positive(rng, size)) if "norms" in further else (None, None)
        active = np.arange(rows) % 3 != 1 if "active" in further else None
        qkv, cache = normal(rng, rows, heads + 2 * key_heads, size), normal(rng, 2, rows, key_heads, capacity, size)
        inputs = (qkv, cache, np.array(lengths, np.int64), *tables, *norms, active)
        attrs = {"scale": 0.3, "window": 2 if "active" in further else 0, "eps": 1e-5 if "norms" in further else 0.0}
        found.append(Case(inputs, attrs))
    return found


def uniform_quarters(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Angles whose sine and cosine are 0, 1 or -1 nearly: they lose nothing in a 2-byte type."""
    return np.asarray(rng.integers(0, 4, shape) * (math.pi / 2))


QKV, CACHE, LENGTHS = np.ones((2, 6, 4)), np.ones((2, 2, 1, 5, 4)), np.zeros(2, np.int64)
ONE: dict[str, Any] = {"scale": 1.0}

# an expanded cache is refused; tests/kernels/test_attention_step.py has other views
ROWS = [
    Rows(
        "attention_step",
        stepped,
        steps,
        errors=(
            (Case((QKV[0], CACHE, LENGTHS), ONE), ShapeError, "qkv"),
            (Case((QKV, CACHE[:, :1], LENGTHS), ONE), ShapeError, "a cache"),
            (Case((QKV[:, :2], CACHE, LENGTHS), ONE), ShapeError, "0 query heads"),
            (Case((QKV, CACHE, LENGTHS[:1]), ONE), ShapeError, r"lengths must be integers \[2\]"),
            (Case((QKV, CACHE, LENGTHS.astype(np.int32)), ONE), DTypeError, "int64 lengths"),
            (Case((QKV, CACHE, LENGTHS, np.ones((5, 2))), ONE), ShapeError, "together"),
            (Case((QKV, CACHE, LENGTHS, np.ones((4, 2)), np.ones((4, 2))), ONE), ShapeError, "5 positions"),
            (Case((QKV, CACHE, LENGTHS, None, None, np.ones(4)), ONE), ShapeError, "both norm weights"),
            (Case((QKV, CACHE.astype(np.float32), LENGTHS), ONE), DTypeError, "cache of qkv's float type"),
        ),
        reduction=lambda case: case.inputs[1].shape[3] + case.inputs[0].shape[2],
        inner=4,
        strided=False,
    )
]
