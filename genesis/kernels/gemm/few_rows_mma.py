"""Up to 32 rows of x with a weight's rows, on the tensor cores, from registers alone.

Plain reference and the launches: few_rows.py.

W is operand A of m16n8k16, x operand B. A thread's part of both, 16 bytes of a row along K, is what it loads at once:
nothing passes through shared memory but the warps' sums at the end. Which elements of 32 along K an MMA takes differs
from the order in memory, for W and x alike, so that every product is summed once.

Tiles are [BS * 8, 32]: 8 rows of W or x and, for each of BS warps, 32 elements along K.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels.dependents import allow_next, wait_for_previous
from genesis.kernels.gemm.gated import swiglu
from genesis.kernels.gemm.one_row import after_loads, load_tile, prefetch_rows, rms_reciprocal
from genesis.kernels.types import converted

__all__ = ["few_rows_mma_kernel", "mma_text"]

CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 16 + ["f"] * 8))
WIDENED = tl.constexpr(
    """{
    .reg .b16 lo, hi, h0, h1, h2, h3;
    .reg .b32 a, b;
    .reg .f32 f0, f1, f2, f3;
    mov.b32 {lo, hi}, $2;
    cvt.rn.f16x2.e4m3x2 a, lo;
    cvt.rn.f16x2.e4m3x2 b, hi;
    mov.b32 {h0, h1}, a;
    mov.b32 {h2, h3}, b;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    cvt.f32.f16 f2, h2;
    cvt.f32.f16 f3, h3;
    cvt.rn.bf16x2.f32 $0, f1, f0;
    cvt.rn.bf16x2.f32 $1, f3, f2;
    }"""
)
SCALED = tl.constexpr("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }")


def mma_text(kind: str, warps: int, blocks: int) -> str:
    """The assembly of `mma` for 8 elements of a thread: sums for 16 rows of W and one or two blocks of 8 rows of x.

    Sums are $0 to $7, before them $24 to $31; W's first 8 rows $8 to $11, its other 8 $12 to $15, x's $16 to $19 and
    $20 to $23. One block of x has two sums, to be added at last. The first line names the layout of all tiles, with
    which the compiler's is compared.
    """
    first, second = "{$8, $12, $9, $13}", "{$10, $14, $11, $15}"
    if blocks == 1:
        steps = [(0, first, "{$16, $17}", 24), (4, second, "{$18, $19}", 28)]
    else:
        steps = [(0, first, "{$16, $17}", 24), (4, first, "{$20, $21}", 28)]
        steps += [(0, second, "{$18, $19}", 0), (4, second, "{$22, $23}", 4)]

    def four(at: int) -> str:
        return "{" + ", ".join(f"${at + i}" for i in range(4)) + "}"

    layout = f"sizePerThread = [1, 8], threadsPerWarp = [8, 4], warpsPerCTA = [{warps}, 1], order = [1, 0]"
    lines = [
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {four(d)}, {a}, {b}, {four(c)};"
        for d, a, b, c in steps
    ]
    return "\n".join([f"{{ // for #ttg.blocked<{{{layout}}}>", *lines, "}"])


@triton.jit
def mma(w, w_next, x, x_next, acc, TEXT: tl.constexpr, BLOCKS: tl.constexpr):
    """acc + the products of 16 rows of W and of 8 rows of x, or 16 with BLOCKS = 2, as `sums_of` numbers them."""
    return tl.inline_asm_elementwise(TEXT, CONSTRAINTS, [w, w_next, x, x_next, acc], tl.float32, True, 8)


@triton.jit
def operand(w, TYPE: tl.constexpr):
    """A tile of W in x's type. Triton converts e4m3 to bfloat16 element by element on a slow unit."""
    if w.dtype == tl.float8e4nv and tl.bfloat16 == TYPE:
        return tl.inline_asm_elementwise(WIDENED, "=r,=r,r", [w], tl.bfloat16, True, 4)
    else:
        return converted(w, TYPE)


