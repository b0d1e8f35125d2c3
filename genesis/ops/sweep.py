"""How references run numpy functions elementwise: in the result's type, in threads, 2-byte floats in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from genesis.backend.cpu import is_split, parallel
from genesis.errors import DTypeError


def is_narrow(dtype: np.dtype) -> bool:
    """Whether `dtype` is float16 or bfloat16: computed in float32 and rounded once at the store."""
    return dtype.itemsize == 2 and dtype.kind not in "iub"


def work_type(dtype: np.dtype) -> np.dtype:
    """What values of `dtype` are computed in: float32 for 2-byte floats, else the type itself."""
    return np.dtype(np.float32) if is_narrow(dtype) else dtype


def as_type(x: Any, dtype: np.dtype) -> Any:
    """A numpy array or number as `dtype`, copied only where the type differs; integers wrap around, as in torch.

    Raises:
        DTypeError: for a Python integer beyond 64 bits or the largest float.
    """
    if isinstance(x, np.ndarray):
        return x if x.dtype == dtype else x.astype(dtype)
    try:
        return np.asarray(x).astype(dtype)[()] if dtype.kind in "iu" else dtype.type(x)
    except OverflowError:
        raise DTypeError(f"an integer of {int(x).bit_length()} bits does not fit into {dtype.name}") from None


def split(work: Callable[..., Any], out: np.ndarray, *inputs: Any) -> None:
    """`work(out, *inputs)` over pieces along the longest axis, in threads, with inputs broadcast to the output."""
    if out.ndim == 0 or not is_split(out.size):
        work(out, *inputs)
        return
    views = [np.broadcast_to(x, out.shape) if isinstance(x, np.ndarray) and x.ndim else x for x in inputs]
    axis = max(range(out.ndim), key=lambda i: out.shape[i]) if out.shape[0] < 8 else 0

    def piece(start: int, stop: int) -> None:
        window = (slice(None),) * axis + (slice(start, stop),)
        work(out[window], *(x[window] if isinstance(x, np.ndarray) and x.ndim else x for x in views))

    parallel(piece, out.shape[axis], out.size)


def sweep(function: Callable[..., Any], out: np.ndarray, *inputs: Any, dtype: np.dtype | None = None) -> None:
    """`function(*inputs, out=out)` over broadcast inputs, by pieces along the longest axis.

    Args:
        function: takes numpy operands of one type and `out=`; each output element depends on the same input elements
            only.
        dtype: the type to compute in; the output's own unless given.
    """
    dtype = out.dtype if dtype is None else dtype
    wide = work_type(dtype)
    direct = out.dtype == wide or out.dtype == np.bool_

    def work(target: np.ndarray, *values: Any) -> None:
        operands = [as_type(x, wide) for x in values]
        if direct:
            function(*operands, out=target)
        else:
            target[...] = function(*operands)

    split(work, out, *inputs)
