"""Kernels of the shape ops that move elements; views need none. Each element of the result is read or written once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.dispatch import cuda_impl, cuda_impl_named
from genesis.backend.cuda.launch import Double, clear, launch
from genesis.dtypes import float64, int32
from genesis.kernels.index.radix_sort import order_of
from genesis.kernels.index.segment import Sorted, add_rows, index_type, rows_of
from genesis.kernels.pointwise.elementwise import positions
from genesis.kernels.strides import collapse, is_wide, offsets
from genesis.kernels.types import TRITON, converted, work_type
from genesis.ops.shape import extent, overlaps
from genesis.shapes import Shape, contiguous_strides, numel

__all__ = ["as_strided_backward", "as_strided_scatter", "cat", "flip", "pad", "roll", "tril", "triu"]

TILE = 1024


def _copy(out: Array, x: Array) -> None:
    cuda_impl_named("copy", "elementwise")(out, x)


# --- Joining and moving -----------------------------------------------------------------------------------------------


@cuda_impl("cat")
def cat(out: Array, *arrays: Array, dim: int) -> None:
    """The arrays one after another along `dim`, in their common dtype: one copy each."""
    start = 0
    for x in arrays:
        if x.shape == (0,):
            continue
        if x.size:
            _copy(out.view(x.shape, out.strides, out.offset + start * out.strides[dim]), x)
        start += x.shape[dim]


@triton.jit
def move_kernel(p_o, p_x, value, n, sizes, strides, ends, shifts, PAD: tl.constexpr, WORK: tl.constexpr,
                DIMS: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """out at coordinates c = x at c + shifts: wrapped at `ends`, or `value` outside of them where PAD is set."""
    i, m = positions(n, T, WIDE)
    rest, o = i, i * 0
    inside = m
    for back in tl.static_range(DIMS):
        c = (rest if back == DIMS - 1 else rest % sizes[DIMS - 1 - back]) + shifts[DIMS - 1 - back]
        rest = rest // sizes[DIMS - 1 - back]
        if PAD:
            inside = inside & (c >= 0) & (c < ends[DIMS - 1 - back])
        else:
            c = tl.where(c >= ends[DIMS - 1 - back], c - ends[DIMS - 1 - back], c)
        o += c * strides[DIMS - 1 - back]
    x = tl.load(p_x + o, mask=inside)
    if PAD:
        x = tl.where(inside, x, converted(tl.full([T], value, WORK), p_o.dtype.element_ty))
    tl.store(p_o + i, x, mask=m)


def _merged(x: Array, moved: list[bool], *more: list[int]) -> list[list[int]]:
    """Sizes, strides and `more` (counts of elements) without inner dimensions that stay as they are."""
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


def _move(out: Array, x: Array, value: Any, sizes: list[int], strides: list[int], ends: list[int], shifts: list[int],
          pads: bool) -> None:  # fmt: skip
    fields = [tuple(f) or (1,) for f in (sizes, strides, ends)]
    work = work_type(out.dtype)
    launch(
        move_kernel, triton.cdiv(out.size, TILE), out, x, value, out.size, *fields, tuple(shifts) or (0,), PAD=pads,
        WORK=TRITON[work.name], DIMS=len(fields[0]), WIDE=is_wide(fields[0], fields[1]), T=TILE, num_warps=4,
    )  # fmt: skip


@cuda_impl("flip")
def flip(out: Array, x: Array, dims: Shape) -> None:
    """x with the order of elements along `dims` reversed."""
    if out.size == 0:
        return
    first = x.offset + sum((x.shape[d] - 1) * x.strides[d] for d in dims)
    strides = tuple(-st if d in dims else st for d, st in enumerate(x.strides))
    sizes, merged = collapse(x.shape, strides)
    _move(out, x.view(x.shape, x.strides, first), 0, list(sizes), list(merged), list(sizes), [0] * len(sizes), False)


@cuda_impl("roll")
def roll(out: Array, x: Array, shifts: Shape, dims: Shape) -> None:
    """x moved by `shifts` along `dims`; what leaves at the end comes back at the start."""
    if out.size == 0:
        return
    total = [0] * x.ndim
    for shift, d in zip(shifts, dims, strict=True):
        total[d] += shift
    back = [-t % n for t, n in zip(total, x.shape, strict=True)]
    sizes, strides, back = _merged(x, [b != 0 for b in back], back)
    _move(out, x, 0, sizes, strides, sizes, back, False)


@cuda_impl("pad")
def pad(out: Array, x: Array, widths: tuple[tuple[int, int], ...], value: float) -> None:
    """x inside a border of `value`."""
    number: Any = int(value) if not out.dtype.is_floating_point else float(value)
    if x.size == 0:
        cuda_impl_named("fill", "elementwise")(out, value=number, shape=out.shape, dtype=out.dtype)
        return
    ends, strides, sizes, before = _merged(x, [w != (0, 0) for w in widths], list(out.shape), [a for a, _ in widths])
    _move(out, x, Double(number) if out.dtype is float64 else number, sizes, strides, ends, [-b for b in before], True)


# --- Triangles --------------------------------------------------------------------------------------------------------


@triton.jit
def triangle_kernel(p_o, p_x, n, rows, columns, diagonal, sizes, so, sx, LOWER: tl.constexpr, DIMS: tl.constexpr,
                    WIDE: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """x where column - row is at most (LOWER) or at least `diagonal`, else 0, which is not read."""
    i, m = positions(n, T, WIDE)
    distance = i % columns - i // columns % rows
    keep = distance <= diagonal if LOWER else distance >= diagonal
    x = tl.load(p_x + offsets(i, sizes, sx, DIMS), mask=m & keep, other=0)
    tl.store(p_o + offsets(i, sizes, so, DIMS), x, mask=m)


def _triangle(out: Array, x: Array, diagonal: int, lower: bool) -> None:
    if out.size == 0:
        return
    sizes, so, sx = collapse(out.shape, out.strides, x.strides)
    rows, columns = x.shape[-2:]
    launch(
        triangle_kernel, triton.cdiv(out.size, TILE), out, x, out.size, rows, columns, diagonal, sizes, so, sx,
        LOWER=lower, DIMS=len(sizes), WIDE=is_wide(sizes, so, sx), T=TILE, num_warps=4,
    )  # fmt: skip


@cuda_impl("tril")
def tril(out: Array, x: Array, diagonal: int) -> None:
    """The matrices of the last two dimensions with 0 above the given diagonal."""
    _triangle(out, x, diagonal, True)


@cuda_impl("triu")
def triu(out: Array, x: Array, diagonal: int) -> None:
    """The matrices of the last two dimensions with 0 below the given diagonal."""
    _triangle(out, x, diagonal, False)


# --- Windows ----------------------------------------------------------------------------------------------------------


@triton.jit
def address_kernel(p_keys, n, start, sizes, strides, DIMS: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr):
    """keys[i] = the element that index i of a window reaches."""
    i, m = positions(n, T, WIDE)
    tl.store(p_keys + i, (start + offsets(i, sizes, strides, DIMS)).to(p_keys.dtype.element_ty), mask=m)


@triton.jit
def visit_kernel(p_visits, n, start, sizes, strides, DIMS: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr):
    """Count how many indices of a window reach each element."""
    i, m = positions(n, T, WIDE)
    tl.atomic_add(p_visits + start + offsets(i, sizes, strides, DIMS), 1, mask=m)


@triton.jit
def share_kernel(p_o, p_x, p_visits, n, start, sizes, strides, DIMS: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr):
    """out[i] = the element that index i reaches, divided by how many reach it."""
    i, m = positions(n, T, WIDE)
    o = start + offsets(i, sizes, strides, DIMS)
    x = converted(tl.load(p_x + o, mask=m), tl.float64)
    y = x / tl.load(p_visits + o, mask=m, other=1).to(tl.float64)
    tl.store(p_o + i, converted(y, p_o.dtype.element_ty), mask=m)


def _over(kernel: Any, shape: Shape, strides: Shape, start: int, *arrays: Array) -> None:
    """Launch a kernel over the indices of a window that begins at element `start`."""
    n = numel(shape)
    sizes, steps = collapse(shape, strides)
    launch(
        kernel, triton.cdiv(n, TILE), *arrays, n, start, sizes, steps, DIMS=len(sizes),
        WIDE=is_wide((*sizes, 1), (*steps, start)) or start >= 1 << 30, T=TILE, num_warps=4,
    )  # fmt: skip


@cuda_impl("as_strided_backward")
def as_strided_backward(
    out: Array, g: Array, strides: Shape, offset: int, source_shape: Shape, source_strides: Shape
) -> None:
    """Zeros of the source's shape with g added into the window."""
    distinct = not overlaps(g.shape, strides)
    inside = offset >= 0 and offset + extent(g.shape, strides) <= out.size
    if tuple(source_strides) == contiguous_strides(source_shape) and inside and distinct:
        clear(out)
        if g.size:
            _copy(out.view(g.shape, strides, out.offset + offset), g)
        return
    low = min(0, offset)
    reach = max(extent(source_shape, source_strides), offset + extent(g.shape, strides)) - low
    flat = empty((max(reach, 1),), out.dtype if distinct else float64, out.device)
    clear(flat)
    if distinct and g.size:
        _copy(flat.view(g.shape, strides, offset - low), g)
    elif g.size:
        keys = empty((1, g.size), index_type(flat.size + 1), out.device)
        _over(address_kernel, g.shape, strides, offset - low, keys)
        ranked, order = order_of(keys, flat.size.bit_length(), signed=False)
        assert ranked is not None
        found = rows_of(g.shape, g.strides, (1,), (1,), (0,))
        add_rows(flat, g, Sorted(ranked, order, flat.size, 1), found, add=False)
    if out.size == 0:
        return
    if not overlaps(source_shape, source_strides):
        _copy(out, flat.view(source_shape, source_strides, -low))
        return
    visits = empty(flat.shape, int32, out.device)
    clear(visits)
    _over(visit_kernel, source_shape, source_strides, -low, visits)
    _over(share_kernel, source_shape, source_strides, -low, out, flat, visits)


@cuda_impl("as_strided_scatter")
def as_strided_scatter(out: Array, x: Array, src: Array, shape: Shape, strides: Shape, offset: int = 0) -> None:
    """x with the window that `as_strided` describes replaced by `src`."""
    if x.strides == contiguous_strides(x.shape) and offset >= 0 and offset + extent(shape, strides) <= x.size:
        _copy(out, x)
        if src.size:
            _copy(out.view(tuple(shape), tuple(strides), out.offset + offset), src)
        return
    low = min(0, offset)
    reach = max(extent(x.shape, x.strides), offset + extent(shape, strides)) - low
    flat = empty((max(reach, 1),), x.dtype, x.device)
    whole = flat.view(x.shape, x.strides, -low)
    if out.size == 0:
        return
    _copy(whole, x)
    if src.size:
        _copy(flat.view(tuple(shape), tuple(strides), offset - low), src)
    _copy(out, whole)
