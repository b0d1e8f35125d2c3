"""Stream compaction: the indices of a mask's true elements, or the values at them, in row-major order.

Reference: `genesis/ops/index.py`: mask_count, mask_indices, mask_offsets, masked_select, masked_select_backward;
`genesis/ops/sort.py`: nonzero_count, nonzero.

A first kernel counts true elements per tile. Exclusive prefix sums of the counts are the offsets at which the second
kernel writes; a last, empty tile gives the count of all. Tiles: T elements; `masked_select_kernel` reads values as
[T / C, C].
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of, faults
from genesis.backend.cuda.dispatch import Plan, layout_of, record
from genesis.backend.cuda.launch import forget_plan, launch
from genesis.dtypes import int32, int64
from genesis.kernels.elements import collapse, needs_int64, offsets, program_indices
from genesis.kernels.index.segment import report_fault
from genesis.kernels.reduce.reduce import ADD
from genesis.kernels.reduce.scan import scan_into
from genesis.ops.index import MASK_BLOCK

TILE = 4096
SUMS = 1024  # counts that a program scans if they are more than twice as many
COLUMNS = 2048  # columns of the tile that copies values; rows of 128 to 1024 are up to 7 times slower
PLANS = 256  # the most cached plans

_plans: dict[Any, Plan] = {}  # launch plans of `masked_select_kernel`


@triton.jit
def load_mask(p_x, i, n, sizes, strides):
    """Return 1 where the element at linear index i [T] is not 0, otherwise 0, as int32."""
    x = tl.load(p_x + offsets(i, sizes, strides), mask=i < n, other=0)  # [T]
    if x.dtype == tl.bfloat16:  # the interpreter loads bfloat16 as integers, where -0 is not 0
        x = x.to(tl.int16, bitcast=True) & 0x7FFF
    return ((x != 0) & (i < n)).to(tl.int32)


@triton.jit
def mask_count_kernel(p_counts, p_x, n, sizes, strides, INT64: tl.constexpr, T: tl.constexpr):
    """Store the number of true elements of each tile."""
    tile = tl.program_id(0)
    i = program_indices(T, INT64)  # [T]
    tl.store(p_counts + tile, tl.sum(load_mask(p_x, i, n, sizes, strides), 0))


@triton.jit(do_not_specialize=["count", "by_count", "by_dim", "site"])
def nonzero_kernel(p_o, p_base, p_x, p_fault, n, sizes, strides, count, by_count, by_dim, shape, site,
                   INT64: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Store the coordinates of true elements at out[rank · by_count + dimension · by_dim]."""
    tile = tl.program_id(0)
    i = program_indices(T, INT64)  # [T]
    true = load_mask(p_x, i, n, sizes, strides)  # [T]
    base = tl.load(p_base + tile)
    rank = tl.cumsum(true, 0) - 1  # [T], in the tile: int32, while the tile's offset is int64
    m = (true != 0) & (rank < tl.minimum(count - base, T).to(tl.int32))  # [T]
    p_o += base * by_count
    rest = i
    LAST: tl.constexpr = len(shape) - 1
    for back in tl.static_range(LAST + 1):
        at = rest if back == LAST else rest % shape[LAST - back]  # [T]
        rest = rest // shape[LAST - back]
        tl.store(p_o + (LAST - back) * by_dim + rank * by_count, at.to(tl.int64), mask=m)
    if tile == tl.num_programs(0) - 1:
        total = base + tl.sum(true, 0)
        report_fault(p_fault, site, total, total != count)


