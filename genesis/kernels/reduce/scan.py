"""Inclusive and exclusive scans along lines.

Reference: `genesis/ops/reduce.py`: cumsum, prod_backward.

Lines whose elements are neighbours in memory are scanned by one program each, or, where that leaves SMs idle, by one a
tile, which merges the totals that a first launch has made of all tiles before. Other lines are columns, which a thread
scans down; where that leaves SMs idle, a split of their rows is reduced and then scanned from the totals of the splits
before. All totals are merged in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType, int64
from genesis.kernels.elements import TRITON, collapse, converted, needs_int64, offsets, program_indices
from genesis.kernels.reduce.plan import Layout, is_inner, scan_tiles, zero_if_single
from genesis.kernels.reduce.reduction import ReduceSpec, load_type, partial_states, reduce_tile
from genesis.shapes import Shape, numel

TOTALS = tl.constexpr(1024)  # of tiles that are merged at a time


class Lines(NamedTuple):
    """Lines (`kept`) and the elements of each (`along`): merged dimensions, strides in input and result."""

    kept: Shape
    kept_in: Shape
    kept_out: Shape
    along: Shape
    along_in: Shape
    along_out: Shape


@tl.core.builtin
def scan_tile(x, AXIS, MERGE, REVERSE, _semantic=None, _generator=None):  # type: ignore[no-untyped-def]
    """`tl.associative_scan`, which does not unwrap a combine function that is a constexpr."""
    reverse = REVERSE.value
    return tl.associative_scan(x, AXIS, MERGE.value, reverse=reverse, _semantic=_semantic, _generator=_generator)


if is_interpreted():  # where tl.associative_scan would call MERGE for every element

    def scan_tile(x: Any, AXIS: Any, MERGE: Any, REVERSE: Any) -> Any:
        """The same on whole tiles: each element takes in the one 1, 2, 4, … before it (Hillis and Steele, 1986)."""
        axis, reverse = getattr(AXIS, "value", AXIS), getattr(REVERSE, "value", REVERSE)
        values = np.moveaxis(x.handle.data, axis, 0)
        values = values[::-1] if reverse else values
        make = type(x.handle)

        def tile(part: np.ndarray) -> Any:
            return tl.tensor(make(part, x.dtype), tl.block_type(x.dtype, list(part.shape)))

        distance = 1
        while distance < len(values):
            merged = MERGE(tile(np.roll(values, distance, 0)), tile(values)).handle.data
            values = np.concatenate([values[:distance], merged[distance:]])
            distance *= 2
        return tile(np.moveaxis(values[::-1] if reverse else values, 0, axis))


@triton.jit
def scan_kernel(p_o, p_x, nk, nr, kept, along, MERGE: tl.constexpr, IDENTITY: tl.constexpr, READ: tl.constexpr,
                WORK: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr, INT64_K: tl.constexpr,
                INT64_R: tl.constexpr, LOOP: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Scan whole lines; LOOP: of more than BR elements.

    `kept` and `along`: sizes, strides in x, and strides in the result, as in `Lines`.
    """
    i_k = program_indices(BK, INT64_K)  # [BK]
    m_k = i_k < nk
    chunks = tl.cdiv(nr, BR)
    p_k = (p_x + offsets(i_k, kept[0], kept[1]))[:, None]
    q_k = (p_o + offsets(i_k, kept[0], kept[2]))[:, None]
    carry = tl.full((BK,), IDENTITY, WORK)
    SHIFT: tl.constexpr = (1 if REVERSE else -1) if EXCLUSIVE else 0
    for step in range(0, chunks):
        chunk = chunks - 1 - step if REVERSE else step
        r = (chunk.to(tl.int64) if INT64_R else chunk) * BR + tl.arange(0, BR)  # [BR]
        source = r + SHIFT
        m = m_k[:, None] & ((source >= 0) & (source < nr))[None, :]
        x = tl.load(p_k + offsets(source, along[0], along[1])[None, :], mask=m, other=0)
        x = tl.where(m, converted(converted(x, READ), WORK), IDENTITY)  # [BK, BR]
        y = MERGE(carry[:, None], scan_tile(x, 1, MERGE, REVERSE))
        o = q_k + offsets(r, along[0], along[2])[None, :]
        tl.store(o, converted(y, p_o.dtype.element_ty), mask=m_k[:, None] & (r < nr)[None, :])
        if LOOP:
            carry = MERGE(carry, reduce_tile((x,), 1, MERGE)[0])


