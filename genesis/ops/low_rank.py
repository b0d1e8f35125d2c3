"""Low-rank pairs of linear ops, the terms that adapters (LoRA, DoRA) add: shape rule, reference and gradients.

    y = c∘z + b + residual        z = x·Wᵀ + u·Bᵀ        u = s·dropout(x)·Aᵀ

A pair is A `[r, in]` and B `[columns, r]`, and adds to some columns of the result. u of all pairs of a call is a single
array `[..., Σ r]`, which is saved for backward. c, DoRA's factors, scales columns. With g' = c∘g and v = s·g'·B:

    dx = g'·W + dropout(v·A)     dA = vᵀ·dropout(x)     dB = g'ᵀ·u     dc = Σ rows g∘z     dW = g'ᵀ·x     db = Σ rows g

An op that takes pairs has an attribute `LowRank` and, after its own inputs: A of each pair, B of each pair, c `[out]`
if there are factors, and the position of dropout's noise if it has one. Pairs that are adjacent in memory may be
passed as one A `[Σ r, in]` and one B `[Σ columns, r]`. After its own outputs, the op has u and, with c, z. Their
gradients are in linear.py.

DoRA's factors (Liu et al., 2024) are c = m / ‖W + s·B·A‖ by rows. Backward treats the norm as a constant (section 4.3
of the paper). B·A is never computed; W·Aᵀ is `[out, r]`, A·Aᵀ `[r, r]`:

    ‖W + s·B·A‖² = ‖W‖² + 2s·Σ (W·Aᵀ)∘B + s²·Σ (B·(A·Aᵀ))∘B        sums along r
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import scratch
from genesis.dtypes import float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.op import Context, op
from genesis.ops.blocks import as_type, is_narrow, rows_of
from genesis.ops.elementwise import cast, div
from genesis.ops.linalg import matmul_spec, multiply, plus_spec, same_type
from genesis.ops.norm import statistics_type
from genesis.ops.random import dropout
from genesis.ops.shape import joined, window


class Pair(NamedTuple):
    """The columns [start, stop) of the result to which a pair adds, its rank, and u's scale."""

    start: int
    stop: int
    rank: int
    scale: float


class LowRank(NamedTuple):
    """The pairs of a call.

    Attributes:
        pairs: pairs in the order of their columns.
        inputs: number of the op's last inputs that belong to the pairs.
        dropout: (p, seed, offset) of the noise on u's input; None without dropout.
    """

    pairs: tuple[Pair, ...]
    inputs: int
    dropout: tuple[float, int, int] | None = None

    @property
    def rank(self) -> int:
        """Sum of all pairs' ranks."""
        return sum(p.rank for p in self.pairs)

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """Columns of u that belong to each pair."""
        ranges, start = [], 0
        for p in self.pairs:
            ranges.append((start, start + p.rank))
            start += p.rank
        return ranges

    @property
    def noise(self) -> dict[str, Any]:
        """Attributes of `dropout`."""
        assert self.dropout is not None
        return dict(zip(("p", "seed", "offset"), self.dropout, strict=True))


class Operands(NamedTuple):
    """The inputs of the pairs: A and B of each pair, or one of each for all; c; the position of dropout's noise."""

    a: list[Any]
    b: list[Any]
    factors: Any = None
    position: Any = None

    @property
    def where(self) -> tuple[Any, ...]:
        """The position as an input of `dropout`."""
        return () if self.position is None else (self.position,)


def split_pairs(inputs: Sequence[Any], low_rank: LowRank | None) -> tuple[list[Any], Operands | None]:
    """Split inputs into the op's own and the pairs'."""
    if low_rank is None:
        return list(inputs), None
    own, rest = list(inputs[: -low_rank.inputs]), inputs[-low_rank.inputs :]
    matrices = [x for x in rest if x.ndim == 2]
    half = len(matrices) // 2
    vectors = [x for x in rest if x.ndim != 2]
    position = vectors.pop() if low_rank.dropout and vectors and vectors[-1].dtype.name == "int64" else None
    return own, Operands(matrices[:half], matrices[half:], vectors[0] if vectors else None, position)


