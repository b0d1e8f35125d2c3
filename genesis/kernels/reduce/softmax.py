"""Kernels of softmax and log_softmax over one dimension, and of their gradients. Sums are float32 or wider.

A line that fits into a program's registers is read once. A longer one is read twice: first for its maximum and sum,
which every lane carries for itself (Milakov and Gimelshein, 2018), then, mostly from the L2, for the
result. Lines along any dimension are read in place: tiles have the dimension next in memory last (AXIS 1: that of the
softmax; AXIS 0: another one).
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.kernels import maths
from genesis.kernels.reduce.plan import LineTiles, is_inner, line_tiles, still
from genesis.kernels.strides import collapse, is_wide, offsets
from genesis.kernels.types import TRITON, converted, work_type
from genesis.shapes import normalize_axis

__all__: list[str] = []


# --- The kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def sum_power(x):
    """e^x for x <= 0 inside a sum: the fast form. Its error is below eps/2 of 1, the largest term of the sum."""
    return tl.exp2(x * 1.4426950408889634) if x.dtype == tl.float32 else maths.exp(x)


@triton.jit
def power(x, OUT: tl.constexpr):
    """e^x for x <= 0 as a result: the fast form where rounding to 2 bytes hides the difference."""
    return sum_power(x) if OUT.primitive_bitwidth == 16 else maths.exp(x)


@triton.jit
def finite(top):
    """A maximum that may be subtracted: a line of -inf alone has no other."""
    return tl.where(top == float("-inf"), tl.zeros_like(top), top)


@triton.jit
def softmax_tile(p_o, p_x, nk, nr, sizes, sx, so, dx, do, LOG: tl.constexpr, WORK: tl.constexpr, AXIS: tl.constexpr,
                 DIMS: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Whole lines in registers."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    k = program * BK + tl.arange(0, BK)
    r = tl.arange(0, BR)
    m = tl.expand_dims(k < nk, AXIS) & tl.expand_dims(r < nr, 1 - AXIS)
    i_r = r.to(tl.int64) if WIDE else r
    o_x = tl.expand_dims(offsets(k, sizes, sx, DIMS), AXIS) + tl.expand_dims(i_r * dx, 1 - AXIS)
    x = converted(tl.load(p_x + o_x, mask=m, other=float("-inf")), WORK)
    x -= tl.expand_dims(tl.max(x, AXIS), AXIS)
    x = tl.where(m, x, float("-inf"))
    o = tl.expand_dims(offsets(k, sizes, so, DIMS), AXIS) + tl.expand_dims(i_r * do, 1 - AXIS)
    OUT: tl.constexpr = p_o.dtype.element_ty
    if LOG:
        total = tl.sum(sum_power(x), AXIS)
        y = x - tl.expand_dims(maths.log(total), AXIS)
    else:
        y = power(x, OUT)
        scale = maths.divide(tl.full((BK,), 1, WORK), tl.sum(y, AXIS))
        y = y * tl.expand_dims(scale, AXIS)
    tl.store(p_o + o, converted(y, OUT), mask=m)


@triton.jit
def lanes(p, first, count, step, m_k, FIRST: tl.constexpr, WORK: tl.constexpr, AXIS: tl.constexpr, U: tl.constexpr,
          BR: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """A tile [U, ...] of U × BR consecutive elements of every line; -inf or 0 beyond the end."""
    r = first + tl.arange(0, U)[:, None] * BR + tl.arange(0, BR)[None, :]  # [U, BR]
    r = tl.expand_dims(r, 3 - AXIS - 1)  # [U, BR, 1] or [U, 1, BR]
    m = m_k
    if MASKED:
        m = m_k & (r < count)
    return converted(tl.load(p + r * step, mask=m, other=FIRST), WORK)


@triton.jit
def softmax_long(p_o, p_x, nk, nr, sizes, sx, so, dx, do, LOG: tl.constexpr, WORK: tl.constexpr, AXIS: tl.constexpr,
                 DIMS: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
                 U: tl.constexpr):  # fmt: skip
    """Long lines, in two passes over chunks of U × BR elements."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
        nr = nr.to(tl.int64)
    k = program * BK + tl.arange(0, BK)
    m_k = tl.expand_dims(tl.expand_dims(k < nk, AXIS), 0)
    p_k = tl.expand_dims(tl.expand_dims(p_x + offsets(k, sizes, sx, DIMS), AXIS), 0)
    q_k = tl.expand_dims(tl.expand_dims(p_o + offsets(k, sizes, so, DIMS), AXIS), 0)
    ROWS: tl.constexpr = BK if AXIS == 1 else BR
    COLUMNS: tl.constexpr = BR if AXIS == 1 else BK
    top = tl.full((ROWS, COLUMNS), float("-inf"), WORK)
    total = tl.zeros((ROWS, COLUMNS), WORK)
    whole = nr // (U * BR) * (U * BR)
    low = float("-inf")
    for first in range(0, whole, U * BR):
        x = lanes(p_k, first, nr, dx, m_k, low, WORK, AXIS, U, BR, False)
        top, total = grown(top, total, x)
    if whole < nr:
        x = lanes(p_k, whole, nr, dx, m_k, low, WORK, AXIS, U, BR, True)
        top, total = grown(top, total, x)
    best = tl.max(top, AXIS)
    # a lane that saw NaN keeps it in its sum, whatever its maximum is
    total = tl.sum(total * sum_power(finite(top) - tl.expand_dims(finite(best), AXIS)), AXIS)
    best = tl.expand_dims(tl.expand_dims(best, AXIS), 0)
    OUT: tl.constexpr = p_o.dtype.element_ty
    if LOG:
        term = tl.expand_dims(tl.expand_dims(maths.log(total), AXIS), 0)
    else:
        term = tl.expand_dims(tl.expand_dims(maths.divide(tl.full((BK,), 1, WORK), total), AXIS), 0)
    for first in range(0, whole, U * BR):
        x = lanes(p_k, first, nr, dx, m_k, low, WORK, AXIS, U, BR, False)
        put_lanes(q_k, softmax_of(x, best, term, LOG, OUT), first, nr, do, m_k, AXIS, U, BR, False)
    if whole < nr:
        x = lanes(p_k, whole, nr, dx, m_k, low, WORK, AXIS, U, BR, True)
        put_lanes(q_k, softmax_of(x, best, term, LOG, OUT), whole, nr, do, m_k, AXIS, U, BR, True)


