"""Linear ops with low-rank pairs, and the ops that adapters need besides."""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError
from genesis.ops.low_rank import LowRank, Pair
from tests.ops.samples.fused import rms_norm_oracle
from tests.ops.samples.layers import MLP_INNER
from tests.ops.samples.linalg import linear_oracle, packed_linear_oracle
from tests.ops.samples.random import dropout as dropout_oracle
from tests.ops.sampling import Case, Rows, normal, positive, uniform

Outputs = tuple[np.ndarray, ...]


# --- Oracle -----------------------------------------------------------------------------------------------------------


def adapted(
    base: np.ndarray, x: np.ndarray, given: tuple[Any, ...], low_rank: LowRank, bias: Any = 0.0, residual: Any = 0.0
) -> Outputs:
    """y, u and, with c, z, by the formula, B·A made in full; `base` is x·Wᵀ."""
    n = len(low_rank.pairs)
    a, b, rest = given[:n], given[n : 2 * n], given[2 * n :]
    factors = next((each for each in rest if each.dtype != np.int64), None)
    position = next((each for each in rest if each.dtype == np.int64), (0, 0))
    if low_rank.dropout is not None:
        p, seed, offset = low_rank.dropout
        x = dropout_oracle(x, position, p=p, seed=seed, offset=offset)
    z, u = base.copy(), []
    for pair, down, up in zip(low_rank.pairs, a, b, strict=True):
        z[..., pair.start : pair.stop] += x @ (pair.scale * (up @ down)).T
        u.append(pair.scale * (x @ down.T))
    found = z if factors is None else factors * z
    y = found + (0.0 if bias is None else bias) + (0.0 if residual is None else residual)
    return (y, np.concatenate(u, -1)) if factors is None else (y, np.concatenate(u, -1), z)


def linear_with_pairs(
    x: np.ndarray, weight: np.ndarray, bias: Any, residual: Any, *given: Any, low_rank: LowRank
) -> Outputs:
    return adapted(linear_oracle(x, weight), x, given, low_rank, bias, residual)


def packed_with_pairs(x: np.ndarray, *given: Any, low_rank: LowRank) -> Outputs:
    own, pairs = given[: -low_rank.inputs], given[-low_rank.inputs :]
    weights = [w for w in own if w.ndim == 2]
    biases = [b for b in own if b.ndim == 1]
    return adapted(packed_linear_oracle(x, *weights), x, pairs, low_rank, np.concatenate(biases) if biases else None)


def norm_with_pairs(x: np.ndarray, scale: np.ndarray, *given: Any, eps: float, low_rank: LowRank) -> Outputs:
    n, r = rms_norm_oracle(x, scale, eps)
    y, *more = packed_with_pairs(n, *given, low_rank=low_rank)
    return y, r, *more


def mlp_with_pairs(
    x: np.ndarray, scale: np.ndarray, down: np.ndarray, down_bias: Any, *given: Any, eps: float, keep: bool = False,
    low_rank: LowRank | None = None, down_low_rank: LowRank | None = None,
) -> Outputs:  # fmt: skip
    n, r = rms_norm_oracle(x, scale, eps)
    rest = given if down_low_rank is None else given[: -down_low_rank.inputs]
    if low_rank is None:
        found: Outputs = (packed_linear_oracle(n, *rest),)
    else:
        found = packed_with_pairs(n, *rest, low_rank=low_rank)[:2]
    gate, up = np.split(found[0], 2, -1)
    h = gate / (1 + np.exp(-gate)) * up
    if down_low_rank is None:
        last: Outputs = (linear_oracle(h, down, down_bias) + x,)
    else:
        last = linear_with_pairs(h, down, down_bias, x, *given[len(rest) :], low_rank=down_low_rank)
    return last[0], r, found[0], *((n, h) if keep else ()), *found[1:], *last[1:]


# --- Cases ------------------------------------------------------------------------------------------------------------


