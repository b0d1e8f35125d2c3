"""Both thin products of a wide matrix g in one pass over it: v = g·B and gᵀ·u, for low-rank pairs on g's columns.

Plain reference: genesis/ops/low_rank.py: `low_rank_backward`.

Reading g takes nearly all the time, so two GEMMs of linalg.py, one per product, would take twice as long. A program
processes a run of tiles: down the rows of a block of columns, then the next block. It keeps a block's gᵀ·u in registers
until the block changes, and stores v for each block. A second kernel adds the partial sums in fixed order.

Shapes: g [m, n], u and v [m, rank]; tiles are BM rows x BN columns of g; R is the rank, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.dtypes import bfloat16, float32
from genesis.kernels import maths
from genesis.kernels.elements import TRITON, converted

LARGEST_RANK = 64  # limited by registers, which hold gᵀ·u
RANGES = 3  # the most ranges of g's columns
MIN_ROWS = 1024  # the fewest rows for which this pass is profitable
WIDE = 4096  # the fewest columns for which tiles are wide
MANY = 8  # partial sums loaded at a time
SHARED = 227 << 10  # bytes of shared memory that the tiles require


class ThinTile(NamedTuple):
    """Tile sizes and launch options."""

    bm: int  # rows
    bn: int  # columns
    warps: int  # warps per program
    stages: int  # pipeline stages
    ctas_per_sm: int = 1  # programs per SM


@triton.jit
def range_of(block, starts, stops, BN: tl.constexpr):
    """Return a block's range (its number, first column and end), and the first column of the block."""
    i, start, stop, first = block * 0, block * 0, block * 0, block * 0
    before = block * 0
    for j in tl.static_range(len(starts)):
        is_here = block >= before
        i, first = tl.where(is_here, j, i), tl.where(is_here, before, first)
        start, stop = tl.where(is_here, starts[j], start), tl.where(is_here, stops[j], stop)
        before += tl.cdiv(stops[j] - starts[j], BN)
    return i, start, stop, start + (block - first) * BN


@triton.jit
def picked(i, p_0, p_1, p_2):
    """Return the pointer of range i."""
    return tl.where(i == 0, p_0, tl.where(i == 1, p_1, p_2))


