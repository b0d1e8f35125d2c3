"""Kernels of the gradients' norm, of the factor that clips gradients, and of the sum over ranks.

Reference: `genesis/ops/gradients.py`.

Programs store partial sums of fixed spans, and one small program adds them. A lane accumulates squares in float32
(float64 for float64); lanes and spans are added in float64. The order is fixed, so results do not depend on timing or
on the GPU.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.compile import Double
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import clear, launch
from genesis.dtypes import float64
from genesis.kernels import maths
from genesis.kernels.elements import TRITON, collapse, converted, float_argument, needs_int64, offsets, work_type
from genesis.kernels.optim.step_constants import exact, updated_in_place
from genesis.kernels.pointwise.elementwise import positions
from genesis.ops.gradients import NORM_SPAN
from genesis.ops.shape import contiguous

BLOCK = 2048  # elements of a span that are loaded at a time; on an H200 longer tiles and spans are up to 12 % slower
FINAL = 8192  # partial sums that the last program loads at a time


@triton.jit
def accumulated(acc, x, ORDER: tl.constexpr):
    """Return acc + x, or for ORDER 0 the larger one, or NaN."""
    return tl.where((x > acc) | (x != x), x, acc) if ORDER == 0 else acc + x


@triton.jit
def total_of(acc, ORDER: tl.constexpr):
    """Return the sum of a tile, or for ORDER 0 its largest element, or NaN."""
    if ORDER == 0:
        bad = tl.max((acc != acc).to(tl.int32), 0)
        return tl.where(bad > 0, float("nan"), tl.max(tl.where(acc == acc, acc, 0.0), 0))
    else:
        return tl.sum(acc, 0)


@triton.jit
def power_sums(p_o, p_x, n, sizes, sx, order, ORDER: tl.constexpr, WORK: tl.constexpr,
               INT64: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store the sum of |x|^order over this program's span.

    Args:
        ORDER: 2 for squares, 0 for the largest |x| (NaN if an element is NaN), 1 for any other order.
    """
    i_program = tl.program_id(0)
    start = (i_program.to(tl.int64) if INT64 else i_program) * SPAN
    acc = tl.zeros((BLOCK,), WORK)  # [BLOCK]
    for at in range(0, tl.minimum(n - start, SPAN), BLOCK):
        i = start + at + tl.arange(0, BLOCK)  # [BLOCK]
        x = converted(tl.load(p_x + offsets(i, sizes, sx), mask=i < n, other=0), WORK)  # [BLOCK]
        if ORDER == 2:
            x = x * x
        else:
            x = tl.abs(x)
            if ORDER == 1:
                x = tl.where(i < n, maths.power(x, tl.full(x.shape, order, WORK)), 0.0)
        acc = accumulated(acc, x, ORDER)
    tl.store(p_o + i_program, total_of(acc.to(tl.float64), ORDER))


