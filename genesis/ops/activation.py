"""Activations: relu, silu, gelu (erf and tanh forms) and SwiGLU's gate. Backward recomputes from the input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.dtypes import result_type
from genesis.errors import DTypeError, ShapeError
from genesis.op import Op, gradient_like, op, through
from genesis.ops.blocks import each_block, store, sweep, upcast, working
from genesis.ops.elementwise import reciprocal_values, sigmoid_values
from genesis.ops.error_function import erf_values
from genesis.ops.formula import by_ops


def _infer(name: str) -> Callable[..., Spec]:
    def infer(x: Array, *rest: Array) -> Spec:
        if not x.dtype.is_floating_point:
            raise DTypeError(f"{name} takes float tensors, got {x.dtype}", next="cast with .float()")
        return Spec(x.shape, x.dtype)

    return infer


def _activation(
    name: str,
    forward: Callable[..., np.ndarray],
    gradient: Callable[..., np.ndarray],
    flops: int,
    *,
    torch_backward: str = "",
    **facts: Any,
) -> Op:
    """Register an activation and its backward op, dx = gradient(g, x); `forward` and `gradient` are formulas."""

    def backward_reference(out: np.ndarray, g: np.ndarray, x: np.ndarray) -> None:
        sweep(gradient, out, g, x)

    def reference(out: np.ndarray, x: np.ndarray) -> None:
        sweep(forward, out, x)

    reference.__doc__ = forward.__doc__

    def count(inputs: object, outputs: tuple[Array, ...], attrs: object) -> int:
        return flops * outputs[0].size

    Op(
        f"{name}_backward",
        backward_reference,
        lambda g, x: gradient_like(f"{name}_backward", g, x),
        flops=count,
        family="activation",
        elementwise=True,
        plain=by_ops(gradient),
        formula=gradient,
        swept=gradient,
        torch=torch_backward,
    )

    facts |= {"flops": count, "family": "activation", "elementwise": True, "formula": forward, "swept": forward}
    return Op(name, reference, _infer(name), through(f"{name}_backward"), (0,), **facts)


def _times(derivative: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    def gradient(g: np.ndarray, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        product: np.ndarray = np.multiply(g, derivative(x), out=out)
        return product

    return gradient


def _relu(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """max(x, 0)."""
    return np.maximum(x, 0, out=out)


def _relu_gradient(g: np.ndarray, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """0 where x ≤ 0, g elsewhere; a product with 0 would turn an infinite g into NaN."""
    return np.positive(np.where(x <= 0, 0.0, g), out=out)


def silu_values(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """x·σ(x), with the same bits as in SwiGLU."""
    return np.multiply(reciprocal_values(np.exp(-x) + 1), x, out=out)


def _silu_derivative(x: np.ndarray) -> np.ndarray:
    """σ·(1 + x·(1 - σ))."""
    s = reciprocal_values(np.exp(-x) + 1)
    derivative: np.ndarray = s * (1 + x * (1 - s))
    return derivative


def _gelu(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """x·Φ(x), Φ the normal distribution function."""
    return np.multiply(x, 0.5 * (1 + erf_values(x * math.sqrt(0.5))), out=out)


def _gelu_derivative(x: np.ndarray) -> np.ndarray:
    """Φ(x) + x·φ(x)."""
    cdf = 0.5 * (1 + erf_values(x * math.sqrt(0.5)))
    derivative: np.ndarray = cdf + x * np.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return derivative


_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


def gelu_tanh_values(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))) (Hendrycks & Gimpel, 2016)."""
    inner = np.tanh((x + x * x * x * _TANH_CUBIC) * _TANH_SCALE)
    return np.multiply(0.5 * x, 1 + inner, out=out)


def gelu_tanh_derivative(x: np.ndarray) -> np.ndarray:
    """Derivative of `gelu_tanh_values` with respect to x."""
    t = np.tanh((x + x * x * x * _TANH_CUBIC) * _TANH_SCALE)
    derivative: np.ndarray = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (1 + x * x * 3 * _TANH_CUBIC) * _TANH_SCALE
    return derivative


