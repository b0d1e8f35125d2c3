"""Kernels of products in 8-bit floats: rows quantised in a pass of their own, then multiplied as they lie in memory.

The tensor cores of Hopper take 8-bit factors with k innermost alone. Activations and gradients lie so, and weights
forward. Backward a weight's codes are turned, in tiles, for which the scales of its rows are made before.
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
from genesis.kernels.gemm.linalg import Scales, matmul_into
from genesis.kernels.strides import as_matrix, is_wide
from genesis.kernels.types import converted
from genesis.ops.fp8 import lacking
from genesis.ops.shape import contiguous
from genesis.shapes import numel

__all__ = [
    "quantize_into",
    "quantize_turned",
    "quantized_factors",
    "quantized_product_into",
    "scaled_factors",
]

LONGEST = 20480  # elements of a row that stay in registers between its largest one and its codes
CHUNK = 2048  # elements of a longer one that are taken at a time
TILE = 4096  # elements of a program's tile, where those of a row are fewer
TURNED = 128, 64  # rows and columns of a tile that is turned


# --- Quantising -------------------------------------------------------------------------------------------------------


@triton.jit
def values_of(p_x, p_factors, i_m, i_k, rows, k):
    """A tile of x·diag(factors) in float32."""
    b_x = tl.load(p_x + i_m[:, None] * k + i_k[None, :], mask=(i_m < rows)[:, None] & (i_k < k)[None, :], other=0)
    b_x = converted(b_x, tl.float32)
    if p_factors is not None:
        b_x = b_x * tl.load(p_factors + i_k, mask=i_k < k, other=0)[None, :]
    return b_x


@triton.jit
def largest_of(b_x):
    """The bits of each row's largest magnitude: NaN, then infinity, then numbers, in the order of whole numbers."""
    return tl.max(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scales_of(b_largest):
    """The power of two for each largest magnitude that brings it to 448 or below, and its inverse; see ops/fp8.py."""
    b_field = tl.maximum(((tl.minimum(b_largest, 0x7F800000) + 0x1FFFFF) >> 23) - 8, 1)
    b_scale = tl.where(b_largest >= 0x7F800000, 0x7FC00000, b_field << 23)
    return b_scale.to(tl.float32, bitcast=True), ((254 - b_field) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_codes(p_q, b_x, b_inverse, i_m, i_k, rows, k):
    """The codes of a tile."""
    b_q = converted(b_x * b_inverse[:, None], tl.float8e4nv)
    tl.store(p_q + i_m[:, None] * k + i_k[None, :], b_q, mask=(i_m < rows)[:, None] & (i_k < k)[None, :])


@triton.jit
def quantize_rows_of(program, p_q, p_scale, p_x, p_factors, rows, k, ONCE: tl.constexpr, WIDE: tl.constexpr,
                     BM: tl.constexpr, BK: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """The BM rows of a program; ONCE: held in a tile, and one of REST more columns. Without p_q the scales alone."""
    if WIDE:
        program = program.to(tl.int64)
    i_m, i_k = program * BM + tl.arange(0, BM), tl.arange(0, BK)
    if ONCE:
        b_x = values_of(p_x, p_factors, i_m, i_k, rows, k)
        b_largest = largest_of(b_x)
        if REST:
            i_rest = BK + tl.arange(0, REST)
            b_rest = values_of(p_x, p_factors, i_m, i_rest, rows, k)
            b_largest = tl.maximum(b_largest, largest_of(b_rest))
        b_scale, b_inverse = scales_of(b_largest)
        if p_q is not None:
            store_codes(p_q, b_x, b_inverse, i_m, i_k, rows, k)
            if REST:
                store_codes(p_q, b_rest, b_inverse, i_m, i_rest, rows, k)
    else:
        b_largest = tl.zeros((BM,), tl.int32)
        for at in range(0, k, BK):
            b_largest = tl.maximum(b_largest, largest_of(values_of(p_x, p_factors, i_m, at + i_k, rows, k)))
        b_scale, b_inverse = scales_of(b_largest)
        if p_q is not None:
            for at in range(0, k, BK):
                b_x = values_of(p_x, p_factors, i_m, at + i_k, rows, k)
                store_codes(p_q, b_x, b_inverse, i_m, at + i_k, rows, k)
    tl.store(p_scale + i_m, b_scale, mask=i_m < rows)


@triton.jit
def quantize_kernel(p_q, p_scale, p_x, p_factors, rows, k, ONCE: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr,
                    BK: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """The rows of one matrix."""
    quantize_rows_of(tl.program_id(0), p_q, p_scale, p_x, p_factors, rows, k, ONCE, WIDE, BM, BK, REST)


@triton.jit
def turn_kernel(p_q, p_scale, p_x, rows, k, WIDE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """The codes of a tile, turned, by the scales of its rows; exponents of a scale and its inverse add up to 254."""
    program, tiles_k = tl.program_id(0), tl.cdiv(k, BK)
    i_m, i_k = program // tiles_k * BM + tl.arange(0, BM), program % tiles_k * BK + tl.arange(0, BK)
    if WIDE:
        i_m, i_k = i_m.to(tl.int64), i_k.to(tl.int64)
    b_scale = tl.load(p_scale + i_m, mask=i_m < rows, other=1.0)
    b_inverse = ((254 << 23) - b_scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    b_q = converted(values_of(p_x, None, i_m, i_k, rows, k) * b_inverse[:, None], tl.float8e4nv)
    mask = (i_m < rows)[:, None] & (i_k < k)[None, :]
    tl.store(p_q + i_k[None, :] * rows + i_m[:, None], b_q, mask=mask)


@triton.jit
def quantize_both_kernel(p_q, p_r, p_scales, p_x, p_w, m, n, k, ONCE: tl.constexpr, WIDE: tl.constexpr,
                         BM: tl.constexpr, BK: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """The m rows of one matrix and the n rows of another."""
    program, first = tl.program_id(0), tl.cdiv(m, BM)
    if program < first:
        quantize_rows_of(program, p_q, p_scales, p_x, None, m, k, ONCE, WIDE, BM, BK, REST)
    else:
        quantize_rows_of(program - first, p_r, p_scales + m, p_w, None, n, k, ONCE, WIDE, BM, BK, REST)


def _tile(k: int, *, factors: bool = False) -> dict[str, Any]:
    """The constants for rows of k elements; `factors`: a program takes several rows, which share them."""
    block, rest = triton.next_power_of_2(max(k, 1)), 0
    if factors:
        once, block = block <= TILE, min(block, TILE)
        rows = max(TILE // block, min(4, 2 * TILE // block))
        return {"ONCE": once, "BM": rows, "BK": block, "REST": 0, "num_warps": 4}
    if block > TILE and (left := triton.next_power_of_2(k - block // 2)) < block // 2:
        block, rest = block // 2, left  # fewer lanes that have nothing to do
    once = block + rest <= LONGEST
    if not once:
        block, rest = CHUNK, 0
    rows = max(1, TILE // block)
    return {"ONCE": once, "BM": rows, "BK": block, "REST": rest, "num_warps": 8 if block == 8192 else 4}


def _check(device: Device) -> None:
    if (lack := lacking(backend_of(device).driver.properties.capability, device)) is not None:
        raise DeviceError(f"fp8 {lack}", next="leave fp8 out")


def quantize_into(codes: Array | None, scale: Array, x: Array, factors: Array | None = None) -> None:
    """Codes, unless they are None, and scales of the rows of x·diag(factors).

    Args:
        codes, x: `[m, k]`, contiguous.
        scale: `[m]`, contiguous.
        factors: `[k]`, contiguous.
    """
    _check(x.device)
    (rows, k), tile = x.shape, _tile(x.shape[1], factors=factors is not None)
    launch(
        quantize_kernel, triton.cdiv(rows, tile["BM"]), codes, scale, x, factors, rows, k,
        WIDE=is_wide((rows, k), (k, 1)), **tile,
    )  # fmt: skip


def quantize_turned(weight: Array) -> tuple[Array, Array]:
    """Codes of a weight `[n, k]` by its rows, turned to `[k, n]`, and the scales of the rows `[n]`."""
    (n, k), (bm, bk) = weight.shape, TURNED
    codes, scale = empty((k, n), float8_e4m3fn, weight.device), empty((n,), float32, weight.device)
    quantize_into(None, scale, weight)
    launch(
        turn_kernel, triton.cdiv(n, bm) * triton.cdiv(k, bk), codes, scale, weight, n, k,
        WIDE=is_wide((n, k), (k, 1)), BM=bm, BK=bk, num_warps=4,
    )  # fmt: skip
    return codes, scale


@cuda_impl("quantize_rows")
def quantize_rows(out: tuple[Array, Array], x: Array, factors: Array | None = None) -> None:
    """Codes and scales."""
    codes, scale = out
    rows, k = numel(x.shape[:-1]), x.shape[-1]
    if rows:
        whole, factors = contiguous(x), None if factors is None else contiguous(factors)
        quantize_into(
            codes.view((rows, k), (k, 1)), scale.view((rows,), (1,)), whole.view((rows, k), (k, 1)), factors
        )  # fmt: skip


# --- Products ---------------------------------------------------------------------------------------------------------


def quantized_product_into(
    out: Array, x: Array, weight: Array, *, bias: Array | None = None, residual: Array | None = None
) -> None:
    """out = x·weightᵀ + bias + residual, with the rows of both factors quantised.

    Args:
        out: `[m, n]`, its rows `out.strides[0]` apart.
        x: `[m, k]`, contiguous.
        weight: `[n, k]`, contiguous.
        bias: `[n]`.
        residual: `[m, n]`, contiguous, and out is so, too.
    """
    if not out.size:
        return
    codes, rows, scales = quantized_factors(x, weight)
    matmul_into(out, codes, rows, turned=True, bias=bias, residual=residual, scales=Scales(scales, True))


def quantized_factors(x: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Codes of x `[m, k]` and of a weight `[n, k]`, and the scales of both `[m + n]`."""
    _check(x.device)
    (m, k), n, tile = x.shape, weight.shape[0], _tile(x.shape[1])
    scales = empty((m + n,), float32, x.device)
    codes, rows = (empty(a.shape, float8_e4m3fn, a.device) for a in (x, weight))
    launch(
        quantize_both_kernel, triton.cdiv(m, tile["BM"]) + triton.cdiv(n, tile["BM"]), codes, rows, scales, x, weight,
        m, n, k, WIDE=is_wide((max(m, n), k), (k, 1)), **tile,
    )  # fmt: skip
    return codes, rows, scales


def scaled_factors(x: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Codes of x·diag(scales of the weight's rows) and of the weight `[n, k]`, turned to `[k, n]`; x's scales `[m]`."""
    turned, factors = quantize_turned(weight)
    codes, scales = empty(x.shape, float8_e4m3fn, x.device), empty(x.shape[:1], float32, x.device)
    quantize_into(codes, scales, x, factors)
    return codes, turned, scales


@cuda_impl("quantized_matmul")
def quantized_matmul(out: Array, x: Array, weight: Array, addend: Array | None = None) -> None:
    """x @ weight + addend."""
    if not out.size:
        return
    residual = None if addend is None else as_matrix(contiguous(addend))
    codes, turned, scales = scaled_factors(as_matrix(contiguous(x)), contiguous(weight))
    matmul_into(as_matrix(out), codes, turned, turned=True, residual=residual, scales=Scales(scales, False))
