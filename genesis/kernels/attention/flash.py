"""The attention kernels: forward, dQ, and dK/dV.

Plain reference: genesis/ops/attention.py: `attention`, `attention_backward`. The forward kernel computes
o = softmax(scale·q·kᵀ)·v over each query's visible keys, and the LSE of the scores. Each program passes once over the
blocks of keys (online softmax) for one block of queries. Only blocks at the ends of the visible range need a mask.

With p = 2^(scaled scores - lse), delta = rowsum(dO·O) and ds = p·(dO·vᵀ - delta): dV = pᵀ·dO, dQ = scale·ds·k,
dK = scale·dsᵀ·q. Both backward kernels recompute the scores, so every result has one writer. The dQ kernel stores LSE
and delta for the dK/dV kernel; `attention_bwd_delta` stores them where dQ comes from spilled ds. The dK/dV kernel holds
the scores transposed, one row per key, so that weights feed the dots that sum over queries from registers.

Shapes: B batches, T queries, S keys, H heads, D head dimension, `g` is dO. Tiles: BM queries, BN keys, BD columns (D
padded). common.py describes the arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels.attention.common import (
    LN2,
    LOG2E,
    extent,
    fast_exp2,
    inverse_rope,
    is_partial,
    key_block,
    left_bounds,
    load_rows,
    load_vector,
    merge_ranges,
    opaque,
    operand,
    query_block,
    store_gradient,
    store_rows,
    unchained,
    visible,
    visible_end,
    visible_key_blocks,
    warp_uniform,
)
from genesis.kernels.attention.spilled_ds import store_ds
from genesis.kernels.elements import converted
from genesis.kernels.maths import rounded_product

# --- Forward ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["sizes"])
def attention_fwd(p_o, p_lse, q, k, v, p_doc_starts, sizes, head_dim, scales, strides, CAUSAL: tl.constexpr,
                  TMA: tl.constexpr, DOT: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Compute o [B, T, H, D] and lse [B, H, T] from q [B, T, H, D], k and v [B, S, H / group, D]."""
    tokens, keys, batches, heads, group, window = sizes
    scale_log2, sign = scales
    so, sq, sk, sv, ss = strides
    TYPE: tl.constexpr = DOT[0]
    WORK: tl.constexpr = DOT[1]
    PRECISION: tl.constexpr = DOT[2]
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    BD: tl.constexpr = TILE[2]
    LEFT_BOUND: tl.constexpr = (p_doc_starts is not None) or (window is not None)
    HAS_GAPS: tl.constexpr = ss[2] is not None
    i_block, i_batch, i_head = query_block(tokens, batches, heads, BM)
    start, diagonal = i_block * BM, keys - tokens
    o_query = start + tl.arange(0, BM)  # [BM]
    m_query = o_query < tokens  # [BM]
    bounds = left_bounds(  # before all other loads because its latency is the longest
        p_doc_starts, i_batch, o_query, m_query, diagonal, keys, window, ss
    )  # fmt: skip
    b_q = load_rows(q, i_batch, i_head, start, tokens, head_dim, sq, TMA, TYPE, BM, BD)  # [BM, BD]
    b_end = visible_end(o_query, diagonal, keys, CAUSAL)  # [BM]
    begin, full_begin, full_end, end, gaps = visible_key_blocks(
        bounds, m_query, start, tl.minimum(start + BM, tokens), diagonal, keys, CAUSAL, LEFT_BOUND, HAS_GAPS, BN
    )
    # Pass over the visible blocks of keys.
    b_acc = tl.zeros((BM, BD), WORK)  # [BM, BD]
    b_sum = tl.zeros((BM,), WORK)  # [BM]
    b_max = tl.full((BM,), -float("inf"), WORK)  # [BM], scaled, in units of log2
    for n in range(begin, end - gaps[1]):
        i, i_key_head = key_block(n, gaps, HAS_GAPS), i_head // group
        start_n = i * BN
        b_k = load_rows(k, i_batch, i_key_head, start_n, keys, head_dim, sk, TMA, TYPE, BN, BD)  # [BN, BD]
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION, out_dtype=b_acc.dtype)  # [BM, BN]
        if sign is not None:
            b_s = b_s * sign
        # Mask only the blocks at the ends of the visible range.
        if is_partial(i, full_begin, full_end, gaps, HAS_GAPS, BN):
            m_visible = visible(start_n + tl.arange(0, BN), b_end, bounds, LEFT_BOUND, HAS_GAPS)  # [BM, BN]
            b_s = tl.where(m_visible, b_s, -float("inf"))
        # Online softmax: rescale the sums so far to the new maximum.
        b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * scale_log2)  # [BM]
        b_base = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)  # [BM]; keeps weights 0, not NaN, without keys
        b_p = fast_exp2(b_s * scale_log2 - b_base[:, None])  # [BM, BN]
        b_rescale = fast_exp2(b_max - b_base)  # [BM]
        b_v = load_rows(v, i_batch, i_key_head, start_n, keys, head_dim, sv, TMA, TYPE, BN, BD)  # [BN, BD]
        b_acc = b_acc * b_rescale[:, None]  # [BM, BD]
        b_acc = tl.dot(operand(b_p, TYPE), b_v, b_acc, input_precision=PRECISION, out_dtype=b_acc.dtype)  # [BM, BD]
        b_sum = b_sum * b_rescale + tl.sum(b_p, 1)  # [BM]
        b_max = b_new_max
    # Normalize, and store o and LSE.
    empty = b_sum == 0  # [BM]; a query without visible keys has o = 0 and an LSE of -inf
    b_sum = tl.where(empty, 1.0, b_sum)  # [BM]
    store_rows(p_o, b_acc * (1.0 / b_sum)[:, None], i_batch, i_head, start, tokens, head_dim, so, BM, BD)
    b_lse = tl.where(empty, -float("inf"), (b_max + tl.log2(b_sum)) * LN2)  # [BM]
    tl.store(p_lse + (i_batch * heads + i_head).to(tl.int64) * tokens + o_query, b_lse, mask=m_query)


