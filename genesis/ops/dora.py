"""DoRA's factors c (Liu et al., 2024), and the pass over a result's columns that they cost: y = c∘z + b + residual.

    c = m / ‖W + s·B·A‖ by rows

The norm is a constant in backward (section 4.3 of the paper). B·A is never made; W·Aᵀ is `[out, r]`, A·Aᵀ `[r, r]`:

    ‖W + s·B·A‖² = ‖W‖² + 2s·Σ (W·Aᵀ)∘B + s²·Σ (B·(A·Aᵀ))∘B        sums along r
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.dtypes import float32, float64
from genesis.errors import DTypeError, ShapeError
from genesis.op import Context, op
from genesis.ops.blocks import as_type, is_narrow
from genesis.ops.elementwise import cast, div
from genesis.ops.linalg import same_type
from genesis.ops.norm import statistics_type
from genesis.ops.shape import joined

Columns = tuple[tuple[int, int], ...]


# --- The factors ------------------------------------------------------------------------------------------------------


def split_layers(arrays: Sequence[Any]) -> list[Sequence[Any]]:
    """All m, all ‖W‖², all W, all A and all B of several layers."""
    count = len(arrays) // 5
    return [arrays[i * count : (i + 1) * count] for i in range(5)]


def _factors_infer(*arrays: Array, columns: Columns, scales: tuple[float, ...], width: int) -> tuple[Spec, Spec]:
    count, ends = len(columns), [0, *(stop for _, stop in columns)]
    if not count or len(arrays) != 5 * count or len(scales) != count:
        raise ShapeError(f"dora_factors: {len(arrays)} arrays for the columns {columns}: m, ‖W‖², W, A, B for each")
    if any(start < end or stop < start for (start, stop), end in zip(columns, ends, strict=False)) or ends[-1] > width:
        raise ShapeError(f"dora_factors: columns {columns} of {width}, each behind the last")
    m, squares, w, a, b = split_layers(arrays)
    for i, (start, stop) in enumerate(columns):
        if w[i].ndim != 2 or a[i].ndim != 2 or w[i].shape != (stop - start, a[i].shape[1]):
            raise ShapeError(f"dora_factors: W of shape {w[i].shape} with A {a[i].shape} at columns {columns[i]}")
        if b[i].shape != (stop - start, a[i].shape[0]) or {m[i].shape, squares[i].shape} != {(stop - start,)}:
            given = f"B {b[i].shape}, m {m[i].shape}, ‖W‖² {squares[i].shape}"
            raise ShapeError(f"dora_factors: {given} with W of shape {w[i].shape} and A {a[i].shape}")
    same_type("dora_factors", *w, *a, *b)
    same_type("dora_factors", *m)
    return Spec((width,), m[0].dtype), Spec((width,), statistics_type(m[0].dtype))


def _factors_vjp(ctx: Context, g: Array, _: None) -> tuple[Array | None, ...]:
    """dm = dc / ‖W + s·B·A‖; no other input has a gradient."""
    norm, columns = ctx.outputs[1], ctx.attrs["columns"]
    assert norm is not None
    found: list[Array | None] = [None] * len(ctx.inputs)
    wide = g if g.dtype is norm.dtype else cast(g, dtype=norm.dtype)
    slots = [ctx.gradient_slot(i) if wide is g and ctx.needs[i] else None for i in range(len(columns))]
    free = [slot for slot in slots if slot is not None]
    is_run = all(stop == start for (_, stop), (start, _) in pairwise(columns))
    if is_run and len(free) == len(slots) and (whole := joined(free)) is not None:  # one pass for all layers
        div(*(_part(x, columns[0][0], columns[-1][1]) for x in (wide, norm)), out=whole)
        found[: len(slots)] = slots
        return tuple(found)
    for i, (start, stop) in enumerate(columns):
        if ctx.needs[i]:
            made = div(*(_part(x, start, stop) for x in (wide, norm)), out=slots[i])
            found[i] = made if wide is g else cast(made, dtype=g.dtype)
    return tuple(found)


def _part(x: Array, start: int, stop: int) -> Array:
    return x.view((stop - start,), x.strides, x.offset + start * x.strides[0])


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
    """c `[width]` of several layers side by side, 1 in columns of none; also the norms, without gradient.

    Args:
        arrays: of each layer m and ‖W‖² by rows `[n]`, W `[n, in]`, A `[r, in]` and B `[n, r]`: all m, then all ‖W‖², …
        columns: of each layer, [start, stop).
        scales: s of each layer.
    """
    c, norm = out
    c[...], norm[...] = 1, 1
    for m, squares, w, a, b, (start, stop), s in zip(*split_layers(arrays), columns, scales, strict=True):
        w, a, b = (as_type(x, norm.dtype) for x in (w, a, b))
        total = as_type(squares, norm.dtype) + (2 * s) * np.vecdot(w @ a.T, b)
        total += (s * s) * np.vecdot(b @ (a @ a.T), b)
        norm[start:stop] = np.sqrt(np.maximum(total, 0))  # rounding must not make a root of less than 0
        c[start:stop] = as_type(m, norm.dtype) / norm[start:stop]


def check_factors(name: str, x: Array, columns: int, factors: Array) -> None:
    """Check c: one for each column, float32 or wider, or of x's type."""
    if factors.shape != (columns,):
        raise ShapeError(f"{name}: factors of shape {factors.shape} for {columns} columns")
    if factors.dtype not in (x.dtype, float32, float64):
        raise DTypeError(f"{name}: factors of {factors.dtype.name} for {x.dtype.name}", next="give them in float32")


