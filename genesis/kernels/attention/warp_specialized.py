"""The forward kernel of attention on Hopper whose warps divide the work: heads of 128, no borders of documents.

Four warps load, by TMA; two groups of four attend 64 queries each, with barriers in shared memory between
them. A group multiplies queries by the next block of keys while it makes the weights of this one, and values by weights
meanwhile; with two groups that are not in step, the tensor cores have work while exponentials are taken. Programs stay,
one an SM, and take tile after tile: the last queries, which see the most keys, go first, and each row of tiles is
taken from the other end than the one before, so that all programs end together. What documents or a window would leave
of that balance is not known beforehand; with them `forward_kernel` is faster, whose programs go wherever there is room.

The kernel is written in Gluon, Triton's lower dialect, which has no interpreter: what is right of it is checked on a
GPU. `forward_kernel` says the same in Triton and stands in for it elsewhere.
"""

from __future__ import annotations

import numpy as np
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
from genesis.backend.cuda.tma import Descriptor
from genesis.kernels.attention.common import LN2
from genesis.kernels.attention.problem import Call, region
from genesis.kernels.attention.tiles import padded
from genesis.kernels.gemm.warp_specialized import load, seen_as

__all__ = ["forward_specialized_into"]


# --- Which tiles, and what their queries see --------------------------------------------------------------------------


@gluon.jit
def position(i_row):
    """Where this program's tile stands in a row of as many tiles as there are programs; rows are walked to and fro."""
    return gl.where(i_row % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))


@gluon.jit
def share(tiles):
    """How many of the tiles are this program's: one of each whole row, and perhaps one of the last."""
    rows = tiles // gl.num_programs(0)
    return rows + gl.where(position(rows) < tiles - rows * gl.num_programs(0), 1, 0)


@gluon.jit
def place(i_row, blocks, heads, together):
    """(block, head) of this program's tile of a row: all blocks of `together` heads go before the next heads."""
    i = position(i_row) + i_row * gl.num_programs(0)
    start = i // (blocks * together) * together
    count = gl.minimum(together, heads - start)
    i -= start * blocks
    return blocks - 1 - i // count, start + i % count


