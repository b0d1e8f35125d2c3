"""Minimum or maximum with its index, for rows that fit in registers and for long columns.

Reference: `genesis/ops/reduce.py`: argmax, argmin, max_with_indices, min_with_indices.

The minimum or maximum of a group of elements costs one instruction an element. Only the first group that holds the
result is loaded again, to find its index. All other layouts go to `reduction.py`, whose state is (value, index).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.launch import launch
from genesis.kernels.reduce.plan import COLUMN_GROUP, Layout, Tiles, group_size
from genesis.kernels.reduce.reduction import ReduceSpec, load_type, reduce_tile
from genesis.kernels.strides import offsets, program_indices
from genesis.kernels.types import TRITON, converted


@triton.jit
def is_best(x, best):
    """Where x equals `best`, or is NaN."""
    return (x == best) | (x != x)


@triton.jit
def row_argminmax_kernel(p_o, p_i, p_x, nk, nr, kept, reduced, MERGE: tl.constexpr, IDENTITY: tl.constexpr,
                         READ: tl.constexpr, INT64_K: tl.constexpr, INT64_R: tl.constexpr, BK: tl.constexpr,
                         GROUPS: tl.constexpr, G: tl.constexpr):  # fmt: skip
    i_k = program_indices(BK, INT64_K)  # [BK]
    m_k = i_k < nk
    p_k = p_x + offsets(i_k, kept[0], kept[1])
    i_g = tl.arange(0, G)  # [G]
    first = tl.arange(0, GROUPS) * G  # [GROUPS]
    if INT64_R:
        first = first.to(tl.int64)
    i_r = first[:, None] + i_g[None, :]  # [GROUPS, G]
    m = m_k[:, None, None] & (i_r < nr)[None, :, :]
    x = converted(tl.load(p_k[:, None, None] + offsets(i_r, reduced[0], reduced[1])[None, :, :], mask=m, other=0), READ)
    x = tl.where(m, x, tl.full((1, 1, 1), IDENTITY, READ))  # [BK, GROUPS, G]
    in_groups = reduce_tile((x,), 2, MERGE)[0]  # [BK, GROUPS]
    best = reduce_tile((in_groups,), 1, MERGE)[0]  # [BK]
    if GROUPS == 1:
        wins = m & is_best(x, best[:, None, None])
        at = tl.min(tl.min(tl.where(wins, i_r[None, :, :], GROUPS * G), 2), 1)
    else:
        begin = tl.min(tl.where(is_best(in_groups, best[:, None]), first[None, :], GROUPS * G), 1)
        r = tl.minimum(begin, (GROUPS - 1) * G)[:, None] + i_g[None, :]  # [BK, G]
        m_r = m_k[:, None] & (r < nr)
        y = converted(tl.load(p_k[:, None] + offsets(r, reduced[0], reduced[1]), mask=m_r, other=0), READ)
        at = tl.min(tl.where(m_r & is_best(y, best[:, None]), r, GROUPS * G), 1)
    o = offsets(i_k, kept[0], kept[2])
    if p_o is not None:
        tl.store(p_o + o, converted(best, p_o.dtype.element_ty), mask=m_k)
    tl.store(p_i + o, at.to(tl.int64), mask=m_k)


@triton.jit
def column_argminmax_kernel(p_o, p_i, p_x, nk, nr, kept, reduced, STEP: tl.constexpr, MERGE: tl.constexpr,
                            IDENTITY: tl.constexpr, READ: tl.constexpr, EVEN: tl.constexpr, INT64_K: tl.constexpr,
                            INT64_R: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Loop down BK columns in chunks of BR groups of G rows. EVEN: G · BR divides the rows."""
    i_k = program_indices(BK, INT64_K)  # [BK]
    m_k = i_k < nk
    p_k = p_x + offsets(i_k, kept[0], kept[1])
    i_b = tl.arange(0, BR)[:, None]  # [BR, 1]
    if INT64_R:
        i_b = i_b.to(tl.int64)
    best, group = tl.full((BR, BK), IDENTITY, READ), tl.zeros((BR, BK), i_b.dtype) + i_b  # [BR, BK]
    for chunk in range(0, tl.cdiv(nr, G * BR)):
        i_g = chunk * BR + i_b
        best_of_group = tl.full((BR, BK), IDENTITY, READ)
        for j in tl.static_range(G):
            p = p_k[None, :] + offsets(i_g * G + j, reduced[0], reduced[1])
            if EVEN:
                x = converted(tl.load(p, mask=m_k[None, :]), READ)  # [BR, BK]
            else:
                m = m_k[None, :] & (i_g * G + j < nr)
                x = tl.where(m, converted(tl.load(p, mask=m, other=0), READ), tl.full((1, 1), IDENTITY, READ))
            best_of_group = MERGE(best_of_group, x)
        best, group = STEP((best, group), best_of_group, i_g, 0, 0)
    column = reduce_tile((best,), 0, MERGE)[0]  # [BK]
    end = tl.cdiv(nr, G) * G
    begin = tl.min(tl.where(is_best(best, column[None, :]), group, end), 0) * G
    r = begin[None, :] + tl.arange(0, G)[:, None]  # [G, BK]
    m = m_k[None, :] & (r < nr)
    x = converted(tl.load(p_k[None, :] + offsets(r, reduced[0], reduced[1]), mask=m, other=0), READ)
    at = tl.min(tl.where(m & is_best(x, column[None, :]), r, end), 0)
    o = offsets(i_k, kept[0], kept[2])
    if p_o is not None:
        tl.store(p_o + o, converted(column, p_o.dtype.element_ty), mask=m_k)
    tl.store(p_i + o, at.to(tl.int64), mask=m_k)


