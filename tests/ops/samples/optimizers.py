"""Rows for the optimizer steps on float32 and float64 values; see `split_steps.py` for the others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError
from tests.ops.sampling import FLOATS, Case, Rows, normal, positive

WIDE = ("float64", "float32")
COEFFICIENTS = (3.4445, -4.775, 2.0315)
SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (1,), (), (0,), (2, 0, 3), (4, 3, 2), (9001,))

ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
MOMENTUM = {"momentum": 0.9, "dampening": 0.1, "nesterov": False, "weight_decay": 0.1}
LION = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
FACTORED = {"beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "d": 1.0, "weight_decay": 0.1}
MUON = {
    "momentum": 0.95,
    "nesterov": True,
    "weight_decay": 0.1,
    "lr_ratio": 1.5,
    "coefficients": COEFFICIENTS,
    "eps": 1e-7,
    "iterations": 5,
}

A, B = np.ones((2, 3)), np.ones(3)


# --- Oracles: the formulas of the papers, in float64 ----------------------------------------------------------------


def _sgd(p: Any, g: Any, lr: float, step: int, c: float, *, weight_decay: float, noise: Any = None) -> tuple[Any, ...]:
    return (p - lr * (c * g + weight_decay * p),)


def _sgd_momentum(
    p: Any,
    g: Any,
    b: Any,
    lr: float,
    step: int,
    c: float,
    *,
    momentum: float,
    dampening: float,
    nesterov: bool,
    weight_decay: float,
    noise: Any = None,
) -> tuple[Any, ...]:
    g = c * g + weight_decay * p
    b = g if step == 1 else momentum * b + (1 - dampening) * g
    return p - lr * (g + momentum * b if nesterov else b), b


def _adamw(
    p: Any,
    g: Any,
    m: Any,
    v: Any,
    lr: float,
    step: int,
    c: float,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    noise: Any = None,
) -> tuple[Any, ...]:
    g = c * g + (0 if decoupled else weight_decay) * p
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    decay = lr * weight_decay * p if decoupled else 0
    return p - decay - lr * m_hat / (np.sqrt(v_hat) + eps), m, v


def _lion(
    p: Any,
    g: Any,
    m: Any,
    lr: float,
    step: int,
    c: float,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
    noise: Any = None,
) -> tuple[Any, ...]:
    update = np.sign(beta1 * m + (1 - beta1) * c * g)
    return p - lr * (update + weight_decay * p), beta2 * m + (1 - beta2) * c * g


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x * x))) if x.size else 0.0


def _relative_step(p: Any, g: Any, v: Any, lr: float, step: int, eps2: float, d: float, weight_decay: float) -> Any:
    update = g / np.sqrt(v)
    rho = max(eps2, _rms(p)) * min(lr, step**-0.5)
    return p * (1 - lr * weight_decay) - rho * update / max(1.0, _rms(update) / d)


def _adafactor(
    p: Any,
    g: Any,
    row: Any,
    col: Any,
    lr: float,
    step: int,
    c: float,
    *,
    beta2_decay: float,
    eps1: float | None,
    eps2: float,
    d: float,
    weight_decay: float,
) -> tuple[Any, ...]:
    if p.size == 0:
        return p, row, col
    weight, g = step**beta2_decay, c * g
    row = (1 - weight) * row + weight * np.mean(g * g, -1, keepdims=True)
    col = (1 - weight) * col + weight * np.mean(g * g, -2, keepdims=True)
    v = np.einsum("...ik,...kj->...ij", row, col) / row.mean(-2, keepdims=True)
    return _relative_step(p, g, v, lr, step, eps2, d, weight_decay), row, col


def _adafactor_vector(
    p: Any, g: Any, v: Any, lr: float, step: int, c: float, *, beta2_decay: float, eps1: float | None, **rest: float
) -> tuple[Any, ...]:
    if p.size == 0:
        return p, v
    weight, g = step**beta2_decay, c * g
    v = (1 - weight) * v + weight * g * g
    return _relative_step(p, g, v, lr, step, **rest), v


def _orthogonal(x: Any, *, coefficients: tuple[float, float, float], eps: float, iterations: int) -> Any:
    """By singular values: the iteration moves each of them by the polynomial a·s + b·s³ + c·s⁵."""
    if x.size == 0:
        return x
    u, s, vt = np.linalg.svd(x / max(float(np.linalg.norm(x)), eps), full_matrices=False)
    a, b, c = coefficients
    for _ in range(iterations):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


def _muon(
    p: Any,
    g: Any,
    b: Any,
    lr: float,
    step: int,
    c: float,
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    lr_ratio: float,
    **iteration: Any,
) -> tuple[Any, ...]:
    b = momentum * b + (1 - momentum) * c * g
    direction = (1 - momentum) * c * g + momentum * b if nesterov else b
    return p - lr * weight_decay * p - lr * lr_ratio * _orthogonal(direction, **iteration), b


# --- Cases ----------------------------------------------------------------------------------------------------------


def _elementwise(
    states: int, positive_last: bool, scalars: tuple[tuple[float, ...], ...], *attrs: dict[str, Any]
) -> Any:
    """Every shape with the first settings, and one shape with the others."""

    def cases(rng: np.random.Generator) -> list[Case]:
        def arrays(shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
            made = [normal(rng, *shape) for _ in range(2 + states)]
            if positive_last:
                made[-1] = positive(rng, *shape)
            return tuple(made)

        every = [Case((*arrays(shape), *scalars[0]), attrs[0]) for shape in SHAPES]
        return every + [Case((*arrays((4, 7)), *numbers), a) for numbers in scalars for a in attrs]

    return cases


def _adafactor_cases(rng: np.random.Generator) -> list[Case]:
    found = []
    for shape in ((3, 5), (1, 1), (2, 4, 3), (0, 3), (40, 60)):
        row, col = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        for step in (1, 7):
            states = (positive(rng, *row), positive(rng, *col))
            found.append(Case((normal(rng, *shape), normal(rng, *shape), *states, 1e-2, step, 0.5), FACTORED))
    return found


def _adafactor_vector_cases(rng: np.random.Generator) -> list[Case]:
    found = []
    for shape in ((5,), (1,), (), (0,), (300,)):
        for step in (1, 7):
            arrays = (normal(rng, *shape), normal(rng, *shape), positive(rng, *shape))
            found.append(Case((*arrays, 1e-2, step, 0.5), FACTORED))
    return found


ITERATION = {k: MUON[k] for k in ("coefficients", "eps", "iterations")}
MATRICES = ((6, 4), (4, 6), (1, 1), (5, 1), (12, 12), (0, 3))


def _muon_cases(rng: np.random.Generator) -> list[Case]:
    every = [Case((*(normal(rng, *s) for _ in range(3)), 0.02, 1, 1.0), MUON) for s in MATRICES]
    plain = {**MUON, "nesterov": False, "weight_decay": 0.0}
    return [*every, Case((*(normal(rng, 8, 3) for _ in range(3)), 0.02, 1, 0.25), plain)]


def _length(case: Case) -> int:
    return max(2, sum(x.size for x in case.inputs if isinstance(x, np.ndarray)))


def _few(case: Case) -> int:
    """Four terms meet in an updated element: decay, moment, gradient, update."""
    return 4


def _products(case: Case) -> int:
    """Three products of the matrix in each of five iterations; an update is small against the parameter."""
    return max(2, 3 * 5 * sum(case.inputs[0].shape))


def _amplified(case: Case) -> int:
    """At a singular value of 0 each of five iterations multiplies an error by the polynomial's derivative, 3.4445."""
    return math.ceil(3.4445 ** (2 * 5)) * _products(case)  # the tolerance takes the root


