"""Matmuls of at most 32 rows, as generation makes them: each element of the weight is read once, by all SMs.

Plain reference: genesis/ops/linear.py: `linear`, `packed_linear`; norm_linear.py; quantized_linear.py.

y = x·Wᵀ, with RMSNorm of x before it, and a scale for each row of W, bias, residual or SwiGLU after it. Such a matmul
takes as long as its weight takes from memory, a microsecond or two, so that latency counts: every launch is alone, and
overlaps with the one before it (`genesis.kernels.dependents`): it lets the next one in at once, and waits. Where the
caller says that nothing ahead writes weights (`mode.fixed_weights`), the first of them are loaded before it waits.

Every program has all of K for BN rows of W: nothing is left to combine. Rows of 2-byte floats are multiplied on the
tensor cores (few_rows_mma.py, one row one_row_mma.py), float32 and rows that 16 bytes do not divide on the CUDA cores
(few_rows_fma.py). The factors of a norm's rows are applied to the finished sums, so that x is read once. In float16
x·scale could overflow: with a norm, it is left to the CUDA cores, which compute in float32. Sums are float32.

A row's result does not depend on the rows beside it; between one row, up to 8, up to 16 and up to 32 the order of its
sums differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton

from genesis.array import Array
from genesis.backend import mode
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.launch import launch
from genesis.dtypes import bfloat16, float16, float32
from genesis.kernels.decode.few_rows_fma import few_rows_fma_kernel
from genesis.kernels.decode.few_rows_mma import few_rows_mma_kernel
from genesis.kernels.decode.one_row_mma import one_row_mma_kernel
from genesis.kernels.dependents import can_overlap
from genesis.kernels.elements import as_matrix
from genesis.ops.shape import columns, contiguous

MAX_ROWS = 32
FMA_ROWS = 4  # of x in a program on the CUDA cores, where there is more than one
MMA_K = 32  # elements along K of a warp's step on the tensor cores
ONE_ROW_K = 256  # the same, of one row of x
MAX_LOADS = 28  # of 16 bytes that a thread has under way there
ONE_ROW_WARPS = 4  # of a program with one row of x, at most
ONE_ROW_HELD = 80  # registers for W, where all of K is loaded at once
ONE_ROW_LOADS = 128  # registers for all loads, at most
REGISTERS = 65536  # of an SM
MAX_HELD = 190  # registers for loads and sums, of 255
OTHER = 42  # registers of a thread besides
RESIDENT = 3  # programs that an SM holds at once, at most
WIDE = 128  # rows of W for each SM, from which on W is a vocabulary


class FewRowsTile(NamedTuple):
    """How the matmul is tiled."""

    bn: int  # rows of W (SwiGLU: of gate and of up) of a program
    bk: int  # elements along K; on the tensor cores of each warp: MMA_K, or ONE_ROW_K
    warps: int  # of a program
    steps: int  # tiles along K whose loads are issued together
    early: bool = False  # load the first of W, and the norm's weight, before the wait, as under `mode.fixed_weights`
    one_row: bool = False  # on the tensor cores, for one row of x


class Norm(NamedTuple):
    """RMSNorm of x: its weight `[K]`, epsilon, and where 1 / rms `[M]` goes, if anywhere."""

    scale: Array
    eps: float
    rstd: Array | None = None


# --- Launching --------------------------------------------------------------------------------------------------------


def choose_fma_tile(m: int, k: int, itemsize: int) -> FewRowsTile:
    """The tile on the CUDA cores: a warp has a row of W, or of a long one a slice, so few loads follow each other."""
    lanes, slices = 32 * 16 // itemsize, 1  # elements that a warp loads at once
    while slices < 4 and triton.cdiv(k, lanes * slices) > 4:
        slices *= 2
    return FewRowsTile(4 // slices, lanes * slices, 4, _balanced(k, lanes * slices, 5 if m == 1 else 2))


def choose_one_row_tile(
    n: int, k: int, itemsize: int, sm_count: int, halves: int = 1, norm: bool = False
) -> FewRowsTile:
    """The tile on the tensor cores for one row of x and n rows of W (of each of `halves` weights).

    Few programs, each with many rows of W and all of K at once: fewer of them process x, and the next kernel's programs
    become resident beside them. With 8-bit weights, for which each program also scales x, half as many suffice. Where
    not all of them are resident at once and all of smaller ones are, which load in two trips, those are taken.
    """
    warps, bn = ONE_ROW_WARPS, 16 // itemsize
    while warps > 1 and 4 * triton.cdiv(k, ONE_ROW_K * warps) * ONE_ROW_K * warps > 5 * k:
        warps //= 2  # a fifth of the elements at most are behind the last
    most = ONE_ROW_HELD // (2 * itemsize * halves * triton.cdiv(k, ONE_ROW_K * warps))
    most = max(most, 8 // (itemsize * halves))  # of a longer K in several trips
    while bn > 4 and (bn > most or 4 * triton.cdiv(n, bn) < 3 * itemsize * sm_count):
        bn //= 2
    wide = _one_row_tile(bn, warps, k, itemsize, halves, norm)
    while warps > 1 and triton.cdiv(k, ONE_ROW_K * warps) * itemsize < 8:
        warps //= 2
    narrow = _one_row_tile(4, warps, k, itemsize, halves, norm)
    wide_is_resident, narrow_is_resident = (
        triton.cdiv(n, t.bn) <= sm_count * _programs_of_an_sm(t, k, itemsize, halves, norm) for t in (wide, narrow)
    )
    return narrow if narrow_is_resident and not wide_is_resident else wide


def _one_row_tile(bn: int, warps: int, k: int, itemsize: int, halves: int, norm: bool) -> FewRowsTile:
    """With as many steps in a trip as registers hold."""
    most = max(1, ONE_ROW_LOADS // _one_row_loads(bn, itemsize, halves, norm))
    return FewRowsTile(bn, ONE_ROW_K, warps, _balanced(k, ONE_ROW_K * warps, most), one_row=True)


def _one_row_loads(bn: int, itemsize: int, halves: int, norm: bool) -> int:
    """Registers of a step's loads: of W, of x, and of the norm's weight."""
    return 2 * itemsize * halves * bn + 4 * (1 + norm)


def _programs_of_an_sm(t: FewRowsTile, k: int, itemsize: int, halves: int, norm: bool) -> int:
    """How many are resident on an SM by their registers, of which each of its four partitions has a quarter. The
    registers of a program are an estimate, made from those of 44 compiled tiles.
    """
    registers = _one_row_loads(t.bn, itemsize, halves, norm) * t.steps + 2 * halves * t.bn + 20
    registers += 50 if k > t.steps * t.bk * t.warps else 0  # what the next trip is about to load
    return REGISTERS // 4 // (32 * triton.cdiv(registers, 8) * 8) * 4 // t.warps


def choose_mma_tile(m: int, n: int, k: int, sm_count: int, halves: int = 1, norm: bool = False) -> FewRowsTile:
    """The tile on the tensor cores for n rows of W (of each of `halves` weights)."""
    blocks, bn = max(1, triton.next_power_of_2(m) // 8), 16  # of 8 rows of x
    if blocks == 4 and halves == 1 and n >= WIDE * sm_count:
        bn = 32  # x, from L2, is more than W
    elif blocks == 1 and k >= 2048 and 4 * triton.cdiv(n, bn) < 3 * sm_count:
        bn = 8  # a long W for few programs
    sums = halves * blocks  # in shared memory, of which 48 KiB are for the asking
    programs = triton.cdiv(n, bn)
    warps = 8 if programs < 2 * sm_count and k > 4 * MMA_K and sums < 8 else 4
    if blocks == 4:  # half of what is loaded is x's, from L2
        most = _steps_of_32_rows(programs, bn, warps, sm_count, halves, norm)
    else:
        most = max(1, MAX_LOADS // (halves * bn // 8 + blocks + norm))
    return FewRowsTile(bn, MMA_K, warps, _balanced(k, MMA_K * warps, most))


def _steps_of_32_rows(programs: int, bn: int, warps: int, sm_count: int, halves: int, norm: bool) -> int:
    """As many steps as registers hold, where an SM holds so many programs that the fewest rounds of them pass."""
    found, sums = [], held_registers(4, bn, 0, halves, norm)
    step = held_registers(4, bn, 1, halves, norm) - sums
    for resident in range(1, RESIDENT + 1):
        steps = (min(MAX_HELD, REGISTERS // (32 * warps * resident) - OTHER) - sums) // step
        if steps >= 2 or resident == 1:
            found.append((triton.cdiv(programs, sm_count * resident), -steps))
    return -min(found)[1]


def held_registers(blocks: int, bn: int, steps: int, halves: int, norm: bool) -> int:
    """Registers in which a thread on the tensor cores has loads of 16 bytes and sums."""
    sums = (halves * max(1, bn // 16) + norm) * max(1, blocks // 2)
    return 4 * steps * (halves * bn // 8 + blocks + norm) + 8 * sums


def _balanced(k: int, step: int, most: int) -> int:
    """Steps of a trip along K, at most so many, where all trips have as many."""
    steps = triton.cdiv(k, step)
    return triton.cdiv(steps, triton.cdiv(steps, most))


def is_for_few_rows(x: Array, *weights: Array) -> bool:
    """Whether these kernels take x·Wᵀ: few rows, floats of at most 4 bytes, rows of all weights contiguous. Ops that
    are recorded for a backward pass keep the kernels of training, and so do their results' bits.
    """
    return (
        not mode.grad
        and 0 < x.size <= MAX_ROWS * x.shape[-1]
        and x.dtype in (bfloat16, float16, float32)
        and all(w.size and w.strides[1] == 1 for w in weights)
    )


def takes_mma(x: Array, weights: Sequence[Array], norm: Norm | None) -> bool:
    """Whether rows are laid out for loads of 16 bytes, and the norm's product cannot overflow."""
    return (
        x.dtype.itemsize == 2
        and (norm is None or (x.dtype is bfloat16 and norm.scale.data_ptr() % 16 == 0))
        and all(a.data_ptr() % 16 == a.strides[0] % 16 == 0 for a in (x, *weights))
    )


