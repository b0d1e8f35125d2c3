"""Matmuls with one row of x on the tensor cores: only the diagonal of each MMA's result is used.

few_rows.py names the plain reference and launches the kernel.

A warp loads 256 consecutive elements of a row of W, 8 per lane. As operand A of m16n8k16 they form eight rows: row g is
held by the four lanes (g, t). Two rows of W therefore fill the sixteen rows of A. Each lane loads the same elements of
x, which form the eight columns of operand B. The products that belong together are on the diagonal, the sums of A's row
g and B's column g, which the same four lanes hold. The other seven eighths of the sums are unused. The tensor cores
compute them without delay, while the CUDA cores would need two instructions per element.

8-bit codes are converted to float16, which takes half an instruction per code; bfloat16 would take two. A bfloat16 x is
then converted to float16 as well, and each group of four lanes scales its part of x by its own power of two.

x is [1, K] and W is [N, K]. Tiles are [BS * 8, 32]: BS * 256 elements along K, in memory order. Vectors [BS * 32] have
one element per thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels.decode.few_rows_fma import after_loads, rms_reciprocal, unrolled
from genesis.kernels.decode.few_rows_mma import (
    constraints,
    element,
    filled,
    layout_line,
    load_each,
    load_operands,
    load_steps,
    mma,
    plus,
    scaled,
)
from genesis.kernels.dependents import allow_next, wait_for_previous
from genesis.kernels.elements import converted
from genesis.kernels.gemm.gated import swiglu

NARROWED = tl.constexpr(
    """{
    .reg .b32 lo, hi;
    .reg .f32 f0, f1;
    shl.b32 lo, $1, 16;
    and.b32 hi, $1, 0xFFFF0000;
    mov.b32 f0, lo;
    mov.b32 f1, hi;
    mul.f32 f0, f0, $2;
    mul.f32 f1, f1, $3;
    cvt.rn.f16x2.f32 $0, f1, f0;
    }"""
)
LARGER = tl.constexpr("{ .reg .b32 a; abs.bf16x2 a, $2; max.bf16x2 $0, $1, a; }")
# Insert byte c + 128 as the low byte of the float16 1024 + c + 128, then subtract 1152. This is exact.
FROM_INT8 = tl.constexpr(
    """{
    .reg .b32 u, a, b, z;
    mov.b32 z, 0xE480E480;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 a, u, 0x64646464, 0x4140;
    prmt.b32 b, u, 0x64646464, 0x4342;
    add.rn.f16x2 $0, a, z;
    add.rn.f16x2 $1, b, z;
    }"""
)


@constexpr_function
def group_of(warps: int, pairs: int) -> int:
    """Return the number of lanes that add the final sums of one pair of rows."""
    return min(32, 8 * warps, 32 * warps // pairs)


@constexpr_function
def diagonal_text(warps: int, pairs: int, has_squares: bool) -> str:
    """Return the assembly of `diagonal_sums`.

    A thread has 8 sums (q, h, b) per pair. It uses those on the diagonal, with 2·t + b = g, if it has any, and stores
    them at [pair, h, warp, g]. Each group of lanes then adds the sums of its pair: $0 for the first row of W, $8 for
    the second, and $16 for squares.
    """
    count, group, row = 2 * pairs + has_squares, group_of(warps, pairs), 8 * warps
    each = row // group  # numbers that a lane adds
    # Store the sums on the diagonal.
    results = 3 if has_squares else 2
    lines = [
        f"{{ {layout_line(warps)}",
        f".shared .align 16 .b32 sums[{count * row}];",
        ".reg .b32 base, thread, lane, at, own, t;",
        ".reg .f32 v, w;",
        ".reg .pred is_odd, has_any;",
        "mov.u32 base, sums;",
        "mov.u32 thread, %tid.x;",
        "and.b32 lane, thread, 31;",
        "and.b32 t, lane, 4;",
        "setp.ne.b32 is_odd, t, 0;",
        "shr.u32 own, lane, 3;",
        "and.b32 t, lane, 3;",
        "setp.eq.b32 has_any, own, t;",
        "shr.u32 at, thread, 2;",  # warp · 8 + g
        "mad.lo.u32 at, at, 4, base;",
    ]
    for i in range(count):
        first = 8 * (results + i // 2) + i % 2 * 2
        lines += [
            f"selp.f32 v, ${first + 1}, ${first}, is_odd;",
            f"selp.f32 w, ${first + 5}, ${first + 4}, is_odd;",
            "add.f32 v, v, w;",
            f"@has_any st.shared.f32 [at + {i * row * 4}], v;",
        ]
    # Add the numbers of each lane, then those in the lanes of its group.
    lines += [
        "bar.sync 0;",
        f"and.b32 lane, thread, {group - 1};",
        f"shr.u32 own, thread, {group.bit_length() - 1};",
        f"and.b32 own, own, {pairs - 1};",
        f"mad.lo.u32 lane, lane, {4 * each}, base;",
        f"mad.lo.u32 own, own, {8 * row}, lane;",
    ]
    for result in range(results):
        source, out = ("lane", 8 * pairs * row) if result == 2 else ("own", 4 * result * row)
        for e in range(each):
            target = f"${8 * result}" if e == 0 else "v"
            lines.append(f"ld.shared.f32 {target}, [{source} + {out + 4 * e}];")
            if e:
                lines.append(f"add.f32 ${8 * result}, ${8 * result}, v;")
    step = group // 2
    while step:
        for result in range(results):
            lines.append(f"shfl.sync.bfly.b32 v, ${8 * result}, {step}, 31, -1;")
            lines.append(f"add.f32 ${8 * result}, ${8 * result}, v;")
        step //= 2
    lines += [f"mov.f32 ${8 * i + j}, 0f80000000;" for i in range(results) for j in range(1, 8)]
    return "\n".join([*lines, "}"])


@triton.jit
def diagonal_sums(tiles, BS: tl.constexpr, P: tl.constexpr, SQUARES: tl.constexpr):
    """Return tiles with the sums of a pair's first row of W, of its second row and, with SQUARES, of the squares of x.

    A thread has its sum in the first of its 8 elements. The threads of group i have the sums of pair i, out of P.
    """
    RESULTS: tl.constexpr = 2 + SQUARES
    TEXT: tl.constexpr = diagonal_text(BS, P, SQUARES)
    return tl.inline_asm_elementwise(
        TEXT, constraints(8 * RESULTS, 0, 8 * (P + SQUARES)), tiles, (tl.float32,) * RESULTS, False, 8
    )


@triton.jit
def operand(w):
    """Return a tile of W in its own type, or 8-bit codes in float16."""
    if w.dtype == tl.int8:
        return tl.inline_asm_elementwise(FROM_INT8, "=&r,=&r,r", [w], tl.float16, True, 4)
    elif w.dtype == tl.float8e4nv:
        return converted(w, tl.float16)
    else:
        return w


@triton.jit
def larger(most, x):
    """Return the larger of `most` and |x|, in bfloat16."""
    return tl.inline_asm_elementwise(LARGER, "=r,r,r", [most, x], tl.bfloat16, True, 2)


@triton.jit
def in_float16(x, by):
    """Return x·by in float16, for x in bfloat16 and `by` in float32."""
    return tl.inline_asm_elementwise(NARROWED, "=r,r,f,f", [x, by], tl.float16, True, 2)


if is_interpreted():

    def diagonal_sums(tiles: Any, BS: Any, P: Any, SQUARES: Any) -> Any:
        warps, pairs, squares = (getattr(v, "value", v) for v in (BS, P, SQUARES))
        group, g = group_of(warps, pairs), np.arange(8)
        of_pairs = []
        for tile in tiles:
            sums = tile.handle.data.reshape(warps, 8, 4, 2, 2, 2).sum(3)  # [BS, g, t, h, b]
            of_pairs.append(sums[:, g, g // 2, :, g % 2].sum((0, 1)))  # [h]
        threads, results = np.arange(32 * warps), []
        for result in range(2 + squares):
            values = np.full((32 * warps, 8), 0, np.float32)
            for thread in threads:
                pair = pairs if result == 2 else thread // group % pairs
                values[thread, 0] = of_pairs[pair][result % 2]
            tile = tiles[0]
            results.append(tl.tensor(type(tile.handle)(values.reshape(tile.handle.data.shape), tl.float32), tile.type))
        return tuple(results)

    @triton.jit
    def operand(w):
        if w.dtype.primitive_bitwidth == 8:
            return converted(w, tl.float16)
        else:
            return w

    @triton.jit
    def larger(most, x):
        return tl.maximum(converted(most, tl.float32), tl.abs(converted(x, tl.float32)))

    @triton.jit
    def in_float16(x, by):
        return converted(converted(x, tl.float32) * by, tl.float16)


@triton.jit
def narrowed(x, BS: tl.constexpr, STEPS: tl.constexpr):
    """Return the tiles of x in float16, and the factor by which sums of products must be multiplied.

    Each group of four lanes scales its elements by a power of two, so that their largest value is at least 2^14 and
    less than 2^15. Values below 2^-38 of the largest lose bits.
    """
    most = tl.full((BS * 8, 32), 0, x[0].dtype)  # [BS * 8, 32]
    for i in tl.static_range(STEPS):
        most = larger(most, x[i])  # [BS * 8, 32]
    exponent = tl.max(converted(most, tl.float32), 1).to(tl.int32, bitcast=True) >> 23  # [BS * 8]
    exponent = tl.maximum(exponent, 15)[:, None] + tl.zeros((BS * 8, 32), tl.int32)  # [BS * 8, 32]
    by, tiles = ((268 - exponent) << 23).to(tl.float32, bitcast=True), ()  # [BS * 8, 32]
    for i in tl.static_range(STEPS):
        tiles += (in_float16(x[i], by),)
    return tiles, ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def one_row_mma_kernel(p_y, p_h, p_rstd, p_x, p_w, p_up, p_norm, p_bias, p_residual, p_w_scale, n, w_row, eps,
                       K: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
                       STEPS: tl.constexpr):  # fmt: skip
    """Multiply x by BN rows of W in pairs, or by BN rows of gate, each paired with its row of up."""
    allow_next(OVERLAP)
    i_n = tl.program_id(0) * BN
    P: tl.constexpr = BN // 2 if p_up is None else BN
    STEP: tl.constexpr = BS * 256
    TRIP: tl.constexpr = STEP * STEPS
    NARROWS: tl.constexpr = p_w.dtype.element_ty.primitive_bitwidth == 8 and p_x.dtype.element_ty == tl.bfloat16
    o_k = tl.arange(0, BS * 8)[:, None] * 32 + tl.arange(0, 32)[None, :]  # [BS * 8, 32]
    # At the end each group of lanes has a pair of rows.
    o_thread = tl.arange(0, BS * 32)  # [BS * 32]
    GROUP: tl.constexpr = group_of(BS, P)
    o_n = i_n + o_thread // GROUP * (1 if p_up is not None else 2)
    m_n = (o_thread % GROUP == 0) & (o_thread < P * GROUP) & (o_n < n)  # [BS * 32]
    o_next = o_n + 1 if p_up is None else o_n + n
    m_next = m_n & (o_next < n) if p_up is None else m_n
    w, up, scale = (), (), ()  # tiles of STEPS steps
    if EARLY:
        w, up, scale = load_operands(p_w, p_up, p_norm, i_n, n, w_row, o_k, K, BN, 1, STEP, STEPS, True)
    wait_for_previous(OVERLAP)
    b_w_scale, b_next_scale = load_each(p_w_scale, o_n, m_n, 1), load_each(p_w_scale, o_next, m_next, 1)  # [BS * 32]
    b_added = load_each(p_bias, o_n, m_n, 0) + load_each(p_residual, o_n, m_n, 0)  # [BS * 32]
    b_next_added = load_each(p_bias, o_next, m_next, 0) + load_each(p_residual, o_next, m_next, 0)
    if not EARLY:
        w, up, scale = load_operands(p_w, p_up, p_norm, i_n, n, w_row, o_k, K, BN, 1, STEP, STEPS, True)
    sums, square = filled(-0.0, P, BS * 8), filled(-0.0, 1, BS * 8)
    # Multiply the tiles along K, with loads of W one trip ahead.
    for i_k in tl.range(0, K, TRIP, loop_unroll_factor=unrolled(p_w.dtype.element_ty, K, TRIP)):
        x = load_steps(p_x, 0, 1, 0, i_k + o_k, K, 1, 1, STEP, STEPS)  # [BS * 8, 32] each
        zero = after_loads()
        if p_norm is not None:
            b_square, normed = square[0] + zero, ()
            for i in tl.static_range(STEPS):
                b_square = mma(x[i], x[i], x[i], x[i], b_square, BS, 1)  # [BS * 8, 32]
                normed += (scaled(x[i], scale[i]),)
            square, x = (b_square,), normed
        before, b_unit = sums, 1.0
        if NARROWS:
            x, b_unit = narrowed(x, BS, STEPS)
            sums = filled(zero, P, BS * 8)
        else:
            sums = plus(sums, zero, P)
        for i in tl.static_range(STEPS):
            new_sums = ()
            for j in tl.static_range(P):
                if p_up is None:
                    b_w, b_next = operand(w[i * BN + 2 * j]), operand(w[i * BN + 2 * j + 1])
                else:
                    b_w, b_next = operand(w[i * BN + j]), operand(up[i * BN + j])
                new_sums += (mma(b_w, b_next, x[i], x[i], sums[j], BS, 1),)
            sums = new_sums
        if NARROWS:
            new_sums = ()
            for j in tl.static_range(P):
                new_sums += (before[j] + sums[j] * b_unit,)
            sums = new_sums
        if K > TRIP:
            o_trip = i_k + TRIP + o_k
            w, up, scale = load_operands(p_w, p_up, p_norm, i_n, n, w_row, o_trip, K, BN, 1, STEP, STEPS, True)
    # Add the sums of the warps, apply the norm, and store.
    if p_norm is not None:
        sums += square
    sums = diagonal_sums(sums, BS, P, 1 if p_norm is not None else 0)
    b_y, b_next = element(sums[0], 0), element(sums[1], 0)  # [BS * 32] each
    if p_norm is not None:
        b_rstd = rms_reciprocal(element(sums[2], 0), K, eps)  # [BS * 32]
        b_y, b_next = b_y * b_rstd, b_next * b_rstd
        if p_rstd is not None:
            tl.store(p_rstd + o_thread, b_rstd, mask=o_thread + i_n == 0)
    b_y = converted(b_y * b_w_scale + b_added, p_y.dtype.element_ty)
    b_next = converted(b_next * b_next_scale + b_next_added, p_y.dtype.element_ty)
    tl.store(p_y + o_n, b_y, mask=m_n)
    tl.store(p_y + o_next, b_next, mask=m_next)
    if p_up is not None:
        tl.store(p_h + o_n, converted(swiglu(b_y, b_next), p_h.dtype.element_ty), mask=m_n)
