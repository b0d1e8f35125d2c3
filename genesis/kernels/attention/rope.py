"""The CUDA implementation of rotary embedding (RoPE): a program reads, rotates and writes some heads of some tokens.

Plain reference: genesis/ops/rope.py: `rope`. Each pair (x[i], x[i + D/2]) rotates by the angle of its position.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.array import Array
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import promote_types
from genesis.kernels.strides import needs_int64
from genesis.kernels.types import TRITON, converted, work_type
from genesis.shapes import broadcast_strides

TILE, HEADS = 1024, 3  # a program's pairs of one head, 8 a thread; and its heads, which share cos and sin


@triton.jit
def rope_kernel(p_o, p_x, p_cos, p_sin, tokens, rotated, so, sx, sc, ss, INVERSE: tl.constexpr, WORK: tl.constexpr,
                INT64: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
                PADDED: tl.constexpr):  # fmt: skip
    """ROWS tokens of a sequence and HEADS heads of each; heads from `rotated` on are copied.

    All loads come before the first store, so that many are in flight together, and out may be x.
    """
    blocks = tl.cdiv(tokens, ROWS)
    i_rest = tl.program_id(0)
    i_batch, i_head = i_rest // blocks, tl.program_id(1) * HEADS
    o_token, o_pair = (i_rest - i_batch * blocks) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    if INT64:
        i_batch, o_token, i_head = i_batch.to(tl.int64), o_token.to(tl.int64), i_head.to(tl.int64)
    m = (o_token < tokens)[:, None] & (o_pair < PAIRS)[None, :]  # [ROWS, PADDED], like all tiles here
    p_x += i_batch * sx[0] + i_head * sx[2]
    p_o += i_batch * so[0] + i_head * so[2]
    o_x = (o_token * sx[1])[:, None] + (o_pair * sx[3])[None, :]
    o_o = (o_token * so[1])[:, None] + (o_pair * so[3])[None, :]
    o_c = (o_token * sc[1])[:, None] + (o_pair * sc[2])[None, :]
    o_s = (o_token * ss[1])[:, None] + (o_pair * ss[2])[None, :]
    lefts, rights = (), ()
    for i in tl.static_range(HEADS):
        lefts += (tl.load(p_x + i * sx[2] + o_x, mask=m),)
        rights += (tl.load(p_x + i * sx[2] + PAIRS * sx[3] + o_x, mask=m),)
    b_cos = converted(tl.load(p_cos + i_batch * sc[0] + o_c, mask=m), WORK)
    b_sin = converted(tl.load(p_sin + i_batch * ss[0] + o_s, mask=m), WORK)
    if INVERSE:
        b_sin = -b_sin
    for i in tl.static_range(HEADS):
        p_left, p_right = p_o + i * so[2] + o_o, p_o + i * so[2] + PAIRS * so[3] + o_o
        if i_head + i < rotated:
            b_left, b_right = converted(lefts[i], WORK), converted(rights[i], WORK)
            tl.store(p_left, converted(b_left * b_cos - b_right * b_sin, p_o.dtype.element_ty), mask=m)
            tl.store(p_right, converted(b_right * b_cos + b_left * b_sin, p_o.dtype.element_ty), mask=m)
        else:
            tl.store(p_left, lefts[i], mask=m)
            tl.store(p_right, rights[i], mask=m)


@cuda_impl("rope")
def rope(
    out: Array, x: Array, cos: Array, sin: Array, inverse: bool = False, heads: int | None = None
) -> None:  # fmt: skip
    """Rotate pairs of x [B, T, H, D]; `inverse` applies the inverse RoPE. `out` may be x."""
    batch, tokens, count, size = x.shape
    half = size // 2
    if x.size == 0:
        return
    angles = (batch, tokens, half)
    sc, ss = (broadcast_strides(t.shape, t.strides, angles) for t in (cos, sin))
    work = work_type(promote_types(promote_types(x.dtype, cos.dtype), sin.dtype))
    padded = triton.next_power_of_2(half)
    rows = max(1, min(TILE // padded, triton.next_power_of_2(tokens)))
    heads_per_program = next(n for n in range(HEADS, 0, -1) if count % n == 0)
    launch(
        rope_kernel, (triton.cdiv(tokens, rows) * batch, count // heads_per_program), out, x, cos, sin, tokens,
        count if heads is None else heads, out.strides, x.strides, sc, ss, INVERSE=inverse, WORK=TRITON[work.name],
        INT64=needs_int64(x.shape, out.strides, x.strides), ROWS=rows, HEADS=heads_per_program, PAIRS=half,
        PADDED=padded, num_warps=max(1, min(4, rows * padded // 256)),
    )  # fmt: skip
