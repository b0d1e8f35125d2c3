"""Attention of a generation step in one launch: norms of heads, RoPE, the write to the KV cache, attention over it.

Plain reference: genesis/ops/attention_step.py: `attention_step`.

A program has the query heads that share one key head of a sequence, so keys and values are read once, and one part of
the keys. The device chooses the number of parts by the sequence's length, so a captured launch works for all lengths.
Parts are stored in float32. A counter finds the program that finishes last, which adds the parts in order and resets
the counter to 0 for the next launch. The token's own key and value stay in registers and come last in the last part;
the program of that part writes them to the cache.

Several lanes hold the same sum of products and must hold the same bits, because any of them may store it. Products are
therefore rounded before they are added: if they were contracted into the addition, each lane would round another term.

A short step is a chain of latencies: length, keys and values, heads, attention. The first tile of a part is loaded
before the heads. If only qkv is new (`early`), it is loaded before the previous kernel ends.

The kernel in this file supports every size and type. attention_step_mma.py has fewer latencies, for heads of 64 or 128
values in 2-byte floats (`is_for_mma`).

Tiles: BM query heads of a group, BN keys, BD columns of a head; BM and BD are padded.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend import mode
from genesis.backend.cuda import COUNTERS, backend_of
from genesis.backend.cuda.dispatch import allow_tf32, cuda_impl
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import float8_e4m3fn, float32, int32
from genesis.errors import DeviceError, ShapeError
from genesis.kernels.attention.common import fast_exp2, operand
from genesis.kernels.attention.problem import padded_head_dim
from genesis.kernels.decode.attention_parts import end_part, length_of, part_of, prefetch_part, saturated, store_heads
from genesis.kernels.decode.attention_step_blocks import BLOCK, attention_step_blocks_kernel
from genesis.kernels.decode.attention_step_exact import WARPS, attention_step_exact_kernel
from genesis.kernels.decode.attention_step_mma import attention_step_mma_kernel
from genesis.kernels.decode.attention_token import load_tables, load_token, loaded, prepared_heads
from genesis.kernels.dependents import allow_next, can_overlap, largest_cluster, wait_for_previous
from genesis.kernels.elements import TRITON, converted, float_argument, work_type
from genesis.kernels.maths import rounded_product
from genesis.ops.fp8 import lacking
from genesis.ops.shape import contiguous

PROGRAMS = 512  # programs per launch with few sequences; those without keys end at once
HELD = 1 << 14  # the most elements that a program adds at once, when it adds parts


class StepTile(NamedTuple):
    """Division of a step's work among programs."""

    keys: int  # keys of a tile
    part: int  # the fewest keys of a part, a multiple of `keys`; parts grow if there would be more than `splits`
    splits: int  # the most parts of a sequence
    together: int  # parts that are loaded at once when parts are added
    warps: int  # warps per program
    stages: int  # pipeline stages
    # Use the kernel that keeps keys and values in registers. A warp then has 16 keys or a multiple of 32; stages is 1.
    is_mma: bool = False
    cluster: int = 1  # programs of a cluster, a power of 2 that divides `splits`; 1 without clusters

    def fitted(self, padded: int, group: int, pairs: int, capacity: int) -> StepTile:
        """Return this tile with no more parts than are useful.

        Args:
            padded: padded columns of a head.
            group: query heads per key head.
            pairs: key heads of all sequences.
            capacity: keys that the cache can hold per sequence.
        """
        useful = triton.next_power_of_2(max(PROGRAMS // max(pairs, 1), 1)), triton.cdiv(capacity, self.part)
        splits = min(self.splits, *useful)
        held = HELD // (triton.next_power_of_2(group) * padded)
        return self._replace(splits=splits, together=min(self.together if splits > 4 else 4, held or 1))


@triton.jit
def attend(b_operand, b_k, b_v, m_key, b_max, b_sum, b_acc, scale_log2, TYPE: tl.constexpr, WORK: tl.constexpr,
           PRECISION: tl.constexpr):  # fmt: skip
    """Update the online softmax, (maximum [BM], sum [BM], o [BM, BD]), with a tile of keys and values [BN, BD]."""
    b_s = tl.dot(b_operand, b_k.T, input_precision=PRECISION, out_dtype=WORK) * scale_log2  # [BM, BN]
    b_s = tl.where(m_key[None, :], b_s, -float("inf"))  # [BM, BN]
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1))  # [BM]
    b_base = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)  # a part without keys has no score
    b_p, b_rescale = fast_exp2(b_s - b_base[:, None]), fast_exp2(b_max - b_base)
    b_acc = tl.dot(operand(b_p, TYPE), b_v, b_acc * b_rescale[:, None], input_precision=PRECISION, out_dtype=WORK)
    return b_new_max, b_sum * b_rescale + tl.sum(b_p, 1), b_acc


