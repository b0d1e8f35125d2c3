"""Copies of a GEMM's operands whose rows TMA cannot address, into rows that begin at multiples of 16 bytes.

Plain reference: genesis/ops/elementwise.py: `copy`.

Through pointers such rows are loaded element by element, which leaves tensor cores idle for nine tenths of the time. A
copy moves twice the operand's bytes once, and the GEMM then loads by TMA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.launch import launch
from genesis.dtypes import int16, int32, int64
from genesis.kernels.strides import collapse, needs_int64, offsets

ROW = 64  # elements that the distance of a copy's rows is a multiple of: 16 units of 8 bytes, stored as vectors
ELEMENTS = 2048  # of a tile
LEAST = 1 << 25  # FLOPs of which TMA saves as much as launching a copy takes
FLOPS_PER_BYTE = 36  # the same of a byte to copy: 60 TFLOP/s through pointers, 400 by TMA, copies of 2 TB/s (H100)


@triton.jit
def copy_tile(p_o, p_x, program, rows, columns, so_r, sx_r, batch, so, sx, INT64: tl.constexpr, R: tl.constexpr,
              C: tl.constexpr):  # fmt: skip
    """out[batch, r, c] = x[batch, r, c] for R rows and C columns."""
    blocks_r, blocks_c = tl.cdiv(rows, R), tl.cdiv(columns, C)
    b, r, c = program // (blocks_r * blocks_c), program // blocks_c % blocks_r, program % blocks_c
    if INT64:
        b, r, c = b.to(tl.int64), r.to(tl.int64), c.to(tl.int64)
    r, c = (r * R + tl.arange(0, R))[:, None], (c * C + tl.arange(0, C))[None, :]
    m_r = r < rows
    x = tl.load(p_x + offsets(b, batch, sx) + r * sx_r + c, mask=m_r & (c < columns), other=0)  # [R, C]
    tl.store(p_o + offsets(b, batch, so) + r * so_r + c, x, mask=m_r & (c < so_r))  # with what pads a row


@triton.jit
def aligned_copies_kernel(p_o, p_x, p_o1, p_x1, programs, rows, columns, so_r, sx_r, batch, so, sx, rows1, columns1,
                          so_r1, sx_r1, batch1, so1, sx1, INT64: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                          R1: tl.constexpr, C1: tl.constexpr):  # fmt: skip
    """One copy in the first `programs` programs, another, where there is one, in those behind."""
    program = tl.program_id(0)
    if program < programs:
        copy_tile(p_o, p_x, program, rows, columns, so_r, sx_r, batch, so, sx, INT64, R, C)
    elif p_x1 is not None:
        copy_tile(p_o1, p_x1, program - programs, rows1, columns1, so_r1, sx_r1, batch1, so1, sx1, INT64, R1, C1)


class Copy(NamedTuple):
    """A copy as the kernel takes it: batch dimensions apart, elements as wide as both sides allow."""

    out: Array
    x: Array
    sizes: tuple[int, int, int, int]  # rows, columns, and distances of rows
    batch: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # sizes, and strides of both
    tile: tuple[int, int]

    @property
    def programs(self) -> int:
        rows, columns, _, _ = self.sizes
        return math.prod(self.batch[0]) * triton.cdiv(rows, self.tile[0]) * triton.cdiv(columns, self.tile[1])


def alignment_is_profitable(flops: int, nbytes: int) -> bool:
    """Whether copying so many bytes of operands first makes a GEMM faster.

    Args:
        flops: twice the multiply-adds.
    """
    return flops > LEAST + FLOPS_PER_BYTE * nbytes


def aligned_columns(columns: int) -> int:
    """The distance of a copy's rows."""
    return -(-columns // ROW) * ROW


def aligned_copies(pairs: Sequence[tuple[Array, Array]]) -> None:
    """Copy x to out for one or two pairs (out, x) of one dtype: both `[..., rows, columns]` with contiguous columns,
    out with rows `aligned_columns` apart.
    """
    copies = [_copy_of(out, x) for out, x in pairs]
    first, second = copies[0], copies[-1]
    wide = any(
        needs_int64((*c.batch[0], *c.sizes[:2]), (*c.batch[i], c.sizes[i + 1], 1)) for c in copies for i in (1, 2)
    )
    arrays = (first.out, first.x, second.out, second.x) if len(copies) > 1 else (first.out, first.x, None, None)
    launch(
        aligned_copies_kernel, sum(c.programs for c in copies), *arrays, first.programs, *first.sizes, *first.batch,
        *second.sizes, *second.batch, INT64=wide, R=first.tile[0], C=first.tile[1], R1=second.tile[0],
        C1=second.tile[1], num_warps=4,
    )  # fmt: skip


def _copy_of(out: Array, x: Array) -> Copy:
    """In integers of up to 8 bytes."""
    assert out.strides[-2] % ROW == 0, out.strides
    item, columns = x.dtype.itemsize, x.shape[-1]
    base = 16 if x.data_ptr() % 16 == 0 else item  # replayed with another address, of which no more is known
    grain = math.gcd(base, 8, columns * item, *(st * item for st in x.strides[:-1]))
    ratio = max(grain // item, 1)
    kind = {2: int16, 4: int32, 8: int64}[item * ratio]
    shape = (*x.shape[:-1], columns // ratio)
    o, s = (
        Array(a.storage, shape, (*(st // ratio for st in a.strides[:-1]), 1), kind, a.device, a.offset // ratio)
        for a in (out, x)
    )
    rows, c = shape[-2], min(256, triton.next_power_of_2(shape[-1]))
    batch = collapse(shape[:-2], o.strides[:-2], s.strides[:-2])
    return Copy(o, s, (rows, shape[-1], o.strides[-2], s.strides[-2]), batch, (ELEMENTS // c, c))  # type: ignore[arg-type]
