"""Inclusive and exclusive scans along lines.

Reference: `genesis/ops/reduce.py`: cumsum, prod_backward.

If the elements of a line are neighbours in memory, one program scans a line. If that leaves SMs idle, a line is divided
into tiles: a first launch stores the total of each tile, and a second launch scans each tile from the totals before it.
Other lines are columns, and one thread scans a column. If that leaves SMs idle, the rows are split: each split is
reduced, then scanned from the totals of the splits before it. All totals are merged in a fixed order.

Tiles: BK lines x BR elements, or BR elements of a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType
from genesis.kernels.elements import TRITON, collapse, converted, needs_int64, offsets, program_indices
from genesis.kernels.reduce.plan import Layout, is_inner, scan_tiles, zero_if_single
from genesis.kernels.reduce.reduction import ReduceSpec, load_type, partial_states, reduce_tile
from genesis.shapes import Shape, numel

TOTALS = tl.constexpr(1024)  # totals of tiles that are merged at a time


@tl.core.builtin
def scan_tile(x, AXIS, MERGE, REVERSE, _semantic=None, _generator=None):  # type: ignore[no-untyped-def]
    """Call `tl.associative_scan`, which does not unwrap a combine function that is a constexpr."""
    reverse = REVERSE.value
    return tl.associative_scan(x, AXIS, MERGE.value, reverse=reverse, _semantic=_semantic, _generator=_generator)


if is_interpreted():  # the interpreter's tl.associative_scan calls MERGE for every element

    def scan_tile(x: Any, AXIS: Any, MERGE: Any, REVERSE: Any) -> Any:
        """Scan whole tiles: merge each element with the one 1, 2, 4, … places before it (Hillis and Steele, 1986)."""
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
    """Scan whole lines.

    Args:
        kept: merged sizes of the lines' dimensions, their strides in x, and their strides in the result.
        along: the same for the elements of a line.
        LOOP: lines have more than BR elements.
    """
    i_k = program_indices(BK, INT64_K)  # [BK]
    m_k = i_k < nk  # [BK]
    chunks = tl.cdiv(nr, BR)
    p_k = (p_x + offsets(i_k, kept[0], kept[1]))[:, None]  # [BK, 1]
    q_k = (p_o + offsets(i_k, kept[0], kept[2]))[:, None]  # [BK, 1]
    carry = tl.full((BK,), IDENTITY, WORK)  # [BK]
    SHIFT: tl.constexpr = (1 if REVERSE else -1) if EXCLUSIVE else 0
    for step in range(0, chunks):
        chunk = chunks - 1 - step if REVERSE else step
        r = (chunk.to(tl.int64) if INT64_R else chunk) * BR + tl.arange(0, BR)  # [BR]
        source = r + SHIFT  # [BR]
        m = m_k[:, None] & ((source >= 0) & (source < nr))[None, :]  # [BK, BR]
        x = tl.load(p_k + offsets(source, along[0], along[1])[None, :], mask=m, other=0)  # [BK, BR]
        x = tl.where(m, converted(converted(x, READ), WORK), IDENTITY)  # [BK, BR]
        y = MERGE(carry[:, None], scan_tile(x, 1, MERGE, REVERSE))  # [BK, BR]
        o = q_k + offsets(r, along[0], along[2])[None, :]  # [BK, BR]
        tl.store(o, converted(y, p_o.dtype.element_ty), mask=m_k[:, None] & (r < nr)[None, :])
        if LOOP:
            carry = MERGE(carry, reduce_tile((x,), 1, MERGE)[0])  # [BK]


@triton.jit
def load_tile(p_line, tile, nr, along, IDENTITY: tl.constexpr, READ: tl.constexpr, WORK: tl.constexpr,
              REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr, INT64_R: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Load the elements of a tile of a line. Return them and their positions in the line, [BR] each."""
    r = (tile.to(tl.int64) if INT64_R else tile) * BR + tl.arange(0, BR)  # [BR]
    source = r + ((1 if REVERSE else -1) if EXCLUSIVE else 0)  # [BR]
    m = (source >= 0) & (source < nr)  # [BR]
    x = tl.load(p_line + offsets(source, along[0], along[1]), mask=m, other=0)  # [BR]
    return tl.where(m, converted(converted(x, READ), WORK), IDENTITY), r


