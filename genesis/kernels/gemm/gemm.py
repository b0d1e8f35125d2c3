"""GEMM kernels, and the epilogue of a tile.

Plain reference: genesis/ops/linalg.py: `matmul`, `matmul_add`, `add_matmul`; genesis/ops/linear.py: `linear`.

`gemm_tma` is persistent, with one program per SM, and loads tiles by TMA through tensor descriptors. `gemm_pointers`
computes one tile per program on any device and with any strides. `gemm_rank1` handles types that tensor cores do not
support. Tiles are transposed on the way to the tensor cores. Tiles that are split along k store partial sums in
float32, which `gemm_reduce_splits` adds in order, so that results never depend on timing. `linalg.py` selects and
launches the kernels.

The GEMM is [m, k] x [k, n] for each of several matrices; tiles are BM x BN, with steps of BK. Arguments of several
kernels:

    sizes          (m, n, k)
    batches        sizes of the batch dimensions
    so             strides of out by matrix, row and column
    p_vector       bias, or scales of rows, with `vector_stride`
    schedule       how tiles are split along k: see `tiles.Schedule`
    p_limit        a limit of the size LIMIT in device memory: see `limited`; or None
    TILE           (BM, BN, BK)
    INT64          some offsets exceed 2^31
"""

from __future__ import annotations

import triton
import triton.language as tl

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels.dependents import allow_next
from genesis.kernels.elements import converted, offsets
from genesis.kernels.maths import exp, tanh

# --- Epilogue ---------------------------------------------------------------------------------------------------------


# The kernels' EPILOGUE is the sum of these flags.
ALPHA = tl.constexpr(1)
BIAS_N = tl.constexpr(2)
BIAS_M = tl.constexpr(4)
RESIDUAL = tl.constexpr(8)
ACCUMULATE = tl.constexpr(16)
RELU = tl.constexpr(32)
GELU_TANH = tl.constexpr(64)
SILU = tl.constexpr(128)
ALPHA_POINTER = tl.constexpr(256)  # alpha is in device memory
SCALE_N = tl.constexpr(512)  # `p_vector` scales columns
SCALE_M = tl.constexpr(1024)  # `p_vector` scales rows
DEQUANT_M = tl.constexpr(2048)  # alpha points to the quantization scales of the m rows
DEQUANT_N = tl.constexpr(4096)  # the scales of the n columns follow them
DEQUANT = tl.constexpr(2048 + 4096)
RESIDUAL_BY_TMA = tl.constexpr(8192)  # instead of RESIDUAL: `p_residual` is a descriptor like out's
ROUND = tl.constexpr(16384)  # round to out's type before the residual is added


@triton.jit
def activation(x, EPILOGUE: tl.constexpr):
    """Apply the activation of EPILOGUE, if any, to a tile."""
    if RELU & EPILOGUE:
        x = tl.where(x < 0, 0, x)  # preserves NaN
    if SILU & EPILOGUE:
        x = x / (1 + exp(-x))
    if GELU_TANH & EPILOGUE:
        x = 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return x


@triton.jit
def dequantized(b_acc, o_m, o_n, m, n, p_scales, EPILOGUE: tl.constexpr):
    """Return b_acc [BM, BN] times the scales of rows, then of columns. The product of both scales could underflow."""
    if DEQUANT_M & EPILOGUE:
        b_acc = b_acc * tl.load(p_scales + o_m, mask=o_m < m, other=0)[:, None]
    if DEQUANT_N & EPILOGUE:
        b_acc = b_acc * tl.load(p_scales + m + o_n, mask=o_n < n, other=0)[None, :]
    return b_acc