def few_rows_into(
    out: Array, x: Array, weight: Array, *, norm: Norm | None = None, bias: Array | None = None,
    residual: Array | None = None, w_scale: Array | None = None, tile: FewRowsTile | None = None,
) -> None:  # fmt: skip
    """out = norm(x)·(diag(w_scale)·W)ᵀ + bias + residual, rounded once.

    Args:
        out: `[M, N]`, rows contiguous, of any distance.
        x: `[M, K]`, likewise; see `is_for_few_rows`.
        weight: `[N, K]`, likewise, of x's dtype, or int8 or e4m3.
        bias, w_scale: `[N]`, contiguous, w_scale in float32.
        residual: of out's shape and strides.
        tile: instead of the rule's choice, for benchmarks.
    """
    _launch(out, None, x, (weight,), norm, bias, residual, w_scale, tile)


def few_rows_linear_into(
    out: Array, x: Array, weights: Sequence[Array], biases: Sequence[Array], residual: Array | None = None,
    norm: Norm | None = None,
) -> None:  # fmt: skip
    """out `[..., ΣN]` = [norm(x)·W1ᵀ + b1, …] + residual, a launch for each weight; x `[..., K]` may have any strides,
    there is a bias for each weight or none.
    """
    y, rows = as_matrix(out), as_matrix(contiguous(x))
    rest = None if residual is None else as_matrix(residual)
    for i, (part, weight) in enumerate(zip(columns(y, [w.shape[0] for w in weights]), weights, strict=True)):
        few_rows_into(part, rows, weight, norm=norm, bias=contiguous(biases[i]) if biases else None, residual=rest)


