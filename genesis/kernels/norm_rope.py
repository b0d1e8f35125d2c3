"""Twins of norm and rotation by head: a tile of (token, head) rows is read, normalised, rotated and written once.

Backward keeps each program's share of the two weights' gradients in registers, as the norms do; see norm.py.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.launch import launch
from genesis.backend.cuda.twins import twin
from genesis.kernels import maths
from genesis.kernels.fold import number
from genesis.kernels.indices import is_wide
from genesis.kernels.norm import add_shares, inverse_root
from genesis.kernels.types import TRITON, converted, work_type
from genesis.ops.shape import contiguous
from genesis.shapes import broadcast_strides

__all__: list[str] = []

PAIRS = 1024  # a program's tile
PROGRAMS = 396  # that share the rows in backward: 3 a processor


@triton.jit
def located(i_row, tokens, every):
    """Sequence, position, head and token of rows, which are (sequence, position, head) in this order."""
    i_token, i_head = i_row // every, i_row % every
    return i_token // tokens, i_token % tokens, i_head, i_token


@triton.jit
def at(i_batch, i_time, i_head, i_pair, strides):
    """Offsets of the first elements of pairs."""
    return (i_batch * strides[0] + i_time * strides[1] + i_head * strides[2])[:, None] + i_pair[None, :] * strides[3]


@triton.jit
def angles(p_cos, p_sin, i_batch, i_time, i_pair, m, sc, ss, WORK: tl.constexpr):
    o_c = (i_batch * sc[0] + i_time * sc[1])[:, None] + i_pair[None, :] * sc[2]
    o_s = (i_batch * ss[0] + i_time * ss[1])[:, None] + i_pair[None, :] * ss[2]
    return converted(tl.load(p_cos + o_c, mask=m, other=0), WORK), converted(
        tl.load(p_sin + o_s, mask=m, other=0), WORK
    )


@triton.jit
def weight(p_w, i_pair, half, step, WORK: tl.constexpr):
    """Both halves of a weight, `[1, HALF]`."""
    m = (i_pair < half)[None, :]
    p_first = p_w + (i_pair * step)[None, :]
    first = converted(tl.load(p_first, mask=m, other=0), WORK)
    return first, converted(tl.load(p_first + half * step, mask=m, other=0), WORK)


@triton.jit
def forward(p_y, p_r, p_x, p_query, p_key, p_cos, p_sin, rows, tokens, every, heads, turned, half, eps, so, sx, sc, ss,
            dq, dk, WORK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    i_program = tl.program_id(0)
    if WIDE:
        i_program = i_program.to(tl.int64)
    i_row, i_pair = i_program * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF)
    i_batch, i_time, i_head, i_token = located(i_row, tokens, every)
    m = (i_row < rows)[:, None] & (i_pair < half)[None, :]
    m_turned = (i_row < rows) & (i_head < turned)
    p_first = p_x + at(i_batch, i_time, i_head, i_pair, sx)
    first = converted(tl.load(p_first, mask=m, other=0), WORK)
    second = converted(tl.load(p_first + half * sx[3], mask=m, other=0), WORK)
    c, s = angles(p_cos, p_sin, i_batch, i_time, i_pair, m, sc, ss, WORK)
    count = tl.full((ROWS,), 2, WORK) * half
    r = inverse_root(maths.divide(tl.sum(first * first + second * second, 1), count), eps)
    tl.store(p_r + i_token * turned + i_head, r, mask=m_turned)
    query_a, query_b = weight(p_query, i_pair, half, dq, WORK)
    key_a, key_b = weight(p_key, i_pair, half, dk, WORK)
    is_query, turn = (i_head < heads)[:, None], m_turned[:, None]
    a = first * r[:, None] * tl.where(is_query, query_a, key_a)
    b = second * r[:, None] * tl.where(is_query, query_b, key_b)
    left, right = tl.where(turn, a * c - b * s, first), tl.where(turn, b * c + a * s, second)
    p_left = p_y + at(i_batch, i_time, i_head, i_pair, so)
    tl.store(p_left, converted(left, p_y.dtype.element_ty), mask=m)
    tl.store(p_left + half * so[3], converted(right, p_y.dtype.element_ty), mask=m)


@triton.jit
def backward(p_d, p_query_share, p_key_share, p_g, p_x, p_query, p_key, p_cos, p_sin, p_r, rows, tokens, every, heads,
             turned, half, so, sg, sx, sc, ss, dq, dk, WORK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
             HALF: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """dx of tiles program, program + P, …, and this program's shares of both weights' gradients."""
    i_pair, lane = tl.arange(0, HALF), tl.arange(0, ROWS)
    if WIDE:
        lane = lane.to(tl.int64)
    query_a, query_b = weight(p_query, i_pair, half, dq, WORK)
    key_a, key_b = weight(p_key, i_pair, half, dk, WORK)
    to_query_a, to_query_b = tl.zeros((ROWS, HALF), WORK), tl.zeros((ROWS, HALF), WORK)
    to_key_a, to_key_b = tl.zeros((ROWS, HALF), WORK), tl.zeros((ROWS, HALF), WORK)
    count = tl.full((ROWS,), 2, WORK) * half
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        i_row = tile * ROWS + lane
        i_batch, i_time, i_head, i_token = located(i_row, tokens, every)
        m = (i_row < rows)[:, None] & (i_pair < half)[None, :]
        m_turned = (i_row < rows) & (i_head < turned)
        turn, is_query = m_turned[:, None], (i_head < heads)[:, None]
        p_left = p_g + at(i_batch, i_time, i_head, i_pair, sg)
        left = converted(tl.load(p_left, mask=m, other=0), WORK)
        right = converted(tl.load(p_left + half * sg[3], mask=m, other=0), WORK)
        p_first = p_x + at(i_batch, i_time, i_head, i_pair, sx)
        r = tl.load(p_r + i_token * turned + i_head, mask=m_turned, other=0)[:, None]
        first = converted(tl.load(p_first, mask=m & turn, other=0), WORK) * r
        second = converted(tl.load(p_first + half * sx[3], mask=m & turn, other=0), WORK) * r
        c, s = angles(p_cos, p_sin, i_batch, i_time, i_pair, m, sc, ss, WORK)
        a, b = left * c + right * s, right * c - left * s
        is_key = turn & (i_head >= heads)[:, None]
        to_query_a += tl.where(is_query, a * first, 0)
        to_query_b += tl.where(is_query, b * second, 0)
        to_key_a += tl.where(is_key, a * first, 0)
        to_key_b += tl.where(is_key, b * second, 0)
        a *= tl.where(is_query, query_a, key_a)
        b *= tl.where(is_query, query_b, key_b)
        along = maths.divide(tl.sum(a * first + b * second, 1), count)[:, None]
        a, b = (a - first * along) * r, (b - second * along) * r
        p_a = p_d + at(i_batch, i_time, i_head, i_pair, so)
        tl.store(p_a, converted(tl.where(turn, a, left), p_d.dtype.element_ty), mask=m)
        tl.store(p_a + half * so[3], converted(tl.where(turn, b, right), p_d.dtype.element_ty), mask=m)
    o = tl.program_id(0) * 2 * half + i_pair
    tl.store(p_query_share + o, tl.sum(to_query_a, 0), mask=i_pair < half)
    tl.store(p_query_share + o + half, tl.sum(to_query_b, 0), mask=i_pair < half)
    tl.store(p_key_share + o, tl.sum(to_key_a, 0), mask=i_pair < half)
    tl.store(p_key_share + o + half, tl.sum(to_key_b, 0), mask=i_pair < half)


def _cut(x: Array, cos: Array, sin: Array, *others: Array) -> tuple[int, int, tuple[Any, ...], dict[str, Any]]:
    """Rows; tiles; strides of cos and sin; constants of the kernels."""
    batch, tokens, every, size = x.shape
    half = size // 2
    spread = (batch, tokens, half)
    tables = tuple(broadcast_strides(t.shape, t.strides, spread) for t in (cos, sin))
    padded, rows = triton.next_power_of_2(half), batch * tokens * every
    each = max(1, PAIRS // padded)
    constants = {
        "WORK": TRITON[work_type(x.dtype).name], "ROWS": each, "HALF": padded, "num_warps": 4,
        "WIDE": is_wide(x.shape, x.strides, *(a.strides for a in others)),
    }  # fmt: skip
    return rows, triton.cdiv(rows, each), tables, constants


@twin("norm_rope")
def norm_rope(
    out: tuple[Array, Array], x: Array, query_weight: Array, key_weight: Array, cos: Array, sin: Array, heads: int,
    key_heads: int, eps: float,
) -> None:  # fmt: skip
    """`rope(rms_norm(x))` of queries and keys, and r."""
    y, rstd = out
    rows, tiles, tables, constants = _cut(x, cos, sin, y)
    if x.size:
        launch(
            forward, tiles, y, rstd, x, query_weight, key_weight, cos, sin, rows, x.shape[1], x.shape[2], heads,
            heads + key_heads, x.shape[3] // 2, number(eps, work_type(x.dtype)), y.strides, x.strides, *tables,
            query_weight.strides[0], key_weight.strides[0], **constants,
        )  # fmt: skip


@twin("norm_rope_backward")
def norm_rope_backward(
    out: tuple[Array, Array, Array], g: Array, x: Array, query_weight: Array, key_weight: Array, cos: Array, sin: Array,
    rstd: Array, heads: int, key_heads: int,
) -> None:  # fmt: skip
    """dx, and the gradients of both weights."""
    d, *weights = out
    rows, tiles, tables, constants = _cut(x, cos, sin, d, g)
    programs = max(1, min(tiles, PROGRAMS if tiles > 4 * PROGRAMS else 128))
    shares = [empty((programs, x.shape[3]), work_type(x.dtype), x.device) for _ in weights]
    launch(
        backward, programs, d, *shares, g, x, query_weight, key_weight, cos, sin, contiguous(rstd), rows, x.shape[1],
        x.shape[2], heads, heads + key_heads, x.shape[3] // 2, d.strides, g.strides, x.strides, *tables,
        query_weight.strides[0], key_weight.strides[0], STAGES=2, **constants,
    )  # fmt: skip
    for weight, share in zip(weights, shares, strict=True):
        add_shares(weight, share)
