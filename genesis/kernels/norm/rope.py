"""RoPE, and RMSNorm of each query and key head followed by RoPE, in one pass. Value heads are copied.

Reference: `genesis/ops/rope.py`: rope, norm_rope, norm_rope_backward. Each pair (x[i], x[i + D/2]) rotates by the angle
of its position. A program has a few tokens, keeps their cos and sin in registers, and loops over heads. Backward also
accumulates partial gradients of the two weights in registers, as in `norm.py`.

x is [B, T, H, D]. Tiles: ROWS tokens x PADDED or HALF pairs of one head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend import mode
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.dtypes import float32, promote_types
from genesis.kernels import maths
from genesis.kernels.elements import TRITON, converted, float_argument, needs_int64, program_indices, work_type
from genesis.kernels.norm.norm import rsqrt, sum_partials
from genesis.ops.shape import contiguous
from genesis.shapes import broadcast_strides

TILE, HEADS = 1024, 3  # pairs of one head per program, 8 per thread; heads per program, which share cos and sin


@triton.jit
def rotated_pair(left, right, cos, sin):
    """Return a rotated pair. All four products are rounded, because if one of them became part of a fused
    multiply-add, the result would depend on the compiler's choice.
    """
    return (
        maths.rounded_product(left, cos) - maths.rounded_product(right, sin),
        maths.rounded_product(right, cos) + maths.rounded_product(left, sin),
    )


@triton.jit
def rope_kernel(p_o, p_x, p_cos, p_sin, tokens, rotated, so, sx, sc, ss, INVERSE: tl.constexpr, WORK: tl.constexpr,
                INT64: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
                PADDED: tl.constexpr):  # fmt: skip
    """Rotate ROWS tokens of a sequence and HEADS heads of each. Heads from `rotated` on are copied.

    All loads come before the first store, so many loads are in flight together, and out may be x.
    """
    blocks = tl.cdiv(tokens, ROWS)
    i_rest = tl.program_id(0)
    i_batch, i_head = i_rest // blocks, tl.program_id(1) * HEADS
    o_token, o_pair = (i_rest - i_batch * blocks) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)  # [ROWS], [PADDED]
    if INT64:
        i_batch, o_token, i_head = i_batch.to(tl.int64), o_token.to(tl.int64), i_head.to(tl.int64)
    m = (o_token < tokens)[:, None] & (o_pair < PAIRS)[None, :]  # [ROWS, PADDED], like all tiles below
    p_x += i_batch * sx[0] + i_head * sx[2]
    p_o += i_batch * so[0] + i_head * so[2]
    o_x = (o_token * sx[1])[:, None] + (o_pair * sx[3])[None, :]
    o_o = (o_token * so[1])[:, None] + (o_pair * so[3])[None, :]
    o_c = (o_token * sc[1])[:, None] + (o_pair * sc[2])[None, :]
    o_s = (o_token * ss[1])[:, None] + (o_pair * ss[2])[None, :]
    # Load the pairs of all heads, then cos and sin.
    lefts, rights = (), ()
    for i in tl.static_range(HEADS):
        lefts += (tl.load(p_x + i * sx[2] + o_x, mask=m),)
        rights += (tl.load(p_x + i * sx[2] + PAIRS * sx[3] + o_x, mask=m),)
    b_cos = converted(tl.load(p_cos + i_batch * sc[0] + o_c, mask=m), WORK)
    b_sin = converted(tl.load(p_sin + i_batch * ss[0] + o_s, mask=m), WORK)
    if INVERSE:
        b_sin = -b_sin
    # Rotate and store, or copy.
    for i in tl.static_range(HEADS):
        p_left, p_right = p_o + i * so[2] + o_o, p_o + i * so[2] + PAIRS * so[3] + o_o
        if i_head + i < rotated:
            b_left, b_right = converted(lefts[i], WORK), converted(rights[i], WORK)
            b_left, b_right = rotated_pair(b_left, b_right, b_cos, b_sin)
            tl.store(p_left, converted(b_left, p_o.dtype.element_ty), mask=m)
            tl.store(p_right, converted(b_right, p_o.dtype.element_ty), mask=m)
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


# --- RoPE after the norm of each head ---------------------------------------------------------------------------------


FEW = 1 << 17  # the most tokens × half a head for which more, smaller programs are faster


class Tiles(NamedTuple):
    """Tile sizes."""

    pairs: int  # elements of a tile: tokens × half a head
    warps: int  # warps per program
    stages: int  # pipeline stages of the loop over heads
    programs: int  # programs that fill the GPU; programs with the same tokens divide the heads


def forward_tiles(pairs: int) -> Tiles:
    """Return the tiles of forward for `pairs` = tokens × half a head."""
    return Tiles(512 if pairs <= FEW else 1024, 2, 1, 1056)


def backward_tiles(pairs: int) -> Tiles:
    """Return the tiles of backward, which also keeps partial gradients of the weights in registers."""
    return Tiles(512, 2, 1, 528 if pairs <= FEW // 2 else 1056) if pairs <= FEW else Tiles(1024, 4, 3, 528)


@triton.jit
def first_head(lowest):
    """Return this program's first head from `lowest` on. Program p of P has the heads p, p + P, …"""
    n = tl.num_programs(1)
    return lowest + (tl.program_id(1) + n - lowest % n) % n


