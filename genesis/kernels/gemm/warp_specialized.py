"""Matrix products of 2-byte floats and of e4m3 on Hopper whose warps divide the work: what follows a sum costs no time.

Eight warps multiply tile after tile; when a tile's sum is complete they lay it down in shared memory, rounded, and go
on with the next. Four other warps finish it from there: they add a residual, gate, or turn it into SwiGLU's gradients,
with loads that began while the tile was multiplied. In one stream of instructions, as Triton has it, the tensor cores
wait for all that. Of 8-bit factors the sums are laid down as they are, and scaled where they are finished. The kernel
is written in Gluon, Triton's lower dialect; it has no interpreter, so what is right of it is checked on a GPU, against
the kernels that stand in for it elsewhere (`linalg.py`, `gated.py`, `swiglu.py`).

Letters: the product is [m, k] x [k, n]; BM, BN, BK are the tile's sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from genesis.array import Array
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.dtypes import bfloat16, float8_e4m3fn
from genesis.kernels.gemm.tiles import IMPRECISE

__all__ = [
    "gated_backward_into",
    "gated_into",
    "load",
    "product_and_residual_into",
    "scaled_product_into",
    "seen_as",
]

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.9 has other names than 3.6
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
RENAMED = gl.constexpr(hasattr(tma, "async_load"))

BYTES = gl.constexpr(128)  # of a step along k
GROUP = 8  # rows of tiles walked together
WARPS = 8  # multiply
ROWS = gl.constexpr(64)  # of a piece that the finishing warps take at once
COLUMNS = gl.constexpr(64)
TERMS = 1024  # of a long sum of e4m3 that the tensor cores add up by themselves
ROUNDS = 1.5  # tiles an SM from which on this pays

RESIDUAL = gl.constexpr(1)  # FORM: sum + residual
GATED = gl.constexpr(2)  # gate and up, and silu(gate)·up
GATED_BACKWARD = gl.constexpr(3)  # the gradients of gate and up from that of silu(gate)·up, which is the sum
SCALED_ROWS = gl.constexpr(4)  # sum of quantised factors
SCALED = gl.constexpr(5)  # the same, with factors of its columns, too


# --- Where tiles and pieces lie ---------------------------------------------------------------------------------------


@gluon.jit
def quotient(x, y):
    """x // y for 0 <= x < 2^21 and y > 0: see `products.quotient`."""
    return ((gl.cast(x, gl.float32) + 0.5) * (1.0 / gl.cast(y, gl.float32))).to(gl.int32)


@gluon.jit
def place(i_tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Row and column of a tile: GROUP rows are walked together, so that neighbours in time share L2."""
    i_group = quotient(i_tile, GROUP * tiles_n)
    rows = gl.minimum(tiles_m - i_group * GROUP, GROUP)
    within = i_tile - i_group * GROUP * tiles_n
    i_n = quotient(within, rows)
    return i_group * GROUP + within - i_n * rows, i_n


@gluon.jit
def piece(i, i_m, i_n, m, n, step, BLOCKED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Offsets of piece i of the tile [BM, BN], in rows of `step` elements, and which exist."""
    IN_ROWS: gl.constexpr = BM // ROWS
    o_m = i_m * BM + i % IN_ROWS * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BLOCKED))
    o_n = i_n * BN + i // IN_ROWS * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, BLOCKED))
    return o_m[:, None] * step + o_n[None, :], (o_m < m)[:, None] & (o_n < n)[None, :]


# --- The multiplying warps --------------------------------------------------------------------------------------------