@triton.jit(do_not_specialize=["capacity", "window", "splits"])
def attention_step_kernel(p_o, p_parts, p_states, p_counters, p_qkv, p_cache, p_lengths, p_cos, p_sin, p_query_weight,
                          p_key_weight, p_active, capacity, window, splits, scale_log2, eps, so_cache,
                          DOT: tl.constexpr, PART: tl.constexpr, TOGETHER: tl.constexpr, HEADS: tl.constexpr,
                          TILE: tl.constexpr, STAGES: tl.constexpr, LAUNCH: tl.constexpr):  # fmt: skip
    """Compute o [B, Q, D] from qkv [B, Q + 2·K, D] and the keys and values in the cache [2, B, K, S, D].

    Args:
        splits: the most parts; 1 without p_parts.
        scale_log2: the scale in units of log2.
        DOT: (TYPE, WORK, PRECISION), as for the other attention kernels.
        HEADS: (K, Q / K, D).
        TILE: (BM, BN, BD).
        LAUNCH: whether kernels overlap, and whether overlapping kernels write nothing but qkv.
    """
    TYPE: tl.constexpr = DOT[0]
    WORK: tl.constexpr = DOT[1]
    PRECISION: tl.constexpr = DOT[2]
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
    # The first parts of all sequences come first, so programs without keys do not delay them.
    pairs = tl.num_programs(0) // splits
    i_pair, i_split = tl.program_id(0) % pairs, tl.program_id(0) // pairs
    i_row, i_head = i_pair // KEY_HEADS, i_pair % KEY_HEADS
    p_keys = p_cache + (i_row.to(tl.int64) * so_cache[1] + i_head.to(tl.int64) * so_cache[2])
    p_values = p_keys + so_cache[0]
    allow_next(OVERLAP)
    if not EARLY:
        wait_for_previous(OVERLAP)
        b_query, b_query_pairs, b_key, b_key_pairs, b_value = load_token(p_qkv, i_row, i_head, HEADS, ROTATES, BM, BD)
    # Find this program's keys, and load the first of them.
    length, is_on = length_of(p_lengths, p_active, i_row, capacity)
    begin, end, active = part_of(length, window, i_split, splits, PART, BN)
    is_last = i_split == active - 1
    o_m, o_n, o_d = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BD)  # [BM], [BN], [BD]
    m_group, m_d = o_m < GROUP, o_d < SIZE  # [BM], [BD]
    m_key = begin + o_n < end  # [BN]
    o_kv = (begin + o_n).to(tl.int64)[:, None] * so_cache[3] + o_d[None, :] * so_cache[4]  # [BN, BD]
    m_kv = m_key[:, None] & m_d[None, :]  # [BN, BD]
    b_k = loaded(p_keys + o_kv, m_kv, TYPE)  # [BN, BD]
    b_v = loaded(p_values + o_kv, m_kv, TYPE)  # [BN, BD]
    b_w, b_w_pairs, b_cos, b_sin = load_tables(p_query_weight, p_cos, p_sin, length, WORK, SIZE, BD)  # [BD] each
    b_key_w, b_key_w_pairs, _, _ = load_tables(p_key_weight, None, None, length, WORK, SIZE, BD)  # [BD] each
    if EARLY:
        if PART > BN:
            prefetch_part(p_keys, p_values, begin + BN, end, so_cache, OVERLAP, SIZE, PART - BN)
        wait_for_previous(OVERLAP)
        b_query, b_query_pairs, b_key, b_key_pairs, b_value = load_token(p_qkv, i_row, i_head, HEADS, ROTATES, BM, BD)
    if i_split >= active:
        return
    b_q = prepared_heads(  # [BM, BD]
        b_query, b_query_pairs, b_w, b_w_pairs, b_cos, b_sin, eps, NORMS, ROTATES, False, WORK, SIZE
    )  # fmt: skip
    b_operand = operand(b_q, TYPE)  # [BM, BD]
    # Compute the online softmax over the keys in the cache, in units of log2.
    b_max = tl.full((BM,), -float("inf"), WORK)  # [BM]
    b_sum = tl.zeros((BM,), WORK)  # [BM]
    b_acc = tl.zeros((BM, BD), WORK)  # [BM, BD]
    b_max, b_sum, b_acc = attend(
        b_operand, b_k, b_v, m_key, b_max, b_sum, b_acc, scale_log2, TYPE, WORK, PRECISION
    )  # fmt: skip
    for start in tl.range(begin + BN, end, BN, num_stages=STAGES):
        m_key = start + o_n < end  # [BN]
        o_kv = (start + o_n).to(tl.int64)[:, None] * so_cache[3] + o_d[None, :] * so_cache[4]  # [BN, BD]
        m_kv = m_key[:, None] & m_d[None, :]  # [BN, BD]
        b_k = loaded(p_keys + o_kv, m_kv, TYPE)  # [BN, BD]
        b_v = loaded(p_values + o_kv, m_kv, TYPE)  # [BN, BD]
        b_max, b_sum, b_acc = attend(
            b_operand, b_k, b_v, m_key, b_max, b_sum, b_acc, scale_log2, TYPE, WORK, PRECISION
        )  # fmt: skip
    # Add the token's own key and value to the last part. No program of this launch reads them from memory.
    b_k = prepared_heads(  # [1, BD]
        b_key, b_key_pairs, b_key_w, b_key_w_pairs, b_cos, b_sin, eps, NORMS, ROTATES, False, WORK, SIZE
    )  # fmt: skip
    b_v = converted(b_value, WORK)  # [1, BD]
    o_own = length.to(tl.int64) * so_cache[3] + o_d[None, :] * so_cache[4]  # [1, BD]
    m_own = (o_d < tl.where(is_last & is_on, SIZE, 0))[None, :]  # [1, BD]
    tl.store(p_keys + o_own, saturated(b_k, p_cache.dtype.element_ty), mask=m_own)
    tl.store(p_values + o_own, saturated(b_v, p_cache.dtype.element_ty), mask=m_own)
    b_product = rounded_product(b_q, tl.broadcast_to(b_k, (BM, BD)))  # [BM, BD]
    b_own = tl.where(is_last, tl.sum(b_product, 1) * scale_log2, -float("inf"))  # [BM]
    b_new_max = tl.maximum(b_max, b_own)  # [BM]
    b_p, b_rescale = fast_exp2(b_own - b_new_max), fast_exp2(b_max - b_new_max)  # [BM] each
    b_acc = b_acc * b_rescale[:, None] + b_p[:, None] * b_v  # [BM, BD]
    b_sum = b_sum * b_rescale + b_p  # [BM]
    # Store the result, or this program's part of it.
    p_result = p_o + i_pair.to(tl.int64) * (GROUP * SIZE)
    if active == 1:
        store_heads(p_result, tl.where(is_on, b_acc / b_sum[:, None], 0.0), GROUP, SIZE, BM, BD)
    if p_parts is not None:
        first = i_pair.to(tl.int64) * splits
        if active > 1:
            p_state = p_states + (first + i_split) * (2 * GROUP) + o_m  # [BM]
            tl.store(p_state, b_new_max, mask=m_group)
            tl.store(p_state + GROUP, b_sum, mask=m_group)
            store_heads(p_parts + (first + i_split) * (GROUP * SIZE), b_acc, GROUP, SIZE, BM, BD)
            p_first, p_first_state = p_parts + first * (GROUP * SIZE), p_states + first * (2 * GROUP)
            end_part(p_result, p_first, p_first_state, p_counters + i_pair, active, WORK, GROUP, SIZE, TOGETHER, BD)