# --- LSE and delta ----------------------------------------------------------------------------------------------------


@triton.jit
def store_bound(p_extent, p_bound, b_x, m_query, keys, rows):
    """Store a left bound of each query, and its extent; `rows` elements are between the smallest and the largest."""
    least, most = extent(b_x, m_query, keys)
    tl.store(p_extent, least)
    tl.store(p_extent + rows, most)
    tl.store(p_bound, b_x)


@triton.jit
def store_lse_and_delta(p_stats, p_extents, p_left, p_g, p_o, p_lse, bounds, o_row, o_d, tile, sizes, head_dim,
                        strides, LEFT_BOUND: tl.constexpr, HAS_GAPS: tl.constexpr, WORK: tl.constexpr,
                        BM: tl.constexpr):  # fmt: skip
    """Return LSE in units of log2 and delta = rowsum(dO · O) of a block of queries, [BM] each, after storing them.

    The first head also stores the left bounds of each query, and their extents over the block.

    Args:
        p_stats: [2, batches·heads·blocks·BM]: LSE, then delta, padded to whole blocks.
        p_extents: smallest and largest of each left bound in each block, [2 or 6, batches·blocks].
        p_left: `bounds` of each query, [1 or 3, batches·blocks·BM]; first visible keys, and with HAS_GAPS all of them.
        o_row: 0 to BM - 1; `o_d` are 0 to BD - 1.
        tile: (i_batch, i_head, i_block).
        sizes: (tokens, keys, batches, heads).
        strides: strides of g, o and lse.
    """
    i_batch, i_head, i_block = tile
    tokens, keys, batches, heads = sizes
    sg, so, sl = strides
    blocks = tl.cdiv(tokens, BM)
    start = i_block * BM
    o_query = start + o_row  # [BM]
    m_query = o_query < tokens  # [BM]
    batch64, head64 = i_batch.to(tl.int64), i_head.to(tl.int64)
    rows64 = tl.cast(batches * heads, tl.int64)
    p_g += batch64 * sg[0] + head64 * sg[2] + start.to(tl.int64) * sg[1]
    p_o += batch64 * so[0] + head64 * so[2] + start.to(tl.int64) * so[1]
    m = m_query[:, None] & (o_d < head_dim)[None, :]  # [BM, BD]
    b_g = tl.load(p_g + o_row[:, None] * sg[1] + o_d[None, :] * sg[3], mask=m, other=0)  # [BM, BD]
    b_o = tl.load(p_o + o_row[:, None] * so[1] + o_d[None, :] * so[3], mask=m, other=0)  # [BM, BD]
    # Two lanes add each other's products. If the multiplication were fused with the addition, each lane would round
    # only the other lane's product, and the lanes of a row would store sums that differ in the last bit.
    b_delta = tl.sum(rounded_product(converted(b_g, WORK), converted(b_o, WORK)), 1)  # [BM]
    b_lse = tl.load(
        p_lse + batch64 * sl[0] + head64 * sl[1] + o_query.to(tl.int64) * sl[2], mask=m_query, other=-float("inf")
    )
    b_lse = tl.where(b_lse == -float("inf"), float("inf"), b_lse) * LOG2E  # [BM]; no visible key: weights are 0
    p_stats += (batch64 * heads + i_head) * (blocks * BM) + o_query
    tl.store(p_stats, b_lse)
    tl.store(p_stats + rows64 * (blocks * BM), b_delta)
    if LEFT_BOUND and i_head == 0:
        p_extent, p_bound = p_extents + i_batch * blocks + i_block, p_left + i_batch * (blocks * BM) + o_query
        rows = batches * blocks
        store_bound(p_extent, p_bound, bounds[0], m_query, keys, rows)
        if HAS_GAPS:
            store_bound(p_extent + 2 * rows, p_bound + rows * BM, bounds[1], m_query, keys, rows)
            store_bound(p_extent + 4 * rows, p_bound + 2 * rows * BM, bounds[2], m_query, keys, rows)
    return b_lse, b_delta


