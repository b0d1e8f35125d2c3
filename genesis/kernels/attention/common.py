"""What the kernels of attention share: tiles of rows, exponents, and which blocks of keys and queries see each other.

A tile comes through TMA (TMA) or, with BOXES unset, through pointers; what lies beyond
its rows and columns is 0 either way.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels import maths
from genesis.kernels.types import converted

__all__ = [
    "LN2",
    "LOG2E",
    "bounds_of",
    "end_key",
    "first_key",
    "key_blocks",
    "numbers_of",
    "operand",
    "pairs_turned_back",
    "place",
    "power_of_2",
    "rows_of",
    "stored",
    "stored_back",
    "unfolded",
    "uniform",
    "wider",
]

LN2 = tl.constexpr(math.log(2))
LOG2E = tl.constexpr(1 / math.log(2))


@triton.jit
def operand(x, TYPE: tl.constexpr):
    """A factor of a product, in the type that products take."""
    return x.to(TYPE)


if is_interpreted():  # where bfloat16 is held as bits: rounded as on a GPU, and multiplied in float32

    def operand(x: Any, TYPE: Any) -> Any:
        """The same, for the interpreter."""
        kind = getattr(TYPE, "value", TYPE)
        return converted(converted(x, kind), tl.float32) if kind.primitive_bitwidth == 16 else converted(x, kind)


@triton.jit
def uniform(x):
    """The same number; the assembler then knows that a warp's threads agree on it, and spares registers."""
    return tl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], tl.int32, False, 1)


if is_interpreted():

    def uniform(x: Any) -> Any:
        """The same, for the interpreter."""
        return x


@triton.jit
def unfolded(x):
    """x, of which the compiler knows nothing else."""
    if x.dtype == tl.float32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, False, 1)
    else:
        return x


if is_interpreted():

    def unfolded(x: Any) -> Any:
        """The same, for the interpreter."""
        return x


@triton.jit
def power_of_2(x):
    """The fast one for float32: right to 2 units, which the rounding of its argument exceeds; 0 below 2^-126."""
    return maths.exp2(x) if x.dtype == tl.float64 else tl.exp2(x)


@triton.jit
def rows_of(x, i_batch, i_head, first, rows, size, sx, BOXES: tl.constexpr, TYPE: tl.constexpr, COUNT: tl.constexpr,
            HEAD: tl.constexpr):  # fmt: skip
    """Rows [first, first + COUNT) of a head as a factor.

    Args:
        x: a descriptor of [batch, head, row, column], or a pointer.
        rows, size: how many rows and columns there are.
    """
    if BOXES:
        b_x = x.load([i_batch, i_head, first, 0]).reshape(COUNT, HEAD)
    else:
        o_row, i_d = tl.arange(0, COUNT), tl.arange(0, HEAD)
        p_x = x + i_batch.to(tl.int64) * sx[0] + i_head.to(tl.int64) * sx[2] + first.to(tl.int64) * sx[1]
        m = (o_row < rows - first)[:, None] & (i_d < size)[None, :]
        b_x = tl.load(p_x + o_row[:, None] * sx[1] + i_d[None, :] * sx[3], mask=m, other=0)
    return operand(b_x, TYPE)


@triton.jit
def _in_order(i):
    return i


@triton.jit
def stored(p_x, b_x, i_batch, i_head, first, rows, size, sx, COUNT: tl.constexpr, HEAD: tl.constexpr,
           order: tl.constexpr = _in_order):  # fmt: skip
    """Store rows [first, first + COUNT) of a head, in the type of `p_x`; `order` gives which one each row is."""
    o_row, i_d = order(tl.arange(0, COUNT)), tl.arange(0, HEAD)
    p_x += i_batch.to(tl.int64) * sx[0] + i_head.to(tl.int64) * sx[2] + first.to(tl.int64) * sx[1]
    m = (o_row < rows - first)[:, None] & (i_d < size)[None, :]
    tl.store(p_x + o_row[:, None] * sx[1] + i_d[None, :], converted(b_x, p_x.dtype.element_ty), mask=m)


@triton.jit
def pairs_turned_back(b_left, b_right, p_cos, p_sin, o, m):
    """The gradient of the pairs behind a rotation as that of those before it; `o` and `m` for the tables."""
    b_c = converted(tl.load(p_cos + o, mask=m, other=0), b_left.dtype)
    b_s = converted(tl.load(p_sin + o, mask=m, other=0), b_left.dtype)
    return b_left * b_c + b_right * b_s, b_right * b_c - b_left * b_s