@triton.jit
def whole_norm(p_parts, count, order, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    """Return the norm in float64, computed from the partial sums."""
    acc = tl.zeros((BLOCK,), tl.float64)  # [BLOCK]
    for at in range(0, count, BLOCK):
        i = at + tl.arange(0, BLOCK)  # [BLOCK]
        x = tl.load(p_parts + i, mask=i < count, other=0)  # [BLOCK]
        acc = accumulated(acc, x, ORDER)
    y = total_of(acc, ORDER)
    if ORDER == 0:
        return y
    else:
        return maths.root(y) if ORDER == 2 else maths.power(y, 1 / exact(order))


@triton.jit
def norm_kernel(p_o, p_parts, count, order, ORDER: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(p_o, converted(whole_norm(p_parts, count, order, ORDER, BLOCK), p_o.dtype.element_ty))


@triton.jit
def factor_kernel(p_report, p_losses, p_parts, losses, count, stride, limit, HAS_LIMIT: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Store loss, norm, factor and mark, from losses, which are added in order, and from partial sums of squares."""
    norm = converted(whole_norm(p_parts, count, 2.0, 2, BLOCK), tl.float32)
    loss = converted(tl.load(p_losses), tl.float32)
    for i in range(1, losses):
        loss += converted(tl.load(p_losses + i), tl.float32)
    mark = tl.load(p_report + 3 * stride) + (loss + norm) * 0.0
    factor = exact(1.0)
    if HAS_LIMIT:
        factor = exact(limit) / (norm.to(tl.float64) + 1e-6)
        factor = tl.where(factor > 1, exact(1.0), factor)  # keeps NaN
    tl.store(p_report, loss)
    tl.store(p_report + stride, norm)
    tl.store(p_report + 2 * stride, converted(factor, tl.float32) + mark)
    tl.store(p_report + 3 * stride, mark)


def _sum_powers(parts: Array, x: Array, of: int, order: float, kind: int) -> None:
    """Store the partial sums of x, which is a part of an array of `of` elements."""
    work = work_type(x.dtype)
    sizes, sx = collapse(x.shape, x.strides)
    launch(
        power_sums, parts.size, parts, x, x.size, sizes, sx, float_argument(order, work),
        ORDER=kind, WORK=TRITON[work.name], INT64=needs_int64(sizes, sx), SPAN=NORM_SPAN,
        BLOCK=min(BLOCK, max(16, triton.next_power_of_2(of))),
        num_warps=8,
    )  # fmt: skip


def _parts(arrays: tuple[Array, ...], order: float, kind: int, device: Any) -> tuple[Array, int]:
    """Return a buffer with the partial sums of all arrays, and their number."""
    counts = [triton.cdiv(x.size, NORM_SPAN) for x in arrays]
    parts = empty((max(sum(counts), 1),), float64, device)
    at = 0
    for x, count in zip(arrays, counts, strict=True):
        _sum_powers(parts.view((count,), (1,), parts.offset + at), x, x.size, order, kind)
        at += count
    return parts, at


def _final_tile(count: int) -> dict[str, int]:
    block = min(FINAL, max(16, triton.next_power_of_2(count)))
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 128))}


def norm_into(out: Array, arrays: tuple[Array, ...], order: float) -> None:
    """Store (Σ |x|^order)^(1/order) over all arrays into the 0-d array `out`."""
    kind = {2.0: 2, math.inf: 0}.get(float(order), 1)
    parts, count = _parts(arrays, order, kind, out.device)
    launch(norm_kernel, 1, out, parts, count, Double(order), ORDER=kind, **_final_tile(count))


@cuda_impl("total_norm")
def total_norm(out: Array, *arrays: Array, ord: float) -> None:
    full = tuple(x for x in arrays if x.size)
    if full:
        norm_into(out, full, ord)
    else:
        clear(out)


@cuda_impl("clip_factor")
def clip_factor(out: tuple[()], report: Array, loss: Array, *arrays: Array, max_norm: float | None) -> None:
    """Store report = (loss, norm, factor, mark), in two launches if there is one gradient array."""
    parts, count = _parts(tuple(x for x in arrays if x.size), 2.0, 2, report.device)
    _report(report, loss, parts, count, max_norm)


def _report(report: Array, losses: Array, parts: Array, count: int, max_norm: float | None) -> None:
    with updated_in_place(report) as (report,):
        launch(
            factor_kernel, 1, report, losses, parts, losses.size, count, report.strides[0], Double(max_norm or 0.0),
            HAS_LIMIT=max_norm is not None, **_final_tile(max(count, 1)),
        )  # fmt: skip


@cuda_impl("square_spans")
def square_spans(out: Array, x: Array, *, of: int) -> None:
    if x.size:
        _sum_powers(out, x, of, 2.0, 2)


@cuda_impl("clip_factor_of_ranks")
def clip_factor_of_ranks(out: tuple[()], report: Array, figures: Array, *, losses: int, max_norm: float | None) -> None:
    """Take float64 `figures`: the losses, then the partial sums of squares."""
    figures, count = contiguous(figures), figures.size - losses
    parts = figures.view((count,), (1,), figures.offset + losses)
    _report(report, figures.view((losses,), (1,)), parts, count, max_norm)


# --- The sum over ranks -----------------------------------------------------------------------------------------------


TILE = 1024  # elements per program: 16 bytes of a 2-byte type for each of 128 threads


@triton.jit
def rank_sum_kernel(p_o, p_own, p_others, n, s_row, RANK: tl.constexpr, OTHERS: tl.constexpr,
                    ADDS: tl.constexpr, WORK: tl.constexpr, INT64: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Compute total = ((… + rank 0's) + rank 1's) + … in WORK, and store it once."""
    i, m = positions(n, TILE, INT64)  # [TILE]
    o_row = i * 0
    own = converted(tl.load(p_own + i, mask=m), WORK)  # [TILE]
    if ADDS:
        acc = converted(tl.load(p_o + i, mask=m), WORK)  # [TILE]
    elif RANK == 0:
        acc = own
    else:
        acc = converted(tl.load(p_others + i, mask=m), WORK)  # [TILE]
    # The sum begins with its first term rather than with 0, because 0 + -0 is 0.
    for q in tl.static_range(OTHERS + 1):
        if q == RANK and (ADDS or q > 0):
            acc += own
        if q < OTHERS:  # row q holds the values of rank q, or of rank q + 1 from this rank on
            if ADDS or q > 0 or RANK == 0:
                acc += converted(tl.load(p_others + o_row + i, mask=m), WORK)
            o_row += s_row
    tl.store(p_o + i, converted(acc, p_o.dtype.element_ty), mask=m)


@cuda_impl("rank_sum")
def rank_sum(out: tuple[()], total: Array, own: Array, others: Array, *, rank: int, adds: bool) -> None:
    """Add in one pass, which reads one value per rank and writes one."""
    n, work = own.size, work_type(own.dtype)
    launch(
        rank_sum_kernel, triton.cdiv(n, TILE), total, own, others, n, others.strides[0],
        RANK=rank, OTHERS=others.shape[0], ADDS=adds, WORK=TRITON[work.name],
        INT64=needs_int64((n,)) or needs_int64(others.shape, others.strides), TILE=TILE, num_warps=4,
    )  # fmt: skip
