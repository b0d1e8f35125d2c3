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
from genesis.dtypes import bool_
from genesis.kernels.dependents import FEW_ROWS, allow_next, can_overlap, wait_for_previous
from genesis.kernels.elements import needs_int64, offsets, work_type
from genesis.kernels.index import segment, select  # noqa: F401  `select` registers the ops of masks
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
from genesis.kernels.pointwise.elementwise import copy, fill, scalar_argument
from genesis.ops.index import placed
from genesis.shapes import Shape, broadcast_shapes, broadcast_strides, numel

MAX_ARRAYS = 4  # the most index arrays that one kernel reads


# --- From indices to offsets ------------------------------------------------------------------------------------------


@triton.jit
def index_offset(p_i, p_fault, n, m, sizes, strides, extent, step, site, NEGATIVE: tl.constexpr):
    """Return the offsets of an index array at positions n [T], and which of them are in range. Report the others."""
    i = tl.load(p_i + offsets(n, sizes, strides), mask=m, other=0).to(tl.int64)  # [T]
    j = tl.where(i < 0, i + extent, i) if NEGATIVE else i  # [T]
    good = (j >= 0) & (j < extent)  # [T]
    report_fault(p_fault, site, i, m & (good == 0))
    return j * step, good


@triton.jit
def index_offsets(p_0, p_1, p_2, p_3, p_fault, n, m, sizes, strides, extents, steps, sites, NEGATIVE: tl.constexpr):
    """Return the sum of `index_offset` over up to four index arrays, and which positions are in range for all."""
    o, good = index_offset(p_0, p_fault, n, m, sizes, strides[0], extents[0], steps[0], sites[0], NEGATIVE)
    if p_1 is not None:
        o_1, g_1 = index_offset(p_1, p_fault, n, m, sizes, strides[1], extents[1], steps[1], sites[1], NEGATIVE)
        o, good = o + o_1, good & g_1
    if p_2 is not None:
        o_2, g_2 = index_offset(p_2, p_fault, n, m, sizes, strides[2], extents[2], steps[2], sites[2], NEGATIVE)
        o, good = o + o_2, good & g_2
    if p_3 is not None:
        o_3, g_3 = index_offset(p_3, p_fault, n, m, sizes, strides[3], extents[3], steps[3], sites[3], NEGATIVE)
        o, good = o + o_3, good & g_3
    return o, good


