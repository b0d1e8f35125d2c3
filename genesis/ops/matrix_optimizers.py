"""Optimizer steps on whole matrices, one op each: Adafactor's factored second moment, Muon's orthogonalized update.

As in `optimizers.py`, learning rate, step count and gradient scale are inputs, and a scale of NaN skips the step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.errors import DTypeError, ShapeError
from genesis.op import op
from genesis.ops.blocks import upcast
from genesis.ops.gradients import square_sum
from genesis.ops.optimizers import DeviceScalar, check_step, is_left_out, step_rule
from genesis.ops.rounding import flops_of

# --- Adafactor --------------------------------------------------------------------------------------------------------


def _adafactor_rule(param: Array, grad: Array, row_var: Array, col_var: Array, *rest: Any, **attrs: Any) -> tuple[()]:
    if param.ndim < 2:
        raise ShapeError(
            f"adafactor_step takes matrices, got shape {param.shape}", next="use adafactor_vector_step for vectors"
        )
    check_step("adafactor_step", param, grad)
    rows, columns = (*param.shape[:-1], 1), (*param.shape[:-2], 1, param.shape[-1])
    if row_var.shape != rows or col_var.shape != columns:
        raise ShapeError(
            f"adafactor_step: a parameter {param.shape} needs states {rows} and {columns},"
            f" got {row_var.shape} and {col_var.shape}"
        )
    if row_var.dtype is not param.dtype or col_var.dtype is not param.dtype:
        raise DTypeError(f"adafactor_step: {row_var.dtype} and {col_var.dtype} states do not fit {param.dtype}")
    return ()


def _scaled(grad: np.ndarray, grad_scale: DeviceScalar, dtype: np.dtype) -> np.ndarray:
    scaled: np.ndarray = np.multiply(grad, dtype.type(float(grad_scale)), dtype=dtype)
    return scaled


def _move(average: np.ndarray, value: np.ndarray, weight: float) -> None:
    """Set average = (1-w)·average + w·value; exact for w = 1, however much the two differ."""
    average *= average.dtype.type(1 - weight)
    average += value.dtype.type(weight) * value


def _rms(x: np.ndarray) -> float:
    return math.sqrt(square_sum(x) / x.size) if x.size else 0.0


def _adafactor_update(
    param: np.ndarray,
    grad: np.ndarray,
    variance: np.ndarray,
    lr: DeviceScalar,
    step: DeviceScalar,
    eps1: float | None,
    eps2: float,
    d: float,
    weight_decay: float,
) -> None:
    """Compute p = (1 - lr·wd)·p - a·u / max(1, rms(u)/d) in place; v is overwritten.

    u = g / √max(v, ε1²), a = max(ε2, rms(p))·min(lr, 1/√t).
    """
    kind, rate = param.dtype.type, float(lr)
    tiny = float(np.finfo(param.dtype).eps) if eps1 is None else eps1
    alpha = max(eps2, _rms(param)) * min(rate, 1 / math.sqrt(float(step)))
    np.maximum(variance, kind(tiny * tiny), out=variance)
    np.sqrt(variance, out=variance)
    update = np.divide(grad, variance, out=variance)
    update *= kind(alpha / max(1.0, _rms(update) / d))
    if weight_decay:
        param *= kind(1 - rate * weight_decay)
    param -= update


@op("adafactor_step", _adafactor_rule, mutates=(0, 2, 3), flops=flops_of(12))
def adafactor_step(
    out: tuple[()],
    param: np.ndarray,
    grad: np.ndarray,
    row_var: np.ndarray,
    col_var: np.ndarray,
    lr: DeviceScalar,
    step: DeviceScalar,
    grad_scale: DeviceScalar,
    *,
    beta2_decay: float,
    eps1: float | None,
    eps2: float,
    d: float,
    weight_decay: float,
) -> None:
    """Adafactor for matrices (the last two dimensions): keeps the second moment v as row means r and column means q.

    r and q move to the means of (c·g)² with weight t^`beta2_decay`; v = r·q / mean(r); then as `_adafactor_update`.
    Shazeer & Stern, "Adafactor" (2018), with means instead of sums, and ε1 as in torch.optim.Adafactor.

    Args:
        row_var: `[..., rows, 1]`.
        col_var: `[..., 1, columns]`.
        eps1: None means the dtype's eps.
    """
    if param.size == 0 or is_left_out(grad_scale):
        return
    g = _scaled(grad, grad_scale, param.dtype)
    square = np.square(g)
    _move(row_var, square.mean(axis=-1, keepdims=True, dtype=np.float64), float(step) ** beta2_decay)
    _move(col_var, square.mean(axis=-2, keepdims=True, dtype=np.float64), float(step) ** beta2_decay)
    tiny = float(np.finfo(param.dtype).eps) if eps1 is None else eps1
    mean = np.maximum(row_var.mean(axis=-2, keepdims=True), param.dtype.type(tiny))
    variance = np.multiply(row_var, col_var, out=square)
    variance /= mean
    _adafactor_update(param, g, variance, lr, step, eps1, eps2, d, weight_decay)


@op("adafactor_vector_step", step_rule("adafactor_vector_step", 1), mutates=(0, 2), flops=flops_of(12))
def adafactor_vector_step(
    out: tuple[()], param: np.ndarray, grad: np.ndarray, variance: np.ndarray, lr: DeviceScalar, step: DeviceScalar,
    grad_scale: DeviceScalar, *, beta2_decay: float, **settings: Any,
) -> None:  # fmt: skip
    """Adafactor for vectors and numbers: keeps the full second moment. See `adafactor_step`."""
    if param.size == 0 or is_left_out(grad_scale):
        return
    g = _scaled(grad, grad_scale, param.dtype)
    _move(variance, np.square(g), float(step) ** beta2_decay)
    _adafactor_update(param, g, np.array(variance), lr, step, **settings)


# --- Muon -------------------------------------------------------------------------------------------------------------


def _orthogonalized(x: np.ndarray, coefficients: tuple[float, float, float], eps: float, iterations: int) -> np.ndarray:
    """Compute `newton_schulz` on one float32 or float64 matrix, in new memory."""
    a, b, c = (x.dtype.type(k) for k in coefficients)
    tall = x.shape[0] > x.shape[1]  # the smaller Gram matrix is cheaper
    y = np.ascontiguousarray(x.T if tall else x)
    y = y * x.dtype.type(1 / max(math.sqrt(square_sum(y)), eps))
    for _ in range(iterations):
        gram = np.matmul(y, y.T)
        inner = np.matmul(gram, gram)
        inner *= c
        inner += b * gram
        y = np.matmul(inner, y) + a * y
    result: np.ndarray = y.T if tall else y
    return result


def _matrix_rule(name: str, x: Array) -> None:
    if x.ndim != 2:
        raise ShapeError(f"{name} takes matrices, got shape {x.shape}", next="use AdamW for the other parameters")


def _newton_schulz_infer(x: Array, **attrs: Any) -> Spec:
    _matrix_rule("newton_schulz", x)
    if not x.dtype.is_floating_point:
        raise DTypeError(f"newton_schulz takes float matrices, got {x.dtype}")
    return Spec(x.shape, x.dtype)


def _newton_schulz_flops(x: Array, iterations: int) -> int:
    small, large = sorted(x.shape)
    return iterations * (4 * small * small * large + 2 * small**3)


@op(
    "newton_schulz",
    _newton_schulz_infer,
    flops=lambda inputs, outputs, attrs: _newton_schulz_flops(inputs[0], attrs["iterations"]),
)
def newton_schulz(
    out: np.ndarray, x: np.ndarray, *, coefficients: tuple[float, float, float], eps: float, iterations: int
) -> None:
    """Approximate the orthogonal factor of a matrix: y = a·y + (b·yyᵀ + c·(yyᵀ)²)·y moves singular values towards 1.

    y starts as x / max(‖x‖, eps). Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    Computes in float32 or wider; torch computes in bfloat16.
    """
    out[...] = _orthogonalized(upcast(x), coefficients, eps, iterations)


def _muon_rule(param: Array, grad: Array, momentum_buffer: Array, *rest: Any, **attrs: Any) -> tuple[Spec, ...]:
    _matrix_rule("muon_step", param)
    return check_step("muon_step", param, grad, momentum_buffer)


@op(
    "muon_step",
    _muon_rule,
    mutates=(0, 2),
    flops=lambda inputs, outputs, attrs: 9 * inputs[0].size + _newton_schulz_flops(inputs[0], attrs["iterations"]),
)
def muon_step(
    out: tuple[()],
    param: np.ndarray,
    grad: np.ndarray,
    momentum_buffer: np.ndarray,
    lr: DeviceScalar,
    step: DeviceScalar,
    grad_scale: DeviceScalar,
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    lr_ratio: float,
    coefficients: tuple[float, float, float],
    eps: float,
    iterations: int,
) -> None:
    """b = μ·b + (1-μ)·c·g; p = (1 - lr·wd)·p - lr·ratio·orthogonalized(b, or (1-μ)·c·g + μ·b with Nesterov).

    See `newton_schulz`; `lr_ratio` compensates for the shape of the matrix.
    """
    if param.size == 0 or is_left_out(grad_scale):
        return
    kind, rate = param.dtype.type, float(lr)
    direction = np.multiply(grad, kind((1 - momentum) * float(grad_scale)), dtype=param.dtype)
    momentum_buffer *= kind(momentum)
    momentum_buffer += direction
    if nesterov:
        direction += kind(momentum) * momentum_buffer
    else:
        direction = momentum_buffer
    update = _orthogonalized(direction, coefficients, eps, iterations)
    if weight_decay:
        param *= kind(1 - rate * weight_decay)
    param -= kind(rate * lr_ratio) * update