# --- Launch -----------------------------------------------------------------------------------------------------------

# Tiles by padded head dimension, measured on an H200. A step over few keys is a chain of latencies, so a program loads
# one wide tile at once and has an SM to itself. Over many keys two programs share an SM and stream their keys.
_SHORT = {128: StepTile(keys=128, part=128, splits=4, together=4, warps=8, stages=2)}
_HALF = {
    64: StepTile(keys=128, part=256, splits=32, together=32, warps=4, stages=2),
    128: StepTile(keys=64, part=128, splits=32, together=32, warps=4, stages=3),
    256: StepTile(keys=32, part=64, splits=32, together=32, warps=4, stages=3),
}
_WIDE = {
    64: StepTile(keys=32, part=128, splits=32, together=8, warps=8, stages=1),
    128: StepTile(keys=32, part=128, splits=32, together=8, warps=8, stages=1),
    256: StepTile(keys=32, part=64, splits=32, together=4, warps=16, stages=1),
}
# Tiles of the kernel with operands in registers, by columns of a head: (keys, warps), narrow tiles first.
_MMA = {64: ((128, 4), (256, 4), (512, 8)), 128: ((64, 4), (128, 8))}
_CLUSTERED = {64: 64, 128: 0}  # the most programs if key heads have several clusters; a cluster is scheduled as a whole
SHORT, LONG = 512, 4096  # keys that a short context has at most, and a long one exceeds
SMS, MANY = 132, 128  # SMs of an H100 or H200; many key heads
MMA_GROUP = 8  # the most query heads per key head
MMA_KEYS, MMA_BLOCKS = 8, 4  # keys per block, and the most blocks per tile of scores


