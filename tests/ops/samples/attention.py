"""Samples of attention; the oracle goes query by query and key by key, with the visibility rule written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError
from tests.ops.samples.fused import rope_oracle
from tests.ops.sampling import Case, Rows, integers, normal

Pair = tuple[np.ndarray, ...]


def visible(i: int, keys: int, shift: int, left: np.ndarray, causal: bool, window: int) -> list[int]:
    """The keys that query i sees; `left` are its first key and the gap that it skips, if there is one."""
    begin, gap, gap_end = (*left, 0, 0)[:3]
    place = i + shift
    past = [j for j in range(max(begin, 0), min(place + 1, keys)) if not gap <= j < gap_end]
    return past[-window:] + ([] if causal else list(range(max(begin, place + 1), keys)))


def weights(
    q: np.ndarray, k: np.ndarray, starts: np.ndarray | None, scale: float, causal: bool, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax weights `[B, Hq, T, S]` and the log of their sums `[B, Hq, T]`."""
    b, t, hq, _ = q.shape
    s, hk = k.shape[1], k.shape[2]
    p, lse = np.zeros((b, hq, t, s)), np.full((b, hq, t), -np.inf)
    for n, h, i in np.ndindex(b, hq, t):
        keys = visible(i, s, s - t, np.zeros(1, int) if starts is None else np.atleast_1d(starts[n, i]), causal, window)
        if keys:
            scores = np.array([scale * float(q[n, i, h] @ k[n, j, h // (hq // hk)]) for j in keys])
            lse[n, h, i] = scores.max() + math.log(np.exp(scores - scores.max()).sum())
            p[n, h, i, keys] = np.exp(scores - lse[n, h, i])
    return p, lse


def attention_oracle(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    starts: np.ndarray | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
) -> Pair:
    p, lse = weights(q, k, starts, scale, causal, window)
    wide = np.repeat(v, q.shape[2] // k.shape[2], axis=2)
    return np.einsum("bhts,bshd->bthd", p, wide), lse


def backward_oracle(
    g: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    starts: np.ndarray | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
) -> Pair:
    """From the given o and lse, as the op reads them, whether or not they belong to q, k and v."""
    group = q.shape[2] // k.shape[2]
    kw, vw = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    seen = weights(q, k, starts, scale, causal, window)[0] > 0
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.where(seen, np.exp(scale * np.einsum("bthd,bshd->bhts", q, kw) - lse[..., None]), 0.0)
    ds = p * (np.einsum("bthd,bshd->bhts", g, vw) - (g * o).sum(-1).transpose(0, 2, 1)[..., None]) * scale
    shape = (*k.shape[:2], k.shape[2], group, k.shape[3])
    dk = np.einsum("bhts,bthd->bshd", ds, q).reshape(shape).sum(3)
    dv = np.einsum("bhts,bthd->bshd", p, g).reshape(shape).sum(3)
    return np.einsum("bhts,bshd->bthd", ds, kw), dk, dv


Sizes = tuple[tuple[int, int, int, int, int, int], dict[str, Any]]  # (B, T, S, Hq, Hkv, D), attributes
SHAPES: list[Sizes] = [
    ((2, 5, 5, 4, 2, 4), {}),
    ((1, 1, 1, 1, 1, 2), {}),
    ((2, 3, 7, 2, 1, 4), {}),
    ((1, 6, 6, 2, 2, 4), {"window": 3}),
    ((1, 4, 6, 2, 1, 2), {"causal": False}),
    ((0, 3, 3, 2, 1, 2), {}),
    ((2, 0, 3, 2, 1, 2), {}),
    ((1, 70, 70, 2, 1, 8), {"window": 20}),  # rows of 16 bytes in 2-byte types, as TMAs need
    ((1, 67, 80, 1, 1, 2), {}),
    ((1, 3, 5, 2, 1, 4), {"scale": 60.0}),  # e^score would overflow
    ((1, 3, 3, 2, 1, 3), {}),  # halves of a head that differ
]


def inputs(rng: np.random.Generator, sizes: tuple[int, ...]) -> Pair:
    b, t, s, hq, hk, d = sizes
    return normal(rng, b, t, hq, d), normal(rng, b, s, hk, d), normal(rng, b, s, hk, d)


def documents(rng: np.random.Generator, b: int, t: int, s: int) -> np.ndarray:
    """Where each query's document starts: at most at the query itself."""
    return np.minimum(integers(rng, -2, s, b, t), np.arange(t) + s - t)


def branches(rng: np.random.Generator, b: int, t: int, s: int) -> np.ndarray:
    """Documents, and a gap of earlier keys for about half of the queries."""
    place = np.broadcast_to(np.arange(t) + s - t, (b, t))
    gap_end = np.minimum(integers(rng, 0, s + 1, b, t), place) * integers(rng, 0, 2, b, t)
    return np.stack([documents(rng, b, t, s), np.minimum(integers(rng, 0, s + 1, b, t), gap_end), gap_end], -1)


def attentions(rng: np.random.Generator, shapes: list[Sizes] = SHAPES) -> list[Case]:
    cases = [Case(inputs(rng, sizes), {"scale": 0.5, **attrs}) for sizes, attrs in shapes]
    for sizes, attrs in shapes:
        if sizes[1] <= sizes[2]:
            cases.append(Case((*inputs(rng, sizes), documents(rng, *sizes[:3])), {"scale": 0.7, **attrs}))
            if attrs.get("causal", True):
                cases.append(Case((*inputs(rng, sizes), branches(rng, *sizes[:3])), {"scale": 0.7, **attrs}))
    return cases


def backwards(rng: np.random.Generator, shapes: list[Sizes] = SHAPES) -> list[Case]:
    cases = []
    for case in attentions(rng, shapes):
        q, k, v, *starts = case.inputs
        if case.attrs["scale"] > 1:  # far scores with another variant's lse would overflow; the gradient check has them
            continue
        o, lse = attention_oracle(*case.inputs, **case.attrs)
        cases.append(Case((normal(rng, *q.shape), q, k, v, o, lse + 0.0, *starts), case.attrs))
    return cases


def small(rng: np.random.Generator, shapes: list[Sizes] = SHAPES) -> list[Case]:
    return [c for c in attentions(rng, shapes) if 0 < c.inputs[0].size <= 100 and c.inputs[0].shape[1] < 10]


def terms(case: Case) -> int:
    """Products and sums over head size, keys and, for keys' gradients, queries of the group."""
    arrays = [x for x in case.inputs if isinstance(x, np.ndarray) and x.ndim == 4]
    q, k = arrays[-4:-2] if len(arrays) > 3 else arrays[:2]
    return 8 * max(q.shape[-1] * q.shape[1] * q.shape[2] * max(k.shape[1], 1), 1)


def split(x: np.ndarray, heads: int, key_heads: int) -> list[np.ndarray]:
    """Queries, keys and values of a packed array."""
    return np.split(x, [heads, heads + key_heads], axis=2)


def packed_oracle(
    qkv: np.ndarray, starts: np.ndarray | None = None, *tables: np.ndarray, heads: int, key_heads: int, **attrs: Any
) -> Pair:
    turned = (rope_oracle(qkv, *tables, heads=heads + key_heads),) if tables else ()
    return *attention_oracle(*split(*turned or (qkv,), heads, key_heads), starts, **attrs), *turned


def packed_backward_oracle(
    g: np.ndarray,
    qkv: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    starts: np.ndarray | None = None,
    *tables: np.ndarray,
    heads: int,
    key_heads: int,
    **attrs: Any,
) -> np.ndarray:
    d = np.concatenate(backward_oracle(g, *split(qkv, heads, key_heads), o, lse, starts, **attrs), axis=2)
    return rope_oracle(d, *tables, inverse=True, heads=heads + key_heads) if tables else d


def packed(case: Case, queries: int) -> Case | None:
    """A case of attention with as many queries as keys, packed; `queries` is the index of q among its inputs."""
    q, k, v = case.inputs[queries : queries + 3]
    if q.shape[1] != k.shape[1]:
        return None
    inputs = (*case.inputs[:queries], np.concatenate((q, k, v), axis=2), *case.inputs[queries + 3 :])
    return Case(inputs, {**case.attrs, "heads": q.shape[2], "key_heads": k.shape[2]})


# Kernels turn gradients of heads that fill their tiles, 16 wide or more.
WHOLE: list[Sizes] = [
    ((1, 3, 3, 2, 1, 16), {}),
    ((2, 21, 21, 4, 2, 16), {"window": 9}),
    ((1, 5, 5, 2, 2, 16), {"causal": False}),
    ((1, 1, 1, 2, 1, 16), {}),
]
TURNED = [*WHOLE, *SHAPES[:2], SHAPES[3], SHAPES[5], SHAPES[6]]


def packed_shape(case: Case) -> tuple[int, ...]:
    """Of the packed array, which is the one with the most heads."""
    return max((x.shape for x in case.inputs if isinstance(x, np.ndarray) and x.ndim == 4), key=lambda s: s[2])


def turned(rng: np.random.Generator, case: Case, before: int, quarters: bool = False) -> Case:
    """A packed case with cos and sin, of each token or of each position.

    Args:
        before: how many inputs stand before the starts.
        quarters: turns by quarters of the circle, which are exact in every type: the oracle does not round in between.
    """
    b, t, _, d = packed_shape(case)
    shape = (b, t, d // 2) if rng.random() < 0.5 else (t, d // 2)
    if quarters:
        turns = integers(rng, 0, 4, *shape)
        tables = np.array([1.0, 0.0, -1.0, 0.0])[turns], np.array([0.0, 1.0, 0.0, -1.0])[turns]
    else:
        angles = rng.uniform(-3, 3, shape)
        tables = np.cos(angles), np.sin(angles)
    starts = case.inputs[before:] or (None,)
    return Case((*case.inputs[:before], *starts, *tables), case.attrs)


def packed_attentions(rng: np.random.Generator, shapes: list[Sizes] = SHAPES) -> list[Case]:
    return [made for case in attentions(rng, shapes) if (made := packed(case, 0))]


def packed_backwards(rng: np.random.Generator, shapes: list[Sizes] = SHAPES) -> list[Case]:
    return [made for case in backwards(rng, shapes) if (made := packed(case, 1))]


def packed_small(rng: np.random.Generator, shapes: list[Sizes] = SHAPES) -> list[Case]:
    return [made for case in small(rng, shapes) if (made := packed(case, 0))]


def by_head(cases: list[Case]) -> list[Case]:
    """The cases with as many key heads as query heads, with operands `[B, H, T, D]`."""
    equal = [case for case in cases if len({x.shape[2] for x in case.inputs if x.ndim == 4}) == 1]
    return [
        Case(tuple([x.swapaxes(1, 2) if x.ndim == 4 else x for x in case.inputs]), {**case.attrs, "by_head": True})
        for case in equal
    ]


def of_heads(oracle: Callable[..., Pair]) -> Callable[..., Pair]:
    """The oracle for operands by head."""

    def swapped(*operands: np.ndarray, by_head: bool, **attrs: Any) -> Pair:
        results = oracle(*[x.swapaxes(1, 2) if x.ndim == 4 else x for x in operands], **attrs)
        return tuple([x.swapaxes(1, 2) if x.ndim == 4 else x for x in results])

    return swapped


def packed_terms(case: Case) -> int:
    """As `terms`."""
    _, t, _, d = packed_shape(case)
    return 8 * max(d * t * case.attrs["heads"] * max(t, 1), 1)


X = np.ones((1, 2, 2, 4))
PACKED, TABLE, ONE_EACH = np.ones((1, 2, 3, 4)), np.ones((2, 2)), {"scale": 1.0, "heads": 1, "key_heads": 1}
ROWS = [
    Rows(
        "attention",
        attention_oracle,
        attentions,
        grads=small,
        errors=(
            (Case((X, np.ones((1, 2, 2, 3)), np.ones((1, 2, 2, 3))), {"scale": 1.0}), ShapeError, "head size"),
            (Case((X, np.ones((1, 1, 2, 4)), np.ones((1, 1, 2, 4))), {"scale": 1.0}), ShapeError, "causal"),
            (Case((X[0], X[0], X[0]), {"scale": 1.0}), ShapeError, "attention takes"),
            (Case((X, X, X, np.zeros((1, 2))), {"scale": 1.0}), ShapeError, "starts"),
            (Case((X, X.astype(np.float32), X), {"scale": 1.0}), DTypeError, "one float type"),
        ),
        reduction=terms,
        inner=1,  # the softmax's weights meet v
    ),
    Rows(
        "attention_backward",
        backward_oracle,
        backwards,
        dtypes=("float64", "float32"),  # a rounded lse is no softmax any more: 2-byte types are covered by the gradient
        errors=(
            (
                Case((X[:, :1], X, X, X, X, np.ones((1, 2, 2))), {"scale": 1.0}),
                ShapeError,
                "gradient",
            ),
        ),
        reduction=terms,
    ),
    Rows(
        "attention",
        of_heads(attention_oracle),
        lambda rng: by_head(attentions(rng)),
        grads=lambda rng: by_head(small(rng)),
        errors=((Case((X, X[:, :1], X[:, :1]), {"scale": 1.0, "by_head": True}), ShapeError, "key heads"),),
        reduction=terms,
        inner=1,
    ),
    Rows(
        "attention_backward",
        of_heads(backward_oracle),
        lambda rng: by_head(backwards(rng)),
        dtypes=("float64", "float32"),
        errors=(
            (Case((X[:, :1], X, X, X, X, np.ones((1, 2, 2))), {"scale": 1.0, "by_head": True}), ShapeError, "grad"),
        ),
        reduction=terms,
    ),
    Rows(
        "attention_packed",
        packed_oracle,
        packed_attentions,
        grads=packed_small,
        errors=(
            (Case((X,), {"scale": 1.0, "heads": 2, "key_heads": 1}), ShapeError, "2 query and 1 key heads"),
            (Case((np.ones((1, 2, 7, 4)),), {"scale": 1.0, "heads": 3, "key_heads": 2}), ShapeError, "multiple"),
        ),
        reduction=packed_terms,
        inner=1,
    ),
    Rows(
        "attention_packed",
        packed_oracle,
        lambda rng: [turned(rng, case, 1, quarters=True) for case in packed_attentions(rng, TURNED)],
        grads=lambda rng: [turned(rng, case, 1) for case in packed_small(rng, TURNED)],
        wrt=(0,),
        errors=(
            (Case((PACKED, None, TABLE), ONE_EACH), ShapeError, "together"),
            (Case((PACKED, None, TABLE[:1], TABLE[:1]), ONE_EACH), ShapeError, "cos"),
            (Case((PACKED[..., :3], None, TABLE, TABLE), ONE_EACH), ShapeError, "even head size"),
        ),
        reduction=packed_terms,
        inner=1,
    ),
    Rows(
        "attention_packed_backward",
        packed_backward_oracle,
        packed_backwards,
        dtypes=("float64", "float32"),
        errors=(
            (
                Case(
                    (X[:, :1], np.ones((1, 2, 6, 4)), X, np.ones((1, 2, 2))), {"scale": 1.0, "heads": 2, "key_heads": 2}
                ),
                ShapeError,
                "gradient",
            ),
        ),
        reduction=packed_terms,
    ),
    Rows(
        "attention_packed_backward",
        packed_backward_oracle,
        lambda rng: [turned(rng, case, 4) for case in packed_backwards(rng, TURNED)],
        dtypes=("float64", "float32"),
        errors=(
            (
                Case((X[:, :, :1], PACKED, X[:, :, :1], np.ones((1, 1, 2)), None, TABLE), ONE_EACH),
                ShapeError,
                "together",
            ),
        ),
        reduction=packed_terms,
    ),
]
