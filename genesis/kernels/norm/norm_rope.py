"""CUDA implementations of norm and rotation by head: what is read is normalised, rotated and written once.

A program has a few tokens, whose angles it keeps, and goes from head to head. Backward keeps the program's share of the
two weights' gradients in registers, as the norms do; see norm.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda.dispatch import cuda_impl
from genesis.backend.cuda.launch import launch
from genesis.kernels import maths
from genesis.kernels.norm.norm import add_shares, inverse_root
from genesis.kernels.reduce.reduction import number
from genesis.kernels.strides import is_wide
from genesis.kernels.types import TRITON, converted, work_type
from genesis.ops.shape import contiguous
from genesis.shapes import broadcast_strides

__all__: list[str] = []

FEW = 1 << 17  # pairs of a head, of all tokens, up to which more and smaller programs are faster


class Cut(NamedTuple):
    """How the work is cut.

    Attributes:
        pairs: of a tile, tokens × half a head.
        warps: of a program.
        stages: heads that are on their way at once.
        programs: how many are wanted, where there are heads enough to share.
    """

    pairs: int
    warps: int
    stages: int
    programs: int


def forward_cut(pairs: int) -> Cut:
    """For `pairs` of a head, of all tokens."""
    return Cut(512 if pairs <= FEW else 1024, 2, 1, 1056)


def backward_cut(pairs: int) -> Cut:
    """The same for backward, whose programs also keep angles and the sums for the weights."""
    return Cut(512, 2, 1, 528 if pairs <= FEW // 2 else 1056) if pairs <= FEW else Cut(1024, 4, 3, 528)


@triton.jit
def first_head(lowest):
    """The first of this program's heads from `lowest` on: through all heads, programs of the same tokens take turns."""
    n = tl.num_programs(1)
    return lowest + (tl.program_id(1) + n - lowest % n) % n


@triton.jit
def at(i_batch, i_time, i_head, i_pair, strides):
    """Offsets of the first elements of pairs of a head."""
    return (i_batch * strides[0] + i_time * strides[1] + i_head * strides[2])[:, None] + i_pair[None, :] * strides[3]


