"""Matmuls of at most 32 rows, as generation makes them: each element of the weight is read once, by all SMs.

Plain reference: genesis/ops/linear.py: `linear`, `packed_linear`; norm_linear.py; norm_mlp.py; quantized_linear.py.

y = x·Wᵀ, with RMSNorm of x before it, and a scale for each row of W, bias, residual or SwiGLU after it. Such a matmul
takes as long as its weight takes from memory, a microsecond or two, so that latency counts: every launch is alone, and
overlaps with the one before it (`genesis.kernels.dependents`): it lets the next one in at once, asks for its rows of W
to be brought to L2, and waits.

Every program has all of K for BN rows of W: nothing is left to combine. One row of x is multiplied on the CUDA cores;
more rows on the tensor cores, each warp with a slice of K, and the warps' sums are added at the end. A row's result
does not depend on the rows beside it; between one row, up to 16 and up to 32 the order of its sums differs.

The factors of a norm's rows are applied to the finished sums, so that x is read once: in float16, where x·scale can
overflow, x is read twice and normalised first. Sums are float32.

Tiles: x `[BM, BK]`, W `[BN, BK]`; on the tensor cores BS of both, side by side along K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.precision import allow_tf32
from genesis.backend.recording import mode
from genesis.dtypes import DType, bfloat16, float16, float32
from genesis.kernels.dependents import allow_next, can_overlap, wait_for_previous
from genesis.kernels.gemm.few_rows_mma import few_rows_mma_kernel, mma_text
from genesis.kernels.gemm.one_row import (
    load_added,
    load_vector,
    one_row_kernel,
    prefetch_rows,
    rms_reciprocal,
    store_rows,
    store_swiglu,
)
from genesis.kernels.strides import as_matrix
from genesis.kernels.types import TRITON, converted
from genesis.ops.shape import columns, contiguous

__all__ = [
    "MAX_ROWS",
    "FewRowsTile",
    "Norm",
    "choose_tile",
    "few_rows_into",
    "few_rows_linear_into",
    "few_rows_swiglu_into",
    "is_for_few_rows",
]

MAX_ROWS = 32
LINE = 128  # bytes of a line of L2
STAGED = 98 << 10  # bytes of shared memory for all stages, so that two programs are on an SM at a time


class FewRowsTile(NamedTuple):
    """How the matmul is tiled.

    Attributes:
        bn: rows of W (SwiGLU: of gate and of up) of a program.
        bk: elements along K; on the tensor cores those of one warp's slice.
        warps: of a program.
        steps: tiles along K whose loads are issued together; on the tensor cores stages of the pipeline.
        prefetch: programs that ask for their rows of W early; -1: all load the first of W, and the norm's
            weight, before they wait, for graphs in which nothing writes them.
    """

    bn: int
    bk: int
    warps: int
    steps: int
    prefetch: int


class Norm(NamedTuple):
    """RMSNorm of x: its weight `[K]`, epsilon, and where 1 / rms `[M]` goes, if anywhere."""

    scale: Array
    eps: float
    rstd: Array | None = None


# --- The kernels ------------------------------------------------------------------------------------------------------


@triton.jit
def load_slices(p, o_rows, o_k, rows, k, stride):
    """Tiles [BS, rows, BK] along K."""
    mask = (o_rows < rows)[None, :, None] & (o_k < k)[:, None, :]
    return tl.load(p + o_rows.to(tl.int64)[None, :, None] * stride + o_k[:, None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["m"])
def few_rows_kernel(p_y, p_h, p_rstd, p_x, p_w, p_up, p_norm, p_bias, p_residual, p_w_scale, m, n, k, x_row, w_row,
                    y_row, eps, DOT: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
                    EARLY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
                    ):  # fmt: skip
    """Up to BM rows of x with BN rows of W, or BN of gate and of up."""
    allow_next(OVERLAP)
    i_n = tl.program_id(0) * BN
    if OVERLAP and tl.program_id(0) < EARLY:
        prefetch_rows(p_w, i_n, n, k, w_row, OVERLAP, BN, 128 // p_w.dtype.element_ty.primitive_bitwidth * 8)
        if p_up is not None:
            prefetch_rows(p_up, i_n, n, k, w_row, OVERLAP, BN, 128 // p_w.dtype.element_ty.primitive_bitwidth * 8)
    wait_for_previous(OVERLAP)
    TWICE: tl.constexpr = tl.float16 == DOT
    o_m, o_n = tl.arange(0, BM), i_n + tl.arange(0, BN)
    b_added = load_added(p_bias, p_residual, o_m, o_n, m, n, y_row)
    b_w_scale, b_up_scale = load_vector(p_w_scale, o_n, n, 1), load_vector(None, o_n, n, 1)
    if p_up is not None and p_w_scale is not None:
        b_up_scale = load_vector(p_w_scale + n, o_n, n, 1)
    o_s = (tl.arange(0, BS) * BK)[:, None] + tl.arange(0, BK)[None, :]  # [BS, BK]
    b_square, b_rstd = tl.zeros((BS, BM, BK), tl.float32), tl.zeros((BM,), tl.float32)
    if p_norm is not None and TWICE:
        for i_k in range(0, k, BS * BK):
            b_x = converted(load_slices(p_x, o_m, i_k + o_s, m, k, x_row), tl.float32)
            b_square += b_x * b_x
        b_rstd = rms_reciprocal(tl.sum(tl.sum(b_square, 2), 0), k, eps)
    b_acc = tl.zeros((BS, BM, BN), tl.float32)
    b_acc_up = b_acc
    for i_k in tl.range(0, k, BS * BK):
        o_k = i_k + o_s
        b_w = load_slices(p_w, o_n, o_k, n, k, w_row)  # [BS, BN, BK]
        b_x = load_slices(p_x, o_m, o_k, m, k, x_row)  # [BS, BM, BK]
        if p_norm is not None:
            b_x = converted(b_x, tl.float32)
            if TWICE:
                b_x = b_x * b_rstd[None, :, None]
            else:
                b_square += b_x * b_x
            b_norm = tl.load(p_norm + o_k[:, None, :], mask=(o_k < k)[:, None, :], other=0.0)
            b_x = b_x * converted(b_norm, tl.float32)
        b_x = converted(b_x, DOT)
        b_w = tl.permute(converted(b_w, DOT), (0, 2, 1))
        b_acc = tl.dot(b_x, b_w, b_acc, input_precision=PRECISION)
        if p_up is not None:
            b_w = tl.permute(converted(load_slices(p_up, o_n, o_k, n, k, w_row), DOT), (0, 2, 1))
            b_acc_up = tl.dot(b_x, b_w, b_acc_up, input_precision=PRECISION)
    b_y, b_up = tl.sum(b_acc, 0), tl.sum(b_acc_up, 0)  # [BM, BN]
    if p_norm is not None:
        if not TWICE:
            b_rstd = rms_reciprocal(tl.sum(tl.sum(b_square, 2), 0), k, eps)
            b_y, b_up = b_y * b_rstd[:, None], b_up * b_rstd[:, None]
        if p_rstd is not None:
            tl.store(p_rstd + o_m, b_rstd, mask=o_m < tl.where(i_n == 0, m, 0))
    b_y = store_rows(b_y, p_y, b_w_scale, b_added, o_m, o_n, m, n, y_row)
    if p_up is not None:
        b_up = store_rows(b_up, p_y + n, b_up_scale, 0, o_m, o_n, m, n, y_row)
        store_swiglu(b_y, b_up, p_h, o_m, o_n, m, n)


# --- Launching --------------------------------------------------------------------------------------------------------


def choose_tile(m: int, n: int, k: int, itemsize: int, sm_count: int, halves: int = 1) -> FewRowsTile:
    """The tile for m rows of x and n rows of W (of each of `halves` weights), from how evenly programs fill the SMs.

    Args:
        itemsize: bytes of an element of W.
    """
    early = 4 * sm_count
    if m == 1:
        # A warp has a row of W, or, where one warp would have too many loads under way at once, a slice of some rows.
        lanes = 32 * 16 // itemsize  # elements that a warp loads at once
        slices = 1
        while slices < 4 and triton.cdiv(k, lanes * slices) * 2 * halves > 20:
            slices *= 2
        warps = 4 if slices == 1 else 8
        bn = warps // slices
        while (
            2 * bn * slices * halves <= 4 * warps and n >= 2 * bn * 3 * sm_count
        ):  # rows of a warp: x is converted once
            bn *= 2
        tiles = triton.cdiv(k, lanes * slices)
        return FewRowsTile(bn, lanes * slices, warps, triton.cdiv(tiles, triton.cdiv(tiles, 10)), early)
    # A program has BN rows of W and all rows of x to load and convert: the least work in the last wave to end.
    wide, bm = max(itemsize, 2), triton.next_power_of_2(max(m, 16))
    fitting = [bn for bn in (8, 16, 32, 64) if bn * halves <= 128 // wide]
    bn = min(fitting, key=lambda bn: triton.cdiv(triton.cdiv(n, bn), sm_count) * (halves * bn + bm))
    warps = 4 if n >= 2 * bn * sm_count else 8  # fewer slices of K, whose sums are added at the end, or lower latency
    bk = (128 if bn * halves <= 128 // warps and m <= 16 and itemsize < 4 else 64) // wide
    stage = warps * bk * (halves * bn * itemsize + bm * wide)
    return FewRowsTile(bn, bk, warps, min(max(STAGED // stage, 2), 5), early)


def choose_mma_tile(m: int, n: int, k: int, sm_count: int, halves: int = 1, norm: bool = False) -> FewRowsTile:
    """The tile on the tensor cores."""
    blocks = max(1, triton.next_power_of_2(m) // 8)
    bn = 8
    while bn < 32 and triton.cdiv(n, 2 * bn) >= 2 * sm_count and bn * halves < 32:
        bn *= 2
    warps = 4
    while warps < 16 and triton.cdiv(n, bn) * warps < 8 * sm_count and 32 * warps * 4 <= k:
        warps *= 2
    return mma_tile(bn, warps, blocks, k, halves, norm, 24, 4 * sm_count)


def mma_tile(bn: int, warps: int, blocks: int, k: int, halves: int, norm: bool, loads: int, early: int) -> FewRowsTile:
    """A tile with about so many loads of a thread under way at once."""
    tiles = triton.cdiv(k, 32 * warps)
    most = max(1, loads // (halves * bn // 8 + blocks + norm))
    return FewRowsTile(bn, 32, warps, triton.cdiv(tiles, triton.cdiv(tiles, most)), early)


def is_for_few_rows(x: Array, *weights: Array) -> bool:
    """Whether these kernels take x·Wᵀ: few rows, floats of at most 4 bytes, rows of all weights contiguous.

    Ops that are recorded for a backward pass keep the kernels of training, and so do their results' bits.
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
    """out = [norm(x)·W1ᵀ + b1, …] + residual of arrays as ops have them, a launch for each weight.

    Args:
        out, residual: `[..., ΣN]`, contiguous.
        x: `[..., K]`, of any strides.
        biases: for each weight, or none.
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
    n, itemsize, overlap = weight.shape[0], weight.dtype.itemsize, can_overlap(x)
    sms = backend_of(x.device).driver.properties.sm_count
    on_mma = (m > 1 or (tile is not None and tile.bk == 32)) and takes_mma(x, weights, norm)
    if tile is not None:
        t = tile
    elif on_mma:
        t = choose_mma_tile(m, n, k, sms, len(weights), norm is not None)
    else:
        t = choose_tile(m, n, k, itemsize, sms, len(weights))
    scale, eps, rstd = norm or (None, 0.0, None)
    rows: list[Any] = [out, h, rstd, x, weight, up, scale, bias, residual, w_scale]
    how: dict[str, Any] = {"OVERLAP": overlap, "EARLY": t.prefetch, "BN": t.bn, "BK": t.bk, "num_warps": t.warps}
    grid = triton.cdiv(n, t.bn)
    if on_mma and (tile is None or t.bk == 32):
        bm = max(8, triton.next_power_of_2(m))
        how.pop("BK")
        launch(
            few_rows_mma_kernel, grid, *rows, m, n, x.strides[0], weight.strides[0], out.strides[0], float(eps), K=k,
            MMA=mma_text("bf16" if x.dtype is bfloat16 else "f16", t.warps, bm // 8), BM=bm, BS=t.warps, STEPS=t.steps,
            **how,
        )  # fmt: skip
        return
    if m == 1:
        launch(
            one_row_kernel, grid, *rows, n, weight.strides[0], float(eps), K=k, STEPS=t.steps, SPAN=LINE // itemsize,
            BW=min(t.bn, max(1, t.warps * 32 * 16 // itemsize // t.bk)), **how,
        )  # fmt: skip
        return
    launch(
        few_rows_kernel, grid, *rows, m, n, k, x.strides[0], weight.strides[0], out.strides[0], float(eps),
        DOT=_dot_type(x.dtype), PRECISION="tf32" if allow_tf32 else "ieee", BM=triton.next_power_of_2(max(m, 16)),
        BS=t.warps, num_stages=t.steps, **how,
    )  # fmt: skip


def _dot_type(dtype: DType) -> Any:
    """The operands' type in tl.dot; the interpreter's dot has no bfloat16."""
    return TRITON[(float32 if is_interpreted() and dtype is bfloat16 else dtype).name]