@triton.jit
def scaled(x, scale):
    """x·scale in bfloat16, rounded once, two elements at a time."""
    return tl.inline_asm_elementwise(SCALED, "=r,r,r", [x, scale], tl.bfloat16, True, 2)


if is_interpreted():

    def mma(w: Any, w_next: Any, x: Any, x_next: Any, acc: Any, TEXT: Any, BLOCKS: Any) -> Any:
        """The same on the numpy values."""
        rows, columns = (
            np.stack([converted(v, tl.float32).handle.data.reshape(-1, 8, 4, 2, 4) for v in pair])
            for pair in ((w, w_next), (x, x_next))
        )  # [2, BS, 8, 4 threads, 2 MMAs, 4 elements]
        columns = columns.reshape(2, -1, 4, 2, 4, 2, 4)  # x's rows in pairs
        with np.errstate(all="ignore"):
            if getattr(BLOCKS, "value", BLOCKS) == 1:
                found = np.einsum("hsgace,stbace->sgtchb", rows, columns[0])
            else:
                found = np.einsum("hsgace,qstbace->sgtqhb", rows, columns)
        return acc + tl.tensor(type(acc.handle)(found.reshape(acc.handle.data.shape), tl.float32), acc.type)

    operand = converted

    @triton.jit
    def scaled(x, scale):
        """The same, for the interpreter."""
        return converted(converted(x, tl.float32) * converted(scale, tl.float32), x.dtype)


@triton.jit
def products(w, x, sums, TEXT: tl.constexpr, X: tl.constexpr, XX: tl.constexpr, WW: tl.constexpr):
    """Sums of all pairs of blocks of W and of x, and the products of one step."""
    found = ()
    for i in tl.static_range(WW):
        for j in tl.static_range(XX):
            found += (mma(w[2 * i], w[2 * i + 1], x[2 * j], x[2 * j + 1], sums[i * XX + j], TEXT, X),)
    return found


@triton.jit
def filled(value, P: tl.constexpr, ROWS: tl.constexpr):
    """P tiles [ROWS, 32] of a value."""
    tiles = ()
    for _ in tl.static_range(P):
        tiles += (tl.full((ROWS, 32), 0, tl.float32) + value,)
    return tiles


@triton.jit
def plus(tiles, value, P: tl.constexpr):
    """Each tile + value."""
    found = ()
    for i in tl.static_range(P):
        found += (tiles[i] + value,)
    return found


