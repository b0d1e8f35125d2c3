"""How references run numpy: by row blocks, so that temporaries stay in the processor's cache, and in threads.

`sweep` runs an elementwise function in the result's type, and 2-byte floats in float32.

The block size depends on shapes only, never on the number of threads, so sums over blocks come out the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.backend.cpu import is_split, parallel
from genesis.errors import DTypeError

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
