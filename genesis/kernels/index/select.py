"""The true elements of a mask in row-major order: counted by tile, and written where the counts' prefix sums say.

Their positions, or the values that stand there in an array of the mask's shape.
"""

from __future__ import annotations

import weakref
from typing import Any

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend import Device
from genesis.backend.cuda import backend_of, faults
from genesis.backend.cuda.dispatch import Plan, layout_of, record
from genesis.backend.cuda.launch import clear, launch, recording
from genesis.dtypes import int32, int64
from genesis.kernels.index.segment import report
from genesis.kernels.reduce.prefix_sum import exclusive_sums
from genesis.kernels.strides import collapse, is_wide, offsets
from genesis.ops.index import MASK_BLOCK

__all__ = ["block_offsets", "count_true", "select_true", "spread_true", "true_positions"]

TILE = 4096
COLUMNS = 2048  # of the shape in which values are moved; short rows, down to 128, were up to 7 times slower
PLANS = 256
SHARED = 1 << 27  # elements; from here on counting again costs more than launches without a plan

_plans: dict[Any, Plan] = {}  # of `values_kernel`

# What the last count on each device left: the mask it was of, and its tiles' offsets.
_counted: dict[Device, tuple[Any, Any, Array]] = {}


@triton.jit
def truths(p_x, i, n, sizes, strides, DIMS: tl.constexpr):
    """Whether the elements at linear indices i are not 0, as int32."""
    x = tl.load(p_x + offsets(i, sizes, strides, DIMS), mask=i < n, other=0)
    if x.dtype == tl.bfloat16:  # which the interpreter reads as integers: -0 is the one value to look after
        x = x.to(tl.int16, bitcast=True) & 0x7FFF
    return ((x != 0) & (i < n)).to(tl.int32)


@triton.jit
def count_kernel(p_counts, p_x, n, sizes, strides, DIMS: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr):
    """counts[tile]."""
    tile = tl.program_id(0)
    i = (tile.to(tl.int64) if WIDE else tile) * T + tl.arange(0, T)
    tl.store(p_counts + tile, tl.sum(truths(p_x, i, n, sizes, strides, DIMS), 0))