@triton.jit
def grown(top, total, x):
    """Maximum and sum of every lane with the U elements of x [U, ...] more."""
    above = tl.maximum(top, tl.max(x, 0))
    base = finite(above)
    total = total * sum_power(top - base) + tl.sum(sum_power(x - tl.expand_dims(base, 0)), 0)
    return above, total


@triton.jit
def softmax_of(x, best, term, LOG: tl.constexpr, OUT: tl.constexpr):
    if LOG:
        return x - best - term
    else:
        return power(x - best, OUT) * term


@triton.jit
def put_lanes(q, y, first, count, step, m_k, AXIS: tl.constexpr, U: tl.constexpr, BR: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    r = first + tl.arange(0, U)[:, None] * BR + tl.arange(0, BR)[None, :]
    r = tl.expand_dims(r, 3 - AXIS - 1)
    m = m_k
    if MASKED:
        m = m_k & (r < count)
    tl.store(q + r * step, converted(y, q.dtype.element_ty), mask=m)


@triton.jit
def backward_of(g, y, total, LOG: tl.constexpr):
    return g - maths.exp(y) * total if LOG else y * (g - total)


@triton.jit
def backward(p_o, p_g, p_y, nk, nr, sizes, sg, sy, so, dg, dy, do, LOG: tl.constexpr, WORK: tl.constexpr,
             AXIS: tl.constexpr, DIMS: tl.constexpr, WIDE: tl.constexpr, ONCE: tl.constexpr, BK: tl.constexpr,
             BR: tl.constexpr):  # fmt: skip
    """Gradients of whole lines in registers (ONCE), or of long lines in two passes."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    k = program * BK + tl.arange(0, BK)
    r = tl.arange(0, BR)
    if WIDE:
        r = r.to(tl.int64)
    m_k = tl.expand_dims(k < nk, AXIS)
    g_k = tl.expand_dims(p_g + offsets(k, sizes, sg, DIMS), AXIS)
    y_k = tl.expand_dims(p_y + offsets(k, sizes, sy, DIMS), AXIS)
    q_k = tl.expand_dims(p_o + offsets(k, sizes, so, DIMS), AXIS)
    OUT: tl.constexpr = p_o.dtype.element_ty
    r_0 = tl.expand_dims(r, 1 - AXIS)
    m = m_k & (r_0 < nr)
    g = converted(tl.load(g_k + r_0 * dg, mask=m, other=0), WORK)
    y = converted(tl.load(y_k + r_0 * dy, mask=m, other=0), WORK)
    if ONCE:
        total = tl.expand_dims(tl.sum(g if LOG else g * y, AXIS), AXIS)
        tl.store(q_k + r_0 * do, converted(backward_of(g, y, total, LOG), OUT), mask=m)
    else:
        sums = g if LOG else g * y
        for first in range(BR, nr, BR):
            i_r = r_0 + first
            m = m_k & (i_r < nr)
            g = converted(tl.load(g_k + i_r * dg, mask=m, other=0), WORK)
            if LOG:
                sums += g
            else:
                sums += g * converted(tl.load(y_k + i_r * dy, mask=m, other=0), WORK)
        total = tl.expand_dims(tl.sum(sums, AXIS), AXIS)
        for first in range(0, nr, BR):
            i_r = r_0 + first
            m = m_k & (i_r < nr)
            g = converted(tl.load(g_k + i_r * dg, mask=m, other=0), WORK)
            y = converted(tl.load(y_k + i_r * dy, mask=m, other=0), WORK)
            tl.store(q_k + i_r * do, converted(backward_of(g, y, total, LOG), OUT), mask=m)


# --- Launching them ---------------------------------------------------------------------------------------------------


def _lines(out: Array, dim: int, *inputs: Array) -> tuple[tuple[int, ...], ...]:
    """Merged sizes of the other dimensions, their strides in out and inputs, and the strides along `dim` (last)."""
    axis = normalize_axis(dim, out.ndim)
    keep = [i for i in range(out.ndim) if i != axis]
    keep.sort(key=lambda i: (inputs[0].strides[i] != 0, -inputs[0].strides[i]))
    arrays = (out, *inputs)
    sizes, *merged = collapse(tuple(out.shape[i] for i in keep), *(tuple(a.strides[i] for i in keep) for a in arrays))
    return (sizes, *still(sizes, *merged), tuple(a.strides[axis] if out.ndim else 1 for a in arrays))


def _tiles(out: Array, dim: int, kept: tuple[int, ...], steps: tuple[int, ...], step: int, arrays: int) -> LineTiles:
    length = out.shape[dim] if out.ndim else 1
    inner = is_inner(kept, steps, (length,), (step,))
    return line_tiles(out.size // length, length, out.dtype.itemsize, inner, arrays)


def _softmax(out: Array, x: Array, dim: int, log: bool, cut: LineTiles | None = None) -> None:
    if out.size == 0:
        return
    kept, so, sx, (do, dx) = _lines(out, dim, x)
    cut = cut or _tiles(out, dim, kept, sx, dx, 1)
    length = out.shape[dim] if out.ndim else 1
    count = out.size // length
    extra = {} if cut.once else {"U": cut.unroll}
    launch(
        softmax_tile if cut.once else softmax_long, triton.cdiv(count, cut.keep), out, x, count, length,
        kept, sx, so, dx, do, LOG=log, WORK=TRITON[work_type(x.dtype).name], AXIS=int(cut.inner), DIMS=len(kept),
        WIDE=is_wide((*kept, length), (*sx, dx), (*so, do)), BK=cut.keep, BR=cut.fold, num_warps=cut.warps, **extra,
    )  # fmt: skip


def _softmax_backward(out: Array, g: Array, y: Array, dim: int, log: bool) -> None:
    if out.size == 0:
        return
    kept, so, sg, sy, (do, dg, dy) = _lines(out, dim, g, y)
    cut = _tiles(out, dim, kept, sy, dy, 2)
    length = out.shape[dim] if out.ndim else 1
    count = out.size // length
    launch(
        backward, triton.cdiv(count, cut.keep), out, g, y, count, length, kept, sg, sy, so, dg, dy, do,
        LOG=log, WORK=TRITON[work_type(out.dtype).name], AXIS=int(cut.inner), DIMS=len(kept),
        WIDE=is_wide((*kept, length), (*sg, dg), (*sy, dy), (*so, do)), ONCE=cut.once, BK=cut.keep,
        BR=cut.fold * (1 if cut.once else cut.unroll), num_warps=cut.warps,
    )  # fmt: skip


@cuda_impl("softmax")
def softmax(out: Array, x: Array, dim: int) -> None:
    """y = e^(x - max x) / Σ e^(x - max x) along `dim`."""
    _softmax(out, x, dim, log=False)


@cuda_impl("log_softmax")
def log_softmax(out: Array, x: Array, dim: int) -> None:
    """y = x - max x - log Σ e^(x - max x) along `dim`."""
    _softmax(out, x, dim, log=True)


@cuda_impl("softmax_backward")
def softmax_backward(out: Array, g: Array, y: Array, dim: int) -> None:
    """dx = y·(g - Σ g·y)."""
    _softmax_backward(out, g, y, dim, log=False)


@cuda_impl("log_softmax_backward")
def log_softmax_backward(out: Array, g: Array, y: Array, dim: int) -> None:
    """dx = g - e^y·Σ g."""
    _softmax_backward(out, g, y, dim, log=True)
