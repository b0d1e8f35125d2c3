"""Row blocks: how fused references go through a matrix so that their temporaries stay in the processor's cache.

The block size depends on shapes only, never on the number of threads, so sums over blocks come out the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from genesis.backend.cpu import parallel

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
