"""Which tiles a matrix product is computed in: a table of measured rows, the nearest row for a shape, and the split.

Tuned ahead of time with benchmarks/gpu/matmul.py, which prints rows to paste here. Nothing is measured in a run.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

__all__ = [
    "IMPRECISE",
    "TABLE",
    "Cut",
    "Row",
    "Tile",
    "beside",
    "choose",
    "cut",
    "fitted",
    "parts",
    "pieces",
    "shared_bytes",
]


class Tile(NamedTuple):
    """How a product is cut.

    Attributes:
        bm, bn, bk: the tile's sizes.
        warps, stages: of the compiled kernel.
        group: rows of tiles that are walked together.
        split: parts along k of each tile that whole rounds over the SMs leave over; 0 lets `parts` decide.
        swapped: compute outᵀ = bᵀ·aᵀ, so that b is the left factor.
        resident: programs on an SM at a time; one's epilogue runs beside the other's products.
        copied: 1 copies the right factor first where k is not its inner dimension, 2 the left one, too. The tensor
            cores take float32 from shared memory only with k innermost.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 8
    split: int = 0
    swapped: bool = False
    resident: int = 1
    copied: int = 0

    @property
    def once(self) -> bool:
        """Whether a program with a single tile goes without the loop over tiles: large tiles are no faster so."""
        return self.bm * self.bn < 1 << 15


class Row(NamedTuple):
    """A measured shape: layout is "nt" for x·wᵀ and so on, t where k is the outer dimension in memory of a, or the
    inner one of b.
    """

    layout: str
    m: int
    n: int
    k: int
    tile: Tile


_DEEP = Tile(128, 256, 64, 8, 4)
_PAIR = Tile(128, 128, 64, 4, 3, split=1, resident=2)
_SQUARE = Tile(128, 128, 64, 4, 4)
_LOW = Tile(64, 128, 128, 4, 4, split=1)
_SMALL = Tile(64, 64, 128, 4, 4, split=1)
_FLAT = Tile(64, 128, 64, 4, 4, split=1, resident=2)
_WGRAD = Tile(64, 128, 128, 4, 3, split=1)
_DECODE = Tile(64, 16, 128, 4, 4, swapped=True, resident=2)
_DEEP8 = Tile(128, 256, 128, 8, 4, split=1)
_PAIR8 = Tile(128, 128, 128, 4, 3, split=1, resident=2)
_SQUARE8 = Tile(128, 128, 128, 8, 4, split=1)
_TF32 = Tile(128, 256, 32, 8, 4)
_TF32_PAIR = Tile(128, 128, 32, 4, 3, split=1, resident=2)
_TF32_LOW = Tile(64, 64, 64, 4, 3, swapped=True, resident=2)

