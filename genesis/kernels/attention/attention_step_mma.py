"""A generation step's attention on the tensor cores, from registers: for 2-byte floats, heads of 64 columns, and up to
8 query heads for a key head.

Plain reference: genesis/ops/attention_step.py: `attention_step`. The launches, what is common with the kernel for
everything else, and how work is divided: attention_step.py.

The step is a chain of latencies, so warps meet once. Each has some keys of its own and all queries of the group, and
an online softmax of its own; at the end the warps' results are added up. Keys and values are multiplied as they are
loaded, 16 bytes in each thread (see few_rows_mma.py), by m16n8k16 with queries, then probabilities as operand A, of
which heads fill 8 of 16 rows.

Tiles are [BS * 8, 32], for BS warps. A thread (g, t) of 8 x 4 in warp w has 8 elements of row 8·w + g, columns 8·t + j:
- of queries: head g, columns 8·t + j of 32;
- of a block of 8 keys: key g, columns 8·t + j of 32; block n of warp w begins with key (n·BS + w)·8 of the tile;
- of scores of 4 blocks: head g, key 2·t + j % 2 of block j / 2, as the MMA leaves them and as it takes them for P;
- of values: keys 2·t + b of a block, for b = 0, 1, columns 8·g + j of 64: two keys make the pairs of operand B;
- of the result: head g, columns 16·t + j and 16·t + 8 + j of 64, in two tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels import maths
from genesis.kernels.attention.attention_parts import end_part, part_of, prefetch_early, prefetch_part, saturated
from genesis.kernels.attention.attention_step_tiles import BLOCKS, combine, load_table, scores, weighted
from genesis.kernels.attention.common import fast_exp2
from genesis.kernels.dependents import allow_next, wait_for_previous
from genesis.kernels.gemm.few_rows_fma import after_loads
from genesis.kernels.gemm.few_rows_mma import operand
from genesis.kernels.maths import rounded_product
from genesis.kernels.norm.norm import rsqrt
from genesis.kernels.types import converted

__all__ = ["attention_step_mma_kernel"]


@triton.jit
def load_columns(p, m, COUNT: tl.constexpr):
    """Tiles of 32 columns each."""
    tiles = ()
    for i in tl.static_range(COUNT):
        tiles += (tl.load(p + i * 32, mask=m, other=0),)
    return tiles


@triton.jit
def loaded_tile(p, m):
    """Keys or values, 0 where the mask is not."""
    if p.dtype.element_ty == tl.float8e4nv:
        return tl.load(p.to(tl.pointer_type(tl.uint8)), mask=m, other=0).to(tl.float8e4nv, bitcast=True)
    else:
        return tl.load(p, mask=m, other=0)


@triton.jit
def column_of(o_r, o_c, AT: tl.constexpr):
    """The columns of a head [BS * 8, 32] whose results tile AT has."""
    return o_r * 0 + AT // 2 * 64 + AT % 2 * 8 + o_c // 8 * 16 + o_c % 8


@triton.jit
def load_result(p, o_r, o_c, COUNT: tl.constexpr):
    """Tiles of a head's columns as results have them."""
    tiles = ()
    for i in tl.static_range(COUNT):
        tiles += (tl.load(p + column_of(o_r, o_c, i)),)
    return tiles


