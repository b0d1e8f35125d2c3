"""Samples of quantising and of products in 8-bit floats. The oracle rounds to e4m3 by arithmetic, without its codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.errors import DTypeError, ShapeError
from tests.ops.samples.layers import packed_swiglu_backward_oracle
from tests.ops.sampling import Case, Rows, normal

Pair = tuple[np.ndarray, ...]


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Rounded to 4 significant bits, halves to even; below 2^-6 to multiples of 2^-9."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.maximum(np.floor(np.log2(np.abs(x))), -6)
    step = 2.0 ** (np.where(np.isfinite(exponent), exponent, 0) - 3)
    return np.asarray(np.rint(x / step) * step)


def quantized_oracle(x: np.ndarray, factors: np.ndarray | None = None) -> Pair:
    """Values of the codes, and scales."""
    x = x if factors is None else x * factors
    largest = np.abs(x).max(axis=-1, initial=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = 2.0 ** np.maximum(np.ceil(np.log2(largest / 448)), -126)
    scale = np.where(np.isfinite(largest), scale, np.nan)
    return np.where(np.isnan(scale[..., None]) & np.isfinite(x), 0, to_e4m3(x / scale[..., None])), scale


def seen_codes(outputs: Pair) -> Pair:
    """Codes as numbers; those of a row that is not finite mean nothing."""
    codes, scale = (a.astype(np.float64) for a in outputs)
    return np.where(np.isnan(scale[..., None]), 0, codes), scale


def finite_codes(x: np.ndarray, factors: np.ndarray | None = None) -> Pair:
    codes, scale = quantized_oracle(x, factors)
    return np.where(np.isnan(scale[..., None]), 0, codes), scale


def quantizings(rng: np.random.Generator) -> list[Case]:
    shapes: list[tuple[int, ...]] = [(5,), (3, 4), (2, 3, 48), (0, 3), (3, 0), (1, 1), (70, 130)]
    found = [Case((normal(rng, *shape),)) for shape in shapes]
    spread = normal(rng, 6, 33) * 2.0 ** rng.integers(-12, 12, (6, 33))  # many of them fall below e4m3's numbers
    spread[1], spread[2, 3], spread[3, 4], spread[4, 5] = 0, np.inf, np.nan, -np.inf
    factors = (2.0 ** rng.integers(-9, 9, 33)).astype(np.float32)
    long = [Case((normal(rng, 2, k),)) for k in (9000, 15000, 21000)]  # in two tiles, in one, in chunks
    factors_of_long = (2.0 ** rng.integers(-9, 9, 9000)).astype(np.float32)
    return [*found, Case((spread,)), Case((spread, factors)), *long, Case((long[0].inputs[0], factors_of_long))]


# --- Products ---------------------------------------------------------------------------------------------------------


def product_oracle(x: np.ndarray, weight: np.ndarray, in_8_bits: bool) -> np.ndarray:
    if not in_8_bits:
        return np.sum(x[..., None, :] * weight, axis=-1)
    (codes, scale), (columns, factors) = quantized_oracle(x), quantized_oracle(weight)
    return np.sum(codes[..., None, :] * columns, axis=-1) * scale[..., None] * factors


def linear_oracle(x: np.ndarray, weight: np.ndarray, bias: Any = None, residual: Any = None, fp8: int = 1) -> Any:
    found = product_oracle(x, weight, fp8 <= len(weight))
    found = found if bias is None else found + bias
    return found if residual is None else found + residual


def matmul_oracle(x: np.ndarray, weight: np.ndarray, addend: Any = None) -> Any:
    columns, factors = quantized_oracle(weight)
    codes, scale = quantized_oracle(x, factors)
    found = np.sum(codes[..., :, None] * columns, axis=-2) * scale[..., None]
    return found if addend is None else found + addend


def packed_oracle(x: np.ndarray, *parameters: np.ndarray, fp8: int = 1) -> Any:
    weights = [p for p in parameters if p.ndim == 2]
    biases: list[Any] = [p for p in parameters if p.ndim == 1] or [None] * len(weights)
    in_8_bits = fp8 <= sum(len(w) for w in weights)
    found = [product_oracle(x, w, in_8_bits) for w in weights]
    return np.concatenate([y if b is None else y + b for y, b in zip(found, biases, strict=True)], axis=-1)


def swiglu_linear_backward_oracle(
    g: np.ndarray, weight: np.ndarray, gate_up: np.ndarray, with_result: bool = False, fp8: int = 1
) -> Any:
    dh = matmul_oracle(g, weight) if fp8 <= weight.shape[1] else g @ weight
    return packed_swiglu_backward_oracle(dh, gate_up, with_result=with_result)


LINEARS: list[tuple[tuple[int, ...], int]] = [((3,), 32), ((2, 5), 16), ((70,), 80), ((), 16), ((0,), 16)]  # lead, out


def linears(rng: np.random.Generator) -> list[Case]:
    found = []
    for i, (lead, out) in enumerate(LINEARS):
        x, weight, bias, residual = (
            normal(rng, *lead, 48),
            normal(rng, out, 48),
            normal(rng, out),
            normal(rng, *lead, out),
        )
        given = ((), (bias,), (None, residual), (bias, residual))[i % 4]
        found.append(Case((x, weight, *given), {"fp8": True}))
    return [*found, *(Case(found[2].inputs, {"fp8": fewest}) for fewest in (80, 81))]


def packed_linears(rng: np.random.Generator) -> list[Case]:
    found = []
    for sizes, bias in (((32,), True), ((48, 16, 16), True), ((16, 16), False)):
        weights, biases = [normal(rng, n, 32) for n in sizes], [normal(rng, n) for n in sizes if bias]
        found.append(Case((normal(rng, 2, 5, 32), *weights, *biases), {"fp8": True}))
    return [*found, *(Case(found[1].inputs, {"fp8": fewest}) for fewest in (80, 81))]


def matmuls(rng: np.random.Generator) -> list[Case]:
    found = [Case((normal(rng, *lead, out), normal(rng, out, 48))) for lead, out in LINEARS]
    spread = normal(rng, 64, 32) * 2.0 ** rng.integers(-6, 6, (64, 1))  # rows of the weight that differ in size
    return [*found, Case((normal(rng, 9, 64), spread)), Case((normal(rng, 9, 64), spread, normal(rng, 9, 32)))]


def swiglu_backwards(rng: np.random.Generator) -> list[Case]:
    arrays = normal(rng, 3, 7, 32), normal(rng, 32, 48) / 8, normal(rng, 3, 7, 96)
    return [Case(arrays, {"fp8": True, **more}) for more in ({}, {"with_result": True}, {"fp8": 48}, {"fp8": 49})]


NARROW = ("float16", "bfloat16")  # wider results show how few bits the tensor cores keep of sums
ODD = np.zeros((2, 24)), np.zeros((16, 24))
PLAIN: dict[str, Any] = {"dtypes": NARROW, "inner": 1, "reduction": lambda case: case.inputs[0].shape[-1] + 2}

ROWS = [
    Rows(
        "quantize_rows", finite_codes, quantizings, dtypes=("float32", *NARROW), seen=seen_codes,
        errors=(
            (Case((np.zeros((2, 3), np.int64),)), DTypeError, "float"),
            (Case((np.zeros(()),)), ShapeError, "dimension"),
            (Case((np.zeros((2, 3)), np.zeros(2, np.float32))), ShapeError, "factors"),
        ),
    ),
    Rows(
        "quantized_matmul", matmul_oracle, matmuls, **PLAIN,
        errors=(
            (Case(ODD), ShapeError, "multiples of 16"),
            (Case((np.zeros((2, 32)), np.zeros((16, 32)))), ShapeError, "weight of shape"),
            (Case((np.zeros((2, 16)), np.zeros((16, 32)), np.zeros((2, 16)))), ShapeError, "addend"),
        ),
    ),
    Rows("linear", linear_oracle, linears, **PLAIN, errors=((Case(ODD, {"fp8": True}), ShapeError, "of 16"),)),
    Rows("packed_linear", packed_oracle, packed_linears, **PLAIN),
    Rows(
        "swiglu_linear_backward", swiglu_linear_backward_oracle, swiglu_backwards, dtypes=NARROW, inner=1,
        reduction=lambda case: 4 * case.inputs[1].shape[0],
        errors=((Case((np.ones((2, 24)), np.ones((24, 16)), np.ones((2, 32))), {"fp8": True}), ShapeError, "of 16"),),
    ),
]  # fmt: skip
