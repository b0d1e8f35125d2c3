"""tf32 GEMMs on Hopper with an MN-major operand B, x·y with y `[k, n]`, by wgmma with a register operand (RS).

Plain reference: genesis/ops/linalg.py: `matmul`.

wgmma reads 4-byte operands from shared memory only if they are K-major, but its first operand may be in registers. The
kernel therefore computes the transposed GEMM yᵀ·xᵀ. It reads a tile of y transposed into registers while it multiplies
the previous tile, whereas `linalg.py` would first copy all of y. Like warp_specialized.py, it is written in Gluon, so
its results are checked on a GPU.

The GEMM is [m, k] x [k, n]; tiles are BM x BN, in steps of BK.
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
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import is_describable
from genesis.kernels.gemm.gemm import grouped_tile
from genesis.kernels.gemm.warp_specialized import tma_load, tma_tiles

# Measured on an H200.
TILE = 256, 128, 32  # BM, BN, BK
STAGES = 4
WARPS = 8
MAX_ROUNDS = 8  # the most rounds over all SMs; with more tiles, copying y is cheaper than reading it transposed
MIN_UTILIZATION = 0.9  # least share of SMs that are busy over all rounds, and of steps that are within k


@gluon.jit
def issue_loads(d_x, d_y, s_x, s_y, full, stage, i_m, i_n, i_k, pred, BM: gl.constexpr, BN: gl.constexpr,
                BK: gl.constexpr):  # fmt: skip
    """Issue the loads of step i_k of the tile if `pred` is set."""
    loaded = full.index(stage)
    mbarrier.expect(loaded, (BM + BN) * BK * 4, pred=pred)
    tma_load(d_x, [i_m * BM, i_k * BK], loaded, s_x.index(stage), pred=pred)  # [BM, BK]
    tma_load(d_y, [i_k * BK, i_n * BN], loaded, s_y.index(stage), pred=pred)  # [BK, BN]


@gluon.jit
def gemm_tf32_rs(d_x, d_y, p_o, m, n, k, row_stride, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
                 STAGES: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Compute one tile of out = x·y. Rows of out are `row_stride` elements apart.

    The kernel waits for all wgmmas once every 2·STAGES steps, because the assembler serializes the wgmmas of a loop
    that has any in flight at its back edge.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 8])
    OPERAND_A: gl.constexpr = gl.DotOperandLayout(0, ACC, 1)
    UNROLL: gl.constexpr = 2 * STAGES
    s_x = gl.allocate_shared_memory(d_x.dtype, [STAGES, BM, BK], d_x.layout)
    s_y = gl.allocate_shared_memory(d_y.dtype, [STAGES, BK, BN], d_y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    i_m, i_n = grouped_tile(gl.program_id(0), gl.cdiv(m, BM), gl.cdiv(n, BN), "one")[1:]
    steps = gl.cdiv(k, BK * UNROLL) * UNROLL  # loads beyond k return zeros
    for i in gl.static_range(STAGES - 1):
        issue_loads(d_x, d_y, s_x, s_y, full, i, i_m, i_n, i, True, BM, BN, BK)
    acc = gl.zeros((BN, BM), gl.float32, ACC)  # [BN, BM]
    for first in range(0, steps, UNROLL):
        for i in gl.static_range(UNROLL):
            mbarrier.wait(full.index(i % STAGES), i // STAGES)
            b_y = s_y.index(i % STAGES).permute((1, 0)).load(OPERAND_A)  # [BN, BK]
            acc = warpgroup_mma(b_y, s_x.index(i % STAGES).permute((1, 0)), acc, is_async=True)  # [BN, BM]
            acc = warpgroup_mma_wait(0 if i == UNROLL - 1 else 1, deps=(acc,))
            ahead = first + i + STAGES - 1  # is loaded into the stage of the previous step, which is done
            issue_loads(d_x, d_y, s_x, s_y, full, (i + STAGES - 1) % STAGES, i_m, i_n, ahead, ahead < steps, BM, BN, BK)
    o_n = i_n * BN + gl.arange(0, BN, gl.SliceLayout(1, ACC))  # [BN]
    o_m = i_m * BM + gl.arange(0, BM, gl.SliceLayout(0, ACC))  # [BM]
    gl.store(p_o + o_m[None, :] * row_stride + o_n[:, None], acc, mask=(o_n < n)[:, None] & (o_m < m)[None, :])


def gemm_tf32_rs_into(out: Array, x: Array, y: Array) -> bool:
    """Write out = x·y for float32 with contiguous rows, in tf32. Return False, without launching, if it is slower: it
    is faster on Hopper, with few rounds that fill the SMs, few steps beyond k, and rows aligned to 128 bytes.
    """
    (m, k), n, (bm, bn, bk), properties = x.shape, y.shape[1], TILE, backend_of(out.device).driver.properties
    tiles, steps = triton.cdiv(m, bm) * triton.cdiv(n, bn), triton.cdiv(k, 2 * STAGES * bk) * 2 * STAGES
    rounds = triton.cdiv(tiles, properties.sm_count)
    is_full = tiles >= MIN_UTILIZATION * rounds * properties.sm_count and k >= MIN_UTILIZATION * steps * bk
    is_full = is_full and x.strides[0] % 32 == y.strides[0] % 32 == 0
    if is_interpreted() or properties.capability[0] != 9 or rounds > MAX_ROUNDS or not is_full:
        return False
    if m * out.strides[0] >= 1 << 31 or not all(is_describable(a, a.shape, a.strides) for a in (x, y)):
        return False
    launch(
        gemm_tf32_rs, tiles, tma_tiles(x, bm, bk, True), tma_tiles(y, bk, bn, True), out, m, n, k, out.strides[0],
        BM=bm, BN=bn, BK=bk, STAGES=STAGES, WARPS=WARPS, num_warps=WARPS,
    )  # fmt: skip
    return True
