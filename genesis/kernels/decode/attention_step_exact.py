"""Attention of a generation step in the order of the training kernel, by four warps.

Plain reference: genesis/ops/attention_step.py: `attention_step`. attention_step.py launches this kernel.

The operations are those of attention_step_blocks.py, whose single warp takes 7 us for 256 keys of a sequence (3.4 us
here). The scores of a block are computed as K·qᵀ, 16 keys per warp, and the output as Vᵀ·pᵀ, 16 columns per warp.
Swapped operands and more warps do not change the bits of a chain. Every warp holds all weights of a block, and four
lanes hold a row of them, as in the training kernel, so they are added in the same order. Keys are loaded before the
previous kernel ends.

The kernel is written in Gluon, which has no interpreter. Its results are checked on a GPU against
attention_step_blocks.py.

Tiles: BM query heads of a group, BN keys, D columns of a head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from genesis.kernels.attention.common import fast_exp2
from genesis.kernels.decode.exact_rows import async_load, inverse_rms, signal
from genesis.kernels.maths import rounded_product

BN = gl.constexpr(64)  # keys of a block
WARPS = gl.constexpr(4)


@gluon.jit
def copy_block(p_keys, p_values, s_k, s_v, stage, start, length, so_cache, D: gl.constexpr, TILE: gl.constexpr):
    """Copy the keys and values of a block to a stage, and 0 beyond the length."""
    o_n = start + gl.arange(0, BN, gl.SliceLayout(1, TILE))[:, None]  # [BN, 1]
    o_kv = o_n.to(gl.int64) * so_cache[3] + gl.arange(0, D, gl.SliceLayout(0, TILE))[None, :]  # [BN, D]
    async_load(s_k.index(stage), p_keys + o_kv, mask=o_n < length)
    async_load(s_v.index(stage), p_values + o_kv, mask=o_n < length)
    async_copy.commit_group()


@gluon.jit
def tables(p_weight, p_cos, p_sin, position, D: gl.constexpr, TILE: gl.constexpr):
    """Return the norm's weight, the weight with halves exchanged, cos, and signed sin, [1, D]. Missing ones are 1."""
    o_d = gl.arange(0, D, gl.SliceLayout(0, TILE))[None, :]  # [1, D]
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
def load_heads(p_token, o_head, m_head, found, eps, NORMS: gl.constexpr, ROTATES: gl.constexpr, D: gl.constexpr,
               TILE: gl.constexpr):  # fmt: skip
    """Load heads [rows, D], normalised with NORMS and rotated with ROTATES, in float32; `found` are the `tables`."""
    b_w, b_w_pairs, b_cos, b_sin = found
    o_d = gl.arange(0, D, gl.SliceLayout(0, TILE))[None, :]  # [1, D]
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
def put_row(s_block, b_row, o_row, TILE: gl.constexpr):
    """Replace a row of a block in shared memory by b_row [1, D]."""
    o_n = gl.arange(0, BN, gl.SliceLayout(1, TILE))[:, None]  # [BN, 1]
    s_block.store(gl.where(o_n == o_row, b_row, s_block.load(TILE)))