def pairs_of(
    rng: np.random.Generator, width: int, pairs: list[tuple[int, int, int, float]], columns: int, factors: bool,
    dropout: bool | int = False,
) -> tuple[list[Any], LowRank]:  # fmt: skip
    """The inputs of pairs (start, stop, rank, scale), B shrinking with the rank, c about 1, and what describes them.

    Args:
        dropout: whether there is noise; a number is its position.
    """
    found: list[Any] = [uniform(rng, -1, 1, r, width) for _, _, r, _ in pairs]
    found += [uniform(rng, -1, 1, stop - start, r) / r for start, stop, r, _ in pairs]
    found += [uniform(rng, 0.5, 1.5, columns)] if factors else []
    found += [np.array([dropout, 7])] if dropout is not False and dropout is not True else []
    noise = None if dropout is False else (0.25, 2**63 + 5, 2**32 - 2)
    return found, LowRank(tuple(Pair(*p) for p in pairs), len(found), noise)


# x's shape, rows of each weight, biases, pairs, factors, dropout
Packed = tuple[tuple[int, ...], tuple[int, ...], bool, list[tuple[int, int, int, float]], bool, bool | int]
PACKED: list[Packed] = [
    ((1, 2, 3), (2, 1, 2), True, [(0, 2, 2, 0.5), (3, 5, 2, 0.5)], False, False),
    ((2, 3), (2, 3), False, [(0, 2, 3, 2.0), (2, 5, 1, 0.25)], True, 3),
    ((4,), (3, 2), True, [(3, 5, 2, 1.5)], True, False),
    ((2, 4), (3,), False, [(0, 3, 4, 1.0)], False, True),
    ((9, 20), (34, 16), True, [(0, 34, 16, 2.0), (34, 50, 16, 2.0)], True, False),
    ((0, 4), (3, 2), True, [(0, 3, 2, 1.0)], True, False),
    ((2, 3), (0, 2), False, [(0, 0, 2, 1.0), (0, 2, 2, 1.0)], False, False),
]


def packed_cases(rng: np.random.Generator) -> list[Case]:
    found = []
    for shape, sizes, bias, pairs, factors, dropout in PACKED:
        own = [normal(rng, n, shape[-1]) for n in sizes] + [normal(rng, n) for n in sizes if bias]
        given, low_rank = pairs_of(rng, shape[-1], pairs, sum(sizes), factors, dropout)
        found.append(Case((normal(rng, *shape), *own, *given), {"low_rank": low_rank}))
    return found


def linear_cases(rng: np.random.Generator) -> list[Case]:
    found = []
    for number, (shape, sizes, bias, pairs, factors, dropout) in enumerate(PACKED):
        columns = sum(sizes)
        given, low_rank = pairs_of(rng, shape[-1], pairs[:1], columns, factors, dropout)
        own = normal(rng, *shape), normal(rng, columns, shape[-1]), normal(rng, columns) if bias else None
        residual = normal(rng, *shape[:-1], columns) if number % 2 == 0 else None
        found.append(Case((*own, residual, *given), {"low_rank": low_rank}))
    return found


def norm_cases(rng: np.random.Generator) -> list[Case]:
    return [
        Case((case.inputs[0], positive(rng, case.inputs[0].shape[-1]), *case.inputs[1:]), {"eps": 1e-5, **case.attrs})
        for case in packed_cases(rng)
    ]


Pairs = list[tuple[int, int, int, float]]
# x's shape, rows of gate's and up's weights, biases, their pairs, rank of down's pair (0: none), c, dropout
MLPS: list[tuple[tuple[int, ...], tuple[int, ...], bool, Pairs, int, bool, bool | int]] = [
    ((1, 2, 3), (2, 2), True, [(0, 2, 2, 0.5), (2, 4, 2, 0.5)], 2, True, False),
    ((2, 3), (2, 2), False, [(2, 4, 1, 0.5)], 0, False, 2),
    ((2, 3), (4,), False, [], 2, False, True),
    ((9, 16), (20, 20), False, [(0, 20, 4, 2.0), (20, 40, 4, 2.0)], 4, False, False),
    ((0, 4), (3, 3), False, [(0, 3, 2, 1.0)], 2, True, False),
]