def column_min_max(
    spec: ReduceSpec, merge: Any, values: Array | None, indices: Array, x: Array, layout: Layout, cut: Tiles
) -> None:
    """Minima or maxima of columns and their first indices; NaN beats every element.

    Args:
        spec: the reduction of (value, index).
        merge: the elementwise minimum or maximum, which propagates NaN.
        values, indices: as in `row_min_max`.
        cut: from `column_tiles`.
    """
    launch(
        column_argminmax_kernel, triton.cdiv(layout.results, cut.block_k), values, indices, x, layout.results,
        layout.elements, *layout.strided, STEP=spec.step, MERGE=merge, IDENTITY=spec.identity,
        READ=TRITON[load_type(x.dtype).name], EVEN=layout.elements % (COLUMN_GROUP * cut.block_r) == 0,
        INT64_K=layout.int64_k, INT64_R=layout.int64_r, BK=cut.block_k, BR=cut.block_r, G=COLUMN_GROUP,
        num_warps=cut.warps,
    )  # fmt: skip


def row_min_max(
    merge: Any, identity: float, values: Array | None, indices: Array, x: Array, layout: Layout, cut: Tiles
) -> None:
    """Minima or maxima of rows and their first indices; NaN beats every element.

    Args:
        merge: the elementwise minimum or maximum, which propagates NaN.
        identity: what every element beats.
        values: contiguous results, or None if only indices are wanted.
        indices: int64.
        cut: from `row_tiles`.
    """
    if layout.results == 0:
        return
    group = group_size(cut, x.dtype.itemsize)
    launch(
        row_argminmax_kernel, triton.cdiv(layout.results, cut.block_k), values, indices, x, layout.results,
        layout.elements, *layout.strided, MERGE=merge, IDENTITY=identity, READ=TRITON[load_type(x.dtype).name],
        INT64_K=layout.int64_k, INT64_R=layout.int64_r, BK=cut.block_k, GROUPS=cut.block_r // group, G=group,
        num_warps=cut.warps,
    )  # fmt: skip
