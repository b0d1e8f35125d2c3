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
from genesis.kernels.dependents import allow_next, can_overlap, prefetch, wait_for_previous
from genesis.kernels.gemm.gated import swiglu
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
        prefetch: programs that ask for their rows of W early.
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
def prefetch_rows(p_w, i_n, n, k, w_row, OVERLAP: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr):
    """Ask for BN rows of W from i_n on. A line of L2 holds SPAN elements."""
    o_n, o_k = i_n + tl.arange(0, BN), tl.arange(0, 64) * SPAN
    p_n = p_w + o_n.to(tl.int64)[:, None] * w_row
    for i_k in range(0, k, 64 * SPAN):
        prefetch(p_n + (i_k + o_k)[None, :], (o_n < n)[:, None] & (i_k + o_k < k)[None, :], OVERLAP)  # [BN, 64]


@triton.jit
def rms_reciprocal(b_square, k, eps):
    """1 / rms of rows from their sums of squares."""
    return 1 / tl.sqrt_rn(b_square / k + eps)


@triton.jit
def load_vector(p, o_n, n, DEFAULT: tl.constexpr):
    """Elements [1, BN] in float32; DEFAULT where there is no vector."""
    if p is None:
        return tl.full((1, o_n.shape[0]), DEFAULT, tl.float32)
    else:
        return converted(tl.load(p + o_n, mask=o_n < n, other=0.0), tl.float32)[None, :]


@triton.jit
def load_added(p_bias, p_residual, o_m, o_n, m, n, y_row):
    """bias + residual [BM, BN], or bias [1, BN], in float32; 0 where there is neither."""
    b_added = load_vector(p_bias, o_n, n, 0)
    if p_residual is None:
        return b_added
    else:
        mask, o_y = (o_m < m)[:, None] & (o_n < n)[None, :], o_m.to(tl.int64)[:, None] * y_row + o_n[None, :]
        return b_added + converted(tl.load(p_residual + o_y, mask=mask, other=0.0), tl.float32)


@triton.jit
def store_rows(b_y, p_y, b_w_scale, b_added, o_m, o_n, m, n, y_row):
    """y [BM, BN] = sums·diag(w_scale) + added, cast once; what was stored."""
    b_y = converted(b_y * b_w_scale + b_added, p_y.dtype.element_ty)
    o_y = o_m.to(tl.int64)[:, None] * y_row + o_n[None, :]
    tl.store(p_y + o_y, b_y, mask=(o_m < m)[:, None] & (o_n < n)[None, :])
    return b_y


@triton.jit
def store_swiglu(b_gate, b_up, p_h, o_m, o_n, m, n):
    """h [BM, BN] = silu(gate)·up."""
    o_h = o_m.to(tl.int64)[:, None] * n + o_n[None, :]
    b_h = converted(swiglu(b_gate, b_up), p_h.dtype.element_ty)
    tl.store(p_h + o_h, b_h, mask=(o_m < m)[:, None] & (o_n < n)[None, :])


@triton.jit
def after_loads():
    """0.0, known once all loads before it are issued. Sums that begin with it make the assembler issue them side by
    side, where it would spare registers and wait for each before the next: it moves no load past a barrier.
    """
    zero = tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, 0, 0; bar.red.popc.u32 $0, 0, p; }", "=r", [], tl.int32, False, 1
    )
    return zero.to(tl.float32)


if is_interpreted():

    def after_loads() -> float:
        """What is issued is done."""
        return 0.0


@triton.jit
def load_tile(p, mask):
    """What is at p, 0 where the mask is not set; None stands for a mask that is set everywhere."""
    if mask is None:
        return tl.load(p)
    else:
        return tl.load(p, mask=mask, other=0.0)