# Measured on an H200.
TABLE: dict[str, tuple[Row, ...]] = {
    "half": (
        Row("nn", 512, 512, 512, Tile(64, 64, 128, 4, 4, split=1)),
        Row("nn", 1024, 1024, 1024, _LOW._replace(group=4)),
        Row("nn", 2048, 2048, 2048, Tile(128, 256, 64, 8, 4, group=4, split=1)),
        Row("nn", 4096, 4096, 4096, _DEEP),
        Row("nn", 8192, 8192, 8192, _DEEP),
        Row("nt", 8192, 8192, 8192, _DEEP),
        Row("nt", 8192, 896, 896, _PAIR),
        Row("nt", 8192, 1152, 896, _PAIR),
        Row("nt", 8192, 2048, 1536, _DEEP._replace(split=1)),
        Row("nt", 8192, 4864, 896, _PAIR._replace(group=4)),
        Row("nt", 8192, 9728, 896, _DEEP._replace(split=1)),
        Row("nt", 8192, 896, 4864, _DEEP._replace(split=1)),
        Row("nt", 8192, 151936, 896, _PAIR),
        Row("nn", 8192, 896, 896, _DEEP._replace(group=4, split=1)),
        Row("nn", 16384, 896, 896, _SQUARE._replace(split=1)),
        Row("nn", 32768, 896, 896, _PAIR),
        Row("nn", 8192, 1536, 1536, _DEEP._replace(split=1)),
        Row("nn", 8192, 1536, 2048, _DEEP._replace(split=1)),
        Row("nn", 8192, 1536, 17920, _DEEP),
        Row("nn", 8192, 896, 1152, _PAIR),
        Row("nn", 8192, 4864, 896, _PAIR),
        Row("nn", 8192, 896, 4864, _DEEP._replace(group=4, split=1)),
        Row("nn", 8192, 896, 9728, _SQUARE._replace(split=2)),
        Row("nn", 32768, 896, 9728, _DEEP._replace(swapped=True)),
        Row("nn", 8192, 896, 151936, _DEEP._replace(split=2)),
        Row("nn", 4096, 896, 151936, _SQUARE._replace(split=1)),
        Row("nn", 2816, 896, 151936, _SQUARE),
        Row("nn", 2048, 896, 151936, _DEEP._replace(split=2)),
        Row("nn", 512, 896, 151936, _DEEP._replace(split=7)),
        Row("tn", 896, 896, 8192, _LOW),
        Row("tn", 896, 896, 16384, _PAIR._replace(split=5)),
        Row("tn", 896, 896, 32768, _PAIR._replace(split=5)),
        Row("tn", 1152, 896, 8192, _LOW),
        Row("tn", 1152, 896, 16384, _LOW._replace(split=0)),
        Row("tn", 1152, 896, 32768, _LOW._replace(split=0)),
        Row("tn", 1536, 1536, 8192, _SQUARE._replace(split=11)),
        Row("tn", 2048, 1536, 8192, Tile(64, 256, 64, 4, 4, split=2)),
        Row("tn", 1024, 2048, 8192, Tile(64, 256, 64, 4, 4, split=1)),
        Row("tn", 1024, 3072, 8192, _SQUARE._replace(split=2)),
        Row("tn", 4096, 1024, 8192, _DEEP._replace(stages=3, split=1)),
        Row("tn", 4864, 896, 8192, _PAIR._replace(split=16)),
        Row("tn", 9728, 896, 8192, _PAIR._replace(split=16)),
        Row("tn", 896, 4864, 8192, _PAIR._replace(split=16)),
        Row("tn", 6144, 1024, 8192, _DEEP),
        Row("tn", 17920, 1536, 8192, _DEEP._replace(split=5)),
        Row("tn", 1536, 8960, 8192, _DEEP),
        Row("tn", 151936, 896, 8192, _SQUARE),
        Row("tn", 151936, 896, 2816, _SQUARE),
        Row("tn", 151936, 896, 2048, Tile(128, 128, 64, 8, 3, split=1, swapped=True, resident=2)),
        Row("tn", 151936, 896, 512, _PAIR),
        Row("nt", 2048, 4864, 896, _PAIR),
        Row("nn", 512, 896, 4864, Tile(64, 64, 128, 4, 6, split=1)),
        Row("tn", 4864, 896, 512, _LOW),
        Row("nt", 128, 4864, 896, _LOW),
        Row("nt", 64, 4864, 896, Tile(64, 64, 128, 4, 6, swapped=True)),
        Row("nn", 64, 4864, 896, Tile(64, 64, 128, 4, 6, swapped=True)),
        Row("nt", 16, 4864, 896, _DECODE),
        Row("nt", 1, 4864, 896, _DECODE),
        Row("nt", 128, 1152, 896, _SMALL),
        Row("nt", 128, 896, 896, _SMALL),
        Row("nt", 128, 9728, 896, _FLAT),
        Row("nt", 128, 896, 4864, Tile(64, 64, 128, 4, 4, split=4)),
        Row("nn", 128, 896, 1152, _SMALL),
        Row("nn", 128, 896, 896, _SMALL),
        Row("nn", 128, 896, 9728, Tile(64, 64, 128, 4, 6)),
        Row("nn", 128, 4864, 896, Tile(64, 64, 64, 4, 4, split=1, resident=2)),
        Row("tn", 1152, 896, 128, _WGRAD),
        Row("tn", 896, 896, 128, _WGRAD),
        Row("tn", 9728, 896, 128, _WGRAD),
        Row("tn", 896, 4864, 128, _WGRAD),
        Row("nt", 512, 1152, 896, Tile(64, 128, 128, 4, 4)),
        Row("nt", 512, 896, 896, _SMALL),
        Row("nt", 512, 9728, 896, _LOW),
        Row("nt", 512, 896, 4864, _SMALL),
        Row("nn", 512, 896, 1152, _SMALL),
        Row("nn", 512, 896, 896, _SMALL),
        Row("nn", 512, 896, 9728, Tile(64, 64, 128, 4, 6)),
        Row("nn", 512, 4864, 896, _LOW),
        Row("tn", 1152, 896, 512, _WGRAD),
        Row("tn", 896, 896, 512, _WGRAD),
        Row("tn", 9728, 896, 512, _PAIR),
        Row("tn", 896, 4864, 512, Tile(64, 128, 128, 4, 4)),
        Row("nt", 2048, 1152, 896, _FLAT),
        Row("nt", 2048, 896, 896, _FLAT),
        Row("nt", 2048, 9728, 896, _DEEP._replace(split=1)),
        Row("nt", 2048, 896, 4864, _SQUARE._replace(split=1)),
        Row("nn", 2048, 896, 1152, _FLAT),
        Row("nn", 2048, 896, 896, _SQUARE._replace(split=1)),
        Row("nn", 2048, 896, 9728, _SQUARE._replace(split=1)),
        Row("nn", 2048, 4864, 896, Tile(128, 128, 64, 4, 3, resident=2)),
        Row("tn", 1152, 896, 2048, Tile(64, 128, 128, 4, 4)),
        Row("tn", 896, 896, 2048, Tile(64, 128, 128, 4, 4)),
        Row("tn", 9728, 896, 2048, Tile(128, 128, 64, 4, 3, split=8, resident=2)),
        Row("tn", 896, 4864, 2048, Tile(128, 128, 64, 4, 3, split=8, resident=2)),
        Row("nt", 128, 151936, 896, _FLAT),
        Row("nn", 128, 896, 151936, Tile(128, 128, 64, 4, 4, split=16)),
        Row("tn", 151936, 896, 128, _PAIR),
    ),
    "fp8": (  # sums that the tensor cores keep to themselves
        Row("nt", 8192, 9728, 896, _DEEP8),
        Row("nt", 8192, 4864, 896, _PAIR8),
        Row("nt", 8192, 1152, 896, _PAIR8),
        Row("nt", 8192, 896, 896, _PAIR8),
        Row("nt", 2048, 9728, 896, _DEEP8),
        Row("nt", 2048, 896, 896, Tile(64, 128, 128, 4, 4, split=1, resident=2)),
        Row("nt", 128, 4864, 896, Tile(64, 128, 128, 4, 4, split=1)),
        Row("nt", 128, 896, 896, Tile(64, 64, 128, 4, 4, split=1)),
    ),
    "fp8_long": (  # sums that are taken out after every step, which needs as many registers again
        Row("nt", 8192, 896, 4864, _SQUARE8),
        Row("nt", 8192, 896, 9728, _SQUARE8),
        Row("nt", 2048, 896, 4864, _SQUARE8),
        Row("nt", 512, 896, 4864, Tile(64, 64, 128, 4, 4)),
    ),
    "tf32": (
        Row("nn", 512, 512, 512, Tile(64, 32, 64, 4, 4, split=1, copied=1)),
        Row("nn", 1024, 1024, 1024, Tile(64, 128, 64, 4, 4, split=1, copied=1)),
        Row("nn", 2048, 2048, 2048, _TF32._replace(group=4, split=1, copied=1)),
        Row("nn", 4096, 4096, 4096, _TF32._replace(group=16, split=1, copied=1)),
        Row("nn", 8192, 8192, 8192, _TF32._replace(group=16, copied=1)),
        Row("nn", 8192, 896, 4864, _TF32._replace(split=1, copied=1)),
        Row("nn", 256, 4096, 4096, _TF32_LOW),
        Row("nn", 64, 4096, 4096, _TF32_LOW),
        Row("nn", 16, 4096, 4096, Tile(64, 16, 128, 4, 4, swapped=True)),
        Row("nn", 128, 1024, 1024, _TF32_LOW),
        Row("nt", 512, 512, 512, Tile(64, 32, 64, 4, 4, split=1)),
        Row("nt", 1024, 1024, 1024, Tile(64, 128, 64, 4, 4, split=1)),
        Row("nt", 2048, 2048, 2048, _TF32_PAIR),
        Row("nt", 4096, 4096, 4096, _TF32._replace(split=1)),
        Row("nt", 8192, 8192, 8192, _TF32),
        Row("nt", 8192, 4864, 896, _TF32_PAIR),
        Row("nt", 64, 4096, 4096, _TF32_LOW._replace(swapped=False)),
        Row("tn", 9728, 896, 8192, _TF32_PAIR._replace(split=16, copied=1)),
        Row("tn", 896, 4864, 8192, _TF32_PAIR._replace(split=16, copied=2)),
    ),
    "float32": (Row("nn", 1024, 1024, 1024, Tile(64, 64, 16, 4, 3)), Row("nn", 64, 64, 64, Tile(32, 32, 16, 4, 3))),
    "pointers": (  # 2-byte floats, and float32 in tf32, that TMA cannot fetch
        Row("nn", 8192, 8192, 8192, Tile(128, 128, 32, 8, 3)),
        Row("nn", 1024, 1024, 1024, Tile(64, 64, 32, 4, 4)),
        Row("nn", 64, 64, 64, Tile(32, 32, 32, 4, 3)),
        Row("nn", 1, 1024, 1024, Tile(16, 64, 64, 4, 3)),
        Row("nn", 1024, 1, 1024, Tile(64, 16, 64, 4, 3)),
    ),
}