def join_pairs(inputs: Sequence[Any], low_rank: LowRank) -> tuple[tuple[Any, ...], LowRank]:
    """Return the pairs' inputs with one A and one B if all A and all B are adjacent in memory, else unchanged."""
    _, operands = split_pairs(inputs, low_rank)
    assert operands is not None
    if len(operands.a) > 1 and (a := joined(operands.a)) is not None and (b := joined(operands.b)) is not None:
        rest = inputs[len(operands.a) * 2 :]
        return (a, b, *rest), low_rank._replace(inputs=2 + len(rest))
    return tuple(inputs), low_rank


# --- Shapes and dtypes ------------------------------------------------------------------------------------------------


def check_low_rank(
    name: str, x: Array, columns: int, operands: Operands | None, low_rank: LowRank | None
) -> tuple[Spec, ...]:
    """Return the specs of u and, with c, of z, for the pairs of an op with this many columns."""
    if operands is None or low_rank is None:
        return ()
    a, b, factors, position = operands
    pairs, ends = low_rank.pairs, [0, *(p.stop for p in low_rank.pairs)]
    if any(p.start < end or p.stop < p.start for p, end in zip(pairs, ends, strict=False)) or ends[-1] > columns:
        raise ShapeError(f"{name}: pairs on the columns {[p[:2] for p in pairs]} of {columns} overlap or are unordered")
    # One A and B per pair, or one joined A and B.
    separate = len(a) == len(pairs)
    ranks = [p.rank for p in pairs] if separate else [low_rank.rank]
    sizes = [p.stop - p.start for p in pairs] if separate else [sum(p.stop - p.start for p in pairs)]
    wanted = [(r, x.shape[-1]) for r in ranks], [(n, p.rank) for n, p in zip(sizes, pairs, strict=False)]
    if [w.shape for w in a] != wanted[0] or [w.shape for w in b] != wanted[1]:
        got = " and ".join(str(w.shape) for w in (*a, *b))
        raise ShapeError(f"{name}: low-rank pairs {got}, expected A {wanted[0]} [r, in], B {wanted[1]} [out, r]")
    # Dtypes, dropout and factors.
    same_type(name, x, *a, *b)
    if not x.dtype.is_floating_point:
        raise DTypeError(f"{name} takes low-rank pairs of floats, got {x.dtype}")
    if position is not None or low_rank.dropout is not None:
        p, seed, offset = low_rank.dropout or (0.0, 0, 0)
        dropout.infer(x, position, p=p, seed=seed, offset=offset)
    u = Spec((*x.shape[:-1], low_rank.rank), x.dtype)
    if factors is None:
        return (u,)
    check_factors(name, x, columns, factors)
    return u, Spec((*x.shape[:-1], columns), x.dtype)


# --- Reference --------------------------------------------------------------------------------------------------------


def add_low_rank(z: np.ndarray, u: np.ndarray, x: np.ndarray, operands: Operands, low_rank: LowRank) -> None:
    """Compute u = s·dropout(x)·Aᵀ and z += u·Bᵀ; z and x have the same dtype, of 4 bytes or more."""
    if not any(p.scale for p in low_rank.pairs):  # the adapters are off
        u.fill(0)
        return
    if low_rank.dropout is not None:
        dropped = np.empty_like(x)
        dropout.reference(dropped, x, operands.position, **low_rank.noise)
        x = dropped
    a = np.concatenate([as_type(w, x.dtype) for w in operands.a])
    b = np.concatenate([as_type(w, x.dtype) for w in operands.b]) if len({p.rank for p in low_rank.pairs}) < 2 else None
    wide, row = np.empty((x.shape[0], low_rank.rank), x.dtype), 0
    multiply(x, a.T, wide)
    for i, (p, (start, stop)) in enumerate(zip(low_rank.pairs, low_rank.ranks, strict=True)):
        part, size = wide[:, start:stop], p.stop - p.start
        part *= x.dtype.type(p.scale)
        more = np.empty((x.shape[0], size), x.dtype)
        multiply(part, (as_type(operands.b[i], x.dtype) if b is None else b[row : row + size]).T, more)
        z[:, p.start : p.stop] += more
        row += size
    np.copyto(u, wide, casting="unsafe")


