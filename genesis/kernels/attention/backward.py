"""The backward kernels of attention: one for the gradient of the queries, one for those of keys and values.

Both compute the scores anew, so each result has one writer. The numbers of rows that the second one reads come from the
first, or from `row_kernel` where the first is not launched. The kernel of the keys holds its scores turned, a row for
each key, so that weights go from registers into the products that sum over queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels.attention.common import (
    LOG2E,
    bounds_of,
    end_key,
    first_key,
    key_blocks,
    numbers_of,
    operand,
    pairs_turned_back,
    place,
    power_of_2,
    rows_of,
    stored,
    stored_back,
    unfolded,
    uniform,
    wider,
)
from genesis.kernels.attention.spilled_ds import left_behind
from genesis.kernels.maths import rounded_product
from genesis.kernels.types import converted

__all__ = ["add_splits", "key_kernel", "query_kernel", "row_kernel"]


# --- Numbers of rows --------------------------------------------------------------------------------------------------


@triton.jit
def row_numbers(p_row, p_low, p_high, p_first, p_g, p_o, p_lse, b_first, i_batch, i_head, i_block, tokens, keys,
                batches, heads, size, sg, so, sl, LEFT: tl.constexpr, WORK: tl.constexpr, BM: tl.constexpr,
                HEAD: tl.constexpr):  # fmt: skip
    """(log2 of its softmax sum, c = Σ g·o) of each query, left for the kernel of the keys, padded to whole blocks; of
    the first head also each query's first visible key, and of the block the bounds of these.
    """
    blocks = tl.cdiv(tokens, BM)
    first = i_block * BM
    i_query, i_d = first + tl.arange(0, BM), tl.arange(0, HEAD)
    m_query = i_query < tokens
    wide_batch, wide_head, o_row = i_batch.to(tl.int64), i_head.to(tl.int64), tl.arange(0, BM)
    wide_rows = tl.zeros((), tl.int64) + batches * heads
    p_g += wide_batch * sg[0] + wide_head * sg[2] + first.to(tl.int64) * sg[1]
    p_o += wide_batch * so[0] + wide_head * so[2] + first.to(tl.int64) * so[1]
    m = m_query[:, None] & (i_d < size)[None, :]
    b_x = tl.load(p_g + o_row[:, None] * sg[1] + i_d[None, :] * sg[3], mask=m, other=0)
    b_o = tl.load(p_o + o_row[:, None] * so[1] + i_d[None, :] * so[3], mask=m, other=0)
    # Two lanes add each other's products. Fused with the addition, each would round the other's only, and what the
    # lanes of a row lay down as its sum would differ in the last bit.
    b_delta = tl.sum(rounded_product(converted(b_x, WORK), converted(b_o, WORK)), 1)
    b_lse = tl.load(
        p_lse + wide_batch * sl[0] + wide_head * sl[1] + i_query.to(tl.int64) * sl[2], mask=m_query, other=-float("inf")
    )
    b_lse = tl.where(b_lse == -float("inf"), float("inf"), b_lse) * LOG2E  # weights of 0 for who saw nothing
    p_row += (wide_batch * heads + i_head) * (blocks * BM) + i_query
    tl.store(p_row, b_lse)
    tl.store(p_row + wide_rows * (blocks * BM), b_delta)
    if LEFT and i_head == 0:
        least, most = bounds_of(b_first, m_query, keys)
        tl.store(p_low + i_batch * blocks + i_block, least)
        tl.store(p_high + i_batch * blocks + i_block, most)
        tl.store(p_first + i_batch * (blocks * BM) + i_query, b_first)
    return b_lse, b_delta


@triton.jit(do_not_specialize=["tokens", "keys", "batches", "heads", "window"])
def row_kernel(p_row, p_low, p_high, p_first, p_g, p_o, p_lse, p_starts, tokens, keys, batches, heads, size, window, sg,
               so, sl, ss, WORK: tl.constexpr, BM: tl.constexpr, HEAD: tl.constexpr):  # fmt: skip
    """`row_numbers` alone."""
    LEFT: tl.constexpr = (p_starts is not None) or (window is not None)
    blocks = tl.cdiv(tokens, BM)
    i_block, i_place = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_batch, i_head = i_place // heads, i_place % heads
    i_query = i_block * BM + tl.arange(0, BM)
    b_first = first_key(p_starts, i_batch, i_query, i_query < tokens, keys - tokens, keys, window, ss)
    row_numbers(
        p_row, p_low, p_high, p_first, p_g, p_o, p_lse, b_first, i_batch, i_head, i_block, tokens, keys, batches, heads,
        size, sg, so, sl, LEFT, WORK, BM, HEAD,
    )  # fmt: skip


# --- Queries ----------------------------------------------------------------------------------------------------------


@triton.jit
def query_step(b_dq, b_q, b_g, b_lse, b_delta, k, v, i_batch, i_head, i_block, whole, to, b_first, b_end, keys,
               size, factor, sign, sk, sv, LEFT: tl.constexpr, SIGNED: tl.constexpr, BOXES: tl.constexpr,
               TYPE: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr, HEAD: tl.constexpr):  # fmt: skip
    """Add what one block of keys gives to the gradient of the queries."""
    first = i_block * BN
    b_k = rows_of(k, i_batch, i_head, first, keys, size, sk, BOXES, TYPE, BN, HEAD)
    b_v = rows_of(v, i_batch, i_head, first, keys, size, sv, BOXES, TYPE, BN, HEAD)
    b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION, out_dtype=b_dq.dtype)
    if SIGNED:
        b_s = b_s * sign
    b_dp = tl.dot(b_g, b_v.T, input_precision=PRECISION, out_dtype=b_dq.dtype)
    b_p = power_of_2(b_s * factor - b_lse[:, None])
    if (i_block >= to) | (i_block < whole):
        i_key = first + tl.arange(0, BN)
        seen = i_key[None, :] < b_end[:, None]
        if LEFT:
            seen = seen & (i_key[None, :] >= b_first[:, None])
        b_p = tl.where(seen, b_p, 0.0)
    b_ds = operand(b_p * (b_dp - b_delta[:, None]), TYPE)
    return tl.dot(b_ds, b_k, b_dq, input_precision=PRECISION, out_dtype=b_dq.dtype)


@triton.jit(do_not_specialize=["tokens", "keys", "batches", "heads", "group", "together", "divided", "window"])
def query_kernel(p_dq, p_row, p_low, p_high, p_first, q, g, k, v, p_g, p_o, p_lse, p_starts, p_cos, p_sin, spread,
                 tokens, keys, batches, heads, group, together, divided, size, window, factor, sign, scale, sd, sg, sq,
                 sk, sv, so, sl, ss, CAUSAL: tl.constexpr, SIGNED: tl.constexpr, BOXES: tl.constexpr,
                 TYPE: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                 HEAD: tl.constexpr):  # fmt: skip
    """dq = scale·ds·k, turned back where there are cos and sin; leaves `row_numbers`."""
    LEFT: tl.constexpr = (p_starts is not None) or (window is not None)
    blocks = tl.cdiv(tokens, BM)
    i_after, i_place = place(blocks, batches * heads, together, divided)
    i_block, i_batch, i_head = blocks - 1 - i_after, i_place // heads, i_place % heads
    first, shift = i_block * BM, keys - tokens
    i_query = first + tl.arange(0, BM)
    m_query = i_query < tokens
    b_first = first_key(p_starts, i_batch, i_query, m_query, shift, keys, window, ss)
    b_lse, b_delta = row_numbers(
        p_row, p_low, p_high, p_first, p_g, p_o, p_lse, b_first, i_batch, i_head, i_block, tokens, keys, batches, heads,
        size, sg, so, sl, LEFT, WORK, BM, HEAD,
    )  # fmt: skip
    b_q = rows_of(q, i_batch, i_head, first, tokens, size, sq, BOXES, TYPE, BM, HEAD)
    b_g = rows_of(g, i_batch, i_head, first, tokens, size, sg, BOXES, TYPE, BM, HEAD)
    b_end = end_key(i_query, shift, keys, CAUSAL)
    low, whole, to, high = key_blocks(
        b_first, m_query, first, tl.minimum(first + BM, tokens), shift, keys, CAUSAL, LEFT, BN
    )
    b_dq = tl.zeros((BM, HEAD), WORK)
    for i in range(low, high):
        b_dq = query_step(
            b_dq, b_q, b_g, b_lse, b_delta, k, v, i_batch, i_head // group, i, whole, to, b_first, b_end, keys, size,
            factor, sign, sk, sv, LEFT, SIGNED, BOXES, TYPE, PRECISION, BN, HEAD,
        )  # fmt: skip
    if p_cos is None:
        stored(p_dq, b_dq * scale, i_batch, i_head, first, tokens, size, sd, BM, HEAD)
    else:
        stored_back(p_dq, b_dq * scale, p_cos, p_sin, i_batch, i_head, first, tokens, spread, sd, BM, HEAD)


# --- Keys and values --------------------------------------------------------------------------------------------------


@triton.jit
def query_blocks(p_low, p_high, i_batch, n_first, tokens, keys, shift, CAUSAL: tl.constexpr, LEFT: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, RATIO: tl.constexpr):  # fmt: skip
    """(low, from, cut, high): query blocks [low, high) see keys of [n_first, n_first + BN). Those before `from` stand
    before some of the keys; of those from `cut` on, some may have their first visible key behind n_first.

    Bounds of first visible keys are of RATIO query blocks together.
    """
    blocks = tl.cdiv(tokens, BM)
    last = tl.minimum(n_first + BN, keys) - 1
    low = tl.maximum(n_first - shift, 0) // BM if CAUSAL else 0
    whole = tl.cdiv(tl.maximum(last - shift, 0), BM) if CAUSAL else 0
    high = blocks
    cut = blocks
    if LEFT:
        high = 0
        bounds = tl.cdiv(tokens, BM * RATIO)
        for t in range(0, bounds, 32):  # a warp's: no warp waits for another
            i = t + tl.arange(0, 32)
            m = i < bounds
            least = tl.load(p_low + i_batch.to(tl.int64) * bounds + i, mask=m, other=0)
            most = tl.load(p_high + i_batch.to(tl.int64) * bounds + i, mask=m, other=0)
            after = tl.where(m & (least <= last), (i + 1) * RATIO, 0)
            before = tl.where(m & ((i + 1) * RATIO > low) & (most > n_first), i * RATIO, blocks)
            before, after = tl.reduce((before, after), 0, wider)
            high, cut = tl.maximum(high, after), tl.minimum(cut, before)
        high, cut = tl.minimum(uniform(high), blocks), uniform(cut)
    high = tl.maximum(high, low)
    whole = tl.maximum(tl.minimum(whole, high), low)
    return low, whole, tl.minimum(tl.maximum(cut, low), high), high


@triton.jit
def key_step(b_dk, b_dv, b_k, b_v, q, g, p_ds, lse, delta, firsts, i_batch, i_head, i_keys, i_block, whole, cut, i_key,
             tokens, padded, heads, shift, size, factor, sign, sq, sg, CAUSAL: tl.constexpr,
             LEFT: tl.constexpr, SIGNED: tl.constexpr, BOXES: tl.constexpr, TYPE: tl.constexpr,
             PRECISION: tl.constexpr, BM: tl.constexpr, HEAD: tl.constexpr):  # fmt: skip
    """Add what one block of queries gives to the gradients of the keys and values."""
    first = i_block * BM
    b_q = rows_of(q, i_batch, i_head, first, tokens, size, sq, BOXES, TYPE, BM, HEAD)
    b_g = rows_of(g, i_batch, i_head, first, tokens, size, sg, BOXES, TYPE, BM, HEAD)
    i_row = (i_batch * heads + i_head) * padded + first
    b_lse = numbers_of(lse, i_row, BOXES, BM)
    b_delta = numbers_of(delta, i_row, BOXES, BM)
    b_s = tl.dot(b_k, b_q.T, input_precision=PRECISION, out_dtype=b_dk.dtype)
    if SIGNED:
        b_s = b_s * sign
    if CAUSAL and i_block < whole:
        b_s = tl.where(i_key[:, None] <= (first + shift + tl.arange(0, BM))[None, :], b_s, -float("inf"))
    b_p = power_of_2(b_s * factor - b_lse[None, :])
    if LEFT and i_block >= cut:
        b_first = numbers_of(firsts, i_batch * padded + first, BOXES, BM)
        b_p = tl.where(i_key[:, None] >= b_first[None, :], b_p, 0.0)
    b_dv = tl.dot(operand(b_p, TYPE), b_g, b_dv, input_precision=PRECISION, out_dtype=b_dk.dtype)
    b_dp = tl.dot(b_v, b_g.T, input_precision=PRECISION, out_dtype=b_dk.dtype)
    b_ds = operand(b_p * (b_dp - b_delta[None, :]), TYPE)
    b_dk = tl.dot(b_ds, b_q, b_dk, input_precision=PRECISION, out_dtype=b_dk.dtype)
    if p_ds is not None:
        left_behind(p_ds, b_ds, i_batch * heads + i_head, i_keys, i_block, tokens)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["tokens", "keys", "batches", "heads", "group", "each", "together", "divided"])
def key_kernel(p_dk, p_dv, q, g, k, v, p_ds, lse, delta, firsts, p_low, p_high, p_cos, p_sin, spread, tokens, keys,
               batches, heads, group, each, together, divided, size, factor, sign, scale, sd, sg, sq, sk, sv,
               CAUSAL: tl.constexpr, SIGNED: tl.constexpr, BOXES: tl.constexpr, TYPE: tl.constexpr, WORK: tl.constexpr,
               PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HEAD: tl.constexpr,
               RATIO: tl.constexpr):  # fmt: skip
    """dv = pᵀ·g and dk = scale·dsᵀ·q over `each` query heads of a key head; the first keys, seen by most, go first.

    dk is turned back where there are cos and sin. ds is left where `p_ds` is, in tiles; see `attention_gathered`.
    """
    LEFT: tl.constexpr = p_low is not None
    splits = tl.cdiv(group, each)
    i_block, i_rest = place(tl.cdiv(keys, BN), batches * heads * splits, together, divided)
    first, shift = i_block * BN, keys - tokens
    i_split = i_rest % splits
    i_batch, i_head = i_rest // splits // heads, i_rest // splits % heads
    i_key = first + tl.arange(0, BN)
    low, whole, cut, high = query_blocks(
        p_low, p_high, i_batch, first, tokens, keys, shift, CAUSAL, LEFT, BM, BN, RATIO
    )
    b_k = rows_of(k, i_batch, i_head, first, keys, size, sk, BOXES, TYPE, BN, HEAD)
    b_v = rows_of(v, i_batch, i_head, first, keys, size, sv, BOXES, TYPE, BN, HEAD)
    b_dk, b_dv = tl.zeros((BN, HEAD), WORK), tl.zeros((BN, HEAD), WORK)
    if p_cos is not None:
        # A zero that is known would be turned back ahead of the loop, for keys that nobody sees. Where that result and
        # the loop's meet, registers are moved while products are on their way, and every product has to wait.
        b_dk = unfolded(b_dk)
    padded = tl.cdiv(tokens, BM * RATIO) * (BM * RATIO)
    member = i_head * group + i_split * each
    members = tl.minimum(each, group - i_split * each)
    count = high - low
    for n in range(0, members * count):  # one loop over heads and blocks: the pipeline does not run dry between heads
        b_dk, b_dv = key_step(
            b_dk, b_dv, b_k, b_v, q, g, p_ds, lse, delta, firsts, i_batch, member + n // count, i_block,
            low + n % count, whole, cut, i_key, tokens, padded, heads * group, shift, size, factor, sign, sq, sg,
            CAUSAL, LEFT, SIGNED, BOXES, TYPE, PRECISION, BM, HEAD,
        )  # fmt: skip
    i_part = i_split * batches + i_batch
    stored(p_dv, b_dv, i_part, i_head, first, keys, size, sd, BN, HEAD)
    if p_cos is None:
        stored(p_dk, b_dk * scale, i_part, i_head, first, keys, size, sd, BN, HEAD)
    else:
        stored_back(p_dk, b_dk * scale, p_cos, p_sin, i_part, i_head, first, keys, spread, sd, BN, HEAD)


@triton.jit
def added(p_x, n, m, SPLITS: tl.constexpr):
    """The sum over splits, which are `n` elements apart, in order."""
    b_x = tl.load(p_x, mask=m)
    for _ in tl.static_range(1, SPLITS):
        p_x += n
        b_x += tl.load(p_x, mask=m)
    return b_x


@triton.jit(do_not_specialize=["rows", "tokens", "heads"])
def add_splits(p_dk, p_dv, p_dks, p_dvs, p_cos, p_sin, spread, rows, tokens, heads, step, SIZE: tl.constexpr,
               SPLITS: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Sums over the splits of rows (sequence, token, head); dk is turned back where there are cos and sin.

    The halves of a head are tiles of their own, so that both columns of a pair are in one thread.

    Args:
        step: elements from one token's heads to the next one's in dk and dv.
    """
    HALF: tl.constexpr = (SIZE + 1) // 2
    i_row, i_pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    i_token = i_row // heads
    o = (i_row.to(tl.int64) * SIZE)[:, None] + i_pair[None, :]
    o_x = (i_token.to(tl.int64) * step + i_row % heads * SIZE)[:, None] + i_pair[None, :]
    m = (i_row < rows)[:, None] & (i_pair < HALF)[None, :]
    m_right = m & (i_pair < SIZE - HALF)[None, :]
    n = (tl.zeros((), tl.int64) + rows) * SIZE
    b_dv, b_dv_right = added(p_dvs + o, n, m, SPLITS), added(p_dvs + o + HALF, n, m_right, SPLITS)
    b_dk, b_dk_right = added(p_dks + o, n, m, SPLITS), added(p_dks + o + HALF, n, m_right, SPLITS)
    if p_cos is not None:
        o_turn = (i_token // tokens).to(tl.int64) * spread + i_token % tokens * HALF
        b_dk, b_dk_right = pairs_turned_back(b_dk, b_dk_right, p_cos, p_sin, o_turn[:, None] + i_pair[None, :], m)
    tl.store(p_dk + o_x, converted(b_dk, p_dk.dtype.element_ty), mask=m)
    tl.store(p_dk + o_x + HALF, converted(b_dk_right, p_dk.dtype.element_ty), mask=m_right)
    tl.store(p_dv + o_x, converted(b_dv, p_dv.dtype.element_ty), mask=m)
    tl.store(p_dv + o_x + HALF, converted(b_dv_right, p_dv.dtype.element_ty), mask=m_right)