@triton.jit
def epilogue(b_acc, i_batch, o_m, o_n, m, n, p_o, operands, so, WORK: tl.constexpr, EPILOGUE: tl.constexpr,
             INT64: tl.constexpr):  # fmt: skip
    """Return the tile [BM, BN] to store: activation(alpha·scale·acc + bias) + residual + previous value of out.

    Args:
        operands: (p_vector, vector_stride, p_residual, alpha).
    """
    p_vector, vector_stride, p_residual, alpha = operands
    if ALPHA & EPILOGUE:
        b_acc = b_acc * alpha
    if ALPHA_POINTER & EPILOGUE:
        b_acc = b_acc * tl.load(alpha)
    b_acc = dequantized(b_acc, o_m, o_n, m, n, alpha, EPILOGUE)
    if SCALE_N & EPILOGUE:
        b_acc = b_acc * converted(tl.load(p_vector + o_n * vector_stride, mask=o_n < n, other=0), WORK)[None, :]
    if SCALE_M & EPILOGUE:
        b_acc = b_acc * converted(tl.load(p_vector + o_m * vector_stride, mask=o_m < m, other=0), WORK)[:, None]
    if BIAS_N & EPILOGUE:
        b_acc += converted(tl.load(p_vector + o_n * vector_stride, mask=o_n < n, other=0), WORK)[None, :]
    if BIAS_M & EPILOGUE:
        b_acc += converted(tl.load(p_vector + o_m * vector_stride, mask=o_m < m, other=0), WORK)[:, None]
    b_acc = activation(b_acc, EPILOGUE)
    if ROUND & EPILOGUE:
        b_acc = converted(converted(b_acc, p_o.dtype.element_ty), WORK)
    if (RESIDUAL | ACCUMULATE) & EPILOGUE:
        o = out_offsets(i_batch, o_m, o_n, so, INT64)
        mask = (o_m < m)[:, None] & (o_n < n)[None, :]  # [BM, BN]
        if RESIDUAL & EPILOGUE:
            b_acc += converted(tl.load(p_residual + o, mask=mask, other=0), WORK)
        if ACCUMULATE & EPILOGUE:
            b_acc += converted(tl.load(p_o + o, mask=mask, other=0), WORK)
    return b_acc


@triton.jit
def out_offsets(i_batch, o_m, o_n, so, INT64: tl.constexpr):
    """Return the offsets [BM, BN] of a tile of out."""
    if INT64:
        i_batch, o_m, o_n = tl.zeros((1, 1), tl.int64) + i_batch, o_m.to(tl.int64), o_n.to(tl.int64)
    return i_batch * so[0] + o_m[:, None] * so[1] + o_n[None, :] * so[2]


# --- Scheduling -------------------------------------------------------------------------------------------------------


@triton.jit
def quotient(x, y):
    """Return x // y for 0 <= x < 2^21 and y > 0, with a reciprocal that loops can hoist.

    Integer division takes ten times as long. (x + 1/2) / y differs by at least 1 / 2y from any integer, which exceeds
    the rounding error.
    """
    return ((tl.cast(x, tl.float32) + 0.5) * (1.0 / tl.cast(y, tl.float32))).to(tl.int32)


@triton.jit
def grouped_tile(i_tile, tiles_m, tiles_n, MATRICES: tl.constexpr):
    """Return matrix, row and column of a tile. Groups of 8 rows of tiles let concurrent tiles share operands in L2.

    MATRICES is "one", "few" for several matrices with fewer than 2^21 tiles in all, or "many".
    """
    GROUP: tl.constexpr = 8
    if MATRICES == "many":
        i_batch = i_tile // (tiles_m * tiles_n)
        i_tile = i_tile % (tiles_m * tiles_n)
        i_group = i_tile // (GROUP * tiles_n)
        rows = tl.minimum(tiles_m - i_group * GROUP, GROUP)
        i_in_group = i_tile % (GROUP * tiles_n)
        i_n = i_in_group // rows
    else:
        i_batch = i_tile * 0
        if MATRICES == "few":
            i_batch = quotient(i_tile, tiles_m * tiles_n)
            i_tile -= i_batch * tiles_m * tiles_n
        i_group = quotient(i_tile, GROUP * tiles_n)
        rows = tl.minimum(tiles_m - i_group * GROUP, GROUP)
        i_in_group = i_tile - i_group * GROUP * tiles_n
        i_n = quotient(i_in_group, rows)
    return i_batch, i_group * GROUP + i_in_group - i_n * rows, i_n