@triton.jit(do_not_specialize=["sizes"])
def attention_bwd_delta(p_stats, p_extents, p_left, p_g, p_o, p_lse, p_doc_starts, sizes, head_dim, strides,
                        WORK: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Run only `store_lse_and_delta`.

    Args:
        sizes: (tokens, keys, batches, heads, window).
        strides: strides of g, o, lse and doc_starts.
    """
    tokens, keys, batches, heads, window = sizes
    sg, so, sl, ss = strides
    LEFT_BOUND: tl.constexpr = (p_doc_starts is not None) or (window is not None)
    HAS_GAPS: tl.constexpr = ss[2] is not None
    blocks = tl.cdiv(tokens, BM)
    i_block, i_batch_head = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_batch, i_head = i_batch_head // heads, i_batch_head % heads
    o_query = i_block * BM + tl.arange(0, BM)  # [BM]
    bounds = left_bounds(p_doc_starts, i_batch, o_query, o_query < tokens, keys - tokens, keys, window, ss)
    store_lse_and_delta(
        p_stats, p_extents, p_left, p_g, p_o, p_lse, bounds, tl.arange(0, BM), tl.arange(0, BD),
        (i_batch, i_head, i_block), (tokens, keys, batches, heads), head_dim, (sg, so, sl), LEFT_BOUND, HAS_GAPS, WORK,
        BM,
    )  # fmt: skip


# --- dQ ---------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["sizes"])
def attention_bwd_dq(p_dq, p_stats, p_extents, p_left, q, g, k, v, p_g, p_o, p_lse, p_doc_starts, p_cos, p_sin,
                     rope_stride, sizes, head_dim, scales, strides, CAUSAL: tl.constexpr, TMA: tl.constexpr,
                     DOT: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Compute dQ = scale·ds·k, with the inverse RoPE if p_cos is given, and store LSE and delta for dK/dV."""
    tokens, keys, batches, heads, group, window = sizes
    scale_log2, sign, scale = scales
    sd, sg, sq, sk, sv, so, sl, ss = strides
    TYPE: tl.constexpr = DOT[0]
    WORK: tl.constexpr = DOT[1]
    PRECISION: tl.constexpr = DOT[2]
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    BD: tl.constexpr = TILE[2]
    LEFT_BOUND: tl.constexpr = (p_doc_starts is not None) or (window is not None)
    HAS_GAPS: tl.constexpr = ss[2] is not None
    i_block, i_batch, i_head = query_block(tokens, batches, heads, BM)
    start, diagonal = i_block * BM, keys - tokens
    o_query = start + tl.arange(0, BM)  # [BM]
    m_query = o_query < tokens  # [BM]
    bounds = left_bounds(p_doc_starts, i_batch, o_query, m_query, diagonal, keys, window, ss)
    b_lse, b_delta = store_lse_and_delta(  # [BM] each
        p_stats, p_extents, p_left, p_g, p_o, p_lse, bounds, tl.arange(0, BM), tl.arange(0, BD),
        (i_batch, i_head, i_block), (tokens, keys, batches, heads), head_dim, (sg, so, sl), LEFT_BOUND, HAS_GAPS, WORK,
        BM,
    )  # fmt: skip
    b_q = load_rows(q, i_batch, i_head, start, tokens, head_dim, sq, TMA, TYPE, BM, BD)  # [BM, BD]
    b_g = load_rows(g, i_batch, i_head, start, tokens, head_dim, sg, TMA, TYPE, BM, BD)  # [BM, BD]
    b_end = visible_end(o_query, diagonal, keys, CAUSAL)  # [BM]
    begin, full_begin, full_end, end, gaps = visible_key_blocks(
        bounds, m_query, start, tl.minimum(start + BM, tokens), diagonal, keys, CAUSAL, LEFT_BOUND, HAS_GAPS, BN
    )
    # Pass over the visible blocks of keys.
    b_dq = tl.zeros((BM, BD), WORK)  # [BM, BD]
    for n in range(begin, end - gaps[1]):
        i, i_key_head = key_block(n, gaps, HAS_GAPS), i_head // group
        start_n = i * BN
        b_k = load_rows(k, i_batch, i_key_head, start_n, keys, head_dim, sk, TMA, TYPE, BN, BD)  # [BN, BD]
        b_v = load_rows(v, i_batch, i_key_head, start_n, keys, head_dim, sv, TMA, TYPE, BN, BD)  # [BN, BD]
        b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION, out_dtype=b_dq.dtype)  # [BM, BN]
        if sign is not None:
            b_s = b_s * sign
        b_dp = tl.dot(b_g, b_v.T, input_precision=PRECISION, out_dtype=b_dq.dtype)  # [BM, BN]
        b_p = fast_exp2(b_s * scale_log2 - b_lse[:, None])  # [BM, BN]
        # Mask only the blocks at the ends of the visible range.
        if is_partial(i, full_begin, full_end, gaps, HAS_GAPS, BN):
            m_visible = visible(start_n + tl.arange(0, BN), b_end, bounds, LEFT_BOUND, HAS_GAPS)  # [BM, BN]
            b_p = tl.where(m_visible, b_p, 0.0)
        b_ds = operand(b_p * (b_dp - b_delta[:, None]), TYPE)  # [BM, BN]
        b_dq = tl.dot(b_ds, b_k, b_dq, input_precision=PRECISION, out_dtype=b_dq.dtype)  # [BM, BD]
    store_gradient(p_dq, b_dq * scale, p_cos, p_sin, rope_stride, i_batch, i_head, start, tokens, head_dim, sd, BM, BD)


