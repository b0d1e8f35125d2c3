"""Stable argsort of integer keys, line by line: a rank sort for short lines, else a radix sort.

Reference: `np.argsort(keys, axis=-1, kind="stable")`; `genesis/ops/sort.py` and randperm use it.

Both are deterministic. A rank counts smaller keys and equal ones before it; a pass of the radix sort moves keys by 8
bits, lowest first, to offsets from prefix sums of digit histograms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import int32
from genesis.kernels.index.segment import index_type, sort_tile
from genesis.kernels.reduce.prefix_sum import exclusive_sums

__all__ = ["RANK_SORT_MAX", "argsort_keys"]

RANK_SORT_MAX = 16384  # the longest line that is sorted by rank
COMPARISONS = 1 << 32  # and the most pairs of keys for that
DIGIT = 8  # bits a pass
TILE = 1024


@triton.jit
def saturating_sub(x, y):
    """min(max(x - y, 0), 1): for integers in float32 whether x > y, in one instruction at full FP32 rate."""
    x, y = tl.broadcast(x, y)
    return tl.inline_asm_elementwise(
        "sub.sat.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


if is_interpreted():  # which has no inline assembly

    def saturating_sub(x: Any, y: Any) -> Any:
        """The same by numpy."""
        values = np.clip(x.handle.data - y.handle.data, 0, 1)
        return tl.tensor(type(x.handle)(values, tl.float32), tl.block_type(tl.float32, list(values.shape)))


@triton.jit
def are_less(x, y, FLOATS: tl.constexpr):
    """1 where x < y, else 0."""
    if FLOATS:
        return saturating_sub(y, x)
    else:
        return (x < y).to(tl.int32)


@triton.jit
def rank_sort_kernel(
    p_sorted, p_order, p_keys, length, blocks, FLOATS: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr
):
    """Store keys and their positions at their ranks. FLOATS: keys are below 2^24 and compared as float32."""
    line = (tl.program_id(0) // blocks).to(tl.int64) * length
    start = (tl.program_id(0) % blocks) * BI
    i = start + tl.arange(0, BI)  # [BI]
    key = tl.load(p_keys + line + i, mask=i < length, other=0)
    own_key = (key.to(tl.float32) if FLOATS else key)[:, None]
    o_j = tl.arange(0, BJ)  # [BJ]
    before = tl.zeros([BI, BJ], tl.float32 if FLOATS else tl.int32)  # [BI, BJ]: keys that come first in the result
    below = start // BJ * BJ
    above = tl.minimum(tl.cdiv(start + BI, BJ) * BJ, length)
    full = length // BJ * BJ
    for j in range(0, below, BJ):  # full tiles of earlier positions: equal keys count
        other = tl.load(p_keys + line + j + o_j)
        other = (other.to(tl.float32) if FLOATS else other)[None, :]
        before += are_less(other, own_key + 1, FLOATS) if FLOATS else (other <= own_key).to(tl.int32)
    for j in range(below, above, BJ):
        at = j + o_j
        other = tl.load(p_keys + line + at, mask=at < length, other=0)[None, :]
        sooner = (other < key[:, None]) | ((other == key[:, None]) & (at[None, :] < i[:, None]))
        before += (sooner & (at < length)[None, :]).to(before.dtype)
    for j in range(above, full, BJ):
        other = tl.load(p_keys + line + j + o_j)
        before += are_less((other.to(tl.float32) if FLOATS else other)[None, :], own_key, FLOATS)
    for j in range(tl.maximum(above, full), length, BJ):  # the last, partial tile
        at = j + o_j
        other = tl.load(p_keys + line + at, mask=at < length, other=0)[None, :]
        before += ((other < key[:, None]) & (at < length)[None, :]).to(before.dtype)
    rank = tl.sum(before, 1).to(tl.int32)  # [BI]
    if p_sorted is not None:
        tl.store(p_sorted + line + rank, key, mask=i < length)
    tl.store(p_order + line + rank, i, mask=i < length)


@triton.jit
def digits_of(key, shift, flip):
    """8 bits of each key from `shift` on; `flip` inverts the sign bit of signed keys."""
    return ((key >> shift) & 255).to(tl.int32) ^ flip


@triton.jit(do_not_specialize=["shift", "flip"])
def radix_histogram_kernel(p_counts, p_keys, length, tiles, shift, flip, T: tl.constexpr):
    """counts[line, digit, tile]."""
    line = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    i = tile.to(tl.int64) * T + tl.arange(0, T)
    key = tl.load(p_keys + line * length + i, mask=i < length, other=0)
    digit = tl.where(i < length, digits_of(key, shift, flip), 255)
    o_d = tl.arange(0, 256)
    missing = tl.sum((i >= length).to(tl.int32), 0)
    count = tl.histogram(digit, 256) - tl.where(o_d == 255, missing, 0)
    tl.store(p_counts + (line * 256 + o_d) * tiles + tile, count)


@triton.jit(do_not_specialize=["shift", "flip"])
def radix_scatter_kernel(p_sorted, p_order_out, p_keys, p_order, p_base, length, tiles, shift, flip, T: tl.constexpr):
    """Scatter keys and positions by this digit; `p_order` is None in the first pass."""
    line = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    local = tl.arange(0, T)
    start = tile.to(tl.int64) * T
    key = tl.load(p_keys + line * length + start + local, mask=start + local < length, other=0)
    digit = tl.where(start + local < length, digits_of(key, shift, flip), 255)
    count = tl.histogram(digit, 256)  # [256]
    first = tl.cumsum(count, 0) - count
    packed = sort_tile(digit * 65536 + local)  # [T]
    digit, local_from = packed // 65536, packed % 65536
    m = start + local_from < length
    source = line * length + start + local_from
    key = tl.load(p_keys + source, mask=m)
    if p_order is None:
        position = (start + local_from).to(p_order_out.dtype.element_ty)
    else:
        position = tl.load(p_order + source, mask=m)
    base = tl.load(p_base + (line * 256 + digit) * tiles + tile, mask=m, other=0)
    target = base + (local - tl.gather(first, digit, 0))
    if p_sorted is not None:
        tl.store(p_sorted + target, key, mask=m)
    tl.store(p_order_out + target, position, mask=m)


def rank_tile(length: int) -> tuple[int, int, int]:
    """(keys per program, keys it compares them with at a time, warps)."""
    return (32, 256, 4) if length > 256 else (16, 64, 4)


def _is_rank_sorted(length: int, lines: int) -> bool:
    return length <= RANK_SORT_MAX and length * length * lines <= COMPARISONS


def argsort_keys(keys: Array, bits: int, signed: bool, keep_keys: bool = True) -> tuple[Array | None, Array]:
    """The stable ascending order of each line.

    Args:
        keys: `[lines, length]` int32 or int64, contiguous.
        bits: how many of their low bits differ, the sign's included where `signed`.
        keep_keys: whether the sorted keys are wanted.

    Returns:
        The sorted keys (None unless wanted), and the position of each in its line, both `[lines, length]`.
    """
    lines, length = keys.shape
    if _is_rank_sorted(length, lines):
        found = empty(keys.shape, keys.dtype, keys.device) if keep_keys else None
        order = empty(keys.shape, int32, keys.device)
        bi, bj, warps = rank_tile(length)
        blocks = triton.cdiv(length, bi)
        floats = bits <= 24 and not signed and keys.dtype is int32
        launch(
            rank_sort_kernel, blocks * lines, found, order, keys, length, blocks, FLOATS=floats, BI=bi, BJ=bj,
            num_warps=warps,
        )  # fmt: skip
        return found, order
    return _radix(keys, bits, signed, keep_keys)


def _radix(keys: Array, bits: int, signed: bool, keep_keys: bool) -> tuple[Array | None, Array]:
    lines, length = keys.shape
    kind, device = index_type(length), keys.device
    tiles, passes = triton.cdiv(length, TILE), max(1, -(-bits // DIGIT))
    order: Array | None = None
    for digit in range(passes):
        last = digit == passes - 1
        flip = 128 if signed and last else 0  # keys are sign-extended, so it is the top bit of their last digit
        shift = DIGIT * digit
        counts = empty((lines * 256 * tiles,), int32, device)
        launch(radix_histogram_kernel, lines * tiles, counts, keys, length, tiles, shift, flip, T=TILE, num_warps=4)
        bases = exclusive_sums(counts)
        moved = empty(keys.shape, keys.dtype, device) if keep_keys or not last else None
        positions = empty(keys.shape, kind, device)
        launch(
            radix_scatter_kernel, lines * tiles, moved, positions, keys, order, bases, length, tiles, shift, flip,
            T=TILE, num_warps=4,
        )  # fmt: skip
        keys, order = keys if moved is None else moved, positions
    assert order is not None
    return (keys if keep_keys else None), order
