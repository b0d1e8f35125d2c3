"""Samples of the ops that fuse parts of a transformer's layer: norm and products, SwiGLU on packed gate and up."""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError
from tests.ops.samples.fused import (
    ACTIVATIONS,
    elements,
    rms_norm_backward_oracle,
    rms_norm_oracle,
    rope_oracle,
    swiglu_backward_oracle,
    swiglu_oracle,
)
from tests.ops.samples.linalg import linear_oracle, packed_linear_oracle
from tests.ops.sampling import Case, Rows, normal, positive, uniform

Pair = tuple[np.ndarray, ...]
Shape = tuple[int, ...]


# --- SwiGLU and GEGLU -------------------------------------------------------------------------------------------------

GELU, GELU_SLOPE = ACTIVATIONS["gelu_tanh"]
GATED: list[Shape] = [(2,), (7, 6), (2, 3, 10), (1, 2), (0, 4), (3, 0), (40, 300), (2, 1100)]


def halves(gate_up: np.ndarray) -> Pair:
    half = gate_up.shape[-1] // 2
    return gate_up[..., :half], gate_up[..., half:]


def packed_swiglu_oracle(gate_up: np.ndarray) -> np.ndarray:
    return swiglu_oracle(*halves(gate_up))


def packed_swiglu_backward_oracle(g: np.ndarray, gate_up: np.ndarray, with_result: bool = False) -> Any:
    d = np.concatenate(swiglu_backward_oracle(g, *halves(gate_up)), axis=-1)
    return (d, packed_swiglu_oracle(gate_up)) if with_result else d


def packed_swiglus(rng: np.random.Generator) -> list[Case]:
    return [Case((normal(rng, *s) * 2,)) for s in GATED]


