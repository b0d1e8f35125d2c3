"""Loads, normalises and rotates the heads of a generation step's token.

Plain reference: genesis/ops/attention_step.py: `attention_step`. attention_step.py and attention_step_blocks.py use it.

Tiles: [heads, BD], for BD padded columns of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels import maths
from genesis.kernels.attention.common import operand
from genesis.kernels.elements import converted
from genesis.kernels.maths import rounded_product
from genesis.kernels.norm.norm import row_sum, rsqrt


@triton.jit
def loaded_tile(p, m):
    """Load keys or values, 0 where the mask is not set."""
    if p.dtype.element_ty == tl.float8e4nv:
        return tl.load(p.to(tl.pointer_type(tl.uint8)), mask=m, other=0).to(tl.float8e4nv, bitcast=True)
    else:
        return tl.load(p, mask=m, other=0)


@triton.jit
def loaded(p, m, TYPE: tl.constexpr):
    """Load keys or values, 0 where the mask is not set, as an operand of tl.dot."""
    return operand(loaded_tile(p, m), TYPE)


@triton.jit
def load_heads(p_x, o_head, m_head, PAIRS: tl.constexpr, SIZE: tl.constexpr, BD: tl.constexpr):
    """Load heads of a token. Return two tiles [heads, BD]; with PAIRS the second has their halves exchanged."""
    o_d = tl.arange(0, BD)  # [BD]
    m_x, p_x = m_head[:, None] & (o_d < SIZE)[None, :], p_x + o_head[:, None] * SIZE  # [heads, BD], [heads, 1]
    b_x = tl.load(p_x + o_d[None, :], mask=m_x, other=0)  # [heads, BD]
    b_y = b_x
    if PAIRS:
        b_y = tl.load(p_x + ((o_d + SIZE // 2) % SIZE)[None, :], mask=m_x, other=0)  # [heads, BD]
    return b_x, b_y


@triton.jit
def load_token(p_qkv, i_row, i_head, HEADS: tl.constexpr, ROTATES: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """Load a token's queries of a group [BM, BD] and its key [1, BD], each with its pairs, and its value [1, BD]."""
    KEY_HEADS: tl.constexpr = HEADS[0]
    GROUP: tl.constexpr = HEADS[1]
    SIZE: tl.constexpr = HEADS[2]
    o_m, one = tl.arange(0, BM), tl.arange(0, 1)  # [BM], [1]
    p_token = p_qkv + i_row.to(tl.int64) * ((GROUP + 2) * KEY_HEADS * SIZE)
    i_key = KEY_HEADS * GROUP + i_head
    b_query, b_query_pairs = load_heads(p_token, i_head * GROUP + o_m, o_m < GROUP, ROTATES, SIZE, BD)  # [BM, BD] each
    b_key, b_key_pairs = load_heads(p_token, i_key + one, one == 0, ROTATES, SIZE, BD)  # [1, BD] each
    b_value, _ = load_heads(p_token, i_key + KEY_HEADS + one, one == 0, False, SIZE, BD)  # [1, BD]
    return b_query, b_query_pairs, b_key, b_key_pairs, b_value


@triton.jit
def load_tables(p_weight, p_cos, p_sin, position, WORK: tl.constexpr, SIZE: tl.constexpr, BD: tl.constexpr):
    """Load the norm's weight [BD], the weight with halves exchanged, cos, and signed sin. Missing ones are 1."""
    HALF: tl.constexpr = SIZE // 2
    o_d = tl.arange(0, BD)  # [BD]
    m_d = o_d < SIZE
    b_w = tl.full((BD,), 1, WORK)  # [BD]
    b_w_pairs, b_cos, b_sin = b_w, b_w, b_w
    if p_weight is not None:
        b_w = converted(tl.load(p_weight + o_d, mask=m_d, other=0), WORK)  # [BD]
        b_w_pairs = converted(tl.load(p_weight + (o_d + HALF) % SIZE, mask=m_d, other=0), WORK)  # [BD]
    if p_cos is not None:
        o_pair = position * HALF + o_d % HALF  # [BD]
        b_cos = converted(tl.load(p_cos + o_pair, mask=m_d, other=0), WORK)  # [BD]
        b_sin = converted(tl.load(p_sin + o_pair, mask=m_d, other=0), WORK)  # [BD]
        b_sin = tl.where(o_d < HALF, -b_sin, b_sin)  # [BD]
    return b_w, b_w_pairs, b_cos, b_sin


@triton.jit
def prepared_heads(b_x, b_y, b_w, b_w_pairs, b_cos, b_sin, eps, NORMS: tl.constexpr, ROTATES: tl.constexpr,
                   EXACT: tl.constexpr, WORK: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Return loaded heads [heads, BD] in WORK, normalised with NORMS, then rotated with ROTATES.

    EXACT computes what the kernels of training compute under `genesis.exact` (docs/decisions/0014-exact.md).
    """
    b_x, b_y = converted(b_x, WORK), converted(b_y, WORK)  # [heads, BD] each
    if NORMS:
        b_square = rounded_product(b_x, b_x)  # [heads, BD]
        b_square = row_sum(b_square, EXACT)  # [heads]
        b_r = rsqrt(maths.divide(b_square, tl.full((1,), SIZE, WORK)), eps)[:, None]  # [heads, 1]
        b_x, b_y = b_x * b_r * b_w[None, :], b_y * b_r * b_w_pairs[None, :]  # [heads, BD] each
    if ROTATES:
        b_cos, b_sin = tl.broadcast_to(b_cos[None, :], b_x.shape), tl.broadcast_to(b_sin[None, :], b_x.shape)
        if EXACT:
            b_x = rounded_product(b_x, b_cos) + rounded_product(b_y, b_sin)  # [heads, BD]
        else:
            b_x = b_x * b_cos + b_y * b_sin  # [heads, BD]
    return b_x
