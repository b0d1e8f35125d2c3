"""The CUDA implementation of rotary embedding: tiles of tokens, of some heads each, read, rotated and written once."""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import promote_types
from genesis.kernels.strides import is_wide
from genesis.kernels.types import TRITON, converted, work_type
from genesis.shapes import broadcast_strides

__all__: list[str] = []

TILE, HEADS = 1024, 3  # a program's pairs of one head, 8 a thread; and its heads, which share cos and sin


@triton.jit
def rotate(p_o, p_x, p_cos, p_sin, tokens, turned, so, sx, sc, ss, INVERSE: tl.constexpr, WORK: tl.constexpr,
           WIDE: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, PAIRS: tl.constexpr,
           PADDED: tl.constexpr):  # fmt: skip
    """ROWS tokens of a sequence and COUNT heads of each; heads from `turned` on are copied.

    All is read before anything is written, so that many loads are on their way together, and out may be x.
    """
    blocks = tl.cdiv(tokens, ROWS)
    i_rest = tl.program_id(0)
    i_batch, i_head = i_rest // blocks, tl.program_id(1) * COUNT
    i_time, i_pair = (i_rest - i_batch * blocks) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    if WIDE:
        i_batch, i_time, i_head = i_batch.to(tl.int64), i_time.to(tl.int64), i_head.to(tl.int64)
    m = (i_time < tokens)[:, None] & (i_pair < PAIRS)[None, :]
    p_x += i_batch * sx[0] + i_head * sx[2]
    p_o += i_batch * so[0] + i_head * so[2]
    o_x = (i_time * sx[1])[:, None] + (i_pair * sx[3])[None, :]
    o_o = (i_time * so[1])[:, None] + (i_pair * so[3])[None, :]
    o_c = (i_time * sc[1])[:, None] + (i_pair * sc[2])[None, :]
    o_s = (i_time * ss[1])[:, None] + (i_pair * ss[2])[None, :]
    firsts, seconds = (), ()
    for i in tl.static_range(COUNT):
        firsts += (tl.load(p_x + i * sx[2] + o_x, mask=m),)
        seconds += (tl.load(p_x + i * sx[2] + PAIRS * sx[3] + o_x, mask=m),)
    c = converted(tl.load(p_cos + i_batch * sc[0] + o_c, mask=m), WORK)
    s = converted(tl.load(p_sin + i_batch * ss[0] + o_s, mask=m), WORK)
    if INVERSE:
        s = -s
    for i in tl.static_range(COUNT):
        p_left, p_right = p_o + i * so[2] + o_o, p_o + i * so[2] + PAIRS * so[3] + o_o
        if i_head + i < turned:
            first, second = converted(firsts[i], WORK), converted(seconds[i], WORK)
            tl.store(p_left, converted(first * c - second * s, p_o.dtype.element_ty), mask=m)
            tl.store(p_right, converted(second * c + first * s, p_o.dtype.element_ty), mask=m)
        else:
            tl.store(p_left, firsts[i], mask=m)
            tl.store(p_right, seconds[i], mask=m)


@cuda_impl("rope")
def rope(
    out: Array, x: Array, cos: Array, sin: Array, inverse: bool = False, heads: int | None = None
) -> None:  # fmt: skip
    """Rotate each pair (x[i], x[i + D/2]) by its position's angle; `inverse` rotates back. `out` may be x."""
    batch, tokens, count, size = x.shape
    half = size // 2
    if x.size == 0:
        return
    spread = (batch, tokens, half)
    sc, ss = (broadcast_strides(t.shape, t.strides, spread) for t in (cos, sin))
    work = work_type(promote_types(promote_types(x.dtype, cos.dtype), sin.dtype))
    padded = triton.next_power_of_2(half)
    rows = max(1, min(TILE // padded, triton.next_power_of_2(tokens)))
    each = next(n for n in range(HEADS, 0, -1) if count % n == 0)
    launch(
        rotate, (triton.cdiv(tokens, rows) * batch, count // each), out, x, cos, sin, tokens,
        count if heads is None else heads, out.strides, x.strides, sc, ss, INVERSE=inverse,
        WORK=TRITON[work.name], WIDE=is_wide(x.shape, out.strides, x.strides), ROWS=rows, COUNT=each, PAIRS=half,
        PADDED=padded, num_warps=max(1, min(4, rows * padded // 256)),
    )  # fmt: skip