@triton.jit(do_not_specialize=["count", "by_count", "by_dim", "site"])
def select_kernel(p_o, p_base, p_x, p_fault, n, sizes, strides, count, by_count, by_dim, shape, site,
                  DIMS: tl.constexpr, NDIM: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """The coordinates of true elements, at out[number · by_count + dimension · by_dim]."""
    tile = tl.program_id(0)
    i = (tile.to(tl.int64) if WIDE else tile) * T + tl.arange(0, T)
    true = truths(p_x, i, n, sizes, strides, DIMS)
    base = tl.load(p_base + tile)
    number = tl.cumsum(true, 0) - 1  # inside the tile: short offsets from one long one
    m = (true != 0) & (number < tl.minimum(count - base, T).to(tl.int32))
    p_o += base * by_count
    rest = i
    for back in tl.static_range(NDIM):
        at = rest if back == NDIM - 1 else rest % shape[NDIM - 1 - back]
        rest = rest // shape[NDIM - 1 - back]
        tl.store(p_o + (NDIM - 1 - back) * by_dim + number * by_count, at.to(tl.int64), mask=m)
    if tile == tl.num_programs(0) - 1:
        total = base + tl.sum(true, 0)
        report(p_fault, site, total, total != count)


@triton.jit
def values_kernel(p_o, p_base, p_x, p_m, n, sizes, sx, sm, DIMS: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr,
                  C: tl.constexpr):  # fmt: skip
    """out[number] = x where the mask is true. All of x is read: that needs not wait for the mask."""
    tile = tl.program_id(0)
    begin = (tile.to(tl.int64) if WIDE else tile) * T
    # in another shape than the mask, so that its long vectors do not set how x is read and written
    i = begin + tl.arange(0, T // C)[:, None] * C + tl.arange(0, C)[None, :]
    x = tl.load(p_x + offsets(i, sizes, sx, DIMS), mask=i < n)
    true = truths(p_m, begin + tl.arange(0, T), n, sizes, sm, DIMS)
    base, end = tl.load(p_base + tile), tl.load(p_base + tile + 1)
    number = tl.cumsum(true, 0) - 1
    m = (true != 0) & (number < (end - base).to(tl.int32))  # also where the mask has changed since it was counted
    number = tl.reshape(tl.where(m, number, -1).to(tl.int16), (T // C, C))
    tl.store(p_o + base + number.to(tl.int32), x, mask=number >= 0)


@triton.jit(do_not_specialize=["count"])
def spread_kernel(p_o, p_base, p_g, p_m, n, count, step, sizes, sm, DIMS: tl.constexpr, WIDE: tl.constexpr,
                  T: tl.constexpr):  # fmt: skip
    """out = g[number · step] where the mask is true, and 0 elsewhere."""
    tile = tl.program_id(0)
    i = (tile.to(tl.int64) if WIDE else tile) * T + tl.arange(0, T)
    true = truths(p_m, i, n, sizes, sm, DIMS)
    base = tl.load(p_base + tile)
    number = tl.cumsum(true, 0) - 1
    m = (true != 0) & (number < tl.minimum(count - base, T).to(tl.int32))
    g = tl.load(p_g + (base + number) * step, mask=m, other=0)
    tl.store(p_o + i, g, mask=i < n)


def _tile_offsets(x: Array, total: Array | None) -> Array:
    """For each tile of x how many elements are true before it; their sum over all into `total`."""
    sizes, strides = collapse(x.shape, x.strides)
    tiles = triton.cdiv(x.size, TILE)
    counts = empty((tiles,), int32, x.device)
    launch(
        count_kernel, tiles, counts, x, x.size, sizes, strides, DIMS=len(sizes),
        WIDE=is_wide(sizes, strides), T=TILE, num_warps=2,
    )  # fmt: skip
    return exclusive_sums(counts, total)


def block_offsets(out: Array, x: Array) -> None:
    """How many elements of x are true before each block of `MASK_BLOCK`, and in all."""
    blocks = out.size - 1
    total = out.view((1,), (1,), out.offset + blocks)
    if blocks == 0:
        clear(out)
        return
    sizes, strides = collapse(x.shape, x.strides)
    counts = empty((blocks,), int32, x.device)
    launch(
        count_kernel, blocks, counts, x, x.size, sizes, strides, DIMS=len(sizes),
        WIDE=is_wide(sizes, strides), T=MASK_BLOCK, num_warps=2,
    )  # fmt: skip
    exclusive_sums(counts, total, out.view((blocks,), (1,)))


def _unplanned() -> None:
    """Keep no plan of a call whose shapes hold a count: it would hardly be used again, and push out others."""
    recorder = recording()
    if recorder is not None:
        recorder.cacheable = False


def select_true(out: Array, x: Array, mask: Array, before: Array) -> None:
    """The elements of x where the mask is true, in row-major order.

    The launch is remembered here, for all counts: the op's own plan would be for this one only.

    Args:
        before: of `block_offsets`; `out` has as many elements as its last one says.
    """
    _unplanned()
    if out.size == 0:
        return
    operands, backend = (out, before, x, mask), backend_of(x.device)
    key = (layout_of(x), layout_of(mask), x is mask, *(a.data_ptr() % 16 for a in operands))
    plan = _plans.get(key)
    if plan is not None:
        plan.run(operands, backend.stream)
        return
    plan = record(operands, lambda: _launch_values(*operands), backend.driver, backend.allocate, "masked_select")
    if plan is not None:
        if len(_plans) >= PLANS:
            _plans.clear()
        _plans[key] = plan


def _launch_values(out: Array, before: Array, x: Array, mask: Array) -> None:
    sizes, sx, sm = collapse(x.shape, x.strides, mask.strides)
    launch(
        values_kernel, before.size - 1, out, before, x, mask, x.size, sizes, sx, sm, DIMS=len(sizes),
        WIDE=is_wide(sizes, sx, sm), T=MASK_BLOCK, C=COLUMNS, num_warps=4,
    )  # fmt: skip


def spread_true(out: Array, g: Array, mask: Array, before: Array) -> None:
    """g, in order, where the mask is true, and 0 elsewhere."""
    _unplanned()
    sizes, sm = collapse(mask.shape, mask.strides)
    launch(
        spread_kernel, before.size - 1, out, before, g, mask, mask.size, g.size, g.strides[0], sizes, sm,
        DIMS=len(sizes), WIDE=is_wide(sizes, sm), T=MASK_BLOCK, num_warps=8,
    )  # fmt: skip


def _place(x: Array) -> tuple[Any, ...]:
    return (x.offset, x.shape, x.strides, x.dtype, x.storage.version, backend_of(x.device).stream)


def count_true(out: Array, x: Array) -> None:
    """How many elements of x are not 0, into an int64 scalar.

    Of a large mask the tiles' offsets are kept for the `true_positions` that usually follows, so this runs anew at
    every call: a plan would not tell that it ran.
    """
    found = _tile_offsets(x, out)
    recorder = recording()
    if x.size >= SHARED and recorder is not None and any(x is operand for operand in recorder.operands):
        recorder.cacheable = False
        _counted[x.device] = (weakref.ref(x.storage), _place(x), found)


def _kept_offsets(x: Array) -> Array | None:
    """What the last count left, if it was of this mask and nothing has written to it."""
    if x.size < SHARED:
        return None
    storage, place, found = _counted.pop(x.device, (None, None, None))
    if storage is None or storage() is not x.storage or place != _place(x):
        return None
    recorder = recording()
    if recorder is not None:
        recorder.cacheable = False
    return found


def true_positions(op: str, out: Array, x: Array, count: int, by_count: int, by_dim: int) -> None:
    """The indices of the elements of x that are not 0, `count` of them, at out[number · by_count + dimension · by_dim].

    A different number of them is reported; then `out` gets the first ones, or is filled with 0 after the last.
    """
    if out.size == 0:
        return
    found = _kept_offsets(x)
    if found is None:
        found = _tile_offsets(x, empty((1,), int64, x.device))
    sizes, strides = collapse(x.shape, x.strides)
    shape = x.shape or (1,)
    launch(
        select_kernel, found.size, out, found, x, faults.flag(x.device), x.size, sizes, strides, count, by_count,
        by_dim, shape, faults.site(op, None, count), DIMS=len(sizes), NDIM=len(shape),
        WIDE=is_wide(sizes, strides), T=TILE, num_warps=16,
    )  # fmt: skip