@triton.jit
def stored_back(p_x, b_x, p_cos, p_sin, i_batch, i_head, first, rows, spread, sx, COUNT: tl.constexpr,
                HEAD: tl.constexpr, order: tl.constexpr = _in_order):  # fmt: skip
    """Store rows [first, first + COUNT) of a head, whose size is HEAD, turned back, in the type of `p_x`.

    Both columns of a pair are in one thread wherever they lie in what a product gives, and halves are stored apart: the
    tile goes to another layout once, as for any store.

    Args:
        spread: elements from one sequence's table to the next one's.
        order: as for `stored`.
    """
    HALF: tl.constexpr = HEAD // 2
    o_row, i_pair = order(tl.arange(0, COUNT)), tl.arange(0, HALF)
    m = (o_row < rows - first)[:, None]
    o = i_batch.to(tl.int64) * spread + first.to(tl.int64) * HALF + (o_row[:, None] * HALF + i_pair[None, :])
    b_left, b_right = tl.split(b_x.reshape(COUNT, 2, HALF).permute(0, 2, 1))
    b_left, b_right = pairs_turned_back(b_left, b_right, p_cos, p_sin, o, m)
    p_x += i_batch.to(tl.int64) * sx[0] + i_head.to(tl.int64) * sx[2] + first.to(tl.int64) * sx[1]
    p_left = p_x + o_row[:, None] * sx[1] + i_pair[None, :]
    tl.store(p_left, converted(b_left, p_x.dtype.element_ty), mask=m)
    tl.store(p_left + HALF, converted(b_right, p_x.dtype.element_ty), mask=m)


@triton.jit
def numbers_of(x, first, BOXES: tl.constexpr, COUNT: tl.constexpr):
    """Numbers [first, first + COUNT) of a vector: a descriptor or a pointer."""
    if BOXES:
        return x.load([first])
    else:
        return tl.load(x + first + tl.arange(0, COUNT))


@triton.jit
def place(blocks, heads, together, divided):
    """(block, head) of this program: all blocks of `together` heads, whose rows stay in the L2 cache, then the next;
    behind the first `divided` heads, all that are left.
    """
    start = tl.minimum(tl.program_id(0) // (blocks * together) * together, divided)
    count = tl.where(start < divided, together, heads - divided)
    i = tl.program_id(0) - start * blocks
    return i // count, start + i % count


# --- Who sees whom ----------------------------------------------------------------------------------------------------


@triton.jit
def first_key(p_starts, i_batch, i_query, m_query, shift, keys, window, ss):
    """The first key that each query may see, at most `keys`."""
    if p_starts is None:
        first = i_query * 0
    else:
        p_first = p_starts + i_batch.to(tl.int64) * ss[0] + i_query.to(tl.int64) * ss[1]
        first = tl.load(p_first, mask=m_query, other=0)
        first = tl.minimum(tl.maximum(first.to(tl.int64), 0), keys).to(tl.int32)
    if window is not None:
        first = tl.minimum(tl.maximum(first, i_query + shift - window + 1), keys)
    return first


@triton.jit
def end_key(i_query, shift, keys, CAUSAL: tl.constexpr):
    """One beyond the last key that each query may see."""
    if CAUSAL:
        return tl.minimum(i_query + shift + 1, keys)
    else:
        return i_query * 0 + keys


@triton.jit
def wider(low, high, other_low, other_high):
    """The bounds of two ranges together."""
    return tl.minimum(low, other_low), tl.maximum(high, other_high)


@triton.jit
def bounds_of(b_first, m_query, keys):
    """The smallest and the largest first visible key of queries, in one reduction."""
    return tl.reduce((tl.where(m_query, b_first, keys), tl.where(m_query, b_first, 0)), 0, wider)


@triton.jit
def key_blocks(b_first, m_query, first, last, shift, keys, CAUSAL: tl.constexpr, LEFT: tl.constexpr,
               BN: tl.constexpr):  # fmt: skip
    """(low, from, to, high): blocks [low, high) hold keys that the queries [first, last) see; in those before `from`,
    some may stand before a query's first visible key, in those from `to` on, some stand behind a query's last one.
    """
    if CAUSAL:
        high = tl.cdiv(tl.minimum(last + shift, keys), BN)
        to = tl.minimum(first + shift + 1, keys) // BN
    else:
        high = tl.cdiv(keys, BN)
        to = keys // BN
    low = 0
    whole = 0
    if LEFT:
        least, most = bounds_of(b_first, m_query, keys)
        low = uniform(least) // BN
        whole = tl.cdiv(uniform(most), BN)
    return low, whole, to, high