@triton.jit
def tile_totals_kernel(p_totals, p_x, nr, tiles, kept, along, MERGE: tl.constexpr, IDENTITY: tl.constexpr,
                       READ: tl.constexpr, WORK: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr,
                       INT64_R: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Store the total of each tile of each line, in the order in which the tiles are scanned."""
    line, turn = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    tile = tiles - 1 - turn if REVERSE else turn
    p_line = p_x + offsets(line.to(tl.int64), kept[0], kept[1])
    x, _ = load_tile(p_line, tile, nr, along, IDENTITY, READ, WORK, REVERSE, EXCLUSIVE, INT64_R, BR)  # [BR]
    tl.store(p_totals + tl.program_id(0), reduce_tile((x,), 0, MERGE)[0])


@triton.jit
def scan_tiles_kernel(p_o, p_x, p_totals, nr, tiles, kept, along, MERGE: tl.constexpr, IDENTITY: tl.constexpr,
                      READ: tl.constexpr, WORK: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr,
                      INT64_R: tl.constexpr, BR: tl.constexpr):  # fmt: skip
    """Scan a tile of a line from the totals of the tiles before it."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # begins with the tiles read last, which may still be in L2
    line, turn = program // tiles, program % tiles
    tile = tiles - 1 - turn if REVERSE else turn
    p_line = p_x + offsets(line.to(tl.int64), kept[0], kept[1])
    q_line = p_o + offsets(line.to(tl.int64), kept[0], kept[2])
    x, r = load_tile(p_line, tile, nr, along, IDENTITY, READ, WORK, REVERSE, EXCLUSIVE, INT64_R, BR)  # [BR] each
    before = tl.full((), IDENTITY, WORK)
    for first in range(0, turn, TOTALS):
        t = first + tl.arange(0, TOTALS)  # [TOTALS]
        total = tl.load(p_totals + program - turn + t, mask=t < turn, other=0)  # [TOTALS]
        before = MERGE(before, reduce_tile((tl.where(t < turn, total, IDENTITY),), 0, MERGE)[0])
    y = MERGE(before, scan_tile(x, 0, MERGE, REVERSE))  # [BR]
    tl.store(q_line + offsets(r, along[0], along[2]), converted(y, p_o.dtype.element_ty), mask=r < nr)


@triton.jit
def scan_columns_kernel(p_o, p_x, p_totals, nk, nr, span, kept, along, MERGE: tl.constexpr, IDENTITY: tl.constexpr,
                        READ: tl.constexpr, WORK: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr,
                        INT64_K: tl.constexpr, INT64_R: tl.constexpr, BK: tl.constexpr,
                        BR: tl.constexpr):  # fmt: skip
    """Scan a split of `span` rows down nk columns, BR rows at a time. `p_totals` is [splits, nk] or None."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    i_k = program_indices(BK, INT64_K)  # [BK]
    m = i_k < nk  # [BK]
    p_k, q_k = p_x + offsets(i_k, kept[0], kept[1]), p_o + offsets(i_k, kept[0], kept[2])  # [BK] each
    carry = tl.full((BK,), IDENTITY, WORK)  # [BK]
    if p_totals is not None:
        # Merge the totals of the splits before this one.
        before = splits - 1 - split if REVERSE else split
        for first in range(0, before, BR):
            totals, at = (), first + tl.zeros_like(i_k)
            for j in tl.static_range(BR):
                s = splits - 1 - first - j if REVERSE else first + j
                m_t = m & (at + j < before)  # [BK]
                total = tl.load(p_totals + s.to(tl.int64) * nk + i_k, mask=m_t, other=0)  # [BK]
                totals += (tl.where(m_t, total, IDENTITY),)
            for j in tl.static_range(BR):
                carry = MERGE(carry, totals[j])  # [BK]
    begin = (split.to(tl.int64) if INT64_R else split) * span
    count = tl.minimum(nr - begin, span)
    for first in range(0, count, BR):
        rows, at = (), first + tl.zeros_like(i_k)
        for j in tl.static_range(BR):  # issue all loads before the first store
            r = begin + (count - 1 - first - j if REVERSE else first + j)
            rows += (tl.load(p_k + offsets(r, along[0], along[1]), mask=m & (at + j < count), other=0),)  # [BK]
        for j in tl.static_range(BR):
            r = begin + (count - 1 - first - j if REVERSE else first + j)
            x = MERGE(carry, converted(converted(rows[j], READ), WORK))  # [BK]
            y = converted(carry if EXCLUSIVE else x, p_o.dtype.element_ty)  # [BK]
            tl.store(q_k + offsets(r, along[0], along[2]), y, mask=m & (at + j < count))
            carry = x


def scan_into(
    spec: ReduceSpec, out: Array, x: Array, axes: Shape, work: DType, *, reverse: bool = False,
    exclusive: bool = False, tile: int | None = None,
) -> None:  # fmt: skip
    """Scan x along the dimensions `axes` in row-major order.

    Args:
        spec: reduction that merges the elements.
        work: type of the computation.
        reverse: scan from the last element.
        exclusive: leave out a result's own element.
        tile: elements of a long line per program, instead of `plan.SCAN_TILE`.
    """
    if out.size == 0:
        return
    # Merge the dimensions of the lines and of their elements.
    keep = [i for i in range(x.ndim) if i not in axes]
    keep.sort(key=lambda i: (x.strides[i] != 0, -x.strides[i]))
    kept, *steps = _merged(x, out, keep)
    kept_in, kept_out = zero_if_single(kept, *steps)
    along, along_in, along_out = _merged(x, out, axes)
    count, length = numel(kept), numel(along)
    inner = is_inner(kept, kept_in, along, along_in)
    constants: dict[str, Any] = {
        "MERGE": spec.merge, "IDENTITY": spec.identity, "READ": TRITON[load_type(x.dtype).name],
        "WORK": TRITON[work.name], "REVERSE": reverse, "EXCLUSIVE": exclusive,
        "INT64_R": needs_int64(along, along_in, along_out),
    }  # fmt: skip
    int64_k = needs_int64((*kept, *along), (*kept_in, *along_in), (*kept_out, *along_out))
    layouts = (kept, kept_in, kept_out), (along, along_in, along_out)
    # Launch the kernels for columns, for whole lines or for tiles of lines.
    cut = scan_tiles(count, length, inner, tile)
    programs = triton.cdiv(count, cut.block_k)
    if not inner:
        totals = None
        if cut.splits > 1:
            layout = Layout(kept, kept_in, (1,) * len(kept), along, along_in, inner)
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


def _merged(x: Array, out: Array, dims: Sequence[int]) -> tuple[Shape, ...]:
    """Return the merged sizes of these dimensions, their strides in x, and their strides in out."""
    return collapse(*(tuple([each[i] for i in dims]) for each in (x.shape, x.strides, out.strides)))