def tile_of(itemsize: int, padded: int, group: int, pairs: int, capacity: int) -> StepTile:
    """Return the tile for inputs of `itemsize` bytes; see `StepTile.fitted` for the other arguments."""
    if itemsize > 2:
        return _WIDE[padded].fitted(padded, group, pairs, capacity)
    half, short = _HALF[padded], _SHORT.get(padded)
    if short is not None and half.part < capacity <= SHORT and pairs <= SMS:
        return short._replace(splits=min(short.splits, SMS // pairs, triton.cdiv(capacity, short.part)))
    return half.fitted(padded, group, pairs, capacity)


def mma_tile_of(size: int, group: int, pairs: int, capacity: int, cluster: int) -> StepTile:
    """Return the tile for the kernel with operands in registers.

    The programs of a cluster are the parts, because adding parts costs little there. If each program has an SM to
    itself, a tile has a whole part where one fits; otherwise tiles are narrow and programs share SMs. Long contexts
    have several clusters if there are few programs, otherwise parts without clusters. Many heads of 64 columns take
    narrow tiles, because more of their programs share an SM.

    Args:
        size: columns of a head.
        group: query heads per key head.
        pairs: key heads of all sequences.
        capacity: keys that the cache can hold per sequence.
        cluster: the most programs of a cluster.
    """
    tiles, most = _MMA[size], max(PROGRAMS // pairs, 1)
    if size == 64 and (pairs > 2 * SMS or (pairs >= MANY and capacity <= SHORT)):
        splits = 2 if pairs <= 2 * SMS and cluster > 1 else 1
        return StepTile(64, 64, splits, 1, 4, 1, True, splits)
    useful = most, triton.cdiv(capacity, tiles[0][0])
    splits = min(4 if capacity <= SHORT else cluster, *map(triton.next_power_of_2, useful))
    while splits >= cluster > 1 and 2 * pairs * splits <= _CLUSTERED[size] and capacity > splits * tiles[-1][0]:
        splits *= 2
    if cluster == 1 or (capacity > LONG and splits == cluster < most):
        keys, warps = [t for t in tiles if t[1] == 4][-1]
        return StepTile(keys, keys, 32, 32, warps, 1, True).fitted(size, group, pairs, capacity)
    fits = [t for t in tiles if splits * t[0] >= capacity] or tiles[-1:]
    keys, warps = fits[0] if pairs * splits <= SMS else tiles[0]
    together = min(splits, cluster)
    return StepTile(keys, keys, splits, splits // together, warps, 1, True, together)


def is_for_mma(qkv: Array, cache: Array, group: int, *rest: Array | None) -> bool:
    """Return whether attention_step_mma.py, which loads 16 bytes at once, supports these arrays.

    Args:
        group: query heads per key head.
        rest: RoPE's tables, then the weights of the norms.
    """
    *strides, step = cache.strides
    rows_of_16_bytes = step == 1 and all(stride * cache.dtype.itemsize % 16 == 0 for stride in strides)
    types = (float32, float32, qkv.dtype, qkv.dtype)
    return (
        qkv.dtype.itemsize == 2
        and cache.shape[-1] in _MMA
        and group <= MMA_GROUP
        and rows_of_16_bytes
        and all(x is None or (x.dtype is kind and x.data_ptr() % 16 == 0) for x, kind in zip(rest, types, strict=True))
        and qkv.data_ptr() % 16 == cache.data_ptr() % 16 == 0
    )


@cuda_impl("attention_step")
def attention_step_into(
    out: Array, qkv: Array, cache: Array, lengths: Array, cos: Array | None = None, sin: Array | None = None,
    query_weight: Array | None = None, key_weight: Array | None = None, active: Array | None = None, *, scale: float,
    window: int = 0, eps: float = 0.0, early: bool = False, tile: StepTile | None = None,
) -> None:  # fmt: skip
    """Compute a step's attention. `tile` overrides the chosen division of the work."""
    _, batch, key_heads, capacity, size = cache.shape
    backend, group = backend_of(qkv.device), out.shape[1] // key_heads
    capability, padded = backend.driver.properties.capability, padded_head_dim(size)
    if cache.dtype is float8_e4m3fn and (lack := lacking(capability, qkv.device)) is not None:
        raise DeviceError(f"a KV cache in {cache.dtype.name} {lack}", next="keep the cache in the model's type")
    if padded > 256 or batch * key_heads > COUNTERS:
        excess = f"attention_step: {batch * key_heads} key heads of {size} columns"
        limit = f"the CUDA kernel supports at most {COUNTERS} of at most 256"
        raise ShapeError(f"{excess}; {limit}", next="use fewer sequences or smaller heads")
    if not out.size:
        return
    qkv, lengths, *rest = (
        None if x is None else contiguous(x) for x in (qkv, lengths, cos, sin, query_weight, key_weight, active)
    )
    if tile is None and takes_blocks(qkv, cache):
        _launch_blocks(out, qkv, cache, lengths, *rest, scale=scale, window=window, eps=eps, early=early)
        return
    # Choose the tile, and allocate the parts.
    pairs, work, most = batch * key_heads, work_type(qkv.dtype), largest_cluster(qkv)
    if tile is not None:
        t = tile
    elif is_for_mma(qkv, cache, group, *rest[:4]):
        t = mma_tile_of(size, group, pairs, capacity, most)
    else:
        t = tile_of(qkv.dtype.itemsize, max(padded, 64), group, pairs, capacity)
    cluster = t.cluster if t.cluster <= most else 1
    parts, states = (
        empty((pairs, t.splits // cluster, group, n), work, qkv.device) if t.splits > cluster else None
        for n in (size, 2)
    )
    counters = Array(backend.counters, (COUNTERS,), (1,), int32, qkv.device, 0)
    # Launch the kernel with operands in registers, or the kernel for all sizes and types.
    kind, constants = TRITON[qkv.dtype.name], {"PART": t.part, "TOGETHER": t.together, "num_warps": t.warps}
    kernel: Any
    if t.is_mma:
        kernel = attention_step_mma_kernel
        blocks = t.keys // (MMA_KEYS * t.warps)  # blocks per warp
        loops = capacity > t.splits * t.keys or t.part > t.keys
        constants |= {"TYPE": kind, "TILE": (t.warps, max(blocks // MMA_BLOCKS, 1), min(blocks, MMA_BLOCKS), loops)}
    else:
        kernel, precision = attention_step_kernel, "tf32" if qkv.dtype is float32 and allow_tf32 else "ieee"
        constants |= {"DOT": (kind, TRITON[work.name], precision), "STAGES": t.stages}
        constants |= {"TILE": (max(16, triton.next_power_of_2(group)), t.keys, padded)}
    launch(
        kernel, pairs * t.splits, out, parts, states, counters, qkv, cache, lengths, *rest, capacity,
        window or None, t.splits, float_argument(scale / math.log(2), work), float_argument(eps, work), cache.strides,
        HEADS=(key_heads, group, size), LAUNCH=(can_overlap(qkv), early, cluster), cluster=cluster, **constants,
    )  # fmt: skip


def takes_blocks(qkv: Array, cache: Array) -> bool:
    """Return whether four warps or one compute a step: if it is exact, or if there are many heads of 128 values."""
    is_many = cache.shape[-1] == 128 and cache.shape[1] * cache.shape[2] > 2 * SMS
    return qkv.dtype.itemsize == 2 and (mode.exact or (is_many and takes_four_warps(qkv, cache)))


def _launch_blocks(
    out: Array, qkv: Array, cache: Array, lengths: Array, *rest: Array | None, scale: float, window: int, eps: float,
    early: bool,
) -> None:  # fmt: skip
    """Launch attention_step_exact.py or attention_step_blocks.py. `rest` is as in `attention_step_into`."""
    _, batch, key_heads, capacity, size = cache.shape
    group, pairs, padded = out.shape[1] // key_heads, batch * key_heads, padded_head_dim(size)
    numbers = float_argument(scale / math.log(2), float32), float_argument(eps, float32), cache.strides
    arguments = out, qkv, cache, lengths, *rest, capacity, window or None, *numbers
    heads, overlaps = (key_heads, group, size), (can_overlap(qkv), early)
    if takes_four_warps(qkv, cache):
        # Two rounds in flight take 128 KiB if a program has an SM, 64 KiB if two share it, otherwise 32 KiB or more.
        length = max((256 if pairs <= SMS else 128 if pairs <= 2 * SMS else 64) // size, 1)  # blocks of a round
        launch(
            attention_step_exact_kernel, pairs, *arguments, HEADS=heads, BM=max(8, triton.next_power_of_2(group)),
            STAGES=2, ROUND=length, LAUNCH=overlaps, num_warps=WARPS.value,
        )  # fmt: skip
        return
    launch(
        attention_step_blocks_kernel, pairs, *arguments, TYPE=TRITON[qkv.dtype.name], HEADS=heads,
        STAGES=3 if padded <= 128 else 2, TILE=(max(16, triton.next_power_of_2(group)), BLOCK, padded), LAUNCH=overlaps,
        num_warps=1,
    )  # fmt: skip


def takes_four_warps(qkv: Array, cache: Array) -> bool:
    """Return whether attention_step_exact.py computes a step."""
    return (
        not is_interpreted()
        and cache.dtype is qkv.dtype
        and cache.shape[-1] in (64, 128, 256)
        and cache.strides[-1] == 1
        and cache.data_ptr() % 16 == qkv.data_ptr() % 16 == 0
        and all(stride % 8 == 0 for stride in cache.strides[:-1])
        and backend_of(qkv.device).driver.properties.capability[0] == 9
    )
