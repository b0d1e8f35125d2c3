"""Twins of attention: forward with a running softmax, backward as two kernels; no matrix of scores is in memory.

Forward and the gradient of the queries go query block by query block over the keys that the block may see; gradients
of keys and values go key block by key block over the queries that may see it. So each result has one writer, nothing
is added atomically, and the same inputs give the same bits. Blocks that nobody sees are skipped; those that all see
whole go through a loop without masks, the others (the diagonal, document borders, the window's end) through one with.

Query heads of a group share a key head. Its gradients are sums over the group: one program adds them, or, where
programs would be too few to fill the GPU, several add some heads each and `add_splits` their parts, in order.

Scores and weights are in units of log2: e^x = 2^(x·log2 e), and the factor joins the scale. Products take tiles of the
inputs' type (weights and their gradients are rounded to it, as tensor cores need) and accumulate in float32; float32
inputs are multiplied exactly, or in tf32 where that is allowed; float64 stays float64.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from genesis.array import Array, empty
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.driver import is_interpreted
from genesis.backend.cuda.launch import clear, launch
from genesis.backend.cuda.precision import allow_tf32
from genesis.backend.cuda.signature import Double
from genesis.backend.cuda.twins import twin
from genesis.dtypes import DType, float32, float64, int32
from genesis.kernels import maths
from genesis.kernels.elementwise import elementwise
from genesis.kernels.types import TRITON, converted, work_type

__all__ = ["Tile", "backward_into", "forward_into", "tiles_of"]

_LN2 = tl.constexpr(math.log(2))
_LOG2E = tl.constexpr(1 / math.log(2))
PROGRAMS = 1024  # of the kernel for keys' gradients: that many even out triangles of work over the processors


# --- Tile sizes -------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Queries and keys of a block, warps, and stages of the pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


# By kind of type and padded head size: forward, queries' gradient, keys' gradient. None of them spills on Triton 3.6.
TILES: dict[str, dict[int, tuple[Tile, Tile, Tile]]] = {
    "half": {
        64: (Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
        128: (Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
        256: (Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 32, 8, 2)),
    },
    "float32": {
        64: (Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 1)),
        128: (Tile(32, 32, 8, 1), Tile(32, 32, 8, 2), Tile(16, 32, 8, 1)),
        256: (Tile(16, 32, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
    "float64": {
        64: (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
        128: (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
        256: (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    },
}


def padded(size: int) -> int:
    """The head size that tiles have: products need 16."""
    return max(16, triton.next_power_of_2(size))


def tiles_of(dtype: DType, size: int, tokens: int, keys: int, shared: int) -> tuple[Tile, Tile, Tile]:
    """The tiles of the three kernels for a head size and sequence lengths.

    Args:
        shared: bytes of shared memory that a program may use.
    """
    table = TILES["half" if dtype.itemsize == 2 else dtype.name]
    row = padded(size) * dtype.itemsize
    forward, queries, by_key = table[next((h for h in table if h >= padded(size)), 256)]
    return (
        _fitting(forward, tokens, keys, row, shared, False),
        _fitting(queries, tokens, keys, row, shared, False),
        _fitting(by_key, tokens, keys, row, shared, True),
    )


def _fitting(tile: Tile, tokens: int, keys: int, row: int, shared: int, stays: bool) -> Tile:
    """The tile, no larger than the sequences, with fewer stages or keys where shared memory of rows of bytes is short.

    Two tiles stay and two go through the pipeline: `stays` says that keys do, otherwise queries.
    """
    m, n, warps, stages = tile
    m = min(m, max(16, triton.next_power_of_2(tokens)))
    n = min(n, max(16, triton.next_power_of_2(keys)))
    while 2 * row * ((n + stages * m) if stays else (m + stages * n)) > shared and (stages, m, n) != (1, 16, 16):
        if stages > 1:
            stages -= 1
        elif n > 16:
            n //= 2
        else:
            m //= 2
    return Tile(m, n, warps, stages)


# --- Parts of all kernels ---------------------------------------------------------------------------------------------


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
def power_of_2(x):
    """The fast one for float32: right to 2 units, which the rounding of its argument exceeds."""
    return maths.exp2(x) if x.dtype == tl.float64 else tl.exp2(x)


@triton.jit
def rows_of(p_x, o_row, i_column, step, step_column, m_row, columns, ROWS_END: tl.constexpr, EVEN: tl.constexpr,
            TYPE: tl.constexpr):  # fmt: skip
    """A tile of rows as a factor; what lies beyond its rows (ROWS_END) or columns (unless EVEN) is 0."""
    p = p_x + o_row[:, None] * step + i_column[None, :] * step_column
    if ROWS_END:
        if EVEN:
            x = tl.load(p, mask=m_row[:, None], other=0)
        else:
            x = tl.load(p, mask=m_row[:, None] & (i_column < columns)[None, :], other=0)
    else:
        if EVEN:
            x = tl.load(p)
        else:
            x = tl.load(p, mask=(i_column < columns)[None, :], other=0)
    return operand(x, TYPE)


@triton.jit
def first_key(p_starts, i_batch, i_query, m_query, shift, keys, window, ss):
    """The first key that each query may see, at most `keys`."""
    if p_starts is None:
        first = i_query * 0
    else:
        first = tl.load(p_starts + i_batch * ss[0] + i_query.to(tl.int64) * ss[1], mask=m_query, other=0)
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
def key_blocks(b_first, m_query, first, last, shift, keys, CAUSAL: tl.constexpr, LEFT: tl.constexpr,
               BN: tl.constexpr):  # fmt: skip
    """(low, from, to, high): blocks [low, high) hold keys that the queries [first, last) see, [from, to) such only."""
    if CAUSAL:
        high = tl.cdiv(tl.minimum(last + shift, keys), BN)
        to = tl.minimum(first + shift + 1, keys) // BN
    else:
        high = tl.cdiv(keys, BN)
        to = keys // BN
    low = 0
    whole = 0
    if LEFT:
        low = tl.min(tl.where(m_query, b_first, keys), 0) // BN
        whole = tl.cdiv(tl.max(tl.where(m_query, b_first, 0), 0), BN)
        high = tl.maximum(high, low)
        whole = tl.minimum(tl.maximum(whole, low), high)
    to = tl.maximum(tl.minimum(to, high), whole)
    return low, whole, to, high


# --- Forward ----------------------------------------------------------------------------------------------------------


@triton.jit
def attend(b_acc, b_sum, b_top, b_q, p_k, p_v, i_block, b_first, b_end, keys, size, factor, sign, sk, sv,
           MASKED: tl.constexpr, LEFT: tl.constexpr, SIGNED: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr,
           PRECISION: tl.constexpr, BN: tl.constexpr, HEAD: tl.constexpr):  # fmt: skip
    """One block of keys into the running softmax: weighted sum, sum of weights and maximum."""
    o_key, i_d = tl.arange(0, BN), tl.arange(0, HEAD)
    i_key = i_block * BN + o_key
    start = tl.zeros((), tl.int64) + i_block * BN
    b_k = rows_of(p_k + start * sk[1], o_key, i_d, sk[1], sk[3], i_key < keys, size, MASKED, EVEN, TYPE)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION, out_dtype=b_acc.dtype)
    if SIGNED:
        b_s = b_s * sign
    if MASKED:
        seen = i_key[None, :] < b_end[:, None]
        if LEFT:
            seen = seen & (i_key[None, :] >= b_first[:, None])
        b_s = tl.where(seen, b_s, -float("inf"))
    b_new = tl.maximum(b_top, tl.max(b_s, 1) * factor)
    # a query that has seen nothing yet: its weights are 0, not NaN
    b_base = tl.where(b_new == -float("inf"), 0.0, b_new) if MASKED else b_new
    b_p = power_of_2(b_s * factor - b_base[:, None])
    b_less = power_of_2(b_top - b_base)
    b_v = rows_of(p_v + start * sv[1], o_key, i_d, sv[1], sv[3], i_key < keys, size, MASKED, EVEN, TYPE)
    b_acc = b_acc * b_less[:, None]
    b_acc += tl.dot(operand(b_p, TYPE), b_v, input_precision=PRECISION, out_dtype=b_acc.dtype)
    return b_acc, b_sum * b_less + tl.sum(b_p, 1), b_new


@triton.jit(do_not_specialize=["tokens", "keys", "batches", "heads", "group", "window"])
def forward_kernel(p_o, p_lse, p_q, p_k, p_v, p_starts, tokens, keys, batches, heads, group, size, window, factor,
                   sign, so, sq, sk, sv, ss, CAUSAL: tl.constexpr, SIGNED: tl.constexpr, EVEN: tl.constexpr,
                   TYPE: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   HEAD: tl.constexpr):  # fmt: skip
    LEFT: tl.constexpr = (p_starts is not None) or (window is not None)
    # the last queries, which see the most keys, go first
    i_block = tl.cdiv(tokens, BM) - 1 - tl.program_id(0) // (batches * heads)
    i_batch = (tl.program_id(0) % (batches * heads) // heads).to(tl.int64)
    i_head = (tl.program_id(0) % heads).to(tl.int64)
    first, shift = i_block * BM, keys - tokens
    o_row, i_d = tl.arange(0, BM), tl.arange(0, HEAD)
    i_query = first + o_row
    m_query = i_query < tokens
    p_k += i_batch * sk[0] + i_head // group * sk[2]
    p_v += i_batch * sv[0] + i_head // group * sv[2]
    p_q += i_batch * sq[0] + i_head * sq[2] + first.to(tl.int64) * sq[1]
    b_q = rows_of(p_q, o_row, i_d, sq[1], sq[3], m_query, size, True, EVEN, TYPE)
    b_first = first_key(p_starts, i_batch, i_query, m_query, shift, keys, window, ss)
    b_end = end_key(i_query, shift, keys, CAUSAL)
    low, whole, to, high = key_blocks(
        b_first, m_query, first, tl.minimum(first + BM, tokens), shift, keys, CAUSAL, LEFT, BN
    )
    b_acc = tl.zeros((BM, HEAD), WORK)
    b_sum = tl.zeros((BM,), WORK)
    b_top = tl.full((BM,), -float("inf"), WORK)
    for i in range(whole, to):
        b_acc, b_sum, b_top = attend(
            b_acc, b_sum, b_top, b_q, p_k, p_v, i, b_first, b_end, keys, size, factor, sign, sk, sv,
            False, LEFT, SIGNED, EVEN, TYPE, PRECISION, BN, HEAD,
        )  # fmt: skip
    left = whole - low
    for n in range(0, left + high - to):
        i = tl.where(n < left, low + n, to + n - left) if LEFT else to + n
        b_acc, b_sum, b_top = attend(
            b_acc, b_sum, b_top, b_q, p_k, p_v, i, b_first, b_end, keys, size, factor, sign, sk, sv,
            True, LEFT, SIGNED, EVEN, TYPE, PRECISION, BN, HEAD,
        )  # fmt: skip
    empty = b_sum == 0  # a query that sees no key: 0, and -inf for the logarithm
    b_sum = tl.where(empty, 1.0, b_sum)
    b_o = b_acc / b_sum[:, None]
    p_o += i_batch * so[0] + i_head * so[2] + first.to(tl.int64) * so[1]
    m_o = m_query[:, None] & (i_d < size)[None, :]
    tl.store(p_o + o_row[:, None] * so[1] + i_d[None, :], converted(b_o, p_o.dtype.element_ty), mask=m_o)
    b_lse = tl.where(empty, -float("inf"), (b_top + tl.log2(b_sum)) * _LN2)
    tl.store(p_lse + (i_batch * heads + i_head) * tokens + i_query, b_lse, mask=m_query)


# --- Backward: queries ------------------------------------------------------------------------------------------------


@triton.jit
def exponent_of(p_lse, o_lse, m_query):
    """log2 of the softmax sums; +inf for queries that saw nothing or do not exist, whose weights are 0."""
    b_lse = tl.load(p_lse + o_lse, mask=m_query, other=float("inf"))
    return tl.where(b_lse == -float("inf"), float("inf"), b_lse) * _LOG2E


@triton.jit
def query_step(b_dq, b_q, b_g, b_lse, b_delta, p_k, p_v, i_block, b_first, b_end, keys, size, factor, sign, sk, sv,
               MASKED: tl.constexpr, LEFT: tl.constexpr, SIGNED: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr,
               PRECISION: tl.constexpr, BN: tl.constexpr, HEAD: tl.constexpr):  # fmt: skip
    """Add what one block of keys gives to the gradient of the queries."""
    o_key, i_d = tl.arange(0, BN), tl.arange(0, HEAD)
    i_key = i_block * BN + o_key
    start = tl.zeros((), tl.int64) + i_block * BN
    b_k = rows_of(p_k + start * sk[1], o_key, i_d, sk[1], sk[3], i_key < keys, size, MASKED, EVEN, TYPE)
    b_v = rows_of(p_v + start * sv[1], o_key, i_d, sv[1], sv[3], i_key < keys, size, MASKED, EVEN, TYPE)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION, out_dtype=b_dq.dtype)
    if SIGNED:
        b_s = b_s * sign
    b_p = power_of_2(b_s * factor - b_lse[:, None])
    if MASKED:
        seen = i_key[None, :] < b_end[:, None]
        if LEFT:
            seen = seen & (i_key[None, :] >= b_first[:, None])
        b_p = tl.where(seen, b_p, 0.0)
    b_dp = tl.dot(b_g, tl.trans(b_v), input_precision=PRECISION, out_dtype=b_dq.dtype)
    b_ds = operand(b_p * (b_dp - b_delta[:, None]), TYPE)
    return b_dq + tl.dot(b_ds, b_k, input_precision=PRECISION, out_dtype=b_dq.dtype)


@triton.jit(do_not_specialize=["tokens", "keys", "batches", "heads", "group", "window"])
def query_kernel(p_dq, p_delta, p_g, p_q, p_k, p_v, p_o, p_lse, p_starts, tokens, keys, batches, heads, group, size,
                 window, factor, sign, scale, sd, sg, sq, sk, sv, so, sl, ss, CAUSAL: tl.constexpr,
                 SIGNED: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr, WORK: tl.constexpr,
                 PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HEAD: tl.constexpr):  # fmt: skip
    """dq = scale·ds·k; also leaves c = Σ g·o for the kernel of the keys."""
    LEFT: tl.constexpr = (p_starts is not None) or (window is not None)
    i_block = tl.cdiv(tokens, BM) - 1 - tl.program_id(0) // (batches * heads)
    i_batch = (tl.program_id(0) % (batches * heads) // heads).to(tl.int64)
    i_head = (tl.program_id(0) % heads).to(tl.int64)
    first, shift = i_block * BM, keys - tokens
    o_row, i_d = tl.arange(0, BM), tl.arange(0, HEAD)
    i_query = first + o_row
    m_query = i_query < tokens
    start = first.to(tl.int64)
    p_k += i_batch * sk[0] + i_head // group * sk[2]
    p_v += i_batch * sv[0] + i_head // group * sv[2]
    p_q += i_batch * sq[0] + i_head * sq[2] + start * sq[1]
    p_g += i_batch * sg[0] + i_head * sg[2] + start * sg[1]
    p_o += i_batch * so[0] + i_head * so[2] + start * so[1]
    m = m_query[:, None] & (i_d < size)[None, :]
    b_g = converted(tl.load(p_g + o_row[:, None] * sg[1] + i_d[None, :] * sg[3], mask=m, other=0), WORK)
    b_o = converted(tl.load(p_o + o_row[:, None] * so[1] + i_d[None, :] * so[3], mask=m, other=0), WORK)
    b_delta = tl.sum(b_g * b_o, 1)
    tl.store(p_delta + (i_batch * heads + i_head) * tokens + i_query, b_delta, mask=m_query)
    b_q = rows_of(p_q, o_row, i_d, sq[1], sq[3], m_query, size, True, EVEN, TYPE)
    b_g = operand(b_g, TYPE)
    b_lse = exponent_of(p_lse + i_batch * sl[0] + i_head * sl[1], i_query.to(tl.int64) * sl[2], m_query)
    b_first = first_key(p_starts, i_batch, i_query, m_query, shift, keys, window, ss)
    b_end = end_key(i_query, shift, keys, CAUSAL)
    low, whole, to, high = key_blocks(
        b_first, m_query, first, tl.minimum(first + BM, tokens), shift, keys, CAUSAL, LEFT, BN
    )
    b_dq = tl.zeros((BM, HEAD), WORK)
    for i in range(whole, to):
        b_dq = query_step(
            b_dq, b_q, b_g, b_lse, b_delta, p_k, p_v, i, b_first, b_end, keys, size, factor, sign, sk, sv,
            False, LEFT, SIGNED, EVEN, TYPE, PRECISION, BN, HEAD,
        )  # fmt: skip
    left = whole - low
    for n in range(0, left + high - to):
        i = tl.where(n < left, low + n, to + n - left) if LEFT else to + n
        b_dq = query_step(
            b_dq, b_q, b_g, b_lse, b_delta, p_k, p_v, i, b_first, b_end, keys, size, factor, sign, sk, sv,
            True, LEFT, SIGNED, EVEN, TYPE, PRECISION, BN, HEAD,
        )  # fmt: skip
    p_dq += i_batch * sd[0] + i_head * sd[2] + start * sd[1]
    tl.store(p_dq + o_row[:, None] * sd[1] + i_d[None, :], converted(b_dq * scale, p_dq.dtype.element_ty), mask=m)


# --- Backward: keys and values ----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens", "keys", "window"])
def bounds_kernel(p_low, p_high, p_starts, tokens, keys, window, ss, BM: tl.constexpr):
    """The smallest and the largest first visible key of each query block, `[B, blocks]`."""
    i_block, i_batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_query = i_block * BM + tl.arange(0, BM)
    m_query = i_query < tokens
    b_first = first_key(p_starts, i_batch, i_query, m_query, keys - tokens, keys, window, ss)
    at = i_batch * tl.num_programs(0) + i_block
    tl.store(p_low + at, tl.min(tl.where(m_query, b_first, keys), 0))
    tl.store(p_high + at, tl.max(tl.where(m_query, b_first, 0), 0))


@triton.jit
def query_blocks(p_low, p_high, i_batch, n_first, tokens, keys, shift, CAUSAL: tl.constexpr, LEFT: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """(low, from, to, high) as of `key_blocks`, of the query blocks for the keys [n_first, n_first + BN)."""
    blocks = tl.cdiv(tokens, BM)
    last = tl.minimum(n_first + BN, keys) - 1
    low = tl.maximum(n_first - shift, 0) // BM if CAUSAL else 0
    whole = tl.cdiv(tl.maximum(last - shift, 0), BM) if CAUSAL else 0
    high, to = blocks, tokens // BM  # the last block may be partly filled
    if LEFT:
        high, to = 0, tokens // BM
        for t in range(0, blocks, 128):
            i = t + tl.arange(0, 128)
            m = i < blocks
            least = tl.load(p_low + i_batch * blocks + i, mask=m, other=0)
            most = tl.load(p_high + i_batch * blocks + i, mask=m, other=0)
            high = tl.maximum(high, tl.max(tl.where(m & (least <= last), i + 1, 0), 0))
            to = tl.minimum(to, tl.min(tl.where(m & (i >= whole) & (most > n_first), i, blocks), 0))
    high = tl.maximum(high, low)
    whole = tl.minimum(whole, high)
    whole = tl.maximum(whole, low)
    to = tl.maximum(tl.minimum(to, high), whole)
    return low, whole, to, high


@triton.jit
def key_step(b_dk, b_dv, b_k, b_v, p_q, p_g, p_lse, p_delta, p_starts, i_batch, i_member, i_block, i_key, tokens, keys,
             shift, size, window, factor, sign, sq, sg, sl, ss, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
             LEFT: tl.constexpr, SIGNED: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
             BM: tl.constexpr, HEAD: tl.constexpr):  # fmt: skip
    """Add what one block of queries gives to the gradients of the keys and values."""
    o_row, i_d = tl.arange(0, BM), tl.arange(0, HEAD)
    i_query = i_block * BM + o_row
    m_query = i_query < tokens
    start, head = tl.zeros((), tl.int64) + i_block * BM, tl.zeros((), tl.int64) + i_member
    b_q = rows_of(p_q + head * sq[2] + start * sq[1], o_row, i_d, sq[1], sq[3], m_query, size, MASKED, EVEN, TYPE)
    b_g = rows_of(p_g + head * sg[2] + start * sg[1], o_row, i_d, sg[1], sg[3], m_query, size, MASKED, EVEN, TYPE)
    b_lse = exponent_of(p_lse + head * sl[1], i_query.to(tl.int64) * sl[2], m_query)
    b_delta = tl.load(p_delta + head * tokens + i_query, mask=m_query, other=0)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION, out_dtype=b_dk.dtype)
    if SIGNED:
        b_s = b_s * sign
    b_p = power_of_2(b_s * factor - b_lse[:, None])
    if MASKED:
        seen = i_key[None, :] < end_key(i_query, shift, keys, CAUSAL)[:, None]
        if LEFT:
            b_first = first_key(p_starts, i_batch, i_query, m_query, shift, keys, window, ss)
            seen = seen & (i_key[None, :] >= b_first[:, None])
        b_p = tl.where(seen, b_p, 0.0)
    b_dv += tl.dot(tl.trans(operand(b_p, TYPE)), b_g, input_precision=PRECISION, out_dtype=b_dk.dtype)
    b_dp = tl.dot(b_g, tl.trans(b_v), input_precision=PRECISION, out_dtype=b_dk.dtype)
    b_ds = operand(b_p * (b_dp - b_delta[:, None]), TYPE)
    b_dk += tl.dot(tl.trans(b_ds), b_q, input_precision=PRECISION, out_dtype=b_dk.dtype)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["tokens", "keys", "batches", "heads", "group", "each", "window"])
def key_kernel(p_dk, p_dv, p_g, p_q, p_k, p_v, p_lse, p_delta, p_starts, p_low, p_high, tokens, keys, batches, heads,
               group, each, size, window, factor, sign, scale, sd, sg, sq, sk, sv, sl, ss, CAUSAL: tl.constexpr,
               SIGNED: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr, WORK: tl.constexpr,
               PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HEAD: tl.constexpr):  # fmt: skip
    """dv = pᵀ·g and dk = scale·dsᵀ·q over `each` query heads of a key head; the first keys, seen by most, go first."""
    LEFT: tl.constexpr = (p_starts is not None) or (window is not None)
    splits = tl.cdiv(group, each)
    i_rest = tl.program_id(0) % (batches * heads * splits)
    first, shift = tl.program_id(0) // (batches * heads * splits) * BN, keys - tokens
    i_split = i_rest % splits
    i_batch, i_head = (i_rest // splits // heads).to(tl.int64), (i_rest // splits % heads).to(tl.int64)
    o_key, i_d = tl.arange(0, BN), tl.arange(0, HEAD)
    i_key = first + o_key
    m_key = i_key < keys
    start = first.to(tl.int64)
    p_k += i_batch * sk[0] + i_head * sk[2] + start * sk[1]
    p_v += i_batch * sv[0] + i_head * sv[2] + start * sv[1]
    b_k = rows_of(p_k, o_key, i_d, sk[1], sk[3], m_key, size, True, EVEN, TYPE)
    b_v = rows_of(p_v, o_key, i_d, sv[1], sv[3], m_key, size, True, EVEN, TYPE)
    low, whole, to, high = query_blocks(p_low, p_high, i_batch, first, tokens, keys, shift, CAUSAL, LEFT, BM, BN)
    b_dk, b_dv = tl.zeros((BN, HEAD), WORK), tl.zeros((BN, HEAD), WORK)
    p_q += i_batch * sq[0] + (i_head * group + i_split * each) * sq[2]
    p_g += i_batch * sg[0] + (i_head * group + i_split * each) * sg[2]
    p_lse += i_batch * sl[0] + (i_head * group + i_split * each) * sl[1]
    p_delta += (i_batch * heads * group + i_head * group + i_split * each) * tokens
    members = tl.minimum(each, group - i_split * each)
    # one loop over heads and blocks: the pipeline does not run dry between heads
    inside, left = to - whole, whole - low
    for n in range(0, members * inside):
        b_dk, b_dv = key_step(
            b_dk, b_dv, b_k, b_v, p_q, p_g, p_lse, p_delta, p_starts, i_batch, n // inside, whole + n % inside, i_key,
            tokens, keys, shift, size, window, factor, sign, sq, sg, sl, ss, False, CAUSAL, LEFT, SIGNED, EVEN, TYPE,
            PRECISION, BM, HEAD,
        )  # fmt: skip
    border = left + high - to
    for n in range(0, members * border):
        i = n % border
        b_dk, b_dv = key_step(
            b_dk, b_dv, b_k, b_v, p_q, p_g, p_lse, p_delta, p_starts, i_batch, n // border,
            tl.where(i < left, low + i, to + i - left), i_key, tokens, keys, shift, size, window, factor, sign, sq, sg,
            sl, ss, True, CAUSAL, LEFT, SIGNED, EVEN, TYPE, PRECISION, BM, HEAD,
        )  # fmt: skip
    o = (i_split * batches + i_batch) * sd[0] + i_head * sd[2] + start * sd[1]
    o_tile = o_key[:, None] * sd[1] + i_d[None, :]
    m = m_key[:, None] & (i_d < size)[None, :]
    tl.store(p_dk + o + o_tile, converted(b_dk * scale, p_dk.dtype.element_ty), mask=m)
    tl.store(p_dv + o + o_tile, converted(b_dv, p_dv.dtype.element_ty), mask=m)


@triton.jit
def add_splits(p_dk, p_dv, p_dks, p_dvs, n, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over the first dimension, in order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    b_dk, b_dv = tl.load(p_dks + i, mask=m), tl.load(p_dvs + i, mask=m)
    for _ in tl.static_range(1, SPLITS):
        p_dks += n
        p_dvs += n
        b_dk += tl.load(p_dks + i, mask=m)
        b_dv += tl.load(p_dvs + i, mask=m)
    tl.store(p_dk + i, converted(b_dk, p_dk.dtype.element_ty), mask=m)
    tl.store(p_dv + i, converted(b_dv, p_dv.dtype.element_ty), mask=m)


# --- Launching them ---------------------------------------------------------------------------------------------------


@triton.jit
def _same(x):
    return x


class _Common(NamedTuple):
    """What the kernels share.

    Attributes:
        factor, sign: their product is the scale in units of log2. The factor is positive, so that it may stand outside
            of maxima.
    """

    batches: int
    tokens: int
    keys: int
    heads: int
    key_heads: int
    size: int
    factor: float
    sign: float
    window: int | None
    ss: tuple[int, int]
    constants: dict[str, Any]


def _common(q: Array, k: Array, starts: Array | None, scale: float, causal: bool, window: int) -> _Common:
    (batches, tokens, heads, size), (_, keys, key_heads, _) = q.shape, k.shape
    number = Double if q.dtype is float64 else float
    sign = float(scale > 0) - float(scale < 0)
    head = padded(size)
    assert head <= 256, f"a head size of {size}"
    constants = {
        "CAUSAL": causal, "SIGNED": sign != 1, "EVEN": head == size, "TYPE": TRITON[q.dtype.name],
        "WORK": TRITON[work_type(q.dtype).name], "PRECISION": "tf32" if q.dtype is float32 and allow_tf32 else "ieee",
        "HEAD": head,
    }  # fmt: skip
    return _Common(
        batches, tokens, keys, heads, key_heads, size, number((abs(scale) or 1.0) / math.log(2)), number(sign),
        window or None, (0, 0) if starts is None else (starts.strides[0], starts.strides[1]), constants,
    )  # fmt: skip


def _tiles(q: Array, c: _Common) -> tuple[Tile, Tile, Tile]:
    shared = backend_of(q.device).driver.properties.shared_memory
    return tiles_of(q.dtype, c.size, c.tokens, c.keys, shared)


def forward_into(
    o: Array, lse: Array, q: Array, k: Array, v: Array, starts: Array | None, scale: float, causal: bool, window: int,
    tile: Tile | None = None,
) -> None:  # fmt: skip
    """Launch the forward kernel, with a tile of one's own if given."""
    c = _common(q, k, starts, scale, causal, window)
    t = tile or _tiles(q, c)[0]
    launch(
        forward_kernel, triton.cdiv(c.tokens, t.queries) * c.batches * c.heads, o, lse, q, k, v, starts, c.tokens,
        c.keys, c.batches, c.heads, c.heads // c.key_heads, c.size, c.window, c.factor, c.sign,
        o.strides, q.strides, k.strides, v.strides, c.ss, **c.constants, BM=t.queries, BN=t.keys, num_warps=t.warps,
        num_stages=t.stages,
    )  # fmt: skip


