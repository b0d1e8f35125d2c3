"""softmax and log_softmax over one dimension, and their gradients. Sums are float32 or wider.

Reference: `genesis/ops/softmax.py`: softmax, log_softmax, softmax_backward, log_softmax_backward.

A line that fits in a program's registers is read once. A longer line is read twice, the second time mostly from L2. The
first pass computes its maximum and sum; each element of the tile has its own running maximum and sum (online softmax;
Milakov and Gimelshein, 2018). The second pass computes the result. Lines along any dimension are read in place, in
tiles whose last dimension is contiguous in memory: the dimension of the softmax (AXIS 1) or another one (AXIS 0).

Tiles: BK lines x BR elements, [BK, BR] with AXIS 1 and [BR, BK] with AXIS 0; U such tiles are a chunk.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.kernels import maths
from genesis.kernels.elements import TRITON, collapse, converted, needs_int64, offsets, program_indices, work_type
from genesis.kernels.reduce.plan import LineTiles, is_inner, line_tiles, zero_if_single
from genesis.shapes import normalize_axis

# --- The kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def fast_exp(x):
    """Return e^x for x <= 0 as a term of a sum. The fast form's error is below eps/2 of 1, the sum's largest term."""
    return tl.exp2(x * 1.4426950408889634) if x.dtype == tl.float32 else maths.exp(x)


@triton.jit
def result_exp(x, OUT: tl.constexpr):
    """Return e^x for x <= 0 as a result: the fast form if rounding to 2 bytes hides the difference."""
    return fast_exp(x) if OUT.primitive_bitwidth == 16 else maths.exp(x)


@triton.jit
def finite_max(top):
    """Return a maximum that can be subtracted: 0 instead of -inf, which is the maximum if all elements are -inf."""
    return tl.where(top == float("-inf"), tl.zeros_like(top), top)


@triton.jit
def softmax_kernel(p_o, p_x, nk, nr, sizes, sx, so, dx, do, LOG: tl.constexpr, WORK: tl.constexpr, AXIS: tl.constexpr,
                   INT64: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Compute the softmax of lines that fit in registers."""
    k = program_indices(BK, INT64)  # [BK]
    r = tl.arange(0, BR)  # [BR]
    m = tl.expand_dims(k < nk, AXIS) & tl.expand_dims(r < nr, 1 - AXIS)  # [BK, BR] or [BR, BK]
    i_r = r.to(tl.int64) if INT64 else r
    o_x = tl.expand_dims(offsets(k, sizes, sx), AXIS) + tl.expand_dims(i_r * dx, 1 - AXIS)  # [BK, BR] or [BR, BK]
    x = converted(tl.load(p_x + o_x, mask=m, other=float("-inf")), WORK)  # [BK, BR] or [BR, BK]
    x -= tl.expand_dims(tl.max(x, AXIS), AXIS)  # [BK, BR] or [BR, BK]
    x = tl.where(m, x, float("-inf"))
    o = tl.expand_dims(offsets(k, sizes, so), AXIS) + tl.expand_dims(i_r * do, 1 - AXIS)  # [BK, BR] or [BR, BK]
    OUT: tl.constexpr = p_o.dtype.element_ty
    if LOG:
        total = tl.sum(fast_exp(x), AXIS)  # [BK]
        y = x - tl.expand_dims(maths.log(total), AXIS)  # [BK, BR] or [BR, BK]
    else:
        y = result_exp(x, OUT)  # [BK, BR] or [BR, BK]
        scale = maths.divide(tl.full((BK,), 1, WORK), tl.sum(y, AXIS))  # [BK]
        y = y * tl.expand_dims(scale, AXIS)
    tl.store(p_o + o, converted(y, OUT), mask=m)


@triton.jit
def load_chunk(p, first, count, step, m_k, WORK: tl.constexpr, AXIS: tl.constexpr, U: tl.constexpr, BR: tl.constexpr,
               MASKED: tl.constexpr):  # fmt: skip
    """Load U × BR consecutive elements of every line, [U, BK, BR] or [U, BR, BK]; -inf beyond the end."""
    r = first + tl.arange(0, U)[:, None] * BR + tl.arange(0, BR)[None, :]  # [U, BR]
    r = tl.expand_dims(r, 3 - AXIS - 1)  # [U, BR, 1] or [U, 1, BR]
    m = m_k
    if MASKED:
        m = m_k & (r < count)  # [U, BK, BR] or [U, BR, BK]
    return converted(tl.load(p + r * step, mask=m, other=float("-inf")), WORK)


