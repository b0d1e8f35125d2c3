"""Matmuls with one row of x on the CUDA cores, and helpers of all kernels for few rows.

few_rows.py names the plain reference and launches the kernel.

x is [1, K] and W is [N, K]. A program has BN rows of W, in tiles [BW, BN // BW, BK].
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


@triton.jit
def few_rows_fma_kernel(p_y, p_h, p_rstd, p_x, p_w, p_up, p_norm, p_bias, p_residual, p_w_scale, n, w_row, eps,
                        K: tl.constexpr, OVERLAP: tl.constexpr, EARLY: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                        STEPS: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    """Multiply x by BN rows of W, or by BN rows of gate and BN of up.

    Tiles are [BW, BN // BW, BK]. The warps take BW groups of rows in parallel; each group has BN // BW rows, for which
    x is converted once. x is loaded as a tile [BW, 1, BK], so that each element is already in the thread that needs it
    and does not pass through shared memory.
    """
    allow_next(OVERLAP)
    i_n = tl.program_id(0) * BN
    o_n, o_b = i_n + tl.arange(0, BN), tl.arange(0, BW)[:, None]  # [BN], [BW, 1]
    o_w = i_n + o_b * (BN // BW) + tl.arange(0, BN // BW)[None, :]  # [BW, BN // BW]
    # Rows beyond the last read the last row, which avoids masks.
    o_w, o_x = (tl.minimum(o_w, n - 1).to(tl.int64) * w_row)[:, :, None], (o_b * 0)[:, :, None]
    w, up, scale = (), (), ()  # tiles of STEPS steps
    if EARLY:
        w = load_steps(p_w, o_w, 0, K, BK, STEPS)
        up, scale = load_steps(p_up, o_w, 0, K, BK, STEPS), load_steps(p_norm, o_x, 0, K, BK, STEPS)
    wait_for_previous(OVERLAP)
    b_w_scale, b_up_scale = load_vector(p_w_scale, o_n, n, 1), load_vector(None, o_n, n, 1)  # [1, BN] each
    if p_up is not None and p_w_scale is not None:
        b_up_scale = load_vector(p_w_scale + n, o_n, n, 1)
    if not EARLY:
        w = load_steps(p_w, o_w, 0, K, BK, STEPS)
        up, scale = load_steps(p_up, o_w, 0, K, BK, STEPS), load_steps(p_norm, o_x, 0, K, BK, STEPS)
    b_added = load_vector(p_bias, o_n, n, 0) + load_vector(p_residual, o_n, n, 0)  # [1, BN]
    b_acc = tl.full((BW, BN // BW, BK), -0.0, tl.float32)  # [BW, BN // BW, BK]
    b_acc_up, b_square = b_acc, tl.full((BW, 1, BK), -0.0, tl.float32)  # [BW, BN // BW, BK], [BW, 1, BK]
    # Multiply the tiles along K, with loads of W one trip ahead.
    for i_k in tl.range(0, K, BK * STEPS, loop_unroll_factor=unrolled(p_w.dtype.element_ty, K, BK * STEPS)):
        x = load_steps(p_x, o_x, i_k, K, BK, STEPS)  # [BW, 1, BK] each
        zero = after_loads()
        b_acc, b_acc_up, b_square = b_acc + zero, b_acc_up + zero, b_square + zero
        for j in tl.static_range(STEPS):
            b_x = converted(x[j], tl.float32)  # [BW, 1, BK]
            if p_norm is not None:
                b_square += b_x * b_x
                b_x = b_x * converted(scale[j], tl.float32)
            b_acc += b_x * upcast(w[j])  # [BW, BN // BW, BK]
            if p_up is not None:
                b_acc_up += b_x * upcast(up[j])
        if K > BK * STEPS:
            i_next = i_k + BK * STEPS
            w = load_steps(p_w, o_w, i_next, K, BK, STEPS)
            up, scale = load_steps(p_up, o_w, i_next, K, BK, STEPS), load_steps(p_norm, o_x, i_next, K, BK, STEPS)
    # Sum along K, apply the norm, and store.
    b_y, b_up = tl.sum(b_acc, 2), tl.sum(b_acc_up, 2)  # [BW, BN // BW]
    if p_norm is not None:
        b_rstd = rms_reciprocal(tl.sum(b_square, 2), K, eps)  # [BW, 1], equal in all BW
        b_y, b_up = b_y * b_rstd, b_up * b_rstd
        if p_rstd is not None:
            tl.store(p_rstd + o_b, b_rstd, mask=i_n + o_b == 0)
    TYPE: tl.constexpr = p_y.dtype.element_ty
    m_n, o_n = (o_n < n)[None, :], o_n[None, :]  # [1, BN] each
    b_y = converted(tl.reshape(b_y, (1, BN)) * b_w_scale + b_added, TYPE)  # [1, BN]
    tl.store(p_y + o_n, b_y, mask=m_n)
    if p_up is not None:
        b_up = converted(tl.reshape(b_up, (1, BN)) * b_up_scale, TYPE)  # [1, BN]
        tl.store(p_y + n + o_n, b_up, mask=m_n)
        tl.store(p_h + o_n, converted(swiglu(b_y, b_up), TYPE), mask=m_n)