# Terms of 8-bit floats that are left to the tensor cores' own sums. Those of Hopper hold some 14 bits and cut off the
# rest, 32 terms at a time: at the most 2^-13 of the sum for each, here 0.8 % where e4m3 itself is uncertain by 4 %.
IMPRECISE = 2048
RESERVED = 1 << 10  # bytes of shared memory that each program on an SM takes besides
TURNED = 2.0  # what another layout counts, in doublings of a size
PART_COST = 8  # steps along k that a part's start and store take, and reading it back
ADD_COST = 4  # steps that the launch of the addition takes
MOST = 32  # parts; more only move more partial sums
SIDE_BY_SIDE = 4  # programs of multiply-adds without tensor cores that an SM has room for: one alone waits
LEAST_STEPS = 16  # along k of a part of theirs


@functools.lru_cache(4096)
def choose(
    kind: str, layout: str, m: int, n: int, k: int, item: int, shared: int, reads: bool = False, out: int = 0
) -> Tile:
    """The tile of the nearest row, with as many stages as `shared` bytes of a block's memory hold.

    A split is right only for the tiles that the row's own shape leaves over: `parts` decides for others.

    Args:
        item: bytes of a factor's element.
        reads: the epilogue reads as much as it stores.
        out: bytes of an element of the result; those of a factor's by default.
    """

    def distance(row: Row) -> float:
        sizes = zip((row.m, row.n, row.k), (m, n, k), strict=True)
        return sum(abs(math.log2(max(x, 1) / max(y, 1))) for x, y in sizes) + TURNED * (row.layout != layout)

    row = min(TABLE[kind], key=distance)
    same = (row.m, row.n, row.k) == (m, n, k)
    return fitted(row.tile if same else row.tile._replace(split=0), item, shared, reads, out)


