"""How references reduce over dimensions: in tiles, pairwise, in threads, 2-byte floats upcast to fp32 by tile.

Tiles depend on sizes only and each is reduced on its own, so a result is the same for any number of threads. Rounding
grows with the logarithm of the count: numpy adds pairwise along the last dimension, `reduce_tiles` blocks the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.backend.cpu import parallel
from genesis.ops.blocks import as_type
from genesis.shapes import Shape, numel

_TILE = 1 << 17  # elements; smaller tiles cost more in calls than they save in cache misses
_BLOCK = 128  # rows added one after another where the summed dimension is not the last
_NARROW = 16  # columns; fewer are transposed so that the summed dimension becomes the last

Prepare = Callable[[np.ndarray, slice, slice], np.ndarray]


def _collapse(x: np.ndarray, axes: Shape) -> tuple[np.ndarray, list[int], Shape]:
    """The same elements with as few dimensions as memory order allows.

    Returns:
        A view with dimensions in order of memory, neighbours of one kind (kept or reduced) merged; which of them are
        reduced; and the kept dimensions of `x` in their order there.
    """
    order = sorted(range(x.ndim), key=lambda i: -x.strides[i])
    shape: list[int] = []
    strides: list[int] = []
    reduced: list[int] = []
    for i in order:
        size, stride, kind = x.shape[i], x.strides[i], int(i in axes)
        if size == 1:
            continue
        if shape and reduced[-1] == kind and strides[-1] == stride * size:
            shape[-1] *= size
            strides[-1] = stride
        else:
            shape.append(size)
            strides.append(stride)
            reduced.append(kind)
    merged = x.transpose(order).reshape(shape)
    return merged, [i for i, kind in enumerate(reduced) if kind], tuple(i for i in order if i not in axes)


def arrange(x: np.ndarray, axes: Shape) -> tuple[np.ndarray, Shape]:
    """`x` (not empty) as `[A, R, C]`, the reduced elements in the middle; copied only where memory order demands it.

    Returns:
        The array, and the order of the kept dimensions in A and C, as `store_kept` takes it.
    """
    merged, groups, kept = _collapse(x, axes)
    if len(groups) > 1:
        kept = tuple(sorted(kept))
        return x.transpose(kept + axes).reshape(numel([x.shape[i] for i in kept]), -1, 1), kept
    if not groups:
        return merged.reshape(-1, 1, 1), kept
    at = groups[0]
    return merged.reshape(numel(merged.shape[:at]), merged.shape[at], -1), kept


def store_kept(result: np.ndarray, kept: Shape, out: np.ndarray) -> None:
    """Store a `[A, C]` result in `out`, which has the kept dimensions in their own order."""
    rank = {axis: i for i, axis in enumerate(sorted(kept))}
    target = out.transpose([rank[i] for i in kept])
    np.copyto(target, result.reshape(target.shape), casting="unsafe")


def _ranges(count: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def reduce_tiles(ufunc: Any, x: np.ndarray, dtype: np.dtype, prepare: Prepare | None = None) -> np.ndarray:
    """`ufunc` over the middle dimension of `[A, R, C]` (not empty), computed in `dtype`.

    Args:
        prepare: what to do to each tile beforehand, without changing it: `prepare(tile [a, r, c], rows, columns)`.

    Returns:
        `[A, C]` in `dtype`.
    """
    a_size, r_size, c_size = x.shape
    if x.size <= _TILE and (c_size == 1 or r_size <= _BLOCK):
        tile = as_type(x, dtype)
        tile = tile if prepare is None else prepare(tile, slice(None), slice(None))
        whole: np.ndarray = ufunc.reduce(tile, axis=1, dtype=dtype)
        return whole
    transposed = c_size < _NARROW
    r_step = min(r_size, _TILE // c_size if transposed else _BLOCK)
    c_step = min(c_size, max(_TILE // r_step, _NARROW))
    a_step = max(1, _TILE // (r_step * c_step))
    rows, blocks, columns = _ranges(a_size, a_step), _ranges(r_size, r_step), _ranges(c_size, c_step)
    partial = np.empty((a_size, len(blocks), c_size), dtype)

    def tiles(start: int, stop: int) -> None:
        for i in range(start, stop):
            rest, column = divmod(i, len(columns))
            row, block = divmod(rest, len(blocks))
            a, r, c = rows[row], blocks[block], columns[column]
            tile = as_type(x[a, r, c], dtype)
            if prepare is not None:
                tile = prepare(tile, a, c)
            if transposed:
                tile = np.ascontiguousarray(tile.transpose(0, 2, 1))
            ufunc.reduce(tile, axis=2 if transposed else 1, out=partial[a, block, c])

    parallel(tiles, len(rows) * len(blocks) * len(columns), x.size)
    return partial[:, 0] if len(blocks) == 1 else reduce_tiles(ufunc, partial, dtype)


def reduce_into(ufunc: Any, x: np.ndarray, axes: Shape, out: np.ndarray, dtype: np.dtype) -> None:
    """`ufunc` over the dimensions `axes` of `x`, computed in `dtype` and stored in `out` (the kept dimensions)."""
    if x.size == 0 or not axes:
        np.copyto(out, x.astype(dtype) if x.size else ufunc.identity or 0, casting="unsafe")
        return
    if x.size <= _TILE and x.flags.c_contiguous and axes == tuple(range(x.ndim - len(axes), x.ndim)):
        lines = as_type(x, dtype).reshape(out.size, -1)
        np.copyto(out, ufunc.reduce(lines, axis=1, dtype=dtype).reshape(out.shape), casting="unsafe")
        return
    merged, groups, kept = _collapse(x, axes)
    for axis in reversed(groups):  # one run of reduced dimensions at a time, innermost first
        before, after = merged.shape[:axis], merged.shape[axis + 1 :]
        flat = merged.reshape(numel(before), merged.shape[axis], numel(after))
        merged = reduce_tiles(ufunc, flat, dtype).reshape(before + after)
    store_kept(merged.astype(dtype, copy=False), kept, out)
