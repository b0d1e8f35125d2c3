"""The forward kernel of attention: a running softmax, query block by query block.

Keys go in blocks of BN; those of which a query of the block sees only a part are masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels.attention.common import (
    LN2,
    end_key,
    first_key,
    key_blocks,
    operand,
    place,
    power_of_2,
    rows_of,
    stored,
)

__all__ = ["forward_kernel"]


@triton.jit
def attend(b_acc, b_sum, b_top, b_q, k, v, i_batch, i_head, i_block, whole, to, b_first, b_end, keys, size, factor,
           sign, sk, sv, LEFT: tl.constexpr, SIGNED: tl.constexpr, BOXES: tl.constexpr, TYPE: tl.constexpr,
           PRECISION: tl.constexpr, BN: tl.constexpr, HEAD: tl.constexpr):  # fmt: skip
    """One block of keys into the running softmax: weighted sum, sum of weights and maximum."""
    first = i_block * BN
    b_k = rows_of(k, i_batch, i_head, first, keys, size, sk, BOXES, TYPE, BN, HEAD)
    b_s = tl.dot(b_q, b_k.T, input_precision=PRECISION, out_dtype=b_acc.dtype)
    if SIGNED:
        b_s = b_s * sign
    if (i_block >= to) | (i_block < whole):
        i_key = first + tl.arange(0, BN)
        seen = i_key[None, :] < b_end[:, None]
        if LEFT:
            seen = seen & (i_key[None, :] >= b_first[:, None])
        b_s = tl.where(seen, b_s, -float("inf"))
    b_new = tl.maximum(b_top, tl.max(b_s, 1) * factor)
    b_base = tl.where(b_new == -float("inf"), 0.0, b_new)  # a query that has seen nothing yet: weights of 0, not NaN
    b_p = power_of_2(b_s * factor - b_base[:, None])
    b_less = power_of_2(b_top - b_base)
    b_v = rows_of(v, i_batch, i_head, first, keys, size, sv, BOXES, TYPE, BN, HEAD)
    b_acc = b_acc * b_less[:, None]
    b_acc = tl.dot(operand(b_p, TYPE), b_v, b_acc, input_precision=PRECISION, out_dtype=b_acc.dtype)
    return b_acc, b_sum * b_less + tl.sum(b_p, 1), b_new


@triton.jit(do_not_specialize=["tokens", "keys", "batches", "heads", "group", "together", "divided", "window"])
def forward_kernel(p_o, p_lse, q, k, v, p_starts, tokens, keys, batches, heads, group, together, divided, size,
                   window, factor, sign, so, sq, sk, sv, ss, CAUSAL: tl.constexpr, SIGNED: tl.constexpr,
                   BOXES: tl.constexpr, TYPE: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, HEAD: tl.constexpr):  # fmt: skip
    LEFT: tl.constexpr = (p_starts is not None) or (window is not None)
    # the last queries, which see the most keys, go first
    blocks = tl.cdiv(tokens, BM)
    i_after, i_place = place(blocks, batches * heads, together, divided)
    i_block, i_batch, i_head = blocks - 1 - i_after, i_place // heads, i_place % heads
    first, shift = i_block * BM, keys - tokens
    i_query = first + tl.arange(0, BM)
    m_query = i_query < tokens
    b_first = first_key(p_starts, i_batch, i_query, m_query, shift, keys, window, ss)  # its way is long: it goes first
    b_q = rows_of(q, i_batch, i_head, first, tokens, size, sq, BOXES, TYPE, BM, HEAD)
    b_end = end_key(i_query, shift, keys, CAUSAL)
    low, whole, to, high = key_blocks(
        b_first, m_query, first, tl.minimum(first + BM, tokens), shift, keys, CAUSAL, LEFT, BN
    )
    b_acc = tl.zeros((BM, HEAD), WORK)
    b_sum = tl.zeros((BM,), WORK)
    b_top = tl.full((BM,), -float("inf"), WORK)
    for i in range(low, high):
        b_acc, b_sum, b_top = attend(
            b_acc, b_sum, b_top, b_q, k, v, i_batch, i_head // group, i, whole, to, b_first, b_end, keys, size, factor,
            sign, sk, sv, LEFT, SIGNED, BOXES, TYPE, PRECISION, BN, HEAD,
        )  # fmt: skip
    empty = b_sum == 0  # a query that sees no key: 0, and -inf for the logarithm
    b_sum = tl.where(empty, 1.0, b_sum)
    stored(p_o, b_acc * (1.0 / b_sum)[:, None], i_batch, i_head, first, tokens, size, so, BM, HEAD)
    b_lse = tl.where(empty, -float("inf"), (b_top + tl.log2(b_sum)) * LN2)
    tl.store(p_lse + (i_batch * heads + i_head).to(tl.int64) * tokens + i_query, b_lse, mask=m_query)
