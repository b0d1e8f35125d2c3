"""Shape ops that copy elements. Views need no kernel. Each element of the result is read and written once.

Reference: `genesis/ops/shape.py`, under the same names. Tiles: T elements in row-major order.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.compile import Double
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import clear, launch
from genesis.dtypes import float64, int32
from genesis.kernels.elements import TRITON, collapse, converted, needs_int64, offsets, work_type
from genesis.kernels.formulas import tile_function
from genesis.kernels.index.radix_sort import argsort_keys
from genesis.kernels.index.segment import SortedKeys, index_type, rows_of, scatter_add_rows
from genesis.kernels.pointwise.elementwise import copy, elementwise, fill, positions
from genesis.ops.shape import extent, overlaps
from genesis.shapes import Shape, contiguous_strides, numel

TILE = 1024


# --- cat, flip, roll, pad ---------------------------------------------------------------------------------------------


@cuda_impl("cat")
def cat(out: Array, *arrays: Array, dim: int) -> None:
    """Concatenate the arrays along `dim` in their common dtype, with one copy per array."""
    start = 0
    for x in arrays:
        if x.shape == (0,):
            continue
        if x.size:
            copy(out.view(x.shape, out.strides, out.offset + start * out.strides[dim]), x)
        start += x.shape[dim]


@triton.jit
def roll_pad_kernel(p_o, p_x, value, n, sizes, strides, ends, shifts, PAD: tl.constexpr, WORK: tl.constexpr,
                    INT64: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Store out[c] = x[c + shifts], wrapped around at `ends`, or with PAD `value` outside of 0 … ends."""
    i, m = positions(n, T, INT64)  # [T]
    rest, o = i, i * 0
    inside = m
    LAST: tl.constexpr = len(sizes) - 1
    for back in tl.static_range(LAST + 1):
        c = (rest if back == LAST else rest % sizes[LAST - back]) + shifts[LAST - back]  # [T]
        rest = rest // sizes[LAST - back]
        if PAD:
            inside = inside & (c >= 0) & (c < ends[LAST - back])
        else:
            c = tl.where(c >= ends[LAST - back], c - ends[LAST - back], c)
        o += c * strides[LAST - back]
    x = tl.load(p_x + o, mask=inside)  # [T]
    if PAD:
        x = tl.where(inside, x, converted(tl.full([T], value, WORK), p_o.dtype.element_ty))
    tl.store(p_o + i, x, mask=m)


def _merged(x: Array, moved: list[bool], *more: list[int]) -> list[list[int]]:
    """Merge dimensions that are not `moved` into the ones before. Return sizes, strides and `more` (element counts)."""
    fields: list[list[int]] = [[], [], *([] for _ in more)]
    for d, (size, stride) in enumerate(zip(x.shape, x.strides, strict=True)):
        if fields[0] and not moved[d] and (size == 1 or fields[1][-1] == stride * size):
            for field in (fields[0], *fields[2:]):
                field[-1] *= size
            fields[1][-1] = stride if size > 1 else fields[1][-1]
        else:
            for field, each in zip(fields, ([size], [stride], *([e[d]] for e in more)), strict=True):
                field += each
    return fields


def _roll_or_pad(out: Array, x: Array, value: Any, sizes: list[int], strides: list[int], ends: list[int],
                 shifts: list[int], pads: bool) -> None:  # fmt: skip
    fields = [tuple(f) or (1,) for f in (sizes, strides, ends)]
    work = work_type(out.dtype)
    launch(
        roll_pad_kernel, triton.cdiv(out.size, TILE), out, x, value, out.size, *fields, tuple(shifts) or (0,), PAD=pads,
        WORK=TRITON[work.name], INT64=needs_int64(fields[0], fields[1]), T=TILE, num_warps=4,
    )  # fmt: skip


@cuda_impl("flip")
def flip(out: Array, x: Array, dims: Shape) -> None:
    if out.size == 0:
        return
    first = x.offset + sum((x.shape[d] - 1) * x.strides[d] for d in dims)
    strides = tuple(-st if d in dims else st for d, st in enumerate(x.strides))
    sizes, merged = collapse(x.shape, strides)
    _roll_or_pad(
        out, x.view(x.shape, x.strides, first), 0, list(sizes), list(merged), list(sizes), [0] * len(sizes), False
    )


@cuda_impl("roll")
def roll(out: Array, x: Array, shifts: Shape, dims: Shape) -> None:
    if out.size == 0:
        return
    total = [0] * x.ndim
    for shift, d in zip(shifts, dims, strict=True):
        total[d] += shift
    back = [-t % n for t, n in zip(total, x.shape, strict=True)]
    sizes, strides, back = _merged(x, [b != 0 for b in back], back)
    _roll_or_pad(out, x, 0, sizes, strides, sizes, back, False)


@cuda_impl("pad")
def pad(out: Array, x: Array, widths: tuple[tuple[int, int], ...], value: float) -> None:
    number: Any = int(value) if not out.dtype.is_floating_point else float(value)
    if x.size == 0:
        fill(out, value=number, shape=out.shape, dtype=out.dtype)
        return
    ends, strides, sizes, before = _merged(x, [w != (0, 0) for w in widths], list(out.shape), [a for a, _ in widths])
    _roll_or_pad(
        out, x, Double(number) if out.dtype is float64 else number, sizes, strides, ends, [-b for b in before], True
    )


# --- tril, triu -------------------------------------------------------------------------------------------------------