def mlp_cases(rng: np.random.Generator) -> list[Case]:
    found = []
    for number, (shape, sizes, bias, pairs, rank, factors, dropout) in enumerate(MLPS):
        width, half = shape[-1], sum(sizes) // 2
        weights = [uniform(rng, -1, 1, n, width) / width for n in sizes]
        weights += [uniform(rng, -0.2, 0.2, n) for n in sizes if bias]
        down = uniform(rng, -1, 1, width, half) / half
        attrs: dict[str, Any] = {"eps": 1e-5, "keep": number % 2 == 0}
        given: list[Any] = []
        if pairs:
            more, attrs["low_rank"] = pairs_of(rng, width, pairs, 2 * half, factors, dropout)
            given += [m / width if m.ndim == 2 and m.shape[-1] == width else m for m in more]
        if rank:
            more, attrs["down_low_rank"] = pairs_of(rng, half, [(0, width, rank, 0.5)], width, factors, dropout)
            given += more
        x = normal(rng, *shape), uniform(rng, 0.5, 1.5, width), down, normal(rng, width) if bias else None
        found.append(Case((*x, *weights, *given), attrs))
    return [*found, Case(found[0].inputs, {**found[0].attrs, "keep": False})]


def gradient_cases(rng: np.random.Generator) -> list[Case]:
    """Those of `packed_linear`, and one with the rows that one pass over g takes, in all ways."""
    found = []
    for shape, sizes, _, pairs, factors, _ in PACKED:
        given, low_rank = pairs_of(rng, 1, pairs, sum(sizes), False)
        g, u = normal(rng, *shape[:-1], sum(sizes)), normal(rng, *shape[:-1], low_rank.rank)
        of_z = (positive(rng, sum(sizes)), normal(rng, *g.shape)) if factors and len(pairs) == 2 else ()
        found.append(Case((g, u, *given[len(pairs) :], *of_z), {"pairs": low_rank.pairs}))
    g, u, b = normal(rng, 2, 516, 24), normal(rng, 2, 516, 10), [normal(rng, n, 5) for n in (8, 16)]
    both = {"pairs": (Pair(0, 8, 5, 0.5), Pair(8, 24, 5, 0.5))}
    found.append(Case((g, u, *b), both))
    found.append(Case((g, u, *b, positive(rng, 24), normal(rng, *g.shape)), {**both, "is_result": True}))
    return found


def gradient_oracle(
    g: np.ndarray, u: np.ndarray, *rest: np.ndarray, pairs: tuple[Pair, ...], is_result: bool = False
) -> Outputs:
    b, of_factors = rest[: len(pairs)], rest[len(pairs) :]
    sums: Outputs = ()
    if of_factors:
        c, z = of_factors
        sums = ((g * z).reshape(-1, z.shape[-1]).sum(0) / (c if is_result else 1),)
        g = g * c
    parts, of_u = [g[..., p.start : p.stop] for p in pairs], np.split(u, np.cumsum([p.rank for p in pairs])[:-1], -1)
    v = [p.scale * part @ w for p, part, w in zip(pairs, parts, b, strict=True)]
    rows = tuple(range(g.ndim - 1))
    d = [np.tensordot(part, mine, (rows, rows)) for part, mine in zip(parts, of_u, strict=True)]
    return np.concatenate(v, -1), *d, *sums


def sums(rng: np.random.Generator) -> list[Case]:
    found = []
    for number, (shape, n, r) in enumerate([((3, 5), 4, 2), ((2, 3, 20), 17, 16), ((4,), 3, 1), ((0, 4), 3, 2)]):
        x, u = normal(rng, *shape), normal(rng, *shape[:-1], r)
        more = (normal(rng, *shape[:-1], n),) if number % 2 else ()
        found.append(Case((x, normal(rng, shape[-1], n), u, normal(rng, r, n), *more)))
    return found