MAX_PARTS = tl.constexpr(32)  # parts of a tile along k


@triton.jit
def limited(sizes, schedule, p_limit, programs, LIMIT: tl.constexpr, TILE: tl.constexpr):
    """Return m, n, k and the schedule, with the size LIMIT, "m", "n" or "k", limited to the number at `p_limit`.

    At least 1 of k is left. Fewer rows or columns get a new schedule, with as many parts as the given one has room for.
    """
    m, n, k = sizes
    full, leftover, split, steps_per_split = schedule
    if LIMIT is not None:
        limit = tl.load(p_limit)
        m = tl.minimum(m, limit) if LIMIT == "m" else m
        n = tl.minimum(n, limit) if LIMIT == "n" else n
        k = tl.maximum(tl.minimum(k, limit), 1) if LIMIT == "k" else k
        if LIMIT != "k":
            room, tiles, steps = leftover * split, tl.cdiv(m, TILE[0]) * tl.cdiv(n, TILE[1]), tl.cdiv(k, TILE[2])
            full = tiles // programs * programs
            split = tl.minimum(tl.minimum(room // tl.maximum(tiles - full, 1), MAX_PARTS), tl.maximum(steps // 2, 1))
            full = tl.where(split == 1, tiles, full)
            leftover, steps_per_split = tiles - full, tl.cdiv(steps, split)
            split = tl.cdiv(steps, steps_per_split)
    return m, n, k, full, leftover, split, steps_per_split


OVERLAP = tl.constexpr(not is_interpreted())  # devices with TMA can overlap kernels, but the interpreter cannot


# --- Tiles through TMA ------------------------------------------------------------------------------------------------


@triton.jit
def load_box(d_x, i_batch, batches, at0, at1, LAYOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile [ROWS, COLUMNS] in the order of memory. LAYOUT is a layout of `accumulate`.

    LAYOUT is passed whole because Triton 3.6 does not accept an element of a tuple that is itself a tuple.
    """
    BATCH: tl.constexpr = LAYOUT[1]
    if len(BATCH) == 0:
        return d_x.load([at0, at1])  # [ROWS, COLUMNS]
    elif len(BATCH) == 1:
        return d_x.load([i_batch * BATCH[0], at0, at1]).reshape(ROWS, COLUMNS)  # [ROWS, COLUMNS]
    else:
        outer, inner = i_batch // batches[1], i_batch % batches[1]
        return d_x.load([outer * BATCH[0], inner * BATCH[1], at0, at1]).reshape(ROWS, COLUMNS)  # [ROWS, COLUMNS]


@triton.jit
def in_registers(x):
    """Return x moved by an instruction, so that wgmma reads it from registers. In shared memory it must be K-major."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float32, True, 1)


if is_interpreted():

    @triton.jit
    def in_registers(x):
        return x


@triton.jit
def accumulate(d_a, d_b, i_batch, batches, o_m, o_n, begin, end, A_LAYOUT: tl.constexpr, B_LAYOUT: tl.constexpr,
               DOT: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Return the accumulator [BM, BN] at (o_m, o_n) over steps [begin, end) along k.

    Args:
        A_LAYOUT: (whether A is transposed in memory, MN-major; 1 per batch dimension with a stride, 0 for others).
        B_LAYOUT: (whether B is transposed in memory, K-major; the same flags).
        DOT: (operands' type, input_precision, terms of 8-bit floats that tensor cores sum at low precision or None
            for all).
    """
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    BK: tl.constexpr = TILE[2]
    b_acc = tl.zeros((BM, BN), tl.float32)  # [BM, BN]
    for i_k in range(begin, end):
        o_k = i_k * BK
        if A_LAYOUT[0]:
            b_a = load_box(d_a, i_batch, batches, o_k, o_m, A_LAYOUT, BK, BM).T  # [BM, BK]
            if DOT[1] == "tf32":
                b_a = in_registers(b_a)
        else:
            b_a = load_box(d_a, i_batch, batches, o_m, o_k, A_LAYOUT, BM, BK)  # [BM, BK]
        b_a = converted(b_a, DOT[0])  # [BM, BK]
        if B_LAYOUT[0]:
            b_b = load_box(d_b, i_batch, batches, o_n, o_k, B_LAYOUT, BN, BK).T  # [BK, BN]
        else:
            b_b = load_box(d_b, i_batch, batches, o_k, o_n, B_LAYOUT, BK, BN)  # [BK, BN]
        b_b = converted(b_b, DOT[0])  # [BK, BN]
        b_acc = tl.dot(b_a, b_b, b_acc, input_precision=DOT[1], max_num_imprecise_acc=DOT[2])  # [BM, BN]
    return b_acc


@triton.jit
def load_out(d_o, i_batch, o_m, o_n, OUT_LAYOUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Load out at (o_m, o_n), [BM, BN] in float32, through a descriptor of out or of its transpose."""
    if OUT_LAYOUT[0] == "rows":
        b_o = d_o.load([i_batch, o_m, o_n]).reshape(BM, BN) if OUT_LAYOUT[1] else d_o.load([o_m, o_n])  # [BM, BN]
    else:
        b_o = (d_o.load([i_batch, o_n, o_m]).reshape(BN, BM) if OUT_LAYOUT[1] else d_o.load([o_n, o_m])).T  # [BM, BN]
    return converted(b_o, tl.float32)


@triton.jit
def store_tile(b_acc, d_o, i_batch, o_m, o_n, m, n, p_o, operands, so, EPILOGUE: tl.constexpr,
               OUT_LAYOUT: tl.constexpr, INT64: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Apply the epilogue to b_acc [BM, BN] and store it at (o_m, o_n).

    Args:
        OUT_LAYOUT: ("rows" for a descriptor of out, "columns" for one of its transpose, or "pointers"; whether the
            descriptor has a batch dimension).
    """
    i_m, i_n = o_m + tl.arange(0, BM), o_n + tl.arange(0, BN)  # [BM], [BN]
    # Previous values of out are loaded by TMA, too: through pointers each thread would wait for one load at a time.
    ACCUMULATE_BY_TMA: tl.constexpr = (ACCUMULATE & EPILOGUE) if OUT_LAYOUT[0] != "pointers" else 0
    b_y = epilogue(
        b_acc, i_batch, i_m, i_n, m, n, p_o, operands, so, tl.float32, EPILOGUE - ACCUMULATE_BY_TMA, INT64
    )  # fmt: skip
    if RESIDUAL_BY_TMA & EPILOGUE:
        b_y += load_out(operands[2], i_batch, o_m, o_n, OUT_LAYOUT, BM, BN)
    if ACCUMULATE_BY_TMA:
        b_y += load_out(d_o, i_batch, o_m, o_n, OUT_LAYOUT, BM, BN)
    b_y = converted(b_y, p_o.dtype.element_ty)  # [BM, BN]
    if OUT_LAYOUT[0] == "rows":
        if OUT_LAYOUT[1]:
            d_o.store([i_batch, o_m, o_n], b_y.reshape(1, BM, BN))
        else:
            d_o.store([o_m, o_n], b_y)
    elif OUT_LAYOUT[0] == "columns":
        if OUT_LAYOUT[1]:
            d_o.store([i_batch, o_n, o_m], b_y.T.reshape(1, BN, BM))
        else:
            d_o.store([o_n, o_m], b_y.T)
    else:
        mask = (i_m < m)[:, None] & (i_n < n)[None, :]  # [BM, BN]
        tl.store(p_o + out_offsets(i_batch, i_m, i_n, so, INT64), b_y, mask=mask)


@triton.jit
def store_slices(b_acc, d_o, i_batch, o_m, o_n, m, n, p_o, operands, so, EPILOGUE: tl.constexpr,
                 OUT_LAYOUT: tl.constexpr, INT64: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                 SLICES: tl.constexpr):  # fmt: skip
    """Call `store_tile` for SLICES slices of columns in turn, which leaves more shared memory for stages."""
    if SLICES == 1:
        store_tile(b_acc, d_o, i_batch, o_m, o_n, m, n, p_o, operands, so, EPILOGUE, OUT_LAYOUT, INT64, BM, BN)
    else:
        HALF: tl.constexpr = BN // 2
        b_left, b_right = tl.split(tl.permute(tl.reshape(b_acc, (BM, 2, HALF)), (0, 2, 1)))  # [BM, HALF] each
        store_slices(b_left, d_o, i_batch, o_m, o_n, m, n, p_o, operands, so, EPILOGUE, OUT_LAYOUT, INT64, BM, HALF,
                     SLICES // 2)  # fmt: skip
        store_slices(b_right, d_o, i_batch, o_m, o_n + HALF, m, n, p_o, operands, so, EPILOGUE, OUT_LAYOUT, INT64, BM,
                     HALF, SLICES // 2)  # fmt: skip


@triton.jit(do_not_specialize=["sizes", "schedule"])  # one kernel for all sizes
def gemm_tma(d_a, d_b, d_o, p_o, p_parts, p_vector, vector_stride, p_residual, alpha, sizes, batches, so, schedule,
             p_limit, LIMIT: tl.constexpr, A_LAYOUT: tl.constexpr, B_LAYOUT: tl.constexpr, OUT_LAYOUT: tl.constexpr,
             DOT: tl.constexpr, EPILOGUE: tl.constexpr, INT64: tl.constexpr, TILE: tl.constexpr,
             MATRICES: tl.constexpr, SCHEDULE: tl.constexpr, SLICES: tl.constexpr):  # fmt: skip
    """Compute `full` tiles over all of k in persistent programs. With SCHEDULE "split_k", `leftover` tiles follow in
    `split` parts of `steps_per_split` steps, stored to `p_parts`. With "one_tile", a program has one tile and no loop.
    """
    start, programs = tl.program_id(0), tl.num_programs(0)
    m, n, k, full, leftover, split, steps_per_split = limited(sizes, schedule, p_limit, programs, LIMIT, TILE)
    if LIMIT == "k" and (ACCUMULATE & EPILOGUE) != 0:
        adds_nothing = tl.load(p_limit) == 0
        if adds_nothing:
            return
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    operands = (p_vector, vector_stride, p_residual, alpha)
    tiles_m, tiles_n, steps = tl.cdiv(m, BM), tl.cdiv(n, BN), tl.cdiv(k, TILE[2])
    if SCHEDULE == "one_tile":
        i_batch, i_m, i_n = grouped_tile(start, tiles_m, tiles_n, MATRICES)
        # A residual that is loaded before the main loop has arrived by its end.
        EARLY: tl.constexpr = (DEQUANT | ROUND | EPILOGUE) == (DEQUANT | ROUND | RESIDUAL)
        if EARLY:
            o_m, o_n = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)  # [BM], [BN]
            mask = (o_m < m)[:, None] & (o_n < n)[None, :]  # [BM, BN]
            b_residual = tl.load(p_residual + out_offsets(i_batch, o_m, o_n, so, INT64), mask=mask, other=0)  # [BM, BN]
        b_acc = accumulate(
            d_a, d_b, i_batch, batches, i_m * BM, i_n * BN, 0, steps, A_LAYOUT, B_LAYOUT, DOT, TILE
        )  # fmt: skip
        if EARLY:
            b_acc = dequantized(b_acc, o_m, o_n, m, n, alpha, EPILOGUE)
            if ROUND & EPILOGUE:
                b_acc = converted(converted(b_acc, p_o.dtype.element_ty), tl.float32)
            b_acc += converted(b_residual, tl.float32)
        store_slices(b_acc, d_o, i_batch, i_m * BM, i_n * BN, m, n, p_o, operands, so, 0 if EARLY else EPILOGUE,
                     OUT_LAYOUT, INT64, BM, BN, SLICES)  # fmt: skip
    else:
        # The store has its own tile counter: a shared one would make the next tile's loads depend on this tile's store.
        i_stored = start - programs
        for i_tile in tl.range(start, full, programs, flatten=True):
            i_batch, i_m, i_n = grouped_tile(i_tile, tiles_m, tiles_n, MATRICES)
            b_acc = accumulate(
                d_a, d_b, i_batch, batches, i_m * BM, i_n * BN, 0, steps, A_LAYOUT, B_LAYOUT, DOT, TILE
            )  # fmt: skip
            i_stored += programs
            i_batch, i_m, i_n = grouped_tile(i_stored, tiles_m, tiles_n, MATRICES)
            store_slices(b_acc, d_o, i_batch, i_m * BM, i_n * BN, m, n, p_o, operands, so, EPILOGUE, OUT_LAYOUT, INT64,
                         BM, BN, SLICES)  # fmt: skip
    # Store partial sums of the leftover tiles. `gemm_reduce_splits` may start meanwhile; it waits for their end.
    if SCHEDULE == "split_k":
        allow_next(OVERLAP)
        for i_part in tl.range(start, leftover * split, programs):
            i_batch, i_m, i_n = grouped_tile(full + i_part // split, tiles_m, tiles_n, MATRICES)
            begin = i_part % split * steps_per_split
            b_acc = accumulate(d_a, d_b, i_batch, batches, i_m * BM, i_n * BN, begin,
                               tl.minimum(begin + steps_per_split, steps), A_LAYOUT, B_LAYOUT, DOT, TILE)  # fmt: skip
            o = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]  # [BM, BN]
            tl.store(p_parts + i_part * (BM * BN) + o, b_acc)


@triton.jit(do_not_specialize=["schedule", "programs"])
def gemm_reduce_splits(p_o, p_parts, p_vector, vector_stride, p_residual, alpha, sizes, so, schedule, p_limit, programs,
                       LIMIT: tl.constexpr, EPILOGUE: tl.constexpr, INT64: tl.constexpr, TILE: tl.constexpr,
                       MATRICES: tl.constexpr, ROWS: tl.constexpr, MANY: tl.constexpr):  # fmt: skip
    """Sum the parts of ROWS rows of a split tile, from first to last, and apply the epilogue. `programs` is the number
    of programs of `gemm_tma`.
    """
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    m, n, _, full, leftover, split, _ = limited(sizes, schedule, p_limit, programs, LIMIT, TILE)
    i_leftover, i_rows = tl.program_id(0) // (BM // ROWS), tl.program_id(0) % (BM // ROWS)
    if LIMIT is not None:
        is_empty = i_leftover >= leftover
        if LIMIT == "k" and (ACCUMULATE & EPILOGUE) != 0:
            is_empty = tl.load(p_limit) == 0
        if is_empty:
            return
    i_batch, i_m, i_n = grouped_tile(full + i_leftover, tl.cdiv(m, BM), tl.cdiv(n, BN), MATRICES)
    o_row = i_rows * ROWS + tl.arange(0, ROWS)  # [ROWS]
    p_part = p_parts + i_leftover * split * (BM * BN) + o_row[:, None] * BN + tl.arange(0, BN)[None, :]  # [ROWS, BN]
    b_acc = tl.zeros((ROWS, BN), tl.float32)  # [ROWS, BN]
    for first in range(0, split, MANY):
        for j in tl.static_range(MANY):  # loads of several parts at a time hide each other's latency
            m_part = (o_row * 0 + first + j < split)[:, None]  # [ROWS, 1]
            b_acc += tl.load(p_part + (first + j) * (BM * BN), mask=m_part, other=0)  # [ROWS, BN]
    o_m, o_n = i_m * BM + o_row, i_n * BN + tl.arange(0, BN)  # [ROWS], [BN]
    operands = (p_vector, vector_stride, p_residual, alpha)
    b_y = epilogue(b_acc, i_batch, o_m, o_n, m, n, p_o, operands, so, tl.float32, EPILOGUE, INT64)
    mask = (o_m < m)[:, None] & (o_n < n)[None, :]  # [ROWS, BN]
    tl.store(p_o + out_offsets(i_batch, o_m, o_n, so, INT64), converted(b_y, p_o.dtype.element_ty), mask=mask)


# --- Tiles through pointers -------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["schedule"])
def gemm_pointers(p_o, p_a, p_b, p_parts, p_vector, vector_stride, p_residual, alpha, sizes, batches, sa, sb, so,
                  schedule, DOT: tl.constexpr, EPILOGUE: tl.constexpr, INT64: tl.constexpr,
                  EVEN: tl.constexpr, VECTORS: tl.constexpr, TILE: tl.constexpr,
                  MATRICES: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Compute one tile per program, or with SPLIT (2: allow the next kernel) a part of a tile, stored to `p_parts`.

    Args:
        sa: (strides of A along the batch dimensions, row stride, column stride); `sb` likewise.
        schedule: (split, steps_per_split).
        DOT: (operands' type, accumulator's type, input_precision).
        EVEN: BK divides k.
        VECTORS: for A and for B, the axis along which 16 bytes are loaded at a time, "m", "n" or "k", or None.
        AHEAD: load tiles into registers one step ahead, because loads of single elements cannot be pipelined through
            shared memory.
    """
    m, n, k = sizes
    split, steps_per_split = schedule
    # Divisors of sizes and strides that are not multiples of 16, which the compiler does not know.
    GRAIN: tl.constexpr = 128 // p_a.dtype.element_ty.primitive_bitwidth
    batch_a, down_a, right_a = sa
    batch_b, down_b, right_b = sb
    if VECTORS[0] == "k":
        k, down_a = k // GRAIN * GRAIN, down_a // GRAIN * GRAIN
    elif VECTORS[0] == "m":
        m, right_a = m // GRAIN * GRAIN, right_a // GRAIN * GRAIN
    if VECTORS[1] == "k":
        k, right_b = k // GRAIN * GRAIN, right_b // GRAIN * GRAIN
    elif VECTORS[1] == "n":
        n, down_b = n // GRAIN * GRAIN, down_b // GRAIN * GRAIN
    WORK: tl.constexpr = DOT[1]
    BM: tl.constexpr = TILE[0]
    BN: tl.constexpr = TILE[1]
    BK: tl.constexpr = TILE[2]
    # The program's tile and its steps along k.
    i_tile, begin, end = tl.program_id(0), 0, tl.cdiv(k, BK)
    if SPLIT:
        allow_next(SPLIT == 2)
        i_tile, begin = tl.program_id(0) // split, tl.program_id(0) % split * steps_per_split
        end = tl.minimum(begin + steps_per_split, end)
    i_batch, i_m, i_n = grouped_tile(i_tile, tl.cdiv(m, BM), tl.cdiv(n, BN), MATRICES)
    o_m, o_n, o_k = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    m_m, m_n = (o_m < m)[:, None], (o_n < n)[None, :]  # [BM, 1], [1, BN]
    x_batch, x_m, x_n, x_k = i_batch, o_m, o_n, begin * BK + o_k
    if INT64:
        x_batch, x_m, x_n, x_k = i_batch.to(tl.int64), o_m.to(tl.int64), o_n.to(tl.int64), x_k.to(tl.int64)
    o_a, o_b = offsets(x_batch, batches, batch_a), offsets(x_batch, batches, batch_b)
    if VECTORS[0] is not None:
        o_a = o_a // GRAIN * GRAIN
    if VECTORS[1] is not None:
        o_b = o_b // GRAIN * GRAIN
    p_ak = p_a + o_a + x_m[:, None] * down_a + x_k[None, :] * right_a  # [BM, BK]
    p_bk = p_b + o_b + x_k[:, None] * down_b + x_n[None, :] * right_b  # [BK, BN]
    # Main loop.
    b_acc = tl.zeros((BM, BN), WORK)  # [BM, BN]
    if AHEAD:
        m_k = o_k < tl.minimum(end * BK, k) - begin * BK  # [BK]
        next_a = tl.load(p_ak, mask=m_m & m_k[None, :], other=0.0)  # [BM, BK]
        next_b = tl.load(p_bk, mask=m_n & m_k[:, None], other=0.0)  # [BK, BN]
    for i_k in range(begin, end):
        if AHEAD:
            m_k = o_k < tl.minimum(end * BK, k) - (i_k + 1) * BK  # [BK]
            b_a, b_b = next_a, next_b
            next_a = tl.load(p_ak + BK * right_a, mask=m_m & m_k[None, :], other=0.0)  # [BM, BK]
            next_b = tl.load(p_bk + BK * down_b, mask=m_n & m_k[:, None], other=0.0)  # [BK, BN]
        elif EVEN:
            b_a, b_b = tl.load(p_ak, mask=m_m, other=0.0), tl.load(p_bk, mask=m_n, other=0.0)  # [BM, BK], [BK, BN]
        else:
            m_k = o_k < k - i_k * BK  # [BK]
            b_a = tl.load(p_ak, mask=m_m & m_k[None, :], other=0.0)  # [BM, BK]
            b_b = tl.load(p_bk, mask=m_n & m_k[:, None], other=0.0)  # [BK, BN]
        b_acc = tl.dot(converted(b_a, DOT[0]), converted(b_b, DOT[0]), b_acc, input_precision=DOT[2])  # [BM, BN]
        p_ak += BK * right_a
        p_bk += BK * down_b
    # Store the partial sum, or apply the epilogue and store the result.
    if SPLIT:
        o = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]  # [BM, BN]
        tl.store(p_parts + tl.program_id(0) * (BM * BN) + o, b_acc)
    else:
        operands = (p_vector, vector_stride, p_residual, alpha)
        b_y = epilogue(b_acc, i_batch, o_m, o_n, m, n, p_o, operands, so, WORK, EPILOGUE, INT64)
        p_y = p_o + out_offsets(i_batch, o_m, o_n, so, INT64)
        tl.store(p_y, converted(b_y, p_o.dtype.element_ty), mask=m_m & m_n)


@triton.jit
def gemm_rank1(p_o, p_a, p_b, p_vector, vector_stride, p_residual, alpha, sizes, batches, sa, sb, so,
               WORK: tl.constexpr, EPILOGUE: tl.constexpr, INT64: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, MATRICES: tl.constexpr):  # fmt: skip
    """Compute one tile per program as a sum of k rank-1 updates: for integers, which wrap around, and float64. `sa` and
    `sb` are as in `gemm_pointers`.
    """
    m, n, k = sizes
    i_batch, i_m, i_n = grouped_tile(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), MATRICES)
    o_m, o_n = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)  # [BM], [BN]
    x_batch, x_m, x_n = i_batch, o_m, o_n
    if INT64:
        x_batch, x_m, x_n = i_batch.to(tl.int64), o_m.to(tl.int64), o_n.to(tl.int64)
    p_ak = p_a + offsets(x_batch, batches, sa[0]) + x_m * sa[1]  # [BM]
    p_bk = p_b + offsets(x_batch, batches, sb[0]) + x_n * sb[2]  # [BN]
    b_acc = tl.zeros((BM, BN), WORK)  # [BM, BN]
    for _ in tl.range(0, k, loop_unroll_factor=4):
        b_a, b_b = tl.load(p_ak, mask=o_m < m, other=0), tl.load(p_bk, mask=o_n < n, other=0)  # [BM], [BN]
        b_acc += converted(b_a, WORK)[:, None] * converted(b_b, WORK)[None, :]  # [BM, BN]
        p_ak += sa[2]
        p_bk += sb[1]
    operands = (p_vector, vector_stride, p_residual, alpha)
    b_y = epilogue(b_acc, i_batch, o_m, o_n, m, n, p_o, operands, so, WORK, EPILOGUE, INT64)
    mask = (o_m < m)[:, None] & (o_n < n)[None, :]  # [BM, BN]
    tl.store(p_o + out_offsets(i_batch, o_m, o_n, so, INT64), converted(b_y, p_o.dtype.element_ty), mask=mask)
