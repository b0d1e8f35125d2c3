"""Copies between arrays whose contiguous axes differ: tiles are read along one's axis and stored along the other's, and
transposed in shared memory in between.

Plain reference: genesis/ops/elementwise.py: `copy`, `cast`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.launch import launch
from genesis.kernels.strides import collapse, needs_int64, offsets
from genesis.kernels.types import converted

MIN_EXTENT = 16  # elements along either axis, for tiles to be profitable
MIN_MULTIPLY_ADDS = 1 << 25  # from which on an operand may be copied first
MIN_USES = 32  # of each element, which save as much as reading and writing it once more costs


@triton.jit
def transpose_kernel(p_o, p_x, rows, columns, blocks_r, blocks_c, so_r, sx_c, batch, so, sx,
                     INT64: tl.constexpr, R: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """out[batch, r, c] = x[batch, r, c], where x's elements are contiguous along r and out's along c."""
    program = tl.program_id(0)
    b = program // (blocks_r * blocks_c)
    r = program // blocks_c % blocks_r
    c = program % blocks_c
    if INT64:
        b, r, c = b.to(tl.int64), r.to(tl.int64), c.to(tl.int64)
    r = (r * R + tl.arange(0, R))[:, None]
    c = (c * C + tl.arange(0, C))[None, :]
    m = (r < rows) & (c < columns)
    x = tl.load(p_x + offsets(b, batch, sx) + r + c * sx_c, mask=m)  # [R, C]
    tl.store(p_o + offsets(b, batch, so) + r * so_r + c, converted(x, p_o.dtype.element_ty), mask=m)


def copy_is_profitable(elements: int, multiply_adds: int) -> bool:
    """Whether copying a K-major operand B of a GEMM in exact float32, to be MN-major, saves more than it costs.

    Such GEMMs are multiply-adds whose operands come from shared memory, 16 bytes a thread: neighbouring columns for
    neighbouring threads. K-major, these are in the same banks, and a load takes 32 cycles instead of 4.

    Args:
        elements: of the operand.
        multiply_adds: with all of its elements.
    """
    return multiply_adds >= max(MIN_MULTIPLY_ADDS, MIN_USES * elements)


def tile(itemsize: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile: 128 bytes or more along both axes."""
    side = {1: 128, 2: 64, 4: 32, 8: 32}[itemsize]
    return side, side, 4


def transposed_copy(out: Array, x: Array) -> bool:
    """Write x into `out` of the same shape, converted to its dtype.

    Returns:
        False, with nothing done, unless x is contiguous along one axis and `out` along another.
    """
    sizes, so, sx = collapse(out.shape, out.strides, x.strides)
    wide_enough = [d for d, n in enumerate(sizes) if n >= MIN_EXTENT]
    c = next((d for d in wide_enough if so[d] == 1), None)
    r = next((d for d in wide_enough if sx[d] == 1 and d != c), None)
    if c is None or r is None or sx[c] == 1 or min(*so, *sx) < 0:
        return False
    rest = [d for d in range(len(sizes)) if d not in (r, c)]
    batch, batch_so, batch_sx = (tuple(s[d] for d in rest) or (n,) for s, n in ((sizes, 1), (so, 0), (sx, 0)))
    rows, columns, warps = tile(max(out.dtype.itemsize, x.dtype.itemsize))
    blocks_r, blocks_c = triton.cdiv(sizes[r], rows), triton.cdiv(sizes[c], columns)
    count = 1
    for n in batch:
        count *= n
    launch(
        transpose_kernel, count * blocks_r * blocks_c, out, x, sizes[r], sizes[c], blocks_r, blocks_c, so[r], sx[c],
        batch, batch_so, batch_sx, INT64=needs_int64(sizes, so, sx), R=rows, C=columns, num_warps=warps,
    )  # fmt: skip
    return True
