"""Ops of several passes as calls of simple ops, so that a kernel can hold them together with their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from genesis.array import Array
from genesis.compiler.fuse import longest_row
from genesis.op import registry
from genesis.shapes import normalize_axes, numel


def _softmax(x: Array, dim: int, log: bool) -> Array:
    kept: dict[str, Any] = {"axes": (dim,), "keepdim": True}
    shifted = registry["sub"](x, registry["amax"](x, **kept))
    powers = registry["exp"](shifted)
    total = registry["sum"](powers, **kept)
    result: Array = registry["sub"](shifted, registry["log"](total)) if log else registry["div"](powers, total)
    return result


def softmax(x: Array, dim: int = -1) -> Array:
    """e^(x - max) / Σ e^(x - max)."""
    return _softmax(x, dim, log=False)


def log_softmax(x: Array, dim: int = -1) -> Array:
    """x - max - log Σ e^(x - max)."""
    return _softmax(x, dim, log=True)


def logsumexp(x: Array, axes: Any = None, keepdim: bool = False) -> Array:
    """max + log Σ e^(x - max); the shift of an infinite maximum is 0."""
    dims = normalize_axes(axes, x.ndim)
    highest = registry["amax"](x, axes=dims, keepdim=True)
    finite = registry["where"](registry["isfinite"](highest), highest, 0.0)
    total = registry["sum"](registry["exp"](registry["sub"](x, finite)), axes=dims, keepdim=True)
    result: Array = registry["add"](registry["log"](total), finite)
    if keepdim:
        return result
    kept = [i for i in range(x.ndim) if i not in dims]
    return result.view(tuple(result.shape[i] for i in kept), tuple(result.strides[i] for i in kept))


def _plain(name: str) -> Callable[..., Array]:
    plain = registry[name].plain
    assert plain is not None
    return plain


DECOMPOSITIONS: dict[str, Callable[..., Array]] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    **{name: _plain(name) for name in ("softmax_backward", "log_softmax_backward")},
}


def decomposition(name: str, inputs: tuple[Any, ...], attrs: dict[str, Any]) -> Callable[..., Array] | None:
    """The simple form of an op on a GPU, if a kernel can hold its rows; None if the op's own kernel is better."""
    function = DECOMPOSITIONS.get(name)
    if function is None or inputs[0].device.type == "cpu" or not inputs[0].size:
        return None
    x = inputs[0]
    if "backward" in name and inputs[1].dtype is not x.dtype:
        return None
    axes = normalize_axes(attrs.get("axes", attrs.get("dim", -1)), x.ndim)
    is_trailing = tuple(axes) == tuple(range(x.ndim - len(axes), x.ndim))
    columns = numel([x.shape[a] for a in axes])
    return function if is_trailing and columns <= longest_row(x.size // columns) else None