@triton.jit(do_not_specialize=["sites"])
def index_keys_kernel(p_keys, p_0, p_1, p_2, p_3, p_fault, count, span, sizes, strides, extents, steps, sites,
                      MORE: tl.constexpr, NEGATIVE: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Store keys[n] = (with MORE: +=) the offset of position n, or `span` if an index is out of range."""
    n = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)  # [T]
    m = n < count  # [T]
    o, good = index_offsets(p_0, p_1, p_2, p_3, p_fault, n, m, sizes, strides, extents, steps, sites, NEGATIVE)
    if MORE:
        before = tl.load(p_keys + n, mask=m, other=0).to(tl.int64)  # [T]
        o, good = o + before, good & (before < span)
    tl.store(p_keys + n, tl.where(good, o, span).to(p_keys.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["sites"])
def gather_kernel(p_o, p_x, p_0, p_1, p_2, p_3, p_fault, rows, count, width, sizes, strides, extents, steps, sites,
                  outer, s_outer, inner, s_inner, NEGATIVE: tl.constexpr, OUTER: tl.constexpr,
                  INT64: tl.constexpr, OVERLAP: tl.constexpr, R: tl.constexpr, C: tl.constexpr):  # fmt: skip
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
    o, good = index_offsets(p_0, p_1, p_2, p_3, p_fault, n, m_r, sizes, strides, extents, steps, sites, NEGATIVE)  # [R]
    if OUTER:
        o += offsets(r // count, outer, s_outer)
    m = m_r[:, None] & (c < width)[None, :]  # [R, C]
    x = tl.load(p_x + o[:, None] + offsets(c, inner, s_inner)[None, :], mask=m & good[:, None], other=0)  # [R, C]
    tl.store(p_o + r.to(tl.int64)[:, None] * width + c[None, :], x, mask=m)


class IndexArrays(NamedTuple):
    """Index arrays that broadcast to one shape of positions, as kernels take them. Tuples have four entries each."""

    arrays: tuple[Array | None, ...]  # the index arrays, then None
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


def _index_arrays(
    op: str, indices: tuple[Array, ...], shape: Shape, extents: Shape, steps: Shape, names: Shape, negative: bool
) -> IndexArrays:
    sizes = shape or (1,)
    broadcast = [broadcast_strides(i.shape, i.strides, shape) or (0,) for i in indices]
    sites = [faults.site(op, d, n, -n if negative else 0) for d, n in zip(names, extents, strict=True)]
    unused = MAX_ARRAYS - len(indices)
    return IndexArrays(
        (*indices, *(None,) * unused), sizes, (*broadcast, *((0,),) * unused), (*extents, *(0,) * unused),
        (*steps, *(0,) * unused), (*sites, *(0,) * unused), negative,
    )  # fmt: skip


def index_arrays(
    op: str,
    indices: tuple[Array, ...],
    extents: Shape,
    steps: Shape,
    names: Shape | None = None,
    negative: bool = True,
) -> IndexArrays:
    """Return index arrays, which broadcast to one shape, as kernels take them. More than four are first added up to one
    array of offsets. `extents` and `steps` are the indexed dimensions' sizes and strides, `names` their numbers in
    errors.
    """
    names = tuple(range(len(indices))) if names is None else names
    shape = broadcast_shapes(*(i.shape for i in indices))
    if len(indices) <= MAX_ARRAYS:
        return _index_arrays(op, indices, shape, extents, steps, names, negative)
    span = _span(extents, steps)
    keys = empty(shape, index_type(span + 1), indices[0].device)
    for first in range(0, len(indices), MAX_ARRAYS):
        part = slice(first, first + MAX_ARRAYS)
        _write_keys(
            keys,
            _index_arrays(op, indices[part], shape, extents[part], steps[part], names[part], negative),
            span,
            first > 0,
        )
    single = _index_arrays(op, (keys,), shape, (span,), (1,), (0,), False)
    return single._replace(sites=(0,) * MAX_ARRAYS)  # `_write_keys` has reported faults


def _span(extents: Shape, steps: Shape) -> int:
    """Return one more than the largest offset."""
    return 1 + sum((n - 1) * step for n, step in zip(extents, steps, strict=True) if n > 1)


def _write_keys(keys: Array, index: IndexArrays, span: int, more: bool = False) -> None:
    launch(
        index_keys_kernel, triton.cdiv(index.count, 256), keys, *index.arrays, faults.flag(keys.device), index.count,
        span, index.sizes, index.strides, index.extents, index.steps, index.sites, MORE=more, NEGATIVE=index.negative,
        T=256, num_warps=4,
    )  # fmt: skip


def index_keys(index: IndexArrays, span: int) -> Array:
    """Return the offset of each position, `[1, N]`, with `span` where an index is out of range."""
    device = next(a for a in index.arrays if a is not None).device
    keys = empty((1, index.count), index_type(span + 1), device)
    _write_keys(keys, index, span)
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
        gather_kernel, triton.cdiv(rows, r) * triton.cdiv(width, c), out, x, *index.arrays, faults.flag(x.device),
        rows, count, width, index.sizes, index.strides, index.extents, index.steps, index.sites, outer_rows.row_sizes,
        outer_rows.target_strides, inner_rows.row_sizes, inner_rows.target_strides, NEGATIVE=index.negative,
        OUTER=rows != count, INT64=wide, OVERLAP=rows <= FEW_ROWS and can_overlap(x), R=r, C=c, num_warps=warps,
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
    op: str, target: Array, values: Any, indices: tuple[Array, ...], dims: Shape, accumulate: bool,
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
def index_put(
    out: Array, x: Array, values: Any, *indices: Array, dims: Shape, accumulate: bool = False,
    named: Shape | None = None, along: int | None = None,
) -> None:  # fmt: skip
    copy(out, x)
    _scatter("index_put", out, values, indices, dims, accumulate, named, along=along)


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
