"""Gate and up projections with SwiGLU in the GEMM's epilogue: h = silu(x·Wgᵀ)·(x·Wuᵀ) in one kernel.

Plain reference: genesis/ops/linear.py: `packed_linear`, and genesis/ops/swiglu.py: `swiglu_packed`.

A program computes the same columns of gate and up, so it can compute h from the accumulators. That saves the loads of a
separate activation kernel, two thirds of its traffic. Gate and up are stored for the backward pass.

The GEMM is [m, k] x [k, n] twice; tiles are BM rows x BN columns of gate and of up, in steps of BK.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.dtypes import bfloat16, float32
from genesis.kernels.elements import TRITON, converted
from genesis.kernels.gemm.copies import can_extend, concat_columns, ones_and
from genesis.kernels.gemm.fp8 import quantize_operands
from genesis.kernels.gemm.gemm import grouped_tile
from genesis.kernels.gemm.linalg import Scales, matmul_into
from genesis.kernels.gemm.low_rank import make_u
from genesis.kernels.gemm.warp_specialized import is_for_swiglu, ws_swiglu_into
from genesis.kernels.pointwise.swiglu import sigmoid_fast, swiglu_packed
from genesis.ops.low_rank import LowRank, Operands


class SwigluTile(NamedTuple):
    """Tile sizes and launch options of the GEMM."""

    bm: int  # rows
    bn: int  # columns of gate and of up
    bk: int  # elements along k
    warps: int  # warps per program
    stages: int  # pipeline stages
    group: int = 8  # rows of tiles in a group of `grouped_tile`
    ctas_per_sm: int = 1  # programs per SM
    slices: int = 2  # slices in which the epilogue stores a tile


# Measured on an H200: with two programs per SM, one's epilogue overlaps the other's main loop.
_LARGE = SwigluTile(128, 64, 64, 8, 3, ctas_per_sm=2)
_MEDIUM = SwigluTile(64, 64, 64, 4, 4, ctas_per_sm=2, slices=1)


@triton.jit
def swiglu(b_gate, b_up):
    """Return silu(gate)·up in float32, with the same operations that the backward pass recomputes it with."""
    g, u = converted(b_gate, tl.float32), converted(b_up, tl.float32)
    return sigmoid_fast(g) * g * u


@triton.jit
def store_tile(b_gate, b_up, d_gate, d_up, d_h, o_m, o_n, TYPE: tl.constexpr):
    """Store a tile [BM, BN] of gate, up and h. h is computed from the rounded gate and up."""
    b_g, b_u = converted(b_gate, TYPE), converted(b_up, TYPE)  # [BM, BN]
    d_gate.store([o_m, o_n], b_g)
    d_up.store([o_m, o_n], b_u)
    d_h.store([o_m, o_n], converted(swiglu(b_g, b_u), TYPE))


@triton.jit
def halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """Return the left and right halves [BM, BN // 2] of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def store_slices(b_gate, b_up, d_gate, d_up, d_h, o_m, o_n, TYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                 SLICES: tl.constexpr):  # fmt: skip
    """Call `store_tile` for SLICES slices of columns in turn, which leaves more shared memory for stages."""
    if SLICES == 1:
        store_tile(b_gate, b_up, d_gate, d_up, d_h, o_m, o_n, TYPE)
    else:
        g_left, g_right = halves(b_gate, BM, BN)  # [BM, BN // 2] each
        u_left, u_right = halves(b_up, BM, BN)  # [BM, BN // 2] each
        store_slices(g_left, u_left, d_gate, d_up, d_h, o_m, o_n, TYPE, BM, BN // 2, SLICES // 2)
        store_slices(g_right, u_right, d_gate, d_up, d_h, o_m, o_n + BN // 2, TYPE, BM, BN // 2, SLICES // 2)


@triton.jit(do_not_specialize=["m", "n", "k"])
def gemm_swiglu(d_x, d_w, d_gate, d_up, d_h, m, n, k, TYPE: tl.constexpr, DOT: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SLICES: tl.constexpr):  # fmt: skip
    """Compute tiles [BM, BN] of gate, up and h in persistent programs. A tile of the weights holds BN rows of gate and,
    below them, the same rows of up, so that one dot computes both.
    """
    start, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, BK)
    # The store has its own tile counter: a shared one would make the next tile's loads depend on this tile's store.
    i_stored = start - programs
    for i_tile in tl.range(start, tiles_m * tiles_n, programs, flatten=True):
        _, i_m, i_n = grouped_tile(i_tile, tiles_m, tiles_n, GROUP, "one")
        b_acc = tl.zeros((BM, 2 * BN), tl.float32)  # [BM, 2 * BN]
        for i_k in range(steps):
            b_x = converted(d_x.load([i_m * BM, i_k * BK]), DOT)  # [BM, BK]
            b_w = converted(d_w.load([0, i_n * BN, i_k * BK]).reshape(2 * BN, BK), DOT)  # [2 * BN, BK]
            b_acc = tl.dot(b_x, b_w.T, b_acc)  # [BM, 2 * BN]
        i_stored += programs
        _, i_m, i_n = grouped_tile(i_stored, tiles_m, tiles_n, GROUP, "one")
        b_gate, b_up = halves(b_acc, BM, 2 * BN)  # [BM, BN] each
        store_slices(b_gate, b_up, d_gate, d_up, d_h, i_m * BM, i_n * BN, TYPE, BM, BN, SLICES)


def gemm_swiglu_into(h: Array, gate_up: Array, x: Array, weight: Array, tile: SwigluTile | None = None) -> bool:
    """Write gate_up = [gate | up] = x·weightᵀ and h = silu(gate)·up.

    Args:
        h: `[m, f]`, contiguous, of x's 2-byte type.
        gate_up: `[m, 2·f]`, contiguous.
        x: `[m, k]`, contiguous.
        weight: `[2·f, k]`: the rows of gate, then the rows of up.

    Returns:
        False, without launching, where the device has no TMA or TMA cannot address the operands.
    """
    if tile is None and ws_swiglu_into(h, gate_up, x, weight):
        return True
    (m, k), n = x.shape, h.shape[1]
    properties = backend_of(x.device).driver.properties
    if properties.capability < (9, 0) or x.dtype.itemsize != 2 or not x.size or not h.size or not weight.is_contiguous:
        return False
    w = weight.view((2, n, k), (n * k, k, 1), weight.offset)
    parts = [gate_up.view((m, n), (2 * n, 1), gate_up.offset + i * n) for i in range(2)]
    if not all(is_describable(a, a.shape, a.strides) for a in (x, w, *parts, h)):
        return False
    t = tile or (_LARGE if m * n >= 1 << 22 else _MEDIUM)

    def tma_tiles(a: Array, *block: int) -> Descriptor:
        return Descriptor(a, a.shape, a.strides, block)

    tiles = triton.cdiv(m, t.bm) * triton.cdiv(n, t.bn)
    launch(
        gemm_swiglu, min(tiles, backend_of(x.device).persistent_programs(t.ctas_per_sm)), tma_tiles(x, t.bm, t.bk),
        tma_tiles(w, 2, t.bn, t.bk), *(tma_tiles(a, t.bm, t.bn // t.slices) for a in (*parts, h)), m, n, k,
        TYPE=TRITON[x.dtype.name], DOT=TRITON[(float32 if is_interpreted() and x.dtype is bfloat16 else x.dtype).name],
        BM=t.bm, BN=t.bn, BK=t.bk, GROUP=t.group, SLICES=t.slices, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return True


def adapted_gemm_swiglu_into(
    h: Array, gate_up: Array, u: Array, x: Array, weight: Array, operands: Operands, low_rank: LowRank
) -> bool:
    """Compute `gemm_swiglu_into` with low-rank pairs, as [x | u]·[weight | B]ᵀ, and u `[m, rank]`, contiguous.

    Returns False, without writing h and gate_up, where copying costs more, or unless gate and up have pairs of the same
    rank with a single operand B. Factors, which add a rounding, require bfloat16 and `is_for_swiglu`.
    """
    halves, factors = [(0, h.shape[1]), (h.shape[1], 2 * h.shape[1])], operands.factors
    is_regular = [p[:2] for p in low_rank.pairs] == halves and len({p.rank for p in low_rank.pairs}) == 1
    if not is_regular or len(operands.b) != 1:
        return False
    properties = backend_of(x.device).driver.properties
    if properties.capability < (9, 0) or x.dtype.itemsize != 2 or not x.size or not h.size or not weight.is_contiguous:
        return False
    if not can_extend(x.shape[0], x.shape[1], low_rank.rank):
        return False
    if factors is not None and not (x.dtype is bfloat16 and is_for_swiglu(x, h.shape[1])):
        return False
    make_u(u, x, operands, low_rank)
    left, right = concat_columns(x, u), concat_columns(weight, operands.b[0], parts=2)
    if factors is None:
        return gemm_swiglu_into(h, gate_up, left, right)
    return ws_swiglu_into(h, gate_up, left, right, ones_and(x.shape[0], factors))  # scales of rows, then of columns


def quantized_gemm_swiglu_into(h: Array, gate_up: Array, x: Array, weight: Array) -> None:
    """Compute `gemm_swiglu_into` in 8-bit floats, on any device. With few tiles, a separate kernel computes h."""
    if not h.size:
        return
    codes, rows, scales = quantize_operands(x, weight)
    if not ws_swiglu_into(h, gate_up, codes, rows, scales):
        matmul_into(gate_up, codes, rows, transpose_b=True, scales=Scales(scales, True))
        swiglu_packed(h, gate_up)
