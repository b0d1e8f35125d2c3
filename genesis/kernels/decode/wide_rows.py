"""Matmuls of a step with many sequences: up to 512 rows by wgmma, in one launch with bias, residual or SwiGLU.

Plain reference: genesis/ops/linear.py: `linear`, `packed_linear`; genesis/ops/swiglu.py: `swiglu_packed`.

With 33 to 512 rows a matmul takes 2 to 10 us: reading the weight is still limited by memory bandwidth, but x no longer
fits into the registers of every program, as few_rows.py requires. A program computes one tile of the result, over a
part of K if K is long and the tiles are few, and lets the next kernel start before its epilogue. `gemm/gemm.py`
computes all other matmuls.

If the next kernel starts at once to prefetch its rows of W to L2, gate and up of 64 rows take 9.3 us (7.4 without),
because waiting programs hold shared memory that running ones need.

Results are rounded before the residual is added. Under `genesis.exact`, which also runs 1 to 32 rows here, a result is
one chain of float32 additions along K, in ascending steps of 16. So the bits of a row do not depend on other rows or
on the tile.

Tiles: BM rows of x, BN rows of W (of gate and of up with SwiGLU), in steps of BK.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend import mode
from genesis.backend.cuda import COUNTERS, backend_of
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.tma import Descriptor, is_describable
from genesis.dtypes import bfloat16, float16, float32, int32
from genesis.kernels import maths
from genesis.kernels.decode.exact_rows import exact_rows_into, takes_exact_rows
from genesis.kernels.decode.few_rows import MAX_ROWS
from genesis.kernels.dependents import allow_next, can_overlap, wait_for_previous
from genesis.kernels.elements import TRITON, as_matrix, converted
from genesis.kernels.gemm.gated import halves, swiglu
from genesis.ops.shape import columns, contiguous

WIDE_ROWS = 512  # largest number of rows
VOCABULARY = 1 << 16  # rows of W from which gemm/gemm.py is faster
SHORT = 2048  # largest K that takes steps of at most 128
SHARED = 208 << 10  # bytes of all stages on an SM
STAGES = 8  # largest number of stages
MAX_NORM = 4096  # longest row that exact_rows.py normalises


class WideTile(NamedTuple):
    """Tile of a matmul with up to 512 rows."""

    bm: int  # rows of x
    bn: int  # rows of W; with SwiGLU rows of gate and as many of up
    bk: int  # elements along K per step
    warps: int
    stages: int
    splits: int = 1  # programs that share K


# Tiles (rows of x, rows of W) by weights, the smallest first, and the most programs per SM. Measured on an H200.
_SIZES = {
    1: ((64, 16, 1), (64, 32, 1), (64, 64, 1), (64, 128, 1), (128, 128, 2)),
    2: ((64, 32, 3), (64, 64, 2), (128, 64, 2)),
}


# --- The kernel -------------------------------------------------------------------------------------------------------


@triton.jit
def store_tile(b_acc, b_residual, p_y, p_h, p_bias, o_y, o_m, o_n, m, n, BM: tl.constexpr, BN: tl.constexpr):
    """Store the tile [BM, BN] of y with bias and residual, or of gate, up and h."""
    TYPE: tl.constexpr = (p_y if p_h is None else p_h).dtype.element_ty
    m_y = (o_m < m)[:, None] & (o_n < n)[None, :]  # [BM, BN]
    if p_h is not None:
        b_gate, b_up = halves(b_acc, BM, 2 * BN)  # [BM, BN] each
        b_gate, b_up = converted(b_gate, TYPE), converted(b_up, TYPE)
        if p_y is not None:
            tl.store(p_y + o_y, b_gate, mask=m_y)
            tl.store(p_y + o_y + n, b_up, mask=m_y)
        o_h = o_m.to(tl.int64)[:, None] * n + o_n[None, :]  # [BM, BN]
        tl.store(p_h + o_h, converted(swiglu(b_gate, b_up), TYPE), mask=m_y)
    else:
        if p_bias is not None:
            # Triton would begin a chain of one step with the bias if it were added by +.
            b_bias = converted(tl.load(p_bias + o_n, mask=o_n < n, other=0), tl.float32)[None, :]  # [1, BN]
            b_one = tl.full((BM, BN), 1, tl.float32)  # [BM, BN]
            b_acc = maths.fma(b_acc, b_one, tl.broadcast_to(b_bias, (BM, BN)))  # [BM, BN]
        b_y = converted(b_acc, TYPE)  # [BM, BN]
        if b_residual is not None:
            b_y = converted(converted(b_y, tl.float32) + converted(b_residual, tl.float32), TYPE)
        tl.store(p_y + o_y, b_y, mask=m_y)


@triton.jit(do_not_specialize=["m"])
def wide_rows_kernel(p_y, p_h, p_parts, p_counters, d_x, d_w, p_bias, p_residual, m, n, sy, K: tl.constexpr,
                     DOT: tl.constexpr, OVERLAP: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr,
                     BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Compute y = x·Wᵀ + bias, rounded, plus the residual. With p_h, W is [gate | up], and h = silu(gate)·up too.

    Args:
        p_y: y; None with p_h stores only h.
        p_parts: sums over parts of K, [tiles, SPLITS, BM, BN]; None without.
        p_counters: a counter per tile, 0 between launches.
        d_w: descriptor of W [1, n, K], or [2, n, K] with p_h.
        sy: row stride of y and of the residual.
        m: number of rows; `n` is the number of columns, of gate alone with p_h.
    """
    N: tl.constexpr = BN if p_h is None else 2 * BN
    PART: tl.constexpr = (K + BK * SPLITS - 1) // (BK * SPLITS) * BK  # elements along K per program
    tiles_m = tl.cdiv(m, BM)
    tile, i_part = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    i_m, i_n = tile % tiles_m, tile // tiles_m
    o_m, o_n = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)  # [BM], [BN]
    wait_for_previous(OVERLAP)
    o_y = o_m.to(tl.int64)[:, None] * sy + o_n[None, :]  # [BM, BN]
    b_residual = None
    if p_residual is not None:  # arrives during the main loop
        b_residual = tl.load(p_residual + o_y, mask=(o_m < m)[:, None] & (o_n < n)[None, :], other=0)  # [BM, BN]
    # Main loop.
    b_acc = tl.zeros((BM, N), tl.float32)  # [BM, N]
    for i_k in range(i_part * PART, min(i_part * PART + PART, K), BK):
        b_x = converted(d_x.load([i_m * BM, i_k]), DOT)  # [BM, BK]
        b_w = converted(d_w.load([0, i_n * BN, i_k]).reshape(N, BK), DOT)  # [N, BK]
        b_acc = tl.dot(b_x, b_w.T, b_acc)
    allow_next(OVERLAP)
    # Epilogue. The last program of a tile adds its parts in order.
    if p_parts is None:
        store_tile(b_acc, b_residual, p_y, p_h, p_bias, o_y, o_m, o_n, m, n, BM, BN)
    else:
        p_parts += tile * (SPLITS * BM * BN) + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]  # [BM, BN]
        tl.store(p_parts + i_part * (BM * BN), b_acc)
        tl.debug_barrier()
        if tl.atomic_add(p_counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(p_counters + tile, 0)
            b_acc = tl.load(p_parts, cache_modifier=".cg")  # [BM, BN]
            for i in tl.static_range(1, SPLITS):
                b_acc += tl.load(p_parts + i * (BM * BN), cache_modifier=".cg")
            store_tile(b_acc, b_residual, p_y, p_h, p_bias, o_y, o_m, o_n, m, n, BM, BN)


# --- Launching it -----------------------------------------------------------------------------------------------------


def is_for_wide_rows(x: Array, *weights: Array) -> bool:
    """Return whether the kernel supports x·Wᵀ and is fastest: 33 to 512 rows of 2-byte floats that TMA can load,
    outside of autograd, on a GPU with wgmma. Under `genesis.exact` it takes fewer rows, too.
    """
    return (
        not mode.grad
        and (0 if mode.exact else MAX_ROWS * x.shape[-1]) < x.size <= WIDE_ROWS * x.shape[-1]
        and x.dtype in (bfloat16, float16)
        and all(w.dtype is x.dtype and w.shape[0] < VOCABULARY for w in weights)
        and all(w.size and is_describable(w, w.shape, w.strides) for w in weights)
        and is_describable(x, (x.size // x.shape[-1], x.shape[-1]), (x.shape[-1], 1))
        and backend_of(x.device).driver.properties.capability[0] == 9
    )


def takes_norm(x: Array, weight: Array) -> bool:
    """Return whether exact_rows.py also normalises x: one row, which fits into the registers of a warp."""
    return is_for_wide_rows(x, weight) and x.size == x.shape[-1] <= MAX_NORM and takes_exact_rows(1, x.size)


def choose_tile(m: int, n: int, k: int, sm_count: int, parts: int = 1, shares: bool = True) -> WideTile:
    """Return the smallest tile for n rows of W (of each of `parts` weights) whose programs all run at once.

    Loads in flight limit the speed, so stages take all of the shared memory, and a program that has an SM to itself
    takes long steps. With few columns and a long K, each program would load all of x and little of W; so several
    programs share K if `shares` is set.
    """
    splits = min(sm_count // (triton.cdiv(m, 64) * triton.cdiv(n, 32)), 4)
    if shares and parts == 1 and k > SHORT and splits > 1:
        return WideTile(64, 32, 256, 4, 4, 4 if splits > 2 else 2)
    sizes = [size for size in _SIZES[parts] if size[0] == 64 or m > 64]
    loads = [triton.cdiv(triton.cdiv(m, bm) * triton.cdiv(n, bn), sm_count) for bm, bn, _ in sizes]  # programs per SM
    tiles = [*zip(sizes, loads, strict=True)]
    (bm, bn, most), load = next((at for at in tiles if at[1] <= at[0][2]), tiles[-1])
    shared_by = min(load, most)
    bk = 64 if parts == 2 or shared_by > 1 or bm * bn > 64 * 128 else 256 if k > SHORT and bn <= 32 else 128
    stages = min(STAGES, SHARED // shared_by // (2 * bk * (bm + parts * bn)), triton.cdiv(k, bk) - 1)
    return WideTile(bm, bn, bk, 8 if bm > 64 else 4, max(2, stages))


def wide_rows_linear_into(
    out: Array, x: Array, weights: Sequence[Array], biases: Sequence[Array], residual: Array | None = None,
    tile: WideTile | None = None,
) -> None:  # fmt: skip
    """Compute out `[..., ΣN]` = [x·W1ᵀ + b1, …], rounded, plus the residual, with one launch per weight.

    Args:
        x: `[..., K]`, with any strides.
        biases: one bias per weight, or empty.
        residual: array of out's shape; only with one weight.
    """
    y, rows = as_matrix(out), as_matrix(contiguous(x))
    added = None if residual is None else as_matrix(residual)
    for i, (part, weight) in enumerate(zip(columns(y, [w.shape[0] for w in weights]), weights, strict=True)):
        _launch(part, None, rows, weight, contiguous(biases[i]) if biases else None, added, tile)


def wide_rows_swiglu_into(h: Array, gate_up: Array, x: Array, weight: Array, tile: WideTile | None = None) -> None:
    """Compute gate_up = x·weightᵀ, and h = silu(gate)·up from the rounded gate_up.

    Args:
        h: `[M, F]`, contiguous.
        gate_up: `[M, 2·F]`, contiguous. Outside of autograd nothing reads it, so it may not be written.
        x: `[M, K]`, contiguous.
        weight: `[2·F, K]`, contiguous: the rows of gate, then the rows of up.
    """
    _launch(gate_up, h, x, weight, None, None, tile)


def _launch(
    y: Array, h: Array | None, x: Array, weight: Array, bias: Array | None, residual: Array | None,
    tile: WideTile | None = None,
) -> None:  # fmt: skip
    (m, k), parts = x.shape, 1 if h is None else 2
    if tile is None and takes_exact_rows(m, k):
        exact_rows_into(y, h, x, weight, bias, residual)
        return
    n = weight.shape[0] // parts
    # The device's counters serve one launch at a time, so only generation steps share K; exact ones have one chain.
    shares = mode.fixed_weights and not mode.exact
    t = tile or choose_tile(m, n, k, backend_of(x.device).driver.properties.sm_count, parts, shares)
    w = weight.view((parts, n, k), (n * weight.strides[0], *weight.strides), weight.offset)
    tiles, sums, counters = triton.cdiv(m, t.bm) * triton.cdiv(n, t.bn), None, None
    if t.splits > 1:
        sums = empty((tiles, t.splits, t.bm, t.bn), float32, x.device)
        counters = Array(backend_of(x.device).counters, (COUNTERS,), (1,), int32, x.device, 0)
    kind = float32 if is_interpreted() and x.dtype is bfloat16 else x.dtype
    launch(
        wide_rows_kernel, tiles * t.splits, y if h is None or mode.grad else None, h, sums, counters,
        Descriptor(x, x.shape, x.strides, (t.bm, t.bk)), Descriptor(w, w.shape, w.strides, (parts, t.bn, t.bk)), bias,
        residual, m, n, y.strides[0], K=k, DOT=TRITON[kind.name], OVERLAP=can_overlap(x), SPLITS=t.splits, BM=t.bm,
        BN=t.bn, BK=t.bk, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