@gluon.jit
def fetch(d_x, d_w, s_x, s_w, full, slot, i_m, i_n, i_k, n, wanted, FORM: gl.constexpr, TURNED: gl.constexpr,
          BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """Begin to load step i_k of a tile, if it is wanted. A gated tile takes BN / 2 rows of gate and the same of up."""
    arrived, s_b = full.index(slot), s_w.index(slot)
    mbarrier.expect(arrived, (BM + BN) * BYTES, pred=wanted)
    load(d_x, [i_m * BM, i_k * BK], arrived, s_x.index(slot), pred=wanted)
    if FORM == GATED:
        HALF: gl.constexpr = BN // 2
        load(d_w, [i_n * HALF, i_k * BK], arrived, s_b.slice(0, HALF, 0), pred=wanted)
        load(d_w, [n + i_n * HALF, i_k * BK], arrived, s_b.slice(HALF, HALF, 0), pred=wanted)
    elif TURNED:
        load(d_w, [i_n * BN, i_k * BK], arrived, s_b, pred=wanted)
    else:
        load(d_w, [i_k * BK, i_n * BN], arrived, s_b, pred=wanted)


@gluon.jit
def lay_down(acc, s_o, FIRST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Round a tile to shared memory, COLUMNS columns behind the other."""
    if BN == COLUMNS:
        s_o.index(FIRST).store(acc.to(s_o.dtype))
    else:
        left, right = acc.reshape((BM, 2, BN // 2)).permute(0, 2, 1).split()
        lay_down(left, s_o, FIRST, BM, BN // 2)
        lay_down(right, s_o, FIRST + BN // 2 // COLUMNS, BM, BN // 2)


@gluon.jit
def add_step(acc, now, ahead, d_x, d_w, s_x, s_w, full, tiles_m, tiles_n, n, steps, FORM: gl.constexpr,
             TURNED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
             GROUP: gl.constexpr):  # fmt: skip
    """Add the step that lies in a slot, and begin to load one into the slot that is free by that.

    Args:
        now: the slot, and the phase of its barrier.
        ahead: the tile that is loaded, its row and column, its step along k and the slot for it.
    """
    slot, phase = now
    i_ahead, m_ahead, n_ahead, k_ahead, slot_ahead = ahead
    programs, tiles = gl.num_programs(0), tiles_m * tiles_n
    mbarrier.wait(full.index(slot), phase)
    s_b = s_w.index(slot)
    if TURNED:
        s_b = s_b.permute((1, 0))
    acc = warpgroup_mma(s_x.index(slot), s_b, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before is done: its slot can be filled again
    fetch(d_x, d_w, s_x, s_w, full, slot_ahead, m_ahead, n_ahead, k_ahead, n, i_ahead < tiles, FORM, TURNED, BM, BN,
          BK)  # fmt: skip
    slot_ahead = gl.where(slot_ahead == STAGES - 1, 0, slot_ahead + 1)
    k_ahead += 1
    if k_ahead == steps:
        i_ahead, k_ahead = i_ahead + programs, 0
        m_ahead, n_ahead = place(i_ahead, tiles_m, tiles_n, GROUP)
    slot += 1
    if slot == STAGES:
        slot, phase = 0, phase ^ 1
    return acc, (slot, phase), (i_ahead, m_ahead, n_ahead, k_ahead, slot_ahead)


@gluon.jit
def multiply(d_x, d_w, s_x, s_w, s_o, full, done, free, tiles_m, tiles_n, n, steps, FORM: gl.constexpr,
             TURNED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
             GROUP: gl.constexpr, WARPS: gl.constexpr, PROMOTED: gl.constexpr):  # fmt: skip
    """Sum tile after tile. Loads run STAGES - 1 steps ahead, over the borders of tiles. With PROMOTED, what so many
    steps give is added up outside of the tensor cores.
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, BK // 4])
    first, programs, tiles = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n
    i_ahead, k_ahead, slot_ahead = first, 0, 0
    m_ahead, n_ahead = place(i_ahead, tiles_m, tiles_n, GROUP)
    for _ in gl.static_range(STAGES - 1):
        fetch(d_x, d_w, s_x, s_w, full, slot_ahead, m_ahead, n_ahead, k_ahead, n, i_ahead < tiles, FORM, TURNED, BM, BN,
              BK)  # fmt: skip
        slot_ahead, k_ahead = slot_ahead + 1, k_ahead + 1
        if k_ahead == steps:
            i_ahead, k_ahead = i_ahead + programs, 0
            m_ahead, n_ahead = place(i_ahead, tiles_m, tiles_n, GROUP)
    now, ahead, is_free = (0, 0), (i_ahead, m_ahead, n_ahead, k_ahead, slot_ahead), 1
    for _ in range(first, tiles, programs):
        acc = gl.zeros((BM, BN), gl.float32, SUMS)
        if PROMOTED:
            for begin in range(0, steps, PROMOTED):
                part = gl.zeros((BM, BN), gl.float32, SUMS)
                for _ in range(begin, gl.minimum(begin + PROMOTED, steps)):
                    part, now, ahead = add_step(part, now, ahead, d_x, d_w, s_x, s_w, full, tiles_m, tiles_n, n, steps,
                                                FORM, TURNED, BM, BN, BK, STAGES, GROUP)  # fmt: skip
                acc += warpgroup_mma_wait(0, deps=(part,))
        else:
            for _ in range(steps):
                acc, now, ahead = add_step(acc, now, ahead, d_x, d_w, s_x, s_w, full, tiles_m, tiles_n, n, steps, FORM,
                                           TURNED, BM, BN, BK, STAGES, GROUP)  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.wait(free, is_free)
        lay_down(acc, s_o, 0, BM, BN)
        fence_async_shared()
        mbarrier.arrive(done, count=1)
        is_free ^= 1


# --- The finishing warps ----------------------------------------------------------------------------------------------


@gluon.jit
def sigmoid(x):
    """1 / (1 + e^-x) in float32, to the bit what `activation.sigmoid` gives of 2-byte floats above -87; 0 below.

    Four instructions: numbers below 2^-126, which cost as many again, are added to 1 here or are the result.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
        " rcp.approx.ftz.f32 $0, t; }",
        "=f,f", [x], gl.float32, True, 1,
    )  # fmt: skip


@gluon.jit
def following(i, pieces, i_m, i_n, next_m, next_n):
    """The piece after piece i: the first of the next tile behind a tile's last."""
    last = i == pieces - 1
    return gl.where(last, 0, i + 1), gl.where(last, next_m, i_m), gl.where(last, next_n, i_n)


@gluon.jit
def row_scales(p_scales, i, i_m, m, BLOCKED: gl.constexpr, BM: gl.constexpr):
    """The factors of the rows of piece i."""
    o_m = i_m * BM + i % (BM // ROWS) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BLOCKED))
    return gl.load(p_scales + o_m, mask=o_m < m, other=0)


@gluon.jit
def column_scales(p_scales, i, i_n, m, n, BLOCKED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """The factors of the columns of piece i, which stand behind those of the m rows."""
    o_n = i_n * BN + i // (BM // ROWS) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, BLOCKED))
    return gl.load(p_scales + m + o_n, mask=o_n < n, other=0)


@gluon.jit
def scale(p_o, p_scales, s_pieces, done, free, tiles_m, tiles_n, m, n, OF_COLUMNS: gl.constexpr, BLOCKED: gl.constexpr,
          BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Out = sum by the factors of its rows and, with OF_COLUMNS, of its columns."""
    PIECES: gl.constexpr = BM // ROWS * (BN // COLUMNS)
    first, programs, tiles, is_done = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, 0
    for i_tile in range(first, tiles, programs):
        i_m, i_n = place(i_tile, tiles_m, tiles_n, GROUP)
        mbarrier.wait(done, is_done)
        for i in range(PIECES):
            b_y = s_pieces.index(i).load(BLOCKED).to(gl.float32)
            b_y = b_y * row_scales(p_scales, i, i_m, m, BLOCKED, BM)[:, None]
            if OF_COLUMNS:
                b_y = b_y * column_scales(p_scales, i, i_n, m, n, BLOCKED, BM, BN)[None, :]
            o, mask = piece(i, i_m, i_n, m, n, n, BLOCKED, BM, BN)
            gl.store(p_o + o, b_y.to(p_o.dtype.element_ty), mask=mask)
        mbarrier.arrive(free, count=1)
        is_done ^= 1


@gluon.jit
def add_residual(p_o, p_r, p_scales, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED: gl.constexpr,
                 BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Out = sum + residual, a piece of the residual loaded ahead."""
    PIECES: gl.constexpr = BM // ROWS * (BN // COLUMNS)
    first, programs, tiles, is_done = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, 0
    i_m, i_n = place(first, tiles_m, tiles_n, GROUP)
    o, mask = piece(0, i_m, i_n, m, n, n, BLOCKED, BM, BN)
    b_r = gl.load(p_r + o, mask=mask, other=0)
    if p_scales is not None:
        b_rows = row_scales(p_scales, 0, i_m, m, BLOCKED, BM)
        b_columns = column_scales(p_scales, 0, i_n, m, n, BLOCKED, BM, BN)
    for i_tile in range(first, tiles, programs):
        next_m, next_n = place(gl.minimum(i_tile + programs, tiles - 1), tiles_m, tiles_n, GROUP)
        mbarrier.wait(done, is_done)
        for i in range(PIECES):
            b_y = s_pieces.index(i).load(BLOCKED).to(gl.float32)
            i_ahead, m_ahead, n_ahead = following(i, PIECES, i_m, i_n, next_m, next_n)
            if p_scales is not None:
                b_y = b_y * b_rows[:, None] * b_columns[None, :]
                b_rows = row_scales(p_scales, i_ahead, m_ahead, m, BLOCKED, BM)
                b_columns = column_scales(p_scales, i_ahead, n_ahead, m, n, BLOCKED, BM, BN)
            b_y += b_r.to(gl.float32)
            o_ahead, mask_ahead = piece(i_ahead, m_ahead, n_ahead, m, n, n, BLOCKED, BM, BN)
            b_r = gl.load(p_r + o_ahead, mask=mask_ahead, other=0)
            o, mask = piece(i, i_m, i_n, m, n, n, BLOCKED, BM, BN)
            gl.store(p_o + o, b_y.to(p_o.dtype.element_ty), mask=mask)
        mbarrier.arrive(free, count=1)
        i_m, i_n, is_done = next_m, next_n, is_done ^ 1


@gluon.jit
def gate(d_gate, d_up, p_h, s_o, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED: gl.constexpr,
         BM: gl.constexpr, HALF: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Gate and up as they are summed, and h = silu(gate)·up of what is stored of them."""
    PIECES: gl.constexpr = BM // ROWS * (HALF // COLUMNS)
    WIDE: gl.constexpr = HALF // COLUMNS
    first, programs, tiles, is_done = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, 0
    for i_tile in range(first, tiles, programs):
        i_m, i_n = place(i_tile, tiles_m, tiles_n, GROUP)
        mbarrier.wait(done, is_done)
        for j in gl.static_range(WIDE):
            store(d_gate, [i_m * BM, i_n * HALF + j * COLUMNS], s_o.index(j))
            store(d_up, [i_m * BM, i_n * HALF + j * COLUMNS], s_o.index(WIDE + j))
        for i in range(PIECES):
            b_gate = s_pieces.index(i).load(BLOCKED).to(gl.float32)
            b_up = s_pieces.index(PIECES + i).load(BLOCKED).to(gl.float32)
            o, mask = piece(i, i_m, i_n, m, n, n, BLOCKED, BM, HALF)
            b_h = sigmoid(b_gate) * b_gate * b_up
            gl.store(p_h + o, b_h.to(p_h.dtype.element_ty), mask=mask)
        tma.store_wait(0)
        mbarrier.arrive(free, count=1)
        is_done ^= 1


@gluon.jit
def gate_scaled(p_o, p_h, p_scales, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED: gl.constexpr,
                BM: gl.constexpr, HALF: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """[gate, up] at p_o of their unscaled sums, and h = silu(gate)·up of what is stored of them."""
    PIECES: gl.constexpr = BM // ROWS * (HALF // COLUMNS)
    first, programs, tiles, is_done = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, 0
    for i_tile in range(first, tiles, programs):
        i_m, i_n = place(i_tile, tiles_m, tiles_n, GROUP)
        b_rows = row_scales(p_scales, 0, i_m, m, BLOCKED, BM)
        b_gates = column_scales(p_scales, 0, i_n, m, n, BLOCKED, BM, HALF)
        b_ups = column_scales(p_scales + n, 0, i_n, m, n, BLOCKED, BM, HALF)
        mbarrier.wait(done, is_done)
        for i in range(PIECES):
            b_gate = s_pieces.index(i).load(BLOCKED).to(gl.float32) * b_rows[:, None] * b_gates[None, :]
            b_up = s_pieces.index(PIECES + i).load(BLOCKED).to(gl.float32) * b_rows[:, None] * b_ups[None, :]
            i_ahead = gl.minimum(i + 1, PIECES - 1)
            b_rows = row_scales(p_scales, i_ahead, i_m, m, BLOCKED, BM)
            b_gates = column_scales(p_scales, i_ahead, i_n, m, n, BLOCKED, BM, HALF)
            b_ups = column_scales(p_scales + n, i_ahead, i_n, m, n, BLOCKED, BM, HALF)
            b_g, b_u = b_gate.to(p_o.dtype.element_ty), b_up.to(p_o.dtype.element_ty)
            o, mask = piece(i, i_m, i_n, m, n, 2 * n, BLOCKED, BM, HALF)
            gl.store(p_o + o, b_g, mask=mask)
            gl.store(p_o + n + o, b_u, mask=mask)
            b_gate, b_up = b_g.to(gl.float32), b_u.to(gl.float32)
            o_h, _ = piece(i, i_m, i_n, m, n, n, BLOCKED, BM, HALF)
            b_h = sigmoid(b_gate) * b_gate * b_up
            gl.store(p_h + o_h, b_h.to(p_h.dtype.element_ty), mask=mask)
        mbarrier.arrive(free, count=1)
        is_done ^= 1


@gluon.jit
def gate_backward(p_d, p_h, p_x, p_scales, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED: gl.constexpr,
                  BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """[dgate, dup] of the sum dh and [gate, up] at p_x, a piece of those loaded ahead; and h where p_h is given."""
    PIECES: gl.constexpr = BM // ROWS * (BN // COLUMNS)
    first, programs, tiles, is_done = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, 0
    i_m, i_n = place(first, tiles_m, tiles_n, GROUP)
    o, mask = piece(0, i_m, i_n, m, n, 2 * n, BLOCKED, BM, BN)
    b_gate, b_up = gl.load(p_x + o, mask=mask, other=0), gl.load(p_x + n + o, mask=mask, other=0)
    if p_scales is not None:
        b_rows = row_scales(p_scales, 0, i_m, m, BLOCKED, BM)
    for i_tile in range(first, tiles, programs):
        next_m, next_n = place(gl.minimum(i_tile + programs, tiles - 1), tiles_m, tiles_n, GROUP)
        mbarrier.wait(done, is_done)
        for i in range(PIECES):
            b_d = s_pieces.index(i).load(BLOCKED).to(gl.float32)
            i_ahead, m_ahead, n_ahead = following(i, PIECES, i_m, i_n, next_m, next_n)
            o_ahead, mask_ahead = piece(i_ahead, m_ahead, n_ahead, m, n, 2 * n, BLOCKED, BM, BN)
            b_gate_ahead = gl.load(p_x + o_ahead, mask=mask_ahead, other=0)
            b_up_ahead = gl.load(p_x + n + o_ahead, mask=mask_ahead, other=0)
            if p_scales is not None:
                b_d = b_d * b_rows[:, None]
                b_rows = row_scales(p_scales, i_ahead, m_ahead, m, BLOCKED, BM)
            b_g, b_u = b_gate.to(gl.float32), b_up.to(gl.float32)
            b_s = sigmoid(b_g)
            b_silu = b_s * b_g
            o, mask = piece(i, i_m, i_n, m, n, 2 * n, BLOCKED, BM, BN)
            d_gate = b_d * (b_s + b_silu * (1 - b_s)) * b_u
            gl.store(p_d + o, d_gate.to(p_d.dtype.element_ty), mask=mask)
            gl.store(p_d + n + o, (b_d * b_silu).to(p_d.dtype.element_ty), mask=mask)
            if p_h is not None:
                o_h, _ = piece(i, i_m, i_n, m, n, n, BLOCKED, BM, BN)
                gl.store(p_h + o_h, (b_silu * b_u).to(p_h.dtype.element_ty), mask=mask)
            b_gate, b_up = b_gate_ahead, b_up_ahead
        mbarrier.arrive(free, count=1)
        i_m, i_n, is_done = next_m, next_n, is_done ^ 1


# --- The kernel -------------------------------------------------------------------------------------------------------


@gluon.jit
def seen_as(s, SHAPE: gl.constexpr, like):
    """Shared memory in another shape, with the layout of `like`: memory, or a descriptor's tiles."""
    if RENAMED:
        return s.reinterpret(s.dtype, SHAPE, like.layout)
    else:
        return s._reinterpret(s.dtype, SHAPE, like.layout)


@gluon.jit
def finish(d_gate, d_up, p_o, p_h, p_r, p_scales, s_o, done, free, tiles_m, tiles_n, m, n, FORM: gl.constexpr,
           FINISHERS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Finish the tiles of [BM, BN] that are laid down, as FORM says."""
    s_pieces = seen_as(s_o, [BN // COLUMNS * (BM // ROWS), ROWS, COLUMNS], s_o)
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [FINISHERS, 1], [1, 0])
    if FORM == RESIDUAL:
        add_residual(p_o, p_r, p_scales, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED, BM, BN, GROUP)
    elif FORM == GATED and p_scales is not None:
        gate_scaled(p_o, p_h, p_scales, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED, BM, BN // 2, GROUP)
    elif FORM == GATED:
        gate(d_gate, d_up, p_h, s_o, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED, BM, BN // 2, GROUP)
    elif FORM == GATED_BACKWARD:
        gate_backward(p_o, p_h, p_r, p_scales, s_pieces, done, free, tiles_m, tiles_n, m, n, BLOCKED, BM, BN, GROUP)
    else:
        scale(p_o, p_scales, s_pieces, done, free, tiles_m, tiles_n, m, n, FORM == SCALED, BLOCKED, BM, BN, GROUP)


@gluon.jit(do_not_specialize=["m"])
def specialized(d_x, d_w, d_gate, d_up, p_o, p_h, p_r, p_scales, m, n, k, FORM: gl.constexpr, TURNED: gl.constexpr,
                BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
                WARPS: gl.constexpr, FINISHERS: gl.constexpr, REGISTERS: gl.constexpr,
                PROMOTED: gl.constexpr):  # fmt: skip
    """Tiles of x·w, or x·wᵀ where it is TURNED, taken in turn by programs that stay, finished as FORM says.

    Args:
        p_scales: where x and w are quantised, what to multiply the m rows by and, in the forms forward, the columns.
    """
    s_x = gl.allocate_shared_memory(d_x.dtype, [STAGES, BM, BK], d_x.layout)
    if TURNED:
        s_w = gl.allocate_shared_memory(d_w.dtype, [STAGES, BN, BK], d_w.layout)
    else:
        s_w = gl.allocate_shared_memory(d_w.dtype, [STAGES, BK, BN], d_w.layout)
    # COLUMNS of 2-byte numbers make rows of 128 bytes, as x's tiles have, so that a piece of them is a range of memory.
    if p_scales is None:
        s_o = gl.allocate_shared_memory(d_x.dtype, [BN // COLUMNS, BM, COLUMNS], d_x.layout)
    else:
        ROUNDED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        s_o = gl.allocate_shared_memory(p_o.dtype.element_ty, [BN // COLUMNS, BM, COLUMNS], ROUNDED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    mbarrier.init(done, count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    OWN: gl.constexpr = BN // 2 if FORM == GATED else BN
    tiles_m, tiles_n, steps = gl.cdiv(m, BM), gl.cdiv(n, OWN), gl.cdiv(k, BK)
    gl.warp_specialize([
        (multiply, (d_x, d_w, s_x, s_w, s_o, full, done, free, tiles_m, tiles_n, n, steps, FORM, TURNED, BM, BN, BK,
                    STAGES, GROUP, WARPS, PROMOTED)),
        (finish, (d_gate, d_up, p_o, p_h, p_r, p_scales, s_o, done, free, tiles_m, tiles_n, m, n, FORM, FINISHERS, BM,
                  BN, GROUP)),
    ], [FINISHERS], [REGISTERS])  # fmt: skip


# --- Launching it -----------------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """How a product is cut.

    Attributes:
        bm, bn: the tile's sizes.
        stages: more would leave no room for the finished tile.
        finishers: warps that finish. More leave the multiplying ones of wide tiles too few registers to begin with.
        registers: of a finishing thread; the multiplying ones have what is left.
    """

    bm: int
    bn: int
    stages: int
    finishers: int
    registers: int


# Measured on an H200.
WIDE = Cut(128, 256, 3, 4, 168)
NARROW = Cut(128, 128, 5, 4, 168)  # for sums that are kept twice
BUSY = Cut(128, 128, 5, 8, 144)  # for products that are made in less time than four warps take to finish them


def _cut(x: Array, form: gl.constexpr) -> Cut:
    """How a product of x `[m, k]` is cut."""
    if x.dtype is not float8_e4m3fn:
        return WIDE
    if form is GATED_BACKWARD:
        return BUSY
    return NARROW if x.shape[1] > IMPRECISE else WIDE


def _tiles(x: Array, n: int, form: gl.constexpr) -> int:
    """How many tiles of x's rows and of n columns there are, where this kernel is the faster way; otherwise 0."""
    if (x.dtype.itemsize != 2 and x.dtype is not float8_e4m3fn) or x.ndim != 2 or not x.size or is_interpreted():
        return 0
    cut, properties = _cut(x, form), backend_of(x.device).driver.properties
    tiles = triton.cdiv(x.shape[0], cut.bm) * triton.cdiv(n, _own(cut, form))
    fits = properties.capability[0] == 9 and tiles < 1 << 21 and x.shape[0] * 2 * n < 1 << 31
    return tiles if fits and tiles >= ROUNDS * properties.sm_count else 0


def _own(cut: Cut, form: gl.constexpr) -> int:
    """Columns of a tile; a gated one holds those of two matrices."""
    return cut.bn // 2 if form is GATED else cut.bn


def _region(a: Array, rows: int, columns: int) -> Descriptor:
    """Tiles of a matrix, with their layout in shared memory."""
    kind = {"bfloat16": gl.bfloat16, "float16": gl.float16, "float8_e4m3fn": gl.float8e4nv}[a.dtype.name]
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    return Descriptor(a, a.shape, a.strides, (rows, columns), layout=repr(layout))


def _are_describable(*arrays: Array) -> bool:
    return all(is_describable(a, a.shape, a.strides) for a in arrays)


def _launch(
    form: gl.constexpr, x: Array, w: Array, n: int, tiles: int, out: Array, *, turned: bool, h: Array | None = None,
    read: Array | None = None, parts: tuple[Array, Array] | None = None, scales: Array | None = None,
) -> None:  # fmt: skip
    (m, k), cut, bk = x.shape, _cut(x, form), BYTES.value // x.dtype.itemsize
    gate_up = [_region(a, cut.bm, COLUMNS.value) for a in parts] if parts else [None, None]
    launch(
        specialized, min(tiles, backend_of(x.device).driver.properties.sm_count), _region(x, cut.bm, bk),
        _region(w, _own(cut, form), bk) if turned else _region(w, bk, cut.bn), *gate_up, out, h, read, scales, m, n, k,
        FORM=form.value, TURNED=turned, BM=cut.bm, BN=cut.bn, BK=bk, STAGES=cut.stages, GROUP=GROUP, WARPS=WARPS,
        FINISHERS=cut.finishers, REGISTERS=cut.registers, num_warps=WARPS,
        PROMOTED=TERMS // bk if scales is not None and k > IMPRECISE else 0,
    )  # fmt: skip


def product_and_residual_into(
    out: Array, x: Array, weight: Array, residual: Array, scales: Array | None = None
) -> bool:
    """out = x·weightᵀ + residual; the product is rounded before the addition.

    Args:
        out, residual: `[m, n]`, contiguous, of x's 2-byte type; bfloat16 where x is quantised.
        x: `[m, k]`.
        weight: `[n, k]`.
        scales: of quantised factors, of the rows and then of the columns `[m + n]`.

    Returns:
        False where this is not the faster way, or TMA cannot address the operands; nothing is done then.
    """
    tiles = _tiles(x, weight.shape[0], RESIDUAL)
    if not tiles or not _are_describable(x, weight, out, residual) or not _is_wide_enough(out, scales):
        return False
    _launch(RESIDUAL, x, weight, weight.shape[0], tiles, out, turned=True, read=residual, scales=scales)
    return True


def scaled_product_into(out: Array, x: Array, weight: Array, scales: Array, of_columns: bool) -> bool:
    """out = x·weightᵀ of quantised factors, where their sums are long. False like above.

    Args:
        out: `[m, n]`, contiguous, bfloat16.
        scales: of the rows `[m]`, or of the rows and then of the columns `[m + n]`, as `of_columns` says.
    """
    form, n = SCALED if of_columns else SCALED_ROWS, weight.shape[0]
    tiles = _tiles(x, n, form) if x.shape[1] > IMPRECISE else 0
    if not tiles or not _are_describable(x, weight, out) or not _is_wide_enough(out, scales):
        return False
    _launch(form, x, weight, n, tiles, out, turned=True, scales=scales)
    return True


def _is_wide_enough(out: Array, scales: Array | None) -> bool:
    """Whether unscaled sums fit into out's type."""
    return scales is None or out.dtype is bfloat16


def gated_into(h: Array, gate_up: Array, x: Array, weight: Array, scales: Array | None = None) -> bool:
    """gate_up = [gate | up] = x·weightᵀ and h = silu(gate)·up; as `gated.gated_product_into`, and False like above."""
    n = h.shape[1]
    tiles = _tiles(x, n, GATED)
    parts = tuple(gate_up.view((gate_up.shape[0], n), (2 * n, 1), gate_up.offset + i * n) for i in range(2))
    if not tiles or not _are_describable(x, weight, h, *parts) or not _is_wide_enough(h, scales):
        return False
    if scales is not None:
        _launch(GATED, x, weight, n, tiles, gate_up, turned=True, h=h, scales=scales)
    else:
        _launch(GATED, x, weight, n, tiles, h, turned=True, h=h, parts=(parts[0], parts[1]))
    return True


def gated_backward_into(
    d: Array, h: Array | None, g: Array, weight: Array, gate_up: Array, scales: Array | None = None
) -> bool:
    """[dgate, dup] behind dh = g·weight, which is rounded before; and h = silu(gate)·up. False like above.

    Args:
        d, gate_up: `[m, 2·n]`, contiguous, of g's 2-byte type; bfloat16 where g is quantised.
        h: `[m, n]`, contiguous, or None.
        g: `[m, k]`.
        weight: `[k, n]`; turned, `[n, k]`, where it is quantised.
        scales: of quantised factors, of the rows `[m]`.
    """
    n = weight.shape[scales is None]
    tiles = _tiles(g, n, GATED_BACKWARD)
    wanted = _are_describable(g, weight, d, gate_up, *([] if h is None else [h]))
    if not tiles or not wanted or not _is_wide_enough(d, scales):
        return False
    _launch(GATED_BACKWARD, g, weight, n, tiles, d, turned=scales is not None, h=h, read=gate_up, scales=scales)
    return True
