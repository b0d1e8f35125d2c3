"""Attention of a generation step on the tensor cores with operands in registers: 2-byte floats, heads of 64 or 128
columns, up to 8 query heads per key head.

Plain reference: genesis/ops/attention_step.py: `attention_step`. attention_step.py launches this kernel, divides the
work, and has the kernel for all other sizes and types.

The step is a chain of latencies. Keys and values are loaded before the token's heads are available. All warps together
prepare these heads once. Then each warp computes an online softmax of all queries of the group over its own keys. At
the end the results of the warps are added, then the results of a cluster's programs.

Keys and values are multiplied in the layout in which they are loaded, 16 bytes per thread (see few_rows_mma.py).
Operand A of m16n8k16 holds the queries, then the probabilities; heads fill 8 of its 16 rows.

Tiles are [BS * 8, 32], for BS warps. Thread (g, t) of 8 x 4 in warp w has 8 elements: row 8·w + g, columns 8·t + j. In
each kind of tile these are:
- the token's heads: see attention_step_tiles.py;
- queries: head g, columns 8·t + j of 32;
- a block of 8 keys: key g, columns 8·t + j of 32; block n of warp w begins with key (n·BS + w)·8 of the tile;
- scores of 4 blocks: head g, key 2·t + j % 2 of block j / 2, which is the MMA's layout of results and of operand P;
- values: keys 2·t + b of a block, for b = 0, 1, columns 8·g + j of 64; two keys form the pairs of operand B;
- the result: head g, columns 16·t + j and 16·t + 8 + j of 64, in two tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels import maths
from genesis.kernels.attention.common import fast_exp2
from genesis.kernels.decode.attention_parts import (
    await_cluster,
    end_part,
    enter_cluster,
    gather,
    length_of,
    part_of,
    saturated,
    share_of,
)
from genesis.kernels.decode.attention_step_tiles import (
    combine,
    exchange,
    load_table,
    place_in_head,
    row_sums,
    scores,
    weighted,
)
from genesis.kernels.decode.attention_token import loaded_tile
from genesis.kernels.decode.few_rows_fma import after_loads
from genesis.kernels.decode.few_rows_mma import operand
from genesis.kernels.dependents import allow_next, wait_for_previous
from genesis.kernels.elements import converted
from genesis.kernels.norm.norm import rsqrt


@triton.jit
def load_keys(p_keys, o_r, o_c, start, end, so_cache, BS: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr):
    """Load the tiles of N blocks of keys: for each block the tiles of all columns."""
    tiles = ()
    for n in tl.static_range(N):
        o_key = start + (n * BS + o_r // 8) * 8 + o_r % 8  # [BS * 8, 1]
        for i in tl.static_range(SIZE // 32):
            p = p_keys + o_key.to(tl.int64) * so_cache[3] + (i * 32 + o_c)  # [BS * 8, 32]
            tiles += (loaded_tile(p, o_key < end),)
    return tiles


@triton.jit
def load_values(p_values, o_r, o_c, start, end, so_cache, BS: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr,
                BLOCKS: tl.constexpr):  # fmt: skip
    """Load the tiles of N blocks of values, ordered by group of BLOCKS blocks, 64 columns, block, and key of a pair."""
    tiles = ()
    for at in tl.static_range(N // BLOCKS):
        for i in tl.static_range(SIZE // 64):
            for n in tl.static_range(BLOCKS):
                for b in tl.static_range(2):
                    o_key = start + ((at * BLOCKS + n) * BS + o_r // 8) * 8 + (o_c // 8 * 2 + b)  # [BS * 8, 32]
                    p = p_values + o_key.to(tl.int64) * so_cache[3] + (i * 64 + o_r % 8 * 8 + o_c % 8)  # [BS * 8, 32]
                    tiles += (loaded_tile(p, o_key < end),)
    return tiles


@triton.jit
def softmax_step(q, k, v, b_max, b_sum, acc, start, end, o_r, o_c, scale_log2, zero, NB: tl.constexpr,
                 BLOCKS: tl.constexpr, TYPE: tl.constexpr, BS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Update each warp's online softmax with its keys in NB times BLOCKS blocks, in one pass and in units of log2."""
    # Compute all scores.
    COUNT: tl.constexpr = SIZE // 32
    tiles = ()
    for at in tl.static_range(NB):
        b_s = tl.full((BS * 8, 32), 0, tl.float32) + zero  # [BS * 8, 32]
        for i in tl.static_range(COUNT):
            keys = ()
            for n in tl.static_range(BLOCKS):
                keys += (operand(k[(at * BLOCKS + n) * COUNT + i], TYPE),)
            b_s = scores(q[i], keys, b_s, BS, BLOCKS)  # [BS * 8, 32]
        o_key = start + ((at * BLOCKS + o_c % 8 // 2) * BS + o_r // 8) * 8 + o_c // 8 * 2 + o_c % 2  # [BS * 8, 32]
        m_key = (o_key < end) & (o_c % 8 < 2 * BLOCKS)  # [BS * 8, 32]
        tiles += (tl.where(m_key, b_s * scale_log2, -float("inf")),)
    b_most = tiles[0]
    for at in tl.static_range(1, NB):
        b_most = tl.maximum(b_most, tiles[at])  # [BS * 8, 32]
    b_new_max = tl.maximum(b_max, tl.max(b_most, 1))  # [BS * 8]
    b_base = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)  # a warp without keys has no score
    b_rescale, weights = fast_exp2(b_max - b_base), ()
    b_weight = tl.full((BS * 8, 32), 0, tl.float32)  # [BS * 8, 32]
    for at in tl.static_range(NB):
        b_p = fast_exp2(tiles[at] - b_base[:, None])  # [BS * 8, 32]
        b_weight += b_p
        weights += (converted(b_p, TYPE),)
    b_sum = b_sum * b_rescale + tl.sum(b_weight, 1)  # [BS * 8]
    # Multiply the probabilities by the values.
    new_acc = ()
    for i in tl.static_range(SIZE // 64):
        o = acc[2 * i] * b_rescale[:, None], acc[2 * i + 1] * b_rescale[:, None]  # [BS * 8, 32] each
        for at in tl.static_range(NB):
            values = ()
            for j in tl.static_range(2 * BLOCKS):
                values += (operand(v[(at * (SIZE // 64) + i) * 2 * BLOCKS + j], TYPE),)
            o = weighted(weights[at], values, o[0], o[1], BS, BLOCKS)
        new_acc += o
    return b_new_max, b_sum, new_acc


@triton.jit
def own_share(b, SHARE: tl.constexpr):
    """Return the first SHARE of each thread's 8 elements [BS * 8, 4, SHARE], if the others are -0."""
    return tl.sum(tl.reshape(converted(b, tl.float32), (b.shape[0], 4, 8 // SHARE, SHARE)), 2)


@triton.jit
def prepared(heads, w, rotation, eps, BS: tl.constexpr, SIZE: tl.constexpr):
    """Return a tile of heads in float32, normalised with a weight, then rotated.

    Args:
        heads: the heads, and their partners half a head away.
        w: the norm's weight for heads and partners; empty without a norm.
        rotation: cosines, and sines with the sign of each half; empty without RoPE.
    """
    x, partner = converted(heads[0], tl.float32), converted(heads[1], tl.float32)  # [BS * 8, 32] each
    if len(w) > 0:
        b_square = own_share(row_sums(x * x, BS, SIZE, 1), 1)  # [BS * 8, 4, 1], one per thread
        b_r = rsqrt(maths.divide(b_square, tl.full(b_square.shape, SIZE, tl.float32)), eps)  # [BS * 8, 4, 1]
        b_r = tl.reshape(tl.broadcast_to(b_r, (BS * 8, 4, 8)), (BS * 8, 32))  # [BS * 8, 32]
        x, partner = x * b_r * converted(w[0], tl.float32), partner * b_r * converted(w[1], tl.float32)
    if len(rotation) > 0:
        x = x * rotation[0] + partner * rotation[1]  # [BS * 8, 32]
    return x


@triton.jit(do_not_specialize=["capacity", "window", "splits"])
def attention_step_mma_kernel(p_o, p_parts, p_states, p_counters, p_qkv, p_cache, p_lengths, p_cos, p_sin,
                              p_query_weight, p_key_weight, p_active, capacity, window, splits, scale_log2, eps,
                              so_cache, TYPE: tl.constexpr, PART: tl.constexpr, TOGETHER: tl.constexpr,
                              HEADS: tl.constexpr, TILE: tl.constexpr, LAUNCH: tl.constexpr):  # fmt: skip
    """Compute o [B, Q, D] from qkv [B, Q + 2·K, D] and the keys and values in the cache [2, B, K, S, D].

    `attention_step_kernel` documents the other arguments.

    Args:
        TILE: (BS, NB, BLOCKS, LOOPS): warps, tiles of scores per warp, blocks of 8 keys per tile of scores, and whether
            a part may have several tiles of keys. A tile of keys has 8·BS·NB·BLOCKS keys.
        LAUNCH: has the number of programs in a cluster (a divisor of `splits`, or 1) as its third value.
    """
    KEY_HEADS: tl.constexpr = HEADS[0]
    GROUP: tl.constexpr = HEADS[1]
    SIZE: tl.constexpr = HEADS[2]
    COUNT: tl.constexpr = SIZE // 32
    BS: tl.constexpr = TILE[0]
    NB: tl.constexpr = TILE[1]
    BLOCKS: tl.constexpr = TILE[2]
    LOOPS: tl.constexpr = TILE[3]
    N: tl.constexpr = NB * BLOCKS
    KEYS: tl.constexpr = BS * 8 * N
    OVERLAP: tl.constexpr = LAUNCH[0]
    EARLY: tl.constexpr = LAUNCH[0] and LAUNCH[1]
    CLUSTER: tl.constexpr = LAUNCH[2]
    WARPS_SHARE: tl.constexpr = COUNT * 8 // BS  # elements of o per thread after the warps' results are added
    SHARE: tl.constexpr = share_of(WARPS_SHARE, CLUSTER)  # the same after the programs' results are added
    # The first parts of all sequences come first, so programs without keys do not delay them.
    pairs, i_cluster = tl.num_programs(0) // splits, tl.program_id(0) // CLUSTER
    i_pair, i_part, rank = i_cluster % pairs, i_cluster // pairs, tl.program_id(0) % CLUSTER
    i_split = i_part * CLUSTER + rank
    i_row, i_head = i_pair // KEY_HEADS, i_pair % KEY_HEADS
    o_r, o_c = tl.arange(0, BS * 8)[:, None], tl.arange(0, 32)[None, :]  # [BS * 8, 1], [1, 32]
    p_keys = p_cache + (i_row.to(tl.int64) * so_cache[1] + i_head.to(tl.int64) * so_cache[2])
    p_values = p_keys + so_cache[0]
    allow_next(OVERLAP)
    if CLUSTER > 1:
        sent = enter_cluster(BS, CLUSTER, WARPS_SHARE, GROUP)
    if not EARLY:
        wait_for_previous(OVERLAP)
    o_head, o_d, o_partner = place_in_head(o_r, o_c, SIZE)  # [BS * 8, 32] each
    query_w, key_w = (), ()
    if p_query_weight is not None:
        query_w = tl.load(p_query_weight + o_d), tl.load(p_query_weight + o_partner)  # [BS * 8, 32] each
        key_w = tl.load(p_key_weight + o_d), tl.load(p_key_weight + o_partner)
    # Find this program's keys, and load the first of them.
    length, is_on = length_of(p_lengths, p_active, i_row, capacity)
    begin, end, active = part_of(length, window, i_split, splits, PART, KEYS)
    k = load_keys(p_keys, o_r, o_c, begin, end, so_cache, BS, SIZE, N)  # [BS * 8, 32] each
    v = load_values(p_values, o_r, o_c, begin, end, so_cache, BS, SIZE, N, BLOCKS)  # [BS * 8, 32] each
    rotation = ()
    if p_cos is not None:
        o_pair = length * (SIZE // 2) + o_d % (SIZE // 2)
        b_sin = load_table(p_sin + o_pair, BS)  # [BS * 8, 32]
        rotation = load_table(p_cos + o_pair, BS), tl.where(o_d < SIZE // 2, -b_sin, b_sin)
    if CLUSTER > 1:
        await_cluster()
    if EARLY:
        wait_for_previous(OVERLAP)
    is_last, parts = i_split == active - 1, tl.cdiv(active, CLUSTER)
    if i_part >= parts:
        return
    # Prepare the token's queries of the group, its key and its value, in all warps together. Store the key and value.
    p_token = p_qkv + i_row.to(tl.int64) * ((GROUP + 2) * KEY_HEADS * SIZE)
    p_key = p_token + (KEY_HEADS * GROUP + i_head) * SIZE
    p_query = p_token + (i_head * GROUP + tl.minimum(o_head, GROUP - 1)) * SIZE
    query = tl.load(p_query + o_d), tl.load(p_query + o_partner)  # [BS * 8, 32] each
    key = tl.load(p_key + o_d), tl.load(p_key + o_partner)  # [BS * 8, 32] each
    b_v = tl.load(p_key + KEY_HEADS * SIZE + o_d)  # [BS * 8, 32]
    b_q = prepared(query, query_w, rotation, eps, BS, SIZE)  # [BS * 8, 32]
    b_k = prepared(key, key_w, rotation, eps, BS, SIZE)  # [BS * 8, 32]
    b_own = row_sums(b_q * b_k, BS, SIZE, 8)  # [BS * 8, 32]
    q = exchange(converted(b_q, TYPE), b_own, b_v, BS, SIZE, CLUSTER, WARPS_SHARE, SHARE)  # also has two other tiles
    m_own = o_head < tl.where(is_last & is_on, 1, 0)
    p_own = p_keys + length.to(tl.int64) * so_cache[3] + o_d  # [BS * 8, 32]
    tl.store(p_own, saturated(b_k, p_cache.dtype.element_ty), mask=m_own)
    tl.store(p_own + so_cache[0], saturated(converted(b_v, tl.float32), p_cache.dtype.element_ty), mask=m_own)
    # Compute each warp's softmax over its keys in the cache.
    zero = after_loads()
    b_max, b_sum, acc = tl.full((BS * 8,), -float("inf"), tl.float32), tl.zeros((BS * 8,), tl.float32), ()
    for _ in tl.static_range(COUNT):
        acc += (tl.zeros((BS * 8, 32), tl.float32),)  # [BS * 8, 32]
    HALF_OF: tl.constexpr = (NB + 1) // 2
    if HALF_OF < NB and begin + KEYS // 2 >= end:
        b_max, b_sum, acc = softmax_step(
            q, k, v, b_max, b_sum, acc, begin, end, o_r, o_c, scale_log2, zero, HALF_OF, BLOCKS, TYPE, BS, SIZE
        )  # fmt: skip
    else:
        b_max, b_sum, acc = softmax_step(
            q, k, v, b_max, b_sum, acc, begin, end, o_r, o_c, scale_log2, zero, NB, BLOCKS, TYPE, BS, SIZE
        )  # fmt: skip
    if LOOPS:
        for start in range(begin + KEYS, end, KEYS):
            k = load_keys(p_keys, o_r, o_c, start, end, so_cache, BS, SIZE, N)
            v = load_values(p_values, o_r, o_c, start, end, so_cache, BS, SIZE, N, BLOCKS)
            zero = after_loads()
            b_max, b_sum, acc = softmax_step(
                q, k, v, b_max, b_sum, acc, start, end, o_r, o_c, scale_log2, zero, NB, BLOCKS, TYPE, BS, SIZE
            )  # fmt: skip
    # Add the results of all warps and programs; each thread gets a share of the columns. Add the token's own key and
    # value to the last part. No program of this launch reads them from memory.
    shape: tl.constexpr = (BS * 8, 32)
    b_max, b_sum = tl.broadcast_to(b_max[:, None], shape), tl.broadcast_to(b_sum[:, None], shape)
    all_warps = combine(b_max, b_sum, acc, BS, COUNT)  # [BS * 8, 32] each
    if CLUSTER > 1:
        all_warps = gather(sent, all_warps[0], all_warps[1], all_warps[2], BS, CLUSTER, WARPS_SHARE, GROUP)
    b_max, b_sum, b_o = own_share(all_warps[0], SHARE), own_share(all_warps[1], SHARE), own_share(all_warps[2], SHARE)
    b_own = tl.where(i_part == parts - 1, own_share(q[COUNT], SHARE) * scale_log2, -float("inf"))
    b_greatest = tl.maximum(b_max, b_own)  # [BS * 8, 4, SHARE]
    b_rescale, b_p = fast_exp2(b_max - b_greatest), fast_exp2(b_own - b_greatest)
    b_sum, b_o = b_sum * b_rescale + b_p, b_o * b_rescale + b_p * own_share(q[COUNT + 1], SHARE)
    # Store the result, or a part of it. Each program of a cluster stores its share.
    first = rank * SHARE
    o_w, o_t = tl.arange(0, BS * 8)[:, None, None], tl.arange(0, 4)[None, :, None]  # [BS * 8, 1, 1], [1, 4, 1]
    o_e = o_w // 8 * WARPS_SHARE + first + tl.arange(0, SHARE)[None, None, :]  # [BS * 8, 1, SHARE]
    # Element e of the result is column e // 16 * 64 + 16 · t + e % 16 of the head.
    o_g, o_o = o_w % 8, o_w % 8 * SIZE + (o_e // 16 * 64 + o_t * 16 + o_e % 16)
    m_o = (o_g < tl.where(first < WARPS_SHARE, GROUP, 0)) & (o_o >= 0)  # [BS * 8, 4, SHARE]
    p_result = p_o + i_pair.to(tl.int64) * (GROUP * SIZE)
    if parts == 1:
        b_result = tl.where(is_on, b_o / b_sum, 0.0)  # [BS * 8, 4, SHARE]
        tl.store(p_result + o_o, converted(b_result, p_o.dtype.element_ty), mask=m_o)
    if p_parts is not None:
        first_part = i_pair.to(tl.int64) * (splits // CLUSTER)
        if parts > 1:
            p_state, m_state = p_states + (first_part + i_part) * (2 * GROUP) + o_g, m_o & (o_e == 0) & (o_t == 0)
            tl.store(p_state + o_o * 0, b_greatest, mask=m_state)
            tl.store(p_state + GROUP + o_o * 0, b_sum, mask=m_state)
            tl.store(p_parts + (first_part + i_part) * (GROUP * SIZE) + o_o, b_o, mask=m_o)
            p_first, p_first_state = p_parts + first_part * (GROUP * SIZE), p_states + first_part * (2 * GROUP)
            end_part(
                p_result, p_first, p_first_state, p_counters + i_pair, parts, tl.float32, GROUP, SIZE, TOGETHER, SIZE,
                CLUSTER,
            )  # fmt: skip