# --- Gradients --------------------------------------------------------------------------------------------------------


def _backward_infer(
    g: Array, u: Array, *rest: Array, pairs: tuple[Pair, ...], is_result: bool = False
) -> tuple[Spec, ...]:
    b, of_factors = rest[: len(pairs)], rest[len(pairs) :]
    if len(b) != len(pairs) or any(w.shape != (p.stop - p.start, p.rank) for w, p in zip(b, pairs, strict=False)):
        raise ShapeError(f"low_rank_backward: B of shape {[w.shape for w in b]} does not fit {pairs}")
    if not g.shape or any(p.stop > g.shape[-1] for p in pairs):
        raise ShapeError(f"low_rank_backward: a gradient {g.shape} does not fit pairs on {[p[:2] for p in pairs]}")
    v = Spec((*g.shape[:-1], sum(p.rank for p in pairs)), g.dtype)
    if u.shape != v.shape:
        raise ShapeError(f"low_rank_backward: u {u.shape} does not fit a gradient of shape {g.shape} and {pairs}")
    same_type("low_rank_backward", g, u, *b)
    if not of_factors:
        return v, *(w.spec for w in b)
    factors, z = of_factors
    check_factors("low_rank_backward", g, g.shape[-1], factors)
    if z.shape != g.shape:
        raise ShapeError(f"low_rank_backward: the gradient has shape {g.shape}, the result has {z.shape}")
    same_type("low_rank_backward", g, z)
    return v, *(w.spec for w in b), Spec(factors.shape, statistics_type(g.dtype))


