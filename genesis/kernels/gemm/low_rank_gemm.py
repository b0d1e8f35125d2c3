"""x·y + u·w in one GEMM: a product with low-rank pairs on its columns, where u·w is one step more along k of a tile.

Plain reference: genesis/ops/low_rank.py: `matmul_sum` and the pairs of the linear ops.

It is meant to save the 13 to 36 us that storing u·w and reading it in the epilogue take at each of a layer's products.
The kernel is `gemm_tma`'s for one matrix of a 2-byte type, with an epilogue for DoRA: z, and y = c∘z + bias + residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.dtypes import bfloat16, float32
from genesis.kernels.gemm.gemm import grouped_tile
from genesis.kernels.gemm.tiles import GemmTile, choose, epilogue_slices, fitted, persistent_schedule
from genesis.kernels.types import TRITON, converted

__all__ = ["low_rank_gemm_into"]

LARGEST_RANK = 64  # of u's columns that a tile takes
SEVERAL = 48  # up to which they are read 16 at a time
MIN_ROWS = 1024
USED = False  # for now by tests alone: it has neither run on a GPU nor been measured


@triton.jit
def store_tile(b_z, d_o, d_z, d_r, p_c, p_bias, o_m, o_n, n, TYPE: tl.constexpr, BN: tl.constexpr):
    """z, and c∘z + bias + residual, of a tile [BM, BN] at (o_m, o_n)."""
    i_n = o_n + tl.arange(0, BN)
    if d_z is not None:
        d_z.store([o_m, o_n], converted(b_z, TYPE))
    if p_c is not None:
        b_z *= converted(tl.load(p_c + i_n, mask=i_n < n, other=0), tl.float32)[None, :]
    if p_bias is not None:
        b_z += converted(tl.load(p_bias + i_n, mask=i_n < n, other=0), tl.float32)[None, :]
    if d_r is not None:
        b_z += converted(d_r.load([o_m, o_n]), tl.float32)
    d_o.store([o_m, o_n], converted(b_z, TYPE))


@triton.jit
def store_slices(b_z, d_o, d_z, d_r, p_c, p_bias, o_m, o_n, n, TYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                 SLICES: tl.constexpr):  # fmt: skip
    """`store_tile` in SLICES slices of columns, one after the other."""
    if SLICES == 1:
        store_tile(b_z, d_o, d_z, d_r, p_c, p_bias, o_m, o_n, n, TYPE, BN)
    else:
        HALF: tl.constexpr = BN // 2
        b_left, b_right = tl.split(tl.permute(tl.reshape(b_z, (BM, 2, HALF)), (0, 2, 1)))  # [BM, HALF] each
        store_slices(b_left, d_o, d_z, d_r, p_c, p_bias, o_m, o_n, n, TYPE, BM, HALF, SLICES // 2)
        store_slices(b_right, d_o, d_z, d_r, p_c, p_bias, o_m, o_n + HALF, n, TYPE, BM, HALF, SLICES // 2)


@triton.jit(do_not_specialize=["m", "n", "k", "rank"])
def low_rank_gemm(d_x, d_y, d_u, d_w, d_o, d_z, d_r, p_c, p_bias, m, n, k, rank, starts, TRANSPOSED: tl.constexpr,
                  TYPE: tl.constexpr, DOT: tl.constexpr, TILE: tl.constexpr, R: tl.constexpr, BOXES: tl.constexpr,
                  GROUP: tl.constexpr, SLICES: tl.constexpr):  # fmt: skip
    """Tiles of x·y + u·w, in persistent programs. The columns from `starts[i]` on have the i-th `rank` columns of u,
    which are read in BOXES of R columns; what these hold beyond them meets rows of w that are 0.

    Args:
        TRANSPOSED: y and w are K-major, `[n, k]` and `[n, rank]`.
        TILE: (BM, BN, BK).
    """
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    BK: tl.constexpr = TILE[2]
    start, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, BK)
    # The store counts tiles itself: one counter for both would tie the loads of the next tile to this one's store.
    i_stored = start - programs
    for i_tile in tl.range(start, tiles_m * tiles_n, programs, flatten=True):
        _, i_m, i_n = grouped_tile(i_tile, tiles_m, tiles_n, GROUP, "one")
        b_acc = tl.zeros((BM, BN), tl.float32)  # [BM, BN]
        for i_k in range(steps):
            b_x = converted(d_x.load([i_m * BM, i_k * BK]), DOT)  # [BM, BK]
            if TRANSPOSED:
                b_y = d_y.load([i_n * BN, i_k * BK]).T  # [BK, BN]
            else:
                b_y = d_y.load([i_k * BK, i_n * BN])
            b_acc = tl.dot(b_x, converted(b_y, DOT), b_acc)
        i_stored += programs
        _, i_m, i_n = grouped_tile(i_stored, tiles_m, tiles_n, GROUP, "one")
        o_m, o_n, o_u = i_m * BM, i_n * BN, i_n * 0
        for i in tl.static_range(1, len(starts)):
            o_u = tl.where(o_n >= starts[i], i * rank, o_u)
        for i in tl.static_range(BOXES):
            b_u = converted(d_u.load([o_m, o_u + i * R]), DOT)  # [BM, R]
            b_w = d_w.load([o_n, i * R]).T if TRANSPOSED else d_w.load([i * R, o_n])  # [R, BN]
            b_acc = tl.dot(b_u, converted(b_w, DOT), b_acc)
        store_slices(b_acc, d_o, d_z, d_r, p_c, p_bias, o_m, o_n, n, TYPE, BM, BN, SLICES)


def low_rank_gemm_into(
    out: Array, x: Array, y: Array, u: Array, w: Array, starts: Sequence[int] = (0,), *, transpose_b: bool = False,
    z: Array | None = None, factors: Array | None = None, bias: Array | None = None, residual: Array | None = None,
    tile: GemmTile | None = None,
) -> bool:  # fmt: skip
    """out = c∘z + bias + residual with z = x·y + u·w, u having its own columns for each range of z's columns.

    Args:
        out: `[m, n]`, of x's 2-byte type, rows contiguous; z and residual are like it.
        x, y: `[m, k]` and `[k, n]`, or with `transpose_b` `[n, k]`; rows contiguous.
        u: `[m, ranges · rank]`, rows contiguous.
        w: `[rank, n]`, or with `transpose_b` `[n, rank]`; rows contiguous.
        starts: of the ranges; the first is 0.
        factors, bias: c and bias `[n]`, contiguous.
        tile: instead of the table's choice, for tests and benchmarks.

    Returns:
        False, with nothing done, where the device is no Hopper or cannot address the operands, there are few rows, the
        rank is too large, tiles have several ranges, or would be split along k.
    """
    (m, k), n, rank = x.shape, out.shape[1], w.shape[1 if transpose_b else 0]
    properties = backend_of(x.device).driver.properties
    # Of the next architecture Triton 3.6 to 3.9 compile no second dot in such a loop.
    if properties.capability[0] != 9 or x.dtype.itemsize != 2 or not 0 < rank <= LARGEST_RANK or not out.size or not k:
        return False
    if tile is None and (m < MIN_ROWS or not USED):
        return False
    t = tile or _tile(m, n, k, rank, starts, transpose_b, properties.shared_memory)
    width = _box(t, rank)
    tiles, programs = triton.cdiv(m, t.bm) * triton.cdiv(n, t.bn), properties.sm_count * t.ctas_per_sm
    if any(start % t.bn for start in starts):
        return False
    if tile is None and persistent_schedule(tiles, triton.cdiv(k, t.bk), programs, t.split).split > 1:
        return False
    slices = epilogue_slices(t, 2, True)
    stored = t.bm, t.bn // slices
    boxes = [(x, (t.bm, t.bk)), (y, (t.bn, t.bk) if transpose_b else (t.bk, t.bn)), (u, (t.bm, width))]
    boxes += [(w, (t.bn, width) if transpose_b else (width, t.bn)), (out, stored), (z, stored), (residual, stored)]
    if not all(a is None or (a.dtype is x.dtype and is_describable(a, a.shape, a.strides)) for a, _ in boxes):
        return False
    if n * 2 % 16:  # TMA wrote past the end of such rows
        return False
    dot = TRITON[(float32 if is_interpreted() and x.dtype is bfloat16 else x.dtype).name]
    descriptors: list[Any] = [None if a is None else Descriptor(a, a.shape, a.strides, box) for a, box in boxes]
    launch(
        low_rank_gemm, min(tiles, programs), *descriptors, factors, bias, m, n, k, rank, tuple(starts),
        TRANSPOSED=transpose_b, TYPE=TRITON[x.dtype.name], DOT=dot, TILE=(t.bm, t.bn, t.bk), R=width,
        BOXES=triton.cdiv(rank, width), GROUP=t.group, SLICES=slices, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return True


def _tile(m: int, n: int, k: int, rank: int, starts: Sequence[int], transpose_b: bool, shared: int) -> GemmTile:
    """The tile of a GEMM that reads as much as it stores, with room for u and w, no wider than the ranges' grain."""
    t = choose("half", "nt" if transpose_b else "nn", m, n, k, 2, shared, True)._replace(swapped=False)
    if any(start % t.bn for start in starts) and t.bn > 128:
        t = t._replace(bn=128, warps=4)
    read = t.bm * t.bn * 2 // epilogue_slices(t, 2, True)  # in whose place u and w are before it
    return fitted(t, 2, shared - max((t.bm + t.bn) * _box(t, rank) * 2 - read, 0) * t.ctas_per_sm, True)


def _box(tile: GemmTile, rank: int) -> int:
    """Columns of u and rows of w that are read at a time: few where that leaves an SM room for two programs."""
    return 16 if tile.ctas_per_sm > 1 and rank <= SEVERAL else max(16, triton.next_power_of_2(rank))
