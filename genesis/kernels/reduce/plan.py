"""How a reduction is laid out on the GPU: which dimensions are walked together, tile sizes, and how far it is split.

Pure arithmetic on shapes and strides. Equal layouts always give equal plans, so results do not change from run to run.
Names: a reduction keeps K results, each made of R elements; a tile holds `keep` results × `fold` elements.
"""

from __future__ import annotations

from typing import NamedTuple

import triton

from genesis.kernels.strides import collapse
from genesis.shapes import Shape, contiguous_strides, numel

__all__ = [
    "Layout",
    "LineTiles",
    "NormTiles",
    "Tiles",
    "arrange",
    "group_of",
    "is_inner",
    "line_tiles",
    "merge_tiles",
    "norm_tiles",
    "scan_tiles",
    "still",
    "tiles",
    "whole_columns",
    "whole_rows",
]

PROGRAMS = 1056  # that run at once: 8 of 4 warps on each of 132 SMs
FEW = 96  # programs that keep the memory busy enough where a second launch would cost more than idle SMs
ROW = 32768  # bytes of a row up to which one program holds it whole
COLUMN_GROUP = 4  # elements that a lane takes at a time on its way down a column, where positions are looked for
GROUP = 256  # elements of a row's group for each byte of an element
SMALL = 1 << 22  # elements; an input of this size stays in the L2, where short lines cost little


class Layout(NamedTuple):
    """The dimensions of a reduction, merged, in the order of memory.

    Attributes:
        kept, kept_in, kept_out: sizes of the kept dimensions, and their strides in the input and in the result.
        reduced, steps: sizes of the reduced dimensions and their strides.
        inner: whether neighbours in memory are reduced with each other (else they belong to different results).
    """

    kept: Shape
    kept_in: Shape
    kept_out: Shape
    reduced: Shape
    steps: Shape
    inner: bool

    @property
    def results(self) -> int:
        return numel(self.kept)

    @property
    def elements(self) -> int:
        """How many elements each result is made of."""
        return numel(self.reduced)


class Tiles(NamedTuple):
    """How the work is cut.

    Attributes:
        keep, fold: a tile's extents, powers of 2.
        splits: programs that share the elements of a result.
        span: elements that each of them takes, a multiple of `fold`.
        warps: warps a program.
    """

    keep: int
    fold: int
    splits: int
    span: int
    warps: int


def arrange(shape: Shape, strides: Shape, axes: Shape, *, ordered: bool = False) -> Layout:
    """The layout of a reduction of `axes` whose result is contiguous.

    Args:
        axes: sorted dimension indices.
        ordered: keep the reduced elements in row-major order (where their positions matter).
    """

    def memory_order(dims: list[int]) -> list[int]:
        return sorted(dims, key=lambda i: (strides[i] != 0, -strides[i]))  # repeated dimensions outermost

    keep = [i for i in range(len(shape)) if i not in axes]
    steps = dict(zip(keep, contiguous_strides(tuple(shape[i] for i in keep)), strict=True))
    keep = memory_order(keep)
    fold = list(axes) if ordered else memory_order(list(axes))
    kept, kept_in, kept_out = collapse(
        tuple(shape[i] for i in keep), tuple(strides[i] for i in keep), tuple(steps[i] for i in keep)
    )
    kept_in, kept_out = still(kept, kept_in, kept_out)
    reduced, inner_steps = collapse(tuple(shape[i] for i in fold), tuple(strides[i] for i in fold))
    return Layout(kept, kept_in, kept_out, reduced, inner_steps, is_inner(kept, kept_in, reduced, inner_steps))


def still(sizes: Shape, *strides: Shape) -> tuple[Shape, ...]:
    """The strides, 0 where there is one element: then the compiler knows that its offset is 0, and aligned."""
    return strides if numel(sizes) != 1 else tuple((0,) * len(sizes) for _ in strides)


def is_inner(kept: Shape, kept_in: Shape, reduced: Shape, steps: Shape) -> bool:
    """Whether the element next in memory is of the same result."""

    def nearest(sizes: Shape, strides: Shape) -> int:
        return min((st for s, st in zip(sizes, strides, strict=True) if s > 1 and st), default=1 << 62)

    if numel(kept) == 1:
        return True
    return nearest(reduced, steps) < nearest(kept, kept_in)


