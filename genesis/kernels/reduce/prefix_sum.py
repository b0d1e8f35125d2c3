"""Exclusive prefix sums of counts: the offset at which each tile's part of a result begins.

Reference: `np.cumsum(counts) - counts`; ops whose result size depends on values use it (nonzero, unique, radix sort).
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.launch import launch
from genesis.dtypes import int64

TILE = 1024  # counts per program and step
ONE_PROGRAM = 2 * TILE  # counts that one program scans alone


@triton.jit
def exclusive_scan_kernel(p_o, p_total, p_x, n, BLOCK: tl.constexpr):
    """out[i] = x[0] + … + x[i - 1] and the sum of all, by one program."""
    carry = tl.full((), 0, tl.int64)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        m = i < n
        x = tl.load(p_x + i, mask=m, other=0).to(tl.int64)
        tl.store(p_o + i, carry + tl.cumsum(x, 0) - x, mask=m)
        carry += tl.sum(x, 0)
    tl.store(p_total, carry)


@triton.jit
def tile_sums_kernel(p_o, p_x, n, BLOCK: tl.constexpr):
    """out[t] = the sum of tile t."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + i, mask=i < n, other=0).to(tl.int64)
    tl.store(p_o + tl.program_id(0), tl.sum(x, 0))


@triton.jit
def tile_scan_kernel(p_o, p_base, p_x, n, BLOCK: tl.constexpr):
    """Prefix sums inside each tile, from its base."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    x = tl.load(p_x + i, mask=m, other=0).to(tl.int64)
    tl.store(p_o + i, tl.load(p_base + tl.program_id(0)) + tl.cumsum(x, 0) - x, mask=m)


def exclusive_sums(counts: Array, total: Array | None = None, out: Array | None = None) -> Array:
    """out[i] = counts[0] + … + counts[i - 1].

    Args:
        counts: `[n]` of any integer type, contiguous; n < 2^31.
        total: `[]` or `[1]` int64 that gets the sum of all.
        out: `[n]` int64, contiguous; made here unless given.

    Returns:
        `[n]` int64.
    """
    n, device = counts.size, counts.device
    total = empty((1,), int64, device) if total is None else total
    out = empty((n,), int64, device) if out is None else out
    if n <= ONE_PROGRAM:
        launch(exclusive_scan_kernel, 1, out, total, counts, n, BLOCK=_block(n), num_warps=_warps(n))
        return out
    tiles = triton.cdiv(n, TILE)
    sums = empty((tiles,), int64, device)
    launch(tile_sums_kernel, tiles, sums, counts, n, BLOCK=TILE, num_warps=8)
    bases = exclusive_sums(sums, total)
    launch(tile_scan_kernel, tiles, out, bases, counts, n, BLOCK=TILE, num_warps=8)
    return out


def _block(n: int) -> int:
    return int(min(max(triton.next_power_of_2(n), 128), TILE))


def _warps(n: int) -> int:
    return 4 if n <= 1024 else 16