def scaled(rng: np.random.Generator) -> list[Case]:
    found = []
    for number, shape in enumerate([(33, 130), (0, 4), (3, 5), (2, 3, 40), (4,)]):
        bias = normal(rng, shape[-1]) if number % 2 == 0 else None
        residual = normal(rng, *shape) if number < 2 else None
        found.append(Case((normal(rng, *shape), positive(rng, shape[-1]), bias, residual)))
    return found


def scale_oracle(z: np.ndarray, factors: np.ndarray, bias: Any = None, residual: Any = None) -> np.ndarray:
    y = factors * z + (0 if bias is None else bias)
    return y if residual is None else y + residual


# rows of each layer, columns between them, width of x, rank
LAYERS = [((2, 4), 3, 20, 3), ((3, 2), 0, 4, 2), ((5,), 0, 3, 1), ((70, 33), 2, 130, 16)]


def factor_cases(rng: np.random.Generator) -> list[Case]:
    found = []
    for sizes, gap, width, rank in LAYERS:
        w = [normal(rng, n, width) for n in sizes]
        given = [positive(rng, n) for n in sizes], [np.square(x).sum(-1) for x in w], w
        given += [uniform(rng, -1, 1, rank, width) for _ in sizes], [normal(rng, n, rank) / 8 for n in sizes]
        columns, start = [], 0
        for n in sizes:
            columns.append((start, start + n))
            start += n + gap
        attrs = {"columns": tuple(columns), "scales": tuple(0.5 + i for i in range(len(sizes))), "width": start}
        found.append(Case(tuple(x for kind in given for x in kind), attrs))
    return found


def factors_oracle(*arrays: np.ndarray, columns: Any, scales: Any, width: int) -> Outputs:
    n, c, norm = len(columns), np.ones(width), np.ones(width)
    for i, (start, stop) in enumerate(columns):
        m, squares, w, a, b = arrays[i::n]
        change = scales[i] * b @ a
        total = squares + ((w + change) ** 2 - w**2).sum(-1)  # ‖W‖² is what was given, rounded as it is
        norm[start:stop] = np.sqrt(total)
        c[start:stop] = m / norm[start:stop]
    return c, norm


def elements(case: Case) -> int:
    return int(
        case.inputs[0].shape[-1] + max((x.shape[0] for x in case.inputs[1:] if getattr(x, "ndim", 0)), default=1)
    )


def call(*more: Any, pairs: Any = ((0, 4, 2, 1.0),), inputs: int = 2, **attrs: Any) -> Case:
    """A `linear` on x `[2, 3]` with a weight `[4, 3]`."""
    low_rank = LowRank(tuple(Pair(*p) for p in pairs), inputs, **attrs)
    return Case((np.ones((2, 3)), np.ones((4, 3)), None, None, *more), {"low_rank": low_rank})


