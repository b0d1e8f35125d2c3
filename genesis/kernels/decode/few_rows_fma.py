"""Matmuls with few rows on the CUDA cores, one or four rows of x at a time, and helpers of all kernels for few rows.

few_rows.py names the plain reference and launches the kernel.

x is [M, K] and W is [N, K]. A program has BM rows of x and BN rows of W, in tiles [BW, BN // BW, BK].
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from genesis.backend.cuda.driver import is_interpreted
from genesis.kernels.dependents import allow_next, wait_for_previous
from genesis.kernels.elements import converted
from genesis.kernels.gemm.gated import swiglu

MOST_WRITTEN_OUT = 4  # the most unrolled trips along K; more take seconds to compile


@triton.jit
def rms_reciprocal(b_square, k, eps):
    """Return 1 / rms of rows, given their sums of squares."""
    return 1 / tl.sqrt_rn(b_square / k + eps)


@triton.jit
def load_vector(p, o_n, n, DEFAULT: tl.constexpr):
    """Return elements [1, BN] of a vector in float32, or DEFAULT if it is None."""
    if p is None:
        return tl.full((1, o_n.shape[0]), DEFAULT, tl.float32)
    else:
        return converted(tl.load(p + o_n, mask=o_n < n, other=0.0), tl.float32)[None, :]


@triton.jit
def load_added(p_bias, p_residual, o_m, o_n, m, n, y_row):
    """Return bias + residual [rows, BN], or bias [1, BN], in float32. Missing ones count as 0."""
    b_added = load_vector(p_bias, o_n, n, 0)  # [1, BN]
    if p_residual is None:
        return b_added
    else:
        mask, o_y = (o_m < m)[:, None] & (o_n < n)[None, :], o_m.to(tl.int64)[:, None] * y_row + o_n[None, :]
        return b_added + converted(tl.load(p_residual + o_y, mask=mask, other=0.0), tl.float32)


@triton.jit
def store_rows(b_y, p_y, b_w_scale, b_added, o_m, o_n, m, n, y_row):
    """Store y [rows, BN] = sums·diag(w_scale) + added, cast once, and return it."""
    b_y = converted(b_y * b_w_scale + b_added, p_y.dtype.element_ty)  # [rows, BN]
    o_y = o_m.to(tl.int64)[:, None] * y_row + o_n[None, :]  # [rows, BN]
    tl.store(p_y + o_y, b_y, mask=(o_m < m)[:, None] & (o_n < n)[None, :])
    return b_y


@triton.jit
def store_swiglu(b_gate, b_up, p_h, o_m, o_n, m, n):
    """Store h [rows, BN] = silu(gate)·up."""
    o_h = o_m.to(tl.int64)[:, None] * n + o_n[None, :]  # [rows, BN]
    b_h = converted(swiglu(b_gate, b_up), p_h.dtype.element_ty)  # [rows, BN]
    tl.store(p_h + o_h, b_h, mask=(o_m < m)[:, None] & (o_n < n)[None, :])


@triton.jit
def after_loads():
    """Return 0.0 after a barrier. The assembler moves no load past the barrier, so sums that begin with this value make
    it issue all loads together. Otherwise it would save registers and wait for each load before it issues the next.
    """
    zero = tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, 0, 0; bar.red.popc.u32 $0, 0, p; }", "=r", [], tl.int32, False, 1
    )
    return zero.to(tl.float32)


if is_interpreted():

    def after_loads() -> float:
        return 0.0


@constexpr_function
def unrolled(kind: tl.dtype, k: int, step: int) -> int:
    """Return the unroll factor of a loop along K over tiles of W.

    Loops over 8-bit tiles are unrolled, because Triton carries tiles from trip to trip as single elements: each 8-bit
    element would be extracted from its word and inserted again, in three or four instructions.
    """
    return min(-(-k // step), MOST_WRITTEN_OUT) if kind.primitive_bitwidth == 8 else 1


@triton.jit
def load_tile(p, mask, ONCE: tl.constexpr = False):
    """Load the elements at p. They are 0 where a mask is given and not set. With ONCE caches evict them first."""
    POLICY: tl.constexpr = "evict_first" if ONCE else ""
    if mask is None:
        return tl.load(p, eviction_policy=POLICY)
    else:
        return tl.load(p, mask=mask, other=0.0, eviction_policy=POLICY)


# Insert byte c + 128 as the low byte of the float 2^23 + c + 128, then subtract 2^23 + 128. This is exact and avoids
# the slow I2F unit.
FROM_INT8 = tl.constexpr(
    """{
    .reg .b32 u, a;
    .reg .f32 f;
    xor.b32 u, $4, 0x80808080;
    prmt.b32 a, u, 0x4B000000, 0x7440;
    mov.b32 f, a;
    add.f32 $0, f, 0fCB000080;
    prmt.b32 a, u, 0x4B000000, 0x7441;
    mov.b32 f, a;
    add.f32 $1, f, 0fCB000080;
    prmt.b32 a, u, 0x4B000000, 0x7442;
    mov.b32 f, a;
    add.f32 $2, f, 0fCB000080;
    prmt.b32 a, u, 0x4B000000, 0x7443;
    mov.b32 f, a;
    add.f32 $3, f, 0fCB000080;
    }"""
)


@triton.jit
def upcast(w):
    """Return a tile of W in float32."""
    if w.dtype == tl.int8:
        return tl.inline_asm_elementwise(FROM_INT8, "=&f,=&f,=&f,=&f,r", [w], tl.float32, True, 4)
    else:
        return converted(w, tl.float32)


if is_interpreted():

    @triton.jit
    def upcast(w):
        return converted(w, tl.float32)


@triton.jit
def load_steps(p, o_rows, i_k, K: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr):
    """Load the tiles of STEPS steps from i_k on; return none if p is None. A single trip over K needs no masks."""
    tiles = ()
    if p is not None:
        for i in tl.static_range(STEPS):
            o_k = (i_k + i * BK + tl.arange(0, BK))[None, None, :]  # [1, 1, BK]
            if K > BK * STEPS or (i + 1) * BK > K:
                tiles += (load_tile(p + o_rows + o_k, (o_k < K) & (o_rows >= 0)),)
            else:
                tiles += (load_tile(p + o_rows + o_k, None),)
    return tiles


@triton.jit(do_not_specialize=["m"])
def few_rows_fma_kernel(p_y, p_h, p_rstd, p_x, p_w, p_up, p_norm, p_bias, p_residual, p_w_scale, m, n, x_row, w_row,
                        y_row, eps, K: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr, BM: tl.constexpr,
                        BN: tl.constexpr, BK: tl.constexpr, STEPS: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """Multiply BM rows of x by BN rows of W, or by BN rows of gate and BN of up.

    Tiles are [BW, BN // BW, BK]. The warps take BW groups of rows in parallel; each group has BN // BW rows, for which
    x is converted once. A row of x is loaded as a tile [BW, 1, BK], so that each element is already in the thread that
    needs it and does not pass through shared memory.
    """
    allow_next(OVERLAP)
    i_m, i_n = 0, tl.program_id(0) * BN
    if BM > 1:  # neighbouring programs have the same rows of W, and share them in L2
        i_m = tl.program_id(0) % tl.cdiv(m, BM) * BM
        i_n = tl.program_id(0) // tl.cdiv(m, BM) * BN
    o_n, o_b = i_n + tl.arange(0, BN), tl.arange(0, BW)[:, None]  # [BN], [BW, 1]
    o_w = i_n + o_b * (BN // BW) + tl.arange(0, BN // BW)[None, :]  # [BW, BN // BW]
    # Rows beyond the last read the last row, which avoids masks.
    o_w, o_b = (tl.minimum(o_w, n - 1).to(tl.int64) * w_row)[:, :, None], (o_b * 0)[:, :, None]
    w, up, scale = (), (), ()  # tiles of STEPS steps
    if EARLY:
        w = load_steps(p_w, o_w, 0, K, BK, STEPS)
        up, scale = load_steps(p_up, o_w, 0, K, BK, STEPS), load_steps(p_norm, o_b, 0, K, BK, STEPS)
    wait_for_previous(OVERLAP)
    b_w_scale, b_up_scale = load_vector(p_w_scale, o_n, n, 1), load_vector(None, o_n, n, 1)  # [1, BN] each
    if p_up is not None and p_w_scale is not None:
        b_up_scale = load_vector(p_w_scale + n, o_n, n, 1)
    if not EARLY:
        w = load_steps(p_w, o_w, 0, K, BK, STEPS)
        up, scale = load_steps(p_up, o_w, 0, K, BK, STEPS), load_steps(p_norm, o_b, 0, K, BK, STEPS)
    added, acc, acc_up, square = (), (), (), ()  # one tile for each row of x
    for i in tl.static_range(BM):
        added += (load_added(p_bias, p_residual, i_m + i + tl.arange(0, 1), o_n, m, n, y_row),)
        acc += (tl.full((BW, BN // BW, BK), -0.0, tl.float32),)  # [BW, BN // BW, BK]
        square += (tl.full((BW, 1, BK), -0.0, tl.float32),)  # [BW, 1, BK]
    acc_up = acc
    # Multiply the tiles along K, with loads of W one trip ahead.
    for i_k in tl.range(0, K, BK * STEPS, loop_unroll_factor=unrolled(p_w.dtype.element_ty, K, BK * STEPS)):
        x = ()
        for i in tl.static_range(BM):
            o_x = tl.minimum(i_m + i, m - 1).to(tl.int64) * x_row if BM > 1 else 0
            x += load_steps(p_x + o_x, o_b, i_k, K, BK, STEPS)  # [BW, 1, BK] each
        zero = after_loads()
        sums, sums_up, squares = acc, acc_up, square
        acc, acc_up, square = (), (), ()
        for i in tl.static_range(BM):
            b_acc, b_acc_up, b_square = sums[i] + zero, sums_up[i] + zero, squares[i] + zero
            for j in tl.static_range(STEPS):
                b_x = converted(x[i * STEPS + j], tl.float32)  # [BW, 1, BK]
                if p_norm is not None:
                    b_square += b_x * b_x
                    b_x = b_x * converted(scale[j], tl.float32)
                b_acc += b_x * upcast(w[j])  # [BW, BN // BW, BK]
                if p_up is not None:
                    b_acc_up += b_x * upcast(up[j])
            acc += (b_acc,)
            acc_up += (b_acc_up,)
            square += (b_square,)
        if K > BK * STEPS:
            i_next = i_k + BK * STEPS
            w = load_steps(p_w, o_w, i_next, K, BK, STEPS)
            up, scale = load_steps(p_up, o_w, i_next, K, BK, STEPS), load_steps(p_norm, o_b, i_next, K, BK, STEPS)
    # Sum along K, apply the norm, and store each row.
    for i in tl.static_range(BM):
        b_y, b_up = tl.sum(acc[i], 2), tl.sum(acc_up[i], 2)  # [BW, BN // BW]
        o_m = i_m + i + tl.arange(0, 1)  # [1]
        if p_norm is not None:
            b_rstd = rms_reciprocal(tl.sum(square[i], 2), K, eps)  # [BW, 1], equal in all BW
            b_y, b_up = b_y * b_rstd, b_up * b_rstd
            if p_rstd is not None:
                o_b = tl.arange(0, BW)[:, None]
                tl.store(p_rstd + i_m + i + o_b, b_rstd, mask=(i_n + o_b == 0) & (o_b * 0 + i_m + i < m))
        b_y = store_rows(tl.reshape(b_y, (1, BN)), p_y, b_w_scale, added[i], o_m, o_n, m, n, y_row)  # [1, BN]
        if p_up is not None:
            b_up = store_rows(tl.reshape(b_up, (1, BN)), p_y + n, b_up_scale, 0, o_m, o_n, m, n, y_row)  # [1, BN]
            store_swiglu(b_y, b_up, p_h, o_m, o_n, m, n)
