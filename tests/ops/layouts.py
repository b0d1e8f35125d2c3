"""The same values at different places in memory: contiguous, transposed, with a step, behind an offset, expanded.

Memory around and between the elements is filled with 0xFF (NaN in every float type), so that reading it shows, and the
whole storage can be compared before and after an op.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import numpy as np

from genesis.array import Array, empty
from genesis.dtypes import as_dtype
from genesis.shapes import contiguous_strides
from tests.ops.devices import moved

__all__ = ["LAYOUTS", "expandable", "memory", "place"]

LAYOUTS = ("contiguous", "transposed", "step", "offset", "expanded")


def place(values: np.ndarray, layout: str) -> Array:
    """An array with these values in fresh memory, laid out as `layout`.

    "expanded" repeats along the first dimension with stride 0: the values must be equal along it.
    """
    shape, offset = values.shape, 0
    strides = contiguous_strides(shape)
    if layout == "transposed":
        strides = tuple(accumulate((max(s, 1) for s in shape), mul, initial=1))[:-1]
    elif layout == "step":
        strides, offset = tuple(2 * s for s in strides), 1
    elif layout == "offset":
        offset = 3
    elif layout == "expanded":
        strides = (0, *contiguous_strides(shape)[1:])
    extent = offset + sum(st * max(s - 1, 0) for s, st in zip(shape, strides, strict=True)) + 3
    around = empty((extent,), as_dtype(values.dtype))
    around.view_np().view(np.uint8).fill(0xFF)
    array = around.view(shape, strides, offset)
    array.view_np()[...] = values
    return moved(array)


def expandable(values: np.ndarray) -> np.ndarray | None:
    """The values with the first entry repeated along the first dimension; None where there is nothing to repeat."""
    if values.ndim == 0 or values.shape[0] < 2:
        return None
    return np.broadcast_to(values[:1], values.shape).copy()


def memory(array: Array) -> bytes:
    """All bytes of the array's storage."""
    whole = array.view((array.storage.nbytes // array.dtype.itemsize,), (1,), 0)
    return whole.numpy().tobytes()
