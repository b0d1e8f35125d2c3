"""Extreme elements and their positions: rows that one program holds whole, and columns that it walks down alone.

Elements are taken in groups, whose extremes cost one instruction an element. The first group that has the extreme is
read again, and only there positions are compared. Other layouts are folded element by element, in `fold.py`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.launch import launch
from genesis.kernels.reduce.plan import COLUMN_GROUP, Layout, Tiles, group_of
from genesis.kernels.reduce.reduction import Recipe, reads, reduced
from genesis.kernels.strides import is_wide, offsets
from genesis.kernels.types import TRITON, converted

__all__ = ["column_extremes", "extremes"]


@triton.jit
def is_best(x, best):
    """Where x is the extreme; if that is NaN, where x is one."""
    return (x == best) | (x != x)


@triton.jit
def extreme_kernel(p_o, p_i, p_x, nk, nr, sizes_k, sx, so, sizes_r, sr, MERGE: tl.constexpr, IDENTITY: tl.constexpr,
                   READ: tl.constexpr, KDIMS: tl.constexpr, RDIMS: tl.constexpr, WIDE_K: tl.constexpr,
                   WIDE_R: tl.constexpr, BK: tl.constexpr, GROUPS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    if WIDE_K:
        program = program.to(tl.int64)
    i_k = program * BK + tl.arange(0, BK)
    m_k = i_k < nk
    p_k = p_x + offsets(i_k, sizes_k, sx, KDIMS)
    i_g = tl.arange(0, G)
    first = tl.arange(0, GROUPS) * G
    if WIDE_R:
        first = first.to(tl.int64)
    i_r = first[:, None] + i_g[None, :]
    m = m_k[:, None, None] & (i_r < nr)[None, :, :]
    x = converted(tl.load(p_k[:, None, None] + offsets(i_r, sizes_r, sr, RDIMS)[None, :, :], mask=m, other=0), READ)
    x = tl.where(m, x, tl.full((1, 1, 1), IDENTITY, READ))
    in_groups = reduced((x,), 2, MERGE)[0]
    best = reduced((in_groups,), 1, MERGE)[0]
    if GROUPS == 1:
        wins = m & is_best(x, best[:, None, None])
        at = tl.min(tl.min(tl.where(wins, i_r[None, :, :], GROUPS * G), 2), 1)
    else:
        begin = tl.min(tl.where(is_best(in_groups, best[:, None]), first[None, :], GROUPS * G), 1)
        r = tl.minimum(begin, (GROUPS - 1) * G)[:, None] + i_g[None, :]
        m_r = m_k[:, None] & (r < nr)
        y = converted(tl.load(p_k[:, None] + offsets(r, sizes_r, sr, RDIMS), mask=m_r, other=0), READ)
        at = tl.min(tl.where(m_r & is_best(y, best[:, None]), r, GROUPS * G), 1)
    o = offsets(i_k, sizes_k, so, KDIMS)
    if p_o is not None:
        tl.store(p_o + o, converted(best, p_o.dtype.element_ty), mask=m_k)
    tl.store(p_i + o, at.to(tl.int64), mask=m_k)


@triton.jit
def column_kernel(p_o, p_i, p_x, nk, nr, sizes_k, sx, so, sizes_r, sr, STEP: tl.constexpr, MERGE: tl.constexpr,
                  IDENTITY: tl.constexpr, READ: tl.constexpr, KDIMS: tl.constexpr, RDIMS: tl.constexpr,
                  EVEN: tl.constexpr, WIDE_K: tl.constexpr, WIDE_R: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
                  G: tl.constexpr):  # fmt: skip
    """BK columns, walked by BR lanes, which take G rows at a time. EVEN: groups fill the columns."""
    program = tl.program_id(0)
    if WIDE_K:
        program = program.to(tl.int64)
    i_k = program * BK + tl.arange(0, BK)
    m_k = i_k < nk
    p_k = p_x + offsets(i_k, sizes_k, sx, KDIMS)
    lanes = tl.arange(0, BR)[:, None]
    if WIDE_R:
        lanes = lanes.to(tl.int64)
    best, group = tl.full((BR, BK), IDENTITY, READ), tl.zeros((BR, BK), lanes.dtype) + lanes
    for chunk in range(0, tl.cdiv(nr, G * BR)):
        i_g = chunk * BR + lanes
        extreme = tl.full((BR, BK), IDENTITY, READ)
        for j in tl.static_range(G):
            p = p_k[None, :] + offsets(i_g * G + j, sizes_r, sr, RDIMS)
            if EVEN:
                x = converted(tl.load(p, mask=m_k[None, :]), READ)
            else:
                m = m_k[None, :] & (i_g * G + j < nr)
                x = tl.where(m, converted(tl.load(p, mask=m, other=0), READ), tl.full((1, 1), IDENTITY, READ))
            extreme = MERGE(extreme, x)
        best, group = STEP((best, group), extreme, i_g, 0, 0)
    column = reduced((best,), 0, MERGE)[0]
    end = tl.cdiv(nr, G) * G
    begin = tl.min(tl.where(is_best(best, column[None, :]), group, end), 0) * G
    r = begin[None, :] + tl.arange(0, G)[:, None]
    m = m_k[None, :] & (r < nr)
    x = converted(tl.load(p_k[None, :] + offsets(r, sizes_r, sr, RDIMS), mask=m, other=0), READ)
    at = tl.min(tl.where(m & is_best(x, column[None, :]), r, end), 0)
    o = offsets(i_k, sizes_k, so, KDIMS)
    if p_o is not None:
        tl.store(p_o + o, converted(column, p_o.dtype.element_ty), mask=m_k)
    tl.store(p_i + o, at.to(tl.int64), mask=m_k)


def column_extremes(
    recipe: Recipe, merge: Any, values: Array | None, positions: Array, x: Array, layout: Layout, cut: Tiles
) -> None:
    """The extremes of columns and where they first stand; NaN is one, before all others.

    Args:
        recipe: of an element and its position.
        merge: the larger or smaller of two tiles, NaN where there is one.
        values, positions: as in `extremes`.
        cut: of `whole_columns`.
    """
    launch(
        column_kernel, triton.cdiv(layout.results, cut.keep), values, positions, x, layout.results, layout.elements,
        layout.kept, layout.kept_in, layout.kept_out, layout.reduced, layout.steps, STEP=recipe.step, MERGE=merge,
        IDENTITY=recipe.identity, READ=TRITON[reads(x.dtype).name], KDIMS=len(layout.kept), RDIMS=len(layout.reduced),
        EVEN=layout.elements % (COLUMN_GROUP * cut.fold) == 0,
        WIDE_K=is_wide((*layout.kept, *layout.reduced), (*layout.kept_in, *layout.steps))
        or is_wide(layout.kept, layout.kept_out),
        WIDE_R=is_wide(layout.reduced, layout.steps), BK=cut.keep, BR=cut.fold, G=COLUMN_GROUP, num_warps=cut.warps,
    )  # fmt: skip


def extremes(
    merge: Any, identity: float, values: Array | None, positions: Array, x: Array, layout: Layout, cut: Tiles
) -> None:
    """The extremes of rows and where they first stand; NaN is one, before all others.

    Args:
        merge: the larger or smaller of two tiles, NaN where there is one.
        identity: what loses against all elements.
        values: contiguous results, or None where only positions are asked for.
        positions: int64.
        cut: of `whole_rows`.
    """
    if layout.results == 0:
        return
    group = group_of(cut, x.dtype.itemsize)
    launch(
        extreme_kernel, triton.cdiv(layout.results, cut.keep), values, positions, x, layout.results, layout.elements,
        layout.kept, layout.kept_in, layout.kept_out, layout.reduced, layout.steps, MERGE=merge, IDENTITY=identity,
        READ=TRITON[reads(x.dtype).name], KDIMS=len(layout.kept), RDIMS=len(layout.reduced),
        WIDE_K=is_wide((*layout.kept, *layout.reduced), (*layout.kept_in, *layout.steps))
        or is_wide(layout.kept, layout.kept_out),
        WIDE_R=is_wide(layout.reduced, layout.steps), BK=cut.keep, GROUPS=cut.fold // group, G=group,
        num_warps=cut.warps,
    )  # fmt: skip