@triton.jit
def softmax_two_pass_kernel(p_o, p_x, nk, nr, sizes, sx, so, dx, do, LOG: tl.constexpr, WORK: tl.constexpr,
                            AXIS: tl.constexpr, INT64: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
                            U: tl.constexpr):  # fmt: skip
    """Compute the softmax of longer lines, in two passes over chunks of U × BR elements."""
    if INT64:
        nr = nr.to(tl.int64)
    k = program_indices(BK, INT64)  # [BK]
    m_k = tl.expand_dims(tl.expand_dims(k < nk, AXIS), 0)  # [1, BK, 1] or [1, 1, BK]
    p_k = tl.expand_dims(tl.expand_dims(p_x + offsets(k, sizes, sx), AXIS), 0)
    q_k = tl.expand_dims(tl.expand_dims(p_o + offsets(k, sizes, so), AXIS), 0)
    ROWS: tl.constexpr = BK if AXIS == 1 else BR
    COLUMNS: tl.constexpr = BR if AXIS == 1 else BK
    top = tl.full((ROWS, COLUMNS), float("-inf"), WORK)  # [ROWS, COLUMNS]
    total = tl.zeros((ROWS, COLUMNS), WORK)  # [ROWS, COLUMNS]
    # Compute the maximum and the sum of each line.
    full = nr // (U * BR) * (U * BR)
    for first in range(0, full, U * BR):
        x = load_chunk(p_k, first, nr, dx, m_k, WORK, AXIS, U, BR, False)  # [U, ROWS, COLUMNS]
        top, total = online_update(top, total, x)
    if full < nr:
        x = load_chunk(p_k, full, nr, dx, m_k, WORK, AXIS, U, BR, True)  # [U, ROWS, COLUMNS]
        top, total = online_update(top, total, x)
    best = tl.max(top, AXIS)  # [BK]
    # The sum keeps NaN, whatever the maximum is.
    total = tl.sum(total * fast_exp(finite_max(top) - tl.expand_dims(finite_max(best), AXIS)), AXIS)  # [BK]
    best = tl.expand_dims(tl.expand_dims(best, AXIS), 0)  # [1, BK, 1] or [1, 1, BK]
    OUT: tl.constexpr = p_o.dtype.element_ty
    if LOG:
        term = tl.expand_dims(tl.expand_dims(maths.log(total), AXIS), 0)
    else:
        term = tl.expand_dims(tl.expand_dims(maths.divide(tl.full((BK,), 1, WORK), total), AXIS), 0)
    # Compute and store the results.
    for first in range(0, full, U * BR):
        x = load_chunk(p_k, first, nr, dx, m_k, WORK, AXIS, U, BR, False)
        store_chunk(q_k, softmax_values(x, best, term, LOG, OUT), first, nr, do, m_k, AXIS, U, BR, False)
    if full < nr:
        x = load_chunk(p_k, full, nr, dx, m_k, WORK, AXIS, U, BR, True)
        store_chunk(q_k, softmax_values(x, best, term, LOG, OUT), full, nr, do, m_k, AXIS, U, BR, True)


@triton.jit
def online_update(top, total, x):
    """Return the maxima and sums [ROWS, COLUMNS] after U more tiles x [U, ROWS, COLUMNS]."""
    above = tl.maximum(top, tl.max(x, 0))  # [ROWS, COLUMNS]
    base = finite_max(above)
    total = total * fast_exp(top - base) + tl.sum(fast_exp(x - tl.expand_dims(base, 0)), 0)  # [ROWS, COLUMNS]
    return above, total


@triton.jit
def softmax_values(x, best, term, LOG: tl.constexpr, OUT: tl.constexpr):
    if LOG:
        return x - best - term
    else:
        return result_exp(x - best, OUT) * term


