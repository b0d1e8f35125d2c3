"""Scatter-add onto few targets along one dimension: each program has the sums of all of them, in order of position.

Reference: `np.add.at` in `genesis/ops/index.py`, under `index_put`.

Every element is compared with each target, which costs two or three instructions, a thousandth of a sort. Nothing is
sorted, no atomics are used, and partial sums are added in order. A line is what is indexed along the dimension at one
place of the others.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of, faults
from genesis.backend.cuda.launch import launch
from genesis.dtypes import float32
from genesis.kernels.gemm.tiles import MAX_SPLIT, split_schedule
from genesis.kernels.index.segment import report_fault
from genesis.kernels.strides import collapse, needs_int64, offsets
from genesis.kernels.types import converted
from genesis.shapes import Shape, numel

COMPARED, STORED = 0.1, 3  # ps of a comparison (counted from machine code), and of a target that is read and stored
SORTED, LAUNCHES = 130, 10e6  # ps of a position that is sorted, and of a sort's launches (H100)
TOGETHER = 64  # targets of a program
SUMS, ELEMENTS = 128, 8  # registers of a thread for sums, and elements at most of each target
PROGRAMS_PER_SM = 4


@triton.jit(do_not_specialize=["site", "split", "steps_per_split"])
def few_targets_kernel(p_x, p_parts, p_index, p_v, p_fault, lines, count, targets, sizes, sx, si, sv, x_step, i_step,
                       v_step, site, split, steps_per_split, ADD: tl.constexpr, INT64: tl.constexpr, T: tl.constexpr,
                       BL: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """x[line, target] = (or with ADD +=) the sum of v[line, n] with index[line, n] = target: BL lines and T targets, or
    with `p_parts` `[split, targets, lines]` a part of their sums.
    """
    program, blocks = tl.program_id(0) // split, tl.cdiv(targets, T)
    i_part, first = tl.program_id(0) % split, program % blocks * T
    o_l, o_n = program // blocks * BL + tl.arange(0, BL), tl.arange(0, BN)
    begin = i_part * steps_per_split * BN
    end = tl.minimum(begin + steps_per_split * BN, count)
    if INT64:
        o_l, o_n = o_l.to(tl.int64), o_n.to(tl.int64)
    m_l = o_l < lines
    p_in = p_index + offsets(o_l, sizes, si)[:, None] + (begin + o_n)[None, :] * i_step  # [BL, BN]
    p_vn = p_v + offsets(o_l, sizes, sv)[:, None] + (begin + o_n)[None, :] * v_step  # [BL, BN]
    sums = ()  # of each target, [BL, BN]
    for _ in tl.static_range(T):
        sums += (tl.zeros((BL, BN), tl.float32),)
    m_next = m_l[:, None] & (o_n < end - begin)[None, :]
    next_i, next_v = tl.load(p_in, mask=m_next, other=0), tl.load(p_vn, mask=m_next, other=0)
    for at in range(begin, end, BN):
        m_n, i, b_v = m_next, next_i.to(tl.int64), converted(next_v, tl.float32)
        p_in += BN * i_step
        p_vn += BN * v_step
        m_next = m_l[:, None] & (o_n < end - at - BN)[None, :]
        next_i, next_v = tl.load(p_in, mask=m_next, other=0), tl.load(p_vn, mask=m_next, other=0)
        j = tl.where(i < 0, i + targets, i)
        good = (j >= 0) & (j < targets)
        report_fault(p_fault, site, i, m_n & (good == 0))
        j = tl.where(m_n & good, j - first, -1).to(tl.int32)
        before, sums = sums, ()
        for t in tl.static_range(T):
            sums += (tl.where(j == t, before[t] + b_v, before[t]),)
    for t in tl.static_range(T):
        b_y, m_y = tl.sum(sums[t], 1), o_l < tl.where(first + t < targets, lines, 0)  # [BL]
        if p_parts is not None:
            tl.store(p_parts + (i_part.to(tl.int64) * targets + first + t) * lines + o_l, b_y, mask=m_y)
        else:
            p_y = p_x + offsets(o_l, sizes, sx) + (first + t) * x_step
            if ADD:
                b_y += converted(tl.load(p_y, mask=m_y, other=0), tl.float32)
            tl.store(p_y, converted(b_y, p_x.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=["split"])
def few_targets_reduce_kernel(p_x, p_parts, lines, targets, sizes, sx, x_step, split, ADD: tl.constexpr,
                              INT64: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """x = (or with ADD +=) the sum over parts, from first to last."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m = i < lines * targets
    b_y = tl.zeros((B,), tl.float32)
    for part in range(0, split):
        b_y += tl.load(p_parts + part * (i * 0 + targets) * lines + i, mask=m, other=0)
    o_l, o_t = i % lines, i // lines
    if not INT64:
        o_l, o_t = o_l.to(tl.int32), o_t.to(tl.int32)
    p_y = p_x + offsets(o_l, sizes, sx) + o_t * x_step
    if ADD:
        b_y += converted(tl.load(p_y, mask=m, other=0), tl.float32)
    tl.store(p_y, converted(b_y, p_x.dtype.element_ty), mask=m)