@gluon.jit
def key_blocks(i_block, tokens, keys, CAUSAL: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """How many blocks of keys the queries of a tile see; at least one."""
    end = gl.minimum(gl.minimum(i_block * BM + BM, tokens) + keys - tokens, keys) if CAUSAL else keys
    return gl.maximum(gl.cdiv(end, BN), 1)


# --- The loading warps ------------------------------------------------------------------------------------------------


@gluon.jit
def stepped(slot, phase, STAGES: gl.constexpr):
    """The next slot, and the phase of its barriers."""
    slot += 1
    if slot == STAGES:
        slot, phase = 0, phase ^ 1
    return slot, phase


@gluon.jit
def fetch(d_q, d_k, d_v, s_q, s_k, s_v, q_full, q_free, k_full, k_free, v_full, v_free, tokens, keys, heads, group,
          total, blocks, together, CAUSAL: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, HEAD: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """Load each tile's queries, and then its keys and values, block by block, as slots become free."""
    slot, phase, q_phase = 0, 1, 1
    for i in range(0, share(blocks * total)):
        i_block, i_place = place(i, blocks, total, together)
        i_batch, i_head = i_place // heads, i_place % heads
        mbarrier.wait(q_free, q_phase)
        mbarrier.expect(q_full, BM * HEAD * 2)
        for half in gl.static_range(2):
            b_q = seen_as(s_q.index(half), [1, 1, BM // 2, HEAD], d_q)
            load(d_q, [i_batch, i_head, i_block * BM + half * (BM // 2), 0], q_full, b_q)
        q_phase ^= 1
        for j in range(0, key_blocks(i_block, tokens, keys, CAUSAL, BM, BN)):
            k_here, v_here = k_full.index(slot), v_full.index(slot)
            mbarrier.wait(k_free.index(slot), phase)
            mbarrier.expect(k_here, BN * HEAD * 2)
            b_k = seen_as(s_k.index(slot), [1, 1, BN, HEAD], d_k)
            load(d_k, [i_batch, i_head // group, j * BN, 0], k_here, b_k)
            mbarrier.wait(v_free.index(slot), phase)
            mbarrier.expect(v_here, BN * HEAD * 2)
            b_v = seen_as(s_v.index(slot), [1, 1, BN, HEAD], d_v)
            load(d_v, [i_batch, i_head // group, j * BN, 0], v_here, b_v)
            slot, phase = stepped(slot, phase, STAGES)


# --- The attending warps ----------------------------------------------------------------------------------------------


@gluon.jit
def scores(s_q, s_k, k_full, slot, phase, S: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr):
    """Begin to multiply queries by a block of keys."""
    mbarrier.wait(k_full.index(slot), phase)
    zero = gl.zeros((ROWS, BN), gl.float32, S)
    return warpgroup_mma(s_q, s_k.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def weights(b_s, b_top, b_end, first_key, factor, sign, is_part, SIGNED: gl.constexpr, S: gl.constexpr,
            BN: gl.constexpr):  # fmt: skip
    """(weights, new maximum, what is left of what was summed before)."""
    if SIGNED:
        b_s = b_s * sign
    if is_part:
        i_key = first_key + gl.arange(0, BN, gl.SliceLayout(0, S))
        b_s = gl.where(i_key[None, :] < b_end[:, None], b_s, -float("inf"))
    b_new = gl.maximum(b_top, gl.max(b_s, 1) * factor)
    b_base = gl.where(b_new == -float("inf"), 0.0, b_new)  # a query that has seen nothing yet: weights of 0, not NaN
    return gl.exp2(b_s * factor - b_base[:, None]), b_new, gl.exp2(b_top - b_base)


@gluon.jit
def settled(x):
    """x >= 0, in such a way that what makes x is done before whatever acts after it: the assembler keeps the order of
    what acts, as a nap does that no thread takes, and would otherwise wait for the tensor cores before all that.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; @p nanosleep.u32 1; mov.f32 $0, $1; }", "=f,f", [x],
        gl.float32, False, 1,
    )  # fmt: skip


@gluon.jit
def attend(p_o, p_lse, s_q, s_k, s_v, q_full, q_free, k_full, k_free, v_full, v_free, tokens, keys, heads, total,
           blocks, together, size, factor, sign, so0, so1, so2, HALF: gl.constexpr, CAUSAL: gl.constexpr,
           SIGNED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, HEAD: gl.constexpr,
           STAGES: gl.constexpr):  # fmt: skip
    """One half of each tile's queries over the keys that the tile sees."""
    ROWS: gl.constexpr = BM // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUM, 2)
    TYPE: gl.constexpr = s_q.dtype
    slot, phase, q_phase = 0, 0, 0
    b_q = s_q.index(HALF)
    for i in range(0, share(blocks * total)):
        i_block, i_place = place(i, blocks, total, together)
        first = i_block * BM + HALF * ROWS
        i_query = first + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        # blocks of keys from `to` on are seen in part
        if CAUSAL:
            b_end = gl.minimum(i_query + keys - tokens + 1, keys)
            to = gl.minimum(first + keys - tokens + 1, keys) // BN
        else:
            b_end = i_query * 0 + keys
            to = keys // BN
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        b_s = scores(b_q, s_k, k_full, slot, phase, S, ROWS, BN)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        mbarrier.arrive(k_free.index(slot), count=1)
        b_top = gl.full((ROWS,), -float("inf"), gl.float32, gl.SliceLayout(1, S))
        b_p, b_top, _ = weights(b_s, b_top, b_end, 0, factor, sign, to <= 0, SIGNED, S, BN)
        b_sum = gl.sum(b_p, 1)
        b_w = gl.convert_layout(b_p.to(TYPE), FACTOR)
        acc = gl.zeros((ROWS, HEAD), gl.float32, SUM)
        for j in range(1, key_blocks(i_block, tokens, keys, CAUSAL, BM, BN)):
            slot_v, phase_v = slot, phase
            slot, phase = stepped(slot, phase, STAGES)
            b_s = scores(b_q, s_k, k_full, slot, phase, S, ROWS, BN)
            mbarrier.wait(v_full.index(slot_v), phase_v)
            acc = warpgroup_mma(b_w, s_v.index(slot_v), acc, is_async=True)
            b_s = warpgroup_mma_wait(1, deps=(b_s,))
            mbarrier.arrive(k_free.index(slot), count=1)
            b_p, b_top, b_less = weights(b_s, b_top, b_end, j * BN, factor, sign, j >= to, SIGNED, S, BN)
            b_sum = settled(b_sum * b_less + gl.sum(b_p, 1))
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_free.index(slot_v), count=1)
            acc = acc * gl.convert_layout(b_less, gl.SliceLayout(1, SUM))[:, None]
            b_w = gl.convert_layout(b_p.to(TYPE), FACTOR)
        mbarrier.arrive(q_free, count=1)
        mbarrier.wait(v_full.index(slot), phase)
        acc = warpgroup_mma(b_w, s_v.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_free.index(slot), count=1)
        slot, phase = stepped(slot, phase, STAGES)
        keep(acc, b_sum, b_top, p_o, p_lse, i_place, first, i_query, tokens, heads, size, so0, so1, so2, SUM, HEAD)


@gluon.jit
def keep(acc, b_sum, b_top, p_o, p_lse, i_place, first, i_query, tokens, heads, size, so0, so1, so2,
         SUM: gl.constexpr, HEAD: gl.constexpr):  # fmt: skip
    """Store the rows of a half and the logarithms of their sums."""
    empty = b_sum == 0  # a query that sees no key: 0, and -inf for the logarithm
    b_sum = gl.where(empty, 1.0, b_sum)
    b_lse = gl.where(empty, -float("inf"), (b_top + gl.log2(b_sum)) * LN2)
    gl.store(p_lse + i_place.to(gl.int64) * tokens + i_query, b_lse, mask=i_query < tokens)
    acc = acc * gl.convert_layout(1.0 / b_sum, gl.SliceLayout(1, SUM))[:, None]
    o_row = first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, SUM))
    o_d = gl.arange(0, HEAD, gl.SliceLayout(0, SUM))
    p = p_o + (i_place // heads).to(gl.int64) * so0 + (i_place % heads).to(gl.int64) * so2
    m = (o_row < tokens)[:, None] & (o_d < size)[None, :]
    gl.store(p + (o_row.to(gl.int64) * so1)[:, None] + o_d[None, :], acc.to(p_o.dtype.element_ty), mask=m)


# --- The kernel -------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=["tokens", "keys", "heads", "group", "total", "blocks", "together"])
def forward_specialized(d_q, d_k, d_v, p_o, p_lse, tokens, keys, heads, group, total, blocks, together, size, factor,
                        sign, so0, so1, so2, CAUSAL: gl.constexpr, SIGNED: gl.constexpr, BM: gl.constexpr,
                        BN: gl.constexpr, HEAD: gl.constexpr, STAGES: gl.constexpr, ATTENDING: gl.constexpr,
                        LOADING: gl.constexpr):  # fmt: skip
    """o and the logarithm of the softmax sums; see `forward_kernel`.

    Args:
        total: heads of all batches.
        ATTENDING, LOADING: registers of a thread.
    """
    ROWS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    s_q = gl.allocate_shared_memory(d_q.dtype, [2, BM // 2, HEAD], ROWS)
    s_k = gl.allocate_shared_memory(d_k.dtype, [STAGES, BN, HEAD], ROWS)
    s_v = gl.allocate_shared_memory(d_v.dtype, [STAGES, BN, HEAD], ROWS)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_free, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize([
        (attend, (p_o, p_lse, s_q, s_k, s_v, q_full, q_free, k_full, k_free, v_full, v_free, tokens, keys, heads, total,
                  blocks, together, size, factor, sign, so0, so1, so2, 0, CAUSAL, SIGNED, BM, BN, HEAD, STAGES)),
        (attend, (p_o, p_lse, s_q, s_k, s_v, q_full, q_free, k_full, k_free, v_full, v_free, tokens, keys, heads, total,
                  blocks, together, size, factor, sign, so0, so1, so2, 1, CAUSAL, SIGNED, BM, BN, HEAD, STAGES)),
        (fetch, (d_q, d_k, d_v, s_q, s_k, s_v, q_full, q_free, k_full, k_free, v_full, v_free, tokens, keys, heads,
                 group, total, blocks, together, CAUSAL, BM, BN, HEAD, STAGES)),
    ], [4, 4], [ATTENDING, LOADING])  # fmt: skip


# --- Launching it -----------------------------------------------------------------------------------------------------

HEAD = 128  # padded size of a head: of 64 gains nothing (docs/log.md), larger ones were not tried
QUERIES, KEYS, STAGES = 128, 128, 2  # of a tile, of a block, and how many blocks lie in shared memory
WARPS, ATTENDING, LOADING = 4, 240, 24  # of a group, and registers of its threads
NEARLY = 1.05  # as long as the longest program with all heads together: less than what keys side by side gain


def together_of(blocks: int, heads: int, causal: bool, sm_count: int) -> int:
    """How many heads go before the next ones: one, whose keys are then read side by side, or all of them, where the
    programs would otherwise end too far apart.
    """

    def longest(together: int) -> int:
        i = np.arange(blocks * heads)
        start = i // (blocks * together) * together
        cost = blocks - (i - start * blocks) // np.minimum(together, heads - start) if causal else np.ones_like(i)
        rows = np.zeros(-(-i.size // sm_count) * sm_count, np.int64)
        rows[: i.size] = cost + 1
        rows = rows.reshape(-1, sm_count)
        rows[1::2] = rows[1::2, ::-1]
        return int(rows.sum(0).max())

    return 1 if longest(1) <= NEARLY * longest(heads) else heads


def _box(x: Array, rows: int) -> Descriptor:
    """Tiles of rows of a head, with their layout in shared memory."""
    kind = {"bfloat16": gl.bfloat16, "float16": gl.float16}[x.dtype.name]
    shape, strides = region(x)
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, HEAD], kind)
    return Descriptor(x, shape, strides, (1, 1, rows, HEAD), layout=repr(layout))


def forward_specialized_into(o: Array, lse: Array, q: Array, k: Array, v: Array, causal: bool, c: Call) -> bool:
    """Launch the kernel, of a call without borders; False, and nothing is done, where it is not the faster way.

    Args:
        c: of the same arrays.
    """
    heads, blocks = c.batches * c.heads, triton.cdiv(c.tokens, QUERIES)
    sm_count = backend_of(q.device).driver.properties.sm_count
    fits = c.boxes and c.hopper and c.window is None and padded(c.size) == HEAD
    if not fits or blocks * heads < sm_count or is_interpreted():
        return False
    launch(
        forward_specialized, sm_count, _box(q, QUERIES // 2), _box(k, KEYS), _box(v, KEYS), o, lse, c.tokens, c.keys,
        c.heads, c.group, heads, blocks, together_of(blocks, heads, causal, sm_count), c.size, c.factor, c.sign,
        *o.strides[:3], CAUSAL=causal, SIGNED=c.sign != 1, BM=QUERIES, BN=KEYS, HEAD=HEAD, STAGES=STAGES,
        ATTENDING=ATTENDING, LOADING=LOADING, num_warps=WARPS,
    )  # fmt: skip
    return True
