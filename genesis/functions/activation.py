"""softmax and activations as functions and methods; the rest of torch.nn.functional stands in genesis.nn.functional."""

from __future__ import annotations

from typing import Any

from genesis.autograd.record import apply
from genesis.functions.arguments import publish
from genesis.functions.elementwise import to_dtype
from genesis.functions.make import as_operand, unary
from genesis.ops import activation as ops
from genesis.ops import softmax as softmax_ops

METHODS = ("log_softmax", "relu", "silu", "softmax")

__all__ = [*METHODS, "gelu_tanh"]  # noqa: PLE0604  METHODS holds names

relu, silu, gelu_tanh = unary(ops.relu), unary(ops.silu), unary(ops.gelu_tanh)


def softmax(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """e^x / Σ e^x along `dim`, computed in float32 or wider; `dtype` casts x first."""
    x = as_operand(x, "softmax")
    if dtype is None:
        return apply(softmax_ops.softmax, x, dim=dim)
    return to_dtype(apply(softmax_ops.softmax, to_dtype(x, dtype), dim=dim), dtype)  # autocast widens in between


def log_softmax(x: Any, dim: int, *, dtype: Any = None) -> Any:
    """log softmax(x) along `dim`, without forming the softmax."""
    x = as_operand(x, "log_softmax")
    if dtype is None:
        return apply(softmax_ops.log_softmax, x, dim=dim)
    return to_dtype(apply(softmax_ops.log_softmax, to_dtype(x, dtype), dim=dim), dtype)  # autocast widens in between


publish(globals(), __all__)
