"""softmax and log_softmax over one dimension, computed in float32 or wider, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.array import Array, Spec
from genesis.errors import DTypeError
from genesis.op import Op, gradient_like, op, registry, through
from genesis.ops.blocks import each_block, upcast
from genesis.ops.elementwise import div, exp, log, mul, sub
from genesis.shapes import normalize_axis


def _infer(x: Array, dim: int) -> Spec:
    if not x.dtype.is_floating_point:
        raise DTypeError(f"softmax takes float tensors, got {x.dtype}", next="cast with .float()")
    normalize_axis(dim, x.ndim)
    return Spec(x.shape, x.dtype)


def _last(x: np.ndarray, dim: int) -> np.ndarray:
    """Return a view of `x` with `dim` last; a number counts as one row."""
    return np.moveaxis(x, dim, -1) if x.ndim else x.reshape(1)


def _rowwise(function: Callable[..., np.ndarray], out: np.ndarray, *inputs: np.ndarray, dim: int) -> None:
    """Run `function(*rows) -> rows` on blocks of rows along dimension `dim`."""
    views = [_last(x, dim) for x in inputs]
    target = _last(out, dim)
    if target.size == 0:
        return
    flat = [v.reshape(-1, v.shape[-1]) for v in views]
    contiguous = target.flags.c_contiguous
    result = target.reshape(-1, target.shape[-1]) if contiguous else np.empty(flat[0].shape, out.dtype)

    def block(start: int, stop: int) -> None:
        result[start:stop] = function(*(upcast(f[start:stop]) for f in flat))

    each_block(block, flat[0].shape[0], flat[0].shape[1])
    if not contiguous:
        target[...] = result.reshape(target.shape)


def _softmax_rows(x: np.ndarray) -> np.ndarray:
    y = x - x.max(axis=-1, keepdims=True)
    np.exp(y, out=y)
    y /= y.sum(axis=-1, keepdims=True)
    return y


def _log_softmax_rows(x: np.ndarray) -> np.ndarray:
    y = x - x.max(axis=-1, keepdims=True)
    y -= np.log(np.exp(y).sum(axis=-1, keepdims=True))
    return y


def _reduced(name: str, x: Array, dim: int) -> Array:
    return registry[name](x, axes=dim, keepdim=True) if x.ndim else x


def _plain(x: Array, dim: int) -> Array:
    powers = exp(sub(x, _reduced("amax", x, dim)))
    return div(powers, _reduced("sum", powers, dim))


def _log_plain(x: Array, dim: int) -> Array:
    shifted = sub(x, _reduced("amax", x, dim))
    return sub(shifted, log(_reduced("sum", exp(shifted), dim)))


def _backward(name: str, plain: Callable[..., Array]) -> Callable[..., Op]:
    facts: dict[str, Any] = {"flops": lambda i, o, a: 4 * o[0].size, "plain": plain}
    return op(name, lambda g, y, dim: gradient_like(name, g, y), **facts)


_forward = functools.partial(op, infer=_infer, saves=("out",), flops=lambda i, o, a: 5 * o[0].size, autocast="fp32")


@_forward("softmax", vjp=through("softmax_backward"), plain=_plain, torch="torch.softmax")
def softmax(out: np.ndarray, x: np.ndarray, dim: int) -> None:
    """y = e^(x - max x) / Σ e^(x - max x) along `dim`."""
    _rowwise(_softmax_rows, out, x, dim=dim)


@_backward("softmax_backward", lambda g, y, dim: mul(y, sub(g, _reduced("sum", mul(g, y), dim))))
def softmax_backward(out: np.ndarray, g: np.ndarray, y: np.ndarray, dim: int) -> None:
    """dx = y·(g - Σ g·y)."""
    _rowwise(lambda g, y: y * (g - (g * y).sum(axis=-1, keepdims=True)), out, g, y, dim=dim)


@_forward("log_softmax", vjp=through("log_softmax_backward"), plain=_log_plain, torch="torch.log_softmax")
def log_softmax(out: np.ndarray, x: np.ndarray, dim: int) -> None:
    """y = x - max x - log Σ e^(x - max x) along `dim`."""
    _rowwise(_log_softmax_rows, out, x, dim=dim)


@_backward("log_softmax_backward", lambda g, y, dim: sub(g, mul(exp(y), _reduced("sum", g, dim))))
def log_softmax_backward(out: np.ndarray, g: np.ndarray, y: np.ndarray, dim: int) -> None:
    """dx = g - e^y·Σ g."""
    _rowwise(lambda g, y: g - np.exp(y) * g.sum(axis=-1, keepdims=True), out, g, y, dim=dim)
