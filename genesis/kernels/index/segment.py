"""Scatter and scatter-add of rows: deterministic segment sums of sorted keys, and sums onto few targets. No atomics.

Reference: `np.add.at` and assignment in `genesis/ops/index.py`.

The sorted keys are divided into windows of R slots; equal keys form a run. A window sums the runs inside it and writes
them. For a run that crosses windows, each window stores a partial sum, and the program of the run's first window adds
these in order.

Sums onto few targets along one dimension need no sort: each program keeps the sums of all its targets, in order of
position. Every element is compared with each target, which costs two or three instructions, a thousandth of a sort.
Partial sums are added in order. A line consists of the elements along that dimension at one index of the others.

Tiles: R slots x C columns; for few targets BL lines x BN positions, with T targets.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of, faults
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, float32, int32, int64
from genesis.kernels.elements import TRITON, collapse, converted, needs_int64, offsets, work_type
from genesis.kernels.gemm.tiles import MAX_SPLIT, schedule_of
from genesis.shapes import Shape, numel

PARTS = 64  # the most windows whose partial sums are loaded at a time
INT32_END = 1 << 31


# --- Helpers of one tile ----------------------------------------------------------------------------------------------


@triton.jit
def report_fault(p_fault, site, i, bad):
    """Report one of the bad indices `i` to the host (`backend.cuda.faults`), unless the site is 0: already reported."""
    low = tl.minimum(tl.maximum(i.to(tl.int64), -2147483648), 2147483647) & 0xFFFFFFFF
    word = (tl.full((), 0, tl.int64) + site) * 4294967296 + low
    tl.store(p_fault + (i * 0).to(tl.int32), word, mask=bad & (word > 0xFFFFFFFF))


@triton.jit
def sort_tile(x):
    """Return x sorted along its last dimension."""
    return tl.sort(x)


@triton.jit
def _join(f, x, g, y):
    return f | g, tl.where(g != 0, y, x + y)


@triton.jit
def segmented_sum(starts, x):
    """Return the sum of x along axis 0 since the last row at which `starts` (int32, of x's shape) is set."""
    return tl.associative_scan((starts, x), 0, _join)[1]


if is_interpreted():  # the interpreter would call Python for each element of a sort or scan

    def sort_tile(x: Any) -> Any:
        return tl.tensor(type(x.handle)(np.sort(x.handle.data, axis=-1), x.dtype.scalar), x.type)

    def segmented_sum(starts: Any, x: Any) -> Any:
        first, values = starts.handle.data, x.handle.data.copy()
        with np.errstate(all="ignore"):
            for row in range(1, len(values)):
                values[row] += np.where(first[row] != 0, 0, values[row - 1]).astype(values.dtype)
        return tl.tensor(type(x.handle)(values, x.dtype.scalar), x.type)


# --- Kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def scatter_rows_kernel(p_x, p_v, p_keys, p_order, count, span, unit, width, blocks, v_sizes, v_strides, rest, sx_rest,
                        sv_rest, SCALAR: tl.constexpr, WORK: tl.constexpr, INT64: tl.constexpr, R: tl.constexpr,
                        C: tl.constexpr):  # fmt: skip
    """Store x[key · unit + …] = v[order + …] for R slots and C columns. The last of equal keys wins."""
    s = (tl.program_id(0) // blocks).to(tl.int64) * R + tl.arange(0, R)  # [R]
    c = (tl.program_id(0) % blocks) * C + tl.arange(0, C)  # [C]
    if INT64:
        c = c.to(tl.int64)
    m = s < count  # [R]
    key = tl.load(p_keys + s, mask=m, other=0).to(tl.int64)  # [R]
    if p_order is not None:
        n = tl.load(p_order + s, mask=m, other=0)  # [R]
        m = m & (key != tl.load(p_keys + s + 1, mask=s + 1 < count, other=-1))
    else:
        n = s
    m = (m & (key < span))[:, None] & (c < width)[None, :]
    o_x = (key * unit)[:, None] + offsets(c, rest, sx_rest)[None, :]  # [R, C]
    if SCALAR:
        v = converted(tl.full([R, C], p_v, WORK), p_x.dtype.element_ty)
    else:
        o_v = offsets(n.to(tl.int64), v_sizes, v_strides)[:, None] + offsets(c, rest, sv_rest)[None, :]  # [R, C]
        v = converted(tl.load(p_v + o_v, mask=m), p_x.dtype.element_ty)  # [R, C]
    tl.store(p_x + o_x, v, mask=m)


@triton.jit
def segment_sum_kernel(p_x, p_parts, p_v, p_keys, p_order, count, span, unit, width, blocks, v_sizes, v_strides, rest,
                       sx_rest, sv_rest, ADD: tl.constexpr, WORK: tl.constexpr, INT64: tl.constexpr, R: tl.constexpr,
                       C: tl.constexpr):  # fmt: skip
    """Sum a window of R slots. Runs inside it are written; other runs store parts[window, 0 (head) or 1 (tail)]."""
    window = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.arange(0, R)  # [R]
    s = window * R + i
    c = (tl.program_id(0) % blocks) * C + tl.arange(0, C)  # [C]
    if INT64:
        c = c.to(tl.int64)
    m = s < count  # [R]
    key = tl.load(p_keys + s, mask=m, other=0).to(tl.int64)  # [R]
    starts = (key != tl.load(p_keys + s - 1, mask=m & (s > 0), other=-1)).to(tl.int32)  # [R]
    ends = key != tl.load(p_keys + s + 1, mask=s + 1 < count, other=-1)  # [R]
    n = tl.load(p_order + s, mask=m, other=0).to(tl.int64)  # [R]
    m = m & (key < span)
    m_c = (c < width)[None, :]
    o_v = offsets(n, v_sizes, v_strides)[:, None] + offsets(c, rest, sv_rest)[None, :]  # [R, C]
    v = converted(tl.load(p_v + o_v, mask=m[:, None] & m_c, other=0), WORK)  # [R, C]
    total = segmented_sum(tl.zeros([R, C], tl.int32) + starts[:, None], v)  # [R, C]
    # Write the runs that begin and end in this window.
    began = tl.cumsum(starts, 0) > 0  # [R]
    p_row = p_x + (key * unit)[:, None] + offsets(c, rest, sx_rest)[None, :]  # [R, C]
    m_done = (m & ends & began)[:, None] & m_c  # [R, C]
    done = total
    if ADD:
        done += converted(tl.load(p_row, mask=m_done, other=0), WORK)
    tl.store(p_row, converted(done, p_x.dtype.element_ty), mask=m_done)
    # Store the parts of runs that cross its ends.
    m_part = m & tl.where(began, (i == R - 1) & (ends == 0), ends | (i == R - 1))  # [R]
    o_part = (window * 2 + began.to(tl.int64)) * width
    tl.store(p_parts + o_part[:, None] + c[None, :], total, mask=m_part[:, None] & m_c)


@triton.jit
def segment_carry_kernel(p_x, p_parts, p_keys, count, span, unit, width, blocks, rest, sx_rest, ADD: tl.constexpr,
                         WORK: tl.constexpr, INT64: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr,
                         C: tl.constexpr):  # fmt: skip
    """Add the parts, in order, of the run that begins in this window and continues in the next."""
    window = (tl.program_id(0) // blocks).to(tl.int64)
    c = (tl.program_id(0) % blocks) * C + tl.arange(0, C)  # [C]
    if INT64:
        c = c.to(tl.int64)
    m_c = c < width
    # Find out whether the window's last run begins in it and continues.
    last = (window + 1) * R - 1
    key = tl.load(p_keys + last, mask=last < count, other=0).to(tl.int64)
    continues = tl.load(p_keys + last + 1, mask=last + 1 < count, other=-1) == key
    first = window * R
    covered = (tl.load(p_keys + first, mask=first < count, other=-1) == key) & (first > 0)
    began_before = tl.load(p_keys + first - 1, mask=covered & (first <= count), other=-1) == key
    if continues & (began_before == 0) & (key < span):
        # Add the heads of the following windows, PARTS at a time, as long as they have the key.
        total = tl.load(p_parts + (window * 2 + 1) * width + c, mask=m_c, other=0)  # [C]
        at = window + 1
        more = tl.full((), 1, tl.int32)
        while more > 0:
            w = at + tl.arange(0, PARTS)  # [PARTS]
            same = tl.load(p_keys + w * R, mask=w * R < count, other=-1) == key  # [PARTS]
            parts = tl.load(p_parts + (w * 2 * width)[:, None] + c[None, :], mask=same[:, None] & m_c[None, :], other=0)
            total += tl.sum(parts, 0).to(WORK)  # [C]
            at += PARTS
            more = tl.min(same.to(tl.int32), 0)
        p_row = p_x + key * unit + offsets(c, rest, sx_rest)  # [C]
        if ADD:
            total += converted(tl.load(p_row, mask=m_c, other=0), WORK)
        tl.store(p_row, converted(total, p_x.dtype.element_ty), mask=m_c)


# --- Launching them ---------------------------------------------------------------------------------------------------


class SortedKeys(NamedTuple):
    """Sorted target keys."""

    keys: Array  # `[N]`; keys from `span` on are dropped
    order: Array | None  # `[N]`, the position of each key; None if the order of equal keys does not matter
    span: int  # end of valid keys
    unit: int  # elements per unit of a key


class Rows(NamedTuple):
    """Rows of values `[*index dimensions, *row]` and the matching rows of a target, with dimensions merged."""

    sizes: Shape  # sizes of the index dimensions of the values
    strides: Shape  # strides of the index dimensions of the values
    row_sizes: Shape  # sizes of a row's dimensions
    target_strides: Shape  # strides of a row in the target
    value_strides: Shape  # strides of a row in the values
    needs_int64: bool  # whether offsets inside a row need int64

    @property
    def width(self) -> int:
        """Elements per row."""
        return int(np.prod(self.row_sizes, dtype=np.int64))


def rows_of(sizes: Shape, strides: Shape, row_sizes: Shape, target_strides: Shape, value_strides: Shape) -> Rows:
    """Return `Rows` with as few dimensions as possible."""
    merged, steps = collapse(sizes, strides)
    inner, so, sv = collapse(row_sizes, target_strides, value_strides)
    far = any(sum((n - 1) * st for n, st in zip(inner, each, strict=True)) >= INT32_END for each in (so, sv))
    return Rows(merged, steps, inner, so, sv, far or int(np.prod(inner, dtype=np.int64)) >= INT32_END - 4096)


def index_type(count: int) -> DType:
    """Return the integer type that holds values below `count`."""
    return int32 if count < INT32_END else int64


def columns(width: int, most: int) -> int:
    """Return the columns of a tile: a power of 2 that divides the width, unless that is below 64."""
    even = width & -width
    return min(even if even >= 64 else int(triton.next_power_of_2(width)), most)


def tile_of(width: int) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a tile that copies rows."""
    c = columns(width, 1024)
    return max(1, 2048 // c), c, 4


def scatter_rows(target: Array, values: Any, sorted_keys: SortedKeys, rows: Rows) -> None:
    """Write target[key] = values[position]; the last position of equal keys wins. `values` may be a number."""
    count, width = sorted_keys.keys.size, rows.width
    if count == 0 or width == 0:
        return
    r, c, warps = tile_of(width)
    blocks = triton.cdiv(width, c)
    launch(
        scatter_rows_kernel, triton.cdiv(count, r) * blocks, target, values, sorted_keys.keys, sorted_keys.order, count,
        sorted_keys.span, sorted_keys.unit, width, blocks, rows.sizes, rows.strides, rows.row_sizes,
        rows.target_strides, rows.value_strides, SCALAR=not isinstance(values, Array),
        WORK=TRITON[work_type(target.dtype).name], INT64=rows.needs_int64, R=r, C=c, num_warps=warps,
    )  # fmt: skip


def window_of(count: int, width: int) -> tuple[int, int, int]:
    """Return (slots of a window, columns of a tile, warps)."""
    slots = 16 if count <= 1 << 16 else 64
    c = columns(width, 2048 // slots)
    if c < 64:
        return max(1024 // c, slots), c, 4
    return slots, c, 1


def scatter_add_rows(
    target: Array, values: Array, sorted_keys: SortedKeys, rows: Rows, add: bool = True, work: DType | None = None
) -> None:
    """Write target[key] = (with `add`: +=) the sum of values[position] over each key's positions, in order. `work` is
    the type of the sum: by default the target's type, or float32 for 2-byte floats.
    """
    count, width = sorted_keys.keys.size, rows.width
    if count == 0 or width == 0:
        return
    r, c, warps = window_of(count, width)
    work = work_type(target.dtype) if work is None else work
    blocks, windows = triton.cdiv(width, c), triton.cdiv(count, r)
    parts = empty((windows, 2, width), work if work.name != "bool" else int32, target.device)
    kind = TRITON[parts.dtype.name]
    launch(
        segment_sum_kernel, windows * blocks, target, parts, values, sorted_keys.keys, sorted_keys.order, count,
        sorted_keys.span, sorted_keys.unit, width, blocks, rows.sizes, rows.strides, rows.row_sizes,
        rows.target_strides, rows.value_strides, ADD=add, WORK=kind, INT64=rows.needs_int64, R=r, C=c, num_warps=warps,
    )  # fmt: skip
    if windows > 1:
        launch(
            segment_carry_kernel, windows * blocks, target, parts, sorted_keys.keys, count, sorted_keys.span,
            sorted_keys.unit, width, blocks, rows.row_sizes, rows.target_strides, ADD=add, WORK=kind,
            INT64=rows.needs_int64, R=r, PARTS=max(1, min(PARTS, 4096 // c)), C=c, num_warps=warps,
        )  # fmt: skip


# --- Few targets ------------------------------------------------------------------------------------------------------


COMPARED, STORED = 0.1, 3  # ps per comparison (counted from machine code), and per target that is read and stored
SORTED, LAUNCHES = 130, 10e6  # ps per position of a sort, and for the launches of a sort (H100)
MAX_TARGETS = 64  # the most targets per program
SUM_REGISTERS, ELEMENTS = 128, 8  # registers per thread for sums, and the most elements per thread of each target
PROGRAMS_PER_SM = 4
ALL_PROGRAMS = 528  # on an H100; fewer leave SMs idle


@triton.jit(do_not_specialize=["site", "split", "steps_per_split"])
def few_targets_kernel(p_x, p_parts, p_index, p_v, p_fault, lines, count, targets, sizes, sx, si, sv, x_step, i_step,
                       v_step, site, split, steps_per_split, ADD: tl.constexpr, INT64: tl.constexpr, T: tl.constexpr,
                       BL: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Store x[line, target] = (with ADD: +=) the sum of v[line, n] over all n with index[line, n] = target, for BL
    lines and T targets. With `p_parts`, `[split, targets, lines]`, store a part of these sums there.
    """
    program, blocks = tl.program_id(0) // split, tl.cdiv(targets, T)
    i_part, first = tl.program_id(0) % split, program % blocks * T
    o_l, o_n = program // blocks * BL + tl.arange(0, BL), tl.arange(0, BN)
    begin = i_part * steps_per_split * BN
    end = tl.minimum(begin + steps_per_split * BN, count)
    if INT64:
        o_l, o_n = o_l.to(tl.int64), o_n.to(tl.int64)
    m_l = o_l < lines  # [BL]
    p_in = p_index + offsets(o_l, sizes, si)[:, None] + (begin + o_n)[None, :] * i_step  # [BL, BN]
    p_vn = p_v + offsets(o_l, sizes, sv)[:, None] + (begin + o_n)[None, :] * v_step  # [BL, BN]
    sums = ()  # [BL, BN] for each target
    for _ in tl.static_range(T):
        sums += (tl.zeros((BL, BN), tl.float32),)
    # Load one step ahead of the comparisons.
    m_next = m_l[:, None] & (o_n < end - begin)[None, :]
    next_i, next_v = tl.load(p_in, mask=m_next, other=0), tl.load(p_vn, mask=m_next, other=0)  # [BL, BN] each
    for at in range(begin, end, BN):
        m_n, i, b_v = m_next, next_i.to(tl.int64), converted(next_v, tl.float32)  # [BL, BN] each
        p_in += BN * i_step
        p_vn += BN * v_step
        m_next = m_l[:, None] & (o_n < end - at - BN)[None, :]
        next_i, next_v = tl.load(p_in, mask=m_next, other=0), tl.load(p_vn, mask=m_next, other=0)  # [BL, BN] each
        # Add each value to the sum of the target that its index names.
        j = tl.where(i < 0, i + targets, i)  # [BL, BN]
        good = (j >= 0) & (j < targets)  # [BL, BN]
        report_fault(p_fault, site, i, m_n & (good == 0))
        j = tl.where(m_n & good, j - first, -1).to(tl.int32)  # [BL, BN]
        before, sums = sums, ()
        for t in tl.static_range(T):
            sums += (tl.where(j == t, before[t] + b_v, before[t]),)
    # Store the sums, or the part of them.
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
    """Store x = (with ADD: +=) the sum over parts, from first to last."""
    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)  # [B]
    m = i < lines * targets
    b_y = tl.zeros((B,), tl.float32)  # [B]
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
    """Return (targets, lines, positions) of a tile. Lanes run along lines, or along positions with `along_count`."""
    program_targets = min(MAX_TARGETS, triton.next_power_of_2(targets))
    elements = min(ELEMENTS, SUM_REGISTERS // program_targets) * 128
    bl = 4 if along_count else max(16, min(128, triton.next_power_of_2(lines)))
    return program_targets, bl, elements // bl


def is_profitable(lines: int, count: int, targets: int, tile: tuple[int, int, int], is_shared: bool) -> bool:
    """Return whether comparing takes less than half the estimated time of a sort of each line, or of all if shared."""
    blocks_t, blocks_l, steps = (triton.cdiv(n, step) for n, step in zip((targets, lines, count), tile, strict=True))
    programs = blocks_t * blocks_l * max(1, min(MAX_SPLIT, steps // 4))
    compared = blocks_t * blocks_l * steps * math.prod(tile) * max(1, ALL_PROGRAMS / programs)
    taken = COMPARED * compared + STORED * lines * targets
    return 2 * taken < LAUNCHES + SORTED * count * (1 if is_shared else lines)


def add_to_few_targets(
    op: str, target: Array, values: Array, index: Array, dim: int, name: int, add: bool, is_shared: bool
) -> bool:
    """Add values along `dim`: target[…, index, …] += values.

    Args:
        op: name of the op in errors; `name` is the number of the dimension there.
        target: at least as large as the index in dimensions other than `dim`. It holds zeros unless `add` is set.
        values: array of the index's shape; both may have any strides.
        is_shared: whether positions are the same for all lines.

    Returns:
        False, without adding, where sorting is faster, and for types that are not summed in float32.
    """
    others = [d for d in range(target.ndim) if d != dim]
    shape: Shape = tuple(index.shape[d] for d in others)
    sizes, sx, si, sv = collapse(shape, *(tuple(a.strides[d] for d in others) for a in (target, index, values)))
    lines, count, targets = numel(shape), index.shape[dim], target.shape[dim]
    if not target.dtype.is_floating_point or target.dtype.itemsize > 4 or not lines * count * targets:
        return False
    # Choose the tile, and split the positions among programs.
    steps = tuple(a.strides[dim] for a in (target, index, values))
    tile = few_targets_tile(lines, targets, steps[2] == 1 and count > 1 and (sv[-1] != 1 or sizes[-1] == 1))
    if not is_profitable(lines, count, targets, tile, is_shared):
        return False
    program_targets, bl, bn = tile
    tiles = triton.cdiv(lines, bl) * triton.cdiv(targets, program_targets)
    most = PROGRAMS_PER_SM * backend_of(target.device).driver.properties.sm_count // tiles
    split = max(1, min(most, triton.cdiv(count, bn) // 4, MAX_SPLIT))
    s = schedule_of(tiles, triton.cdiv(count, bn), 1, split, is_persistent=False)
    parts = empty((s.split, targets, lines), float32, target.device) if s.split > 1 else None
    extents = zip((targets, count, count), (sx, si, sv), steps, strict=True)
    wide = any(needs_int64((*sizes, n), (*line, step)) for n, line, step in extents)
    launch(
        few_targets_kernel, tiles * s.split, target, parts, index, values, faults.flag(target.device), lines, count,
        targets, sizes, sx, si, sv, *steps, faults.site(op, name, targets, -targets), s.split, s.steps_per_split,
        ADD=add, INT64=wide, T=program_targets, BL=bl, BN=bn, num_warps=4,
    )  # fmt: skip
    if parts is not None:
        launch(
            few_targets_reduce_kernel, triton.cdiv(lines * targets, 256), target, parts, lines, targets, sizes, sx,
            steps[0], s.split, ADD=add, INT64=wide, B=256, num_warps=4,
        )  # fmt: skip
    return True
