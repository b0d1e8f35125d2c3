"""Twins of matrix products, and `matmul_into`, with which other twins multiply and finish the result in the same kernel.

Two kernels do the work. `by_descriptors` stays resident, one program a processor, and has the copy engine of Hopper
and newer fetch tiles through tensor descriptors; `by_pointers` computes one tile a program on any device and from any
strides. Operands are read in the order in which they lie in memory and tiles are transposed on the way to the tensor
cores, so no layout is copied first. Where whole rounds over the processors leave tiles over, these are split along k:
their parts go to memory in float32 and `add_parts` adds them in order, so the result never depends on timing.

Letters: the product is [m, k] x [k, n]; BM, BN, BK are the tile's sizes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.descriptor import Descriptor, is_describable
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.precision import allow_tf32
from genesis.backend.cuda.twins import twin
from genesis.dtypes import DType, bfloat16, float32, int64
from genesis.kernels.indices import collapse, is_wide, offsets
from genesis.kernels.matmul_tiles import Tile, choose
from genesis.kernels.maths import exp, tanh
from genesis.kernels.types import TRITON, converted, work_type
from genesis.op import registry
from genesis.shapes import Shape, broadcast_shapes, broadcast_strides

__all__ = ["matmul_into"]


# --- What a tile goes through after the sum ---------------------------------------------------------------------------


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        return tl.where(x > 0, x, tl.where(x != x, x, 0))
    elif ACTIVATION == "silu":
        return x / (1 + exp(-x))
    elif ACTIVATION == "gelu_tanh":
        return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        return x


@triton.jit
def finished(b_acc, i_batch, o_m, o_n, m, n, p_o, p_bias, p_residual, alpha, so, WORK: tl.constexpr,
             EPILOGUE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The tile as it is stored: activation(alpha·acc + bias) + residual + what out held."""
    BIAS: tl.constexpr = EPILOGUE[0]
    if EPILOGUE[4]:
        b_acc = b_acc * alpha
    if BIAS == "n":
        b_acc += converted(tl.load(p_bias + o_n, mask=o_n < n, other=0), WORK)[None, :]
    if BIAS == "m":
        b_acc += converted(tl.load(p_bias + o_m, mask=o_m < m, other=0), WORK)[:, None]
    b_acc = activated(b_acc, EPILOGUE[1])
    if EPILOGUE[2] or EPILOGUE[3]:
        o = out_offsets(i_batch, o_m, o_n, so, WIDE)
        b_mask = (o_m < m)[:, None] & (o_n < n)[None, :]
        if EPILOGUE[2]:
            b_acc += converted(tl.load(p_residual + o, mask=b_mask, other=0), WORK)
        if EPILOGUE[3]:
            b_acc += converted(tl.load(p_o + o, mask=b_mask, other=0), WORK)
    return b_acc


@triton.jit
def out_offsets(i_batch, o_m, o_n, so, WIDE: tl.constexpr):
    if WIDE:
        i_batch, o_m, o_n = i_batch.to(tl.int64), o_m.to(tl.int64), o_n.to(tl.int64)
    return i_batch * so[0] + o_m[:, None] * so[1] + o_n[None, :] * so[2]


