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
from genesis.ops.elementwise import (
    add,
    erf,
    erf_values,
    exp,
    le,
    mul,
    sigmoid,
    sigmoid_values,
    sub,
    tanh,
    where,
)


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
    plain: Callable[..., Array] | None = None,
    torch_backward: str = "",
    **facts: Any,
) -> Op:
    """Register an activation and its backward op, dx = gradient(g, x); `plain(g, x)` computes it by ops on arrays."""

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
        plain=plain,
        torch=torch_backward,
    )

    facts |= {"flops": count, "family": "activation", "elementwise": True}
    return Op(name, reference, _infer(name), through(f"{name}_backward"), (0,), **facts)


def _times(derivative: Callable[[np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    def gradient(g: np.ndarray, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        product: np.ndarray = np.multiply(g, derivative(x), out=out)
        return product

    return gradient


def _relu(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """max(x, 0)."""
    return np.maximum(x, np.zeros((), np.asarray(x).dtype), out=out)


def _relu_gradient(g: np.ndarray, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """0 where x ≤ 0, g elsewhere; a product with 0 would turn an infinite g into NaN."""
    dx = np.where(x <= 0, np.zeros((), g.dtype), g)
    if out is None:
        return dx
    np.copyto(out, dx)
    return out


def _silu(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """x·sigmoid(x)."""
    return np.multiply(x, sigmoid_values(x), out=out)


def _silu_derivative(x: np.ndarray) -> np.ndarray:
    """σ·(1 + x·(1 - σ))."""
    s = np.asarray(sigmoid_values(x))
    derivative: np.ndarray = s * (1 + x * (1 - s))
    return derivative


def _gelu(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """x·Φ(x), Φ the normal distribution function."""
    cdf = 0.5 * (1 + erf_values(x * np.asarray(x).dtype.type(math.sqrt(0.5))))
    return np.multiply(x, cdf, out=out)


def _gelu_derivative(x: np.ndarray) -> np.ndarray:
    """Φ(x) + x·φ(x)."""
    cdf = 0.5 * (1 + erf_values(x * x.dtype.type(math.sqrt(0.5))))
    derivative: np.ndarray = cdf + x * np.exp(-0.5 * x * x) * x.dtype.type(1 / math.sqrt(2 * math.pi))
    return derivative


_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715


def gelu_tanh_values(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))) (Hendrycks & Gimpel, 2016)."""
    inner = np.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x * x * x))
    return np.multiply(0.5 * x, 1 + inner, out=out)


def gelu_tanh_derivative(x: np.ndarray) -> np.ndarray:
    """Derivative of `gelu_tanh_values` with respect to x."""
    t = np.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x * x * x))
    derivative: np.ndarray = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x)
    return derivative


# The gradients by ops on arrays, for second derivatives.


def _silu_plain(g: Array, x: Array) -> Array:
    s = sigmoid(x)
    return mul(g, mul(s, add(mul(x, sub(1, s)), 1)))


def _gelu_plain(g: Array, x: Array) -> Array:
    cdf = mul(add(erf(mul(x, math.sqrt(0.5))), 1), 0.5)
    density = mul(exp(mul(mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
    return mul(g, add(cdf, mul(x, density)))


def gelu_tanh_plain(g: Array, x: Array) -> Array:
    """g times the derivative of `gelu_tanh_values`."""
    square = mul(x, x)
    t = tanh(mul(mul(x, add(mul(square, _TANH_CUBIC), 1)), _TANH_SCALE))
    slope = mul(add(mul(square, 3 * _TANH_CUBIC), 1), 0.5 * _TANH_SCALE)
    return mul(g, add(mul(add(t, 1), 0.5), mul(mul(x, sub(1, mul(t, t))), slope)))


def gated_plain(g: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """The gradients of silu(gate)·up."""
    return _silu_plain(mul(g, up), gate), mul(g, mul(gate, sigmoid(gate)))


relu = _activation(
    "relu",
    _relu,
    _relu_gradient,
    1,
    plain=lambda g, x: where(le(x, 0), 0.0, g),
    public="relu",
    method=True,
    module="ReLU",
    torch="torch.relu",
)
silu = _activation(
    "silu",
    _silu,
    _times(_silu_derivative),
    6,
    plain=_silu_plain,
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
    plain=_gelu_plain,
    torch="torch.nn.functional.gelu",
    torch_backward="torch.ops.aten.gelu_backward",
)
gelu_tanh = _activation(
    "gelu_tanh", gelu_tanh_values, _times(gelu_tanh_derivative), 15, plain=gelu_tanh_plain, public="gelu_tanh"
)


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
