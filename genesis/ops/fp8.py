"""Matmuls in 8-bit floats: each row of both operands is scaled by a power of two and rounded to e4m3.

e4m3 (`float8_e4m3fn`) has 3 mantissa bits, values up to ±448, and NaN. Sums are float32. A row's scale is the smallest
power of two that brings its largest magnitude to 448 or below. Scaling by a power of two is exact, so codes have the
same bits on every device, and it costs no precision, because relative rounding does not depend on the exponent.

A weight W `[out, in]` is quantised by rows, with scales s. They scale the columns of x·Wᵀ. In g·W they are inside the
sums, so g is multiplied by them, which is exact, before it is quantised by rows. The same codes of W serve both
matmuls. Weight gradients are sums over tokens, in which small values matter; they stay in the wider dtype.

Ops that support this take `fp8`: the smallest result width that is computed in 8-bit floats, 0 for none, 1 for all.
Each matmul is decided separately: a layer may use them only in forward, or only for its input gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.backend import Device
from genesis.backend.cpu import scratch
from genesis.dtypes import float8_e4m3fn, float32
from genesis.errors import DTypeError, ShapeError
from genesis.op import op
from genesis.ops.blocks import as_type, each_block, rows_of
from genesis.ops.linalg import matmul_flops, multiply, same_type

CAPABILITY = 8, 9  # compute capability of the first GPUs that convert to and multiply 8-bit floats
GRAIN = 16  # both sizes of a weight must be multiples of it, for TMA and the tensor cores
# Smallest result width that models compute in 8-bit floats. Narrower matmuls gain less than quantising the input costs,
# or too little compared with the effect that rounding queries and keys has on the loss (decision 6).
MIN_COLUMNS = 2048


def lacking(capability: tuple[int, int], device: Device) -> str | None:
    """Return what a GPU lacks for 8-bit floats, as a phrase that follows the feature's name; None if nothing."""
    if capability >= CAPABILITY:
        return None
    needed, has = (".".join(map(str, pair)) for pair in (CAPABILITY, capability))
    return f"needs compute capability {needed}, and {device} has {has}"


def suits_fp8(weight: Any) -> bool:
    """Whether matmuls with a weight `[out, in]` can use 8-bit floats."""
    return weight.ndim == 2 and all(size > 0 and size % GRAIN == 0 for size in weight.shape)


def check_quantizable(name: str, *weights: Array) -> None:
    """Raise ShapeError for a weight that does not suit 8-bit floats."""
    for weight in weights:
        if not suits_fp8(weight):
            raise ShapeError(
                f"{name}: a weight of shape {weight.shape} does not suit fp8: its sizes must be multiples of {GRAIN}",
                next="disable fp8 for this layer",
            )


# --- Quantising -------------------------------------------------------------------------------------------------------

# A float32's exponent field is its power of two plus 127. 448 is 1.75·2^8.
_INFINITE, _UP, _EIGHT, _MANTISSA = 0x7F800000, 0x1FFFFF, 8, 23


