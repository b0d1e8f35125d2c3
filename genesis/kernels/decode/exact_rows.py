"""Matmuls with at most 32 rows under `genesis.exact`: each result is one chain of additions along K.

Plain reference: genesis/ops/linear.py: `linear`, `packed_linear`; genesis/ops/swiglu.py: `swiglu_packed`.

With few rows the chain decides the time: on an H200 a step of 16 elements takes 24 cycles, and K = 4,864 has 304 steps.
A program is a single warp with 16 rows of W as operand A of mma.sync, so that nothing but its chain holds it up. TMA
loads W several steps ahead and, if no earlier kernel writes weights (`mode.fixed_weights`), before the previous kernel
ends. The bits are those of `wide_rows.py`, because an MMA has the same terms, and the order of MMAs is the same.

The kernel is written in Gluon, which has no interpreter. Its results are checked on a GPU against `wide_rows.py`.

Tiles: 16 rows of W (of gate and up together with SwiGLU), BX rows of x, in steps of BOXES boxes of 64 elements along K.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from genesis.array import Array
from genesis.backend import mode
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import Descriptor
from genesis.kernels import maths
from genesis.kernels.decode.few_rows import MAX_ROWS, Norm
from genesis.kernels.dependents import allow_next, can_overlap, wait_for_previous
from genesis.kernels.gemm.gated import swiglu
from genesis.kernels.gemm.warp_specialized import reinterpret_as, tma_load
from genesis.shapes import Shape

async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # Triton 3.9 and 3.6

BOX = gl.constexpr(64)  # elements along K of a box: 128 bytes
ROWS = gl.constexpr(16)  # rows of W per program
MAX_ROW = 16384  # longest single row of x that is loaded at once
SHORT = 2048  # longest K with short steps


class ExactTile(NamedTuple):
    """Tile of a matmul with one warp per program."""

    bx: int  # rows of x
    boxes: int  # boxes along K per step
    stages: int  # steps whose loads are in flight
    length: int  # power of 2 that holds the only row of x, which is loaded at once; 0 for several rows


@gluon.jit
def inverse_rms(b_x, eps, SIZE: gl.constexpr):
    """Return 1 / rms of the rows of b_x [rows, SIZE], as `norm_forward_kernel` computes it under `genesis.exact`."""
    b_total = maths.order_free_sum(maths.rounded_product(b_x, b_x), 1)  # [rows]
    b_one = gl.where(b_total == b_total, 1.0, 1.0)  # [rows]
    return maths.divide(b_one, maths.root(maths.divide(b_total, b_one * SIZE) + eps))


@gluon.jit
def load_w(d_w, s_w, full, stage, i_step, i_n, pred, GATED: gl.constexpr, BYTES: gl.constexpr, BOXES: gl.constexpr):
    """Issue the load of W of a step into a stage, whose barrier then waits for x, too."""
    mbarrier.expect(full.index(stage), BYTES, pred=pred)
    if GATED:
        tma_load(d_w, [i_step * BOXES, 0, i_n, 0], full.index(stage), s_w.index(stage), pred=pred)
    else:
        tma_load(d_w, [i_step * BOXES, i_n, 0], full.index(stage), s_w.index(stage), pred=pred)


@gluon.jit
def load_row(p_x, p_norm, p_rstd, eps, OVERLAP: gl.constexpr, K: gl.constexpr, LENGTH: gl.constexpr):
    """Wait for the previous kernel; return the row x, normalised with p_norm, as boxes [LENGTH / 64, 64]."""
    TYPE: gl.constexpr = p_x.dtype.element_ty
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_x = gl.allocate_shared_memory(TYPE, [LENGTH], FLAT)
    if p_norm is None:
        o_k = gl.arange(0, LENGTH, gl.BlockedLayout([8], [32], [1], [0]))  # [LENGTH]
        wait_for_previous(OVERLAP)
        async_load(s_x, p_x + o_k, mask=o_k < K)  # 0 beyond K
        async_copy.commit_group()
        async_copy.wait_group(0)
    else:
        o_k = gl.arange(0, LENGTH, gl.SliceLayout(0, TILE))[None, :]  # [1, LENGTH]
        b_scale = gl.load(p_norm + o_k, mask=o_k < K, other=0).to(gl.float32)  # [1, LENGTH]
        wait_for_previous(OVERLAP)
        b_x = gl.load(p_x + o_k, mask=o_k < K, other=0).to(gl.float32)  # [1, LENGTH]
        b_rstd = inverse_rms(b_x, eps, K)  # [1]
        gl.store(p_rstd + gl.arange(0, 1, gl.SliceLayout(1, TILE)), b_rstd)  # every program stores the same value
        s_x.store((b_x * b_rstd[:, None] * b_scale).to(TYPE).reshape((LENGTH,)))
    return reinterpret_as(s_x, TYPE, [LENGTH // BOX, BOX], FLAT)


@gluon.jit(do_not_specialize=["m"])
def exact_rows_kernel(p_y, p_h, p_rstd, x, d_w, p_norm, p_bias, p_residual, m, n, y_row, eps, K: gl.constexpr,
                      LENGTH: gl.constexpr, OVERLAP: gl.constexpr, EARLY: gl.constexpr, BX: gl.constexpr,
                      BOXES: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Compute y = x·Wᵀ + bias, rounded, plus the residual. With p_h, W is [gate | up], and h = silu(gate)·up too.

    Args:
        x: boxes of x; with LENGTH a pointer to its only row, which is loaded at once.
        p_norm: weight of an RMSNorm of that row, whose 1 / rms is stored at p_rstd.
        y_row: row stride of y and of the residual.
        m: number of rows; `n` is the number of columns, of gate alone with p_h.
    """
    GATED: gl.constexpr = p_h is not None
    TYPE: gl.constexpr = p_y.dtype.element_ty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    BOXED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    STEPS: gl.constexpr = (K + BOX * BOXES - 1) // (BOX * BOXES)
    FIRST: gl.constexpr = min(STAGES, STEPS)
    BYTES: gl.constexpr = (ROWS if LENGTH else ROWS + BX) * BOX * 2 * BOXES
    BN: gl.constexpr = ROWS // 2 if GATED else ROWS
    allow_next(OVERLAP)
    i_n = gl.program_id(0) * BN
    # Load the first stages of W, before the previous kernel ends, and x.
    s_w = gl.allocate_shared_memory(
        TYPE, [STAGES, BOXES, 2, BN, BOX] if GATED else [STAGES, BOXES, BN, BOX], d_w.layout
    )
    s_w_boxes = reinterpret_as(s_w, TYPE, [STAGES * BOXES, ROWS, BOX], BOXED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    if not EARLY:
        wait_for_previous(OVERLAP)
    for i in gl.static_range(FIRST):
        load_w(d_w, s_w, full, i, i, i_n, True, GATED, BYTES, BOXES)
    if LENGTH:
        s_x_boxes = load_row(x, p_norm, p_rstd, eps, OVERLAP, K, LENGTH)
    else:
        wait_for_previous(OVERLAP)
        s_x = gl.allocate_shared_memory(TYPE, [STAGES, BOXES, BX, BOX], x.layout)
        s_x_boxes = reinterpret_as(s_x, TYPE, [STAGES * BOXES, BX, BOX], BOXED)
        for i in gl.static_range(FIRST):
            tma_load(x, [i * BOXES, 0, 0], full.index(i), s_x.index(i))
    # Load what the epilogue adds.
    o_w = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))[:, None]  # [16, 1]
    o_x = gl.arange(0, BX, gl.SliceLayout(0, ACC))[None, :]  # [1, BX]
    o_n = i_n + o_w % BN  # [16, 1]
    o_y = o_x.to(gl.int64) * y_row + o_n + o_w // BN * n  # [16, BX]
    m_y = (o_x < m) & (o_n < n)  # [16, BX]
    if p_residual is not None:
        b_residual = gl.load(p_residual + o_y, mask=m_y, other=0).to(gl.float32)  # [16, BX]
    # Main loop.
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    b_acc = gl.zeros((ROWS, BX), gl.float32, ACC)  # [16, BX]
    for i_step in range(STEPS):
        stage = i_step % STAGES
        mbarrier.wait(full.index(stage), i_step // STAGES & 1)
        for i in gl.static_range(BOXES):
            if LENGTH:
                b_row = s_x_boxes.index(i_step * BOXES + i).load(gl.SliceLayout(1, B))  # [64]
                b_x, _ = gl.broadcast(b_row[:, None], gl.zeros((BOX, BX), TYPE, B))  # [64, BX]
            else:
                b_x = s_x_boxes.index(stage * BOXES + i).permute((1, 0)).load(B)  # [64, BX]
            b_acc = mma_v2(s_w_boxes.index(stage * BOXES + i).load(A), b_x, b_acc)  # [16, BX]
        if STEPS > STAGES:
            i_ahead = i_step + STAGES
            load_w(d_w, s_w, full, stage, i_ahead, i_n, i_ahead < STEPS, GATED, BYTES, BOXES)
            if not LENGTH:
                tma_load(x, [i_ahead * BOXES, 0, 0], full.index(stage), s_x.index(stage), pred=i_ahead < STEPS)
    # Epilogue.
    if p_bias is not None:
        b_acc += gl.load(p_bias + o_n, mask=o_n < n, other=0).to(gl.float32)
    b_y = b_acc.to(TYPE)  # [16, BX]
    if p_residual is not None:
        b_y = (b_y.to(gl.float32) + b_residual).to(TYPE)
    gl.store(p_y + o_y, b_y, mask=m_y)
    if GATED:
        HALF: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, 1], [1, 0])
        b_gate, b_up = b_y.to(gl.float32).reshape((2, BN, BX)).permute((1, 2, 0)).split()  # [8, BX] each
        b_gate, b_up = gl.convert_layout(b_gate, HALF), gl.convert_layout(b_up, HALF)
        o_n = i_n + gl.arange(0, BN, gl.SliceLayout(1, HALF))[:, None]  # [8, 1]
        o_x = gl.arange(0, BX, gl.SliceLayout(0, HALF))[None, :]  # [1, BX]
        b_h = swiglu(b_gate, b_up).to(TYPE)  # [8, BX]
        gl.store(p_h + o_x.to(gl.int64) * n + o_n, b_h, mask=(o_x < m) & (o_n < n))


