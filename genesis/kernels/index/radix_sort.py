"""Stable radix sorts of lines by integer keys.

Reference: `np.argsort(keys, axis=-1, kind="stable")`; `genesis/ops/sort.py` and randperm use it.

Passes sort by digits of 8 bits, lowest first. Each pass recomputes keys from values, so only values and positions move.
One program sorts a line of up to 8,192 elements. For longer lines, a kernel counts the digits of all passes, and each
pass then reads and writes the line once. If only few elements are wanted, tiles of a long line are sorted first, and
then the elements that they keep.

Tiles: T elements of a line (W warps).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from genesis.array import Array, empty
from genesis.backend.cuda.launch import clear, launch
from genesis.dtypes import int32, int64
from genesis.kernels.elements import converted, offsets
from genesis.kernels.index.radix_tile import DIGITS, WARPS, count_digits, load_states, order_in_tile, sort_by_digit
from genesis.kernels.index.segment import index_type
from genesis.shapes import Shape

MAX_LINE = 8192  # the longest line, of up to 4 bytes per element, that one program sorts
MIN_TILE_RATIO = 8  # tiles are sorted first if they are at least this many times as long as the part that is kept
TILE = 4096  # elements per program in a pass over long lines
COUNT_TILE = 4096  # elements per program where digits are counted
MAXNREG = 128  # registers per thread, so that two programs fit on an SM
LOOK_BACK = tl.constexpr(8)  # states loaded at a time


# --- Keys -------------------------------------------------------------------------------------------------------------


@constexpr_function
def infinity_of(kind: tl.dtype) -> int:
    """Return the bits of infinity in a floating-point type."""
    return ((1 << (kind.primitive_bitwidth - 1)) - 1) >> kind.fp_mantissa_width << kind.fp_mantissa_width


@triton.jit
def bits_of(x):
    """Return the bits of x, sign-extended, as int64 for 8-byte types and otherwise int32."""
    if x.dtype.primitive_bitwidth == 64:
        return x.to(tl.int64, bitcast=True)
    elif x.dtype.is_floating():
        return x.to(tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True).to(tl.int32)
    else:
        return x.to(tl.int32)


@triton.jit
def value_of(bits, TYPE: tl.constexpr):
    """Return the value of TYPE with these bits."""
    if TYPE.primitive_bitwidth == 64:
        return bits.to(TYPE, bitcast=True)
    elif TYPE.is_floating():
        return bits.to(tl.int16 if TYPE.primitive_bitwidth == 16 else tl.int32).to(TYPE, bitcast=True)
    else:
        return converted(bits, TYPE)


@triton.jit
def ordered_keys(bits, TYPE: tl.constexpr, DESCENDING: tl.constexpr):
    """Return signed integers in the order of the values with these bits. NaN is last, and both zeros are equal."""
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
    """Return 8 bits of each key, from bit `shift` on. FLIP is the sign bit of signed keys."""
    return (((ordered_keys(bits, TYPE, DESCENDING) ^ FLIP) >> shift) & 255).to(tl.int32)


# --- Radix sort -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["passes"])
def sort_lines_kernel(p_values, p_order, p_x, p_old, length, parts, count, total, step, sizes, strides, inner, passes,
                      DESCENDING: tl.constexpr, FLIP: tl.constexpr, W: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Sort each part of T elements of a line, and store the first `count` elements of each, `total` per line.

    `p_old` `[lines, length]` holds the original positions of the elements; None if they have not moved.
    """
    line, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    start = part.to(tl.int64) * T
    remaining = tl.minimum(length - start, T).to(tl.int32)
    o = order_in_tile(T, W)  # [T]
    # Load the part's values; `position` follows them through the passes.
    TYPE: tl.constexpr = p_x.dtype.element_ty
    PACKED: tl.constexpr = TYPE.primitive_bitwidth <= 16
    p_line = p_x + offsets(line, sizes, strides) + start * step
    bits = bits_of(tl.load(p_line + o.to(tl.int64) * step, mask=o < remaining, other=0))  # [T]
    position = o
    # Pack position and value of 2-byte types into one word.
    if PACKED:
        bits = (o << 16) | (bits & 0xFFFF)
    for digit in range(passes):  # `passes` is a variable, so that the assembly is not duplicated by unrolling
        value = bits.to(tl.int16).to(tl.int32) if PACKED else bits
        by = tl.where(o < remaining, digits_of(value, 8 * digit, TYPE, DESCENDING, FLIP), 255)  # [T]
        if PACKED:
            bits, _ = sort_by_digit(by, (bits,), W)
        else:
            bits, position, _ = sort_by_digit(by, (bits, position), W)
    if PACKED:
        position = bits >> 16
        bits = bits.to(tl.int16).to(tl.int32)
    # Store the first elements of the part.
    rank = part.to(tl.int64) * count + o  # [T]
    m = o < tl.minimum(count, remaining)  # [T]
    out = (line // inner * total + rank) * inner + line % inner  # [T]
    if p_values is not None:
        tl.store(p_values + out, value_of(bits, TYPE), mask=m)
    if p_old is not None:
        order = tl.load(p_old + line * length + start + position, mask=m)  # [T]
    else:
        order = start + position
    tl.store(p_order + out, order.to(p_order.dtype.element_ty), mask=m)


@triton.jit
def radix_count_kernel(p_counts, p_x, length, tiles, step, sizes, strides, DESCENDING: tl.constexpr,
                       FLIP: tl.constexpr, PASSES: tl.constexpr, T: tl.constexpr):  # fmt: skip
    """Add the keys' digits to counts[line, pass, digit]."""
    line, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    i = tile.to(tl.int64) * T + tl.arange(0, T)  # [T]
    x = tl.load(p_x + offsets(line, sizes, strides) + i * step, mask=i < length, other=0)  # [T]
    key = ordered_keys(bits_of(x), p_x.dtype.element_ty, DESCENDING) ^ FLIP  # [T]
    count_digits(p_counts + line * PASSES * DIGITS, key, i < length, PASSES, WARPS)


@triton.jit(do_not_specialize=["digit"])
def radix_pass_kernel(p_values, p_order, p_x, p_old, p_tickets, p_counts, p_states, digit, length, tiles, count, step,
                      sizes, strides, inner, DESCENDING: tl.constexpr, FLIP: tl.constexpr, PASSES: tl.constexpr,
                      T: tl.constexpr):  # fmt: skip
    """Move values and their positions to their places by one digit, if these are among the first `count` of a line.

    A tile looks up how many elements of earlier tiles have each digit in their states (decoupled look-back, Merrill
    and Garland, 2016). A state first holds the tile's own count plus ALONE, then, as a negative number, the count
    including all earlier tiles. Tiles are numbered as programs start, so all earlier tiles are running or done. `p_old`
    is None in the first pass.
    """
    ticket = tl.atomic_add(p_tickets + digit, 1, sem="relaxed")
    line, tile = (ticket // tiles).to(tl.int64), ticket % tiles
    start = tile.to(tl.int64) * T
    remaining = tl.minimum(length - start, T).to(tl.int32)
    shift = 8 * digit
    o, d = order_in_tile(T, WARPS), tl.arange(0, DIGITS)  # [T], [256]
    TYPE: tl.constexpr = p_x.dtype.element_ty
    p_line = p_x + offsets(line, sizes, strides) + start * step
    bits = bits_of(tl.load(p_line + o.to(tl.int64) * step, mask=o < remaining, other=0))  # [T]
    if p_old is None:
        order = (start + o).to(tl.int64 if p_states.dtype.element_ty == tl.int64 else tl.int32)  # [T]
    else:
        order = tl.load(p_old + line * length + start + o, mask=o < remaining, other=0)  # [T]
    # Sort the tile by digit, and count its digits.
    by = tl.where(o < remaining, digits_of(bits, shift, TYPE, DESCENDING, FLIP), 255)  # [T]
    bits, order, found = sort_by_digit(by, (bits, order), WARPS)  # [T] each
    found = tl.sum(tl.reshape(found, (T // DIGITS, DIGITS)), 0)  # [256]
    first = tl.cumsum(found, 0) - found  # [256]
    # Publish the tile's own counts.
    STATE: tl.constexpr = p_states.dtype.element_ty
    ALONE: tl.constexpr = 1 << (STATE.primitive_bitwidth - 2)
    LEAST: tl.constexpr = -2 * ALONE
    found = (found - tl.where(d == 255, T - remaining, 0)).to(STATE)
    p_own = p_states + ticket.to(tl.int64) * DIGITS + d
    tl.atomic_xchg(p_own, found + ALONE, sem="relaxed")
    # Look back, LOOK_BACK tiles at a time, until the counts of all earlier tiles are known.
    before, is_done = tl.zeros((DIGITS,), STATE), tl.zeros((DIGITS,), tl.int32)
    back, answer = tile * 0 + 1, tile * 0 + 1
    while answer != 0:
        total, ends, is_missing = before, is_done, tl.zeros((DIGITS,), tl.int32)
        for k in tl.static_range(LOOK_BACK):
            state = load_states(p_own - (back + k).to(tl.int64) * DIGITS, d * 0 + back + k <= tile)  # [256]
            is_missing = is_missing | ((state == 0) & (ends == 0)).to(tl.int32)
            total += tl.where(ends != 0, 0, state & (ALONE - 1))
            ends = ends | (state < 0).to(tl.int32)
        answer = tl.max(2 * is_missing + 1 - ends, 0)  # >= 2: some state is missing; 1: earlier tiles are needed
        if answer < 2:
            before, is_done = total, ends
            back += LOOK_BACK
    # Publish the counts including earlier tiles, then store the elements at their ranks.
    tl.atomic_xchg(p_own, before + found + LEAST, sem="relaxed")
    whole = tl.load(p_counts + (line * PASSES + digit) * DIGITS + d)  # [256]
    first = tl.cumsum(whole, 0) - whole + before - first  # [256]
    by = tl.where(o < remaining, digits_of(bits, shift, TYPE, DESCENDING, FLIP), 255)  # [T]
    rank = tl.gather(first, by, 0).to(tl.int64) + o  # [T]
    m = (o < remaining) & (rank < count)  # [T]
    out = (line // inner * count + rank) * inner + line % inner  # [T]
    if p_values is not None:
        tl.store(p_values + out, value_of(bits, TYPE), mask=m)
    tl.store(p_order + out, order.to(p_order.dtype.element_ty), mask=m)


class Lines(NamedTuple):
    """Element i of line l is at offset(l; sizes, strides) + i·step. Results have `inner` columns."""

    lines: int
    length: int
    step: int
    sizes: Shape
    strides: Shape
    inner: int


def radix_sort(
    values: Array | None, order: Array, x: Array, where: Lines, count: int, bits: int, signed: bool, descending: bool
) -> None:
    """Write the first `count` elements of each line in order to `values`, unless it is None, and their positions. Keys
    differ in their low `bits`, which include the sign bit if `signed`.
    """
    lines, length, step, sizes, strides, inner = where
    passes = max(1, -(-bits // 8))
    constants: dict[str, Any] = {"DESCENDING": descending, "FLIP": 0}
    if signed:
        constants["FLIP"] = 1 << (8 * passes - 1) if passes not in (4, 8) else -(1 << (8 * passes - 1))
    old: Array | None = None
    longest = MAX_LINE // max(1, x.dtype.itemsize // 4)
    # Sort tiles and keep the first `count` elements of each, until the rest fits a single program.
    while length > longest and count * MIN_TILE_RATIO <= longest:
        parts = triton.cdiv(length, longest)
        total = (parts - 1) * count + min(count, length - (parts - 1) * longest)
        kept = empty((lines, total), x.dtype, x.device), empty((lines, total), index_type(length), x.device)
        launch(
            sort_lines_kernel, lines * parts, *kept, x, old, length, parts, count, total, step, sizes, strides, 1,
            passes, T=longest, W=16, num_warps=16, **constants,
        )  # fmt: skip
        (x, old), length, step, sizes, strides = kept, total, 1, (lines,), (total,)
    # With 4 elements per thread, ptxas runs out of predicates for integers (C7600).
    tile = max(triton.next_power_of_2(length), 1024 if x.dtype.is_floating_point else 2048)
    if tile > longest:
        assert old is None
        _radix_passes(values, order, x, where, count, passes, constants)
        return
    warps = 16 if tile > 2048 else 8
    launch(
        sort_lines_kernel, lines, values, order, x, old, length, 1, count, count, step, sizes, strides, inner, passes,
        T=tile, W=warps, num_warps=warps, **constants,
    )  # fmt: skip


def _radix_passes(
    values: Array | None, order: Array, x: Array, where: Lines, count: int, passes: int, constants: dict[str, Any]
) -> None:
    """Launch a kernel that counts the digits of all passes, then one kernel per pass."""
    lines, length, step, sizes, strides, inner = where
    tiles, kind = triton.cdiv(length, TILE), int64 if length >= 1 << 30 else int32
    # One cleared buffer holds tickets, counts and states.
    counts, states = lines * passes * 256, lines * tiles * 256
    zeros = empty((passes * 256 + counts + passes * states,), kind, x.device)
    clear(zeros)
    tickets = zeros.view((passes,), (1,))
    counted = zeros.view((counts,), (1,), zeros.offset + passes * 256)
    groups = triton.cdiv(length, COUNT_TILE)
    launch(
        radix_count_kernel, lines * groups, counted, x, length, groups, step, sizes, strides, PASSES=passes,
        T=COUNT_TILE, num_warps=WARPS.value, **constants,
    )  # fmt: skip
    # Each pass moves values and positions to new buffers; the last pass writes the results.
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


def argsort_keys(keys: Array, bits: int, signed: bool, keep_keys: bool = True) -> tuple[Array | None, Array]:
    """Sort each line of contiguous integers `[lines, length]` stably in ascending order. Return the sorted keys, None
    unless `keep_keys`, and each key's position in its line. Keys differ in their low `bits`, which include the sign bit
    if `signed`.
    """
    lines, length = keys.shape
    sorted_keys = empty(keys.shape, keys.dtype, keys.device) if keep_keys else None
    order = empty(keys.shape, index_type(length), keys.device)
    radix_sort(sorted_keys, order, keys, Lines(lines, length, 1, (lines,), (length,), 1), length, bits, signed, False)
    return sorted_keys, order
