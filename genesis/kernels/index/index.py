"""Indexing with arrays. Gathers compute their offsets in the kernel; scatters sort the target offsets first.

Reference: `genesis/ops/index.py`, under the same names. The gradient of an embedding sums rows over sorted ids.

Indices are checked on the device: an index out of range reads 0 or writes nothing, and raises IndexRangeError at the
next synchronization (`backend.cuda.faults`).

Kernels address an array as [outer, n, inner]: n is a position of the index arrays, outer and inner are the dimensions
before and after. Tiles: T positions, or R rows x C columns.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import faults
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import clear, launch
from genesis.dtypes import bool_, int64
from genesis.kernels.dependents import FEW_ROWS, allow_next, can_overlap, wait_for_previous
from genesis.kernels.elements import needs_int64, offsets, work_type
from genesis.kernels.index import segment
from genesis.kernels.index.radix_sort import argsort_keys
from genesis.kernels.index.segment import (
    Rows,
    SortedKeys,
    add_to_few_targets,
    index_type,
    report_fault,
    rows_of,
    scatter_add_rows,
    scatter_rows,
)
from genesis.kernels.index.select import scatter_true, select_true, true_before, true_indices
from genesis.kernels.pointwise.elementwise import copy, fill, scalar_argument
from genesis.kernels.reduce.reduce import NONZERO, reduce_axes
from genesis.ops.index import MASK_BLOCK, placed
from genesis.ops.shape import contiguous
from genesis.shapes import Shape, broadcast_shapes, broadcast_strides, numel

# --- From indices to offsets ------------------------------------------------------------------------------------------


@triton.jit
def index_offsets(indices, sizes, strides, extents, steps, sites, p_fault, n, m, NEGATIVE: tl.constexpr):
    """Return the sum of the index arrays' offsets at positions n [T], and which are in range. Report the others."""
    o, good = n.to(tl.int64) * 0, m  # [T] each
    for k in tl.static_range(len(indices)):
        i = tl.load(indices[k] + offsets(n, sizes, strides[k]), mask=m, other=0).to(tl.int64)  # [T]
        j = tl.where(i < 0, i + extents[k], i) if NEGATIVE else i  # [T]
        inside = (j >= 0) & (j < extents[k])  # [T]
        report_fault(p_fault, sites[k], i, m & (inside == 0))
        o += j * steps[k]
        good = good & inside
    return o, good


