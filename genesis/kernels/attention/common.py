"""Device functions that the attention kernels share: row loads and stores, exponents, visible ranges.

Plain reference: genesis/ops/attention.py. Tiles of rows are loaded by TMA (if TMA is set) or through pointers. Rows and
columns out of bounds read as 0 either way.

Shapes: B batches, T tokens (queries), H heads, D head dimension. Arguments of several kernels, grouped in tuples:

    sizes      (tokens, keys, batches, heads, group[, window]): queries and keys per sequence, query heads, query heads
               per key head, window or None. Values are not specialized, so one kernel serves all lengths
    scales     (scale_log2, sign[, scale]): scale_log2·sign is the softmax scale in units of log2. scale_log2 is
               positive, so that it commutes with max; sign is None for 1
    strides    one tuple per array [B, T, H, D], in the order of the kernel's arguments; `sx` are the strides of x
    head_dim   columns of a head; tiles have BD columns, the next power of 2
    DOT        (TYPE, WORK, PRECISION): type of operands, type of accumulators, input_precision of tl.dot
    TILE       (BM, BN, BD[, stages]): queries, keys and columns of a tile, and stages of the pipeline

A query sees the keys in [first visible key, visible end). Documents and windows bound that range on the left (then
LEFT_BOUND is set), causality on the right. `diagonal` is keys - tokens: query i sees keys up to i + diagonal. A query
may skip keys in [gap, gap end), which come before its own (then HAS_GAPS is set).
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels import maths
from genesis.kernels.elements import converted

LN2 = tl.constexpr(math.log(2))
LOG2E = tl.constexpr(1 / math.log(2))


@triton.jit
def operand(x, TYPE: tl.constexpr):
    """Cast an operand of tl.dot to the type that the tensor cores take."""
    return x.to(TYPE)


if is_interpreted():  # the interpreter stores bfloat16 as bits: round as a GPU does, then multiply in float32

    def operand(x: Any, TYPE: Any) -> Any:
        kind = getattr(TYPE, "value", TYPE)
        return converted(converted(x, kind), tl.float32) if kind.primitive_bitwidth == 16 else converted(x, kind)


@triton.jit
def warp_uniform(x):
    """Return x, marked as uniform across the warp for the assembler, which saves registers."""
    return tl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], tl.int32, False, 1)


if is_interpreted():

    def warp_uniform(x: Any) -> Any:
        return x


@triton.jit
def opaque(x):
    """Return x with its value hidden from the compiler, which keeps it from folding."""
    if x.dtype == tl.float32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, False, 1)
    else:
        return x


if is_interpreted():

    def opaque(x: Any) -> Any:
        return x


@triton.jit
def unchained(x, never):
    """Return x, the result of a dot that feeds another dot, without constraining the layout of the first dot.

    Triton splits a dot that feeds another by rows among all warps. If a tile has rows for only four warps, the other
    warps repeat their work. Triton's search for the second dot ends at a condition, so this one, which is never true,
    hides it.
    """
    if never:
        x = x * 2.0
    return x


@triton.jit
def fast_exp2(x):
    """Return 2^x, in float32 by ex2.approx: within 2 ULP, less than the error from rounding x, and 0 below 2^-126."""
    return maths.exp2(x) if x.dtype == tl.float64 else tl.exp2(x)


# --- Loads and stores -------------------------------------------------------------------------------------------------


@triton.jit
def load_rows(x, i_batch, i_head, start, rows, head_dim, sx, TMA: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr,
              BD: tl.constexpr):  # fmt: skip
    """Load rows [start, start + ROWS) of a head as an operand [ROWS, BD].

    Args:
        x: a descriptor of [batch, head, row, column] with TMA, otherwise a pointer.
        rows: rows of the sequence; rows beyond it read as 0.
    """
    if TMA:
        b_x = x.load([i_batch, i_head, start, 0]).reshape(ROWS, BD)  # [ROWS, BD]
    else:
        o_row, o_d = tl.arange(0, ROWS), tl.arange(0, BD)  # [ROWS], [BD]
        p_x = x + i_batch.to(tl.int64) * sx[0] + i_head.to(tl.int64) * sx[2] + start.to(tl.int64) * sx[1]
        m_x = (o_row < rows - start)[:, None] & (o_d < head_dim)[None, :]  # [ROWS, BD]
        b_x = tl.load(p_x + o_row[:, None] * sx[1] + o_d[None, :] * sx[3], mask=m_x, other=0)  # [ROWS, BD]
    return operand(b_x, TYPE)


@triton.jit
def _identity(i):
    return i


@triton.jit
def store_rows(p_x, b_x, i_batch, i_head, start, rows, head_dim, sx, ROWS: tl.constexpr, BD: tl.constexpr,
               row_of: tl.constexpr = _identity):  # fmt: skip
    """Store b_x [ROWS, BD] as rows [start, start + ROWS) of a head, cast to the type of `p_x`.

    Args:
        row_of: maps a row of the tile to its row in the block.
    """
    o_row, o_d = row_of(tl.arange(0, ROWS)), tl.arange(0, BD)  # [ROWS], [BD]
    p_x += i_batch.to(tl.int64) * sx[0] + i_head.to(tl.int64) * sx[2] + start.to(tl.int64) * sx[1]
    m_x = (o_row < rows - start)[:, None] & (o_d < head_dim)[None, :]  # [ROWS, BD]
    tl.store(p_x + o_row[:, None] * sx[1] + o_d[None, :], converted(b_x, p_x.dtype.element_ty), mask=m_x)


@triton.jit
def inverse_rope(b_left, b_right, p_cos, p_sin, o, m):
    """Apply the inverse RoPE to gradient pairs (left, right) [ROWS, HALF]; `o` and `m` index cos and sin."""
    b_c = converted(tl.load(p_cos + o, mask=m, other=0), b_left.dtype)  # [ROWS, HALF]
    b_s = converted(tl.load(p_sin + o, mask=m, other=0), b_left.dtype)  # [ROWS, HALF]
    return b_left * b_c + b_right * b_s, b_right * b_c - b_left * b_s


@triton.jit
def store_gradient(p_x, b_x, p_cos, p_sin, rope_stride, i_batch, i_head, start, rows, head_dim, sx, ROWS: tl.constexpr,
                   BD: tl.constexpr, row_of: tl.constexpr = _identity):  # fmt: skip
    """Store rows as `store_rows` does, through the inverse RoPE if p_cos is given. Heads then have exactly BD columns.

    In the layout of a dot's result one thread holds both columns of a pair. The halves are stored separately, so the
    tile changes its layout only once, as in any store.

    Args:
        rope_stride: elements between the cos (and sin) of two sequences; 0 if they share them.
    """
    if p_cos is None:
        store_rows(p_x, b_x, i_batch, i_head, start, rows, head_dim, sx, ROWS, BD, row_of)
    else:
        HALF: tl.constexpr = BD // 2
        o_row, o_pair = row_of(tl.arange(0, ROWS)), tl.arange(0, HALF)  # [ROWS], [HALF]
        m_row = (o_row < rows - start)[:, None]  # [ROWS, 1]
        o_rope = i_batch.to(tl.int64) * rope_stride + start.to(tl.int64) * HALF
        o_rope = o_rope + (o_row[:, None] * HALF + o_pair[None, :])  # [ROWS, HALF]
        b_left, b_right = tl.split(b_x.reshape(ROWS, 2, HALF).permute(0, 2, 1))  # [ROWS, HALF] each
        b_left, b_right = inverse_rope(b_left, b_right, p_cos, p_sin, o_rope, m_row)  # [ROWS, HALF] each
        p_x += i_batch.to(tl.int64) * sx[0] + i_head.to(tl.int64) * sx[2] + start.to(tl.int64) * sx[1]
        p_left = p_x + o_row[:, None] * sx[1] + o_pair[None, :]  # [ROWS, HALF]
        tl.store(p_left, converted(b_left, p_x.dtype.element_ty), mask=m_row)
        tl.store(p_left + HALF, converted(b_right, p_x.dtype.element_ty), mask=m_row)


@triton.jit
def load_vector(x, start, TMA: tl.constexpr, COUNT: tl.constexpr):
    """Load elements [start, start + COUNT) of a vector: a descriptor with TMA, otherwise a pointer."""
    if TMA:
        return x.load([start])  # [COUNT]
    else:
        return tl.load(x + start + tl.arange(0, COUNT))  # [COUNT]


# --- Visible ranges ---------------------------------------------------------------------------------------------------


@triton.jit
def query_block(tokens, batches, heads, BM: tl.constexpr):
    """Return (block, sequence, head) of this program. The last queries, which see the most keys, run first."""
    blocks = tl.cdiv(tokens, BM)
    i_reversed, i_batch_head = tl.program_id(0) // (batches * heads), tl.program_id(0) % (batches * heads)
    return blocks - 1 - i_reversed, i_batch_head // heads, i_batch_head % heads


@triton.jit
def load_position(p_x, m, keys):
    """Load key positions, limited to 0 to `keys`."""
    return tl.minimum(tl.maximum(tl.load(p_x, mask=m, other=0).to(tl.int64), 0), keys).to(tl.int32)


@triton.jit
def left_bounds(p_doc_starts, i_batch, o_query, m_query, diagonal, keys, window, ss):
    """Return (first visible key, gap, gap end) of each query, [BM] each, at most `keys`. Without gaps both are 0."""
    b_first, b_gap, b_gap_end = o_query * 0, o_query * 0, o_query * 0  # [BM] each
    if p_doc_starts is not None:
        p_first = p_doc_starts + i_batch.to(tl.int64) * ss[0] + o_query.to(tl.int64) * ss[1]  # [BM]
        b_first = load_position(p_first, m_query, keys)  # [BM]
        if ss[2] is not None:
            b_gap = load_position(p_first + ss[2], m_query, keys)  # [BM]
            b_gap_end = tl.maximum(load_position(p_first + 2 * ss[2], m_query, keys), b_gap)  # [BM]
    if window is not None:
        b_bound = o_query + diagonal - window + 1  # [BM]
        b_bound = tl.where(b_bound < b_gap_end, b_bound - (b_gap_end - b_gap), b_bound)
        b_first = tl.minimum(tl.maximum(b_first, b_bound), keys)
    return b_first, b_gap, b_gap_end


@triton.jit
def visible(o_key, b_end, bounds, LEFT_BOUND: tl.constexpr, HAS_GAPS: tl.constexpr):
    """Return which keys `o_key` [BN] each query sees, [BM, BN], by `visible_end` and `left_bounds`."""
    b_first, b_gap, b_gap_end = bounds
    m = o_key[None, :] < b_end[:, None]  # [BM, BN]
    if LEFT_BOUND:
        m = m & (o_key[None, :] >= b_first[:, None])
    if HAS_GAPS:
        m = m & ((o_key[None, :] < b_gap[:, None]) | (o_key[None, :] >= b_gap_end[:, None]))
    return m


@triton.jit
def visible_end(o_query, diagonal, keys, CAUSAL: tl.constexpr):
    """Return one past the last visible key of each query [BM]."""
    if CAUSAL:
        return tl.minimum(o_query + diagonal + 1, keys)
    else:
        return o_query * 0 + keys


@triton.jit
def merge_ranges(low, high, other_low, other_high):
    """Return the smallest range that contains both."""
    return tl.minimum(low, other_low), tl.maximum(high, other_high)


@triton.jit
def extent(b_x, m_query, keys):
    """Return the smallest and largest position of a block of queries, in one reduction."""
    return tl.reduce((tl.where(m_query, b_x, keys), tl.where(m_query, b_x, 0)), 0, merge_ranges)


@triton.jit
def visible_key_blocks(bounds, m_query, start, stop, diagonal, keys, CAUSAL: tl.constexpr, LEFT_BOUND: tl.constexpr,
                       HAS_GAPS: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Return (begin, full_begin, full_end, end, gaps). Blocks [begin, end) hold keys that the queries [start, stop)
    see. Blocks [full_begin, full_end) are visible to all these queries; the others need a mask. `gaps` are (first block
    that all queries skip, number of such blocks, begin and end of the keys that any query skips).
    """
    b_first, b_gap, b_gap_end = bounds
    if CAUSAL:
        end = tl.cdiv(tl.minimum(stop + diagonal, keys), BN)
        full_end = tl.minimum(start + diagonal + 1, keys) // BN
    else:
        end = tl.cdiv(keys, BN)
        full_end = keys // BN
    begin = 0
    full_begin = 0
    if LEFT_BOUND:
        least, most = extent(b_first, m_query, keys)
        begin = warp_uniform(least) // BN
        full_begin = tl.cdiv(warp_uniform(most), BN)
    gaps = (0, 0, 0, 0)
    if HAS_GAPS:
        first_gap, last_gap = extent(b_gap, m_query, keys)
        first_end, last_end = extent(b_gap_end, m_query, keys)
        skip = tl.maximum(tl.cdiv(warp_uniform(last_gap), BN), begin)
        skip_end = tl.minimum(warp_uniform(first_end), tl.maximum(start + diagonal, 0)) // BN
        gaps = (skip, tl.maximum(skip_end - skip, 0), warp_uniform(first_gap), warp_uniform(last_end))
    return begin, full_begin, full_end, end, gaps


@triton.jit
def key_block(n, gaps, HAS_GAPS: tl.constexpr):
    """Return the index of the n-th block of keys, counted without the blocks that all queries skip."""
    if HAS_GAPS:
        n += tl.where(n >= gaps[0], gaps[1], 0)
    return n


@triton.jit
def is_partial(i, full_begin, full_end, gaps, HAS_GAPS: tl.constexpr, BN: tl.constexpr):
    """Return whether some query does not see all keys of block i."""
    found = (i >= full_end) | (i < full_begin)
    if HAS_GAPS:
        found = found | ((i * BN < gaps[3]) & (i * BN + BN > gaps[2]))
    return found
