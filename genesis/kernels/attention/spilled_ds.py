"""dQ as a single GEMM from spilled ds: the dK/dV kernel stores ds, the gradient of the scores, and dQ = scale·ds·k.

Plain reference: genesis/ops/attention.py: `attention_backward`. One dot per tile replaces the three dots of a dQ kernel
that recomputes the scores. Writing and reading 4 bytes per pair of query and key costs less than the other two dots
with heads of 128 and 256, and more with heads of 64. The kernels support only causal self-attention on Hopper, because
ds is stored in the layout of wgmma results.

The ds of a head consists of tiles of BT = 64 keys by 64 queries. With causal attention the first block of keys has a
tile for every block of queries, and the last block has a single tile. Blocks j and n - 1 - j of n share a row of n + 1
tiles, so the triangle fills a rectangle half as large as the square. Within a tile, `permuted_column` permutes the
columns (queries).
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels.attention.common import (
    key_block,
    left_bounds,
    load_rows,
    operand,
    query_block,
    store_gradient,
    visible_key_blocks,
)
from genesis.kernels.elements import converted

HEAD_DIMS = range(65, 257)  # head dimensions for which spilling is profitable
DS_TILE = 64  # rows and columns of a tile
MAX_CHUNK_BYTES = 1 << 30  # the most bytes of ds at a time; SMs idle at the end of each chunk
BT: tl.constexpr = tl.constexpr(DS_TILE)

# --- Layout and chunks ------------------------------------------------------------------------------------------------


def ds_extent(tokens: int) -> tuple[int, int]:
    """Return the rows and columns of a head's ds."""
    blocks = -(-tokens // DS_TILE)
    return -(-blocks // 2) * DS_TILE, (blocks + 1) * DS_TILE


def ds_chunks_of(batches: int, tokens: int, heads: int, key_heads: int, itemsize: int) -> list[tuple[slice, slice]]:
    """Return equal chunks (sequences, key heads), largest first, with MAX_CHUNK_BYTES of ds or a single key head."""
    head_bytes = heads // key_heads * math.prod(ds_extent(tokens)) * itemsize
    sequences = _even_part(batches, MAX_CHUNK_BYTES // (head_bytes * key_heads))
    width = _even_part(key_heads, MAX_CHUNK_BYTES // head_bytes)
    return [
        (slice(first, min(batches, first + sequences)), slice(head, min(key_heads, head + width)))
        for first in range(0, batches, sequences)
        for head in range(0, key_heads, width)
    ]


def _even_part(count: int, most: int) -> int:
    """Return the size of nearly equal parts of `count`, between 1 and `most`."""
    parts = -(-count // max(1, most))
    return -(-count // parts)


def ds_buffer_shape(batches: int, tokens: int, heads: int, key_heads: int, itemsize: int) -> tuple[int, int, int]:
    """Return the shape of the largest chunk's ds: query heads, rows, columns."""
    sequences, part = ds_chunks_of(batches, tokens, heads, key_heads, itemsize)[0]
    return sequences.stop * part.stop * (heads // key_heads), *ds_extent(tokens)


@triton.jit
def permuted_column(i):
    """Return the column at which query i of a tile is stored. The permutation is its own inverse.

    In the layout of a wgmma result a thread holds two neighbours of every 8 columns. The permutation makes a thread's
    values of 32 columns contiguous in memory, so that it stores 16 bytes at once.
    """
    return (i & -32) + ((i >> 1) & 3) * 8 + ((i >> 3) & 3) * 2 + (i & 1)


@triton.jit
def tile_origin(i_key, i_query, blocks):
    """Return (row, column) of the first element of the tile for a block of keys and a block of queries."""
    in_first_half = 2 * i_key < blocks
    row = tl.where(in_first_half, i_key, blocks - 1 - i_key)
    return row * BT, tl.where(in_first_half, i_query + 1, i_query - i_key) * BT


# --- Stored by the dK/dV kernel ---------------------------------------------------------------------------------------


def store_fragment(warps: str, columns: int) -> tl.constexpr:
    """Return PTX that stores 16 values of a thread: base address $4, offsets $20 to $35, values $36 to $43.

    The first line names the expected layout (`warps` of a program, `columns` of a wgmma), which is compared with the
    compiler's. In it a thread's pairs of neighbours alternate between a row and the row 8 below, in every 8 columns.
    """
    layout = f"versionMajor = 3, versionMinor = 0, warpsPerCTA = {warps}, instrShape = [16, {columns}, 16]"
    return tl.constexpr(
        f"{{ // for #ttg.nvidia_mma<{{{layout}}}>"
        """
    .reg .b64 a, b;
    mad.wide.s32 a, $20, 2, $4;
    mad.wide.s32 b, $22, 2, $4;
    st.global.v4.b32 [a], {$36, $38, $40, $42};
    st.global.v4.b32 [b], {$37, $39, $41, $43};
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    }"""
    )


STORE_BY_4_WARPS = store_fragment("[4, 1]", 64)
STORE_BY_8_WARPS = store_fragment("[4, 2]", 32)
CONSTRAINTS = tl.constexpr(",".join(["=r"] * 4 + ["l"] * 16 + ["r"] * 24))


@triton.jit
def store_fragments(p_x, o, b_x, WARPS: tl.constexpr):
    """Store a wgmma result b_x [BT, BT] of a 2-byte type at offsets `o`, straight from the registers of WARPS warps.

    `tl.store` would first change the layout through shared memory. With such a change in the loop, the assembler does
    not overlap wgmmas with other work.
    """
    p_all = o.to(tl.int64) * 0 + p_x.to(tl.int64)  # [BT, BT]; Gluon has no `tl.broadcast_to` of scalars
    FRAGMENT: tl.constexpr = STORE_BY_4_WARPS if WARPS == 4 else STORE_BY_8_WARPS
    tl.inline_asm_elementwise(FRAGMENT, CONSTRAINTS, [p_all, o, b_x], dtype=tl.int8, is_pure=False, pack=16)


if is_interpreted():

    @triton.jit
    def store_fragments(p_x, o, b_x, WARPS: tl.constexpr):
        """Store b_x at offsets `o` in the interpreter."""
        tl.store(p_x + o, converted(b_x, p_x.dtype.element_ty))


@triton.jit
def store_ds(p_ds, b_ds, o_key, o_query, i_head, i_key, i_query, tokens, WARPS: tl.constexpr):
    """Store a tile of ds, b_ds [BT keys, BT queries].

    Args:
        o_key: 0 to BT - 1, like `o_query`.
        i_head: index among the query heads of all sequences.
        i_key: index of the block of keys.
        i_query: index of the block of queries.
    """
    blocks = tl.cdiv(tokens, BT)
    width = (blocks + 1) * BT
    row, column = tile_origin(i_key, i_query, blocks)
    p_ds += (i_head.to(tl.int64) * (tl.cdiv(blocks, 2) * BT) + row) * width + column
    store_fragments(p_ds, o_key[:, None] * width + permuted_column(o_query)[None, :], b_ds, WARPS)


# --- dQ ---------------------------------------------------------------------------------------------------------------


@triton.jit
def load_ds(p_ds, ds, i_head, i_key, i_query, tokens, BEYOND: tl.constexpr, TMA: tl.constexpr, TYPE: tl.constexpr,
            BM: tl.constexpr):  # fmt: skip
    """Load ds [BT, BM] of a block of keys and of BM queries, starting with block `i_query`.

    Args:
        p_ds: pointer to ds.
        ds: a descriptor of the same memory with TMA.
        BEYOND: the keys come after the first block of queries, which has no tile for them and reads as 0.
    """
    blocks = tl.cdiv(tokens, BT)
    rows, width = tl.cdiv(blocks, 2) * BT, (blocks + 1) * BT
    row, column = tile_origin(i_key, i_query, blocks)
    if TMA and not BEYOND:
        b_ds = ds.load([i_head, row, column]).reshape(BT, BM)  # [BT, BM]
    else:
        o_n, o_m = tl.arange(0, BT), tl.arange(0, BM)  # [BT], [BM]
        m = (o_m < (blocks - i_query) * BT) & (o_m >= (BT if BEYOND else 0))  # [BM]
        p_ds += (i_head.to(tl.int64) * rows + row) * width + column
        b_ds = tl.load(p_ds + (o_n[:, None] * width + o_m[None, :]), mask=m[None, :], other=0)  # [BT, BM]
    return operand(b_ds, TYPE)


@triton.jit(do_not_specialize=["sizes"])
def attention_bwd_dq_from_ds(p_dq, p_ds, ds, k, p_doc_starts, p_cos, p_sin, rope_stride, sizes, head_dim,
                             scale, strides, TMA: tl.constexpr, DOT: tl.constexpr, BM: tl.constexpr,
                             BD: tl.constexpr):  # fmt: skip
    """Compute dQ = scale·ds·k, with the inverse RoPE if p_cos is given.

    Args:
        sizes: (tokens, batches, heads, group, window).
        BM: BT or 2·BT.
    """
    tokens, batches, heads, group, window = sizes
    sd, sk, ss = strides
    TYPE: tl.constexpr = DOT[0]
    WORK: tl.constexpr = DOT[1]
    PRECISION: tl.constexpr = DOT[2]
    LEFT_BOUND: tl.constexpr = (p_doc_starts is not None) or (window is not None)
    HAS_GAPS: tl.constexpr = ss[2] is not None
    i_block, i_batch, i_head = query_block(tokens, batches, heads, BM)
    start = i_block * BM
    o_query = start + tl.arange(0, BM)  # [BM]
    m_query = o_query < tokens  # [BM]
    bounds = left_bounds(p_doc_starts, i_batch, o_query, m_query, 0, tokens, window, ss)
    begin, _, _, end, gaps = visible_key_blocks(
        bounds, m_query, start, tl.minimum(start + BM, tokens), 0, tokens, True, LEFT_BOUND, HAS_GAPS, BT
    )
    b_dq = tl.zeros((BM, BD), WORK)  # [BM, BD]
    # All blocks of the program's queries have a ds tile for these blocks of keys.
    beyond = tl.minimum(start // BT + 1, end)
    for n in range(begin, beyond - gaps[1]):  # skipped keys come before the queries' own blocks
        i, i_query_block = key_block(n, gaps, HAS_GAPS), start // BT
        start_n = i * BT
        b_ds = load_ds(p_ds, ds, i_batch * heads + i_head, i, i_query_block, tokens, False, TMA, TYPE, BM)  # [BT, BM]
        b_k = load_rows(k, i_batch, i_head // group, start_n, tokens, head_dim, sk, TMA, TYPE, BT, BD)  # [BT, BD]
        b_dq = tl.dot(b_ds.T, b_k, b_dq, input_precision=PRECISION, out_dtype=b_dq.dtype)  # [BM, BD]
    # Only the second block of queries has a ds tile for the last block of keys.
    if BM > BT:
        for i in range(tl.maximum(beyond, begin), end):
            i_query_block = start // BT
            start_n = i * BT
            b_ds = load_ds(p_ds, ds, i_batch * heads + i_head, i, i_query_block, tokens, True, TMA, TYPE, BM)
            b_k = load_rows(k, i_batch, i_head // group, start_n, tokens, head_dim, sk, TMA, TYPE, BT, BD)  # [BT, BD]
            b_dq = tl.dot(b_ds.T, b_k, b_dq, input_precision=PRECISION, out_dtype=b_dq.dtype)  # [BM, BD]
    store_gradient(
        p_dq, b_dq * scale, p_cos, p_sin, rope_stride, i_batch, i_head, start, tokens, head_dim, sd, BM, BD,
        permuted_column,
    )  # fmt: skip
