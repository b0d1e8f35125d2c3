"""Launch plans of reductions, scans, softmax and norms: merged dimensions, tile sizes, and the number of splits.

The plans depend on shapes and strides alone. Equal layouts give equal plans, so results do not change from run to run.
A reduction has K results of R elements each; a tile has `block_k` results × `block_r` elements.
"""

from __future__ import annotations

from typing import NamedTuple

import triton

from genesis.kernels.elements import collapse, needs_int64
from genesis.shapes import Shape, contiguous_strides, numel

PROGRAMS = 1056  # programs resident at once: 8 of 4 warps on each of 132 SMs
ENOUGH_PROGRAMS = 96  # programs that nearly saturate memory; splitting further costs a second launch
ROW_BYTES = 32768  # the longest row, in bytes, that one program holds in registers
COLUMN_GROUP = 4  # rows per step of `column_argminmax_kernel`
GROUP_PER_BYTE = 256  # elements of a row's group per byte of an element (`row_argminmax_kernel`)
SCAN_TILE = 4096  # elements of a line that a program scans
SCAN_TILES = 4096  # the most tiles per line; longer lines have tiles of twice the size
SCAN_COLUMNS = 1 << 15  # columns, or splits of them, that nearly saturate memory
MAX_SPLITS = 256  # the most splits of columns, since each program merges the totals of all splits before its own
L2_ELEMENTS = 1 << 22  # elements that fit in L2, where short rows cost little


class Layout(NamedTuple):
    """The merged dimensions of a reduction, in memory order."""

    kept: Shape  # sizes of the kept dimensions
    kept_in: Shape  # their strides in the input
    kept_out: Shape  # their strides in the result
    reduced: Shape  # sizes of the reduced dimensions
    reduced_in: Shape  # their strides in the input
    inner: bool  # whether neighbours in memory belong to the same result

    @property
    def results(self) -> int:
        return numel(self.kept)

    @property
    def elements(self) -> int:
        """The number of elements per result."""
        return numel(self.reduced)

    @property
    def strided(self) -> tuple[tuple[Shape, Shape, Shape], tuple[Shape, Shape]]:
        """The kernel arguments `kept` (sizes, strides in input and result) and `reduced` (sizes, input strides)."""
        return (self.kept, self.kept_in, self.kept_out), (self.reduced, self.reduced_in)

    @property
    def int64_k(self) -> bool:
        """Whether offsets of results need int64."""
        inside = needs_int64((*self.kept, *self.reduced), (*self.kept_in, *self.reduced_in))
        return inside or needs_int64(self.kept, self.kept_out)

    @property
    def int64_r(self) -> bool:
        """Whether offsets inside a result's elements need int64."""
        return needs_int64(self.reduced, self.reduced_in)


class Tiles(NamedTuple):
    """Tile sizes of a reduction or a scan."""

    block_k: int  # results per tile, a power of 2
    block_r: int  # elements per result and tile, a power of 2
    splits: int  # programs that divide the elements of a result
    span: int  # elements per split, a multiple of `block_r`
    warps: int  # warps per program


def reduction_layout(shape: Shape, strides: Shape, axes: Shape, *, ordered: bool = False) -> Layout:
    """Return the layout of a reduction over sorted `axes`. `ordered` keeps row-major order, for indices."""

    def memory_order(dims: list[int]) -> list[int]:
        return sorted(dims, key=lambda i: (strides[i] != 0, -strides[i]))  # repeated dimensions outermost

    keep = [i for i in range(len(shape)) if i not in axes]
    out_strides = dict(zip(keep, contiguous_strides(tuple(shape[i] for i in keep)), strict=True))
    keep = memory_order(keep)
    reduce = list(axes) if ordered else memory_order(list(axes))
    kept, kept_in, kept_out = collapse(
        tuple(shape[i] for i in keep), tuple(strides[i] for i in keep), tuple(out_strides[i] for i in keep)
    )
    kept_in, kept_out = zero_if_single(kept, kept_in, kept_out)
    reduced, reduced_in = collapse(tuple(shape[i] for i in reduce), tuple(strides[i] for i in reduce))
    return Layout(kept, kept_in, kept_out, reduced, reduced_in, is_inner(kept, kept_in, reduced, reduced_in))


