"""Parts of a generation step's keys: which they are, and how their results are added up; for all kernels of the step.

Plain reference: genesis/ops/attention_step.py: `attention_step`; the launches: attention_step.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels.attention.common import fast_exp2
from genesis.kernels.dependents import prefetch
from genesis.kernels.maths import rounded_product
from genesis.kernels.types import converted
from genesis.ops.attention_step import LARGEST

LIMIT = tl.constexpr(LARGEST)


@triton.jit
def part_of(length, window, i_split, splits, PART: tl.constexpr, BN: tl.constexpr):
    """The keys [begin, end) of a part, and how many parts of the keys before `length` there are."""
    low = length * 0
    if window is not None:
        low = tl.maximum(length + 1 - window, 0)
    part = tl.maximum(tl.cdiv(tl.cdiv(length - low, splits), BN) * BN, PART)
    begin = low + i_split * part
    return begin, tl.minimum(begin + part, length), tl.maximum(tl.cdiv(length - low, part), 1)


@triton.jit
def prefetch_part(p_keys, p_values, begin, end, so_cache, OVERLAP: tl.constexpr, SIZE: tl.constexpr,
                  KEYS: tl.constexpr):  # fmt: skip
    """Bring the first KEYS keys of [begin, end), or some more, and their values to L2."""
    LINE: tl.constexpr = 1024 // p_keys.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    LINES: tl.constexpr = triton.next_power_of_2((SIZE + LINE - 1) // LINE)
    o_line, o_key = tl.arange(0, LINES) * LINE, begin + tl.arange(0, triton.next_power_of_2(KEYS))
    o_kv = o_key.to(tl.int64)[:, None] * so_cache[3] + o_line[None, :] * so_cache[4]
    m_kv = (o_key < end)[:, None] & (o_line < SIZE)[None, :]  # [KEYS, LINES]
    prefetch(p_keys + o_kv, m_kv, OVERLAP)
    prefetch(p_values + o_kv, m_kv, OVERLAP)


@triton.jit
def prefetch_early(p_keys, p_values, p_length, capacity, window, i_split, splits, so_cache, OVERLAP: tl.constexpr,
                   SIZE: tl.constexpr, PART: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Bring a part to L2 while the kernel ahead runs. It may be about to change the length: what is read here decides
    nothing.
    """
    if OVERLAP:
        early = tl.load(p_length, cache_modifier=".cg")
        early = tl.where((early >= 0) & (early < capacity), early, 0).to(tl.int32)
        begin, end, _ = part_of(early, window, i_split, splits, PART, BN)
        prefetch_part(p_keys, p_values, begin, end, so_cache, OVERLAP, SIZE, PART)


@triton.jit
def saturated(b_x, TYPE: tl.constexpr):
    """Cast to the cache's type, in e4m3 with the largest number in the place of those beyond it; NaN stays."""
    if tl.float8e4nv == TYPE:
        b_x = tl.where(b_x > LIMIT, LIMIT, tl.where(b_x < -LIMIT, -LIMIT, b_x))
    return converted(b_x, TYPE)


@triton.jit
def store_heads(p_x, b_x, GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """Store the heads of a group, contiguous, of a tile [ROWS, BD]."""
    o_g, o_d = tl.arange(0, ROWS), tl.arange(0, BD)
    m_x = (o_g < GROUP)[:, None] & (o_d < SIZE)[None, :]
    tl.store(p_x + (o_g * SIZE)[:, None] + o_d[None, :], converted(b_x, p_x.dtype.element_ty), mask=m_x)


@triton.jit
def add_parts(p_parts, p_states, active, WORK: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
              TOGETHER: tl.constexpr, BG: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """o [BG, BD] of the parts of one key head's queries, TOGETHER of them at a time, in order."""
    o_s, o_g, o_d = tl.arange(0, TOGETHER), tl.arange(0, BG), tl.arange(0, BD)
    b_max = tl.full((BG,), -float("inf"), WORK)
    b_sum = tl.zeros((BG,), WORK)
    b_acc = tl.zeros((BG, BD), WORK)
    for first in range(0, active, TOGETHER):
        o_part = first + o_s
        m_state = (o_part < active)[:, None] & (o_g < GROUP)[None, :]  # [TOGETHER, BG]
        p_state = p_states + (o_part * (2 * GROUP))[:, None] + o_g[None, :]
        b_m = tl.load(p_state, mask=m_state, other=-float("inf"), cache_modifier=".cg")
        b_l = tl.load(p_state + GROUP, mask=m_state, other=0, cache_modifier=".cg")
        m_part = m_state[:, :, None] & (o_d < SIZE)[None, None, :]  # [TOGETHER, BG, BD]
        o_x = (o_part * (GROUP * SIZE))[:, None, None] + (o_g * SIZE)[None, :, None] + o_d[None, None, :]
        b_o = tl.load(p_parts + o_x, mask=m_part, other=0, cache_modifier=".cg")
        b_new_max = tl.maximum(b_max, tl.max(b_m, 0))  # [BG]
        b_base = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)  # of heads that only fill the tile
        b_factor, b_rescale = fast_exp2(b_m - b_base[None, :]), fast_exp2(b_max - b_base)
        b_factors = tl.broadcast_to(b_factor[:, :, None], (TOGETHER, BG, BD))
        b_acc = b_acc * b_rescale[:, None] + tl.sum(rounded_product(b_o, b_factors), 0)
        b_sum = b_sum * b_rescale + tl.sum(rounded_product(b_l, b_factor), 0)
        b_max = b_new_max
    return b_acc / tl.where(o_g < GROUP, b_sum, 1.0)[:, None]


@triton.jit
def end_part(p_result, p_parts, p_states, p_counter, active, WORK: tl.constexpr, GROUP: tl.constexpr,
             SIZE: tl.constexpr, TOGETHER: tl.constexpr, BD: tl.constexpr, CLUSTER: tl.constexpr = 1):  # fmt: skip
    """Count a part that is stored, by each of CLUSTER programs a share; the program that ends the last one adds up all
    of them, and leaves the counter at 0.

    All stores of the program come before it is counted, all counts before the sum: one thread adds, with release and
    acquire, between barriers of all.
    """
    tl.debug_barrier()
    if tl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu") == active * CLUSTER - 1:
        BG: tl.constexpr = triton.next_power_of_2(GROUP)
        b_o = add_parts(p_parts, p_states, active, WORK, GROUP, SIZE, TOGETHER, BG, BD)
        store_heads(p_result, b_o, GROUP, SIZE, BG, BD)
        tl.store(p_counter, 0)