def _scales(largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale for each largest magnitude, given as float32 bits, and 1 / scale."""
    field = np.maximum((np.minimum(largest, _INFINITE) + _UP >> _MANTISSA) - _EIGHT, 1)
    scale = (field << _MANTISSA).astype(np.int32).view(np.float32)
    return np.where(largest >= _INFINITE, np.float32(np.nan), scale), (254 - field << _MANTISSA).view(np.float32)


def quantized(x: np.ndarray, factors: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return codes of x·diag(factors), quantised by rows of the last dimension, and their scales."""
    codes, scale = np.empty(x.shape, float8_e4m3fn.numpy), np.empty(x.shape[:-1], np.float32)
    quantize_rows.reference((codes, scale), x, factors)
    return codes, scale


def _quantize_infer(x: Array, factors: Array | None = None) -> tuple[Spec, Spec]:
    if not x.dtype.is_floating_point:
        raise DTypeError(f"quantize_rows takes float tensors, got {x.dtype}", next="cast with .float()")
    if not x.shape:
        raise ShapeError("quantize_rows needs at least one dimension")
    if factors is not None and (factors.shape != x.shape[-1:] or factors.dtype is not float32):
        raise ShapeError(
            f"quantize_rows: factors of shape {factors.shape}, {factors.dtype} do not fit rows of {x.shape[-1]}:"
            " pass one float32 per column"
        )
    return Spec(x.shape, float8_e4m3fn), Spec(x.shape[:-1], float32)


@op("quantize_rows", _quantize_infer, flops=lambda i, o, a: 3 * o[0].size)
def quantize_rows(out: tuple[np.ndarray, np.ndarray], x: np.ndarray, factors: np.ndarray | None = None) -> None:
    """Return e4m3 codes and scales with codes·scale ≈ x·diag(factors), by rows of the last dimension.

    A row with NaN or infinity has the scale NaN, which makes every product with it NaN. The smallest scale is 2^-126.
    """
    if not x.size:
        out[1][...] = 2.0**-126
        return
    codes, scale, rows = rows_of(out[0]), out[1].reshape(-1), rows_of(x)

    def block(start: int, stop: int) -> None:
        values = rows[start:stop].astype(np.float32)
        if factors is not None:
            values *= factors
        largest = np.abs(values).view(np.int32).max(axis=1)
        scale[start:stop], inverse = _scales(largest)
        values *= inverse[:, None]
        codes[start:stop] = values

    with np.errstate(all="ignore"):
        each_block(block, rows.shape[0], rows.shape[1])


# --- Matmuls ----------------------------------------------------------------------------------------------------------


def multiply_quantized(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """Set out = x @ y as `linalg.multiply` does, with the rows of x and the columns of y `[in, out]` quantised."""
    codes, scale = quantized(x)
    columns, factors = quantized(y.T)
    with scratch(out.shape, np.float32) as product, np.errstate(invalid="ignore", over="ignore"):
        multiply(codes.astype(np.float32), columns.astype(np.float32).T, product)
        product *= scale[..., None]
        product *= factors
        np.copyto(out, product, casting="unsafe")


def multiply_scaled(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    """Set out = x @ weight, both quantised by rows; x is first multiplied by the weight's scales."""
    columns, factors = quantized(weight)
    codes, scale = quantized(x, factors)
    with scratch(out.shape, np.float32) as product, np.errstate(invalid="ignore", over="ignore"):
        multiply(codes.astype(np.float32), columns.astype(np.float32), product)
        product *= scale[..., None]
        np.copyto(out, product, casting="unsafe")


def _matmul_infer(x: Array, weight: Array, addend: Array | None = None) -> Spec:
    check_quantizable("quantized_matmul", weight)
    if not x.shape or x.shape[-1] != weight.shape[0]:
        raise ShapeError(f"quantized_matmul: an input of shape {x.shape} does not fit a weight of shape {weight.shape}")
    spec = Spec((*x.shape[:-1], weight.shape[1]), x.dtype)
    same_type("quantized_matmul", x, weight)
    if addend is not None and addend.spec != spec:
        raise ShapeError(f"quantized_matmul: an addend {addend.spec} does not match the result {spec}")
    return spec


@op("quantized_matmul", _matmul_infer, flops=matmul_flops)
def quantized_matmul(out: np.ndarray, x: np.ndarray, weight: np.ndarray, addend: np.ndarray | None = None) -> None:
    """x @ weight + addend in 8-bit floats, rounded once. No gradient: it computes input gradients of linear layers.

    Args:
        x: `[..., out]`.
        weight: `[out, in]`, quantised by rows.
        addend: `[..., in]`, or None.
    """
    if addend is None:
        multiply_scaled(x, weight, out)
        return
    with scratch(out.shape, np.float32) as wide:
        multiply_scaled(x, weight, wide)
        np.add(wide, as_type(addend, wide.dtype), out=wide)
        np.copyto(out, wide, casting="unsafe")