@triton.jit
def masked_select_kernel(p_o, p_base, p_x, p_m, n, sizes, sx, sm, INT64: tl.constexpr, T: tl.constexpr,
                         C: tl.constexpr):  # fmt: skip
    """Store out[rank] = x where the mask is true. All of x is loaded, so the loads do not wait for the mask."""
    tile = tl.program_id(0)
    begin = (tile.to(tl.int64) if INT64 else tile) * T
    # The tile of x has another shape than the mask, whose long vectors would otherwise determine the layout of x.
    i = begin + tl.arange(0, T // C)[:, None] * C + tl.arange(0, C)[None, :]  # [T / C, C]
    x = tl.load(p_x + offsets(i, sizes, sx), mask=i < n)  # [T / C, C]
    true = load_mask(p_m, begin + tl.arange(0, T), n, sizes, sm)  # [T]
    base, end = tl.load(p_base + tile), tl.load(p_base + tile + 1)
    rank = tl.cumsum(true, 0) - 1  # [T]
    m = (true != 0) & (rank < (end - base).to(tl.int32))  # [T]; in bounds even if the mask has changed since the count
    rank = tl.reshape(tl.where(m, rank, -1).to(tl.int16), (T // C, C))  # [T / C, C]
    tl.store(p_o + base + rank.to(tl.int32), x, mask=rank >= 0)


@triton.jit(do_not_specialize=["count"])
def masked_scatter_kernel(p_o, p_base, p_g, p_m, n, count, step, sizes, sm, INT64: tl.constexpr, T: tl.constexpr):
    """Store out = g[rank · step] where the mask is true, and 0 elsewhere."""
    tile = tl.program_id(0)
    i = program_indices(T, INT64)  # [T]
    true = load_mask(p_m, i, n, sizes, sm)  # [T]
    base = tl.load(p_base + tile)
    rank = tl.cumsum(true, 0) - 1  # [T]
    m = (true != 0) & (rank < tl.minimum(count - base, T).to(tl.int32))
    g = tl.load(p_g + (base + rank) * step, mask=m, other=0)  # [T]
    tl.store(p_o + i, g, mask=i < n)


def sums_before(counts: Array, out: Array | None = None) -> Array:
    """Return out[i] = counts[0] + … + counts[i - 1] in int64."""
    out = empty(counts.shape, int64, counts.device) if out is None else out
    tile = SUMS if counts.size > 2 * SUMS else None
    scan_into(ADD, out, counts, (0,), int64, exclusive=True, tile=tile)
    return out


def true_before(x: Array, tile: int, out: Array | None = None) -> Array:
    """Return the number of true elements before each tile of x, and of all."""
    sizes, strides = collapse(x.shape, x.strides)
    counts = empty((triton.cdiv(x.size, tile) + 1,), int32, x.device)
    launch(
        mask_count_kernel, counts.size, counts, x, x.size, sizes, strides, INT64=needs_int64(sizes, strides), T=tile,
        num_warps=2,
    )  # fmt: skip
    return sums_before(counts, out)


def select_true(out: Array, x: Array, mask: Array, before: Array) -> None:
    """Write the elements of x where the mask is true, in row-major order.

    One cached plan serves all counts; the op's own plan would serve only this count.

    Args:
        before: result of `mask_offsets`; its last element is the size of `out`.
    """
    forget_plan()
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
        masked_select_kernel, before.size - 1, out, before, x, mask, x.size, sizes, sx, sm,
        INT64=needs_int64(sizes, sx, sm), T=MASK_BLOCK, C=COLUMNS, num_warps=4,
    )  # fmt: skip


def scatter_true(out: Array, g: Array, mask: Array, before: Array) -> None:
    """Write the elements of g, in order, where the mask is true, and 0 elsewhere."""
    forget_plan()
    sizes, sm = collapse(mask.shape, mask.strides)
    launch(
        masked_scatter_kernel, before.size - 1, out, before, g, mask, mask.size, g.size, g.strides[0], sizes, sm,
        INT64=needs_int64(sizes, sm), T=MASK_BLOCK, num_warps=8,
    )  # fmt: skip


def true_indices(op: str, out: Array, x: Array, count: int, by_count: int, by_dim: int) -> None:
    """Write the indices of the `count` elements of x that are not 0 to out[rank · by_count + dimension · by_dim].
    Another number of such elements is reported as a fault.
    """
    if out.size == 0:
        return
    before = true_before(x, TILE)
    sizes, strides = collapse(x.shape, x.strides)
    shape = x.shape or (1,)
    launch(
        nonzero_kernel, before.size - 1, out, before, x, faults.flag(x.device), x.size, sizes, strides, count,
        by_count, by_dim, shape, faults.site(op, None, count), INT64=needs_int64(sizes, strides), T=TILE, num_warps=16,
    )  # fmt: skip