def few_rows_swiglu_into(
    h: Array, gate_up: Array, x: Array, gate: Array, up: Array, *, norm: Norm | None = None,
    w_scale: Array | None = None, tile: FewRowsTile | None = None,
) -> None:  # fmt: skip
    """gate_up = norm(x)·(diag(w_scale)·[gate | up])ᵀ, h = silu(gate)·up of gate and up as they are stored.

    Args:
        h: `[M, F]`, contiguous.
        gate_up: `[M, 2·F]`, contiguous.
        gate, up: `[F, K]`, likewise; where the distances of their rows differ, they are copied.
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
    on_mma, t = takes_mma(x, weights, norm), tile
    if t is None and on_mma and m == 1:
        t = choose_one_row_tile(n, k, itemsize, sms, len(weights), norm is not None)
    elif t is None and on_mma:
        t = choose_mma_tile(m, n, k, sms, len(weights), norm is not None)
    t = t or choose_fma_tile(m, k, itemsize)
    scale, eps, rstd = norm or (None, 0.0, None)
    rows: list[Any] = [out, h, rstd, x, weight, up, scale, bias, residual, w_scale]
    sizes = m, n, x.strides[0], weight.strides[0], out.strides[0], float(eps)
    is_early = t.early or mode.fixed_weights
    how: dict[str, Any] = {"OVERLAP": can_overlap(x), "EARLY": is_early, "BN": t.bn, "STEPS": t.steps}
    how |= {"K": k, "num_warps": t.warps}
    grid = triton.cdiv(n, t.bn)
    if t.one_row:
        launch(one_row_mma_kernel, grid, *rows, n, weight.strides[0], float(eps), BS=t.warps, **how)
        return
    if on_mma and t.bk == MMA_K:
        bm = max(8, triton.next_power_of_2(m))
        launch(few_rows_mma_kernel, grid, *rows, *sizes, BM=bm, BS=t.warps, **how)
        return
    bm = 1 if m == 1 else FMA_ROWS
    bw = min(t.bn, max(1, t.warps * 32 * 16 // itemsize // t.bk))
    launch(few_rows_fma_kernel, grid * triton.cdiv(m, bm), *rows, *sizes, BK=t.bk, BM=bm, BW=bw, **how)