@triton.jit
def pair_offsets(i_batch, i_time, i_head, i_pair, strides):
    """Return the offsets [ROWS, HALF] of the first elements of a head's pairs."""
    return (i_batch * strides[0] + i_time * strides[1] + i_head * strides[2])[:, None] + i_pair[None, :] * strides[3]


@triton.jit
def token_indices(count, tokens, INT64: tl.constexpr, ROWS: tl.constexpr):
    """Return the token, batch and time indices [ROWS] of this program's tokens, and their mask."""
    i_token = program_indices(ROWS, INT64)  # [ROWS]
    return i_token, i_token // tokens, i_token % tokens, i_token < count


@triton.jit
def load_cos_sin(p_cos, p_sin, i_batch, i_time, i_pair, m, sc, ss, WORK: tl.constexpr):
    """Load cos and sin of this program's tokens, each [ROWS, HALF]."""
    o_c = (i_batch * sc[0] + i_time * sc[1])[:, None] + i_pair[None, :] * sc[2]  # [ROWS, HALF]
    o_s = (i_batch * ss[0] + i_time * ss[1])[:, None] + i_pair[None, :] * ss[2]  # [ROWS, HALF]
    b_cos = converted(tl.load(p_cos + o_c, mask=m, other=0), WORK)  # [ROWS, HALF]
    return b_cos, converted(tl.load(p_sin + o_s, mask=m, other=0), WORK)


@triton.jit
def load_weight(p_w, i_pair, half, step, WORK: tl.constexpr):
    """Load both halves of a weight, each [1, HALF]."""
    m = (i_pair < half)[None, :]  # [1, HALF]
    p_first = p_w + (i_pair * step)[None, :]  # [1, HALF]
    first = converted(tl.load(p_first, mask=m, other=0), WORK)  # [1, HALF]
    return first, converted(tl.load(p_first + half * step, mask=m, other=0), WORK)


@triton.jit
def load_pairs(p_x, i_batch, i_time, i_head, i_pair, half, strides, m, WORK: tl.constexpr):
    """Load the first and the second elements of a head's pairs, each [ROWS, HALF]."""
    p_first = p_x + pair_offsets(i_batch, i_time, i_head, i_pair, strides)  # [ROWS, HALF]
    first = converted(tl.load(p_first, mask=m, other=0), WORK)  # [ROWS, HALF]
    return first, converted(tl.load(p_first + half * strides[3], mask=m, other=0), WORK)


@triton.jit
def store_pairs(p_y, first, second, i_batch, i_time, i_head, i_pair, half, strides, m):
    p_first = p_y + pair_offsets(i_batch, i_time, i_head, i_pair, strides)  # [ROWS, HALF]
    tl.store(p_first, converted(first, p_y.dtype.element_ty), mask=m)
    tl.store(p_first + half * strides[3], converted(second, p_y.dtype.element_ty), mask=m)


@triton.jit
def copy_heads(p_y, p_x, lowest, end, i_batch, i_time, i_pair, m, half, so, sx, WORK: tl.constexpr,
               STAGES: tl.constexpr):  # fmt: skip
    """Copy value heads, or their gradients."""
    for i_head in tl.range(first_head(lowest), end, tl.num_programs(1), num_stages=STAGES):
        first, second = load_pairs(p_x, i_batch, i_time, i_head, i_pair, half, sx, m, WORK)
        store_pairs(p_y, first, second, i_batch, i_time, i_head, i_pair, half, so, m)