@triton.jit
def place(i_tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Batch, row and column of a tile: GROUP rows are walked together, so that neighbours in time share L2."""
    i_batch = i_tile // (tiles_m * tiles_n)
    i_tile = i_tile % (tiles_m * tiles_n)
    first = i_tile // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    within = i_tile % (GROUP * tiles_n)
    return i_batch, first + within % rows, within // rows


# --- Tiles through tensor descriptors ---------------------------------------------------------------------------------


@triton.jit
def fetched(d_x, i_batch, batches, at0, at1, SPREAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile [ROWS, COLUMNS] as it lies in memory; SPREAD says along which batch dimensions the operand moves."""
    if len(SPREAD) == 0:
        return d_x.load([at0, at1])
    elif len(SPREAD) == 1:
        return d_x.load([i_batch * SPREAD[0], at0, at1]).reshape(ROWS, COLUMNS)
    else:
        outer, inner = i_batch // batches[1], i_batch % batches[1]
        return d_x.load([outer * SPREAD[0], inner * SPREAD[1], at0, at1]).reshape(ROWS, COLUMNS)


@triton.jit
def multiplied(d_a, d_b, b_acc, i_batch, batches, o_m, o_n, o_k, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr,
               A_SPREAD: tl.constexpr, B_SPREAD: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """acc plus the product of two tiles; a turned operand lies with its k (a) or n (b) outermost."""
    if A_TURNED:
        b_a = fetched(d_a, i_batch, batches, o_k, o_m, A_SPREAD, BK, BM).T
    else:
        b_a = fetched(d_a, i_batch, batches, o_m, o_k, A_SPREAD, BM, BK)
    if B_TURNED:
        b_b = fetched(d_b, i_batch, batches, o_n, o_k, B_SPREAD, BN, BK).T
    else:
        b_b = fetched(d_b, i_batch, batches, o_k, o_n, B_SPREAD, BK, BN)
    return tl.dot(converted(b_a, TYPE), converted(b_b, TYPE), b_acc, input_precision=PRECISION)


@triton.jit
def stored(b_acc, d_o, i_batch, o_m, o_n, m, n, p_o, p_bias, p_residual, alpha, so, EPILOGUE: tl.constexpr,
           STORE: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Finish and store [BM, BN] at (o_m, o_n): through a descriptor of out or of outᵀ, or through pointers."""
    i_m, i_n = o_m + tl.arange(0, BM), o_n + tl.arange(0, BN)
    b_y = finished(b_acc, i_batch, i_m, i_n, m, n, p_o, p_bias, p_residual, alpha, so, tl.float32, EPILOGUE, WIDE)
    b_y = converted(b_y, p_o.dtype.element_ty)
    if STORE == "rows":
        d_o.store([i_batch, o_m, o_n], b_y.reshape(1, BM, BN))
    elif STORE == "columns":
        d_o.store([i_batch, o_n, o_m], b_y.T.reshape(1, BN, BM))
    else:
        b_mask = (i_m < m)[:, None] & (i_n < n)[None, :]
        tl.store(p_o + out_offsets(i_batch, i_m, i_n, so, WIDE), b_y, mask=b_mask)


@triton.jit
def by_descriptors(d_a, d_b, d_o, p_o, p_parts, p_bias, p_residual, alpha, m, n, k, batches, so, whole, rest, share,
                   A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, A_SPREAD: tl.constexpr, B_SPREAD: tl.constexpr,
                   TYPE: tl.constexpr, PRECISION: tl.constexpr, EPILOGUE: tl.constexpr, STORE: tl.constexpr,
                   WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                   SPLIT: tl.constexpr, HALVES: tl.constexpr, SPECIALIZED: tl.constexpr):  # fmt: skip
    """`whole` tiles from first to last k; then `rest` tiles in SPLIT parts of `share` steps each, kept in `p_parts`."""
    start, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, BK)
    # The store counts tiles by itself: one number for both would tie the loads of the next tile to this one's store.
    i_stored = start - programs
    for i_tile in tl.range(start, whole, programs, flatten=True, warp_specialize=SPECIALIZED):
        i_batch, i_m, i_n = place(i_tile, tiles_m, tiles_n, GROUP)
        b_acc = tl.zeros((BM, BN), tl.float32)
        for i_k in range(steps):
            b_acc = multiplied(d_a, d_b, b_acc, i_batch, batches, i_m * BM, i_n * BN, i_k * BK, A_TURNED, B_TURNED,
                               A_SPREAD, B_SPREAD, TYPE, PRECISION, BM, BN, BK)  # fmt: skip
        i_stored += programs
        i_batch, i_m, i_n = place(i_stored, tiles_m, tiles_n, GROUP)
        o_m, o_n = i_m * BM, i_n * BN
        if HALVES:  # half the registers at the store, and half the shared memory
            HALF: tl.constexpr = BN // 2
            b_left, b_right = tl.split(tl.permute(tl.reshape(b_acc, (BM, 2, HALF)), (0, 2, 1)))
            stored(b_left, d_o, i_batch, o_m, o_n, m, n, p_o, p_bias, p_residual, alpha, so, EPILOGUE, STORE, WIDE,
                   BM, HALF)  # fmt: skip
            stored(b_right, d_o, i_batch, o_m, o_n + HALF, m, n, p_o, p_bias, p_residual, alpha, so, EPILOGUE, STORE,
                   WIDE, BM, HALF)  # fmt: skip
        else:
            stored(b_acc, d_o, i_batch, o_m, o_n, m, n, p_o, p_bias, p_residual, alpha, so, EPILOGUE, STORE, WIDE,
                   BM, BN)  # fmt: skip
    if SPLIT > 1:
        for i_part in tl.range(start, rest * SPLIT, programs):
            i_batch, i_m, i_n = place(whole + i_part // SPLIT, tiles_m, tiles_n, GROUP)
            first = i_part % SPLIT * share
            b_acc = tl.zeros((BM, BN), tl.float32)
            for i_k in range(first, tl.minimum(first + share, steps)):
                b_acc = multiplied(d_a, d_b, b_acc, i_batch, batches, i_m * BM, i_n * BN, i_k * BK, A_TURNED, B_TURNED,
                                   A_SPREAD, B_SPREAD, TYPE, PRECISION, BM, BN, BK)  # fmt: skip
            o = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
            tl.store(p_parts + i_part.to(tl.int64) * (BM * BN) + o, b_acc)


@triton.jit
def add_parts(p_o, p_parts, p_bias, p_residual, alpha, m, n, so, whole, EPILOGUE: tl.constexpr, WIDE: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
              ROWS: tl.constexpr):  # fmt: skip
    """ROWS rows of a split tile: its parts added from first to last, finished, stored."""
    i_rest, i_rows = tl.program_id(0) // (BM // ROWS), tl.program_id(0) % (BM // ROWS)
    i_batch, i_m, i_n = place(whole + i_rest, tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    i_row = i_rows * ROWS + tl.arange(0, ROWS)
    p_part = p_parts + i_rest.to(tl.int64) * (SPLIT * BM * BN) + i_row[:, None] * BN + tl.arange(0, BN)[None, :]
    b_acc = tl.load(p_part)
    for i_part in range(1, SPLIT):
        b_acc += tl.load(p_part + i_part * (BM * BN))
    o_m, o_n = i_m * BM + i_row, i_n * BN + tl.arange(0, BN)
    b_y = finished(b_acc, i_batch, o_m, o_n, m, n, p_o, p_bias, p_residual, alpha, so, tl.float32, EPILOGUE, WIDE)
    b_mask = (o_m < m)[:, None] & (o_n < n)[None, :]
    tl.store(p_o + out_offsets(i_batch, o_m, o_n, so, WIDE), converted(b_y, p_o.dtype.element_ty), mask=b_mask)
