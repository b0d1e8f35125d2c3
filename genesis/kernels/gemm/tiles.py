"""The choice of a GEMM's tile: a table of tuned shapes, the nearest entry for a given shape, and the split along k.

The table is tuned ahead of time with benchmarks/gpu/matmul.py, which prints rows to paste. Runs measure nothing.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple


class GemmTile(NamedTuple):
    """Tile sizes and launch options of a GEMM."""

    bm: int  # rows of a tile
    bn: int  # columns of a tile
    bk: int  # elements along k
    warps: int  # warps per program
    stages: int  # pipeline stages
    group: int = 8  # rows of tiles in a group of `grouped_tile`
    split: int = 0  # parts along k of each tile left over after full rounds over the SMs; 0 means `best_split`
    swapped: bool = False  # compute outᵀ = bᵀ·aᵀ
    ctas_per_sm: int = 1  # programs per SM; one's epilogue overlaps the other's main loop
    # 1 copies operand B to K-major first, 2 copies operand A too: tensor cores read float32 from shared memory only
    # K-major.
    transposed_copies: int = 0

    @property
    def is_single(self) -> bool:
        """True if a program with a single tile has no loop over tiles, which is not profitable for large tiles."""
        return self.bm * self.bn < 1 << 15


class TunedShape(NamedTuple):
    """A measured shape. Its layout has a "t" for an MN-major operand A and for a K-major B: "nt" is x·wᵀ."""

    layout: str
    m: int
    n: int
    k: int
    tile: GemmTile


_DEEP = GemmTile(128, 256, 64, 8, 4)
_PAIR = GemmTile(128, 128, 64, 4, 3, split=1, ctas_per_sm=2)
_SQUARE = GemmTile(128, 128, 64, 4, 4)
_LOW = GemmTile(64, 128, 128, 4, 4, split=1)
_SMALL = GemmTile(64, 64, 128, 4, 4, split=1)
_FLAT = GemmTile(64, 128, 64, 4, 4, split=1, ctas_per_sm=2)
_WGRAD = GemmTile(64, 128, 128, 4, 3, split=1)
_DECODE = GemmTile(64, 16, 128, 4, 4, swapped=True, ctas_per_sm=2)
_DEEP8 = GemmTile(128, 256, 128, 8, 4, split=1)
_PAIR8 = GemmTile(128, 128, 128, 4, 3, split=1, ctas_per_sm=2)
_SQUARE8 = GemmTile(128, 128, 128, 8, 4, split=1)
_TF32 = GemmTile(128, 256, 32, 8, 4)
_TF32_PAIR = GemmTile(128, 128, 32, 4, 3, split=1, ctas_per_sm=2)
_TF32_LOW = GemmTile(64, 64, 64, 4, 3, swapped=True, ctas_per_sm=2)

# Measured on an H200.
TABLE: dict[str, tuple[TunedShape, ...]] = {
    "half": (
        TunedShape("nn", 512, 512, 512, GemmTile(64, 64, 128, 4, 4, split=1)),
        TunedShape("nn", 1024, 1024, 1024, _LOW._replace(group=4)),
        TunedShape("nn", 2048, 2048, 2048, GemmTile(128, 256, 64, 8, 4, group=4, split=1)),
        TunedShape("nn", 4096, 4096, 4096, _DEEP),
        TunedShape("nn", 8192, 8192, 8192, _DEEP),
        TunedShape("nt", 8192, 8192, 8192, _DEEP),
        TunedShape("nt", 8192, 896, 896, _PAIR),
        TunedShape("nt", 8192, 1152, 896, _PAIR),
        TunedShape("nt", 8192, 2048, 1536, _DEEP._replace(split=1)),
        TunedShape("nt", 8192, 4864, 896, _PAIR._replace(group=4)),
        TunedShape("nt", 8192, 9728, 896, _DEEP._replace(split=1)),
        TunedShape("nt", 8192, 896, 4864, _DEEP._replace(split=1)),
        TunedShape("nt", 8192, 151936, 896, _PAIR),
        TunedShape("nn", 8192, 896, 896, _DEEP._replace(group=4, split=1)),
        TunedShape("nn", 16384, 896, 896, _SQUARE._replace(split=1)),
        TunedShape("nn", 32768, 896, 896, _PAIR),
        TunedShape("nn", 8192, 1536, 1536, _DEEP._replace(split=1)),
        TunedShape("nn", 8192, 1536, 2048, _DEEP._replace(split=1)),
        TunedShape("nn", 8192, 1536, 17920, _DEEP),
        TunedShape("nn", 8192, 896, 1152, _PAIR),
        TunedShape("nn", 8192, 4864, 896, _PAIR),
        TunedShape("nn", 8192, 896, 4864, _DEEP._replace(group=4, split=1)),
        TunedShape("nn", 8192, 896, 9728, _SQUARE._replace(split=2)),
        TunedShape("nn", 32768, 896, 9728, _DEEP._replace(swapped=True)),
        TunedShape("nn", 8192, 896, 151936, _DEEP._replace(split=2)),
        TunedShape("nn", 4096, 896, 151936, _SQUARE._replace(split=1)),
        TunedShape("nn", 2816, 896, 151936, _SQUARE),
        TunedShape("nn", 2048, 896, 151936, _DEEP._replace(split=2)),
        TunedShape("nn", 512, 896, 151936, _DEEP._replace(split=7)),
        TunedShape("tn", 896, 896, 8192, _LOW),
        TunedShape("tn", 896, 896, 16384, _PAIR._replace(split=5)),
        TunedShape("tn", 896, 896, 32768, _PAIR._replace(split=5)),
        TunedShape("tn", 1152, 896, 8192, _LOW),
        TunedShape("tn", 1152, 896, 16384, _LOW._replace(split=0)),
        TunedShape("tn", 1152, 896, 32768, _LOW._replace(split=0)),
        TunedShape("tn", 1536, 1536, 8192, _SQUARE._replace(split=11)),
        TunedShape("tn", 2048, 1536, 8192, GemmTile(64, 256, 64, 4, 4, split=2)),
        TunedShape("tn", 1024, 2048, 8192, GemmTile(64, 256, 64, 4, 4, split=1)),
        TunedShape("tn", 1024, 3072, 8192, _SQUARE._replace(split=2)),
        TunedShape("tn", 4096, 1024, 8192, _DEEP._replace(stages=3, split=1)),
        TunedShape("tn", 4864, 896, 8192, _PAIR._replace(split=16)),
        TunedShape("tn", 9728, 896, 8192, _PAIR._replace(split=16)),
        TunedShape("tn", 896, 4864, 8192, _PAIR._replace(split=16)),
        TunedShape("tn", 6144, 1024, 8192, _DEEP),
        TunedShape("tn", 17920, 1536, 8192, _DEEP._replace(split=5)),
        TunedShape("tn", 1536, 8960, 8192, _DEEP),
        TunedShape("tn", 151936, 896, 8192, _SQUARE),
        TunedShape("tn", 151936, 896, 2816, _SQUARE),
        TunedShape("tn", 151936, 896, 2048, GemmTile(128, 128, 64, 8, 3, split=1, swapped=True, ctas_per_sm=2)),
        TunedShape("tn", 151936, 896, 512, _PAIR),
        TunedShape("nt", 2048, 4864, 896, _PAIR),
        TunedShape("nn", 512, 896, 4864, GemmTile(64, 64, 128, 4, 6, split=1)),
        TunedShape("tn", 4864, 896, 512, _LOW),
        TunedShape("nt", 128, 4864, 896, _LOW),
        TunedShape("nt", 64, 4864, 896, GemmTile(64, 64, 128, 4, 6, swapped=True)),
        TunedShape("nn", 64, 4864, 896, GemmTile(64, 64, 128, 4, 6, swapped=True)),
        TunedShape("nt", 16, 4864, 896, _DECODE),
        TunedShape("nt", 1, 4864, 896, _DECODE),
        TunedShape("nt", 128, 1152, 896, _SMALL),
        TunedShape("nt", 128, 896, 896, _SMALL),
        TunedShape("nt", 128, 9728, 896, _FLAT),
        TunedShape("nt", 128, 896, 4864, GemmTile(64, 64, 128, 4, 4, split=4)),
        TunedShape("nn", 128, 896, 1152, _SMALL),
        TunedShape("nn", 128, 896, 896, _SMALL),
        TunedShape("nn", 128, 896, 9728, GemmTile(64, 64, 128, 4, 6)),
        TunedShape("nn", 128, 4864, 896, GemmTile(64, 64, 64, 4, 4, split=1, ctas_per_sm=2)),
        TunedShape("tn", 1152, 896, 128, _WGRAD),
        TunedShape("tn", 896, 896, 128, _WGRAD),
        TunedShape("tn", 9728, 896, 128, _WGRAD),
        TunedShape("tn", 896, 4864, 128, _WGRAD),
        TunedShape("nt", 512, 1152, 896, GemmTile(64, 128, 128, 4, 4)),
        TunedShape("nt", 512, 896, 896, _SMALL),
        TunedShape("nt", 512, 9728, 896, _LOW),
        TunedShape("nt", 512, 896, 4864, _SMALL),
        TunedShape("nn", 512, 896, 1152, _SMALL),
        TunedShape("nn", 512, 896, 896, _SMALL),
        TunedShape("nn", 512, 896, 9728, GemmTile(64, 64, 128, 4, 6)),
        TunedShape("nn", 512, 4864, 896, _LOW),
        TunedShape("tn", 1152, 896, 512, _WGRAD),
        TunedShape("tn", 896, 896, 512, _WGRAD),
        TunedShape("tn", 9728, 896, 512, _PAIR),
        TunedShape("tn", 896, 4864, 512, GemmTile(64, 128, 128, 4, 4)),
        TunedShape("nt", 2048, 1152, 896, _FLAT),
        TunedShape("nt", 2048, 896, 896, _FLAT),
        TunedShape("nt", 2048, 9728, 896, _DEEP._replace(split=1)),
        TunedShape("nt", 2048, 896, 4864, _SQUARE._replace(split=1)),
        TunedShape("nn", 2048, 896, 1152, _FLAT),
        TunedShape("nn", 2048, 896, 896, _SQUARE._replace(split=1)),
        TunedShape("nn", 2048, 896, 9728, _SQUARE._replace(split=1)),
        TunedShape("nn", 2048, 4864, 896, GemmTile(128, 128, 64, 4, 3, ctas_per_sm=2)),
        TunedShape("tn", 1152, 896, 2048, GemmTile(64, 128, 128, 4, 4)),
        TunedShape("tn", 896, 896, 2048, GemmTile(64, 128, 128, 4, 4)),
        TunedShape("tn", 9728, 896, 2048, GemmTile(128, 128, 64, 4, 3, split=8, ctas_per_sm=2)),
        TunedShape("tn", 896, 4864, 2048, GemmTile(128, 128, 64, 4, 3, split=8, ctas_per_sm=2)),
        TunedShape("nt", 128, 151936, 896, _FLAT),
        TunedShape("nn", 128, 896, 151936, GemmTile(128, 128, 64, 4, 4, split=16)),
        TunedShape("tn", 151936, 896, 128, _PAIR),
    ),
    "fp8": (  # the tensor cores accumulate all terms
        TunedShape("nt", 8192, 9728, 896, _DEEP8),
        TunedShape("nt", 8192, 4864, 896, _PAIR8),
        TunedShape("nt", 8192, 1152, 896, _PAIR8),
        TunedShape("nt", 8192, 896, 896, _PAIR8),
        TunedShape("nt", 2048, 9728, 896, _DEEP8),
        TunedShape("nt", 2048, 896, 896, GemmTile(64, 128, 128, 4, 4, split=1, ctas_per_sm=2)),
        TunedShape("nt", 128, 4864, 896, GemmTile(64, 128, 128, 4, 4, split=1)),
        TunedShape("nt", 128, 896, 896, GemmTile(64, 64, 128, 4, 4, split=1)),
    ),
    "fp8_long": (  # sums are promoted to float32 after every step, which doubles the registers
        TunedShape("nt", 8192, 896, 4864, _SQUARE8),
        TunedShape("nt", 8192, 896, 9728, _SQUARE8),
        TunedShape("nt", 2048, 896, 4864, _SQUARE8),
        TunedShape("nt", 512, 896, 4864, GemmTile(64, 64, 128, 4, 4)),
    ),
    "tf32": (
        TunedShape("nn", 512, 512, 512, GemmTile(64, 32, 64, 4, 4, split=1, transposed_copies=1)),
        TunedShape("nn", 1024, 1024, 1024, GemmTile(64, 128, 64, 4, 4, split=1, transposed_copies=1)),
        TunedShape("nn", 2048, 2048, 2048, _TF32._replace(group=4, split=1, transposed_copies=1)),
        TunedShape("nn", 4096, 4096, 4096, _TF32._replace(group=16, split=1, transposed_copies=1)),
        TunedShape("nn", 8192, 8192, 8192, _TF32._replace(group=16, transposed_copies=1)),
        TunedShape("nn", 8192, 896, 4864, _TF32._replace(split=1, transposed_copies=1)),
        TunedShape("nn", 256, 4096, 4096, _TF32_LOW),
        TunedShape("nn", 64, 4096, 4096, _TF32_LOW),
        TunedShape("nn", 16, 4096, 4096, GemmTile(64, 16, 128, 4, 4, swapped=True)),
        TunedShape("nn", 128, 1024, 1024, _TF32_LOW),
        TunedShape("nt", 512, 512, 512, GemmTile(64, 32, 64, 4, 4, split=1)),
        TunedShape("nt", 1024, 1024, 1024, GemmTile(64, 128, 64, 4, 4, split=1)),
        TunedShape("nt", 2048, 2048, 2048, _TF32_PAIR),
        TunedShape("nt", 4096, 4096, 4096, _TF32._replace(split=1)),
        TunedShape("nt", 8192, 8192, 8192, _TF32),
        TunedShape("nt", 8192, 4864, 896, _TF32_PAIR),
        TunedShape("nt", 64, 4096, 4096, _TF32_LOW._replace(swapped=False)),
        TunedShape("tn", 9728, 896, 8192, _TF32_PAIR._replace(split=16, transposed_copies=1)),
        TunedShape("tn", 896, 4864, 8192, _TF32_PAIR._replace(split=16, transposed_copies=2)),
    ),
    "float32": (
        TunedShape("nn", 1024, 1024, 1024, GemmTile(64, 64, 16, 4, 3)),
        TunedShape("nn", 64, 64, 64, GemmTile(32, 32, 16, 4, 3)),
    ),
    "pointers": (  # 2-byte floats and tf32 that TMA cannot load
        TunedShape("nn", 8192, 8192, 8192, GemmTile(128, 128, 32, 8, 3)),
        TunedShape("nn", 1024, 1024, 1024, GemmTile(64, 64, 32, 4, 4)),
        TunedShape("nn", 64, 64, 64, GemmTile(32, 32, 32, 4, 3)),
        TunedShape("nn", 1, 1024, 1024, GemmTile(16, 64, 64, 4, 3)),
        TunedShape("nn", 1024, 1, 1024, GemmTile(64, 16, 64, 4, 3)),
    ),
}

# The most terms of 8-bit floats that tensor cores alone accumulate. Hopper's accumulators keep some 14 bits and drop
# the rest every 32 terms, by at most 2^-13 of the sum: 0.8 % for 2048 terms, while e4m3 itself is uncertain by 4 %.
MAX_IMPRECISE = 2048
THIN, MIN_ROWS, MIN_TERMS = 64, 2048, 512  # the most columns, the fewest rows and terms of a thin product
# Thin products with at least this many rows are not split: nearly every SM has a tile, whose loads saturate memory.
FULL_ROWS = 6144
RESERVED = 1 << 10  # bytes of shared memory that the driver reserves for each program
LAYOUT_PENALTY = 2.0  # distance of another layout, in doublings of a size
SPLIT_COST = 8  # cost of a part's prologue, store and load, in steps along k
REDUCE_COST = 4  # cost of launching the reduction, in steps along k
MAX_SPLIT = 32  # more parts only move more partial sums
PROGRAMS_PER_SM = 4  # programs without tensor cores that fit on an SM; a single one leaves latency exposed
MIN_STEPS = 16  # the fewest steps along k per part, without tensor cores


@functools.lru_cache(4096)
def choose(
    table: str, layout: str, m: int, n: int, k: int, item: int, shared: int, reads: bool = False, out: int = 0
) -> GemmTile:
    """Return the tile of the nearest row, with as many stages as `shared` bytes of a program's shared memory hold.

    A tuned split only suits its own shape; `best_split` decides for other shapes. Thin products of 2-byte floats have
    their own tile.

    Args:
        item: bytes per element of the operands.
        reads: whether the epilogue reads as much as it stores.
        out: bytes per element of out; 0 means `item`.
    """

    if table == "half" and is_thin(m, n, k):
        return fitted(thin_tile(n)._replace(split=int(m >= FULL_ROWS)), item, shared, reads, out)

    def distance(row: TunedShape) -> float:
        sizes = zip((row.m, row.n, row.k), (m, n, k), strict=True)
        return sum(abs(math.log2(max(x, 1) / max(y, 1))) for x, y in sizes) + LAYOUT_PENALTY * (row.layout != layout)

    row = min(TABLE[table], key=distance)
    same = (row.m, row.n, row.k) == (m, n, k)
    return fitted(row.tile if same else row.tile._replace(split=0), item, shared, reads, out)


def is_thin(m: int, n: int, k: int) -> bool:
    """Return whether a product reads far more than it computes, like products of low-rank pairs. A tile as narrow as n
    then neither computes nor reduces columns out of bounds.
    """
    return n <= THIN and m >= MIN_ROWS and k >= MIN_TERMS


def thin_tile(n: int) -> GemmTile:
    """Return the tile of a thin product, with two programs per SM so that loads are always in flight."""
    return GemmTile(64, 16 if n <= 16 else 32 if n <= 32 else 64, 128, 4, 4 if n <= 32 else 3, ctas_per_sm=2)


def unaligned_tile(matrices: int, m: int, n: int, k: int, item: int, sm_count: int) -> GemmTile:
    """Return the tile of operands that are loaded element by element, which is bound by memory latency. It is small
    enough for each SM to have a tile, and split along k, in parts of at least 4 steps, for each SM to have four.
    """
    bm, bn, bk = *(max(16, min(64, 1 << (x - 1).bit_length())) for x in (m, n)), 128 // item
    while max(bm, bn) > 32 and matrices * -(-m // bm) * -(-n // bn) < sm_count:
        bm, bn = (bm // 2, bn) if bm > bn else (bm, bn // 2)
    tiles = matrices * -(-m // bm) * -(-n // bn)
    split = min(PROGRAMS_PER_SM * sm_count // tiles, -(-k // bk) // 4, MAX_SPLIT)
    return GemmTile(bm, bn, bk, 4, 1, split=max(split, 1))


def shared_bytes(tile: GemmTile, item: int, reads: bool = False, out: int = 0) -> int:
    """Return the bytes of shared memory that the kernel uses: for the stages of both tiles, and for the epilogue."""
    stage, out = (tile.bm + tile.bn) * tile.bk * item, out or item
    epilogue = _epilogue_bytes(tile, out, reads) // epilogue_slices(tile, out, reads)
    return tile.stages * stage + epilogue + 1024


def epilogue_slices(tile: GemmTile, out: int, reads: bool = False) -> int:
    """Return the number of slices that the epilogue stores: each at most 32 KiB per SM, but at least 32 columns."""
    count = 1
    while tile.ctas_per_sm * _epilogue_bytes(tile, out, reads) // count > 32 << 10 and tile.bn // count > 32:
        count *= 2
    return count


def _epilogue_bytes(tile: GemmTile, out: int, reads: bool) -> int:
    """Return the bytes of shared memory that storing, and reading, an unsliced tile would use. Triton upcasts values of
    a swapped tile, whose columns are contiguous, before it changes their layout, and other values afterwards.
    """
    return tile.bm * tile.bn * (out + reads * (max(out, 4) if tile.swapped else out))


def fitted(tile: GemmTile, item: int, shared: int, reads: bool = False, out: int = 0) -> GemmTile:
    """Return the tile with fewer programs per SM, fewer stages, then smaller sizes, until it fits `shared` bytes."""
    while shared_bytes(tile, item, reads, out) > (shared + RESERVED) // tile.ctas_per_sm - RESERVED:
        if tile.ctas_per_sm > 1:
            tile = tile._replace(ctas_per_sm=1)
        elif tile.stages > 2:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.bn > 64:
            tile = tile._replace(bn=tile.bn // 2)
        else:
            tile = tile._replace(bk=tile.bk // 2)
    return tile


class Schedule(NamedTuple):
    """The distribution of tiles: `full` tiles over all of k, `leftover` tiles in `split` parts of `steps_per_split`."""

    full: int
    leftover: int
    split: int
    steps_per_split: int


@functools.lru_cache(4096)
def persistent_schedule(tiles: int, steps: int, programs: int, split: int = 0) -> Schedule:
    """Return full rounds over the programs, and leftover tiles in non-empty parts. `split` 0 means `best_split`."""
    split = min(split or best_split(tiles, steps, programs), steps)
    steps_per_split = -(-steps // split)
    split = -(-steps // steps_per_split)
    full = tiles if split == 1 else tiles // programs * programs
    if full == tiles:
        return Schedule(tiles, 0, 1, steps)
    return Schedule(full, tiles - full, split, steps_per_split)


def simt_schedule(tiles: int, steps: int, sm_count: int, tile: GemmTile) -> Schedule:
    """Return the schedule of a GEMM without tensor cores. Few tiles are split, so that several programs share an SM."""
    split = tile.split
    if split == 0 and tiles < 2 * sm_count:
        split = min(PROGRAMS_PER_SM * sm_count // max(tiles, 1), steps // MIN_STEPS, MAX_SPLIT)
    return split_schedule(tiles, steps, split)


def split_schedule(tiles: int, steps: int, split: int) -> Schedule:
    """Return all tiles in `split` non-empty parts."""
    steps_per_split = -(-steps // max(split, 1))
    split = -(-steps // max(steps_per_split, 1))
    return Schedule(0, tiles, split, steps_per_split) if split > 1 else Schedule(tiles, 0, 1, steps)


def best_split(tiles: int, steps: int, programs: int) -> int:
    """Return the number of parts along k for each tile left over after full rounds over the programs. A round of parts
    costs its share of the steps, plus storing and adding the parts. Splits must save a twentieth of the total.
    """
    rounds, leftover = divmod(tiles, programs)
    if leftover == 0 or steps < 2:
        return 1
    best, least = 1, steps * (1 - (rounds + 1) / 20)
    for split in range(2, min(MAX_SPLIT, steps) + 1):
        cost = -(-leftover * split // programs) * (-(-steps // split) + SPLIT_COST) + REDUCE_COST
        if cost < least:
            best, least = split, cost
    return best