@triton.jit
def store_chunk(q, y, first, count, step, m_k, AXIS: tl.constexpr, U: tl.constexpr, BR: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    r = first + tl.arange(0, U)[:, None] * BR + tl.arange(0, BR)[None, :]  # [U, BR]
    r = tl.expand_dims(r, 3 - AXIS - 1)  # [U, BR, 1] or [U, 1, BR]
    m = m_k
    if MASKED:
        m = m_k & (r < count)
    tl.store(q + r * step, converted(y, q.dtype.element_ty), mask=m)


@triton.jit
def softmax_gradient(g, y, total, LOG: tl.constexpr):
    return g - maths.exp(y) * total if LOG else y * (g - total)


@triton.jit
def softmax_backward_kernel(p_o, p_g, p_y, nk, nr, sizes, sg, sy, so, dg, dy, do, LOG: tl.constexpr, WORK: tl.constexpr,
                            AXIS: tl.constexpr, INT64: tl.constexpr, ONE_PASS: tl.constexpr, BK: tl.constexpr,
                            BR: tl.constexpr):  # fmt: skip
    """Compute the gradients of lines that fit in registers (ONE_PASS), or of longer lines in two passes."""
    k = program_indices(BK, INT64)  # [BK]
    r = tl.arange(0, BR)  # [BR]
    if INT64:
        r = r.to(tl.int64)
    m_k = tl.expand_dims(k < nk, AXIS)  # [BK, 1] or [1, BK]
    g_k = tl.expand_dims(p_g + offsets(k, sizes, sg), AXIS)
    y_k = tl.expand_dims(p_y + offsets(k, sizes, sy), AXIS)
    q_k = tl.expand_dims(p_o + offsets(k, sizes, so), AXIS)
    OUT: tl.constexpr = p_o.dtype.element_ty
    r_0 = tl.expand_dims(r, 1 - AXIS)  # [1, BR] or [BR, 1]
    m = m_k & (r_0 < nr)  # [BK, BR] or [BR, BK]
    g = converted(tl.load(g_k + r_0 * dg, mask=m, other=0), WORK)  # [BK, BR] or [BR, BK]
    y = converted(tl.load(y_k + r_0 * dy, mask=m, other=0), WORK)  # [BK, BR] or [BR, BK]
    if ONE_PASS:
        total = tl.expand_dims(tl.sum(g if LOG else g * y, AXIS), AXIS)  # [BK, 1] or [1, BK]
        tl.store(q_k + r_0 * do, converted(softmax_gradient(g, y, total, LOG), OUT), mask=m)
    else:
        # Sum over the line, then compute the gradients.
        sums = g if LOG else g * y  # [BK, BR] or [BR, BK]
        for first in range(BR, nr, BR):
            i_r = r_0 + first
            m = m_k & (i_r < nr)
            g = converted(tl.load(g_k + i_r * dg, mask=m, other=0), WORK)  # [BK, BR] or [BR, BK]
            if LOG:
                sums += g
            else:
                sums += g * converted(tl.load(y_k + i_r * dy, mask=m, other=0), WORK)
        total = tl.expand_dims(tl.sum(sums, AXIS), AXIS)  # [BK, 1] or [1, BK]
        for first in range(0, nr, BR):
            i_r = r_0 + first
            m = m_k & (i_r < nr)
            g = converted(tl.load(g_k + i_r * dg, mask=m, other=0), WORK)  # [BK, BR] or [BR, BK]
            y = converted(tl.load(y_k + i_r * dy, mask=m, other=0), WORK)  # [BK, BR] or [BR, BK]
            tl.store(q_k + i_r * do, converted(softmax_gradient(g, y, total, LOG), OUT), mask=m)


# --- Launching them ---------------------------------------------------------------------------------------------------


def _layout(out: Array, dim: int, *inputs: Array) -> tuple[tuple[int, ...], ...]:
    """Return the merged sizes of the other dimensions, their strides in out and inputs, and the strides along `dim`."""
    axis = normalize_axis(dim, out.ndim)
    keep = [i for i in range(out.ndim) if i != axis]
    keep.sort(key=lambda i: (inputs[0].strides[i] != 0, -inputs[0].strides[i]))
    arrays = (out, *inputs)
    sizes, *merged = collapse(tuple(out.shape[i] for i in keep), *(tuple(a.strides[i] for i in keep) for a in arrays))
    return (sizes, *zero_if_single(sizes, *merged), tuple(a.strides[axis] if out.ndim else 1 for a in arrays))


def _tiles(
    out: Array, dim: int, kept: tuple[int, ...], steps: tuple[int, ...], step: int, arrays: int
) -> tuple[int, int, LineTiles]:
    """Return the length of a line, the number of lines, and their tiles."""
    length = out.shape[dim] if out.ndim else 1
    count, inner = out.size // length, is_inner(kept, steps, (length,), (step,))
    return length, count, line_tiles(count, length, out.dtype.itemsize, inner, arrays)


def _softmax(log: bool, out: Array, x: Array, dim: int) -> None:
    if out.size == 0:
        return
    kept, so, sx, (do, dx) = _layout(out, dim, x)
    length, count, cut = _tiles(out, dim, kept, sx, dx, 1)
    extra = {} if cut.one_pass else {"U": cut.unroll}
    launch(
        softmax_kernel if cut.one_pass else softmax_two_pass_kernel, triton.cdiv(count, cut.block_k), out, x, count,
        length, kept, sx, so, dx, do, LOG=log, WORK=TRITON[work_type(x.dtype).name], AXIS=int(cut.inner),
        INT64=needs_int64((*kept, length), (*sx, dx), (*so, do)), BK=cut.block_k, BR=cut.block_r, num_warps=cut.warps,
        **extra,
    )  # fmt: skip


def _softmax_backward(log: bool, out: Array, g: Array, y: Array, dim: int) -> None:
    if out.size == 0:
        return
    kept, so, sg, sy, (do, dg, dy) = _layout(out, dim, g, y)
    length, count, cut = _tiles(out, dim, kept, sy, dy, 2)
    launch(
        softmax_backward_kernel, triton.cdiv(count, cut.block_k), out, g, y, count, length, kept, sg, sy, so, dg, dy,
        do, LOG=log, WORK=TRITON[work_type(out.dtype).name], AXIS=int(cut.inner),
        INT64=needs_int64((*kept, length), (*sg, dg), (*sy, dy), (*so, do)), ONE_PASS=cut.one_pass, BK=cut.block_k,
        BR=cut.block_r * (1 if cut.one_pass else cut.unroll), num_warps=cut.warps,
    )  # fmt: skip


for _name, _log in (("softmax", False), ("log_softmax", True)):
    cuda_impl(_name)(functools.partial(_softmax, _log))
    cuda_impl(f"{_name}_backward")(functools.partial(_softmax_backward, _log))
