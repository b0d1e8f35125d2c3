"""The twin of rotary embedding: tiles of (token, head) rows, each read, rotated and written once."""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.twins import twin
from genesis.dtypes import promote_types
from genesis.kernels.indices import is_wide
from genesis.kernels.types import TRITON, converted, work_type
from genesis.shapes import broadcast_strides

__all__: list[str] = []

PAIRS = 512  # a program: 4 pairs a thread; more are no faster on large tensors, and slower on small ones


@triton.jit
def rotate(p_o, p_x, p_cos, p_sin, rows, tokens, heads, turned, half, so, sx, sc, ss, INVERSE: tl.constexpr,
           WORK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Rows are (sequence, token, head) in this order; strides of x and out are for those and the element.

    Heads from `turned` on are copied.
    """
    i_program = tl.program_id(0)
    if WIDE:
        i_program = i_program.to(tl.int64)
    i_row = i_program * ROWS + tl.arange(0, ROWS)
    i_pair = tl.arange(0, HALF)
    m = (i_row < rows)[:, None] & (i_pair < half)[None, :]
    i_token = i_row // heads
    i_head, i_batch, i_time = i_row % heads, i_token // tokens, i_token % tokens
    o_x = (i_batch * sx[0] + i_time * sx[1] + i_head * sx[2])[:, None] + i_pair[None, :] * sx[3]
    o_o = (i_batch * so[0] + i_time * so[1] + i_head * so[2])[:, None] + i_pair[None, :] * so[3]
    o_c = (i_batch * sc[0] + i_time * sc[1])[:, None] + i_pair[None, :] * sc[2]
    o_s = (i_batch * ss[0] + i_time * ss[1])[:, None] + i_pair[None, :] * ss[2]
    first = converted(tl.load(p_x + o_x, mask=m), WORK)
    second = converted(tl.load(p_x + o_x + half * sx[3], mask=m), WORK)
    c = converted(tl.load(p_cos + o_c, mask=m), WORK)
    s = converted(tl.load(p_sin + o_s, mask=m), WORK)
    if INVERSE:
        s = -s
    still = (i_head >= turned)[:, None]
    left, right = tl.where(still, first, first * c - second * s), tl.where(still, second, second * c + first * s)
    tl.store(p_o + o_o, converted(left, p_o.dtype.element_ty), mask=m)
    tl.store(p_o + o_o + half * so[3], converted(right, p_o.dtype.element_ty), mask=m)


@twin("rope")
def rope(
    out: Array, x: Array, cos: Array, sin: Array, inverse: bool = False, heads: int | None = None
) -> None:  # fmt: skip
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle; `inverse` rotates back."""
    batch, tokens, count, size = x.shape
    turned = count if heads is None else heads
    half = size // 2
    rows = batch * tokens * count
    if rows * half == 0:
        return
    spread = (batch, tokens, half)
    sc, ss = (broadcast_strides(t.shape, t.strides, spread) for t in (cos, sin))
    work = work_type(promote_types(promote_types(x.dtype, cos.dtype), sin.dtype))
    padded = triton.next_power_of_2(half)
    each = max(1, PAIRS // padded)
    launch(
        rotate, triton.cdiv(rows, each), out, x, cos, sin, rows, tokens, count, turned, half, out.strides, x.strides,
        sc, ss, INVERSE=inverse, WORK=TRITON[work.name], WIDE=is_wide(x.shape, out.strides, x.strides), ROWS=each,
        HALF=padded, num_warps=4,
    )  # fmt: skip
