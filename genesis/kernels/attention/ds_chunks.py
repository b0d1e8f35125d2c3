"""How much of attention's backward goes together where the gradient of the scores, ds, stays in memory: the rule alone,
for its kernels and memory plans.

ds of a head is made of tiles of 64 keys and 64 queries. Queries see keys from the first one on: the first block of keys
has tiles with all blocks of queries, the last one with one. Block j of n and block n - 1 - j share a row of n + 1
tiles, so that the triangle fills a rectangle of half its square.
"""

from __future__ import annotations

import math

__all__ = ["HEADS", "HELD", "SIDE", "held_shape", "portions", "sides"]

HEADS = range(65, 129)  # sizes with which that pays
SIDE = 64  # of a tile
HELD = 1 << 30  # bytes of ds at a time; each portion ends with SMs that wait for the last ones


def sides(tokens: int) -> tuple[int, int]:
    """Rows and columns of ds of a head."""
    blocks = -(-tokens // SIDE)
    return -(-blocks // 2) * SIDE, (blocks + 1) * SIDE


def portions(batches: int, tokens: int, heads: int, key_heads: int, itemsize: int) -> list[tuple[slice, slice]]:
    """Sequences and key heads that go together, in like parts, the first one the largest: as many as HELD bytes of ds
    are for, or one key head.
    """
    each = heads // key_heads * math.prod(sides(tokens)) * itemsize
    height = _like_parts(batches, HELD // (each * key_heads))
    width = _like_parts(key_heads, HELD // each)
    return [
        (slice(row, min(batches, row + height)), slice(head, min(key_heads, head + width)))
        for row in range(0, batches, height)
        for head in range(0, key_heads, width)
    ]


def _like_parts(count: int, most: int) -> int:
    """The size of nearly equal parts of `most` at the most, but of one at least."""
    parts = -(-count // max(1, most))
    return -(-count // parts)


def held_shape(batches: int, tokens: int, heads: int, key_heads: int, itemsize: int) -> tuple[int, int, int]:
    """ds of the largest portion."""
    rows, mine = portions(batches, tokens, heads, key_heads, itemsize)[0]
    return rows.stop * mine.stop * (heads // key_heads), *sides(tokens)
