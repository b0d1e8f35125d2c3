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
from genesis.kernels.elementwise import elementwise
from genesis.kernels.fold import number
from genesis.kernels.indices import is_wide
from genesis.kernels.norm import add_shares, inverse_root
from genesis.kernels.step_constants import same
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
def halves(p_x, i_batch, i_time, i_head, i_pair, half, strides, m, WORK: tl.constexpr):
    """First and second elements of pairs; all indices but the last are of rows, or one for all."""
    p_first = p_x + at(i_batch, i_time, i_head, i_pair, strides)
    first = converted(tl.load(p_first, mask=m, other=0), WORK)
    return first, converted(tl.load(p_first + half * strides[3], mask=m, other=0), WORK)


@triton.jit
def halves_into(p_y, first, second, i_batch, i_time, i_head, i_pair, half, strides, m):
    p_first = p_y + at(i_batch, i_time, i_head, i_pair, strides)
    tl.store(p_first, converted(first, p_y.dtype.element_ty), mask=m)
    tl.store(p_first + half * strides[3], converted(second, p_y.dtype.element_ty), mask=m)


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
    first, second = halves(p_x, i_batch, i_time, i_head, i_pair, half, sx, m, WORK)
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
    halves_into(p_y, left, right, i_batch, i_time, i_head, i_pair, half, so, m)


@triton.jit
def backward(p_d, p_query_share, p_key_share, p_g, p_x, p_query, p_key, p_cos, p_sin, p_r, count, tokens, every, heads,
             turned, half, so, sg, sx, sc, ss, dq, dk, WORK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
             HALF: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """dx of one head of queries or keys, ROWS tokens at a time, and this program's share of its weight's gradient; and
    a part of what passes by, the gradients of values.

    The programs of a head take turns.
    """
    i_pair, lane = tl.arange(0, HALF), tl.arange(0, ROWS)
    if WIDE:
        lane = lane.to(tl.int64)
    i_head, i_part = tl.program_id(0) % turned, tl.program_id(0) // turned
    m_pair = (i_pair < half)[None, :]
    if i_head < heads:
        weight_a, weight_b = weight(p_query, i_pair, half, dq, WORK)
        p_share = p_query_share + (i_part * heads + i_head) * 2 * half
    else:
        weight_a, weight_b = weight(p_key, i_pair, half, dk, WORK)
        p_share = p_key_share + (i_part * (turned - heads) + i_head - heads) * 2 * half
    share_a, share_b = tl.zeros((ROWS, HALF), WORK), tl.zeros((ROWS, HALF), WORK)
    width = tl.full((ROWS,), 2, WORK) * half
    for tile in tl.range(i_part, tl.cdiv(count, ROWS), tl.num_programs(0) // turned, num_stages=STAGES):
        i_token = tile * ROWS + lane
        i_batch, i_time, m_token = i_token // tokens, i_token % tokens, i_token < count
        m = m_token[:, None] & m_pair
        left, right = halves(p_g, i_batch, i_time, i_head, i_pair, half, sg, m, WORK)
        first, second = halves(p_x, i_batch, i_time, i_head, i_pair, half, sx, m, WORK)
        r = tl.load(p_r + i_token * turned + i_head, mask=m_token, other=0)[:, None]
        first, second = first * r, second * r
        c, s = angles(p_cos, p_sin, i_batch, i_time, i_pair, m, sc, ss, WORK)
        a, b = left * c + right * s, right * c - left * s
        share_a += a * first
        share_b += b * second
        a, b = a * weight_a, b * weight_b
        along = maths.divide(tl.sum(a * first + b * second, 1), width)[:, None]
        a, b = (a - first * along) * r, (b - second * along) * r
        halves_into(p_d, a, b, i_batch, i_time, i_head, i_pair, half, so, m)
    tl.store(p_share + i_pair, tl.sum(share_a, 0), mask=i_pair < half)
    tl.store(p_share + half + i_pair, tl.sum(share_b, 0), mask=i_pair < half)
    values = every - turned
    for tile in tl.range(tl.program_id(0), tl.cdiv(count * values, ROWS), tl.num_programs(0), num_stages=STAGES):
        i_row = tile * ROWS + lane
        i_token, i_head_of = i_row // values, turned + i_row % values
        i_batch, i_time = i_token // tokens, i_token % tokens
        m = (i_token < count)[:, None] & m_pair
        left, right = halves(p_g, i_batch, i_time, i_head_of, i_pair, half, sg, m, WORK)
        halves_into(p_d, left, right, i_batch, i_time, i_head_of, i_pair, half, so, m)


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
    _, tiles, tables, constants = _cut(x, cos, sin, d, g)
    (batch, tokens, every, size), turned = x.shape, heads + key_heads
    most = (PROGRAMS if tiles > 4 * PROGRAMS else 128) // max(turned, 1)
    each = max(1, min(triton.cdiv(batch * tokens, constants["ROWS"]), most))  # programs of a head
    shares = [empty((each * n, size), work_type(x.dtype), x.device) for n in (heads, key_heads)]
    if turned:
        launch(
            backward, each * turned, d, *shares, g, x, query_weight, key_weight, cos, sin, contiguous(rstd),
            batch * tokens, tokens, every, heads, turned, size // 2, d.strides, g.strides, x.strides, *tables,
            query_weight.strides[0], key_weight.strides[0], STAGES=2, **constants,
        )  # fmt: skip
    else:
        elementwise(same, d, g)
    for weight, share in zip(weights, shares, strict=True):
        add_shares(weight, share)
