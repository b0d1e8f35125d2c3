"""Operands side by side along k: [x | u]·[W | B]ᵀ is x·Wᵀ + u·Bᵀ as one product, with any kernel and its epilogue.

Plain reference: numpy.concatenate. Copying costs what x, W and their copies have in bytes; it saves passes over the
product's result, which is wider.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.launch import launch
from genesis.dtypes import float32
from genesis.kernels.strides import needs_int64, program_indices
from genesis.kernels.types import converted
from genesis.ops.shape import contiguous

GRAIN = 8  # elements: rows of 2-byte types that TMA can address
ROWS, COLUMNS = 32, 128
ELEMENTS = 2048


@triton.jit
def beside_kernel(p_o, p_x, p_u, rows, width, rank, part, so, sx, su, INT64: tl.constexpr, R: tl.constexpr,
                  C: tl.constexpr):  # fmt: skip
    """out[i] = [x[i] | 0 | u[i] | 0], u being in the columns of the part of `part` rows that i is in."""
    i, j = tl.program_id(0), tl.program_id(1) * C + tl.arange(0, C)[None, :]
    if INT64:
        i = i.to(tl.int64)
    i = i * R + tl.arange(0, R)[:, None]
    is_x = (i < rows) & (j < width)
    j_u = j - width - i // part * rank
    is_u = (i < rows) & (j_u >= 0) & (j_u < rank)
    b_x = tl.load(p_x + i * sx + j, mask=is_x, other=0)  # [R, C]
    b_u = tl.load(p_u + i * su + j_u, mask=is_u & (j >= width), other=0)
    tl.store(p_o + i * so + j, tl.where(j < width, b_x, b_u), mask=(i < rows) & (j < so))


def can_extend(rows: int, width: int, rank: int) -> bool:
    """Whether copying operands is the shorter way, for a product of so many rows whose result is wider than `width`."""
    return rows >= width and width % GRAIN == rank % GRAIN == 0


def beside(x: Array, u: Array, parts: int = 1) -> Array:
    """[x | u], with `parts` > 1 the parts of u's rows in columns of their own, between zeros.

    Args:
        x: `[rows, width]`, rows contiguous.
        u: `[rows, rank]`, like x; `parts` divides its rows.
    """
    (rows, width), rank = x.shape, u.shape[1]
    assert x.strides[1] == u.strides[1] == 1 and u.shape[0] == rows and rows % parts == 0
    out = empty((rows, width + parts * rank), x.dtype, x.device)
    if out.size:
        launch(
            beside_kernel, (triton.cdiv(rows, ROWS), triton.cdiv(out.shape[1], COLUMNS)), out, x, u, rows, width, rank,
            rows // parts, out.shape[1], x.strides[0], u.strides[0],
            INT64=needs_int64(out.shape, out.strides) or needs_int64(x.shape, x.strides), R=ROWS, C=COLUMNS,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def below_kernel(p_o, p_x, p_u, size, total, INT64: tl.constexpr, N: tl.constexpr):
    """N elements of out: `size` of x, or 1 where x is None, then those of u."""
    i = program_indices(N, INT64)
    b_u = tl.load(p_u + (i - size), mask=(i >= size) & (i < total), other=0)
    b_x = tl.load(p_x + i, mask=i < size, other=0) if p_x is not None else 1.0
    tl.store(p_o + i, converted(tl.where(i < size, b_x, b_u), p_o.dtype.element_ty), mask=i < total)


def below(x: Array, u: Array) -> Array:
    """[x ; u] of `[rows, width]` and `[rank, width]`."""
    out = empty((x.shape[0] + u.shape[0], x.shape[1]), x.dtype, x.device)
    _below_into(out, contiguous(x), u, x.size)
    return out


def ones_and(count: int, u: Array) -> Array:
    """`count` ones, then u `[n]`, in float32."""
    out = empty((count + u.size,), float32, u.device)
    _below_into(out, None, u, count)
    return out


def _below_into(out: Array, x: Array | None, u: Array, size: int) -> None:
    if out.size:
        launch(
            below_kernel, triton.cdiv(out.size, ELEMENTS), out, x, contiguous(u), size, out.size,
            INT64=needs_int64(out.shape, out.strides), N=ELEMENTS,
        )  # fmt: skip
