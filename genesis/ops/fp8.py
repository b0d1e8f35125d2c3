"""Products in 8-bit floats: each row of both factors is scaled by a power of two and rounded to e4m3, sums are wide.

e4m3 (`float8_e4m3fn`) has 3 bits of mantissa, values up to 448, and NaN. A row's scale is the smallest power of two
that brings its largest magnitude to 448 or below. A power of two is exact, so that codes are the same bits on every
device; and it wastes nothing, since a float rounds no worse at another exponent.

A weight W `[out, in]` is quantised by its rows, with scales s. x·Wᵀ has them in its columns. g·W has them inside its
sums, so they go to g, whose products with them are exact, before g is quantised by rows: the same codes of W serve
both. Gradients of weights are sums over tokens, where small values matter; they stay in the wider type.

Ops that can multiply so take `fp8`: the fewest columns of a result that is made in 8-bit floats, 0 for none, 1 for all.
Each product is chosen by itself: a layer's forward may be made so and its input gradient not, or the reverse.
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

CAPABILITY = 8, 9  # of the first GPUs that convert to 8-bit floats and multiply them
GRAIN = 16  # both sizes of a weight are multiples of it: what TMA and the tensor cores ask for
# Columns from which on a model's products are made in 8-bit floats. Narrower ones do not pay for the pass that
# quantises the input, or gain too little for what rounding queries and keys does to the loss (decision 6).
MIN_COLUMNS = 2048


def lacking(capability: tuple[int, int], device: Device) -> str | None:
    """What a GPU of a compute capability lacks for 8-bit floats, after the name of what needs them; None: nothing."""
    if capability >= CAPABILITY:
        return None
    needed, has = (".".join(map(str, pair)) for pair in (CAPABILITY, capability))
    return f"needs compute capability {needed}, and {device} has {has}"


def suits_fp8(weight: Any) -> bool:
    """Whether products with a weight `[out, in]` can be made in 8-bit floats."""
    return weight.ndim == 2 and all(size > 0 and size % GRAIN == 0 for size in weight.shape)


def check_quantizable(name: str, *weights: Array) -> None:
    """Check the sizes of weights whose products are to be made in 8-bit floats."""
    for weight in weights:
        if not suits_fp8(weight):
            raise ShapeError(
                f"{name}: a weight of shape {weight.shape} in fp8, where both sizes are multiples of {GRAIN}",
                next="leave fp8 out for this layer",
            )


# --- Quantising -------------------------------------------------------------------------------------------------------

# The exponent field of a float32 is that of its power of two plus 127. 448 is 1.75·2^8.
_INFINITE, _UP, _EIGHT, _MANTISSA = 0x7F800000, 0x1FFFFF, 8, 23


def _scales(largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale for each largest magnitude, given by its bits as a float32, and 1 / scale."""
    field = np.maximum((np.minimum(largest, _INFINITE) + _UP >> _MANTISSA) - _EIGHT, 1)
    scale = (field << _MANTISSA).astype(np.int32).view(np.float32)
    return np.where(largest >= _INFINITE, np.float32(np.nan), scale), (254 - field << _MANTISSA).view(np.float32)


def quantized(x: np.ndarray, factors: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Codes of x·diag(factors) by rows of the last dimension, and their scales."""
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
            f"quantize_rows: factors of shape {factors.shape} and type {factors.dtype} for rows of {x.shape[-1]};"
            " it takes a float32 for each column"
        )
    return Spec(x.shape, float8_e4m3fn), Spec(x.shape[:-1], float32)


@op("quantize_rows", _quantize_infer, flops=lambda i, o, a: 3 * o[0].size)
def quantize_rows(out: tuple[np.ndarray, np.ndarray], x: np.ndarray, factors: np.ndarray | None = None) -> None:
    """Codes in e4m3 and scales with codes·scale ≈ x·diag(factors), row by row of the last dimension.

    A row with NaN or infinity has the scale NaN, so that all that is made of it is NaN; the smallest scale is 2^-126.
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


# --- Products ---------------------------------------------------------------------------------------------------------


def multiply_quantized(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """out = x @ y as `linalg.multiply`, with the rows of x and the columns of y `[in, out]` quantised."""
    codes, scale = quantized(x)
    columns, factors = quantized(y.T)
    with scratch(out.shape, np.float32) as product, np.errstate(invalid="ignore", over="ignore"):
        multiply(codes.astype(np.float32), columns.astype(np.float32).T, product)
        product *= scale[..., None]
        product *= factors
        np.copyto(out, product, casting="unsafe")


def multiply_scaled(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    """out = x @ weight with the weight's rows quantised, and those of x·diag(scales of these)."""
    columns, factors = quantized(weight)
    codes, scale = quantized(x, factors)
    with scratch(out.shape, np.float32) as product, np.errstate(invalid="ignore", over="ignore"):
        multiply(codes.astype(np.float32), columns.astype(np.float32), product)
        product *= scale[..., None]
        np.copyto(out, product, casting="unsafe")


def _matmul_infer(x: Array, weight: Array, addend: Array | None = None) -> Spec:
    check_quantizable("quantized_matmul", weight)
    if not x.shape or x.shape[-1] != weight.shape[0]:
        raise ShapeError(f"quantized_matmul: an input of shape {x.shape} with a weight of shape {weight.shape}")
    spec = Spec((*x.shape[:-1], weight.shape[1]), x.dtype)
    same_type("quantized_matmul", x, weight)
    if addend is not None and addend.spec != spec:
        raise ShapeError(f"quantized_matmul: an addend {addend.spec} for a result {spec}")
    return spec


@op("quantized_matmul", _matmul_infer, flops=matmul_flops)
def quantized_matmul(out: np.ndarray, x: np.ndarray, weight: np.ndarray, addend: np.ndarray | None = None) -> None:
    """x @ weight + addend in 8-bit floats, rounded once; without gradient: it makes those of linear layers' inputs.

    Args:
        x: `[..., out]`.
        weight: `[out, in]`, quantised by its rows.
    """
    if addend is None:
        multiply_scaled(x, weight, out)
        return
    with scratch(out.shape, np.float32) as wide:
        multiply_scaled(x, weight, wide)
        np.add(wide, as_type(addend, wide.dtype), out=wide)
        np.copyto(out, wide, casting="unsafe")