A, B = np.ones((2, 3)), np.ones((4, 2))
# What the pairs are made of is that of `linear`, which runs in all types and layouts.
FEW: dict[str, Any] = {"dtypes": ("float64", "float32", "bfloat16"), "strided": False}
ROWS = [
    Rows(
        "linear", linear_with_pairs, linear_cases, grads=lambda rng: linear_cases(rng)[:3], reduction=elements,
        inner=80,
        errors=(
            (call(A, np.ones((4, 3))), ShapeError, r"A \[\(2, 3\)\] \[r, in\], B \[\(4, 2\)\] \[out, r\]"),
            (call(np.ones((2, 4)), B), ShapeError, r"low-rank pairs \(2, 4\)"),
            (call(A, B, pairs=((0, 5, 2, 1.0),)), ShapeError, r"pairs on the columns \[\(0, 5\)\] of 4"),
            (call(A, B.astype(np.float32)), DTypeError, "float64 and float32"),
            (call(A, B, np.ones(3), inputs=3), ShapeError, r"factors of shape \(3,\) .* 4 columns"),
            (call(A, B, np.ones(4, int), inputs=3), DTypeError, "int64"),
            (call(A, B, np.ones(()), inputs=3), ShapeError, r"factors of shape \(\)"),
        ),
    ),
    Rows(
        "packed_linear", packed_with_pairs, packed_cases, grads=lambda rng: packed_cases(rng)[:2], reduction=elements,
        inner=80, **FEW,
    ),
    Rows(
        "norm_linear", norm_with_pairs, norm_cases, grads=lambda rng: norm_cases(rng)[:2], reduction=elements, **FEW,
        inner=120,
    ),
    Rows(
        "norm_mlp", mlp_with_pairs, mlp_cases, grads=lambda rng: mlp_cases(rng)[:3], reduction=elements, **FEW,
        inner=4 * MLP_INNER,
    ),
    Rows(
        "low_rank_backward", gradient_oracle, gradient_cases,
        reduction=lambda case: sum(case.inputs[0].shape) + case.inputs[0].size // case.inputs[0].shape[-1],
        inner=20,  # s·|c∘B| of v; all else is rounded once
        errors=(
            (Case((np.ones((2, 3)), A[:, :2], B), {"pairs": (Pair(0, 3, 2, 1.0),)}), ShapeError, "B of shape"),
            (Case((A, A[:, :2], B), {"pairs": (Pair(0, 4, 2, 1.0),)}), ShapeError, r"a gradient \(2, 3\)"),
            (Case((B.T, A, B), {"pairs": (Pair(0, 4, 2, 1.0),)}), ShapeError, r"u \(2, 3\)"),
            (
                Case((B.T, B[:2], B, np.ones(4), A), {"pairs": (Pair(0, 4, 2, 1.0),)}), ShapeError,
                "the gradient has shape",
            ),
        ),
    ),
    Rows(
        "matmul_sum", lambda x, y, u, w, more=0.0: x @ y + u @ w + more, sums, reduction=elements, inner=4,
        errors=(
            (Case((A, B[:3], A, np.ones((3, 5)))), ShapeError, "products"),
            (Case((A, B[:3], A, B[:3], np.ones((2, 3)))), ShapeError, r"has shape \(2, 2\), not \(2, 3\)"),
            (Case(tuple(x.astype(int) for x in (A, B[:3], A, B[:3]))), DTypeError, "takes float tensors"),
        ),
    ),
    Rows(
        "scale_columns", scale_oracle, scaled, reduction=lambda case: 3,
        errors=(
            (Case((A, np.ones(2))), ShapeError, r"factors of shape \(2,\) .* 3 columns"),
            (Case((A, np.ones(3), np.ones(2))), ShapeError, r"a bias of shape \(2,\)"),
            (Case((A, np.ones(3), None, B)), ShapeError, "a residual"),
        ),
    ),
    Rows(
        "scale_rows", lambda w, c: c[:, None] * w,
        lambda rng: [Case((normal(rng, n, k), positive(rng, n))) for n, k in ((33, 130), (0, 4), (5, 600), (3, 5))],
        errors=(
            (Case((A, np.ones(3))), ShapeError, r"factors of shape \(3,\) .* \(2, 3\)"),
            (Case((A, np.ones(2, int))), DTypeError, "int64"),
        ),
    ),
    Rows(
        "dora_factors", factors_oracle, factor_cases, grads=lambda rng: factor_cases(rng)[:1], wrt=(0, 1),
        reduction=lambda case: 2 * case.inputs[-1].shape[-1] * max(x.shape[-1] for x in case.inputs), inner=8,
        errors=(
            (Case((np.ones(2),), {"columns": ((0, 2),), "scales": (1.0,), "width": 2}), ShapeError, "1 arrays for"),
        ),
    ),
]  # fmt: skip