@triton.jit(do_not_specialize=["sites"])
def index_keys_kernel(p_keys, indices, sizes, strides, extents, steps, sites, p_fault, count, span,
                      NEGATIVE: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Store keys[n] = the offset of position n, or `span` if an index is out of range."""
    n = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)  # [T]
    m = n < count  # [T]
    o, good = index_offsets(indices, sizes, strides, extents, steps, sites, p_fault, n, m, NEGATIVE)  # [T] each
    tl.store(p_keys + n, tl.where(good, o, span).to(p_keys.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["sites"])
def gather_kernel(p_o, p_x, indices, sizes, strides, extents, steps, sites, p_fault, rows, count, width, outer,
                  s_outer, inner, s_inner, NEGATIVE: tl.constexpr, OUTER: tl.constexpr, INT64: tl.constexpr,
                  OVERLAP: tl.constexpr, R: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Store out[outer, n, inner] = x[outer, indices at n, inner], or 0 if an index is out of range."""
    allow_next(OVERLAP)
    wait_for_previous(OVERLAP)
    blocks = tl.cdiv(width, C)
    r, c = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if INT64:
        r, c = r.to(tl.int64), c.to(tl.int64)
    r = r * R + tl.arange(0, R)  # [R]
    c = c * C + tl.arange(0, C)  # [C]
    m_r = r < rows  # [R]
    n = r % count if OUTER else r  # [R]
    o, good = index_offsets(indices, sizes, strides, extents, steps, sites, p_fault, n, m_r, NEGATIVE)  # [R] each
    if OUTER:
        o += offsets(r // count, outer, s_outer)
    m = m_r[:, None] & (c < width)[None, :]  # [R, C]
    x = tl.load(p_x + o[:, None] + offsets(c, inner, s_inner)[None, :], mask=m & good[:, None], other=0)  # [R, C]
    tl.store(p_o + r.to(tl.int64)[:, None] * width + c[None, :], x, mask=m)


class IndexArrays(NamedTuple):
    """Index arrays that broadcast to one shape of positions. All fields but the last are arguments of kernels."""

    arrays: tuple[Array, ...]
    sizes: Shape  # the shape of the positions, at least one dimension
    strides: tuple[Shape, ...]  # strides of each array over `sizes`
    extents: Shape  # sizes of the indexed dimensions
    steps: Shape  # strides of the indexed dimensions
    sites: Shape  # ids of the indexed dimensions in `backend.cuda.faults`
    negative: bool  # whether negative indices count from the end

    @property
    def count(self) -> int:
        """The number of positions."""
        return numel(self.sizes)


def index_arrays(
    op: str, indices: tuple[Array, ...], extents: Shape, steps: Shape, names: Shape | None = None, negative: bool = True
) -> IndexArrays:
    """Return index arrays, which broadcast to one shape, as kernels take them. `extents` and `steps` are the indexed
    dimensions' sizes and strides, `names` their numbers in errors.
    """
    shape = broadcast_shapes(*(i.shape for i in indices))
    strides = tuple(broadcast_strides(i.shape, i.strides, shape) or (0,) for i in indices)
    names = tuple(range(len(indices))) if names is None else names
    sites = tuple(faults.site(op, d, n, -n if negative else 0) for d, n in zip(names, extents, strict=True))
    return IndexArrays(indices, shape or (1,), strides, extents, steps, sites, negative)


def _span(extents: Shape, steps: Shape) -> int:
    """Return one more than the largest offset."""
    return 1 + sum((n - 1) * step for n, step in zip(extents, steps, strict=True) if n > 1)


def index_keys(index: IndexArrays, span: int) -> Array:
    """Return the offset of each position, `[1, N]`, with `span` where an index is out of range."""
    keys = empty((1, index.count), index_type(span + 1), index.arrays[0].device)
    launch(
        index_keys_kernel, triton.cdiv(index.count, 256), keys, *index[:-1], faults.flag(keys.device), index.count,
        span, NEGATIVE=index.negative, T=256, num_warps=4,
    )  # fmt: skip
    return keys


def sorted_index_keys(index: IndexArrays, span: int, unit: int) -> SortedKeys:
    """Return the positions sorted by offset. A unit of offset is `unit` elements."""
    keys = index_keys(index, span)
    ranked, order = argsort_keys(keys, span.bit_length(), signed=False)
    assert ranked is not None
    return SortedKeys(ranked, order, span, unit)


# --- Gather -----------------------------------------------------------------------------------------------------------


def gather(out: Array, x: Array, index: IndexArrays, outer: tuple[Shape, Shape], inner: tuple[Shape, Shape]) -> None:
    """Write out[outer, n, inner] = x[outer, indices at n, inner]. `outer` and `inner` are (sizes, strides of x)."""
    # `rows_of` merges dimensions.
    outer_rows = rows_of((1,), (0,), outer[0], outer[1], outer[1])
    inner_rows = rows_of((1,), (0,), inner[0], inner[1], inner[1])
    count, width = index.count, inner_rows.width
    rows = outer_rows.width * count
    if rows == 0 or width == 0:
        return
    r, c, warps = segment.tile_of(width)
    wide = (
        needs_int64((rows + r, width))
        or needs_int64(outer_rows.row_sizes, outer_rows.target_strides)
        or needs_int64(inner_rows.row_sizes, inner_rows.target_strides)
    )
    launch(
        gather_kernel, triton.cdiv(rows, r) * triton.cdiv(width, c), out, x, *index[:-1], faults.flag(x.device),
        rows, count, width, outer_rows.row_sizes, outer_rows.target_strides, inner_rows.row_sizes,
        inner_rows.target_strides, NEGATIVE=index.negative, OUTER=rows != count, INT64=wide,
        OVERLAP=rows <= FEW_ROWS and can_overlap(x), R=r, C=c, num_warps=warps,
    )  # fmt: skip


@cuda_impl("index_get")
def index_get(out: Array, x: Array, *indices: Array, dims: Shape, named: Shape | None = None) -> None:
    extents, steps = tuple(x.shape[d] for d in dims), tuple(x.strides[d] for d in dims)
    index = index_arrays("index_get", indices, extents, steps, named or dims)
    kept = [(n, st) for d, (n, st) in enumerate(zip(x.shape, x.strides, strict=True)) if d not in dims]
    at = placed(x.shape, dims, index.sizes)[1]
    outer, inner = (tuple(zip(*part, strict=True)) or ((), ()) for part in (kept[:at], kept[at:]))
    gather(out, x, index, outer, inner)  # type: ignore[arg-type]


# --- Scatter ----------------------------------------------------------------------------------------------------------


def _scatter_rows(
    op: str, target: Array, values: Any, indices: tuple[Array, ...], dims: Shape, named: Shape | None
) -> tuple[IndexArrays, int, int, Rows]:
    """Return what maps rows of `values` to `target`: index arrays, span, unit (common divisor of strides), and rows."""
    extents, steps = tuple(target.shape[d] for d in dims), tuple(target.strides[d] for d in dims)
    unit = math.gcd(*(st for n, st in zip(extents, steps, strict=True) if n > 1)) or 1
    steps = tuple(st // unit if n > 1 else 0 for n, st in zip(extents, steps, strict=True))
    index = index_arrays(op, indices, extents, steps, named or dims)
    shape = broadcast_shapes(*(i.shape for i in indices))
    result, at = placed(target.shape, dims, shape)
    if isinstance(values, Array):
        broadcast = broadcast_strides(values.shape, values.strides, result)
    else:
        broadcast = (0,) * len(result)
    end = at + len(shape)
    kept = [d for d in range(target.ndim) if d not in dims]
    rows = rows_of(
        shape, broadcast[at:end], tuple(target.shape[d] for d in kept), tuple(target.strides[d] for d in kept),
        broadcast[:at] + broadcast[end:],
    )  # fmt: skip
    return index, _span(extents, steps), unit, rows


def _scatter(
    op: str, target: Array, values: Any, indices: tuple[Array, ...], dims: Shape, accumulate: bool = False,
    named: Shape | None = None, add: bool = True, along: int | None = None,
) -> None:  # fmt: skip
    """Write `values` at the indices of `target`, or add them with `accumulate`, in order of position."""
    # A sum needs an array: a number becomes one, and for a bool target any value but 0 becomes True.
    if accumulate and not isinstance(values, Array):
        number, values = values, empty((), target.dtype, target.device)
        fill(values, value=number, shape=(), dtype=target.dtype)
    if accumulate and target.dtype is bool_ and values.dtype is not bool_:
        numbers, values = values, empty(values.shape, bool_, target.device)
        copy(values, numbers)
    if accumulate and _add_along(op, target, values, indices, dims, named, add, along):
        return
    index, span, unit, rows = _scatter_rows(op, target, values, indices, dims, named)
    if index.count == 0 or rows.width == 0:
        return
    if accumulate:
        scatter_add_rows(target, values, sorted_index_keys(index, span, unit), rows, add)
        return
    # No sort is needed if a single position is written, or if all positions write the same values.
    argument = values if isinstance(values, Array) else scalar_argument(values, work_type(target.dtype))
    if index.count == 1 or not any(st for n, st in zip(rows.sizes, rows.strides, strict=True) if n > 1):
        scatter_rows(target, argument, SortedKeys(index_keys(index, span), None, span, unit), rows)
    else:
        scatter_rows(target, values, sorted_index_keys(index, span, unit), rows)


def _add_along(
    op: str, target: Array, values: Array, indices: tuple[Array, ...], dims: Shape, named: Shape | None, add: bool,
    along: int | None,
) -> bool:  # fmt: skip
    """Add `values` if only one dimension, with few targets, is indexed. Return False, without adding, otherwise."""
    if along is None and (len(indices) > 1 or indices[0].ndim != 1):
        return False
    dim = dims[0] if along is None else along
    index = indices[dims.index(dim)]
    shape = index.shape if along is not None else (*target.shape[:dim], index.size, *target.shape[dim + 1 :])
    strides = index.strides if along is not None else tuple(index.strides[0] * (d == dim) for d in range(target.ndim))
    spread = values.view(shape, broadcast_strides(values.shape, values.strides, shape))
    name = dim if named is None else named[dims.index(dim)]
    return add_to_few_targets(op, target, spread, index.view(shape, strides), dim, name, add, along is None)


@cuda_impl("index_get_backward")
def index_get_backward(out: Array, g: Array, *indices: Array, dims: Shape, shape: Shape) -> None:
    clear(out)
    _scatter("index_get_backward", out, g, indices, dims, True, add=False)


@cuda_impl("index_put")
def index_put(out: Array, x: Array, values: Any, *indices: Array, **how: Any) -> None:
    if out is not x:
        copy(out, x)
    _scatter("index_put", out, values, indices, **how)


@cuda_impl("index_put_")
def index_put_(
    out: tuple[()], x: Array, values: Any, *indices: Array, dims: Shape, accumulate: bool = False,
    named: Shape | None = None, along: int | None = None,
) -> None:  # fmt: skip
    # Inputs must not change while they are read.
    values, *index_copies = (_unaliased(a, x) for a in (values, *indices))
    _scatter("index_put_", x, values, tuple(index_copies), dims, accumulate, named, along=along)


def _unaliased(a: Any, x: Array) -> Any:
    """Return `a`, or a copy of it if it shares x's memory."""
    if not isinstance(a, Array) or a.storage is not x.storage:
        return a
    copied = empty(a.shape, a.dtype, a.device)
    copy(copied, a)
    return copied


# --- Masks ------------------------------------------------------------------------------------------------------------


@cuda_impl("mask_count")
def mask_count(out: Array, mask: Array) -> None:
    reduce_axes(NONZERO, out, mask, None, int64)


@cuda_impl("mask_indices")
def mask_indices(out: Array, mask: Array, count: int) -> None:
    true_indices("mask_indices", out, mask, count, 1, count)


@cuda_impl("mask_offsets")
def mask_offsets(out: Array, mask: Array) -> None:
    """Write the number of true elements before each block of `MASK_BLOCK`, and of all."""
    if mask.size:
        true_before(mask, MASK_BLOCK, out)
    else:
        clear(out)


@cuda_impl("masked_select")
def masked_select(out: Array, x: Array, mask: Array, offsets: Array, count: int) -> None:
    select_true(out, x, mask, contiguous(offsets))


@cuda_impl("masked_select_backward")
def masked_select_backward(out: Array, g: Array, mask: Array, offsets: Array) -> None:
    scatter_true(out, g, mask, contiguous(offsets))


# --- Embedding --------------------------------------------------------------------------------------------------------


def _add(op: str, target: Array, g: Array, ids: Array, add: bool) -> None:
    """Write target[ids] = g, or += g with `add`. Rows of equal ids are summed in order of position."""
    rows, width = target.shape
    if g.size:
        g_rows = rows_of(ids.shape, g.strides[:-1], (width,), target.strides[1:], g.strides[-1:])
        index = index_arrays(op, (ids,), (rows,), (1,), negative=False)
        scatter_add_rows(target, g, sorted_index_keys(index, max(rows, 1), target.strides[0]), g_rows, add=add)


@cuda_impl("embedding")
def embedding(out: Array, ids: Array, weight: Array) -> None:
    index = index_arrays("embedding", (ids,), weight.shape[:1], weight.strides[:1], negative=False)
    gather(out, weight, index, ((), ()), (weight.shape[1:], weight.strides[1:]))


@cuda_impl("embedding_backward")
def embedding_backward(out: Array, g: Array, ids: Array, rows: int) -> None:
    clear(out)
    _add("embedding_backward", out, g, ids, add=False)


@cuda_impl("embedding_add_")
def embedding_add_(out: tuple[()], total: Array, g: Array, ids: Array) -> None:
    _add("embedding_add_", total, g, ids, add=True)
