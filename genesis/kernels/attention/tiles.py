"""Tile sizes of attention's kernels: which blocks of queries and keys, how many warps, how deep a pipeline."""

from __future__ import annotations

from typing import NamedTuple

import triton

from genesis.dtypes import DType

__all__ = ["Tile", "padded", "sections", "tiles_of"]


class Tile(NamedTuple):
    """Queries and keys of a block, warps, stages of the pipeline.

    Attributes:
        registers: the most that a thread may have, so that more programs share an SM; 0 for no limit.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0


# By kind of type and padded head size: forward, queries' gradient, keys' gradient. "boxes" are 2-byte types that come
# through Hopper's TMA: measured on an H200 with Triton 3.6.
TILES: dict[str, dict[int, tuple[Tile, Tile, Tile]]] = {
    "boxes": {
        64: (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3, 168)),
        128: (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
        256: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    },
    "half": {
        64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(32, 64, 4, 2)),
        128: (Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
        256: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    },
    "float32": {
        64: (Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 1)),
        128: (Tile(32, 32, 8, 1), Tile(32, 32, 8, 2), Tile(16, 32, 8, 1)),
        256: (Tile(16, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
    "float64": {
        64: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        128: (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
        256: (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
}


def padded(size: int) -> int:
    """The head size that tiles have: products need 16."""
    return max(16, triton.next_power_of_2(size))


LARGE = 3 << 20  # bytes of a head from which on heads are divided for the sake of the cache
CACHE = 64 << 20  # bytes of all heads up to which they are not divided
# Programs at the end that are not divided by heads: the longest of all their heads go first, the shortest last, so that
# SMs end together. Where a last section of few heads begins with its longest programs, most SMs wait.
LAST = 800
LONG = 2048  # from so many keys on, the forward kernel for "boxes" of 64 takes more of them at a time
LONG_TILE = Tile(64, 128, 4, 2)


def tiles_of(dtype: DType, size: int, tokens: int, keys: int, shared: int, boxes: bool) -> tuple[Tile, Tile, Tile]:
    """The tiles of the three kernels for a head size and sequence lengths.

    The last one's queries divide the second one's.

    Args:
        shared: bytes of shared memory that a program may use.
        boxes: tiles come through Hopper's TMA.
    """
    table = TILES["boxes" if boxes else "half" if dtype.itemsize == 2 else dtype.name]
    row, head = padded(size) * dtype.itemsize, next((h for h in table if h >= padded(size)), 256)
    forward, queries, by_key = table[head]
    if boxes:  # whole tiles whatever the sequence: what lies beyond it costs nothing
        return (LONG_TILE if head == 64 and keys >= LONG else forward), queries, by_key
    queries = _fitting(queries, tokens, keys, row, shared, False)
    by_key = _fitting(by_key, tokens, keys, row, shared, True)
    return (
        _fitting(forward, tokens, keys, row, shared, False),
        queries,
        by_key._replace(queries=min(by_key.queries, queries.queries)),
    )


def sections(rows: float, heads: int, bytes_per_row: int, blocks: int, section: int = 8 << 20) -> tuple[int, int]:
    """How many heads all programs go through before the next ones, so that what they read stays in the L2 cache, and
    how many heads are divided so: those behind them go together.

    Args:
        rows: how many rows a head has that many programs read.
        bytes_per_row: of the two arrays read.
        blocks: programs of a head.
        section: bytes of the heads that go together.
    """
    each = rows * bytes_per_row
    if each < LARGE or each * heads < CACHE:
        return heads, 0
    together = max(1, int(section / each))
    return together, max(0, heads - triton.cdiv(LAST, blocks)) // together * together


def _fitting(tile: Tile, tokens: int, keys: int, row: int, shared: int, stays: bool) -> Tile:
    """The tile, no larger than the sequences, with fewer stages or keys where shared memory of rows of bytes is short.

    Two tiles stay and two go through the pipeline: `stays` says that keys do, otherwise queries.
    """
    m, n, _, stages = tile[:4]
    m = min(m, max(16, triton.next_power_of_2(tokens)))
    n = min(n, max(16, triton.next_power_of_2(keys)))
    while 2 * row * ((n + stages * m) if stays else (m + stages * n)) > shared and (stages, m, n) != (1, 16, 16):
        if stages > 1:
            stages -= 1
        elif n > 16:
            n //= 2
        else:
            m //= 2
    return tile._replace(queries=m, keys=n, stages=stages)
