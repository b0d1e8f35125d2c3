"""Samples of the fused ops of language models; the oracles are plain float64, element by element or row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genesis.errors import DTypeError, IndexRangeError, ShapeError
from tests.ops.sampling import Case, Rows, integers, normal, positive, small_cases

Pair = tuple[np.ndarray, ...]


# --- softmax ----------------------------------------------------------------------------------------------------------


def softmax_oracle(x: np.ndarray, dim: int) -> np.ndarray:
    e = np.exp(x - np.max(x, axis=dim, keepdims=True)) if x.size else x
    found: np.ndarray = e / e.sum(axis=dim, keepdims=True) if x.size else x
    return found


def log_softmax_oracle(x: np.ndarray, dim: int) -> np.ndarray:
    if not x.size:
        return x
    top = np.max(x, axis=dim, keepdims=True)
    found: np.ndarray = x - top - np.log(np.exp(x - top).sum(axis=dim, keepdims=True))
    return found


def softmax_backward_oracle(g: np.ndarray, y: np.ndarray, dim: int) -> np.ndarray:
    found: np.ndarray = y * (g - (g * y).sum(axis=dim, keepdims=True)) if y.size else y
    return found


def log_softmax_backward_oracle(g: np.ndarray, y: np.ndarray, dim: int) -> np.ndarray:
    found: np.ndarray = g - np.exp(y) * g.sum(axis=dim, keepdims=True) if y.size else y
    return found


SOFTMAX_SHAPES: list[tuple[tuple[int, ...], int]] = [
    ((5,), 0), ((3, 4), -1), ((3, 4), 0), ((2, 3, 5), 1), ((1,), 0), ((4, 1), 1), ((0, 3), 1), ((3, 0), 0), ((), 0),
    ((70, 300), 1),
]  # fmt: skip


def softmaxes(rng: np.random.Generator) -> list[Case]:
    far = normal(rng, 4, 6) * 300  # weights that underflow, and would overflow without the maximum
    return [Case((normal(rng, *shape) * 3,), {"dim": dim}) for shape, dim in SOFTMAX_SHAPES] + [
        Case((far,), {"dim": 1})
    ]


def softmax_backwards(rng: np.random.Generator) -> list[Case]:
    return [Case((normal(rng, *s), positive(rng, *s) / 3), {"dim": d}) for s, d in SOFTMAX_SHAPES]


def log_softmax_backwards(rng: np.random.Generator) -> list[Case]:
    return [Case((normal(rng, *s), -positive(rng, *s)), {"dim": d}) for s, d in SOFTMAX_SHAPES]


def small_softmaxes(rng: np.random.Generator) -> list[Case]:
    return [Case((normal(rng, 3, 4),), {"dim": d}) for d in (0, -1)] + [Case((normal(rng, 2, 3, 2),), {"dim": 1})]


def last_dim(case: Case) -> int:
    shape = case.inputs[0].shape
    return shape[case.attrs["dim"]] if shape else 1


INTEGERS = (Case((np.arange(3),), {"dim": 0}), DTypeError, "float")
SOFTMAX_ROWS = [
    Rows("softmax", softmax_oracle, softmaxes, grads=small_softmaxes, errors=(INTEGERS,), reduction=last_dim),
    Rows("log_softmax", log_softmax_oracle, softmaxes, grads=small_softmaxes, errors=(INTEGERS,), reduction=last_dim),
    Rows(
        "softmax_backward",
        softmax_backward_oracle,
        softmax_backwards,
        reduction=last_dim,
        errors=((Case((np.ones(3), np.ones(4)), {"dim": 0}), ShapeError, "gradient"),),
    ),
    Rows(
        "log_softmax_backward",
        log_softmax_backward_oracle,
        log_softmax_backwards,
        reduction=last_dim,
        errors=((Case((np.ones(3), np.ones(4)), {"dim": 0}), ShapeError, "gradient"),),
    ),
]


# --- norms ------------------------------------------------------------------------------------------------------------

NORM_SHAPES = [(4,), (3, 5), (2, 3, 8), (1, 1), (0, 4), (2, 0, 3), (300, 130), (2, 20000)]


def rms_norm_oracle(x: np.ndarray, weight: np.ndarray, eps: float) -> Pair:
    r = 1 / np.sqrt((x * x).mean(axis=-1) + eps)
    return x * r[..., None] * weight, r


def rms_norm_backward_oracle(
    g: np.ndarray, x: np.ndarray, weight: np.ndarray, rstd: np.ndarray, plus: Any = 0, with_result: bool = False,
    learns: bool = True,
) -> Any:  # fmt: skip
    r = rstd[..., None]
    n, gw = x * r, g * weight
    dx = r * (gw - n * (gw * n).mean(axis=-1, keepdims=True)) + plus
    dw = (g * n).reshape(-1, x.shape[-1]).sum(axis=0)
    found = (dx, *((dw,) if learns else ()), *((n * weight,) if with_result else ()))
    return found if len(found) > 1 else dx


def layer_norm_oracle(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> Pair:
    m = x.mean(axis=-1)
    c = x - m[..., None]
    r = 1 / np.sqrt((c * c).mean(axis=-1) + eps)
    return c * r[..., None] * weight + bias, m, r


def layer_norm_backward_oracle(
    g: np.ndarray, x: np.ndarray, weight: np.ndarray, mean: np.ndarray, rstd: np.ndarray, plus: Any = 0
) -> Pair:
    r = rstd[..., None]
    n, gw = (x - mean[..., None]) * r, g * weight
    dx = r * (gw - gw.mean(axis=-1, keepdims=True) - n * (gw * n).mean(axis=-1, keepdims=True)) + plus
    width = x.shape[-1]
    return dx, (g * n).reshape(-1, width).sum(axis=0), g.reshape(-1, width).sum(axis=0)


def rms_norms(rng: np.random.Generator, shapes: Any = NORM_SHAPES) -> list[Case]:
    return [Case((normal(rng, *s), positive(rng, s[-1])), {"eps": 1e-5}) for s in shapes]


def layer_norms(rng: np.random.Generator, shapes: Any = NORM_SHAPES) -> list[Case]:
    return [Case((normal(rng, *s) + 1, positive(rng, s[-1]), normal(rng, s[-1])), {"eps": 1e-5}) for s in shapes]


def with_plus(rng: np.random.Generator, cases: list[Case]) -> list[Case]:
    """Each also with a sum of gradients to add to."""
    return cases + [Case((*c.inputs, normal(rng, *c.inputs[1].shape))) for c in cases]


def rms_norm_backwards(rng: np.random.Generator) -> list[Case]:
    cases = with_plus(
        rng,
        [Case((normal(rng, *s), normal(rng, *s), positive(rng, s[-1]), positive(rng, *s[:-1]))) for s in NORM_SHAPES],
    )
    frozen = [Case(c.inputs, {"learns": False, "with_result": n % 2 == 0}) for n, c in enumerate(cases)]
    return cases + [Case(c.inputs, {"with_result": True}) for c in cases] + frozen


def layer_norm_backwards(rng: np.random.Generator) -> list[Case]:
    return with_plus(
        rng,
        [
            Case((normal(rng, *s), normal(rng, *s), positive(rng, s[-1]), normal(rng, *s[:-1]), positive(rng, *s[:-1])))
            for s in NORM_SHAPES
        ],
    )


def elements(case: Case) -> int:
    """Sums run over the last dimension and, for parameter gradients, over all rows."""
    return max((x.size for x in case.inputs if isinstance(x, np.ndarray)), default=1)


WRONG_WEIGHT = (Case((np.ones((2, 3)), np.ones(4)), {"eps": 1e-5}), ShapeError, "weight")
WRONG_BIAS = (Case((np.ones((2, 3)), np.ones(3), np.ones(4)), {"eps": 1e-5}), ShapeError, "weight")
SMALL = [(3, 4), (2, 2, 3)]
NORM_ROWS = [
    Rows(
        "rms_norm", rms_norm_oracle, rms_norms, grads=lambda rng: rms_norms(rng, SMALL), errors=(WRONG_WEIGHT,),
        reduction=elements,
    ),
    Rows(
        "layer_norm", layer_norm_oracle, layer_norms, grads=lambda rng: layer_norms(rng, SMALL), errors=(WRONG_BIAS,),
        reduction=elements,
    ),
    Rows(
        "rms_norm_backward", rms_norm_backward_oracle, rms_norm_backwards, reduction=elements,
        errors=((Case((np.ones(3), np.ones((2, 3)), np.ones(3), np.ones(2))), ShapeError, "gradient"),),
    ),
    Rows(
        "layer_norm_backward", layer_norm_backward_oracle, layer_norm_backwards, reduction=elements,
        errors=((Case((np.ones(3), np.ones((2, 3)), np.ones(3), np.ones(2), np.ones(2))), ShapeError, "gradient"),),
    ),
]  # fmt: skip


# --- rotary embedding -------------------------------------------------------------------------------------------------


def rope_oracle(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, inverse: bool = False, heads: int | None = None
) -> np.ndarray:
    half = x.shape[-1] // 2
    c, s = (np.broadcast_to(t, (x.shape[0], x.shape[1], half)) for t in (cos, sin))
    y = np.empty_like(x)
    sign = -1 if inverse else 1
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            first, second = x[b, t, :, :half], x[b, t, :, half:]
            y[b, t, :, :half] = first * c[b, t] - sign * second * s[b, t]
            y[b, t, :, half:] = second * c[b, t] + sign * first * s[b, t]
    if heads is not None:
        y[:, :, heads:] = x[:, :, heads:]
    return y


def ropes(rng: np.random.Generator) -> list[Case]:
    cases = []
    for b, t, h, d in [(2, 3, 2, 4), (1, 1, 1, 2), (2, 5, 3, 8), (0, 3, 2, 4), (2, 0, 2, 4), (3, 40, 4, 32)]:
        angles = rng.uniform(-3, 3, (t, d // 2))
        each = rng.uniform(-3, 3, (b, t, d // 2))
        cases.append(Case((normal(rng, b, t, h, d), np.cos(angles), np.sin(angles))))
        cases.append(Case((normal(rng, b, t, h, d), np.cos(each), np.sin(each)), {"inverse": True}))
        cases.append(Case((normal(rng, b, t, h, d), np.cos(angles), np.sin(angles)), {"heads": h - 1}))
    return cases


ROPE_ROWS = [
    Rows(
        "rope",
        rope_oracle,
        ropes,
        grads=lambda rng: [c for c in ropes(rng) if 0 < c.inputs[0].size < 100],
        wrt=(0,),
        errors=(
            (Case((np.ones((2, 3, 4)), np.ones((3, 2)), np.ones((3, 2)))), ShapeError, "rope"),
            (Case((np.ones((2, 3, 1, 4)), np.ones((4, 2)), np.ones((4, 2)))), ShapeError, "cos"),
            (Case((np.ones((2, 3, 1, 4)), np.ones((3, 2)), np.ones((3, 2))), {"heads": 2}), ShapeError, "2 heads"),
        ),
        reduction=lambda case: 2,
    ),
]


# --- activations ------------------------------------------------------------------------------------------------------


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def each(function: Any) -> Any:
    return np.vectorize(function, otypes=[np.float64])


def cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def density(x: float) -> float:
    return math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def tanh_form(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def tanh_slope(x: np.ndarray) -> np.ndarray:
    t = tanh_form(x)
    inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return np.asarray(0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner)


ACTIVATIONS: dict[str, tuple[Any, Any]] = {
    "relu": (lambda x: np.where(x <= 0, 0.0, x), lambda x: np.where(x <= 0, 0.0, 1.0)),
    "silu": (lambda x: x * sigmoid(x), lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x)))),
    "gelu": (each(lambda x: x * cdf(x)), each(lambda x: cdf(x) + x * density(x))),
    "gelu_tanh": (lambda x: 0.5 * x * (1 + tanh_form(x)), tanh_slope),
}
SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (3, 4), (0, 3), (2, 3, 5), (90, 200)]


def activation_cases(rng: np.random.Generator) -> list[Case]:
    return [Case((normal(rng, *s) * 3,)) for s in SHAPES]


def slope_cases(rng: np.random.Generator) -> list[Case]:
    return [Case((normal(rng, *s), normal(rng, *s) * 3)) for s in SHAPES]


def away_from_zero(rng: np.random.Generator) -> list[Case]:
    x = normal(rng, 3, 4)
    return [Case((np.where(np.abs(x) < 0.1, 0.5, x),))]


def activation_rows(name: str) -> list[Rows]:
    forward, derivative = ACTIVATIONS[name]
    extremes = name == "relu"  # of the others inf·0 inside is NaN, as in torch's own formulas
    return [
        Rows(
            name,
            forward,
            activation_cases,
            grads=away_from_zero,
            errors=((Case((np.arange(3),)), DTypeError, name),),
            reduction=lambda case: 4,  # steps of rounding inside, near zeros of the function
            extremes=extremes,
        ),
        Rows(
            f"{name}_backward",
            (lambda g, x: np.where(x <= 0, 0.0, g)) if extremes else lambda g, x: g * derivative(x),
            slope_cases,
            errors=((Case((np.ones(3), np.ones(4))), ShapeError, "gradient"),),
            reduction=lambda case: 4,
            extremes=extremes,
        ),
    ]


def swiglu_oracle(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.asarray(gate * sigmoid(gate) * up)


def swiglu_backward_oracle(g: np.ndarray, gate: np.ndarray, up: np.ndarray) -> Pair:
    s = sigmoid(gate)
    return g * up * s * (1 + gate * (1 - s)), g * gate * s


def swiglus(rng: np.random.Generator) -> list[Case]:
    return [Case((normal(rng, *s) * 2, normal(rng, *s))) for s in SHAPES]


def swiglu_backwards(rng: np.random.Generator) -> list[Case]:
    return [Case((normal(rng, *s), normal(rng, *s) * 2, normal(rng, *s))) for s in SHAPES]


ACTIVATION_ROWS = [row for name in ACTIVATIONS for row in activation_rows(name)] + [
    Rows(
        "swiglu",
        swiglu_oracle,
        swiglus,
        grads=lambda rng: [Case((normal(rng, 2, 3), normal(rng, 2, 3)))],
        errors=((Case((np.ones((2, 3)), np.ones((3, 2)))), ShapeError, "gate"),),
        reduction=lambda case: 4,
    ),
    Rows(
        "swiglu_backward",
        swiglu_backward_oracle,
        swiglu_backwards,
        errors=((Case((np.ones(3), np.ones(4), np.ones(4))), ShapeError, "gradient"),),
        reduction=lambda case: 4,
    ),
]


# --- embedding --------------------------------------------------------------------------------------------------------


def embedding_backward_oracle(g: np.ndarray, ids: np.ndarray, rows: int) -> np.ndarray:
    found = np.zeros((rows, g.shape[-1]))
    for place in np.ndindex(ids.shape):
        found[ids[place]] += g[place]
    return found


def embedding_add_oracle(total: np.ndarray, g: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.asarray(total + embedding_backward_oracle(g, ids, len(total)))


def embedding_adds(rng: np.random.Generator) -> list[Case]:
    found = [(case, case.attrs["rows"], case.inputs[0].shape[-1]) for case in embedding_backwards(rng)]
    return [Case((normal(rng, rows, width), *case.inputs)) for case, rows, width in found]


def embeddings(rng: np.random.Generator) -> list[Case]:
    shapes: list[tuple[tuple[int, ...], int, int]] = [
        ((5,), 7, 3),
        ((2, 3), 4, 2),
        ((), 3, 2),
        ((0,), 3, 2),
        ((9,), 1, 40),
    ]
    return [Case((integers(rng, 0, rows, *s), normal(rng, rows, width))) for s, rows, width in shapes]


def embedding_backwards(rng: np.random.Generator) -> list[Case]:
    shapes: list[tuple[tuple[int, ...], int, int]] = [
        ((5,), 7, 3),
        ((2, 3), 4, 2),
        ((), 3, 2),
        ((0,), 3, 2),
        ((60,), 5, 40),
    ]
    return [Case((normal(rng, *s, width), integers(rng, 0, rows, *s)), {"rows": rows}) for s, rows, width in shapes]


EMBEDDING_ROWS = [
    Rows(
        "embedding",
        lambda ids, weight: weight[ids],
        embeddings,
        grads=lambda rng: [Case((np.array([1, 0, 1]), normal(rng, 3, 2)))],
        errors=(
            (Case((np.array([0, 3]), np.ones((3, 2)))), IndexRangeError, "id 3"),
            (Case((np.array([-1]), np.ones((3, 2)))), IndexRangeError, "id -1"),
            (Case((np.array([0.5]), np.ones((3, 2)))), DTypeError, "integer ids"),
        ),
        exact=True,
    ),
    Rows(
        "embedding_backward",
        embedding_backward_oracle,
        embedding_backwards,
        grads=small_cases(embedding_backwards),
        errors=((Case((np.ones((2, 3)), np.array([0, 1, 2])), {"rows": 4}), ShapeError, "gradient"),),
        reduction=lambda case: max(case.inputs[1].size, 1),
    ),
    Rows(
        "embedding_add_",
        embedding_add_oracle,
        embedding_adds,
        errors=(
            (Case((np.ones((4, 3)), np.ones((2, 3)), np.array([0, 1, 2]))), ShapeError, "gradient"),
            (Case((np.ones((4, 3)), np.ones((2, 3), np.float32), np.array([0, 1]))), DTypeError, "float32"),
        ),
        reduction=lambda case: max(case.inputs[2].size, 1) + 1,
        strided=False,  # an expanded target cannot be written
    ),
]

ROWS = SOFTMAX_ROWS + NORM_ROWS + ROPE_ROWS + ACTIVATION_ROWS + EMBEDDING_ROWS
