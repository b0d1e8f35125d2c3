"""How ds, the gradient of attention's scores, is spilled to memory in backward: the layout and the chunks alone, for
the kernels and for memory plans.

ds of a head consists of tiles of 64 keys by 64 queries. With causal attention the first block of keys has a tile for
every block of queries, and the last one has a single tile. Blocks j and n - 1 - j of n share a row of n + 1 tiles, so
that the triangle fills a rectangle half as large as the square.
"""

from __future__ import annotations

import math

HEAD_DIMS = range(65, 257)  # with which spilling is profitable
DS_TILE = 64  # rows and columns of a tile
MAX_CHUNK_BYTES = 1 << 30  # of ds at a time; at the end of each chunk SMs idle until the last ones are done


def ds_extent(tokens: int) -> tuple[int, int]:
    """Rows and columns of ds of a head."""
    blocks = -(-tokens // DS_TILE)
    return -(-blocks // 2) * DS_TILE, (blocks + 1) * DS_TILE


def ds_chunks_of(batches: int, tokens: int, heads: int, key_heads: int, itemsize: int) -> list[tuple[slice, slice]]:
    """Chunks of (sequences, key heads) of nearly equal size, the first one the largest: as many as fit MAX_CHUNK_BYTES
    of ds, and at least one key head.
    """
    head_bytes = heads // key_heads * math.prod(ds_extent(tokens)) * itemsize
    sequences = _even_part(batches, MAX_CHUNK_BYTES // (head_bytes * key_heads))
    width = _even_part(key_heads, MAX_CHUNK_BYTES // head_bytes)
    return [
        (slice(first, min(batches, first + sequences)), slice(head, min(key_heads, head + width)))
        for first in range(0, batches, sequences)
        for head in range(0, key_heads, width)
    ]


def _even_part(count: int, most: int) -> int:
    """The size of nearly equal parts of at most `most`, and of at least 1."""
    parts = -(-count // max(1, most))
    return -(-count // parts)


def ds_buffer_shape(batches: int, tokens: int, heads: int, key_heads: int, itemsize: int) -> tuple[int, int, int]:
    """The shape of ds of the largest chunk: query heads, rows, columns."""
    sequences, part = ds_chunks_of(batches, tokens, heads, key_heads, itemsize)[0]
    return sequences.stop * part.stop * (heads // key_heads), *ds_extent(tokens)
