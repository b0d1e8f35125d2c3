"""The kernels of matrix products, and what a tile goes through behind its sum.

`by_descriptors` stays resident, one program an SM, and has TMA fetch tiles
through tensor descriptors; `by_pointers` computes one tile a program on any device and from any strides; `by_terms`
multiplies without tensor cores what these do not take. Tiles are transposed on the way to the tensor cores. Tiles that
are split along k leave their parts in memory in float32, and `add_parts` adds them in order, so that the result never
depends on timing. `linalg.py` chooses and launches them.

Letters: the product is [m, k] x [k, n]; BM, BN, BK are the tile's sizes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.kernels.maths import exp, tanh
from genesis.kernels.strides import offsets
from genesis.kernels.types import converted

__all__ = [
    "ACCUMULATE", "ALPHA", "ALPHA_THERE", "BIAS_M", "BIAS_N", "FACTOR_M", "FACTOR_N", "GELU_TANH", "RELU", "RESIDUAL",
    "SCALED", "SCALED_M", "SCALED_N", "SILU", "add_parts", "by_descriptors", "by_pointers", "by_terms", "place",
    "quotient",
]  # fmt: skip


# --- What a tile goes through after the sum ---------------------------------------------------------------------------


# EPILOGUE of the kernels is the sum of those that apply.
ALPHA = tl.constexpr(1)
BIAS_N = tl.constexpr(2)
BIAS_M = tl.constexpr(4)
RESIDUAL = tl.constexpr(8)
ACCUMULATE = tl.constexpr(16)
RELU = tl.constexpr(32)
GELU_TANH = tl.constexpr(64)
SILU = tl.constexpr(128)
ALPHA_THERE = tl.constexpr(256)  # alpha points to it
FACTOR_N = tl.constexpr(512)  # `p_bias` holds factors
FACTOR_M = tl.constexpr(1024)
SCALED_M = tl.constexpr(2048)  # alpha points to factors of the m rows
SCALED_N = tl.constexpr(4096)  # and, behind them, of the n columns
SCALED = tl.constexpr(2048 + 4096)


@triton.jit
def activated(x, EPILOGUE: tl.constexpr):
    if RELU & EPILOGUE:
        x = tl.where(x < 0, 0, x)  # NaN stays
    if SILU & EPILOGUE:
        x = x / (1 + exp(-x))
    if GELU_TANH & EPILOGUE:
        x = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return x


@triton.jit
def scaled(b_acc, o_m, o_n, m, n, alpha, EPILOGUE: tl.constexpr):
    """The tile with what its quantised factors were divided by: one after the other, since their product may vanish."""
    if SCALED_M & EPILOGUE:
        b_acc = b_acc * tl.load(alpha + o_m, mask=o_m < m, other=0)[:, None]
    if SCALED_N & EPILOGUE:
        b_acc = b_acc * tl.load(alpha + m + o_n, mask=o_n < n, other=0)[None, :]
    return b_acc


@triton.jit
def finished(b_acc, i_batch, o_m, o_n, m, n, p_o, p_bias, step, p_residual, alpha, so, WORK: tl.constexpr,
             EPILOGUE: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The tile as it is stored: activation(alpha·factors·acc + bias) + residual + what out held."""
    if ALPHA & EPILOGUE:
        b_acc = b_acc * alpha
    if ALPHA_THERE & EPILOGUE:
        b_acc = b_acc * tl.load(alpha)
    b_acc = scaled(b_acc, o_m, o_n, m, n, alpha, EPILOGUE)
    if FACTOR_N & EPILOGUE:
        b_acc = b_acc * converted(tl.load(p_bias + o_n * step, mask=o_n < n, other=0), WORK)[None, :]
    if FACTOR_M & EPILOGUE:
        b_acc = b_acc * converted(tl.load(p_bias + o_m * step, mask=o_m < m, other=0), WORK)[:, None]
    if BIAS_N & EPILOGUE:
        b_acc += converted(tl.load(p_bias + o_n * step, mask=o_n < n, other=0), WORK)[None, :]
    if BIAS_M & EPILOGUE:
        b_acc += converted(tl.load(p_bias + o_m * step, mask=o_m < m, other=0), WORK)[:, None]
    b_acc = activated(b_acc, EPILOGUE)
    if (RESIDUAL | ACCUMULATE) & EPILOGUE:
        o = out_offsets(i_batch, o_m, o_n, so, WIDE)
        b_mask = (o_m < m)[:, None] & (o_n < n)[None, :]
        if RESIDUAL & EPILOGUE:
            b_acc += converted(tl.load(p_residual + o, mask=b_mask, other=0), WORK)
        if ACCUMULATE & EPILOGUE:
            b_acc += converted(tl.load(p_o + o, mask=b_mask, other=0), WORK)
    return b_acc