ADAM_NUMBERS = ((1e-2, 3, 1.0), (1e-3, 1, 0.25), (1e-3, 1000, -1.0))

ROWS = [
    Rows(
        "sgd_step",
        _sgd,
        _elementwise(0, False, ((0.1, 1, 1.0), (0.1, 3, 0.5)), {"weight_decay": 0.1}, {"weight_decay": 0.0}),
        dtypes=WIDE,
        errors=(
            (Case((A, B, 0.1, 1, 1.0), {"weight_decay": 0.0}), ShapeError, r"sgd_step.*\(2, 3\).*\(3,\)"),
            (Case((A.astype(np.float16), A, 0.1, 1, 1.0), {"weight_decay": 0.0}), DTypeError, "float32 or float64"),
        ),
        reduction=_few,
    ),
    Rows(
        "sgd_momentum_step",
        _sgd_momentum,
        _elementwise(
            1,
            False,
            ((0.1, 2, 1.0), (0.1, 1, 0.5)),
            MOMENTUM,
            {**MOMENTUM, "nesterov": True, "dampening": 0.0},
            {**MOMENTUM, "weight_decay": 0.0},
        ),
        dtypes=WIDE,
        errors=((Case((A, A, B, 0.1, 1, 1.0), MOMENTUM), ShapeError, r"sgd_momentum_step.*\(3,\)"),),
        reduction=_few,
    ),
    Rows(
        "adamw_step",
        _adamw,
        _elementwise(
            2,
            True,
            ADAM_NUMBERS,
            ADAM,
            {**ADAM, "decoupled": False},
            {**ADAM, "weight_decay": 0.0},
        ),
        dtypes=WIDE,
        errors=(
            (Case((A, A, B, A, 0.1, 1, 1.0), ADAM), ShapeError, r"adamw_step.*\(3,\)"),
            (Case((A, A, A, A.astype(np.float32), 0.1, 1, 1.0), ADAM), DTypeError, "states of one type"),
            (Case((A, A.astype(np.int64), A, A, 0.1, 1, 1.0), ADAM), DTypeError, "int64 gradient"),
            (
                Case((A.astype(np.float32), A, *[A.astype(np.float32)] * 2, 0.1, 1, 1.0), ADAM),
                DTypeError,
                "float64 gradient",
            ),
        ),
        reduction=_few,
    ),
    Rows(
        "lion_step",
        _lion,
        _elementwise(1, False, ((1e-2, 1, 1.0), (1e-3, 4, -0.5)), LION, {**LION, "weight_decay": 0.0}),
        dtypes=WIDE,
        errors=((Case((A, B, A, 0.1, 1, 1.0), LION), ShapeError, r"lion_step.*\(3,\)"),),
        reduction=_few,
    ),
    Rows(
        "adafactor_step",
        _adafactor,
        _adafactor_cases,
        dtypes=WIDE,
        errors=(
            (Case((B, B, B, B, 0.1, 1, 1.0), FACTORED), ShapeError, "matrices"),
            (Case((A, A, A, A, 0.1, 1, 1.0), FACTORED), ShapeError, r"\(2, 1\) and \(1, 3\)"),
            (Case((A, A, A[:, :1].astype(np.float32), A[:1], 0.1, 1, 1.0), FACTORED), DTypeError, "float32 and"),
        ),
        reduction=_length,
    ),
    Rows(
        "adafactor_vector_step",
        _adafactor_vector,
        _adafactor_vector_cases,
        dtypes=WIDE,
        errors=((Case((B, B, A, 0.1, 1, 1.0), FACTORED), ShapeError, r"adafactor_vector_step.*\(2, 3\)"),),
        reduction=_length,
    ),
    Rows(
        "newton_schulz",
        _orthogonal,
        lambda rng: [Case((normal(rng, *s),), ITERATION) for s in MATRICES],
        dtypes=FLOATS,
        errors=(
            (Case((B,), ITERATION), ShapeError, "matrices"),
            (Case((A.astype(np.int64),), ITERATION), DTypeError, "int64"),
        ),
        reduction=_amplified,
    ),
    Rows(
        "muon_step",
        _muon,
        _muon_cases,
        dtypes=WIDE,
        errors=(
            (Case((B, B, B, 0.1, 1, 1.0), MUON), ShapeError, "use AdamW"),
            (Case((A, A, A[:1], 0.1, 1, 1.0), MUON), ShapeError, r"\(1, 3\)"),
        ),
        reduction=_products,
    ),
]
