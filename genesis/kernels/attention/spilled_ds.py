"""The gradient of attention's queries as one product with what the kernel of the keys leaves in memory.

That kernel makes ds, the gradient of the scores, and dq is scale·ds·k: where ds lies in memory, one product gives it,
in place of three with the scores made anew. Writing and reading 4 bytes for each pair of a query and a key costs less
than the other two with heads of 128, and more with heads of 64. It is for causal attention of a sequence to itself, on
GPUs of Hopper's kind, whose layout of products decides how ds goes to memory.

How the tiles of ds fill memory is told in attention_portions.py. Within a tile, queries stand as `column_of` says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels.attention.common import first_key, key_blocks, operand, place, rows_of, stored, stored_back
from genesis.kernels.attention.ds_chunks import SIDE
from genesis.kernels.types import converted

__all__ = ["column_of", "gather_kernel", "left_behind"]

WIDE: tl.constexpr = tl.constexpr(SIDE)


@triton.jit
def column_of(i):
    """Where a tile's query stands in memory, and which query stands there.

    A thread of a product's result has two neighbours of each 8 columns; those of 32 columns are side by side in memory,
    16 bytes that go there at once.
    """
    return (i & -32) + ((i >> 1) & 3) * 8 + ((i >> 3) & 3) * 2 + (i & 1)


@triton.jit
def corner(i_key, i_query, blocks):
    """(row, column) where the tile of a block of keys and a block of queries begins."""
    is_first = 2 * i_key < blocks
    row = tl.where(is_first, i_key, blocks - 1 - i_key)
    return row * WIDE, tl.where(is_first, i_query + 1, i_query - i_key) * WIDE


# --- What the kernel of the keys leaves -------------------------------------------------------------------------------

# Of 16 numbers of a thread: base address $4, offsets $20 to $35, numbers in $36 to $43. With the layout of the first
# line (the compiler's is compared with it), pairs of neighbours 8 columns apart take turns with those 8 rows below.
STORE = tl.constexpr(
    """{ // for #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 64, 16]}>
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
REGISTERS = tl.constexpr(",".join(["=r"] * 4 + ["l"] * 16 + ["r"] * 24))


@triton.jit
def stored_pieces(p_x, o, b_x):
    """Store a product's result of 2-byte numbers at offsets, from the registers in which it lies.

    `tl.store` would take it to another layout first, through shared memory; with that in its loop, the assembler no
    longer lets products run beside other work.
    """
    p_all = tl.broadcast_to(p_x.to(tl.int64), o.shape)
    tl.inline_asm_elementwise(STORE, REGISTERS, [p_all, o, b_x], dtype=tl.int8, is_pure=False, pack=16)


if is_interpreted():

    @triton.jit
    def stored_pieces(p_x, o, b_x):
        """The same, for the interpreter."""
        tl.store(p_x + o, converted(b_x, p_x.dtype.element_ty))


@triton.jit
def left_behind(p_ds, b_ds, i_head, i_key, i_query, tokens):
    """Store a tile of ds, keys by queries.

    Args:
        i_head: among the heads of all sequences.
    """
    blocks = tl.cdiv(tokens, WIDE)
    width = (blocks + 1) * WIDE
    row, column = corner(i_key, i_query, blocks)
    p_ds += (i_head.to(tl.int64) * (tl.cdiv(blocks, 2) * WIDE) + row) * width + column
    i = tl.arange(0, WIDE)
    stored_pieces(p_ds, i[:, None] * width + column_of(i)[None, :], b_ds)


# --- Queries ----------------------------------------------------------------------------------------------------------


@triton.jit
def gathered(p_ds, ds, i_head, i_key, i_query, tokens, BEYOND: tl.constexpr, BOXES: tl.constexpr, TYPE: tl.constexpr,
             BM: tl.constexpr):  # fmt: skip
    """ds of a block of keys and of the BM queries from a block of them on.

    Args:
        p_ds, ds: the same memory; the second is a descriptor with BOXES.
        BEYOND: the keys stand beyond the first block of queries, for which there is no tile; it is 0.
    """
    blocks = tl.cdiv(tokens, WIDE)
    rows, width = tl.cdiv(blocks, 2) * WIDE, (blocks + 1) * WIDE
    row, column = corner(i_key, i_query, blocks)
    if BOXES and not BEYOND:
        b_ds = ds.load([i_head, row, column]).reshape(WIDE, BM)
    else:
        i, i_m = tl.arange(0, WIDE), tl.arange(0, BM)
        m = (i_m < (blocks - i_query) * WIDE) & (i_m >= (WIDE if BEYOND else 0))
        p_ds += (i_head.to(tl.int64) * rows + row) * width + column
        b_ds = tl.load(p_ds + (i[:, None] * width + i_m[None, :]), mask=m[None, :], other=0)
    return operand(b_ds, TYPE)


@triton.jit
def gather_step(b_dq, p_ds, ds, k, i_batch, i_head, heads, group, i_key, i_query, tokens, size, sk,
                BEYOND: tl.constexpr, BOXES: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
                BM: tl.constexpr, HEAD: tl.constexpr):  # fmt: skip
    """Add what one block of keys gives to the gradient of the queries."""
    first = i_key * WIDE
    b_ds = gathered(p_ds, ds, i_batch * heads + i_head, i_key, i_query, tokens, BEYOND, BOXES, TYPE, BM)
    b_k = rows_of(k, i_batch, i_head // group, first, tokens, size, sk, BOXES, TYPE, WIDE, HEAD)
    return tl.dot(b_ds.T, b_k, b_dq, input_precision=PRECISION, out_dtype=b_dq.dtype)


@triton.jit(do_not_specialize=["tokens", "batches", "heads", "group", "together", "divided", "window"])
def gather_kernel(p_dq, p_ds, ds, k, p_starts, p_cos, p_sin, spread, tokens, batches, heads, group, together, divided,
                  size, window, scale, sd, sk, ss, BOXES: tl.constexpr, TYPE: tl.constexpr, WORK: tl.constexpr,
                  PRECISION: tl.constexpr, BM: tl.constexpr, HEAD: tl.constexpr):  # fmt: skip
    """dq = scale·ds·k, turned back where there are cos and sin; the last queries, which see most keys, go first.

    BM is a tile's side or twice that.
    """
    LEFT: tl.constexpr = (p_starts is not None) or (window is not None)
    blocks = tl.cdiv(tokens, BM)
    i_after, i_place = place(blocks, batches * heads, together, divided)
    i_block, i_batch, i_head = blocks - 1 - i_after, i_place // heads, i_place % heads
    first = i_block * BM
    i_query = first + tl.arange(0, BM)
    m_query = i_query < tokens
    b_first = first_key(p_starts, i_batch, i_query, m_query, 0, tokens, window, ss)
    low, _, _, high = key_blocks(b_first, m_query, first, tl.minimum(first + BM, tokens), 0, tokens, True, LEFT, WIDE)
    b_dq = tl.zeros((BM, HEAD), WORK)
    beyond = tl.minimum(first // WIDE + 1, high)
    for i in range(low, beyond):
        b_dq = gather_step(
            b_dq, p_ds, ds, k, i_batch, i_head, heads, group, i, first // WIDE, tokens, size, sk, False, BOXES, TYPE,
            PRECISION, BM, HEAD,
        )  # fmt: skip
    if BM > WIDE:
        for i in range(tl.maximum(beyond, low), high):  # one or none
            b_dq = gather_step(
                b_dq, p_ds, ds, k, i_batch, i_head, heads, group, i, first // WIDE, tokens, size, sk, True, BOXES, TYPE,
                PRECISION, BM, HEAD,
            )  # fmt: skip
    if p_cos is None:
        stored(p_dq, b_dq * scale, i_batch, i_head, first, tokens, size, sd, BM, HEAD, column_of)
    else:
        stored_back(p_dq, b_dq * scale, p_cos, p_sin, i_batch, i_head, first, tokens, spread, sd, BM, HEAD, column_of)