@triton.jit
def out_offsets(i_batch, o_m, o_n, so, WIDE: tl.constexpr):
    if WIDE:
        i_batch, o_m, o_n = tl.zeros((1, 1), tl.int64) + i_batch, o_m.to(tl.int64), o_n.to(tl.int64)
    return i_batch * so[0] + o_m[:, None] * so[1] + o_n[None, :] * so[2]


@triton.jit
def quotient(x, y):
    """x // y for 0 <= x < 2^21 and y > 0, by a reciprocal which loops can keep: whole division takes ten times as long.

    (x + 1/2) / y is at least 1 / 2y from any whole number, and the rounding of the product is less.
    """
    return ((tl.cast(x, tl.float32) + 0.5) * (1.0 / tl.cast(y, tl.float32))).to(tl.int32)


@triton.jit
def place(i_tile, tiles_m, tiles_n, GROUP: tl.constexpr, MATRICES: tl.constexpr):
    """Batch, row and column of a tile: GROUP rows are walked together, so that neighbours in time share L2.

    MATRICES says whether there are 1 ("one"), or several with fewer than 2^21 tiles in all ("few") or more ("many").
    """
    if MATRICES == "many":
        i_batch = i_tile // (tiles_m * tiles_n)
        i_tile = i_tile % (tiles_m * tiles_n)
        i_group = i_tile // (GROUP * tiles_n)
        rows = tl.minimum(tiles_m - i_group * GROUP, GROUP)
        within = i_tile % (GROUP * tiles_n)
        i_n = within // rows
    else:
        i_batch = i_tile * 0
        if MATRICES == "few":
            i_batch = quotient(i_tile, tiles_m * tiles_n)
            i_tile -= i_batch * tiles_m * tiles_n
        i_group = quotient(i_tile, GROUP * tiles_n)
        rows = tl.minimum(tiles_m - i_group * GROUP, GROUP)
        within = i_tile - i_group * GROUP * tiles_n
        i_n = quotient(within, rows)
    return i_batch, i_group * GROUP + within - i_n * rows, i_n


# --- Tiles through tensor descriptors ---------------------------------------------------------------------------------