@twin("attention")
def attention(
    out: tuple[Array, Array], q: Array, k: Array, v: Array, starts: Array | None = None, *, scale: float,
    causal: bool = True, window: int = 0,
) -> None:  # fmt: skip
    """o = softmax(scale·q·kᵀ)·v over the visible keys, and the log of each softmax sum."""
    o, lse = out
    if q.size and k.size:
        forward_into(o, lse, q, k, v, starts, scale, causal, window)
    else:
        clear(o)
        elementwise(_same, lse, -math.inf)


def splits_of(programs: int, group: int) -> int:
    """How many query heads of a group one program adds up."""
    return -(-group // max(1, min(group, PROGRAMS // max(programs, 1))))


def backward_into(
    grads: tuple[Array, Array, Array], g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array,
    starts: Array | None, scale: float, causal: bool, window: int, tiles: tuple[Tile, Tile] | None = None,
    each: int | None = None,
) -> None:  # fmt: skip
    """Launch the backward kernels, with tiles for queries and keys, and heads a program, of one's own if given."""
    dq, dk, dv = grads
    c = _common(q, k, starts, scale, causal, window)
    work, device, group = work_type(q.dtype), q.device, c.heads // c.key_heads
    factor = Double(scale) if work is float64 else float(scale)
    t, s = tiles or _tiles(q, c)[1:]
    delta = empty(lse.shape, work, device)
    launch(
        query_kernel, triton.cdiv(c.tokens, t.queries) * c.batches * c.heads, dq, delta, g, q, k, v, o, lse, starts,
        c.tokens, c.keys, c.batches, c.heads, group, c.size, c.window, c.factor, c.sign, factor, dq.strides, g.strides,
        q.strides, k.strides, v.strides, o.strides, lse.strides, c.ss, **c.constants, BM=t.queries, BN=t.keys,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    low = high = None
    if starts is not None or c.window is not None:
        blocks = triton.cdiv(c.tokens, s.queries)
        low, high = (empty((c.batches, blocks), int32, device) for _ in range(2))
        launch(
            bounds_kernel, (blocks, c.batches), low, high, starts, c.tokens, c.keys, c.window, c.ss, BM=s.queries,
            num_warps=1,
        )  # fmt: skip
    programs = triton.cdiv(c.keys, s.keys) * c.batches * c.key_heads
    each = each or splits_of(programs, group)
    splits = triton.cdiv(group, each)
    parts = [empty((splits, *x.shape), work, device) if splits > 1 else x for x in (dk, dv)]
    launch(
        key_kernel, programs * splits, *parts, g, q, k, v, lse, delta, starts, low, high, c.tokens, c.keys, c.batches,
        c.key_heads, group, each, c.size, c.window, c.factor, c.sign, factor, dk.strides, g.strides, q.strides,
        k.strides, v.strides, lse.strides, c.ss, **c.constants, BM=s.queries, BN=s.keys, num_warps=s.warps,
        num_stages=s.stages,
    )  # fmt: skip
    if splits > 1:
        launch(add_splits, triton.cdiv(dk.size, 1024), dk, dv, *parts, dk.size, SPLITS=splits, BLOCK=1024)


@twin("attention_backward")
def attention_backward(
    out: tuple[Array, Array, Array], g: Array, q: Array, k: Array, v: Array, o: Array, lse: Array,
    starts: Array | None = None, *, scale: float, causal: bool = True, window: int = 0,
) -> None:  # fmt: skip
    """With p = e^(s - lse) and c = Σ g·o: dv = pᵀ·g, ds = p·(g·vᵀ - c), dq = scale·ds·k, dk = scale·dsᵀ·q."""
    if q.size and k.size:
        backward_into(out, g, q, k, v, o, lse, starts, scale, causal, window)
    else:
        for x in out:
            clear(x)