def _swiglu_gradients(g: Any, gate: Any, up: Any) -> Any:
    """dgate = g·up·σ·(1 + gate·(1 - σ)), dup = g·gate·σ, with σ = sigmoid(gate)."""
    s = reciprocal_values(np.exp(-gate) + 1)
    return g * (s + s * gate * (1 - s)) * up, g * (s * gate)


# The gradients by ops on arrays, for second derivatives.
gelu_tanh_plain = by_ops(_times(gelu_tanh_derivative))
gated_plain = by_ops(_swiglu_gradients)


relu = _activation(
    "relu",
    _relu,
    _relu_gradient,
    1,
    public="relu",
    method=True,
    module="ReLU",
    torch="torch.relu",
)
silu = _activation(
    "silu",
    silu_values,
    _times(_silu_derivative),
    6,
    public="silu",
    method=True,
    module="SiLU",
    torch="torch.nn.functional.silu",
    torch_backward="torch.ops.aten.silu_backward",
)
# nn.functional.gelu selects one of the two.
gelu = _activation(
    "gelu",
    _gelu,
    _times(_gelu_derivative),
    24,
    torch="torch.nn.functional.gelu",
    torch_backward="torch.ops.aten.gelu_backward",
)
gelu_tanh = _activation("gelu_tanh", gelu_tanh_values, _times(gelu_tanh_derivative), 15, public="gelu_tanh")


def _swiglu_infer(gate: Array, up: Array) -> Spec:
    if gate.shape != up.shape:
        raise ShapeError(f"swiglu: gate has shape {gate.shape}, up has {up.shape}")
    for x in (gate, up):
        _infer("swiglu")(x)
    return Spec(gate.shape, result_type((gate, up)))


@op(
    "swiglu",
    _swiglu_infer,
    vjp=through("swiglu_backward"),
    saves=(0, 1),
    flops=lambda i, o, a: 7 * o[0].size,
    formula=lambda gate, up: silu_values(gate) * up,
)
def swiglu(out: np.ndarray, gate: np.ndarray, up: np.ndarray) -> None:
    """y = silu(gate)·up (Shazeer, 2020)."""
    y, a, b = (x.reshape(-1) for x in (out, gate, up))

    def block(start: int, stop: int) -> None:
        x = upcast(a[start:stop])
        silu = sigmoid_values(x, out=working(y[start:stop]))
        silu *= x
        silu *= upcast(b[start:stop])
        store(silu, y[start:stop])

    each_block(block, y.shape[0], 1)


@op(
    "swiglu_backward",
    lambda g, gate, up: gradient_like("swiglu_backward", g, gate, up),
    flops=lambda i, o, a: 13 * o[0].size,
    plain=gated_plain,
    formula=_swiglu_gradients,
)
def swiglu_backward(out: tuple[np.ndarray, np.ndarray], g: np.ndarray, gate: np.ndarray, up: np.ndarray) -> None:
    """dgate = g·up·σ·(1 + gate·(1 - σ)), dup = g·gate·σ, with σ = sigmoid(gate)."""
    da, db, grad, a, b = (x.reshape(-1) for x in (*out, g, gate, up))

    def block(start: int, stop: int) -> None:
        x, gb = upcast(a[start:stop]), upcast(grad[start:stop])
        s = sigmoid_values(x)
        silu = np.multiply(s, x, out=working(db[start:stop]))
        gradient = np.subtract(1, s, out=working(da[start:stop]))
        gradient *= silu
        gradient += s  # σ + silu·(1 - σ)
        gradient *= gb
        gradient *= upcast(b[start:stop])
        silu *= gb
        store(gradient, da[start:stop])
        store(silu, db[start:stop])

    each_block(block, grad.shape[0], 1)