def few_targets_tile(lines: int, targets: int, along_count: bool) -> tuple[int, int, int]:
    """(targets, lines, positions) of a tile, whose lanes lie along lines or, with `along_count`, along positions."""
    together = min(TOGETHER, triton.next_power_of_2(targets))
    elements = min(ELEMENTS, SUMS // together) * 128
    bl = 4 if along_count else max(16, min(128, triton.next_power_of_2(lines)))
    return together, bl, elements // bl


def is_profitable(lines: int, count: int, targets: int, tile: tuple[int, int, int], is_shared: bool) -> bool:
    """Whether comparing takes less than half of what sorting does, of which less is known.

    Args:
        is_shared: positions are the same for all lines, and are sorted once.
    """
    sizes = zip((targets, lines, count), tile, strict=True)
    compared = math.prod(triton.cdiv(size, step) * step for size, step in sizes)
    taken = COMPARED * compared + STORED * lines * targets
    return 2 * taken < LAUNCHES + SORTED * count * (1 if is_shared else lines)


def add_to_few_targets(
    op: str, target: Array, values: Array, index: Array, dim: int, name: int, add: bool, is_shared: bool
) -> bool:
    """target[…, index, …] += values along `dim`; False, with nothing done, where sorting is faster, or for types that
    are not summed in float32.

    Args:
        op, name: of the op and of the dimension, for errors.
        target: sizes other than `dim`'s are at least those of the index.
        values, index: of one shape, with any strides.
        add: False where the target holds zeros.
        is_shared: positions are the same for all lines.
    """
    rest = [d for d in range(target.ndim) if d != dim]
    shape: Shape = tuple(index.shape[d] for d in rest)
    sizes, sx, si, sv = collapse(shape, *(tuple(a.strides[d] for d in rest) for a in (target, index, values)))
    lines, count, targets = numel(shape), index.shape[dim], target.shape[dim]
    if not target.dtype.is_floating_point or target.dtype.itemsize > 4 or not lines * count * targets:
        return False
    steps = tuple(a.strides[dim] for a in (target, index, values))
    tile = few_targets_tile(lines, targets, steps[2] == 1 and count > 1 and (sv[-1] != 1 or sizes[-1] == 1))
    if not is_profitable(lines, count, targets, tile, is_shared):
        return False
    together, bl, bn = tile
    tiles = triton.cdiv(lines, bl) * triton.cdiv(targets, together)
    most = PROGRAMS_PER_SM * backend_of(target.device).driver.properties.sm_count // tiles
    s = split_schedule(tiles, triton.cdiv(count, bn), max(1, min(most, triton.cdiv(count, bn) // 4, MAX_SPLIT)))
    parts = empty((s.split, targets, lines), float32, target.device) if s.split > 1 else None
    extents = zip((targets, count, count), (sx, si, sv), steps, strict=True)
    wide = any(needs_int64((*sizes, n), (*line, step)) for n, line, step in extents)
    launch(
        few_targets_kernel, tiles * s.split, target, parts, index, values, faults.flag(target.device), lines, count,
        targets, sizes, sx, si, sv, *steps, faults.site(op, name, targets, -targets), s.split, s.steps_per_split,
        ADD=add, INT64=wide, T=together, BL=bl, BN=bn, num_warps=4,
    )  # fmt: skip
    if parts is not None:
        launch(
            few_targets_reduce_kernel, triton.cdiv(lines * targets, 256), target, parts, lines, targets, sizes, sx,
            steps[0], s.split, ADD=add, INT64=wide, B=256, num_warps=4,
        )  # fmt: skip
    return True