@triton.jit
def one_row_kernel(p_y, p_h, p_rstd, p_x, p_w, p_up, p_norm, p_bias, p_residual, p_w_scale, n, w_row, eps,
                   K: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                   STEPS: tl.constexpr, BW: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """One row of x with BN rows of W, or BN of gate and of up.

    Tiles are [BW, BN // BW, BK]: warps take BW rows side by side, and each BN // BW of them, for which it converts x
    once. x is a tile [BW, 1, BK], so that each element is where it is needed, without a pass through shared memory.
    """
    allow_next(OVERLAP)
    i_n = tl.program_id(0) * BN
    if OVERLAP and tl.program_id(0) < EARLY:
        prefetch_rows(p_w, i_n, n, K, w_row, OVERLAP, BN, SPAN)
        if p_up is not None:
            prefetch_rows(p_up, i_n, n, K, w_row, OVERLAP, BN, SPAN)
    wait_for_previous(OVERLAP)
    o_m, o_n, o_b = tl.arange(0, 1), i_n + tl.arange(0, BN), tl.arange(0, BW)[:, None]  # [1], [BN], [BW, 1]
    b_added = load_added(p_bias, p_residual, o_m, o_n, 1, n, n)
    b_w_scale, b_up_scale = load_vector(p_w_scale, o_n, n, 1), load_vector(None, o_n, n, 1)
    if p_up is not None and p_w_scale is not None:
        b_up_scale = load_vector(p_w_scale + n, o_n, n, 1)
    o_w = i_n + o_b * (BN // BW) + tl.arange(0, BN // BW)[None, :]  # [BW, BN // BW]
    # rows behind the last are read as that one, which spares masks
    o_w, o_b = (tl.minimum(o_w, n - 1).to(tl.int64) * w_row)[:, :, None], (o_b * 0)[:, :, None]
    b_acc, b_square = tl.full((BW, BN // BW, BK), -0.0, tl.float32), tl.full((BW, 1, BK), -0.0, tl.float32)
    b_acc_up = b_acc
    for i_k in range(0, K, BK * STEPS):
        x, w, up, scale = (), (), (), ()  # tiles of STEPS steps
        for i in tl.static_range(STEPS):
            o_k = (i_k + i * BK + tl.arange(0, BK))[None, None, :]
            if (i + 1) * BK > (K - 1) % (BK * STEPS) + 1:  # the last trip does not fill this tile
                m_k = (o_k < K) & (o_b == 0)  # [BW, 1, BK]
            else:
                m_k = None
            x += (load_tile(p_x + o_b + o_k, m_k),)
            w += (load_tile(p_w + o_w + o_k, m_k),)
            if p_up is not None:
                up += (load_tile(p_up + o_w + o_k, m_k),)
            if p_norm is not None:
                scale += (load_tile(p_norm + o_b + o_k, m_k),)
        zero = after_loads()
        b_acc, b_acc_up, b_square = b_acc + zero, b_acc_up + zero, b_square + zero
        for i in tl.static_range(STEPS):
            b_x = converted(x[i], tl.float32)
            if p_norm is not None:
                b_square += b_x * b_x
                b_x = b_x * converted(scale[i], tl.float32)
            b_acc += b_x * converted(w[i], tl.float32)
            if p_up is not None:
                b_acc_up += b_x * converted(up[i], tl.float32)
    b_y, b_up = tl.sum(b_acc, 2), tl.sum(b_acc_up, 2)  # [BW, BN // BW]
    if p_norm is not None:
        b_rstd = rms_reciprocal(tl.sum(b_square, 2), K, eps)  # [BW, 1], the same in all
        b_y, b_up = b_y * b_rstd, b_up * b_rstd
        if p_rstd is not None:
            o_b = tl.arange(0, BW)[:, None]
            tl.store(p_rstd + o_b, b_rstd, mask=i_n + o_b == 0)
    b_y = store_rows(tl.reshape(b_y, (1, BN)), p_y, b_w_scale, b_added, o_m, o_n, 1, n, n)
    if p_up is not None:
        b_up = store_rows(tl.reshape(b_up, (1, BN)), p_y + n, b_up_scale, 0, o_m, o_n, 1, n, n)
        store_swiglu(b_y, b_up, p_h, o_m, o_n, 1, n)


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
    t = tile or choose_tile(m, n, k, itemsize, backend_of(x.device).driver.properties.sm_count, len(weights))
    scale, eps, rstd = norm or (None, 0.0, None)
    rows: list[Any] = [out, h, rstd, x, weight, up, scale, bias, residual, w_scale]
    how: dict[str, Any] = {"OVERLAP": overlap, "EARLY": t.prefetch, "BN": t.bn, "BK": t.bk, "num_warps": t.warps}
    grid = triton.cdiv(n, t.bn)
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
