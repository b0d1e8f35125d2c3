"""Rows for the roundings of float32: at random, and into a weight and its residual."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from genesis.dtypes import bfloat16
from genesis.errors import DTypeError, ShapeError
from genesis.random import philox
from tests.ops.sampling import Case, Rows, normal

__all__ = ["ROWS", "master_of", "random_halves"]

SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (1,), (), (0,), (2, 0, 3), (4, 3, 2), (9001,))
A, B = np.ones((2, 3)), np.ones(3)
W, L = A.astype(ml_dtypes.bfloat16), np.zeros((2, 3), np.int16)


# --- Oracles ----------------------------------------------------------------------------------------------------------


def _stochastic(x: Any, *, dtype: Any, seed: int, offset: int) -> Any:
    """Each value goes away from zero when the dropped share of its last place plus a random share reaches 1."""
    flat = np.ravel(x)
    words = philox(seed, offset, -(-flat.size // 8)).reshape(-1)
    share = np.array([(int(words[i // 2]) >> 16 * (i % 2)) & 0xFFFF for i in range(flat.size)]) / 65536
    exponent = np.maximum(np.frexp(flat)[1] - 8, -133)  # bfloat16's last place; below its normal range it stays
    place = np.ldexp(1.0, exponent)
    below = np.floor(np.abs(flat) / place)
    return (np.sign(flat) * (below + (np.abs(flat) / place - below + share >= 1)) * place).reshape(np.shape(x))


def master_of(weight: Any, low: Any) -> Any:
    """The float32 numbers that weights and residuals are, in float64, by arithmetic on bits as integers."""
    high = np.asarray(weight).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.int64)
    bits = (high * 65536 + np.asarray(low, np.int64)) % 2**32
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def _split(weight: Any, low: Any, master: Any) -> tuple[Any, ...]:
    """The nearest bfloat16 number, of two the one further from zero, and what is left in units of float32's last place.

    Bits of floats of one sign count their places, so neighbours differ by one there, too.
    """
    single = np.asarray(master).astype(np.float32)
    places = np.atleast_1d(single).view(np.uint32).astype(np.int64)
    below = places // 65536
    nearest = below + (places % 65536 >= 32768)
    found = nearest.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    return found.reshape(np.shape(master)), (places - nearest * 65536).reshape(np.shape(master))


# --- Cases ------------------------------------------------------------------------------------------------------------


def _rounding_cases(rng: np.random.Generator) -> list[Case]:
    attrs = {"dtype": bfloat16, "seed": 3, "offset": 5}
    tiny = normal(rng, 50) * 1e-39
    return [*(Case((normal(rng, *shape),), attrs) for shape in SHAPES), Case((tiny,), attrs)]


def random_halves(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights as bfloat16 and any residuals."""
    low = rng.integers(-(2**15), 2**15, shape).astype(np.int16)
    return normal(rng, *shape).astype(ml_dtypes.bfloat16), np.asarray(low, np.int16)


def _join_cases(rng: np.random.Generator) -> list[Case]:
    return [Case(random_halves(rng, *shape)) for shape in SHAPES]


def _split_cases(rng: np.random.Generator) -> list[Case]:
    special = [0.0, -0.0, 1 + 2.0**-8, -1 - 2.0**-8, 1 + 3 * 2.0**-9, 1e-45, -1e-40, np.inf, -np.inf, 3.4e38, -3.4e38]
    values = [normal(rng, *shape).astype(np.float32) for shape in SHAPES] + [np.array(special, np.float32)]
    return [Case((*random_halves(rng, *x.shape), x)) for x in values]


ROWS = [
    Rows(
        "stochastic_round",
        _stochastic,
        _rounding_cases,
        dtypes=("float32",),
        errors=((Case((A,), {"dtype": bfloat16, "seed": 0, "offset": 0}), DTypeError, "float32 to bfloat16"),),
        exact=True,
    ),
    Rows(
        "join_master",
        lambda weight, low: master_of(weight, low),
        _join_cases,
        errors=(
            (Case((A, L)), DTypeError, "bfloat16 weight and an int16 residual"),
            (Case((W, np.zeros(3, np.int16))), ShapeError, r"join_master.*\(3,\)"),
        ),
        exact=True,
    ),
    Rows(
        "split_master",
        _split,
        _split_cases,
        errors=(
            (Case((W, A, A.astype(np.float32))), DTypeError, "split_master.*int16 residual"),
            (Case((W, L, A)), DTypeError, "split_master: a .*float64 master"),
        ),
        exact=True,
    ),
]
