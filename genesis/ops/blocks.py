"""How references run numpy: by row blocks, so that temporaries stay in the processor's cache, and in threads.

`sweep` runs an elementwise function in the result's type, and 2-byte floats in float32.

The sizes of blocks and tiles depend on shapes only, never on the number of threads, so sums over them come out the same
everywhere. Reductions go in tiles; rounding grows with the logarithm of the count: numpy adds pairwise along the last
dimension, `reduce_tiles` blocks the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.backend.cpu import is_split, parallel
from genesis.errors import DTypeError
from genesis.shapes import Shape, numel

# Elements. Smaller blocks stay nearer to the core, and numpy's cost per call outweighs that: a call needs the
# interpreter's lock to start, for which two threads then wait often. An optimizer step on 4M elements takes 13 ms in
# blocks of 8K, and 6 ms like this.
BLOCK = 1 << 17
UNIT = 1 << 12  # elements; where there are no rows, threads share the work at multiples of it


def _step(row_elements: int) -> int:
    return max(1, BLOCK // max(row_elements, 1))


def each_block(work: Callable[[int, int], None], rows: int, row_elements: int) -> None:
    """`work(start, stop)` for every block of rows, in threads when there is enough to do."""
    step = _step(row_elements)

    def some(first: int, last: int) -> None:
        for block in range(first, last):
            work(block * step, min((block + 1) * step, rows))

    parallel(some, -(-rows // step), rows * row_elements)


def sum_blocks(work: Callable[[int, int], np.ndarray], rows: int, row_elements: int, out: np.ndarray) -> None:
    """`out` = the sum over blocks of rows of `work(start, stop)`, added in block order in `work`'s type."""
    step = _step(row_elements)
    parts: list[np.ndarray | None] = [None] * -(-rows // step)

    def one(start: int, stop: int) -> None:
        parts[start // step] = work(start, stop)

    each_block(one, rows, row_elements)
    if not parts:
        out[...] = 0
        return
    total, *rest = (part for part in parts if part is not None)
    for part in rest:
        total = np.add(total, part, out=total)
    out[...] = total


def rows_of(x: np.ndarray, width: int | None = None) -> np.ndarray:
    """`x` as a matrix of its last dimension (a view where its strides allow)."""
    return x.reshape(-1, x.shape[-1] if width is None else width)


def upcast(x: np.ndarray) -> np.ndarray:
    """A block in the type that sums are accumulated in: float32 for 2-byte floats."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def working(target: np.ndarray) -> np.ndarray:
    """Where to compute a block of the result `target`: in its own memory, or in float32 where its type has 2 bytes.
    Each temporary less is a block less that competes for the cache. `store` brings the values to `target`.
    """
    return np.empty(target.shape, np.float32) if target.dtype.itemsize == 2 else target


def store(values: np.ndarray, target: np.ndarray) -> None:
    """Put what was computed in `working(target)` into `target`."""
    if values is not target:
        np.copyto(target, values, casting="unsafe")


def is_narrow(dtype: np.dtype) -> bool:
    """Whether `dtype` is float16 or bfloat16: computed in float32 and rounded once at the store."""
    return dtype.itemsize == 2 and dtype.kind not in "iub"


def work_type(dtype: np.dtype) -> np.dtype:
    """What values of `dtype` are computed in: float32 for 2-byte floats, else the type itself."""
    return np.dtype(np.float32) if is_narrow(dtype) else dtype


def as_type(x: Any, dtype: np.dtype) -> Any:
    """A numpy array or number as `dtype`, copied only where the type differs; integers wrap around, as in torch.

    Raises:
        DTypeError: for a Python integer beyond 64 bits or the largest float.
    """
    if isinstance(x, np.ndarray):
        return x if x.dtype == dtype else x.astype(dtype)
    try:
        return np.asarray(x).astype(dtype)[()] if dtype.kind in "iu" else dtype.type(x)
    except OverflowError:
        raise DTypeError(f"an integer of {int(x).bit_length()} bits does not fit into {dtype.name}") from None


def split(work: Callable[..., Any], out: np.ndarray, *inputs: Any) -> None:
    """`work(out, *inputs)` over pieces along the longest axis, in threads, with inputs broadcast to the output."""
    if out.ndim == 0 or not is_split(out.size):
        work(out, *inputs)
        return
    views = [np.broadcast_to(x, out.shape) if isinstance(x, np.ndarray) and x.ndim else x for x in inputs]
    axis = max(range(out.ndim), key=lambda i: out.shape[i]) if out.shape[0] < 8 else 0

    def piece(start: int, stop: int) -> None:
        window = (slice(None),) * axis + (slice(start, stop),)
        work(out[window], *(x[window] if isinstance(x, np.ndarray) and x.ndim else x for x in views))

    parallel(piece, out.shape[axis], out.size)


def sweep(function: Callable[..., Any], out: np.ndarray, *inputs: Any, dtype: np.dtype | None = None) -> None:
    """`function(*inputs, out=out)` over broadcast inputs, by pieces along the longest axis.

    Args:
        function: takes numpy operands of one type and `out=`; each output element depends on the same input elements
            only.
        dtype: the type to compute in; the output's own unless given.
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
_BLOCK = 128  # rows added one after another where the summed dimension is not the last
_NARROW = 16  # columns; fewer are transposed so that the summed dimension becomes the last

Prepare = Callable[[np.ndarray, slice, slice], np.ndarray]


def _collapse(x: np.ndarray, axes: Shape) -> tuple[np.ndarray, list[int], Shape]:
    """A view with as few dimensions as memory order allows, in that order, neighbours of one kind (kept or reduced)
    merged; which of them are reduced; and the kept dimensions of `x` in their order there.
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
    """`x` (not empty) as `[A, R, C]`, the reduced elements in the middle, copied only where memory order demands it;
    and the order of the kept dimensions in A and C, as `store_kept` takes it.
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
    """`ufunc` over the middle dimension of `[A, R, C]` (not empty), computed in `dtype`: `[A, C]`. `prepare(tile [a, r,
    c], rows, columns)` gives what each tile becomes beforehand, without changing it.
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