def tiles(layout: Layout, itemsize: int, states: int = 1) -> Tiles:
    """How to cut a reduction.

    Args:
        itemsize: bytes of an input element.
        states: numbers that are carried for each result; the more, the fewer fit into registers.
    """
    # 4 loads of 16 bytes for each of 128 threads
    full = max(512, 4 * 128 * 16 // itemsize)
    area = full // (1 if states == 1 else 2)
    if layout.inner:
        return _inner(layout, itemsize, area, longest=4 * (full if states < 3 else area))
    return _outer(layout, itemsize, area, states)


def _inner(layout: Layout, itemsize: int, area: int, longest: int) -> Tiles:
    """Rows that lie together: one program holds one or several whole, longer ones are walked."""
    results, elements = max(layout.results, 1), max(layout.elements, 1)
    whole = triton.next_power_of_2(elements)
    if whole * itemsize <= ROW and whole <= longest:
        fold = whole
        run = max(1, triton.next_power_of_2(layout.reduced[-1]))
        short = max(1, 32 // run) if layout.steps[-1] and len(layout.reduced) > 1 else 1
        wanted = max(1, area // fold, short)
        # short rows share a program, but not so many that SMs stay idle
        keep = min(wanted, max(1, triton.next_power_of_2(results // PROGRAMS + 1) if fold >= 128 else wanted))
        keep = min(keep, triton.next_power_of_2(results))
        return Tiles(keep, fold, 1, whole, _warps(keep * fold, area))
    fold = min(2 * area, 4096, whole)
    return _split(1, fold, results, elements, 8 if fold * itemsize >= 8192 else 4)


def whole_rows(layout: Layout, itemsize: int) -> Tiles | None:
    """How to cut a search for positions in rows that one program holds whole; None for other layouts."""
    cut = tiles(layout, itemsize)
    if not layout.inner or cut.splits > 1 or not cut.fold >= layout.elements > 0:
        return None
    return cut._replace(warps=8 if cut.keep * cut.fold * itemsize > 16384 else min(cut.warps, 4))


def whole_columns(layout: Layout, itemsize: int) -> Tiles | None:
    """How to cut a search for positions in columns that one program walks down; None for other layouts.

    Comparing pairs of value and position takes about 20 instructions an element, which keeps up with memory only where
    elements are wide; and there must be columns enough for every SM.
    """
    keep, fold = 64, 16
    if layout.inner or itemsize > 2 or layout.elements < COLUMN_GROUP * fold or layout.results < keep * PROGRAMS // 2:
        return None
    return Tiles(keep, fold, 1, layout.elements, 4)


def group_of(cut: Tiles, itemsize: int) -> int:
    """How many neighbours of a row share an extreme, where positions are looked for: `cut.fold`, or a part of it.

    Larger groups cost less exchange between threads, smaller ones less reading again.
    """
    return cut.fold if cut.keep > 1 else min(cut.fold, GROUP * itemsize)


def _outer(layout: Layout, itemsize: int, area: int, states: int) -> Tiles:
    """Neighbours belong to different results: a tile takes a stretch of them, and rows enough to fill the loads."""
    results, elements = max(layout.results, 1), max(layout.elements, 1)
    stretch, small = min(128, 512 // itemsize), results * elements <= SMALL
    if small:  # more programs of more warps: a launch less, and less waiting in each
        stretch, area = min(128 // itemsize, 32), 2 * area
    elif states == 2 and itemsize <= 4:
        stretch, area = 64 * itemsize, 4096
    keep = min(stretch, triton.next_power_of_2(results))
    programs = -(-results // keep)
    alone = states == 1 and not small and programs >= PROGRAMS // 2
    if alone:  # nothing is split: fewer loads in each thread, but more threads
        area = min(area, 2048)
    fold = min(max(1, area // keep), triton.next_power_of_2(elements))
    warps = 8 if alone and keep * fold >= 2048 else _warps(keep * fold, 8192 // itemsize)
    return _split(keep, fold, programs, elements, min(warps, 4) if states == 2 and not small else warps)


def _warps(count: int, area: int) -> int:
    """Warps for a tile of `count` elements: 4 for a usual one, 8 for a large one, fewer where threads would idle."""
    return 8 if count > area else 4 if count >= 512 else 2 if count >= 256 else 1


def _split(keep: int, fold: int, programs: int, elements: int, warps: int) -> Tiles:
    """Share the elements of a result among programs where results alone do not fill the SMs."""
    chunks = -(-elements // fold)
    enough = programs >= PROGRAMS // 2 or chunks <= 2 or (programs >= FEW and chunks <= 16)
    splits = 1 if enough else min(max(PROGRAMS // programs, 1), chunks)
    span = -(-chunks // splits) * fold
    return Tiles(keep, fold, -(-elements // span), span, warps)


def merge_tiles(results: int, splits: int) -> Tiles:
    """How to merge `splits` partial results, which lie as [splits, results]."""
    fold = min(triton.next_power_of_2(splits), 1024)
    keep = max(1, min(triton.next_power_of_2(results), 1024 // fold, 64))
    return Tiles(keep, fold, 1, -(-splits // fold) * fold, 4 if keep * fold >= 256 else 1)


def scan_tiles(lines: int, length: int, inner: bool, *, whole: bool = False) -> Tiles:
    """How to cut a scan of `lines` × `length` elements; `whole` lines stay with one program."""
    area = 2048
    fold = min(triton.next_power_of_2(length), area if inner else 64)
    keep = min(triton.next_power_of_2(lines), max(1, area // fold), 4096 if inner else 64)
    programs, chunks = -(-lines // keep), -(-length // fold)
    warps = _warps(keep * fold, area)
    if whole or programs >= FEW or chunks <= 4:
        return Tiles(keep, fold, 1, chunks * fold, warps)
    span = -(-chunks // min(max(PROGRAMS // programs, 1), chunks)) * fold
    return Tiles(keep, fold, -(-length // span), span, warps)


class LineTiles(NamedTuple):
    """How lines that are read and written (softmax) are cut.

    Attributes:
        keep, fold: lines and elements of a tile.
        unroll: tiles that each lane takes at a time, where lines are longer than a program's registers.
        once: whether a tile holds whole lines.
        inner: whether a line's elements lie together.
        warps: warps a program.
    """

    keep: int
    fold: int
    unroll: int
    once: bool
    inner: bool
    warps: int


def line_tiles(lines: int, length: int, itemsize: int, inner: bool, arrays: int = 1) -> LineTiles:
    """How to cut `lines` × `length` elements of which every line is read whole before any of it is written.

    Args:
        arrays: inputs that are held at a time.
    """
    wide = 2 if itemsize == 8 else 1  # registers an element
    whole = triton.next_power_of_2(length)
    limit = 16384 // (arrays * wide)  # 32 elements for each thread of 16 warps
    if inner and whole <= limit:
        keep = min(max(1, 2048 // (arrays * wide) // whole), triton.next_power_of_2(lines))
        count = keep * whole * arrays * wide
        return LineTiles(keep, whole, 1, True, True, 16 if count > 8192 else 8 if count > 4096 else _warps(count, 4096))
    if inner:
        return LineTiles(1, 8192 // (4 * arrays * wide), 4, False, True, 8)
    keep = min(max(8, 128 // itemsize), triton.next_power_of_2(lines))
    if keep * whole <= limit // 2:
        count = keep * whole * arrays * wide
        return LineTiles(keep, whole, 1, True, False, 8 if count > 4096 else _warps(count, 4096))
    fold = max(1, 1024 // (keep * arrays * wide))
    return LineTiles(keep, fold, 4, False, False, 8 if arrays * wide == 1 else 4)


class NormTiles(NamedTuple):
    """How the rows of a norm are cut.

    Attributes:
        rows, columns: a tile's extents.
        once: whether a tile holds whole rows.
        programs: how many programs share the rows in the backward pass; as many partial sums are kept.
        warps: warps a program.
        stages: tiles of the backward pass that are fetched ahead.
    """

    rows: int
    columns: int
    once: bool
    programs: int
    warps: int
    stages: int = 1


def norm_tiles(rows: int, columns: int, itemsize: int, *, backward: bool = False) -> NormTiles:
    """How to cut a norm of `rows` × `columns` elements."""
    wide = 2 if itemsize == 8 else 1
    whole = triton.next_power_of_2(max(columns, 1))
    limit = (8192 if backward else 16384) // wide
    once = whole <= limit
    if once and backward and whole * wide <= 4096:
        return _short_rows(rows, whole, itemsize)
    tile = 1 if not once else max(1, min((1024 if backward else 2048) // wide // whole, triton.next_power_of_2(rows)))
    span = whole if once else 4096 // wide
    count = tile * span * wide * (2 if backward else 1)  # registers
    warps = 16 if count > 8192 else 8 if count > 4096 else 4 if count > 1024 else 2 if count > 512 else 1
    tiles = -(-rows // tile)
    # about 16 warps an SM, and at least 4 tiles a program where there are many
    programs = min(132 * 16 // warps, max(132, -(-tiles // 4)), max(tiles, 1)) if once else min(64, max(rows, 1))
    return NormTiles(tile, span, once, programs, warps)


def _short_rows(rows: int, whole: int, itemsize: int) -> NormTiles:
    """The backward pass of rows that a program holds; of many, the next tiles are fetched while one is worked on."""
    wide = 2 if itemsize == 8 else 1
    few = rows * whole * wide <= SMALL
    area = 4096 if few and whole * wide > 1024 else 2048
    tile = max(1, min(area // wide // whole, triton.next_power_of_2(max(rows, 1))))
    count, tiles = tile * whole * wide, max(1, -(-rows // tile))
    if few:  # about 16 warps an SM
        warps = 8 if count > 2048 else 4 if count >= 1024 else 1
        return NormTiles(tile, whole, True, min(tiles, 2048 // max(warps, 4)), warps)
    warps = 8 if whole * wide > 2048 else 4 if count >= 1024 else 1
    return NormTiles(tile, whole, True, min(tiles, 396 if warps < 8 else 264), warps, 3)
