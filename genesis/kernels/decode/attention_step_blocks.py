"""Attention of a generation step that adds in the order of the training kernel, one program per sequence and key head.

Plain reference: genesis/ops/attention_step.py: `attention_step`. attention_step.py launches this kernel.

One online softmax processes the keys of a sequence in ascending blocks of 64 from its first position. Each block has
the operations of `attention_fwd` (genesis/kernels/attention/flash.py), and one warp has the 16 rows of a tensor-core
tile, so four lanes add the weights of a row in either kernel. The output is therefore bit-identical to the output of a
pass over the whole sequence (docs/decisions/0014-exact.md), and does not depend on other sequences or their lengths.
Keys are not divided among programs, so a single sequence with a long context is slow.

Tiles: BM query heads of a group, BN keys, BD columns of a head; BM and BD are padded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels.attention.common import fast_exp2, operand
from genesis.kernels.decode.attention_parts import length_of, prefetch_part, saturated, store_heads
from genesis.kernels.decode.attention_token import load_tables, load_token, loaded, prepared_heads
from genesis.kernels.dependents import allow_next, wait_for_previous
from genesis.kernels.elements import converted

BLOCK = 64  # keys of a block, as in the forward kernel of training
PREFETCHED = tl.constexpr(512)  # keys that a program prefetches while the previous kernel ends


@triton.jit
def block_step(b_q, b_k, b_v, b_max, b_sum, b_acc, m_key, scale_log2, TYPE: tl.constexpr):
    """Update the online softmax with a block of keys and values; m_key [BN] marks visible keys."""
    b_s = tl.where(m_key[None, :], tl.dot(b_q, b_k.T, input_precision="ieee"), -float("inf"))  # [BM, BN]
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * scale_log2)  # [BM]
    b_base = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)  # [BM]
    b_p = fast_exp2(b_s * scale_log2 - b_base[:, None])  # [BM, BN]
    b_rescale = fast_exp2(b_max - b_base)  # [BM]
    b_acc = tl.dot(operand(b_p, TYPE), b_v, b_acc * b_rescale[:, None], input_precision="ieee")  # [BM, BD]
    return b_new_max, b_sum * b_rescale + tl.sum(b_p, 1), b_acc


@triton.jit(do_not_specialize=["capacity", "window"])
def attention_step_blocks_kernel(p_o, p_qkv, p_cache, p_lengths, p_cos, p_sin, p_query_weight, p_key_weight, p_active,
                                 capacity, window, scale_log2, eps, so_cache, TYPE: tl.constexpr,
                                 HEADS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
                                 LAUNCH: tl.constexpr):  # fmt: skip
    """Compute o [B, Q, D] from qkv [B, Q + 2·K, D] and the keys and values in the cache [2, B, K, S, D].

    `attention_step_kernel` documents the other arguments.

    Args:
        LAUNCH: whether kernels overlap, and whether overlapping kernels write only qkv.
    """
    KEY_HEADS: tl.constexpr = HEADS[0]
    GROUP: tl.constexpr = HEADS[1]
    SIZE: tl.constexpr = HEADS[2]
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    BD: tl.constexpr = TILE[2]
    OVERLAP: tl.constexpr = LAUNCH[0]
    EARLY: tl.constexpr = LAUNCH[0] and LAUNCH[1]
    NORMS: tl.constexpr = p_query_weight is not None
    ROTATES: tl.constexpr = p_cos is not None
    i_row, i_head = tl.program_id(0) // KEY_HEADS, tl.program_id(0) % KEY_HEADS
    p_keys = p_cache + (i_row.to(tl.int64) * so_cache[1] + i_head.to(tl.int64) * so_cache[2])
    p_values = p_keys + so_cache[0]
    allow_next(OVERLAP)
    if not EARLY:
        wait_for_previous(OVERLAP)
    # Find the visible keys, and load the token's heads.
    length, is_on = length_of(p_lengths, p_active, i_row, capacity)
    low = length * 0
    if window is not None:
        low = tl.maximum(length + 1 - window, 0)
    if EARLY:
        end = tl.minimum(low + PREFETCHED, length)
        prefetch_part(p_keys, p_values, low, end, so_cache, OVERLAP, SIZE, PREFETCHED)
    b_w, b_w_pairs, b_cos, b_sin = load_tables(p_query_weight, p_cos, p_sin, length, tl.float32, SIZE, BD)  # [BD] each
    b_key_w, b_key_w_pairs, _, _ = load_tables(p_key_weight, None, None, length, tl.float32, SIZE, BD)  # [BD] each
    if EARLY:
        wait_for_previous(OVERLAP)
    b_query, b_query_pairs, b_key, b_key_pairs, b_value = load_token(p_qkv, i_row, i_head, HEADS, ROTATES, BM, BD)
    b_q = prepared_heads(  # [BM, BD]
        b_query, b_query_pairs, b_w, b_w_pairs, b_cos, b_sin, eps, NORMS, ROTATES, True, tl.float32, SIZE
    )  # fmt: skip
    b_q = operand(b_q, TYPE)  # [BM, BD]
    b_key = prepared_heads(  # [1, BD]
        b_key, b_key_pairs, b_key_w, b_key_w_pairs, b_cos, b_sin, eps, NORMS, ROTATES, True, tl.float32, SIZE
    )  # fmt: skip
    # Store the token's own key and value; the last block of keys includes them.
    o_d = tl.arange(0, BD)  # [BD]
    o_own = length.to(tl.int64) * so_cache[3] + o_d[None, :] * so_cache[4]  # [1, BD]
    m_own = (o_d < tl.where(is_on, SIZE, 0))[None, :]  # [1, BD]
    tl.store(p_keys + o_own, saturated(b_key, p_cache.dtype.element_ty), mask=m_own)
    tl.store(p_values + o_own, saturated(converted(b_value, tl.float32), p_cache.dtype.element_ty), mask=m_own)
    tl.debug_barrier()
    # Pass over the blocks of keys.
    o_n = tl.arange(0, BN)  # [BN]
    b_max = tl.full((BM,), -float("inf"), tl.float32)  # [BM], scaled, in units of log2
    b_sum, b_acc = tl.zeros((BM,), tl.float32), tl.zeros((BM, BD), tl.float32)  # [BM], [BM, BD]
    for start in tl.range(low // BN * BN, length + 1, BN, num_stages=STAGES):
        m_key = (start + o_n <= length) & (start + o_n >= low)  # [BN]
        o_kv = (start + o_n).to(tl.int64)[:, None] * so_cache[3] + o_d[None, :] * so_cache[4]  # [BN, BD]
        m_kv = (start + o_n <= length)[:, None] & (o_d < SIZE)[None, :]  # [BN, BD]
        b_k = loaded(p_keys + o_kv, m_kv, TYPE)  # [BN, BD]
        b_v = loaded(p_values + o_kv, m_kv, TYPE)  # [BN, BD]
        b_max, b_sum, b_acc = block_step(b_q, b_k, b_v, b_max, b_sum, b_acc, m_key, scale_log2, TYPE)
    b_o = tl.where(is_on, b_acc * (1.0 / b_sum)[:, None], 0.0)  # [BM, BD]
    store_heads(p_o + tl.program_id(0).to(tl.int64) * (GROUP * SIZE), b_o, GROUP, SIZE, BM, BD)
