"""GEMMs in 8-bit floats: a separate kernel quantizes rows, and the GEMM takes their codes K-major.

Plain reference: genesis/ops/fp8.py: `quantize_rows`, `quantized_matmul`.

Hopper's tensor cores take 8-bit operands only K-major. Activations and gradients are K-major, and so are weights in the
forward pass. In the backward pass a weight's codes are transposed tile by tile, after the scales of its rows are known.

Codes are e4m3, and a scale is a power of two. Tiles: BM rows x BK columns.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend import Device
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import float8_e4m3fn, float32
from genesis.errors import DeviceError
from genesis.kernels.elements import as_matrix, converted, needs_int64
from genesis.kernels.gemm.linalg import Scales, matmul_into
from genesis.ops.fp8 import lacking
from genesis.ops.shape import contiguous
from genesis.shapes import numel

LONGEST = 20480  # the longest row that is held in registers until its codes are computed
CHUNK = 2048  # elements of a longer row at a time
TILE = 4096  # elements per tile of shorter rows
TRANSPOSE_TILE = 128, 64  # rows and columns of a tile of `quantize_transposed_kernel`


# --- Quantization -----------------------------------------------------------------------------------------------------


@triton.jit
def load_scaled(p_x, p_column_scale, i_m, i_k, rows, k):
    """Load a tile [BM, BK] of x·diag(column_scale) in float32."""
    b_x = tl.load(p_x + i_m[:, None] * k + i_k[None, :], mask=(i_m < rows)[:, None] & (i_k < k)[None, :], other=0)
    b_x = converted(b_x, tl.float32)  # [BM, BK]
    if p_column_scale is not None:
        b_x = b_x * tl.load(p_column_scale + i_k, mask=i_k < k, other=0)[None, :]
    return b_x


@triton.jit
def largest_magnitude(b_x):
    """Return the bits of each row's largest magnitude [BM]. As integers, NaN > infinity > numbers."""
    return tl.max(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scales_of(b_largest):
    """Return the power of two that brings each largest magnitude [BM] to 448 or below, and its inverse (ops/fp8.py)."""
    b_field = tl.maximum(((tl.minimum(b_largest, 0x7F800000) + 0x1FFFFF) >> 23) - 8, 1)  # [BM]
    b_scale = tl.where(b_largest >= 0x7F800000, 0x7FC00000, b_field << 23)  # [BM]
    return b_scale.to(tl.float32, bitcast=True), ((254 - b_field) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_codes(p_q, b_x, b_inverse, i_m, i_k, rows, k):
    """Store the codes of a tile [BM, BK]."""
    b_q = converted(b_x * b_inverse[:, None], tl.float8e4nv)  # [BM, BK]
    tl.store(p_q + i_m[:, None] * k + i_k[None, :], b_q, mask=(i_m < rows)[:, None] & (i_k < k)[None, :])


@triton.jit
def quantize_block(program, p_q, p_scale, p_x, p_column_scale, rows, k, ONCE: tl.constexpr, INT64: tl.constexpr,
                   BM: tl.constexpr, BK: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """Quantize BM rows, or only compute their scales if p_q is None. With ONCE, a row is one tile of BK columns, plus
    one of REST columns.
    """
    if INT64:
        program = program.to(tl.int64)
    i_m, i_k = program * BM + tl.arange(0, BM), tl.arange(0, BK)
    # Hold a row in registers if it fits.
    if ONCE:
        b_x = load_scaled(p_x, p_column_scale, i_m, i_k, rows, k)  # [BM, BK]
        b_largest = largest_magnitude(b_x)  # [BM]
        if REST:
            i_rest = BK + tl.arange(0, REST)  # [REST]
            b_rest = load_scaled(p_x, p_column_scale, i_m, i_rest, rows, k)  # [BM, REST]
            b_largest = tl.maximum(b_largest, largest_magnitude(b_rest))
        b_scale, b_inverse = scales_of(b_largest)  # [BM] each
        if p_q is not None:
            store_codes(p_q, b_x, b_inverse, i_m, i_k, rows, k)
            if REST:
                store_codes(p_q, b_rest, b_inverse, i_m, i_rest, rows, k)
    else:
        # Read long rows twice: for the largest magnitude, then for the codes.
        b_largest = tl.zeros((BM,), tl.int32)  # [BM]
        for at in range(0, k, BK):
            b_largest = tl.maximum(
                b_largest, largest_magnitude(load_scaled(p_x, p_column_scale, i_m, at + i_k, rows, k))
            )
        b_scale, b_inverse = scales_of(b_largest)  # [BM] each
        if p_q is not None:
            for at in range(0, k, BK):
                b_x = load_scaled(p_x, p_column_scale, i_m, at + i_k, rows, k)  # [BM, BK]
                store_codes(p_q, b_x, b_inverse, i_m, at + i_k, rows, k)
    tl.store(p_scale + i_m, b_scale, mask=i_m < rows)


@triton.jit
def quantize_rows_kernel(p_q, p_r, p_scales, p_x, p_w, p_column_scale, m, n, k, ONCE: tl.constexpr, INT64: tl.constexpr,
                         BM: tl.constexpr, BK: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """Quantize the m rows of one matrix and, unless p_w is None, the n rows of another, which has no column scales."""
    program, first = tl.program_id(0), tl.cdiv(m, BM)
    if p_w is None or program < first:
        quantize_block(program, p_q, p_scales, p_x, p_column_scale, m, k, ONCE, INT64, BM, BK, REST)
    else:
        quantize_block(program - first, p_r, p_scales + m, p_w, None, n, k, ONCE, INT64, BM, BK, REST)


@triton.jit
def quantize_transposed_kernel(p_q, p_scale, p_x, rows, k, INT64: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Store the transposed codes of a tile, given its rows' scales. Exponents of a scale and its inverse sum to 254."""
    program, tiles_k = tl.program_id(0), tl.cdiv(k, BK)
    i_m, i_k = program // tiles_k * BM + tl.arange(0, BM), program % tiles_k * BK + tl.arange(0, BK)
    if INT64:
        i_m, i_k = i_m.to(tl.int64), i_k.to(tl.int64)
    b_scale = tl.load(p_scale + i_m, mask=i_m < rows, other=1.0)  # [BM]
    b_inverse = ((254 << 23) - b_scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # [BM]
    b_q = converted(load_scaled(p_x, None, i_m, i_k, rows, k) * b_inverse[:, None], tl.float8e4nv)  # [BM, BK]
    mask = (i_m < rows)[:, None] & (i_k < k)[None, :]  # [BM, BK]
    tl.store(p_q + i_k[None, :] * rows + i_m[:, None], b_q, mask=mask)


def _tile(k: int, *, column_scale: bool = False) -> dict[str, Any]:
    """Return the constants for rows of k elements. With `column_scale`, the rows of a program share its load."""
    block, rest = triton.next_power_of_2(max(k, 1)), 0
    if column_scale:
        once, block = block <= TILE, min(block, TILE)
        rows = max(TILE // block, min(4, 2 * TILE // block))
        return {"ONCE": once, "BM": rows, "BK": block, "REST": 0, "num_warps": 4}
    if block > TILE and (left := triton.next_power_of_2(k - block // 2)) < block // 2:
        block, rest = block // 2, left  # leaves fewer lanes idle
    once = block + rest <= LONGEST
    if not once:
        block, rest = CHUNK, 0
    rows = max(1, TILE // block)
    return {"ONCE": once, "BM": rows, "BK": block, "REST": rest, "num_warps": 8 if block == 8192 else 4}


def _check(device: Device) -> None:
    if (lack := lacking(backend_of(device).driver.properties.capability, device)) is not None:
        raise DeviceError(f"fp8 {lack}", next="use bfloat16 instead of fp8")


def quantize_into(codes: Array | None, scale: Array, x: Array, column_scale: Array | None = None) -> None:
    """Write codes, unless None, and scales `[m]` of the rows of x·diag(column_scale), x `[m, k]`. All are contiguous.
    Raises DeviceError if the GPU does not support fp8.
    """
    _check(x.device)
    (rows, k), tile = x.shape, _tile(x.shape[1], column_scale=column_scale is not None)
    launch(
        quantize_rows_kernel, triton.cdiv(rows, tile["BM"]), codes, None, scale, x, None, column_scale, rows, 0, k,
        INT64=needs_int64((rows, k), (k, 1)), **tile,
    )  # fmt: skip


@cuda_impl("quantize_rows")
def quantize_rows(out: tuple[Array, Array], x: Array, column_scale: Array | None = None) -> None:
    codes, scale = out
    rows, k = numel(x.shape[:-1]), x.shape[-1]
    if rows:
        x_rows, column_scale = contiguous(x), None if column_scale is None else contiguous(column_scale)
        quantize_into(
            codes.view((rows, k), (k, 1)), scale.view((rows,), (1,)), x_rows.view((rows, k), (k, 1)), column_scale
        )  # fmt: skip


# --- GEMMs ------------------------------------------------------------------------------------------------------------


def quantized_gemm_into(
    out: Array, x: Array, weight: Array, *, bias: Array | None = None, residual: Array | None = None
) -> None:
    """Write out = x·weightᵀ + bias + residual, with the rows of both operands quantized.

    Args:
        out: `[m, n]`, with any row stride, but contiguous with a residual.
        x: `[m, k]`, contiguous.
        weight: `[n, k]`, contiguous.
        bias: `[n]`.
        residual: `[m, n]`, contiguous.
    """
    if not out.size:
        return
    codes, rows, scales = quantize_operands(x, weight)
    matmul_into(out, codes, rows, transpose_b=True, bias=bias, residual=residual, scales=Scales(scales, True))


def quantize_operands(x: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Return codes of x `[m, k]` and of a weight `[n, k]`, and the scales of both, `[m + n]`."""
    _check(x.device)
    (m, k), n, tile = x.shape, weight.shape[0], _tile(x.shape[1])
    scales = empty((m + n,), float32, x.device)
    codes, rows = (empty(a.shape, float8_e4m3fn, a.device) for a in (x, weight))
    launch(
        quantize_rows_kernel, triton.cdiv(m, tile["BM"]) + triton.cdiv(n, tile["BM"]), codes, rows, scales, x, weight,
        None, m, n, k, INT64=needs_int64((max(m, n), k), (k, 1)), **tile,
    )  # fmt: skip
    return codes, rows, scales


def quantize_scaled_operands(x: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Return codes of x·diag(scales of the weight's rows), codes of the weight as `[k, n]`, and x's scales `[m]`."""
    (n, k), (bm, bk) = weight.shape, TRANSPOSE_TILE
    transposed, column_scale = empty((k, n), float8_e4m3fn, weight.device), empty((n,), float32, weight.device)
    quantize_into(None, column_scale, weight)
    launch(
        quantize_transposed_kernel, triton.cdiv(n, bm) * triton.cdiv(k, bk), transposed, column_scale, weight, n, k,
        INT64=needs_int64((n, k), (k, 1)), BM=bm, BK=bk, num_warps=4,
    )  # fmt: skip
    codes, scales = empty(x.shape, float8_e4m3fn, x.device), empty(x.shape[:1], float32, x.device)
    quantize_into(codes, scales, x, column_scale)
    return codes, transposed, scales


@cuda_impl("quantized_matmul")
def quantized_matmul(out: Array, x: Array, weight: Array, addend: Array | None = None) -> None:
    if not out.size:
        return
    residual = None if addend is None else as_matrix(contiguous(addend))
    codes, transposed, scales = quantize_scaled_operands(as_matrix(contiguous(x)), contiguous(weight))
    matmul_into(as_matrix(out), codes, transposed, transpose_b=True, residual=residual, scales=Scales(scales, False))
