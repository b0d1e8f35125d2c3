"""Warp-specialized forward kernel of attention on Hopper: heads of 65 to 256 without documents or a window.

Plain reference: genesis/ops/attention.py: `attention`. `attention_fwd` in flash.py handles all other cases.

Four producer warps load by TMA. Two groups of four consumer warps compute 64 queries each. Mbarriers in shared memory
synchronize producer and consumers. A consumer issues q·kᵀ of the next block of keys and p·v of this one, and computes
weights meanwhile. The two groups are out of step, so the tensor cores have work while exponentials are computed.

The kernel is persistent, with one program per SM. The last queries, which see the most keys, run first, and every other
round of tiles is assigned in reverse order, so that all programs finish together. With documents or a window the work
per tile is not known in advance. `attention_fwd`, whose programs start wherever an SM is free, is then faster.

The kernel is written in Gluon, Triton's lower-level dialect without an interpreter; its results are checked on a GPU.

Tiles: BM queries (ROWS = BM / 2 per consumer), BN keys, BD columns (padded head dimension).
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
from genesis.kernels.attention.common import LN2
from genesis.kernels.attention.problem import Problem
from genesis.kernels.gemm.warp_specialized import reinterpret, tma_load

# --- Scheduling -------------------------------------------------------------------------------------------------------


@gluon.jit
def column_in_round(i_round):
    """Return the index of this program's tile in a round of one tile per program. Rounds alternate in direction."""
    return gl.where(i_round % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))


@gluon.jit
def tile_count(tiles):
    """Return how many tiles this program computes: one per full round, and perhaps one of the last round."""
    rounds = tiles // gl.num_programs(0)
    return rounds + gl.where(column_in_round(rounds) < tiles - rounds * gl.num_programs(0), 1, 0)


@gluon.jit
def persistent_tile(i_round, blocks, heads):
    """Return (block, head) of this program's tile in a round. The last blocks of all heads come first."""
    i = column_in_round(i_round) + i_round * gl.num_programs(0)
    return blocks - 1 - i // heads, i % heads


