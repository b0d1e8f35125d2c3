"""Stable sorts of lines by integer keys: a rank sort of few short lines of keys, else a radix sort.

Reference: `np.argsort(keys, axis=-1, kind="stable")`; `genesis/ops/sort.py` and randperm use it.

Both are deterministic. A rank counts smaller keys and equal ones before it. The radix sort orders by 8 bits at a time,
lowest first. Keys are made of values in every pass, so that values and positions are all that moves. A line of up to
8,192 elements is sorted inside one program; of longer ones all passes' digits are counted first, and each pass reads
and writes once. Where few elements are wanted, tiles of a long line are sorted, and then what they keep.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from genesis.array import Array, empty
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import clear, launch
from genesis.dtypes import DType, int32, int64
from genesis.kernels.elements import converted, offsets
from genesis.kernels.index.radix_tile import DIGITS, WARPS, count_digits, load_states, order_in_tile, sort_by_digit
from genesis.kernels.index.segment import index_type
from genesis.shapes import Shape

RANK_SORT_MAX = 16384  # the longest line that is sorted by rank
COMPARISONS = 1 << 28  # and the most pairs of keys for that
LINE = 8192  # the longest line, of up to 4 bytes an element, that one program sorts
MERGED = 8  # tiles at least this many times as long as what is kept of them
TILE = 4096  # elements of a program in a pass over long lines
COUNTED = 4096  # and where digits are counted
MAXNREG = 128  # so that two programs fit on an SM
LOOK_BACK = tl.constexpr(8)  # states that are loaded at a time


@triton.jit
def saturating_sub(x, y):
    """min(max(x - y, 0), 1): for integers in float32 whether x > y, in one instruction at full FP32 rate."""
    x, y = tl.broadcast(x, y)
    return tl.inline_asm_elementwise(
        "sub.sat.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
    )


if is_interpreted():  # which has no inline assembly

    def saturating_sub(x: Any, y: Any) -> Any:
        values = np.clip(x.handle.data - y.handle.data, 0, 1)
        return tl.tensor(type(x.handle)(values, tl.float32), tl.block_type(tl.float32, list(values.shape)))


@triton.jit
def are_less(x, y, FLOATS: tl.constexpr):
    """1 where x < y, else 0."""
    if FLOATS:
        return saturating_sub(y, x)
    else:
        return (x < y).to(tl.int32)


@triton.jit
def rank_sort_kernel(
    p_sorted, p_order, p_keys, length, blocks, FLOATS: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr
):
    """Store keys and their positions at their ranks. FLOATS: keys are below 2^24 and compared as float32."""
    line = (tl.program_id(0) // blocks).to(tl.int64) * length
    start = (tl.program_id(0) % blocks) * BI
    i = start + tl.arange(0, BI)  # [BI]
    key = tl.load(p_keys + line + i, mask=i < length, other=0)
    own_key = (key.to(tl.float32) if FLOATS else key)[:, None]
    o_j = tl.arange(0, BJ)  # [BJ]
    before = tl.zeros([BI, BJ], tl.float32 if FLOATS else tl.int32)  # [BI, BJ]: keys that come first in the result
    below = start // BJ * BJ
    above = tl.minimum(tl.cdiv(start + BI, BJ) * BJ, length)
    full = length // BJ * BJ
    for j in range(0, below, BJ):  # full tiles of earlier positions: equal keys count
        other = tl.load(p_keys + line + j + o_j)
        other = (other.to(tl.float32) if FLOATS else other)[None, :]
        before += are_less(other, own_key + 1, FLOATS) if FLOATS else (other <= own_key).to(tl.int32)
    for j in range(below, above, BJ):
        at = j + o_j
        other = tl.load(p_keys + line + at, mask=at < length, other=0)[None, :]
        sooner = (other < key[:, None]) | ((other == key[:, None]) & (at[None, :] < i[:, None]))
        before += (sooner & (at < length)[None, :]).to(before.dtype)
    for j in range(above, full, BJ):
        other = tl.load(p_keys + line + j + o_j)
        before += are_less((other.to(tl.float32) if FLOATS else other)[None, :], own_key, FLOATS)
    for j in range(tl.maximum(above, full), length, BJ):  # the last, partial tile
        at = j + o_j
        other = tl.load(p_keys + line + at, mask=at < length, other=0)[None, :]
        before += ((other < key[:, None]) & (at < length)[None, :]).to(before.dtype)
    rank = tl.sum(before, 1).to(tl.int32)  # [BI]
    if p_sorted is not None:
        tl.store(p_sorted + line + rank, key, mask=i < length)
    tl.store(p_order + line + rank, i, mask=i < length)


# --- Keys -------------------------------------------------------------------------------------------------------------


@constexpr_function
def infinity_of(kind: tl.dtype) -> int:
    """The bits of infinity in a type of floats."""
    return ((1 << (kind.primitive_bitwidth - 1)) - 1) >> kind.fp_mantissa_width << kind.fp_mantissa_width


@triton.jit
def bits_of(x):
    """The bits of x as int64 for 8-byte types, else int32; sign-extended."""
    if x.dtype.primitive_bitwidth == 64:
        return x.to(tl.int64, bitcast=True)
    elif x.dtype.is_floating():
        return x.to(tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True).to(tl.int32)
    else:
        return x.to(tl.int32)


@triton.jit
def value_of(bits, TYPE: tl.constexpr):
    """The value with such bits."""
    if TYPE.primitive_bitwidth == 64:
        return bits.to(TYPE, bitcast=True)
    elif TYPE.is_floating():
        return bits.to(tl.int16 if TYPE.primitive_bitwidth == 16 else tl.int32).to(TYPE, bitcast=True)
    else:
        return converted(bits, TYPE)


@triton.jit
def ordered_keys(bits, TYPE: tl.constexpr, DESCENDING: tl.constexpr):
    """Signed integers in the order of the values with such bits: NaN last, both zeros equal."""
    key = bits
    if TYPE.is_floating():
        MOST: tl.constexpr = (1 << (TYPE.primitive_bitwidth - 1)) - 1
        size = bits & MOST
        key = bits ^ ((bits >> (bits.dtype.primitive_bitwidth - 1)) & MOST)
        key = tl.where(size == 0, 0, tl.where(size > infinity_of(TYPE), MOST, key))
    elif tl.uint8 == TYPE:
        key = bits - 128
    return ~key if DESCENDING else key


@triton.jit
def digits_of(bits, shift, TYPE: tl.constexpr, DESCENDING: tl.constexpr, FLIP: tl.constexpr):
    """8 bits of each key from `shift` on; FLIP is the sign bit of signed keys."""
    return (((ordered_keys(bits, TYPE, DESCENDING) ^ FLIP) >> shift) & 255).to(tl.int32)


# --- Radix sort -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["passes"])
def sort_lines_kernel(p_values, p_order, p_x, p_old, length, parts, count, total, step, sizes, strides, inner, passes,
                      DESCENDING: tl.constexpr, FLIP: tl.constexpr, W: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Sort each of the parts of T elements of a line, and store the first `count` of each, of `total` of a line.

    `p_old` [lines, length]: what the order is of, if that is not the position.
    """
    line, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    start = part.to(tl.int64) * T
    remaining = tl.minimum(length - start, T).to(tl.int32)
    o = order_in_tile(T, W)  # [T]
    TYPE: tl.constexpr = p_x.dtype.element_ty
    PACKED: tl.constexpr = TYPE.primitive_bitwidth <= 16
    p_line = p_x + offsets(line, sizes, strides) + start * step
    bits = bits_of(tl.load(p_line + o.to(tl.int64) * step, mask=o < remaining, other=0))
    position = o
    if PACKED:  # position and value in one word
        bits = (o << 16) | (bits & 0xFFFF)
    for digit in range(passes):  # which is no constant: the assembly must not be there twice
        value = bits.to(tl.int16).to(tl.int32) if PACKED else bits
        by = tl.where(o < remaining, digits_of(value, 8 * digit, TYPE, DESCENDING, FLIP), 255)
        if PACKED:
            bits, _ = sort_by_digit(by, (bits,), W)
        else:
            bits, position, _ = sort_by_digit(by, (bits, position), W)
    if PACKED:
        position = bits >> 16
        bits = bits.to(tl.int16).to(tl.int32)
    rank = part.to(tl.int64) * count + o
    m = o < tl.minimum(count, remaining)
    out = (line // inner * total + rank) * inner + line % inner
    if p_values is not None:
        tl.store(p_values + out, value_of(bits, TYPE), mask=m)
    if p_old is not None:
        order = tl.load(p_old + line * length + start + position, mask=m)
    else:
        order = start + position
    tl.store(p_order + out, order.to(p_order.dtype.element_ty), mask=m)


@triton.jit
def radix_count_kernel(p_counts, p_x, length, tiles, step, sizes, strides, DESCENDING: tl.constexpr,
                       FLIP: tl.constexpr, PASSES: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """counts[line, pass, digit] of keys, which must be 0 before."""
    line, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    i = tile.to(tl.int64) * T + tl.arange(0, T)
    x = tl.load(p_x + offsets(line, sizes, strides) + i * step, mask=i < length, other=0)
    key = ordered_keys(bits_of(x), p_x.dtype.element_ty, DESCENDING) ^ FLIP
    count_digits(p_counts + line * PASSES * DIGITS, key, i < length, PASSES, WARPS)


@triton.jit(do_not_specialize=["digit"])
def radix_pass_kernel(p_values, p_order, p_x, p_old, p_tickets, p_counts, p_states, digit, length, tiles, count, step,
                      sizes, strides, inner, DESCENDING: tl.constexpr, FLIP: tl.constexpr, PASSES: tl.constexpr,
                      T: tl.constexpr):  # fmt: skip
    """Move values and their order to where a digit says, as far as that is among the first `count` of a line.

    How many elements of earlier tiles have a digit is looked up in the tiles' states (decoupled look-back, Merrill and
    Garland, 2016): first a tile's own count with ALONE, then, negative, with the counts of all tiles before. Tiles are
    numbered as programs start, so all earlier ones run or are done. `p_old` is None in the first pass.
    """
    ticket = tl.atomic_add(p_tickets + digit, 1, sem="relaxed")
    line, tile = (ticket // tiles).to(tl.int64), ticket % tiles
    start = tile.to(tl.int64) * T
    remaining = tl.minimum(length - start, T).to(tl.int32)
    shift = 8 * digit
    o, d = order_in_tile(T, WARPS), tl.arange(0, DIGITS)  # [T], [256]
    TYPE: tl.constexpr = p_x.dtype.element_ty
    p_line = p_x + offsets(line, sizes, strides) + start * step
    bits = bits_of(tl.load(p_line + o.to(tl.int64) * step, mask=o < remaining, other=0))
    if p_old is None:
        order = (start + o).to(tl.int64 if p_states.dtype.element_ty == tl.int64 else tl.int32)
    else:
        order = tl.load(p_old + line * length + start + o, mask=o < remaining, other=0)
    by = tl.where(o < remaining, digits_of(bits, shift, TYPE, DESCENDING, FLIP), 255)
    bits, order, found = sort_by_digit(by, (bits, order), WARPS)
    found = tl.sum(tl.reshape(found, (T // DIGITS, DIGITS)), 0)  # [256]
    first = tl.cumsum(found, 0) - found
    STATE: tl.constexpr = p_states.dtype.element_ty
    ALONE: tl.constexpr = 1 << (STATE.primitive_bitwidth - 2)
    LEAST: tl.constexpr = -2 * ALONE
    found = (found - tl.where(d == 255, T - remaining, 0)).to(STATE)
    p_own = p_states + ticket.to(tl.int64) * DIGITS + d
    tl.atomic_xchg(p_own, found + ALONE, sem="relaxed")
    before, is_done = tl.zeros((DIGITS,), STATE), tl.zeros((DIGITS,), tl.int32)
    back, answer = tile * 0 + 1, tile * 0 + 1
    while answer != 0:
        total, ends, is_missing = before, is_done, tl.zeros((DIGITS,), tl.int32)
        for k in tl.static_range(LOOK_BACK):
            state = load_states(p_own - (back + k).to(tl.int64) * DIGITS, d * 0 + back + k <= tile)
            is_missing = is_missing | ((state == 0) & (ends == 0)).to(tl.int32)
            total += tl.where(ends != 0, 0, state & (ALONE - 1))
            ends = ends | (state < 0).to(tl.int32)
        answer = tl.max(2 * is_missing + 1 - ends, 0)  # 2 and more: some state is not there yet; 1: look further back
        if answer < 2:
            before, is_done = total, ends
            back += LOOK_BACK
    tl.atomic_xchg(p_own, before + found + LEAST, sem="relaxed")
    whole = tl.load(p_counts + (line * PASSES + digit) * DIGITS + d)
    first = tl.cumsum(whole, 0) - whole + before - first
    by = tl.where(o < remaining, digits_of(bits, shift, TYPE, DESCENDING, FLIP), 255)
    rank = tl.gather(first, by, 0).to(tl.int64) + o
    m = (o < remaining) & (rank < count)
    out = (line // inner * count + rank) * inner + line % inner
    if p_values is not None:
        tl.store(p_values + out, value_of(bits, TYPE), mask=m)
    tl.store(p_order + out, order.to(p_order.dtype.element_ty), mask=m)


class Lines(NamedTuple):
    """Where lines are: element i of line l is at offset(l; sizes, strides) + i · step; results have `inner` columns."""

    lines: int
    length: int
    step: int
    sizes: Shape
    strides: Shape
    inner: int


def line_tile(length: int, dtype: DType) -> tuple[int, int] | None:
    """(elements, warps) of the tile in which one program sorts a line; None if the line is too long."""
    # with 4 elements a thread, ptxas runs out of predicates for integers (C7600)
    tile = max(triton.next_power_of_2(length), 1024 if dtype.is_floating_point else 2048)
    return None if tile > LINE // max(1, dtype.itemsize // 4) else (tile, 16 if tile > 2048 else 8)


def radix_sort(
    values: Array | None, order: Array, x: Array, where: Lines, count: int, bits: int, signed: bool, descending: bool
) -> None:
    """The first `count` elements of each line in order, and positions; low `bits` of keys differ, with any sign."""
    lines, length, step, sizes, strides, inner = where
    passes = max(1, -(-bits // 8))
    constants: dict[str, Any] = {"DESCENDING": descending, "FLIP": 0}
    if signed:
        constants["FLIP"] = 1 << (8 * passes - 1) if passes not in (4, 8) else -(1 << (8 * passes - 1))
    old: Array | None = None
    longest = LINE // max(1, x.dtype.itemsize // 4)
    while length > longest and count * MERGED <= longest:  # the first ones of each tile
        parts = triton.cdiv(length, longest)
        total = (parts - 1) * count + min(count, length - (parts - 1) * longest)
        kept = empty((lines, total), x.dtype, x.device), empty((lines, total), index_type(length), x.device)
        launch(
            sort_lines_kernel, lines * parts, *kept, x, old, length, parts, count, total, step, sizes, strides, 1,
            passes, T=longest, W=16, num_warps=16, **constants,
        )  # fmt: skip
        (x, old), length, step, sizes, strides = kept, total, 1, (lines,), (total,)
    tile = line_tile(length, x.dtype)
    if tile is not None:
        launch(
            sort_lines_kernel, lines, values, order, x, old, length, 1, count, count, step, sizes, strides, inner,
            passes, T=tile[0], W=tile[1], num_warps=tile[1], **constants,
        )  # fmt: skip
        return
    assert old is None
    _radix_passes(values, order, x, Lines(lines, length, step, sizes, strides, inner), count, passes, constants)


def _radix_passes(
    values: Array | None, order: Array, x: Array, where: Lines, count: int, passes: int, constants: dict[str, Any]
) -> None:
    """One launch that counts the digits of all passes, and one a pass."""
    lines, length, step, sizes, strides, inner = where
    tiles, kind = triton.cdiv(length, TILE), int64 if length >= 1 << 30 else int32
    counts, states = lines * passes * 256, lines * tiles * 256
    zeros = empty((passes * 256 + counts + passes * states,), kind, x.device)
    clear(zeros)
    tickets = zeros.view((passes,), (1,))
    counted = zeros.view((counts,), (1,), zeros.offset + passes * 256)
    groups = triton.cdiv(length, COUNTED)
    launch(
        radix_count_kernel, lines * groups, counted, x, length, groups, step, sizes, strides, PASSES=passes, T=COUNTED,
        num_warps=WARPS.value, **constants,
    )  # fmt: skip
    old: Array | None = None
    for digit in range(passes):
        last = digit == passes - 1
        moved, positions, most = values, order, count
        if not last:
            moved, most = empty((lines, length), x.dtype, x.device), length
            positions = empty((lines, length), kind, x.device)
        state = zeros.view((states,), (1,), zeros.offset + passes * 256 + counts + digit * states)
        launch(
            radix_pass_kernel, lines * tiles, moved, positions, x, old, tickets, counted, state, digit, length, tiles,
            most, step, sizes, strides, inner if last else 1, PASSES=passes, T=TILE, num_warps=WARPS.value,
            maxnreg=MAXNREG, **constants,
        )  # fmt: skip
        if not last:
            assert moved is not None
            x, old, step, sizes, strides = moved, positions, 1, (lines,), (length,)


def rank_tile(length: int) -> tuple[int, int, int]:
    """(keys per program, keys it compares them with at a time, warps)."""
    return (32, 256, 4) if length > 256 else (16, 64, 4)


def argsort_keys(keys: Array, bits: int, signed: bool, keep_keys: bool = True) -> tuple[Array | None, Array]:
    """The stable ascending order of each line of contiguous integers `[lines, length]`, of which so many low `bits`
    differ, the sign's included where `signed`: the sorted keys, None unless `keep_keys`, and the position of each in
    its line.
    """
    lines, length = keys.shape
    if length <= RANK_SORT_MAX and length * length * lines <= COMPARISONS:
        found = empty(keys.shape, keys.dtype, keys.device) if keep_keys else None
        order = empty(keys.shape, int32, keys.device)
        bi, bj, warps = rank_tile(length)
        blocks = triton.cdiv(length, bi)
        floats = bits <= 24 and not signed and keys.dtype is int32
        launch(
            rank_sort_kernel, blocks * lines, found, order, keys, length, blocks, FLOATS=floats, BI=bi, BJ=bj,
            num_warps=warps,
        )  # fmt: skip
        return found, order
    found = empty(keys.shape, keys.dtype, keys.device) if keep_keys else None
    order = empty(keys.shape, index_type(length), keys.device)
    radix_sort(found, order, keys, Lines(lines, length, 1, (lines,), (length,), 1), length, bits, signed, False)
    return found, order
