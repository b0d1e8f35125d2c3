"""Element types inside kernels: Triton's types for ours, the type to compute in, and conversion between types."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from genesis.backend.cuda.compile import Double
from genesis.backend.cuda.driver import is_interpreted
from genesis.dtypes import ALL, DType, float8_e4m3fn, float32, float64

TRITON = {
    "float64": tl.float64,
    "float32": tl.float32,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float8_e4m3fn": tl.float8e4nv,
    "int64": tl.int64,
    "int32": tl.int32,
    "int16": tl.int16,
    "int8": tl.int8,
    "uint8": tl.uint8,
    "bool": tl.int1,
}


def work_type(dtype: DType) -> DType:
    """The type in which a dtype is computed: float32 for floats of at most 2 bytes."""
    return float32 if dtype.is_floating_point and dtype.itemsize <= 2 else dtype


def float_argument(value: float, work: DType) -> float:
    """A Python number as a kernel's argument: float64 if the kernel computes in float64, else float32."""
    return Double(value) if work is float64 else float(value)


@triton.jit
def converted(x, TYPE: tl.constexpr):
    """x cast to another type: floats to integers round towards zero, and anything but 0 is True."""
    if tl.int1 == TYPE:
        return x != 0
    elif x.dtype == tl.int1:
        return x.to(tl.int8).to(TYPE)
    elif x.dtype == tl.float64 and TYPE.primitive_bitwidth == 16:
        return x.to(tl.float32).to(TYPE)
    elif x.dtype.is_floating() and not TYPE.is_floating() and TYPE.primitive_bitwidth < 32:
        return x.to(tl.int32).to(TYPE)
    else:
        return x.to(TYPE)


if is_interpreted():  # which truncates bfloat16 where a GPU rounds, and loads it and 8-bit floats as integers
    _NUMPY = {TRITON[d.name]: d.numpy for d in (*ALL, float8_e4m3fn)}
    _BITS = {tl.bfloat16: np.dtype(np.uint16), tl.float8e4nv: np.dtype(np.uint8)}  # what holds them

    def converted(x: Any, TYPE: Any) -> Any:
        """The same on the numpy values behind an interpreted tile."""
        target = getattr(TYPE, "value", TYPE)
        values = x.handle.data
        if x.dtype in _BITS and values.dtype == _BITS[x.dtype]:
            values = values.view(_NUMPY[x.dtype])
        with np.errstate(all="ignore"):
            values = values.astype(_NUMPY[target])
        if target in _BITS:
            values = values.view(_BITS[target])
        kind = tl.block_type(target, list(x.shape)) if x.shape else target
        return tl.tensor(type(x.handle)(values, target), kind)