@triton.jit
def squares_of_pairs(first, second, EXACT: tl.constexpr):
    """Return the sums of the squares of heads [ROWS]; with EXACT their bits do not depend on the tile."""
    if EXACT:
        first, second = first * first, second * second
        top = tl.max(tl.maximum(maths.size_bits(first), maths.size_bits(second)), 1)  # [ROWS]
        units = maths.in_units(first, top[:, None]) + maths.in_units(second, top[:, None])  # [ROWS, HALF]
        return maths.from_units(tl.sum(units, 1), top)
    else:
        return tl.sum(first * first + second * second, 1)


@triton.jit
def norm_rope_kernel(p_y, p_r, p_x, p_query, p_key, p_cos, p_sin, count, tokens, heads, half, eps, so, sx, sc, ss, sw,
                     WORK: tl.constexpr, INT64: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr,
                     HALF: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Normalise and rotate query and key heads, and copy value heads.

    Args:
        heads: (all heads, query heads, query and key heads together).
    """
    i_token, i_batch, i_time, m_token = token_indices(count, tokens, INT64, ROWS)  # [ROWS] each
    i_pair = tl.arange(0, HALF)  # [HALF]
    m = m_token[:, None] & (i_pair < half)[None, :]  # [ROWS, HALF]
    c, s = load_cos_sin(p_cos, p_sin, i_batch, i_time, i_pair, m, sc, ss, WORK)  # [ROWS, HALF] each
    for part in tl.static_range(2):  # query heads, then key heads, each with its own weight
        lowest, end = (0 if part == 0 else heads[1]), (heads[1] if part == 0 else heads[2])
        w_a, w_b = load_weight(p_query if part == 0 else p_key, i_pair, half, sw[part], WORK)  # [1, HALF] each
        width = tl.full((ROWS,), 2, WORK) * half  # [ROWS]
        for i_head in tl.range(first_head(lowest), end, tl.num_programs(1), num_stages=STAGES):
            first, second = load_pairs(p_x, i_batch, i_time, i_head, i_pair, half, sx, m, WORK)  # [ROWS, HALF] each
            r = rsqrt(maths.divide(squares_of_pairs(first, second, EXACT), width), eps)  # [ROWS]
            tl.store(p_r + i_token * heads[2] + i_head, r, mask=m_token)
            a, b = first * r[:, None] * w_a, second * r[:, None] * w_b  # [ROWS, HALF] each
            a, b = rotated_pair(a, b, c, s)
            store_pairs(p_y, a, b, i_batch, i_time, i_head, i_pair, half, so, m)
    copy_heads(p_y, p_x, heads[2], heads[0], i_batch, i_time, i_pair, m, half, so, sx, WORK, STAGES)


@triton.jit
def norm_rope_backward_kernel(p_d, p_dquery, p_dkey, p_g, p_x, p_query, p_key, p_cos, p_sin, p_r, count, tokens, heads,
                              half, so, sg, sx, sc, ss, sw, WORK: tl.constexpr, INT64: tl.constexpr,
                              ROWS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Store dx and, unless weights are frozen, this program's partial gradients of both. `heads` is as in forward."""
    i_token, i_batch, i_time, m_token = token_indices(count, tokens, INT64, ROWS)  # [ROWS] each
    i_pair = tl.arange(0, HALF)  # [HALF]
    m = m_token[:, None] & (i_pair < half)[None, :]  # [ROWS, HALF]
    c, s = load_cos_sin(p_cos, p_sin, i_batch, i_time, i_pair, m, sc, ss, WORK)  # [ROWS, HALF] each
    # Invert the rotation, then the norm, of query and key heads.
    for part in tl.static_range(2):  # query heads, then key heads, each with its own weight
        lowest, end = (0 if part == 0 else heads[1]), (heads[1] if part == 0 else heads[2])
        w_a, w_b = load_weight(p_query if part == 0 else p_key, i_pair, half, sw[part], WORK)  # [1, HALF] each
        acc_a, acc_b = tl.zeros((ROWS, HALF), WORK), tl.zeros((ROWS, HALF), WORK)  # [ROWS, HALF] each
        width = tl.full((ROWS,), 2, WORK) * half  # [ROWS]
        for i_head in tl.range(first_head(lowest), end, tl.num_programs(1), num_stages=STAGES):
            left, right = load_pairs(p_g, i_batch, i_time, i_head, i_pair, half, sg, m, WORK)  # [ROWS, HALF] each
            first, second = load_pairs(p_x, i_batch, i_time, i_head, i_pair, half, sx, m, WORK)  # [ROWS, HALF] each
            r = tl.load(p_r + i_token * heads[2] + i_head, mask=m_token, other=0)[:, None]  # [ROWS, 1]
            first, second = first * r, second * r
            a, b = left * c + right * s, right * c - left * s  # RoPE backward
            if p_dquery is not None:
                acc_a += a * first  # [ROWS, HALF]
                acc_b += b * second
            a, b = a * w_a, b * w_b
            mean_gx = maths.divide(tl.sum(a * first + b * second, 1), width)[:, None]  # [ROWS, 1]
            a, b = (a - first * mean_gx) * r, (b - second * mean_gx) * r  # [ROWS, HALF] each
            store_pairs(p_d, a, b, i_batch, i_time, i_head, i_pair, half, so, m)
        if p_dquery is not None:
            p_dw = p_dquery if part == 0 else p_dkey
            p_dw += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2 * half
            tl.store(p_dw + i_pair, tl.sum(acc_a, 0), mask=i_pair < half)
            tl.store(p_dw + half + i_pair, tl.sum(acc_b, 0), mask=i_pair < half)
    copy_heads(p_d, p_g, heads[2], heads[0], i_batch, i_time, i_pair, m, half, so, sg, WORK, STAGES)


def _plan(
    tiles: Tiles, x: Array, cos: Array, sin: Array, *others: Array
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Return the grid (tiles of tokens, programs that divide the heads), the strides of cos and sin, and constants."""
    batch, tokens, all_heads, size = x.shape
    shape = (batch, tokens, size // 2)
    tables = tuple(broadcast_strides(t.shape, t.strides, shape) for t in (cos, sin))
    half = triton.next_power_of_2(size // 2)
    rows = max(1, tiles.pairs // half)
    blocks = triton.cdiv(batch * tokens, rows)
    constants = {
        "INT64": needs_int64(x.shape, x.strides, *(a.strides for a in others)), "ROWS": rows, "HALF": half,
        "STAGES": tiles.stages, "num_warps": tiles.warps,
    }  # fmt: skip
    return (blocks, max(1, min(all_heads, tiles.programs // max(blocks, 1)))), tables, constants


@cuda_impl("norm_rope")
def norm_rope(
    out: tuple[Array, Array], x: Array, query_weight: Array, key_weight: Array, cos: Array, sin: Array, heads: int,
    key_heads: int, eps: float,
) -> None:  # fmt: skip
    """Store `rope(rms_norm(x))` of query and key heads, and their 1 / rms."""
    y, rstd = out
    batch, tokens, all_heads, size = x.shape
    work = work_type(x.dtype)
    grid, tables, constants = _plan(forward_tiles(batch * tokens * size // 2), x, cos, sin, y)
    if x.size:
        launch(
            norm_rope_kernel, grid, y, rstd, x, query_weight, key_weight, cos, sin, batch * tokens, tokens,
            (all_heads, heads, heads + key_heads), size // 2, float_argument(eps, work), y.strides, x.strides, *tables,
            (query_weight.strides[0], key_weight.strides[0]), WORK=TRITON[work.name],
            EXACT=mode.exact and work is float32, **constants,
        )  # fmt: skip


@cuda_impl("norm_rope_backward")
def norm_rope_backward(
    out: Array | tuple[Array, ...], g: Array, x: Array, query_weight: Array, key_weight: Array, cos: Array, sin: Array,
    rstd: Array, heads: int, key_heads: int, learns: bool = True,
) -> None:  # fmt: skip
    d, *weights = out if isinstance(out, tuple) else (out,)
    batch, tokens, all_heads, size = x.shape
    grid, tables, constants = _plan(backward_tiles(batch * tokens * size // 2), x, cos, sin, d, g)
    parts = grid[0] * grid[1] if x.size else 0
    work = work_type(x.dtype)
    partials = [empty((parts, size), work, x.device) for _ in weights]
    if x.size:
        launch(
            norm_rope_backward_kernel, grid, d, *(partials or (None, None)), g, x, query_weight, key_weight, cos, sin,
            contiguous(rstd), batch * tokens, tokens, (all_heads, heads, heads + key_heads), size // 2, d.strides,
            g.strides, x.strides, *tables, (query_weight.strides[0], key_weight.strides[0]), WORK=TRITON[work.name],
            **constants,
        )  # fmt: skip
    for weight, partial in zip(weights, partials, strict=True):
        sum_partials(weight, partial)