def zero_if_single(sizes: Shape, *strides: Shape) -> tuple[Shape, ...]:
    """Return the strides, or zeros for a single element: they tell the compiler that its offset is 0 and aligned."""
    return strides if numel(sizes) != 1 else tuple((0,) * len(sizes) for _ in strides)


def is_inner(kept: Shape, kept_in: Shape, reduced: Shape, reduced_in: Shape) -> bool:
    """Return whether the next element in memory belongs to the same result."""

    def nearest(sizes: Shape, strides: Shape) -> int:
        return min((st for s, st in zip(sizes, strides, strict=True) if s > 1 and st), default=1 << 62)

    if numel(kept) == 1:
        return True
    return nearest(reduced, reduced_in) < nearest(kept, kept_in)


def reduction_tiles(layout: Layout, itemsize: int, states: int = 1) -> Tiles:
    """Return the tiles of a reduction. Tiles are smaller for more accumulators (`states`) per element."""
    # Each of 128 threads has 4 loads of 16 bytes.
    full = max(512, 4 * 128 * 16 // itemsize)
    area = full // (1 if states == 1 else 2)
    if layout.inner:
        return _inner(layout, itemsize, area, longest=4 * (full if states < 3 else area))
    return _outer(layout, itemsize, area, states)


def _inner(layout: Layout, itemsize: int, area: int, longest: int) -> Tiles:
    """Return the tiles for contiguous rows. A program has one or more rows in registers, or loops over a long row."""
    results, elements = max(layout.results, 1), max(layout.elements, 1)
    padded = triton.next_power_of_2(elements)
    if padded * itemsize <= ROW_BYTES and padded <= longest:
        block_r = padded
        run = max(1, triton.next_power_of_2(layout.reduced[-1]))
        short = max(1, 32 // run) if layout.reduced_in[-1] and len(layout.reduced) > 1 else 1
        wanted = max(1, area // block_r, short)
        # Several short rows share a program, unless SMs would then idle.
        block_k = min(wanted, max(1, triton.next_power_of_2(results // PROGRAMS + 1) if block_r >= 128 else wanted))
        block_k = min(block_k, triton.next_power_of_2(results))
        return Tiles(block_k, block_r, 1, padded, _warps(block_k * block_r, area))
    block_r = min(2 * area, 4096, padded)
    return _split(1, block_r, results, elements, 8 if block_r * itemsize >= 8192 else 4)


def row_tiles(layout: Layout, itemsize: int) -> Tiles | None:
    """Return the tiles of `row_argminmax_kernel`, whose programs hold whole rows, or None for other layouts."""
    cut = reduction_tiles(layout, itemsize)
    if not layout.inner or cut.splits > 1 or not cut.block_r >= layout.elements > 0:
        return None
    return cut._replace(warps=8 if cut.block_k * cut.block_r * itemsize > 16384 else min(cut.warps, 4))


def column_tiles(layout: Layout, itemsize: int) -> Tiles | None:
    """Return the tiles of `column_argminmax_kernel`, whose programs loop down their columns, or None for other layouts.

    `reduce_kernel` compares (value, position) pairs in about 20 instructions per element, so it is as fast as memory
    only for wide elements. The columns must also fill every SM.
    """
    block_k, block_r = 64, 16
    if layout.inner or itemsize > 2:
        return None
    if layout.elements < COLUMN_GROUP * block_r or layout.results < block_k * PROGRAMS // 2:
        return None
    return Tiles(block_k, block_r, 1, layout.elements, 4)


def group_size(cut: Tiles, itemsize: int) -> int:
    """Return the elements of a row whose minimum or maximum is found together: `cut.block_r`, or a part of it. Larger
    groups exchange less between threads, and smaller groups reload less.
    """
    return cut.block_r if cut.block_k > 1 else min(cut.block_r, GROUP_PER_BYTE * itemsize)


def _outer(layout: Layout, itemsize: int, area: int, states: int) -> Tiles:
    """Return the tiles if neighbours belong to different results. A tile has some results and many rows."""
    results, elements = max(layout.results, 1), max(layout.elements, 1)
    span, small = min(128, 512 // itemsize), results * elements <= L2_ELEMENTS
    if small:  # more programs with more warps need no second launch, and each waits less
        span, area = min(128 // itemsize, 32), 2 * area
    elif states == 2 and itemsize <= 4:
        span, area = 64 * itemsize, 4096
    block_k = min(span, triton.next_power_of_2(results))
    programs = -(-results // block_k)
    alone = states == 1 and not small and programs >= PROGRAMS // 2
    if alone:  # results are not split, so fewer loads per thread allow more threads
        area = min(area, 2048)
    block_r = min(max(1, area // block_k), triton.next_power_of_2(elements))
    warps = 8 if alone and block_k * block_r >= 2048 else _warps(block_k * block_r, 8192 // itemsize)
    return _split(block_k, block_r, programs, elements, min(warps, 4) if states == 2 and not small else warps)


def _warps(count: int, area: int) -> int:
    """Return the warps for a tile of `count` elements: usually 4, 8 for a large tile, fewer for a small one."""
    return 8 if count > area else 4 if count >= 512 else 2 if count >= 256 else 1


def _split(block_k: int, block_r: int, programs: int, elements: int, warps: int) -> Tiles:
    """Return tiles that split the elements of a result among programs if the results alone do not fill the SMs."""
    chunks = -(-elements // block_r)
    enough = programs >= PROGRAMS // 2 or chunks <= 2 or (programs >= ENOUGH_PROGRAMS and chunks <= 16)
    splits = 1 if enough else min(max(PROGRAMS // programs, 1), chunks)
    span = -(-chunks // splits) * block_r
    return Tiles(block_k, block_r, -(-elements // span), span, warps)


def merge_tiles(results: int, splits: int) -> Tiles:
    """Return the tiles that merge `splits` partial results, stored as [splits, results]."""
    block_r = min(triton.next_power_of_2(splits), 1024)
    block_k = max(1, min(triton.next_power_of_2(results), 1024 // block_r, 64))
    return Tiles(block_k, block_r, 1, -(-splits // block_r) * block_r, 4 if block_k * block_r >= 256 else 1)


def scan_tiles(lines: int, length: int, inner: bool, tile: int | None = None) -> Tiles:
    """Return the tiles of a scan of `lines` × `length` elements. `tile` is another number than SCAN_TILE.

    Inner lines are split into tiles if they are too few to fill the SMs. Columns have one thread each, with `block_r`
    loads in flight at a time; their rows are split if the columns are too few.
    """
    if inner:
        block_r = tile or (SCAN_TILE if length <= SCAN_TILES * SCAN_TILE else 2 * SCAN_TILE)
        tiles = -(-length // block_r)
        if tiles > 1 and lines < PROGRAMS // 2:
            return Tiles(1, block_r, tiles, block_r, max(4, block_r // 512))
        block_r = min(triton.next_power_of_2(length), 2048)
        block_k = min(triton.next_power_of_2(lines), 2048 // block_r)
        return Tiles(block_k, block_r, 1, -(-length // block_r) * block_r, _warps(block_k * block_r, 1024))
    block_k = min(64, max(32, triton.next_power_of_2(lines)))
    block_r = min(16 if lines >= SCAN_COLUMNS // 2 else 32, triton.next_power_of_2(length))
    splits = min(max(SCAN_COLUMNS // lines, 1), MAX_SPLITS, -(-length // 64))
    span = -(-length // (splits * 32)) * 32
    return Tiles(block_k, block_r, -(-length // span), span, block_k // 32)


class LineTiles(NamedTuple):
    """Tile sizes of an op that reads and writes lines, such as softmax."""

    block_k: int  # lines per tile
    block_r: int  # elements per line and tile
    unroll: int  # tiles loaded at a time, if a line is longer than a program's registers
    one_pass: bool  # whether a tile holds whole lines
    inner: bool  # whether a line is contiguous
    warps: int  # warps per program


def line_tiles(lines: int, length: int, itemsize: int, inner: bool, arrays: int = 1) -> LineTiles:
    """Return the tiles for lines that are read completely before they are written; `arrays` counts the arrays read."""
    registers = 2 if itemsize == 8 else 1  # registers per element
    padded = triton.next_power_of_2(length)
    limit = 16384 // (arrays * registers)  # 32 elements for each thread of 16 warps
    if inner and padded <= limit:
        block_k = min(max(1, 2048 // (arrays * registers) // padded), triton.next_power_of_2(lines))
        count = block_k * padded * arrays * registers
        warps = 16 if count > 8192 else _warps(count, 4096)
        return LineTiles(block_k, padded, 1, True, True, warps)
    if inner:
        return LineTiles(1, 8192 // (4 * arrays * registers), 4, False, True, 8)
    block_k = min(max(8, 128 // itemsize), triton.next_power_of_2(lines))
    if block_k * padded <= limit // 2:
        count = block_k * padded * arrays * registers
        return LineTiles(block_k, padded, 1, True, False, _warps(count, 4096))
    block_r = max(1, 1024 // (block_k * arrays * registers))
    return LineTiles(block_k, block_r, 4, False, False, 8 if arrays * registers == 1 else 4)


class NormTiles(NamedTuple):
    """Tile sizes of a norm."""

    rows: int  # rows per tile
    columns: int  # columns per tile
    one_pass: bool  # whether a tile holds padded rows
    programs: int  # programs of the backward pass, each with its own partial sums
    warps: int  # warps per program
    stages: int = 1  # pipeline stages of the backward pass


def norm_tiles(rows: int, columns: int, itemsize: int, *, backward: bool = False) -> NormTiles:
    """Return the tiles of a norm of `rows` × `columns` elements."""
    registers = 2 if itemsize == 8 else 1
    padded = triton.next_power_of_2(max(columns, 1))
    limit = (8192 if backward else 16384) // registers
    one_pass = padded <= limit
    if one_pass and backward and padded * registers <= 4096:
        return _short_rows(rows, padded, itemsize)
    most = max(1, (1024 if backward else 2048) // registers // padded)
    is_few = rows <= 64 and padded * registers <= 1024 and not backward  # latency decides
    tile = min(most, triton.next_power_of_2(rows)) if one_pass and not is_few else 1
    span = padded if one_pass else 4096 // registers
    count = tile * span * registers * (2 if backward else 1)  # registers
    usual = 16 if count > 8192 else 8 if count > 4096 else 4 if count > 1024 else 2 if count > 512 else 1
    warps = max(count // 128, 1) if is_few else usual
    tiles = -(-rows // tile)
    # Aim at 16 warps per SM, and at least 4 tiles per program if there are many tiles.
    programs = min(132 * 16 // warps, max(132, -(-tiles // 4)), max(tiles, 1)) if one_pass else min(64, max(rows, 1))
    return NormTiles(tile, span, one_pass, programs, warps)


def _short_rows(rows: int, padded: int, itemsize: int) -> NormTiles:
    """Return the tiles of the backward pass for rows that fit in registers. Loops over many rows are pipelined."""
    registers = 2 if itemsize == 8 else 1
    few = rows * padded * registers <= L2_ELEMENTS
    area = 4096 if few and padded * registers > 1024 else 2048
    tile = max(1, min(area // registers // padded, triton.next_power_of_2(max(rows, 1))))
    count, tiles = tile * padded * registers, max(1, -(-rows // tile))
    if few:  # about 16 warps per SM
        warps = 8 if count > 2048 else 4 if count >= 1024 else 1
        return NormTiles(tile, padded, True, min(tiles, 2048 // max(warps, 4)), warps)
    warps = 8 if padded * registers > 2048 else 4 if count >= 1024 else 1
    return NormTiles(tile, padded, True, min(tiles, 396 if warps < 8 else 264), warps, 3)