@gluon.jit(do_not_specialize=["capacity", "window"])
def attention_step_exact_kernel(p_o, p_qkv, p_cache, p_lengths, p_cos, p_sin, p_query_weight, p_key_weight, p_active,
                                capacity, window, scale_log2, eps, so_cache, HEADS: gl.constexpr, BM: gl.constexpr,
                                STAGES: gl.constexpr, LAUNCH: gl.constexpr):  # fmt: skip
    """Compute o [B, Q, D] from qkv [B, Q + 2·K, D] and the keys and values in the cache [2, B, K, S, D].

    `attention_step_kernel` documents the arguments, `attention_step_blocks_kernel` LAUNCH. HEADS is (K, Q / K, D).
    """
    KEY_HEADS: gl.constexpr = HEADS[0]
    GROUP: gl.constexpr = HEADS[1]
    D: gl.constexpr = HEADS[2]
    NORMS: gl.constexpr = p_query_weight is not None
    ROTATES: gl.constexpr = p_cos is not None
    TYPE: gl.constexpr = p_qkv.dtype.element_ty
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [WARPS, 1], [1, 0])  # a row of weights in four lanes
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    s_k = gl.allocate_shared_memory(TYPE, [STAGES, BN, D], SWIZZLED)
    s_v = gl.allocate_shared_memory(TYPE, [STAGES, BN, D], SWIZZLED)
    s_q = gl.allocate_shared_memory(TYPE, [BM, D], SWIZZLED)
    i_row, i_head = gl.program_id(0) // KEY_HEADS, gl.program_id(0) % KEY_HEADS
    p_keys = p_cache + (i_row.to(gl.int64) * so_cache[1] + i_head.to(gl.int64) * so_cache[2])
    p_values = p_keys + so_cache[0]
    signal("griddepcontrol.launch_dependents; // $0", LAUNCH[0])
    if not LAUNCH[1]:
        signal("griddepcontrol.wait; // $0", LAUNCH[0])
    # Find the visible keys, and load the first blocks.
    length = gl.load(p_lengths + i_row, cache_modifier=".cg")
    is_on = (length >= 0) & (length < capacity)
    if p_active is not None:
        is_on = is_on & (gl.load(p_active + i_row) != 0)
    length = gl.where(is_on, length, 0).to(gl.int32)  # an inactive row is computed like an empty one
    low = length * 0
    if window is not None:
        low = gl.maximum(length + 1 - window, 0)
    first = low // BN * BN
    for i in gl.static_range(STAGES):
        copy_block(p_keys, p_values, s_k, s_v, i, first + i * BN, length, so_cache, D, TILE)
    query_tables = tables(p_query_weight, p_cos, p_sin, length, D, TILE)
    key_tables = tables(p_key_weight, p_cos, p_sin, length, D, TILE)
    if LAUNCH[1]:
        signal("griddepcontrol.wait; // $0", LAUNCH[0])
    # Load the token's heads, and store its own key and value.
    p_token = p_qkv + i_row.to(gl.int64) * ((GROUP + 2) * KEY_HEADS * D)
    o_m = gl.arange(0, BM, gl.SliceLayout(1, TILE))[:, None]  # [BM, 1]
    one = gl.arange(0, 1, gl.SliceLayout(1, TILE))[:, None]  # [1, 1]
    b_q = load_heads(p_token, i_head * GROUP + o_m, o_m < GROUP, query_tables, eps, NORMS, ROTATES, D, TILE)  # [BM, D]
    i_key = KEY_HEADS * GROUP + i_head
    b_key = load_heads(p_token, i_key + one, one == 0, key_tables, eps, NORMS, ROTATES, D, TILE).to(TYPE)  # [1, D]
    b_value = load_heads(p_token, i_key + KEY_HEADS + one, one == 0, key_tables, eps, False, False, D, TILE).to(TYPE)
    s_q.store(b_q.to(TYPE))
    o_own = length.to(gl.int64) * so_cache[3] + gl.arange(0, D, gl.SliceLayout(0, TILE))[None, :]  # [1, D]
    gl.store(p_keys + o_own, b_key, mask=is_on)
    gl.store(p_values + o_own, b_value, mask=is_on)
    b_q = s_q.permute((1, 0)).load(gl.DotOperandLayout(1, ACC, 2))  # [D, BM]
    # Pass over the blocks of keys.
    o_n = gl.arange(0, BN, gl.SliceLayout(0, ROW))  # [BN]
    b_max = gl.full((BM,), -float("inf"), gl.float32, gl.SliceLayout(1, ROW))  # [BM], scaled, in units of log2
    b_sum = gl.zeros((BM,), gl.float32, gl.SliceLayout(1, ROW))  # [BM]
    b_acc = gl.zeros((D, BM), gl.float32, ACC)  # [D, BM]
    stage = 0
    for start in range(first, length + 1, BN):
        async_copy.wait_group(STAGES - 1)
        if start + BN > length:  # the last block has the token's own key and value
            put_row(s_k.index(stage), b_key, length - start, TILE)
            put_row(s_v.index(stage), b_value, length - start, TILE)
        b_k = s_k.index(stage).load(gl.DotOperandLayout(0, ACC, 2))  # [BN, D]
        b_s = mma_v2(b_k, b_q, gl.zeros((BN, BM), gl.float32, ACC))  # [BN, BM]
        b_s = gl.convert_layout(b_s.permute((1, 0)), ROW)  # [BM, BN]
        m_key = (start + o_n <= length) & (start + o_n >= low)  # [BN]
        b_s = gl.where(m_key[None, :], b_s, -float("inf"))  # [BM, BN]
        b_new_max = gl.maximum(b_max, gl.max(b_s, 1) * scale_log2)  # [BM]
        b_base = gl.where(b_new_max == -float("inf"), 0.0, b_new_max)  # [BM]
        b_p = fast_exp2(b_s * scale_log2 - b_base[:, None])  # [BM, BN]
        b_rescale = fast_exp2(b_max - b_base)  # [BM]
        b_v = s_v.index(stage).permute((1, 0)).load(gl.DotOperandLayout(0, ACC, 2))  # [D, BN]
        b_weights = gl.convert_layout(b_p.to(TYPE).permute((1, 0)), gl.DotOperandLayout(1, ACC, 2))  # [BN, BM]
        b_acc = mma_v2(b_v, b_weights, b_acc * gl.convert_layout(b_rescale, gl.SliceLayout(0, ACC))[None, :])
        b_sum = b_sum * b_rescale + gl.sum(b_p, 1)
        b_max = b_new_max
        copy_block(p_keys, p_values, s_k, s_v, stage, start + STAGES * BN, length, so_cache, D, TILE)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    b_share = gl.convert_layout(1.0 / b_sum, gl.SliceLayout(0, ACC))[None, :]  # [1, BM]
    b_o = gl.where(is_on, b_acc * b_share, 0.0).to(TYPE)  # [D, BM]
    o_g = gl.arange(0, BM, gl.SliceLayout(0, ACC))[None, :]  # [1, BM]
    o_o = gl.program_id(0).to(gl.int64) * (GROUP * D) + o_g * D + gl.arange(0, D, gl.SliceLayout(1, ACC))[:, None]
    gl.store(p_o + o_o, b_o, mask=o_g < GROUP)
