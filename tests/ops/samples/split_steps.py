"""Rows for the optimizer steps on split masters; and for steps on bfloat16 values that are rounded at random.

Of the latter the numbers are such that every result is a bfloat16 number, which rounding leaves as it is. That other
results are rounded as `stochastic_round` does it is tested in tests/optim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from genesis.errors import DTypeError, ShapeError
from genesis.ops.rounding import Noise
from tests.ops.samples.optimizers import ADAM, LION, MOMENTUM, SHAPES, _adamw, _lion, _sgd, _sgd_momentum
from tests.ops.samples.rounding import L, W, master_of, random_halves
from tests.ops.sampling import Case, Rows, normal, positive

A = np.ones((2, 3), np.float32)
NOISE = Noise(3, 64, 1000)
SGD = {"weight_decay": 0.1}


def split(oracle: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A step's oracle on the masters of weights and residuals."""
    return lambda weight, low, *rest, **attrs: oracle(master_of(weight, low), *rest, **attrs)


def joined(outputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The halves of the master as one float32 output."""
    weight, low, *states = outputs
    return (np.asarray(master_of(weight, low)).astype(np.float32), *states)


def split_cases(states: int, numbers: tuple[tuple[float, ...], ...], *attrs: dict[str, Any]) -> Any:
    """Every shape with the first settings, and one shape with the others; gradients in all dtypes of the row."""

    def cases(rng: np.random.Generator) -> list[Case]:
        def arrays(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
            kept = [normal(rng, *shape).astype(np.float32) for _ in range(states)]
            if states == 2:
                kept[1] = positive(rng, *shape).astype(np.float32)
            return (*random_halves(rng, *shape), normal(rng, *shape), *kept)

        every = [Case((*arrays(shape), *numbers[0]), attrs[0]) for shape in SHAPES]
        return every + [Case((*arrays((4, 7)), *some), a) for some in numbers for a in attrs]

    return cases


def exact_case(states: int, is_split: bool, lr: float, **attrs: Any) -> Callable[[np.random.Generator], list[Case]]:
    """Small whole numbers, in bfloat16 throughout."""

    def cases(rng: np.random.Generator) -> list[Case]:
        def whole(shape: tuple[int, ...]) -> np.ndarray:
            return np.asarray(2 * rng.integers(1, 5, shape)).astype(ml_dtypes.bfloat16)

        found = []
        for shape in ((3, 5), (), (0,), (2100,)):
            low = (np.zeros(shape, np.int16),) if is_split else ()
            arrays = (whole(shape), *low, whole(shape), *(whole(shape) for _ in range(states)))
            found.append(Case((*arrays, lr, 3, 1.0), {**attrs, "noise": NOISE}))
        return found

    return cases


HALF_ADAM = {"beta1": 0.5, "beta2": 0.5, "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}
HALF_MOMENTUM = {"momentum": 0.5, "dampening": 0.5, "nesterov": False, "weight_decay": 0.0}
HALF_LION = {"beta1": 0.5, "beta2": 0.5, "weight_decay": 0.0}

# Name, oracle, states, numbers, settings, and those of the exact case with its learning rate.
STEPS: tuple[tuple[str, Any, int, Any, tuple[dict[str, Any], ...], dict[str, Any], float], ...] = (
    ("sgd", _sgd, 0, ((0.1, 1, 1.0), (0.1, 2, 0.5)), (SGD, {"weight_decay": 0.0}), {"weight_decay": 0.0}, 0.5),
    (
        "sgd_momentum", _sgd_momentum, 1, ((0.1, 2, 1.0), (0.1, 1, 0.5)),
        (MOMENTUM, {**MOMENTUM, "nesterov": True, "dampening": 0.0}), HALF_MOMENTUM, 0.5,
    ),
    (
        "adamw", _adamw, 2, ((1e-2, 3, 1.0), (1e-3, 1, 0.25)),
        (ADAM, {**ADAM, "decoupled": False}), HALF_ADAM, 0.0,
    ),
    ("lion", _lion, 1, ((1e-2, 1, 1.0), (1e-3, 4, -0.5)), (LION,), HALF_LION, 0.5),
)  # fmt: skip


def _rows() -> list[Rows]:
    found = []
    for name, oracle, states, numbers, settings, half, lr in STEPS:
        kept = [A] * states
        wrong = Case((W, A, A, *kept, 0.1, 1, 1.0), settings[0])
        narrow = Case((W, L, A, *[x.astype(np.float64) for x in kept], 0.1, 1, 1.0), settings[0])
        shape = Case((W, L, A[:1], *kept, 0.1, 1, 1.0), settings[0])
        kinds = ((narrow, DTypeError, rf"{name}_split_step takes states of"),) if states else ()
        found += [
            Rows(
                f"{name}_split_step", split(oracle), split_cases(states, numbers, *settings),
                dtypes=("float32", "bfloat16"), seen=joined, reduction=lambda case: 4,
                errors=(
                    (wrong, DTypeError, "int16 residual"),
                    (shape, ShapeError, rf"{name}_split_step.*\(1, 3\)"),
                    *kinds,
                ),
            ),
            Rows(f"{name}_split_step", split(oracle), exact_case(states, True, lr, **half), seen=joined),
            Rows(f"{name}_step", oracle, exact_case(states, False, lr, **half)),
        ]  # fmt: skip
    return found


ROWS = _rows()