# --- Scaling columns --------------------------------------------------------------------------------------------------


def _scale_infer(z: Array, factors: Array, bias: Array | None = None, residual: Array | None = None) -> Spec:
    check_factors("scale_columns", z, z.shape[-1] if z.shape else 0, factors)
    if bias is not None and bias.shape != factors.shape:
        raise ShapeError(f"scale_columns: a bias of shape {bias.shape} for {z.shape[-1]} columns")
    if residual is not None and residual.shape != z.shape:
        raise ShapeError(f"scale_columns: a residual of shape {residual.shape} with a result of shape {z.shape}")
    same_type("scale_columns", z, *(x for x in (bias, residual) if x is not None))
    return z.spec


@op("scale_columns", _scale_infer, flops=lambda i, o, a: 3 * o[0].size)
def scale_columns(
    out: np.ndarray, z: np.ndarray, factors: np.ndarray, bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
) -> None:  # fmt: skip
    """y = c∘z + b + residual for z `[..., out]`, c and b `[out]`; without gradient."""
    work = np.dtype(np.float32) if is_narrow(z.dtype) else z.dtype
    wide = as_type(z, work) * as_type(factors, work)
    for more in (bias, residual):
        if more is not None:
            wide += as_type(more, work)
    np.copyto(out, wide, casting="unsafe")


def _scale_rows_infer(w: Array, factors: Array) -> Spec:
    if w.ndim != 2 or factors.shape != w.shape[:1]:
        raise ShapeError(f"scale_rows: factors of shape {factors.shape} for a weight of shape {w.shape}")
    if factors.dtype not in (w.dtype, float32, float64):
        raise DTypeError(f"scale_rows: factors of {factors.dtype.name} for {w.dtype.name}", next="give them in float32")
    return w.spec


@op("scale_rows", _scale_rows_infer)
def scale_rows(out: np.ndarray, w: np.ndarray, factors: np.ndarray) -> None:
    """c∘W by rows, for W `[out, in]`; without gradient: backward multiplies c∘g by W as g by c∘W, which is smaller."""
    work = np.dtype(np.float32) if is_narrow(w.dtype) else w.dtype
    np.copyto(out, as_type(w, work) * as_type(factors, work)[:, None], casting="unsafe")
