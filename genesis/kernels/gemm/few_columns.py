"""GEMMs with few columns, such as matrix times vector, on the CUDA cores. Each element of A is read once.

Plain reference: genesis/ops/linalg.py: `matmul`.

A program multiplies tiles of A in registers by each column of B and sums along k at the end, so that no tile passes
through shared memory. A GEMM with few rows is swapped, so that its rows become columns. `linalg.py` launches it.

The GEMM is [m, k] x [k, COLUMNS]; tiles are BM rows x BK elements along k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels.elements import converted, offsets
from genesis.kernels.gemm.gemm import epilogue, grouped_tile, out_offsets
from genesis.kernels.gemm.tiles import MAX_SPLIT, GemmTile

MAX_COLUMNS = 2  # the most columns if A is K-major; otherwise 1, because all lanes then load the same element of B
MAX_EXACT_COLUMNS = 6  # the limit for float32 without tensor cores, where tiles in shared memory would be mostly empty
FEW_ELEMENTS = 1 << 20  # below this many elements of A, twice as many columns are worth reading B in each warp
ELEMENTS = 2048  # elements of A per tile, 16 per thread; half as many for 3 or more columns, which have as many sums
PROGRAMS_PER_SM = 4
MIN_STEPS = 4  # the fewest steps along k per part


@triton.jit(do_not_specialize=["schedule"])
def gemm_few_columns(p_o, p_a, p_b, p_parts, p_vector, vector_stride, p_residual, alpha, sizes, batches, sa, sb, so,
                     schedule, EPILOGUE: tl.constexpr, INT64: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr,
                     BN: tl.constexpr, BK: tl.constexpr, MATRICES: tl.constexpr,
                     SPLIT: tl.constexpr, VECTORS: tl.constexpr):  # fmt: skip
    """Compute BM rows and all COLUMNS columns, or with SPLIT a part of their sums; see `gemm_pointers`.

    Args:
        VECTORS: both operands are loaded 16 bytes at a time along k. A column of B is then loaded as a tile like A's,
            so that each element is already in the thread that needs it.
    """
    m, n, k = sizes
    split, steps_per_split = schedule
    i_tile, begin, end = tl.program_id(0), 0, tl.cdiv(k, BK)
    if SPLIT:
        i_tile, begin = tl.program_id(0) // split, tl.program_id(0) % split * steps_per_split
        end = tl.minimum(begin + steps_per_split, end)
    i_batch, i_m, _ = grouped_tile(i_tile, tl.cdiv(m, BM), 1, MATRICES)
    o_m, o_k, stop = i_m * BM + tl.arange(0, BM), tl.arange(0, BK), tl.minimum(end * BK, k)
    # Rows beyond the last read the last row, which avoids masks.
    x_batch, x_m, x_k = i_batch, tl.minimum(o_m, m - 1), begin * BK + o_k
    if INT64:
        x_batch, x_m, x_k = i_batch.to(tl.int64), x_m.to(tl.int64), x_k.to(tl.int64)
    p_ak = p_a + offsets(x_batch, batches, sa[0]) + x_m[:, None] * sa[1] + x_k[None, :] * sa[2]  # [BM, BK]
    p_bk = p_b + offsets(x_batch, batches, sb[0]) + x_k[None, :] * sb[1]  # [1, BK]
    if VECTORS:
        p_bk += x_m[:, None] * 0  # [BM, BK]
    # Multiply the tiles of A by each column, with loads one step ahead.
    sums = ()  # [BM, BK] for each column
    for _ in tl.static_range(COLUMNS):
        sums += (tl.zeros((BM, BK), tl.float32),)
    b_next = tl.load(p_ak, mask=(o_k < stop - begin * BK)[None, :], other=0.0)  # [BM, BK]
    for i_k in range(begin, end):
        b_a = converted(b_next, tl.float32)  # [BM, BK]
        p_ak += BK * sa[2]
        b_next = tl.load(p_ak, mask=(o_k < stop - (i_k + 1) * BK)[None, :], other=0.0)  # [BM, BK], one step ahead
        before, sums = sums, ()
        for j in tl.static_range(COLUMNS):
            b_b = tl.load(p_bk + j * sb[2], mask=(o_k < stop - i_k * BK)[None, :], other=0.0)  # [1, BK] or [BM, BK]
            sums += (before[j] + b_a * converted(b_b, tl.float32),)  # [BM, BK]
        p_bk += BK * sb[1]
    # Sum along k, then store the columns or their parts.
    operands = (p_vector, vector_stride, p_residual, alpha)
    for j in tl.static_range(COLUMNS):
        b_y, o_n = tl.sum(sums[j], 1)[:, None], j + tl.arange(0, 1)  # [BM, 1]
        if SPLIT:
            tl.store(p_parts + tl.program_id(0) * (BM * BN) + tl.arange(0, BM)[:, None] * BN + o_n[None, :], b_y)
        else:
            b_y = epilogue(b_y, i_batch, o_m, o_n, m, n, p_o, operands, so, tl.float32, EPILOGUE, INT64)
            p_y = p_o + out_offsets(i_batch, o_m, o_n, so, INT64)
            tl.store(p_y, converted(b_y, p_o.dtype.element_ty), mask=(o_m < m)[:, None])


def is_for_few_columns(
    n: int, a_row: int, a_column: int, b_row: int, elements: int = FEW_ELEMENTS, is_exact: bool = False
) -> bool:
    """Return whether the kernel is the fastest for n columns with these strides, and for that many elements of A.
    `is_exact` is for float32 without tensor cores, which are faster for more columns.
    """
    most = MAX_EXACT_COLUMNS if is_exact else MAX_COLUMNS * (1 + (elements < FEW_ELEMENTS))
    if a_column == 1 and n <= most:
        return n == 1 or b_row == 1
    return a_row == 1 and n == 1


def few_columns_tile(matrices: int, m: int, n: int, k: int, is_k_major: bool, sm_count: int) -> GemmTile:
    """Return a tile along A's contiguous axis, with few enough rows for two programs per SM, and splits along k."""
    bm, elements = 8, ELEMENTS >> (n > 2)
    if is_k_major:
        while bm > 1 and matrices * triton.cdiv(m, bm) < 2 * sm_count:
            bm //= 2
        bk = min(elements // bm, max(128, triton.next_power_of_2(k)))
    else:
        bm = max(32, min(128, triton.next_power_of_2(m)))
        bk = elements // bm
    tiles = matrices * triton.cdiv(m, bm)
    split = min(PROGRAMS_PER_SM * sm_count // tiles, triton.cdiv(k, bk) // MIN_STEPS, MAX_SPLIT)
    return GemmTile(bm, triton.next_power_of_2(n), bk, 4, 1, split=max(split, 1))
