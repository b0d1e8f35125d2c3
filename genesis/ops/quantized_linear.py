"""A linear layer with an 8-bit weight, for generation: codes, and a float32 scale for each row.

Only the weight is quantised: codes are converted when they are multiplied, and the sums are scaled by column
afterwards. (For training, fp8.py quantises both operands.) Codes are int8, or e4m3, whose bits are stored as uint8.
The op has no gradient.
"""

from __future__ import annotations

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import scratch
from genesis.dtypes import DType, float8_e4m3fn, float32, int8, uint8
from genesis.errors import DTypeError, ShapeError
from genesis.op import op
from genesis.ops.blocks import as_type, is_narrow
from genesis.ops.linalg import multiply, same_type
from genesis.ops.norm import check_norm, rms_norm
from genesis.ops.swiglu import swiglu_packed
from genesis.shapes import numel

KINDS: dict[DType, DType] = {int8: int8, uint8: float8_e4m3fn}  # dtype of the codes' array: dtype of their values
ROWS = 4096  # rows of codes that are converted together


def _check_codes(name: str, codes: Array, scale: Array) -> None:
    if codes.dtype not in KINDS or scale.dtype is not float32:
        raise DTypeError(
            f"{name} takes codes in int8 or uint8 (e4m3) with float32 scales, got {codes.dtype} and {scale.dtype}",
            next="quantize after casting the model",
        )
    if codes.ndim != 2 or scale.shape != codes.shape[:1]:
        raise ShapeError(f"{name}: codes {codes.shape} [out, in] do not fit scales {scale.shape} [out]")


def _values(codes: np.ndarray, scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    values = codes.view(KINDS[int8 if codes.dtype == np.int8 else uint8].numpy).astype(dtype)
    values *= scale[:, None]
    return values


def _dequantize_infer(codes: Array, scale: Array, *, dtype: DType) -> Spec:
    _check_codes("dequantize_rows", codes, scale)
    if not dtype.is_floating_point:
        raise DTypeError(f"dequantize_rows gives a float type, not {dtype}", next="use float32 or bfloat16")
    return Spec(codes.shape, dtype)


@op("dequantize_rows", _dequantize_infer)
def dequantize_rows(out: np.ndarray, codes: np.ndarray, scale: np.ndarray, *, dtype: DType) -> None:
    """W = diag(scale)·codes `[out, in]` in a float type; see `quantized_linear`."""
    wide = np.dtype(np.float32) if is_narrow(out.dtype) else out.dtype
    for start in range(0, codes.shape[0], ROWS):
        part = slice(start, start + ROWS)
        np.copyto(out[part], _values(codes[part], scale[part], wide), casting="unsafe")


def _infer(
    x: Array, codes: Array, scale: Array, bias: Array | None = None, residual: Array | None = None,
    norm: Array | None = None, *, eps: float = 0.0, swiglu: bool = False,
) -> Spec:  # fmt: skip
    name = "quantized_linear"
    _check_codes(name, codes, scale)
    if not x.shape or x.shape[-1] != codes.shape[1]:
        raise ShapeError(f"{name}: an input of shape {x.shape} does not fit codes of shape {codes.shape} [out, in]")
    if swiglu and (codes.shape[0] % 2 or bias is not None or residual is not None):
        raise ShapeError(f"{name}: SwiGLU takes [2F, in] (gate, then up) without bias and residual")
    if bias is not None and bias.shape != codes.shape[:1]:
        raise ShapeError(f"{name}: a bias of shape {bias.shape} does not fit codes of shape {codes.shape}")
    out = (*x.shape[:-1], codes.shape[0] // (2 if swiglu else 1))
    if residual is not None and residual.shape != out:
        raise ShapeError(f"{name}: a residual of shape {residual.shape} does not match a result of shape {out}")
    if norm is not None:
        check_norm(name, x, norm)
    same_type(name, x, *(a for a in (bias, residual, norm) if a is not None))
    if not x.dtype.is_floating_point:
        raise DTypeError(f"{name} takes float tensors, got {x.dtype}", next="cast with .float()")
    return Spec(out, x.dtype)


@op(
    "quantized_linear",
    _infer,
    flops=lambda i, o, a: 2 * i[1].size * numel(i[0].shape[:-1]),
)
def quantized_linear(
    out: np.ndarray, x: np.ndarray, codes: np.ndarray, scale: np.ndarray, bias: np.ndarray | None = None,
    residual: np.ndarray | None = None, norm: np.ndarray | None = None, *, eps: float = 0.0, swiglu: bool = False,
) -> None:  # fmt: skip
    """y = n·(diag(scale)·codes)ᵀ + bias + residual with n = rms_norm(x), or n = x without `norm`; rounded once.

    Args:
        x: `[..., in]`.
        codes: `[out, in]`, int8, or uint8 with the bits of e4m3.
        scale: float32 `[out]`.
        bias: `[out]`.
        residual: `[..., out]`.
        norm: the norm's weight `[in]`.
        eps: the norm's epsilon.
        swiglu: codes are `[2F, in]`, gate above up, and the result is silu(gate)·up, `[..., F]`.
    """
    wide = np.dtype(np.float32) if is_narrow(out.dtype) else out.dtype
    rows = x.size // max(x.shape[-1], 1)
    with scratch(x.shape, wide) as n, scratch((rows, codes.shape[0]), wide) as y:
        if norm is None:
            np.copyto(n, x)
        else:
            rms_norm.reference((n, np.empty(x.shape[:-1], wide)), x, norm, eps)
        for start in range(0, codes.shape[0], ROWS):
            part = slice(start, start + ROWS)
            multiply(n.reshape(rows, x.shape[-1]), _values(codes[part], scale[part], wide).T, y[:, part])
        if bias is not None:
            y += as_type(bias, wide)
        if residual is not None:
            y += as_type(residual, wide).reshape(y.shape)
        if swiglu:
            swiglu_packed.reference(out, y.reshape(*x.shape[:-1], codes.shape[0]))
        else:
            np.copyto(out, y.reshape(out.shape), casting="unsafe")
