"""arange and linspace, in float64 or exact integers.

Reference: `genesis/ops/create.py`: arange, linspace.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.compile import Double
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import DType
from genesis.kernels.types import converted

TILE = 1024


@triton.jit(do_not_specialize=["start", "step", "count", "end"])
def arange_kernel(p_o, start, step, end, count, TYPE: tl.constexpr, ENDS: tl.constexpr, T: tl.constexpr):
    """start + step · i; with ENDS, the last element is `end`."""
    i = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    y = tl.full([T], start, TYPE) + tl.full([T], step, TYPE) * i.to(TYPE)
    if ENDS:
        y = tl.where((i == count - 1) & (i > 0), tl.full([T], end, TYPE), y)
    tl.store(p_o + i, converted(y, p_o.dtype.element_ty), mask=i < count)


@cuda_impl("arange")
def arange(out: Array, start: float, step: float, count: int, dtype: DType) -> None:
    """start + step·i for i = 0 .. count - 1."""
    exact = isinstance(start, int) and isinstance(step, int)
    bounds = (int(start), int(step)) if exact else (Double(start), Double(step))
    launch(
        arange_kernel, triton.cdiv(count, TILE), out, *bounds, bounds[0], count, TYPE=tl.int64 if exact else tl.float64,
        ENDS=False, T=TILE, num_warps=4,
    )  # fmt: skip


@cuda_impl("linspace")
def linspace(out: Array, start: float, end: float, count: int, dtype: DType) -> None:
    """`count` values from start to end, both included."""
    step = (float(end) - float(start)) / max(count - 1, 1)
    launch(
        arange_kernel, triton.cdiv(count, TILE), out, Double(start), Double(step), Double(end), count, TYPE=tl.float64,
        ENDS=True, T=TILE, num_warps=4,
    )  # fmt: skip