@triton.jit
def load_tile(p_line, tile, nr, along, IDENTITY: tl.constexpr, READ: tl.constexpr, WORK: tl.constexpr,
              REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr, INT64_R: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """The elements that a tile of a line scans, and where they go along it. [BR]"""
    r = (tile.to(tl.int64) if INT64_R else tile) * BR + tl.arange(0, BR)
    source = r + ((1 if REVERSE else -1) if EXCLUSIVE else 0)
    m = (source >= 0) & (source < nr)
    x = tl.load(p_line + offsets(source, along[0], along[1]), mask=m, other=0)
    return tl.where(m, converted(converted(x, READ), WORK), IDENTITY), r


@triton.jit
def tile_totals_kernel(p_totals, p_x, nr, tiles, kept, along, MERGE: tl.constexpr, IDENTITY: tl.constexpr,
                       READ: tl.constexpr, WORK: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr,
                       INT64_R: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """The total of each tile of each line, in the order in which they are scanned."""
    line, turn = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    tile = tiles - 1 - turn if REVERSE else turn
    p_line = p_x + offsets(line.to(tl.int64), kept[0], kept[1])
    x, _ = load_tile(p_line, tile, nr, along, IDENTITY, READ, WORK, REVERSE, EXCLUSIVE, INT64_R, BR)
    tl.store(p_totals + tl.program_id(0), reduce_tile((x,), 0, MERGE)[0])


@triton.jit
def scan_tiles_kernel(p_o, p_x, p_totals, nr, tiles, kept, along, MERGE: tl.constexpr, IDENTITY: tl.constexpr,
                      READ: tl.constexpr, WORK: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr,
                      INT64_R: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Scan a tile of a line from the totals of the tiles before."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last is the likeliest to be in L2 still
    line, turn = program // tiles, program % tiles
    tile = tiles - 1 - turn if REVERSE else turn
    p_line = p_x + offsets(line.to(tl.int64), kept[0], kept[1])
    q_line = p_o + offsets(line.to(tl.int64), kept[0], kept[2])
    x, r = load_tile(p_line, tile, nr, along, IDENTITY, READ, WORK, REVERSE, EXCLUSIVE, INT64_R, BR)
    before = tl.full((), IDENTITY, WORK)
    for first in range(0, turn, TOTALS):
        t = first + tl.arange(0, TOTALS)  # [TOTALS]
        total = tl.load(p_totals + program - turn + t, mask=t < turn, other=0)
        before = MERGE(before, reduce_tile((tl.where(t < turn, total, IDENTITY),), 0, MERGE)[0])
    y = MERGE(before, scan_tile(x, 0, MERGE, REVERSE))
    tl.store(q_line + offsets(r, along[0], along[2]), converted(y, p_o.dtype.element_ty), mask=r < nr)


@triton.jit
def scan_columns_kernel(p_o, p_x, p_totals, nk, nr, span, kept, along, MERGE: tl.constexpr, IDENTITY: tl.constexpr,
                        READ: tl.constexpr, WORK: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr,
                        INT64_K: tl.constexpr, INT64_R: tl.constexpr, BK: tl.constexpr,
                        BR: tl.constexpr):  # fmt: skip
    """Scan a split of `span` rows down nk columns, BR rows at a time; totals [splits, nk], if there are several."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    i_k = program_indices(BK, INT64_K)  # [BK]
    m = i_k < nk
    p_k, q_k = p_x + offsets(i_k, kept[0], kept[1]), p_o + offsets(i_k, kept[0], kept[2])
    carry = tl.full((BK,), IDENTITY, WORK)
    if p_totals is not None:
        before = splits - 1 - split if REVERSE else split
        for first in range(0, before, BR):
            totals, at = (), first + tl.zeros_like(i_k)
            for j in tl.static_range(BR):
                s = splits - 1 - first - j if REVERSE else first + j
                m_t = m & (at + j < before)
                total = tl.load(p_totals + s.to(tl.int64) * nk + i_k, mask=m_t, other=0)
                totals += (tl.where(m_t, total, IDENTITY),)
            for j in tl.static_range(BR):
                carry = MERGE(carry, totals[j])
    begin = (split.to(tl.int64) if INT64_R else split) * span
    count = tl.minimum(nr - begin, span)
    for first in range(0, count, BR):
        rows, at = (), first + tl.zeros_like(i_k)
        for j in tl.static_range(BR):  # all loads before the first store
            r = begin + (count - 1 - first - j if REVERSE else first + j)
            rows += (tl.load(p_k + offsets(r, along[0], along[1]), mask=m & (at + j < count), other=0),)
        for j in tl.static_range(BR):
            r = begin + (count - 1 - first - j if REVERSE else first + j)
            x = MERGE(carry, converted(converted(rows[j], READ), WORK))
            y = converted(carry if EXCLUSIVE else x, p_o.dtype.element_ty)
            tl.store(q_k + offsets(r, along[0], along[2]), y, mask=m & (at + j < count))
            carry = x


def scan_into(
    spec: ReduceSpec, out: Array, x: Array, axes: Shape, work: DType, *, reverse: bool = False, exclusive: bool = False
) -> None:
    """The scan of `spec` along the dimensions `axes` in row-major order, in the type `work`; from the last element with
    `reverse`; each result leaves out its own element with `exclusive`.
    """
    if out.size == 0:
        return
    keep = [i for i in range(x.ndim) if i not in axes]
    keep.sort(key=lambda i: (x.strides[i] != 0, -x.strides[i]))
    kept, kept_in, kept_out = _merged(x, out, keep)
    lines = Lines(kept, *zero_if_single(kept, kept_in, kept_out), *_merged(x, out, list(axes)))
    count, length = numel(lines.kept), numel(lines.along)
    inner = is_inner(lines.kept, lines.kept_in, lines.along, lines.along_in)
    sizes = (*lines.kept, *lines.along)
    constants: dict[str, Any] = {
        "MERGE": spec.merge, "IDENTITY": spec.identity, "READ": TRITON[load_type(x.dtype).name],
        "WORK": TRITON[work.name], "REVERSE": reverse, "EXCLUSIVE": exclusive,
        "INT64_R": needs_int64(lines.along, lines.along_in, lines.along_out),
    }  # fmt: skip
    int64_k = needs_int64(sizes, (*lines.kept_in, *lines.along_in), (*lines.kept_out, *lines.along_out))
    layouts = (lines.kept, lines.kept_in, lines.kept_out), (lines.along, lines.along_in, lines.along_out)
    cut = scan_tiles(count, length, inner)
    programs = triton.cdiv(count, cut.block_k)
    if not inner:
        totals = None
        if cut.splits > 1:
            layout = Layout(lines.kept, lines.kept_in, (1,) * len(lines.kept), lines.along, lines.along_in, inner)
            totals, *_ = partial_states(spec, x, layout, work, cut._replace(block_r=32, warps=4))
        launch(
            scan_columns_kernel, (programs, cut.splits), out, x, totals, count, length, cut.span, *layouts,
            INT64_K=int64_k, BK=cut.block_k, BR=cut.block_r, num_warps=cut.warps, **constants,
        )  # fmt: skip
    elif cut.splits == 1:
        launch(
            scan_kernel, programs, out, x, count, length, *layouts, INT64_K=int64_k, LOOP=length > cut.block_r,
            BK=cut.block_k, BR=cut.block_r, num_warps=cut.warps, **constants,
        )  # fmt: skip
    else:
        totals = empty((count * cut.splits,), work, x.device)
        constants["BR"] = cut.block_r
        for kernel, arrays in ((tile_totals_kernel, (totals, x)), (scan_tiles_kernel, (out, x, totals))):
            launch(
                kernel, count * cut.splits, *arrays, length, cut.splits, *layouts, num_warps=cut.warps, maxnreg=64,
                **constants,
            )  # fmt: skip


def _merged(x: Array, out: Array, dims: list[int]) -> tuple[Shape, Shape, Shape]:
    sizes, along_in, along_out = collapse(
        tuple(x.shape[i] for i in dims), tuple(x.strides[i] for i in dims), tuple(out.strides[i] for i in dims)
    )
    return sizes, along_in, along_out


# --- Exclusive prefix sums of counts ----------------------------------------------------------------------------------


TILE = 1024  # counts per program and step
ONE_PROGRAM = 2 * TILE  # counts that one program scans alone


@triton.jit
def exclusive_scan_kernel(p_o, p_total, p_x, n, BLOCK: tl.constexpr):
    """out[i] = x[0] + … + x[i - 1] and the sum of all, by one program."""
    carry = tl.full((), 0, tl.int64)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)  # [BLOCK]
        m = i < n
        x = tl.load(p_x + i, mask=m, other=0).to(tl.int64)
        tl.store(p_o + i, carry + tl.cumsum(x, 0) - x, mask=m)
        carry += tl.sum(x, 0)
    tl.store(p_total, carry)


@triton.jit
def tile_sums_kernel(p_o, p_x, n, BLOCK: tl.constexpr):
    """out[t] = the sum of tile t."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + i, mask=i < n, other=0).to(tl.int64)
    tl.store(p_o + tl.program_id(0), tl.sum(x, 0))


@triton.jit
def tile_scan_kernel(p_o, p_base, p_x, n, BLOCK: tl.constexpr):
    """Prefix sums inside each tile, from its base."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    x = tl.load(p_x + i, mask=m, other=0).to(tl.int64)
    tl.store(p_o + i, tl.load(p_base + tl.program_id(0)) + tl.cumsum(x, 0) - x, mask=m)


def exclusive_sums(counts: Array, total: Array | None = None, out: Array | None = None) -> Array:
    """out[i] = counts[0] + … + counts[i - 1] in int64, n < 2^31; `total` gets the sum of all."""
    n, device = counts.size, counts.device
    total = empty((1,), int64, device) if total is None else total
    out = empty((n,), int64, device) if out is None else out
    if n <= ONE_PROGRAM:
        block = min(max(triton.next_power_of_2(n), 128), TILE)
        launch(exclusive_scan_kernel, 1, out, total, counts, n, BLOCK=block, num_warps=4 if n <= 1024 else 16)
        return out
    tiles = triton.cdiv(n, TILE)
    sums = empty((tiles,), int64, device)
    launch(tile_sums_kernel, tiles, sums, counts, n, BLOCK=TILE, num_warps=8)
    bases = exclusive_sums(sums, total)
    launch(tile_scan_kernel, tiles, out, bases, counts, n, BLOCK=TILE, num_warps=8)
    return out
