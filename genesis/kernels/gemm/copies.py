"""Which operands of a GEMM are copied first, and concatenated operands.

Plain reference: numpy.concatenate.

- Aligned copies, of rows that TMA cannot address to rows that begin at multiples of 128 bytes. Loading such rows
  through pointers, element by element, leaves the tensor cores idle for nine tenths of the time. The copy reads and
  writes the operand once, and the GEMM then loads by TMA.
- Concatenation along k: [x | u]·[W | B]ᵀ = x·Wᵀ + u·Bᵀ as one GEMM, with any kernel and epilogue. Copying reads and
  writes x and W, and saves passes over the result, which is wider.

Tiles: R rows x C columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.launch import launch
from genesis.kernels.elements import needs_int64

MIN_EXTENT = 16  # the fewest elements along either axis for which tiles are profitable
MIN_MULTIPLY_ADDS = 1 << 22  # the fewest multiply-adds for which an operand is copied to another layout first
MIN_USES = 3  # uses of each element that save as much as an extra read and write costs


# --- Aligned rows -----------------------------------------------------------------------------------------------------


ROW = 128  # the row stride of a copy is a multiple of this many bytes
MIN_FLOPS = 1 << 25  # FLOPs for which TMA saves as much time as launching a copy takes
FLOPS_PER_BYTE = 36  # the same per byte copied: 60 TFLOP/s through pointers, 400 by TMA, copies at 2 TB/s (H100)


def alignment_is_profitable(flops: int, nbytes: int) -> bool:
    """Return whether copying `nbytes` bytes of operands first makes a GEMM of `flops` FLOPs faster."""
    return flops > MIN_FLOPS + FLOPS_PER_BYTE * nbytes


def aligned_columns(columns: int, item: int) -> int:
    """Return the row stride of an aligned copy, in elements of `item` bytes."""
    return -(-columns * item // ROW) * ROW // item


# --- Concatenation ----------------------------------------------------------------------------------------------------


GRAIN = 8  # TMA addresses rows of a multiple of this many 2-byte elements
ROWS, COLUMNS = 32, 128


@triton.jit
def concat_columns_kernel(p_o, p_x, p_u, rows, width, rank, part, so, sx, su, INT64: tl.constexpr, R: tl.constexpr,
                          C: tl.constexpr):  # fmt: skip
    """Store out[i] = [x[i] | 0 | u[i] | 0]. Each part of `part` rows has its own columns for u."""
    i, j = tl.program_id(0), tl.program_id(1) * C + tl.arange(0, C)[None, :]
    if INT64:
        i = i.to(tl.int64)
    i = i * R + tl.arange(0, R)[:, None]  # [R, 1]
    is_x = (i < rows) & (j < width)  # [R, C]
    j_u = j - width - i // part * rank
    is_u = (i < rows) & (j_u >= 0) & (j_u < rank)  # [R, C]
    b_x = tl.load(p_x + i * sx + j, mask=is_x, other=0)  # [R, C]
    b_u = tl.load(p_u + i * su + j_u, mask=is_u & (j >= width), other=0)  # [R, C]
    tl.store(p_o + i * so + j, tl.where(j < width, b_x, b_u), mask=(i < rows) & (j < so))


def can_extend(rows: int, width: int, rank: int) -> bool:
    """Return whether concatenation is faster, for a product with `rows` rows and a result wider than `width`."""
    return rows >= width and width % GRAIN == rank % GRAIN == 0


def concat_columns(x: Array, u: Array, parts: int = 1) -> Array:
    """Return [x | u] of x `[rows, width]` and u `[rows, rank]`, both with contiguous rows. With `parts` > 1, each of
    these parts of u's rows has its own columns, and zeros fill the others.
    """
    (rows, width), rank = x.shape, u.shape[1]
    assert x.strides[1] == u.strides[1] == 1 and u.shape[0] == rows and rows % parts == 0
    out = empty((rows, width + parts * rank), x.dtype, x.device)
    if out.size:
        launch(
            concat_columns_kernel, (triton.cdiv(rows, ROWS), triton.cdiv(out.shape[1], COLUMNS)), out, x, u, rows,
            width, rank, rows // parts, out.shape[1], x.strides[0], u.strides[0],
            INT64=needs_int64(out.shape, out.strides) or needs_int64(x.shape, x.strides), R=ROWS, C=COLUMNS,
            num_warps=4,
        )  # fmt: skip
    return out
