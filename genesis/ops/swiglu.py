"""SwiGLU and GEGLU on packed gate and up (Shazeer, 2020), and SwiGLU's gradient fused with the next layer's.

Packed means concatenated in the last dimension, as one matmul produces them. GEGLU uses the tanh form of GELU. SwiGLU
of two separate tensors is in activation.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.backend.cpu import scratch
from genesis.errors import DTypeError, ShapeError
from genesis.op import gradient_like, op, registry, through
from genesis.ops.activation import gated_plain, gelu_tanh_derivative, gelu_tanh_plain, gelu_tanh_values
from genesis.ops.blocks import as_type, each_block, rows_of, store, upcast, work_type, working
from genesis.ops.elementwise import mul, sigmoid, sigmoid_values
from genesis.ops.fp8 import check_quantizable, multiply_scaled
from genesis.ops.linalg import is_wide_enough, multiply, same_type
from genesis.ops.shape import cat, window


def _half(name: str, gate_up: Array) -> Spec:
    """Return the spec of gate, which is one half of the packed array."""
    if not gate_up.dtype.is_floating_point:
        raise DTypeError(f"{name} takes float tensors, got {gate_up.dtype}", next="cast with .float()")
    if not gate_up.shape or gate_up.shape[-1] % 2:
        raise ShapeError(f"{name} takes [..., 2F], gate and then up, got {gate_up.shape}")
    return Spec((*gate_up.shape[:-1], gate_up.shape[-1] // 2), gate_up.dtype)


@op(
    "swiglu_packed",
    lambda gate_up: _half("swiglu_packed", gate_up),
    vjp=through("swiglu_packed_backward"),
    saves=(0,),
    flops=lambda i, o, a: 7 * o[0].size,
)
def swiglu_packed(out: np.ndarray, gate_up: np.ndarray) -> None:
    """y = silu(gate)·up for `[..., 2F]` with gate in the first half and up in the second."""
    if not out.size:
        return
    y, x, half = rows_of(out), rows_of(gate_up), out.shape[-1]

    def block(start: int, stop: int) -> None:
        gate = np.ascontiguousarray(upcast(x[start:stop, :half]))
        silu = sigmoid_values(gate, out=working(y[start:stop]))
        silu *= gate
        silu *= upcast(x[start:stop, half:])
        store(silu, y[start:stop])

    each_block(block, y.shape[0], half)


def _backward_infer(g: Array, gate_up: Array, *, with_result: bool = False) -> Spec | tuple[Spec, ...]:
    result = _half("swiglu_packed_backward", gate_up)
    (spec,) = gradient_like("swiglu_packed_backward", g, gate_up, like=result)
    return (spec, result) if with_result else spec


def _halves(gate_up: Array) -> tuple[Array, Array]:
    half = gate_up.shape[-1] // 2
    return window(gate_up, 0, half), window(gate_up, half, 2 * half)


def _packed_plain(g: Array, gate_up: Array, *, with_result: bool = False) -> Any:
    gate, up = _halves(gate_up)
    d = cat(*gated_plain(g, gate, up), dim=g.ndim - 1)
    return (d, mul(mul(gate, sigmoid(gate)), up)) if with_result else d


def _geglu_plain(g: Array, gate_up: Array) -> Array:
    gate, up = _halves(gate_up)
    d: Array = cat(gelu_tanh_plain(mul(g, up), gate), mul(g, registry["gelu_tanh"](gate)), dim=g.ndim - 1)
    return d


@op("swiglu_packed_backward", _backward_infer, plain=_packed_plain, flops=lambda i, o, a: 13 * i[0].size)
def swiglu_packed_backward(
    out: np.ndarray | tuple[np.ndarray, np.ndarray], g: np.ndarray, gate_up: np.ndarray, with_result: bool = False
) -> None:
    """[dgate, dup] with dgate = g·up·σ·(1 + gate·(1 - σ)), dup = g·gate·σ, σ = sigmoid(gate).

    `with_result` also returns gate·σ·up, forward's result, which then need not be saved.
    """
    d_packed, result = out if isinstance(out, tuple) else (out, None)
    half = g.shape[-1]
    if not g.size:
        return
    d, x, grad = rows_of(d_packed), rows_of(gate_up), rows_of(g)
    h = None if result is None else rows_of(result)

    def block(start: int, stop: int) -> None:
        gate, up, gb = upcast(x[start:stop, :half]), upcast(x[start:stop, half:]), upcast(grad[start:stop])
        s = sigmoid_values(gate)  # contiguous, like all intermediate values below
        silu = s * gate
        if h is not None:
            np.multiply(silu, up, out=h[start:stop], casting="unsafe")
        gradient = 1 - s
        gradient *= silu
        gradient += s  # σ + silu·(1 - σ)
        gradient *= gb
        np.multiply(gradient, up, out=d[start:stop, :half], casting="unsafe")
        np.multiply(silu, gb, out=d[start:stop, half:], casting="unsafe")

    each_block(block, grad.shape[0], half)


def _backward_of_linear(
    g: Array, weight: Array, gate_up: Array, v: Array | None = None, a: Array | None = None, *,
    with_result: bool = False, fp8: int = 0,
) -> Spec | tuple[Spec, Spec]:  # fmt: skip
    h = _half("swiglu_linear_backward", gate_up)
    expected = (*h.shape[:-1], weight.shape[0])
    if weight.shape[1:] != h.shape[-1:] or g.shape != expected:
        raise ShapeError(
            f"swiglu_linear_backward: a gradient of shape {g.shape} does not fit a weight of shape {weight.shape}"
            f" and gate and up of shape {gate_up.shape}"
        )
    same_type("swiglu_linear_backward", g, weight, gate_up, *(y for y in (v, a) if y is not None))
    pair = None if v is None else v.shape, None if a is None else a.shape
    rank = pair[0][-1] if pair[0] else 0
    if pair not in ((None, None), ((*g.shape[:-1], rank), (rank, weight.shape[1]))):
        raise ShapeError(f"swiglu_linear_backward: v and A of shape {pair} do not fit a gradient of shape {g.shape}")
    if fp8:
        check_quantizable("swiglu_linear_backward", weight)
    spec = Spec(gate_up.shape, gate_up.dtype)
    return (spec, h) if with_result else spec


@op(
    "swiglu_linear_backward",
    _backward_of_linear,
    flops=lambda i, o, a: 2 * sum(x.size for x in i[:4:3] if x is not None) * i[1].shape[1] + 13 * i[2].size // 2,
)
def swiglu_linear_backward(
    out: np.ndarray | tuple[np.ndarray, np.ndarray], g: np.ndarray, weight: np.ndarray, gate_up: np.ndarray,
    v: np.ndarray | None = None, a: np.ndarray | None = None, with_result: bool = False, fp8: int = 0,
) -> None:  # fmt: skip
    """[dgate, dup] for the gradient g `[..., out]` of the result of the linear layer W `[out, F]` that follows.

    `with_result` also returns silu(gate)·up, which then need not be saved.

    Args:
        v: v of a low-rank pair of that layer, `[..., r]`; v·A is added to g·W, see low_rank.py.
        a: A of the pair, `[r, F]`.
        fp8: smallest width F for which g·W is computed in 8-bit floats; 0 disables them. See fp8.py.
    """
    if not gate_up.size:
        return
    with scratch((*g.shape[:-1], weight.shape[1]), work_type(gate_up.dtype)) as dh:
        matmul_into = multiply_scaled if is_wide_enough(fp8, weight.shape[1]) else multiply
        matmul_into(as_type(g, dh.dtype), as_type(weight, dh.dtype), dh)
        if v is not None and a is not None:
            with scratch(dh.shape, dh.dtype) as more:
                multiply(as_type(v, dh.dtype), as_type(a, dh.dtype), more)
                np.add(dh, more, out=dh)
        swiglu_packed_backward.reference(out, dh, gate_up, with_result=with_result)


# --- GEGLU ------------------------------------------------------------------------------------------------------------


@op(
    "geglu_packed",
    lambda gate_up: _half("geglu_packed", gate_up),
    vjp=through("geglu_packed_backward"),
    saves=(0,),
    flops=lambda i, o, a: 16 * o[0].size,
)
def geglu_packed(out: np.ndarray, gate_up: np.ndarray) -> None:
    """y = gelu(gate)·up for `[..., 2F]` with gate in the first half and up in the second."""
    if not out.size:
        return
    y, x, half = rows_of(out), rows_of(gate_up), out.shape[-1]

    def block(start: int, stop: int) -> None:
        gate, up = upcast(x[start:stop, :half]), upcast(x[start:stop, half:])
        np.multiply(gelu_tanh_values(gate), up, out=y[start:stop], casting="unsafe")

    each_block(block, y.shape[0], half)


@op(
    "geglu_packed_backward",
    lambda g, x: gradient_like("geglu_packed_backward", g, x, like=_half("geglu_packed_backward", x))[0],
    flops=lambda i, o, a: 32 * i[0].size,
    plain=_geglu_plain,
)
def geglu_packed_backward(out: np.ndarray, g: np.ndarray, gate_up: np.ndarray) -> None:
    """[dgate, dup] with dgate = g·up·gelu'(gate) and dup = g·gelu(gate)."""
    if not g.size:
        return
    d, x, grad, half = rows_of(out), rows_of(gate_up), rows_of(g), g.shape[-1]

    def block(start: int, stop: int) -> None:
        gate, up, gb = upcast(x[start:stop, :half]), upcast(x[start:stop, half:]), upcast(grad[start:stop])
        np.multiply(gb * gelu_tanh_derivative(gate), up, out=d[start:stop, :half], casting="unsafe")
        np.multiply(gelu_tanh_values(gate), gb, out=d[start:stop, half:], casting="unsafe")

    each_block(block, grad.shape[0], half)