@triton.jit
def summed(b, OUTER: tl.constexpr, COUNT: tl.constexpr):
    """Tiles [R, 32, P], whose columns are [OUTER, COUNT, …], with the sum over COUNT in each of them."""
    SHAPE: tl.constexpr = (b.shape[0], OUTER, COUNT, 32 // OUTER // COUNT, b.shape[2])
    return tl.reshape(tl.broadcast_to(tl.sum(tl.reshape(b, SHAPE), 2, keep_dims=True), SHAPE), b.shape)


@triton.jit
def over_warps(parts, P: tl.constexpr, BS: tl.constexpr):
    """Sums [8, 32, P] over the warps of P tiles."""
    for LEVEL in tl.static_range(3):
        if P >> LEVEL > 1:
            joined = ()
            for i in tl.static_range(P >> LEVEL + 1):
                joined += (tl.join(parts[i], parts[i + (P >> LEVEL + 1)]),)
            parts = joined
    return tl.sum(tl.reshape(parts[0], (BS, 8, 32, P)), 0)


@triton.jit
def load_steps(p, o_rows, rows, stride, o_k, K: tl.constexpr, BLOCKS: tl.constexpr, BS: tl.constexpr,
               STEPS: tl.constexpr):  # fmt: skip
    """The tiles of STEPS steps, of BLOCKS blocks of 8 rows each; none where there is no operand.

    Rows behind the last are read as that one, and where one trip has all of K, masks are spared.
    """
    tiles = ()
    if p is not None:
        for i in tl.static_range(STEPS):
            o = o_k + i * BS * 32
            for j in tl.static_range(BLOCKS):
                p_rows = p + tl.minimum(o_rows + j * 8, rows - 1).to(tl.int64) * stride
                if K > BS * 32 * STEPS or (i + 1) * BS * 32 > K:
                    tiles += (load_tile(p_rows + o, o < K),)
                else:
                    tiles += (load_tile(p_rows + o, None),)
    return tiles


@triton.jit
def load_each(p, o, mask, DEFAULT: tl.constexpr):
    """What is at offsets o, in float32; DEFAULT where there is nothing to load."""
    if p is None:
        return tl.full(mask.shape, DEFAULT, tl.float32)
    else:
        return converted(tl.load(p + o, mask=mask, other=0.0), tl.float32)


@triton.jit(do_not_specialize=["m"])
def few_rows_mma_kernel(p_y, p_h, p_rstd, p_x, p_w, p_up, p_norm, p_bias, p_residual, p_w_scale, m, n, x_row, w_row,
                        y_row, eps, K: tl.constexpr, MMA: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr,
                        BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, STEPS: tl.constexpr):  # fmt: skip
    """Up to BM rows of x with BN rows of W, or BN of gate and of up."""
    allow_next(OVERLAP)
    i_n, SPAN = tl.program_id(0) * BN, tl.constexpr(1024 // p_w.dtype.element_ty.primitive_bitwidth)
    X: tl.constexpr = BM // 8  # blocks of 8 rows of x, and of W; pairs of them; pairs of both
    W: tl.constexpr = BN // 8
    XX: tl.constexpr = (X + 1) // 2
    WW: tl.constexpr = (W + 1) // 2
    P: tl.constexpr = XX * WW
    # What the sums [8, 32, P] are of: row g of half h of a pair of blocks of W, and of a pair of blocks of x row
    # 2·t + b of block q. The columns are [4 t, 2 q, 2 h, 2 b]; a single block of x has two sums for q.
    o_g, o_c, o_p = tl.arange(0, 8)[:, None, None], tl.arange(0, 32)[None, :, None], tl.arange(0, P)[None, None, :]
    o_m = o_p % XX * 16 + o_c // 4 % 2 * 8 + o_c // 8 * 2 + o_c % 2
    o_n = o_p // XX * 16 + o_c // 2 % 2 * 8 + o_g
    m_y = (o_m < tl.minimum(m, BM)) & (o_n < tl.minimum(n - i_n, BN))
    o_n += i_n
    o_y = o_m.to(tl.int64) * y_row + o_n
    o_r, o_k = tl.arange(0, BS * 8)[:, None], tl.arange(0, 32)[None, :]
    o_k, o_r = o_k + o_r // 8 * 32, o_r % 8  # [BS * 8, 32], [BS * 8, 1]
    w, up, scale = (), (), ()  # tiles of STEPS steps
    if EARLY < 0:
        w = load_steps(p_w, i_n + o_r, n, w_row, o_k, K, W, BS, STEPS)
        up = load_steps(p_up, i_n + o_r, n, w_row, o_k, K, W, BS, STEPS)
        scale = load_steps(p_norm, o_r * 0, 1, 0, o_k, K, 1, BS, STEPS)
    elif OVERLAP and tl.program_id(0) < EARLY:
        prefetch_rows(p_w, i_n, n, K, w_row, OVERLAP, BN, SPAN)
        if p_up is not None:
            prefetch_rows(p_up, i_n, n, K, w_row, OVERLAP, BN, SPAN)
    wait_for_previous(OVERLAP)
    b_added = load_each(p_bias, o_n, m_y, 0) + load_each(p_residual, o_y, m_y, 0)
    b_w_scale, b_up_scale = load_each(p_w_scale, o_n, m_y, 1), load_each(None, o_n, m_y, 1)
    if p_up is not None and p_w_scale is not None:
        b_up_scale = load_each(p_w_scale + n, o_n, m_y, 1)
    if EARLY >= 0:
        w = load_steps(p_w, i_n + o_r, n, w_row, o_k, K, W, BS, STEPS)
        up = load_steps(p_up, i_n + o_r, n, w_row, o_k, K, W, BS, STEPS)
        scale = load_steps(p_norm, o_r * 0, 1, 0, o_k, K, 1, BS, STEPS)
    sums, square = filled(-0.0, P, BS * 8), filled(-0.0, XX, BS * 8)
    sums_up = sums
    for i_k in range(0, K, BS * 32 * STEPS):
        x = load_steps(p_x, o_r, m, x_row, i_k + o_k, K, X, BS, STEPS)
        zero = after_loads()
        sums, sums_up, square = plus(sums, zero, P), plus(sums_up, zero, P), plus(square, zero, XX)
        for i in tl.static_range(STEPS):
            b_x, b_w, b_up = (), (), ()  # pairs of blocks; a single block is paired with itself
            for j in tl.static_range(2 * XX):
                b_x += (x[i * X + j % X],)
            if p_norm is not None:
                normed, squares = (), ()
                for j in tl.static_range(XX):  # products of 16 rows with themselves
                    squares += (mma(b_x[2 * j], b_x[2 * j + 1], b_x[2 * j], b_x[2 * j + 1], square[j], MMA, X),)
                for j in tl.static_range(2 * XX):
                    normed += (scaled(b_x[j], scale[i]),)
                square, b_x = squares, normed
            for j in tl.static_range(2 * WW):
                b_w += (operand(w[i * W + j % W], p_x.dtype.element_ty),)
                if p_up is not None:
                    b_up += (operand(up[i * W + j % W], p_x.dtype.element_ty),)
            sums = products(b_w, b_x, sums, MMA, X, XX, WW)
            if p_up is not None:
                sums_up = products(b_up, b_x, sums_up, MMA, X, XX, WW)
        if K > BS * 32 * STEPS:  # of the next trip
            o_next = i_k + BS * 32 * STEPS + o_k
            w = load_steps(p_w, i_n + o_r, n, w_row, o_next, K, W, BS, STEPS)
            up = load_steps(p_up, i_n + o_r, n, w_row, o_next, K, W, BS, STEPS)
            scale = load_steps(p_norm, o_r * 0, 1, 0, o_next, K, 1, BS, STEPS)
    b_y, b_up = over_warps(sums, P, BS), over_warps(sums_up, P, BS)  # [8, 32, P]
    if X == 1:
        b_y, b_up = summed(b_y, 4, 2), summed(b_up, 4, 2)
    if p_norm is not None:
        m_own = o_c // 8 * 2 + o_c % 2 == o_g
        if X > 1:
            m_own = m_own & (o_c // 4 % 2 == o_c // 2 % 2)
        b_square = tl.sum(tl.where(m_own, over_warps(square, XX, BS), 0.0), 0, keep_dims=True)
        b_rstd = rms_reciprocal(summed(b_square, 4 if X == 1 else 8, 2), K, eps)  # [1, 32, XX]
        if p_rstd is not None:
            o_x = o_c // 4 % 2 * 8 + o_c // 8 * 2 + o_c % 2 + tl.arange(0, XX)[None, None, :] * 16
            tl.store(p_rstd + o_x, b_rstd, mask=(o_x < tl.where(i_n == 0, tl.minimum(m, BM), 0)) & (o_c // 2 % 2 == 0))
        b_rstd = tl.reshape(tl.broadcast_to(b_rstd[:, :, None, :], (1, 32, WW, XX)), (1, 32, P))
        b_y, b_up = b_y * b_rstd, b_up * b_rstd
    b_y = converted(b_y * b_w_scale + b_added, p_y.dtype.element_ty)
    tl.store(p_y + o_y, b_y, mask=m_y)
    if p_up is not None:
        b_up = converted(b_up * b_up_scale, p_y.dtype.element_ty)
        tl.store(p_y + n + o_y, b_up, mask=m_y)
        b_h = converted(swiglu(b_y, b_up), p_h.dtype.element_ty)
        tl.store(p_h + o_m.to(tl.int64) * n + o_n, b_h, mask=m_y)
