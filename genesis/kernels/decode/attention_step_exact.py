"""Attention of a generation step in the order of the training kernel, by four warps.

Plain reference: genesis/ops/attention_step.py: `attention_step`. attention_step.py launches this kernel.

The operations are those of attention_step_blocks.py, whose single warp takes 7 us for 256 keys of a sequence (3.4 us
here). The scores of a block are computed as K·qᵀ, 16 keys per warp, and the output as Vᵀ·pᵀ, 16 columns per warp.
Swapped operands and more warps do not change the bits of a chain. A round has the scores and weights of several blocks
at once, so only the weighted values wait for each other. Four lanes hold a row of weights of a block, as in the
training kernel, so they are added in the same order. Keys are loaded before the previous kernel ends.

The kernel is written in Gluon, which has no interpreter. Its results are checked on a GPU against
attention_step_blocks.py.

Tiles: BM query heads of a group, BN keys, D columns of a head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from genesis.kernels.attention.common import fast_exp2
from genesis.kernels.decode.attention_parts import length_of
from genesis.kernels.decode.exact_rows import async_load, inverse_rms
from genesis.kernels.dependents import allow_next, wait_for_previous
from genesis.kernels.gemm.warp_specialized import reinterpret_as
from genesis.kernels.maths import rounded_product

BN = gl.constexpr(64)  # keys of a block
WARPS = gl.constexpr(4)


@gluon.jit
def copy_round(p_keys, p_values, s_k, s_v, stage, start, length, so_cache, N: gl.constexpr, D: gl.constexpr,
               TILE: gl.constexpr):  # fmt: skip
    """Copy the keys and values of a round of N keys to a stage, and 0 beyond the length."""
    if start <= length:
        o_n = start + gl.arange(0, N, gl.SliceLayout(1, TILE))[:, None]  # [N, 1]
        o_kv = o_n.to(gl.int64) * so_cache[3] + gl.arange(0, D, gl.SliceLayout(0, TILE))[None, :]  # [N, D]
        async_load(s_k.index(stage), p_keys + o_kv, mask=o_n < length)
        async_load(s_v.index(stage), p_values + o_kv, mask=o_n < length)
    async_copy.commit_group()


@gluon.jit
def tables(p_weight, p_cos, p_sin, position, o_d, D: gl.constexpr, TILE: gl.constexpr):
    """Return the norm's weight, the weight with halves exchanged, cos, and signed sin at o_d [1, D], or 1."""
    b_w = gl.full((1, D), 1.0, gl.float32, TILE)  # [1, D]
    b_w_pairs, b_cos, b_sin = b_w, b_w, b_w
    if p_weight is not None:
        b_w = gl.load(p_weight + o_d).to(gl.float32)
        b_w_pairs = gl.load(p_weight + (o_d + D // 2) % D).to(gl.float32)
    if p_cos is not None:
        o_pair = position * (D // 2) + o_d % (D // 2)  # [1, D]
        b_cos, b_sin = gl.load(p_cos + o_pair).to(gl.float32), gl.load(p_sin + o_pair).to(gl.float32)
        b_sin = gl.where(o_d < D // 2, -b_sin, b_sin)
    return b_w, b_w_pairs, b_cos, b_sin


@gluon.jit
def load_heads(p_token, o_head, m_head, o_d, found, eps, NORMS: gl.constexpr, ROTATES: gl.constexpr,
               D: gl.constexpr):  # fmt: skip
    """Load columns o_d of heads [rows, D], normalised with NORMS and rotated with ROTATES, in float32; `found` are the
    `tables`.
    """
    b_w, b_w_pairs, b_cos, b_sin = found
    b_x = gl.load(p_token + o_head * D + o_d, mask=m_head, other=0).to(gl.float32)  # [rows, D]
    b_y = b_x
    if ROTATES:
        b_y = gl.load(p_token + o_head * D + (o_d + D // 2) % D, mask=m_head, other=0).to(gl.float32)
    if NORMS:
        b_r = inverse_rms(b_x, eps, D)[:, None]  # [rows, 1]
        b_x, b_y = b_x * b_r * b_w, b_y * b_r * b_w_pairs  # [rows, D] each
    if ROTATES:
        b_cos, _ = gl.broadcast(b_cos, b_x)
        b_sin, _ = gl.broadcast(b_sin, b_x)
        b_x = rounded_product(b_x, b_cos) + rounded_product(b_y, b_sin)
    return b_x


@gluon.jit
def next_max(b_max, b_top):
    """Return the running maximum [BM] with a block's, the base of its weights, and the factor of earlier sums."""
    b_new_max = gl.maximum(b_max, b_top)  # [BM]
    b_base = gl.where(b_new_max == -float("inf"), 0.0, b_new_max)  # [BM]
    return b_new_max, b_base, fast_exp2(b_max - b_base)


@gluon.jit(do_not_specialize=["capacity", "window"])
def attention_step_exact_kernel(p_o, p_qkv, p_cache, p_lengths, p_cos, p_sin, p_query_weight, p_key_weight, p_active,
                                capacity, window, scale_log2, eps, so_cache, HEADS: gl.constexpr, BM: gl.constexpr,
                                STAGES: gl.constexpr, ROUND: gl.constexpr, LAUNCH: gl.constexpr):  # fmt: skip
    """Compute o [B, Q, D] from qkv [B, Q + 2·K, D] and the keys and values in the cache [2, B, K, S, D].

    `attention_step_kernel` documents the arguments, `attention_step_blocks_kernel` LAUNCH. HEADS is (K, Q / K, D). A
    round has ROUND blocks; STAGES of them are in flight.
    """
    KEY_HEADS: gl.constexpr = HEADS[0]
    GROUP: gl.constexpr = HEADS[1]
    D: gl.constexpr = HEADS[2]
    NORMS: gl.constexpr = p_query_weight is not None
    ROTATES: gl.constexpr = p_cos is not None
    TYPE: gl.constexpr = p_qkv.dtype.element_ty
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 8, 4], [ROUND, WARPS // ROUND, 1], [2, 1, 0])  # as in training
    TOPS: gl.constexpr = gl.SliceLayout(2, ROWS)
    ROW: gl.constexpr = gl.SliceLayout(0, TOPS)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLAIN_3D: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    SWIZZLED_3D: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    KEYS: gl.constexpr = ROUND * BN
    s_k = gl.allocate_shared_memory(TYPE, [STAGES, KEYS, D], SWIZZLED)
    s_v = gl.allocate_shared_memory(TYPE, [STAGES, KEYS, D], SWIZZLED)
    s_q = gl.allocate_shared_memory(TYPE, [BM, D], SWIZZLED)
    s_scores = gl.allocate_shared_memory(gl.float32, [ROUND, BN, BM], PLAIN)
    s_weights = gl.allocate_shared_memory(TYPE, [ROUND, BM, BN], SWIZZLED)
    s_tops = gl.allocate_shared_memory(gl.float32, [ROUND, BM], FLAT)
    s_sums = gl.allocate_shared_memory(gl.float32, [ROUND, BM], FLAT)
    i_row, i_head = gl.program_id(0) // KEY_HEADS, gl.program_id(0) % KEY_HEADS
    p_keys = p_cache + (i_row.to(gl.int64) * so_cache[1] + i_head.to(gl.int64) * so_cache[2])
    p_values = p_keys + so_cache[0]
    allow_next(LAUNCH[0])
    if not LAUNCH[1]:
        wait_for_previous(LAUNCH[0])
    # Find the visible keys, and load the first rounds.
    length, is_on = length_of(p_lengths, p_active, i_row, capacity)
    low = length * 0
    if window is not None:
        low = gl.maximum(length + 1 - window, 0)
    first = low // BN * BN
    for i in gl.static_range(STAGES):
        copy_round(p_keys, p_values, s_k, s_v, i, first + i * KEYS, length, so_cache, KEYS, D, TILE)
    # In shared memory (SWIZZLED) the order of a row's groups of 8 columns depends on the row; o_own has that order.
    o_d = gl.arange(0, D, gl.SliceLayout(0, TILE))[None, :]  # [1, D]
    o_own = o_d ^ ((length & 7) * 8)  # [1, D]
    query_tables = tables(p_query_weight, p_cos, p_sin, length, o_d, D, TILE)
    key_tables = tables(p_key_weight, p_cos, p_sin, length, o_own, D, TILE)
    if LAUNCH[1]:
        wait_for_previous(LAUNCH[0])
    # Load the token's heads, and store its own key and value.
    p_token = p_qkv + i_row.to(gl.int64) * ((GROUP + 2) * KEY_HEADS * D)
    o_m = gl.arange(0, BM, gl.SliceLayout(1, TILE))[:, None]  # [BM, 1]
    one = gl.arange(0, 1, gl.SliceLayout(1, TILE))[:, None]  # [1, 1]
    b_q = load_heads(p_token, i_head * GROUP + o_m, o_m < GROUP, o_d, query_tables, eps, NORMS, ROTATES, D)  # [BM, D]
    i_key = KEY_HEADS * GROUP + i_head
    b_key = load_heads(p_token, i_key + one, one == 0, o_own, key_tables, eps, NORMS, ROTATES, D).to(TYPE)  # [1, D]
    b_value = load_heads(p_token, i_key + KEY_HEADS + one, one == 0, o_own, key_tables, eps, False, False, D).to(TYPE)
    s_q.store(b_q.to(TYPE))
    o_own = length.to(gl.int64) * so_cache[3] + o_own  # [1, D]
    gl.store(p_keys + o_own, b_key, mask=is_on)
    gl.store(p_values + o_own, b_value, mask=is_on)
    b_q = s_q.permute((1, 0)).load(gl.DotOperandLayout(1, ACC, 2))  # [D, BM]
    # Pass over the rounds.
    s_k_rows = reinterpret_as(s_k, TYPE, [STAGES * KEYS, D], FLAT)
    s_v_rows = reinterpret_as(s_v, TYPE, [STAGES * KEYS, D], FLAT)
    s_k_blocks = reinterpret_as(s_k, TYPE, [STAGES * ROUND, BN, D], SWIZZLED)
    s_v_blocks = reinterpret_as(s_v, TYPE, [STAGES * ROUND, BN, D], SWIZZLED)
    o_i = gl.arange(0, ROUND, gl.SliceLayout(1, TOPS))[:, None]  # [ROUND, 1]
    o_n = gl.expand_dims(o_i, 2) * BN + gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(1, ROWS)))[None, None, :]
    b_max = gl.full((BM,), -float("inf"), gl.float32, ROW)  # [BM], scaled, in units of log2
    b_acc_max = gl.full((BM,), -float("inf"), gl.float32, COLUMN)  # [BM], the same in another layout
    b_sum = gl.zeros((BM,), gl.float32, COLUMN)  # [BM]
    b_acc = gl.zeros((D, BM), gl.float32, ACC)  # [D, BM]
    stage = 0
    for start in range(first, length + 1, KEYS):
        async_copy.wait_group(STAGES - 1)
        if start + KEYS > length:  # the last block has the token's own key and value
            s_k_rows.index(stage * KEYS + length - start).store(b_key.reshape((D,)))
            s_v_rows.index(stage * KEYS + length - start).store(b_value.reshape((D,)))
        for i in gl.static_range(ROUND):
            b_k = s_k_blocks.index(stage * ROUND + i).load(gl.DotOperandLayout(0, ACC, 2))  # [BN, D]
            s_scores.index(i).store(mma_v2(b_k, b_q, gl.zeros((BN, BM), gl.float32, ACC)))  # [BN, BM]
        s_all_scores = reinterpret_as(s_scores, gl.float32, [ROUND, BN, BM], PLAIN_3D)
        b_s = s_all_scores.permute((0, 2, 1)).load(ROWS)  # [ROUND, BM, BN]
        b_values = ()
        for i in gl.static_range(ROUND):
            s_block = s_v_blocks.index(stage * ROUND + i).permute((1, 0))
            b_values += (s_block.load(gl.DotOperandLayout(0, ACC, 2)),)  # [D, BN]
        b_s = gl.where((start + o_n <= length) & (start + o_n >= low), b_s, -float("inf"))  # [ROUND, BM, BN]
        reinterpret_as(s_tops, gl.float32, [ROUND, BM], PLAIN).store(gl.max(b_s, 2) * scale_log2)  # [ROUND, BM]
        b_base = gl.zeros((ROUND, BM), gl.float32, TOPS)  # [ROUND, BM]
        for i in gl.static_range(ROUND):
            b_max, b_block_base, _ = next_max(b_max, s_tops.index(i).load(ROW))
            b_base = gl.where(o_i == i, b_block_base[None, :], b_base)  # [ROUND, BM]
        b_p = fast_exp2(b_s * scale_log2 - gl.expand_dims(b_base, 2))  # [ROUND, BM, BN]
        reinterpret_as(s_weights, TYPE, [ROUND, BM, BN], SWIZZLED_3D).store(b_p.to(TYPE))
        reinterpret_as(s_sums, gl.float32, [ROUND, BM], PLAIN).store(gl.sum(b_p, 2))
        for i in gl.static_range(ROUND):
            b_acc_max, _, b_rescale = next_max(b_acc_max, s_tops.index(i).load(COLUMN))
            b_weights = s_weights.index(i).permute((1, 0)).load(gl.DotOperandLayout(1, ACC, 2))  # [BN, BM]
            b_acc = mma_v2(b_values[i], b_weights, b_acc * b_rescale[None, :])  # [D, BM]
            b_sum = b_sum * b_rescale + s_sums.index(i).load(COLUMN)  # [BM]
        copy_round(p_keys, p_values, s_k, s_v, stage, start + STAGES * KEYS, length, so_cache, KEYS, D, TILE)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    b_o = gl.where(is_on, b_acc * (1.0 / b_sum)[None, :], 0.0).to(TYPE)  # [D, BM]
    o_g = gl.arange(0, BM, gl.SliceLayout(0, ACC))[None, :]  # [1, BM]
    o_o = gl.program_id(0).to(gl.int64) * (GROUP * D) + o_g * D + gl.arange(0, D, gl.SliceLayout(1, ACC))[:, None]
    gl.store(p_o + o_o, b_o, mask=o_g < GROUP)
