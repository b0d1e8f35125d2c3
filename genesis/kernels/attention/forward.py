"""The forward kernel of attention: online softmax, one block of queries a program.

Plain reference: genesis/ops/attention.py: `attention`. Computes o = softmax(scale·q·kᵀ)·v over each query's visible
keys, and the LSE of its scores, in one pass over blocks of keys. Only blocks at the ends of the visible range need a
mask.

Tiles: BM queries, BN keys, BD the padded head dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels.attention.common import (
    LN2,
    fast_exp2,
    first_visible_key,
    load_rows,
    operand,
    scheduled_tile,
    store_rows,
    visible_end,
    visible_key_blocks,
)


@triton.jit(do_not_specialize=["sizes", "schedule"])
def attention_fwd(p_o, p_lse, q, k, v, p_doc_starts, sizes, schedule, head_dim, scales, strides, CAUSAL: tl.constexpr,
                  TMA: tl.constexpr, DOT: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """o [B, T, H, D] and lse [B, H, T] of q [B, T, H, D], k and v [B, S, H / group, D].

    The arguments of all attention kernels are described in common.py.
    """
    tokens, keys, batches, heads, group, window = sizes
    section, sectioned = schedule
    scale_log2, sign = scales
    so, sq, sk, sv, ss = strides
    TYPE: tl.constexpr = DOT[0]
    WORK: tl.constexpr = DOT[1]
    PRECISION: tl.constexpr = DOT[2]
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    BD: tl.constexpr = TILE[2]
    LEFT_BOUND: tl.constexpr = (p_doc_starts is not None) or (window is not None)
    # the last queries, which see the most keys, go first
    blocks = tl.cdiv(tokens, BM)
    i_reversed, i_batch_head = scheduled_tile(blocks, batches * heads, section, sectioned)
    i_block, i_batch, i_head = blocks - 1 - i_reversed, i_batch_head // heads, i_batch_head % heads
    start, diagonal = i_block * BM, keys - tokens
    o_query = start + tl.arange(0, BM)  # [BM]
    m_query = o_query < tokens  # [BM]
    b_first = first_visible_key(  # [BM]; before all other loads, because its latency is the longest
        p_doc_starts, i_batch, o_query, m_query, diagonal, keys, window, ss
    )  # fmt: skip
    b_q = load_rows(q, i_batch, i_head, start, tokens, head_dim, sq, TMA, TYPE, BM, BD)  # [BM, BD]
    b_end = visible_end(o_query, diagonal, keys, CAUSAL)  # [BM]
    begin, full_begin, full_end, end = visible_key_blocks(
        b_first, m_query, start, tl.minimum(start + BM, tokens), diagonal, keys, CAUSAL, LEFT_BOUND, BN
    )
    b_acc = tl.zeros((BM, BD), WORK)  # [BM, BD]
    b_sum = tl.zeros((BM,), WORK)  # [BM]
    b_max = tl.full((BM,), -float("inf"), WORK)  # [BM], in units of log2 and scaled
    for i in range(begin, end):
        i_key_head = i_head // group
        start_n = i * BN
        b_k = load_rows(k, i_batch, i_key_head, start_n, keys, head_dim, sk, TMA, TYPE, BN, BD)  # [BN, BD]
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION, out_dtype=b_acc.dtype)  # [BM, BN]
        if sign is not None:
            b_s = b_s * sign
        if (i >= full_end) | (i < full_begin):
            o_key = start_n + tl.arange(0, BN)  # [BN]
            m_visible = o_key[None, :] < b_end[:, None]  # [BM, BN]
            if LEFT_BOUND:
                m_visible = m_visible & (o_key[None, :] >= b_first[:, None])
            b_s = tl.where(m_visible, b_s, -float("inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * scale_log2)  # [BM]
        b_base = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)  # no visible key so far: weights of 0, not NaN
        b_p = fast_exp2(b_s * scale_log2 - b_base[:, None])  # [BM, BN]
        b_rescale = fast_exp2(b_max - b_base)  # [BM]
        b_v = load_rows(v, i_batch, i_key_head, start_n, keys, head_dim, sv, TMA, TYPE, BN, BD)  # [BN, BD]
        b_acc = b_acc * b_rescale[:, None]
        b_acc = tl.dot(operand(b_p, TYPE), b_v, b_acc, input_precision=PRECISION, out_dtype=b_acc.dtype)
        b_sum = b_sum * b_rescale + tl.sum(b_p, 1)
        b_max = b_new_max
    empty = b_sum == 0  # a query without visible keys: o is 0 and its LSE is -inf
    b_sum = tl.where(empty, 1.0, b_sum)
    store_rows(p_o, b_acc * (1.0 / b_sum)[:, None], i_batch, i_head, start, tokens, head_dim, so, BM, BD)
    b_lse = tl.where(empty, -float("inf"), (b_max + tl.log2(b_sum)) * LN2)  # [BM]
    tl.store(p_lse + (i_batch * heads + i_head).to(tl.int64) * tokens + o_query, b_lse, mask=m_query)