@triton.jit(do_not_specialize=["m", "quota"])
def thin_kernel(d_g, d_z, p_v, p_d, p_s, p_b0, p_b1, p_b2, p_u, p_c, m, rank, quota, su, sb_n, sb_r, blocks, starts,
                stops, DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
                STAGES: tl.constexpr):  # fmt: skip
    """Process a run of `quota` tiles. B's rows are scaled by c if p_c is given.

    Store v of each block of columns `[blocks, m, R]` unless p_v is None, and for each block of the run gᵀ·u
    `[program + block, BN, R]` and, with z, the sums of g∘z `[program + block, BN]`.
    """
    program, tiles = tl.program_id(0), tl.cdiv(m, BM)
    begin = program * quota
    end = tl.minimum(begin + quota, tiles * blocks)
    i_r = tl.arange(0, R)  # [R]
    m_r = (i_r < rank)[None, :]
    for block in range(begin // tiles, tl.cdiv(end, tiles)):
        i_range, start, stop, n = range_of(block, starts, stops, BN)
        i_n = n + tl.arange(0, BN)  # [BN]
        m_n = i_n < stop  # [BN]
        if p_v is not None:
            p_b = picked(i_range, p_b0, p_b1, p_b2) + ((i_n - start).to(tl.int64) * sb_n)[:, None]
            b_b = tl.load(p_b + (i_r * sb_r)[None, :], mask=m_n[:, None] & m_r, other=0)  # [BN, R]
            if p_c is not None:
                c = converted(tl.load(p_c + i_n, mask=m_n, other=0), tl.float32)  # [BN]
                b_b = converted(converted(b_b, tl.float32) * c[:, None], p_b0.dtype.element_ty)  # [BN, R]
            b_b = converted(b_b, DOT)  # [BN, R]
        # Go down the rows of the block.
        p_columns = p_u + i_range * rank + i_r[None, :]
        b_acc, b_sum = tl.zeros((BN, R), tl.float32), tl.zeros((BN,), tl.float32)  # [BN, R], [BN]
        first, last = tl.maximum(begin - block * tiles, 0), tl.minimum(end - block * tiles, tiles)
        for tile in tl.range(first, last, num_stages=STAGES):
            i_m = tl.arange(0, BM).to(tl.int64) + tile * BM  # [BM]
            m_m = (i_m < m)[:, None]
            b_g = converted(d_g.load([tile * BM, n]), DOT)  # [BM, BN]
            b_u = converted(tl.load(p_columns + (i_m * su)[:, None], mask=m_m & m_r, other=0), DOT)  # [BM, R]
            b_acc = tl.dot(b_g.T, b_u, b_acc)  # [BN, R]
            if p_v is not None:
                b_v = tl.dot(b_g, b_b)  # [BM, R]
                tl.store(p_v + ((block * m + i_m) * R)[:, None] + i_r[None, :], b_v, mask=m_m)
            if d_z is not None:
                b_z = d_z.load([tile * BM, n])  # [BM, BN]
                b_sum += tl.sum(converted(b_g, tl.float32) * converted(b_z, tl.float32), 0)  # [BN]
        # Store the block's partial sums.
        o_n = (program + block).to(tl.int64) * BN + tl.arange(0, BN)  # [BN]
        tl.store(p_d + (o_n * R)[:, None] + i_r[None, :], b_acc)
        if d_z is not None:
            tl.store(p_s + o_n, b_sum)


@triton.jit
def reduce_v(p_v, p_vs, program, m, rank, scale, sv, starts, stops, BN: tl.constexpr, R: tl.constexpr,
             ROWS: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    """Store v of ROWS rows and one range, summed over the range's blocks."""
    row_blocks = tl.cdiv(m, ROWS)
    i_range = program // row_blocks
    first, last = i_range * 0, i_range * 0
    for j in tl.static_range(len(starts)):
        first = tl.where(j <= i_range, last, first)
        last += tl.where(j <= i_range, tl.cdiv(stops[j] - starts[j], BN), 0)
    i = tl.arange(0, ROWS * R)  # [ROWS · R], so that each thread adds up its own elements
    i_m, i_r = (program % row_blocks).to(tl.int64) * ROWS + i // R, i % R
    b_v = tl.zeros((ROWS * R,), tl.float32)  # [ROWS · R]
    for chunk in range(first, last, MANY):
        i_block = chunk + tl.arange(0, MANY)[:, None]  # [MANY, 1]
        o = (i_block * m + i_m[None, :]) * R + i_r[None, :]  # [MANY, ROWS · R]
        b_v += tl.sum(tl.load(p_vs + o, mask=(i_block < last) & (i_m < m)[None, :], other=0), 0)
    p_o = p_v + i_m * sv + i_range * rank + i_r
    tl.store(p_o, converted(b_v * scale, p_v.dtype.element_ty), mask=(i_m < m) & (i_r < rank))


@triton.jit
def reduce_d(p_d0, p_d1, p_d2, p_s, p_ds, p_ss, p_c, program, m, rank, quota, sd_n, sd_r, starts, stops,
             DIVIDES: tl.constexpr, ADDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, R: tl.constexpr,
             ROWS: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    """Store gᵀ·u and the sums of ROWS columns of g, summed over the programs that processed their block."""
    tiles, block = tl.cdiv(m, BM), program // (BN // ROWS)
    i_range, start, stop, n = range_of(block, starts, stops, BN)
    o_n = program % (BN // ROWS) * ROWS  # offset in the block
    i = tl.arange(0, ROWS * R)
    i_n, i_r = n + o_n + i // R, i % R  # [ROWS · R] each
    first, last = block * tiles // quota, ((block + 1) * tiles - 1) // quota  # programs that processed the block
    # Add the programs' partial sums, MANY at a time.
    b_d, b_sum = tl.zeros((ROWS * R,), tl.float32), tl.zeros((ROWS,), tl.float32)  # [ROWS · R], [ROWS]
    for chunk in range(first, last + 1, MANY):
        i_program = chunk + tl.arange(0, MANY)[:, None]  # [MANY, 1]
        o = (i_program + block).to(tl.int64) * BN + o_n  # [MANY, 1]
        b_d += tl.sum(tl.load(p_ds + o * R + i[None, :], mask=i_program <= last, other=0), 0)
        if p_s is not None:
            b_sum += tl.sum(tl.load(p_ss + o + tl.arange(0, ROWS)[None, :], mask=i_program <= last, other=0), 0)
    # Scale by c, and store d and the sums of g∘z.
    m_n = i_n < stop  # [ROWS · R]
    if p_c is not None:
        b_d *= converted(tl.load(p_c + i_n, mask=m_n, other=0), tl.float32)
    p_o = picked(i_range, p_d0, p_d1, p_d2) + (i_n - start).to(tl.int64) * sd_n + i_r * sd_r
    m_o = m_n & (i_r < rank)
    if ADDS:
        b_d += converted(tl.load(p_o, mask=m_o, other=0), tl.float32)
    tl.store(p_o, converted(b_d, p_d0.dtype.element_ty), mask=m_o)
    if p_s is not None:
        i_n = n + o_n + tl.arange(0, ROWS)
        if DIVIDES:
            b_sum = maths.divide(b_sum, converted(tl.load(p_c + i_n, mask=i_n < stop, other=1), tl.float32))
        tl.store(p_s + i_n, b_sum, mask=i_n < stop)


@triton.jit(do_not_specialize=["m", "quota"])
def thin_reduce_kernel(p_v, p_d0, p_d1, p_d2, p_s, p_vs, p_ds, p_ss, p_c, m, rank, quota, scale, sv, sd_n, sd_r,
                       starts, stops, DIVIDES: tl.constexpr, ADDS: tl.constexpr, BM: tl.constexpr,
                       BN: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    """Reduce the partial sums of `thin_kernel`: v in the first programs, the other results in the rest."""
    program, v_programs = tl.program_id(0), 0
    if p_vs is not None:
        v_programs = len(starts) * tl.cdiv(m, ROWS)
    if program >= v_programs:
        reduce_d(p_d0, p_d1, p_d2, p_s, p_ds, p_ss, p_c, program - v_programs, m, rank, quota, sd_n, sd_r, starts,
                 stops, DIVIDES, ADDS, BM, BN, R, ROWS, MANY)  # fmt: skip
    elif p_vs is not None:
        reduce_v(p_v, p_vs, program, m, rank, scale, sv, starts, stops, BN, R, ROWS, MANY)


def tile_for(columns: int, rank: int, has_v: bool, has_z: bool) -> ThinTile:
    """Return the tile, as measured with rank 16 (benchmarks/gpu/low_rank.py).

    Each SM needs some 30 KB in flight to saturate memory. Wider tiles store fewer partial sums of v, but more of gᵀ·u.
    """
    if columns < WIDE or not has_v:
        return ThinTile(64, 128, 4, 4, 2 if not has_v and rank <= 32 else 1)
    if has_z:  # a stage holds two tiles
        return ThinTile(128, 128, 4, 3, 2)
    return ThinTile(64, 512, 8, 3 if rank <= 16 else 2)


def thin_products_into(
    v: Array | None, d: Sequence[Array], g: Array, b: Sequence[Array], u: Array, ranges: Sequence[tuple[int, int]], *,
    scale: float = 1.0, accumulate: bool = False, z: Array | None = None, factors: Array | None = None,
    sums: Array | None = None, divides: bool = False, tile: ThinTile | None = None,
) -> bool:  # fmt: skip
    """Write v = scale·g·(c∘B) and d = c∘(gᵀ·u) for each range of g's columns, which has its own columns of v and u.

    Args:
        v: `[m, ranges · rank]`, rows contiguous, or None to skip it.
        d: one array `[columns, rank]` per range; strides are arbitrary but all the same.
        g: `[m, n]`, of a 2-byte type, rows contiguous.
        b: one array like d per range; empty without v.
        u: array like v.
        ranges: (start, stop) of each range, in ascending order.
        accumulate: add to the previous values of d.
        z: array like g. With it, `sums` are the sums over all rows of g∘z.
        factors: c `[n]`, contiguous, of any float type.
        sums: `[n]` in float32, not written outside the ranges.
        divides: divide the sums by c.

    Returns:
        False, without launching, if the device has no TMA or too little shared memory, TMA cannot address the operands,
        g has few rows, or the ranges are too many, differ in rank, or do not start at multiples of 16 bytes.
    """
    # Reject operands that the kernels do not support.
    (m, _), rank, properties = g.shape, d[0].shape[1], backend_of(g.device).driver.properties
    if properties.capability < (9, 0) or g.dtype.itemsize != 2 or not 0 < rank <= LARGEST_RANK or not g.size:
        return False
    if any(start * g.dtype.itemsize % 16 for start, _ in ranges):
        return False
    if len(ranges) > RANGES or len({x.strides for x in d}) > 1 or len({x.strides for x in b}) > 1:
        return False
    if any(x.shape != (stop - start, rank) for x, (start, stop) in zip(d, ranges, strict=True)):
        return False
    wide = [x for x in (g, z) if x is not None]  # arrays that are read by TMA
    if tile is None and (m < MIN_ROWS or properties.shared_memory < SHARED):
        return False
    if not all(is_describable(x, x.shape, x.strides) for x in wide):
        return False
    assert u.strides[1] == 1 and (v is None or v.strides[1] == 1)
    t, width = tile or tile_for(g.shape[1], rank, v is not None, z is not None), max(16, triton.next_power_of_2(rank))
    tiles, blocks = triton.cdiv(m, t.bm), sum(triton.cdiv(stop - start, t.bn) for start, stop in ranges)
    if not blocks:
        return False
    # Divide the tiles into one run per program, and allocate the partial sums.
    quota = triton.cdiv(tiles * blocks, properties.sm_count * t.ctas_per_sm)
    programs = triton.cdiv(tiles * blocks, quota)
    of_v = None if v is None else empty((blocks, m, width), float32, g.device)
    of_d = empty((programs + blocks, t.bn, width), float32, g.device)
    of_sums = None if sums is None else empty((programs + blocks, t.bn), float32, g.device)
    starts, stops = (tuple(x) for x in zip(*ranges, strict=True))
    dot = TRITON[(float32 if is_interpreted() and g.dtype is bfloat16 else g.dtype).name]
    descriptors = [None if x is None else Descriptor(x, x.shape, x.strides, (t.bm, t.bn)) for x in (g, z)]
    launch(
        thin_kernel, programs, *descriptors, of_v, of_d, of_sums, *_padded(b), u, factors, m, rank, quota,
        u.strides[0], *(b[0].strides if b else (0, 0)), blocks, starts, stops, DOT=dot, BM=t.bm, BN=t.bn, R=width,
        STAGES=t.stages, num_warps=t.warps,
    )  # fmt: skip
    rows = min(t.bn, 512 // width)
    v_programs = 0 if v is None else len(ranges) * triton.cdiv(m, rows)
    launch(
        thin_reduce_kernel, v_programs + blocks * (t.bn // rows), v, *_padded(d), sums, of_v, of_d, of_sums, factors,
        m, rank, quota, float(scale), 0 if v is None else v.strides[0], *d[0].strides, starts, stops,
        DIVIDES=divides, ADDS=accumulate, BM=t.bm, BN=t.bn, R=width, ROWS=rows, MANY=MANY, num_warps=4,
    )  # fmt: skip
    return True


def _padded(arrays: Sequence[Array]) -> list[Array | None]:
    """Pad the arrays to RANGES, as the kernels take them."""
    return [*arrays, *[arrays[0] if arrays else None] * (RANGES - len(arrays))]