@triton.jit
def place(count, tokens, WIDE: tl.constexpr, ROWS: tl.constexpr):
    """Token, sequence and position of this program's rows, and which of them are there."""
    i_token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if WIDE:
        i_token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return i_token, i_token // tokens, i_token % tokens, i_token < count


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
def turned_heads(p_y, p_r, p_x, p_w, lowest, end, c, s, i_token, i_batch, i_time, i_pair, m_token, m, turned, half, eps,
                 so, sx, step, WORK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Norm and rotation of this program's heads from `lowest` on, which share a weight."""
    w_a, w_b = weight(p_w, i_pair, half, step, WORK)
    width = tl.full((ROWS,), 2, WORK) * half
    for i_head in tl.range(first_head(lowest), end, tl.num_programs(1), num_stages=STAGES):
        first, second = halves(p_x, i_batch, i_time, i_head, i_pair, half, sx, m, WORK)
        r = inverse_root(maths.divide(tl.sum(first * first + second * second, 1), width), eps)
        tl.store(p_r + i_token * turned + i_head, r, mask=m_token)
        a, b = first * r[:, None] * w_a, second * r[:, None] * w_b
        halves_into(p_y, a * c - b * s, b * c + a * s, i_batch, i_time, i_head, i_pair, half, so, m)


@triton.jit
def passed_heads(p_y, p_x, lowest, end, i_batch, i_time, i_pair, m, half, so, sx, WORK: tl.constexpr,
                 STAGES: tl.constexpr):  # fmt: skip
    """What is only passed on: values, and their gradients."""
    for i_head in tl.range(first_head(lowest), end, tl.num_programs(1), num_stages=STAGES):
        first, second = halves(p_x, i_batch, i_time, i_head, i_pair, half, sx, m, WORK)
        halves_into(p_y, first, second, i_batch, i_time, i_head, i_pair, half, so, m)


@triton.jit
def forward(p_y, p_r, p_x, p_query, p_key, p_cos, p_sin, count, tokens, every, heads, turned, half, eps, so, sx, sc, ss,
            dq, dk, WORK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
            STAGES: tl.constexpr):  # fmt: skip
    i_token, i_batch, i_time, m_token = place(count, tokens, WIDE, ROWS)
    i_pair = tl.arange(0, HALF)
    m = m_token[:, None] & (i_pair < half)[None, :]
    c, s = angles(p_cos, p_sin, i_batch, i_time, i_pair, m, sc, ss, WORK)
    turned_heads(p_y, p_r, p_x, p_query, 0, heads, c, s, i_token, i_batch, i_time, i_pair, m_token, m, turned, half,
                 eps, so, sx, dq, WORK, ROWS, STAGES)  # fmt: skip
    turned_heads(p_y, p_r, p_x, p_key, heads, turned, c, s, i_token, i_batch, i_time, i_pair, m_token, m, turned, half,
                 eps, so, sx, dk, WORK, ROWS, STAGES)  # fmt: skip
    passed_heads(p_y, p_x, turned, every, i_batch, i_time, i_pair, m, half, so, sx, WORK, STAGES)


@triton.jit
def turned_back(p_d, p_share, p_g, p_x, p_w, p_r, lowest, end, c, s, i_token, i_batch, i_time, i_pair, m_token, m,
                turned, half, so, sg, sx, step, WORK: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr,
                STAGES: tl.constexpr):  # fmt: skip
    """dx of this program's heads from `lowest` on, which share a weight, and its share of that weight's gradient."""
    w_a, w_b = weight(p_w, i_pair, half, step, WORK)
    share_a, share_b = tl.zeros((ROWS, HALF), WORK), tl.zeros((ROWS, HALF), WORK)
    width = tl.full((ROWS,), 2, WORK) * half
    for i_head in tl.range(first_head(lowest), end, tl.num_programs(1), num_stages=STAGES):
        left, right = halves(p_g, i_batch, i_time, i_head, i_pair, half, sg, m, WORK)
        first, second = halves(p_x, i_batch, i_time, i_head, i_pair, half, sx, m, WORK)
        r = tl.load(p_r + i_token * turned + i_head, mask=m_token, other=0)[:, None]
        first, second = first * r, second * r
        a, b = left * c + right * s, right * c - left * s
        share_a += a * first
        share_b += b * second
        a, b = a * w_a, b * w_b
        along = maths.divide(tl.sum(a * first + b * second, 1), width)[:, None]
        a, b = (a - first * along) * r, (b - second * along) * r
        halves_into(p_d, a, b, i_batch, i_time, i_head, i_pair, half, so, m)
    p_share += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * 2 * half
    tl.store(p_share + i_pair, tl.sum(share_a, 0), mask=i_pair < half)
    tl.store(p_share + half + i_pair, tl.sum(share_b, 0), mask=i_pair < half)


@triton.jit
def backward(p_d, p_query_share, p_key_share, p_g, p_x, p_query, p_key, p_cos, p_sin, p_r, count, tokens, every, heads,
             turned, half, so, sg, sx, sc, ss, dq, dk, WORK: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
             HALF: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    i_token, i_batch, i_time, m_token = place(count, tokens, WIDE, ROWS)
    i_pair = tl.arange(0, HALF)
    m = m_token[:, None] & (i_pair < half)[None, :]
    c, s = angles(p_cos, p_sin, i_batch, i_time, i_pair, m, sc, ss, WORK)
    turned_back(p_d, p_query_share, p_g, p_x, p_query, p_r, 0, heads, c, s, i_token, i_batch, i_time, i_pair, m_token,
                m, turned, half, so, sg, sx, dq, WORK, ROWS, HALF, STAGES)  # fmt: skip
    turned_back(p_d, p_key_share, p_g, p_x, p_key, p_r, heads, turned, c, s, i_token, i_batch, i_time, i_pair, m_token,
                m, turned, half, so, sg, sx, dk, WORK, ROWS, HALF, STAGES)  # fmt: skip
    passed_heads(p_d, p_g, turned, every, i_batch, i_time, i_pair, m, half, so, sg, WORK, STAGES)


def _laid_out(
    cut: Cut, x: Array, cos: Array, sin: Array, *others: Array
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Programs, by tokens and by heads; strides of cos and sin; constants of the kernels."""
    batch, tokens, every, size = x.shape
    spread = (batch, tokens, size // 2)
    tables = tuple(broadcast_strides(t.shape, t.strides, spread) for t in (cos, sin))
    half = triton.next_power_of_2(size // 2)
    rows = max(1, cut.pairs // half)
    tiles = triton.cdiv(batch * tokens, rows)
    constants = {
        "WORK": TRITON[work_type(x.dtype).name], "ROWS": rows, "HALF": half, "STAGES": cut.stages,
        "WIDE": is_wide(x.shape, x.strides, *(a.strides for a in others)), "num_warps": cut.warps,
    }  # fmt: skip
    return (tiles, max(1, min(every, cut.programs // max(tiles, 1)))), tables, constants


@cuda_impl("norm_rope")
def norm_rope(
    out: tuple[Array, Array], x: Array, query_weight: Array, key_weight: Array, cos: Array, sin: Array, heads: int,
    key_heads: int, eps: float,
) -> None:  # fmt: skip
    """`rope(rms_norm(x))` of queries and keys, and r."""
    y, rstd = out
    (batch, tokens, every, size), turned = x.shape, heads + key_heads
    programs, tables, constants = _laid_out(forward_cut(batch * tokens * size // 2), x, cos, sin, y)
    if x.size:
        launch(
            forward, programs, y, rstd, x, query_weight, key_weight, cos, sin, batch * tokens, tokens, every, heads,
            turned, size // 2, number(eps, work_type(x.dtype)), y.strides, x.strides, *tables, query_weight.strides[0],
            key_weight.strides[0], **constants,
        )  # fmt: skip


@cuda_impl("norm_rope_backward")
def norm_rope_backward(
    out: tuple[Array, Array, Array], g: Array, x: Array, query_weight: Array, key_weight: Array, cos: Array, sin: Array,
    rstd: Array, heads: int, key_heads: int,
) -> None:  # fmt: skip
    """dx, and the gradients of both weights."""
    d, *weights = out
    (batch, tokens, every, size), turned = x.shape, heads + key_heads
    programs, tables, constants = _laid_out(backward_cut(batch * tokens * size // 2), x, cos, sin, d, g)
    parts = programs[0] * programs[1] if x.size else 0
    shares = [empty((parts, size), work_type(x.dtype), x.device) for _ in weights]
    if x.size:
        launch(
            backward, programs, d, *shares, g, x, query_weight, key_weight, cos, sin, contiguous(rstd), batch * tokens,
            tokens, every, heads, turned, size // 2, d.strides, g.strides, x.strides, *tables, query_weight.strides[0],
            key_weight.strides[0], **constants,
        )  # fmt: skip
    for weight, share in zip(weights, shares, strict=True):
        add_shares(weight, share)
