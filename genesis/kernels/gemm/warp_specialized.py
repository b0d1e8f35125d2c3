"""Warp-specialized GEMMs of 2-byte floats and of e4m3 on Hopper, whose epilogues overlap the main loop.

Plain reference: genesis/ops/linear.py: `linear`, with a residual; genesis/ops/swiglu.py: `swiglu_packed` and
`swiglu_linear_backward`; genesis/ops/fp8.py: `quantized_matmul`.

Eight MMA warps compute tile after tile and load ahead by TMA. They round a complete accumulator, store it to shared
memory and start the next tile. Four or eight epilogue warps read it from there and add a residual, or apply SwiGLU or
its backward, with loads issued during the main loop. In a single instruction stream, as Triton generates it, the tensor
cores would wait for all of that. Accumulators of 8-bit operands are stored unscaled, and the epilogue scales them.

The kernel is written in Gluon, Triton's lower-level dialect, which has no interpreter. Its results are checked on a GPU
against other kernels (`linalg.py`, `gated.py`, `swiglu.py`).

The GEMM is [m, k] x [k, n]; tiles are BM x BN, in steps of BK. Epilogues process slices [SLICE_ROWS, SLICE_COLUMNS],
written [SR, SC] in the comments.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from genesis.kernels.gemm.gemm import grouped_tile
from genesis.kernels.gemm.tiles import MAX_IMPRECISE

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.9 has other names than 3.6
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_memory = gl.shared_memory_descriptor
reinterpret_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret  # (memory, dtype, shape, layout)

BYTES = gl.constexpr(128)  # bytes of a row per step along k
WARPS = 8  # MMA warps
SLICE_ROWS = gl.constexpr(64)
SLICE_COLUMNS = gl.constexpr(64)
PROMOTE_TERMS = 1024  # terms of a long e4m3 sum that the tensor cores accumulate before it is promoted to float32
ROUNDS = 1.5  # the fewest tiles per SM for which the kernel is profitable

# Values of FORM, the epilogue.
RESIDUAL = gl.constexpr(1)  # acc + residual
SWIGLU = gl.constexpr(2)  # gate and up, and silu(gate)·up
SWIGLU_BACKWARD = gl.constexpr(3)  # gradients of gate and up from acc, the gradient of silu(gate)·up
SCALED_ROWS = gl.constexpr(4)  # acc of quantized operands times the scales of its rows
SCALED = gl.constexpr(5)  # acc of quantized operands times the scales of its rows and of its columns


# --- Slices of a tile -------------------------------------------------------------------------------------------------


@gluon.jit
def slice_offsets(i, i_m, i_n, m, n, row_stride, BLOCKED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Return offsets and mask [SR, SC] of slice i of the tile [BM, BN]."""
    IN_ROWS: gl.constexpr = BM // SLICE_ROWS
    o_m = i_m * BM + i % IN_ROWS * SLICE_ROWS + gl.arange(0, SLICE_ROWS, gl.SliceLayout(1, BLOCKED))  # [SR]
    o_n = i_n * BN + i // IN_ROWS * SLICE_COLUMNS + gl.arange(0, SLICE_COLUMNS, gl.SliceLayout(0, BLOCKED))  # [SC]
    return o_m[:, None] * row_stride + o_n[None, :], (o_m < m)[:, None] & (o_n < n)[None, :]


# --- The MMA warps, which also load -----------------------------------------------------------------------------------