def shared_bytes(tile: Tile, item: int, reads: bool = False, out: int = 0) -> int:
    """Shared memory that the kernel takes: the stages of both tiles, and room for the store, and for what is read."""
    stage, out = (tile.bm + tile.bn) * tile.bk * item, out or item
    finish = _finish_bytes(tile, out, reads) // pieces(tile, out, reads)
    return tile.stages * stage + finish + 1024


def pieces(tile: Tile, out: int, reads: bool = False) -> int:
    """Into how many pieces the epilogue cuts a tile: 32 KiB an SM each, of at least 32 columns."""
    count = 1
    while tile.resident * _finish_bytes(tile, out, reads) // count > 32 << 10 and tile.bn // count > 32:
        count *= 2
    return count


def _finish_bytes(tile: Tile, out: int, reads: bool) -> int:
    """Bytes of shared memory through which a whole tile would be stored, and read.

    What is read of a swapped tile, whose columns lie side by side in memory, Triton makes float32 before it moves it to
    the threads that hold the sums; otherwise after.
    """
    return tile.bm * tile.bn * (out + reads * (max(out, 4) if tile.swapped else out))


def fitted(tile: Tile, item: int, shared: int, reads: bool = False, out: int = 0) -> Tile:
    """The tile with fewer stages, then smaller, until it fits."""
    while shared_bytes(tile, item, reads, out) > (shared + RESERVED) // tile.resident - RESERVED:
        if tile.resident > 1:
            tile = tile._replace(resident=1)
        elif tile.stages > 2:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.bn > 64:
            tile = tile._replace(bn=tile.bn // 2)
        else:
            tile = tile._replace(bk=tile.bk // 2)
    return tile


class Cut(NamedTuple):
    """How tiles are shared out: `whole` of them go from first to last k, `rest` in `split` parts of `share` steps."""

    whole: int
    rest: int
    split: int
    share: int


@functools.lru_cache(4096)
def cut(tiles: int, steps: int, programs: int, split: int = 0) -> Cut:
    """Whole rounds over the programs and a rest in parts, none of them empty; `split` 0 takes what `parts` advises."""
    split = min(split or parts(tiles, steps, programs), steps)
    share = -(-steps // split)
    split = -(-steps // share)
    whole = tiles if split == 1 else tiles // programs * programs
    if whole == tiles:
        return Cut(tiles, 0, 1, steps)
    return Cut(whole, tiles - whole, split, share)


def beside(tiles: int, steps: int, sm_count: int, tile: Tile) -> Cut:
    """How tiles that are summed without tensor cores are shared out: all in parts where they are so few that most
    SMs would have one at the most, so that several share each.
    """
    split = tile.split
    if split == 0 and tiles < 2 * sm_count:
        split = min(SIDE_BY_SIDE * sm_count // max(tiles, 1), steps // LEAST_STEPS, MOST)
    share = -(-steps // max(split, 1))
    split = -(-steps // max(share, 1))
    return Cut(0, tiles, split, share) if split > 1 else Cut(tiles, 0, 1, steps)


def parts(tiles: int, steps: int, programs: int) -> int:
    """Into how many parts along k to split each of the tiles that whole rounds over the programs leave over.

    A round of parts takes its share of the steps along k, and what it costs to keep and add them. 1 where splitting
    gains less than a twentieth of the whole.
    """
    rounds, rest = divmod(tiles, programs)
    if rest == 0 or steps < 2:
        return 1
    best, least = 1, steps * (1 - (rounds + 1) / 20)
    for split in range(2, min(MOST, steps) + 1):
        cost = -(-rest * split // programs) * (-(-steps // split) + PART_COST) + ADD_COST
        if cost < least:
            best, least = split, cost
    return best
