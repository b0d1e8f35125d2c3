"""Matmuls with at most 32 rows, as in generation: the programs together read each element of the weight once.

Plain reference: genesis/ops/linear.py: `linear`, `packed_linear`; norm_linear.py; quantized_linear.py.

y = x·Wᵀ, with optional RMSNorm of x before it, and a scale for each row of W, bias, residual or SwiGLU after it. Such a
matmul takes one or two microseconds, the time of reading its weight from memory, so latency counts. Each matmul is one
launch, which overlaps with the previous kernel (`genesis.kernels.dependents`): it allows the next kernel to start, then
waits for the previous one. If no earlier kernel writes weights (`mode.fixed_weights`), it loads its first tiles of W
before it waits.

Every program multiplies all of K for BN rows of W, so no partial sums are left to combine. Rows of 2-byte floats run on
the tensor cores (few_rows_mma.py, or one_row_mma.py for one row). One row of float32, or whose size is not a multiple
of 16 bytes, runs on the CUDA cores (few_rows_fma.py); more of them are left to `gemm/`. The factors 1 / rms of a norm
are applied to the finished sums, so x is read once. In float16 x·scale could overflow: one row with a norm runs on the
CUDA cores, which compute in float32, and more rows are normalised by a kernel of their own. Sums are float32.

The result of a row does not depend on the other rows. The order of its sums differs between 1 row, up to 8, up to 16
and up to 32 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton

from genesis.array import Array, empty
from genesis.backend import mode
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.launch import launch
from genesis.dtypes import bfloat16, float16, float32
from genesis.kernels.decode.few_rows_fma import few_rows_fma_kernel
from genesis.kernels.decode.few_rows_mma import few_rows_mma_kernel
from genesis.kernels.decode.one_row_mma import one_row_mma_kernel
from genesis.kernels.dependents import can_overlap
from genesis.kernels.elements import as_matrix
from genesis.kernels.norm.norm import rms_norm
from genesis.ops.shape import columns, contiguous

MAX_ROWS = 32
MMA_K = 32  # elements along K per step of a warp on the tensor cores
ONE_ROW_K = 256  # the same for one row of x
MAX_LOADS = 28  # the most loads of 16 bytes in flight per thread on the tensor cores
ONE_ROW_WARPS = 4  # the most warps of a program with one row of x
ONE_ROW_HELD = 80  # the most registers for W, if a program loads all of K at once
ONE_ROW_LOADS = 128  # the most registers for all loads of a program with one row of x
REGISTERS = 65536  # registers of an SM
MAX_HELD = 190  # the most of a thread's 255 registers for loads and sums
OTHER = 42  # registers per thread for everything else
RESIDENT = 3  # the most resident programs per SM
WIDE = 128  # rows of W per SM from which W counts as a vocabulary


class FewRowsTile(NamedTuple):
    """Tile of a matmul with few rows."""

    bn: int  # rows of W per program; with SwiGLU rows of gate and as many of up
    bk: int  # elements along K; on the tensor cores per warp: MMA_K or ONE_ROW_K
    warps: int  # warps per program
    steps: int  # tiles along K whose loads are issued together
    early: bool = False  # load the first of W and the norm's weight before the wait, as under `mode.fixed_weights`
    one_row: bool = False  # use the tensor-core kernel for one row of x


class Norm(NamedTuple):
    """RMSNorm of x."""

    scale: Array  # the norm's weight `[K]`
    eps: float
    rstd: Array | None = None  # optional output `[M]` for 1 / rms


# --- Launching --------------------------------------------------------------------------------------------------------


def choose_fma_tile(k: int, itemsize: int) -> FewRowsTile:
    """Return a tile for the CUDA cores. A warp has one row of W, or a slice of a long one, so few loads are serial."""
    lanes, slices = 32 * 16 // itemsize, 1  # elements that a warp loads at once
    while slices < 4 and triton.cdiv(k, lanes * slices) > 4:
        slices *= 2
    return FewRowsTile(4 // slices, lanes * slices, 4, _balanced(k, lanes * slices, 5))


def choose_one_row_tile(
    n: int, k: int, itemsize: int, sm_count: int, halves: int = 1, norm: bool = False
) -> FewRowsTile:
    """Return a tile on the tensor cores for one row of x and n rows of W (of each of `halves` weights).

    The wide tile loads many rows of W and all of K at once. It needs few programs, so few of them process x, and
    programs of the next kernel fit on the SMs too. With 8-bit weights each program also scales x, and half as many
    programs suffice. The narrow tile loads in two trips. It is chosen if all its programs are resident at once and
    not all programs of the wide tile are.
    """
    warps, bn = ONE_ROW_WARPS, 16 // itemsize
    # Choose the wide tile: at most a fifth of its elements are beyond K.
    while warps > 1 and 4 * triton.cdiv(k, ONE_ROW_K * warps) * ONE_ROW_K * warps > 5 * k:
        warps //= 2
    most = ONE_ROW_HELD // (2 * itemsize * halves * triton.cdiv(k, ONE_ROW_K * warps))
    most = max(most, 8 // (itemsize * halves))  # a longer K takes several trips
    while bn > 4 and (bn > most or 4 * triton.cdiv(n, bn) < 3 * itemsize * sm_count):
        bn //= 2
    wide = _one_row_tile(bn, warps, k, itemsize, halves, norm)
    # Compare it with the narrow tile.
    while warps > 1 and triton.cdiv(k, ONE_ROW_K * warps) * itemsize < 8:
        warps //= 2
    narrow = _one_row_tile(4, warps, k, itemsize, halves, norm)
    wide_is_resident, narrow_is_resident = (
        triton.cdiv(n, t.bn) <= sm_count * _programs_per_sm(t, k, itemsize, halves, norm) for t in (wide, narrow)
    )
    return narrow if narrow_is_resident and not wide_is_resident else wide


def _one_row_tile(bn: int, warps: int, k: int, itemsize: int, halves: int, norm: bool) -> FewRowsTile:
    """Return the tile with as many steps per trip as fit in registers."""
    most = max(1, ONE_ROW_LOADS // _one_row_loads(bn, itemsize, halves, norm))
    return FewRowsTile(bn, ONE_ROW_K, warps, _balanced(k, ONE_ROW_K * warps, most), one_row=True)


def _one_row_loads(bn: int, itemsize: int, halves: int, norm: bool) -> int:
    """Return the registers of one step's loads of W, of x and of the norm's weight."""
    return 2 * itemsize * halves * bn + 4 * (1 + norm)


def _programs_per_sm(t: FewRowsTile, k: int, itemsize: int, halves: int, norm: bool) -> int:
    """Return how many programs are resident on an SM. Registers limit them, and each of its four partitions has a
    quarter of these. The registers of a program are estimated by a fit to 44 compiled tiles.
    """
    registers = _one_row_loads(t.bn, itemsize, halves, norm) * t.steps + 2 * halves * t.bn + 20
    registers += 50 if k > t.steps * t.bk * t.warps else 0  # the loads of the next trip
    return REGISTERS // 4 // (32 * triton.cdiv(registers, 8) * 8) * 4 // t.warps


def choose_mma_tile(m: int, n: int, k: int, sm_count: int, halves: int = 1, norm: bool = False) -> FewRowsTile:
    """Return a tile on the tensor cores for n rows of W (of each of `halves` weights)."""
    blocks, bn = max(1, triton.next_power_of_2(m) // 8), 16  # blocks of 8 rows of x
    if blocks == 4 and halves == 1 and n >= WIDE * sm_count:
        bn = 32  # x takes more loads from L2 than W
    elif blocks == 1 and k >= 2048 and 4 * triton.cdiv(n, bn) < 3 * sm_count:
        bn = 8  # a long K and few programs
    sums = halves * blocks  # sums in shared memory; 48 KiB need no opt-in
    programs = triton.cdiv(n, bn)
    warps = 8 if programs < 2 * sm_count and k > 4 * MMA_K and sums < 8 else 4
    if blocks == 4:  # half of the loads are of x, from L2
        most = _steps_of_32_rows(programs, bn, warps, sm_count, halves, norm)
    else:
        most = max(1, MAX_LOADS // (halves * bn // 8 + blocks + norm))
    return FewRowsTile(bn, MMA_K, warps, _balanced(k, MMA_K * warps, most))


def _steps_of_32_rows(programs: int, bn: int, warps: int, sm_count: int, halves: int, norm: bool) -> int:
    """Return the steps per trip with which all programs run in the fewest waves; among those, the most steps."""
    candidates, sums = [], held_registers(4, bn, 0, halves, norm)
    step = held_registers(4, bn, 1, halves, norm) - sums
    for resident in range(1, RESIDENT + 1):
        steps = (min(MAX_HELD, REGISTERS // (32 * warps * resident) - OTHER) - sums) // step
        if steps >= 2 or resident == 1:
            candidates.append((triton.cdiv(programs, sm_count * resident), -steps))
    return -min(candidates)[1]


def held_registers(blocks: int, bn: int, steps: int, halves: int, norm: bool) -> int:
    """Return a thread's registers for loads of 16 bytes and for sums in the tensor-core kernel."""
    sums = (halves * max(1, bn // 16) + norm) * max(1, blocks // 2)
    return 4 * steps * (halves * bn // 8 + blocks + norm) + 8 * sums


def _balanced(k: int, step: int, most: int) -> int:
    """Return the steps per trip along K, at most `most`, that make all trips equally long."""
    steps = triton.cdiv(k, step)
    return triton.cdiv(steps, triton.cdiv(steps, most))


def is_for_few_rows(x: Array, *weights: Array) -> bool:
    """Return whether these kernels support x·Wᵀ: one row of floats of at most 4 bytes, or few rows as `takes_mma` needs
    them, and contiguous rows in all weights. Ops that are recorded for a backward pass use the training kernels, so
    training results keep their bits. These kernels add along K in several chains, so `genesis.exact` does not use them.
    """
    return (
        not (mode.grad or mode.exact)
        and 0 < x.size <= MAX_ROWS * x.shape[-1]
        and x.dtype in (bfloat16, float16, float32)
        and all(w.size and w.strides[1] == 1 for w in weights)
        and (x.size == x.shape[-1] or takes_mma(as_matrix(x), weights))
    )


def takes_mma(x: Array, weights: Sequence[Array]) -> bool:
    """Return whether rows of a matrix x are 2-byte floats, and all rows can be loaded 16 bytes at a time."""
    return x.dtype.itemsize == 2 and all(a.data_ptr() % 16 == a.strides[0] % 16 == 0 for a in (x, *weights))


def _normalized(x: Array, norm: Norm) -> Array:
    y = empty(x.shape, x.dtype, x.device)
    rms_norm((y, empty(x.shape[:1], float32, x.device) if norm.rstd is None else norm.rstd), x, norm.scale, norm.eps)
    return y


def few_rows_into(
    out: Array, x: Array, weight: Array, *, norm: Norm | None = None, bias: Array | None = None,
    residual: Array | None = None, w_scale: Array | None = None, tile: FewRowsTile | None = None,
) -> None:  # fmt: skip
    """Compute out = norm(x)·(diag(w_scale)·W)ᵀ + bias + residual, rounded once.

    Args:
        out: `[M, N]` with contiguous rows and any row stride.
        x: `[M, K]` with contiguous rows and any row stride; one row, or rows for which `takes_mma` is true.
        weight: `[N, K]` with contiguous rows and any row stride, of x's dtype, int8 or e4m3.
        bias: `[N]`, contiguous.
        residual: array of out's shape and strides.
        w_scale: `[N]`, contiguous, in float32.
        tile: tile that overrides the rule's choice, for benchmarks.
    """
    _launch(out, None, x, (weight,), norm, bias, residual, w_scale, tile)


def few_rows_linear_into(
    out: Array, x: Array, weights: Sequence[Array], biases: Sequence[Array], residual: Array | None = None,
    norm: Norm | None = None,
) -> None:  # fmt: skip
    """Compute out `[..., ΣN]` = [norm(x)·W1ᵀ + b1, …] + residual, with one launch per weight. x `[..., K]` may have any
    strides. `biases` has one bias per weight, or is empty.
    """
    y, rows = as_matrix(out), as_matrix(contiguous(x))
    added = None if residual is None else as_matrix(residual)
    for i, (part, weight) in enumerate(zip(columns(y, [w.shape[0] for w in weights]), weights, strict=True)):
        few_rows_into(part, rows, weight, norm=norm, bias=contiguous(biases[i]) if biases else None, residual=added)


def few_rows_swiglu_into(
    h: Array, gate_up: Array, x: Array, gate: Array, up: Array, *, norm: Norm | None = None,
    w_scale: Array | None = None, tile: FewRowsTile | None = None,
) -> None:  # fmt: skip
    """Compute gate_up = norm(x)·(diag(w_scale)·[gate | up])ᵀ, and h = silu(gate)·up from the rounded gate_up.

    Args:
        h: `[M, F]`, contiguous.
        gate_up: `[M, 2·F]`, contiguous.
        gate: weight `[F, K]` with contiguous rows.
        up: weight `[F, K]` with contiguous rows. Both weights are copied if their row strides differ.
        w_scale: `[2·F]`.
    """
    if gate.strides[0] != up.strides[0]:
        gate, up = contiguous(gate), contiguous(up)
    _launch(gate_up, h, x, (gate, up), norm, None, None, w_scale, tile)


def _launch(
    out: Array, h: Array | None, x: Array, weights: tuple[Array, ...], norm: Norm | None, bias: Array | None,
    residual: Array | None, w_scale: Array | None, tile: FewRowsTile | None,
) -> None:  # fmt: skip
    (m, k), weight, up = x.shape, weights[0], weights[1] if h is not None else None
    n, itemsize = weight.shape[0], weight.dtype.itemsize
    sms = backend_of(x.device).driver.properties.sm_count
    # Choose the tile.
    on_mma, t = takes_mma(x, weights), tile
    if norm is not None and (x.dtype is not bfloat16 or norm.scale.data_ptr() % 16):  # its product could overflow
        if m == 1:
            on_mma = False
        else:
            x, norm = _normalized(x, norm), None
    assert on_mma or m == 1, (x, weights)
    if t is None and on_mma and m == 1:
        t = choose_one_row_tile(n, k, itemsize, sms, len(weights), norm is not None)
    elif t is None and on_mma:
        t = choose_mma_tile(m, n, k, sms, len(weights), norm is not None)
    t = t or choose_fma_tile(k, itemsize)
    # Launch the kernel for one row, for the tensor cores or for the CUDA cores.
    scale, eps, rstd = norm or (None, 0.0, None)
    arrays: list[Any] = [out, h, rstd, x, weight, up, scale, bias, residual, w_scale]
    is_early = t.early or mode.fixed_weights
    constants: dict[str, Any] = {"OVERLAP": can_overlap(x), "EARLY": is_early, "BN": t.bn, "STEPS": t.steps}
    constants |= {"K": k, "num_warps": t.warps}
    grid = triton.cdiv(n, t.bn)
    if t.one_row:
        launch(one_row_mma_kernel, grid, *arrays, n, weight.strides[0], float(eps), BS=t.warps, **constants)
    elif on_mma and t.bk == MMA_K:
        strides, bm = (x.strides[0], weight.strides[0], out.strides[0]), max(8, triton.next_power_of_2(m))
        launch(few_rows_mma_kernel, grid, *arrays, m, n, *strides, float(eps), BM=bm, BS=t.warps, **constants)
    else:
        bw = min(t.bn, max(1, t.warps * 32 * 16 // itemsize // t.bk))
        launch(few_rows_fma_kernel, grid, *arrays, n, weight.strides[0], float(eps), BK=t.bk, BW=bw, **constants)