@gluon.jit
def visible_key_blocks(i_block, tokens, keys, CAUSAL: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Return how many blocks of keys the queries of a tile see, at least one."""
    end = gl.minimum(gl.minimum(i_block * BM + BM, tokens) + keys - tokens, keys) if CAUSAL else keys
    return gl.maximum(gl.cdiv(end, BN), 1)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the next stage and the phase of its barriers."""
    stage += 1
    if stage == STAGES:
        stage, phase = 0, phase ^ 1
    return stage, phase


# --- The producer warps -----------------------------------------------------------------------------------------------


@gluon.jit
def producer(descriptors, smem, barriers, sizes, CAUSAL: gl.constexpr, TILE: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """Load each tile's queries, then its keys and values block by block, as stages become empty."""
    d_q, d_k, d_v = descriptors
    s_q, s_k, s_v = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    tokens, keys, heads, group, all_heads, blocks = sizes
    BM: gl.constexpr = TILE[0]
    BN: gl.constexpr = TILE[1]
    BD: gl.constexpr = TILE[2]
    stage, phase, q_phase = 0, 1, 1
    for i in range(0, tile_count(blocks * all_heads)):
        i_block, i_batch_head = persistent_tile(i, blocks, all_heads)
        i_batch, i_head = i_batch_head // heads, i_batch_head % heads
        # Queries, half a tile per consumer.
        mbarrier.wait(q_empty, q_phase)
        mbarrier.expect(q_full, BM * BD * 2)
        for half in gl.static_range(2):
            s_half = reinterpret(s_q.index(half), [1, 1, BM // 2, BD], d_q)  # [1, 1, BM / 2, BD]
            tma_load(d_q, [i_batch, i_head, i_block * BM + half * (BM // 2), 0], q_full, s_half)
        q_phase ^= 1
        # Keys and values.
        for j in range(0, visible_key_blocks(i_block, tokens, keys, CAUSAL, BM, BN)):
            k_loaded, v_loaded = k_full.index(stage), v_full.index(stage)
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_loaded, BN * BD * 2)
            s_block = reinterpret(s_k.index(stage), [1, 1, BN, BD], d_k)  # [1, 1, BN, BD]
            tma_load(d_k, [i_batch, i_head // group, j * BN, 0], k_loaded, s_block)
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_loaded, BN * BD * 2)
            s_block = reinterpret(s_v.index(stage), [1, 1, BN, BD], d_v)  # [1, 1, BN, BD]
            tma_load(d_v, [i_batch, i_head // group, j * BN, 0], v_loaded, s_block)
            stage, phase = next_stage(stage, phase, STAGES)


# --- The consumer warps -----------------------------------------------------------------------------------------------


@gluon.jit
def issue_scores(s_q, s_k, k_full, stage, phase, LAYOUT: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr):
    """Wait for a block of keys, then issue q·kᵀ [ROWS, BN]."""
    mbarrier.wait(k_full.index(stage), phase)
    zero = gl.zeros((ROWS, BN), gl.float32, LAYOUT)  # [ROWS, BN]
    return warpgroup_mma(s_q, s_k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def softmax_weights(b_s, b_max, b_end, start_n, scale_log2, sign, is_partial, LAYOUT: gl.constexpr,
                    BN: gl.constexpr):  # fmt: skip
    """Return (weights [ROWS, BN], new maximum [ROWS], factor for previous sums [ROWS]) of scores b_s [ROWS, BN]."""
    if sign is not None:
        b_s = b_s * sign
    if is_partial:
        o_key = start_n + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))  # [BN]
        b_s = gl.where(o_key[None, :] < b_end[:, None], b_s, -float("inf"))  # [ROWS, BN]
    b_new_max = gl.maximum(b_max, gl.max(b_s, 1) * scale_log2)  # [ROWS]
    b_base = gl.where(b_new_max == -float("inf"), 0.0, b_new_max)  # [ROWS]; keeps weights 0, not NaN, without keys
    return gl.exp2(b_s * scale_log2 - b_base[:, None]), b_new_max, gl.exp2(b_max - b_base)


@gluon.jit
def ordered(x):
    """Return x (at least 0), which is then computed before any later side effect. The assembler keeps side effects in
    order, such as a nanosleep that no thread executes. Otherwise it would wait for the tensor cores first.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p nanosleep.u32 1; mov.f32 $0, $1; }", "=f,f", [x],
        gl.float32, False, 1,
    )  # fmt: skip


@gluon.jit
def consumer(p_o, p_lse, smem, barriers, sizes, head_dim, scales, so, HALF: gl.constexpr, CAUSAL: gl.constexpr,
             TILE: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Compute attention of one half of each tile's queries over the keys visible to the tile."""
    s_q, s_k, s_v = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    tokens, keys, heads, _group, all_heads, blocks = sizes
    scale_log2, sign = scales
    BM: gl.constexpr = TILE[0]
    BN: gl.constexpr = TILE[1]
    BD: gl.constexpr = TILE[2]
    ROWS: gl.constexpr = BM // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])  # layout of scores
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    TYPE: gl.constexpr = s_q.dtype
    stage, phase, q_phase = 0, 0, 0
    s_half = s_q.index(HALF)  # [ROWS, BD]
    for i in range(0, tile_count(blocks * all_heads)):
        i_block, i_batch_head = persistent_tile(i, blocks, all_heads)
        start = i_block * BM + HALF * ROWS
        o_query = start + gl.arange(0, ROWS, gl.SliceLayout(1, S))  # [ROWS]
        # Blocks of keys from `full_end` on are partially visible.
        if CAUSAL:
            b_end = gl.minimum(o_query + keys - tokens + 1, keys)
            full_end = gl.minimum(start + keys - tokens + 1, keys) // BN
        else:
            b_end = o_query * 0 + keys
            full_end = keys // BN
        # The first block of keys starts the sums.
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        b_s = issue_scores(s_half, s_k, k_full, stage, phase, S, ROWS, BN)  # [ROWS, BN]
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        b_max = gl.full((ROWS,), -float("inf"), gl.float32, gl.SliceLayout(1, S))  # [ROWS]
        b_p, b_max, _ = softmax_weights(b_s, b_max, b_end, 0, scale_log2, sign, full_end <= 0, S, BN)
        b_sum = gl.sum(b_p, 1)  # [ROWS]
        b_w = gl.convert_layout(b_p.to(TYPE), WEIGHTS)  # [ROWS, BN]
        acc = gl.zeros((ROWS, BD), gl.float32, ACC)  # [ROWS, BD]
        for j in range(1, visible_key_blocks(i_block, tokens, keys, CAUSAL, BM, BN)):
            # Issue the scores of this block and the weighted values of the previous one, then compute weights.
            stage_v, phase_v = stage, phase
            stage, phase = next_stage(stage, phase, STAGES)
            b_s = issue_scores(s_half, s_k, k_full, stage, phase, S, ROWS, BN)  # [ROWS, BN]
            mbarrier.wait(v_full.index(stage_v), phase_v)
            acc = warpgroup_mma(b_w, s_v.index(stage_v), acc, is_async=True)  # [ROWS, BD]
            b_s = warpgroup_mma_wait(1, deps=(b_s,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            b_p, b_max, b_rescale = softmax_weights(
                b_s, b_max, b_end, j * BN, scale_log2, sign, j >= full_end, S, BN
            )  # fmt: skip
            # `ordered` makes the weights ready before the wait for the weighted values.
            b_sum = ordered(b_sum * b_rescale + gl.sum(b_p, 1))  # [ROWS]
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_empty.index(stage_v), count=1)
            acc = acc * gl.convert_layout(b_rescale, gl.SliceLayout(1, ACC))[:, None]
            b_w = gl.convert_layout(b_p.to(TYPE), WEIGHTS)  # [ROWS, BN]
        # The last block of values.
        mbarrier.arrive(q_empty, count=1)
        mbarrier.wait(v_full.index(stage), phase)
        acc = warpgroup_mma(b_w, s_v.index(stage), acc, is_async=True)  # [ROWS, BD]
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
        # Store o and LSE.
        empty = b_sum == 0  # [ROWS]; a query without visible keys has o = 0 and an LSE of -inf
        b_sum = gl.where(empty, 1.0, b_sum)  # [ROWS]
        b_lse = gl.where(empty, -float("inf"), (b_max + gl.log2(b_sum)) * LN2)  # [ROWS]
        gl.store(p_lse + i_batch_head.to(gl.int64) * tokens + o_query, b_lse, mask=o_query < tokens)
        acc = acc * gl.convert_layout(1.0 / b_sum, gl.SliceLayout(1, ACC))[:, None]
        o_row = start + gl.arange(0, ROWS, gl.SliceLayout(1, ACC))  # [ROWS]
        o_d = gl.arange(0, BD, gl.SliceLayout(0, ACC))  # [BD]
        p_head = p_o + (i_batch_head // heads).to(gl.int64) * so[0] + (i_batch_head % heads).to(gl.int64) * so[2]
        m = (o_row < tokens)[:, None] & (o_d < head_dim)[None, :]  # [ROWS, BD]
        gl.store(p_head + (o_row.to(gl.int64) * so[1])[:, None] + o_d[None, :], acc.to(p_o.dtype.element_ty), mask=m)


# --- The kernel -------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["sizes"])
def attention_fwd_ws(d_q, d_k, d_v, p_o, p_lse, sizes, head_dim, scales, so, CAUSAL: gl.constexpr, TILE: gl.constexpr,
                     STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                     PRODUCER_REGISTERS: gl.constexpr):  # fmt: skip
    """Compute o [B, T, H, D] and lse [B, H, T]; common.py describes the other arguments.

    Args:
        sizes: (tokens, keys, heads, group, heads of all batches, blocks of queries).
        so: strides of o by batch, token and head.
        CONSUMER_REGISTERS: registers per thread of a consumer warp.
        PRODUCER_REGISTERS: registers per thread of a producer warp.
    """
    BM: gl.constexpr = TILE[0]
    BN: gl.constexpr = TILE[1]
    BD: gl.constexpr = TILE[2]
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # Allocate the tiles and their barriers in shared memory.
    s_q = gl.allocate_shared_memory(d_q.dtype, [2, BM // 2, BD], SWIZZLED)
    s_k = gl.allocate_shared_memory(d_k.dtype, [STAGES, BN, BD], SWIZZLED)
    s_v = gl.allocate_shared_memory(d_v.dtype, [STAGES, BN, BD], SWIZZLED)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    # Two consumers read each tile, so that a tile is empty after two arrivals.
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    smem, barriers = (s_q, s_k, s_v), (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize([
        (consumer, (p_o, p_lse, smem, barriers, sizes, head_dim, scales, so, 0, CAUSAL, TILE, STAGES)),
        (consumer, (p_o, p_lse, smem, barriers, sizes, head_dim, scales, so, 1, CAUSAL, TILE, STAGES)),
        (producer, ((d_q, d_k, d_v), smem, barriers, sizes, CAUSAL, TILE, STAGES)),
    ], [4, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# --- Launch -----------------------------------------------------------------------------------------------------------

# By padded head dimension: BN, and programs of `attention_fwd` per SM. 64 is not profitable (docs/log.md).
HEAD_SIZES = {128: (128, 2), 256: (64, 1)}
BM, STAGES = 128, 2  # STAGES: blocks of keys and of values in shared memory
WARPS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 4, 240, 24  # warps per group, registers per thread


def forward_ws_into(o: Array, lse: Array, q: Array, k: Array, v: Array, causal: bool, p: Problem) -> bool:
    """Launch the kernel for problem `p` without documents. Return False, without launching, where it is slower."""
    heads, blocks = p.batches * p.heads, triton.cdiv(p.tokens, BM)
    sm_count = backend_of(q.device).driver.properties.sm_count
    fits = p.uses_tma and p.is_hopper and p.window is None and p.padded in HEAD_SIZES
    if not fits or is_interpreted():
        return False
    block, others = HEAD_SIZES[p.padded]
    if 2 * blocks * heads < sm_count * others:  # all programs of `attention_fwd`, with BM / 2 queries, run at once
        return False
    launch(
        attention_fwd_ws, backend_of(q.device).persistent_programs(), p.tiled(q, BM // 2, True),
        p.tiled(k, block, True), p.tiled(v, block, True), o, lse,
        (p.tokens, p.keys, p.heads, p.group, heads, blocks), p.head_dim, p.scales[:2], o.strides[:3],
        CAUSAL=causal, TILE=(BM, block, p.padded), STAGES=STAGES, CONSUMER_REGISTERS=CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=PRODUCER_REGISTERS, num_warps=WARPS,
    )  # fmt: skip
    return True