@triton.jit
def fetched(d_x, i_batch, batches, at0, at1, SPREAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile [ROWS, COLUMNS] as it lies in memory; SPREAD says along which batch dimensions the operand moves."""
    if len(SPREAD) == 0:
        return d_x.load([at0, at1])
    elif len(SPREAD) == 1:
        return d_x.load([i_batch * SPREAD[0], at0, at1]).reshape(ROWS, COLUMNS)
    else:
        outer, inner = i_batch // batches[1], i_batch % batches[1]
        return d_x.load([outer * SPREAD[0], inner * SPREAD[1], at0, at1]).reshape(ROWS, COLUMNS)


@triton.jit
def left(d_a, i_batch, batches, o_m, o_k, TURNED: tl.constexpr, SPREAD: tl.constexpr, TYPE: tl.constexpr,
         MOVED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """A tile [BM, BK] of the left factor; a turned one lies with its k outermost."""
    if TURNED:
        b_a = fetched(d_a, i_batch, batches, o_k, o_m, SPREAD, BK, BM).T
    else:
        b_a = fetched(d_a, i_batch, batches, o_m, o_k, SPREAD, BM, BK)
    if MOVED:
        b_a = in_registers(b_a)
    return converted(b_a, TYPE)


@triton.jit
def right(d_b, i_batch, batches, o_n, o_k, TURNED: tl.constexpr, SPREAD: tl.constexpr, TYPE: tl.constexpr,
          BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """A tile [BK, BN] of the right factor; a turned one lies with its n outermost."""
    if TURNED:
        b_b = fetched(d_b, i_batch, batches, o_n, o_k, SPREAD, BN, BK).T
    else:
        b_b = fetched(d_b, i_batch, batches, o_k, o_n, SPREAD, BK, BN)
    return converted(b_b, TYPE)


@triton.jit
def in_registers(x):
    """The same, moved by an instruction, after which the tensor cores read it from registers: from shared
    memory they take float32 only with k innermost.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


@triton.jit
def held(d_o, i_batch, o_m, o_n, STORE: tl.constexpr, BATCHED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """What out holds at (o_m, o_n), in float32, through its descriptor or that of its transpose."""
    if STORE == "rows":
        b_o = d_o.load([i_batch, o_m, o_n]).reshape(BM, BN) if BATCHED else d_o.load([o_m, o_n])
    else:
        b_o = (d_o.load([i_batch, o_n, o_m]).reshape(BN, BM) if BATCHED else d_o.load([o_n, o_m])).T
    return converted(b_o, tl.float32)


@triton.jit
def stored(b_acc, d_o, i_batch, o_m, o_n, m, n, p_o, p_bias, step, p_residual, alpha, so, EPILOGUE: tl.constexpr,
           STORE: tl.constexpr, BATCHED: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr,
           BN: tl.constexpr):  # fmt: skip
    """Finish and store [BM, BN] at (o_m, o_n): through a descriptor of out or of outᵀ, or through pointers."""
    i_m, i_n = o_m + tl.arange(0, BM), o_n + tl.arange(0, BN)
    # What out held comes by TMA, too: through pointers each thread waits for one load after the other.
    HELD: tl.constexpr = (ACCUMULATE & EPILOGUE) if STORE != "pointers" else 0
    b_y = finished(
        b_acc, i_batch, i_m, i_n, m, n, p_o, p_bias, step, p_residual, alpha, so, tl.float32, EPILOGUE - HELD, WIDE
    )  # fmt: skip
    if HELD:
        b_y += held(d_o, i_batch, o_m, o_n, STORE, BATCHED, BM, BN)
    b_y = converted(b_y, p_o.dtype.element_ty)
    if STORE == "rows":
        if BATCHED:
            d_o.store([i_batch, o_m, o_n], b_y.reshape(1, BM, BN))
        else:
            d_o.store([o_m, o_n], b_y)
    elif STORE == "columns":
        if BATCHED:
            d_o.store([i_batch, o_n, o_m], b_y.T.reshape(1, BN, BM))
        else:
            d_o.store([o_n, o_m], b_y.T)
    else:
        b_mask = (i_m < m)[:, None] & (i_n < n)[None, :]
        tl.store(p_o + out_offsets(i_batch, i_m, i_n, so, WIDE), b_y, mask=b_mask)


@triton.jit
def stored_in_pieces(b_acc, d_o, i_batch, o_m, o_n, m, n, p_o, p_bias, step, p_residual, alpha, so,
                     EPILOGUE: tl.constexpr, STORE: tl.constexpr, BATCHED: tl.constexpr, WIDE: tl.constexpr,
                     BM: tl.constexpr, BN: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    """Store columns in PIECES parts, one after the other: less shared memory, which the stages can have."""
    if PIECES == 1:
        stored(b_acc, d_o, i_batch, o_m, o_n, m, n, p_o, p_bias, step, p_residual, alpha, so, EPILOGUE, STORE, BATCHED,
               WIDE, BM, BN)  # fmt: skip
    else:
        HALF: tl.constexpr = BN // 2
        b_left, b_right = tl.split(tl.permute(tl.reshape(b_acc, (BM, 2, HALF)), (0, 2, 1)))
        stored_in_pieces(b_left, d_o, i_batch, o_m, o_n, m, n, p_o, p_bias, step, p_residual, alpha, so, EPILOGUE,
                         STORE, BATCHED, WIDE, BM, HALF, PIECES // 2)  # fmt: skip
        stored_in_pieces(b_right, d_o, i_batch, o_m, o_n + HALF, m, n, p_o, p_bias, step, p_residual, alpha, so,
                         EPILOGUE, STORE, BATCHED, WIDE, BM, HALF, PIECES // 2)  # fmt: skip


@triton.jit
def summed(d_a, d_b, i_batch, batches, o_m, o_n, first, end, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr,
           A_SPREAD: tl.constexpr, B_SPREAD: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
           MOVED: tl.constexpr, IMPRECISE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           BK: tl.constexpr):  # fmt: skip
    """The tile at (o_m, o_n), from step `first` along k to before `end`; of 8-bit floats no more than IMPRECISE terms
    are summed in the few bits that the tensor cores have for them, all where it is None.
    """
    b_acc = tl.zeros((BM, BN), tl.float32)
    for i_k in range(first, end):
        b_a = left(d_a, i_batch, batches, o_m, i_k * BK, A_TURNED, A_SPREAD, TYPE, MOVED, BM, BK)
        b_b = right(d_b, i_batch, batches, o_n, i_k * BK, B_TURNED, B_SPREAD, TYPE, BN, BK)
        b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
    return b_acc


@triton.jit(do_not_specialize=["m", "n", "k", "whole", "rest", "split", "share"])  # one kernel for all sizes
def by_descriptors(d_a, d_b, d_o, p_o, p_parts, p_bias, step, p_residual, alpha, m, n, k, batches, so, whole, rest,
                   split, share, A_TURNED: tl.constexpr, B_TURNED: tl.constexpr, A_SPREAD: tl.constexpr,
                   B_SPREAD: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, MOVED: tl.constexpr,
                   IMPRECISE: tl.constexpr, EPILOGUE: tl.constexpr, STORE: tl.constexpr, BATCHED: tl.constexpr,
                   WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                   MATRICES: tl.constexpr, SPLIT: tl.constexpr, ONCE: tl.constexpr,
                   PIECES: tl.constexpr):  # fmt: skip
    """`whole` tiles from first to last k (ONCE: one for each program, without the loop); then, with SPLIT, `rest`
    tiles in `split` parts of `share` steps each, which go to `p_parts`.
    """
    start, programs = tl.program_id(0), tl.num_programs(0)
    tiles_m, tiles_n, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, BK)
    if ONCE:
        i_batch, i_m, i_n = place(start, tiles_m, tiles_n, GROUP, MATRICES)
        # A residual that is fetched before the sum is there after it.
        EARLY: tl.constexpr = (SCALED | EPILOGUE) == (SCALED | RESIDUAL)
        if EARLY:
            o_m, o_n = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
            b_mask = (o_m < m)[:, None] & (o_n < n)[None, :]
            b_residual = tl.load(p_residual + out_offsets(i_batch, o_m, o_n, so, WIDE), mask=b_mask, other=0)
        b_acc = summed(d_a, d_b, i_batch, batches, i_m * BM, i_n * BN, 0, steps, A_TURNED, B_TURNED, A_SPREAD,
                       B_SPREAD, TYPE, PRECISION, MOVED, IMPRECISE, BM, BN, BK)  # fmt: skip
        if EARLY:
            b_acc = scaled(b_acc, o_m, o_n, m, n, alpha, EPILOGUE) + converted(b_residual, tl.float32)
        stored_in_pieces(b_acc, d_o, i_batch, i_m * BM, i_n * BN, m, n, p_o, p_bias, step, p_residual, alpha, so,
                         0 if EARLY else EPILOGUE, STORE, BATCHED, WIDE, BM, BN, PIECES)  # fmt: skip
    else:
        # The store counts tiles itself: one number for both would tie the loads of the next tile to this one's store.
        i_stored = start - programs
        for i_tile in tl.range(start, whole, programs, flatten=True):
            i_batch, i_m, i_n = place(i_tile, tiles_m, tiles_n, GROUP, MATRICES)
            b_acc = summed(d_a, d_b, i_batch, batches, i_m * BM, i_n * BN, 0, steps, A_TURNED, B_TURNED, A_SPREAD,
                           B_SPREAD, TYPE, PRECISION, MOVED, IMPRECISE, BM, BN, BK)  # fmt: skip
            i_stored += programs
            i_batch, i_m, i_n = place(i_stored, tiles_m, tiles_n, GROUP, MATRICES)
            stored_in_pieces(b_acc, d_o, i_batch, i_m * BM, i_n * BN, m, n, p_o, p_bias, step, p_residual, alpha, so,
                             EPILOGUE, STORE, BATCHED, WIDE, BM, BN, PIECES)  # fmt: skip
    if SPLIT:
        for i_part in tl.range(start, rest * split, programs):
            i_batch, i_m, i_n = place(whole + i_part // split, tiles_m, tiles_n, GROUP, MATRICES)
            first = i_part % split * share
            b_acc = summed(d_a, d_b, i_batch, batches, i_m * BM, i_n * BN, first, tl.minimum(first + share, steps),
                           A_TURNED, B_TURNED, A_SPREAD, B_SPREAD, TYPE, PRECISION, MOVED, IMPRECISE, BM, BN,
                           BK)  # fmt: skip
            o = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
            tl.store(p_parts + i_part * (BM * BN) + o, b_acc)


@triton.jit(do_not_specialize=["whole", "split"])
def add_parts(p_o, p_parts, p_bias, step, p_residual, alpha, m, n, so, whole, split, EPILOGUE: tl.constexpr,
              WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
              MATRICES: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """ROWS rows of a split tile: its parts added from first to last, finished, stored."""
    i_rest, i_rows = tl.program_id(0) // (BM // ROWS), tl.program_id(0) % (BM // ROWS)
    i_batch, i_m, i_n = place(whole + i_rest, tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP, MATRICES)
    i_row = i_rows * ROWS + tl.arange(0, ROWS)
    p_part = p_parts + i_rest * split * (BM * BN) + i_row[:, None] * BN + tl.arange(0, BN)[None, :]
    b_acc = tl.load(p_part)
    for i_part in range(1, split):
        b_acc += tl.load(p_part + i_part * (BM * BN))
    o_m, o_n = i_m * BM + i_row, i_n * BN + tl.arange(0, BN)
    b_y = finished(b_acc, i_batch, o_m, o_n, m, n, p_o, p_bias, step, p_residual, alpha, so, tl.float32, EPILOGUE, WIDE)
    b_mask = (o_m < m)[:, None] & (o_n < n)[None, :]
    tl.store(p_o + out_offsets(i_batch, o_m, o_n, so, WIDE), converted(b_y, p_o.dtype.element_ty), mask=b_mask)


# --- Tiles through pointers -------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["split", "share"])
def by_pointers(p_o, p_a, p_b, p_parts, p_bias, step, p_residual, alpha, m, n, k, batches, ba, bb, sa, sb, so, split,
                share, DIMS: tl.constexpr, TYPE: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
                EPILOGUE: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr, GROUP: tl.constexpr, MATRICES: tl.constexpr, SPLIT: tl.constexpr):  # fmt: skip
    """One tile a program; EVEN says that BK divides k. With SPLIT one of `split` parts of a tile, of `share` steps,
    which goes to `p_parts`.
    """
    i_tile, first, end = tl.program_id(0), 0, tl.cdiv(k, BK)
    if SPLIT:
        i_tile, first = tl.program_id(0) // split, tl.program_id(0) % split * share
        end = tl.minimum(first + share, end)
    i_batch, i_m, i_n = place(i_tile, tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP, MATRICES)
    o_m, o_n, o_k = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    b_m, b_n = (o_m < m)[:, None], (o_n < n)[None, :]
    x_batch, x_m, x_n, x_k = i_batch, o_m, o_n, first * BK + o_k
    if WIDE:
        x_batch, x_m, x_n, x_k = i_batch.to(tl.int64), o_m.to(tl.int64), o_n.to(tl.int64), x_k.to(tl.int64)
    p_x = p_a + offsets(x_batch, batches, ba, DIMS) + x_m[:, None] * sa[0] + x_k[None, :] * sa[1]
    p_y = p_b + offsets(x_batch, batches, bb, DIMS) + x_k[:, None] * sb[0] + x_n[None, :] * sb[1]
    b_acc = tl.zeros((BM, BN), WORK)
    for i_k in range(first, end):
        if EVEN:
            b_x, b_y = tl.load(p_x, mask=b_m, other=0.0), tl.load(p_y, mask=b_n, other=0.0)
        else:
            m_k = o_k < k - i_k * BK
            b_x = tl.load(p_x, mask=b_m & m_k[None, :], other=0.0)
            b_y = tl.load(p_y, mask=b_n & m_k[:, None], other=0.0)
        b_acc = tl.dot(converted(b_x, TYPE), converted(b_y, TYPE), b_acc, input_precision=PRECISION)
        p_x += BK * sa[1]
        p_y += BK * sb[0]
    if SPLIT:
        o = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(p_parts + tl.program_id(0) * (BM * BN) + o, b_acc)
    else:
        b_out = finished(b_acc, i_batch, o_m, o_n, m, n, p_o, p_bias, step, p_residual, alpha, so, WORK, EPILOGUE, WIDE)
        p_y = p_o + out_offsets(i_batch, o_m, o_n, so, WIDE)
        tl.store(p_y, converted(b_out, p_o.dtype.element_ty), mask=b_m & b_n)


@triton.jit
def by_terms(p_o, p_a, p_b, p_bias, step, p_residual, alpha, m, n, k, batches, ba, bb, sa, sb, so, DIMS: tl.constexpr,
             WORK: tl.constexpr, EPILOGUE: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
             MATRICES: tl.constexpr):  # fmt: skip
    """One tile a program, a term of the sum at a time: for integers, which wrap around, and float64."""
    i_batch, i_m, i_n = place(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), 8, MATRICES)
    o_m, o_n = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    x_batch, x_m, x_n = i_batch, o_m, o_n
    if WIDE:
        x_batch, x_m, x_n = i_batch.to(tl.int64), o_m.to(tl.int64), o_n.to(tl.int64)
    p_x = p_a + offsets(x_batch, batches, ba, DIMS) + x_m * sa[0]
    p_y = p_b + offsets(x_batch, batches, bb, DIMS) + x_n * sb[1]
    b_acc = tl.zeros((BM, BN), WORK)
    for _ in tl.range(0, k, loop_unroll_factor=4):
        b_x, b_y = tl.load(p_x, mask=o_m < m, other=0), tl.load(p_y, mask=o_n < n, other=0)
        b_acc += converted(b_x, WORK)[:, None] * converted(b_y, WORK)[None, :]
        p_x += sa[1]
        p_y += sb[0]
    b_out = finished(b_acc, i_batch, o_m, o_n, m, n, p_o, p_bias, step, p_residual, alpha, so, WORK, EPILOGUE, WIDE)
    b_mask = (o_m < m)[:, None] & (o_n < n)[None, :]
    tl.store(p_o + out_offsets(i_batch, o_m, o_n, so, WIDE), converted(b_out, p_o.dtype.element_ty), mask=b_mask)