@triton.jit
def triangle_kernel(p_o, p_x, n, rows, columns, diagonal, sizes, so, sx, LOWER: tl.constexpr, INT64: tl.constexpr,
                    T: tl.constexpr):  # fmt: skip
    """Store x where column - row is at most (LOWER) or at least `diagonal`, else 0, for which x is not loaded."""
    i, m = positions(n, T, INT64)  # [T]
    distance = i % columns - i // columns % rows  # [T]
    keep = distance <= diagonal if LOWER else distance >= diagonal
    x = tl.load(p_x + offsets(i, sizes, sx), mask=m & keep, other=0)  # [T]
    tl.store(p_o + offsets(i, sizes, so), x, mask=m)


def _triangle(lower: bool, out: Array, x: Array, diagonal: int) -> None:
    """Store the matrices of the last two dimensions with 0 above (`lower`) or below the given diagonal."""
    if out.size == 0:
        return
    sizes, so, sx = collapse(out.shape, out.strides, x.strides)
    rows, columns = x.shape[-2:]
    launch(
        triangle_kernel, triton.cdiv(out.size, TILE), out, x, out.size, rows, columns, diagonal, sizes, so, sx,
        LOWER=lower, INT64=needs_int64(sizes, so, sx), T=TILE, num_warps=4,
    )  # fmt: skip


cuda_impl("tril")(functools.partial(_triangle, True))
cuda_impl("triu")(functools.partial(_triangle, False))

# --- as_strided -------------------------------------------------------------------------------------------------------


@triton.jit
def window_keys_kernel(p_keys, n, start, sizes, strides, INT64: tl.constexpr, T: tl.constexpr):
    """Store keys[i] = the offset of index i of a strided window."""
    i, m = positions(n, T, INT64)  # [T]
    tl.store(p_keys + i, (start + offsets(i, sizes, strides)).to(p_keys.dtype.element_ty), mask=m)


@triton.jit
def window_counts_kernel(p_counts, n, start, sizes, strides, INT64: tl.constexpr, T: tl.constexpr):
    """Add 1 to counts[offset] for each index of a strided window."""
    i, m = positions(n, T, INT64)  # [T]
    tl.atomic_add(p_counts + start + offsets(i, sizes, strides), 1, mask=m)


def _launch_window(kernel: Any, shape: Shape, strides: Shape, start: int, *arrays: Array) -> None:
    """Launch a kernel over the indices of a strided window that begins at element `start`."""
    n = numel(shape)
    sizes, steps = collapse(shape, strides)
    launch(
        kernel, triton.cdiv(n, TILE), *arrays, n, start, sizes, steps,
        INT64=needs_int64((*sizes, 1), (*steps, start)) or start >= 1 << 30, T=TILE, num_warps=4,
    )  # fmt: skip


@cuda_impl("as_strided_backward")
def as_strided_backward(
    out: Array, g: Array, strides: Shape, offset: int, source_shape: Shape, source_strides: Shape
) -> None:
    # A window without repeated elements inside a contiguous source needs one copy.
    distinct = not overlaps(g.shape, strides)
    inside = offset >= 0 and offset + extent(g.shape, strides) <= out.size
    if tuple(source_strides) == contiguous_strides(source_shape) and inside and distinct:
        clear(out)
        if g.size:
            copy(out.view(g.shape, strides, out.offset + offset), g)
        return
    # Otherwise add the gradients of each element in a flat buffer that covers source and window.
    low = min(0, offset)
    reach = max(extent(source_shape, source_strides), offset + extent(g.shape, strides)) - low
    flat = empty((max(reach, 1),), out.dtype if distinct else float64, out.device)
    clear(flat)
    if distinct and g.size:
        copy(flat.view(g.shape, strides, offset - low), g)
    elif g.size:
        keys = empty((1, g.size), index_type(flat.size + 1), out.device)
        _launch_window(window_keys_kernel, g.shape, strides, offset - low, keys)
        ranked, order = argsort_keys(keys, flat.size.bit_length(), signed=False)
        assert ranked is not None
        rows = rows_of(g.shape, g.strides, (1,), (1,), (0,))
        scatter_add_rows(flat, g, SortedKeys(ranked, order, flat.size, 1), rows, add=False)
    # Copy them to the source; elements that the source repeats get equal shares.
    if out.size == 0:
        return
    if not overlaps(source_shape, source_strides):
        copy(out, flat.view(source_shape, source_strides, -low))
        return
    counts = empty(flat.shape, int32, out.device)
    clear(counts)
    _launch_window(window_counts_kernel, source_shape, source_strides, -low, counts)
    sums, repeats = (x.view(source_shape, source_strides, -low) for x in (flat, counts))
    elementwise(tile_function("div"), out, sums, repeats, work=float64)


@cuda_impl("as_strided_scatter")
def as_strided_scatter(out: Array, x: Array, src: Array, shape: Shape, strides: Shape, offset: int = 0) -> None:
    if x.strides == contiguous_strides(x.shape) and offset >= 0 and offset + extent(shape, strides) <= x.size:
        copy(out, x)
        if src.size:
            copy(out.view(tuple(shape), tuple(strides), out.offset + offset), src)
        return
    low = min(0, offset)
    reach = max(extent(x.shape, x.strides), offset + extent(shape, strides)) - low
    flat = empty((max(reach, 1),), x.dtype, x.device)
    source = flat.view(x.shape, x.strides, -low)
    if out.size == 0:
        return
    copy(source, x)
    if src.size:
        copy(flat.view(tuple(shape), tuple(strides), offset - low), src)
    copy(out, source)
