"""tf32 products on Hopper whose second factor has k as its outer dimension: x·y with y `[k, n]` as it lies.

The tensor cores take 4-byte operands from shared memory only where k is the inner dimension, but the first one from
registers as well. So the transposed product yᵀ·xᵀ is summed: a tile of y is read across into registers while the tile
before it is multiplied, where `linalg.py` turns all of y over in memory first. The kernel is written in Gluon, like
`specialized.py`, and like there what is right of it is checked on a GPU.

Letters: the product is [m, k] x [k, n]; BM, BN, BK are the tile's sizes.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from genesis.array import Array
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.driver import Properties, is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.kernels.gemm.warp_specialized import load, place

__all__ = ["crosswise_into"]

TILE = 256, 128, 32  # BM, BN, BK; measured on an H200, as all here
STAGES = 4
GROUP = 8  # rows of tiles walked together
WARPS = 8
ROUNDS = 8  # of all SMs: with more tiles than that the copy in memory costs less than reading across
FULL = 0.9  # share of the SMs that are busy in the mean


@gluon.jit
def fetch(d_x, d_y, s_x, s_y, full, slot, i_m, i_n, i_k, wanted, BM: gl.constexpr, BN: gl.constexpr,
          BK: gl.constexpr):  # fmt: skip
    """Begin to load step i_k of the tile, if it is wanted."""
    arrived = full.index(slot)
    mbarrier.expect(arrived, (BM + BN) * BK * 4, pred=wanted)
    load(d_x, [i_m * BM, i_k * BK], arrived, s_x.index(slot), pred=wanted)
    load(d_y, [i_k * BK, i_n * BN], arrived, s_y.index(slot), pred=wanted)


@gluon.jit
def crosswise(d_x, d_y, p_o, m, n, k, step_o, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
              STAGES: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """One tile of x·y, whose rows are step_o elements apart.

    The tensor cores come to rest once in 2·STAGES steps: a loop whose sums are under way at its border is serialized by
    the assembler.
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 8])
    ACROSS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 1)
    TURN: gl.constexpr = 2 * STAGES
    s_x = gl.allocate_shared_memory(d_x.dtype, [STAGES, BM, BK], d_x.layout)
    s_y = gl.allocate_shared_memory(d_y.dtype, [STAGES, BK, BN], d_y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    i_m, i_n = place(gl.program_id(0), gl.cdiv(m, BM), gl.cdiv(n, BN), GROUP)
    steps = gl.cdiv(k, BK * TURN) * TURN  # what they go beyond k is loaded as zeros
    for i in gl.static_range(STAGES - 1):
        fetch(d_x, d_y, s_x, s_y, full, i, i_m, i_n, i, True, BM, BN, BK)
    acc = gl.zeros((BN, BM), gl.float32, SUMS)
    for first in range(0, steps, TURN):
        for i in gl.static_range(TURN):
            mbarrier.wait(full.index(i % STAGES), i // STAGES)
            b_y = s_y.index(i % STAGES).permute((1, 0)).load(ACROSS)
            acc = warpgroup_mma(b_y, s_x.index(i % STAGES).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0 if i == TURN - 1 else 1, deps=(acc,))
            ahead = first + i + STAGES - 1  # into the slot of the step before, which is done
            fetch(d_x, d_y, s_x, s_y, full, (i + STAGES - 1) % STAGES, i_m, i_n, ahead, ahead < steps, BM, BN, BK)
    o_n = i_n * BN + gl.arange(0, BN, gl.SliceLayout(1, SUMS))
    o_m = i_m * BM + gl.arange(0, BM, gl.SliceLayout(0, SUMS))
    gl.store(p_o + o_m[None, :] * step_o + o_n[:, None], acc, mask=(o_n < n)[:, None] & (o_m < m)[None, :])


def crosswise_into(out: Array, x: Array, y: Array) -> bool:
    """out = x·y, the factors rounded to tf32.

    Args:
        out, x, y: float32 `[m, n]`, `[m, k]` and `[k, n]`, the last dimension without gaps.

    Returns:
        False where this is not the faster way, or TMA cannot address the factors; nothing is done then.
    """
    (m, k), n, (bm, bn, bk) = x.shape, y.shape[1], TILE
    tiles = triton.cdiv(m, bm) * triton.cdiv(n, bn)
    if is_interpreted() or not _is_faster(tiles, k, backend_of(out.device).driver.properties):
        return False
    if m * out.strides[0] >= 1 << 31 or not all(is_describable(a, a.shape, a.strides) for a in (x, y)):
        return False
    launch(
        crosswise, tiles, _region(x, bm, bk), _region(y, bk, bn), out, m, n, k, out.strides[0], BM=bm, BN=bn, BK=bk,
        STAGES=STAGES, GROUP=GROUP, WARPS=WARPS, num_warps=WARPS,
    )  # fmt: skip
    return True


def _is_faster(tiles: int, k: int, properties: Properties) -> bool:
    """Few rounds that fill the SMs of a Hopper, and sums that are long beside what they go beyond k."""
    rounds = triton.cdiv(tiles, properties.sm_count)
    return (
        properties.capability[0] == 9
        and rounds <= ROUNDS
        and tiles >= FULL * rounds * properties.sm_count
        and k >= FULL * triton.cdiv(k, 2 * STAGES * TILE[2]) * 2 * STAGES * TILE[2]
    )


def _region(a: Array, rows: int, columns: int) -> Descriptor:
    """Tiles of a matrix, rounded to tf32 on their way, with their layout in shared memory."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float32)
    return Descriptor(a, a.shape, a.strides, (rows, columns), tf32=True, layout=repr(layout))
