"""Tile sizes of attention's kernels: queries and keys of a block, warps, pipeline stages; and sections for L2."""

from __future__ import annotations

from typing import NamedTuple

import triton

from genesis.dtypes import DType


class AttentionTile(NamedTuple):
    """How a kernel divides a head.

    Attributes:
        queries, keys: of a block.
        warps, stages: of a program and of its pipeline.
        registers: the most that a thread may have, so that more programs share an SM; 0 for no limit.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int = 0


# By kind of type and padded head dimension: forward, dQ, dK/dV. "tma" is for 2-byte types that come through Hopper's
# TMA: measured on an H200 with Triton 3.6.
TILES: dict[str, dict[int, tuple[AttentionTile, AttentionTile, AttentionTile]]] = {
    "tma": {
        64: (AttentionTile(64, 64, 4, 2), AttentionTile(64, 64, 4, 2), AttentionTile(64, 64, 4, 3, 168)),
        128: (AttentionTile(64, 64, 4, 3), AttentionTile(128, 64, 8, 3), AttentionTile(64, 64, 4, 2)),
        256: (AttentionTile(64, 64, 4, 2), AttentionTile(64, 64, 4, 2), AttentionTile(64, 64, 8, 2)),
    },
    "half": {
        64: (AttentionTile(64, 64, 4, 3), AttentionTile(64, 64, 4, 3), AttentionTile(32, 64, 4, 2)),
        128: (AttentionTile(128, 64, 8, 3), AttentionTile(64, 64, 8, 2), AttentionTile(32, 64, 8, 2)),
        256: (AttentionTile(64, 64, 8, 2), AttentionTile(64, 32, 8, 2), AttentionTile(32, 32, 8, 2)),
    },
    "float32": {
        64: (AttentionTile(32, 32, 4, 2), AttentionTile(32, 32, 4, 2), AttentionTile(32, 32, 8, 1)),
        128: (AttentionTile(32, 32, 8, 1), AttentionTile(32, 32, 8, 2), AttentionTile(16, 32, 8, 1)),
        256: (AttentionTile(16, 32, 8, 1), AttentionTile(16, 16, 8, 1), AttentionTile(16, 16, 8, 1)),
    },
    "float64": {
        64: (AttentionTile(16, 16, 4, 1), AttentionTile(16, 16, 4, 1), AttentionTile(16, 16, 4, 1)),
        128: (AttentionTile(16, 16, 8, 1), AttentionTile(16, 16, 8, 1), AttentionTile(16, 16, 8, 1)),
        256: (AttentionTile(16, 16, 8, 1), AttentionTile(16, 16, 8, 1), AttentionTile(16, 16, 8, 1)),
    },
}


def padded_head_dim(head_dim: int) -> int:
    """The head dimension that tiles have: a power of 2, and at least the 16 that dots need."""
    return max(16, triton.next_power_of_2(head_dim))


SECTION_HEAD_BYTES = 3 << 20  # of a head, from which on heads go in sections
SECTION_TOTAL_BYTES = 64 << 20  # of all heads, up to which they do not
# Programs at the end that belong to no section: the longest of all their heads go first and the shortest last, so that
# SMs finish together. If a last section of few heads began with its longest programs, most SMs would wait.
UNSECTIONED_PROGRAMS = 800
LONG_KEYS = 2048  # from so many keys on, the forward kernel for "tma" and heads of 64 takes larger blocks of them
LONG_TILE = AttentionTile(64, 128, 4, 2)


def tiles_of(
    dtype: DType, head_dim: int, tokens: int, keys: int, shared: int, uses_tma: bool
) -> tuple[AttentionTile, AttentionTile, AttentionTile]:
    """The tiles of the forward, dQ and dK/dV kernels. Blocks of queries of the last divide those of the second.

    Args:
        shared: bytes of shared memory that a program may use.
        uses_tma: tiles come through Hopper's TMA.
    """
    table = TILES["tma" if uses_tma else "half" if dtype.itemsize == 2 else dtype.name]
    padded = padded_head_dim(head_dim)
    row_bytes, row = padded * dtype.itemsize, next((d for d in table if d >= padded), 256)
    forward, dq, dkdv = table[row]
    if uses_tma:  # whole tiles whatever the sequence: what is out of bounds costs nothing
        return (LONG_TILE if row == 64 and keys >= LONG_KEYS else forward), dq, dkdv
    dq = _fitting(dq, tokens, keys, row_bytes, shared, False)
    dkdv = _fitting(dkdv, tokens, keys, row_bytes, shared, True)
    return (
        _fitting(forward, tokens, keys, row_bytes, shared, False),
        dq,
        dkdv._replace(queries=min(dkdv.queries, dq.queries)),
    )


def l2_sections(
    rows: float, heads: int, bytes_per_row: int, blocks: int, section_bytes: int = 8 << 20
) -> tuple[int, int]:
    """(section, sectioned): how many heads a section has, so that what its programs read stays in L2, and how many
    heads go in sections; the others follow together.

    Args:
        rows: of a head that many programs read.
        bytes_per_row: of the two arrays read.
        blocks: programs of a head.
        section_bytes: of the heads of a section.
    """
    head_bytes = rows * bytes_per_row
    if head_bytes < SECTION_HEAD_BYTES or head_bytes * heads < SECTION_TOTAL_BYTES:
        return heads, 0
    section = max(1, int(section_bytes / head_bytes))
    return section, max(0, heads - triton.cdiv(UNSECTIONED_PROGRAMS, blocks)) // section * section


def _fitting(
    tile: AttentionTile, tokens: int, keys: int, row_bytes: int, shared: int, keeps_keys: bool
) -> AttentionTile:
    """The tile, no larger than the sequences, with fewer stages or smaller blocks where shared memory is short.

    Two tiles stay in shared memory and two go through the pipeline. With `keeps_keys` keys stay, otherwise queries.
    """
    m, n, _, stages = tile[:4]
    m = min(m, max(16, triton.next_power_of_2(tokens)))
    n = min(n, max(16, triton.next_power_of_2(keys)))
    while 2 * row_bytes * ((n + stages * m) if keeps_keys else (m + stages * n)) > shared and (stages, m, n) != (
        1, 16, 16,
    ):  # fmt: skip
        if stages > 1:
            stages -= 1
        elif n > 16:
            n //= 2
        else:
            m //= 2
    return tile._replace(queries=m, keys=n, stages=stages)