# --- Launching it -----------------------------------------------------------------------------------------------------


def choose_exact_tile(m: int, k: int, is_gated: bool = False) -> ExactTile:
    """Return the tile for m rows: few long steps, or short ones for many programs per SM or for more than 8 rows."""
    bx = max(8, triton.next_power_of_2(m))
    is_long_step = bx == 8 and not is_gated and k <= 16 * BOX.value
    short = (8 if k > 12 * BOX.value else 4, 4) if is_long_step else (2, 4 if m == 1 else 5)
    boxes, stages = short if k <= SHORT else (16, 2) if bx == 8 else (4, 4)
    length = max(triton.next_power_of_2(k), boxes * BOX.value) if m == 1 and k <= MAX_ROW else 0
    return ExactTile(bx, boxes, min(stages, triton.cdiv(k, boxes * BOX.value)), length)


def takes_exact_rows(m: int, k: int) -> bool:
    """Return whether the kernel is exact and the fastest for m rows of k elements, outside of the interpreter."""
    most = MAX_ROWS if k <= SHORT else MAX_ROWS // 2
    return mode.exact and m <= most and k % BOX.value == 0 and not is_interpreted()


def exact_rows_into(
    y: Array, h: Array | None, x: Array, weight: Array, bias: Array | None = None, residual: Array | None = None,
    norm: Norm | None = None, tile: ExactTile | None = None,
) -> None:  # fmt: skip
    """Compute y = norm(x)·weightᵀ + bias, rounded, plus the residual; see `wide_rows.py` for arguments and conditions.

    Args:
        norm: RMSNorm of x, which then has one contiguous row; its `rstd` is required.
    """
    (m, k), n = x.shape, weight.shape[0] // (1 if h is None else 2)
    t, scale, eps, rstd = tile or choose_exact_tile(m, k, h is not None), *(norm or (None, 0.0, None))
    rows = ROWS.value if h is None else ROWS.value // 2
    boxes = Descriptor(x, *_boxed(x, m, 1), (t.boxes, t.bx, BOX.value), layout=_layout(3)) if not t.length else x
    w_box = (t.boxes, rows, BOX.value) if h is None else (t.boxes, 2, rows, BOX.value)
    w_boxes = Descriptor(weight, *_boxed(weight, n, 1 if h is None else 2), w_box, layout=_layout(len(w_box)))
    launch(
        exact_rows_kernel, triton.cdiv(n, rows), y, h, rstd, boxes, w_boxes, scale, bias, residual, m, n, y.strides[0],
        float(eps), K=k, LENGTH=t.length, OVERLAP=can_overlap(x), EARLY=mode.fixed_weights, BX=t.bx,
        BOXES=t.boxes, STAGES=t.stages, num_warps=1,
    )  # fmt: skip


def _boxed(a: Array, rows: int, parts: int) -> tuple[Shape, Shape]:
    """Return shape and strides of a `[parts · rows, k]` as `[k / 64, parts, rows, 64]`, without one part."""
    boxes, row = a.shape[1] // BOX.value, a.strides[0]
    if parts == 1:
        return (boxes, rows, BOX.value), (BOX.value, row, 1)
    return (boxes, parts, rows, BOX.value), (BOX.value, rows * row, row, 1)


def _layout(rank: int) -> str:
    """Return the layout of boxes of 128 bytes in shared memory."""
    return repr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank))
