"""softmax and its logarithm. Activations are in `pointwise.py`, other layers' functions in `genesis.nn.functional`."""

from __future__ import annotations

from genesis.autograd.record import apply
from genesis.functions.elementwise import to_dtype
from genesis.functions.make import as_operand
from genesis.functions.surface import public
from genesis.functions.types import DTypeLike, Tensor
from genesis.ops import softmax as ops


@public(nn=True)
def softmax(x: Tensor, dim: int, *, dtype: DTypeLike = None) -> Tensor:
    """e^x / Σ e^x along `dim`, computed in float32 or wider; `dtype` casts x first."""
    x = as_operand(x, "softmax")
    if dtype is None:
        return apply(ops.softmax, x, dim=dim)
    return to_dtype(apply(ops.softmax, to_dtype(x, dtype), dim=dim), dtype)  # autocast widens in between


@public(nn=True)
def log_softmax(x: Tensor, dim: int, *, dtype: DTypeLike = None) -> Tensor:
    """log softmax(x) along `dim`, without forming the softmax."""
    x = as_operand(x, "log_softmax")
    if dtype is None:
        return apply(ops.log_softmax, x, dim=dim)
    return to_dtype(apply(ops.log_softmax, to_dtype(x, dtype), dim=dim), dtype)  # autocast widens in between
