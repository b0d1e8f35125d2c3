"""Samples of linear layers with weights in 8 bits. The oracle decodes e4m3 by arithmetic."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from genesis.dtypes import bfloat16, float32, int8
from genesis.errors import DTypeError, ShapeError
from tests.ops.sampling import Case, Rows, normal


def decoded(bits: np.ndarray) -> np.ndarray:
    """The values of e4m3: a sign, 4 bits of the exponent, 3 of the mantissa."""
    exponent, mantissa = bits >> 3 & 15, (bits & 7).astype(np.float64)
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.where(bits >> 7, -size, size)


def oracle(
    x: np.ndarray, codes: np.ndarray, scale: np.ndarray, bias: Any = None, residual: Any = None, norm: Any = None,
    eps: float = 0.0, swiglu: bool = False,
) -> np.ndarray:  # fmt: skip
    if norm is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * norm
    y = np.sum(x[..., None, :] * codes, -1) * scale
    y = y if bias is None else y + bias
    if swiglu:
        gate, up = np.split(y, 2, -1)
        return np.asarray(gate / (1 + np.exp(-gate)) * up)
    return np.asarray(y if residual is None else y + residual)


def fp8_oracle(x: np.ndarray, codes: np.ndarray, *others: Any, **attrs: Any) -> np.ndarray:
    return oracle(x, decoded(codes), *others, **attrs)


def weight(rng: np.random.Generator, out: int, inner: int, kind: Any) -> tuple[np.ndarray, np.ndarray]:
    """Codes, none of them NaN, and scales that make results of about 1."""
    low, high, largest = (-127, 128, 127) if kind is np.int8 else (0, 127, 448)
    codes = rng.integers(low, high, (out, inner)).astype(kind)
    if kind is np.uint8:
        codes |= (rng.integers(0, 2, codes.shape) << 7).astype(np.uint8)
    return codes, ((0.5 + rng.random(out)) / largest / np.sqrt(max(inner, 1))).astype(np.float32)


LEADS: list[tuple[int, ...]] = [(), (1,), (3, 1), (2, 5), (33,), (0,)]


def cases(rng: np.random.Generator, kind: Any) -> list[Case]:
    found = []
    for i, lead in enumerate(LEADS):
        w = weight(rng, 22, 19, kind)
        x, residual, bias, norm = normal(rng, *lead, 19), normal(rng, *lead, 22), normal(rng, 22), normal(rng, 19)
        found.append(Case((x, *w, *((), (bias,), (None, residual), (bias, residual))[i % 4])))
        found.append(Case((x, *w, None, None, norm), {"eps": 1e-5, "swiglu": True}))
        found.append(Case((x, *w, bias, None, norm), {"eps": 1e-5}))
    return found


def weights(rng: np.random.Generator, kind: Any) -> list[Case]:
    sizes = [(1, 1), (7, 5), (3, 5000), (0, 4), (4, 0)]
    return [Case(weight(rng, *size, kind), {"dtype": dtype}) for size in sizes for dtype in (float32, bfloat16)]


X, CODES, SCALE = np.zeros((2, 6)), np.zeros((4, 6), np.int8), np.zeros(4, np.float32)

COMMON: dict[str, Any] = {
    "dtypes": ("float32", "float16", "bfloat16"),
    "inner": 3,
    "reduction": lambda case: 4 * case.inputs[0].shape[-1],
}

ROWS = [
    Rows("quantized_linear", fp8_oracle, functools.partial(cases, kind=np.uint8), **COMMON),
    Rows(
        "quantized_linear", oracle, functools.partial(cases, kind=np.int8), **COMMON,
        errors=(
            (Case((X, CODES.astype(np.float32), SCALE)), DTypeError, "int8 or uint8"),
            (Case((X, CODES, SCALE.astype(np.float64))), DTypeError, "float32 scales"),
            (Case((X[:, :5], CODES, SCALE)), ShapeError, "codes of shape"),
            (Case((X, CODES, SCALE, np.zeros(3))), ShapeError, "bias of shape"),
            (Case((X, CODES, SCALE, None, np.zeros((2, 3)))), ShapeError, "residual of shape"),
            (Case((X, CODES, SCALE, np.zeros(4)), {"swiglu": True}), ShapeError, "SwiGLU"),
        ),
    ),
    Rows(
        "dequantize_rows", lambda codes, scale, dtype: decoded(codes) * scale[:, None],
        functools.partial(weights, kind=np.uint8), dtypes=("float32",),
    ),
    Rows(
        "dequantize_rows", lambda codes, scale, dtype: codes * scale[:, None],
        functools.partial(weights, kind=np.int8), dtypes=("float32",),
        errors=(
            (Case((CODES, SCALE[:3]), {"dtype": float32}), ShapeError, "scales"),
            (Case((CODES, SCALE), {"dtype": int8}), DTypeError, "float type"),
        ),
    ),
]  # fmt: skip