# --- dK and dV --------------------------------------------------------------------------------------------------------


@triton.jit
def visible_query_blocks(p_extents, i_batch, batches, start_n, tokens, keys, diagonal, o_lane, CAUSAL: tl.constexpr,
                         LEFT_BOUND: tl.constexpr, HAS_GAPS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                         RATIO: tl.constexpr):  # fmt: skip
    """Return (begin, causal_end, left_begin, end). Query blocks [begin, end) see keys in [start_n, start_n + BN).
    Blocks before `causal_end` need the causal mask; blocks from `left_begin` on need the mask of left bounds.

    Each extent at `p_extents` covers RATIO query blocks. `o_lane` are 0 to 31. A block of keys that all queries of an
    extent skip is found by the same comparisons as in `visible_key_blocks`, because dQ may read only what dK/dV spills.
    """
    blocks = tl.cdiv(tokens, BM)
    last = tl.minimum(start_n + BN, keys) - 1
    begin = tl.maximum(start_n - diagonal, 0) // BM if CAUSAL else 0
    causal_end = tl.cdiv(tl.maximum(last - diagonal, 0), BM) if CAUSAL else 0
    end = blocks
    left_begin = blocks
    if LEFT_BOUND:
        end = 0
        count = tl.cdiv(tokens, BM * RATIO)
        for t in range(0, count, 32):  # one warp's lanes, so that no warp waits for another
            o = t + o_lane  # [32]
            m = o < count
            p_extent, step = p_extents + i_batch.to(tl.int64) * count + o, batches * count
            least = tl.load(p_extent, mask=m, other=0)  # [32]
            most = tl.load(p_extent + step, mask=m, other=0)  # [32]
            m_seen, m_partial = m & (least <= last), m & (most > start_n)  # [32] each
            if HAS_GAPS:
                first_gap = tl.load(p_extent + 2 * step, mask=m, other=0)  # [32]
                last_gap = tl.load(p_extent + 3 * step, mask=m, other=0)  # [32]
                first_end = tl.load(p_extent + 4 * step, mask=m, other=0)  # [32]
                last_end = tl.load(p_extent + 5 * step, mask=m, other=0)  # [32]
                before_own = tl.minimum(first_end, o * (RATIO * BM) + diagonal)  # [32]
                m_seen = m_seen & ((last_gap > start_n) | (start_n + BN > before_own))
                m_partial = m_partial | (m & (start_n < last_end) & (start_n + BN > first_gap))
            after = tl.where(m_seen, (o + 1) * RATIO, 0)
            before = tl.where(m_partial & ((o + 1) * RATIO > begin), o * RATIO, blocks)
            before, after = tl.reduce((before, after), 0, merge_ranges)
            end, left_begin = tl.maximum(end, after), tl.minimum(left_begin, before)
        end, left_begin = tl.minimum(warp_uniform(end), blocks), warp_uniform(left_begin)
    end = tl.maximum(end, begin)
    causal_end = tl.maximum(tl.minimum(causal_end, end), begin)
    return begin, causal_end, tl.minimum(tl.maximum(left_begin, begin), end), end


