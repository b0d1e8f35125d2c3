"""How references run numpy: in blocks of rows, so that temporaries fit into the processor's cache, and in threads.

`sweep` runs an elementwise function in the result's dtype, 2-byte floats in float32.

Block and tile sizes depend only on shapes, never on the number of threads, so sums are the same on every machine.
Reductions run in tiles, and their rounding error grows with the logarithm of the count: numpy adds pairwise along the
last dimension, and `reduce_tiles` adds blocks along the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.backend.cpu import is_split, parallel
from genesis.errors import DTypeError
from genesis.shapes import Shape, numel

# Elements. Smaller blocks fit into a faster cache, but the cost per numpy call outweighs that: a call needs the
# interpreter's lock to start, so two threads often block each other. An optimizer step on 4M elements takes 6 ms with
# this size (13 ms with 8K).
BLOCK = 1 << 17
UNIT = 1 << 12  # elements; without rows, threads split the work at multiples of it


def _step(row_elements: int) -> int:
    return max(1, BLOCK // max(row_elements, 1))


def each_block(work: Callable[[int, int], None], rows: int, row_elements: int) -> None:
    """Call `work(start, stop)` for every block of rows, in threads if the work is large enough."""
    step = _step(row_elements)

    def process_blocks(first: int, last: int) -> None:
        for block in range(first, last):
            work(block * step, min((block + 1) * step, rows))

    parallel(process_blocks, -(-rows // step), rows * row_elements)


def sum_blocks(work: Callable[[int, int], np.ndarray], rows: int, row_elements: int, out: np.ndarray) -> None:
    """Set `out` to the sum of `work(start, stop)` over blocks of rows, added in block order and in `work`'s dtype."""
    step = _step(row_elements)
    parts: list[np.ndarray | None] = [None] * -(-rows // step)

    def store_part(start: int, stop: int) -> None:
        parts[start // step] = work(start, stop)

    each_block(store_part, rows, row_elements)
    if not parts:
        out[...] = 0
        return
    total, *rest = (part for part in parts if part is not None)
    for part in rest:
        total = np.add(total, part, out=total)
    out[...] = total


def rows_of(x: np.ndarray, width: int | None = None) -> np.ndarray:
    """Return `x` as a matrix with its last dimension as columns, a view where the strides allow it."""
    return x.reshape(-1, x.shape[-1] if width is None else width)


def upcast(x: np.ndarray) -> np.ndarray:
    """Return a block in the accumulation dtype: float32 for 2-byte floats."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def working(target: np.ndarray) -> np.ndarray:
    """Return memory in which to compute a block of the result `target`; `store` copies the values to `target`.

    It is `target` itself, or float32 memory if `target` has 2-byte elements. Every temporary that is avoided leaves
    more of the cache to the others.
    """
    return np.empty(target.shape, np.float32) if target.dtype.itemsize == 2 else target


def store(values: np.ndarray, target: np.ndarray) -> None:
    """Copy to `target` the values that were computed in `working(target)`."""
    if values is not target:
        np.copyto(target, values, casting="unsafe")


def is_narrow(dtype: np.dtype) -> bool:
    """Whether `dtype` is float16 or bfloat16, which are computed in float32 and rounded once at the store."""
    return dtype.itemsize == 2 and dtype.kind not in "iub"


def work_type(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which values of `dtype` are computed: float32 for 2-byte floats, else `dtype` itself."""
    return np.dtype(np.float32) if is_narrow(dtype) else dtype


def as_type(x: Any, dtype: np.dtype) -> Any:
    """Return a numpy array or number as `dtype`, copied only if the dtype differs; integers wrap around, as in torch.

    Raises:
        DTypeError: for a Python integer beyond 64 bits or beyond the largest float.
    """
    if isinstance(x, np.ndarray):
        return x if x.dtype == dtype else x.astype(dtype)
    try:
        return np.asarray(x).astype(dtype)[()] if dtype.kind in "iu" else dtype.type(x)
    except OverflowError:
        raise DTypeError(f"an integer of {int(x).bit_length()} bits does not fit into {dtype.name}") from None


def split(work: Callable[..., Any], out: np.ndarray, *inputs: Any) -> None:
    """Run `work(out, *inputs)` on blocks along the longest axis, in threads, with inputs broadcast to the output."""
    if out.ndim == 0 or (out.size <= BLOCK and not is_split(out.size)):
        work(out, *inputs)
        return
    views = [np.broadcast_to(x, out.shape) if isinstance(x, np.ndarray) and x.ndim else x for x in inputs]
    axis = max(range(out.ndim), key=lambda i: out.shape[i]) if out.shape[0] < 8 else 0
    step = _step(out.size // out.shape[axis])

    def piece(start: int, stop: int) -> None:
        for first in range(start, stop, step):
            window = (slice(None),) * axis + (slice(first, min(first + step, stop)),)
            work(out[window], *(x[window] if isinstance(x, np.ndarray) and x.ndim else x for x in views))

    parallel(piece, out.shape[axis], out.size)


def sweep(function: Callable[..., Any], out: np.ndarray, *inputs: Any, dtype: np.dtype | None = None) -> None:
    """Run `function(*inputs, out=out)` on broadcast inputs, in pieces along the longest axis.

    Args:
        function: takes numpy operands of one dtype and `out=`; an output element depends only on the same input
            elements.
        dtype: dtype to compute in, by default the output's.
    """
    dtype = out.dtype if dtype is None else dtype
    wide = work_type(dtype)
    direct = out.dtype == wide or out.dtype == np.bool_

    def work(target: np.ndarray, *values: Any) -> None:
        operands = [as_type(x, wide) for x in values]
        if direct:
            function(*operands, out=target)
        else:
            target[...] = function(*operands)

    split(work, out, *inputs)


# --- Reductions -------------------------------------------------------------------------------------------------------


_TILE = 1 << 17  # elements; smaller tiles cost more in calls than they save in cache misses
_BLOCK = 128  # rows added one after another if the summed dimension is not the last
_NARROW = 16  # columns; narrower tiles are transposed so that the summed dimension becomes the last

Prepare = Callable[[np.ndarray, slice, slice], np.ndarray]


def _collapse(x: np.ndarray, axes: Shape) -> tuple[np.ndarray, list[int], Shape]:
    """Return a view of `x` with as few dimensions as possible, in memory order, and its reduced and kept dimensions.

    Adjacent dimensions of the same kind (kept or reduced) are merged. Returns the view, the indices of its reduced
    dimensions, and the kept dimensions of `x` in memory order.
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
    """Return `x` (not empty) as `[A, R, C]` with the reduced elements in the middle, copied only if necessary.

    Also returns the order of the kept dimensions in A and C, as `store_kept` takes it.
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
    """Store an `[A, C]` result in `out`, whose kept dimensions are in their original order."""
    rank = {axis: i for i, axis in enumerate(sorted(kept))}
    target = out.transpose([rank[i] for i in kept])
    np.copyto(target, result.reshape(target.shape), casting="unsafe")


def _ranges(count: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def reduce_tiles(ufunc: Any, x: np.ndarray, dtype: np.dtype, prepare: Prepare | None = None) -> np.ndarray:
    """Reduce the middle dimension of `[A, R, C]` (not empty) with `ufunc`, in `dtype`; return `[A, C]`.

    `prepare(tile [a, r, c], rows, columns)` returns the values to reduce instead of a tile, which it must not change.
    """
    a_size, r_size, c_size = x.shape
    # One tile.
    if x.size <= _TILE and (c_size == 1 or r_size <= _BLOCK):
        tile = as_type(x, dtype)
        tile = tile if prepare is None else prepare(tile, slice(None), slice(None))
        reduced: np.ndarray = ufunc.reduce(tile, axis=1, dtype=dtype)
        return reduced
    # Several tiles: partial results of each block of rows, which are then reduced.
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
    """Reduce the dimensions `axes` of `x` with `ufunc`, in `dtype`, and store the result in `out`."""
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