@gluon.jit
def issue_loads(d_x, d_w, s_x, s_w, full, stage, i_m, i_n, i_k, n, pred, FORM: gl.constexpr, TRANSPOSED: gl.constexpr,
                BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """Issue the loads of step i_k of a tile if `pred` is set. With SWIGLU they load BN / 2 rows of gate and of up."""
    loaded, s_b = full.index(stage), s_w.index(stage)
    mbarrier.expect(loaded, (BM + BN) * BYTES, pred=pred)
    tma_load(d_x, [i_m * BM, i_k * BK], loaded, s_x.index(stage), pred=pred)  # [BM, BK]
    if FORM == SWIGLU:
        HALF: gl.constexpr = BN // 2
        tma_load(d_w, [i_n * HALF, i_k * BK], loaded, s_b.slice(0, HALF, 0), pred=pred)  # [HALF, BK]
        tma_load(d_w, [n + i_n * HALF, i_k * BK], loaded, s_b.slice(HALF, HALF, 0), pred=pred)  # [HALF, BK]
    elif TRANSPOSED:
        tma_load(d_w, [i_n * BN, i_k * BK], loaded, s_b, pred=pred)  # [BN, BK]
    else:
        tma_load(d_w, [i_k * BK, i_n * BN], loaded, s_b, pred=pred)  # [BK, BN]


@gluon.jit
def store_to_smem(acc, s_o, FIRST: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Round acc [BM, BN] and store it to shared memory, in slices of SLICE_COLUMNS columns from slice FIRST on."""
    if BN == SLICE_COLUMNS:
        s_o.index(FIRST).store(acc.to(s_o.dtype))
    else:
        left, right = acc.reshape((BM, 2, BN // 2)).permute(0, 2, 1).split()  # [BM, BN // 2] each
        store_to_smem(left, s_o, FIRST, BM, BN // 2)
        store_to_smem(right, s_o, FIRST + BN // 2 // SLICE_COLUMNS, BM, BN // 2)


@gluon.jit
def mma_step(acc, now, ahead, d_x, d_w, s_x, s_w, full, tiles_m, tiles_n, n, steps, FORM: gl.constexpr,
             TRANSPOSED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """Accumulate a loaded step into acc [BM, BN], and issue loads into the stage that has become empty.

    Args:
        now: (stage, phase of its barrier).
        ahead: (tile to load, its row, its column, its step along k, the stage to load into).
    """
    stage, phase = now
    i_ahead, m_ahead, n_ahead, k_ahead, stage_ahead = ahead
    programs, tiles = gl.num_programs(0), tiles_m * tiles_n
    mbarrier.wait(full.index(stage), phase)
    s_b = s_w.index(stage)
    if TRANSPOSED:
        s_b = s_b.permute((1, 0))  # [BK, BN]
    acc = warpgroup_mma(s_x.index(stage), s_b, acc, is_async=True)  # [BM, BN]
    acc = warpgroup_mma_wait(1, deps=(acc,))  # [BM, BN]; the previous step is done, so its stage is empty
    issue_loads(d_x, d_w, s_x, s_w, full, stage_ahead, m_ahead, n_ahead, k_ahead, n, i_ahead < tiles, FORM, TRANSPOSED,
                BM, BN, BK)  # fmt: skip
    stage_ahead = gl.where(stage_ahead == STAGES - 1, 0, stage_ahead + 1)
    k_ahead += 1
    if k_ahead == steps:
        i_ahead, k_ahead = i_ahead + programs, 0
        m_ahead, n_ahead = grouped_tile(i_ahead, tiles_m, tiles_n, "one")[1:]
    stage += 1
    if stage == STAGES:
        stage, phase = 0, phase ^ 1
    return acc, (stage, phase), (i_ahead, m_ahead, n_ahead, k_ahead, stage_ahead)


@gluon.jit
def mma_partition(d_x, d_w, s_x, s_w, s_o, full, done, free, tiles_m, tiles_n, n, steps, FORM: gl.constexpr,
                  TRANSPOSED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
                  WARPS: gl.constexpr, PROMOTE: gl.constexpr):  # fmt: skip
    """Accumulate tile after tile, with loads issued STAGES - 1 steps ahead, across tiles. With PROMOTE, sums over that
    many steps are added up outside the tensor cores.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, BK // 4])
    first, programs, tiles = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n
    i_ahead, k_ahead, stage_ahead = first, 0, 0
    m_ahead, n_ahead = grouped_tile(i_ahead, tiles_m, tiles_n, "one")[1:]
    # Fill the pipeline.
    for _ in gl.static_range(STAGES - 1):
        issue_loads(d_x, d_w, s_x, s_w, full, stage_ahead, m_ahead, n_ahead, k_ahead, n, i_ahead < tiles, FORM,
                    TRANSPOSED, BM, BN, BK)  # fmt: skip
        stage_ahead, k_ahead = stage_ahead + 1, k_ahead + 1
        if k_ahead == steps:
            i_ahead, k_ahead = i_ahead + programs, 0
            m_ahead, n_ahead = grouped_tile(i_ahead, tiles_m, tiles_n, "one")[1:]
    now, ahead, is_free = (0, 0), (i_ahead, m_ahead, n_ahead, k_ahead, stage_ahead), 1
    for _ in range(first, tiles, programs):
        acc = gl.zeros((BM, BN), gl.float32, ACC)  # [BM, BN]
        if PROMOTE:
            for begin in range(0, steps, PROMOTE):
                part = gl.zeros((BM, BN), gl.float32, ACC)  # [BM, BN]
                for _ in range(begin, gl.minimum(begin + PROMOTE, steps)):
                    part, now, ahead = mma_step(part, now, ahead, d_x, d_w, s_x, s_w, full, tiles_m, tiles_n, n, steps,
                                                FORM, TRANSPOSED, BM, BN, BK, STAGES)  # fmt: skip
                acc += warpgroup_mma_wait(0, deps=(part,))  # [BM, BN]
        else:
            for _ in range(steps):
                acc, now, ahead = mma_step(acc, now, ahead, d_x, d_w, s_x, s_w, full, tiles_m, tiles_n, n, steps, FORM,
                                           TRANSPOSED, BM, BN, BK, STAGES)  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=(acc,))
        # Pass the accumulator to the epilogue warps.
        mbarrier.wait(free, is_free)
        store_to_smem(acc, s_o, 0, BM, BN)
        fence_async_shared()
        mbarrier.arrive(done, count=1)
        is_free ^= 1


# --- The epilogue warps -----------------------------------------------------------------------------------------------


@gluon.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x) in float32: the bits of `formulas.sigmoid_fast` for 2-byte floats above -87, and 0 below.

    Flushing subnormals halves the instructions, to four. A subnormal is either added to 1 or is the result.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
        " rcp.approx.ftz.f32 $0, t; }",
        "=f,f", [x], gl.float32, True, 1,
    )  # fmt: skip