@op(
    "low_rank_backward",
    _backward_infer,
    flops=lambda i, o, a: 4 * (i[0].size // max(i[0].shape[-1], 1)) * sum(x.size for x in o[1 : 1 + len(a["pairs"])]),
)
def low_rank_backward(
    out: tuple[np.ndarray, ...], g: np.ndarray, u: np.ndarray, *rest: np.ndarray, pairs: tuple[Pair, ...],
    is_result: bool = False,
) -> None:  # fmt: skip
    """v = [s1·g'1·B1, …], dBi = g'iᵀ·ui and dc = Σ rows g∘z; no gradient.

    g'i are the columns of g' = c∘g to which pair i adds.

    Args:
        g: gradient of the result, `[..., out]`.
        u: `[..., Σ r]`.
        rest: B of each pair; then c and z, or neither: then c is 1, and dc is not an output.
        is_result: z's position holds the result y = c∘z, so dc is Σ rows g∘y, divided by c.
    """
    v, *d = out
    b, of_factors = rest[: len(pairs)], rest[len(pairs) :]
    kind = np.dtype(np.float32) if is_narrow(g.dtype) else g.dtype
    wide, u = rows_of(as_type(g, kind)), rows_of(as_type(u, kind))
    if of_factors:
        factors = as_type(of_factors[0], kind)
        sums = np.einsum("nh,nh->h", wide, rows_of(as_type(of_factors[1], kind)))
        d.pop()[...] = sums / factors if is_result else sums
        wide = wide * factors
    v, start = rows_of(v), 0
    for p, weight, db in zip(pairs, b, d, strict=True):
        columns, mine = wide[:, p.start : p.stop], slice(start, start + p.rank)
        part = np.empty((len(wide), p.rank), kind)
        multiply(columns, as_type(weight, kind), part)
        part *= kind.type(p.scale)
        np.copyto(v[:, mine], part, casting="unsafe")
        if db.size:
            multiply(columns.T, u[:, mine], db)
        start += p.rank


# --- A matmul and a low-rank matmul -----------------------------------------------------------------------------------


def _sum_infer(x: Array, y: Array, u: Array, w: Array, addend: Array | None = None) -> Spec:
    spec, other = matmul_spec(x, y), matmul_spec(u, w)
    if spec != other:
        raise ShapeError(f"matmul_sum: products {spec} and {other} differ")
    if not spec.dtype.is_floating_point:
        raise DTypeError(f"matmul_sum takes float tensors, got {spec.dtype}", next="cast with .float()")
    return spec if addend is None else plus_spec("matmul_sum", x, y, addend)


@op("matmul_sum", _sum_infer, flops=lambda i, o, a: 2 * o[0].size * (i[0].shape[-1] + i[2].shape[-1]))
def matmul_sum(
    out: np.ndarray, x: np.ndarray, y: np.ndarray, u: np.ndarray, w: np.ndarray, addend: np.ndarray | None = None
) -> None:
    """x @ y + u @ w + addend, rounded once. No gradient: it computes input gradients with a low-rank term."""
    work = np.float32 if is_narrow(out.dtype) else out.dtype
    with scratch(out.shape, work) as wide, scratch(out.shape, work) as more:
        multiply(as_type(x, wide.dtype), as_type(y, wide.dtype), wide)
        multiply(as_type(u, wide.dtype), as_type(w, wide.dtype), more)
        np.add(wide, more, out=wide)
        if addend is not None:
            np.add(wide, addend, out=wide)
        np.copyto(out, wide, casting="unsafe")


Columns = tuple[tuple[int, int], ...]


# --- DoRA: the factors ------------------------------------------------------------------------------------------------


def split_layers(arrays: Sequence[Any]) -> list[Sequence[Any]]:
    """Split arrays of several layers into all m, all ‖W‖², all W, all A and all B."""
    count = len(arrays) // 5
    return [arrays[i * count : (i + 1) * count] for i in range(5)]


def _factors_infer(*arrays: Array, columns: Columns, scales: tuple[float, ...], width: int) -> tuple[Spec, Spec]:
    count, ends = len(columns), [0, *(stop for _, stop in columns)]
    if not count or len(arrays) != 5 * count or len(scales) != count:
        raise ShapeError(f"dora_factors: {len(arrays)} arrays for columns {columns}, expected m, ‖W‖², W, A, B of each")
    if any(start < end or stop < start for (start, stop), end in zip(columns, ends, strict=False)) or ends[-1] > width:
        raise ShapeError(f"dora_factors: columns {columns} of {width} overlap or are unordered")
    m, squares, w, a, b = split_layers(arrays)
    for i, (start, stop) in enumerate(columns):
        if w[i].ndim != 2 or a[i].ndim != 2 or w[i].shape != (stop - start, a[i].shape[1]):
            raise ShapeError(f"dora_factors: W {w[i].shape} does not fit A {a[i].shape} at columns {columns[i]}")
        if b[i].shape != (stop - start, a[i].shape[0]) or {m[i].shape, squares[i].shape} != {(stop - start,)}:
            shapes = f"B {b[i].shape}, m {m[i].shape}, ‖W‖² {squares[i].shape}"
            raise ShapeError(f"dora_factors: {shapes} do not fit W of shape {w[i].shape} and A {a[i].shape}")
    same_type("dora_factors", *w, *a, *b)
    same_type("dora_factors", *m)
    return Spec((width,), m[0].dtype), Spec((width,), statistics_type(m[0].dtype))


def _factors_vjp(ctx: Context, g: Array, _: None) -> tuple[Array | None, ...]:
    """dm = dc / ‖W + s·B·A‖; the other inputs have no gradient."""
    norm, columns = ctx.outputs[1], ctx.attrs["columns"]
    assert norm is not None
    grads: list[Array | None] = [None] * len(ctx.inputs)
    wide = g if g.dtype is norm.dtype else cast(g, dtype=norm.dtype)
    slots = [ctx.gradient_slot(i) if wide is g and ctx.needs[i] else None for i in range(len(columns))]
    free = [slot for slot in slots if slot is not None]
    are_adjacent = all(stop == start for (_, stop), (start, _) in pairwise(columns))
    if are_adjacent and len(free) == len(slots) and (joint := joined(free)) is not None:  # one pass for all layers
        div(*(window(x, columns[0][0], columns[-1][1]) for x in (wide, norm)), out=joint)
        grads[: len(slots)] = slots
        return tuple(grads)
    for i, (start, stop) in enumerate(columns):
        if ctx.needs[i]:
            dm = div(*(window(x, start, stop) for x in (wide, norm)), out=slots[i])
            grads[i] = dm if wide is g else cast(dm, dtype=g.dtype)
    return tuple(grads)


@op(
    "dora_factors",
    _factors_infer,
    vjp=_factors_vjp,
    saves=("out1",),
    auxiliary=(1,),
    flops=lambda i, o, a: sum(2 * w.size * v.shape[0] for w, v in zip(*split_layers(i)[2:4], strict=True)),
)
def dora_factors(
    out: tuple[np.ndarray, np.ndarray], *arrays: np.ndarray, columns: Columns, scales: tuple[float, ...], width: int
) -> None:
    """c `[width]` of several layers, 1 in columns without a layer; the second output is the norms (no gradient).

    Args:
        arrays: m and ‖W‖² of rows `[n]`, W `[n, in]`, A `[r, in]` and B `[n, r]` of each layer: all m, then all ‖W‖², …
        columns: [start, stop) of each layer.
        scales: s of each layer.
    """
    c, norm = out
    c[...], norm[...] = 1, 1
    for m, squares, w, a, b, (start, stop), s in zip(*split_layers(arrays), columns, scales, strict=True):
        w, a, b = (as_type(x, norm.dtype) for x in (w, a, b))
        total = as_type(squares, norm.dtype) + (2 * s) * np.vecdot(w @ a.T, b)
        total += (s * s) * np.vecdot(b @ (a @ a.T), b)
        norm[start:stop] = np.sqrt(np.maximum(total, 0))  # rounding may have made the sum negative
        c[start:stop] = as_type(m, norm.dtype) / norm[start:stop]


def check_factors(name: str, x: Array, columns: int, factors: Array) -> None:
    """Raise ShapeError or DTypeError unless c has one value per column, in float32 or wider or in x's dtype."""
    if factors.shape != (columns,):
        raise ShapeError(f"{name}: factors of shape {factors.shape} do not fit {columns} columns")
    if factors.dtype not in (x.dtype, float32, float64):
        raise DTypeError(f"{name}: {factors.dtype.name} factors do not fit {x.dtype.name}", next="pass them in float32")


# --- Scaling columns --------------------------------------------------------------------------------------------------


def _scale_infer(z: Array, factors: Array, bias: Array | None = None, residual: Array | None = None) -> Spec:
    check_factors("scale_columns", z, z.shape[-1] if z.shape else 0, factors)
    if bias is not None and bias.shape != factors.shape:
        raise ShapeError(f"scale_columns: a bias of shape {bias.shape} does not fit {z.shape[-1]} columns")
    if residual is not None and residual.shape != z.shape:
        raise ShapeError(f"scale_columns: a residual {residual.shape} does not match a result of shape {z.shape}")
    same_type("scale_columns", z, *(x for x in (bias, residual) if x is not None))
    return z.spec


@op("scale_columns", _scale_infer, flops=lambda i, o, a: 3 * o[0].size)
def scale_columns(
    out: np.ndarray, z: np.ndarray, factors: np.ndarray, bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
) -> None:  # fmt: skip
    """y = c∘z + b + residual for z `[..., out]`, c and b `[out]`. No gradient."""
    work = np.dtype(np.float32) if is_narrow(z.dtype) else z.dtype
    wide = as_type(z, work) * as_type(factors, work)
    for more in (bias, residual):
        if more is not None:
            wide += as_type(more, work)
    np.copyto(out, wide, casting="unsafe")


def _scale_rows_infer(w: Array, factors: Array) -> Spec:
    if w.ndim != 2 or factors.shape != w.shape[:1]:
        raise ShapeError(f"scale_rows: factors of shape {factors.shape} do not fit a weight of shape {w.shape}")
    if factors.dtype not in (w.dtype, float32, float64):
        raise DTypeError(
            f"scale_rows: {factors.dtype.name} factors do not fit {w.dtype.name}", next="pass them in float32"
        )
    return w.spec


@op("scale_rows", _scale_rows_infer)
def scale_rows(out: np.ndarray, w: np.ndarray, factors: np.ndarray) -> None:
    """c∘W by rows, for W `[out, in]`. No gradient: backward computes (c∘g)·W as g·(c∘W); W is smaller than g."""
    work = np.dtype(np.float32) if is_narrow(w.dtype) else w.dtype
    np.copyto(out, as_type(w, work) * as_type(factors, work)[:, None], casting="unsafe")