@triton.jit
def inside_left_bounds(b_p, o_key, p_left, step, HAS_GAPS: tl.constexpr):
    """Return weights b_p [BN, BM] with 0 for keys outside the bounds at p_left, which are `step` elements apart."""
    b_p = tl.where(o_key[:, None] >= tl.load(p_left)[None, :], b_p, 0.0)
    if HAS_GAPS:
        b_gap, b_gap_end = tl.load(p_left + step), tl.load(p_left + 2 * step)  # [BM] each
        b_p = tl.where((o_key[:, None] < b_gap[None, :]) | (o_key[:, None] >= b_gap_end[None, :]), b_p, 0.0)
    return b_p


@triton.jit
def add_sum_over_queries(b_acc, b_w, b_x, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return b_acc + b_w·b_x for weights b_w [BN, BM] and query rows b_x [BM, BD]; [BD, BN] where TRANSPOSED.

    With heads of more than 128 columns, 8 warps share the columns. Weights in registers would then have to move between
    threads for their dot, which serializes wgmmas. The transposed product reads them from shared memory.
    """
    if TRANSPOSED:
        return tl.dot(b_x.T, b_w.T, b_acc, input_precision=PRECISION, out_dtype=b_acc.dtype)  # [BD, BN]
    else:
        return tl.dot(b_w, b_x, b_acc, input_precision=PRECISION, out_dtype=b_acc.dtype)  # [BN, BD]


@triton.jit(do_not_specialize=["sizes"])
def attention_bwd_dkdv(p_dk, p_dv, q, g, k, v, p_ds, lse, delta, p_extents, p_left, p_cos, p_sin, rope_stride, sizes,
                       head_dim, scales, strides, CAUSAL: tl.constexpr, HAS_GAPS: tl.constexpr, TMA: tl.constexpr,
                       DOT: tl.constexpr, TILE: tl.constexpr, RATIO: tl.constexpr):  # fmt: skip
    """Compute dV = pᵀ·dO and dK = scale·dsᵀ·q, summed over `group_part` query heads of a key head.

    dK goes through the inverse RoPE if p_cos is given. If p_ds is given, ds is stored too; see spilled_ds.py. The first
    keys, which the most queries see, run first.

    Args:
        lse: stored by `store_lse_and_delta`; a descriptor with TMA, like `delta`.
        sizes: (tokens, keys, batches, key heads, group, group_part).
        RATIO: blocks of BM queries per block of the kernel that stored `lse`.
    """
    tokens, keys, batches, heads, group, group_part = sizes
    scale_log2, sign, scale = scales
    sd, sg, sq, sk, sv = strides
    TYPE: tl.constexpr = DOT[0]
    WORK: tl.constexpr = DOT[1]
    PRECISION: tl.constexpr = DOT[2]
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    BD: tl.constexpr = TILE[2]
    LEFT_BOUND: tl.constexpr = p_left is not None
    splits = tl.cdiv(group, group_part)
    i_block, i_rest = tl.program_id(0) // (batches * heads * splits), tl.program_id(0) % (batches * heads * splits)
    start_n, diagonal = i_block * BN, keys - tokens
    i_split = i_rest % splits
    i_batch, i_head = i_rest // splits // heads, i_rest // splits % heads
    o_key = start_n + tl.arange(0, BN)  # [BN]
    begin, causal_end, left_begin, end = visible_query_blocks(
        p_extents, i_batch, batches, start_n, tokens, keys, diagonal, tl.arange(0, 32), CAUSAL, LEFT_BOUND, HAS_GAPS,
        BM, BN, RATIO,
    )  # fmt: skip
    b_k = load_rows(k, i_batch, i_head, start_n, keys, head_dim, sk, TMA, TYPE, BN, BD)  # [BN, BD]
    b_v = load_rows(v, i_batch, i_head, start_n, keys, head_dim, sv, TMA, TYPE, BN, BD)  # [BN, BD]
    TRANSPOSED: tl.constexpr = TMA and BD > 128
    b_dk = tl.zeros((BD, BN) if TRANSPOSED else (BN, BD), WORK)  # [BN, BD], or transposed
    b_dv = tl.zeros((BD, BN) if TRANSPOSED else (BN, BD), WORK)  # [BN, BD], or transposed
    if p_cos is not None:
        # The compiler would hoist the inverse RoPE of a known zero (for keys that no query sees) above the loop. Where
        # that result and the loop's merge, it moves registers while wgmmas are in flight, and each of them must wait.
        b_dk = opaque(b_dk)
    padded = tl.cdiv(tokens, BM * RATIO) * (BM * RATIO)
    first_head = i_head * group + i_split * group_part
    head_count = tl.minimum(group_part, group - i_split * group_part)
    count = end - begin
    # A single loop over heads and blocks keeps the pipeline full between heads.
    for n in range(0, head_count * count):
        i_query_head = first_head + n // count
        i_query_block = begin + n % count
        query_heads = heads * group
        start_m = i_query_block * BM
        b_q = load_rows(q, i_batch, i_query_head, start_m, tokens, head_dim, sq, TMA, TYPE, BM, BD)  # [BM, BD]
        b_g = load_rows(g, i_batch, i_query_head, start_m, tokens, head_dim, sg, TMA, TYPE, BM, BD)  # [BM, BD]
        i_row = (i_batch * query_heads + i_query_head) * padded + start_m
        b_lse = load_vector(lse, i_row, TMA, BM)  # [BM]
        b_delta = load_vector(delta, i_row, TMA, BM)  # [BM]
        b_s = tl.dot(b_k, b_q.T, input_precision=PRECISION, out_dtype=b_dk.dtype)  # [BN, BM]
        if TRANSPOSED:
            b_s = unchained(b_s, tokens < 0)
        if sign is not None:
            b_s = b_s * sign
        if CAUSAL and i_query_block < causal_end:
            m_causal = o_key[:, None] <= (start_m + diagonal + tl.arange(0, BM))[None, :]  # [BN, BM]
            b_s = tl.where(m_causal, b_s, -float("inf"))
        b_p = fast_exp2(b_s * scale_log2 - b_lse[None, :])  # [BN, BM]
        if LEFT_BOUND and i_query_block >= left_begin:
            p_bound = p_left + i_batch * padded + start_m + tl.arange(0, BM)  # [BM]
            b_p = inside_left_bounds(b_p, o_key, p_bound, batches * padded, HAS_GAPS)
        # dV from the weights, then ds, then dK.
        b_dv = add_sum_over_queries(b_dv, operand(b_p, TYPE), b_g, PRECISION, TRANSPOSED)
        b_dp = tl.dot(b_v, b_g.T, input_precision=PRECISION, out_dtype=b_dk.dtype)  # [BN, BM]
        if TRANSPOSED:
            b_dp = unchained(b_dp, tokens < 0)
        b_ds = operand(b_p * (b_dp - b_delta[None, :]), TYPE)  # [BN, BM]
        b_dk = add_sum_over_queries(b_dk, b_ds, b_q, PRECISION, TRANSPOSED)
        if p_ds is not None:
            store_ds(
                p_ds, b_ds, tl.arange(0, BN), tl.arange(0, BM), i_batch * query_heads + i_query_head, i_block,
                i_query_block, tokens, 8 if TRANSPOSED else 4,
            )  # fmt: skip
    # Store this split's dV and dK.
    if TRANSPOSED:
        b_dk, b_dv = b_dk.T, b_dv.T
    i_part = i_split * batches + i_batch
    store_rows(p_dv, b_dv, i_part, i_head, start_n, keys, head_dim, sd, BN, BD)
    store_gradient(p_dk, b_dk * scale, p_cos, p_sin, rope_stride, i_part, i_head, start_n, keys, head_dim, sd, BN, BD)


@triton.jit
def sum_splits(p_x, step, m, SPLITS: tl.constexpr):
    """Return the sum over splits in order. Splits are `step` elements apart."""
    b_x = tl.load(p_x, mask=m)  # [ROWS, PADDED]
    for _ in tl.static_range(1, SPLITS):
        p_x += step
        b_x += tl.load(p_x, mask=m)
    return b_x


@triton.jit(do_not_specialize=["rows", "tokens", "heads"])
def attention_bwd_reduce_splits(p_dk, p_dv, p_dks, p_dvs, p_cos, p_sin, rope_stride, rows, tokens, heads, token_stride,
                                SIZE: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
                                PADDED: tl.constexpr):  # fmt: skip
    """Sum dK and dV over SPLITS for ROWS rows (sequence, token, head) of SIZE columns, with the inverse RoPE of dK if
    p_cos is given.

    The halves of a head are separate tiles [ROWS, PADDED], so that one thread holds both columns of a pair.

    Args:
        token_stride: elements between neighbouring tokens in dk and dv; the heads of a token are contiguous.
    """
    HALF: tl.constexpr = (SIZE + 1) // 2
    o_row, o_pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)  # [ROWS], [PADDED]
    i_token = o_row // heads  # [ROWS]
    o_split = (o_row.to(tl.int64) * SIZE)[:, None] + o_pair[None, :]  # [ROWS, PADDED]
    o_out = (i_token.to(tl.int64) * token_stride + o_row % heads * SIZE)[:, None] + o_pair[None, :]  # [ROWS, PADDED]
    m = (o_row < rows)[:, None] & (o_pair < HALF)[None, :]  # [ROWS, PADDED]
    m_right = m & (o_pair < SIZE - HALF)[None, :]  # [ROWS, PADDED]
    step = (tl.zeros((), tl.int64) + rows) * SIZE
    b_dv = sum_splits(p_dvs + o_split, step, m, SPLITS)  # [ROWS, PADDED]
    b_dv_right = sum_splits(p_dvs + o_split + HALF, step, m_right, SPLITS)  # [ROWS, PADDED]
    b_dk = sum_splits(p_dks + o_split, step, m, SPLITS)  # [ROWS, PADDED]
    b_dk_right = sum_splits(p_dks + o_split + HALF, step, m_right, SPLITS)  # [ROWS, PADDED]
    if p_cos is not None:
        o_rope = (i_token // tokens).to(tl.int64) * rope_stride + i_token % tokens * HALF  # [ROWS]
        b_dk, b_dk_right = inverse_rope(b_dk, b_dk_right, p_cos, p_sin, o_rope[:, None] + o_pair[None, :], m)
    tl.store(p_dk + o_out, converted(b_dk, p_dk.dtype.element_ty), mask=m)
    tl.store(p_dk + o_out + HALF, converted(b_dk_right, p_dk.dtype.element_ty), mask=m_right)
    tl.store(p_dv + o_out, converted(b_dv, p_dv.dtype.element_ty), mask=m)
    tl.store(p_dv + o_out + HALF, converted(b_dv_right, p_dv.dtype.element_ty), mask=m_right)