@gluon.jit
def next_slice(i, slices, i_m, i_n, next_m, next_n):
    """Return the slice after slice i, and its tile. The first slice of the next tile follows a tile's last slice."""
    last = i == slices - 1
    return gl.where(last, 0, i + 1), gl.where(last, next_m, i_m), gl.where(last, next_n, i_n)


@gluon.jit
def row_scales(p_scales, i, i_m, m, BLOCKED: gl.constexpr, BM: gl.constexpr):
    """Load the scales [SR] of the rows of slice i."""
    o_m = i_m * BM + i % (BM // SLICE_ROWS) * SLICE_ROWS + gl.arange(0, SLICE_ROWS, gl.SliceLayout(1, BLOCKED))  # [SR]
    return gl.load(p_scales + o_m, mask=o_m < m, other=0)


@gluon.jit
def column_scales(p_scales, i, i_n, m, n, BLOCKED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):
    """Load the scales [SC] of the columns of slice i, which are stored after the scales of the m rows."""
    IN_ROWS: gl.constexpr = BM // SLICE_ROWS
    o_n = i_n * BN + i // IN_ROWS * SLICE_COLUMNS + gl.arange(0, SLICE_COLUMNS, gl.SliceLayout(0, BLOCKED))  # [SC]
    return gl.load(p_scales + m + o_n, mask=o_n < n, other=0)


@gluon.jit
def epilogue_linear(p_o, p_r, p_scales, s_slices, done, free, tiles_m, tiles_n, m, n, OF_COLUMNS: gl.constexpr,
                    BLOCKED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):  # fmt: skip
    """Store acc, with p_scales times the scales of its rows and, with OF_COLUMNS, of its columns, and with p_r plus the
    residual. Both are loaded one slice ahead.
    """
    SLICES: gl.constexpr = BM // SLICE_ROWS * (BN // SLICE_COLUMNS)
    first, programs, tiles, is_done = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, 0
    i_m, i_n = grouped_tile(first, tiles_m, tiles_n, "one")[1:]
    if p_r is not None:
        o, mask = slice_offsets(0, i_m, i_n, m, n, n, BLOCKED, BM, BN)
        b_r = gl.load(p_r + o, mask=mask, other=0)  # [SR, SC]
    if p_scales is not None:
        b_rows = row_scales(p_scales, 0, i_m, m, BLOCKED, BM)  # [SR]
        if OF_COLUMNS:
            b_columns = column_scales(p_scales, 0, i_n, m, n, BLOCKED, BM, BN)  # [SC]
    for i_tile in range(first, tiles, programs):
        next_m, next_n = grouped_tile(gl.minimum(i_tile + programs, tiles - 1), tiles_m, tiles_n, "one")[1:]
        mbarrier.wait(done, is_done)
        for i in range(SLICES):
            b_y = s_slices.index(i).load(BLOCKED).to(gl.float32)  # [SR, SC]
            i_ahead, m_ahead, n_ahead = next_slice(i, SLICES, i_m, i_n, next_m, next_n)
            if p_scales is not None:
                b_y = b_y * b_rows[:, None]
                b_rows = row_scales(p_scales, i_ahead, m_ahead, m, BLOCKED, BM)  # [SR]
                if OF_COLUMNS:
                    b_y = b_y * b_columns[None, :]
                    b_columns = column_scales(p_scales, i_ahead, n_ahead, m, n, BLOCKED, BM, BN)  # [SC]
            if p_r is not None:
                b_y += b_r.to(gl.float32)  # [SR, SC]
                o_ahead, mask_ahead = slice_offsets(i_ahead, m_ahead, n_ahead, m, n, n, BLOCKED, BM, BN)
                b_r = gl.load(p_r + o_ahead, mask=mask_ahead, other=0)  # [SR, SC]
            o, mask = slice_offsets(i, i_m, i_n, m, n, n, BLOCKED, BM, BN)
            gl.store(p_o + o, b_y.to(p_o.dtype.element_ty), mask=mask)
        mbarrier.arrive(free, count=1)
        i_m, i_n, is_done = next_m, next_n, is_done ^ 1


@gluon.jit
def epilogue_swiglu(d_gate, d_up, p_h, s_o, s_slices, done, free, tiles_m, tiles_n, m, n, BLOCKED: gl.constexpr,
                    BM: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    """Store gate and up, rounded, and h = silu(gate)·up of the rounded values."""
    SLICES: gl.constexpr = BM // SLICE_ROWS * (HALF // SLICE_COLUMNS)
    COLUMN_SLICES: gl.constexpr = HALF // SLICE_COLUMNS
    first, programs, tiles, is_done = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, 0
    for i_tile in range(first, tiles, programs):
        i_m, i_n = grouped_tile(i_tile, tiles_m, tiles_n, "one")[1:]
        mbarrier.wait(done, is_done)
        for j in gl.static_range(COLUMN_SLICES):
            tma_store(d_gate, [i_m * BM, i_n * HALF + j * SLICE_COLUMNS], s_o.index(j))
            tma_store(d_up, [i_m * BM, i_n * HALF + j * SLICE_COLUMNS], s_o.index(COLUMN_SLICES + j))
        for i in range(SLICES):
            b_gate = s_slices.index(i).load(BLOCKED).to(gl.float32)  # [SR, SC]
            b_up = s_slices.index(SLICES + i).load(BLOCKED).to(gl.float32)  # [SR, SC]
            o, mask = slice_offsets(i, i_m, i_n, m, n, n, BLOCKED, BM, HALF)
            b_h = sigmoid(b_gate) * b_gate * b_up  # [SR, SC]
            gl.store(p_h + o, b_h.to(p_h.dtype.element_ty), mask=mask)
        tma.store_wait(0)
        mbarrier.arrive(free, count=1)
        is_done ^= 1


@gluon.jit
def epilogue_swiglu_scaled(p_o, p_h, p_scales, s_slices, done, free, tiles_m, tiles_n, m, n, BLOCKED: gl.constexpr,
                           BM: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    """Scale the accumulators, store [gate, up] at p_o, and h = silu(gate)·up of the rounded values."""
    SLICES: gl.constexpr = BM // SLICE_ROWS * (HALF // SLICE_COLUMNS)
    first, programs, tiles, is_done = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, 0
    for i_tile in range(first, tiles, programs):
        i_m, i_n = grouped_tile(i_tile, tiles_m, tiles_n, "one")[1:]
        b_rows = row_scales(p_scales, 0, i_m, m, BLOCKED, BM)  # [SR]
        b_gates = column_scales(p_scales, 0, i_n, m, n, BLOCKED, BM, HALF)  # [SC]
        b_ups = column_scales(p_scales + n, 0, i_n, m, n, BLOCKED, BM, HALF)  # [SC]
        mbarrier.wait(done, is_done)
        for i in range(SLICES):
            b_gate = s_slices.index(i).load(BLOCKED).to(gl.float32) * b_rows[:, None] * b_gates[None, :]  # [SR, SC]
            b_up = s_slices.index(SLICES + i).load(BLOCKED).to(gl.float32) * b_rows[:, None] * b_ups[None, :]
            i_ahead = gl.minimum(i + 1, SLICES - 1)
            b_rows = row_scales(p_scales, i_ahead, i_m, m, BLOCKED, BM)  # [SR]
            b_gates = column_scales(p_scales, i_ahead, i_n, m, n, BLOCKED, BM, HALF)  # [SC]
            b_ups = column_scales(p_scales + n, i_ahead, i_n, m, n, BLOCKED, BM, HALF)  # [SC]
            b_g, b_u = b_gate.to(p_o.dtype.element_ty), b_up.to(p_o.dtype.element_ty)  # [SR, SC] each
            o, mask = slice_offsets(i, i_m, i_n, m, n, 2 * n, BLOCKED, BM, HALF)
            gl.store(p_o + o, b_g, mask=mask)
            gl.store(p_o + n + o, b_u, mask=mask)
            b_gate, b_up = b_g.to(gl.float32), b_u.to(gl.float32)
            o_h, _ = slice_offsets(i, i_m, i_n, m, n, n, BLOCKED, BM, HALF)
            b_h = sigmoid(b_gate) * b_gate * b_up  # [SR, SC]
            gl.store(p_h + o_h, b_h.to(p_h.dtype.element_ty), mask=mask)
        mbarrier.arrive(free, count=1)
        is_done ^= 1


@gluon.jit
def epilogue_swiglu_backward(p_d, p_h, p_x, p_scales, s_slices, done, free, tiles_m, tiles_n, m, n,
                             BLOCKED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):  # fmt: skip
    """Store [dgate, dup] from dh (acc) and [gate, up] at p_x, loaded one slice ahead. Store h too if p_h is given."""
    SLICES: gl.constexpr = BM // SLICE_ROWS * (BN // SLICE_COLUMNS)
    first, programs, tiles, is_done = gl.program_id(0), gl.num_programs(0), tiles_m * tiles_n, 0
    i_m, i_n = grouped_tile(first, tiles_m, tiles_n, "one")[1:]
    o, mask = slice_offsets(0, i_m, i_n, m, n, 2 * n, BLOCKED, BM, BN)
    b_gate, b_up = gl.load(p_x + o, mask=mask, other=0), gl.load(p_x + n + o, mask=mask, other=0)  # [SR, SC] each
    if p_scales is not None:
        b_rows = row_scales(p_scales, 0, i_m, m, BLOCKED, BM)  # [SR]
    for i_tile in range(first, tiles, programs):
        next_m, next_n = grouped_tile(gl.minimum(i_tile + programs, tiles - 1), tiles_m, tiles_n, "one")[1:]
        mbarrier.wait(done, is_done)
        for i in range(SLICES):
            b_d = s_slices.index(i).load(BLOCKED).to(gl.float32)  # [SR, SC]
            i_ahead, m_ahead, n_ahead = next_slice(i, SLICES, i_m, i_n, next_m, next_n)
            o_ahead, mask_ahead = slice_offsets(i_ahead, m_ahead, n_ahead, m, n, 2 * n, BLOCKED, BM, BN)
            # Load gate and up of the next slice.
            b_gate_ahead = gl.load(p_x + o_ahead, mask=mask_ahead, other=0)  # [SR, SC]
            b_up_ahead = gl.load(p_x + n + o_ahead, mask=mask_ahead, other=0)  # [SR, SC]
            if p_scales is not None:
                b_d = b_d * b_rows[:, None]
                b_rows = row_scales(p_scales, i_ahead, m_ahead, m, BLOCKED, BM)  # [SR]
            # dgate = dh · silu'(gate) · up, dup = dh · silu(gate).
            b_g, b_u = b_gate.to(gl.float32), b_up.to(gl.float32)  # [SR, SC] each
            b_s = sigmoid(b_g)  # [SR, SC]
            b_silu = b_s * b_g  # [SR, SC]
            o, mask = slice_offsets(i, i_m, i_n, m, n, 2 * n, BLOCKED, BM, BN)
            d_gate = b_d * (b_s + b_silu * (1 - b_s)) * b_u  # [SR, SC]
            gl.store(p_d + o, d_gate.to(p_d.dtype.element_ty), mask=mask)
            gl.store(p_d + n + o, (b_d * b_silu).to(p_d.dtype.element_ty), mask=mask)
            if p_h is not None:
                o_h, _ = slice_offsets(i, i_m, i_n, m, n, n, BLOCKED, BM, BN)
                gl.store(p_h + o_h, (b_silu * b_u).to(p_h.dtype.element_ty), mask=mask)
            b_gate, b_up = b_gate_ahead, b_up_ahead
        mbarrier.arrive(free, count=1)
        i_m, i_n, is_done = next_m, next_n, is_done ^ 1


# --- The kernel -------------------------------------------------------------------------------------------------------


@gluon.jit
def reinterpret(s, SHAPE: gl.constexpr, like):
    """Return shared memory in another shape, with the layout of `like`: shared memory, or a descriptor."""
    return reinterpret_as(s, s.dtype, SHAPE, like.layout)


@gluon.jit
def epilogue_partition(d_gate, d_up, p_o, p_h, p_r, p_scales, s_o, done, free, tiles_m, tiles_n, m, n,
                       FORM: gl.constexpr, EPILOGUE_WARPS: gl.constexpr, BM: gl.constexpr,
                       BN: gl.constexpr):  # fmt: skip
    """Run the epilogue FORM on the tiles [BM, BN] in shared memory."""
    s_slices = reinterpret(s_o, [BN // SLICE_COLUMNS * (BM // SLICE_ROWS), SLICE_ROWS, SLICE_COLUMNS], s_o)
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [EPILOGUE_WARPS, 1], [1, 0])
    if FORM == SWIGLU and p_scales is not None:
        epilogue_swiglu_scaled(p_o, p_h, p_scales, s_slices, done, free, tiles_m, tiles_n, m, n, BLOCKED, BM, BN // 2)
    elif FORM == SWIGLU:
        epilogue_swiglu(d_gate, d_up, p_h, s_o, s_slices, done, free, tiles_m, tiles_n, m, n, BLOCKED, BM, BN // 2)
    elif FORM == SWIGLU_BACKWARD:
        epilogue_swiglu_backward(p_o, p_h, p_r, p_scales, s_slices, done, free, tiles_m, tiles_n, m, n, BLOCKED, BM, BN)
    else:
        epilogue_linear(p_o, p_r, p_scales, s_slices, done, free, tiles_m, tiles_n, m, n, FORM != SCALED_ROWS, BLOCKED,
                        BM, BN)  # fmt: skip


@gluon.jit(do_not_specialize=["m"])
def gemm_ws(d_x, d_w, d_gate, d_up, p_o, p_h, p_r, p_scales, m, n, k, FORM: gl.constexpr, TRANSPOSED: gl.constexpr,
            BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
            WARPS: gl.constexpr, EPILOGUE_WARPS: gl.constexpr, REGISTERS: gl.constexpr,
            PROMOTE: gl.constexpr):  # fmt: skip
    """Compute tiles of x·w, or x·wᵀ with TRANSPOSED, in persistent programs, with the epilogue FORM.

    Args:
        p_scales: scales of quantized operands: of the m rows and, in the forward forms, of the columns.
    """
    s_x = gl.allocate_shared_memory(d_x.dtype, [STAGES, BM, BK], d_x.layout)
    s_w = gl.allocate_shared_memory(d_w.dtype, [STAGES, BN, BK] if TRANSPOSED else [STAGES, BK, BN], d_w.layout)
    # SLICE_COLUMNS 2-byte elements are 128 bytes, like a row of x's tiles, so that a slice is contiguous in memory.
    if p_scales is None:
        s_o = gl.allocate_shared_memory(d_x.dtype, [BN // SLICE_COLUMNS, BM, SLICE_COLUMNS], d_x.layout)
    else:
        ROUNDED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        s_o = gl.allocate_shared_memory(p_o.dtype.element_ty, [BN // SLICE_COLUMNS, BM, SLICE_COLUMNS], ROUNDED)
    # Barriers: a stage is loaded; an accumulator is stored; the epilogue has read it.
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    mbarrier.init(done, count=1)
    mbarrier.init(free, count=1)
    fence_async_shared()
    OUT_COLUMNS: gl.constexpr = BN // 2 if FORM == SWIGLU else BN
    tiles_m, tiles_n, steps = gl.cdiv(m, BM), gl.cdiv(n, OUT_COLUMNS), gl.cdiv(k, BK)
    gl.warp_specialize([
        (mma_partition, (d_x, d_w, s_x, s_w, s_o, full, done, free, tiles_m, tiles_n, n, steps, FORM, TRANSPOSED, BM,
                         BN, BK, STAGES, WARPS, PROMOTE)),
        (epilogue_partition, (d_gate, d_up, p_o, p_h, p_r, p_scales, s_o, done, free, tiles_m, tiles_n, m, n, FORM,
                              EPILOGUE_WARPS, BM, BN)),
    ], [EPILOGUE_WARPS], [REGISTERS])  # fmt: skip


# --- Launches ---------------------------------------------------------------------------------------------------------


class WsTile(NamedTuple):
    """Tile sizes and launch options of a GEMM."""

    bm: int  # rows of a tile
    bn: int  # columns of a tile
    stages: int  # pipeline stages; more would leave no shared memory for the accumulator
    epilogue_warps: int  # warps of the epilogue; more would leave the MMA warps of wide tiles too few registers
    registers: int  # registers per thread of the epilogue; the MMA warps have the others


# Measured on an H200.
WIDE_TILE = WsTile(128, 256, 3, 4, 168)
NARROW_TILE = WsTile(128, 128, 5, 4, 168)  # for promoted sums, which need twice the registers
SHORT_TILE = WsTile(128, 128, 5, 8, 144)  # for main loops that are shorter than an epilogue with four warps
SHORT_TERMS = 640  # largest K of 2-byte operands for which that holds


def _tile_of(x: Array, form: gl.constexpr) -> WsTile:
    is_fp8 = x.dtype is float8_e4m3fn
    if form is SWIGLU_BACKWARD and (is_fp8 or x.shape[1] <= SHORT_TERMS):
        return SHORT_TILE
    return NARROW_TILE if is_fp8 and x.shape[1] > MAX_IMPRECISE else WIDE_TILE


def _tiles(
    x: Array, n: int, form: gl.constexpr, *others: Array, scales: Array | None = None, tile: WsTile | None = None
) -> int:
    """Return the number of tiles for x's rows and n columns, or 0 if the kernel does not support the operands, of which
    out is the first, or is not the fastest, as it is with a given tile.
    """
    if (x.dtype.itemsize != 2 and x.dtype is not float8_e4m3fn) or x.ndim != 2 or not x.size or is_interpreted():
        return 0
    t, properties = tile or _tile_of(x, form), backend_of(x.device).driver.properties
    tiles = triton.cdiv(x.shape[0], t.bm) * triton.cdiv(n, _out_columns(t, form))
    fits = properties.capability[0] == 9 and tiles < 1 << 21 and x.shape[0] * 2 * n < 1 << 31
    if not fits or (tile is None and tiles < ROUNDS * properties.sm_count):
        return 0
    holds_sums = scales is None or others[0].dtype is bfloat16  # which are not scaled yet
    return tiles if holds_sums and all(is_describable(a, a.shape, a.strides) for a in (x, *others)) else 0


def _out_columns(t: WsTile, form: gl.constexpr) -> int:
    """Return the columns of out in a tile. With SWIGLU, a tile holds as many of gate and of up."""
    return t.bn // 2 if form is SWIGLU else t.bn


def tma_tiles(a: Array, rows: int, columns: int, tf32: bool = False) -> Descriptor:
    """Return a descriptor of tiles of a matrix, with their layout in shared memory. With `tf32`, TMA rounds to tf32."""
    kind = {"bfloat16": gl.bfloat16, "float16": gl.float16, "float8_e4m3fn": gl.float8e4nv, "float32": gl.float32}
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], kind[a.dtype.name])
    return Descriptor(a, a.shape, a.strides, (rows, columns), tf32, layout=repr(layout))


def _launch(
    form: gl.constexpr, x: Array, w: Array, n: int, out: Array, checked: Sequence[Array], *, transposed: bool = True,
    h: Array | None = None, read: Array | None = None, parts: Sequence[Array] = (), scales: Array | None = None,
    tile: WsTile | None = None,
) -> bool:  # fmt: skip
    """Launch `gemm_ws`, unless `_tiles`, given `checked`, is 0; return whether it did. `read` is the residual, or gate
    and up to read; `parts` are gate and up to store.
    """
    if not (tiles := _tiles(x, n, form, *checked, scales=scales, tile=tile)):
        return False
    (m, k), t, bk = x.shape, tile or _tile_of(x, form), BYTES.value // x.dtype.itemsize
    gate_up = [tma_tiles(a, t.bm, SLICE_COLUMNS.value) for a in parts] or [None, None]
    launch(
        gemm_ws, min(tiles, backend_of(x.device).persistent_programs()), tma_tiles(x, t.bm, bk),
        tma_tiles(w, _out_columns(t, form), bk) if transposed else tma_tiles(w, bk, t.bn), *gate_up, out, h, read,
        scales, m, n, k, FORM=form.value, TRANSPOSED=transposed, BM=t.bm, BN=t.bn, BK=bk, STAGES=t.stages,
        WARPS=WARPS, EPILOGUE_WARPS=t.epilogue_warps, REGISTERS=t.registers, num_warps=WARPS,
        PROMOTE=PROMOTE_TERMS // bk if x.dtype is float8_e4m3fn and k > MAX_IMPRECISE else 0,
    )  # fmt: skip
    return True


def can_add_residual(out: Array, x: Array, weight: Array, residual: Array) -> bool:
    """Return whether `ws_residual_into` supports these 2-byte operands, in tiles of any size."""
    return _tiles(x, weight.shape[0], RESIDUAL, out, weight, residual, tile=SHORT_TILE) > 0


def ws_residual_into(
    out: Array, x: Array, weight: Array, residual: Array, scales: Array | None = None, columns: int = 0
) -> bool:
    """Write out = x·weightᵀ + residual. The GEMM's result is rounded before the addition.

    Args:
        out: `[m, n]`, contiguous, of x's 2-byte type, or bfloat16 if x is quantized; `residual` is like out.
        x: `[m, k]`.
        weight: `[n, k]`.
        scales: scales of quantized operands, of rows, then of columns, `[m + n]`.
        columns: columns of a tile, 256 or 128, that are known to be the fastest; 0 if that is not known.

    Returns:
        False, without launching, where this kernel is slower or TMA cannot address the operands.
    """
    n, tile = weight.shape[0], {0: None, WIDE_TILE.bn: WIDE_TILE, SHORT_TILE.bn: SHORT_TILE}[columns]
    return _launch(RESIDUAL, x, weight, n, out, (out, weight, residual), read=residual, scales=scales, tile=tile)


def ws_scaled_into(out: Array, x: Array, weight: Array, scales: Array, of_columns: bool) -> bool:
    """Write out `[m, n]` = x·weightᵀ, scaled, in bfloat16, for long sums. Return False as `ws_residual_into` does.
    Scales are of rows, then of columns if `of_columns` is set.
    """
    form, n = SCALED if of_columns else SCALED_ROWS, weight.shape[0]
    return x.shape[1] > MAX_IMPRECISE and _launch(form, x, weight, n, out, (out, weight), scales=scales)


def is_for_swiglu(x: Array, n: int) -> bool:
    """Return whether `ws_swiglu_into` is the fastest kernel for x `[m, k]` and n columns of gate."""
    return _tiles(x, n, SWIGLU) > 0


def ws_swiglu_into(h: Array, gate_up: Array, x: Array, weight: Array, scales: Array | None = None) -> bool:
    """Write gate_up and h as `gated.gemm_swiglu_into` does, or return False as `ws_residual_into` does. Scales of rows,
    then of columns, multiply the rounded product: scales of quantized operands, or DoRA's factors.
    """
    n = h.shape[1]
    parts = [gate_up.view((gate_up.shape[0], n), (2 * n, 1), gate_up.offset + i * n) for i in range(2)]
    if scales is not None:
        return _launch(SWIGLU, x, weight, n, gate_up, (h, weight, *parts), h=h, scales=scales)
    return _launch(SWIGLU, x, weight, n, h, (h, weight, *parts), h=h, parts=parts)


def ws_swiglu_backward_into(
    d: Array, h: Array | None, g: Array, weight: Array, gate_up: Array, scales: Array | None = None
) -> bool:
    """Write d = [dgate, dup] from the rounded dh = g·weight, and h = silu(gate)·up, or return False as above.

    Args:
        d: `[m, 2·n]`, contiguous, of g's 2-byte type, or bfloat16 if g is quantized; `gate_up` is like d.
        h: `[m, n]`, contiguous, or None.
        g: `[m, k]`.
        weight: `[k, n]`, or transposed, `[n, k]`, if it is quantized.
        scales: scales of quantized operands, of the rows, `[m]`.
    """
    n = weight.shape[scales is None]
    checked = [a for a in (d, weight, gate_up, h) if a is not None]
    return _launch(
        SWIGLU_BACKWARD, g, weight, n, d, checked, transposed=scales is not None, h=h, read=gate_up, scales=scales
    )  # fmt: skip