@triton.jit
def load_keys(p_keys, o_r, o_c, start, end, so_cache, BS: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr):
    """Tiles of N blocks of keys, each of all columns."""
    tiles = ()
    for n in tl.static_range(N):
        o_key = start + (n * BS + o_r // 8) * 8 + o_r % 8  # [BS * 8, 1]
        for i in tl.static_range(SIZE // 32):
            p = p_keys + o_key.to(tl.int64) * so_cache[3] + (i * 32 + o_c)
            tiles += (loaded_tile(p, o_key < end),)
    return tiles


@triton.jit
def load_values(p_values, o_r, o_c, start, end, so_cache, BS: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr):
    """Tiles of N blocks of values: of each four of them, of 64 columns after the other, of each block, of both keys."""
    tiles = ()
    for at in tl.static_range(N // BLOCKS):
        for i in tl.static_range(SIZE // 64):
            for n in tl.static_range(BLOCKS):
                for b in tl.static_range(2):
                    o_key = start + ((at * BLOCKS + n) * BS + o_r // 8) * 8 + (o_c // 8 * 2 + b)  # [BS * 8, 32]
                    p = p_values + o_key.to(tl.int64) * so_cache[3] + (i * 64 + o_r % 8 * 8 + o_c % 8)
                    tiles += (loaded_tile(p, o_key < end),)
    return tiles


@triton.jit
def products_of(x, y, COUNT: tl.constexpr):
    """Σ x·y of each row, over all tiles."""
    b_sum = rounded_product(converted(x[0], tl.float32), converted(y[0], tl.float32))
    for i in tl.static_range(1, COUNT):
        b_sum += rounded_product(converted(x[i], tl.float32), converted(y[i], tl.float32))
    return tl.sum(b_sum, 1)


@triton.jit
def reciprocal_rms(x, eps, SIZE: tl.constexpr):
    """Of heads [BS * 8, 1]."""
    b_square = products_of(x, x, SIZE // 32)
    return rsqrt(maths.divide(b_square, tl.full((1,), SIZE, tl.float32)), eps)[:, None]


@triton.jit
def rotated_pair(x, y, b_r, w, cos, sin, AT: tl.constexpr, HALF: tl.constexpr):
    """Columns of tile AT and their partners, half a head away at the same place of another tile: normalised with a
    weight, then rotated, in float32."""
    x, y = converted(x, tl.float32), converted(y, tl.float32)
    if len(w) > 0:
        x, y = x * b_r * converted(w[AT], tl.float32), y * b_r * converted(w[AT + HALF], tl.float32)
    if len(cos) > 0:
        x, y = x * cos[AT] - y * sin[AT], y * cos[AT] + x * sin[AT]
    return x, y


@triton.jit
def softmax_step(q, k, v, b_max, b_sum, acc, start, end, o_r, o_c, scale_log2, zero, NB: tl.constexpr,
                 TYPE: tl.constexpr, BS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Online softmax of each warp over its keys in NB times four blocks, in one pass and in units of log2."""
    COUNT: tl.constexpr = SIZE // 32
    tiles = ()
    for at in tl.static_range(NB):
        b_s = tl.full((BS * 8, 32), 0, tl.float32) + zero
        for i in tl.static_range(COUNT):
            keys = ()
            for n in tl.static_range(BLOCKS):
                keys += (operand(k[(at * BLOCKS + n) * COUNT + i], TYPE),)
            b_s = scores(q[i], keys[0], keys[1], keys[2], keys[3], b_s, BS)
        o_key = start + ((at * BLOCKS + o_c % 8 // 2) * BS + o_r // 8) * 8 + o_c // 8 * 2 + o_c % 2
        tiles += (tl.where(o_key < end, b_s * scale_log2, -float("inf")),)
    b_most = tiles[0]
    for at in tl.static_range(1, NB):
        b_most = tl.maximum(b_most, tiles[at])
    b_new_max = tl.maximum(b_max, tl.max(b_most, 1))
    b_base = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)  # of a warp without keys
    b_rescale, weights = fast_exp2(b_max - b_base), ()
    b_weight = tl.full((BS * 8, 32), 0, tl.float32)
    for at in tl.static_range(NB):
        b_p = fast_exp2(tiles[at] - b_base[:, None])
        b_weight += b_p
        weights += (converted(b_p, TYPE),)
    b_sum = b_sum * b_rescale + tl.sum(b_weight, 1)
    found = ()
    for i in tl.static_range(SIZE // 64):
        o = acc[2 * i] * b_rescale[:, None], acc[2 * i + 1] * b_rescale[:, None]
        for at in tl.static_range(NB):
            values = ()
            for j in tl.static_range(2 * BLOCKS):
                values += (operand(v[(at * (SIZE // 64) + i) * 2 * BLOCKS + j], TYPE),)
            o = weighted(weights[at], values, o[0], o[1], BS)
        found += o
    return b_new_max, b_sum, found


@triton.jit
def own_part(b, PART: tl.constexpr):
    """The first PART of 8 elements of a thread [BS * 8, 4, PART], where the others are -0."""
    return tl.sum(tl.reshape(b, (b.shape[0], 4, 8 // PART, PART)), 2)


@triton.jit
def combined(b_max, b_sum, tiles, BS: tl.constexpr, COUNT: tl.constexpr):
    """Of all warps, by head: the greatest score, the sum and o, each [BS * 8, 4, PART]: the elements of a thread (g, t)
    are divided among the warps.

    Args:
        b_max, b_sum: of each warp [BS * 8].
        tiles: o of each warp, relative to its greatest score.
    """
    PART: tl.constexpr = COUNT * 8 // BS
    shape: tl.constexpr = tiles[0].shape
    b_max, b_sum = tl.broadcast_to(b_max[:, None], shape), tl.broadcast_to(b_sum[:, None], shape)
    found = combine(b_max, b_sum, tiles, BS, COUNT)
    return own_part(found[0], PART), own_part(found[1], PART), own_part(found[2], PART)


@triton.jit(do_not_specialize=["capacity", "window", "splits"])
def attention_step_mma_kernel(p_o, p_parts, p_states, p_counters, p_qkv, p_cache, p_lengths, p_cos, p_sin,
                              p_query_weight, p_key_weight, p_active, capacity, window, splits, scale_log2, eps,
                              so_cache, TYPE: tl.constexpr, PART: tl.constexpr, TOGETHER: tl.constexpr,
                              HEADS: tl.constexpr, TILE: tl.constexpr, LAUNCH: tl.constexpr):  # fmt: skip
    """o [B, Q, D] of qkv [B, Q + 2·K, D], over keys and values in the cache [2, B, K, S, D].

    TILE is (BS, NB): warps, and tiles of scores of each, so that a tile of keys has 32·BS·NB. The other arguments are
    those of `attention_step_kernel`.
    """
    KEY_HEADS: tl.constexpr = HEADS[0]
    GROUP: tl.constexpr = HEADS[1]
    SIZE: tl.constexpr = HEADS[2]
    COUNT: tl.constexpr = SIZE // 32
    BS: tl.constexpr = TILE[0]
    NB: tl.constexpr = TILE[1]
    N: tl.constexpr = NB * BLOCKS
    KEYS: tl.constexpr = BS * 8 * N
    OVERLAP: tl.constexpr = LAUNCH[0]
    EARLY: tl.constexpr = LAUNCH[0] and LAUNCH[1]
    ROTATES: tl.constexpr = p_cos is not None
    # The first parts of all sequences come first: programs without keys do not keep them from the SMs.
    pairs = tl.num_programs(0) // splits
    i_pair, i_split = tl.program_id(0) % pairs, tl.program_id(0) // pairs
    i_row, i_head = i_pair // KEY_HEADS, i_pair % KEY_HEADS
    o_r, o_c = tl.arange(0, BS * 8)[:, None], tl.arange(0, 32)[None, :]

    p_keys = p_cache + (i_row.to(tl.int64) * so_cache[1] + i_head.to(tl.int64) * so_cache[2])
    p_values = p_keys + so_cache[0]
    allow_next(OVERLAP)
    if not EARLY:
        p_length = p_lengths + i_row
        prefetch_early(
            p_keys, p_values, p_length, capacity, window, i_split, splits, so_cache, OVERLAP, SIZE, PART, KEYS
        )
        wait_for_previous(OVERLAP)

    # Which keys are this program's, and the first of them.
    length = tl.load(p_lengths + i_row, cache_modifier=".cg")
    is_on = (length >= 0) & (length < capacity)
    if p_active is not None:
        is_on = is_on & (tl.load(p_active + i_row) != 0)
    length = tl.where(is_on, length, 0).to(tl.int32)  # a row that is off is computed as if it were empty
    begin, end, active = part_of(length, window, i_split, splits, PART, KEYS)
    is_last = i_split == active - 1
    k = load_keys(p_keys, o_r, o_c, begin, end, so_cache, BS, SIZE, N)
    v = load_values(p_values, o_r, o_c, begin, end, so_cache, BS, SIZE, N)
    cos, sin, query_w, key_w = (), (), (), ()
    if ROTATES:
        o_pair = length * (SIZE // 2) + o_c + o_r * 0
        for i in tl.static_range(COUNT // 2):
            cos += (load_table(p_cos + (o_pair + i * 32), BS),)
            sin += (load_table(p_sin + (o_pair + i * 32), BS),)
    if p_query_weight is not None:
        query_w = load_columns(p_query_weight + (o_c + o_r * 0), o_r >= 0, COUNT)
        key_w = load_columns(p_key_weight + (o_c + o_r * 0), o_r >= 0, COUNT)
    if EARLY:
        if PART > KEYS:
            prefetch_part(p_keys, p_values, begin + KEYS, end, so_cache, OVERLAP, SIZE, PART - KEYS)
        wait_for_previous(OVERLAP)
    if i_split >= active:
        return

    # The token's queries of the group and its key.
    p_token = p_qkv + i_row.to(tl.int64) * ((GROUP + 2) * KEY_HEADS * SIZE)
    o_head, p_key = i_head * GROUP + o_r % 8, p_token + (KEY_HEADS * GROUP + i_head) * SIZE
    b_query = load_columns(p_token + (o_head * SIZE + o_c), o_r % 8 < GROUP, COUNT)
    b_key = load_columns(p_key + (o_c + o_r * 0), o_r >= 0, COUNT)
    b_value = load_result(p_key + KEY_HEADS * SIZE, o_r, o_c, COUNT)
    zero = after_loads()
    HALF: tl.constexpr = COUNT // 2
    b_query_r, b_key_r = zero, zero
    if p_query_weight is not None:
        b_query_r, b_key_r = reciprocal_rms(b_query, eps, SIZE), reciprocal_rms(b_key, eps, SIZE)
    q, q_later, own = (), (), tl.zeros((BS * 8, 32), tl.float32)
    is_own = is_last & is_on
    m_own = (o_r < tl.where(is_own, 1, 0)) & (o_c >= 0)
    p_own = p_keys + length.to(tl.int64) * so_cache[3] + (o_c + o_r * 0)
    for i in tl.static_range(HALF):
        b_q, b_q_later = rotated_pair(b_query[i], b_query[i + HALF], b_query_r, query_w, cos, sin, i, HALF)
        b_k, b_k_later = rotated_pair(b_key[i], b_key[i + HALF], b_key_r, key_w, cos, sin, i, HALF)
        own += rounded_product(b_q, b_k) + rounded_product(b_q_later, b_k_later)
        tl.store(p_own + i * 32, saturated(b_k, p_cache.dtype.element_ty), mask=m_own)
        tl.store(p_own + (i + HALF) * 32, saturated(b_k_later, p_cache.dtype.element_ty), mask=m_own)
        q += (converted(b_q, TYPE),)
        q_later += (converted(b_q_later, TYPE),)
    q += q_later

    # Each warp's softmax over its keys in the cache. The token's own key and value begin it in the first warp of the
    # last part. Nobody reads them from memory in this launch.
    is_first = (tl.arange(0, BS * 8) < 8) & is_last
    b_max = tl.where(is_first, tl.sum(own, 1) * scale_log2, -float("inf"))
    b_sum, acc = tl.where(is_first, 1.0, 0.0), ()
    p_own = p_values + length.to(tl.int64) * so_cache[3]
    for i in tl.static_range(COUNT):
        b_v = converted(b_value[i], tl.float32)
        tl.store(p_own + column_of(o_r, o_c, i), saturated(b_v, p_cache.dtype.element_ty), mask=m_own)
        acc += (tl.where(is_first[:, None], b_v, 0.0),)
    if begin + KEYS // 2 < end:
        b_max, b_sum, acc = softmax_step(
            q, k, v, b_max, b_sum, acc, begin, end, o_r, o_c, scale_log2, zero, NB, TYPE, BS, SIZE
        )  # fmt: skip
    else:
        b_max, b_sum, acc = softmax_step(
            q, k, v, b_max, b_sum, acc, begin, end, o_r, o_c, scale_log2, zero, (NB + 1) // 2, TYPE, BS, SIZE
        )  # fmt: skip
    for start in range(begin + KEYS, end, KEYS):
        k = load_keys(p_keys, o_r, o_c, start, end, so_cache, BS, SIZE, N)
        v = load_values(p_values, o_r, o_c, start, end, so_cache, BS, SIZE, N)
        zero = after_loads()
        b_max, b_sum, acc = softmax_step(
            q, k, v, b_max, b_sum, acc, start, end, o_r, o_c, scale_log2, zero, NB, TYPE, BS, SIZE
        )  # fmt: skip

    # All warps', a part of the columns in each of them.
    b_greatest, b_sum, b_o = combined(b_max, b_sum, acc, BS, COUNT)
    PART_OF: tl.constexpr = COUNT * 8 // BS
    o_e = tl.arange(0, BS * 8)[:, None, None] // 8 * PART_OF + tl.arange(0, PART_OF)[None, None, :]  # [BS * 8, 4, PART]
    o_g, o_t = tl.arange(0, BS * 8)[:, None, None] % 8, tl.arange(0, 4)[None, :, None]
    o_o = o_g * SIZE + (o_e // 16 * 64 + o_t * 16 + o_e % 16)
    m_o = (o_g < GROUP) & (o_o >= 0)

    # The result, or this program's part of it.
    p_result = p_o + i_pair.to(tl.int64) * (GROUP * SIZE)
    if active == 1:
        b_result = tl.where(is_on, b_o / b_sum, 0.0)
        tl.store(p_result + o_o, converted(b_result, p_o.dtype.element_ty), mask=m_o)
    if p_parts is not None:
        first = i_pair.to(tl.int64) * splits
        if active > 1:
            p_state, m_state = p_states + (first + i_split) * (2 * GROUP) + o_g, m_o & (o_e == 0) & (o_t == 0)
            tl.store(p_state + o_e * 0 + o_t * 0, b_greatest, mask=m_state)
            tl.store(p_state + GROUP + o_e * 0 + o_t * 0, b_sum, mask=m_state)
            tl.store(p_parts + (first + i_split) * (GROUP * SIZE) + o_o, b_o, mask=m_o)
            p_first, p_first_state = p_parts + first * (GROUP * SIZE), p_states + first * (2 * GROUP)
            p_counter = p_counters + i_pair
            end_part(p_result, p_first, p_first_state, p_counter, active, tl.float32, GROUP, SIZE, TOGETHER, SIZE)
