"""The kernel that adds what all ranks have sent, each element by one thread in the order of the ranks.

Reference: `genesis/ops/rank_sum.py`, under the same name.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.kernels.pointwise.elementwise import positions
from genesis.kernels.strides import needs_int64
from genesis.kernels.types import TRITON, converted, work_type

TILE = 1024  # elements: 16 bytes of a 2-byte type for each of 128 threads


@triton.jit
def rank_sum_kernel(p_o, p_own, p_others, n, s_row, RANK: tl.constexpr, OTHERS: tl.constexpr,
                    ADDS: tl.constexpr, WORK: tl.constexpr, INT64: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """total = ((… + rank 0's) + rank 1's) + … in WORK, stored once."""
    i, m = positions(n, TILE, INT64)  # [TILE]
    o_row = i * 0
    own = converted(tl.load(p_own + i, mask=m), WORK)
    if ADDS:
        acc = converted(tl.load(p_o + i, mask=m), WORK)
    elif RANK == 0:
        acc = own
    else:
        acc = converted(tl.load(p_others + i, mask=m), WORK)
    for q in tl.static_range(OTHERS + 1):  # the sum has begun with the first of its terms: 0 + -0 would be 0
        if q == RANK and (ADDS or q > 0):
            acc += own
        if q < OTHERS:  # row q holds rank q's values, or rank q + 1's behind this one's
            if ADDS or q > 0 or RANK == 0:
                acc += converted(tl.load(p_others + o_row + i, mask=m), WORK)
            o_row += s_row
    tl.store(p_o + i, converted(acc, p_o.dtype.element_ty), mask=m)


@cuda_impl("rank_sum")
def rank_sum(out: tuple[()], total: Array, own: Array, others: Array, *, rank: int, adds: bool) -> None:
    """One pass: W values are read, one is written."""
    n, work = own.size, work_type(own.dtype)
    launch(
        rank_sum_kernel, triton.cdiv(n, TILE), total, own, others, n, others.strides[0],
        RANK=rank, OTHERS=others.shape[0], ADDS=adds, WORK=TRITON[work.name],
        INT64=needs_int64((n,)) or needs_int64(others.shape, others.strides), TILE=TILE, num_warps=4,
    )  # fmt: skip
