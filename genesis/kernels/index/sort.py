"""Sorting, top-k, nonzero, bincount and unique.

Reference: `genesis/ops/sort.py`, under the same names.

Values become integers in the same order, with NaN last and both zeros equal. Lines of up to 128 elements (of up to 4
bytes) take a bitonic sort of key and index packed in 64 bits; longer lines take a radix sort. Tiles: T elements, or
LINES lines x T elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import faults
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import clear, launch
from genesis.dtypes import float64, int32, int64
from genesis.kernels.elements import TRITON, collapse, converted, offsets
from genesis.kernels.formulas import tile_function
from genesis.kernels.index.index import index_arrays, index_keys, sorted_index_keys
from genesis.kernels.index.radix_sort import Lines, bits_of, ordered_keys, radix_sort
from genesis.kernels.index.segment import index_type, report_fault, rows_of, scatter_add_rows, sort_tile
from genesis.kernels.index.select import sums_before, true_indices
from genesis.kernels.pointwise.elementwise import elementwise
from genesis.kernels.reduce.reduce import ADD, NONZERO, reduce_axes
from genesis.kernels.reduce.reduction import load_type
from genesis.ops.reduce import single_axis
from genesis.ops.shape import contiguous
from genesis.shapes import numel

SHORT = 128  # the longest line that takes a bitonic sort
TILE = 1024  # elements per program


# --- Sorting lines ----------------------------------------------------------------------------------------------------


@triton.jit
def bitonic_sort_kernel(p_values, p_indices, p_x, lines, length, count, step, sizes, strides, inner,
                        DESCENDING: tl.constexpr, LINES: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Sort short lines and store the first `count` elements of each."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]  # [LINES, 1]
    i = tl.arange(0, T)[None, :]  # [1, T]
    m = (line < lines) & (i < length)  # [LINES, T]
    o_line = offsets(line, sizes, strides)  # [LINES, 1]
    bits = bits_of(tl.load(p_x + o_line + i.to(tl.int64) * step, mask=m, other=0))  # [LINES, T]
    key = ordered_keys(bits, p_x.dtype.element_ty, DESCENDING).to(tl.int64)  # [LINES, T]
    packed = sort_tile(tl.where(m, key * 4294967296 + i, 0x7FFFFFFFFFFFFFFF))  # [LINES, T]
    m = (line < lines) & (i < count)
    index = packed & 0xFFFFFFFF  # [LINES, T]
    x = tl.load(p_x + o_line + index * step, mask=m)  # [LINES, T]
    o = (line // inner * count + i) * inner + line % inner
    tl.store(p_values + o, x, mask=m)
    tl.store(p_indices + o, index, mask=m)


def _sort_into(out: tuple[Array, Array], x: Array, axis: int, count: int, descending: bool) -> None:
    """Write the first `count` elements along `axis` in order, and their indices."""
    length, step = (x.shape[axis], x.strides[axis]) if x.shape else (1, 0)
    lines = x.size // max(length, 1)
    if lines == 0 or count == 0:
        return
    others = [d for d in range(x.ndim) if d != axis]
    sizes, steps = collapse(tuple(x.shape[d] for d in others), tuple(x.strides[d] for d in others))
    inner = numel(x.shape[axis + 1 :]) if x.shape else 1
    if x.dtype.itemsize > 4 or length > SHORT:
        where = Lines(lines, length, step, sizes, steps, inner)
        radix_sort(*out, x, where, count, 8 * x.dtype.itemsize, True, descending)
        return
    tile = triton.next_power_of_2(max(length, 2))
    lines_per_tile = max(1, min(1024 // tile, triton.next_power_of_2(lines)))
    launch(
        bitonic_sort_kernel, triton.cdiv(lines, lines_per_tile), *out, x, lines, length, count, step, sizes, steps,
        inner, DESCENDING=descending, LINES=lines_per_tile, T=tile, num_warps=4,
    )  # fmt: skip


@cuda_impl("sort")
def sort(out: tuple[Array, Array], x: Array, axis: int, descending: bool = False) -> None:
    axis = single_axis("sort", x.shape, axis)
    _sort_into(out, x, axis, x.shape[axis] if x.shape else 1, descending)


@cuda_impl("topk")
def topk(out: tuple[Array, Array], x: Array, k: int, axis: int, largest: bool = True) -> None:
    _sort_into(out, x, single_axis("topk", x.shape, axis), k, largest)


# --- Results whose size depends on values -----------------------------------------------------------------------------


@cuda_impl("nonzero_count")
def nonzero_count(out: Array, x: Array) -> None:
    reduce_axes(NONZERO, out, x, None, int64)


@cuda_impl("nonzero")
def nonzero(out: Array, x: Array, size: int) -> None:
    true_indices("nonzero", out, x, size, x.ndim, 1)


@triton.jit
def bincount_kernel(p_o, p_keys, n, size, T: tl.constexpr):
    """Add 1 to out[key]. Atomic additions of integers give the same result in any order."""
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)  # [T]
    key = tl.load(p_keys + i, mask=i < n, other=0)  # [T]
    tl.atomic_add(p_o + key, tl.full([T], 1, tl.int64), mask=(i < n) & (key < size))


@cuda_impl("bincount")
def bincount(out: Array, x: Array, *weights: Array, size: int) -> None:
    clear(out)
    if x.size == 0:
        return
    index = index_arrays("bincount", (x,), (size,), (1,), negative=False)
    if weights:
        rows = rows_of(x.shape, weights[0].strides, (1,), (1,), (0,))
        scatter_add_rows(out, weights[0], sorted_index_keys(index, max(size, 1), 1), rows, add=False, work=float64)
        return
    launch(bincount_kernel, triton.cdiv(x.size, TILE), out, index_keys(index, max(size, 1)), x.size, size, T=TILE)


@triton.jit
def load_is_first(p_x, i, n, READ: tl.constexpr):
    """Return 1 where a sorted element differs from the one before, otherwise 0, as int32. Every NaN differs."""
    x = converted(tl.load(p_x + i, mask=i < n, other=0), READ)  # [T]
    before = converted(tl.load(p_x + i - 1, mask=(i > 0) & (i < n), other=0), READ)  # [T]
    return (((x != before) | (i == 0)) & (i < n)).to(tl.int32)


@triton.jit
def count_unique_kernel(p_counts, p_x, n, READ: tl.constexpr, T: tl.constexpr):
    """Store the number of sorted elements in a tile that differ from the one before."""
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)  # [T]
    tl.store(p_counts + tl.program_id(0), tl.sum(load_is_first(p_x, i, n, READ), 0))


@triton.jit(do_not_specialize=["size", "site"])
def unique_kernel(p_values, p_inverse, p_starts, p_fault, p_base, p_x, p_order, n, size, site, READ: tl.constexpr,
                  T: tl.constexpr):  # fmt: skip
    """Store the group of each sorted element, the value and start of each group, and the end of the last."""
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)  # [T]
    new = load_is_first(p_x, i, n, READ)  # [T]
    group = tl.load(p_base + tl.program_id(0)) + tl.cumsum(new, 0) - 1  # [T]
    tl.store(p_inverse + tl.load(p_order + i, mask=i < n, other=0), group, mask=i < n)
    m = (new != 0) & (group < size)  # [T]
    tl.store(p_values + group, tl.load(p_x + i, mask=m), mask=m)
    tl.store(p_starts + group, i, mask=m)
    tl.store(p_starts + size + i * 0, n, mask=i == n - 1)
    report_fault(p_fault, site, group + 1, (i == n - 1) & (group + 1 != size))


def _grouped(x: Array) -> tuple[Array, Array, Array]:
    """Return the sorted elements, their positions, and the unique ones in each tile; the last tile is empty."""
    x, n = contiguous(x), x.size
    ordered, order = empty((n,), x.dtype, x.device), empty((n,), index_type(n), x.device)
    radix_sort(ordered, order, x, Lines(1, n, 1, (1,), (n,), 1), n, 8 * x.dtype.itemsize, True, False)
    counts = empty((triton.cdiv(n, TILE) + 1,), int32, x.device)
    launch(count_unique_kernel, counts.size, counts, ordered, n, READ=_read(x), T=TILE, num_warps=4)
    return ordered, order, counts


def _read(x: Array) -> tl.dtype:
    return TRITON[load_type(x.dtype).name]


@cuda_impl("unique_count")
def unique_count(out: Array, x: Array) -> None:
    if x.size:
        reduce_axes(ADD, out, _grouped(x)[2], None, int64)
    else:
        clear(out)


@cuda_impl("unique")
def unique(out: tuple[Array, Array, Array], x: Array, size: int) -> None:
    values, inverse, counts = out
    if x.size == 0:
        return
    ordered, order, found = _grouped(x)
    starts = empty((size + 1,), int64, x.device)
    launch(
        unique_kernel, found.size - 1, values, inverse, starts, faults.flag(x.device), sums_before(found), ordered,
        order, x.size, size, faults.site("unique", None, size), READ=_read(x), T=TILE, num_warps=4,
    )  # fmt: skip
    elementwise(tile_function("sub"), counts, *(starts.view((size,), (1,), first) for first in (1, 0)))
