"""Copies between arrays that lie differently in memory: tiles that are read along one's contiguous axis and written
along the other's, turned around in shared memory in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.launch import launch
from genesis.kernels.strides import collapse, is_wide, offsets
from genesis.kernels.types import converted

__all__ = ["LEAST", "gains", "transposed_copy"]

LEAST = 16  # elements along either axis, for tiles to be worth it
LARGE = 1 << 25  # multiply-adds from which on a factor of them may be turned over first
USES = 32  # of each element, which spare as much as it costs to read and write it once more


@triton.jit
def transpose_kernel(p_o, p_x, rows, columns, blocks_r, blocks_c, so_r, sx_c, batch, so, sx, DIMS: tl.constexpr,
                     WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """out[batch, r, c] = x[batch, r, c], where x's elements are contiguous along r and out's along c."""
    program = tl.program_id(0)
    b = program // (blocks_r * blocks_c)
    r = program // blocks_c % blocks_r
    c = program % blocks_c
    if WIDE:
        b, r, c = b.to(tl.int64), r.to(tl.int64), c.to(tl.int64)
    r = (r * R + tl.arange(0, R))[:, None]
    c = (c * C + tl.arange(0, C))[None, :]
    m = (r < rows) & (c < columns)
    x = tl.load(p_x + offsets(b, batch, sx, DIMS) + r + c * sx_c, mask=m)
    tl.store(p_o + offsets(b, batch, so, DIMS) + r * so_r + c, converted(x, p_o.dtype.element_ty), mask=m)


def gains(elements: int, products: int) -> bool:
    """Whether a right factor of a product in exact float32 that lies with k innermost is worth turning over.

    Such products are multiply-adds whose factors come from shared memory, 16 bytes a thread: for neighbouring threads
    neighbouring columns. With k innermost these lie in the same banks, and a load takes 32 cycles for 4.

    Args:
        elements: of the factor.
        products: multiply-adds that it takes part in.
    """
    return products >= max(LARGE, USES * elements)


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
    wide_enough = [d for d, n in enumerate(sizes) if n >= LEAST]
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
        batch, batch_so, batch_sx, DIMS=len(batch), WIDE=is_wide(sizes, so, sx), R=rows, C=columns, num_warps=warps,
    )  # fmt: skip
    return True