def packed_swiglu_backwards(rng: np.random.Generator) -> list[Case]:
    return [
        Case((normal(rng, *s[:-1], s[-1] // 2), normal(rng, *s) * 2), {"with_result": True} if kept else {})
        for s in GATED
        for kept in (False, True)
    ]


def packed_geglu_oracle(gate_up: np.ndarray) -> np.ndarray:
    gate, up = halves(gate_up)
    return GELU(gate) * up


def packed_geglu_backward_oracle(g: np.ndarray, gate_up: np.ndarray) -> np.ndarray:
    gate, up = halves(gate_up)
    return np.concatenate((g * GELU_SLOPE(gate) * up, g * GELU(gate)), axis=-1)


# the leading shape, F, out
GATED_LINEAR: list[tuple[Shape, int, int]] = [
    ((), 3, 2), ((4,), 3, 5), ((2, 3), 4, 4), ((2, 3), 1, 6), ((0,), 3, 2), ((2,), 0, 3), ((2, 9), 40, 33),
]  # fmt: skip
# the same, the rank of a pair, whether silu(gate)·up is wanted
LOW_RANK_LINEAR: list[tuple[Shape, int, int, int, bool]] = [
    ((4,), 3, 5, 2, True), ((2, 3), 4, 4, 1, False), ((0,), 3, 2, 2, False), ((3, 9), 40, 24, 8, True),
    ((2, 3), 16, 8, 8, False),
]  # fmt: skip


def swiglu_linear_backwards(rng: np.random.Generator) -> list[Case]:
    return [
        Case(
            (normal(rng, *lead, out), normal(rng, out, width), normal(rng, *lead, 2 * width)),
            {"with_result": True} if kept else {},
        )
        for lead, width, out in GATED_LINEAR
        for kept in (False, True)
    ] + [
        Case(
            (normal(rng, *lead, out), normal(rng, out, width), normal(rng, *lead, 2 * width), normal(rng, *lead, r),
             normal(rng, r, width)),
            {"with_result": True} if kept else {},
        )
        for lead, width, out, r, kept in LOW_RANK_LINEAR
    ]  # fmt: skip


def swiglu_linear_backward_oracle(
    g: np.ndarray, weight: np.ndarray, gate_up: np.ndarray, v: np.ndarray | None = None, a: np.ndarray | None = None,
    with_result: bool = False,
) -> Any:  # fmt: skip
    dh = np.sum(g[..., :, None] * weight, axis=-2)
    if v is not None and a is not None:
        dh = dh + np.sum(v[..., :, None] * a, axis=-2)
    return packed_swiglu_backward_oracle(dh, gate_up, with_result=with_result)


ODD = (Case((np.ones((2, 3)),)), ShapeError, "2F")
SWIGLU_ROWS = [
    Rows(
        "swiglu_packed", packed_swiglu_oracle, packed_swiglus, grads=lambda rng: [Case((normal(rng, 2, 6),))],
        errors=(ODD, (Case((np.ones((2, 4), np.int64),)), DTypeError, "float")), reduction=lambda case: 4,
    ),
    Rows(
        "swiglu_packed_backward", packed_swiglu_backward_oracle, packed_swiglu_backwards, reduction=lambda case: 4,
        errors=((Case((np.ones((2, 3)), np.ones((2, 4)))), ShapeError, "gradient"),),
    ),
    Rows(
        "geglu_packed", packed_geglu_oracle, packed_swiglus, grads=lambda rng: [Case((normal(rng, 2, 6),))],
        errors=(ODD, (Case((np.ones((2, 4), np.int64),)), DTypeError, "float")), reduction=lambda case: 4,
    ),
    Rows(
        "geglu_packed_backward", packed_geglu_backward_oracle,
        lambda rng: [case for case in packed_swiglu_backwards(rng) if not case.attrs], reduction=lambda case: 4,
        errors=((Case((np.ones((2, 3)), np.ones((2, 4)))), ShapeError, "gradient"),),
    ),
    Rows(
        "swiglu_linear_backward", swiglu_linear_backward_oracle, swiglu_linear_backwards, inner=1,
        reduction=lambda case: 4 * max(1, sum(len(w) for w in case.inputs[1::3])),
        errors=(
            (Case((np.ones((2, 3)), np.ones((4, 2)), np.ones((2, 4)))), ShapeError, "gradient"),
            (Case((np.ones((2, 3)), np.ones((3, 2)), np.ones((2, 4)), np.ones((2, 5)))), ShapeError, "v and A"),
        ),
    ),
]  # fmt: skip


# --- RMSNorm ----------------------------------------------------------------------------------------------------------

NORMED: list[tuple[Shape, tuple[int, ...], bool]] = [
    ((4,), (3, 2), True), ((2, 4), (3,), False), ((2, 5, 4), (3, 1, 2), True), ((2, 5, 6), (2, 6), False),
    ((0, 4), (3, 2), True), ((2, 3), (0, 2), False), ((9, 20), (34, 16), True),
]  # fmt: skip


def norm_linears(rng: np.random.Generator) -> list[Case]:
    found = []
    for shape, sizes, bias in NORMED:
        parameters = [normal(rng, n, shape[-1]) for n in sizes] + [normal(rng, n) for n in sizes if bias]
        found.append(Case((normal(rng, *shape), positive(rng, shape[-1]), *parameters), {"eps": 1e-5}))
    return found


def norm_linear_oracle(x: np.ndarray, scale: np.ndarray, *parameters: np.ndarray, eps: float) -> Pair:
    y, r = rms_norm_oracle(x, scale, eps)
    return packed_linear_oracle(y, *parameters), r


# x's shape, rows of each weight of gate and up, their biases, down's bias
MLPS: list[tuple[Shape, tuple[int, ...], bool, bool]] = [
    ((4,), (3, 3), False, False), ((2, 4), (6,), True, True), ((2, 5, 4), (3, 3), True, False),
    ((3, 2), (1, 1), False, True), ((0, 4), (3, 3), True, True), ((2, 3), (0, 0), False, False),
    ((9, 20), (18, 18), False, False), ((2, 3, 16), (48,), False, False), ((3, 8), (144,), False, True),
]  # fmt: skip
# In half steps of the 2-byte type: n's rounding moves gate and up by 1.5 (weights' rows sum up to 1, scale < 1.5) and
# their own by 1.7, the largest |gate| and |up|. h is then off by |h| + |up·silu'|·3.2 + |silu|·3.2 < 13, y by a mean.
MLP_INNER = 13


def norm_mlps(rng: np.random.Generator) -> list[Case]:
    """Weights shrink with their width, so that products stay small; neighbours in memory stand as one weight."""
    found = []
    for number, (shape, sizes, bias, down_bias) in enumerate(MLPS):
        width, half = shape[-1], sum(sizes) // 2
        weights = [uniform(rng, -1, 1, n, width) / width for n in sizes]
        biases = [uniform(rng, -0.2, 0.2, n) for n in sizes if bias]
        down = uniform(rng, -1, 1, width, half) / max(half, 1)
        given = normal(rng, *shape), uniform(rng, 0.5, 1.5, width), down, normal(rng, width) if down_bias else None
        found.append(Case((*given, *weights, *biases), {"eps": 1e-5, "keep": number % 2 == 1}))
    return [*found, *(Case(c.inputs, {"eps": 1e-5, "keep": not c.attrs["keep"]}) for c in found[-2:])]


def norm_mlp_oracle(
    x: np.ndarray, scale: np.ndarray, down: np.ndarray, down_bias: Any, *parameters: np.ndarray, eps: float, keep: bool
) -> Pair:
    n, r = rms_norm_oracle(x, scale, eps)
    gate_up = packed_linear_oracle(n, *parameters)
    h = packed_swiglu_oracle(gate_up)
    y = linear_oracle(h, down, down_bias, x)
    return (y, r, gate_up, n, h) if keep else (y, r, gate_up)


def scales(rng: np.random.Generator) -> list[Case]:
    shapes: list[Shape] = [(4,), (3, 5), (2, 3, 8), (0, 4), (30, 130), (2, 2100)]
    return [Case((normal(rng, *s), positive(rng, s[-1]), positive(rng, *s[:-1]))) for s in shapes]


def mlp(*parameters: np.ndarray, scale: Any = None, down: Any = None) -> Case:
    """A call on x `[2, 3]` with F = 4."""
    given = np.ones(3) if scale is None else scale, np.ones((3, 4)) if down is None else down
    return Case((np.ones((2, 3)), *given, None, *parameters), {"eps": 1e-5})


NORM_ROWS = [
    Rows(
        "norm_linear", norm_linear_oracle, norm_linears, grads=lambda rng: norm_linears(rng)[:-1], reduction=elements,
        inner=60,  # a row of 20, of root mean square 1, times a scale below 3
        errors=(
            (Case((np.ones((2, 3)), np.ones(3), np.ones((4, 2))), {"eps": 1e-5}), ShapeError, "a weight"),
            (Case((np.ones((2, 3)), np.ones(2), np.ones((4, 3))), {"eps": 1e-5}), ShapeError, "weight"),
        ),
    ),
    Rows(
        "norm_mlp", norm_mlp_oracle, norm_mlps, grads=lambda rng: norm_mlps(rng)[:6], reduction=elements,
        inner=MLP_INNER,
        errors=(
            (mlp(np.ones((4, 3)), np.ones((5, 3))), ShapeError, "both .F, in., or one"),
            (mlp(np.ones((5, 3))), ShapeError, "both .F, in., or one"),
            (mlp(), ShapeError, "got none"),
            (mlp(np.ones((4, 2)), np.ones((4, 2))), ShapeError, "a weight"),
            (mlp(np.ones((4, 3)), np.ones((4, 3)), np.ones(4)), ShapeError, "own bias"),
            (mlp(np.ones((4, 3)), np.ones((4, 3)), down=np.ones((2, 4))), ShapeError, "a residual"),
            (mlp(np.ones((4, 3)), np.ones((4, 3)), scale=np.ones(2)), ShapeError, "weight"),
        ),
    ),
    Rows(
        "rms_norm_scale", lambda x, weight, rstd: x * rstd[..., None] * weight, scales, reduction=lambda case: 2,
        errors=((Case((np.ones((2, 3)), np.ones(4), np.ones(2))), ShapeError, "weight"),),
    ),
]  # fmt: skip

# --- Norm and rotation by head ----------------------------------------------------------------------------------------

# B, T, query heads, key heads, others, D
TURNED = [
    (2, 3, 2, 1, 1, 4),
    (1, 1, 1, 1, 0, 2),
    (2, 5, 3, 2, 2, 8),
    (0, 3, 2, 1, 1, 4),
    (2, 4, 0, 2, 1, 6),
    (3, 40, 4, 2, 2, 32),
    (2, 3, 0, 0, 2, 4),
    (2, 5, 2, 0, 1, 6),
]


def turned_inputs(
    rng: np.random.Generator, case: tuple[int, ...], each: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    b, t, heads, keys, others, d = case
    angles = uniform(rng, -3, 3, *((b,) if each else ()), t, d // 2)
    inputs = (normal(rng, b, t, heads + keys + others, d), positive(rng, d), positive(rng, d))
    return (*inputs, np.cos(angles), np.sin(angles)), {"heads": heads, "key_heads": keys}


def norm_ropes(rng: np.random.Generator, shapes: Any = TURNED) -> list[Case]:
    found = []
    for case in shapes:
        for each in (False, True):
            inputs, attrs = turned_inputs(rng, case, each)
            found.append(Case(inputs, {**attrs, "eps": 1e-5}))
    return found


def norm_rope_oracle(
    x: np.ndarray, query: np.ndarray, key: np.ndarray, cos: np.ndarray, sin: np.ndarray, heads: int, key_heads: int,
    eps: float,
) -> Pair:  # fmt: skip
    turned, y = heads + key_heads, x.copy()
    y[:, :, :heads], first = rms_norm_oracle(x[:, :, :heads], query, eps)
    y[:, :, heads:turned], second = rms_norm_oracle(x[:, :, heads:turned], key, eps)
    return rope_oracle(y, cos, sin, heads=turned), np.concatenate([first, second], axis=2)


def norm_rope_backwards(rng: np.random.Generator) -> list[Case]:
    found = []
    for case in TURNED:
        for each in (False, True):
            inputs, attrs = turned_inputs(rng, case, each)
            b, t, heads, keys, _, _ = case
            found.append(Case((normal(rng, *inputs[0].shape), *inputs, positive(rng, b, t, heads + keys)), attrs))
    return found + [Case(c.inputs, {**c.attrs, "learns": False}) for c in found]


def norm_rope_backward_oracle(
    g: np.ndarray, x: np.ndarray, query: np.ndarray, key: np.ndarray, cos: np.ndarray, sin: np.ndarray,
    rstd: np.ndarray, heads: int, key_heads: int, learns: bool = True,
) -> Any:  # fmt: skip
    turned = heads + key_heads
    d = rope_oracle(g, cos, sin, inverse=True, heads=turned)
    found = []
    for weight, start, stop in ((query, 0, heads), (key, heads, turned)):
        part = slice(start, stop)
        d[:, :, part], dw = rms_norm_backward_oracle(d[:, :, part], x[:, :, part], weight, rstd[:, :, part])
        found.append(dw)
    return (d, *found) if learns else d


HEADS = {"heads": 2, "key_heads": 2}
TABLE = (np.ones((3, 2)), np.ones((3, 2)))
TURNED_ROWS = [
    Rows(
        "norm_rope", norm_rope_oracle, norm_ropes, grads=lambda rng: norm_ropes(rng, TURNED[:3]), wrt=(0, 1, 2),
        reduction=lambda case: 4 * max(1, case.inputs[1].size),
        errors=(
            (Case((np.ones((2, 3, 3, 4)), *np.ones((2, 4)), *TABLE), {**HEADS, "eps": 0.1}), ShapeError, "2 key heads"),
            (Case((np.ones((2, 3, 4, 4)), *np.ones((2, 3)), *TABLE), {**HEADS, "eps": 0.1}), ShapeError, "weight"),
        ),
    ),
    Rows(
        "norm_rope_backward", norm_rope_backward_oracle, norm_rope_backwards, reduction=elements,
        errors=(
            (
                Case((np.ones((2, 3, 4)), np.ones((2, 3, 4, 4)), *np.ones((2, 4)), *TABLE, np.ones((2, 3, 4))), HEADS),
                ShapeError,
                "gradient",
            ),
        ),
    ),
]  # fmt: skip

ROWS = SWIGLU_ROWS + NORM_ROWS + TURNED_ROWS
